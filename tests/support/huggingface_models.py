"""Small models that transformers can express, their checkpoints, and rows of whole documents to
compare logits on.
"""

import dataclasses
import importlib.util

import jax
import numpy as np

import train
from shardlib.shardtypes import f32
from shardwright.data.loader import TokenBatch
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import RopeScaling
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.resume import open_run
from shardwright.program.step import trace_step
from shardwright.tools import checkpoint_to_huggingface, huggingface_to_checkpoint
from tests.support import tiny

COMPARES = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
"""Whether exports and imports can be compared with transformers here."""
LENGTH = 96
LLAMA3 = RopeScaling(
    kind="llama3",
    factor=4.0,
    original_length=64,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
)
"""With a base of 100 and heads of 8: a wavelength that is kept, two that are interpolated, and one
that is stretched, on documents longer than original_length."""
CASES = {
    "grouped": {},
    "tied": {"tied_embeddings": True},
    "llama3": {"rope_scaling": LLAMA3},
    "qk_norm": {"qk_norm": True, "norm_epsilon": 1e-3},
    "qk_norm tied llama3": {"qk_norm": True, "tied_embeddings": True, "rope_scaling": LLAMA3},
}


def model(case: str, **changes) -> train.ModelConfig:
    """bos_id is not 0, and heads·d_head not d_model, so that neither is taken for granted."""
    return tiny.model(**{"d_head": 8, "rope_base": 100.0, "bos_id": 3} | CASES[case] | changes)


def weights(c: train.ModelConfig, seed: int = 7) -> train.Transformer:
    """Weights on the mesh in force, drawn without the time to compile that; the norms' differ from
    one.
    """
    rng = np.random.default_rng(seed)

    def draw(weight):
        return rng.normal(weight.mean, weight.std or 0.3, weight.shape).astype(np.float32)

    table = load_model(c).table
    return tiny.place(jax.tree.map(draw, table), type(table))


def settings(c: train.ModelConfig, filespec: str = "unused", **training):
    config = tiny.config(c, **{"seq_len": LENGTH} | training)
    config.data.filespec = filespec
    return config


def save(
    directory, w: train.Transformer, c: train.ModelConfig, step: int = 5, filespec: str = "unused"
) -> str:
    """A run's directory with a checkpoint of these weights, as train.py writes it."""
    metadata = {"config": dataclasses.asdict(settings(c, filespec)), "loader": {}}
    with Checkpointer(directory / "checkpoints") as checkpoints:
        checkpoints.save(step, train.State(w, w, w), metadata)
    return str(directory)


def export(run, output, **settings) -> str:
    """Exports a run; what the tool printed."""
    lines: list[str] = []
    given = {
        "run": str(run),
        "output": str(output),
        "check": COMPARES,
        "trust": True,
        "dtype": "f32",
    } | settings
    checkpoint_to_huggingface.run(checkpoint_to_huggingface.Settings(**given), lines.append)
    return "\n".join(lines)


def read(run) -> tuple:
    """The model section and the weights of the last checkpoint of a run."""
    with jax.set_mesh(tiny.mesh("one device")), open_run(str(run), None, True) as saved:
        step = trace_step(saved.config, load_model(saved.config.model))
        weights = saved.read_weights(step, False, print)
    return saved.config.model, weights


def to_run(model, output, **settings) -> str:
    """Imports a model; what the tool printed."""
    lines: list[str] = []
    given = {"model": str(model), "output": str(output), "check": COMPARES} | settings
    huggingface_to_checkpoint.run(huggingface_to_checkpoint.Settings(**given), lines.append)
    return "\n".join(lines)


def rows(c: train.ModelConfig, seed: int = 0) -> TokenBatch:
    """Each row is one document."""
    is_start = np.zeros((tiny.BATCH, LENGTH), bool)
    is_start[:, 0] = True
    targets = np.random.default_rng(seed).integers(0, c.vocab, is_start.shape).astype(np.uint32)
    return TokenBatch(targets=targets, is_seq_start=is_start, loss_mask=np.ones_like(is_start))


def logits_of(c: train.ModelConfig, **training):
    """A function from weights and a batch to our logits, on the mesh in force."""

    def compute(w: load_model(c).Weights, batch: TokenBatch) -> f32["B/r/d L V/t"]:
        return tiny.logits(w, batch, settings(c, **training))

    compiled = tiny.per_device(compute)
    kind = load_model(c).Weights
    return lambda w, batch: np.asarray(compiled(tiny.place(w, kind), tiny.place(batch, TokenBatch)))
