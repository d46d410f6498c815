"""Writes text for users: prints it, and formats commands and settings in it."""

import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwright.data.untrusted import shown

PACKAGE = Path(__file__).parents[1]
_IN_CHECKOUT = (PACKAGE.parent / "pyproject.toml").exists()


def as_installed(text: str) -> str:
    """Writes commands and pages in a message as they are outside a checkout: `shardwright plan`,
    and a whole path.

    A program that was started by the command `shardwright` may be outside of the checkout that it
    is installed from.
    """
    if not _IN_CHECKOUT or sys.argv[0].startswith("shardwright "):
        text = re.sub(r"python -m (?:tools\.|(?=train\b))", "shardwright ", text)
        text = re.sub(r"pip install -e '\.(\[\w+\])'", r"pip install 'shardwright\1'", text)
    return (
        text
        if _IN_CHECKOUT
        else re.sub(r"(?<![\w/])(?=docs/[\w/]+\.(?:md|py))", f"{PACKAGE}/", text)
    )


def say(text: str, flush: bool = False) -> None:
    """Prints a text without control characters. Once stdout is lost, what is printed is dropped.

    A full disk, a terminal that is gone and a pipe that nobody reads thus don't end a run.
    """
    try:
        print(shown(as_installed(text)), flush=flush)
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        with contextlib.suppress(OSError):
            print(
                f"WARNING: stdout is lost: {error.strerror}. The program continues.",
                file=sys.stderr,
                flush=True,
            )


def told_in_a_line(main: Callable[[], None]) -> Callable[[], None]:
    """Decorator of a program without settings: ends it with one line for a path that cannot be read
    or written.
    """

    @functools.wraps(main)
    def told() -> None:
        try:
            main()
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            sys.exit(
                f"Error: {error.strerror or error}{where}. Check the path, its permissions and its "
                "disk."
            )

    return told


def listed(names: Sequence[str], most: int = 3) -> str:
    """Joins the first names, and counts the rest: `a, b, c and 2 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def quoted(text: str) -> str:
    """Quotes a text as a value on Hydra's command line."""
    # A backslash is special before a quote, before "${", and at the end.
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return (
        '"'
        + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + '\\"' * bool(found[2]), text)
        + '"'
    )


def override(setting: str, value: str) -> str:
    """Formats `setting=value` as a command-line argument, quoted for a shell if needed."""
    plain = re.fullmatch(r"(?!(?i:null)\Z)[\w+./:-]+", value, re.ASCII)
    return f"{setting}={value}" if plain else shlex.quote(f"{setting}={quoted(value)}")
