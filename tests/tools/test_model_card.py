"""The model card of an export: what it says of the run, that it claims no check that was not made, and strangers."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import huggingface_models as models
import jax
import pytest
import tiny
import yaml
from markdown_it import MarkdownIt
from written_runs import write_run

from shardwright.modeling.model import load_model
from tools.checkpoint_to_huggingface import __main__ as tool
from tools.checkpoint_to_huggingface import facts
from tools.checkpoint_to_huggingface.card import card
from tools.checkpoint_to_huggingface.facts import Exported, read_run_until

PROGRAMS = {"training": "cd" * 10}
"""Those that write_run names."""
EVIL = [
    "</td></tr></table>\n\n# Owned\n\n<script>alert(1)</script>",
    "a\n---\nlicense: mit\n---\n\n## Owned",
    "`x` | **bold** [link](javascript:x) ![i](i.png) $$\\alpha$$",
    "\x1b[31mred\x07 \u202e",
    "&lt;b&gt;",
]


class Page(HTMLParser):
    """A card as a page: its front matter, the elements, and the rows of its tables by their first cell."""

    def __init__(self, text: str):
        super().__init__()
        self.front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
        self.about = yaml.safe_load(self.front)
        self.elements, self.rows, self.headings, self._cells, self._open = [], {}, [], [], None
        self.feed(MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(body))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self._cells = []
        if tag in ("td", "th", "h1", "h2"):
            self._open = ""

    def handle_data(self, data):
        if self._open is not None:
            self._open += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cells.append(self._open)
        if tag == "tr":
            self.rows.setdefault(self._cells[0], self._cells[1:])
        if tag in ("h1", "h2"):
            self.headings.append(self._open)
        if tag in ("td", "th", "h1", "h2"):
            self._open = None


HEADINGS = ["Use", "Loss", "What was checked", "Data", "Training", "Configuration"]


@pytest.fixture
def one_device():
    with jax.set_mesh(tiny.mesh("one device")):
        yield


def exported(run: Path | None = None, step: int = 120, **changes) -> Exported:
    """A model without weights, with the run's files in `run`."""
    metadata = {"config": dataclasses.asdict(models.settings(models.model("grouped")))}
    metadata |= {"provenance": {"programs": PROGRAMS, "source": {"train.py": "ab" * 10}, "traced_by": "jax"}}
    known = {"name": "mine", "repository": None, "step": step, "weights": "weights", "dtype": "f32"}
    known |= {"parameters": 12345, "content": {"architectures": ["LlamaForCausalLM"]}, "metadata": metadata}
    known |= {"has_tokenizer": True, "compared": "logits of 32 tokens"}
    return Exported(**known | {"run": run and read_run_until(str(run), step)} | changes)


def rewrite(run: Path, change) -> None:
    """Changes the contents of each provenance.json by `change`."""
    for path in run.glob("source/*/provenance.json"):
        about = json.loads(path.read_text())
        change(about)
        path.write_text(json.dumps(about))


# ---- the facts ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_export_has_a_card_with_the_facts_of_its_run(tmp_path, one_device):
    """Of the first 120 of 200 steps: what came later is not of these weights."""
    c = models.model("grouped")
    run = write_run(tmp_path / "run")
    models.save(run, models.weights(c), c, step=120, filespec=str(tmp_path / "secret" / "novels.zarr"))
    said: list[str] = []
    output = tmp_path / "exported"
    tool.run(tool.Config(run=str(run), output=str(output), license="apache-2.0", check=models.COMPARES), said.append)
    text = (output / "README.md").read_text()
    page = Page(text)
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "apache-2.0"}
    assert page.about == expected | {"tags": ["shardwright", "jax"]}
    assert page.headings == ["exported", *HEADINGS]
    count = sum(math.prod(weight.shape) for weight in jax.tree.leaves(load_model(c).table))
    assert page.rows["Parameters"] == [f"{count:,}"]
    assert page.rows["Tokens seen"] == ["76,800, of metrics.jsonl"]
    true_loss = lambda step: 2 + 4 * math.exp(-step * 0.01) + 0.1 * math.sin(7 * step)
    mean = sum(map(true_loss, range(108, 120))) / 12
    assert page.rows["Training, at step 120"] == [f"{mean:.3f} nats a token, mean of 12 steps"]
    validated = f"{true_loss(99) + 0.2:.3f} nats a token, 1.500 bits a byte"
    assert page.rows["Validation, at step 100"] == [validated]
    assert page.rows["Data"] == ["…/novels.zarr"]
    assert page.rows["model.rope_base"] == ["100.0", "10000.0"]
    assert "paths.root_working_dir" not in page.rows
    assert str(tmp_path) not in text
    assert page.rows["Steps"] == ["120 of 250"]
    assert "mesh d=8; 8 x cpu; Python 3.13.0; jax 0.12.0; commit 0123456789ab;" in page.rows["Started"][0]
    assert "Started after 100 steps" in page.rows
    assert page.rows["The step on its mesh, before the first step"] == ["not recorded by the run"]
    (compared,) = page.rows["Logits of these files, by the export"]
    assert f"compared   {compared}" in said


