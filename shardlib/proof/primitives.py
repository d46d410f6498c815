"""Rules of primitives: how the facts about the results follow from those about the operands.

Each rule states what the primitive does to whole values, and under which conditions doing it to the blocks gives the
blocks of that. It refuses (raises Refused) where they are not met. The modules beside this one have the rules.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardlib.proof.domain import Value, whole
from shardlib.proof.equation import Equation, Refused


class Rules(dict[str, Callable[[Equation], Any]]):
    """Rules by the name of the primitive. A rule returns the facts about the result, or a list of them."""

    def of(self, *names: str) -> Callable:
        """Decorator: the function is the rule of the primitives of these names."""

        def register(fn: Callable) -> Callable:
            self.update(dict.fromkeys(names, fn))
            return fn

        return register


RULES = Rules()
rule = RULES.of

COLLECTIVES = frozenset(
    """
    psum psum2 psum_invariant unreduced_psum pmax pmin all_gather all_gather_invariant all_gather_reduced
    reduce_scatter unreduced_reduce_scatter psum_scatter all_to_all ppermute pbroadcast ragged_all_to_all
    """.split()  # noqa: SIM905
)
OF_SIZES = frozenset(
    """
    shape new_sizes sizes start_indices limit_indices strides padding_config slice_sizes axis_size perm sharding
    out_sharding dst_sharding concrete_mesh mesh feature_group_count batch_group_count result_avals
    """.split()  # noqa: SIM905
)
"""Parameters that may depend on the mesh: the rules compare the sizes that they make."""
KEEPING = frozenset(
    """
    iota axis_index argmax argmin broadcast_in_dim transpose squeeze expand_dims reshape concatenate slice gather
    scan while cond sort dot_general scatter ring_index
    """.split()  # noqa: SIM905
)
"""Primitives, besides elementwise ones, whose results may still be no blocks, such as an index less an offset."""


@rule("name", "stop_gradient", "pvary", "pcast", "copy_to_host", "sharding_constraint", "layout_constraint")
@rule("reshard")  # between devices of axes that are not manual, which the program does not show
@rule("reduced_vary_cast", "reduced_vary_cast_p", "vary_reduced_cast", "preduced", "preduced_p", "mul_by_one")
def _identity(eq: Equation) -> Value:
    return eq.ins[0]


@rule("optimization_barrier")
def _barrier(eq: Equation) -> list[Value]:
    return eq.ins


@rule("device_put")
def _device_put(eq: Equation) -> list[Value]:
    """A move to the memory of a device's host, or back, changes nothing. One to other devices might."""
    is_move = all(isinstance(place, jax.memory.Space) for place in eq.params["devices"])
    return eq.ins if is_move else everything_whole(eq)


TOGETHER = dict.fromkeys(("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd"), 2) | {"lu_pivots_to_permutation": 1}
"""How many last dims these primitives take together."""


@rule(*TOGETHER, "triangular_solve", "fft")
def _of_last_dims(eq: Equation) -> list[Value]:
    """Each matrix, each transform, and each vector that a triangular system is solved for, by itself."""
    ndim = len(eq.shape())
    if eq.name != "triangular_solve":
        return everything_whole(eq, ndim - (TOGETHER.get(eq.name) or len(eq.params["fft_lengths"])))
    return everything_whole(eq, ndim - 2, vectors=ndim - 1 if eq.params["left_side"] else ndim - 2)


IMPURE = COLLECTIVES | frozenset(
    "axis_index io_callback ordered_io_callback rng_uniform infeed run_state shard_map".split()  # noqa: SIM905
)
"""Primitives whose results are not a function of their operands alone, where no rule is for them."""


def jaxprs_of(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield part


def _impure(eqn: Any) -> str | None:
    """The first primitive in an equation, or in the jaxprs that it calls, that is IMPURE."""
    if eqn.primitive.name in IMPURE:
        return eqn.primitive.name
    inner = (e for jaxpr in jaxprs_of(eqn) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns)
    return next(filter(None, map(_impure, inner)), None)


def everything_whole(eq: Equation, batch: int = 0, vectors: int | None = None) -> list[Value]:
    """The results of a primitive without a rule: whole, if each device has all of each operand.

    What it does to the entries of the first `batch` dims, and of dim `vectors` of operand 2, it does to each by itself.
    In operand 2 it is linear then.
    """
    if name := _impure(eq.eqn):
        raise Refused(f"{name} may give another result on each device", "say so with shardops.per_device")
    if any(hasattr(var.aval, "inner_aval") for var in (*eq.eqn.invars, *eq.eqn.outvars)):
        raise Refused("an array is changed in place", "return the changed array: x.at[i].set(...)")
    for k, value in enumerate(eq.ins):
        is_linear = k == 1 and vectors is not None
        eq.unscaled(eq.term(value)) if is_linear else eq.plain(value)
        for i in range(batch, len(value.dims)):
            if (k, i) != (1, vectors):
                eq.uncut(value, i, eq.name)
                eq.same_size(k, i)
    dims = [eq.joined_dim(i, (value.dims[i] for value in eq.ins)) for i in range(batch)]
    shapes = [getattr(var.aval, "shape", ()) for var in eq.eqn.outvars]
    rest = lambda shape: (eq.ins[1].dims[i] if i == vectors else whole(shape[i]) for i in range(batch, len(shape)))
    partial = eq.ins[1].partial if vectors is not None else frozenset()
    return [Value((*dims, *rest(shape)), partial) for shape in shapes]
