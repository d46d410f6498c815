"""Reads untrusted files safely: bounded sizes, JSON and YAML as plain data, text without control
characters.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

SMALL, LARGE = 2**24, 2**27
"""Most bytes of a descriptive file, such as settings, and of a table, such as a vocabulary or
prompts."""
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Bytes of memory of this host."""
COPY_AGAIN = "Copy or download it again."
POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git lfs pull",
    b"/annex/objects/": "git annex get",
}
"""First bytes of a file that stands for content which Git has not fetched, and the command that
fetches it."""
POINTER_BYTES = 2**10
"""No pointer is larger."""

_UNSAFE = re.compile(
    r"[^\S \n\t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|[\x00-\x08\x0e-\x1b\x7f-\x9f"
    r"\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Characters that control the terminal or reorder text: control characters, line breaks other than
a line feed, halves of surrogate pairs, and the controls of bidirectional text."""


def shown(text: object) -> str:
    r"""Replaces characters that control the terminal, such as the ESC of a color, by U+FFFD.

    Keeps line feeds and tabs; \r\n becomes a line feed.
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", str(text).replace("\r\n", "\n"))


def one_line(text: str, characters: int) -> str:
    """Shortens a text to one line, with symbols for line ends and unprintable characters."""
    cut = text if len(text) <= characters else text[:characters] + "…"
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "�") for c in cut)


class Damaged(OSError, ValueError):
    """A file is missing, differs from what was written, is too large, or is not a regular file."""


def check_file(path: str | os.PathLike, most: float = math.inf) -> None:
    """Raises what `read_file` raises, without reading the file."""
    kind = Damaged
    status = None
    why = None
    remedy = COPY_AGAIN
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: a null byte in the name
        if not os.path.islink(path):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path)) from None
        why = "it is a link to a file that is missing"
        remedy = (
            "Run `git annex get` in its folder."
            if "annex/objects/" in os.readlink(path)
            else COPY_AGAIN
        )
    except OSError as error:  # a link to itself is damage; for other errors the file may be intact
        kind = Damaged if error.errno == errno.ELOOP else ValueError
        why = error.strerror
    if status and not stat.S_ISREG(status.st_mode):
        why = "it is a directory, a pipe or a device"
    elif status and status.st_size > most:
        why = f"it has {status.st_size:,} bytes, more than the limit of {most:,}"
    elif status and not os.access(path, os.R_OK):
        kind = ValueError
        why = "its permissions forbid it"
    elif status and status.st_size <= POINTER_BYTES:
        with open(path, "rb") as file:
            check_pointer(str(path), file.read(POINTER_BYTES))
    if why is not None:
        raise kind(f"{path} cannot be read: {why}. {remedy}")


def check_pointer(where: str, content: bytes) -> None:
    """Raises ValueError if the content of the file `where` is one of POINTERS."""
    for start, command in POINTERS.items():
        if content.startswith(start):
            raise ValueError(
                f"{where} is a pointer of {command.rpartition(' ')[0]}: its content is not "
                f"downloaded. Run `{command}` in its folder, or download the file itself."
            )


def check_private(directory: Path) -> None:
    """Raises PermissionError if others may write in a directory."""
    about = directory.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        remedy = "chmod go-w it, or choose your own directory"
        raise PermissionError(f"others may write in {directory}: {remedy}")


def read_file(path: str | os.PathLike, most: int = SMALL) -> bytes:
    """Reads a file.

    Raises:
        FileNotFoundError: it does not exist.
        Damaged: it is a directory, a pipe or a device, or has more than `most` bytes.
        ValueError: it cannot be read, or is a pointer to content that is elsewhere.
    """
    check_file(path, most)
    with open(path, "rb") as file:
        return file.read(most)


def read_text(path: str | os.PathLike, most: int = SMALL) -> str:
    """Reads a UTF-8 file, without a byte order mark. Raises what `read_file` raises."""
    try:
        return read_file(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}. {COPY_AGAIN}") from error


def decode(content: bytes) -> str:
    """Decodes UTF-8 bytes. Raises ValueError, which names the first invalid byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(first_line(error)) from None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without a full stop; its class name if there is
    no message.
    """
    if isinstance(error, UnicodeDecodeError) and error.encoding == "utf-8":
        return f"it is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"
    return next(iter(str(error).splitlines()), "").rstrip(". ") or type(error).__name__


