"""Names kinds of primitives, and takes equations of a traced program apart.

Uses public JAX only. shardlib/interpret.py goes through the equations of a program.
"""

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType

_KINDS = {
    "call": """call_hi_primitive closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit
        remat2""",
    # between devices
    "sum": "psum psum_invariant unreduced_psum",
    "extreme": "pmax pmin",
    "gather": "all_gather all_gather_invariant all_gather_reduced",
    "scatter": "reduce_scatter unreduced_reduce_scatter",
    "exchange": "all_to_all ragged_all_to_all",
    "permutation": "pbroadcast ppermute",
    # return their operands; casts do so between JAX's types of values under shard_map
    "cast": "preduced pvary reduced_vary_cast_p",
    "unreduced": "vary_unreduced_cast_p",  # turns what varies into a partial sum
    "identity": """layout_constraint name optimization_barrier reshard sharding_constraint
        stop_gradient""",
    # give the entries another shape
    "view": "broadcast_in_dim reshape squeeze transpose",
    # of each entry alone
    "linear": "conj convert_element_type copy imag neg real reduce_precision",
    "addition": "add add_any sub",
    "product": "div mul",
    "comparison": "eq ge gt le lt ne",
    "selection": "clamp max min select_n",
    "nonlinear": """abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clz complex cos cosh digamma eq_to erf erf_inv erfc exp exp2 expm1 floor igamma
        igamma_grad_a igammac integer_pow is_finite le_to lgamma log log1p logistic lt_to
        nextafter not or polygamma population_count pow regularized_incomplete_beta rem round
        rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan
        tanh xor zeta one_minus_square""",  # the last one since jax 0.12
    "random": "random_fold_in threefry2x32",
    # of several entries together
    "reduction": "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum",
    "running": "cumlogsumexp cummax cummin cumprod cumsum",
    # at indices
    "scattering": "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub",
}
"""Primitives by kind, each in one kind. The names are those of jax 0.10.2; newer versions may drop
the final _p."""


def words(text: str) -> frozenset[str]:
    """Splits a text into words: names of primitives, or of their parameters."""
    return frozenset(text.split())


def kinds(*names: str) -> frozenset[str]:
    """Returns all primitives of these kinds.

    kinds("extreme") has pmax and pmin.
    """
    found = words(" ".join(_KINDS[name] for name in names))
    return found | {name.removesuffix("_p") for name in found}


CALLS = kinds("call")
"""Primitives that call a function."""
COLLECTIVES = kinds("sum", "extreme", "gather", "scatter", "exchange", "permutation")
IDENTITIES = kinds("cast", "identity")
ELEMENTWISE = kinds(
    "linear", "addition", "product", "comparison", "selection", "nonlinear", "random"
)
REDUCTIONS, SCATTERS = kinds("reduction"), kinds("scattering")


class Eqn(Protocol):
    """An equation of a jaxpr (jax.extend.core.JaxprEqn), with the attributes that are read."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    effects: Any
    source_info: Any
    ctx: Any
    replace: Callable[..., Any]


class Atom(Protocol):
    """A variable of a jaxpr, or a literal, with the attribute that is read."""

    aval: Any


def is_variable(var: Any) -> bool:
    """Returns True if an operand is a variable and not a literal."""
    return not isinstance(var, core.Literal)


def shape_of(var: Any) -> tuple[int, ...]:
    """Returns the shape of a variable or a literal; () for a token, which has none."""
    return tuple(getattr(var.aval, "shape", ()))


def is_integer(dtype: object) -> bool:
    """Returns True for an integer dtype; False for those of keys."""
    return isinstance(dtype, np.dtype) and np.issubdtype(dtype, np.integer)


def is_program(x: Any) -> bool:
    """Returns True if a parameter is a jaxpr, closed or open."""
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def body_of(jaxpr: Any) -> tuple[Any, Any]:
    """Splits a closed or open jaxpr into the jaxpr and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Counts the operands of a scan that are constants of its body, and those that are carried."""
    body, _ = body_of(eqn.params["jaxpr"])
    # The arrays a loop iterates over have one more dim outside of it. (The parameters for this
    # differ by JAX version.)
    not_iterated = _count_equal_ranks(eqn.invars, body.invars)
    carried = _count_equal_ranks(eqn.outvars, body.outvars)
    return not_iterated - carried, carried


def _count_equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Counts the variables that have as many dims outside of a loop as in its body."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(shape_of(a)) == len(shape_of(b)) for a, b in pairs)


def split_scan(eqn: Eqn, values: list) -> tuple[list, list, list]:
    """Splits operands of a scan into constants, carried values and what it iterates over.

    They may also be arguments of its body.
    """
    consts, carried = scan_counts(eqn)
    return values[:consts], values[consts : consts + carried], values[consts + carried :]


def split_while(eqn: Eqn, values: list) -> tuple[list, list, list]:
    """Splits operands of a while loop into constants and carried values.

    There are constants of its condition and constants of its body.
    """
    test = eqn.params["cond_nconsts"]
    body = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return values[:test], values[test:body], values[body:]


def called(eqn: Eqn) -> Any:
    """Returns the jaxpr that an equation calls, once and with its operands.

    Returns None if it calls none.
    """
    is_call = eqn.primitive.name in CALLS or eqn.primitive.name == "shard_map"
    params = params_of(eqn)
    return params.get("jaxpr", params.get("call_jaxpr")) if is_call else None


def params_of(eqn: Eqn) -> dict[str, Any]:
    """Returns the parameters of an equation.

    Since jax 0.12 functions like jnp.searchsorted are primitives of their own: objects
    (jax.experimental.hijax.HiPrim) that say by which others they are computed. Such an equation has
    that program for its `jaxpr`.
    """
    if eqn.primitive.name != "call_hi_primitive":
        return eqn.params
    primitive = eqn.params["_prim"]
    return {
        "jaxpr": _expanded(primitive, *jax.tree.leaves((primitive.in_avals, primitive.out_aval)))
    }


@functools.cache  # equations are known by their ids
def _expanded(primitive: Any, aval: Any, *other_avals: Any) -> Any:
    """Traces what computes a HiPrim, for operands and results of these types.

    They are arguments here because primitives that differ only in them are equal.
    """
    found = []

    def trace() -> None:
        found.append(jax.jit(primitive.expand).trace(*primitive.in_avals).jaxpr)

    # Under a shard_map like the one around the equation, whose mesh the types name.
    mesh = aval.sharding.mesh
    outside = mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Auto))
    none = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with none, jax.sharding.use_abstract_mesh(outside):
        if mesh.manual_axes:
            axes = {*mesh.manual_axes}
            jax.eval_shape(jax.shard_map(trace, in_specs=(), out_specs=None, axis_names=axes))
        else:
            trace()
    return found[0]


def axes_of(eqn: Eqn) -> tuple:
    """Returns the axes of a collective; none for other equations."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def frames_of(eqn: Eqn) -> list[tuple[str, int]]:
    """Returns file and line of each call that led to an equation, outermost first."""
    return _frames_of(eqn.source_info.traceback)


@functools.lru_cache(maxsize=2**14)  # many equations share one
def _frames_of(trace: Any) -> list[tuple[str, int]]:
    calls = traceback.walk_tb(trace and trace.as_python_traceback())
    return [(frame.f_code.co_filename, line) for frame, line in calls]


def jaxprs_of(eqn: Eqn) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation."""
    for value in params_of(eqn).values():
        parts = value if isinstance(value, tuple | list) else (value,)
        yield from filter(is_program, parts)
