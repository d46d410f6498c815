"""Whole training and evaluation steps of models with other rules of attention, against a dense computation.

Short sequences take the path einsum, long ones blockwise: each rule on either side of the threshold of `choose`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardwright.data.loader import TokenBatch
from shardwright.modeling.attention_calls import describe_attention
from shardwright.modeling.blockwise import BLOCKS
from shardwright.run.step import trace_step
from tests.support import dense, tiny
from tests.support import rule_models as models

ROWS = 4
LENGTHS = {"einsum": 16, "blockwise": BLOCKS["cpu"] + 32}
PLACES = ("one device", "d=2 t=2", "p=2 d=2", "p=2 t=2 in halves")
# A rule on one mesh and one path where that is enough of a look; the others are slow.
QUICK = {
    ("window", "d=2 t=2", "einsum"),
    ("sinks", "d=2 t=2", "blockwise"),
}
ALL = [(name, place, path) for name in models.KINDS for place in PLACES for path in LENGTHS]


def batch(length: int) -> TokenBatch:
    """Some four documents in a sequence."""
    rng = np.random.default_rng(0)
    return TokenBatch(
        targets=rng.integers(0, models.SIZES.vocab, (ROWS, length)).astype(np.uint32),
        is_seq_start=rng.random((ROWS, length)) < 3 / length,
        loss_mask=rng.random((ROWS, length)) < 0.9,
    )


def config(length: int, **training):
    c = tiny.config(models.SIZES, microbatches=2, **training)
    c.training.batch_size, c.training.seq_len = ROWS, length
    return c


@functools.cache
def expected(name: str, length: int) -> tuple:
    """The loss and its gradients, densely."""
    given = batch(length)

    def logits(w):
        return dense.logits(w, dense.tokens_of(given), models.SIZES, **models.DENSE[name])

    def loss(w):
        return dense.cross_entropy(logits(w), given)

    with jax.set_mesh(tiny.mesh("one device")):
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(models.host_weights(name)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "place", "path"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ALL],
)
def test_steps_are_dense(name, place, path):
    """A training step and an evaluation, from the same weights, are what the dense computation says."""
    length = LENGTHS[path]
    c = config(length)
    if "p=" in place:
        c.pipeline.schedule = "zb_h1" if "halves" in place else "interleaved_1f1b"
    model = models.KINDS[name](c.model)
    loss, gradients = expected(name, length)
    with jax.set_mesh(tiny.mesh(place)):
        w, data = models.placed_weights(name), tiny.place_batch(c, batch(length))
        assert all(line.startswith(path) for line in describe_attention(trace_step(c, model)))
        nats, targets = train.make_evaluation_step(c, model)(w, data)

        def zeros():
            return jax.tree.map(jnp.zeros_like, w)

        state = train.State(w, zeros(), zeros())
        state, metrics = train.make_training_step(c, model)(state, data, np.int32(0))
        clipped = min(1, c.optimizer.clip_norm / float(metrics.grad_norm))
        found = jax.tree.map(lambda mu: np.asarray(mu) / (1 - c.optimizer.adam_b1) / clipped, state.adam_mu)
    assert float(metrics.loss) == pytest.approx(float(loss), rel=5e-6)
    assert float(nats / targets) == pytest.approx(float(loss), rel=5e-6)
    for (where, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(gradients), strict=True):
        assert np.abs(b).max() > 0, where
        np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max(), rtol=0, err_msg=jax.tree_util.keystr(where))
