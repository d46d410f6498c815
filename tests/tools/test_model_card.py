"""The model card of an export: what it says of the run, and that what a stranger wrote is only text."""

import huggingface_models as models
import jax
import pytest
import tiny
import yaml
from markdown_it import MarkdownIt

from tools.checkpoint_to_huggingface import __main__ as tool
from tools.checkpoint_to_huggingface.card import write_card

EVIL = [
    "</code></pre>\n\n# Owned\n\n<script>alert(1)</script>",
    "a\n---\nlicense: mit\n---\n\n## Owned",
    "`x` | **bold** [link](javascript:x) ![i](i.png) $$\\alpha$$",
    "\x1b[31mred\x07 \u202e",
    "a: b\n\nc",
]


def parts(text: str) -> tuple[dict, list]:
    """The front matter, and the tokens of the page."""
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(body)


def blocks(tokens: list) -> list[dict]:
    """What is in the blocks of indented YAML: the facts and the settings."""
    code = [token.content for token in tokens if token.type == "code_block"]
    return [yaml.safe_load(code[0]), yaml.safe_load(code[-1])]


@pytest.mark.long
def test_an_export_has_a_card_with_the_facts_of_its_run(tmp_path):
    c = models.model("grouped")
    with jax.set_mesh(tiny.mesh("one device")):
        models.save(tmp_path / "run", models.weights(c), c, step=120, filespec=str(tmp_path / "secret" / "novels.zarr"))
        said: list[str] = []
        output = tmp_path / "exported"
        tool.run(
            tool.Config(run=str(tmp_path / "run"), output=str(output), license="apache-2.0", check=models.COMPARES),
            said.append,
        )
    text = (output / "README.md").read_text()
    about, tokens = parts(text)
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "apache-2.0"}
    assert about == expected | {"tags": ["shardwright", "jax"]}
    facts, settings = blocks(tokens)
    assert facts["weights"] == "f32, weights, after 120 steps"
    assert f"compared   {facts['logits compared']}" in said
    assert settings["data"]["filespec"] == "…/novels.zarr"
    assert settings["model"]["rope_base"] == 100.0
    assert "paths" not in settings
    assert str(tmp_path) not in text


@pytest.mark.parametrize("text", EVIL)
def test_what_a_stranger_wrote_is_only_text(tmp_path, text):
    write_card(tmp_path, text, None, None, {"architecture": text, text: text}, {"model": {text: [text]}}, False)
    about, tokens = parts((tmp_path / "README.md").read_text())
    assert about.keys() == {"library_name", "pipeline_tag", "tags"}
    kinds = [token.type for token in tokens]
    assert kinds.count("heading_open") == 3
    assert "html_block" not in kinds
    inside = {part.type for token in tokens for part in token.children or ()}
    assert inside <= {"text", "softbreak", "code_inline", "text_special", "html_entity"}, inside
    facts, settings = blocks(tokens)
    assert facts.keys() >= {"architecture"}
    assert settings.keys() == {"model"}
