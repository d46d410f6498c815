"""docs/settings.md: all settings of a run, by section, with types, defaults and docstrings.

python -m docs.site.settings_page > docs/settings.md
"""

import importlib
from collections.abc import Iterator

from omegaconf import MISSING

from shardwright.modeling.settings import ModelConfig
from shardwright.program.config import Config
from shardwright.settings.settings import Setting, is_section, settings_of, shown_value, words_for

MODELS = ("family", "moe", "mla", "delta", "gpt2")
"""Values of model.module whose class ModelConfig has settings of its own."""
HEAD = """# All settings

Give each setting on the command line as `section.name=value`, or write it into a configuration. `python -m train
--help` prints this list in a terminal. A leading `~` of a path is your home directory. This page is made from the
docstrings of the settings.
"""


def sections() -> Iterator[tuple[str, str, list[Setting]]]:
    """Title, docstring and settings of each section."""
    found: dict[str, list[Setting]] = {}
    about: dict[str, str] = {}
    for setting in settings_of(Config, sections={"model": ModelConfig}):
        if is_section(setting.kind):
            about[setting.name] = setting.doc
        else:
            found.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    for title, settings in found.items():
        yield title, about[title], settings
    shown = {setting.name for setting in settings_of(ModelConfig, "model.")}
    for name in MODELS:
        schema = importlib.import_module(f"shardwright.models.{name}").ModelConfig
        new = [
            s
            for s in settings_of(schema, "model.")
            if s.name not in shown and not is_section(s.kind)
        ]
        shown |= {s.name for s in new}
        yield f"model.module={name}", "Beside the settings of the models above:", new


def line_of(setting: Setting) -> str:
    """A line of the page: name, type, default and docstring of a setting."""
    default = "required"
    if setting.default != MISSING:
        default = f"default `{shown_value(setting.default)}`".replace("\n", "\\n")
    doc = setting.doc.replace("*", r"\*")
    kind = words_for(setting.kind)
    return f'- <a id="{setting.name}"></a>**`{setting.name}`** ({kind}; {default}) {doc}'.rstrip()


def page() -> str:
    """The text of docs/settings.md."""
    lines = [HEAD]
    for title, about, settings in sections():
        lines += [f"## {title}\n", *([f"{about}\n"] if about else [])]
        lines += [line_of(setting) for setting in settings]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