def read_object(path: str | os.PathLike, kinds: object = dict, most: int = SMALL) -> dict:
    """Reads the JSON object in a file. Raises what `read_file` and `parse_object` raise."""
    return parse_object(str(path), read_text(path, most), kinds)


def parse_object(
    where: str, content: str | bytes, kinds: object = dict, remedy: str = COPY_AGAIN
) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        where: source of the text, for messages.
        content: the text.
        kinds: types of its values, as for `check_types`.
        remedy: last sentence of messages.

    Raises:
        ValueError: it is not a JSON object, or a value has the wrong type.
    """
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}. {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is not a JSON object. {remedy}")
    check_types(where, found, kinds, remedy)
    return found


WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
_MISSING = object()


def check_types(
    where: str, value: Any, kind: Any, remedy: str = COPY_AGAIN, name: str = ""
) -> None:
    """Checks the types in a JSON value.

    Raises ValueError, with name and value, for the first part that is wrong.

    Args:
        where: source of the value, for messages.
        value: as `json` and `yaml` return it.
        kind: a type, or several as in `str | None`; a whole number is also a `float`. `[kind]` is a
            list of any length, a tuple of kinds a list of that length. A dict maps keys to kinds; a
            key with ? may be missing, and `str` stands for all keys.
        remedy: last sentence of the message.
        name: of the value, for messages.
    """
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(kind, dict):
        matches = type(value) is dict
        for key, of_key in kind.items() if matches else ():
            keys = [*value] if key is str else [str(key).removesuffix("?")]
            needed = key is not str and not str(key).endswith("?")
            parts += [
                (f"{name}.{k}".lstrip("."), value.get(k, _MISSING), of_key)
                for k in keys
                if needed or k in value
            ]
    elif isinstance(kind, list | tuple):
        matches = type(value) is list and (isinstance(kind, list) or len(value) == len(kind))
        parts = (
            [(name, *pair) for pair in zip(value, itertools.cycle(kind), strict=False)]
            if matches
            else []
        )
    else:
        kinds = get_args(kind) or (kind,)
        matches = type(value) in kinds or (type(value) is int and float in kinds)
    if not matches:
        found = "missing" if value is _MISSING else f"{value!r:.80}"
        raise ValueError(
            f"{where}: {name} is {found}; it must be {_words(kind)}. {remedy}".replace(
                ":  is", " is"
            )
        )
    for part_name, part, of_part in parts:
        check_types(where, part, of_part, remedy, part_name)


def _words(kind: object) -> str:
    if isinstance(kind, dict | list):
        return WORDS[type(kind)]
    if isinstance(kind, tuple):
        return f"a list of {len(kind)}"
    return " or ".join(WORDS.get(part, "null") for part in get_args(kind) or (kind,))


@contextlib.contextmanager
def refused(what: str, remedy: str = COPY_AGAIN) -> Iterator[None]:
    """Context in which a library reads untrusted data: turns any error into a ValueError that
    begins with `what`.

    Also a panic of a Rust library, which is not an Exception. The message includes the causes,
    because `datasets` often reports only that something went wrong.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, ImportError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        # details of tensorstore
        why = ": ".join(re.sub(r" \[\w+='.*", "", first_line(cause)) for cause in causes)
        raise ValueError(f"{what}: {why}. {remedy}".rstrip()) from error


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text. Raises ValueError if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Plain(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # a few lines of nested aliases can expand to fill memory
            raise yaml.YAMLError(
                f"it repeats a part, *{self.peek_event().anchor}, instead of writing it again"
            )
        return super().compose_node(parent, index)


def parse_yaml(text: str) -> Any:
    """Parses a YAML text without aliases.

    Raises ValueError, with a message of one line, if it is not valid.
    """
    try:
        return yaml.load(text, _Plain)
    except Exception as error:  # PyYAML raises various errors for a tag that does not fit its value
        raise ValueError(" ".join(str(error).split())) from error


def number(value: Any) -> float:
    """Converts a JSON value to a number; infinities and NaN may be strings.

    NaN if it is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
