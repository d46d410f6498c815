"""Evaluation of a checkpoint: the run's own validation, documents against transformers, multiple
choice, lm-eval.
"""

import dataclasses
import importlib
import io
import json
import math
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import train
from shardlib.shardtypes import ShardError
from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import DataConfig
from shardwright.data.text.tokenizers import open_tokenizer
from shardwright.modeling.model import load_model
from shardwright.tools import checkpoint_to_huggingface
from shardwright.tools.evaluate import MeshChoice, OpenRun, Settings, evaluate
from tests.support import tiny

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("not_remembered")]

ROOT = Path(__file__).parents[2]
TEXTS = [f"Document {i}: {'naïve, ' * (7 * i % 13)}{i * i}." for i in range(40)]
"""Some of more than one sequence, none without a character of two bytes beside it."""
QUESTIONS = [
    {
        "context": f"{i} and one is ",
        "choices": [str(i + 1), "ünknown", "not a number at all"],
        "answer": i % 3,
    }
    for i in range(7)
]
SEQ_LEN = 32


def write_dataset(path, texts, append_end=True):
    for split in ("train", "validation"):
        encoded = open_tokenizer("bytes", end_token="</s>" if append_end else None).encode(texts)
        with Writer(str(path), split) as writer:
            writer.append(encoded.ids, encoded.lengths)
            end = {"end_token": "</s>"} if append_end else {}
            writer.attributes.update({"tokenizer": {"kind": "bytes"} | end})
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps on the mesh d=8."""
    directory = tmp_path_factory.mktemp("runs")
    c = tiny.config(tiny.model(vocab=320, layers=1), eval_batches=3, eval_interval=2)
    c.data = DataConfig(filespec=write_dataset(directory / "data.zarr", TEXTS))
    c.training = dataclasses.replace(
        c.training, steps=4, seq_len=SEQ_LEN, checkpoint_interval=2, microbatches=1
    )
    with jax.set_mesh(tiny.mesh("d=8")), tiny.unproved():
        train.train(c, load_model(c.model), directory / "run")
    return directory / "run"


@pytest.fixture
def causal(monkeypatch):
    """Nothing is proved of a model, which takes longest."""
    monkeypatch.setattr("shardwright.tools.evaluate.check_causal", lambda step: "")


def logged(run):
    """The losses of the run's validations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "validation"]


def evaluated(run, **settings):
    return evaluate(Settings(run=str(run), **settings), Console(file=io.StringIO()))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the run's own validation --------------------------------------------------------------------


def test_on_the_mesh_of_the_run_the_loss_is_that_of_its_log(run, tmp_path):
    """Of an earlier checkpoint, printed and written.

    Bytes are those of the tokens evaluated, not of the whole split, of which the validation reads a
    part.
    """
    out, console, event = tmp_path / "result.json", Console(file=io.StringIO()), logged(run)[0]
    evaluate(Settings(run=f"{run}/checkpoints/0000000002", out=str(out)), console)
    found = json.loads(out.read_text())
    assert (found["step"], found["loss"], found["tokens"]) == (2, event["loss"], event["targets"])
    assert f"loss          {found['loss']:.6f}" in console.file.getvalue().splitlines()
    ids = open_tokenizer("bytes", end_token="</s>").encode(TEXTS).ids[: 3 * tiny.BATCH * SEQ_LEN]
    assert found["tokens"] == ids.size
    assert found["bytes"] == (ids > 1).sum()
    assert found["bits_per_byte"] == pytest.approx(
        found["loss"] * ids.size / math.log(2) / found["bytes"]
    )
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


# ---- documents -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(run):
    """The texts, after one that is empty."""
    path = run.parent / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in ["", *TEXTS]))
    return {"data": str(path), "text_field": "body"}


@pytest.fixture(scope="module")
def theirs(run, tmp_path_factory):
    """The exported run: its directory, and a function from tokens, the first of which is only read,
    to their losses.
    """
    torch = pytest.importorskip("torch")  # of Python 3.11 only
    transformers = pytest.importorskip("transformers")
    output = tmp_path_factory.mktemp("exported") / "model"
    given = {"output": str(output), "dtype": "f32", "check": False}
    checkpoint_to_huggingface.run(
        checkpoint_to_huggingface.Settings(str(run), **given), lambda _: None
    )
    llama = transformers.AutoModelForCausalLM.from_pretrained(output)

    def losses(ids) -> np.ndarray:
        ids = torch.tensor(np.asarray(ids, np.int64))
        with torch.no_grad():
            logits = llama(input_ids=ids[None, :-1], use_cache=False).logits[0]
        return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").numpy()

    return output, losses


def encoded(text):
    """With the end token."""
    return [*(byte + 3 for byte in text.encode()), 1]


def cut(ids):
    """A document as it is read: in pieces after bos."""
    return [[0, *ids[i : i + SEQ_LEN]] for i in range(0, len(ids), SEQ_LEN)]


