"""The model card of an export: README.md.

What a run says may be a stranger's. It stands in tables of HTML without an empty line, where no Markdown is read, and
is escaped there. A YAML library writes the front matter.
"""

import json
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from shardwright_data.foreign import shown
from tools.checkpoint_to_huggingface import facts
from tools.checkpoint_to_huggingface.facts import Exported

CARD = "README.md"
_LONGEST = 1000
"""Characters of a value."""


def write_card(x: Exported, directory: Path) -> None:
    """Writes README.md."""
    (directory / CARD).write_text(card(x), encoding="utf-8")


def card(x: Exported) -> str:
    """The text of README.md."""
    from huggingface_hub import ModelCard, ModelCardData

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_plain,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    chosen, rest = facts.settings(x)
    name = re.sub(r"[^\w.\- ]", lambda sign: f"&#{ord(sign[0])};", " ".join(shown(x.name).split()))
    text = environment.get_template("card.md").render(
        title=Markup(name),
        place=Markup(json.dumps(x.repository or "path/of/this/directory")),
        has_tokenizer=x.has_tokenizer,
        tables={name: getattr(facts, name)(x) for name in ("model", "loss", "checks", "data", "training")},
        chosen=chosen,
        rest=rest,
    )
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=x.license,
        tags=["shardwright", "jax"],
        datasets=facts.dataset_on_hub(x),
    )
    return str(ModelCard(f"---\n{about.to_yaml()}\n---\n\n{text}\n"))


def _plain(value: Any) -> Any:
    """A value as HTML in one line, without the signs that a page may read as mathematics."""
    if isinstance(value, Markup):
        return value
    text = " ".join(shown(value).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return Markup(str(escape(text)).replace("\\", "&#92;").replace("$", "&#36;"))
