"""Rules of primitives: how facts about the results follow from facts about the operands.

Each rule states what the primitive does to whole values, and under which conditions doing it to
blocks gives the blocks of the result. Otherwise it raises Refused. The other modules of this folder
hold the rules.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

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
    """Registers a function as the rule of the primitives of these names."""

    def register(function: Callable[..., Any]) -> Callable:
        of.update(dict.fromkeys(names, function))
        return function

    return register


OF_SIZES = words(
    """shape new_sizes sizes start_indices limit_indices strides padding_config slice_sizes
    axis_size perm sharding out_sharding dst_sharding concrete_mesh mesh feature_group_count
    batch_group_count result_avals"""
)
"""Parameters that may depend on the mesh: the rules compare the sizes that result."""
KEEPING = kinds("view") | words(
    "iota axis_index argmax argmin concatenate slice gather scan while cond sort dot_general "
    "scatter ring_index"
)
"""Primitives, besides elementwise ones, whose results need not be blocks yet, such as an index less
an offset."""


rule(*IDENTITIES)(lambda eq: eq.ins)


@rule("device_put")
def _device_put(eq: Equation) -> list[Value]:
    """A move to a device's host memory, or back, changes nothing. One to other devices might."""
    is_move = all(isinstance(place, jax.memory.Space) for place in eq.params["devices"])
    return eq.ins if is_move else everything_whole(eq)


TOGETHER = dict.fromkeys(("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd"), 2) | {
    "lu_pivots_to_permutation": 1
}
"""The number of last dims that these primitives take together."""


@rule(*TOGETHER, "fft")
def _of_last_dims(eq: Equation) -> list[Value]:
    """Treats each matrix, and each transform, separately."""
    return everything_whole(
        eq, len(eq.shape()) - (TOGETHER.get(eq.name) or len(eq.params["fft_lengths"]))
    )


@rule("triangular_solve")
def _solve(eq: Equation) -> list[Value]:
    """Treats each matrix, and each vector for which a triangular system is solved, separately."""
    ndim = len(eq.shape())
    return everything_whole(eq, ndim - 2, vectors=ndim - 1 if eq.params["left_side"] else ndim - 2)


@rule("random_bits", "random_split", "random_unwrap", "random_seed", "bitcast_convert_type")
def _of_each_entry(eq: Equation) -> list[Value]:
    """Treats each key, or the bits of each number, separately."""
    refuse_rbg(eq)
    return everything_whole(eq, min(len(eq.shape()), len(eq.result_shape)))


IMPURE = COLLECTIVES | words("axis_index io_callback rng_uniform run_state shard_map")
"""Primitives whose results depend on more than their operands, if no rule handles them."""


def everything_whole(eq: Equation, batch: int = 0, vectors: int | None = None) -> list[Value]:
    """Handles a primitive without a rule.

    The results are whole, if each device has all of each operand. It treats the entries of the
    first `batch` dims, and of dim `vectors` of operand 2, separately. It is then linear in operand
    2.
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

    def label_dims(var: Any) -> list[int | None]:
        return [i if i < batch else None for i in range(len(shape_of(var)))]

    operands, results = list(map(label_dims, eq.eqn.invars)), list(map(label_dims, eq.eqn.outvars))
    if vectors is None:
        return map_separately(eq, operands, results, eq.name)
    eq.plain(eq.ins[0]), eq.unscaled(eq.ins[1])
    operands[1][vectors] = results[0][vectors] = vectors
    (found,) = map_separately(eq, operands, results, eq.name, Equation.term)
    return [dataclasses.replace(found, partial=eq.ins[1].partial)]


def map_separately(
    eq: Equation,
    operands: list,
    results: list,
    verb: str,
    demand: Callable[..., Any] = Equation.plain,
) -> list[Value]:
    """Handles an operation that treats entries along some dims separately.

    It treats those along others together.

    Args:
        eq: the equation.
        operands: for each dim of each operand, a label that the same dim of other operands and
            results has; None where entries are taken together, which requires the whole dim.
        results: the same for each result. None: a new dim, which is whole.
        verb: what happens to the entries that are taken together.
        demand: what each operand must be.
    """
    dims_of: dict[Any, list] = {}
    for k, labels in enumerate(operands):
        demand(eq, eq.ins[k])
        for i, (label, dim) in enumerate(zip(labels, eq.ins[k].dims, strict=True)):
            if label is None:
                eq.uncut(eq.ins[k], i, verb)
                eq.same_size(k, i)
            else:
                dims_of.setdefault(label, []).append(dim)
    joined = {label: eq.joined_dim(label, dims) for label, dims in dims_of.items()}
    found = []
    for var, labels in zip(eq.eqn.outvars, results, strict=True):
        pairs = zip(shape_of(var), labels, strict=True)
        dims = (whole(n) if label is None else joined[label] for n, label in pairs)
        found.append(Value(tuple(dims)))
    return found
