"""Aligns a per-device program with the same program on one device, equation by equation.

"Here" means in the per-device program, "there" in the program on one device. Both are traces of one
source, so their equations match, except that JAX adds or leaves out reshapes where a device has one
entry along a dim. These need not match. A sum along such a dim counts as a reshape. Other equations
compute: they must match, and take the same entries. If a reshape is missing here, its rule is still
applied, because it may add up entries of several devices.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import Literal, Var

from shardlib import equations
from shardlib.dims import ROWS
from shardlib.equations import Atom, Eqn, Jaxpr, body_of, is_variable, shape_of
from shardlib.interpret import Domain, Operation, equations_in, interpret, steps
from shardlib.marks import is_region
from shardlib.proof import rings
from shardlib.proof.domain import Sizes, SizesOnOne
from shardlib.proof.equation import Equation, Twins, equal_parameters
from shardlib.proof.origins import callers_text, choice_between
from shardlib.proof.primitives import OF_SIZES

V = TypeVar("V")
AS_IS = equations.words("copy pvary convert_element_type")
"""Primitives that change neither entries nor shape if they keep the dtype."""
SHAPING = equations.REDUCTIONS | equations.kinds("view") | {"slice"}


class Layout(NamedTuple):
    """An array of entries of the value `root`, given by strides like a NumPy view.

    Strides count entries; along a dim of size 1, the stride is 0. A root of shape [2, 3] itself is
    Layout(root, (2, 3), (3, 1)), its transpose is Layout(root, (3, 2), (1, 3)).
    """

    root: object
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def laid_out(root: object, shape: tuple[int, ...]) -> Layout:
    """Returns the layout of an array of all entries of `root`, in row-major order."""
    strides = (math.prod(shape[i + 1 :]) if n > 1 else 0 for i, n in enumerate(shape))
    return Layout(root, tuple(shape), tuple(strides))


class Different(Exception):
    """Raised if the programs on the mesh and on one device have different operations.

    `place` is `file.py:line` of the first operation that differs; ? if it is not known.
    """

    def __init__(self, here: Any, there: Any):
        self.place = "?" if here is None and there is None else Operation(here or there).place()
        names = [Operation(e).shown if e is not None else "nothing more" for e in (here, there)]
        problem = (
            f"the program is another one on this mesh than on one device: {names[0]} here, "
            f"{names[1]} there"
        )
        lines = [problem, choice_between(here, there), callers_text(here or there)]
        super().__init__("\n  ".join(filter(None, lines)))


ANY = Layout(object(), (), ())
"""Layout of what per-device code (shardops.per_device) computes, which is not aligned."""


class Aligned(NamedTuple):
    """Two jaxprs, aligned as pairs of equations.

    Attributes:
        ours: the jaxpr here, in which one turn replaces each ring (rings.py).
        theirs: the jaxpr on one device, with the operations that a choice such as `if axis_size >
            1` skipped there.
        pairs: an Equation for each equation of `theirs`, in order. `Paired.run` adds the caller.
        here: layout of each result of the per-device program; None for a literal.
        there: layout that this result should have according to the program on one device.
    """

    ours: Any
    theirs: Any
    pairs: list[Equation]
    here: list[Layout | None]
    there: list[Layout | None]


def _group_sizes(sizes: Mapping[str, int]) -> Iterator[int]:
    """Yields the number of devices along each subset of the axes of a mesh."""
    for k in range(len(sizes) + 1):
        yield from map(math.prod, itertools.combinations(sizes.values(), k))


class Alignment:
    """Alignments of the jaxprs within a program, each computed once.

    Args:
        sizes: number of devices along each axis of the mesh.
        twin_sizes: the same for the twin's mesh: 1 along each axis, unless both meshes have several
            devices along it.
    """

    def __init__(self, sizes: Mapping[str, int], twin_sizes: Mapping[str, int]):
        self._sizes, self._twin_sizes = sizes, twin_sizes
        self._devices = {*itertools.product(_group_sizes(sizes), _group_sizes(twin_sizes))}
        self._known: dict[tuple, Aligned] = {}

    def align(self, ours: Any, theirs: Any, shapes: Sequence | None = None) -> Aligned:
        """Aligns two jaxprs.

        Args:
            ours: the jaxpr on a mesh, or a body in it.
            theirs: the same on one device.
            shapes: the shape that each argument of `theirs` has on a device of the mesh; None: the
                shapes of the arguments of `ours`. Reshapes before a call may make them differ.

        Raises:
            Different: an equation that does more than reshape, or an argument, is on one side only.
        """
        if (len(ours.constvars), len(ours.invars)) != (len(theirs.constvars), len(theirs.invars)):
            raise Different(*(next(equations_in(jaxpr), None) for jaxpr in (ours, theirs)))
        shapes = tuple(map(shape_of, ours.invars)) if shapes is None else tuple(shapes)
        key = id(ours), id(theirs), shapes  # of objects that the two programs keep
        if key not in self._known:
            ours, theirs = rings.closed(ours, theirs, self._sizes, self._twin_sizes)
            try:
                self._known[key] = self._made(ours, theirs, shapes)
            except Different:
                complete = completed(ours, theirs, self._twin_sizes)
                if complete is theirs:
                    raise
                self._known[key] = self._made(ours, complete, shapes)
        return self._known[key]

    def _made(self, ours: Any, theirs: Any, shapes: tuple) -> Aligned:
        variables = [*theirs.constvars, *theirs.invars]
        own = list(map(shape_of, [*ours.constvars, *ours.invars]))
        whole = [*own[: len(ours.constvars)], *shapes]
        pairing = _Pairing(self, ours, map(laid_out, variables, own))
        there = interpret(theirs, pairing, map(laid_out, variables, whole))
        if pairing.own is not None:
            raise Different(pairing.own.eqn, None)
        here = pairing.ins
        if len(here) != len(there):
            raise Different(None, None)
        return Aligned(ours, theirs, pairing.pairs, here, there)

    def fits(self, here: tuple[int, ...], there: tuple[int, ...]) -> bool:
        """Returns True if arrays of shape `here` may be the blocks of an array of shape `there`.

        On a mesh of 2 x 2 devices, (4, 3) here fits (16, 3) on one device, and not (12, 3).
        """
        sizes = zip(here, there, strict=True) if len(here) == len(there) else [(1, 0)]
        return all(a == b or any(a * n == b * m for n, m in self._devices) for a, b in sizes)


class Paired(Domain[V]):
    """Analyzes a program together with its twin on one device. Its operations are Equations.

    Attributes:
        sizes: number of devices along each axis of the mesh.
        twin_sizes: the same for the twin's mesh, as in Alignment.
    """

    def __init__(self, sizes: Mapping[str, int], twin_sizes: Mapping[str, int]):
        self.sizes, self.twin_sizes = Sizes(sizes), SizesOnOne(twin_sizes)
        self._alignment = Alignment(self.sizes, self.twin_sizes)

    def number(self, here: Any, there: Any, op: Equation | None) -> V:
        """Returns the fact about a literal, or about an array that the programs hold."""
        raise NotImplementedError

    def other(self, var: Atom, op: Equation | None) -> V:
        """Returns the fact about an operand of `op` whose entries differ from those on one device.

        If `op` is None, `var` is a result of the program.
        """
        raise NotImplementedError

    def constant(self, x: object) -> Any:
        """Returns None, because `read` fills in the facts about literals."""

    def run(self, program: Twins, ins: list[V], op: Any = None) -> list[V]:
        """Aligns both programs, and derives facts about the results. Raises Different."""
        (ours, consts), (theirs, twin_consts) = map(body_of, program)
        known = op and op.inner
        found = known or self._alignment.align(ours, theirs)
        pairs = (
            dataclasses.replace(pair, caller=op, sizes=self.sizes, twin_sizes=self.twin_sizes)
            for pair in found.pairs
        )
        numbers = (self.number(a, b, None) for a, b in zip(consts, twin_consts, strict=True))
        outs = interpret(found.theirs, self, [*numbers, *ins], op, pairs)
        wrong = others(found.here, found.there, same_entries if known else None)
        return self.read(found.ours.outvars, found.theirs.outvars, outs, wrong, op)

    def read(
        self, ours: list, theirs: list, values: list[V], wrong: frozenset, op: Equation | None
    ) -> list[V]:
        """Returns `values`, with results of `number` for literals, and of `other` at `wrong`."""
        return [
            self.other(a, op)
            if i in wrong
            else self.number(a, b, op)
            if isinstance(a, Literal)
            else x
            for i, (a, b, x) in enumerate(zip(ours, theirs, values, strict=True))
        ]

    def call(self, op: Any, body: object, ins: list[V]) -> list[V]:
        """Interprets the callee of a call; a shard_map is left to `apply`."""
        if op.name == "shard_map":
            return self.apply(op, ins)
        return self.run(Twins(*map(equations.called, (op.eqn, op.twin))), ins, op)


class _View(NamedTuple):
    """An equation here that only reshapes, with the layouts of its operand and of its result."""

    eqn: Eqn
    operand: Layout
    result: Layout


class _Pairing(Domain[Layout | None]):
    """Goes through a program on one device, and pairs its equations with those here.

    The fact about a value is the Layout that it should have here; None for a literal. `own` is the
    next equation here that does more than reshape, and `ins` has the layouts of its operands.
    """

    def __init__(self, alignment: Alignment, ours: Any, args: Iterable[Layout]):
        self.pairs: list[Equation] = []
        self._alignment = alignment
        self._ours = steps(ours, self.constant, args)
        self._views: list[_View] = []
        self._go_on(*next(self._ours))

    def constant(self, x: Any) -> None:
        """Returns None, because literals have no layout."""

    def _go_on(self, own: Operation | None, ins: list[Any]) -> None:
        """Goes to the next equation here that does more than reshape; collects those before it."""
        while own and _may_reshape(own.eqn) and (x := ins[0]) is not ANY:
            found = _view(own.eqn, x, shape_of(own.eqn.outvars[0]))
            if found is None:
                break
            self._views.append(_View(own.eqn, x, found))
            own, ins = self._ours.send([found])
        self.own, self.ins = own, ins

    def follow(self, op: Operation, wholes: list[Layout | None]) -> list[Layout | None]:
        eqn = op.eqn
        x = wholes[0] if _may_reshape(eqn) else None
        if x is not None and x is not ANY:
            view = self._view_of(eqn, x)
            found = view.result if view else _view(eqn, x)
            if found is not None:
                self._views = [other for other in self._views if other is not view]
                cut = view.eqn if view and view.operand == x else _cut(eqn, [x], found.shape)
                self.pairs.append(Equation(cut, twin=eqn))
                return [found]
        if self.own is None:
            raise Different(None, eqn)
        own = self.own.eqn
        if own.primitive.name != op.name or is_region(own) != is_region(eqn):
            raise Different(own, eqn)
        # The residuals of a region depend on the mesh: a ring keeps some for each turn.
        if is_region(eqn):
            self.pairs.append(Equation(own, twin=eqn))
            self._go_on(*self._ours.send([ANY] * len(own.outvars)))
            return [ANY] * len(eqn.outvars)
        pair, results, found = self._paired(own, eqn, wholes)
        self.pairs.append(pair)
        self._go_on(*self._ours.send(results))
        return [*found]

    def _view_of(self, eqn: Eqn, x: Layout) -> "_View | None":
        """Finds the reshape here, among those collected, that returns what `eqn` returns there.

        Returns None if there is none.
        """
        alike = [view for view in self._views if view.eqn.primitive is eqn.primitive]
        for view in alike:
            shape = view.result.shape
            is_fitting = self._alignment.fits(shape, shape_of(eqn.outvars[0]))
            if is_fitting and _view(eqn, x, shape) == view.result:
                return view
        # Entries that stand for devices: as many as devices here, one on one device.
        if eqn.primitive.name == "reshape":
            rank = len(shape_of(eqn.outvars[0]))
            for view in alike:
                if view.operand == x and len(view.result.shape) == rank:
                    return view
        return None

    def _paired(
        self, own: Eqn, eqn: Eqn, ys: list[Layout | None]
    ) -> tuple[Equation, list[Layout], list[Layout]]:
        """Pairs two equations that compute. Also returns their results' layouts, here and there."""
        if len(own.invars) != len(eqn.invars) or len(own.outvars) != len(eqn.outvars):
            raise Different(own, eqn)
        xs = self.ins
        if own.primitive.name in equations.CALLS:
            shapes = [
                shape_of(a) if y in (None, ANY) else y.shape
                for a, y in zip(own.invars, ys, strict=True)
            ]
            found = self._alignment.align(
                body_of(equations.called(own))[0], body_of(equations.called(eqn))[0], shapes
            )
            ours, theirs = (
                list(map(_result_of_call, own.outvars, eqn.outvars, side))
                for side in (found.here, found.there)
            )
            wrong = others(xs, ys, same_entries)
            return Equation(own, twin=eqn, inner=found, others=wrong), ours, theirs
        pair = Equation(own, twin=eqn, others=others(xs, ys))
        if (
            own.primitive.name in FORMS
            and None not in (*xs, *ys)
            and not others(xs, ys, same_entries)
        ):
            pair = _in_form(own, eqn, xs, ys) or pair
        ours, theirs = (
            [laid_out(b, shape_of(a)) for a, b in zip(e.outvars, eqn.outvars, strict=True)]
            for e in (own, pair.eqn)
        )
        return pair, ours, theirs


