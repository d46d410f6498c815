"""Before a run, its steps are proved to compute on their mesh what one device does; wrong
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
from shardwright.modeling.model import load_model
from shardwright.program.config import PipelineConfig
from shardwright.program.step import Step, trace_step
from tests.support import tiny
from tests.support.proofs import found_soon

# Name: the mesh, and what is set of training, the model, the optimizer and the pipeline.
SETTINGS = {
    "fp8, gathered once a step": (
        "r=2 d=2 t=2",
        {"fp8": True, "gather_weights": "step", "microbatches": 2, "compute_dtype": "bf16"},
    ),
    # Its halves of backward passes hand on values of other types.
    "zb_v": ("d=2 p=2", {"schedule": "zb_v", "virtual_stages": 2}),
    # Some casts of their backward passes lose the line that they are of.
    "1f1b in bf16": ("d=2 p=2", {"schedule": "1f1b", "compute_dtype": "bf16"}),
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


# ---- programs of users ---------------------------------------------------------------------------

HEAD = """
import dataclasses
import functools

import jax
import jax.numpy as jnp

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
    "what a trace left in a cache": ("d=2 t=2", {}, {"EMBED": "devices()"}),
    "what the model kept": ("d=2 t=2", {}, {"EMBED": "self.devices"}),
    "whether there is c": (*GATHER, {"EMBED": "(2.0 if has('c') else 1.0)"}),
    "a window if there is c": (
        *GATHER,
        rule("mask_mod=(masks.causal, *[masks.Window(3)] * has('c'))"),
    ),
    "whether there are stages": (
        "p=2 d=2 t=2",
        {},
        {"EMBED": "(4.0 if stages.has_stages() else 1.0)"},
    ),
}
CALLED_LATER = ("a soft-cap of a device's heads", "a window if there is c")
"""Rules that are applied elsewhere: no call leads from the line to the operation."""


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
        settings = {"module": "of_a_user", "layers": 2} | settings
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
