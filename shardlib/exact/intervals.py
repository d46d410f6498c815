"""Bounds the integers of a program, by abstract interpretation, and the outcomes of decisions.

A decision is a primitive whose result has other laws in other ranges of its operands: comparisons,
selections, extremes, remainders, clamped indices, conditionals.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardlib.equations import IDENTITIES, axes_of, is_integer, kinds, words
from shardlib.exact.elementwise import MASKED
from shardlib.exact.machine import axes_of_entry
from shardlib.exact.values import is_float
from shardlib.interpret import Domain, Operation, fixed_point, literal_of, operations_in

Number = Any
"""An int, or ±math.inf."""


class Interval(NamedTuple):
    """Bounds of all entries of an array on all devices; infinite where nothing is known.

    Attributes:
        low: lower bound; 0 of a bool that may be False.
        high: upper bound; 1 of a bool that may be True.
        of_data: whether floats among the arguments, or random numbers, decide it.
        base: the value that a loop carries, if this is that plus `low_step` to `high_step`.
        position: an iota that is at least this in each entry, by its equation and dim, and whether
            it is this.
        share: of a polynomial in numbers of devices, layers or positions, the sum of its degrees,
            each over the count of such numbers that were run.
    """

    low: Number = -math.inf
    high: Number = math.inf
    of_data: bool = False
    base: Any = None
    low_step: Number = 0
    high_step: Number = 0
    position: tuple[Any, bool] | None = None
    share: float = 0


UNKNOWN = Interval()
TRUE, FALSE, SMALLER, LARGER, REACHES = "true", "false", "smaller", "larger", "not smaller"
_EXTREME = (SMALLER, None, LARGER)
_TURNS = (SMALLER, REACHES, REACHES)
COMPARED: dict[str, tuple[str | None, str | None, str | None]] = {
    "lt": (TRUE, FALSE, FALSE),
    "le": (TRUE, TRUE, FALSE),
    "gt": (FALSE, FALSE, TRUE),
    "ge": (FALSE, TRUE, TRUE),
    "eq": (FALSE, TRUE, FALSE),
    "ne": (TRUE, FALSE, TRUE),
    "abs": _EXTREME,
    "and": _EXTREME,
    "or": _EXTREME,
    "xor": _EXTREME,
    "clamp": _EXTREME,
    "max": _EXTREME,
    "min": _EXTREME,
    "sign": _EXTREME,
    "dynamic_slice": _EXTREME,
    "dynamic_update_slice": _EXTREME,
    "gather": _EXTREME,
    "div": _TURNS,
    "exp": _TURNS,
    "rem": _TURNS,
    "shift_right_arithmetic": _TURNS,
    "shift_right_logical": _TURNS,
}
"""The outcome of each decision if a number is smaller than, equal to, or larger than another."""
STEPWISE = words("""and ceil convert_element_type cummax cummin div dynamic_slice floor gather
    is_finite mul or reduce_sum rem round shift_right_arithmetic shift_right_logical top_k""")
"""Functions that may be constant in a range of positions: quotients, roundings, tables.

If a run at small sizes had one value only, it says nothing of the others.
"""
OF_SEVERAL = words("mul reduce_sum")
"""Those of which a single number may be another at each size, such as a count of positions."""
_SAME = kinds("view", "cast", "identity", "unreduced", "gather", "exchange", "extreme")
_SAME |= {"copy", "cummax", "cummin", "dynamic_slice", "gather", "pbroadcast"}
_SAME |= {"convert_element_type", "reduce_max", "reduce_min", "rev", "slice", "split"}
"""Primitives whose results have entries of their first operand only."""
_JOINED = frozenset({"concatenate", "dynamic_update_slice", "pad", "scatter", "stack"})
"""Primitives whose results have entries of their operands of the result's dtype."""
_LINEAR = _SAME | _JOINED | kinds("sum") | words("add cumsum div neg reduce_sum select_n sort sub")
"""Primitives whose results are polynomials of the same degree as their operands."""


