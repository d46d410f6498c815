"""The paths that compute attention by a model's Rule, and the choice of one.

`training.attention` names a path:

    einsum      train.attention: the scores of all pairs of positions, in f32. The only path with dropout.
    blockwise   softmax over one block of keys after another, in jax.numpy: any device, any float dtype
                (shardwright/modeling/blockwise.py). Its memory grows linearly with L.
    cudnn       cuDNN's fused kernel, on NVIDIA GPUs, for rules that change no scores. It knows the conditions causal
                and Window. Others, such as same_document, become a mask of L×L entries for each sequence.
    splash      JAX's Pallas kernel for TPUs, for the conditions and soft-caps of shardwright/modeling/rules.py
                (shardwright/modeling/splash.py).
    auto        one of these, by `choose`.

All are per-device code under `typed_shard_map`: each device has whole sequences, and some of the heads.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import typed
from shardlib.values import target_device
from shardwright.modeling.blockwise import BLOCK, BLOCKS, blockwise
from shardwright.modeling.model import act
from shardwright.modeling.rules import Places, Rule, SoftCap, Window, causal, same_document
from shardwright.modeling.splash import LANES, splash

PATHS = ("auto", "einsum", "blockwise", "cudnn", "splash")
"""Values of `training.attention`."""
KERNELS = {"cudnn": "gpu", "splash": "tpu"}
"""Paths that are kernels of one platform, and the platform."""
CUDNN_UP_TO = 32768
"""Longest sequence, in tokens, for which `auto` chooses cudnn with a mask. The mask then takes 2 GiB for each
sequence. So does its gradient, which jax 0.10 has cuDNN compute, and jax 0.12 does not."""


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
    refusals["splash"] = _splash_refuses(rule, q, dropout, sinks, device)
    if path != "auto":
        if refusals[path]:
            raise ValueError(
                f"training.attention is {path}, which cannot do this: {refusals[path]}. Choose auto, which takes what "
                "can, or einsum, which can do everything."
            )
        return path, ""
    if not refusals["splash"]:
        return "splash", "a TPU"
    if not refusals["cudnn"] and not _masked(rule):
        return "cudnn", "an NVIDIA GPU, no mask"
    if not refusals["cudnn"] and length <= CUDNN_UP_TO:
        return "cudnn", f"an NVIDIA GPU, at most {CUDNN_UP_TO} tokens"
    if refusals["blockwise"]:
        return "einsum", "dropout"
    kernel = "splash" if device.platform == "tpu" else "cudnn"
    why = f"no {kernel}: {refusals[kernel] or f'its mask of {length} × {length} is large'}"
    block = BLOCKS.get(device.platform, BLOCK)
    if length <= block:
        return "einsum", f"one block of {block} tokens; {why}"
    return "blockwise", f"blocks of {block} tokens; {why}"


def _cudnn_refuses(rule: Rule, q: Any, dropout: bool, sinks: bool, device: jax.Device) -> str | None:
    """Reason why cuDNN's kernel cannot compute this, or None. The limits are those of jax.nn.dot_product_attention."""
    length, d_head, dtype = q.shape[1], q.shape[-1], jnp.dtype(q.dtype)
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        return f"{device.device_kind} is not an NVIDIA GPU"
    if dropout:
        return "it has no dropout here"
    if rule.score or sinks:
        return "it changes no scores, and has no sinks"
    if dtype != jnp.bfloat16:
        return f"it takes bf16, not {dtype.name}"
    largest = _largest_head(device)
    if d_head % 8 or d_head > largest:
        return f"heads of {d_head} entries; it takes multiples of 8 up to {largest}"
    return f"an odd number of tokens, {length}" if length % 2 else None


def _largest_head(device: jax.Device) -> int:
    """Largest number of entries of a head that cuDNN takes: more from Hopper on.

    An abstract device does not say what it is, and JAX takes it for an older one.
    """
    return 256 if float(getattr(device, "compute_capability", 8)) >= 9 else 128


def _splash_refuses(rule: Rule, q: Any, dropout: bool, sinks: bool, device: jax.Device) -> str | None:
    """Reason why splash attention cannot compute this, or None."""
    length, dtype = q.shape[1], jnp.dtype(q.dtype)
    if device.platform != "tpu":
        return f"{device.device_kind} is not a TPU"
    if dropout:
        return "it has no dropout"
    if sinks:
        return "it has no sinks here"
    if rule.score and not isinstance(rule.score, SoftCap):
        return "of functions of scores, it knows SoftCap alone"
    if not all(f in (causal, same_document) or isinstance(f, Window) for f in rule.visible):
        return "of conditions, it knows causal, same_document and Window alone"
    if dtype != jnp.bfloat16:
        return f"it takes bf16, not {dtype.name}"
    return f"{length} tokens; it takes multiples of {LANES}" if length % LANES else None


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
    """Attention by a path other than einsum."""
    if path == "blockwise":
        return blockwise(q, k, v, places, rule, learned, sinks)
    return {"cudnn": cudnn, "splash": splash}[path](q, k, v, places, rule)


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
