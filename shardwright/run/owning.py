"""One run in a place of checkpoints, where that is outside of the run's directory, which is locked itself."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator

import jax

from shardwright.run.checkpoint import Checkpointer
from shardwright.run.directory import locked
from shardwright.run.stores import agreed

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
        stack.enter_context(locked(store.path))
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    me = f"process {os.getpid()} on {socket.gethostname()}, since {since} ({secrets.token_hex(8)})"
    store.write(OWNER, me.encode())

    def check() -> None:
        other = (store.read(OWNER) or me.encode()).decode(errors="replace")
        if other != me:
            raise OSError(
                f"another run saves to {store.url}: {other}. End one of the two, or rename it (paths.model_name)."
            )

    checkpoints.check_owner = check
