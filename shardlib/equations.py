"""Equations of a traced program: which call a function, and how one is run again. Public JAX only."""

import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

CALLS = dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr") | dict.fromkeys(
    ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"
)
"""Primitives that call a function, with the parameter that holds it."""


def is_variable(var: Any) -> bool:
    """Whether an operand is a variable, and not a literal."""
    return not isinstance(var, core.Literal)


def body_of(jaxpr: Any) -> tuple[Any, Any]:
    """The jaxpr of a closed one or of an open one, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants of its body, and how many are carried."""
    body, _ = body_of(eqn.params["jaxpr"])
    # What a loop runs over has one dim more outside of it. (The parameters that say so differ by JAX's version.)
    ndim = lambda var: len(getattr(var.aval, "shape", ()))
    is_carry = lambda pair: ndim(pair[0]) == ndim(pair[1])
    carried = len(list(filter(is_carry, zip(eqn.outvars, body.outvars, strict=True))))
    return len(list(filter(is_carry, zip(eqn.invars, body.invars, strict=True)))) - carried, carried


def source_dims(eqn: Any) -> list[int | None]:
    """The dim of the operand that each dim of a result is, None for a new one. Of moves of dims, and of reductions."""
    name, p = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        at = p["broadcast_dimensions"]
        return [at.index(j) if j in at else None for j in range(len(p["shape"]))]
    if name == "transpose":
        return list(p["permutation"])
    gone = p["dimensions" if name == "squeeze" else "axes"]
    return [i for i in range(len(eqn.invars[0].aval.shape)) if i not in gone]


def axes_of(eqn: Any) -> tuple:
    """The axes of a collective; none of another equation."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def frames_of(eqn: Any) -> list[tuple[str, int]]:
    """File and line of each call on the way to an equation, outermost first."""
    found = eqn.source_info.traceback
    calls = traceback.walk_tb(found and found.as_python_traceback())
    return [(frame.f_code.co_filename, line) for frame, line in calls]


def jaxprs_of(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield part


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, closed or open, each before those of the jaxprs among its parameters."""
    for eqn in body_of(jaxpr)[0].eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations_in(inner)


def run_again(eqn: Any, jaxpr: Any, ins: list) -> list[jax.Array]:
    """The results of an equation of `jaxpr`, for the operands `ins`. It keeps its source line."""
    operands = {var: value for var, value in zip(eqn.invars, ins, strict=True) if is_variable(var)}
    alone = jaxpr.replace(constvars=[], invars=[*operands], outvars=[*eqn.outvars], eqns=[eqn], effects=eqn.effects)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*operands.values())


def values_of(variables: Any, env: dict) -> list:
    """The values of variables and literals, None for variables that are not in `env`."""
    value = lambda var: env.get(var) if is_variable(var) else np.asarray(var.val, var.aval.dtype)
    return list(map(value, variables))