def _result_of_call(var: Any, twin: Any, inner: Layout | None) -> Layout:
    """Returns the layout of a call's result, from the layout that the called jaxpr returns."""
    if inner is ANY:
        return ANY
    if inner is None:
        return laid_out(twin, shape_of(var))
    return inner._replace(root=(twin, inner.root))


def others(
    ours: Sequence, theirs: Sequence, key: Callable[..., Any] | None = None
) -> frozenset[int]:
    """Returns the indices at which the layouts here and on one device differ.

    If `key` is given, layouts with the same key(layout) count as equal.
    """
    return frozenset(
        i
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True))
        if x != y and (key is None or None in (x, y) or key(x) != key(y))
    )


def _may_reshape(eqn: Eqn) -> bool:
    """Returns True if an equation possibly does no more than reshape.

    Equations on literals count as computing, because JAX does not leave them out.
    """
    return eqn.primitive.name in SHAPING | AS_IS and is_variable(eqn.invars[0])


def _in_form(own: Eqn, eqn: Eqn, xs: list[Any], ys: list[Any]) -> Equation | None:
    """Pairs two equations of FORMS that differ only in dims of size 1.

    Returns None if they differ in more, or if they match as they are.
    """
    # These say which dim is which.
    names_of_dims = ("axes", "dimension_numbers")
    if xs == ys and all(own.params.get(n) == eqn.params.get(n) for n in names_of_dims):
        return None  # most equations
    if any(len(y.shape) != len(shape_of(x)) for x, y in zip(eqn.invars, ys, strict=True)):
        return None  # an operand has lost a dim of one entry here
    params = eqn.params
    if own.primitive.name == "gather":
        sizes = iter(
            n for n, size in zip(own.params["slice_sizes"], xs[0].shape, strict=True) if size > 1
        )
        params = {**params, "slice_sizes": tuple(next(sizes) if n > 1 else 1 for n in ys[0].shape)}
    form, shape = _form(eqn, [y.shape for y in ys], params)
    names = own.params.keys() - OF_SIZES - {*names_of_dims}
    is_other = any(
        not (callable(own.params[n]) or equal_parameters(own.params[n], eqn.params[n]))
        for n in names
    )
    if is_other or _form(own, [x.shape for x in xs], own.params)[0] != form:
        return None
    if (xs, shape) == (ys, shape_of(own.outvars[0])):
        return None
    return Equation(_cut(eqn, ys, shape, params), twin=eqn)


