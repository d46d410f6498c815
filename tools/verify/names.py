"""The name and the line of the source that a report gives a tensor."""

import ast
import functools
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from shardwright.microscope.names import function_and_target
from tools.verify.program import RECORD
from tools.verify.record import Site


def name_of_site(site: Site) -> str:
    """The function around a `save_for_backward` and what its result is assigned to, if anything: `layer.v`."""
    function, target = function_and_target(site.file, site.line)
    return ".".join(filter(None, (function.rpartition(".")[2], target))) or "saved"


def line_of_field(weights: Any, path: str) -> tuple[str, int]:
    """File and line of the field that `path`, for example `layers.w_q`, names in the dataclass `weights`."""
    *outer, name = path.split(".")
    return _line_in_class(type(functools.reduce(getattr, outer, weights)), name)


@functools.cache
def _line_in_class(owner: type, name: str) -> tuple[str, int]:
    """File and line of a field of `owner`; those of the class for a field that it inherits."""
    lines, first = inspect.getsourcelines(owner)
    (cls,) = ast.parse(textwrap.dedent("".join(lines))).body
    fields = [n.lineno - 1 for n in cls.body if isinstance(n, ast.AnnAssign) and n.target.id == name]
    return inspect.getsourcefile(owner), first + (fields or [0])[0]


def line_of_function(fn) -> tuple[str, int]:
    """File and line of the `def` of `fn`."""
    fn = inspect.unwrap(fn)
    return fn.__code__.co_filename, fn.__code__.co_firstlineno


def line_at(place: str) -> str:
    """The line of the source at `file.py:line`, as it is in the original of the copy."""
    file, _, line = place.rpartition(":")
    lines = Path(file).read_text().splitlines() if Path(file).is_file() else []
    text = lines[int(line) - 1].strip() if 0 < int(line) <= len(lines) else ""
    return re.sub(rf"{RECORD}\.", "", text)