def hull(a: Interval, b: Interval) -> Interval:
    """Returns an interval for what is in one of two."""
    low, high = min(a.low, b.low), max(a.high, b.high)
    if a.base is None or a.base != b.base:
        return Interval(low, high, a.of_data or b.of_data)
    steps = min(a.low_step, b.low_step), max(a.high_step, b.high_step)
    return Interval(low, high, a.of_data or b.of_data, a.base, *steps)


def join_all(intervals: Sequence[Interval]) -> Interval:
    """Returns an interval for what is in one of several."""
    found = intervals[0]
    for other in intervals[1:]:
        found = hull(found, other)
    return found


# ---- arithmetic ----------------------------------------------------------------------------------


def _shift(a: Interval, low: Number, high: Number) -> Interval:
    """Adds a number from `low` to `high`."""
    return Interval(a.low + low, a.high + high, False, a.base, a.low_step + low, a.high_step + high)


def _add(a: Interval, b: Interval) -> Interval:
    return _shift(a, b.low, b.high) if b.base is None else _shift(b, a.low, a.high)


def _times(x: Number, y: Number) -> Number:
    return x * y if x and y else 0


def _quotient(x: Number, y: Number) -> Number:
    if math.isinf(x):
        return x if y > 0 else -x
    if math.isinf(y):
        return 0
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _ratio(x: Number, y: Number) -> Number:
    return _times(x, 1 / y)


def _at_corners(function: Callable, a: Interval, b: Interval) -> Interval:
    pairs = itertools.product((a.low, a.high), (b.low, b.high))
    found = [function(x, y) for x, y in pairs]
    return Interval(min(found), max(found))


def _multiply(a: Interval, b: Interval) -> Interval:
    return _at_corners(_times, a, b)


def _divide(a: Interval, b: Interval) -> Interval:
    return UNKNOWN if b.low <= 0 <= b.high else _at_corners(_quotient, a, b)


def _remainder(a: Interval, b: Interval) -> Interval:
    if b.low <= 0 or not isinstance(b.high, int):  # of floats, whose remainders are not whole
        return UNKNOWN
    if a.low >= 0 and a.high < b.low:
        return a
    low = 0 if a.low >= 0 else max(a.low, 1 - b.high)
    return Interval(low, 0 if a.high <= 0 else min(a.high, b.high - 1))


def _power_of_two(bits: Interval) -> Interval:
    if not 0 <= bits.low <= bits.high < 64:
        return UNKNOWN
    return Interval(2**bits.low, 2**bits.high)


def _shift_right(a: Interval, bits: Interval) -> Interval:
    return _divide(a, _power_of_two(bits)) if a.low >= 0 else UNKNOWN


def _and(a: Interval, b: Interval) -> Interval:
    highs = [x.high for x in (a, b) if x.low >= 0]
    base = a if a.base is not None else b  # of a comparison that limits a counter
    of_data = a.of_data or b.of_data
    low = 1 if a.low == a.high == b.low == b.high == 1 else 0
    return Interval(low, min(highs), of_data, *base[3:]) if highs else UNKNOWN


def _or(a: Interval, b: Interval) -> Interval:
    if min(a.low, b.low) < 0:
        return UNKNOWN
    high = max(a.high, b.high)
    filled = high if math.isinf(high) else 2 ** int(high).bit_length() - 1
    return Interval(max(a.low, b.low), filled, a.of_data or b.of_data)


def _xor(a: Interval, b: Interval) -> Interval:
    return _or(a, b)._replace(low=0) if min(a.low, b.low) >= 0 else UNKNOWN


def _abs(a: Interval) -> Interval:
    low = 0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
    return Interval(low, max(abs(a.low), abs(a.high)))


def _sign(a: Interval) -> Interval:
    return Interval((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0))


def _rounding(function: Callable) -> Callable[[Interval], Interval]:
    return lambda a: Interval(float(function(a.low)), float(function(a.high)))


def _minimum(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.low, b.low), min(a.high, b.high))


def _maximum(a: Interval, b: Interval) -> Interval:
    return Interval(max(a.low, b.low), max(a.high, b.high))


