"""Defines the exit codes of programs, and what a launcher should do after each (table in docs/multi-host.md)."""

from typing import NamedTuple


class Exit(NamedTuple):
    """An exit code, its meaning, and what the launcher should do."""

    code: int
    what: str
    next: str


AGAIN = "Start all processes again with the same command: the run resumes from its last checkpoint."

ERROR = Exit(1, "failed", "It would fail again.")
OUT_OF_MEMORY = Exit(
    74, "is out of memory", "Use more training.microbatches or devices, or save fewer activations, or it will be again."
)
STALLED = Exit(75, "stalled", AGAIN)
LOST = Exit(76, "lost another process, the network or a device", AGAIN)
STOPPED = Exit(143, "was stopped by a signal, and saved", AGAIN)
"""143 = 128 + 15, as for a process killed by SIGTERM."""


def exit_of(error: BaseException) -> Exit:
    """Chooses the Exit for an uncaught error.

    JAX runtime errors about memory or arguments would recur. With several processes, all others count as lost
    connections or devices, because gloo and NCCL have no error class of their own.
    """
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    import jax  # takes a second, and not every program needs it

    if isinstance(error, jax.errors.JaxRuntimeError):
        status = str(error).partition(":")[0]
        if status == "RESOURCE_EXHAUSTED":
            return OUT_OF_MEMORY
        if status not in ("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND") and jax.process_count() > 1:
            return LOST
    return ERROR
