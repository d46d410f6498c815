"""The directory of a run: one run at a time in it, tried before the first step, and gone again if no step was done.

A run locks `.lock` in its directory. The kernel releases the lock when the process ends, however it ends. What a start
has not finished is named `*.tmp`, and the next start removes it.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from shardlib.places import shown_path
from shardwright.run.best_effort import why
from shardwright.run.files import LOCK
from shardwright.run.stores import agreed
from shardwright.settings.words import say

TRACE = "trace.tmp"
"""Directory in that of a run in which JAX writes a trace."""


def check_place(root: str, name: str | None) -> None:
    """Raises ValueError if paths.root_working_dir and paths.model_name cannot be those of a run. Looks at no disk."""
    for setting, value in {"paths.root_working_dir": root, "paths.model_name": "x" if name is None else name}.items():
        if not value or "://" in value or "\\" in value or not value.isprintable():
            raise ValueError(
                f"{setting} is {value!a}; give a directory, without backslashes and what cannot be printed. Only "
                "paths.checkpoints may be a URL."
            )
    inside = os.path.normpath(name or "x")
    # In a name that Hydra made of a path, `..` would lead two jobs of a sweep to one directory.
    if inside == "." or inside.startswith("~") or os.path.isabs(inside) or ".." in (name or "").split(os.sep):
        raise ValueError(
            f"paths.model_name is {name!r}, which is no directory inside of paths.root_working_dir; give the run a "
            "name without .. (so swept values too), and the place of all runs in paths.root_working_dir."
        )


def place(root: str, name: str) -> Path:
    """The directory of the run, without `..`, which tensorstore does not take: relative if below the current one."""
    # Symbolic links in the name stay: they may lead to another disk.
    return Path(shown_path(str(Path(os.path.expanduser(root)).resolve() / os.path.normpath(name))))


def quoted(text: str) -> str:
    """The text as a value on Hydra's command line, in double quotes."""
    # A backslash is special before a quote, before "${", and at the end.
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + '\\"' * bool(found[2]), text) + '"'


def override(setting: str, value: str) -> str:
    """The argument, quoted for a shell where that is needed, that gives a setting this value."""
    plain = re.fullmatch(r"[\w+./:-]+", value, re.ASCII)
    return f"{setting}={value}" if plain else shlex.quote(f"{setting}={quoted(value)}")


def find_place(root: str, name: str | None, config: str) -> tuple[str, Path]:
    """Name and directory of a run. A run without a name is called by the configuration and the time."""
    name = name or f"{config}_{time.strftime('%Y_%m_%d_%H_%M_%S')}"
    return name, place(root, name)


@contextlib.contextmanager
def run_directory(root: str, name: str | None, config: str, is_shared: bool = True) -> Iterator[tuple[str, Path]]:
    """Name and directory of a run. Inside the context no other run is in it; it can be written; no rest is in it.

    With several processes all call this: process 0 makes and locks the directory, and all look for it, if it
    `is_shared`. If one fails, all raise the same error. After an error before the first step, a directory that this
    start made is removed.

    `name` is None only with one process. Raises ValueError if another run is there, or if it cannot be written.
    """
    name, directory = find_place(root, name, config)
    with contextlib.ExitStack() as cleanup:
        agreed(lambda: _prepare(directory, cleanup) if jax.process_index() == 0 else None)
        if is_shared:
            agreed(lambda: _see(directory))
        yield name, directory


def _prepare(directory: Path, cleanup: contextlib.ExitStack) -> None:
    try:
        is_new = not directory.exists()
        cleanup.enter_context(locked(directory))
        # Before the lock is released.
        cleanup.push(lambda kind, *_: _remove_start(directory) if kind and is_new else None)
        if (directory / "metrics.jsonl").exists() or (directory / "config.yaml").exists():  # else it is of no run
            for path in directory.glob("*.tmp"):
                _remove(path)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be written: {why(error)}. See to its room, its rights and files in the way, or choose "
            "another paths.root_working_dir."
        ) from error


def _see(directory: Path) -> None:
    if not (directory / LOCK).exists():
        raise ValueError(
            f"process {jax.process_index()} on {socket.gethostname()} does not see {directory / LOCK}, which process 0 "
            "made. Give a paths.root_working_dir in a file system that all hosts share, or a URL in paths.checkpoints."
        )


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context in which no other process, on any host, locks this directory.

    Prints a line and locks nothing where the file system has no locks. Raises ValueError, with the other process, if
    one has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{directory} is in use by {_holder(file)}. Wait for that run or end it, or start another one with a "
                "new paths.model_name."
            ) from None
        except OSError as error:
            say(f"lock       none on this file system ({why(error)}): start no second run in {directory}")
        file.truncate(0)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        file.write(json.dumps(who) + "\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # the file stays: another process may be about to lock it


def _holder(file: Any) -> str:
    """Words for the process that has the lock."""
    file.seek(0)
    try:
        who = json.loads(file.read(1000))
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _remove_start(directory: Path) -> None:
    """Removes the directory that a start made, if no step was logged or saved."""
    log, checkpoints = directory / "metrics.jsonl", directory / "checkpoints"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    is_logged = any('"event": ' not in line for line in lines)  # lines of events have "event"
    if not is_logged and not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        _remove(directory)


def remove_older(newest: Path, pattern: str) -> None:
    """Removes what earlier starts left beside the path `newest`, by the pattern of its name."""
    for path in newest.parent.glob(pattern):
        if path.stem != newest.stem:
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
