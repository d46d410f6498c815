"""One run in a place of checkpoints, where that is outside of the run's directory, which is locked itself."""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator

import jax

from shardwright.run.checkpoint import Checkpointer
from shardwright.run.directory import locked, missing, remove_empty
from shardwright.run.stores import agreed
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
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    me = {"id": secrets.token_hex(8), "pid": os.getpid(), "host": socket.gethostname(), "since": since}
    store.write(OWNER, json.dumps(me).encode())

    def check() -> None:
        try:
            other = parse_json(store.read(OWNER) or b"{}")
            if other.get("id", me["id"]) == me["id"]:
                return
            words = f": process {other.get('pid')!r} on {other.get('host')!r}, since {other.get('since')!r}"
        except (ValueError, AttributeError):
            words = ""
        raise OSError(f"another run saves to {store.url}{words}. End one of the two, or rename it (paths.model_name).")

    checkpoints.check_owner = check
