"""Starts programs with settings from Hydra, and prints errors that users can act on."""

import contextlib
import errno
import functools
import importlib.util
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from shardlib.places import is_raised_on_purpose
from shardwright.data.checks import check_ranges
from shardwright.data.untrusted import check_private, first_line, shown
from shardwright.settings.command_line import (
    Program,
    explained,
    parse,
    register_shipped,
    search_first,
)
from shardwright.settings.exits import ERROR, LOST, exit_of
from shardwright.settings.help import help_text
from shardwright.settings.output import as_installed
from shardwright.settings.settings import made, untyped
from shardwright.settings.starting import missing_package, prepare

PACKAGE = Path(__file__).parents[1]
CACHE = "JAX_COMPILATION_CACHE_DIR"
FULL_ERROR = "SHARDWRIGHT_FULL_ERROR"
"""Environment variable with the user's HYDRA_FULL_ERROR, which `start` sets for Hydra."""


def refusal(error: Exception) -> str | None:
    """Returns the message to print for `error` instead of its traceback; None if the traceback is
    needed.

    Messages are for a ValueError, OSError or FloatingPointError that this project, a model or the
    configuration raises on purpose; system errors about a file or a full disk; and missing
    packages. A ValueError from Python or a library is a bug and needs its traceback, as does every
    error with HYDRA_FULL_ERROR=1. For errors in code that shardlib checks, the message starts with
    the location. Control characters, which data may contain, are removed.
    """
    message = _message(error)
    if message is None or os.environ.get(FULL_ERROR, os.environ.get("HYDRA_FULL_ERROR")) == "1":
        return None
    if getattr(error, "place", ""):
        return f"{shown(as_installed(message))}\n  Set HYDRA_FULL_ERROR=1 to see the traceback."
    return f"Error: {shown(as_installed(message))}"


def _message(error: Exception) -> str | None:
    """Writes the message of an error that a user can act on; None for another."""
    if missing := missing_package(error):
        return missing
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}. Check the path, its permissions and its disk."
    if isinstance(error, OmegaConfBaseException):
        name = error.full_key or "a setting"
        return f"{name}: {first_line(error)}. Correct the value of {name}."
    on_purpose = isinstance(
        error, ValueError | OSError | FloatingPointError
    ) and is_raised_on_purpose(error)
    return str(error) if on_purpose or getattr(error, "errno", None) == errno.ENOSPC else None


def has_package(name: str) -> bool:
    """Returns whether Python finds a module.

    A mere folder of its name, which Python would import, is none.
    """
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


class Refused(CompactHydraException):
    """An error of one job of a sweep, with the message to print."""


@contextlib.contextmanager
def refusals_shown() -> Iterator[None]:
    """Context that prints errors: one with a `refusal` message ends the program with that and
    status 1.

    An error that `exit_of` knows ends it with a line on what happened and what to do, and its
    status. A traceback precedes it, unless another process has failed, which prints its own. In a
    sweep, an error with a message ends only the job, as Refused.
    """
    try:
        yield
    except Exception as error:
        ended = exit_of(error)
        message = refusal(error) if ended is not LOST else None
        several = is_sweep()
        if message is None and (several or ended is ERROR):
            raise
        if several:
            raise Refused(message) from error
        if message is None:
            if ended is not LOST or os.environ.get(FULL_ERROR) == "1":
                traceback.print_exception(error)
            why = shown(first_line(error))
            message = (
                f"shardwright: the process on {socket.gethostname()} {ended.what}: {why}. "
                f"{ended.next}"
            )
        print(message, file=sys.stderr)
        sys.exit(ended.code)


def is_sweep() -> bool:
    """Returns whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def start(
    program: Program, job: Callable[[Any], Any], sections: Callable[[], dict[str, type]] = dict
) -> None:
    """Calls `job` with what Hydra composes from the command line, or prints the help or what is
    wrong.

    Args:
        program: the program and its settings.
        job: function of the configuration that Hydra composed. It prints its own errors, with
            refusals_shown.
        sections: returns dataclasses for sections whose type the schema leaves open, for the help.
    """
    prepare()
    os.environ.setdefault(FULL_ERROR, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors, which are printed here
    try:
        _start(program, job, sections)
    except Refused as error:
        sys.exit(str(error))
    except BrokenPipeError:  # a reader such as `head` stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if message := refusal(error):
            sys.exit(message)
        raise


def _start(
    program: Program, job: Callable[[Any], Any], sections: Callable[[], dict[str, type]]
) -> None:
    register_shipped()
    line = parse(program, sys.argv[1:])
    if line.help:
        print(as_installed(help_text(program, sections())), flush=True)
        return
    named = [] if line.config_name is None else [f"--config-name={line.config_name}"]
    sys.argv[1:] = [*named, *line.words]  # programs that start others give them these
    search_first(line.directories)
    _ignore_shared_cache()
    try:
        hydra.main(
            version_base="1.3", config_path=str(program.configs), config_name=line.config_name
        )(job)()
    except Exception as error:
        if isinstance(error, Refused) or not (
            message := explained(program, line.directories, error)
        ):
            raise
        raise ValueError(message) from error


def _ignore_shared_cache() -> None:
    """Has JAX ignore a directory of compiled programs in which others may write: they could run
    theirs as the user.
    """
    directory = Path(os.environ.get(CACHE) or os.devnull).expanduser()
    try:
        if directory.is_dir():
            check_private(directory)
    except PermissionError as error:
        print(f"{CACHE}: not used: {error}.", file=sys.stderr)
        os.environ[CACHE] = ""
        if jax := sys.modules.get("jax"):  # which read it
            jax.config.update("jax_compilation_cache_dir", None)


def run_program(name: str, schema: type, run: Callable[[Any], Any]) -> None:
    """Calls `run` with the settings of the command line.

    Errors that `refusal` has a message for are printed without a traceback. The exit status of any
    error is 1.

    Args:
        name: default of --config-name, a file in shardwright/tools/configs/.
        schema: dataclass of the settings. The config names it as `<name>_schema`.
        run: function of the program's main module, called with a `schema`.
    """

    # functools.wraps: Hydra looks for the program's name in the file of the wrapped function.
    @functools.wraps(run)
    def job(config: object) -> None:
        with refusals_shown():
            settings = made(schema, config)
            check_ranges("", settings)
            run(settings)

    ConfigStore.instance().store(f"{name}_schema", untyped(schema))
    doc = inspect.getmodule(run).__doc__ or ""
    start(Program(f"python -m tools.{name}", PACKAGE / "tools" / "configs", name, schema, doc), job)
