"""Gradient accumulation: the same gradients as the whole batch, in the memory of a part, communicating as it says."""

import jax
import numpy as np
import pytest
import tiny
from compiled import collectives, compile_step

import train
from input_loader import TokenBatch
from shardlib.shardtypes import f32
from training_io.config import check_divides

MESH = "r=2 d=2 t=2"


def loss_and_gradients(batch: TokenBatch, **training):
    c = tiny.config(tiny.model(qk_norm=True), **training)

    def per_device(w: train.Transformer, batch: train.Batch) -> tuple[f32[""], train.Transformer]:
        return tiny.loss_and_gradients(w, batch, c)

    with jax.set_mesh(tiny.mesh(MESH)):
        w = tiny.weights(c.model)
        return jax.tree.map(np.asarray, tiny.per_device(per_device)(w, tiny.place_batch(c, batch)))


@pytest.fixture(scope="module")
def whole_batch():
    return loss_and_gradients(tiny.host_batch())


@pytest.mark.long
@pytest.mark.parametrize(("n", "gather"), [(2, "layer"), (2, "step"), (1, "step")])
def test_gradients_are_those_of_the_whole_batch(whole_batch, n, gather):
    loss, g = loss_and_gradients(tiny.host_batch(), microbatches=n, gather_weights=gather)
    assert loss == pytest.approx(whole_batch[0], rel=1e-6)
    # Rounding, relative to the largest entry: targets are masked unevenly, so the parts do not weigh the same.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())
    jax.tree.map(close, g, whole_batch[1])


def test_weights_gathered_ahead_are_not_gathered_again():
    """With gather_weights=step only t's collectives, for the activations, are left in the loops."""
    found = collectives(compile_step(MESH, microbatches=2, gather_weights="step").as_text())
    assert found["forward"] == {"all-gather": 2, "reduce-scatter": 2}
    assert found["backward"] == {"all-gather": 4, "reduce-scatter": 2}
    # The embeddings' scatter, the last norm's gather, each with its transpose; of the loss, one maximum and three sums.
    assert found["microbatches"] == {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 4}
    weights = len(jax.tree.leaves(train.weight_table(tiny.model())))
    # Outside: each weight's gather and scatter over d, its gradient's sum over r; the targets' count and the norm.
    assert found["outside"] == {"all-gather": weights, "reduce-scatter": weights, "all-reduce": weights + 2}


def test_gradients_are_scattered_in_each_microbatch_otherwise():
    found = collectives(compile_step(MESH, microbatches=2).as_text())
    assert found["forward"] == {"all-gather": 11, "reduce-scatter": 2}
    assert found["backward"] == {"all-gather": 13, "reduce-scatter": 11}
    # But they are summed over r once a step; and XLA takes the three gathers outside of layers out of the loop.
    assert found["outside"] == {"all-reduce": 12 + 2, "all-gather": 3}


@pytest.mark.long
def test_microbatches_take_less_memory():
    whole, parts = (compile_step("d=4 t=2", microbatches=n).memory_analysis() for n in (1, 2))
    assert parts.temp_size_in_bytes < 0.8 * whole.temp_size_in_bytes


def test_microbatches_divide_the_rows_of_a_device():
    c = tiny.config(microbatches=3)
    with pytest.raises(ValueError, match=r"batch_size is 8; .* a multiple of r·d·training\.microbatches = 12\."):
        check_divides(c, {"r": 2, "d": 2, "t": 2})
