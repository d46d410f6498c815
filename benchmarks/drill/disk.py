"""Faults of the disk under a run. What was saved stays whole, and an error has its path."""

import contextlib
import functools
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import (
    ONE,
    Start,
    cache_of,
    differences,
    differing_checkpoints,
    shortened,
    unkilled,
)

DISK_BYTES = 2**27
"""Size of the disk that is filled. A whole run needs a fifth of it."""


def mount(*arguments: str) -> bool:
    """Calls `mount` or `umount`. Returns whether it did it."""
    program = shutil.which(arguments[0], path="/usr/bin:/bin:/usr/sbin:/sbin")
    return program is not None and subprocess.run([program, *arguments[1:]], capture_output=True).returncode == 0


@contextlib.contextmanager
def disk(field: Field, case: int) -> Iterator[Path]:
    """A disk of its own: a tmpfs, where this user may mount one. Raises PermissionError where not."""
    path = field.directory(f"disk{case}")
    if not mount("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)):
        raise PermissionError("this user may not mount a tmpfs")
    try:
        yield path
    finally:
        mount("umount", "-l", str(path))


@functools.cache
def can_mount(field: Field) -> bool:
    """Whether this user may mount a disk."""
    try:
        with disk(field, -1):
            return True
    except PermissionError:
        return False


def fill(path: Path, left: int) -> None:
    """Fills the disk but for so many bytes."""
    size = shutil.disk_usage(path).free - left
    with (path / "filler").open("wb") as file, contextlib.suppress(OSError):
        while size > 0:
            size -= file.write(bytes(min(size, 2**20)))
            file.flush()


def limit_files(size: int) -> None:
    """No file of this process may be larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# ---- the faults ----------------------------------------------------------------------------------------------------

Fault = Callable[[Field, Path, random.Random], Start]


def in_a_step(field: Field, directory: Path, draw: random.Random, harm: Callable[[], object]) -> Start:
    """A start during which, after some steps, `harm` is called."""
    start, step = Start(directory, ONE, cache=cache_of(field)), draw.randrange(1, 16)
    if start.wait_until(lambda: f"\nstep {step}/" in start.said(errors=False)):
        harm()
    return start


def full(field: Field, directory: Path, draw: random.Random) -> Start:
    """The disk is full, but for some bytes."""
    left = draw.choice([0, draw.randrange(2**16), draw.randrange(2**21)])
    return in_a_step(field, directory, draw, lambda: fill(directory.parent, left))


def short_files(field: Field, directory: Path, draw: random.Random) -> Start:
    """Every file that is longer than some KiB fails."""
    return Start(
        directory, ONE, cache=cache_of(field), before=functools.partial(limit_files, draw.randrange(2**13, 2**15))
    )


def read_only(field: Field, directory: Path, draw: random.Random) -> Start:
    """Nothing can be written from the beginning."""
    mount("mount", "-o", "remount,ro", str(directory.parent))
    return Start(directory, ONE, cache=cache_of(field))


def removed(field: Field, directory: Path, draw: random.Random) -> Start:
    """The directory of the run is removed."""
    return in_a_step(field, directory, draw, lambda: shutil.rmtree(directory, ignore_errors=True))


def file_for_checkpoints(field: Field, directory: Path, draw: random.Random) -> Start:
    """A file lies where the checkpoints would be, those before it are elsewhere."""

    def harm() -> None:
        with contextlib.suppress(OSError):
            (directory / "checkpoints").rename(directory / "moved")
        with contextlib.suppress(OSError):
            (directory / "checkpoints").touch()

    return in_a_step(field, directory, draw, harm)


def taken_step(field: Field, directory: Path, draw: random.Random) -> Start:
    """A folder without a manifest has the name of a checkpoint that is to come."""
    taken = directory / "checkpoints" / f"{draw.choice([3, 12, 24]):010}"
    taken.mkdir(parents=True)
    (taken / "notes").touch()
    return Start(directory, ONE, cache=cache_of(field))


def taken_name(name: str, needed: bool) -> Fault:
    """Something else has the name of a file or folder of the run, which the run needs or not."""

    def fault(field: Field, directory: Path, draw: random.Random) -> Start:
        path = directory / name
        if path.suffix:
            path.mkdir(parents=True)
        else:
            directory.mkdir(parents=True)
            path.touch()
        return Start(directory, ONE, cache=cache_of(field))

    fault.__doc__ = f"Something else is called {name}, which the run {'needs' if needed else 'can do without'}."
    return fault


def unwritable_temporary(field: Field, directory: Path, draw: random.Random) -> Start:
    """The directory of temporary files does not exist."""
    return Start(directory, ONE, cache=cache_of(field), env={"TMPDIR": str(directory.parent / "missing" / "tmp")})


FAULTS: dict[str, tuple[Fault, bool, bool]] = {
    "full": (full, True, False),
    "short files": (short_files, False, False),
    "read-only": (read_only, True, False),
    "removed": (removed, False, False),
    "file for checkpoints": (file_for_checkpoints, False, False),
    "taken step": (taken_step, False, False),
    "plugins taken": (taken_name("plugins", needed=False), False, True),
    "samples.jsonl taken": (taken_name("samples.jsonl", needed=False), False, True),
    "no TMPDIR": (unwritable_temporary, False, False),
    "metrics.jsonl taken": (taken_name("metrics.jsonl", needed=True), False, False),
    "config.yaml taken": (taken_name("config.yaml", needed=True), False, False),
}
"""By name: the fault, whether it needs a disk of its own, and whether a run has to end as if there were none."""


def play(field: Field, case: int) -> Finding:
    """A run on a faulty disk; then the fault is mended, and the run is started again."""
    name = list(FAULTS)[case % len(FAULTS)]
    fault, needs_disk, is_optional = FAULTS[name]
    expected = unkilled(field, ONE)
    with contextlib.ExitStack() as stack:
        if needs_disk and not can_mount(field):
            return Finding(f"{name}: left out, as this user may not mount a disk", faults=0, outcomes=("left out",))
        root = stack.enter_context(disk(field, case)) if needs_disk else field.directory(f"disk{case}")
        directory = root / f"run{case}"
        with fault(field, directory, field.random(case)) as start:
            (code,) = start.wait()
            wrong, said = [], start.said()
            ended = f"the run ended with {code}: {start.ending()}"
        if code is None:
            wrong.append(f"the run hangs: {ended}")
        elif code and is_optional:
            wrong.append(f"what is taken is optional, but {ended}")
        elif code and "Traceback" in said:
            wrong.append(f"a traceback: {ended}")
        elif code and str(root) not in said and "missing/tmp" not in said:
            wrong.append(f"no path in the message: {shortened(said)}")
        wrong += differing_checkpoints(directory, expected)
        mend(root, directory)
        with Start(directory, ONE, cache=cache_of(field)) as start:
            if start.wait() == [0]:
                found = differences(directory, expected, deleted=name == "removed")
                wrong += [w for w in found if not (is_optional and w.startswith("samples"))]
            else:
                wrong.append(f"after the fault was mended the run does not go on: {start.ending()}")
    outcome = "ended with a message" if code else "went on"
    return Finding(name, tuple(wrong), outcomes=(f"{name}, {outcome}",))


def mend(root: Path, directory: Path) -> None:
    """Makes the disk as it was, with what the run has left."""
    if os.path.ismount(root):
        mount("mount", "-o", "remount,rw", str(root))
    (root / "filler").unlink(missing_ok=True)
    moved, saves = directory / "moved", directory / "checkpoints"
    if moved.is_dir():
        saves.unlink() if saves.is_file() else shutil.rmtree(saves, ignore_errors=True)
        moved.rename(saves)
    for path in (*saves.glob("*/notes"), directory / "plugins", saves):
        if path.is_file():
            shutil.rmtree(path.parent) if path.name == "notes" else path.unlink()
    for name in ("samples.jsonl", "metrics.jsonl", "config.yaml"):
        if (directory / name).is_dir():
            (directory / name).rmdir()


KIND = Kind(
    name="disk",
    short=len(FAULTS),
    full=3 * len(FAULTS),
    checked="The run ends with the path in its message, without a traceback, or goes on where the file is optional. "
    "Each checkpoint equals, to the bit, that of an undisturbed run, and so does the run once the disk is mended.",
    play=play,
)
