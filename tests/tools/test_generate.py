"""Texts from checkpoints and during training: the tool, samples.jsonl, prompts on the command line
and as tokens.
"""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.console import Console

import train
from shardwright.data.checks import check_ranges
from shardwright.data.loader import DataConfig, StreamConfig
from shardwright.data.text.tokenizers import open_tokenizer
from shardwright.modeling.model import load_model
from shardwright.program.mesh_choice import mesh_for
from shardwright.sampling.samples import Samples
from shardwright.tools.generate import MeshChoice, Settings, generate, quote_prompt, read_prompts
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("not_remembered")

ROOT = Path(__file__).parents[2]
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of"
)
PROMPTS = ["It is", ""]


def settings(directory):
    """Five steps on bytes, with texts every two."""
    c = tiny.config(
        tiny.model(vocab=320, layers=1), eval_batches=0, sample_interval=2, sample_tokens=8
    )
    file = str(directory / "text.txt")
    Path(file).write_text((TEXT + "\n") * 30)
    c.data = DataConfig(stream=StreamConfig(train_files=[file], end_token="</s>"))
    c.training = dataclasses.replace(
        c.training, steps=5, sample_prompts=PROMPTS, checkpoint_interval=3
    )
    return c


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    with jax.set_mesh(tiny.mesh("d=8")), tiny.unproved():
        c = settings(directory)
        train.train(c, load_model(c.model), directory)
    return directory


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- during training -----------------------------------------------------------------------------


@pytest.mark.long
def test_the_last_texts_are_those_of_the_checkpoint(run, tmp_path):
    """On another mesh, too."""
    (tmp_path / "prompts").write_text("\n".join(PROMPTS) + "\n")
    expected = [line for line in read(run / "samples.jsonl") if line["step"] == 5]
    assert all(line.keys() == {"step", "prompt", "text", "ended"} for line in expected)
    mesh = MeshChoice(t=2, d=2, r=2)
    config = Settings(
        str(run), prompts_file=f"{tmp_path}/prompts", max_tokens=8, temperature=0.8, mesh=mesh
    )
    found = generate(config, Console(file=io.StringIO()))
    assert [(line["text"], line["ended"]) for line in found] == [
        (line["text"], line["ended"]) for line in expected
    ]
    events = [line for line in read(run / "metrics.jsonl") if line.get("event") == "sample"]
    assert [event["step"] for event in events] == [0, 0, 2, 2, 4, 4, 5, 5]
    assert events[0]["text"].startswith("It is")


def samples_of(c, directory):
    given = {
        "config": c,
        "step": SimpleNamespace(inputs=()),
        "directory": directory,
        "provenance": {"source": None},
    }
    log = SimpleNamespace(flush=lambda: None)
    run: Any = SimpleNamespace(**given, start=0, done=0, is_over=False, placement=None, log=log)
    samples = Samples()
    samples.check(run)
    return samples


def test_a_sample_that_fails_is_one_warning(tmp_path, capsys, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("as a model may that trains")

    sampler = "shardwright.sampling.samples.Sampler"
    monkeypatch.setattr(sampler, lambda *_, **__: SimpleNamespace(generate=fails))
    with jax.set_mesh(tiny.mesh("d=8")):
        samples = samples_of(settings(tmp_path), tmp_path)
        for _ in range(2):
            samples.before(0, SimpleNamespace(weights=None), None)
    assert capsys.readouterr().out.count("WARNING: no samples: ") == 1
    assert not (tmp_path / "samples.jsonl").exists()


# ---- the tool ------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command(run, tmp_path):
    """With a prompt that Hydra's grammar would not take."""
    prompt, output = 'so, "it" is', tmp_path / "texts.jsonl"
    command = [sys.executable, "-m", "tools.generate", f"run={run}", "step=3", f"prompt={prompt}"]
    command += ["max_tokens=3", "samples=2", "top_k=5", "seed=1", "stop=[]"]
    command += [f"output={output}", "mesh.d=8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = read(output)
    found = [(line["prompt"], line["sample"], len(line["ids"])) for line in lines]
    assert found == [(prompt, 0, 3), (prompt, 1, 3)]
    assert bytes(i - 3 for i in lines[0]["prompt_ids"]).decode() == prompt
    assert lines[0]["ids"] != lines[1]["ids"]
    assert f"{prompt}▸" in done.stdout
    assert "\0" not in done.stdout
    assert "6 tokens of 2 texts" in done.stdout
    assert "step 3, mesh r=1 d=8 t=1, f32" in done.stdout


@pytest.mark.long
def test_a_stop_string_ends_a_text_before_it(run):
    """Of several, the first in the text does; the ids end with the token that completed it."""
    of = {"run": str(run), "prompt": "It is", "max_tokens": 40, "stop": [], "seed": 3, "samples": 4}

    def generated(**settings):
        with tiny.unproved():
            return generate(Settings(**of, **settings), Console(file=io.StringIO()))

    texts = generated()
    plain = [c for text in texts for c in text["text"] if c.isascii()]
    ends = [plain[-1], plain[0]]
    assert not any(text["ended"] for text in texts)
    for found, other in zip(generated(stop_strings=ends), texts, strict=True):
        at = [other["text"].index(end) for end in ends if end in other["text"]]
        assert found["ended"] == bool(at)
        assert found["text"] == other["text"][: min(at, default=None)]
        assert found["ids"] == other["ids"][: len(found["ids"])]
        tokens = open_tokenizer("bytes")
        assert not at or any(tokens.decode(found["ids"]).endswith(end) for end in ends)


def test_a_file_of_prompts(tmp_path):
    """Lines are taken as they are; of .jsonl a prompt may have line breaks."""

    def prompts(name, text):
        (tmp_path / name).write_text(text, newline="")
        return read_prompts(Settings("x", prompts_file=str(tmp_path / name)))

    given = ["one", "", " two\n\u2028 ", 'say "so"']
    lines = [json.dumps({"prompt": x, "text": "left out"}, ensure_ascii=False) for x in given]
    assert prompts("a.jsonl", "\n".join(lines) + "\n") == given
    assert prompts("a.txt", 'one\n\n two\r\n{"prompt": 1}') == ["one", "", " two", '{"prompt": 1}']


SIGNS = ["it's, so", '"so"', "back\\", '\\"', 'a\\\\" b', "a\nb", "", "${x}", r"\\${x}", "3"]


@pytest.mark.parametrize("text", SIGNS)
def test_a_prompt_on_the_command_line_is_taken_sign_by_sign(text):
    override = OverridesParser.create().parse_override(quote_prompt(f"prompt={text}"))
    assert OmegaConf.to_object(OmegaConf.create({"value": override.value()}))["value"] == text
    assert quote_prompt("top_k=5") == "top_k=5"


@pytest.mark.parametrize("axis", ["r", "d", "t"])
def test_an_axis_may_take_the_remaining_devices(axis):
    sizes = {"r": 2, "d": 2, "t": 2}
    mesh = MeshChoice(**{**sizes, axis: -1})
    check_ranges("", Settings("runs/a", mesh=mesh))
    assert mesh_for(mesh, tiny.config()).shape == sizes
