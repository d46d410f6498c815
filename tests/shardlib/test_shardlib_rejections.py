"""The catalogue of what ops and annotations reject while JAX traces: the mistake, its message, a valid neighbour."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_mesh import drop, on_mesh, unsound
from jax import lax
from jax.sharding import PartitionSpec as P

from shardlib.shardops import (
    all_gather,
    all_to_all,
    broadcast,
    einsum_unreduced,
    index_unreduced,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    replicate,
)
from shardlib.shardtypes import Partial, ShardError, f32, typed

pytestmark = pytest.mark.quick


def missing(axis: str) -> str:
    return (
        f"a gather or a reduction over {axis} is missing before this point (all_gather, psum_scatter, psum), "
        f"or the spec lacks `/{axis}` on the dim sharded over it, or `+{axis}` for a partial sum"
    )


# ---- pieces of a model, right as they stand ---------------------------------------------------------------------


def down(h, w_down) -> Partial:
    return einsum_unreduced("B/d L F/t, F/t M -> B/d L M +t", h, all_gather("F/t M/d -> F/t M", w_down))


def scattered(h, w_down):
    return psum_scatter("B/d L M +t -> B/d L/t M", down(h, w_down))


def total(h) -> Partial:
    return einsum_unreduced("B/d L F/t -> B/d L +t", h)


def own_gradient(h, wrong: bool) -> Partial:
    """`total` with a gradient of its own, which uses that of the partial sum as a partial sum if `wrong`."""
    own = jax.custom_vjp(total)
    spread = lambda g: jnp.broadcast_to(lax.pcast(g, "t", to="varying")[..., None], h.shape)
    whole = lambda g: psum("B/d L +t -> B/d L", g) if wrong else jax.tree.leaves(g)[0]
    own.defvjp(lambda h: (total(h), None), lambda _, g: (spread(whole(g)),))
    return own(h)


def drop_sum(p):
    return psum("+d ->", einsum_unreduced("B/d L -> +d", psum("B/d L +t -> B/d L", p)))


@typed
def activation(y: f32["B/d L M"]) -> f32["B/d L M"]:
    return jax.nn.silu(y)


@typed
def with_local(y, reduce: bool) -> f32["B/d L M"]:
    z: f32["B/d L M"] = psum("B/d L M +t -> B/d L M", y) if reduce else y
    return z


@typed
def per_device_loss(losses: f32["B/d L"]) -> f32[""]:
    return jnp.mean(losses)


@typed
def global_loss(losses: f32["B/d L"]) -> f32[""]:
    return psum("+d ->", einsum_unreduced("B/d L -> +d", losses))


def copies(bias):
    return replicate("M -> M *d", bias)


def scaled(x, bias):
    return einsum_unreduced("B/d L/t M, M -> B/d L/t M", x, bias)


def product_with_gathered(small):
    """On every device of t the same: right, but without a gradient with respect to `small`."""
    small = all_gather("F/t U -> F U", small)
    return einsum_unreduced("F U, F ->", small, jnp.ones(12))


class Case(NamedTuple):
    """`wrong` raises a ShardError whose first line is `problem` and whose remedy has `remedy` in it; `right` passes."""

    wrong: Callable
    problem: str
    remedy: str
    right: Callable
    result: object = f32[""]


WAYS = (
    "or compute on the blocks before the gather, shard another dim in place of this one with all_to_all, or have a "
    "plain array that is the same on all devices: all_gather(..., replicated=True)"
)
"""What can be done with blocks besides gathering them for an op."""


CASES = {
    # -- a reduction forgotten
    "partial sum as the result": Case(
        down,
        "fn, result: f32['B/d L/t M']: the value is a partial sum over t, `B/d L/t M` has no + mark",
        "reduce it over t first, with psum_scatter or psum",
        scattered,
        f32["B/d L/t M"],
    ),
    "partial sum as an argument": Case(
        lambda h, w_down: drop(activation(down(h, w_down))),
        "activation, argument y: f32['B/d L M']: the value is a partial sum over t, `B/d L M` has no + mark",
        "reduce it over t first, with psum_scatter or psum",
        lambda h, w_down: drop(activation(psum("B/d L M +t -> B/d L M", down(h, w_down)))),
    ),
    "partial sum as an annotated local": Case(
        lambda h, w_down: drop(with_local(down(h, w_down), False)),
        "with_local, local z: f32['B/d L M']: the value is a partial sum over t, `B/d L M` has no + mark",
        "reduce it over t first, with psum_scatter or psum",
        lambda h, w_down: drop(with_local(down(h, w_down), True)),
    ),
    "partial sum added to an array": Case(
        lambda x, h, w_down: x + down(h, w_down),
        "a jax.numpy or jax.lax function was given f32[2,6,8], a partial sum over t, made by "
        "einsum_unreduced(B/d L F/t, F/t M -> B/d L M +t)",
        "reduce it over t first, with psum_scatter or psum",
        lambda x, h, w_down: x + scattered(h, w_down),
        f32["B/d L/t M"],
    ),
    "array added to a partial sum": Case(
        lambda losses, h: total(h) + losses,
        "+ was given f32[2,6], a partial sum over t, made by einsum_unreduced(B/d L F/t -> B/d L +t), "
        "and f32[2,6] {varying over d}",
        "only partial sums over the same axes and of one shape can be added: reduce it over t first, "
        "with psum_scatter or psum",
        lambda losses, h: losses + psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "sum over this device's block alone": Case(
        lambda h: jnp.sum(h, axis=-1),
        "fn, result: f32['B/d L']: the value differs between devices of t, which `B/d L` does not mention",
        missing("t"),
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "loss that stays per device, as the result": Case(
        lambda losses: jnp.mean(losses),
        "fn, result: f32['']: the value differs between devices of d, which its spec, a scalar without "
        "marks, does not mention",
        missing("d"),
        global_loss,
    ),
    "loss that stays per device, under grad": Case(
        lambda losses: jax.grad(per_device_loss)(losses),
        "per_device_loss, result: f32['']: the value differs between devices of d, which its spec, "
        "a scalar without marks, does not mention",
        missing("d"),
        lambda losses: jax.grad(global_loss)(losses),
        f32["B/d L"],
    ),
    "loss that is a partial sum, under grad": Case(
        lambda losses: jax.grad(lambda l: einsum_unreduced("B/d L -> +d", l))(losses),
        "a jax.numpy or jax.lax function was given f32[], a partial sum over d, made by einsum_unreduced(B/d L -> +d)",
        "reduce it over d first, with psum_scatter or psum",
        lambda losses: jax.grad(global_loss)(losses),
        f32["B/d L"],
    ),
    # -- a gather forgotten
    "weight used without its gather": Case(
        lambda h, w_down: drop(einsum_unreduced("B/d L F/t, F/t M -> B/d L M +t", h, w_down)),
        "einsum_unreduced('B/d L F/t, F/t M -> B/d L M +t'): operand 2 `F/t M`: the value differs "
        "between devices of d, which `F/t M` does not mention",
        missing("d"),
        scattered,
        f32["B/d L/t M"],
    ),
    "weight used without its gather, its spec saying so": Case(
        lambda h, w_down: einsum_unreduced("B/d L F/t, F/t M/d -> B/d L M/d +t", h, w_down),
        "einsum_unreduced('B/d L F/t, F/t M/d -> B/d L M/d +t'): spec 'B/d L M/d +t' names axis d more than once",
        "a device has one coordinate on d: gather or reduce over d first, or use another axis",
        scattered,
        f32["B/d L/t M"],
    ),
    "lookup in a table without its gather": Case(
        lambda table, ids: drop(index_unreduced("[V/t] M, B/d L -> B/d L M +t", table, ids)),
        "index_unreduced('[V/t] M, B/d L -> B/d L M +t'): operand 1 `[V/t] M`: the value differs "
        "between devices of d, which `[V/t] M` does not mention",
        missing("d"),
        lambda table, ids: drop(
            index_unreduced("[V/t] M, B/d L -> B/d L M +t", all_gather("V/t M/d -> V/t M", table), ids)
        ),
    ),
    # -- the wrong reduction
    "reduction over the wrong axis": Case(
        lambda norm: psum("M/d +t ->", einsum_unreduced("M/t/d -> +t +d", norm)),
        "psum('M/d +t ->'): operand 1 `M/d +t`: the value is a partial sum over t, d, `M/d +t` says +t",
        "write `+t +d`: a partial sum names all its axes",
        lambda norm: psum("+t +d ->", einsum_unreduced("M/t/d -> +t +d", norm)),
    ),
    "reduction over one axis of two": Case(
        lambda norm: psum("+d ->", einsum_unreduced("M/t/d -> +t +d", norm)),
        "psum('+d ->'): operand 1 `+d`: the value is a partial sum over t, d, `+d` says +d",
        "write `+t +d`: a partial sum names all its axes",
        lambda norm: psum("+t ->", psum("+t +d -> +t", einsum_unreduced("M/t/d -> +t +d", norm))),
    ),
    "reduction over an axis that holds the same": Case(
        lambda losses: drop(einsum_unreduced("B/d L -> +d +t", losses)),
        "einsum_unreduced('B/d L -> +d +t'): the result says +t, but no contracted dim is sharded over it",
        "drop the +; a contracted dim sharded over it would be written B/t",
        lambda losses: drop(einsum_unreduced("B/d L -> +d", losses)),
    ),
    "reduction twice": Case(
        lambda h: psum("B/d L +t -> B/d L", psum("B/d L +t -> B/d L", total(h))),
        "psum('B/d L +t -> B/d L'): operand 1 `B/d L +t`: `B/d L +t` says a partial sum over t, but the "
        "value is not one: it is reduced already, or was never summed",
        "drop the + mark, or the second reduction; einsum_unreduced makes partial sums",
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "reduction by jax.lax, then by shardops": Case(
        lambda h: psum("B/d L +t -> B/d L", lax.psum(total(h), "t")),
        "psum('B/d L +t -> B/d L'): operand 1 `B/d L +t`: the array in this partial sum over t was replaced by "
        "f32[2,6] {varying over d}, which is not a partial sum",
        "do not change a partial sum from inside, e.g. by jax.tree.map: reduce it over t first, with psum_scatter or "
        "psum; what is linear is written with the partial sum itself: p + q, p - q, c * p",
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "reduction of an array that is no partial sum": Case(
        lambda h: psum("B/d L F/t -> B/d L", h),
        "psum('B/d L F/t -> B/d L'): the operand's spec has no +",
        "only a partial sum can be reduced: `B L +t -> B L`",
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "reduction of nothing": Case(
        lambda h: psum("B/d L +t -> B/d L +t", total(h)),
        "psum('B/d L +t -> B/d L +t'): `B/d L +t` to `B/d L +t` reduces nothing",
        "drop a + mark on the right side",
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "partial sums over different axes added": Case(
        lambda norm, h: drop(total(h) + einsum_unreduced("M/t/d -> +t +d", norm)),
        "+ was given f32[2,6], a partial sum over t, made by einsum_unreduced(B/d L F/t -> B/d L +t), "
        "and f32[], a partial sum over t, d",
        "only partial sums over the same axes and of one shape can be added: reduce it over t first, "
        "with psum_scatter or psum",
        lambda h: drop(total(h) + total(h)),
    ),
    "partial sums subtracted that are over different axes": Case(
        lambda h: drop(total(h) - total(h) * 2 - einsum_unreduced("B/d L F/t -> +t +d", h)),
        "- was given f32[2,6], a partial sum over t, made by einsum_unreduced(B/d L F/t -> B/d L +t), "
        "and f32[], a partial sum over t, d",
        "only partial sums over the same axes and of one shape can be added: reduce it over t first, "
        "with psum_scatter or psum",
        lambda h: drop(total(h) - total(h) * 2),
    ),
    "partial sum times what differs over its axis": Case(
        lambda h: drop(total(h) * h[:, :, 0]),
        "* was given f32[2,6], a partial sum over t, made by einsum_unreduced(B/d L F/t -> B/d L +t), "
        "and f32[2,6] {varying over t, d}",
        "it is scaled only by a number, or by an array that has its dims and is the same on every device of t: "
        "reduce it over t first, with psum_scatter or psum",
        lambda h, losses: drop(total(h) * losses),
    ),
    "partial sum divided by what differs over its axis": Case(
        lambda h: drop(total(h) / (1.0 + lax.axis_index("t"))),
        "/ was given f32[2,6], a partial sum over t, made by einsum_unreduced(B/d L F/t -> B/d L +t), "
        "and f32[] {varying over t}",
        "it is scaled only by a number, or by an array that has its dims and is the same on every device of t: "
        "reduce it over t first, with psum_scatter or psum",
        lambda h: drop(total(h) / (1.0 + lax.axis_index("d"))),
    ),
    "partial sum times an array of another shape": Case(
        lambda h: drop(total(h) * jnp.ones(5)),
        "* was given f32[2,6], a partial sum over t, made by einsum_unreduced(B/d L F/t -> B/d L +t), "
        "and f32[5] {the same on every device}",
        "it is scaled only by a number, or by an array that has its dims and is the same on every device of t: "
        "reduce it over t first, with psum_scatter or psum",
        lambda h: drop(total(h) * jnp.ones(6)),
    ),
    "array taken out of a partial sum": Case(
        lambda h: all_gather("B/d L -> B L", jax.tree.leaves(total(h))[0]),
        "all_gather('B/d L -> B L'): operand 1 `B/d L`: the value is unreduced over t in JAX's own types: "
        "the array in a partial sum, taken out of it",
        "pass the partial sum itself to psum_scatter or psum",
        lambda h: drop(all_gather("B/d L -> B L", psum("B/d L +t -> B/d L", total(h)))),
    ),
    "gradient of a partial sum used as one": Case(
        lambda h: jax.grad(lambda h: drop_sum(own_gradient(h, wrong=True)))(h),
        "psum('B/d L +t -> B/d L'): operand 1 `B/d L +t`: this is the gradient of a partial sum over t, an array that "
        "is the same on every device of t",
        "take the array out, which is as if it was gathered: (g,) = jax.tree.leaves(g)",
        lambda h: jax.grad(lambda h: drop_sum(own_gradient(h, wrong=False)))(h),
        f32["B/d L F/t"],
    ),
    "partial sum rounded to integers": Case(
        lambda h: total(h).astype(jnp.int32),
        ".astype(int32), which would round each part of the sum, was given f32[2,6], a partial sum over "
        "t, made by einsum_unreduced(B/d L F/t -> B/d L +t)",
        "reduce it over t first, with psum_scatter or psum",
        lambda h: drop(total(h).astype(jnp.bfloat16)),
    ),
    "product of partial sums": Case(
        lambda h: einsum_unreduced("B/d L +t, B/d L -> B/d L", total(h), total(h)),
        "einsum_unreduced('B/d L +t, B/d L -> B/d L'): operand 2 `B/d L`: the value is a partial sum "
        "over t, `B/d L` has no + mark",
        "reduce it over t first, with psum_scatter or psum",
        lambda h, losses: einsum_unreduced("B/d L, B/d L -> B/d L", psum("B/d L +t -> B/d L", total(h)), losses),
        f32["B/d L"],
    ),
    "maximum of a partial sum": Case(
        lambda h: pmax("B/d L +t -> B/d", total(h)),
        "pmax('B/d L +t -> B/d'): the maximum of a partial sum is not the maximum of the sum",
        "reduce it first, with psum",
        lambda h: pmax("B/d L F/t -> B/d L", h),
        f32["B/d L"],
    ),
    "gather of a partial sum": Case(
        lambda h: drop(all_gather("B/d L +t -> B L +t", total(h))),
        "all_gather('B/d L +t -> B L +t'): a partial sum cannot be gathered",
        "reduce it first, with psum_scatter or psum",
        lambda h: drop(all_gather("B/d L -> B L", psum("B/d L +t -> B/d L", total(h)))),
    ),
    # -- products whose spec is wrong in itself
    "operands that disagree on a dim's sharding": Case(
        lambda h, small: einsum_unreduced("B/d L F/t, F U -> B/d L U", h, all_gather("F/t U -> F U", small)),
        "einsum_unreduced('B/d L F/t, F U -> B/d L U'): operands disagree on the sharding of F: F/t in "
        "one, F in another: they hold different blocks of it",
        "all_gather the operand that is sharded, or shard both the same way (F/t or F)",
        lambda h, small: drop(
            einsum_unreduced("B/d L F/t, F/t U -> B/d L U +t", h, replicate("F/t U -> F/t U *d", small))
        ),
    ),
    "contraction of a sharded dim without +": Case(
        lambda h: einsum_unreduced("B/d L F/t -> B/d L", h),
        "einsum_unreduced('B/d L F/t -> B/d L'): contracting F/t sums only this device's block: the "
        "result is a partial sum over t",
        "write `+t` in the result, then reduce it with psum_scatter or psum; or all_gather F/t first",
        lambda h: psum("B/d L +t -> B/d L", einsum_unreduced("B/d L F/t -> B/d L +t", h)),
        f32["B/d L"],
    ),
    "axis that shards two dims of the operands": Case(
        lambda losses, w_down: einsum_unreduced("B/d L, F/t M/d -> L F/t +d", losses, w_down),
        "einsum_unreduced('B/d L, F/t M/d -> L F/t +d'): axis d shards both B and M: each device would "
        "see only the matching pairs of blocks, not all of them",
        "all_gather B or M over d first",
        lambda losses, w_down: drop(
            einsum_unreduced(
                "B/d L, F/t M -> L F/t M +d",
                replicate("B/d L -> B/d L *t", losses),
                all_gather("F/t M/d -> F/t M", w_down),
            )
        ),
    ),
    "einsum that would have to communicate": Case(
        lambda x: einsum_unreduced("B/d L/t M -> B/d L M/t", x),
        "einsum_unreduced('B/d L/t M -> B/d L M/t'): L/t in an operand becomes L in the result: "
        "einsum_unreduced does not communicate",
        "all_gather before it, or psum_scatter its result",
        lambda x: all_to_all("B/d L/t M -> B/d L M/t", x),
        f32["B/d L M/t"],
    ),
    "result dim that no operand has": Case(
        lambda losses: einsum_unreduced("B/d L -> B/d L M", losses),
        "einsum_unreduced('B/d L -> B/d L M'): dim M of the result is in no operand",
        "name a dim of an operand",
        global_loss,
    ),
    "operands of two dtypes": Case(
        lambda losses: einsum_unreduced("B/d L, B/d L -> B/d L", losses, losses.astype(jnp.bfloat16)),
        "einsum_unreduced('B/d L, B/d L -> B/d L'): dtype mismatch: operands are float32, bfloat16",
        "cast them to one dtype with .astype",
        lambda losses: einsum_unreduced("B/d L, B/d L -> B/d L", losses, losses),
        f32["B/d L"],
    ),
    "lookup whose result is another": Case(
        lambda table, ids: index_unreduced("[V/t] M, B/d L -> B/d L M", all_gather("V/t M/d -> V/t M", table), ids),
        "index_unreduced('[V/t] M, B/d L -> B/d L M'): the result of this lookup is `B/d L M +t`, not `B/d L M`",
        "write `-> B/d L M +t`",
        lambda table, ids: drop(
            index_unreduced("[V/t] M, B/d L -> B/d L M +t", all_gather("V/t M/d -> V/t M", table), ids)
        ),
    ),
    "lookup by what is no integer": Case(
        lambda table, losses: index_unreduced(
            "[V/t] M, B/d L -> B/d L M +t", all_gather("V/t M/d -> V/t M", table), losses
        ),
        "index_unreduced('[V/t] M, B/d L -> B/d L M +t'): dtype mismatch: ids are float32",
        "ids are integers",
        lambda table, ids: drop(
            index_unreduced("[V/t] M, B/d L -> B/d L M +t", all_gather("V/t M/d -> V/t M", table), ids)
        ),
    ),
    # -- specs and shapes
    "axes of a dim in the wrong order": Case(
        lambda norm: all_gather("M/d/t -> M", norm),
        "all_gather('M/d/t -> M'): dim M/d/t has its axes in the wrong order: another order would "
        "silently permute the data",
        "order the axes of a dim as r, t, d, p, then alphabetically: write M/t/d",
        lambda norm: drop(all_gather("M/t/d -> M", norm)),
    ),
    "axis that the mesh does not have": Case(
        lambda norm: all_gather("M/t/q -> M", norm),
        "all_gather('M/t/q -> M'): operand 1 `M/t/q`: axis q is not an axis of the mesh (the mesh has d, t)",
        "name one of the mesh's axes, or give the mesh an axis q of one device",
        lambda norm: drop(all_gather("M/t/d -> M", norm)),
    ),
    "axis that shards two dims of one shape": Case(
        lambda w_square: all_gather("M/d N/d -> M N", w_square),
        "all_gather('M/d N/d -> M N'): spec 'M/d N/d' names axis d more than once",
        "a device has one coordinate on d: gather or reduce over d first, or use another axis",
        lambda w_square: drop(all_gather("M/d N/t -> M N", w_square)),
    ),
    "size mismatch": Case(
        lambda norm, h: drop(all_gather("F/t/d -> F", norm)),
        "all_gather('F/t/d -> F'): operand 1 `F/t/d`: size mismatch: dim F is 12, but here it is 8",
        "give the two dims different names, or correct the shape; a dim that is in fact sharded must say "
        "so in its spec, e.g. `M/d`",
        lambda norm: drop(all_gather("M/t/d -> M", norm)),
    ),
    "size mismatch between two ops": Case(
        lambda norm, small: drop(all_gather("X/t/d -> X", norm), all_gather("X/t U -> X U", small)),
        "all_gather('X/t U -> X U'): operand 1 `X/t U`: size mismatch: dim X is 8, but here it is 12",
        "give the two dims different names, or correct the shape; a dim that is in fact sharded must say so "
        "in its spec, e.g. `M/d`",
        lambda norm, small: drop(all_gather("X/t/d -> X", norm), all_gather("Y/t U -> Y U", small)),
    ),
    "rank mismatch": Case(
        lambda w_down: all_gather("M/d -> M", w_down),
        "all_gather('M/d -> M'): operand 1 `M/d`: rank mismatch: `M/d` has 1 dims, the array has 2: [6, 4]",
        "name each dim of the array once",
        lambda w_down: drop(all_gather("F/t M/d -> F/t M", w_down)),
    ),
    "dims renamed by a collective": Case(
        lambda w_down: all_gather("F/t M/d -> F/t N", w_down),
        "all_gather('F/t M/d -> F/t N'): the dims change from `F/t M/d` to `F/t N`",
        "keep the names and the order of the dims on both sides",
        lambda w_down: drop(all_gather("F/t M/d -> F/t M", w_down)),
    ),
    "scatter of a dim that does not divide": Case(
        lambda table: psum_scatter(
            "3 +t -> 3/t", einsum_unreduced("V/t 3 -> 3 +t", all_gather("V/t M/d -> V/t M", table)[:, :3])
        ),
        "psum_scatter('3 +t -> 3/t'): dim 3 of size 3 is not divisible by its axes t, 2 devices",
        "make 3 a multiple of 2, or shard it over fewer devices",
        lambda h: drop(psum_scatter("B/d L +t -> B/d L/t", total(h))),
    ),
    # -- collectives that would permute data, or do something else than they say
    "gather of the major axis first": Case(
        lambda norm: all_gather("M/t/d -> M/d", norm),
        "all_gather('M/t/d -> M/d'): M/t/d and M/d differ in more than their last axes: the blocks "
        "would be in another order",
        "remove or add M's axes from the right, one op after the other",
        lambda norm: drop(all_gather("M/t -> M", all_gather("M/t/d -> M/t", norm))),
    ),
    "scatter into the major place": Case(
        lambda w_square: psum_scatter("M/d +t -> M/t/d", einsum_unreduced("M/d N/t -> M/d +t", w_square)),
        "psum_scatter('M/d +t -> M/t/d'): M/t/d and M/d differ in more than their last axes: the blocks "
        "would be in another order",
        "remove or add M's axes from the right, one op after the other",
        lambda w_square: psum_scatter("N/t +d -> N/t/d", einsum_unreduced("M/d N/t -> N/t +d", w_square)),
        f32["N/t/d"],
    ),
    "gather of nothing": Case(
        lambda norm: all_gather("M/t/d -> M/t/d", norm),
        "all_gather('M/t/d -> M/t/d'): `M/t/d` to `M/t/d` gathers nothing",
        "drop an axis from a dim on the right side",
        lambda norm: drop(all_gather("M/t/d -> M/t", norm)),
    ),
    "gather half as a copy": Case(
        lambda norm: all_gather("M/t/d -> M *t", norm),
        "all_gather('M/t/d -> M *t'): the result is to be a copy over t, but t, d is gathered",
        "mark all axes removed from dims with *, or none: gather the others in a call of their own; for "
        "an axis that shards no dim use replicate",
        lambda norm: drop(all_gather("M/t/d -> M *t *d", norm)),
    ),
    "scatter that loses a +": Case(
        lambda h: psum_scatter("B/d L +t -> B/d L", total(h)),
        "psum_scatter('B/d L +t -> B/d L'): `B/d L +t` to `B/d L` does not turn each + axis into a / axis",
        "each axis that loses its + must be added to one dim: `B L M +t -> B L/t M`; psum drops it instead",
        lambda h: drop(psum_scatter("B/d L +t -> B/d L/t", total(h))),
    ),
    "psum that shards": Case(
        lambda h: psum("B/d L +t -> B/d L/t", total(h)),
        "psum('B/d L +t -> B/d L/t'): the dims change from `B/d L +t` to `B/d L/t`",
        "psum only drops + marks; psum_scatter also shards a dim",
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "maximum over nothing": Case(
        lambda losses: pmax("B/d L -> B/d L", losses),
        "pmax('B/d L -> B/d L'): `B/d L` is not `B/d L` with some dims dropped",
        "keep the other dims and their axes as they are",
        lambda losses: pmax("B/d L -> L", losses),
        f32["L"],
    ),
    "broadcast of a bias that is the same everywhere": Case(
        lambda x, bias: x + broadcast("M -> B/d L/t M", bias),
        "broadcast('M -> B/d L/t M'): operand 1 `M` is the same on every device of t, d, over which the result varies: "
        "its gradient would be all-reduced over t, d unseen",
        "say so once, where operand 1 is made: x = replicate('... -> ... *t *d', x)",
        lambda x, bias: x + broadcast("M -> B/d L/t M", replicate("M -> M *t *d", bias)),
        f32["B/d L/t M"],
    ),
    "broadcast that changes a dim": Case(
        lambda x, norm: x + broadcast("M/t -> B/d L/t M", all_gather("M/t/d -> M/t", norm)),
        "broadcast('M/t -> B/d L/t M'): `B/d L/t M` is not `M/t` with some dims added",
        "keep the dims, their order and axes: `M -> B/d L M`",
        lambda x, norm: x + broadcast("M -> B/d L/t M", all_gather("M/t/d -> M", norm)),
        f32["B/d L/t M"],
    ),
    "broadcast to a size that nothing tells": Case(
        lambda x, norm: x + broadcast("M -> B/d S/t M", all_gather("M/t/d -> M", norm)),
        "broadcast('M -> B/d S/t M'): the size of S is not known here",
        "annotate an array that has this dim",
        lambda x, norm: x + broadcast("M -> B/d L/t M", all_gather("M/t/d -> M", norm)),
        f32["B/d L/t M"],
    ),
    "all_to_all that moves two axes": Case(
        lambda x: all_to_all("B/d L/t M -> B L M/t/d", x),
        "all_to_all('B/d L/t M -> B L M/t/d'): `B/d L/t M` to `B L M/t/d` does not move one axis from "
        "one dim to another",
        "write `L/t K -> L K/t`",
        lambda x: all_to_all("B/d L/t M -> B/d L M/t", x),
        f32["B/d L M/t"],
    ),
    "shift along an axis that shards nothing": Case(
        lambda losses: ppermute("B/d L", losses, axis="t", shift=1),
        "ppermute('B/d L'): the blocks do not differ over t: `B/d L` is not sharded over it, or is a partial sum",
        "shift only along an axis that shards a dim, e.g. `L/t`",
        lambda losses: ppermute("B/d L", losses, axis="d", shift=1),
        f32["B/d L"],
    ),
    "brackets outside of index_unreduced": Case(
        lambda norm: all_gather("[M/t/d] -> M", norm),
        "all_gather('[M/t/d] -> M'): `[M/t/d]` has a [dim]",
        "only the first operand of index_unreduced has one",
        lambda norm: drop(all_gather("M/t/d -> M", norm)),
    ),
    "any dims outside of replicate": Case(
        lambda h: psum("... +t -> ...", total(h)),
        "psum('... +t -> ...'): `... +t` has '...'",
        "only replicate takes any dims: name them",
        lambda h: psum("B/d L +t -> B/d L", total(h)),
        f32["B/d L"],
    ),
    "spec with too few operands": Case(
        lambda losses: einsum_unreduced("B/d L -> B/d L", losses, losses),
        "einsum_unreduced('B/d L -> B/d L'): the spec has 1 operands, the call 2",
        "write one operand spec for each operand",
        global_loss,
    ),
    # -- copies
    "copy into jax.numpy": Case(
        lambda bias: jnp.exp(copies(bias)),
        "a jax.numpy or jax.lax function was given f32[8], a copy on each device of d, made by replicate(M -> M *d)",
        f"use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over d; {WAYS}",
        lambda x, bias: scaled(x, replicate("... -> ... *d *t", bias)),
        f32["B/d L/t M"],
    ),
    "copy in arithmetic": Case(
        lambda x, bias: x + copies(bias),
        "a jax.numpy or jax.lax function was given f32[8], a copy on each device of d, made by replicate(M -> M *d)",
        f"use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over d; {WAYS}",
        lambda x, bias: scaled(x, replicate("... -> ... *d *t", bias)),
        f32["B/d L/t M"],
    ),
    "copy as the result": Case(
        copies,
        "fn, result: f32['M']: a copy cannot leave shard_map",
        "return what was copied",
        lambda bias: bias,
        f32["M"],
    ),
    "copy of what differs between devices": Case(
        lambda losses: replicate("... -> ... *d", losses),
        "replicate('... -> ... *d'): operand 1, f32[2,6] {varying over d}, differs between devices of d already",
        "gather or reduce it first: a copy holds the same value on each device",
        lambda losses: drop(replicate("B/d L -> B/d L *t", losses)),
    ),
    "copy of a pytree, one leaf of which differs": Case(
        lambda bias, losses: replicate("... -> ... *d", {"bias": bias, "losses": losses}),
        "replicate('... -> ... *d'): operand 1['losses'], f32[2,6] {varying over d}, differs between "
        "devices of d already",
        "gather or reduce it first: a copy holds the same value on each device",
        lambda bias, losses: drop(replicate("... -> ... *t", {"losses": losses})),
    ),
    "copy of a partial sum": Case(
        lambda h: replicate("... -> ... *t", total(h)),
        "replicate('... -> ... *t'): operand 1 `...`: the value is a partial sum over t, `...` has no + mark",
        "reduce it over t first, with psum_scatter or psum",
        lambda bias: drop(replicate("... -> ... *t", bias)),
    ),
    "copy where the spec says it is sharded": Case(
        lambda bias: einsum_unreduced("M/d -> +d", copies(bias)),
        "einsum_unreduced('M/d -> +d'): operand 1 `M/d`: the value is a copy over d, but `M/d` says it is "
        "sharded over one of them",
        "drop that axis from the spec",
        lambda bias: drop(einsum_unreduced("M -> M *d", copies(bias))),
    ),
    "copy gathered ahead over more axes": Case(
        lambda norm: all_gather("M/t/d -> M/t", all_gather("M/t/d -> M *t *d", norm)),
        "all_gather('M/t/d -> M/t'): the operand was gathered over t, d before, this gathers over d",
        "gather ahead only over axes that are gathered here",
        lambda norm: drop(all_gather("M/t/d -> M", all_gather("M/t/d -> M/t *d", norm))),
    ),
    "array where the spec says a copy": Case(
        lambda bias: einsum_unreduced("M *d -> M", bias),
        "einsum_unreduced('M *d -> M'): operand 1 `M *d`: `M *d` says a copy on each device of d, but "
        "the value is an ordinary array",
        "make the copy with replicate, or all_gather into `*axis`",
        lambda bias: drop(einsum_unreduced("M *d -> M *d", copies(bias))),
    ),
    "copy in the result of operands that are none": Case(
        lambda bias: einsum_unreduced("M -> M *d", bias),
        "einsum_unreduced('M -> M *d'): the result says *d, but no operand is a copy over it",
        "drop the *, or replicate an operand",
        lambda bias: drop(einsum_unreduced("M -> M *d", copies(bias))),
    ),
    "copy over another axis than the spec says": Case(
        lambda bias: einsum_unreduced("M *t -> M", copies(bias)),
        "einsum_unreduced('M *t -> M'): operand 1 `M *t`: the value is a copy over d, `M *t` says a copy over t",
        "make the copy over the axes that the spec names, with replicate or all_gather",
        lambda bias: drop(einsum_unreduced("M *d -> M", copies(bias))),
    ),
    "copy reduced": Case(
        lambda bias: psum("M +d -> M", copies(bias)),
        "psum('M +d -> M'): operand 1 `M +d`: `M +d` says a partial sum over d, but the value is not one: "
        "it is reduced already, or was never summed",
        "drop the + mark, or the second reduction; einsum_unreduced makes partial sums",
        lambda losses: global_loss(losses),
    ),
    "maximum of a copy": Case(
        lambda bias: pmax("M ->", copies(bias)),
        "pmax('M ->'): operand 1 is a copy over d",
        f"use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over d; {WAYS}",
        lambda bias: pmax("M ->", bias),
    ),
    # -- gradients that would communicate unseen
    "operand that is the same over an axis of the result": Case(
        scaled,
        "einsum_unreduced('B/d L/t M, M -> B/d L/t M'): operand 2 `M` is the same on every device of t, "
        "d, over which the result varies: its gradient would be all-reduced over t, d unseen",
        "say so once, where operand 2 is made: x = replicate('... -> ... *t *d', x)",
        lambda x, bias: scaled(x, replicate("M -> M *d *t", bias)),
        f32["B/d L/t M"],
    ),
    "table that is the same over an axis of the result": Case(
        lambda whole, ids: index_unreduced("[V] M, B/d L -> B/d L M", whole, ids),
        "index_unreduced('[V] M, B/d L -> B/d L M'): operand 1 `[V] M` is the same on every device of "
        "d, over which the result varies: its gradient would be all-reduced over d unseen",
        "say so once, where operand 1 is made: x = replicate('... -> ... *d', x)",
        lambda whole, ids: drop(index_unreduced("[V] M, B/d L -> B/d L M", replicate("V M -> V M *d", whole), ids)),
    ),
    "operand that is the same over an axis of which another is a copy": Case(
        lambda bias: einsum_unreduced("M, M -> M", bias, copies(bias)),
        "einsum_unreduced('M, M -> M'): operand 1 `M` is the same on every device of d, over which the "
        "result varies: its gradient would be all-reduced over d unseen",
        "say so once, where operand 1 is made: x = replicate('... -> ... *d', x)",
        lambda bias: drop(einsum_unreduced("M, M -> M", copies(bias), copies(bias))),
    ),
    "gather of what is the same already": Case(
        lambda bias: all_gather("M/d -> M", bias[:4]),
        "all_gather('M/d -> M'): operand 1 `M/d` is the same on every device of d, over which the "
        "result varies: its gradient would be all-reduced over d unseen",
        "drop the axis from its spec; or, if it is a constant, jax.lax.pcast(x, ('d',), to='varying')",
        lambda norm: drop(all_gather("M/t/d -> M/t", norm)),
    ),
    "gathered operand, and a result that is the same over that axis": Case(
        lambda small: jax.grad(product_with_gathered)(small),
        "einsum_unreduced('F U, F ->'): operand 1 was gathered over t, but the result is neither "
        "sharded nor partial over t: each of its devices would compute the whole gradient, and the "
        "gather's backward pass would add them up",
        f"shard another operand over t, so that its devices share the work; {WAYS}; without a gradient this is right",
        lambda small: drop(product_with_gathered(small)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rejected_beside_a_valid_neighbour(name):
    case = CASES[name]
    with pytest.raises(ShardError) as raised:
        on_mesh(case.wrong, case.result)
    problem, *context = str(raised.value).splitlines()
    assert problem == f"{raised.value.place}: {case.problem}"
    assert re.fullmatch(r"tests/\S+\.py:\d+|\S+/tests/\S+\.py:\d+", raised.value.place)
    assert context[-1] == f"  remedy: {case.remedy}"
    if re.match(r"[a-z_]+\('", case.problem):  # raised by an op: it shows operands, sizes and mesh
        assert len(context) == 2 or re.match(r"  operand 1: (`.*`, )?[a-z0-9]+\[[0-9,]*\](, a | \{)", context[0])
        assert re.match(r"  sizes so far: .*; mesh: d=2, t=2", context[-2])
    on_mesh(case.right, case.result)


def test_an_op_shows_its_operands_with_their_axes_the_sizes_and_the_mesh():
    with pytest.raises(ShardError) as raised:
        on_mesh(CASES["weight used without its gather"].wrong)
    assert str(raised.value).splitlines()[1:-1] == [
        "  operand 1: `B/d L F/t`, f32[2,6,6] {varying over t, d}",
        "  operand 2: `F/t M/d`, f32[6,4] {varying over t, d}",
        "  sizes so far: B=4, L=6, F=12, M=8; mesh: d=2, t=2",
    ]


def test_jax_rejects_a_gathered_operand_of_plain_jnp_under_grad():
    """Where an op of jax.numpy takes what was gathered, JAX's own types still stop a wrong gradient."""

    def body(x, small):
        def loss(w):
            gathered = all_gather("F/t U -> F U", w)
            return psum("+t +d ->", einsum_unreduced("B/d L/t U -> +t +d", jnp.einsum("blm,fu->blu", x, gathered)))

        return jax.grad(loss)(small)

    with pytest.raises((TypeError, ValueError), match=r"reduced|cotangent"):
        on_mesh(body, f32["F/t U"])


