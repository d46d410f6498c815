"""Functions that replace those of program.RECORDED in the copy of the program that tools/verify runs."""

import contextlib
import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_extra
from shardlib import marks, shardops
from shardlib.parsing import PIPELINE_AXIS, parse_op, sort_axes
from shardlib.shardtypes import Scope


@dataclass(frozen=True)
class Site:
    """The place of a value that the program saves with `save_for_backward`."""

    file: str
    line: int
    layers: tuple[int, ...]
    """Turn of each scan around the call, outermost first."""


_RECORDER: contextvars.ContextVar["Recorder | None"] = contextvars.ContextVar("recorder", default=None)


class Recorder:
    """Collects the values that the program saves while JAX traces it, in program order."""

    def __init__(self):
        self.sites: list[Site] = []
        self.values: list[jax.Array] = []
        self.layers: tuple[int, ...] = ()

    def add(self, x: Any, file: str, line: int) -> None:
        """Adds the arrays of `x`, saved at this line."""
        for leaf in jax.tree.leaves(x):
            self.sites.append(Site(file, line, self.layers))
            self.values.append(leaf)


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """While entered, `recorder` gets each value that the program saves; None: values are not recorded."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def save_for_backward(x: Any) -> Any:
    """`jax_extra.save_for_backward`; a Recorder in force gets `x` and the line of the call."""
    if recorder := _RECORDER.get():
        caller = inspect.currentframe().f_back
        recorder.add(x, caller.f_code.co_filename, caller.f_lineno)
    return jax_extra.save_for_backward(x)


def explicit_activation_checkpointing(fn: Callable, **options: Any) -> Callable:
    """`jax_extra.explicit_activation_checkpointing`, without checkpointing while a Recorder is in force."""
    checkpointed = jax_extra.explicit_activation_checkpointing(fn, **options)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (fn if _RECORDER.get() else checkpointed)(*args, **kwargs)

    return call


def scan(f, init, xs=None, length=None, reverse=False, **options):
    """`lax.scan`; if a Recorder is in force and `f` saves something, a Python loop."""
    recorder = _RECORDER.get()
    if recorder is None:
        return lax.scan(f, init, xs, length=length, reverse=reverse, **options)
    count = length if length is not None else jax.tree.leaves(xs)[0].shape[0]
    turn = lambda i: jax.tree.map(lambda x: x[i], xs)
    probe = Recorder()
    with recording(probe):
        jax.eval_shape(f, init, turn(0))
    if not probe.values:
        return lax.scan(f, init, xs, length=length, reverse=reverse, **options)
    carry, outputs, outer = init, {}, recorder.layers
    for i in reversed(range(count)) if reverse else range(count):
        recorder.layers = (*outer, i)
        carry, outputs[i] = f(carry, turn(i))
    recorder.layers = outer
    return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *(outputs[i] for i in range(count)))


# ---- sums in another order ----------------------------------------------------------------------------------------

_BLOCKS: contextvars.ContextVar[dict[str, int]] = contextvars.ContextVar("blocks", default={})  # noqa: B039


@contextlib.contextmanager
def summed_in_blocks(**blocks: int) -> Iterator[None]:
    """On one device, einsum_unreduced works block by block, as the devices of a mesh do: `t=4` is four along t.

    The result of each block is rounded to its dtype before the results are added, or concatenated. In the backward
    pass, so are the parts of a gradient.
    """
    token = _BLOCKS.set(blocks)
    try:
        yield
    finally:
        _BLOCKS.reset(token)


def einsum(spec, *operands, **options):
    """`shardops.einsum_unreduced`, by the blocks of `summed_in_blocks`."""
    blocks, op = _BLOCKS.get(), parse_op(spec)
    counts = {dim.name: math.prod(blocks.get(axis, 1) for axis in dim.axes) for side in op.lhs for dim in side.dims}
    cut = tuple((name, count) for name, count in counts.items() if count > 1)
    if not cut:
        return shardops.einsum_unreduced(spec, *operands, **options)

    def by_blocks(cut, operands):
        if not cut:
            with Scope():  # with the sizes of the blocks
                return shardops.einsum_unreduced(spec, *operands, **options)
        (name, count), *rest = cut
        parts = [by_blocks(rest, [_block(x, s, name, i, count) for x, s in zip(operands, op.lhs, strict=True)])
                 for i in range(count)]  # fmt: skip
        if name in op.rhs.names:
            join = lambda *xs: jnp.concatenate(xs, axis=op.rhs.names.index(name))
        else:
            join = lambda *xs: functools.reduce(jnp.add, xs)
        return jax.tree.map(join, *parts)

    return by_blocks(cut, operands)


def shared_scale(peak: jax.Array, reason: str, spec: str) -> jax.Array:
    """`marks.leave` for the peak of a block that fp8.py scales by: the peak of the blocks of all devices.

    So all meshes round alike.
    """
    axes = jax.typeof(peak).manual_axis_type.varying - {PIPELINE_AXIS}  # its devices are at different stages
    return marks.leave(lax.pmax(peak, sort_axes(axes)) if axes else peak, reason, spec)


def _block(x, spec, name: str, index: int, count: int):
    """Block `index` of `count` along the dim `name` of x, an array or a copy; all of x if its spec has no such dim."""
    if name not in spec.names:
        return x
    axis = spec.names.index(name)
    size = x.shape[axis] // count
    return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, index * size, (index + 1) * size, axis=axis), x)
