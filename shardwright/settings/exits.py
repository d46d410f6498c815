"""Defines the exit codes of programs, and what a launcher should do after each (table in
docs/multi-host.md).
"""

from typing import NamedTuple


class Exit(NamedTuple):
    """An exit code, its meaning, and what the launcher should do."""

    code: int
    what: str
    next: str


AGAIN = "Start all processes again with the same command: the run resumes from its last checkpoint."

ERROR = Exit(1, "failed", "It would fail again.")
OUT_OF_MEMORY = Exit(
    74,
    "is out of memory",
    "Use more training.microbatches or devices, or save fewer activations, or it will be again.",
)
STALLED = Exit(75, "stalled", AGAIN)
LOST = Exit(76, "lost another process, the network or a device", AGAIN)
STOPPED = Exit(143, "was stopped by a signal, and saved", AGAIN)
"""143 = 128 + 15, as for a process killed by SIGTERM."""


_OF_LOSS = {
    "ABORTED",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "UNAVAILABLE",
}
_OF_LOSS |= {"UNKNOWN"}
"""Statuses of JAX's runtime that, with several processes, count as a lost connection or device:
gloo and NCCL have no error class of their own."""


class LostError(RuntimeError):
    """Another process failed, or cannot be reached."""


def exit_of(error: BaseException) -> Exit:
    """Chooses the Exit for an uncaught error.

    An error in the cleanup after another has the Exit of that one.
    """
    if error.__context__ is not None and not error.__suppress_context__:
        before = exit_of(error.__context__)
        if before is not ERROR:
            return before
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    if isinstance(error, LostError):
        return LOST
    import jax  # takes a second, and not every program needs it

    if isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        # at its dispatch, a program raises ValueError
        status = str(error).partition(":")[0]
        if status == "RESOURCE_EXHAUSTED":
            return OUT_OF_MEMORY
        if status in _OF_LOSS and jax.distributed.is_initialized() and jax.process_count() > 1:
            return LOST
    return ERROR
