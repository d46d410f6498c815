"""The axes of the current mesh, and contexts in which values may differ along some of them."""

import contextlib
import math
from collections.abc import Iterable, Mapping

import jax

from shardlib.axes import AXIS_ORDER, PIPELINE_AXIS
from shardlib.parsing import ShapeSpec, ShardError, sort_axes
from shardlib.scopes import bound, current_scope


def mesh_axes() -> Mapping[str, int]:
    """Returns the size of each mesh axis, without those of `alone`; {} if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    left_out = current_scope().alone
    return {} if mesh.empty else {a: n for a, n in mesh.shape.items() if a not in left_out}


def on_mesh(spec: ShapeSpec) -> ShapeSpec:
    """Returns `spec` on the current mesh: without the axes of AXIS_ORDER that the mesh lacks.

    Within `alone`, it also lacks the axes of `alone`, and names axes instead of groups: `B/b`
    without r becomes `B/d/e`.
    """
    sizes = mesh_axes()
    left_out = current_scope().alone
    absent = [axis for axis in (*AXIS_ORDER, *left_out) if axis not in sizes]
    spec = spec.without(absent) if sizes and absent else spec
    return spec.spelled_out() if left_out else spec


def vary_over(axis: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which each device of `axis` computes something of its own.

    Inside, every value may differ over the axis, and specs need not mention it. On a mesh without
    the axis nothing changes.

    Args:
        axis: the axis.
    """
    return bound(apart=current_scope().apart | ({axis} & {*mesh_axes()}))


def alone(axis: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which each device of an axis computes as if the mesh lacked the axis.

    Inside, specs are read without the axis, no op communicates over it, and values may differ over
    it. Call `lax.map` inside, over a dim that the axis shards: each device then maps over its own
    rows, and one device over all rows, with the same results.

    >>> @typed
    ... def total(x: f32["L/t"]) -> f32[""]:
    ...     return shardops.psum("+t ->", shardops.einsum_unreduced("L/t -> +t", x))
    >>> @typed_shard_map
    ... def totals(x: f32["R/d L/t"]) -> f32["R/d"]:
    ...     with shardops.alone("d"):
    ...         return lax.map(total, x)
    >>> totals(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [3.0, 7.0]
    """
    apart = current_scope().apart | ({axis} & {*mesh_axes()})
    return bound(apart=apart, alone=current_scope().alone | {axis})


def pipeline_stage() -> contextlib.AbstractContextManager[None]:
    """Returns a context for tracing a task of a pipeline, in which values may differ over p."""
    return vary_over(PIPELINE_AXIS)


def stage_axes() -> tuple[str, ...]:
    """Returns the axes over which any value may vary although its spec does not say so.

    They are those of the enclosing `vary_over` and `alone`: within a task of a pipeline, p.
    """
    return sort_axes(current_scope().apart)


def inside_shard_map() -> bool:
    """Returns True while per-device code is traced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def devices_along(axes: Iterable[str]) -> int:
    """Returns the number of devices along `axes` together.

    Axes of AXIS_ORDER that the mesh lacks count as one device.

    Raises:
        ShardError: the mesh lacks an axis outside AXIS_ORDER, or no mesh is set.
    """
    axes = list(axes)
    sizes = mesh_axes()
    if axes and not sizes:
        raise ShardError("no mesh is set", "run this under `with jax.set_mesh(mesh):`")
    known = {**dict.fromkeys((*AXIS_ORDER, *current_scope().alone), 1), **sizes}
    for axis in axes:
        if axis not in known:
            raise ShardError(
                f"axis {axis} is not an axis of the mesh (the mesh has {', '.join(sizes)})",
                "name one of the mesh's axes, a group (b, fsdp), or give the mesh an axis "
                f"{axis} of one device",
            )
    return math.prod(known[axis] for axis in axes)
