"""Hash of a traced program as a graph of values.

The hash depends on each result as an expression of the arguments, and on which loop, conditional or checkpoint each
equation is in. It does not depend on names, on the order of independent equations, on repeated equations or on results
that nothing uses: XLA compiles the same program with and without them.
"""

import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from shardlib.equations import CALLS, body_of, scan_counts

CHECKPOINTS = ("remat", "remat2", "checkpoint")
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
    jaxpr, constants = body_of(jaxpr)
    constants = map(_constant, constants)
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
    name, p = equation.primitive.name, equation.params
    if name == "name":
        return inputs
    if name in CHECKPOINTS:
        return [_hash("checkpoint", p["prevent_cse"], p["differentiated"], x) for x in _run(p["jaxpr"], inputs, depth)]
    if name in CALLS:
        return _run(p[CALLS[name]], inputs, depth)
    if name == "shard_map":
        blocks = [_hash("block", str(spec), x) for spec, x in zip(p["in_specs"], inputs, strict=True)]
        whole = zip(p["out_specs"], _run(p["jaxpr"], blocks, depth), strict=True)
        return [_hash("whole", str(p["mesh"].shape), str(spec), x) for spec, x in whole]
    if name == "scan":
        constants, carries = scan_counts(equation)
        # With the depth, so that the carries of an inner loop differ from those of the outer one.
        carried = [_hash("carry", depth, i, str(v.aval)) for i, v in enumerate(equation.invars[constants:][:carries])]
        turns = [_hash("turn", depth, x) for x in inputs[constants + carries :]]
        results = _run(p["jaxpr"], inputs[:constants] + carried + turns, depth + 1)
        settings = p["length"], p["reverse"], p["unroll"]
        base = _hash("scan", settings, inputs[constants:][:carries], results[:carries])
        return [_hash(base, i) for i in range(carries)] + [_hash(base, "stacked", y) for y in results[carries:]]
    parameters = [(key, _parameter(value)) for key, value in sorted(p.items()) if key not in WITHOUT_EFFECT]
    base = _hash(name, parameters, inputs, [str(v.aval) for v in equation.outvars])
    return [_hash(base, i) for i in range(len(equation.outvars))]


def _parameter(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_parameter(part) for part in value]
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return _run(value, [_hash("argument", i) for i in range(len(body_of(value)[0].invars))])
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
