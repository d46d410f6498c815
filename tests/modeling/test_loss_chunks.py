"""The loss in chunks of positions: memory, and what is refused.

Its values and gradients: test_oracles.py.
"""

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import shardops
from shardlib.shardtypes import pytree_dataclass
from shardwright.data.loader import batch_shapes
from shardwright.modeling.loss_chunks import sum_in_chunks
from shardwright.modeling.model import Targets
from shardwright.modeling.weights import Weight, act, at_rest, gain
from tests.support import tiny


def logits(chunk: int | None) -> set[int]:
    """Sizes of the arrays with a dim of a device's 80 of the vocabulary, in the steps of training
    and evaluation.
    """
    c = tiny.config(tiny.model(layers=1, vocab=160, d_model=48), microbatches=2, loss_chunk=chunk)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state = jax.eval_shape(lambda: tiny.state(c))
        shapes = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        text = str(tiny.training_step(c).trace(state, shapes, np.int32(0)).jaxpr)
        w, batch = state.weights, tiny.place_batch(c)
        text += str(tiny.evaluation_step(c).trace(w, batch).jaxpr)
    shapes = [list(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]", text)]
    return {math.prod(shape) for shape in shapes if 80 in shape}


@pytest.mark.long
def test_no_array_has_the_logits_of_all_positions():
    """Two microbatches.

    A device has one row and 80 of the vocabulary, and a chunk 4 of 16 positions.
    """
    whole, chunked = logits(None), logits(4)
    assert 16 * 80 in whole, "this test can fail"
    assert 16 * 80 not in chunked
    assert 2 * 16 * 80 not in chunked
    assert 4 * 80 in chunked


@pytree_dataclass
class OneWeight:
    gain: gain["M", act]


def test_gradients_of_weights_are_summed_in_f32():
    """512 chunks with a gradient of 1 each; in bf16 256 + 1 is 256."""

    def gradient(x: act["B/r/d L/t M"], w: OneWeight) -> OneWeight:
        def share(w, x, targets):
            scale = shardops.all_gather("M/t/fsdp -> M", w.gain)
            scaled = shardops.einsum_unreduced("B/r/d P/t M, M -> B/r/d P/t M", x, scale)
            total = shardops.einsum_unreduced("B/r/d P/t M -> +r +d +t", jnp.float32(scaled))
            return shardops.psum("+r +d +t -> +r +d", total)

        table = OneWeight(Weight((1,), "vector"))
        forward = SimpleNamespace(
            read_by_logits=lambda w, x: x,
            training=SimpleNamespace(loss_chunk=1),
            model=SimpleNamespace(table=table),
        )

        def loss(w):
            targets = Targets(jnp.zeros((1, 512), jnp.uint32), jnp.ones((1, 512), bool))
            return shardops.psum(
                "+r +d ->", sum_in_chunks(share, forward, at_rest(w, "compute"), x, targets)
            )

        return jax.grad(lambda w: 2 * loss(w))(w)

    with jax.set_mesh(tiny.mesh("one device")):
        found = tiny.per_device(gradient, act="bfloat16")(
            jnp.ones((1, 512, 1), jnp.bfloat16), OneWeight(jnp.zeros(1))
        )
    assert float(found.gain[0]) == 1024
