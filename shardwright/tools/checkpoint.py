"""Lists and verifies checkpoints.

    python -m tools.checkpoint run=runs/<name>
    python -m tools.checkpoint run=runs/<name> verify=true

The first reads the manifests, the second every chunk, and compares it with its checksum there. Both
name what is damaged, and end with status 1 if something is. To copy or delete a checkpoint, copy or
delete its directory.
"""

import dataclasses
import math
import sys

from omegaconf import MISSING

from shardwright.data.checks import a_path
from shardwright.data.untrusted import Damaged, shown
from shardwright.program.checkpoint import Checkpointer, directory_of, find_checkpoint, saved_arrays
from shardwright.settings.program import run_program


@dataclasses.dataclass
class Settings:
    """The settings of the program."""

    run: str = a_path(MISSING)
    """Directory or URL of a run, or of one of its checkpoints."""
    verify: bool = False
    """Read all, and compare the checksums."""


def run(config: Settings) -> None:
    """Prints a line for each checkpoint, and what is damaged.

    Raises:
        ValueError: no checkpoint.
        OSError: a place that cannot be read.
        SystemExit: status 1, if something is damaged.
    """
    checkpoints, step = find_checkpoint(config.run)
    with checkpoints:
        steps = (
            [step] if config.run.rstrip("/").endswith(directory_of(step)) else checkpoints.steps()
        )
        whole = [_show(checkpoints, step, config.verify) for step in steps]
    if not all(whole):
        sys.exit(1)


def _show(checkpoints: Checkpointer, step: int, is_read: bool) -> bool:
    """Prints what is known of a checkpoint. Returns whether nothing is damaged."""
    try:
        manifest = checkpoints.manifest(step)
        size = sum(
            math.prod(array.grid) * array.chunk_bytes for array in saved_arrays(manifest).values()
        )
        print(
            shown(f"{step:>10}  {manifest['saved_at']:20}  {size / 2**20:12,.1f} MiB"),
            end="",
            flush=True,
        )
        problems = checkpoints.verify(step) if is_read else []
    except Damaged as error:
        print(f"{step:>10}", end="")
        problems = [str(error)]
    print("  whole" if is_read and not problems else "")
    for problem in problems:
        print(shown(f"            DAMAGED: {problem}"))
    return not problems


if __name__ == "__main__":
    run_program("checkpoint", Settings, run)