_ARITHMETIC: dict[str, Callable[..., Interval]] = {
    "abs": _abs,
    "add": _add,
    "add_any": _add,
    "and": _and,
    "ceil": _rounding(np.ceil),
    "clamp": lambda low, a, high: _minimum(_maximum(a, low), high),
    "div": _divide,
    "floor": _rounding(np.floor),
    "max": _maximum,
    "min": _minimum,
    "mul": _multiply,
    "neg": lambda a: Interval(-a.high, -a.low),
    "or": _or,
    "rem": _remainder,
    "round": _rounding(np.round),
    "shift_left": lambda a, bits: _multiply(a, _power_of_two(bits)),
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "sign": _sign,
    "square": lambda a: _multiply(_abs(a), _abs(a)),
    "sub": lambda a, b: _shift(a, -b.high, -b.low),
    "xor": _xor,
}


_OF_COUNTS = {"floor_divide": _divide, "remainder": _remainder}
"""Functions of jax.numpy that do the same for integers that are not negative."""


# ---- decisions -----------------------------------------------------------------------------------


def kind_of(op: Operation) -> str:
    """Returns the name of a decision in COMPARED, `select_n` or `cond`; "" if it is none."""
    name = op.name.removesuffix("_to")
    if name in ("select_n", "cond"):
        return name
    if name not in COMPARED:
        return ""
    dtype = op.eqn.invars[-1].aval.dtype
    return name if is_integer(dtype) or (name in _OF_FLOATS and is_float(dtype)) else ""


def chooses_once(op: Operation) -> bool:
    """Returns True for a conditional, and for a selection of whole arrays by one number."""
    return op.name == "cond" or (op.name == "select_n" and op.eqn.invars[0].aval.size == 1)


def is_stepwise(op: Operation) -> bool:
    """Returns True for a function whose result may be the same in a range of its operands."""
    if op.name not in STEPWISE:
        return False
    of_floats, to_floats = (is_float(v[0].aval.dtype) for v in (op.eqn.invars, op.eqn.outvars))
    if op.name == "convert_element_type":
        return of_floats and not to_floats
    if op.name == "mul":
        return to_floats  # such as a product of masks
    return op.name != "div" or not to_floats


_OF_BITS = words("and or shift_right_arithmetic shift_right_logical xor")
_OF_FLOATS = words("abs clamp eq exp ge gt le lt max min ne sign")


def pairs_of(
    op: Operation, ins: Sequence[Any], size: Callable[[Any], Any], number: Callable[[Any], Any]
) -> list[tuple[Any, Any]]:
    """Returns what a decision of COMPARED compares, as intervals or as arrays.

    Args:
        op: the decision.
        ins: its operands.
        size: returns |x|.
        number: makes an int a value.
    """
    name = kind_of(op)
    if name == "clamp":
        return [(ins[1], ins[0]), (ins[1], ins[2])]
    if name in ("abs", "sign"):
        return [(ins[0], number(0))]
    if name == "exp":
        return [(ins[0], number(MASKED))]
    if name in ("div", "rem"):
        return [(size(ins[0]), size(ins[1]))]
    if name.startswith("shift_right"):
        return [(size(ins[0]), _shift_left(number(1), ins[1]))]
    if name == "gather":
        return _indices_of(op, ins[1], number)
    if name.startswith("dynamic"):
        ends = [*map(number, ends_of(op))]
        starts = ins[len(ins) - len(ends) :]
        return [
            pair for x, end in zip(starts, ends, strict=True) for pair in ((x, number(0)), (x, end))
        ]
    return [(ins[0], ins[1])]


def _indices_of(op: Operation, indices: Any, number: Callable) -> list[tuple[Any, Any]]:
    shape, sizes = op.eqn.invars[0].aval.shape, op.params["slice_sizes"]
    pairs = []
    for i, dim in enumerate(op.params["dimension_numbers"].start_index_map):
        index = indices if isinstance(indices, Interval) else indices[..., i]
        pairs += [(index, number(0)), (index, number(shape[dim] - sizes[dim]))]
    return pairs


def ends_of(op: Operation) -> list[int]:
    """Returns the last index in each dim at which a dynamic slice may start."""
    sliced = op.eqn.invars[0].aval.shape
    taken = op.params.get("slice_sizes") or op.eqn.invars[1].aval.shape
    return [n - m for n, m in zip(sliced, taken, strict=True)]


