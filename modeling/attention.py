"""What `train.attention` computes, causal attention within documents, without its scores of all pairs of positions.

`training.attention` chooses, and `choose` says what `auto` takes:

    einsum      train.attention itself: scores of all pairs of positions, in f32. Alone in having dropout.
    blockwise   online softmax over blocks of keys, in jax.numpy: any device, any float dtype (arXiv 2205.14135; the
                order of the loops is that of arXiv 2307.08691, algorithms 1 and 2). Memory grows linearly with L.
    cudnn       cuDNN's fused kernel, on NVIDIA GPUs; its documents are a mask of L×L entries a row, without heads.

All are per-device code under `typed_shard_map`: each device has whole sequences of its own rows and heads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_extra import save_for_backward
from shardlib.op_checks import varying
from shardlib.shardtypes import dtype_name, i32, typed
from shardlib.values import stage_axes, target_device

act = dtype_name("act")

PATHS = ("auto", "einsum", "blockwise", "cudnn")
"""What `training.attention` may be."""
BLOCKS = {"cpu": 128}
"""Positions in a block of `blockwise`, at most, by platform: docs/performance.md has the measurements."""
BLOCK = 512
"""The same where BLOCKS names none. Of other platforms none was measured: blocks that fill a large device."""
CUDNN_UP_TO = 16384
"""The longest sequences, in tokens, for which `auto` takes cudnn with a mask of documents, which has their square in
entries: the mask, and the gradient of it that cuDNN makes, then take 1 GiB a row."""


# ---- which one --------------------------------------------------------------------------------------------------


def choose(
    path: str,
    length: int,
    d_head: int,
    dtype: Any,
    dropout: bool,
    device: jax.Device | None = None,
    masked: bool = True,
) -> tuple[str, str]:
    """What `training.attention: path` runs, one of PATHS without auto; and why, in words, if `path` is auto.

    Args:
        length: tokens in a sequence.
        d_head: entries of a head.
        dtype: of queries, keys and values.
        dropout: whether attention weights have dropout.
        device: one of those that will run it; None: as the mesh in force says.
        masked: whether a row may have several documents, as it may with training.document_mask.

    Raises:
        ValueError: `path` cannot do it.
    """
    device = device or target_device()
    refusals = {"einsum": None, "blockwise": "it has no dropout" if dropout else None}
    refusals["cudnn"] = _cudnn_refuses(length, d_head, jnp.dtype(dtype), dropout, device)
    if path != "auto":
        if refusals[path]:
            raise ValueError(
                f"training.attention is {path}, which cannot do this: {refusals[path]}. Choose auto, which takes what "
                "can, or einsum, which can do everything."
            )
        return path, ""
    if not refusals["cudnn"] and not masked:
        return "cudnn", "an NVIDIA GPU, no mask of documents"
    if not refusals["cudnn"] and length <= CUDNN_UP_TO:
        return "cudnn", f"an NVIDIA GPU, at most {CUDNN_UP_TO} tokens"
    if refusals["blockwise"]:
        return "einsum", "dropout"
    block = BLOCKS.get(device.platform, BLOCK)
    if length <= block:
        return "einsum", f"one block of {block} tokens; no cudnn: {refusals['cudnn']}"
    why = refusals["cudnn"] or f"its mask of {length} × {length} is large"
    return "blockwise", f"blocks of {block} tokens; no cudnn: {why}"


def describe(training: Any, model: Any, dtype: Any, device: jax.Device) -> str:
    """Which path the steps of a run take, and why, for its TrainingConfig and ModelConfig. Raises as `choose` does.

    `dtype`: of the computation.
    """
    dropout = bool(getattr(model, "dropout", 0))
    masked = training.document_mask
    path, why = choose(training.attention, training.seq_len, model.d_head, dtype, dropout, device, masked)
    return f"{path} (auto: {why})" if why else path


def _cudnn_refuses(length: int, d_head: int, dtype: Any, dropout: bool, device: jax.Device) -> str | None:
    """Why cuDNN's kernel cannot do this, or None. What it can is what jax.nn.dot_product_attention checks."""
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        return f"{device.device_kind} is no NVIDIA GPU"
    if dropout:
        return "it has no dropout here"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bf16, not {dtype.name}"
    largest = 256 if float(getattr(device, "compute_capability", 9)) >= 9 else 128  # an abstract device does not tell
    if d_head % 8 or d_head > largest:
        return f"heads of {d_head} entries; it takes multiples of 8 up to {largest}"
    return f"an odd number of tokens, {length}" if length % 2 else None


