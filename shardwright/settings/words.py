"""Text on a terminal, whose lines break between words. Elsewhere lines stay whole, for programs that read them."""

import re
import shutil
import sys
import textwrap
from typing import Any, TextIO

from rich.console import CONSOLE_SVG_FORMAT

from shardwright_data.foreign import shown

_LABEL = re.compile(r"(?=.{11}\S)\w+ +(?=\S)|\s*")


def wrapped(text: str, width: int) -> str:
    """The text with line breaks between words where a line is longer than `width`; a longer word, a path, is whole.

    What follows a break is below the text beside a label of eleven columns, or as deep as the line.
    """
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    found = []
    for line in text.split("\n"):
        depth = len(_LABEL.match(line)[0])
        indent = " " * (depth if depth == 11 or line[:depth].isspace() else 0)
        found += textwrap.wrap(line, width, subsequent_indent=indent, **options) if len(line) > width else [line]
    return "\n".join(found)


def for_stream(text: str, stream: TextIO) -> str:
    """The text as it is shown on `stream`: wrapped on a terminal."""
    return wrapped(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def say(text: str, flush: bool = False) -> None:
    """Prints a text, with no character that a terminal would obey."""
    print(for_stream(shown(text), sys.stdout), flush=flush)


def for_console(text: str, console: Any) -> str:
    """The text as a rich console is to show it, with soft_wrap: wrapped on a terminal."""
    return wrapped(text, console.width) if console.is_terminal else text


def picture_of(console: Any, title: str) -> str:
    """What a recording rich console has shown, as an SVG that fetches nothing: without the addresses of fonts."""
    template = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=template, unique_id=re.sub(r"\W+", "-", title))
