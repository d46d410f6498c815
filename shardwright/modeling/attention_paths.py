"""The implementations of attention, each of which follows a model's AttentionMask, and the choice
of one.

`training.attention` names an implementation:

    einsum      softmax_attention of train.py: the scores of all pairs of positions, in f32. The
    only one with dropout. blockwise   softmax over one block of keys after another, in jax.numpy:
    any device, any float dtype
                (shardwright/modeling/blockwise.py). Its memory grows linearly with L.
    cudnn       cuDNN's fused kernel, on NVIDIA GPUs, for masks that do not change scores. It knows
    causal and Window.
                Other conditions, such as same_document, become a mask of L×L entries for each
                sequence.
    triton      JAX's Pallas kernel for NVIDIA GPUs, for causal and same_document. Its memory grows
    linearly with L. splash      JAX's Pallas kernel for TPUs, for the conditions and soft-caps of
    shardwright/modeling/masks.py
                (shardwright/modeling/splash.py).
    auto        one of these, by `choose`.

All are per-device code under `typed_shard_map`: each device has the keys of whole sequences, and
some of the heads. If positions are sharded over c, shardwright/modeling/context.py decides which
queries and keys a device has; its ring is an implementation of its own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.planned import planned, target_device
from shardlib.shardtypes import typed
from shardwright.cluster.devices import Device
from shardwright.modeling.blockwise import BLOCK, BLOCKS, blockwise
from shardwright.modeling.masks import AttentionMask, Mask, SoftCap, Window, causal, same_document
from shardwright.modeling.model import act
from shardwright.modeling.planned_attention import alike, planned_kernel
from shardwright.modeling.splash import LANES, by_kernel, splash

PATHS = ("auto", "einsum", "blockwise", "cudnn", "triton", "splash")
"""Values of `training.attention`."""
KERNELS = {"cudnn": "gpu", "triton": "gpu", "splash": "tpu"}
"""The platform of each implementation that is a kernel for one platform."""
MASKED_UP_TO = 4096 if jax.__version_info__ >= (0, 12) else 0
"""Longest sequence, in tokens, for which `auto` chooses cudnn with a mask: the longest that was
measured. Before jax 0.12 it also computes a gradient of the mask, so it is never chosen."""
MULTIPLE, BLOCK_OF_TRITON = 128, 64
"""Positions in triton's blocks of queries in the forward pass, which must divide sequences, and in
other blocks."""


def choose(
    path: str,
    pattern: AttentionMask,
    q: Any,
    dropout: bool = False,
    sinks: bool = False,
    keys: int | None = None,
    values: int = 0,
) -> str:
    """Chooses the implementation of attention for the setting `path`: one of PATHS other than auto.

    Args:
        path: one of PATHS.
        pattern: the attention mask.
        q: queries [B, L, K, Q, D], or their shape and dtype.
        dropout: True if attention weights have dropout.
        sinks: True if the softmax has sinks.
        keys: number of keys if it differs from that of queries: keys of a whole sequence, for part
            of the queries.
        values: entries of a value if they may be more than those of a query.

    Raises:
        ValueError: `path` cannot compute this.
    """
    device = target_device()
    length = keys or q.shape[1]
    refusals = _refusals(pattern, q, dropout, sinks, device, length, max(q.shape[-1], values))
    if path != "auto":
        if refusals[path]:
            raise ValueError(
                f"training.attention is {path}, which cannot do this: {refusals[path]}. Choose "
                f"auto, which picks one that can, or einsum, which can do everything."
            )
        return path
    masked = _masked(pattern)
    kernels = [
        "splash",
        *(["triton"] if masked else []),
        *(["cudnn"] if not masked or length <= MASKED_UP_TO else []),
    ]
    if kernel := next((kernel for kernel in kernels if not refusals[kernel]), None):
        return kernel
    in_one_block = length <= BLOCKS.get(device.platform, BLOCK)
    return "einsum" if in_one_block or refusals["blockwise"] else "blockwise"


def _refusals(
    pattern: AttentionMask,
    q: jax.Array,
    dropout: bool,
    sinks: bool,
    device: Device,
    length: int,
    d_head: int,
) -> dict[str, str | None]:
    """Why each implementation cannot compute this; None if it can.

    For cuDNN see jax.nn.dot_product_attention.
    """
    dtype = jnp.dtype(q.dtype)
    # From Hopper on, cuDNN takes larger heads. Abstract devices do not say what they are, so JAX
    # assumes older ones.
    capability = float(getattr(device, "compute_capability", 8))
    largest = 256 if capability >= 9 else 128
    is_nvidia = (
        device.platform == "gpu" and device.device_kind.startswith("NVIDIA") and capability >= 8
    )
    not_nvidia = (not is_nvidia, f"{device.device_kind} is not an NVIDIA GPU from Ampere on")
    windows = [f for f in pattern.mask_mod if isinstance(f, Window)]
    is_known = all(f in (causal, same_document, *windows) for f in pattern.mask_mod)
    no_dropout = (dropout, "it has no dropout")
    of_kernels = [
        no_dropout,
        # Their masks compare indices that count queries and keys from 0.
        (
            length != q.shape[1],
            f"{q.shape[1]} queries of {length} positions; it needs queries of all positions",
        ),
        (dtype != jnp.bfloat16, f"it takes bf16, not {dtype.name}"),
    ]
    reasons = {
        "einsum": [],
        "blockwise": [no_dropout],
        "cudnn": [
            not_nvidia,
            *of_kernels,
            (pattern.score_mod or sinks, "it changes no scores, and has no sinks"),
            (
                d_head % 8 or d_head > largest,
                f"heads of {d_head} entries; it takes multiples of 8 up to {largest}",
            ),
            (length % 2, f"an odd number of tokens, {length}"),
        ],
        "triton": [
            not_nvidia,
            *of_kernels,
            (pattern.score_mod or sinks, "it changes no scores, and has no sinks here"),
            (not is_known or windows, "it only knows the conditions causal and same_document"),
            (not 16 <= d_head <= 128, f"heads of {d_head} entries; it takes 16 to 128"),
            (length % MULTIPLE, f"{length} tokens; it takes multiples of {MULTIPLE}"),
        ],
        "splash": [
            (device.platform != "tpu", f"{device.device_kind} is not a TPU"),
            *of_kernels,
            (sinks, "it has no sinks here"),
            (
                pattern.score_mod and not isinstance(pattern.score_mod, SoftCap),
                "it only knows SoftCap as score_mod",
            ),
            (not is_known, "it only knows the conditions causal, same_document and Window"),
            (length % LANES, f"{length} tokens; it takes multiples of {LANES}"),
        ],
    }
    return {
        path: next((why for refuses, why in of_path if refuses), None)
        for path, of_path in reasons.items()
    }


def run(
    path: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, block: int | None
) -> jax.Array:
    """Runs attention by an implementation other than einsum. Arguments as for `blockwise`."""
    if path in KERNELS and q.shape[-1] != v.shape[-1]:
        return _with_zeros(path, q, k, v, mask)
    if planned().kernels_as_calls:
        pairs = _pairs(mask, q) if path == "cudnn" else None
        bias = None if pairs is None else pairs.astype(q.dtype)  # what JAX turns it into
        return planned_kernel(mask.pattern, k.shape[1], path, q, k, v, bias)
    if path == "blockwise":
        return blockwise(q, k, v, mask, block)
    return {"cudnn": cudnn, "triton": triton, "splash": splash}[path](q, k, v, mask)


def _with_zeros(path: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """Runs a kernel, whose queries, keys and values have as many entries, on those that do not:
    zeros fill them up.
    """
    width = max(q.shape[-1], v.shape[-1])

    def filled(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, width - x.shape[-1])])

    pattern = dataclasses.replace(mask.pattern, scale=mask.pattern.scale_of(q.shape[-1]))
    out = run(
        path, filled(q), filled(k), filled(v), dataclasses.replace(mask, pattern=pattern), None
    )
    return out[..., : v.shape[-1]]


@typed
def cudnn(
    q: act["B/b L K/t Q D"], k: act["B/b L K/t D"], v: act["B/b L K/t D"], mask: Mask
) -> act["B/b L K/t Q D"]:
    """softmax_attention by cuDNN's kernel, without dropout.

    It skips blocks that causal and Window exclude.

    JAX's public function takes other conditions only as a mask [B, 1, L, L], the same for all
    heads.
    """
    pattern = mask.pattern
    windows = [condition.size for condition in pattern.mask_mod if isinstance(condition, Window)]
    out = jax.nn.dot_product_attention(
        shardops.rearrange("B/b L K/t Q D -> B/b L (K/t Q) D", q),
        k,
        v,
        mask=_pairs(mask, q),
        scale=pattern.scale,
        is_causal=causal in pattern.mask_mod,
        local_window_size=(min(windows) - 1, 0) if windows and causal in pattern.mask_mod else None,
        implementation="cudnn",
    )
    return shardops.rearrange("B/b L (K/t Q) D -> B/b L K/t Q D", out)


@typed
def triton(
    q: act["B/b L K/t Q D"], k: act["B/b L K/t D"], v: act["B/b L K/t D"], mask: Mask
) -> act["B/b L K/t Q D"]:
    """softmax_attention by JAX's Pallas kernel for GPUs, without dropout.

    It always sums in the same order.
    """
    pattern = mask.pattern

    def attend(q, k, v, document):
        # The kernel needs as many heads of keys as of queries.
        return by_kernel(
            kernel,
            False,
            q,
            *(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v)),
            document,
        )

    def kernel(q, k, v, document):
        # A heavy import, for GPUs alone.
        from jax.experimental.pallas.ops.gpu import attention as kernels

        blocks = dict.fromkeys(
            ("block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), BLOCK_OF_TRITON
        )
        return kernels.mha(
            *(q, k, v, document if same_document in pattern.mask_mod else None),
            sm_scale=pattern.scale_of(q.shape[-1]),
            causal=causal in pattern.mask_mod,
            block_sizes=kernels.BlockSizes(block_q=MULTIPLE, **blocks),
            interpret=target_device().platform == "cpu",  # in tests
        )

    heads = shardops.rearrange("B/b L K/t Q D -> B/b L (K/t Q) D", q)
    # JAX requires each gradient to vary over the axes of its value. So here all values vary over
    # the same axes.
    out = attend(*alike(heads, k, v, mask.queries.document))
    return shardops.rearrange("B/b L (K/t Q) D -> B/b L K/t Q D", out, Q=q.shape[3])


def _masked(pattern: AttentionMask) -> tuple:
    """Conditions that become a mask for cuDNN, which only knows a window if attention is also
    causal.
    """

    def known(condition):
        return condition is causal or (isinstance(condition, Window) and causal in pattern.mask_mod)

    return tuple(condition for condition in pattern.mask_mod if not known(condition))


def _pairs(mask: Mask, q: jax.Array) -> jax.Array | None:
    """The mask that cuDNN gets for the conditions that become one."""
    b, l = q.shape[:2]
    if not _masked(mask.pattern):
        return None
    seen = AttentionMask(_masked(mask.pattern)).sees(mask.queries.as_queries(), mask.keys.as_keys())
    return jnp.broadcast_to(seen[:, 0], (b, 1, l, l))