FORMS = equations.REDUCTIONS | equations.SCATTERS | {"dot_general", "gather"}
"""Primitives that compute, and whose parameters JAX changes if an operand has a dim of size 1."""


def same_entries(x: Layout) -> tuple:
    """Returns what identifies a layout apart from its dims of size 1.

    This is the root, and the size and stride of each other dim.
    """
    return x.root, *((n, stride) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1)


def _form(
    eqn: Eqn, shapes: Sequence[tuple[int, ...]], params: Mapping
) -> tuple[Any, tuple[int, ...]]:
    """Describes what an equation of FORMS does to dims of more than one entry.

    Also returns the result's shape. For example, a matmul of [4, 1, 8] and [8, 2] that contracts
    the 8 has the same form as one of [4, 8] and [8, 2]. Their results are [4, 1, 2] and [4, 2].

    Args:
        eqn: the equation.
        shapes: the shape of each operand.
        params: its parameters, for operands of these shapes.
    """
    name = eqn.primitive.name
    operands, (result,) = ROWS[name](eqn)
    # A gather returns a part of each dim of its operand.
    taken = [params.get("slice_sizes", shapes[0]), *shapes[1:]]
    sizes = dict(zip(itertools.chain(*operands), itertools.chain(*taken), strict=True))
    shape = shapes[0] if name in equations.SCATTERS else tuple(sizes[label] for label in result)
    rows = list(zip([*operands, result], [*shapes, shape], strict=True))
    long = [[label for label, n in zip(*row, strict=True) if n > 1] for row in rows]
    counts = Counter(itertools.chain(*long))
    shared = [label for label in counts if label is not None and counts[label] > 1]
    same = [[shared.index(x) if x in shared else None for x in labels] for labels in long]
    dims = [i for i, n in enumerate(shapes[0]) if n > 1]
    numbers = params.get("dimension_numbers")
    indexed = getattr(numbers, "scatter_dims_to_operand_dims", ())
    indexed = getattr(numbers, "start_index_map", indexed)
    at = [dims.index(i) if i in dims else None for i in indexed]
    return (same, [taken[0][i] for i in dims], at), tuple(shape)