def _shift_left(a: Any, bits: Any) -> Any:
    return a << bits if isinstance(bits, np.ndarray) else _multiply(a, _power_of_two(bits))


def exactly(number: int) -> Interval:
    """Returns the interval of one number."""
    return Interval(number, number)


def possible(op: Operation, ins: Sequence[Interval]) -> list[set[Any]]:
    """Returns for each question of a decision about integers which outcomes it may have."""
    name = kind_of(op)
    if name in COMPARED:
        is_random = name in _OF_BITS and any(x.of_data for x in ins)
        of_data = is_float(op.eqn.invars[-1].aval.dtype) and any(x.of_data for x in ins)
        one = op.eqn.outvars[0].aval.size == 1 and name != "exp"  # a mask has several
        if is_random or (of_data and not one):  # data has all
            return []
        pairs = pairs_of(op, ins, _abs, exactly)
        return [outcomes(name, x.low < y.high, _meet(x, y), x.high > y.low) for x, y in pairs]
    if not name or (ins[0].of_data and not chooses_once(op)):
        return []
    cases = op.params["branches"] if name == "cond" else ins[1:]
    return [{i for i in range(len(cases)) if ins[0].low <= i <= ins[0].high}]


def _meet(a: Interval, b: Interval) -> bool:
    return a.low <= b.high and b.low <= a.high


def outcomes(name: str, smaller: bool, equal: bool, larger: bool) -> set[Any]:
    """Returns the outcomes of a decision in COMPARED."""
    words = zip(COMPARED[name], (smaller, equal, larger), strict=True)
    return {word for word, is_so in words if is_so and word}


def differing_over(axis: str) -> str:
    """Returns the outcome of a decision that devices of an axis do not make alike."""
    return f"different over {axis}"


# ---- programs ------------------------------------------------------------------------------------


