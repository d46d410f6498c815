"""Compares traces of a program at several sizes: are they one program with other numbers?

A check at small sizes says something about a run only if the program at the run's sizes is the same
one: the same primitives from the same source lines, with the same operands and parameters. Numbers
may differ (shapes, lengths of loops, literals) if one monomial of the sizes gives them all. Two
small traces with independent ratios say much more than one, because real sizes are mostly powers of
two: 4·B and L may be equal by chance, but not in all traces.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardlib.equations import body_of, is_program, jaxprs_of, words
from shardlib.exact.monomials import Monomials, Numbers
from shardlib.exact.values import is_float, is_key
from shardlib.interpret import Domain, Operation, in_words, interpret, literal_of

SMALLEST_RING = 3
"""A ring of two devices is its own reverse, so one of the small programs needs a larger one."""
_NUMBERS = words("""axis_size k length limit_indices new_sizes operand_shape padding_config shape
    size sizes slice_sizes start_indices strides unroll""")
"""Parameters that are sizes. All others are equal in all traces."""
_NOT_COMPARED = words("""compiler_options_kvs ctx_mesh debug_info in_layouts in_shardings mesh name
    out_layouts out_shardings""")
"""Parameters that name the devices, or where a function was traced."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """An equation, or the arguments or results of a body: `what` says which.

    Attributes:
        operands: the number of each variable, in the order of their equations, or a literal.
        avals: types of the results.
    """

    op: Operation | None
    what: str
    operands: list[Any]
    avals: list[Any]


class _Steps(Domain[Any]):
    """Lists the steps of a program, and those of each body after its equation."""

    def __init__(self, program: Any):
        self._numbers = itertools.count()
        self.found: list[_Step] = []
        self._enter(program, None)

    def constant(self, x: Any) -> Any:
        return literal_of(x)

    def follow(self, op: Operation, ins: list[Any]) -> list[Any]:
        outs = self._add(op, op.name, ins, op.eqn.outvars)
        for body in jaxprs_of(op.eqn):
            self._enter(body, op)
        return outs

    def _add(self, op: Operation | None, what: str, ins: list[Any], outs: list[Any]) -> list[Any]:
        self.found.append(_Step(op, what, ins, [var.aval for var in outs]))
        return [next(self._numbers) for _ in outs]

    def _enter(self, program: Any, op: Operation | None) -> None:
        jaxpr, consts = body_of(program)
        variables = jaxpr.invars if consts else [*jaxpr.constvars, *jaxpr.invars]
        arguments = self._add(op, "arguments", [], variables)
        self._add(op, "results", interpret(program, self, arguments, op), [])


def compare(
    programs: Sequence[Any], dims: Mapping[str, Numbers], axes: Mapping[str, Numbers]
) -> list[str]:
    """Finds where traces of a program at several sizes are not the same program.

    Args:
        programs: the jaxpr at the sizes of a run, the one at small sizes that stands for it, and
            others, which only show what the numbers are made of.
        dims: the size of each dim in each of them, by name.
        axes: the number of devices along each axis of the mesh in each of them.

    Returns:
        What does not correspond, such as `train.py:12: matmul: 96 of (96, 8) is no product of
        sizes: 12 in the small program`; empty if they are one program.
    """
    found = [
        f"axis {name} has {shown(sizes)} devices: one device is another program than several"
        for name, sizes in axes.items()
        if 1 in sizes and set(sizes) != {1}
    ]
    monomials = Monomials(dims, axes)
    for steps in itertools.zip_longest(*(_Steps(program).found for program in programs)):
        texts = [*_Comparison(monomials, steps).texts()]
        found += [f"{_place(steps)}: {text}" for text in texts]
        if _is_other(steps):  # the steps after it do not belong together
            break
    return [*dict.fromkeys(found)]


def shown(numbers: Sequence[Any]) -> str:
    """Formats a number of each trace: `512 (32 and 48 in the small programs)`."""
    real, *small = numbers
    others = " and ".join(map(str, small))
    return f"{real} ({others} in the small program{'s'[: len(small) - 1]})"


def _place(steps: Sequence[_Step | None]) -> str:
    op = next(step for step in steps if step is not None).op
    return f"{op.place()}: {op.shown}" if op else "the program"


def _is_other(steps: Sequence[_Step | None]) -> bool:
    shapes = {step and (step.what, len(step.operands), len(step.avals)) for step in steps}
    return len(shapes) > 1


class _Comparison:
    """Compares a step of each program."""

    def __init__(self, monomials: Monomials, steps: Sequence[Any]):
        self.monomials = monomials
        self.steps = steps

    def texts(self) -> Iterator[str]:
        """Yields what differs."""
        if _is_other(self.steps):
            names = [step.what if step else "the end" for step in self.steps]
            yield f"another equation: {shown(names)}"
            return
        for operands in zip(*(step.operands for step in self.steps), strict=True):
            yield from self.operand(operands)
        for avals in zip(*(step.avals for step in self.steps), strict=True):
            yield from self.types(avals)
        first = self.steps[0]
        if first.op is not None and first.what == first.op.name:
            if any(step.op.calls() != first.op.calls() for step in self.steps):
                places = [step.op.place() for step in self.steps]
                yield f"from another line: {shown(places)}"
            yield from self.params([step.op.params for step in self.steps])
            if first.what == "slice":
                yield from self.parts()

    def parts(self) -> Iterator[str]:
        """Finds slices of what does not become smaller, such as the first entries of a table."""
        shapes = [step.op.eqn.invars[0].aval.shape for step in self.steps]
        ends = [step.op.params["limit_indices"] for step in self.steps]
        for sizes, limits in zip(zip(*shapes, strict=True), zip(*ends, strict=True), strict=True):
            if len(set(sizes)) == 1 and len(set(limits)) > 1:
                yield f"a part of {sizes[0]} entries that ends at {shown(limits)}"

    def operand(self, operands: Sequence[Any]) -> Iterator[str]:
        """Compares variables by their numbers, literals by their values."""
        if all(isinstance(x, int) for x in operands):
            if len(set(operands)) > 1:
                yield "another operand"
        elif any(isinstance(x, int) for x in operands):
            yield "a constant in some programs only"
        else:
            yield from self.arrays(operands)

    def types(self, avals: Sequence[Any]) -> Iterator[str]:
        """Compares types: dtypes are equal, and sizes are made of dims and axes."""
        dtypes = [getattr(aval, "dtype", None) for aval in avals]
        shapes = [tuple(getattr(aval, "shape", ())) for aval in avals]
        if any(dtype != dtypes[0] for dtype in dtypes):
            yield f"dtype {shown(dtypes)}"
        if len({len(shape) for shape in shapes}) > 1:
            yield f"shape {shown(shapes)}"
            return
        for sizes in zip(*shapes, strict=True):
            if len(set(sizes)) == 1:
                continue
            if min(sizes[:2]) < 2:  # the others only show what the numbers are made of
                yield f"a dim of {shown(sizes)} entries: one entry is another case than several"
            else:
                yield from self.number(sizes, f" of shape {shapes[0]}")

    def number(self, numbers: Numbers, where: str = "") -> Iterator[str]:
        """Compares sizes."""
        # positions may be padded for a convolution of up to four taps
        near = (tuple(int(n) - pad for n in numbers) for pad in (0, 2))
        if not any(map(self.monomials.explain, near)):
            yield f"{shown(numbers)}{where} is no product of sizes"

    def arrays(self, arrays: Sequence[Any]) -> Iterator[str]:
        """Compares literals, and arrays that the programs hold."""
        yield from self.types(arrays)
        dtype = arrays[0].dtype
        if is_key(dtype) or len({len(a.shape) for a in arrays}) > 1:
            return
        arrays = [np.asarray(a) for a in arrays]
        if len({a.shape for a in arrays}) == 1 and all(
            map(functools.partial(_equal, arrays[0]), arrays)
        ):
            return
        forms = [_as_numbers, _logarithms] if is_float(dtype) else [_as_numbers]
        explain: Any = self.monomials.explain
        if is_float(dtype):
            tolerance = 1e-4 if dtype.itemsize >= 4 else 2.0**-7
            explain = functools.partial(self.monomials.explain_floats, tolerance=tolerance)
        for form in forms:
            lines = [_line(form(a)) for a in arrays]
            if None not in lines and all(map(explain, zip(*lines, strict=True))):
                return
        values = [a.tolist() for a in arrays] if arrays[0].size == 1 else [a.shape for a in arrays]
        yield f"a constant that no product of sizes explains: {shown(values)}"

    def params(self, params: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Compares the parameters of a primitive. Its bodies are steps of their own."""
        if len({frozenset(of) for of in params}) > 1:
            yield f"parameters {shown([sorted(of) for of in params])}"
            return
        for name in params[0].keys() - _NOT_COMPARED:
            values = [of[name] for of in params]
            if name == "perm":
                yield from self.permutation(values)
            elif name in _NUMBERS:
                yield from self.numbers_in(name, values)
            elif any(x is not values[0] for x in values) and len({*map(_comparable, values)}) > 1:
                yield f"{name}: {shown(values)}"

    def numbers_in(self, name: str, values: Sequence[Any]) -> Iterator[str]:
        """Compares nested tuples of sizes."""
        if all(x == values[0] for x in values):
            return
        if all(isinstance(x, int | np.integer) for x in values):
            yield from self.number(tuple(values), f" of {name}")
        elif all(isinstance(x, tuple) for x in values) and len({*map(len, values)}) == 1:
            for parts in zip(*values, strict=True):
                yield from self.numbers_in(name, parts)
        elif len({*map(_comparable, values)}) > 1:
            yield f"{name}: {shown(values)}"

    def permutation(self, values: Sequence[Any]) -> Iterator[str]:
        """Compares which device sends to which: pairs are equal, or rings in one direction."""
        pairs = [sorted(map(tuple, pairs)) for pairs in values]
        if all(of == pairs[0] for of in pairs):
            return
        turns = [_turn(of) for of in pairs]
        forward = set(turns)
        backward = {turn and turn - len(of) for turn, of in zip(turns, pairs, strict=True)}
        if 0 in forward or min(len(forward), len(backward)) > 1:
            yield f"another permutation: {shown(pairs)}"
        elif max(map(len, pairs[1:])) < SMALLEST_RING:
            sizes = shown([len(of) for of in pairs])
            yield f"a ring of {sizes} devices: one of two devices is its own reverse"


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _turn(pairs: Sequence[tuple[int, int]]) -> int:
    """Returns how far a ring sends; 0: it is no ring."""
    size = len(pairs)
    turns = {(b - a) % size for a, b in pairs}
    is_ring = len(turns) == 1 and [a for a, _ in pairs] == [*range(size)]
    return turns.pop() if is_ring else 0


def _as_numbers(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64 if is_float(a.dtype) else np.int64)


def _logarithms(a: np.ndarray) -> np.ndarray:
    """Rotary frequencies have logarithms that grow by the same step."""
    with np.errstate(all="ignore"):
        return np.log(a.astype(np.float64))


def _line(a: np.ndarray) -> tuple[Any, ...] | None:
    """Returns the first entry of an array and its growth along each dim, if that gives all."""
    if not a.size:
        return (0,)
    found = [a.flat[0].item()]
    line = np.full(a.shape, a.flat[0])
    for dim, size in enumerate(a.shape):
        step = a.take(min(1, size - 1), dim).flat[0] - a.flat[0]
        line = line + step * np.arange(size).reshape([-1 if i == dim else 1 for i in range(a.ndim)])
        found.append(step.item())
    return tuple(found) if np.allclose(line, a, 1e-5, 1e-5, equal_nan=True) else None


def _comparable(x: Any) -> str:
    """Describes a parameter, apart from devices and functions."""
    if is_program(x) or (callable(x) and not isinstance(x, type)):
        return "function"
    if isinstance(x, tuple | list):
        return str([_comparable(part) for part in x])
    return in_words(getattr(x, "spec", x))
