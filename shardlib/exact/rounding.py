"""Compares dtypes, because exact arithmetic does not see rounding."""

import collections
from typing import Any

from shardlib.exact.values import is_float
from shardlib.interpret import operations_in


def differing_dtypes(program: Any, twin: Any) -> list[str]:
    """Finds lines that compute floats on a mesh in a dtype in which one device doesn't.

    A dtype of one device alone is no difference: a pipeline stage that runs its backward pass
    apart loses the line of some casts.
    """
    here, there = _dtypes_by_line(program), _dtypes_by_line(twin)
    texts = (
        f"{op[0]}: computes {_named(found)} on the mesh, {_named(there[op])} on one device\n"
        "  remedy: compute in one dtype on every mesh"
        for op, found in here.items()
        if op in there and found - there[op]
    )
    return [*dict.fromkeys(texts)]


def _dtypes_by_line(program: Any) -> dict[tuple[str, str], set[str]]:
    found = collections.defaultdict(set)
    for op in operations_in(program):
        dtypes = {str(var.aval.dtype) for var in op.eqn.outvars if _has_floats(var.aval)}
        if dtypes and (place := op.place()) != "?":
            found[place, op.shown] |= dtypes
    return found


def _has_floats(aval: Any) -> bool:
    return is_float(getattr(aval, "dtype", bool))


def _named(dtypes: set[str]) -> str:
    return " and ".join(sorted(dtypes))
