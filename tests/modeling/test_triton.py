"""Attention in Triton for GPUs against train.attention. Pallas interprets the kernel on a CPU."""

import re

import jax
import numpy as np
import pytest
import tiny
from gradients import assert_close, with_gradients

import train
from shardwright.modeling import attention_calls, context
from shardwright.modeling.attention import triton
from shardwright.modeling.masks import CAUSAL, AttentionMask, causal, same_document
from shardwright_data.loader import batch_shapes

ROWS, LENGTH, KV, WIDTH = 2, 384, 2, 24  # three blocks of queries, six of keys; the kernel pads 24 to 32
RULES = {
    "causal, documents": CAUSAL,
    "causal": AttentionMask((causal,), scale=0.3),
    "documents": AttentionMask((same_document,)),
    "everything": AttentionMask(()),
}


def operands(queries: int) -> list[np.ndarray]:
    """q, k, v, documents, and a gradient of the result, large enough for some weights to be near 1."""
    rng = np.random.default_rng(0)
    heads = (KV, queries, WIDTH), (KV, WIDTH), (KV, WIDTH), (KV, queries, WIDTH)
    q, k, v, g = (1.5 * rng.standard_normal((ROWS, LENGTH, *shape)).astype(np.float32) for shape in heads)
    return q, k, v, np.cumsum(rng.random((ROWS, LENGTH)) < 0.02, axis=1, dtype=np.int32), g


@pytest.mark.parametrize(("name", "queries"), [*((name, 2) for name in RULES), ("causal, documents", 1)])
def test_it_is_attention(name, queries):
    with jax.set_mesh(tiny.mesh("one device")):
        expected = with_gradients(train.attention, *operands(queries), pattern=RULES[name])
        assert_close(with_gradients(triton, *operands(queries), pattern=RULES[name]), expected, 1e-5)


@pytest.mark.long
def test_heads_and_sequences_may_be_sharded():
    """The gradient of each device's block is its own: no sum over others."""
    mesh = jax.make_mesh((1, 2, 2), ("r", "d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        expected = with_gradients(train.attention, *operands(2), "bfloat16")
        assert_close(with_gradients(triton, *operands(2), "bfloat16"), expected, 2e-2)


def test_the_backward_pass_does_not_repeat_the_kernel_and_no_array_has_all_pairs(monkeypatch):
    """A layer keeps the result and the normalizer of the softmax, as it is marked, and nothing of L×L entries."""
    monkeypatch.setattr(context, "choose", lambda *_: "triton")
    c = tiny.config(tiny.model(layers=2), attention="triton")
    c.training.seq_len = LENGTH
    with jax.set_mesh(tiny.mesh("one device")):
        state = jax.eval_shape(lambda: tiny.state(c))
        step = tiny.training_step(c).trace(state, batch_shapes(tiny.BATCH, LENGTH, 1), np.int32(0))
    text = str(step.jaxpr)
    assert len(re.findall(r"name=mha_forward", text)) == 1
    assert re.findall(r"mha_backward", text)
    assert f"{LENGTH},{LENGTH}" not in text


def test_the_comparison_has_the_options_of_the_run(monkeypatch):
    """Those of the compiler: with others it could take other kernels than the step."""
    given, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **options: given.append(options) or jit(f, **options))
    c = tiny.config(attention="blockwise")
    with jax.set_mesh(tiny.mesh("one device")):
        attention_calls.check_paths(tiny.step(c), {"xla_cpu_enable_fast_math": False})
    assert {"compiler_options": {"xla_cpu_enable_fast_math": False}} in given
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(jax.errors.JaxRuntimeError, match="xla_not_there"):
        attention_calls.check_paths(tiny.step(c), {"xla_not_there": 1})
