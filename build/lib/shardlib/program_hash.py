"""Hash of a traced program as a graph of values.

The hash depends on each result as an expression of the arguments, and on which loop, conditional or checkpoint each
equation is in. It does not depend on names, on the order of independent equations, on repeated equations or on results
that nothing uses: XLA compiles the same program with and without them.
"""

import functools
import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
"""Primitives that only run a jaxpr."""
WITHOUT_EFFECT = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros", "name")
"""Parameters of primitives that do not affect the result."""


def hash_of(traced: jax.stages.Traced) -> str:
    """Hash of the program of a jitted function, from `jax.jit(f).trace(*args)`."""
    closed = traced.jaxpr
    return _hash(_run(closed, [_hash("argument", i, str(v.aval)) for i, v in enumerate(closed.jaxpr.invars)]))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _run(jaxpr: Any, arguments: list[str], depth: int = 0) -> list[str]:
    """Hashes of the results of a jaxpr, closed or open, from those of its arguments, within `depth` loops."""
    constants = map(_constant, getattr(jaxpr, "consts", ()))
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # of a closed one; from jax 0.12 on they are one class
    known = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))
    read = lambda v: _hash("literal", str(v.aval), str(v.val)) if isinstance(v, Literal) else known[v]
    for equation in jaxpr.eqns:
        results = _results(equation, [read(v) for v in equation.invars], depth)
        known |= zip(equation.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _constant(x: Any) -> str:
    array = np.asarray(x)
    return _hash("constant", str(array.dtype), array.shape, array.tobytes())


def _results(equation: Any, inputs: list[str], depth: int) -> list[str]:
    name, p, count = equation.primitive.name, equation.params, len(equation.outvars)
    numbered = lambda base: [_hash(base, i) for i in range(count)]
    if name == "name":
        return inputs
    if name in CALLS and (jaxpr := p.get("jaxpr") or p.get("call_jaxpr")) is not None:
        return _run(jaxpr, inputs, depth)
    if name == "shard_map":
        blocks = [_hash("block", str(spec), x) for spec, x in zip(p["in_specs"], inputs, strict=True)]
        whole = zip(p["out_specs"], _run(p["jaxpr"], blocks, depth), strict=True)
        return [_hash("whole", str(p["mesh"].shape), str(spec), x) for spec, x in whole]
    if name in ("remat", "remat2", "checkpoint"):
        return [_hash("checkpoint", p["prevent_cse"], p["differentiated"], x) for x in _run(p["jaxpr"], inputs, depth)]
    if name == "scan":
        constants, carries = _counts(equation)
        # With the depth, so that the carries of an inner loop differ from those of the outer one.
        carried = [_hash("carry", depth, i, str(v.aval)) for i, v in enumerate(equation.invars[constants:][:carries])]
        turns = [_hash("turn", depth, x) for x in inputs[constants + carries :]]
        results = _run(p["jaxpr"], inputs[:constants] + carried + turns, depth + 1)
        settings = p["length"], p["reverse"], p["unroll"]
        base = _hash("scan", settings, inputs[constants:][:carries], results[:carries])
        return [_hash(base, i) for i in range(carries)] + [_hash(base, "stacked", y) for y in results[carries:]]
    if name == "while":
        of_condition, of_body = p["cond_nconsts"], p["body_nconsts"]
        begin = inputs[of_condition + of_body :]
        carried = [_hash("carry", depth, i) for i in range(len(begin))]
        condition = _run(p["cond_jaxpr"], inputs[:of_condition] + carried, depth + 1)
        body = _run(p["body_jaxpr"], inputs[of_condition:][:of_body] + carried, depth + 1)
        return numbered(_hash("while", begin, condition, body))
    if name == "cond":
        branches = [_run(branch, inputs[1:], depth) for branch in p["branches"]]
        return [_hash("cond", inputs[0], [branch[i] for branch in branches]) for i in range(count)]
    parameters = [(key, _parameter(value)) for key, value in sorted(p.items()) if key not in WITHOUT_EFFECT]
    return numbered(_hash(name, parameters, inputs, [str(v.aval) for v in equation.outvars]))


def _counts(scan: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a scan.

    The other inputs and outputs have one dim more outside of the loop than inside. The shapes are compared because the
    parameters with these numbers differ between versions of JAX.
    """
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
    pairs = lambda outside, inside: zip(outside, inside, strict=True)
    stacked = lambda *sides: sum(len(a.aval.shape) != len(b.aval.shape) for a, b in pairs(*sides))
    carries = len(scan.outvars) - stacked(scan.outvars, body.outvars)
    return len(scan.invars) - carries - stacked(scan.invars, body.invars), carries


@functools.singledispatch
def _parameter(value: Any) -> Any:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        jaxpr = getattr(value, "jaxpr", value)
        return _run(value, [_hash("argument", i) for i in range(len(jaxpr.invars))])
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@_parameter.register(tuple)
@_parameter.register(list)
def _(value: Any) -> Any:
    return [_parameter(part) for part in value]
