"""Keeps what was written for a setting: a text that looks like a number stays a text, and 1e9 may be a whole number.

Hydra and YAML make numbers and booleans of 1_1_1, 1e5, 1.10, yes and 12:30 before the declared type is known.
"""

import codecs
import contextlib
import dataclasses
import functools
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from shardlib.places import shown_path
from shardwright.data.untrusted import first_line
from shardwright.settings.settings import (
    UnknownSetting,
    check_values,
    is_open,
    is_section,
    kind_of,
    without_null,
    words_for,
)

_NUMBER = r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?|(?i:[+-]?inf|nan|true|false)"
_PLAIN = r"""[^][(){}'",$\\]*"""
_UNREADABLE = rf"{_PLAIN}(?:[~=#;&`!<>^]|[^\x09\x20-\x7e]){_PLAIN}"
_VALUES = re.compile(
    rf"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![^\[,])\s*(?:{_NUMBER}|{_UNREADABLE})(?=\s*(?:[\],]|\Z))"""
)
"""Quoted texts, and values and entries of lists that Hydra takes for a number or boolean, or cannot read."""
_ONE = re.compile(r"""(?!null$)("[^"]*"|'[^']*'|[^][(){}$,]+)""")
"""One value, not a list, a function, or the values of a sweep."""


def override_as_written(schema: type, argument: str) -> str:
    """Writes an override `name=value` so that Hydra gives the setting what was written, in a list if it is one."""
    name, equals, value = argument.partition("=")
    setting = name.lstrip("+~")
    is_list = typing.get_origin(_kind(schema, setting)) is list
    kind = _kind(schema, f"{setting}.0" if is_list else setting)

    def changed(found: re.Match) -> str:
        text = found[0].strip()
        if kind is str and text[0] not in "'\"":
            return f"'{text}'"
        is_whole = kind is int and re.fullmatch(r"[\d.]+[eE]\+?\d{1,2}", text) and float(text).is_integer()
        return str(int(float(text))) if is_whole else text

    if kind in (str, int):
        value = _VALUES.sub(changed, value)
    return f"{name}{equals}[{value}]" if is_list and _ONE.fullmatch(value) else f"{name}{equals}{value}"


def in_its_section(schema: type, override: str) -> str:
    """Writes an override of one value so that Hydra adds what is not there yet, and checks the types of what it adds.

    `data.stream.train_files=[a]` becomes `data={stream:{train_files:[a]}}`, because data.stream may be null, and
    `+data.mixture.big={…}` becomes `data.mixture={big:{…}}`. A plus before a declared setting makes no difference.
    """
    name, _, value = override.lstrip("+").partition("=")
    has_plus, parts = override.startswith("+"), name.split(".")
    for i in range(1, len(parts)):
        kind = kind_of(schema, ".".join(parts[:i]))
        of_sections = has_plus and typing.get_origin(kind) is dict and is_section(typing.get_args(kind)[1])
        may_be_null = i > 1 and (kind is Any or without_null(kind) is not kind)
        if of_sections or may_be_null:
            at = i - may_be_null
            for part in reversed(parts[at:]):
                value = f"{{{part}:{value}}}"
            return f"{'++' if of_sections else ''}{'.'.join(parts[:at])}={value}"
    is_mapping = typing.get_origin(kind_of(schema, name)) is dict
    return f"{'++' if has_plus and (is_mapping or is_open(schema, name)) else ''}{name}={value}"


def check_setting(schema: type, name: str, value: Any) -> None:
    """Raises ValueError for a value that a setting cannot have, also for a name in it that is no setting."""
    check_values(schema, _nested(name, _as_written(schema, name, value, value)))


def _nested(name: str, value: Any) -> Any:
    """Returns {a: {b: value}} for the name a.b, and the value itself for no name."""
    return functools.reduce(lambda inner, part: {part: inner}, name.split(".")[::-1], value) if name else value


