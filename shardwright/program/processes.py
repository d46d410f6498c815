"""Collectives of Python values: errors of one process reach all, and all processes must be given
the same.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwright.data.untrusted import Damaged, first_line
from shardwright.program.best_effort import in_a_line
from shardwright.settings.exits import LostError
from shardwright.settings.output import listed

T = TypeVar("T")

_MESSAGE_BYTES = 6000


def gathered(x: Any) -> np.ndarray:
    """Gathers an array of the same shape from all processes, which all call this.

    Raises LostError if one has failed.

    The first axis of the result is the process.
    """
    try:
        return multihost_utils.process_allgather(x)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise LostError(first_line(error)) from error


def in_any_process(is_so: bool) -> bool:
    """Returns True if `is_so` is True in any process; all processes call this."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        # asked in this order: no devices start
        return is_so
    return bool(gathered(np.int32(is_so)).any())


def in_all_processes(action: Callable[[], T], *more: type[Exception]) -> T:
    """Runs `action`; all processes call this.

    Damaged, OSError, ValueError or `more` in one is raised in all. Another exception in one is
    LostError in the others.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return action()
    kinds = (*more, Damaged, OSError, ValueError)
    raised = None
    sent = b""
    result: T | Any = None
    try:
        result = action()
    except Exception as error:
        raised = error
        kind = next((i for i, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
        text = str(error) if kind < len(kinds) else in_a_line(error)
        sent = f"{kind} process {jax.process_index()}: {text}".encode(errors="replace")[
            :_MESSAGE_BYTES
        ]
    sent = np.frombuffer(sent.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    texts = []
    if in_any_process(raised is not None):  # one number of each process, mostly
        texts = [bytes(x).rstrip(b"\0").decode(errors="replace") for x in gathered(sent)]
    if raised is not None:
        raise raised
    if failed := next(filter(None, texts), ""):
        kind, _, text = failed.partition(" ")
        raise (*kinds, LostError)[int(kind)](text)
    return result


def check_processes(parts: Mapping[str, Any]) -> None:
    """Raises ValueError in all processes if a part differs between processes.

    All call this with the same names.

    Each process updates its own shards, so a stale file on one host would silently change the
    result.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    digests = [
        np.frombuffer(hashlib.sha256(repr(part).encode()).digest(), np.uint8)
        for part in parts.values()
    ]
    every = gathered(np.stack(digests))
    for name, differs in zip(parts, (every != every[0]).any(-1).T, strict=True):
        if differs.any():
            numbers = listed([str(process) for process in np.flatnonzero(differs)])
            which = f"process {numbers} has" if differs.sum() == 1 else f"processes {numbers} have"
            raise ValueError(
                f"{which} another {name} than process 0: give all the same and restart."
            )