def _view(eqn: Eqn, x: Layout, shape: tuple[int, ...] | None = None) -> Layout | None:
    """Returns the layout of an equation's result if it only reshapes its operand, else None.

    A sum along a dim of size 1 only reshapes: along dim 1, Layout(root, (4, 1), (1, 0)) becomes
    Layout(root, (4,), (1,)).

    Args:
        eqn: the equation.
        x: the layout of its operand.
        shape: the result's shape on a device; None: JAX left out the equation here.
    """
    name = eqn.primitive.name
    params = eqn.params
    if name in AS_IS:
        return x if eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype else None
    there, one = shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])
    if name in equations.REDUCTIONS or name in ("transpose", "squeeze", "broadcast_in_dim"):
        source = equations.source_dims(eqn)
        if name != "broadcast_in_dim" and any(
            n != 1 for i, n in enumerate(x.shape) if i not in source
        ):
            return None
        sizes = tuple(1 if i is None else x.shape[i] for i in source)
        sizes = shape if shape is not None and name == "broadcast_in_dim" else sizes
        return Layout(x.root, sizes, tuple(0 if i is None else x.strides[i] for i in source))
    if name == "slice":  # a part of a dim may be the one entry that there is here
        is_whole = all(
            b == a or (n == 1 < a and b > 0) for n, a, b in zip(x.shape, one, there, strict=True)
        )
        return x if (is_whole if shape is None else shape == x.shape) else None
    if name != "reshape" or params.get("dimensions") is not None:
        return None
    if shape is None:
        old = [n for n, whole in zip(x.shape, one, strict=True) if whole > 1]
        if len(old) != sum(n > 1 for n in there):
            return None
        sizes = iter(old)
        shape = tuple(next(sizes) if n > 1 else 1 for n in there)
    if [n for n in shape if n > 1] == [n for n in x.shape if n > 1]:
        old = iter(s for n, s in zip(x.shape, x.strides, strict=True) if n > 1)
        return Layout(x.root, shape, tuple(next(old) if n > 1 else 0 for n in shape))
    is_in_order = x == laid_out(x.root, x.shape) and math.prod(shape) == math.prod(x.shape)
    return laid_out(x.root, shape) if is_in_order else None