def test_a_run_that_is_not_at_hand_has_a_card(tmp_path):
    """As of a run on a server: what its checkpoint says is there, the rest is not known."""
    page = Page(card(exported()))
    assert page.rows["Parameters"] == ["12,345"]
    assert page.rows["Losses"] == [facts._NO_RUN]
    assert page.rows["The step on its mesh, before the first step"] == [facts._NO_RUN]
    assert "img" not in [name for name, _ in page.elements]
    assert read_run_until("gs://bucket/run", 5) is None
    assert read_run_until(str(tmp_path), 5) is None


def test_the_run_of_a_checkpoint_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    found = read_run_until(str(run / "checkpoints" / "0000000100"), 100)
    assert found.directory == run
    assert found.step.max() == 99
    assert [step for step, _ in found.starts] == [0]


def test_a_dataset_on_the_hub_is_in_the_front_matter():
    x = exported()
    x.metadata["config"]["data"]["stream"] = {"dataset": "HuggingFaceFW/fineweb-edu"}
    assert Page(card(x)).about["datasets"] == "HuggingFaceFW/fineweb-edu"
    x.metadata["config"]["data"]["stream"] = {"dataset": "a/b\nlicense: mit"}
    assert "datasets" not in Page(card(x)).about


def test_a_proof_is_told_where_the_run_recorded_one(tmp_path):
    run = write_run(tmp_path / "run")
    assert facts.checks(exported(run))[0][1] == "not recorded by the run"
    rewrite(run, lambda about: about.update(proof={"programs": ["training"], "mesh": {"d": 8}}))
    assert facts.checks(exported(run))[0][1].startswith('the run recorded a proof: on mesh d=8, ["training"] compute')


# ---- strangers ----------------------------------------------------------------------------------------------------


def plant(value, text):
    """The value with each string in it, and each name of a dict, replaced by `text`."""
    if isinstance(value, dict):
        return {name: plant(part, text) for name, part in value.items()} | {text: text}
    if isinstance(value, list):
        return [plant(part, text) for part in value]
    return text if isinstance(value, str) else value


@pytest.mark.parametrize("text", EVIL)
def test_what_a_stranger_wrote_is_only_text(tmp_path, text):
    run = write_run(tmp_path / "run")
    proof = {"programs": ["training"], "mesh": {"d": 8}}
    rewrite(run, lambda about: about.update(plant(about | {"proof": proof}, text)))
    x = exported(run, name=text.replace("/", " "), has_tokenizer=False)
    x.content = {"architectures": [text]}
    config = x.metadata["config"]
    x.metadata["config"] = plant(config, text) | {"model": config["model"] | {"rope_base": text}}
    x.metadata["provenance"] = plant(x.saved, text)
    written = card(x)
    page = Page(written)
    assert page.headings[1:] == HEADINGS
    assert set(page.about) == {"library_name", "pipeline_tag", "tags"}
    links = [about for name, about in page.elements if name in ("a", "img", "script", "strong", "b")]
    assert links == []
    assert page.rows["model.rope_base"][0] == " ".join(re.sub("[\x1b\x07\u202e]", "\ufffd", text).split())
    assert not re.search("[\x1b\x07\u202e$]", written)


@pytest.mark.parametrize("value", [None, [], {}, "x", [1], {"a": {"b": 1}}, 1e400, -1, True])
def test_no_damage_of_a_run_ends_the_export(tmp_path, value):
    run = write_run(tmp_path / "run")
    names = [*json.loads(next(run.glob("source/*/provenance.json")).read_text()), "proof"]
    original = {path: path.read_text() for path in run.glob("source/*/provenance.json")}
    for name in names:
        rewrite(run, lambda about, name=name: about.update({name: value}))
        Page(card(exported(run)))
        for path, text in original.items():
            path.write_text(text)
    rewrite(run, lambda about: about.update(run=dict.fromkeys(about["run"], value)))
    rewrite(run, lambda about: about.update(proof={"programs": value, "mesh": value}))
    with (run / "metrics.jsonl").open("a") as file:
        event = {"step": 3, "event": "validation", "loss": value, "bits_per_byte": value, "targets": value}
        file.write(json.dumps(event) + "\n")
    Page(card(exported(run, step=10)))