class Intervals(Domain[Interval]):
    """Bounds the values of a program.

    Attributes:
        possible: for each decision, by the path of its operation: the outcomes of its questions.
        shares: by path, the shares of results.
        several: paths of functions of STEPWISE that may have several values, whatever the data.
        outside: by path, values outside of their dtype.
    """

    def __init__(
        self, axes: Mapping[str, int], counts: Mapping[tuple[int, ...], int] | None = None
    ):
        """Takes sizes of axes, and the count of numbers of an iota or axis_index that were run."""
        self._few = counts or {}
        self.possible: dict[tuple[int, ...], list[set[Any]]] = {}
        self.shares: dict[tuple[int, ...], float] = {}
        self.several: set[tuple[int, ...]] = set()
        self.outside: dict[tuple[int, ...], str] = {}
        self._axes = axes
        self._is_noting = True
        self._settled: dict[Any, Any] = {}

    def constant(self, x: Any) -> Interval:
        """Bounds a literal, or an array that the program holds."""
        a = literal_of(x)
        if is_float(a.dtype) and a.size and not np.isnan(np.asarray(a, np.float64)).any():
            return Interval(float(np.min(a)), float(np.max(a)))
        if getattr(a.dtype, "kind", "") not in "biu" or not a.size:
            return UNKNOWN
        return Interval(int(np.min(a)), int(np.max(a)))

    def join(self, op: Operation, a: Interval, b: Interval) -> Interval:
        """Widens: what grows in a loop may grow to any size."""
        found = hull(a, b)
        if (found.low >= 0 and found.high <= 1) or found[:2] == a[:2]:
            return found
        low = found.low if found.low == a.low else (0 if found.low >= 0 else -math.inf)
        return Interval(low, found.high if found.high == a.high else math.inf, found.of_data)

    def apply(self, op: Operation, ins: list[Interval]) -> list[Interval]:
        """Bounds the results of an equation. Without a rule, they may be anything."""
        found = self._results(op, ins)
        self._note(op, ins, found)
        at = _position(op, ins)
        if op.name == "sub" and ins[0].position and ins[1].position == (ins[0].position[0], False):
            found = [found[0]._replace(low=max(found[0].low, 0))] if ins[0].position[1] else found
        found = [x._replace(position=at) for x in found]
        if op.name.startswith("random") or any(x.of_data for x in ins):
            found = [x._replace(of_data=True) for x in found]
        elif share := self._share(op, ins):
            self.shares[op.path] = share
            found = [x._replace(share=share) for x in found]
        return [self._within(op, x, var.aval) for x, var in zip(found, op.eqn.outvars, strict=True)]

    def _share(self, op: Operation, ins: list[Interval]) -> float:
        shares = [x.share for x in ins]
        if op.name in ("axis_index", "iota"):
            return 1 / self._few[op.path] if op.path in self._few else 0
        if op.name in ("mul", "dot_general"):
            return sum(shares)
        if op.name in ("integer_pow", "square"):
            return shares[0] * max(op.params.get("y", 2), 0)
        if op.name in ("cumprod", "reduce_prod"):
            dims = op.params.get("axes", (op.params.get("axis"),))
            return shares[0] * math.prod(op.eqn.invars[0].aval.shape[dim] for dim in dims)
        return max(shares, default=0) if op.name in _LINEAR else 0

    def _note(self, op: Operation, ins: list[Interval], outs: list[Interval]) -> None:
        if self._is_noting and outs and is_stepwise(op):
            of_step = _divide(_abs(ins[0]), _abs(ins[1])) if op.name == "rem" else outs[0]
            if of_step.low < of_step.high and not any(x.of_data for x in ins):
                self.several.add(op.path)
        if not self._is_noting or not (questions := possible(op, ins)):
            return
        if chooses_once(op) and ins[0].of_data:
            # Devices that decide otherwise than others may wait for them, in a collective.
            varying = op.eqn.invars[0].aval.manual_axis_type.varying
            axes = [axis for axis in varying if self._axes.get(axis, 1) > 1]
            questions[0] |= {*map(differing_over, axes)}
        self.possible[op.path] = questions

    def _within(self, op: Operation, x: Interval, aval: Any) -> Interval:
        """Notes bounds outside of the dtype of a result, whose bounds then say nothing."""
        dtype = getattr(aval, "dtype", None)
        if dtype == np.bool_:
            return x._replace(low=max(x.low, 0), high=min(x.high, 1))
        if is_float(dtype) and not math.isnan(x.low + x.high - x.high):
            return Interval(*x[:3], share=x.share)
        if not is_integer(dtype):
            return UNKNOWN._replace(of_data=x.of_data, share=x.share)
        limits = jnp.iinfo(dtype)
        far = [n for n in (x.low, x.high) if math.isfinite(n) and not limits.min <= n <= limits.max]
        if far and self._is_noting:
            self.outside[op.path] = f"{far[-1]:,} does not fit {dtype}"
        return UNKNOWN._replace(of_data=x.of_data) if far else x

    def _results(self, op: Operation, ins: list[Interval]) -> list[Interval]:
        name, eqn = op.name, op.eqn
        count = len(eqn.outvars)
        shapes = [getattr(var.aval, "shape", ()) for var in (*eqn.invars, *eqn.outvars)]
        if TRUE in COMPARED.get(name.removesuffix("_to"), ()):
            return [_comparison(name.removesuffix("_to"), *ins)]
        if name == "convert_element_type" and eqn.outvars[0].aval.dtype == bool:
            return [Interval(int(not ins[0].low <= 0 <= ins[0].high), int(ins[0][:2] != (0, 0)))]
        if name == "div" and is_float(eqn.outvars[0].aval.dtype):
            return [UNKNOWN if ins[1].low <= 0 <= ins[1].high else _at_corners(_ratio, *ins)]
        if name in _SAME:
            return ins if len(ins) == count else [ins[0]] * count
        if name == "select_n":
            cases = [x for i, x in enumerate(ins[1:]) if ins[0].low <= i <= ins[0].high]
            return [join_all(cases)]
        if name in _JOINED:
            dtype = eqn.outvars[0].aval.dtype
            pairs = zip(ins, eqn.invars, strict=True)
            parts = [x for x, var in pairs if var.aval.dtype == dtype]
            return [join_all(parts if name != "dynamic_update_slice" else ins[:2])]
        if name == "not":
            last = 1 if eqn.outvars[0].aval.dtype == bool else -1
            return [Interval(last - ins[0].high, last - ins[0].low, ins[0].of_data)]
        if name == "sort":
            return ins
        if name in ("iota", "axis_index", "argmax", "argmin", "top_k", "cumsum", "reduce_sum"):
            return self._counts(op, ins, shapes)
        if name in kinds("sum"):
            devices = math.prod(self._axes.get(axis, 1) for axis in axes_of(eqn))
            return [_multiply(x, exactly(devices)) for x in ins]
        if name == "ppermute":  # devices to which nobody sends get zeros
            return [hull(ins[0], exactly(0))]
        return [_ARITHMETIC[name](*ins)] if name in _ARITHMETIC else [UNKNOWN] * count

    def _counts(self, op: Operation, ins: list[Interval], shapes: list) -> list[Interval]:
        name, params = op.name, op.params
        if name == "iota":
            return [Interval(0, max(params["shape"][params["dimension"]] - 1, 0))]
        if name == "axis_index":
            axes = axes_of_entry(params["axis_name"])
            return [Interval(0, math.prod(self._axes[axis] for axis in axes) - 1)]
        if name.startswith("arg"):
            return [Interval(0, max(math.prod(shapes[0][i] for i in params["axes"]) - 1, 0))]
        if name == "top_k":
            return [ins[0], Interval(0, shapes[0][-1] - 1)]
        dims = [params["axis"]] if name == "cumsum" else params["axes"]
        total = _multiply(ins[0], exactly(math.prod(shapes[0][i] for i in dims)))
        return [hull(ins[0], total) if name == "cumsum" else total]

    def call(self, op: Operation, body: Any, ins: list[Interval]) -> list[Interval]:
        """Bounds the results of a call; those of // and % without corrections for negatives."""
        plain = _OF_COUNTS.get(op.params.get("name", ""))
        if plain and len(ins) == 2 and ins[0].low >= 0 and ins[1].low > 0:
            found = [plain(*ins)]
            for inner in operations_in(body, op):
                if inner.name in ("div", "rem"):  # the others correct the results for negatives
                    self._note(inner, ins, found)
            return found
        return super().call(op, body, ins)

    def scan(self, op: Operation, consts: list, carry: list, xs: list) -> list[Interval]:
        """Bounds the results of a scan, whose number of turns is known."""
        length = op.params["length"]

        def turn(values: Sequence[Interval]) -> list[Interval]:
            return self.run(op.body("jaxpr"), [*consts, *values, *xs], op)

        def bound(start: Interval, out: Interval) -> tuple[Interval, Interval]:
            turns = length - 1
            low = start.low + min(0, out.low_step * turns)
            high = start.high + max(0, out.high_step * turns)
            after = _shift(start, out.low_step * length, out.high_step * length)
            return Interval(low, high), Interval(after.low, after.high)

        if not length:
            return [*carry, *[UNKNOWN] * (len(op.eqn.outvars) - len(carry))]
        return self._iterate(op, (*consts, *carry, *xs), carry, turn, bound)

    def loop(self, op: Operation, of_test: list, of_body: list, carry: list) -> list[Interval]:
        """Bounds the results of a while loop. A test like i < n limits its counter."""
        limits: dict[Any, Number] = {}

        def turn(values: Sequence[Interval]) -> list[Interval]:
            (test,) = self.run(op.body("cond_jaxpr"), [*of_test, *values], op)
            if test.base is not None:
                limits[test.base] = test.high_step
            return self.run(op.body("body_jaxpr"), [*of_body, *values], op)

        def bound(start: Interval, out: Interval) -> tuple[Interval, Interval]:
            low = start.low if out.low_step >= 0 else -math.inf
            high = limits.get(out.base, math.inf) if out.high_step > 0 else start.high
            after = max(start.high, high + max(out.high_step, 0))
            return Interval(low, max(start.high, high)), Interval(low, after)

        after = self._iterate(op, (*of_test, *of_body, *carry), carry, turn, bound)
        self.run(op.body("cond_jaxpr"), [*of_test, *after], op)  # the last test
        return after

    def _iterate(
        self, op: Operation, ins: tuple, carry: list[Interval], turn: Callable, bound: Callable
    ) -> list[Interval]:
        """Bounds what a loop carries: counters by their steps, the others by a fixed point.

        Decisions are noted in one last turn, with what holds in each.
        """
        key = op.path, ins
        if key not in self._settled:
            noting, self._is_noting = self._is_noting, False
            self._settled[key] = self._settle(op, carry, turn, bound)
            self._is_noting = noting
        during, counters, outs = self._settled[key]
        if self._is_noting:
            outs = turn(during)
        after = [hull(a, b) for a, b in zip(carry, outs, strict=False)]
        return [counters.get(i, (a, a))[1] for i, a in enumerate(after)] + outs[len(carry) :]

    def _settle(
        self, op: Operation, carry: list[Interval], turn: Callable, bound: Callable
    ) -> tuple[list[Interval], dict[int, tuple[Interval, Interval]], list[Interval]]:
        """Returns bounds in each turn, those of counters in and after them, and of results."""
        marks = [Interval(base=(op.path, i)) for i in range(len(carry))]
        outs = turn(marks)
        kept = [mark == out for mark, out in zip(marks, outs, strict=False)]
        if any(kept):  # such as the end of a while loop: its value limits the counter
            for i, start in enumerate(carry):
                if kept[i]:
                    marks[i] = marks[i]._replace(low=start.low, high=start.high)
            outs = turn(marks)
        counters = {}
        for i, (mark, start, out) in enumerate(zip(marks, carry, outs, strict=False)):
            if out.base == mark.base and all(map(math.isfinite, (out.low_step, out.high_step))):
                counters[i] = bound(start, out)

        def with_counters(values: Sequence[Interval]) -> list[Interval]:
            pairs = enumerate(values[: len(carry)])
            return [counters[i][0] if i in counters else Interval(*x[:3]) for i, x in pairs]

        start = with_counters(carry)
        wide = fixed_point(
            start, lambda x: with_counters(turn(x)), lambda a, b: self.join(op, a, b)
        )
        outs = turn(wide)
        during = [*map(hull, start, with_counters(outs))]  # narrower where they were widened
        return during, counters, outs if during == wide else turn(during)

    def branch(self, op: Operation, which: Interval, args: list[Interval]) -> list[Interval]:
        """Bounds the results of the branches that may be taken."""
        self._note(op, [which], [])
        last = len(op.params["branches"]) - 1
        cases = range(int(min(max(which.low, 0), last)), int(min(max(which.high, 0), last)) + 1)
        outs = [self.run(op.body("branches", i), args, op) for i in cases]
        return [join_all(found) for found in zip(*outs, strict=True)]


