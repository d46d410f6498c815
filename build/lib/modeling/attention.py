"""The paths that compute attention by a model's Rule, and the choice of one.

`training.attention` names a path:

    einsum      train.attention: the scores of all pairs of positions, in f32. The only path with dropout.
    blockwise   softmax over one block of keys after another, in jax.numpy: any device, any float dtype
                (modeling/blockwise.py). Its memory grows linearly with L.
    cudnn       cuDNN's fused kernel, on NVIDIA GPUs, for rules that change no scores. It knows the conditions causal
                and Window. Others, such as same_document, become a mask of L×L entries for each sequence.
    auto        one of these, by `choose`.

All are per-device code under `typed_shard_map`: each device has whole sequences, and some of the heads.
"""

from typing import Any

import jax
import jax.numpy as jnp

from modeling.blockwise import BLOCK, BLOCKS, blockwise
from modeling.model import act
from modeling.rules import Places, Rule, Window, causal
from shardlib import shardops
from shardlib.shardtypes import typed
from shardlib.values import target_device

PATHS = ("auto", "einsum", "blockwise", "cudnn")
"""Values of `training.attention`."""
CUDNN_UP_TO = 16384
"""Longest sequence, in tokens, for which `auto` chooses cudnn with a mask of documents. The mask, and its gradient,
which cuDNN computes, then take 1 GiB for each sequence."""


def choose(path: str, rule: Rule, q: Any, dropout: bool = False, sinks: bool = False) -> tuple[str, str]:
    """Path of attention for the setting `path`: one of PATHS other than auto. If `path` is auto, also the reason.

    Args:
        path: one of PATHS.
        rule: who attends to whom.
        q: queries [B, L, K, Q, D], or their shape and dtype.
        dropout: whether attention weights have dropout.
        sinks: whether the softmax has sinks.

    Raises:
        ValueError: `path` cannot compute it.
    """
    device, length = target_device(), q.shape[1]
    refusals = {"einsum": None, "blockwise": "it has no dropout" if dropout else None}
    refusals["cudnn"] = _cudnn_refuses(rule, q, dropout, sinks, device)
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


def _cudnn_refuses(rule: Rule, q: Any, dropout: bool, sinks: bool, device: jax.Device) -> str | None:
    """Reason why cuDNN's kernel cannot compute this, or None. The limits are those of jax.nn.dot_product_attention."""
    length, d_head, dtype = q.shape[1], q.shape[-1], jnp.dtype(q.dtype)
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        return f"{device.device_kind} is not an NVIDIA GPU"
    if dropout:
        return "it has no dropout here"
    if rule.score or sinks:
        return "it changes no scores, and has no sinks"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bf16, not {dtype.name}"
    largest = 256 if float(getattr(device, "compute_capability", 9)) >= 9 else 128  # abstract devices have none
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
    """Attention by the path blockwise or cudnn."""
    return blockwise(q, k, v, places, rule, learned, sinks) if path == "blockwise" else cudnn(q, k, v, places, rule)


@typed
def cudnn(
    q: act["B/r/d L K/t Q D"], k: act["B/r/d L K/t D"], v: act["B/r/d L K/t D"], places: Places, rule: Rule
) -> act["B/r/d L K/t Q D"]:
    """train.attention by cuDNN's kernel, without dropout. It skips the blocks that causal and Window leave out.

    JAX's public function takes other conditions only as a mask [B, 1, L, L], one for all heads.
    """
    b, l = q.shape[:2]
    mask = Rule(_masked(rule)).sees(places.as_queries(), places.as_keys())[:, 0] if _masked(rule) else None
    windows = [condition.size for condition in rule.visible if isinstance(condition, Window)]
    out = jax.nn.dot_product_attention(
        shardops.rearrange("B/r/d L K/t Q D -> B/r/d L (K/t Q) D", q),
        k,
        v,
        mask=None if mask is None else jnp.broadcast_to(mask, (b, 1, l, l)),
        scale=rule.scale,
        is_causal=causal in rule.visible,
        local_window_size=(min(windows) - 1, 0) if windows and causal in rule.visible else None,
        implementation="cudnn",
    )
    return shardops.rearrange("B/r/d L (K/t Q) D -> B/r/d L K/t Q D", out)


def _masked(rule: Rule) -> tuple:
    """Conditions that become a mask for cuDNN, which knows a window only where attention is causal too."""
    known = lambda condition: condition is causal or (isinstance(condition, Window) and causal in rule.visible)
    return tuple(condition for condition in rule.visible if not known(condition))
