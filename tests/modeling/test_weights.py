"""Weights that are declared in one line each: their table and types, against what is written out
and numpy.
"""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardlib.array_types import arrays_in, placeholders
from shardlib.shardtypes import Array, f32, pytree_dataclass
from shardwright.modeling.weights import (
    Weight,
    bias,
    embedding,
    experts,
    gain,
    initialize,
    matrix,
    outside_of_layers,
    table_of,
    unembedding,
)
from tests.support import tiny

pytestmark = pytest.mark.quick


@dataclasses.dataclass
class Sizes:
    """The settings that table_of reads of a ModelConfig."""

    vocab: int = 32
    width: int = 16
    heads: int = 8
    head: int = 8
    hidden: int = 24
    count: int = 4
    layers: int = 6
    expert_share: float = 0.25
    on: bool = True
    off: int = 0
    dims: ClassVar[dict[str, str]] = {
        "V": "vocab",
        "M": "width",
        "K": "heads",
        "D": "head",
        "F": "hidden",
        "E": "count",
    }


@pytree_dataclass
class Layer:
    norm: gain["M"]
    w_q: matrix["M/fsdp -> K/t D"]
    w_kv: matrix["M/fsdp -> 2 K/t D"]
    w_o: matrix["K/t D -> M/fsdp"]
    b_q: bias["K/t D"]
    b_o: bias["M", f32]
    at_rest: bias["E/e F/t"]
    w_up: experts["M/fsdp -> F/t"]
    w_down: experts["F/t -> M/fsdp"]
    router: matrix["M/t/fsdp -> E", f32]
    present: gain["D if on"]
    absent: gain["D if off"]
    also_absent: bias["D if not on"]
    also_present: matrix["M/fsdp -> D/t if not off"]


@pytree_dataclass
class Weights:
    embed: embedding["V/t/p M/fsdp"]
    layers: Array["layers/p", Layer]
    final: gain["M/p"]
    unembed: unembedding["V/t/p M/fsdp"]


@pytree_dataclass
class WrittenLayer:
    norm: f32["M/t/fsdp"]
    w_q: f32["M/fsdp K/t D"]
    w_kv: f32["M/fsdp 2 K/t D"]
    w_o: f32["K/t D M/fsdp"]
    b_q: f32["K/t D/fsdp"]
    b_o: f32["M/t/fsdp"]
    at_rest: f32["E/e F/t/c/d"]
    w_up: f32["E/e M/c/d F/t"]
    w_down: f32["E/e F/t M/c/d"]
    router: f32["M/t/fsdp E"]
    present: f32["D/t/fsdp"] | None
    absent: f32["D/t/fsdp"] | None
    also_absent: f32["D/t/fsdp"] | None
    also_present: f32["M/fsdp D/t"] | None


@pytree_dataclass
class WrittenWeights:
    embed: f32["V/t/p M/fsdp"]
    layers: Array["layers/p", WrittenLayer]
    final: f32["M/t/fsdp/p"]
    unembed: f32["V/t/p M/fsdp"]


def table(c: Sizes | None = None) -> Weights:
    return table_of(Weights, c or Sizes(), lambda fan_in: 3 / fan_in**0.5)


# name: shape without the layers, fan-in or None, mean, numbers of inputs and outputs, share used
STACKED = {
    "norm": ((16,), None, 1.0, 0, 0, 1.0),
    "w_q": ((16, 8, 8), 16, 0.0, 1, 2, 1.0),
    "w_kv": ((16, 2, 8, 8), 16, 0.0, 1, 3, 1.0),
    "w_o": ((8, 8, 16), 64, 0.0, 2, 1, 1.0),
    "b_q": ((8, 8), None, 0.0, 0, 0, 1.0),
    "b_o": ((16,), None, 0.0, 0, 0, 1.0),
    "at_rest": ((4, 24), None, 0.0, 0, 0, 1.0),
    "w_up": ((4, 16, 24), 16, 0.0, 1, 1, 0.25),
    "w_down": ((4, 24, 16), 24, 0.0, 1, 1, 0.25),
    "router": ((16, 4), 16, 0.0, 1, 1, 1.0),
    "present": ((8,), None, 1.0, 0, 0, 1.0),
    "also_present": ((16, 8), 16, 0.0, 1, 1, 1.0),
}


def test_shape_and_initial_values_follow_from_the_declaration():
    def weight(shape, fan_in, mean, inputs, outputs, used):
        kind, std = ("vector", 0.0) if fan_in is None else ("matrix", 3 / fan_in**0.5)
        return Weight((6, *shape), kind, std, mean, inputs, outputs, used)

    layers = table().layers
    assert {name: getattr(layers, name) for name in STACKED} == {
        name: weight(*of) for name, of in STACKED.items()
    }


def test_types_are_those_that_are_written_out():
    """At rest."""
    on = AbstractMesh((2,) * 6, tuple("prdect"), axis_types=(AxisType.Explicit,) * 6)

    def types(kind: type) -> dict:
        found = {path: array for path, array, _ in arrays_in(kind, placeholders(kind))}
        return {path: (array.dtype, array.spec) for path, array in found.items()}

    def used(name: str) -> tuple[str, str]:
        """The dtype in which a weight is used, and its dims when it is gathered ahead."""
        (array,) = (x for path, x, _ in arrays_in(Weights, placeholders(Weights)) if path == name)
        return array.used_dtype.name, str(array.ahead)

    with jax.sharding.use_abstract_mesh(on):
        declared, written = types(Weights), types(WrittenWeights)
        assert set(STACKED) == {name for name, x in vars(table().layers).items() if x is not None}
        assert outside_of_layers(table()) == ["embed", "final", "unembed"]
        assert outside_of_layers(table(), but="embedding") == ["final", "unembed"]
    assert declared == written
    assert len(written) == 17
    assert used("layers.w_q") == ("act", "M K/t D")
    assert used("layers.w_up") == ("act", "E/e M F/t")
    assert used("layers.router") == ("f32", "M/t E")
    assert used("final") == ("f32", "M")


def test_initial_values_have_the_spread_of_their_fan_in():
    """By numpy, of all entries: normal, cut at two of its own deviations."""
    large = Sizes(vocab=1024, width=128, heads=8, head=16, hidden=512)
    with jax.set_mesh(tiny.mesh("one device")):
        made = jax.jit(lambda key: initialize(table(large), key))(jax.random.key(0))
    w = jax.tree.map(np.asarray, made)
    for x, expected in [
        (w.layers.w_q, 128),
        (w.layers.w_o, 128),
        (w.layers.w_down, 512),
        (w.unembed, 128),
    ]:
        assert np.std(x) == pytest.approx(3 / expected**0.5, rel=0.01)
        # std of a normal cut at 2
        assert np.abs(x).max() / np.std(x) == pytest.approx(2 / 0.8796, rel=0.01)
    assert np.std(w.embed) == pytest.approx(1, rel=0.01)
    assert all(np.all(x == 1) for x in (w.layers.norm, w.layers.present, w.final))
    assert all(np.all(x == 0) for x in (w.layers.b_q, w.layers.b_o, w.layers.at_rest))
