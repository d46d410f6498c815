"""Compares two programs, each traced on one device: do they compute the same?

They are two forms of one step. Every value gets a number by how it is computed, the same number in
both programs. The order of equations does not count, nor what is computed twice, nor what changes
nothing on one device: collectives, casts between JAX's types, offsets by axis_index, and a reshape
that is undone.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib import equations
from shardlib.equations import Eqn, body_of, is_variable
from shardlib.marks import GRADIENT_SUMS, LAYER_NUMBERS
from shardlib.proof.equation import Equation, is_integer

CASTS = equations.kinds("unreduced") | equations.words(
    "copy dynamic_slice slice convert_element_type"
)
UNCHANGED = (equations.COLLECTIVES | equations.IDENTITIES | CASTS) - {"stop_gradient", "ppermute"}
"""Primitives that return their operands on one device, if the type stays the same."""
OF_MESHES = equations.words(
    "sharding out_sharding dst_sharding mesh concrete_mesh axis_size linear prevent_cse"
)
"""Parameters that do not affect values on one device."""
VIEWS = ("reshape", "transpose", "split", "concatenate", "scan")
"""Primitives that messages do not name, because the difference is before or inside them."""
AT_MOST, ALIKE = 20, 4
"""How many more equations one program may have, before this many that have the same names in
both."""


def differences(
    ours: object, theirs: object, names: tuple[str, str], remedy: str, rounding: bool = False
) -> Iterator[str]:
    """Finds where two programs part, if they do not compute the same.

    Args:
        ours: the result of jax.jit(f).trace(...).jaxpr.
        theirs: another one, with the same arguments and results.
        names: who runs each program, for the message.
        remedy: what to do.
        rounding: True if numbers may be rounded at different points. They are rounded to the same
            dtypes.
    """
    table: dict[Any, int] = {}
    a, b = (_Numbers(program, table, rounding) for program in (ours, theirs))
    if a.results == b.results:
        for x, y, name in ((a, b, names[0]), (b, a, names[1])):
            for key in [key for key in x.rounded if key not in y.rounded][:1]:
                problem = f"{x.rounded[key].place()}: only {name} rounds this to {key[1]}"
                yield f"{problem}\n  remedy: {remedy}"
        return
    alone = [
        [eq for n, eq in x.made.items() if not (n in y.made or n in x.zeros or eq.name in VIEWS)]
        for x, y in ((a, b), (b, a))
    ]
    firsts = _firsts(alone)
    found = [
        f"{eq.place()}: {eq.name}: {name} runs this"
        for eqs, name in zip(firsts, names, strict=True)
        for eq in eqs
    ]
    text = "; ".join(found) or f"{' and '.join(names)} give other results of the same values"
    other = "" if len(found) != 1 else f", and {names[bool(firsts[0])]} does not"
    yield f"{text}{other}\n  remedy: {remedy}"


def _firsts(alone: list[list[Equation]]) -> list[list[Equation]]:
    """The first equation that one program has and the other lacks.

    It is the first of each if they have different ones. What follows from it is another value in
    each, from the same operations.
    """
    names = [[eq.name for eq in equations] for equations in alone]
    if names[0][:ALIKE] != names[1][:ALIKE]:
        for more, i in itertools.product(range(1, AT_MOST), (0, 1)):
            rest = names[i][more : more + ALIKE]
            if rest and rest == names[1 - i][: len(rest)]:
                return [alone[k][:1] if k == i else [] for k in (0, 1)]
    return [equations[:1] for equations in alone]


class _Numbers:
    """The numbers of a program's results, and the equation that computes each number."""

    def __init__(self, program: object, table: dict[Any, int], rounding: bool):
        self.made: dict[int, Equation] = {}
        self._rounding = rounding
        # What is cast to fewer bits: the whole array, and the dtype.
        self.rounded: dict[tuple[int, str], Equation] = {}
        # Sums of gradients, which take the dtype that their weight has in the step.
        self._sums: set[int] = set()
        # For a part of an array, or a stack of them: what is cast with it.
        self._whole: dict[int, int] = {}
        self._table, self._roots = table, {}  # for a reshape: the array and its shape
        # For a transpose: the array and its order.
        self._turned: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._even: dict[int, int] = {}  # for a value with equal entries: the entry
        # For some rows of an array: the array, which rows, and how many it has; None: as many as a
        # loop produces.
        self._rows: dict[int, tuple[int, int, int, int | None]] = {}
        # For what a loop carries: the loop and its turn.
        self._after: dict[tuple[int, ...], tuple[tuple, int, int]] = {}
        self.zeros: set[int] = set()
        self._ones: set[int] = set()
        self._depth = 0
        self.results = self._of_body(program, None)

    def _number(self, *key: object) -> int:
        return self._table.setdefault(key, len(self._table))

    def _array(self, x: object) -> int:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        x = x.astype(np.float64) if self._rounding and jnp.issubdtype(x.dtype, jnp.floating) else x
        number = self._number(str(x.dtype), x.shape, x.tobytes())
        self.zeros |= {number} if is_integer(x.dtype) and not x.any() else set()
        self._ones |= {number} if x.ndim == 0 and x == 1 else set()
        return number

    def _of_body(
        self, program: object, caller: Equation | None, ins: list[int] | None = None
    ) -> list[int]:
        """The numbers of a jaxpr's results; `ins` are those of its arguments, None: new ones."""
        jaxpr, consts = body_of(program)
        if ins is None:
            ins = [self._number("argument", i) for i in range(len(jaxpr.invars))]
        env = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*map(self._array, consts), *ins], strict=True)
        )

        def read(var: Any) -> int:
            return (
                env[var] if is_variable(var) else self._array(np.asarray(var.val, var.aval.dtype))
            )

        needed, live = set(filter(is_variable, jaxpr.outvars)), []
        for eqn in reversed(jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                live.append(eqn)
                needed |= set(filter(is_variable, _operands(eqn)))
        for eqn in reversed(live):
            found = self._of_equation(Equation(eqn, caller=caller), list(map(read, _operands(eqn))))
            env.update(zip(eqn.outvars, found, strict=True))
        return list(map(read, jaxpr.outvars))

    def _of_equation(self, eq: Equation, ins: list[int]) -> list[int]:
        name, outs = eq.name, eq.eqn.outvars
        if body := equations.called(eq.eqn):
            return self._of_body(body, eq, ins)
        if (same := self._unchanged(eq, ins)) is not None:
            return same
        if name in ("scan", "while", "cond"):
            return self._of_control(eq, ins)
        if (rows := self._of_rows(eq, ins)) is not None:
            return rows
        bodies = [tuple(self._of_body(inner, eq)) for inner in equations.jaxprs_of(eq.eqn)]
        if name == "dot_general":
            return [self._product(eq, ins)]
        order = None
        if name in equations.ELEMENTWISE:
            ins, order = self._each_entry(eq, ins)
        if name in ("add", "mul"):
            ins = sorted(ins)
        if _reshapes(eq):
            return [self._reshaped(eq, ins[0], eq.shape(), eq.result_shape)]
        number = self._made(eq, name, _in_words(eq.params), *bodies, *ins)
        if name in ("broadcast_in_dim", "convert_element_type", "mul") and is_integer(
            eq.result_type()
        ):
            self.zeros |= {number} if self.zeros & {*ins} else set()
        if name == "broadcast_in_dim" and not eq.eqn.invars[0].aval.shape:
            self._even[number] = ins[0]
        if order is not None:
            return [self._transposed(eq, number, order)]
        return [number, *(self._number(number, i) for i in range(1, len(outs)))]

    def _each_entry(self, eq: Equation, ins: list[int]) -> tuple[list[int], tuple[int, ...] | None]:
        """Operands of an elementwise equation before their dims are moved.

        Also how they are moved, if they are. An operand with equal entries is replaced by one of
        them, as long as another operand has the shape.
        """
        even = [
            self._even.get(x, x if not var.aval.shape else None)
            for x, var in zip(ins, eq.eqn.invars, strict=True)
        ]
        if None not in even:
            return ins, None
        orders = {
            self._turned[x][1] if x in self._turned else None
            for x, one in zip(ins, even, strict=True)
            if one is None
        }
        order = orders.pop() if len(orders) == 1 else None
        roots = [
            one if one is not None else x if order is None else self._turned[x][0]
            for x, one in zip(ins, even, strict=True)
        ]
        return roots, order

    def _transposed(self, eq: Equation, x: int, order: tuple[int, ...]) -> int:
        root, old = self._turned.get(x, (x, tuple(range(len(order)))))
        order = tuple(old[i] for i in order)
        if order == tuple(sorted(order)):
            return root
        number = self._made(eq, "transpose", root, order)
        self._whole[number] = root
        self._turned[number] = root, order
        return number

    def _product(self, eq: Equation, ins: list[int]) -> int:
        """The number of a matmul; either operand may come first."""
        contracted, batch = eq.params["dimension_numbers"]
        free = [eq.eqn.invars[k].aval.ndim - len(contracted[k]) - len(batch[k]) for k in (0, 1)]
        order = tuple(range(len(batch[0]) + sum(free)))
        if ins[0] > ins[1]:
            ins, contracted, batch = ins[::-1], contracted[::-1], batch[::-1]
            n, m = len(batch[0]), len(batch[0]) + free[1]
            order = (*order[:n], *order[m:], *order[n:m])
        params = {name: value for name, value in eq.params.items() if name != "dimension_numbers"}
        pairs = str((sorted(zip(*contracted, strict=True)), batch))
        return self._transposed(
            eq, self._made(eq, "dot_general", _in_words(params), pairs, *ins), order
        )

    def _of_control(self, eq: Equation, ins: list[int]) -> list[int]:
        """The numbers of the results of a conditional or loop.

        The order in which it reads operands does not count.
        """
        params = eq.params
        if eq.name == "cond":
            branches = [self._of_body(branch, eq, ins[1:]) for branch in params["branches"]]
            return [self._made(eq, "cond", ins[0], *outs) for outs in zip(*branches, strict=True)]
        if eq.name == "scan":
            return self._of_scan(eq, ins)
        self._depth += 1
        of_test, of_body, inits = equations.split_while(eq.eqn, ins)
        carry = [self._number("carry", self._depth, i) for i in range(len(inits))]
        outs = self._of_body(params["body_jaxpr"], eq, [*of_body, *carry])
        test = self._of_body(params["cond_jaxpr"], eq, [*of_test, *carry])
        loop = self._made(eq, "while", *test, *inits, *outs)
        self._depth -= 1
        return [self._number(loop, i) for i in range(len(inits))]

    def _of_scan(self, eq: Equation, ins: list[int]) -> list[int]:
        """The numbers of the results of a scan.

        Two scans count as one if the second continues where the first ends.
        """
        consts, inits, xs = equations.split_scan(eq.eqn, ins)
        length, is_back, carried = eq.params["length"], eq.params["reverse"], len(inits)
        rows = [self._rows.get(x, (x, 0)) for x in xs]
        start = rows[0][1] if rows else 0
        end = start + length
        self._depth += 1
        carry = [self._number("carry", self._depth, i) for i in range(carried)]
        entries = [self._number("entry", self._depth, root, at - start) for root, at, *_ in rows]
        self._whole |= {entry: root for entry, (root, *_) in zip(entries, rows, strict=True)}
        outs = self._of_body(eq.params["jaxpr"], eq, [*consts, *carry, *entries])
        self._depth -= 1
        step = is_back, *outs[:carried]
        first, last = (end, start) if is_back else (start, end)
        before, loop, turn = self._after.get(tuple(inits), (None, 0, 0))
        if before != step or turn != first:
            loop = self._made(eq, "scan", step, *inits, *([first] if carried else []))
        found = [self._number(loop, last, i) for i in range(carried)]
        self._after[tuple(found)] = step, loop, last
        stacked = [self._made(eq, "stacked", loop, y) for y in outs[carried:]]
        self._whole |= dict(zip(stacked, outs[carried:], strict=True))
        return [*found, *(self._some_rows(eq, x, start, end, None) for x in stacked)]

    def _of_rows(self, eq: Equation, ins: list[int]) -> list[int] | None:
        """The numbers of rows of an array, of their reshape, or of concatenated rows.

        Returns None for other equations.
        """
        name, params, shape = eq.name, eq.params, eq.shape() if ins else ()
        if not shape or not (ins[0] in self._rows or name in ("split", "slice")):
            return None
        root, start, end, whole = self._rows.get(ins[0], (ins[0], 0, shape[0], shape[0]))
        if name == "split" and params["axis"] == 0:
            ends = itertools.accumulate(params["sizes"], initial=start)
            return [self._some_rows(eq, root, *span, whole) for span in itertools.pairwise(ends)]
        if name == "slice" and not params["strides"] and shape[1:] == eq.result_shape[1:]:
            span = (start + params[name][0] for name in ("start_indices", "limit_indices"))
            return [self._some_rows(eq, root, *span, whole=whole)]
        if name == "concatenate" and params["dimension"] == 0:
            parts = [self._rows.get(x, (x, -1, -1)) for x in ins]
            if all(a[0] == b[0] and a[2] == b[1] for a, b in itertools.pairwise(parts)):
                return [self._some_rows(eq, root, start, parts[-1][2], whole)]
        if (
            _reshapes(eq)
            and eq.result_shape
            and not any(n * eq.result_shape[0] % shape[0] for n in (start, end))
        ):
            before = (whole, *shape[1:])
            start, end = (n * eq.result_shape[0] // shape[0] for n in (start, end))
            whole = whole and whole * eq.result_shape[0] // shape[0]
            root = self._reshaped(eq, root, before, (whole, *eq.result_shape[1:]))
            return [self._some_rows(eq, root, start, end, whole)]
        return None

    def _reshaped(self, eq: Equation, x: int, old: tuple, new: tuple) -> int:
        """The number of `x`, of shape `old`, in another shape.

        The first dim is None if it is that of any loop.
        """
        root = self._roots.setdefault(x, (x, old))
        if root[1] == new:
            return root[0]
        number = self._made(eq, "reshape", new, root[0])
        self._whole[number] = root[0]
        self._roots.setdefault(number, root)
        return number

    def _some_rows(self, eq: Equation, root: int, start: int, end: int, whole: int | None) -> int:
        if (start, end) == (0, whole):
            return root
        number = self._made(eq, "rows", root, start, end)
        self._rows[number] = root, start, end, whole
        self._whole[number] = root
        return number

    def _made(self, eq: Equation, *key: object) -> int:
        number = self._number(*key)
        self.made.setdefault(number, eq)
        return number

    def _round(self, eq: Equation, x: int) -> None:
        """Notes a cast to fewer bits."""
        old, new = (jnp.finfo(var.aval.dtype) for var in (eq.eqn.invars[0], eq.eqn.outvars[0]))
        while x in self._whole:
            x = self._whole[x]
        if x not in self._sums and (new.nmant < old.nmant or new.nexp < old.nexp):
            self.rounded.setdefault((x, str(new.dtype)), eq)

    def _unchanged(self, eq: Equation, ins: list[int]) -> list[int] | None:
        """The numbers of operands that an equation returns unchanged; None if it computes."""
        if eq.name == "axis_index":
            return [self._array(np.int32(0))]
        if eq.params.get("name") == GRADIENT_SUMS:
            self._sums.add(ins[0])
        outs = eq.eqn.outvars
        if (
            eq.name in UNCHANGED
            and _types(eq.eqn.invars[: len(outs)]) == _types(outs)
            and eq.params.get("name") != LAYER_NUMBERS
        ):
            return ins[: len(outs)]
        if eq.name == "transpose":
            return [self._transposed(eq, ins[0], tuple(eq.params["permutation"]))]
        is_cast = self._rounding and eq.name == "convert_element_type"
        if is_cast and all(
            jnp.issubdtype(var.aval.dtype, jnp.floating) for var in (eq.eqn.invars[0], outs[0])
        ):
            self._round(eq, ins[0])
            return ins[:1]
        if eq.name == "pad" and not any(map(any, eq.params["padding_config"])):
            return ins[:1]
        if eq.name in ("add", "sub") and ins[1] in self.zeros:
            return ins[:1]
        if eq.name == "div" and ins[1] in self._ones:
            return ins[:1]
        return ins[1:] if eq.name == "add" and ins[0] in self.zeros else None


def _operands(eqn: Eqn) -> Any:
    """What an equation reads. For a slice of everything, the start does not count."""
    is_all = eqn.primitive.name == "dynamic_slice" and _types(eqn.invars[:1]) == _types(eqn.outvars)
    return eqn.invars[:1] if is_all else eqn.invars


def _reshapes(eq: Equation) -> bool:
    """True if the result has the entries of the operand in the same order."""
    if eq.name in ("reshape", "squeeze"):
        return eq.params.get("dimensions") is None or eq.name == "squeeze"
    return (
        eq.name == "broadcast_in_dim"
        and eq.shape() != ()
        and math.prod(eq.shape()) == math.prod(eq.result_shape)
    )


def _types(variables: Any) -> list:
    return [(var.aval.shape, var.aval.dtype) for var in variables]


def _in_words(params: Any) -> str:
    """Formats the parameters of an equation.

    Those of the mesh, programs, and Python functions are left out.
    """
    found = {}
    for name, value in params.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        is_function = callable(value) and not isinstance(value, type)
        is_program = any(map(equations.is_program, parts))
        if name not in OF_MESHES and not is_function and not is_program:
            is_array = isinstance(value, np.ndarray | jax.Array)
            found[name] = f"{value.dtype}{value.tolist()}" if is_array else str(value)
    return str(sorted(found.items()))
