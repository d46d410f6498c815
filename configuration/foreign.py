"""What others wrote, such as files that were downloaded: JSON as data, and text as a terminal may show it."""

import errno
import json
import os
import re
import stat
from typing import Any

_UNSAFE = re.compile(r"[^\S \n\t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|[\x00-\x08\x0e-\x1b\x7f-\x9f\ud800-\udfff"
                     r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # fmt: skip
"""What moves the cursor, changes the terminal, or reorders what is read: control characters, line breaks other than a
line feed, halves of surrogate pairs, and the controls of bidirectional text."""


def shown(text: Any) -> str:
    r"""`text` with U+FFFD in the place of each character that a terminal would obey, such as the ESC of a colour.

    Line feeds and tabs stay, and \r\n is a line feed.
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", str(text).replace("\r\n", "\n"))


def one_line(text: str, characters: int | None = None) -> str:
    """The first characters of a text, or all, with signs for line ends and for unprintable characters."""
    cut = text if characters is None or len(text) <= characters else text[:characters] + "…"
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "�") for c in cut)


def open_no_pipe(path: str, flags: int) -> int:
    """Opener, for `open`, of a file to read. Raises FileNotFoundError for a pipe or a device, and waits for none."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # `open` refuses a directory
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is a pipe or a device, and no file", path)
    return descriptor


def open_no_link(path: str, flags: int) -> int:
    """Opener, for `open`, of a file to write. Raises OSError for a symbolic link, which may lead anywhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
