"""Whether two traces for one device compute the same: one on a mesh with all axes, and one on a mesh that lacks some.

Both have one device along each axis, so that collectives give back their operands and each device's index is 0. Each
value gets a number, which is the same for values that are computed in the same way. Code that is per-device on purpose
is not looked into.
"""

import math
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from shardlib.equations import CALLS, axes_of, body_of, scan_counts
from shardlib.marks import is_region, mark_of
from shardlib.proof.elementwise import ELEMENTWISE
from shardlib.proof.equation import Equation, comparable
from shardlib.proof.primitives import COLLECTIVES, IDENTITIES

REMEDY = (
    "let no value depend on whether the mesh has an axis: types, shardops.axis_size and axis_index are read as "
    "with one device along an axis that it lacks"
)
FOLDED = {"add": operator.add, "add_any": operator.add, "sub": operator.sub, "mul": operator.mul, "lt": operator.lt}
OF_MESHES = frozenset("sharding out_sharding dst_sharding mesh concrete_mesh ctx_mesh vma result_avals".split())  # noqa: SIM905
"""Parameters that name axes of the mesh."""


class _Numbering:
    """Numbers of the values of programs: `where` has the first equation that makes each."""

    def __init__(self, numbers: dict):
        self._numbers, self.where = numbers, {}
        self._moved: dict[Any, tuple] = {}  # of which value another is a transpose, and its dims
        self._shaped: dict[Any, tuple] = {}  # of which value another is a reshape, and the shape of that

    def number(self, *parts: Any) -> Any:
        """The number of what is computed so."""
        return self._numbers.setdefault(parts, len(self._numbers))

    def run(self, jaxpr: Any, args: list, depth: int = 0, caller: Any = None) -> list:
        """The numbers of the results, by those of the arguments."""
        body, consts = body_of(jaxpr)
        known = dict(zip(body.invars, args, strict=True))
        known |= zip(body.constvars, map(self._constant, consts or body.constvars), strict=True)
        read = lambda var: (
            self._constant(np.asarray(var.val, var.aval.dtype)) if isinstance(var, Literal) else known[var]
        )
        for eqn in body.eqns:
            at = Equation(eqn, caller=caller)
            known |= zip(eqn.outvars, self._results(eqn, list(map(read, eqn.invars)), depth, at), strict=True)
        return list(map(read, body.outvars))

    def _constant(self, x: Any) -> Any:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        if x.size and x.dtype != object and (x == x.flat[0]).all():  # not where it is NaN
            return ("all", x.shape, x.dtype, x.flat[0].item())
        return self.number("constant", x.shape, str(x.dtype), x.tobytes() if x.dtype != object else str(x))

    def _results(self, eqn: Any, ins: list, depth: int, at: Any) -> list:
        name, params, avals = eqn.primitive.name, eqn.params, [var.aval for var in eqn.outvars]
        if is_region(eqn):
            return [self.number("per_device", *ins, i) for i in range(len(avals))]
        if mark := mark_of(eqn):
            return [self.number(mark.kind, re.sub(r" ?[/+*]\w+", "", mark.label), *ins)]  # of types, without their axes
        if name in CALLS or name == "shard_map":
            return self.run(params[CALLS.get(name, "jaxpr")], ins, depth, at)
        if name == "ppermute" and not params["perm"]:
            return [("all", avals[0].shape, avals[0].dtype, 0)]
        is_collective = name in COLLECTIVES and not any(isinstance(axis, int) for axis in axes_of(eqn))
        is_identity = is_collective or name in IDENTITIES or name.removesuffix("_p").endswith("_cast")
        if is_identity and len(ins) == len(avals):
            return [self._reshaped(x, var.aval, aval) for x, var, aval in zip(ins, eqn.invars, avals, strict=True)]
        if name == "axis_index":
            return [("all", (), avals[0].dtype, 0)]
        if name == "transpose":
            return [self._transposed(ins[0], params["permutation"])]
        if name == "scan":
            return self._scan(eqn, ins, depth, at)
        if name == "while":
            return self._while(params, ins, depth, at)
        if name == "cond":
            branches = [self.run(branch, ins[1:], depth, at) for branch in params["branches"]]
            return [self.number("cond", ins[0], *outs) for outs in zip(*branches, strict=True)]
        if (found := _folded(eqn, ins)) is not None:
            return [found]
        if name == "dot_general":
            return [self._dot(eqn, ins, at)]
        is_new_shape = name == "broadcast_in_dim" and math.prod(avals[0].shape) == math.prod(eqn.invars[0].aval.shape)
        if is_new_shape or name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
            return [self._reshaped(ins[0], eqn.invars[0].aval, avals[0])]
        text = lambda parameter: re.sub(r" at 0x\w+", "", repr(comparable(parameter)))
        given = sorted((k, text(v)) for k, v in params.items() if k not in OF_MESHES)
        orders = [self._moved[x][1] for x in ins if x in self._moved]
        if name in ELEMENTWISE and len({*orders}) == 1 and len(orders) == len([x for x in ins if isinstance(x, int)]):
            order, shape = orders[0], avals[0].shape  # dims are moved after what is done to each entry
            whole = tuple(shape[order.index(i)] for i in range(len(order)))
            alike = lambda x: (x[0], whole, *x[2:]) if x[1] == shape else x
            ins = [self._moved[x][0] if isinstance(x, int) else alike(x) for x in ins]
            return [self._transposed(self._made(at, name, *given, whole, str(avals[0].dtype), *ins, 0), order)]
        shapes = [part for aval in avals for part in (getattr(aval, "shape", ()), str(aval.dtype))]
        return [self._made(at, name, *given, *shapes, *ins, i) for i in range(len(avals))]

    def _made(self, at: Any, *parts: Any) -> Any:
        found = self.number(*parts)
        self.where.setdefault(found, at)
        return found

    def _transposed(self, x: Any, order: tuple) -> Any:
        """The number of `x` with its dims in this order, however often they were moved."""
        root, before = self._root(x, len(order))
        order = tuple(before[i] for i in order)
        if isinstance(root, tuple):  # all entries are equal
            return (root[0], tuple(root[1][i] for i in order), *root[2:])
        if order == tuple(range(len(order))):
            return root
        found = self.number("transpose", order, root)
        self._moved[found] = root, order
        return found

    def _root(self, x: Any, ndim: int) -> tuple[Any, tuple]:
        return self._moved.get(x, (x, tuple(range(ndim))))

    def _dot(self, eqn: Any, ins: list, at: Any) -> Any:
        """The number of a product, whatever the order of its operands and of their dims."""
        p, (contracted, batch) = eqn.params, eqn.params["dimension_numbers"]
        ndims = [len(var.aval.shape) for var in eqn.invars]
        roots = [self._root(x, n) for x, n in zip(ins, ndims, strict=True)]
        first, second = order = sorted((0, 1), key=lambda k: (repr(roots[k][0]), k))
        of = lambda k, dims: [roots[k][1][i] for i in dims]
        summed = tuple(sorted(zip(of(first, contracted[first]), of(second, contracted[second]), strict=True)))
        # The dims of the result, as they are there, and in the order of those of the operands.
        together = list(zip(of(first, batch[first]), of(second, batch[second]), strict=True))
        free = lambda k: of(k, [i for i in range(ndims[k]) if i not in (*contracted[k], *batch[k])])
        there = [(0, *pair) for pair in together] + [(1 + order.index(k), i) for k in (0, 1) for i in free(k)]
        kept = sorted(there)
        more = str(p["precision"]), str(p["preferred_element_type"]), str(eqn.outvars[0].aval.dtype)
        found = self._made(at, "dot_general", *more, summed, tuple(kept), roots[first][0], roots[second][0])
        return self._transposed(found, tuple(kept.index(dim) for dim in there))

    def _reshaped(self, x: Any, before: Any, after: Any) -> Any:
        """The number of the entries of `x` in another shape, however often it was changed."""
        root, shape = self._shaped.get(x, (x, getattr(before, "shape", ())))
        if shape == getattr(after, "shape", ()):
            return root
        found = self.number("reshape", after.shape, root)
        self._shaped[found] = root, shape
        return found

    def _scan(self, eqn: Any, ins: list, depth: int, at: Any) -> list:
        (consts, carried), p = scan_counts(eqn), eqn.params
        fixed, start, rows = ins[:consts], ins[consts : consts + carried], ins[consts + carried :]
        symbols = [self.number("carry", depth, i) for i in range(carried)]
        outs = self.run(p["jaxpr"], [*fixed, *symbols, *(self.number("row", depth, x) for x in rows)], depth + 1, at)
        loop = self.number("scan", p["length"], p["reverse"], *start, *outs[:carried])
        return [self.number(loop, i) for i in range(carried)] + [self.number(loop, "rows", x) for x in outs[carried:]]

    def _while(self, p: Any, ins: list, depth: int, at: Any) -> list:
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        symbols = [self.number("carry", depth, i) for i in range(len(ins) - b)]
        test = self.run(p["cond_jaxpr"], [*ins[:a], *symbols], depth + 1, at)
        outs = self.run(p["body_jaxpr"], [*ins[a:b], *symbols], depth + 1, at)
        return [self.number("while", *test, *outs, *ins[b:], i) for i in range(len(outs))]


