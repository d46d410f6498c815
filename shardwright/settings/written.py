"""Keeps what was written for a setting: a text that looks like a number stays a text, and 1e9 may be a whole number.

Hydra and YAML make numbers and booleans of 1_1_1, 1e5, 1.10, yes and 12:30 before the declared type is known.
"""

import os
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from shardwright.settings.settings import UnknownSetting, is_section, kind_of, without_null

_NUMBER = r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?|(?i:[+-]?inf|nan|true|false)"
_VALUES = re.compile(rf"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![^\[,])\s*(?:{_NUMBER})(?=\s*(?:[\],]|\Z))""")
"""Quoted texts, and values and entries of lists that Hydra takes for a number or boolean."""
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
    if name.startswith("+") and (value.startswith("{") or _ONE.fullmatch(value)):
        name, value = _in_its_section(schema, name, value)
    return f"{name}{equals}[{value}]" if is_list and _ONE.fullmatch(value) else f"{name}{equals}{value}"


def _in_its_section(schema: type, name: str, value: str) -> tuple[str, str]:
    """Writes `+data.mixture.big={…}` as `+data.mixture={big:{…}}`: Hydra checks the types of entries that it merges."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        kind = _kind(schema, ".".join(parts[:i]).lstrip("+"))
        if typing.get_origin(kind) is dict and is_section(typing.get_args(kind)[1]):
            for part in reversed(parts[i:]):
                value = f"{{{part}:{value}}}"
            return ".".join(parts[:i]), value
    return name, value


def read_as_written(schema: type, directories: Sequence[str] = ()) -> None:
    """Makes Hydra read YAML files, first those in `directories`, by the declared types of `schema`."""
    _Files.schema, _SearchPath.directories = schema, directories
    for plugin in (_Files, _SearchPath):
        Plugins.instance().register(plugin)


class _Files(FileConfigSource):
    schema: ClassVar[type]

    @staticmethod
    def scheme() -> str:
        return "written"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        content = Path(self.path, self._normalize_file_name(config_path)).read_text(encoding="utf-8")
        texts = yaml.load(content, yaml.BaseLoader)
        package = result.header["package"] or ".".join(config_path.split("/")[:-1])
        found = _as_written(self.schema, package.removeprefix("_global_"), OmegaConf.to_container(result.config), texts)
        result.config = OmegaConf.create(found)
        return result


class _SearchPath(SearchPathPlugin):
    directories: ClassVar[Sequence[str]]

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in filter(os.path.isdir, self.directories):  # Hydra reports later what is none
            search_path.prepend("command-line", os.path.abspath(directory), "main")  # a project's files win
        for element in search_path.get_path():
            element.path = element.path if "://" in element.path else f"{_Files.scheme()}://{element.path}"


def _as_written(schema: type, name: str, value: Any, text: Any) -> Any:
    """Corrects what YAML made of `text`, by the declared type of the setting `name`."""
    if isinstance(value, dict):
        entries = ((key, inner, text.get(str(key), inner)) for key, inner in value.items())
        return {key: _as_written(schema, f"{name}.{key}".lstrip("."), inner, of_key) for key, inner, of_key in entries}
    if isinstance(value, list):
        return [_as_written(schema, f"{name}.0", *both) for both in zip(value, text, strict=True)]
    kind = _kind(schema, name)
    if kind is str and isinstance(value, int | float):
        return str(text)
    is_whole = kind is int and isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


def _kind(schema: type, name: str) -> Any:
    """Returns the type of a setting; None if there is no such setting."""
    try:
        return without_null(kind_of(schema, name))
    except UnknownSetting:
        return None
