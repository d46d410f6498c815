"""Applies a function to many items in several processes, and yields the results in order."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

_function: Callable[[Any], Any]


def map_in_order(
    function: Callable[[Any], Any], items: Iterable[Any], num_workers: int
) -> Generator[tuple[Any, Any], None, None]:
    """Yields each item with its result, in order. Holds at most three items per worker.

    Args:
        function: sent to each process once.
        items: its arguments.
        num_workers: processes, at least 1. With 1, none is started.

    Raises:
        ValueError: the function raises it, or a process was killed.
    """
    if num_workers == 1:
        yield from ((item, function(item)) for item in items)
        return
    context = multiprocessing.get_context("forkserver")
    # All workers share what is imported before the fork.
    context.set_forkserver_preload(["__main__"])
    pool = ProcessPoolExecutor(num_workers, context, _begin, (function,))
    try:
        submitted = ((item, pool.submit(_apply, item)) for item in items)
        ahead = deque(itertools.islice(submitted, 3 * num_workers))
        while ahead:
            item, future = ahead.popleft()
            yield item, future.result()
            ahead.extend(itertools.islice(submitted, 1))
    except BrokenProcessPool as e:
        raise ValueError(
            f"One of {num_workers} processes was killed, maybe because memory ran out: try fewer "
            "num_workers."
        ) from e
    finally:
        # The caller may not have taken all results.
        pool.shutdown(cancel_futures=True)


def _begin(function: Callable[[Any], Any]) -> None:
    """Initializes a process of the pool."""
    # The processes are the parallelism here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    global _function
    _function = function


def _exit_with_parent() -> None:
    """Ends this process when its parent ends: if the parent is killed, it would wait for work
    forever.
    """
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _apply(item: object) -> Any:
    return _function(item)