def _resized(var: Any, shape: tuple[int, ...]) -> SimpleNamespace:
    """Makes a stand-in for a variable, with another shape."""
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, var.aval.dtype))


def _cut(eqn: Eqn, xs: Sequence[Any], shape: tuple[int, ...], params: Mapping | None = None) -> Any:
    """Copies an equation of one device, with operands shaped like `xs` and a result of `shape`."""
    sizes = {
        name: tuple(shape) for name in ("shape", "new_sizes", "limit_indices") if name in eqn.params
    }
    sizes |= {"start_indices": (0,) * len(shape)} if eqn.primitive.name == "slice" else {}
    return SimpleNamespace(
        primitive=eqn.primitive,
        params={**(params or eqn.params), **sizes},
        invars=[_resized(var, x.shape) for var, x in zip(eqn.invars, xs, strict=True)],
        outvars=[_resized(eqn.outvars[0], shape)],
        source_info=eqn.source_info,
    )


# ---- choices by the size of an axis --------------------------------------------------------------
# For example `if lax.axis_size('t') > 1: x = lax.psum(x, 't')`, which one device leaves out.

OPERATIONS = equations.COLLECTIVES | equations.words(
    "pvary div mul ring_enter ring_index ring_close ring_scatter"
)


class _Lacking(Exception):
    """Raised if one device lacks an equation that would change values there."""