def read_as_written(schema: type, directories: Sequence[str] = (), bases: Mapping[str, str] | None = None) -> None:
    """Makes Hydra read YAML files, first those in `directories`, by the declared types of `schema`.

    `bases` maps a configuration to the one that it includes if it includes none.
    """
    _Files.schema, _Files.bases, _SearchPath.directories = schema, bases or {}, directories
    for plugin in (_Files, _SearchPath):
        Plugins.instance().register(plugin)


class _Files(FileConfigSource):
    schema: ClassVar[type]
    bases: ClassVar[Mapping[str, str]]

    @staticmethod
    def scheme() -> str:
        return "written"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        with _wrong_files_named(path):
            text = path.read_text(encoding="utf-8-sig")
            texts = yaml.load(text, yaml.BaseLoader) or {}
            if not isinstance(texts, dict) or not isinstance(texts.get("defaults", []), list):
                raise ValueError("it is not a configuration; write `section: {name: value}`, and `defaults` as a list.")
            values: Any = OmegaConf.to_container(OmegaConf.create(text or "{}"))
            header = self._get_header_dict(text)
            package = (header["package"] or ".".join(config_path.split("/")[:-1])).removeprefix("_global_")
            others = {key: values.pop(key) for key in ("defaults", "hydra") if key in values}
            if not package or package.partition(".")[0] in (field.name for field in dataclasses.fields(self.schema)):
                values = _as_written(self.schema, package, values, texts)
                check_values(self.schema, _nested(package, values))
            base, included = self.bases.get(config_path.removesuffix(".yaml")), others.get("defaults", [])
            if base and not any(isinstance(each, str) and each != "_self_" for each in included):
                others["defaults"] = [base, *included, *["_self_"] * ("_self_" not in included)]
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, where, OmegaConf.create(values | others), header)


@contextlib.contextmanager
def _wrong_files_named(path: Path) -> Iterator[None]:
    """Raises errors about the content of a configuration file as ValueErrors of one line with the file."""
    where = shown_path(str(path))
    try:
        yield
    except UnicodeDecodeError as error:
        guess = "UTF-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "perhaps Latin-1"
        raise ValueError(f"{where} is {guess}, not UTF-8 ({first_line(error)}). Save it as UTF-8.") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line}: {error.problem}. Correct the file.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where} has a character that YAML rejects ({first_line(error)}). Delete it.") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class _SearchPath(SearchPathPlugin):
    directories: ClassVar[Sequence[str]]

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in filter(os.path.isdir, self.directories):  # Hydra reports later what is none
            search_path.prepend("command-line", os.path.abspath(directory), "main")  # a project's files win
        for element in search_path.get_path():
            element.path = element.path if "://" in element.path else f"{_Files.scheme()}://{element.path}"


def _as_written(schema: type, name: str, value: Any, text: Any) -> Any:
    """Corrects what YAML made of `text`, by the declared type of the setting `name`.

    Raises ValueError for a name that is no setting, and for a mapping or list in the place of something else.
    """
    declared = kind_of(schema, name) if name else schema
    kind = without_null(declared)
    origin = dict if is_section(kind) else typing.get_origin(kind)
    is_open_value = kind is Any or value is None or (isinstance(value, str) and "$" in value)
    if (origin or isinstance(value, dict | list)) and not is_open_value and not isinstance(value, origin or ()):
        raise ValueError(f"{name} is {text}; it must be {words_for(declared)}.")
    if isinstance(value, dict):
        for key in value if is_section(kind) else ():
            section, dot, rest = str(key).partition(".")
            if dot:
                raise ValueError(f"{key} is not a setting here; write {section}: {{{rest}: <value>}}.")
        names = {key: f"{name}.{key}".lstrip(".") for key in value}
        return {key: _as_written(schema, names[key], inner, text.get(str(key), inner)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_written(schema, f"{name}.0", *both) for both in zip(value, text, strict=True)]
    if kind is str and isinstance(value, int | float):
        return str(text)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _kind(schema: type, name: str) -> Any:
    """Returns the type of a setting; None if there is no such setting."""
    try:
        return without_null(kind_of(schema, name))
    except UnknownSetting:
        return None
