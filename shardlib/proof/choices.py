"""Choices by the size of an axis: `if lax.axis_size('t') > 1: x = lax.psum(x, 't')`, which one device leaves out."""

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Literal, Var

from shardlib.equations import is_variable
from shardlib.proof.primitives import COLLECTIVES

OPERATIONS = COLLECTIVES | {"pvary", "pcast", "div", "mul", "ring_enter", "ring_index", "ring_close"}


def completed(jaxpr: Any, twin: Any, twin_sizes: Mapping[str, int]) -> Any:
    """The program of one device, with operations that it left out and that change nothing there.

    Those are collectives that keep the shape, over axes of one device, and products with a number, which is 1 there.
    Each gives its operand, so that the program computes what it did. `twin` itself, if it lacks others.
    """
    pairs = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*twin.constvars, *twin.invars], strict=False))
    before: dict[Any, Any] = {}  # the variable that is the same value as a new one
    kept = lambda var: before.get(var, var)

    def renamed(ours: Any, theirs: Any) -> list:
        """The variables of one device, by those of which they are the value here."""
        if len(ours) != len(theirs):
            return theirs
        same = lambda a, b: is_variable(a) and is_variable(b) and a in pairs and kept(pairs[a]) is b
        return [pairs[a] if same(a, b) else b for a, b in zip(ours, theirs, strict=True)]

    found, rest = [], list(twin.eqns)
    for eqn in jaxpr.eqns:
        other = rest[0] if rest and rest[0].primitive is eqn.primitive else None
        if other is not None:
            other = other.replace(invars=renamed(eqn.invars, other.invars))
        if other is None or (eqn.primitive.name in OPERATIONS and not _is_same(eqn, other, pairs)):
            if (other := _left_out(eqn, pairs, twin_sizes)) is None:
                return twin
            before |= {new: kept(old) for new, old in zip(other.outvars, other.invars, strict=False)}
        else:
            rest.pop(0)
        found.append(other)
        pairs.update(zip(eqn.outvars, other.outvars, strict=False))
    return twin if rest else twin.replace(eqns=found, outvars=renamed(jaxpr.outvars, twin.outvars))


def _axes(eqn: Any) -> tuple:
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _is_same(eqn: Any, other: Any, pairs: Mapping) -> bool:
    same = zip(eqn.invars, other.invars, strict=False)
    return _axes(eqn) == _axes(other) and all(not is_variable(a) or pairs.get(a) is b for a, b in same)


def _left_out(eqn: Any, pairs: Mapping, twin_sizes: Mapping[str, int]) -> Any:
    """The equation on one device, if it changes nothing there; None if it does."""
    name, (first, *others) = eqn.primitive.name, eqn.invars or [None]
    if name in ("div", "mul"):
        if len(others) != 1 or not is_variable(first) or is_variable(others[0]):
            return None
        one = Literal(type(others[0].val)(1), others[0].aval)
        return eqn.replace(invars=[pairs[first], one], outvars=[Var(pairs[first].aval)])
    if name not in OPERATIONS or not eqn.params.get("tiled", True) or not all(map(is_variable, eqn.invars)):
        return None
    if any(twin_sizes[axis] != 1 for axis in _axes(eqn)):
        return None
    operands = [pairs[var] for var in eqn.invars]
    return eqn.replace(invars=operands, outvars=[Var(var.aval) for var in operands])