class _Completion(Domain[Any]):
    """Goes through a program next to its twin on one device, and adds what the twin left out.

    The fact about a value is a pair of variables or literals of the twin: the one that holds the
    value now, and the one that stood in its place before anything was added.
    """

    def __init__(self, twin: Jaxpr, twin_sizes: Mapping[str, int]):
        self.found: list[Any] = []
        self._twin = steps(twin, lambda x: x, [*twin.constvars, *twin.invars])
        self.next, _ = next(self._twin)
        self._twin_sizes = twin_sizes

    def constant(self, x: Any) -> tuple[Any, Any]:
        return x, x

    def rename(self, ours: Sequence, ins: Sequence, theirs: Sequence) -> list:
        """Returns `theirs`; what is the second of its pair in `ins` is replaced by the first."""
        if len(ours) != len(theirs):
            return list(theirs)

        def is_same(a: Any, before: Any, b: Any) -> bool:
            are_literals = not (is_variable(before) or is_variable(b))
            return is_variable(a) and (before is b or (are_literals and str(before) == str(b)))

        return [
            x if is_same(a, before, b) else b
            for a, (x, before), b in zip(ours, ins, theirs, strict=True)
        ]

    def follow(self, op: Operation, ins: list) -> list:
        eqn = op.eqn
        other = self.next.eqn if self.next and self.next.eqn.primitive is eqn.primitive else None
        if other is not None:
            other = other.replace(invars=self.rename(eqn.invars, ins, other.invars))
        if other is None or (op.name in OPERATIONS and not self._does_same(eqn, ins, other)):
            other = _left_out(eqn, [x for x, _ in ins], self._twin_sizes)
            values = [before for _, before in ins]
        else:
            values = other.outvars
            self.next, _ = self._twin.send(values)
        if len(other.outvars) != len(eqn.outvars):
            raise _Lacking
        self.found.append(other)
        return list(zip(other.outvars, values, strict=False))

    def _does_same(self, eqn: Eqn, ins: list, other: Eqn) -> bool:
        operands = zip(eqn.invars, ins, other.invars, strict=False)
        return equations.axes_of(eqn) == equations.axes_of(other) and all(
            not is_variable(a) or x is b for a, (x, _), b in operands
        )


def completed(jaxpr: Jaxpr, twin: Jaxpr, twin_sizes: Mapping[str, int]) -> Any:
    """Adds to the program of one device the operations that it left out.

    The step may have `if lax.axis_size("t") > 1: x = lax.psum(x, "t")`. Then one device lacks the
    psum. Only operations that change nothing there are added: collectives over axes of one device
    that keep the shape, and `mul` and `div` by a literal, which becomes 1. If anything else is
    missing, returns `twin` itself.
    """
    completion = _Completion(twin, twin_sizes)
    try:
        outs = interpret(jaxpr, completion, [(x, x) for x in [*twin.constvars, *twin.invars]])
    except _Lacking:
        return twin
    if completion.next:
        return twin
    outs = completion.rename(jaxpr.outvars, outs, twin.outvars)
    return twin.replace(eqns=completion.found, outvars=outs)


def _left_out(eqn: Eqn, ins: list, twin_sizes: Mapping[str, int]) -> Any:
    """Copies an equation for operands `ins`. Raises _Lacking if it would change values there."""
    name = eqn.primitive.name
    if name in ("div", "mul"):
        if len(ins) != 2 or is_variable(eqn.invars[1]):
            raise _Lacking
        number = eqn.invars[1]
        one = Literal(type(number.val)(1), number.aval)
        return eqn.replace(invars=[ins[0], one], outvars=[Var(ins[0].aval)])
    if (
        name not in OPERATIONS
        or not eqn.params.get("tiled", True)
        or not all(map(is_variable, eqn.invars))
        or any(twin_sizes.get(axis, 1) != 1 for axis in equations.axes_of(eqn))
    ):
        raise _Lacking
    return eqn.replace(invars=ins, outvars=[Var(x.aval) for x in ins])
