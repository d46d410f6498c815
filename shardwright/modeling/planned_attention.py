"""Stand-ins for attention kernels in a program that is only planned, on devices that need not
exist.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.mesh import stage_axes
from shardlib.op_checks import varying
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.masks import AttentionMask

KERNEL = "attention_kernel"
"""Name of the call that stands for an attention kernel, or for its gradient, in a program that is
only planned."""


def planned_kernel(
    pattern: AttentionMask,
    keys: int,
    path: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: object,
) -> jax.Array:
    """The call that stands for an implementation of attention, for a sequence of `keys` positions.

    `mask` is what it takes besides queries, keys and values.
    """
    return _kernel((pattern.attended(keys) / keys, path), *alike(q, k, v, mask))


def share_of(name: str) -> float:
    """Share of the pairs of queries and keys that are attended to, from the name of the call."""
    return float(name.removeprefix(f"{KERNEL}_"))


def alike(*arrays: object) -> Any:
    """Makes the arrays vary over all axes over which any of them varies, and over those of
    stages.
    """
    axes = {
        axis for x in jax.tree.leaves(arrays) for axis in jax.typeof(x).manual_axis_type.varying
    }
    return varying(arrays, axes | set(stage_axes()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(
    call: tuple[float, str], q: jax.Array, k: jax.Array, v: jax.Array, mask: object
) -> jax.Array:
    return _kernel_forward(call, q, k, v, mask)[0]


def _kernel_forward(
    call: tuple[float, str], q: jax.Array, k: jax.Array, v: jax.Array, mask: object
) -> tuple:
    def results(q, k, v, mask, all):
        out = (
            q
            if q.shape[-1] == v.shape[-1]
            else jnp.broadcast_to(q[..., :1], (*q.shape[:-1], v.shape[-1]))
        )
        return out + all.astype(q.dtype), q[..., 0] + all

    out, normalizer = _called(call[0], results, q, k, v, mask)
    out, normalizer = save_for_backward((out, normalizer))
    return out, (q, k, v, mask, out, normalizer)


def _kernel_backward(call: tuple[float, str], kept: tuple, g: object) -> tuple:
    # Before jax 0.12 cuDNN's kernel also writes the mask's gradient. Nothing reads it; the barrier
    # keeps it traced.
    count = (
        4 if call[1] == "cudnn" and kept[3] is not None and jax.__version_info__ < (0, 12) else 3
    )

    def gradients(*args, all):
        return [x + all.astype(x.dtype) for x in args[:count]]

    # blockwise sums these gradients in f32, in its loops.
    sums = [jnp.zeros_like(x, jnp.float32) for x in kept[1:3]] if call[1] == "blockwise" else []
    return *jax.lax.optimization_barrier(_called(call[0], gradients, *kept, g, *alike(*sums)))[
        :3
    ], None


def _called(share: float, fn: Callable[..., Any], *args: object) -> Any:
    """The results of `fn`; its argument `all` is a number that depends on all of `args`, so that
    JAX drops none.
    """

    def call(*args):
        args = jax.lax.optimization_barrier(args)  # JAX computes nothing of it before the rest
        return fn(*args, all=sum(jnp.float32(jnp.sum(x)) for x in args if x is not None))

    call.__name__ = f"{KERNEL}_{share}"
    return jax.jit(call)(*args)


_kernel.defvjp(_kernel_forward, _kernel_backward)