def run(path: str, q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array, masked: bool) -> jax.Array:
    """The path blockwise or cudnn; `masked`: whether there may be several documents in a sequence."""
    return blockwise(q, k, v, document) if path == "blockwise" else cudnn(q, k, v, document, masked)


# ---- cuDNN ------------------------------------------------------------------------------------------------------


@typed
def cudnn(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d L K/t D"],
    v: act["B/r/d L K/t D"],
    document: i32["B/r/d L"],
    masked: bool = True,
) -> act["B/r/d L K/t Q D"]:
    """train.attention by cuDNN's kernel, without dropout. Causal blocks are skipped; those of other documents are not.

    JAX's public function takes documents as a mask only, [B, 1, L, L]: one for all heads and layers, but quadratic.
    `masked`: whether there may be several documents in a sequence; otherwise there is no mask.
    """
    b, l, k_heads, q_heads, d = q.shape
    mask = document[:, None, :, None] == document[:, None, None, :] if masked else None
    out = jax.nn.dot_product_attention(
        q.reshape(b, l, k_heads * q_heads, d), k, v, mask=mask, is_causal=True, implementation="cudnn"
    )
    return out.reshape(q.shape)


# ---- by blocks --------------------------------------------------------------------------------------------------


@typed
def blockwise(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d L K/t D"],
    v: act["B/r/d L K/t D"],
    document: i32["B/r/d L"],
    block: int | None = None,
) -> act["B/r/d L K/t Q D"]:
    """train.attention by blocks of `block` positions at most (None: as BLOCKS says), without dropout.

    Sums and softmax are in f32 at least. `document` must not decrease along L: a block of keys that ends before the
    documents of a block of queries begin, in all rows, is skipped, as are those behind the queries.
    """
    # JAX wants a gradient to vary over the very axes that its value does, and from here on everything varies alike.
    axes = {axis for x in (q, k, v, document) for axis in jax.typeof(x).manual_axis_type.varying}
    q, k, v, document = (varying(x, axes | set(stage_axes())) for x in (q, k, v, document))
    length = q.shape[1]
    blocks = -(-length // (block or BLOCKS.get(target_device().platform, BLOCK)))
    padding = -length % blocks
    # Behind all else, so that only padding sees it; each position sees itself, so that no softmax is over nothing.
    pad = lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return _blockwise(blocks, pad(q), pad(k), pad(v), pad(document))[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(blocks: int, q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array) -> jax.Array:
    return _forward(blocks, q, k, v, document)[0]


def _blockwise_forward(blocks, q, k, v, document):
    out, log_normalizer = _forward(blocks, q, k, v, document)
    # Both are what the backward pass cannot do without; unmarked, a checkpointed layer would compute them again.
    out, log_normalizer = save_for_backward(out), save_for_backward(log_normalizer)
    return out, (q, k, v, document, out, log_normalizer)


def _cut(x: jax.Array, blocks: int) -> jax.Array:
    """[B, L, K, …, D] in blocks: [blocks, B, K, …, L / blocks, D]."""
    x = x.reshape(x.shape[0], blocks, -1, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)


def _join(x: jax.Array) -> jax.Array:
    """What `_cut` cut."""
    x = jnp.moveaxis(jnp.moveaxis(x, -2, 2), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _first_blocks(document: jax.Array, blocks: int) -> jax.Array:
    """i32[blocks]: the first block of keys that some query of each block sees, in some row."""
    place = jnp.arange(document.shape[1], dtype=jnp.int32)
    begins = jnp.pad(document[:, 1:] != document[:, :-1], ((0, 0), (1, 0)))
    start = lax.cummax(jnp.where(begins, place, 0), axis=1)
    size = document.shape[1] // blocks
    return jnp.min(start[:, ::size], axis=0) // size


def _scores(q, k, q_document, k_document, i, j) -> jax.Array:
    """[B, K, Q, l, s], of the block i of queries and j of keys: q·k/√D, -inf where a query does not see a key."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bkqld,bksd->bkqls", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    size = jnp.arange(q.shape[-2])
    causal = i * q.shape[-2] + size[:, None] >= j * q.shape[-2] + size[None, :]
    visible = causal & (q_document[:, :, None] == k_document[:, None, :])
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _forward(blocks: int, q, k, v, document) -> tuple[jax.Array, jax.Array]:
    """The result, [B, L, K, Q, D], and the log of the softmax's normalizer, [blocks, B, K, Q, L / blocks]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    first = _first_blocks(document, blocks)
    documents = document.reshape(len(document), blocks, -1).swapaxes(0, 1)
    queries, keys, values = _cut(q, blocks), _cut(k, blocks), _cut(v, blocks)

    def of_queries(of_block):
        i, first, q, q_document = of_block

        def step(j, carry):
            out, peak, total = carry
            scores = _scores(q, keys[j], q_document, documents[j], i, j)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights, scale = jnp.exp(scores - new_peak[..., None]), jnp.exp(peak - new_peak)
            more = jnp.einsum("bkqls,bksd->bkqld", weights.astype(v.dtype), values[j], preferred_element_type=wide)
            return out * scale[..., None] + more, new_peak, total * scale + jnp.sum(weights, axis=-1)

        # Finite, so that -inf of a row that sees nothing in a block is 0 behind the exponential, and not NaN.
        lowest = jnp.full_like(q[..., 0], jnp.finfo(wide).min, wide)
        start = jnp.zeros_like(q, wide), lowest, jnp.zeros_like(lowest)
        out, peak, total = lax.fori_loop(first, i + 1, step, start)
        return (out / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    out, log_normalizer = lax.map(of_queries, (jnp.arange(blocks), first, queries, documents))
    return _join(out), log_normalizer


def _blockwise_backward(blocks: int, saved, g):
    q, k, v, document, out, log_normalizer = saved
    wide = jnp.promote_types(q.dtype, jnp.float32)
    first = _first_blocks(document, blocks)
    documents = document.reshape(len(document), blocks, -1).swapaxes(0, 1)
    queries, keys, values, outs, gs = (_cut(x, blocks) for x in (q, k, v, out, g))
    einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
    add = lambda total, j, x: lax.dynamic_update_index_in_dim(total, total[j] + x, j, 0)

    def of_queries(carry, of_block):
        i, first, q, q_document, out, log_normalizer, g = of_block
        # Σ_s weights·(g·v): what the softmax's normalization takes off the gradient of each score.
        mean = jnp.sum(g.astype(wide) * out.astype(wide), axis=-1)

        def step(j, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(q, keys[j], q_document, documents[j], i, j) - log_normalizer[..., None])
            dv = add(dv, j, einsum("bkqls,bkqld->bksd", weights.astype(v.dtype), g))
            d_weights = einsum("bkqld,bksd->bkqls", g, values[j])
            d_scores = (weights * (d_weights - mean[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
            dk = add(dk, j, einsum("bkqls,bkqld->bksd", d_scores, q))
            return dq + einsum("bkqls,bksd->bkqld", d_scores, keys[j]), dk, dv

        dq, *carry = lax.fori_loop(first, i + 1, step, (jnp.zeros_like(q, wide), *carry))
        return tuple(carry), dq.astype(q.dtype)

    start = jnp.zeros_like(keys, wide), jnp.zeros_like(values, wide)
    per_block = jnp.arange(blocks), first, queries, documents, outs, log_normalizer, gs
    (dk, dv), dq = lax.scan(of_queries, start, per_block)
    return _join(dq), _join(dk).astype(k.dtype), _join(dv).astype(v.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
