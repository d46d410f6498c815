"""Attention on NVIDIA GPUs by a Pallas kernel in Triton that comes with JAX, for causal and same_document.

Its memory grows linearly with L, and documents are no mask of L×L entries. It sums in the same order in each run.
Per-device code under `typed_shard_map`: each device has whole sequences, and some of the heads.
"""

import functools

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import typed
from shardlib.values import target_device
from shardwright.modeling.model import act
from shardwright.modeling.planned_attention import alike
from shardwright.modeling.rules import Places, Rule, causal, same_document
from shardwright.modeling.splash import by_kernel

MULTIPLE, BLOCK = 128, 64
"""Positions in a block of queries of the forward pass, of which sequences are a multiple, and in any other block."""


@typed
def triton(
    q: act["B/r/d/e L K/t Q D"],
    k: act["B/r/d/e L K/t D"],
    v: act["B/r/d/e L K/t D"],
    places: tuple[Places, Places],
    rule: Rule,
) -> act["B/r/d/e L K/t Q D"]:
    """train.attention by JAX's kernel in Triton, without dropout and sinks. L is a multiple of MULTIPLE."""
    out = shardops.per_device(
        "B/r/d/e L H/t D",
        functools.partial(_of_device, rule),
        # JAX requires each gradient to vary over the axes of its value. So here all values vary over the same axes.
        *alike(shardops.rearrange("B/r/d/e L K/t Q D -> B/r/d/e L (K/t Q) D", q), k, v, places[0].document),
        reason=f"the kernel computes each head of each sequence by itself {q.shape[3:]}",
    )
    return shardops.rearrange("B/r/d/e L (K/t Q) D -> B/r/d/e L K/t Q D", out, Q=q.shape[3])


def _of_device(rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array) -> jax.Array:
    # The kernel has as many heads of keys as of queries.
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return by_kernel(functools.partial(_kernel, rule), False, q, k, v, document)


def _kernel(rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array) -> jax.Array:
    # A heavy import, for GPUs alone.
    from jax.experimental.pallas.ops.gpu import attention as kernels

    sizes = dict.fromkeys(("block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), BLOCK)
    return kernels.mha(
        *(q, k, v, document if same_document in rule.visible else None),
        sm_scale=rule.scale_of(q.shape[-1]),
        causal=causal in rule.visible,
        block_sizes=kernels.BlockSizes(block_q=MULTIPLE, **sizes),
        interpret=target_device().platform == "cpu",  # in tests
    )
