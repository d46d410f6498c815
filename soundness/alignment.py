"""Alignment of a per-device program with the same program on one device, an equation at a time.

Both are traces of one source. Where a device has one entry of a dim, JAX adds or leaves out equations that only give
entries another shape. Such equations are not compared by their number: what counts is that the other equations, which
compute, take the same entries in the same shape. An equation that was left out here has its rule applied all the same,
since it may add up the entries of several devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from shardlib.marks import is_region
from soundness.equation import Equation

AS_IS = frozenset("copy copy_p pvary pcast convert_element_type".split())  # noqa: SIM905
"""Primitives that keep all entries and the shape, if they keep the dtype."""
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())  # noqa: SIM905
SHAPING = REDUCTIONS | frozenset("transpose broadcast_in_dim squeeze expand_dims reshape".split())  # noqa: SIM905


class Layout(NamedTuple):
    """Entries that a value has on a device: those of the value `root`, by strides; 0 along a dim of one entry."""

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
        others: operands that are another value here than on one device.
        is_own: whether it is in the per-device program, as it is on one device.
    """

    eqn: Any
    twin: Any
    others: frozenset[int] = frozenset()
    is_own: bool = True


class Different(Exception):
    """The program is another one on one device."""

    def __init__(self, here: Any, there: Any):
        self.place = "?" if here is None else Equation(here, None, [], {}, {}).place()
        names = [e.primitive.name if e is not None else "nothing more" for e in (here, there)]
        super().__init__(
            f"the program is another one on this mesh than on one device: {names[0]} here, {names[1]} there"
        )

    @classmethod
    def between(cls, ours: Sequence, theirs: Sequence) -> "Different":
        """The first difference of two lists of equations."""
        pairs = itertools.zip_longest(ours, theirs)
        return cls(*next((p for p in pairs if len({e and e.primitive.name for e in p}) > 1), (None, None)))


def aligned(ours: Any, theirs: Any, sizes: Mapping[str, int]) -> tuple[list[Pair], frozenset[int]]:
    """The equations of two jaxprs by pairs, and which of the results are other values here than on one device.

    Args:
        ours: the jaxpr on a mesh, or a body in it.
        theirs: that on one device.
        sizes: number of devices along each axis of the mesh.

    Raises:
        Different: an equation is on one side alone, and does more than to give entries another shape.
    """
    if (len(ours.constvars), len(ours.invars)) != (len(theirs.constvars), len(theirs.invars)):
        raise Different(next(iter(ours.eqns), None), next(iter(theirs.eqns), None))
    numbers = {math.prod(n) for k in range(len(sizes) + 1) for n in itertools.combinations(sizes.values(), k)}
    here: dict[Any, Layout] = {}
    there: dict[Any, Layout] = {}

    def begin(a: Any, b: Any, like: Any) -> None:
        """Two variables that stand for one value, with the entries of its own; `like` has the shape here of b."""
        here[a], there[b] = (laid_out(b, getattr(var.aval, "shape", ())) for var in (a, like))

    for a, b in zip([*ours.constvars, *ours.invars], [*theirs.constvars, *theirs.invars], strict=True):
        begin(a, b, a)
    rest, views, pairs = list(reversed(ours.eqns)), [], []
    for eqn in theirs.eqns:
        views += _views(rest, here)
        x = _operand(eqn, there)
        for own in views if x is not None else ():
            out = own.outvars[0].aval.shape
            is_same = own.primitive is eqn.primitive and _fits(out, eqn.outvars[0].aval.shape, numbers)
            if is_same and _view(eqn, x, out) == here[own.outvars[0]]:
                views = [other for other in views if other is not own]
                is_own = here[own.invars[0]] == x
                pairs.append(Pair(own, eqn) if is_own else Pair(_cut(eqn, [x], out), eqn, is_own=False))
                there[eqn.outvars[0]] = here[own.outvars[0]]
                break
        else:
            shape = _shape_here(eqn, x) if x is not None else None
            if shape is not None and (found := _view(eqn, x, shape)) is not None:
                pairs.append(Pair(_cut(eqn, [x], shape), eqn, is_own=False))
                there[eqn.outvars[0]] = found
                continue
            own = rest.pop() if rest else None
            pair = _paired(own, eqn, here, there)
            pairs.append(pair)
            if is_region(eqn):  # what it keeps for its backward pass, a ring for each of its turns, depends on the mesh
                here |= dict.fromkeys(own.outvars, ANY)
                there |= dict.fromkeys(eqn.outvars, ANY)
                continue
            for a, b, like in zip(own.outvars, eqn.outvars, pair.eqn.outvars, strict=True):
                begin(a, b, like)
    views += _views(rest, here)
    if rest:
        raise Different(rest[-1], None)
    if len(ours.outvars) != len(theirs.outvars):
        raise Different(None, None)
    return pairs, _others(ours.outvars, theirs.outvars, here, there)


