"""Gradient accumulation: the same gradients as the whole batch, in the memory of a part,
communicating as it says.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.pipeline import run_schedule
from shardlib.placement import LayerPlacement
from shardlib.schedules import in_a_ring, schedule_of
from shardlib.shardtypes import Array, f64, pytree_dataclass, typed_shard_map
from shardlib.tick_tables import tick_table
from shardwright.data.loader import DataConfig, FlatTokensLoader
from tests.support import tiny
from tests.support.step_text import collectives, compile_step


@pytree_dataclass
class Layers:
    layers: Array["layers/p", f64["L"]]


def sum_of_squares(weights, targets):
    """Σ s² over the microbatches, s the mean of tanh(w₃ … tanh(w₀ x)) over all of one; and its
    gradients. In numpy.
    """
    loss, gradients = 0.0, np.zeros_like(weights)
    for x in targets / 1280:
        inputs = [x]
        for w in weights:
            inputs.append(np.tanh(w * inputs[-1]))
        y = inputs.pop()
        loss += y.mean() ** 2
        g = np.full_like(y, 2 * y.mean() / y.size)
        for i in reversed(range(len(weights))):
            g = g * (1 - y**2)
            y = inputs.pop()
            gradients[i] += np.sum(g * y, 0)
            g = g * weights[i]
    return loss, gradients


@pytest.mark.parametrize(
    ("mesh", "m", "schedule"),
    [
        ("r=2 d=2 t=2", 1, ""),
        ("d=8", 3, ""),
        ("p=2 r=2 d=2", 1, "interleaved_1f1b"),
        ("p=2 r=2 d=2", 6, "zb_h1"),
        ("p=4", 6, "1f1b"),
    ],
)
def test_a_loss_that_is_not_linear_over_a_microbatch(mesh, m, schedule, monkeypatch):
    """From the loader to the gradients, in f64: it depends on which sequences are in a microbatch
    together.
    """
    mesh = tiny.mesh(mesh)
    p = mesh.shape.get("p", 1)
    placement = LayerPlacement(in_a_ring(p, 1), 4 // p)
    table = tick_table(schedule_of(schedule or "gpipe")(p, m, 1))
    config = DataConfig(filespec=str(Path(__file__).parents[2] / "synthetic_dataset.zarr"))

    def layers(w, x, *_):
        for i in range(4 // p):
            row = jax.tree.map(lambda copy, i=i: copy[i], w)
            x = jnp.tanh(shardops.einsum_unreduced("L, B/r/d L -> B/r/d L", row, x))
        return x, LayerAux()

    def last(w, y, batch):
        size = y.size * shardops.axis_size("r") * shardops.axis_size("d")
        return (
            shardops.psum("+r +d ->", shardops.einsum_unreduced("B/r/d L -> +r +d", y)) ** 2
            / size**2
        )

    def first(w, batch):
        return jnp.float64(batch.targets) / 1280

    parts = SimpleNamespace(first=first, layers=layers, last=last)

    def one(w, batch):
        return last(w, layers(w.layers, first(w, batch))[0], batch)

    def microbatch_loss(w, batch, seeds, forward):
        return one(w, batch), {}

    def gatherable(self, w):
        """The weights are not sharded; the step makes them copies over r where it adds up
        gradients.
        """
        return shardops.replicate("... -> ... *d" if m > 1 else "... -> ... *r *d", w)

    monkeypatch.setattr(train.Forward, "gatherable", gatherable)
    monkeypatch.setattr(train, "microbatch_loss", microbatch_loss)
    monkeypatch.setattr(train, "head_loss", lambda w, x, batch, forward: one(w, batch))
    c = tiny.config(microbatches=m, gather_weights="layer")
    forward = train.Forward(
        SimpleNamespace(config=None, Weights=Layers, table=Layers(None)), c.training, None
    )

    @typed_shard_map
    def step(w: Layers, batch: train.Batch) -> tuple[f64[""], Layers]:
        if p == 1:
            return inspect.unwrap(train.loss_and_gradients)(w, batch, None, c, forward)[:2]
        copies, reduced = jax.vjp(lambda w: shardops.replicate("... -> ... *r *d", w), w)
        loss, g, _ = run_schedule(parts, placement, table, copies, (batch,))
        return shardops.psum("+p ->", loss), reduced(g)[0]

    weights = np.random.default_rng(0).standard_normal((4, 16))
    with jax.enable_x64(True), jax.set_mesh(mesh):
        loader = FlatTokensLoader(config, "train", 48, 16, microbatches=m)
        loss, g = jax.jit(step)(tiny.place(Layers(weights), Layers), loader.load(3))
        rows = loader.sequences(3, np.arange(48)).targets.astype(np.float64)
    expected, gradients = sum_of_squares(weights, rows.reshape(m, 48 // m, 16))
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    np.testing.assert_allclose(g.layers, gradients, rtol=1e-10, atol=1e-14)
    another, _ = sum_of_squares(weights, rows.reshape(48 // m, m, 16).swapaxes(0, 1))
    assert m == 1 or abs(another - expected) > 1e-4 * expected, (
        "other sequences together give another loss"
    )


@pytest.mark.long
def test_weights_are_gathered_once_a_step():
    """Only t's collectives, for the activations, are left in the loops.

    In a microbatch: the embeddings' scatter, the last norm's gather, each with its transpose; of
    the loss, one maximum and three sums. Outside: each weight's gather and scatter over d, its
    gradient's sum over r; the targets' count and the norm.
    """
    weights = len(jax.tree.leaves(train.Llama(tiny.model()).table))
    expected = {
        "forward": {"all-gather": 2, "reduce-scatter": 2},
        "backward": {"all-gather": 4, "reduce-scatter": 2},
        "microbatches": {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 4},
        "outside": {"all-gather": weights, "reduce-scatter": weights, "all-reduce": weights + 2},
    }
    text = compile_step("r=2 d=2 t=2", microbatches=2, gather_weights="step").as_text()
    assert {part: collectives(text)[part] for part in expected} == expected
