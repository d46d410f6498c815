"""Writes the text of `--help`: configurations, groups, and all settings with types, defaults and docstrings."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING

from shardwright.settings.composing import Program
from shardwright.settings.settings import Setting, is_section, settings_of, shown_value, words_for

WIDTH = 80


def help_text(program: Program, sections: dict[str, type] | None = None) -> str:
    """Writes the help of a program. `sections` are dataclasses for sections whose type the schema leaves open."""
    choice = "" if program.config_name else "--config-name=<configuration> "
    lines = [*_wrapped(_sentence(program.doc), 0), "", f"    {program.command} {choice}[<setting>=<value> ...]", ""]

    def says_command(path):
        return f"{program.command} --config-name={path.stem}" in path.read_text(encoding="utf-8")

    if named := sorted(path.stem for path in program.configs.glob("*.yaml") if says_command(path)):
        lines += _wrapped(f"--config-name=<{', '.join(named)}>", 0)
    for directory in sorted(path for path in program.configs.iterdir() if path.is_dir()):
        if options := sorted(path.stem for path in directory.glob("*.yaml")):
            lines += _wrapped(f"{directory.name}=<{', '.join(options)}>", 0)
    lines += ["", "Settings, with type and default:"]
    for setting in settings_of(program.schema):
        opened = (sections or {}).get(setting.name)
        if is_section(setting.kind) or opened:
            about = f": {_sentence(setting.doc)}" if setting.doc else ""
            lines += ["", *_wrapped(f"{setting.name}{about}", 0)]
            inner = settings_of(opened, f"{setting.name}.") if opened else ()
            lines += [line for each in inner if not is_section(each.kind) for line in _setting(each)]
        else:
            lines += _setting(setting)
    further = (
        "Further flags: --multirun for a sweep (name=a,b), --config-dir=<directory> for your own configurations, "
        "--cfg=job to show the settings without running, --hydra-help for the rest."
    )
    return "\n".join([*lines, "", *_wrapped(further, 0)])


def _setting(setting: Setting) -> Iterator[str]:
    default = "must be given" if setting.default == MISSING else f"= {shown_value(setting.default)}"
    yield from _wrapped(f"{setting.name} ({words_for(setting.kind)}) {default}", 2)
    yield from _wrapped(setting.doc, 6)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 4))


def _sentence(text: Any) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z0-9`])", paragraph)[0]
