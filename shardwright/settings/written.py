"""Keeps what was written for a setting: a text that looks like a number stays a text, and 1e9 may be a whole number.

Hydra and YAML make numbers and booleans of 1_1_1, 1e5, 1.10, yes and 12:30 before the declared type is known.
"""

import io
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from shardwright.settings.settings import kind_of, without_null

_LIKE_NUMBER = r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?|(?i:[+-]?inf|nan|true|false)"
_VALUES = re.compile(rf"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![^\[,])\s*(?:{_LIKE_NUMBER})(?=\s*(?:[\],]|\Z))""")
"""Quoted texts, and values and entries of lists that Hydra takes for a number or boolean."""


def override_as_written(schema: type, argument: str) -> str:
    """Writes an override `name=value` so that Hydra gives the setting what was written."""
    name, equals, value = argument.partition("=")
    kind = _kind(schema, name.lstrip("+~"))

    def changed(text):
        return text if text[0] in "'\"" else _as_written(kind, text.strip())

    return f"{name}{equals}{_VALUES.sub(lambda found: changed(found[0]), value)}" if kind in (str, int) else argument


def read_as_written(schema: type, config_dir: str | None = None) -> None:
    """Makes Hydra read YAML files, also those of --config-dir, by the declared types of `schema`."""
    _Files.schema, _SearchPath.config_dir = schema, config_dir
    for plugin in (_Files, _SearchPath):
        Plugins.instance().register(plugin)


class _Files(FileConfigSource):
    schema: ClassVar[type]

    @staticmethod
    def scheme() -> str:
        return "written"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        text = Path(self.path, self._normalize_file_name(config_path)).read_text(encoding="utf-8")
        package = result.header["package"] or ".".join(config_path.split("/")[:-1])
        found = _changed(yaml.compose(text, yaml.SafeLoader), package.removeprefix("_global_"), self.schema)
        ends = {node.end_mark.index: (node, value) for node, value in found}  # once for an anchor and its aliases
        for end, (node, value) in sorted(ends.items(), reverse=True):
            text = text[: end - len(node.value)] + value + text[end:]
        result.config = OmegaConf.load(io.StringIO(text))
        return result


class _SearchPath(SearchPathPlugin):
    config_dir: ClassVar[str | None]

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.config_dir and os.path.isdir(self.config_dir):  # Hydra has it only later, and reports what is none
            search_path.prepend("command-line", os.path.abspath(self.config_dir), "main")  # a project's files win
        for element in search_path.get_path():
            element.path = element.path if "://" in element.path else f"{_Files.scheme()}://{element.path}"


def _changed(node: yaml.Node | None, name: str, schema: type) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """Yields the scalars below a node that YAML would not read as written, and what to write instead."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _changed(value, f"{name}.{key.value}".lstrip("."), schema)
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _changed(entry, f"{name}.0", schema)
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        is_text = node.tag.endswith((":str", ":null", ":merge")) and not re.fullmatch(_LIKE_NUMBER, node.value)
        yield from () if is_text else [(node, _as_written(_kind(schema, name), node.value))]


def _as_written(kind: Any, text: str) -> str:
    """Quotes what is to be a text, and writes 1e9 as 1000000000 for a whole number."""
    is_whole = kind is int and re.fullmatch(r"[\d.]+[eE]\+?\d{1,2}", text) and float(text).is_integer()
    return f"'{text}'" if kind is str else str(int(float(text))) if is_whole else text


def _kind(schema: type, name: str) -> Any:
    """Returns the type of a setting, or of the entries of a list; None if there is no such setting."""
    try:
        kind = without_null(kind_of(schema, name))
    except ValueError:
        return None
    return without_null(typing.get_args(kind)[0]) if typing.get_origin(kind) is list else kind
