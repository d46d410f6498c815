"""Aligns a per-device program with the same program on one device, equation by equation.

Both are traces of one source. If a device has one entry of a dim, JAX adds or leaves out equations
that only reshape. Such equations need not match: the other equations, which compute, must take the
same entries in the same shape. The rule of an equation that was left out here is still applied,
since it may add up the entries of several devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, Var

from shardlib import equations
from shardlib.equations import Eqn, Jaxpr, body_of, is_variable, shape_of
from shardlib.marks import is_region
from shardlib.proof import rings
from shardlib.proof.equation import Equation, equal_parameters
from shardlib.proof.origins import callers_text, choice_between
from shardlib.proof.primitives import OF_SIZES

AS_IS = equations.words("copy pvary convert_element_type")
"""Primitives that keep all entries and the shape, if they keep the dtype."""
SHAPING = equations.REDUCTIONS | equations.kinds("view") | {"slice"}


class Layout(NamedTuple):
    """The entries that a value has on a device: those of the value `root`, by strides.

    The stride is 0 along a dim of one entry.
    """

    root: object
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def laid_out(root: object, shape: tuple[int, ...]) -> Layout:
    """All entries of `root`, in row-major order."""
    strides = (math.prod(shape[i + 1 :]) if n > 1 else 0 for i, n in enumerate(shape))
    return Layout(root, tuple(shape), tuple(strides))


@dataclasses.dataclass(frozen=True)
class Pair:
    """An equation of the per-device program, and the same one on one device.

    Attributes:
        eqn: the equation here; if JAX left it out, what it would be here.
        twin: the equation on one device.
        others: operands whose value here differs from that on one device.
        is_own: True if it is in the per-device program as it is on one device.
        inner: for a call, the alignment of what it calls.
    """

    eqn: Any
    twin: Any
    others: frozenset[int] = frozenset()
    is_own: bool = True
    inner: "Aligned | None" = None


class Different(Exception):
    """Raised if the program is another one on one device."""

    def __init__(self, here: Any, there: Any):
        self.place = "?" if here is None and there is None else Equation(here or there).place()
        names = [Equation(e).shown if e is not None else "nothing more" for e in (here, there)]
        problem = (
            f"the program is another one on this mesh than on one device: {names[0]} here, "
            f"{names[1]} there"
        )
        lines = [problem, choice_between(here, there), callers_text(here or there)]
        super().__init__("\n  ".join(filter(None, lines)))

    @classmethod
    def between(cls, ours: Sequence, theirs: Sequence) -> "Different":
        """Creates the error for the first difference of two lists of equations."""
        pairs = itertools.zip_longest(ours, theirs)
        return cls(
            *next((p for p in pairs if len({e and e.primitive.name for e in p}) > 1), (None, None))
        )


ANY = Layout(object(), (), ())
"""Stands for the entries of what per-device code computes."""


class Aligned(NamedTuple):
    """Two jaxprs as pairs of equations.

    Attributes:
        ours: the jaxpr here, with one turn instead of each ring.
        theirs: that on one device, completed by what it left out because of a choice by the number
            of devices.
        pairs: the equations, in the order on one device.
        here: entries of each result of the per-device program.
        there: the entries that it should have according to the program on one device.
    """

    ours: Any
    theirs: Any
    pairs: list[Pair]
    here: list[Layout | None]
    there: list[Layout | None]


def _group_sizes(sizes: Mapping[str, int]) -> Iterator[int]:
    """The number of devices along each subset of the axes of a mesh."""
    for k in range(len(sizes) + 1):
        yield from map(math.prod, itertools.combinations(sizes.values(), k))


class Alignment:
    """Alignments of the jaxprs within a program, each computed once.

    Args:
        sizes: number of devices along each axis of the mesh.
        twin_sizes: those of the mesh of one device: 1, but for axes that both have.
    """

    def __init__(self, sizes: Mapping[str, int], twin_sizes: Mapping[str, int]):
        self._sizes, self._twin_sizes = sizes, twin_sizes
        self._devices = {*itertools.product(_group_sizes(sizes), _group_sizes(twin_sizes))}
        self._known: dict[tuple, Aligned] = {}

    def align(self, ours: Any, theirs: Any, shapes: Sequence | None = None) -> Aligned:
        """Aligns two jaxprs.

        Args:
            ours: the jaxpr on a mesh, or a body in it.
            theirs: that on one device.
            shapes: shape that each argument of `theirs` has here; None: that of the argument of
                `ours`.

        Raises:
            Different: an equation is on one side only, and does more than reshape.
        """
        if (len(ours.constvars), len(ours.invars)) != (len(theirs.constvars), len(theirs.invars)):
            raise Different(next(iter(ours.eqns), None), next(iter(theirs.eqns), None))
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
        here = {
            a: laid_out(b, shape_of(a))
            for a, b in zip(ours.constvars, theirs.constvars, strict=True)
        }
        there = {b: here[a] for a, b in zip(ours.constvars, theirs.constvars, strict=True)}
        for a, b, shape in zip(ours.invars, theirs.invars, shapes, strict=True):
            here[a], there[b] = laid_out(b, shape_of(a)), laid_out(b, shape)
        rest = list(reversed(ours.eqns))
        views = []
        pairs = []
        for eqn in theirs.eqns:
            views += _views(rest, here)
            x = _operand(eqn, there)
            own = self._view_of(views, eqn, x, here) if x is not None else None
            found = here[own.outvars[0]] if own else x and _view(eqn, x)
            if found is not None:
                views = [other for other in views if other is not own]
                is_own = own is not None and here[own.invars[0]] == x
                pairs.append(
                    Pair(own, eqn)
                    if is_own
                    else Pair(_cut(eqn, [x], found.shape), eqn, is_own=False)
                )
                there[eqn.outvars[0]] = found
                continue
            own = rest.pop() if rest else None
            if (
                own is None
                or own.primitive.name != eqn.primitive.name
                or is_region(own) != is_region(eqn)
            ):
                raise Different(own, eqn)
            # What it keeps for its backward pass, a ring for each of its turns, depends on the
            # mesh.
            if is_region(eqn):
                pairs.append(Pair(own, eqn))
                here |= dict.fromkeys(own.outvars, ANY)
                there |= dict.fromkeys(eqn.outvars, ANY)
                continue
            pair, results, wholes = self._paired(own, eqn, here, there)
            pairs.append(pair)
            here |= zip(own.outvars, results, strict=True)
            there |= zip(eqn.outvars, wholes, strict=True)
        views += _views(rest, here)
        if rest or len(ours.outvars) != len(theirs.outvars):
            raise Different(rest[-1] if rest else None, None)
        layouts = (
            _layouts(jaxpr.outvars, known) for jaxpr, known in ((ours, here), (theirs, there))
        )
        return Aligned(ours, theirs, pairs, *layouts)

    def _view_of(self, views: list, eqn: Eqn, x: Layout, here: Mapping) -> Any:
        """The equation among `views` that returns what `eqn` returns on one device.

        Returns None if there is none.
        """
        alike = [own for own in views if own.primitive is eqn.primitive]
        for own in alike:
            shape = shape_of(own.outvars[0])
            if (
                self._fits(shape, shape_of(eqn.outvars[0]))
                and _view(eqn, x, shape) == here[own.outvars[0]]
            ):
                return own
        # Entries that stand for devices: as many as devices here, one on one device.
        reshaped = (
            own for own in alike if eqn.primitive.name == "reshape" and here[own.invars[0]] == x
        )
        return next(
            (
                own
                for own in reshaped
                if len(shape_of(own.outvars[0])) == len(shape_of(eqn.outvars[0]))
            ),
            None,
        )

    def _fits(self, here: tuple[int, ...], there: tuple[int, ...]) -> bool:
        """True if blocks of two shapes may make one whole.

        The numbers of devices that may cut a dim are given.
        """
        sizes = zip(here, there, strict=True) if len(here) == len(there) else [(1, 0)]
        return all(a == b or any(a * n == b * m for n, m in self._devices) for a, b in sizes)

    def _paired(
        self, own: Eqn, eqn: Eqn, here: Mapping, there: Mapping
    ) -> tuple[Pair, list[Layout], list[Layout]]:
        """Pairs two equations that compute; also returns the entries of their results."""
        if len(own.invars) != len(eqn.invars) or len(own.outvars) != len(eqn.outvars):
            raise Different(own, eqn)
        xs, ys = _layouts(own.invars, here), _layouts(eqn.invars, there)
        if own.primitive.name in equations.CALLS:
            shapes = [
                shape_of(a) if y in (None, ANY) else y.shape
                for a, y in zip(own.invars, ys, strict=True)
            ]
            found = self.align(
                body_of(equations.called(own))[0], body_of(equations.called(eqn))[0], shapes
            )
            ours, theirs = (
                list(map(_result_of_call, own.outvars, eqn.outvars, side))
                for side in (found.here, found.there)
            )
            return Pair(own, eqn, others(xs, ys, same_entries), inner=found), ours, theirs
        pair = Pair(own, eqn, others(xs, ys))
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
    """The entries of a result of a call, from those that the called jaxpr returns."""
    if inner is ANY:
        return ANY
    if inner is None:
        return laid_out(twin, shape_of(var))
    return inner._replace(root=(twin, inner.root))


def others(
    ours: Sequence, theirs: Sequence, key: Callable[..., Any] | None = None
) -> frozenset[int]:
    """Which of some Layouts differ between here and one device.

    They are compared by key(Layout) if it is given.
    """
    return frozenset(
        i
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True))
        if x != y and (key is None or None in (x, y) or key(x) != key(y))
    )


def _layouts(variables: Any, known: Mapping) -> list[Layout | None]:
    """Entries of some variables; None for literals."""
    return [None if isinstance(var, Literal) else known[var] for var in variables]


def _operand(eqn: Eqn, layouts: Mapping) -> Layout | None:
    """Entries of the first operand of an equation that may reshape it; None for other equations."""
    if eqn.primitive.name not in SHAPING | AS_IS or isinstance(eqn.invars[0], Literal):
        return None  # JAX does not leave out what it makes of literals
    found = layouts[eqn.invars[0]]
    return None if found is ANY else found


def _views(rest: list, here: dict) -> Iterator[Any]:
    """Removes equations that only reshape from the end of `rest`."""
    while rest and (x := _operand(rest[-1], here)) is not None:
        if (found := _view(rest[-1], x, shape_of(rest[-1].outvars[0]))) is None:
            return
        here[rest[-1].outvars[0]] = found
        yield rest.pop()


def _in_form(own: Eqn, eqn: Eqn, xs: list[Any], ys: list[Any]) -> Pair | None:
    """Pairs two equations with the same entries, if they treat dims of more than one entry alike.

    They do if they do the same to all of these dims.
    """
    params = eqn.params
    if own.primitive.name == "gather":
        sizes = iter(
            n for n, size in zip(own.params["slice_sizes"], xs[0].shape, strict=True) if size > 1
        )
        params = {**params, "slice_sizes": tuple(next(sizes) if n > 1 else 1 for n in ys[0].shape)}
    form, shape = _form(own.primitive.name, params, [y.shape for y in ys])
    # These say which dim is which.
    names = own.params.keys() - OF_SIZES - {"axes", "dimension_numbers"}
    is_other = any(
        not (callable(own.params[n]) or equal_parameters(own.params[n], eqn.params[n]))
        for n in names
    )
    if is_other or _form(own.primitive.name, own.params, [x.shape for x in xs])[0] != form:
        return None
    if (xs, shape) == (ys, shape_of(own.outvars[0])):
        return None
    return Pair(_cut(eqn, ys, shape, params), eqn, is_own=False)


FORMS = equations.REDUCTIONS | equations.SCATTERS | {"dot_general", "gather"}
"""Primitives that compute, and whose parameters JAX changes if an operand has a dim of one
entry."""


def same_entries(x: Layout) -> tuple:
    """Identifies the entries of a value whatever its shape.

    Returns its root, and the dims of more than one entry.
    """
    return x.root, *((n, stride) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1)


def _form(name: str, params: Mapping, shapes: list) -> tuple[Any, tuple[int, ...]]:
    """What the parameters of a primitive of FORMS say about dims of more than one entry.

    Also returns the result's shape.
    """
    # For each shape, numbers the dims of more than one entry.
    ranks = [
        dict(zip((i for i, n in enumerate(s) if n > 1), itertools.count(), strict=False))
        for s in shapes
    ]

    def number(k: int, dims: Sequence[int]) -> list[int | None]:
        """The numbers of dims of operand k; None for one of one entry."""
        return [ranks[k].get(i) for i in dims]

    def number_pairs(a: Sequence[int], b: Sequence[int]) -> list:
        """The numbers of dims of the first two operands that belong together."""
        pairs = zip(number(0, a), number(1, b), strict=True)
        return [pair for pair in pairs if pair != (None, None)]

    if name in equations.REDUCTIONS:
        axes = params["axes"]
        return {*number(0, axes)} - {None}, tuple(
            n for i, n in enumerate(shapes[0]) if i not in axes
        )
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        gone = [{*contracted[k], *batch[k]} for k in (0, 1)]
        free = [n for k in (0, 1) for i, n in enumerate(shapes[k]) if i not in gone[k]]
        return (sorted(number_pairs(*contracted)), number_pairs(*batch)), (
            *(shapes[0][i] for i in batch[0]),
            *free,
        )
    numbers = params["dimension_numbers"]
    (whole, index, *updates) = shapes
    if name == "gather":
        windows = numbers.offset_dims
        gone = numbers.collapsed_slice_dims
        to = numbers.start_index_map
        batch = (numbers.operand_batching_dims, numbers.start_indices_batching_dims)
        sizes = params["slice_sizes"]
    else:
        windows, gone = numbers.update_window_dims, numbers.inserted_window_dims
        to = numbers.scatter_dims_to_operand_dims
        batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    kept = [i for i in range(len(whole)) if i not in (*gone, *batch[0])]
    if name != "gather":
        window = dict(zip(kept, (updates[0][j] for j in windows), strict=True))
        sizes = [window.get(i, 1) for i in range(len(whole))]
    of_window = iter(kept)
    of_index = iter(range(len(index) - 1))
    dims = [
        (0, next(of_window)) if j in windows else (1, next(of_index))
        for j in range(len(kept) + len(index) - 1)
    ]
    shape = tuple(sizes[i] if k == 0 else index[i] for k, i in dims)
    order = [(k, ranks[k].get(i)) for n, (k, i) in zip(shape, dims, strict=True) if n > 1]
    form = [sizes[i] for i in ranks[0]], number(0, to), number_pairs(*batch), order
    return form, shape if name == "gather" else tuple(whole)


def _view(eqn: Eqn, x: Layout, shape: tuple[int, ...] | None = None) -> Layout | None:
    """The result of an equation, if it only reshapes its operand.

    Args:
        eqn: the equation.
        x: its operand.
        shape: shape of the result on a device; None: of an equation on one device that JAX left out
            here.
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
    """Stands for a variable of another shape."""
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, var.aval.dtype))


