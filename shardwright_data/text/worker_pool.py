"""A function applied to many items by several processes, with the results in order."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

ENOUGH = 5
"""Number of items for which processes are started: fewer take less time than starting processes."""

_function: Callable[[Any], Any]


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Processes that apply one function, as a context manager; they start when there is enough to do.

    Args:
        function: sent to each process once; where none is started, it is called here.
        num_workers: processes, at least 1. With 1, none is started.
        imports: modules that the function imports when it is called; those that are not installed are left out.
    """

    def __init__(self, function: Callable[[Item], Result], num_workers: int, imports: tuple[str, ...] = ()):
        self._function, self._num_workers, self._imports = function, num_workers, imports
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Each item with its result, in order. At most three items for each worker are held.

        Raises:
            ValueError: the function raises it, or a process was killed.
        """
        items = iter(items)
        first = [] if self._num_workers == 1 else list(itertools.islice(items, ENOUGH))
        items = itertools.chain(first, items)
        if len(first) < ENOUGH:
            yield from ((item, self._function(item)) for item in items)
            return
        pool = self._start()
        ahead: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                ahead.append((item, pool.submit(_apply, item)))
                if len(ahead) == 3 * self._num_workers:
                    item, future = ahead.popleft()
                    yield item, future.result()
            while ahead:
                item, future = ahead.popleft()
                yield item, future.result()
        except BrokenProcessPool as e:
            raise ValueError(
                f"One of {self._num_workers} processes was killed, perhaps for want of memory: try fewer num_workers."
            ) from e
        finally:
            # Not all results may have been taken.
            for _, future in ahead:
                future.cancel()

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            # What is imported before the fork, all workers share.
            context.set_forkserver_preload(["__main__", *self._imports])
            self._pool = ProcessPoolExecutor(self._num_workers, context, _begin, (self._function,))
        return self._pool


def _begin(function: Callable[[Any], Any]) -> None:
    """Begins a process of the pool."""
    # The processes are the parallelism here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    global _function
    _function = function


def _exit_with_parent() -> None:
    """Ends this process when its parent ends, which may be killed: this process would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _apply(item: Any) -> Any:
    return _function(item)
