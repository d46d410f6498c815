"""The table of rules, and the rule of primitives that have none of their own.

A rule derives facts about the results of an equation from facts about its operands. It knows what
the primitive does to whole values, and when doing that to blocks gives the blocks of the result;
otherwise it raises Refused. So `reduce_sum` along the dim that d cuts turns f32[8/d 4] into f32[4
+d], `psum` over d turns this into f32[4], and `exp` refuses f32[4 +d]. A primitive without a rule
is applied to each block, as far as shardlib/dims.py says that it treats the entries along a dim
separately.
"""

from collections.abc import Callable
from typing import Any

import jax

from shardlib.dims import Dims, Labels, checked, dims_of
from shardlib.equations import (
    COLLECTIVES,
    IDENTITIES,
    jaxprs_of,
    kinds,
    shape_of,
    words,
)
from shardlib.interpret import equations_in
from shardlib.proof.domain import Value, whole
from shardlib.proof.elementwise import refuse_rbg
from shardlib.proof.equation import Equation, Refused

RULES: dict[str, Callable[[Equation], Any]] = {}
"""Rules by the name of the primitive. A rule returns the facts about the result, or a list of
them."""


def rule(*names: str, of: dict = RULES) -> Callable:
    """Registers a function in the table `of` as the rule of the primitives of these names.

    For example, the order of entries may be reversed along a whole dim only:

        @rule("rev")
        def _rev(eq):
            (x,) = eq.ins
            for i in eq.params["dimensions"]:
                eq.uncut(x, i, "the order is reversed")  # raises Refused if dim i is sharded
            return x.rearranged(x.dims)
    """

    def register(function: Callable[..., Any]) -> Callable:
        of.update(dict.fromkeys(names, function))
        return function

    return register


OF_SIZES = words(
    """shape new_sizes sizes start_indices limit_indices strides padding_config slice_sizes
    axis_size perm sharding out_sharding dst_sharding concrete_mesh mesh feature_group_count
    batch_group_count result_avals"""
)
"""Parameters that may depend on the mesh: rules compare the sizes of the results instead."""
KEEPING = kinds("view") | words(
    "iota axis_index argmax argmin concatenate slice gather scan while cond sort dot_general "
    "scatter ring_index"
)
"""Primitives, besides elementwise ones, whose results need not be blocks yet, such as an index less
an offset."""


rule(*IDENTITIES)(lambda eq: eq.ins)


@rule("device_put")
def _device_put(eq: Equation) -> list[Value]:
    """Handles moves between a device's memory and its host's; other moves need whole operands."""
    is_move = all(isinstance(place, jax.memory.Space) for place in eq.params["devices"])
    return eq.ins if is_move else everything_whole(eq)


IMPURE = COLLECTIVES | words("axis_index io_callback rng_uniform run_state shard_map")
"""Primitives whose results depend on more than their operands, if no rule handles them."""
LINEAR_IN: dict[str, int] = dict.fromkeys(
    ("cumsum", "fft", "reduce_window_sum", "select_and_scatter_add"), 0
)
LINEAR_IN |= {"triangular_solve": 1}
"""The index of the operand in which each of these primitives is linear, which may therefore be a
term of a sum."""


@rule(*LINEAR_IN)
def _linear(eq: Equation) -> list[Value]:
    """Applies a primitive that is linear in one operand, which may be a term of a sum.

    x: f32[8 +d]    jnp.cumsum(x)    f32[8 +d]
    x: f32[8/d 4]    jnp.cumsum(x, 1)    f32[8/d 4]
    x: f32[8/d 4]    jnp.cumsum(x, 0)    refused
    """
    k = LINEAR_IN[eq.name]
    for value in (*eq.ins[:k], *eq.ins[k + 1 :]):
        eq.plain(value)
    x = eq.term(eq.ins[k])
    return [Value(dims, x.partial, ratio=x.ratio) for dims in joined_dims(eq)]


def everything_whole(eq: Equation) -> list[Value]:
    """Handles a primitive without a rule, by its row in shardlib.dims.

    Without a row, each device must hold each operand whole.

        x: f32[8/d 4 4]    jnp.linalg.cholesky(x)    f32[8/d 4 4]
        x: f32[4 4/d]    lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME")    refused
    """
    names = [
        eq.name,
        *(eqn.primitive.name for inner in jaxprs_of(eq.eqn) for eqn in equations_in(inner)),
    ]
    if impure := next(filter(IMPURE.__contains__, names), None):
        problem = f"{impure} may give another result on each device"
        raise Refused(problem, "compute it by other operations, or outside of the program")
    if any(hasattr(var.aval, "inner_aval") for var in (*eq.eqn.invars, *eq.eqn.outvars)):
        raise Refused("an array is changed in place", "return the changed array: x.at[i].set(...)")
    if eq.name.startswith("random"):
        refuse_rbg(eq)
    return map_separately(eq)


def shared_dims(eq: Equation) -> Dims:
    """Returns the labels of an equation's dims, as far as they are the same on one device.

    For a dim of size 1 here, the label on one device counts: a single channel, for example, is both
    a group and all channels.
    """

    def shared(var: Any, here: Labels, there: Labels) -> Labels:
        rows = zip(shape_of(var), here, there, strict=True)
        return [b if a == b or n == 1 else None for n, a, b in rows]

    here, there = dims_of(eq.eqn), dims_of(eq.twin)
    operands = map(shared, eq.eqn.invars, here.operands, there.operands)
    row = Dims([*operands], [*map(shared, eq.eqn.outvars, here.results, there.results)])
    return checked(eq.eqn, row)


def joined_dims(
    eq: Equation, verb: str = "entries are taken together", of: Dims | None = None
) -> list[tuple[Any, ...]]:
    """Returns how the results of an operation are cut, from the dims of its operands.

    Raises Refused unless the dims along which `verb` happens are whole.

    Args:
        eq: the equation.
        verb: what happens along other dims, as in "entries are taken together along dim 0".
        of: its Dims, of which the caller checks the contracted dims; None: those of shardlib.dims.
    """
    operands, results = of or shared_dims(eq)
    kept = {label for labels in (operands if of else results) for label in labels} - {None}
    found: dict[Any, list] = {label: [] for label in kept}
    for k, labels in enumerate(operands):
        for i, label in enumerate(labels):
            if label in kept:
                found[label].append(eq.ins[k].dims[i])
            else:
                eq.uncut(eq.ins[k], i, verb)
                eq.same_size(k, i)
    joined = {label: eq.joined_dim(label, dims) for label, dims in found.items()}
    pairs = (
        zip(shape_of(var), x, strict=True) for var, x in zip(eq.eqn.outvars, results, strict=True)
    )
    return [tuple(whole(n) if x is None else joined[x] for n, x in pair) for pair in pairs]


def map_separately(eq: Equation, of: Dims | None = None) -> list[Value]:
    """Applies an operation to each block separately, as its Dims allow.

    Raises Refused for an operand that is not a plain block (Equation.plain).
    """
    for value in eq.ins:
        eq.plain(value)
    return [*map(Value, joined_dims(eq, of=of))]
