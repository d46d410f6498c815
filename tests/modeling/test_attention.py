"""Attention by blocks, and cuDNN's, against train.softmax_attention; the choice between them."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib.shardtypes import dtype_name
from shardwright.modeling import attention_paths
from shardwright.modeling import blockwise as blockwise_module
from shardwright.modeling.blockwise import blockwise
from shardwright.modeling.masks import CAUSAL, AttentionMask, SoftCap, Window, causal, same_document
from shardwright.modeling.model import Tokens
from tests.support import tiny
from tests.support.gradients import assert_close, with_gradients

act = dtype_name("act")
ROWS, HEADS, WIDTH = 8, 2, 4
GPU = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
A100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")


def documents(length: int, seed: int = 0) -> np.ndarray:
    """i32[ROWS, length]: of few and of many documents; in row 0 one, in row 1 a second at its very
    end.
    """
    rng = np.random.default_rng(seed)
    starts = rng.random((ROWS, length)) < rng.choice([0.05, 0.3], (ROWS, 1))
    starts[0], starts[1] = False, np.arange(length) == length - 1
    return np.cumsum(starts, axis=1, dtype=np.int32)


def operands(length: int, queries: int, seed: int = 0) -> list[np.ndarray]:
    """q, k, v and a gradient of the result, large enough for some weights to be near 1."""
    rng = np.random.default_rng(seed)
    shapes = (queries, WIDTH), (WIDTH,), (WIDTH,), (queries, WIDTH)
    return [
        2 * rng.standard_normal((ROWS, length, HEADS, *shape)).astype(np.float32)
        for shape in shapes
    ]


def in_numpy(q, k, v, document) -> np.ndarray:
    """Causal attention within documents, in f64."""
    q, k, v = map(np.float64, (q, k, v))
    scores = np.einsum("blkqd,bskd->bkqls", q, k) / WIDTH**0.5
    sees = np.tri(document.shape[1], dtype=bool) & (document[:, :, None] == document[:, None, :])
    weights = np.where(sees[:, None, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("bkqls,bskd->blkqd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.quick
@pytest.mark.parametrize(("block", "size"), [(5, 5), (None, 23)])
def test_the_setting_is_the_size_of_the_blocks(block, size, monkeypatch):
    """And changes nothing else: neither einsum nor numpy has blocks."""
    (q, k, v, g), document, sizes = operands(23, 2), documents(23), set()
    scores = blockwise_module._scores

    def note(task, q, keys, *rest):
        return sizes.add((q.shape[3], keys.k.shape[3])) or scores(task, q, keys, *rest)

    monkeypatch.setattr(blockwise_module, "_scores", note)

    def by(path, block=None):
        forward = tiny.forward(tiny.config(attention=path, attention_block=block))

        def tokens(mask):
            return Tokens(None, mask.keys.position, mask.keys.document)

        def attend(q, k, v, mask):
            return forward.attention(tokens(mask))(q, k, v, mask.pattern)

        with jax.set_mesh(tiny.mesh("one device")):
            return with_gradients(attend, q, k, v, document, g)

    found = by("blockwise", block)
    assert_close(found, by("einsum"), 3e-6)
    np.testing.assert_allclose(
        found[0], in_numpy(q, k, v, document), atol=1e-5 * np.abs(v).max(), rtol=0
    )
    assert sizes == {(size, size)}


def test_blocks_that_nobody_sees_are_not_computed():
    """What is in them would be NaN even with weight 0."""
    q, k, v, g = operands(12, 1)
    k[:, :4], v[:, :4] = np.nan, np.nan

    def found(q, k, v, first: int):
        """With the first document of so many positions, and a second one."""
        document = np.int32(np.arange(12) >= first)[None].repeat(ROWS, 0)
        with jax.set_mesh(tiny.mesh("one device")):
            return with_gradients(functools.partial(blockwise, block=4), q, k, v, document, g)

    early = found(q[:, ::-1], k[:, ::-1], v[:, ::-1], 12)[0]
    assert np.isfinite(early[:, :8]).all(), "keys behind a block of queries"
    assert np.isnan(early[:, 8:]).all(), "and those that it sees"
    assert np.isnan(found(q, k, v, 9)[0][:, 8]).all(), "document 0 is seen from position 8"
    assert all(np.isfinite(x[:, 8:]).all() for x in found(q, k, v, 8)), "keys of documents before"


@pytest.fixture
def asked(monkeypatch):
    """What cuDNN's kernel is asked for.

    JAX's own implementation is in its place; the kernel is not run.
    """
    real, asked = jax.nn.dot_product_attention, []

    def instead(q, *args, implementation, **options):
        mask, window = options["mask"] is not None, options["local_window_size"]
        asked.append((implementation, options["is_causal"], mask, window, q.shape[-1]))
        return real(q, *args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    return asked


def WINDOW(q, k):
    return q.index - k.index < 5


CUDNN = {  # name: pattern, the same for train.softmax_attention, whether there is a mask, window
    "documents": (CAUSAL, CAUSAL, True, None),
    "window": (
        AttentionMask((causal, Window(5)), None, 0.25),
        AttentionMask((causal, WINDOW), None, 0.25),
        False,
        (4, 0),
    ),
}


@pytest.mark.parametrize("name", CUDNN)
def test_cudnn_is_asked_for_the_same(asked, name):
    """Heads, documents, masks and scale."""
    pattern, by_hand, masked, window = CUDNN[name]
    (q, k, v, g), document = operands(12, 3), documents(12)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        found = with_gradients(attention_paths.cudnn, q, k, v, document, g, pattern=pattern)
        expected = with_gradients(train.softmax_attention, q, k, v, document, g, pattern=by_hand)
    assert_close(found, expected, 1e-5)
    assert asked == [("cudnn", True, masked, window, WIDTH)]


# ---- the choice ----------------------------------------------------------------------------------


def asking(length: int = 64, d_head: int = 64, dtype=jnp.bfloat16, **options) -> dict:
    """Arguments of attention_paths.choose for such queries."""
    return {
        "pattern": CAUSAL,
        "q": jax.ShapeDtypeStruct((1, length, 2, 2, d_head), dtype),
        **options,
    }


@pytest.mark.parametrize(
    ("device", "length", "changes", "expected"),
    [
        (A100, 65536, {}, "triton"),
        (GPU, 1000, {}, "blockwise"),
        (GPU, 1024, {"pattern": AttentionMask((*CAUSAL.mask_mod, Window(9)))}, "blockwise"),
        (GPU, 65536, {"pattern": AttentionMask((causal, Window(9)))}, "cudnn"),
        (GPU, 1024, {"sinks": True}, "blockwise"),
        (GPU, 1024, {"dropout": True}, "einsum"),
        (
            TPU,
            32768,
            {"pattern": AttentionMask((Window(9), same_document), SoftCap(30.0)), "d_head": 60},
            "splash",
        ),
        (CPU, 128, {}, "einsum"),
        (CPU, 129, {}, "blockwise"),
    ],
)
def test_auto_takes_what_can_do_it(monkeypatch, device, length, changes, expected):
    """Where a mask has a gradient: before jax 0.12."""
    monkeypatch.setattr(attention_paths, "target_device", lambda: device)
    monkeypatch.setattr(attention_paths, "MASKED_UP_TO", 0)
    asked = asking(length=length, **changes)
    path = attention_paths.choose("auto", **asked)
    assert path == expected
    assert attention_paths.choose(path, **asked) == path, "and what it takes can be asked for"


def test_kernels_that_count_from_0_take_no_part_of_the_queries(monkeypatch):
    monkeypatch.setattr(attention_paths, "target_device", lambda: GPU)
    q = jax.ShapeDtypeStruct((1, 1024, 2, 2, 64), jnp.bfloat16)
    for kernel, pattern in (("triton", CAUSAL), ("cudnn", CAUSAL.without(same_document))):
        assert attention_paths.choose("auto", pattern, q) == kernel
        assert attention_paths.choose("auto", pattern, q, keys=2048) == "blockwise"
        with pytest.raises(ValueError, match=f"is {kernel}, .*: 1024 queries of 2048 positions"):
            attention_paths.choose(kernel, pattern, q, keys=2048)