ANY = Layout(object(), (), ())
"""In place of the entries of what per-device code computes."""


def _others(ours: Any, theirs: Any, here: Mapping, there: Mapping) -> frozenset[int]:
    """Which of some variables and literals have other entries, or another shape, here than on one device."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    is_same = lambda a, b: isinstance(b, Literal) if isinstance(a, Literal) else here[a] == there.get(b)
    return frozenset(i for i, (a, b) in pairs if not is_same(a, b))


def _operand(eqn: Any, layouts: Mapping) -> Layout | None:
    """Entries of the first operand of an equation that may give them another shape; None of any other equation."""
    if eqn.primitive.name not in SHAPING | AS_IS or isinstance(eqn.invars[0], Literal):
        return None  # JAX does not leave out what it makes of literals
    found = layouts[eqn.invars[0]]
    return None if found is ANY else found


def _views(rest: list, here: dict) -> Iterator[Any]:
    """Takes the equations off the end of `rest` that only give entries another shape."""
    while rest and (x := _operand(rest[-1], here)) is not None:
        if (found := _view(rest[-1], x, rest[-1].outvars[0].aval.shape)) is None:
            return
        here[rest[-1].outvars[0]] = found
        yield rest.pop()


def _paired(own: Any, eqn: Any, here: Mapping, there: Mapping) -> Pair:
    """The pair of two equations that compute."""
    if own is None or own.primitive.name != eqn.primitive.name or is_region(own) != is_region(eqn):
        raise Different(own, eqn)
    if is_region(eqn):
        return Pair(own, eqn)
    if len(own.invars) != len(eqn.invars) or len(own.outvars) != len(eqn.outvars):
        raise Different(own, eqn)
    others = _others(own.invars, eqn.invars, here, there)
    if own.primitive.name not in FORMS or any(isinstance(var, Literal) for var in (*own.invars, *eqn.invars)):
        return Pair(own, eqn, others)
    xs, ys = [here[var] for var in own.invars], [there[var] for var in eqn.invars]
    if ANY in xs or list(map(_entries, xs)) != list(map(_entries, ys)):
        return Pair(own, eqn, others)
    params = eqn.params
    if own.primitive.name == "gather":
        sizes = iter(n for n, size in zip(own.params["slice_sizes"], xs[0].shape, strict=True) if size > 1)
        params = {**params, "slice_sizes": tuple(next(sizes) if n > 1 else 1 for n in ys[0].shape)}
    form, shape = _form(own.primitive.name, params, [y.shape for y in ys])
    if _form(own.primitive.name, own.params, [x.shape for x in xs])[0] != form or not _same_but_form(own, eqn):
        return Pair(own, eqn, others)
    is_own = not others and shape == own.outvars[0].aval.shape
    return Pair(own, eqn) if is_own else Pair(_cut(eqn, ys, shape, params), eqn, is_own=False)


SCATTERS = frozenset("scatter scatter-add scatter-max scatter-min scatter-mul".split())  # noqa: SIM905
FORMS = REDUCTIONS | SCATTERS | {"dot_general", "gather"}
"""Primitives that compute, with parameters that JAX gives other values where an operand has a dim of one entry."""


def _same_but_form(own: Any, eqn: Any) -> bool:
    """Whether two equations have the same parameters, but for those that say which dim is which."""
    names = own.params.keys() - {"axes", "dimension_numbers", "slice_sizes"}
    pairs = ((own.params[name], eqn.params[name]) for name in names)
    return all(a == b or (a != a and b != b) or callable(a) for a, b in pairs)  # NaN is a value to fill in


def _entries(x: Layout) -> tuple:
    """Entries of a value whatever its shape: its root, and the dims of more than one entry."""
    return x.root, *((n, stride) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1)


def _form(name: str, params: Mapping, shapes: list) -> tuple[Any, tuple[int, ...]]:
    """What the parameters of a primitive of FORMS say of the dims of more than one entry, and the result's shape."""
    # Number of each dim of more than one entry among these.
    ranks = [dict(zip((i for i, n in enumerate(s) if n > 1), itertools.count(), strict=False)) for s in shapes]
    of = lambda k, dims: [ranks[k].get(i) for i in dims]
    pairs = lambda a, b: [pair for pair in zip(of(0, a), of(1, b), strict=True) if pair != (None, None)]
    if name in REDUCTIONS:
        axes = params["axes"]
        return {*of(0, axes)} - {None}, tuple(n for i, n in enumerate(shapes[0]) if i not in axes)
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        gone = [{*contracted[k], *batch[k]} for k in (0, 1)]
        free = [n for k in (0, 1) for i, n in enumerate(shapes[k]) if i not in gone[k]]
        return (sorted(pairs(*contracted)), pairs(*batch)), (*(shapes[0][i] for i in batch[0]), *free)
    numbers, (whole, index, *updates) = params["dimension_numbers"], shapes
    if name == "gather":
        windows, gone, to = numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map
        batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        sizes = params["slice_sizes"]
    else:
        windows, gone, to = (
            numbers.update_window_dims,
            numbers.inserted_window_dims,
            numbers.scatter_dims_to_operand_dims,
        )
        batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    kept = [i for i in range(len(whole)) if i not in (*gone, *batch[0])]
    if name != "gather":
        window = dict(zip(kept, (updates[0][j] for j in windows), strict=True))
        sizes = [window.get(i, 1) for i in range(len(whole))]
    of_window, of_index = iter(kept), iter(range(len(index) - 1))
    dims = [(0, next(of_window)) if j in windows else (1, next(of_index)) for j in range(len(kept) + len(index) - 1)]
    shape = tuple(sizes[i] if k == 0 else index[i] for k, i in dims)
    order = [(k, ranks[k].get(i)) for n, (k, i) in zip(shape, dims, strict=True) if n > 1]
    form = [sizes[i] for i in ranks[0]], of(0, to), pairs(*batch), order
    return form, shape if name == "gather" else tuple(whole)


