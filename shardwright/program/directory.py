"""Prepares the directory of a run: locks it, checks that it can be written, and removes it if no
step was done.

The lock is on the file `.lock`; the kernel releases it when the process ends, however it ends.
Unfinished files are named `*.tmp`, and the next start removes them.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from shardlib.places import shown_path
from shardwright.program.best_effort import why
from shardwright.program.files import LOCK
from shardwright.program.processes import in_all_processes
from shardwright.settings.output import say

TRACE = "trace.tmp"
"""Subdirectory of a run in which JAX writes a trace."""


def check_place(root: str, name: str | None) -> None:
    """Raises ValueError if paths.root_working_dir or paths.model_name is not valid.

    Does not access the disk.
    """
    for setting, value in {
        "paths.root_working_dir": root,
        "paths.model_name": "x" if name is None else name,
    }.items():
        if not value or "://" in value or "\\" in value or not value.isprintable():
            raise ValueError(
                f"{setting} is {value!a}; give a directory without backslashes and unprintable "
                f"characters. Only paths.checkpoints may be a URL."
            )
    inside = os.path.normpath(name or "x")
    # `..` in a name that Hydra made from a swept path could lead two jobs to one directory.
    if (
        inside == "."
        or inside.startswith("~")
        or os.path.isabs(inside)
        or ".." in (name or "").split(os.sep)
    ):
        raise ValueError(
            f"paths.model_name is {name!r}, which is not a directory inside "
            f"paths.root_working_dir; give a name without .. (swept values too), and set the "
            f"directory of all runs with paths.root_working_dir."
        )


def place(root: str, name: str) -> Path:
    """Returns the path of a run, relative if below the current directory; without `..`, which
    tensorstore rejects.
    """
    # Symbolic links in the name are kept: they may lead to another disk.
    return Path(shown_path(str(Path(os.path.expanduser(root)).resolve() / os.path.normpath(name))))


def find_place(root: str, name: str | None, config: str) -> tuple[str, Path]:
    """Returns the name and directory of a run.

    Without a name, makes one from the configuration's name and the time.
    """
    name = name or f"{config}_{time.strftime('%Y_%m_%d_%H_%M_%S')}"
    return name, place(root, name)


@contextlib.contextmanager
def run_directory(
    root: str, name: str | None, config: str, is_shared: bool = True
) -> Iterator[tuple[str, Path]]:
    """Creates and locks the directory of a run for the context, and removes leftovers.

    Yields the name and path.

    With several processes all call this: process 0 makes and locks the directory, and if
    `is_shared`, all check that they see it. An error in one is raised in all. If a start fails
    before the first step, the directory that it made is removed.

    The arguments are as for `find_place`; `name` may be None only with one process. Raises
    ValueError if another run uses the directory, or if it cannot be written.
    """
    name, directory = find_place(root, name, config)
    with contextlib.ExitStack() as cleanup:
        in_all_processes(lambda: _prepare(directory, cleanup) if jax.process_index() == 0 else None)
        if is_shared:
            in_all_processes(lambda: _see(directory))
        yield name, directory


def _prepare(directory: Path, cleanup: contextlib.ExitStack) -> None:
    try:
        is_new = not directory.exists()
        cleanup.enter_context(locked(directory))
        # Before the lock is released.
        cleanup.push(lambda kind, *_: _remove_start(directory) if kind and is_new else None)
        if (directory / "metrics.jsonl").exists() or (directory / "config.yaml").exists():
            # else it is of no run
            for path in directory.glob("*.tmp"):
                _remove(path)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be written: {why(error)}. Check free space, permissions and files "
            f"in the way, or choose another paths.root_working_dir."
        ) from error


def _see(directory: Path) -> None:
    if not (directory / LOCK).exists():
        raise ValueError(
            f"process {jax.process_index()} on {socket.gethostname()} does not see "
            f"{directory / LOCK}, which process 0 made. Give a paths.root_working_dir in a file "
            f"system that all hosts share, or a URL in paths.checkpoints."
        )


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a directory for the context, against processes on any host.

    Prints a line and locks nothing if the file system has no locks. Raises ValueError, naming the
    other process, if the directory is locked.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{directory} is in use by {_holder(file)}. Wait for that run, end it, or start "
                f"another one with a new paths.model_name."
            ) from None
        except OSError as error:
            say(
                f"lock       none on this file system ({why(error)}): do not start a second run in "
                f"{directory}"
            )
        file.truncate(0)
        who = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        file.write(json.dumps(who) + "\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # the file stays: another process may be about to lock it


def _holder(file: Any) -> str:
    """Describes the process that has the lock."""
    file.seek(0)
    try:
        who = json.loads(file.read(1000))
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _remove_start(directory: Path) -> None:
    """Removes the directory that a start made if no step was logged or saved."""
    log, checkpoints = directory / "metrics.jsonl", directory / "checkpoints"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    is_logged = any('"event": ' not in line for line in lines)  # lines of events have "event"
    if not is_logged and not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        _remove(directory)


def remove_older(newest: Path, pattern: str) -> None:
    """Removes what matches a glob pattern in the directory of `newest`, except files with the stem
    of `newest`.
    """
    for path in newest.parent.glob(pattern):
        if path.stem != newest.stem:
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
