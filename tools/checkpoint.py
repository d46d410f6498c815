"""Lists, verifies, copies and deletes checkpoints.

    python -m tools.checkpoint run=runs/<name>
    python -m tools.checkpoint action=verify run=runs/<name>
    python -m tools.checkpoint action=copy run=runs/<name> steps=[500] to=s3://bucket/runs/<name>
    python -m tools.checkpoint action=delete run=runs/<name> steps=[500,1000]

`list` looks whether the files are there. `verify` reads every one and compares it with the checksums of the manifest.
Both name what is damaged, and end with status 1 if something is. Use nothing else while the run is going on.
"""

import dataclasses
import os
import re
import sys

from omegaconf import MISSING

from configuration.checks import check_choice
from configuration.foreign import shown
from configuration.program import run_program
from training_io.checkpoint import Checkpointer, directory_of
from training_io.checkpoint_care import copy, size, verify
from training_io.manifest import Damaged
from training_io.stores import MANIFEST, open_store

ACTIONS = ("list", "verify", "copy", "delete")


@dataclasses.dataclass
class Config:
    """The settings of the program."""

    run: str = MISSING
    """Directory or URL of a run, of its checkpoints, or of one of them."""
    action: str = "list"
    """list: step, time, size, and whether all files are there. verify: read all, and compare the checksums. copy: to
    another place. delete."""
    steps: list[int] | None = None
    """Steps of the checkpoints. Null: all of them to list or verify, the latest to copy."""
    to: str | None = None
    """Directory or URL of a run, to whose checkpoints is copied."""
    last: bool = False
    """Whether the last checkpoint that is whole may be deleted."""


def open_checkpoints(run: str) -> tuple[Checkpointer, list[int]]:
    """The checkpoints of a run, and the steps of those that are meant. Raises ValueError if there are none."""
    place = run.rstrip("/")
    above, _, name = place.rpartition("/")
    if re.fullmatch(r"\d{10}", name) and not os.path.isdir(f"{place}/checkpoints"):
        return Checkpointer(above or "."), [int(name)]
    for directory in (f"{place}/checkpoints", place):
        checkpoints = Checkpointer(directory)
        if steps := sorted({*checkpoints.steps(), *checkpoints.lost()}):
            return checkpoints, steps
    raise ValueError(f"run is {run}, which has no checkpoints; give a run's directory, such as runs/<name>, or a URL.")


def run(config: Config) -> None:
    """Does what the settings say, and prints what was done.

    Raises:
        ValueError: a setting that makes no sense, or a checkpoint that is damaged where it has to be whole.
        OSError: a place that cannot be read or written.
        SystemExit: status 1, if one that was listed or verified is damaged.
    """
    check_choice("action", config.action, ACTIONS)
    if (config.action == "copy") != (config.to is not None):
        raise ValueError(f"action is {config.action}, and to is {config.to}; to copy, give action=copy to=<place>.")
    checkpoints, there = open_checkpoints(config.run)
    with checkpoints:
        steps = config.steps
        if steps is None:
            if config.action == "delete":
                raise ValueError(f"action is delete: give steps=[…], of {there}.")
            steps = there[-1:] if config.action == "copy" else there
        steps = [*dict.fromkeys(steps)]
        if absent := sorted({*steps} - {*there}):
            raise ValueError(f"steps has {absent}, but {checkpoints.store.url} has {there}.")
        whole: list[bool] = []
        if config.action == "list":
            whole = [_list(checkpoints, step) for step in steps]
        elif config.action == "verify":
            whole = [_verify(checkpoints, step) for step in steps]
        elif config.action == "copy":
            if open_store(config.to.rstrip("/")).read(MANIFEST) is not None:
                raise ValueError(f"to is {config.to}, which is a checkpoint; give the directory of a run.")
            target = open_store(f"{config.to.rstrip('/')}/checkpoints")
            for step in steps:
                copy(checkpoints.store, directory_of(step), target, directory_of(step))
                print(f"{step:>10}  copied to {target.url}/{directory_of(step)}, and verified there")
        else:
            _delete(checkpoints, there, steps, config.last)
        if not all(whole):
            sys.exit(1)


def _list(checkpoints: Checkpointer, step: int) -> bool:
    try:
        found, saved_at = size(checkpoints.store, directory_of(step))
    except Damaged as error:
        print(shown(f"{step:>10}  DAMAGED: {error}"))
        return False
    print(f"{step:>10}  {saved_at or 'time unknown':20}  {found / 2**20:12,.1f} MiB  all files are there")
    return True


def _verify(checkpoints: Checkpointer, step: int) -> bool:
    problems = verify(checkpoints.store, directory_of(step))
    print(f"{step:>10}  {'DAMAGED:' if problems else 'whole'}", flush=True)
    for problem in problems:
        print(shown(f"            {problem}"))
    return not problems


def _delete(checkpoints: Checkpointer, there: list[int], steps: list[int], last: bool) -> None:
    whole = lambda chosen: any(not verify(checkpoints.store, directory_of(step)) for step in chosen)
    kept = sorted({*there} - {*steps}, reverse=True)
    if not last and not whole(kept) and whole(steps):
        raise ValueError(
            f"steps is {steps}: without them {checkpoints.store.url} has no checkpoint that is whole. Keep one, or set "
            "last=true."
        )
    for step in steps:
        checkpoints.remove(step)
        print(f"{step:>10}  deleted")


if __name__ == "__main__":
    run_program("checkpoint", Config, run)
