"""Text that programs show."""

import re
from typing import Any

from rich.console import CONSOLE_SVG_FORMAT

from shardwright_data.foreign import shown


def say(text: str, flush: bool = False) -> None:
    """Prints a text, with no character that a terminal would obey."""
    print(shown(text), flush=flush)


def picture_of(console: Any, title: str) -> str:
    """What a recording rich console has shown, as an SVG that fetches nothing: without the addresses of fonts."""
    template = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=template, unique_id=re.sub(r"\W+", "-", title))
