"""The op for the parts of a softmax's normalizer: the maximum on all devices, and the sums of exponentials below it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_extra import save_for_backward
from shardlib.escapes import per_device
from shardlib.op_checks import checked_collective, refuse_copy, refuse_in_stage, varying, wrap
from shardlib.parsing import ShardError, sort_axes
from shardlib.values import target_device


def pmax_and_exp_sum(spec, x):
    """(peak, terms): the maximum over the dropped dims, on all their devices, and Σ exp(x − peak) over these dims.

    `B L V/t -> B L +t`: `terms` is a partial sum over the axes of the dropped dims. `peak` counts as a constant, so the
    gradient of log(psum(terms)) + peak, which does not depend on it, is right. A GPU reads `x` once (arXiv 1805.02867,
    algorithm 3), other devices twice.
    """
    with checked_collective("pmax_and_exp_sum", spec, x) as (op, value, _):
        lhs, rhs = op.lhs[0], op.rhs
        dropped = tuple(i for i, dim in enumerate(lhs.dims) if dim not in rhs.dims)
        axes = sort_axes(axis for i in dropped for axis in lhs.dims[i].axes)
        kept = tuple(dim for dim in lhs.dims if dim in rhs.dims)
        if lhs.partial or not dropped or rhs.dims != kept or sort_axes(rhs.partial) != axes:
            raise ShardError(
                f"`{rhs}` is not `{lhs}` with some dims dropped, and a + for each of their axes",
                "keep the other dims and their axes as they are: `B L V/t -> B L +t`",
            )
        refuse_copy(1, x)
        refuse_in_stage(axes)
    label = f"pmax_and_exp_sum({op})"
    if target_device().platform != "gpu":
        peak = save_for_backward(_pmax(jnp.max(lax.stop_gradient(value), axis=dropped), axes))
        terms = jnp.sum(jnp.exp(value - jnp.expand_dims(peak, dropped)), axis=dropped)
        return peak, wrap(varying(terms, axes), rhs.partial, (), label)

    def of_block(value):
        peak, terms = _in_one_pass(dropped, axes, value)
        return lax.stop_gradient(peak), wrap(varying(terms, axes), rhs.partial, (), label)

    peak = " ".join(map(str, rhs.dims))
    return per_device(f"{peak}, {rhs}", of_block, x, reason=f"{label}: how blocks are added up does not matter")


def _pmax(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmax(varying(x, axes), axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_one_pass(dims: tuple[int, ...], axes: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward(dims, axes, x)[0]


def _forward(dims, axes, x):
    lowest = jnp.finfo(x.dtype).min

    def add(left, right):  # (maximum, Σ exp(entry − maximum)) of two parts
        (a, left), (b, right) = left, right
        factor = jnp.exp(-jnp.abs(a - b))
        return jnp.maximum(a, b), jnp.where(a > b, left + right * factor, left * factor + right)

    # Not from −∞, whose difference with itself is not a number.
    parts = jnp.maximum(x, lowest), jnp.ones_like(x)
    largest, terms = lax.reduce(parts, (jnp.asarray(lowest, x.dtype), jnp.zeros((), x.dtype)), add, dims)
    peak = save_for_backward(_pmax(largest, axes))
    return (peak, terms * jnp.exp(largest - peak)), (x, peak)


def _backward(dims, axes, saved, g):
    x, peak = saved
    return (jnp.exp(x - jnp.expand_dims(peak, dims)) * jnp.expand_dims(g[1], dims),)


_in_one_pass.defvjp(_forward, _backward)