def test_each_document_has_the_loss_that_transformers_computes(run, theirs, file, tmp_path, causal):
    """One without text is left out, and counted in the index."""
    _, losses = theirs
    out = tmp_path / "losses.jsonl"
    found = evaluated(run, **file, out=str(out), mesh=MeshChoice(d=4, t=2))
    *lines, total = read(out)
    assert total == found
    assert [line["index"] for line in lines] == list(range(1, len(TEXTS) + 1))
    for text, line in zip(TEXTS, lines, strict=True):
        ids = encoded(text)
        expected = sum(losses(piece).sum(dtype=np.float64) for piece in cut(ids))
        assert line["loss"] == pytest.approx(expected, rel=1e-5)
        assert (line["tokens"], line["bytes"]) == (len(ids), len(text.encode()))
    assert found["documents"] == len(TEXTS)
    for name in ("tokens", "bytes"):
        assert found[name] == sum(line[name] for line in lines)
    nats = sum(line["loss"] for line in lines)
    assert found["loss"] == pytest.approx(nats / found["tokens"], rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-12)


# ---- lm-eval -------------------------------------------------------------------------------------

TASKS = {
    "choices": """
        output_type: multiple_choice
        doc_to_text: "{{context}}"
        doc_to_choice: choices
        doc_to_target: answer
        metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]""",
    "rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]""",
    "generated": """
        output_type: generate_until
        doc_to_text: "{{context}}"
        doc_to_target: "{{choices[0]}}"
        generation_kwargs: {until: ["z"], max_gen_toks: 8, do_sample: false}
        metric_list: [{metric: exact_match}]""",
}


@pytest.fixture
def tasks(tmp_path):
    """A directory with tasks of lm-eval, and their documents."""
    data = tmp_path / "documents.jsonl"
    lines = [question | {"text": text} for question, text in zip(QUESTIONS, TEXTS, strict=False)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in TASKS.items():
        common = (
            f"task: local_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "
            f"{data}}}}}\n"
        )
        body = "\n".join(line.strip() for line in task.splitlines())
        (tmp_path / f"{name}.yaml").write_text(f"{common}test_split: test\n{body.strip()}\n")
    return tmp_path


@pytest.mark.filterwarnings("default")
def test_lm_eval_gets_the_numbers_of_its_own_model(run, theirs, tasks):
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")
    names = [f"local_{name}" for name in TASKS]
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(tasks))
    options = {"tasks": names, "task_manager": manager, "bootstrap_iters": 0}
    given = {"pretrained": str(theirs[0]), "device": "cpu", "dtype": "float32"}
    given["max_length"] = SEQ_LEN

    def flat(x):
        return np.ravel(np.array(x["resps"], dtype=object)).tolist()

    model = OpenRun(Settings(run=str(run))).language_model()
    found = lm_eval.simple_evaluate(model=model, **options)
    for arguments, compared in (({}, names[::2]), ({"add_bos_token": False}, names[1:2])):
        expected = lm_eval.simple_evaluate(model="hf", model_args=given | arguments, **options)
        for name in compared:
            ours, theirs_ = (each["results"][name] for each in (found, expected))
            for metric, value in theirs_.items():
                if isinstance(value, float):
                    assert ours[metric] == pytest.approx(value, rel=1e-5), (name, metric)
            samples = (each["samples"][name] for each in (found, expected))
            for x, y in zip(*samples, strict=True):
                assert x["arguments"] == y["arguments"]
                for a, b in zip(flat(x), flat(y), strict=True):
                    assert a == (pytest.approx(b, rel=1e-4) if isinstance(b, float) else b)
    command = evaluated(run, tasks=names[:1], task_path=str(tasks))
    assert command["results"][names[0]]["acc,none"] == found["results"][names[0]]["acc,none"]
    with pytest.raises(ValueError, match="lm-eval has no task 'nowhere'"):
        evaluated(run, tasks=["nowhere"], task_path=str(tasks))


# ---- the tool ------------------------------------------------------------------------------------


def test_the_example_of_the_page(run, monkeypatch, causal):
    """docs/evaluation.md, with a harness that only notes what it is asked."""
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    harness = types.ModuleType("lm_eval")
    harness.simple_evaluate = lambda **asked: asked
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setattr(
        "shardwright.tools.evaluate.language_model", lambda scorer, tokenizer, weights: scorer
    )
    names = {}
    exec(code.replace("runs/<name>", str(run)), names)
    assert names["results"]["model"].length == SEQ_LEN
    assert names["results"]["tasks"] == ["hellaswag"]


class WrongOnAMesh(train.Llama):
    """Multiplies by the sequences of the device."""

    def layer(self, x, w, tokens, attention):
        return super().layer(x, w, tokens, attention) * x.shape[0]


def test_another_model_and_one_that_is_wrong_on_the_mesh_are_refused(run, monkeypatch, causal):
    monkeypatch.setattr("shardwright.tools.evaluate.load_model", WrongOnAMesh)
    with pytest.raises(ValueError, match="it computes something else in evaluation"):
        evaluated(run)
    with pytest.raises(ShardError, match=r"test_evaluate\.py:\d+"):
        evaluated(run, other_source=True)
