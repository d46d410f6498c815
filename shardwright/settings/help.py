"""Writes the text of `--help`: configurations, groups, and all settings with types, defaults and
docstrings.
"""

import re
import textwrap

from omegaconf import MISSING

from shardwright.settings.command_line import Program
from shardwright.settings.settings import is_section, settings_of, shown_value, words_for

WIDTH = 80
FLAGS = (
    "Further flags: --multirun for a sweep (name=a,b), --config-dir=<directory> for your own "
    "configurations, --cfg=job to show the settings without running, --hydra-help for the rest."
)


def help_text(program: Program, sections: dict[str, type]) -> str:
    """Writes the help of a program.

    `sections` are dataclasses for sections whose type the schema leaves open.
    """
    choice = "" if program.config_name else "--config-name=<configuration> "
    lines = [
        *_wrapped(_sentence(program.doc)),
        "",
        f"    {program.command} {choice}[<setting>=<value> ...]",
        "",
    ]
    files = {
        path: path.read_text(encoding="utf-8") for path in sorted(program.configs.glob("*.yaml"))
    }
    named = [
        path.stem
        for path, text in files.items()
        if f"{program.command} --config-name={path.stem}" in text
    ]
    groups = {
        path.name: sorted(each.stem for each in path.glob("*.yaml"))
        for path in sorted(program.configs.iterdir())
    }
    for name, options in {"--config-name": named, **groups}.items():
        lines += _wrapped(f"{name}=<{', '.join(options)}>") if options else []
    lines += ["", "Settings, with type and default:"]
    for setting in settings_of(program.schema, sections=sections):
        if is_section(setting.kind):
            lines += ["", *_wrapped(f"{setting.name}: {_sentence(setting.doc)}".rstrip(": "))]
        else:
            default = (
                "must be given"
                if setting.default == MISSING
                else f"= {shown_value(setting.default)}"
            )
            lines += _wrapped(
                f"{setting.name} ({words_for(setting.kind)}) {default}", 2
            ) + _wrapped(setting.doc, 6)
    return "\n".join([*lines, "", *_wrapped(FLAGS)])


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 4)
    )


def _sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z0-9`])", paragraph)[0]