def _cut(eqn: Eqn, xs: Sequence[Any], shape: tuple[int, ...], params: Mapping | None = None) -> Any:
    """Adapts an equation on one device to the operands `xs` and a result of this shape."""
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


def completed(jaxpr: Jaxpr, twin: Jaxpr, twin_sizes: Mapping[str, int]) -> Any:
    """Completes the program of one device by operations that it left out.

    These change nothing there. These are collectives that keep the shape, over axes of one device,
    and multiplications by a number that is 1 there. Each returns its operand, so the program
    computes the same. Returns `twin` itself if it lacks other operations.
    """
    pairs = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*twin.constvars, *twin.invars], strict=False)
    )
    before: dict[Any, Any] = {}  # the variable that is the same value as a new one

    def resolve(var: Any) -> Any:
        return before.get(var, var) if is_variable(var) else var

    def is_same(ours: Any, theirs: Any) -> bool:
        """True if `theirs` is the variable or literal whose value `ours` has here."""
        if not is_variable(ours) or ours not in pairs:
            return False
        value = resolve(pairs[ours])
        are_literals = not (is_variable(value) or is_variable(theirs))
        return value is theirs or (are_literals and str(value) == str(theirs))

    def rename(ours: Any, theirs: Any) -> list:
        """Renames variables on one device to those whose value they have here."""
        if len(ours) != len(theirs):
            return theirs
        return [pairs[a] if is_same(a, b) else b for a, b in zip(ours, theirs, strict=True)]

    def does_same(ours: Eqn, theirs: Eqn) -> bool:
        operands = zip(ours.invars, theirs.invars, strict=False)
        return equations.axes_of(ours) == equations.axes_of(theirs) and all(
            not is_variable(a) or pairs.get(a) is b for a, b in operands
        )

    found = []
    rest = list(twin.eqns)
    for eqn in jaxpr.eqns:
        other = rest[0] if rest and rest[0].primitive is eqn.primitive else None
        if other is not None:
            other = other.replace(invars=rename(eqn.invars, other.invars))
        if other is None or (eqn.primitive.name in OPERATIONS and not does_same(eqn, other)):
            if (other := _left_out(eqn, pairs, twin_sizes)) is None:
                return twin
            before |= {
                new: resolve(old) for new, old in zip(other.outvars, other.invars, strict=False)
            }
        else:
            rest.pop(0)
        found.append(other)
        pairs.update(zip(eqn.outvars, other.outvars, strict=False))
    return twin if rest else twin.replace(eqns=found, outvars=rename(jaxpr.outvars, twin.outvars))


def _left_out(eqn: Eqn, pairs: Mapping, twin_sizes: Mapping[str, int]) -> Any:
    """The equation on one device, if it changes nothing there; else None."""
    name = eqn.primitive.name
    (first, *others) = eqn.invars or (None,)
    if name in ("div", "mul"):
        if len(others) != 1 or is_variable(others[0]):
            return None
        operand: Any = pairs[first] if is_variable(first) else first
        one = Literal(type(others[0].val)(1), others[0].aval)
        return eqn.replace(invars=[operand, one], outvars=[Var(operand.aval)])
    if (
        name not in OPERATIONS
        or not eqn.params.get("tiled", True)
        or not all(map(is_variable, eqn.invars))
    ):
        return None
    if any(twin_sizes.get(axis, 1) != 1 for axis in equations.axes_of(eqn)):
        return None
    operands = [pairs[var] for var in eqn.invars]
    return eqn.replace(invars=operands, outvars=[Var(var.aval) for var in operands])
