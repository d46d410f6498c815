"""The paths that compute attention as the model's Rule says, and which one a step takes.

`training.attention` chooses, and `choose` says what `auto` takes:

    einsum      train.attention itself: scores of all pairs of positions, in f32. Alone in having dropout.
    blockwise   online softmax over blocks of keys, in jax.numpy: any device, any float dtype (modeling/blockwise.py).
                Memory grows linearly with L.
    cudnn       cuDNN's fused kernel, on NVIDIA GPUs, for rules that change no scores. It knows causal and Window; other
                conditions, documents among them, are a mask of L×L entries a row, without heads.

All are per-device code under `typed_shard_map`: each device has whole sequences of its own rows and heads.
"""

from typing import Any

import jax
import jax.numpy as jnp

from modeling.blockwise import BLOCK, BLOCKS, blockwise
from modeling.rules import Places, Rule, Window, causal
from shardlib.shardtypes import dtype_name, typed
from shardlib.values import target_device

act = dtype_name("act")

PATHS = ("auto", "einsum", "blockwise", "cudnn")
"""What `training.attention` may be."""
CUDNN_UP_TO = 16384
"""The longest sequences, in tokens, for which `auto` takes cudnn with a mask of documents, which has their square in
entries: the mask, and the gradient of it that cuDNN makes, then take 1 GiB a row."""


# ---- which one --------------------------------------------------------------------------------------------------


def choose(
    path: str,
    rule: Rule,
    length: int,
    d_head: int,
    dtype: Any,
    dropout: bool = False,
    sinks: bool = False,
    device: jax.Device | None = None,
) -> tuple[str, str]:
    """What `training.attention: path` runs, one of PATHS without auto; and why, in words, if `path` is auto.

    Args:
        rule: who attends to whom.
        length: tokens in a sequence.
        d_head: entries of a head.
        dtype: of queries, keys and values.
        dropout: whether attention weights have dropout.
        sinks: whether the softmax has sinks.
        device: one of those that will run it; None: as the mesh in force says.

    Raises:
        ValueError: `path` cannot do it.
    """
    device = device or target_device()
    refusals = {"einsum": None, "blockwise": "it has no dropout" if dropout else None}
    refusals["cudnn"] = _cudnn_refuses(rule, length, d_head, jnp.dtype(dtype), dropout, sinks, device)
    if path != "auto":
        if refusals[path]:
            raise ValueError(
                f"training.attention is {path}, which cannot do this: {refusals[path]}. Choose auto, which takes what "
                "can, or einsum, which can do everything."
            )
        return path, ""
    if not refusals["cudnn"] and not _masked(rule):
        return "cudnn", "an NVIDIA GPU, no mask"
    if not refusals["cudnn"] and length <= CUDNN_UP_TO:
        return "cudnn", f"an NVIDIA GPU, at most {CUDNN_UP_TO} tokens"
    if refusals["blockwise"]:
        return "einsum", "dropout"
    block = BLOCKS.get(device.platform, BLOCK)
    if length <= block:
        return "einsum", f"one block of {block} tokens; no cudnn: {refusals['cudnn']}"
    why = refusals["cudnn"] or f"its mask of {length} × {length} is large"
    return "blockwise", f"blocks of {block} tokens; no cudnn: {why}"


def _cudnn_refuses(
    rule: Rule, length: int, d_head: int, dtype: Any, dropout: bool, sinks: bool, device: jax.Device
) -> str | None:
    """Why cuDNN's kernel cannot do this, or None. What it can is what jax.nn.dot_product_attention checks."""
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        return f"{device.device_kind} is no NVIDIA GPU"
    if dropout:
        return "it has no dropout here"
    if rule.score or sinks:
        return "it changes no scores, and has no sinks"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bf16, not {dtype.name}"
    largest = 256 if float(getattr(device, "compute_capability", 9)) >= 9 else 128  # an abstract device does not tell
    if d_head % 8 or d_head > largest:
        return f"heads of {d_head} entries; it takes multiples of 8 up to {largest}"
    return f"an odd number of tokens, {length}" if length % 2 else None


def run(
    path: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    rule: Rule,
    learned: tuple = (),
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The path blockwise or cudnn."""
    return blockwise(q, k, v, places, rule, learned, sinks) if path == "blockwise" else cudnn(q, k, v, places, rule)


# ---- cuDNN ------------------------------------------------------------------------------------------------------


@typed
def cudnn(
    q: act["B/r/d L K/t Q D"], k: act["B/r/d L K/t D"], v: act["B/r/d L K/t D"], places: Places, rule: Rule
) -> act["B/r/d L K/t Q D"]:
    """train.attention by cuDNN's kernel, without dropout. Blocks that causal and Window leave out are skipped.

    JAX's public function takes other conditions as a mask only, [B, 1, L, L]: one for all heads, but quadratic.
    """
    b, l, k_heads, q_heads, d = q.shape
    mask = Rule(_masked(rule)).sees(places.as_queries(), places.as_keys())[:, 0] if _masked(rule) else None
    windows = [condition.size for condition in rule.visible if isinstance(condition, Window)]
    out = jax.nn.dot_product_attention(
        q.reshape(b, l, k_heads * q_heads, d),
        k,
        v,
        mask=None if mask is None else jnp.broadcast_to(mask, (b, 1, l, l)),
        scale=rule.scale,
        is_causal=causal in rule.visible,
        local_window_size=(min(windows) - 1, 0) if windows and causal in rule.visible else None,
        implementation="cudnn",
    )
    return out.reshape(q.shape)


def _masked(rule: Rule) -> tuple:
    """The conditions that are a mask to cuDNN: a window is one that it knows where it is causal too."""
    known = lambda condition: condition is causal or (isinstance(condition, Window) and causal in rule.visible)
    return tuple(condition for condition in rule.visible if not known(condition))
