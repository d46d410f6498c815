"""The model card of an export: README.md.

What a checkpoint says may be a stranger's. It stands in blocks of indented YAML, in which Markdown is not read.
"""

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwright_data.foreign import shown

CARD = "README.md"
_OF_PLACES = ("paths", "trackers", "distributed", "hardware")
"""The sections that are left out: they say where a run was, and not what it is."""
_TEXT = """\
# {title}

A causal language model, trained from a recipe of shardwright and exported to `transformers`. `shardwright` wrote this
page. It has no statement on what the model is good or bad for.

{facts}

## Use

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained({place})
{tokenizer}

## Settings of the run

Of paths and addresses only the last part is shown.

{settings}
"""


def write_card(
    directory: Path,
    title: str,
    place: str | None,
    license: str | None,
    facts: Mapping,
    settings: Mapping,
    tokenizer: bool,
) -> None:
    """Writes README.md.

    Args:
        directory: of the export.
        title: name of the model.
        place: <owner>/<name> on the hub; None: it is not pushed.
        license: its name on the hub; None: not given.
        facts: what the export knows of the model, by name.
        settings: configuration of the run, by section.
        tokenizer: whether the export has one.
    """
    from huggingface_hub import ModelCard, ModelCardData

    opened = json.dumps(place or "path/of/this/directory")
    use = f"    tokenizer = transformers.AutoTokenizer.from_pretrained({opened})"
    text = _TEXT.format(
        title=re.sub(r"[^\w.\- ]", lambda sign: f"&#{ord(sign[0])};", " ".join(shown(title).split())),
        facts=_block(facts),
        place=opened,
        tokenizer=use if tokenizer else "\nThe tokenizer of the training data is not part of the export.",
        settings=_block({name: part for name, part in settings.items() if name not in _OF_PLACES}),
    )
    about = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", license=license, tags=["shardwright", "jax"]
    )
    (directory / CARD).write_text(str(ModelCard(f"---\n{about.to_yaml()}\n---\n\n{text}")), encoding="utf-8")


def _block(values: Mapping) -> str:
    """YAML, indented as code; each value in one line, so that none ends the block."""
    text = yaml.safe_dump(_public(values), sort_keys=False, allow_unicode=False, width=2**20)
    return textwrap.indent(text, "    ").rstrip()


def _public(value: Any) -> Any:
    """The value without the directories and servers that it names: of a path or an address, the last part."""
    if isinstance(value, Mapping):
        return {_public(name): _public(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_public(part) for part in value]
    if isinstance(value, str):
        is_place = value.startswith(("/", "~", "../")) or "://" in value
        value = f"…/{re.split(r'[?#]', value)[0].rstrip('/').rpartition('/')[2]}" if is_place else value
        return " ".join(shown(value).split())
    return value
