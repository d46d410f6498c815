"""Before a run, its steps are proved to compute on their mesh what one device computes; wrong
programs are refused.
"""

import dataclasses
import importlib
import re
import sys
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import train
from shardwright.inspect.soundness import examine
from shardwright.modeling import attention_calls, attention_paths
from shardwright.modeling.model import load_model
from shardwright.program.config import PipelineConfig
from shardwright.program.step import Step, trace_step
from tests.support import tiny
from tests.support.proofs import found_soon
from tests.support.shipped import load

# Name: the mesh, and what is set of training, the model, the optimizer and the pipeline.
SETTINGS = {
    "fp8, gathered once a step": (
        "r=2 d=2 t=2",
        {"fp8": True, "gather_weights": "step", "microbatches": 2, "eval_average": "ema"},
    ),
    "a ring, one document": (
        "r=2 e=2 c=4",
        {"context": "ring", "attention_block": 2, "document_mask": False, "qk_norm": True},
    ),
    "ulysses, the loss in chunks": (
        "d=2 c=2 t=2",
        {"context": "ulysses", "attention": "blockwise", "loss_chunk": 4, "unroll": 3},
    ),
    "gathered positions, tied": (
        "d=2 c=2 t=2",
        {"tied_embeddings": True, "logit_softcap": 5.0, "z_loss": 1e-3, "n_kv": 4, "n_q_per_kv": 6},
    ),
    "four stages": ("d=2 p=4", {"microbatches": 4, "compute_dtype": "bf16", "z_loss": 1e-3}),
    "1f1b over c": ("p=2 c=2", {"context": "ring", "schedule": "1f1b", "microbatches": 4}),
    # Its halves of backward passes hand on values of other types.
    "zb_v": ("d=2 t=2 p=2", {"microbatches": 4, "schedule": "zb_v", "virtual_stages": 2}),
    # A device holds one entry of each: heads, positions, d_ff, vocabulary, sequences.
    "one of each": ("r=2 d=4 t=8", {"seq_len": 8, "d_ff": 8, "vocab": 8, "n_q_per_kv": 1}),
}