def _position(op: Operation, ins: list[Interval]) -> tuple[Any, bool] | None:
    """Returns the `position` of the result of an equation."""
    first = ins[0].position if ins else None
    if op.name == "iota":
        from_last = len(op.params["shape"]) - op.params["dimension"]
        return (op.path, from_last), True
    if first and op.name == "broadcast_in_dim":
        ((path, from_last), is_it) = first
        dims = op.params["broadcast_dimensions"]
        from_last = len(op.params["shape"]) - dims[len(dims) - from_last]
        return (path, from_last), is_it
    if op.name == "select_n":
        known = {x.position[0] for x in ins[1:] if x.position}
        is_least = all(x.position or x.high <= 0 for x in ins[1:])
        return (known.pop(), False) if len(known) == 1 and is_least else None
    if first and op.name == "cummax" and not op.params["reverse"]:
        return first[0], False
    return first if op.name in IDENTITIES or op.name == "convert_element_type" else None


def _comparison(name: str, a: Interval, b: Interval) -> Interval:
    """Returns the result of a comparison, with the limit that a True puts on a counter."""
    found = outcomes(name, a.low < b.high, _meet(a, b), a.high > b.low)
    result = Interval(int(FALSE not in found), int(TRUE in found))
    a, b = (a, b) if name in ("lt", "le") else (b, a)
    if a.base is None or name in ("eq", "ne"):
        return result
    limit = b.high - a.low_step - (name in ("lt", "gt"))
    return result._replace(base=a.base, high_step=limit)
