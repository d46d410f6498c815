"""Reads the names, types, defaults and docstrings of settings from their dataclasses."""

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting, or a section of settings.

    Attributes:
        name: its dotted name, as on the command line.
        kind: its type.
        default: its default; MISSING if it has none.
        doc: its docstring.
    """

    name: str
    kind: Any
    default: Any
    doc: str


def settings_of(schema: type, prefix: str = "") -> Iterator[Setting]:
    """Yields the settings of a dataclass in order. A section comes before its settings."""
    kinds, docs = typing.get_type_hints(schema), _docstrings(schema)
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = MISSING if default is dataclasses.MISSING else default
        name, kind = f"{prefix}{field.name}", kinds[field.name]
        yield Setting(name, kind, default, docs.get(field.name, ""))
        if is_section(kind):
            yield from settings_of(without_null(kind), f"{name}.")


def kind_of(schema: type, name: str, prefix: str = "") -> Any:
    """Returns the type of the setting `name`. For an unknown name raises ValueError, with the closest one.

    `prefix` is the section of `schema`, with a dot.
    """
    kind: Any = schema
    parts = name.split(".")
    for i, part in enumerate(parts):
        kind = without_null(kind)
        path = prefix + ".".join(parts[:i])
        if is_section(kind):
            kinds = typing.get_type_hints(kind)
            if part not in kinds:
                raise ValueError(f"there is no setting {prefix}{name}.{_known(schema, parts, i, [*kinds], prefix)}")
            kind = kinds[part]
        elif typing.get_origin(kind) in (list, dict):
            kind = typing.get_args(kind)[-1]
        elif kind is not Any:
            raise ValueError(f"there is no setting {prefix}{name}: {path} is {words_for(kind)}. Set {path}=<value>.")
        else:
            return Any
    return kind


def _known(schema: type, parts: list[str], i: int, known: list[str], prefix: str) -> str:
    """Suggests the closest name if part `i` is unknown, in its section or elsewhere, or lists those of the section."""
    path = (prefix + ".".join(parts[:i])).rstrip(".")
    if near := difflib.get_close_matches(parts[i], known, n=1):
        return f" Did you mean {prefix}{'.'.join([*parts[:i], near[0], *parts[i + 1 :]])}?"
    names = [s.name for s in settings_of(schema, prefix) if not is_section(s.kind)]
    if elsewhere := [name for name in names if name.rpartition(".")[2] == parts[-1]]:
        return f" Did you mean {elsewhere[0]}?"
    return f" {f'The section {path} has' if path else 'There are'} {', '.join(known)}."


def without_null(kind: object) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = [part for part in typing.get_args(kind) if part is not type(None)][:1]
    return kind


def is_section(kind: object) -> bool:
    """Returns whether this type is a section, a dataclass of settings."""
    return dataclasses.is_dataclass(without_null(kind))


def words_for(kind: object) -> str:
    """Describes the values of a type, to follow "it must be"."""
    inner = without_null(kind)
    origin = typing.get_origin(inner)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if is_section(inner):
        said = f"a section, with {', '.join(field.name for field in dataclasses.fields(inner))}"
    elif origin is list:
        said = f"a list, each entry {words_for(typing.get_args(inner)[0])}, such as [a,b]"
    elif origin is dict:
        said = "a mapping, such as {name:value}"
    else:
        said = words.get(inner, "a value")
    return said if inner is kind else f"{said}, or null"


def shown_value(value: object) -> str:
    """Formats a default as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value) or "''"


def _docstrings(schema: type) -> dict[str, str]:
    """Maps each field of a dataclass to the docstring below it, in one line."""
    found: dict[str, str] = {}
    for owner in (cls for cls in reversed(schema.__mro__) if dataclasses.is_dataclass(cls)):
        node: Any = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found