def mesh_of(text: str) -> AbstractMesh:
    sizes = {axis: int(n) for axis, n in (word.split("=") for word in text.split())}
    sizes = {"r": 1, "d": 1, "t": 1} | sizes
    types = (AxisType.Explicit,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def with_settings(of: Any, settings: dict) -> Any:
    """A part of the configuration with those of the settings that it has."""
    known = {key: value for key, value in settings.items() if key in of.__dataclass_fields__}
    return dataclasses.replace(of, **known)


def step_of(mesh: str, settings: dict, spec=None) -> Step:
    given = {"microbatches": 2, "layers": 4} | settings if "p=" in mesh else settings
    c = tiny.config(with_settings(tiny.model(), given))
    c.training, c.optimizer = with_settings(c.training, given), with_settings(c.optimizer, given)
    c.pipeline = with_settings(PipelineConfig(), given)
    return trace_step(c, load_model(c.model), mesh_of(mesh), spec=spec or train.SPEC)


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_compute_what_one_device_computes(name):
    found, undecided, *_ = examine(step_of(*SETTINGS[name]))
    assert (found, undecided) == ([], [])


@pytest.mark.long
@pytest.mark.parametrize("name", ["local_test_pipeline", "local_experts"])
def test_a_shipped_configuration_computes_what_one_device_computes(name):
    c = load(name)
    sizes = {axis: 2 if n == -1 else n for axis, n in vars(c.mesh).items() if n != 1}
    mesh = mesh_of(" ".join(f"{axis}={n}" for axis, n in sizes.items()))
    found, undecided, *_ = examine(trace_step(c, load_model(c.model), mesh))
    assert (found, undecided) == ([], [])


@pytest.mark.long
@pytest.mark.parametrize("path", ["cudnn", "splash"])
def test_a_step_with_a_kernel_is_proved(monkeypatch, path):
    """The kernels, which take whole sequences, are not run; cuDNN's is replaced."""
    real = jax.nn.dot_product_attention

    def plain(*args, implementation, **options):
        return real(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    for module in (attention_calls, attention_paths):
        # This device has no kernels.
        monkeypatch.setattr(module, "choose", lambda setting, *_, **__: setting)
    settings = {"context": "ulysses", "attention": path, "seq_len": 128, "layers": 1, "n_kv": 4}
    found, undecided, *_ = examine(step_of("d=2 c=2 t=2", settings))
    assert (found, undecided) == ([], [])


# ---- programs of users ---------------------------------------------------------------------------

HEAD = """
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

import train
from shardlib import shardops
from shardwright.modeling import masks
from shardwright.modeling.settings import ModelConfig
from shardwright.program import stages


def has(axis):
    return axis in jax.sharding.get_abstract_mesh().shape


@functools.cache
def devices():
    return shardops.axis_size("t")


def loss(logits, targets, config):
    return LOSS


class Model(train.Llama):
    mask = masks.AttentionMask(MASK)

    def __init__(self, config):
        super().__init__(config)
        self.devices = devices()

    def embed(self, w, tokens):
        return super().embed(w, tokens) * EMBED

    def layer(self, x, w, tokens, attention):
        def attend(q, k, v, rule):
            return ATTEND

        return super().layer(x, w, tokens, attend)
"""
DEFAULTS = {
    "LOSS": "train.cross_entropy(logits, targets.ids)",
    "MASK": "mask_mod=(masks.causal, masks.same_document)",
    "EMBED": "1",
    "ATTEND": "attention(q, k, v, rule)",
}


def score(text: str) -> dict:
    return {"MASK": f"score_mod=lambda scores, q, k, heads: {text}"}


def rule(changes: str) -> dict:
    return {"ATTEND": f"attention(q, k, v, dataclasses.replace(rule, {changes}))"}


# The mesh, settings, the part of the program that differs, and whether a line of it is named.
BLOCKS, GATHER = ("d=2 t=2", {"attention": "blockwise"}), ("d=2 c=2 t=2", {})
WRONG = {
    "ALiBi by the heads of a device": (
        *BLOCKS,
        score("scores - 2.0 ** (-8.0 * (heads + 1) / heads.size) * (q.index - k.index)"),
    ),
    "the index of a device": ("d=2 t=2", {}, score("scores * (1 + lax.axis_index('t'))")),
    "a window of a device's positions": (
        "d=2 c=2 t=2",
        {"context": "ring"},
        rule("mask_mod=(masks.causal, masks.Window(q[:, :, 0].size // 64))"),
    ),
    "a soft-cap of a device's heads": (*GATHER, rule("score_mod=masks.SoftCap(float(q.shape[2]))")),
    "sinks of a device's heads": (
        "d=2 c=2 t=2",
        {"context": "ulysses"},
        {"ATTEND": "attention(q, k, v, rule, sinks=jnp.float32(q).mean((1, 4)) * 0 + q.shape[2])"},
    ),
    "what a trace left in a cache": ("d=2 t=2", {}, {"LOSS": f"{DEFAULTS['LOSS']} / devices()"}),
    "what the model kept": ("d=2 t=2", {}, {"EMBED": "self.devices"}),
    "whether there is c": (*GATHER, {"EMBED": "(2.0 if has('c') else 1.0)"}),
    "a window if there is c": (
        *GATHER,
        rule("mask_mod=(masks.causal, *[masks.Window(3)] * has('c'))"),
    ),
    "whether there are stages": (
        "p=2 d=2 t=2",
        {},
        {"LOSS": f"{DEFAULTS['LOSS']} * (4.0 if stages.has_stages() else 1.0)"},
    ),
}
CALLED_LATER = (
    "a window of a device's positions",
    "a soft-cap of a device's heads",
    "a window if there is c",
    "whether there are stages",
)
"""Rules that are applied elsewhere: no call leads from the line to the operation."""
RIGHT = {
    "ALiBi": (
        *BLOCKS,
        score("scores - 2.0 ** (-8.0 * (heads + 1) / 16) * (q.index - k.index)"),
    ),
    "a soft-cap and a window in a ring": (
        "d=2 c=2 t=2",
        {"context": "ring"},
        rule("mask_mod=(masks.causal, masks.Window(4)), score_mod=masks.SoftCap(5.0), scale=0.3"),
    ),
}


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Gives what is found in a program, and the number of the line that differs in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def find(mesh: str, settings: dict, changes: dict) -> tuple[str, int]:
        source = HEAD
        for name, text in (DEFAULTS | changes).items():
            source = source.replace(name, text)
        (tmp_path / "of_a_user.py").write_text(source)
        importlib.invalidate_caches()
        (part,) = changes
        line = next(i for i, text in enumerate(HEAD.splitlines(), 1) if part in text)
        settings = settings | {"module": "of_a_user", "layers": 2, "loss": "of_a_user:loss"}
        with jax.set_mesh(tiny.mesh(mesh)):
            return found_soon(step_of(mesh, settings), bool), line

    return find


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x != "whether there is c")) for x in WRONG]
)
def test_a_wrong_program_is_refused_at_its_line(found, name):
    text, line = found(*WRONG[name])
    assert text
    lines = map(int, re.findall(r"of_a_user\.py:(\d+)", text))
    assert (line in lines) == (name not in CALLED_LATER), text
    assert sys.modules["of_a_user"].Model, "the module of the run is in its place again"


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_accepted(found, name):
    assert found(*RIGHT[name])[0] == ""
