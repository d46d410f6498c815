"""Splash attention for TPUs against train.attention. Pallas interprets the kernel on a CPU."""

import re

import jax
import numpy as np
import pytest
import tiny
from gradients import assert_close, assert_same, loss_and_gradients, with_gradients

import train
from shardlib.shardtypes import dtype_name
from shardwright.modeling import context
from shardwright.modeling import splash as splash_module
from shardwright.modeling.masks import CAUSAL, AttentionMask, SoftCap, Window, causal, same_document
from shardwright.modeling.splash import splash
from shardwright_data.loader import batch_shapes

act = dtype_name("act")
ROWS, LENGTH, KV, QUERIES, WIDTH = 2, 384, 2, 2, 16  # three blocks
RULES = {
    "causal, documents": CAUSAL,
    "causal": AttentionMask((causal,)),
    "window, documents": AttentionMask((*CAUSAL.mask_mod, Window(70))),
    "window": AttentionMask((causal, Window(200), Window(130)), scale=0.3),
    "window to the left alone": AttentionMask((Window(70),)),
    "documents": AttentionMask((same_document,)),
    "everything": AttentionMask(()),
    "soft-cap": AttentionMask(score_mod=SoftCap(1.5)),
}


def operands(seed: int = 0) -> list[np.ndarray]:
    """q, k, v, documents, and a gradient of the result, large enough for some weights to be near 1."""
    rng = np.random.default_rng(seed)
    heads = (KV, QUERIES, WIDTH), (KV, WIDTH), (KV, WIDTH), (KV, QUERIES, WIDTH)
    q, k, v, g = (1.5 * rng.standard_normal((ROWS, LENGTH, *shape)).astype(np.float32) for shape in heads)
    return q, k, v, np.cumsum(rng.random((ROWS, LENGTH)) < 0.02, axis=1, dtype=np.int32), g


QUICK = ("causal, documents", "window", "soft-cap")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in RULES])
def test_it_is_attention(name):
    with jax.set_mesh(tiny.mesh("one device")):
        expected = with_gradients(train.attention, *operands(), pattern=RULES[name])
        assert_close(with_gradients(splash, *operands(), pattern=RULES[name]), expected, 1e-5)


@pytest.mark.long
def test_a_block_may_be_computed_in_parts(monkeypatch):
    monkeypatch.setattr(splash_module, "BLOCK", 2 * LENGTH)
    monkeypatch.setattr(splash_module, "COMPUTED", 128)
    with jax.set_mesh(tiny.mesh("one device")):
        expected = with_gradients(train.attention, *operands())
        assert_close(with_gradients(splash, *operands()), expected, 1e-5)


@pytest.mark.long
def test_heads_and_sequences_may_be_sharded():
    """The gradient of each device's block is its own: no sum over others."""
    mesh = jax.make_mesh((1, 2, 2), ("r", "d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        expected = with_gradients(train.attention, *operands(), "bfloat16")
        assert_close(with_gradients(splash, *operands(), "bfloat16"), expected, 2e-2)


@pytest.mark.long
def test_the_backward_pass_does_not_repeat_the_kernel(monkeypatch):
    """A layer keeps the result and the normalizer of the softmax, as it is marked."""
    monkeypatch.setattr(context, "choose", lambda *_: "splash")
    c = tiny.config(tiny.model(layers=2), attention="splash")
    c.training.seq_len = LENGTH
    with jax.set_mesh(tiny.mesh("one device")):
        state = jax.eval_shape(lambda: tiny.state(c))
        step = tiny.training_step(c).trace(state, batch_shapes(tiny.BATCH, LENGTH, 1), np.int32(0))
    found = re.findall(r"name=splash_mha_(\w+?)_segmented", str(step.jaxpr))
    assert sorted(set(found)) == ["dkv", "dq", "fwd"]
    assert len(found) == 3, found


@pytest.mark.slow
def test_a_step_is_the_same(monkeypatch):
    monkeypatch.setattr(tiny, "LENGTH", 128)
    model = tiny.model(layers=2)
    _, (expected, g) = loss_and_gradients(tiny.config(model, attention="einsum"), tiny.mesh("one device"))
    monkeypatch.setattr(context, "choose", lambda *_: "splash")
    c = tiny.config(model, microbatches=2, attention="splash")
    _, (found, g_found) = loss_and_gradients(c, tiny.mesh("p=2 d=2 t=2"))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert_same(g_found, g, 1e-5)
