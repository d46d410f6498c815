"""Before a run, its steps are proved to compute on their mesh what one device does; wrong
programs are refused.
"""

import dataclasses
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
from shardwright.program.step import NAMES, Step, trace_step
from tests.support import tiny
from tests.support.own_model import imported

# Name: the mesh, and what is set of training, the model, the optimizer and the pipeline.
SETTINGS = {
    "fp8, gathered once a step": (
        "r=2 d=2 t=2",
        {"fp8": True, "gather_weights": "step", "microbatches": 2, "compute_dtype": "bf16"},
    ),
    # Its halves of backward passes hand on values of other types.
    "zb_v": ("d=2 p=2", {"schedule": "zb_v", "virtual_stages": 2}),
    # 1f1b in bf16: test_diloco.py.
}


def found_in(step: Step) -> str:
    """What is found in one of the smaller programs alone, if anything is; else in all of a step."""
    texts = (
        "\n".join(map(str, [*verdict.found, *verdict.undecided]))
        for verdict in (examine(step, names) for names in (("evaluation",), ("start",), NAMES))
    )
    return next(filter(None, texts), "")


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
    found, undecided, *_ = examine(step_of(*SETTINGS[name]), ("training",))
    assert (found, undecided) == ([], [])


# ---- programs of users ---------------------------------------------------------------------------

HEAD = """
import dataclasses
import functools

import jax

import train
from shardlib import shardops
from shardwright.modeling import masks
from shardwright.modeling.settings import ModelConfig


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


# The mesh, settings, and the part of the program that differs.
WRONG = {
    "ALiBi by the heads of a device": (
        "d=2 t=2",
        {"attention": "blockwise"},
        {
            "MASK": "score_mod=lambda scores, q, k, heads: "
            "scores - 2.0 ** (-8.0 * (heads + 1) / heads.size) * (q.index - k.index)"
        },
    ),
    "a window of a device's positions": (
        "d=2 c=2 t=2",
        {"context": "ring"},
        {
            "ATTEND": "attention(q, k, v, dataclasses.replace(rule, mask_mod=(masks.causal, "
            "masks.Window(q[:, :, 0].size // 64))))"
        },
    ),
    "what the model kept": ("d=2 t=2", {}, {"EMBED": "self.devices"}),
    "whether there is c": ("d=2 c=2 t=2", {}, {"EMBED": "(2.0 if has('c') else 1.0)"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x != "whether there is c")) for x in WRONG]
)
def test_a_wrong_program_is_refused_at_its_line(name, tmp_path):
    mesh, settings, changes = WRONG[name]
    source, (part,) = HEAD, changes
    for key, text in (DEFAULTS | changes).items():
        source = source.replace(key, text)
    line = next(i for i, text in enumerate(HEAD.splitlines(), 1) if part in text)
    settings = {"module": "of_a_user", "layers": 2} | settings
    with imported("of_a_user", source, tmp_path), jax.set_mesh(tiny.mesh(mesh)):
        found = found_in(step_of(mesh, settings))
        assert sys.modules["of_a_user"].Model, "the module of the run is in its place again"
    assert line in map(int, re.findall(r"of_a_user\.py:(\d+)", found)), found
