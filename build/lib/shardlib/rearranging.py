"""The op rearrange: transposing, splitting and merging dims, checked by name."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import einops
import jax.numpy as jnp

from shardlib.checks import Sizes, check_divisible
from shardlib.op_checks import cast, check_operand, checked_op, copy_axes, parse, require_shard_map, wrap
from shardlib.parsing import Dim, OpSpec, ShapeSpec, ShardError, parse_op, sort_axes
from shardlib.values import devices_along


def rearrange(spec: str | bytes, x: Any, /, **sizes: int) -> Any:
    """Transposes, splits and merges the dims of `x`: `B/d L (K/t Q) D -> B/d K/t Q L D`. It does not communicate.

    The notation is that of einops, with axes. A group `(K/t Q)` is one dim of the array, with K outermost, and `1` is a
    dim of size 1. Each name is on both sides, with the same axes. In a group only the outermost dim may be sharded. A
    partial sum and a Copy stay what they are.

    Args:
        spec: the dims of the operand and of the result.
        x: an array, a partial sum or a Copy.
        **sizes: sizes of dims by name, at least 1, where neither `x` nor the current scope tells them: `Q=4`. As
            everywhere these are the sizes of whole dims, not of a device's block.
    """
    with checked_op("rearrange", spec, x) as known:
        op = parse(spec, 1, copies=True, groups=True)
        lhs, rhs = op.lhs[0], op.rhs
        pattern, names = _pattern(parse_op(spec, groups=True))  # on a mesh without p too, p stays in its place
        require_shard_map()
        _bind_given(lhs, sizes, known)
        value = check_operand(1, lhs, x, known)
        _bind_groups(lhs, known)
        value = cast(1, lhs, value, (), lhs.sharded)
        inner = [dim for group in lhs.dims for dim in group.group]
        blocks = {names[dim.name]: known[dim.name] // devices_along(dim.axes) for dim in inner}
    return wrap(einops.rearrange(jnp.asarray(value), pattern, **blocks), rhs.partial, copy_axes(x), f"rearrange({op})")


@functools.lru_cache(maxsize=4096)
def _pattern(op: OpSpec) -> tuple[str, dict[str, str]]:
    """The pattern of a spec for einops, and the name in it of each dim. Raises ShardError for a wrong spec."""
    lhs, rhs = _members("operand", op.lhs[0]), _members("result", op.rhs)
    if lost := [dim for name, dim in lhs.items() if name not in rhs]:
        raise ShardError(
            f"{lost[0]} of the operand is not in the result: rearrange keeps every entry",
            "name it in the result; to sum it, einsum_unreduced; to drop a dim of size 1, write it as 1",
        )
    if new := [dim for name, dim in rhs.items() if name not in lhs]:
        raise ShardError(
            f"{new[0]} of the result is not in the operand",
            "name a dim of the operand; a new dim of size 1 is written 1, and broadcast repeats along a new dim",
        )
    for name, dim in lhs.items():
        if dim.axes != rhs[name].axes:
            raise ShardError(
                f"{dim} in the operand becomes {rhs[name]} in the result: rearrange moves nothing between devices",
                _collective(dim, rhs[name], op),
            )
    if (op.lhs[0].partial, op.lhs[0].copies) != (op.rhs.partial, op.rhs.copies):
        raise ShardError(
            f"`{op.lhs[0]}` to `{op.rhs}` changes the marks",
            "keep + and * on both sides: psum and psum_scatter reduce, all_gather and replicate make copies",
        )
    names = {name: f"a{i}" for i, name in enumerate(lhs)}
    word = lambda dim: f"({' '.join(names[d.name] for d in dim.group)})" if dim.group else names.get(dim.name, "1")
    side = lambda shape: " ".join(map(word, shape.dims))
    return f"{side(op.lhs[0])} -> {side(op.rhs)}", names


def _members(which: str, shape: ShapeSpec) -> dict[str, Dim]:
    """Each dim of a side by its name, also those in groups, without 1."""
    found: dict[str, Dim] = {}
    for dim in itertools.chain(*(dim.members for dim in shape.dims)):
        if str(dim) == "1":
            continue
        if dim.literal_size is not None:
            raise ShardError(f"{dim} in the {which} has no name", "name it, and give its size: rearrange(…, N=3)")
        if dim.name in found:
            raise ShardError(f"the {which} `{shape}` names {dim.name} twice", "use two names")
        found[dim.name] = dim
    return found


def _collective(before: Dim, after: Dim, op: OpSpec) -> str:
    """What moves the axes that differ between two dims of the same name."""
    lost, gained = (sort_axes(set(a.axes) - set(b.axes)) for a, b in ((before, after), (after, before)))
    if set(gained) & set(op.lhs[0].partial):
        return f"psum_scatter turns +{gained[0]} into /{gained[0]}, before or after it"
    if set(lost) & op.rhs.sharded or set(gained) & op.lhs[0].sharded:
        return "keep the axes of each name; all_to_all moves an axis from one dim to another, before or after it"
    if lost:
        return f"all_gather({f'… {before} … -> … {after} …'!r}) before or after it makes {before.name} whole"
    return f"write {before} in the result: a device holds all of it, and only psum_scatter or all_to_all leave a block"


def _bind_given(shape: ShapeSpec, given: Mapping[str, int], sizes: Sizes) -> None:
    """Adds the sizes `given` by keyword to `sizes`. Raises ShardError if one is wrong or contradicts what is known."""
    names = {member.name for dim in shape.dims for member in dim.members}
    for name, size in given.items():
        if name not in names:
            raise ShardError(f"{name}={size!r}, but no dim has this name", "name a dim of the spec")
        if not isinstance(size, int) or size < 1:
            raise ShardError(f"{name}={size!r} is no size of a dim", "give the whole size, an int of at least 1")
        if sizes.setdefault(name, size) != size:
            raise ShardError(
                f"size mismatch: dim {name} is {sizes[name]}, but {name}={size} was given",
                "leave it out, or use another name; sizes are those of whole dims, over all devices",
            )


def _bind_groups(shape: ShapeSpec, sizes: Sizes) -> None:
    """Replaces the size of each group in `sizes` by the sizes of its dims. Raises ShardError if they do not fit."""
    for group in (dim for dim in shape.dims if dim.group):
        whole, names = sizes.pop(group.name), [dim.name for dim in group.group]
        unknown = [name for name in names if name not in sizes]
        if len(unknown) > 1:
            raise ShardError(
                f"{group} is {whole} in all, but the sizes of {' and '.join(unknown)} are not known here",
                f"give the whole size of all but one: rearrange(…, {unknown[-1]}=…)",
            )
        known = {name: sizes[name] for name in names if name in sizes}
        product, text = math.prod(known.values()), " · ".join(f"{name}={size}" for name, size in known.items())
        if unknown and product and whole % product == 0:
            sizes[unknown[0]] = whole // product
        elif unknown or product != whole:
            raise ShardError(
                f"size mismatch: {group} is {whole}, which is not {'a multiple of ' * bool(unknown)}{text}",
                "correct the size, or use other names; sizes are those of whole dims, over all devices",
            )
        check_divisible(group.group[0], sizes[names[0]])