def callback(losses):
    sort = lambda x: np.sort(x, axis=0)
    return jax.pure_callback(sort, jax.ShapeDtypeStruct(losses.shape, losses.dtype), losses)


def unchecked(h):
    mapped = functools.partial(jax.shard_map, in_specs=P(), out_specs=P(), check_vma=False)
    return mapped(lambda h: lax.psum(h, "t"), mesh=jax.sharding.get_abstract_mesh())(h)


# docs/sharding-types.md says that the types let these pass, and that the check of the step refuses them.
@pytest.mark.parametrize(
    ("body", "result", "problem"),
    [
        (lambda h: jax.nn.softmax(h, axis=-1), f32["B/d L F/t"], "a maximum over this device's block is used"),
        (lambda h: h - jnp.mean(h, axis=-1, keepdims=True), f32["B/d L F/t"], "a partial sum over t is combined"),
        (lambda h: jnp.sort(h), f32["B/d L F/t"], "sort runs along dim F, which is sharded over t"),
        (lambda h: jnp.cumsum(h, axis=-1), f32["B/d L F/t"], "runs along dim F, which is sharded over t"),
        (lambda w_square: w_square.T, f32["M/d N/t"], "is f32[N/t M/d], and is declared"),
        (lambda losses: lax.psum(lax.psum(jnp.sum(losses, axis=0), "d"), "d"), f32["L"], "depends on the mesh"),
        (lambda h: psum("B/d L +t -> B/d L", jax.tree.map(jnp.sort, total(h))), f32["B/d L"], "sort of a partial sum"),
        (
            lambda losses: jnp.argsort(losses, axis=0)[0] * 1.0,
            f32["L"],
            "sort runs along dim B, which is sharded over d",
        ),
        (lambda losses: callback(losses), f32["B/d L"], "along dim B, which is sharded over d"),
        (unchecked, f32["B/d L F/t"], "shard_map: its jaxpr depends on the mesh"),
    ],
)
def test_what_the_types_do_not_catch(body, result, problem):
    on_mesh(body, result)
    (found,) = unsound(body, result)
    assert problem in found


def test_what_costs_a_collective_unseen_is_right():
    on_mesh(lambda x, bias: x + bias, f32["B/d L/t M"])
    assert unsound(lambda x, bias: x + bias, f32["B/d L/t M"]) == []
