"""What `--help` prints: the configurations, the groups, and all settings with their types, defaults and docstrings."""

import enum
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from shardwright.settings.composing import Program
from shardwright.settings.settings import is_section, settings_of, short_type

WIDTH = 80


def help_text(program: Program, sections: dict[str, type] | None = None) -> str:
    """The help of a program. `sections` are dataclasses of sections whose type the schema leaves open."""
    choice = "" if program.config_name else "--config-name=<configuration> "
    lines = [_sentence(program.doc), "", f"    {program.command} {choice}[<setting>=<value> ...]", ""]
    configurations = sorted(path for path in program.configs.glob("*.yaml") if _is_own(program, path))
    lines += ["Configurations, for --config-name:" if configurations else ""]
    for path in configurations:
        lines += _item(path.stem, _header(path))
    for directory in sorted(path for path in program.configs.iterdir() if path.is_dir()):
        options = sorted(path.stem for path in directory.glob("*.yaml"))
        if options:
            lines += _item(f"{directory.name}=", f"a group of settings: {', '.join(options)}")
    lines += ["", "Settings, with type and default:"]
    for setting in settings_of(program.schema):
        if is_section(setting.kind):
            lines += ["", *_wrapped(f"{setting.name}: {_sentence(setting.doc)}" if setting.doc else setting.name, 0)]
            continue
        if setting.name in (sections or {}):
            lines += ["", *_wrapped(f"{setting.name}: {_sentence(setting.doc)}", 0)]
            for inner in settings_of(sections[setting.name], f"{setting.name}."):
                if not is_section(inner.kind):
                    lines += _setting(inner)
            continue
        lines += _setting(setting)
    lines += [
        "",
        "Further flags: --multirun for a sweep (name=a,b), --config-dir=<directory> for configurations of your own, "
        "--cfg=job to show the settings without running, --hydra-help for the rest.",
    ]
    return "\n".join(line.rstrip() for part in lines for line in (_wrapped(part, 0) if len(part) > WIDTH else [part]))


def _setting(setting: Any) -> list[str]:
    default = "must be given" if setting.default == MISSING else f"= {_shown(setting.default)}"
    return [
        *_wrapped(f"{setting.name} ({short_type(setting.kind)}) {default}", 2),
        *_wrapped(" ".join(setting.doc.split()), 6),
    ]


def _item(name: str, text: str) -> list[str]:
    if len(name) <= 28:
        return _wrapped(text, 32, f"  {name:28}  ") if text else [f"  {name}"]
    return [f"  {name}", *_wrapped(text, 32)]


def _wrapped(text: str, indent: int, first: str | None = None) -> list[str]:
    first = " " * indent if first is None else first
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * indent)


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    text = (
        {None: "null", True: "true", False: "false", "": "''"}.get(value)
        if isinstance(value, str | bool | None)
        else None
    )
    return text or str(value)


def _sentence(text: str) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z0-9`])", paragraph)[0]


def _is_own(program: Program, path: Path) -> bool:
    """Whether a configuration is one of this program, and one to start: its header has its command."""
    return f"{program.command} --config-name={path.stem}" in path.read_text().partition("defaults:")[0]


def _header(path: Path) -> str:
    """The first sentence in the comment at the top of a configuration that is not its command."""
    return _sentence("\n".join(_comment(path)))


def _comment(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            return
        text = line[1:].strip()
        if text and "python -m " not in text.partition(".")[0]:
            yield text
