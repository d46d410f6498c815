"""The kernels in Pallas, of Triton for GPUs and splash for TPUs, against softmax_attention; a CPU
interprets them.
"""

import functools
import re

import jax
import numpy as np
import pytest

import train
from shardwright.data.loader import batch_shapes
from shardwright.modeling import attention_calls, attention_paths, kernel_checks
from shardwright.modeling.attention_paths import triton
from shardwright.modeling.masks import CAUSAL, AttentionMask, SoftCap, Window, causal
from shardwright.modeling.splash import splash
from tests.support import tiny
from tests.support.gradients import assert_close, with_gradients

KERNELS = {"triton": triton, "splash": splash}
LENGTH = 384  # three blocks of queries; of Triton six of keys
WIDTHS = {"triton": 24, "splash": 16}  # the first is padded to 32
RULES = {
    ("triton", "causal, documents"): CAUSAL,
    ("splash", "window"): AttentionMask((causal, Window(200), Window(130)), scale=0.3),
    ("splash", "soft-cap"): AttentionMask(score_mod=SoftCap(1.5)),
}


def operands(kernel: str) -> list[np.ndarray]:
    """q, k, v, documents, and a gradient of the result, large enough for some weights to be
    near 1.
    """
    rng, kv, queries, width = np.random.default_rng(0), 2, 2, WIDTHS[kernel]
    heads = (kv, queries, width), (kv, width), (kv, width), (kv, queries, width)
    q, k, v, g = (
        1.5 * rng.standard_normal((2, LENGTH, *shape)).astype(np.float32) for shape in heads
    )
    return q, k, v, np.cumsum(rng.random((2, LENGTH)) < 0.02, axis=1, dtype=np.int32), g


@pytest.mark.parametrize(("kernel", "name"), RULES)
def test_it_is_attention(kernel, name):
    given, pattern = operands(kernel), RULES[kernel, name]
    with jax.set_mesh(tiny.mesh("one device")):
        expected = with_gradients(train.softmax_attention, *given, pattern=pattern)
        assert_close(with_gradients(KERNELS[kernel], *given, pattern=pattern), expected, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "width"), [("triton", 28)])
def test_values_may_have_another_size_than_keys(kernel, width):
    """Zeros fill up the smaller ones, and change nothing."""
    q, k, v, document, g = operands(kernel)
    v, g = (np.resize(x, (*x.shape[:-1], width)) for x in (v, g))
    with jax.set_mesh(tiny.mesh("one device")):
        expected = with_gradients(train.softmax_attention, q, k, v, document, g)
        path = functools.partial(attention_paths.run, kernel, block=None)
        assert_close(with_gradients(path, q, k, v, document, g), expected, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_and_sequences_may_be_sharded(kernel):
    """The gradient of each device's block is its own: no sum over others."""
    mesh = jax.make_mesh(
        (1, 2, 2), ("r", "d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 3
    )
    with jax.set_mesh(mesh):
        expected = with_gradients(train.softmax_attention, *operands(kernel), "bfloat16")
        assert_close(with_gradients(KERNELS[kernel], *operands(kernel), "bfloat16"), expected, 2e-2)


NAMES = {
    "triton": (r"mha_(\w+)", ["backward", "forward", "preprocess_backward"]),
    "splash": (r"splash_mha_(\w+?)_segmented", ["dkv", "dq", "fwd"]),
}


@pytest.mark.parametrize("kernel", ["triton", pytest.param("splash", marks=pytest.mark.long)])
def test_the_backward_pass_does_not_repeat_the_kernel_and_no_array_has_all_pairs(
    kernel, monkeypatch
):
    """A layer keeps the result and the normalizer of the softmax, as it is marked, and nothing of
    L×L entries.
    """
    monkeypatch.setattr(attention_paths, "choose", lambda *_: kernel)
    c = tiny.config(tiny.model(layers=2), attention=kernel)
    c.training.seq_len = LENGTH
    with jax.set_mesh(tiny.mesh("one device")):
        state = jax.eval_shape(lambda: tiny.state(c))
        step = tiny.training_step(c).trace(state, batch_shapes(tiny.BATCH, LENGTH, 1), np.int32(0))
    text, (name, each_once) = str(step.jaxpr), NAMES[kernel]
    assert sorted(re.findall(rf"name={name}", text)) == each_once
    assert kernel == "splash" or f"{LENGTH},{LENGTH}" not in text


def doubled(*given):
    return 2 * attend(*given)


attend = train.softmax_attention


@pytest.mark.long
def test_a_kernel_is_compared_with_the_options_of_the_run(monkeypatch):
    """Those of the compiler: with others it could take other kernels than the step."""
    given, jit = [], jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda *f, **options: given.append(options) or jit(*f, **options)
    )
    for module in (attention_calls, attention_paths):
        monkeypatch.setattr(module, "choose", lambda setting, *_: setting)
    c = tiny.config(attention="triton")
    c.training.seq_len = 128
    with jax.set_mesh(tiny.mesh("one device")):
        kernel_checks.check_paths(tiny.step(c), {"xla_cpu_enable_fast_math": False})
        assert {"compiler_options": {"xla_cpu_enable_fast_math": False}} in given
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_not_there"):
            kernel_checks.check_paths(tiny.step(c), {"xla_not_there": 1})
        monkeypatch.setattr(kernel_checks, "_differ", lambda *_: "")
        monkeypatch.setattr(train, "softmax_attention", doubled)
        with pytest.raises(
            ValueError, match=r"attention by triton is not what .* or a gradient differs by 0.5 of"
        ):
            kernel_checks.check_paths(tiny.step_of(tiny.forward(c), 128))
