"""One run in a place of checkpoints, where that is outside of the run's directory, which is locked itself."""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator

import jax

from shardwright.run.checkpoint import Checkpointer, agreed
from shardwright.run.directory import locked, missing, remove_empty
from shardwright.run.stores import Store
from shardwright_data.foreign import parse_json

OWNER = ".owner"
"""Key of the file, at a URL, that names the run that started last."""


@contextlib.contextmanager
def owned(checkpoints: Checkpointer) -> Iterator[None]:
    """Context in which no other run completes a checkpoint in the same place. All processes enter it.

    A directory is locked. At a URL there are no locks: the run that started last saves, and the saves of another fail.

    Raises:
        ValueError: another run has locked the directory.
        OSError: the place cannot be written.
    """
    with contextlib.ExitStack() as stack:
        agreed(lambda: _own(checkpoints, stack) if jax.process_index() == 0 else None)
        yield


def _own(checkpoints: Checkpointer, stack: contextlib.ExitStack) -> None:
    store = checkpoints.store
    if store.path is not None:
        stack.callback(remove_empty, missing(store.path))
        stack.enter_context(locked(store.path))
        return
    me = secrets.token_hex(8)
    who = {"id": me, "pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    store.write(OWNER, json.dumps(who).encode())

    def check() -> None:
        if (other := _owner(store)) and other.get("id") != me:
            words = f"process {other.get('pid')!r} on {other.get('host')!r}, since {other.get('since')!r}"
            raise OSError(
                f"another run saves to {store.url}: {words}. End one of the two, and give it another paths.model_name."
            )

    def leave() -> None:
        with contextlib.suppress(OSError):
            if (_owner(store) or {}).get("id") == me:
                store.remove_file(OWNER)

    checkpoints.check_owner = check
    stack.callback(leave)


def _owner(store: Store) -> dict | None:
    """Content of the file; None without one. It is not trusted."""
    content = store.read(OWNER)
    try:
        found = None if content is None else parse_json(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) or found is None else {}