def _view(eqn: Any, x: Layout, shape: tuple[int, ...]) -> Layout | None:
    """What an equation gives in a shape on a device, if it gives the entries of its operand another shape alone."""
    name, params, strides = eqn.primitive.name, eqn.params, None
    if name in AS_IS and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
        strides = x.strides
    elif name == "transpose":
        strides = [x.strides[i] for i in params["permutation"]]
    elif name == "broadcast_in_dim":
        source = dict(zip(params["broadcast_dimensions"], range(len(x.shape)), strict=True))
        strides = [x.strides[source[j]] if j in source else 0 for j in range(len(shape))]
    elif name == "squeeze" or name in REDUCTIONS:
        gone = params["dimensions" if name == "squeeze" else "axes"]
        if all(x.shape[i] == 1 for i in gone):
            strides = [s for i, s in enumerate(x.strides) if i not in gone]
    elif name == "expand_dims":
        old = iter(x.strides)
        strides = [0 if j in params["dimensions"] else next(old) for j in range(len(shape))]
    elif name == "reshape" and params.get("dimensions") is None:
        if [n for n in shape if n > 1] == [n for n in x.shape if n > 1]:
            old = iter(s for n, s in zip(x.shape, x.strides, strict=True) if n > 1)
            strides = [next(old) if n > 1 else 0 for n in shape]
        elif x == laid_out(x.root, x.shape) and math.prod(shape) == math.prod(x.shape):
            return laid_out(x.root, shape)
    return None if strides is None else Layout(x.root, tuple(shape), tuple(strides))


def _shape_here(eqn: Any, x: Layout) -> tuple[int, ...] | None:
    """Shape that the result of an equation on one device has here, for the operand `x`, if JAX left it out here."""
    name, params, there = eqn.primitive.name, eqn.params, getattr(eqn.outvars[0].aval, "shape", ())
    if name in AS_IS:
        return x.shape
    if name == "transpose":
        return tuple(x.shape[i] for i in params["permutation"])
    if name == "broadcast_in_dim":
        source = dict(zip(params["broadcast_dimensions"], x.shape, strict=True))
        return tuple(source.get(j, 1) for j in range(len(there)))
    if name == "squeeze" or name in REDUCTIONS:
        gone = params["dimensions" if name == "squeeze" else "axes"]
        return tuple(n for i, n in enumerate(x.shape) if i not in gone)
    if name == "expand_dims":
        old = iter(x.shape)
        return tuple(1 if j in params["dimensions"] else next(old) for j in range(len(there)))
    if name == "reshape":
        old = [n for n, whole in zip(x.shape, eqn.invars[0].aval.shape, strict=True) if whole > 1]
        if len(old) == sum(n > 1 for n in there):
            sizes = iter(old)
            return tuple(next(sizes) if n > 1 else 1 for n in there)
    return None


def _fits(here: tuple[int, ...], there: tuple[int, ...], numbers: set[int]) -> bool:
    """Whether blocks of a shape may make a whole, by the numbers of devices that may cut a dim."""
    sizes = zip(here, there, strict=True) if len(here) == len(there) else [(1, 0)]
    return all(b == a or (a and b % a == 0 and b // a in numbers) for a, b in sizes)


def _cut(eqn: Any, xs: list[Layout], shape: tuple[int, ...], params: Mapping | None = None) -> Any:
    """An equation on one device, as it is here for the operands `xs` and a result of this shape."""
    of = lambda var, shape: SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, var.aval.dtype))
    sizes = {name: tuple(shape) for name in ("shape", "new_sizes") if name in eqn.params}
    return SimpleNamespace(
        primitive=eqn.primitive,
        params={**(params or eqn.params), **sizes},
        invars=[of(var, x.shape) for var, x in zip(eqn.invars, xs, strict=True)],
        outvars=[of(eqn.outvars[0], shape)],
        source_info=eqn.source_info,
    )
