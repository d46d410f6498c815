"""Attention on TPUs by splash attention, a Pallas kernel that comes with JAX, for the conditions of
masks.py.

Its memory grows linearly with L. It skips blocks that causal and Window exclude, but not those of
other documents. Per-device code under `typed_shard_map`: each device has whole sequences, and some
of the heads.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardlib import shardops
from shardlib.op_checks import varying
from shardlib.planned import target_device
from shardlib.shardtypes import typed
from shardwright.jax_extra import SAVED, save_for_backward
from shardwright.modeling.masks import AttentionMask, Mask, Window, causal, same_document
from shardwright.modeling.model import act
from shardwright.modeling.planned_attention import alike

LANES = 128
"""Sequences and blocks must be multiples of this many positions."""
BLOCK, COMPUTED = 1024, 512
"""Largest number of positions in a block, and of keys in the part of a block that is computed at a
time. Not measured; smaller blocks would read keys and values faster than the memory of a v6e
delivers them."""


@typed
def splash(
    q: act["B/b L K/t Q D"],
    k: act["B/b L K/t D"],
    v: act["B/b L K/t D"],
    mask: Mask,
) -> act["B/b L K/t Q D"]:
    """softmax_attention by splash attention, without dropout, sinks and learned scores.

    L is a multiple of LANES.
    """
    pattern = mask.pattern
    # In f32, because bf16 would round the scale itself.
    scaled = (jnp.float32(q) * pattern.scale_of(q.shape[-1])).astype(q.dtype)
    heads_first = (
        shardops.rearrange("B/b L K/t Q D -> B/b (K/t Q) L D", scaled),
        shardops.rearrange("B/b L K/t D -> B/b K/t L D", k),
        shardops.rearrange("B/b L K/t D -> B/b K/t L D", v),
    )
    # JAX requires each gradient to vary over the axes of its value. So here all values vary over
    # the same axes.
    given = alike(*heads_first, mask.queries.document)
    out = by_kernel(functools.partial(_kernel, pattern), True, *given)
    return shardops.rearrange("B/b (K/t Q) L D -> B/b L K/t Q D", out)


def _kernel(
    pattern: AttentionMask, q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array
) -> jax.Array:
    # A heavy import, for TPUs alone.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, length = q.shape[1:3]
    ahead = 0 if causal in pattern.mask_mod else None
    windows = [
        condition.size - 1 for condition in pattern.mask_mod if isinstance(condition, Window)
    ]
    if windows:
        mask = masks.LocalMask((length, length), (min(windows), ahead), 0)
    else:
        mask = (masks.CausalMask if causal in pattern.mask_mod else masks.FullMask)(
            (length, length)
        )
    block = math.gcd(length, BLOCK)
    part = min(block, COMPUTED)
    kernel: Any = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(block, block, part, block, block, part, block, block),
        attn_logits_soft_cap=pattern.score_mod.cap if pattern.score_mod else None,
        residual_checkpoint_name=SAVED,
        interpret=target_device().platform == "cpu",  # in tests
    )
    segments = kernels.SegmentIds(document, document) if same_document in pattern.mask_mod else None
    return jax.vmap(kernel)(q, k, v, segments)


def _unchecked(fn: Callable[..., Any], *args: object) -> Any:
    """Calls fn(*args) without JAX's check over which axes values vary: the kernel does not state it
    for its results.

    All axes are manual already, so this `shard_map` cuts nothing.
    """

    # Results of operations in there vary over no axes, like the kernel's. Its arguments must be
    # such results too.
    def alike(tree):
        return jax.tree.map(lambda x: jnp.squeeze(jnp.expand_dims(x, 0), 0), tree)

    within = jax.shard_map(
        lambda args: fn(*alike(args)), in_specs=(P(),), out_specs=P(), check_vma=False
    )
    axes = {axis for x in jax.tree.leaves(args) for axis in jax.typeof(x).manual_axis_type.varying}
    return jax.tree.map(lambda x: varying(x, axes), within(args))


# Define the gradient here, since JAX would sum the gradients of values that it takes to be the same
# on all devices.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_kernel(kernel: Callable[..., Any], marks: bool, *given: jax.Array) -> jax.Array:
    """Runs kernel(q, k, v, document) on a device.

    `marks`: it marks what its backward pass needs besides these.
    """
    return _unchecked(kernel, *given)


def _forward(kernel: Callable[..., Any], marks: bool, *given: jax.Array) -> tuple:
    def run(q, k, v, document):
        out, vjp = jax.vjp(lambda q, k, v: kernel(q, k, v, document), q, k, v)

        def is_given(x):
            return any(x is y for y in (q, k, v, document))

        return out, jax.tree.map(lambda x: x if marks or is_given(x) else save_for_backward(x), vjp)

    return _unchecked(run, *given)


def _backward(
    kernel: Callable[..., Any], marks: bool, vjp: Callable[..., Any], g: jax.Array
) -> tuple:
    return *_unchecked(lambda vjp, g: vjp(g), vjp, g), None


by_kernel.defvjp(_forward, _backward)
