"""The op rearrange: transposes, splits and merges dims by name, with checks."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import einops
import jax.numpy as jnp

from shardlib.checks import check_divisible
from shardlib.mesh import devices_along
from shardlib.op_checks import (
    cast,
    check_operand,
    checked_op,
    copy_axes,
    parse,
    require_shard_map,
    wrap,
)
from shardlib.parsing import Dim, OpSpec, ShapeSpec, ShardError, parse_op
from shardlib.scopes import Sizes


def rearrange(spec: str, x: object, /, **sizes: int) -> Any:
    """Transposes, splits and merges dims by name, as einops does.

    A group `(K/t Q)` is one dim of the array, with K outermost, and `1` is a dim of size 1. Each
    name must be on both sides, with the same axes. A partial sum stays a partial sum, and a copy a
    copy.

    - accepts: also partial sums, gathered arrays and copies
    - sends: nothing
    - gradient: the reverse
    - rejects: an axis on a dim that is not the first of its group; a size that does not match

    Args:
        spec: the dims of the operand and of the result.
        x: an array, a partial sum or a copy.
        **sizes: global sizes of dims that neither `x` nor an annotation determines: `Q=4`.

    >>> @typed_shard_map
    ... def heads(x: f32["L H/t"]) -> f32["K/t Q L"]:
    ...     block = shardops.rearrange("L (K/t Q) -> K/t Q L", x, Q=2)
    ...     print(x.shape, "->", block.shape)
    ...     return block
    >>> heads(jnp.ones((3, 8))).shape
    (3, 4) -> (2, 2, 3)
    (4, 2, 3)
    """
    with checked_op("rearrange", spec, x) as known:
        op = parse(spec, 1, "*", "( )")
        lhs = op.lhs[0]
        rhs = op.rhs
        # Even on a mesh without p, p stays in its position.
        pattern, names = _pattern(parse_op(spec, groups=True))
        require_shard_map()
        _bind_given(lhs, sizes, known)
        value = check_operand(1, lhs, x, known)
        bind_groups(lhs, known)
        value = cast(1, lhs, value, (), lhs.sharded)
        inner = [dim for group in lhs.dims for dim in group.group]
        blocks = {names[dim.name]: known[dim.name] // devices_along(dim.axes) for dim in inner}
    return wrap(
        einops.rearrange(jnp.asarray(value), pattern, **blocks),
        rhs,
        copy_axes(x),
        f"rearrange({op})",
    )


@functools.lru_cache(maxsize=4096)
def _pattern(op: OpSpec) -> tuple[str, dict[str, str]]:
    """Returns the pattern for einops of a spec, and the name in it of each dim.

    Raises ShardError for a wrong spec.
    """
    lhs = _members("operand", op.lhs[0])
    rhs = _members("result", op.rhs)
    for name in [*lhs, *rhs]:
        before, after = (str(side.get(name, "nothing")) for side in (lhs, rhs))
        if before != after:
            raise ShardError(
                f"{before} in the operand becomes {after} in the result: rearrange keeps every "
                "entry on its device",
                "keep each name, with its axes; einsum_unreduced sums over a dim, broadcast adds "
                "one, and a dim of size 1 is written 1; all_gather makes a dim whole, "
                "psum_scatter turns a + into an axis, and all_to_all moves an axis to another dim",
            )
    if (op.lhs[0].partial, op.lhs[0].copies) != (op.rhs.partial, op.rhs.copies):
        raise ShardError(
            f"`{op.lhs[0]}` to `{op.rhs}` changes the marks",
            "keep + and * on both sides: psum and psum_scatter reduce, all_gather and replicate "
            "make copies",
        )
    names = {name: f"a{i}" for i, name in enumerate(lhs)}
    return f"{_side(op.lhs[0], names)} -> {_side(op.rhs, names)}", names


def _side(shape: ShapeSpec, names: dict[str, str]) -> str:
    """Returns one side of a pattern for einops."""
    words = []
    for dim in shape.dims:
        if dim.group:
            words.append(f"({' '.join(names[member.name] for member in dim.group)})")
        else:
            words.append(names.get(dim.name, "1"))
    return " ".join(words)


def _members(which: str, shape: ShapeSpec) -> dict[str, Dim]:
    """Returns the dims of one side by name: members in place of groups, but no `1`."""
    dims = [
        dim
        for dim in itertools.chain(*(dim.group or [dim] for dim in shape.dims))
        if str(dim) != "1"
    ]
    for dim in dims:
        if dim.literal_size is not None or [other.name for other in dims].count(dim.name) > 1:
            problem = f"{dim} in the {which} `{shape}` does not have a name of its own"
            raise ShardError(
                problem, "give each dim a different name, and a size if needed: rearrange(…, N=3)"
            )
    return {dim.name: dim for dim in dims}


def _bind_given(shape: ShapeSpec, given: Mapping[str, int], sizes: Sizes) -> None:
    """Adds the sizes `given` by keyword to `sizes`.

    Raises ShardError if one is wrong or contradicts what is known.
    """
    names = {member.name for dim in shape.dims for member in dim.group or [dim]}
    for name, size in given.items():
        if (
            name not in names
            or not isinstance(size, int)
            or size < 1
            or sizes.setdefault(name, size) != size
        ):
            problem = f"{name}={size!r} is not the size of a dim of `{shape}`"
            raise ShardError(problem, "give the global sizes of dims whose size is not known")


def bind_groups(shape: ShapeSpec, sizes: Sizes) -> None:
    """Replaces the size of each group in `sizes` by the sizes of its dims.

    Raises ShardError if they do not match.
    """
    for group in (dim for dim in shape.dims if dim.group):
        whole = sizes.pop(group.name)
        names = [dim.name for dim in group.group]
        unknown = [name for name in names if name not in sizes]
        product = math.prod(sizes.get(name, 1) for name in names)
        if len(unknown) > 1 or whole % product or (not unknown and product != whole):
            known = ", ".join(f"{name}={sizes[name]}" for name in names if name in sizes)
            raise ShardError(
                f"size mismatch: {group} has size {whole}; its known dims: {known or 'none'}",
                "give the global sizes of all of its dims but one: rearrange(…, "
                f"{(unknown or names)[-1]}=…)",
            )
        sizes |= dict.fromkeys(unknown, whole // product)
        check_divisible(group.group[0], sizes[names[0]])
