"""Evaluation of a checkpoint: the run's own validation, documents against transformers, multiple choice, lm-eval."""

import dataclasses
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from rich.console import Console

import train
from flat_tokens import Writer
from input_loader import DataConfig
from modeling.model import load_model
from text.tokenizers import ByteTokenizer
from tools import checkpoint_to_huggingface
from tools.evaluate import Config, MeshChoice, evaluate, open_run

ROOT = Path(__file__).parents[2]
TEXTS = [f"Document {i}: {'naïve, ' * (7 * i % 13)}{i * i}." for i in range(40)]
"""Some of more than one sequence, none without a character of two bytes beside it."""
QUESTIONS = [
    {"context": f"{i} and one is ", "choices": [str(i + 1), "ünknown", "not a number at all"], "answer": i % 3}
    for i in range(7)
]
SEQ_LEN = 32


def write_dataset(path, texts, append_end=True):
    for split in ("train", "validation"):
        encoded = ByteTokenizer(append_end).encode(texts)
        with Writer(str(path), split) as writer:
            writer.append(encoded.ids, encoded.lengths)
            end = {"end_token": "</s>"} if append_end else {}
            writer.attributes.update({"tokenizer": {"kind": "bytes"} | end, "utf8_bytes": int(encoded.utf8_bytes.sum())})
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps on the mesh d=8, with an average of the weights."""
    directory = tmp_path_factory.mktemp("runs")
    c = tiny.config(tiny.model(vocab=320, layers=1), eval_batches=3, eval_interval=2, ema_decay=0.5)
    c.data = DataConfig(filespec=write_dataset(directory / "data.zarr", TEXTS))
    c.training = dataclasses.replace(c.training, steps=4, seq_len=SEQ_LEN, checkpoint_interval=2, microbatches=1)
    with jax.set_mesh(tiny.mesh("d=8")):
        train.train(c, load_model(c.model), directory / "run")
    return directory / "run"


def logged(run):
    """The losses of the run's validations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "validation"]


def evaluated(run, **settings):
    return evaluate(Config(run=str(run), **settings), Console(file=io.StringIO()))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the run's own validation ---------------------------------------------------------------------------------------


def test_on_the_mesh_of_the_run_the_loss_is_that_of_its_log(run):
    for event, step in zip(logged(run), (2, 4), strict=True):
        found = evaluated(run, step=step)
        assert (found["loss"], found["tokens"]) == (event["loss"], event["targets"])


@pytest.mark.parametrize("mesh", [MeshChoice(t=8), MeshChoice(r=2, d=2, t=2)])
def test_on_other_meshes_it_is_the_same_but_for_rounding(run, mesh):
    found, event = evaluated(run, mesh=mesh), logged(run)[-1]
    assert found["loss"] == pytest.approx(event["loss"], rel=1e-6)
    assert found["tokens"] == event["targets"]