def _folded(eqn: Any, ins: list) -> Any:
    """The number of a result that is known, or is an operand as it is; None of any other."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    shapes = [getattr(var.aval, "shape", ()) for var in eqn.invars]
    if name == "dynamic_slice" and shapes[0] == aval.shape:
        return ins[0]
    if name == "dynamic_update_slice" and shapes[0] == shapes[1]:
        return ins[1]
    values = [x[3] if isinstance(x, tuple) else None for x in ins]
    if name in ("broadcast_in_dim", "reshape", "squeeze") and values[0] is not None:
        return ("all", aval.shape, aval.dtype, values[0])
    is_own = lambda i: shapes[i] == aval.shape and eqn.invars[i].aval.dtype == aval.dtype
    for i, other in ((0, 1), (1, 0)):
        neutral = {"add": 0, "add_any": 0, "sub": 0 if i == 0 else None, "mul": 1}.get(name)
        if neutral is not None and values[other] == neutral and is_own(i):
            return ins[i]
    if None in values or not all(isinstance(x, int | bool) for x in values):
        return None
    if name == "select_n" and shapes[0] == ():
        return ins[1 + values[0]]
    value = values[0] if name == "convert_element_type" else FOLDED[name](*values) if name in FOLDED else None
    return None if value is None else ("all", aval.shape, aval.dtype, np.asarray(value).astype(aval.dtype).item())


def differences(program: Any, lacking: Any, axes: Iterable[str]) -> Iterator[str]:
    """Where a traced program first computes something else than the same program on a mesh that lacks `axes`."""
    numbers: dict = {}
    ours, theirs = _Numbering(numbers), _Numbering(numbers)
    args = [[ours.number("argument", i) for i in range(len(body_of(x)[0].invars))] for x in (program, lacking)]
    if ours.run(program, args[0]) != theirs.run(lacking, args[1]):
        first = next((at for number, at in ours.where.items() if number not in theirs.where), None)
        problem = f"another value on a mesh that lacks {', '.join(axes)}, as that of one device does"
        yield f"{f'{first.place()}: {first.name}' if first else '?'}: {problem}\n  remedy: {REMEDY}"
