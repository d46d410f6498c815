"""How a program ends: its exit codes, and what a launcher does after each. docs/multi-host.md has the table."""

from typing import NamedTuple


class Exit(NamedTuple):
    """An exit code, what it says of the process, and what comes next."""

    code: int
    what: str
    next: str


AGAIN = "Start all processes again with the same command: the run resumes from its last checkpoint."

ERROR = Exit(1, "failed", "It would fail again.")
OUT_OF_MEMORY = Exit(
    74, "is out of memory", "It would be again: more training.microbatches or devices, or fewer saved activations."
)
STALLED = Exit(75, "stalled", AGAIN)
LOST = Exit(76, "lost another process, the network or a device", AGAIN)
STOPPED = Exit(143, "was stopped by a signal, and saved", AGAIN)
"""143 is that of a program that SIGTERM kills, 128 + 15."""


def exit_of(error: BaseException) -> Exit:
    """How a process ends that `error` ends.

    Of what JAX's runtime raises, an error of memory comes again, and so does one about an argument. In a run of several
    processes the others are about connections or devices: gloo and NCCL have no kind of error of their own.
    """
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    import jax  # which takes a second, and not every program needs it

    if isinstance(error, jax.errors.JaxRuntimeError):
        status = str(error).partition(":")[0]
        if status == "RESOURCE_EXHAUSTED":
            return OUT_OF_MEMORY
        if status not in ("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND") and jax.process_count() > 1:
            return LOST
    return ERROR
