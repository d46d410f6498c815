"""Random per-device programs, run in numpy on all devices in lockstep: does the analysis accept one that is wrong?

A program is a list of steps. Each is written once, for numpy (the run) and for jax.numpy (the trace). Most steps keep
to the types of the values; some do not, such as a cumulative sum along a sharded dim. hypothesis draws, and makes what
fails small.
"""

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib.proof.alignment import Different
from shardlib.proof.check import findings

AXES = ("d", "t")
MESHES = ((2, 2), (4, 2), (2, 4))
OF_ONE_ENTRY = ((8, 1), (1, 8), (4, 2), (2, 4))
"""Meshes on which a device has one entry of many dims: sizes are 8 and 16."""
WRONG = 0.08
"""Share of the steps that heed no type."""


class Dim(NamedTuple):
    """A dim of a block: its whole size, and the axes that shard it."""

    size: int
    axes: tuple[str, ...] = ()


class Type(NamedTuple):
    """What a value is meant to be. Where a step was wrong it gives its shape alone."""

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    kind: str = "f"

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(n // math.prod(sizes[a] for a in axes) for n, axes in self.dims)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(dim.axes or None for dim in self.dims))


class Step(NamedTuple):
    """Computes a value from others.

    Attributes:
        name: what it does.
        operands: numbers of the values that it takes.
        local: fn(xp, device, *arrays) on each device.
        together: fn(devices, values) of a collective, on all devices; traced: the same on a device of a trace.
    """

    name: str
    operands: tuple[int, ...]
    local: Callable | None = None
    together: Callable | None = None
    traced: Callable | None = None


class Program(NamedTuple):
    inputs: tuple[Type, ...]
    steps: tuple[Step, ...]
    result: Type


class Traced:
    """A device, in a trace."""

    index, size = staticmethod(lax.axis_index), staticmethod(lax.axis_size)


@dataclasses.dataclass
class Device:
    """A device of a run."""

    place: dict[str, int]
    sizes: dict[str, int]

    def index(self, axis: str) -> int:
        return self.place[axis]

    def size(self, axis: str) -> int:
        return self.sizes[axis]


def devices_of(sizes: dict[str, int]) -> list[Device]:
    places = itertools.product(*(range(n) for n in sizes.values()))
    return [Device(dict(zip(sizes, place, strict=True)), sizes) for place in places]


def block(array: np.ndarray, t: Type, device: Device) -> np.ndarray:
    """This device's block of a whole array."""
    for i, dim in enumerate(t.dims):
        start = 0
        for axis in dim.axes:
            start = start * device.size(axis) + device.index(axis)
        n = array.shape[i] // math.prod(device.size(a) for a in dim.axes)
        array = np.take(array, range(start * n, start * n + n), axis=i)
    return array


def run(program: Program, sizes: dict[str, int], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The result on each device."""
    devices = devices_of(sizes)
    values = [[block(x, t, device) for device in devices] for x, t in zip(arrays, program.inputs, strict=True)]
    for step in program.steps:
        operands = [values[i] for i in step.operands]
        if step.together:
            values.append(step.together(devices, *operands))
        else:
            each = zip(devices, *operands, strict=True)
            values.append([np.asarray(step.local(np, device, *xs)) for device, *xs in each])
    return values[-1]


def trace(program: Program, sizes: dict[str, int]) -> Any:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))

    def body(*arrays):
        values = list(arrays)
        for step in program.steps:
            operands = [values[i] for i in step.operands]
            values.append(step.traced(*operands) if step.traced else step.local(jnp, Traced, *operands))
        return values[-1]

    dtypes = {"f": np.float32, "i": np.int32}
    with jax.sharding.use_abstract_mesh(mesh):
        arguments = [
            jax.ShapeDtypeStruct([d.size for d in t.dims], dtypes[t.kind], sharding=NamedSharding(mesh, t.spec))
            for t in program.inputs
        ]
        specs = tuple(t.spec for t in program.inputs)
        mapped = jax.shard_map(body, in_specs=specs, out_specs=program.result.spec, check_vma=False)
        return jax.make_jaxpr(mapped)(*arguments)


# ---- steps --------------------------------------------------------------------------------------------------------


def around(devices: list[Device], axis: str) -> Iterator[tuple[int, list[int]]]:
    """For each device the ones that differ from it along `axis` alone, in order."""
    for i, device in enumerate(devices):
        others = [k for k, d in enumerate(devices) if d.place | {axis: 0} == device.place | {axis: 0}]
        yield i, others


def reduced(axis: str, total: Callable) -> Callable:
    return lambda devices, x: [total([x[k] for k in group]) for _, group in around(devices, axis)]


def scattered(axis: str, k: int) -> Callable:
    def together(devices, x):
        sums = reduced(axis, sum)(devices, x)
        return [np.split(y, d.size(axis), axis=k)[d.index(axis)] for y, d in zip(sums, devices, strict=True)]

    return together


def exchanged(axis: str, split: int, joined: int) -> Callable:
    def together(devices, x):
        pieces = [np.split(y, d.size(axis), axis=split) for y, d in zip(x, devices, strict=True)]
        own = [devices[i].index(axis) for i in range(len(devices))]
        return [np.concatenate([pieces[k][own[i]] for k in g], axis=joined) for i, g in around(devices, axis)]

    return together


UNARY = {
    "sin": lambda xp, x: xp.sin(x),
    "tanh": lambda xp, x: xp.tanh(x),
    "square": lambda xp, x: xp.square(xp.tanh(x)),
    "root": lambda xp, x: xp.sqrt(xp.abs(x) + 1),
    "exp": lambda xp, x: xp.exp(xp.tanh(x)),
    "relu": lambda xp, x: xp.maximum(x, 0),
    "add one": lambda xp, x: x + 1,
    "clip": lambda xp, x: xp.clip(x, -1, 1),
}
LINEAR = {"negative": lambda xp, x: -x, "half": lambda xp, x: 0.5 * x, "double": lambda xp, x: x + x}
BINARY = {
    "add": lambda xp, x, y: x + y,
    "sub": lambda xp, x, y: x - y,
    "mul": lambda xp, x, y: x * y,
    "div": lambda xp, x, y: x / (xp.abs(y) + 1),
    "maximum": lambda xp, x, y: xp.maximum(x, y),
    "where": lambda xp, x, y: xp.where(x > 0, x, y),
}
ALONG = {
    "cumsum": lambda xp, x, k: xp.cumsum(x, axis=k),
    "sort": lambda xp, x, k: xp.sort(x, axis=k),
    "flip": lambda xp, x, k: xp.flip(x, axis=k),
    "roll": lambda xp, x, k: xp.roll(x, 1, axis=k),
    "centered": lambda xp, x, k: x - x.mean(axis=k, keepdims=True),
    "over maximum": lambda xp, x, k: x / (xp.abs(x).max(axis=k, keepdims=True) + 1),
    "argsort": lambda xp, x, k: xp.argsort(x, axis=k) * 1.0,
    "shift": lambda xp, x, k: xp.concatenate([0 * xp.take(x, xp.arange(1), k), _rows(xp, x, 0, -1, k)], axis=k),
    "first": lambda xp, x, k: x - _rows(xp, x, 0, 1, k),
    "scan": lambda xp, x, k: _recurrence(xp, x, k),
}
"""Steps that need a whole dim."""


def _rows(xp, x, start, stop, k):
    return x[(slice(None),) * k + (slice(start, stop),)]


def _recurrence(xp, x, k):
    def step(c, x):
        return (xp.tanh(c + x), xp.tanh(c + x))

    items, c = xp.moveaxis(x, k, 0), 0 * xp.moveaxis(x, k, 0)[0]
    if xp is jnp:
        return jnp.moveaxis(lax.scan(step, c, items)[1], 0, k)
    found = []
    for item in items:
        c, y = step(c, item)
        found.append(y)
    return np.moveaxis(np.stack(found), 0, k)


def _branch(xp, x, go):
    if xp is jnp:
        return lax.cond(go > 0, jnp.sin, lambda x: 0.5 * x, x)
    return np.sin(x) if go > 0 else 0.5 * x


def _loop(xp, x, limit):
    """Halves x until its largest entry is small: as often as `limit` says."""
    if xp is jnp:
        return lax.while_loop(lambda s: s[0] > 0.5, lambda s: (s[0] / 2, s[1] * 0.9), (jnp.abs(limit), x))[1]
    limit = np.abs(limit)
    while limit > 0.5:
        limit, x = limit / 2, x * 0.9
    return x


def _looked_up(how: str, axis: str):
    def local(xp, device, table, ids, others):
        n = table.shape[0]
        start = device.index(axis) * n
        own, other = ids - start, others - start
        clipped = xp.clip(own, 0, n // 2 if how == "short clip" else n - 1)
        found = (own >= 0) & ((other if how == "other ids" else own) < (n + (how == "too long")))
        entries = xp.take(table, clipped + (how == "shifted"), axis=0, mode="clip")
        mask = found.reshape(found.shape + (1,) * (table.ndim - 1))
        return xp.where(mask, xp.ones_like(entries) if how == "mask alone" else entries, 1.0 if how == "ones" else 0.0)

    return local


LOOKUPS = ("right",) * 6 + ("short clip", "other ids", "too long", "shifted", "mask alone", "ones")


def _added(how: str, axis: str, size: int):
    def local(xp, device, g, ids, others):
        n = size // device.size(axis)
        own = ids - device.index(axis) * n
        other = others - device.index(axis) * n if how == "other ids" else own
        found = (other >= 0) & (other < n)
        mask = found.reshape(found.shape + (1,) * (g.ndim - 1))
        g = g if how == "not masked" else xp.where(mask, g, 0.0)
        own = xp.clip(own, 0, n - 1)
        if xp is jnp:
            return jnp.zeros((n, *g.shape[1:])).at[own].add(g)
        total = np.zeros((n, *g.shape[1:]))
        np.add.at(total, own, g)
        return total

    return local


class Skip(Exception):
    """A step does not fit the values that there are."""


class Generator:
    """Draws a program."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.types: list[Type] = []
        self.steps: list[Step] = []

    def pick(self, items):
        return self.rng.choice(list(items))

    def errs(self) -> bool:
        return self.rng.random() > 1 - WRONG

    def skip_if(self, fits_not) -> None:
        if fits_not:
            raise Skip

    def add(self, name: str, operands: tuple[int, ...], t: Type, local=None, **fns) -> bool:
        self.steps.append(Step(name, operands, local, **fns))
        self.types.append(t)
        return True

    def value(self, *, finished: bool = True, kind: str = "f", ndim: int = 0) -> int:
        def fits(t):
            return t.kind == kind and len(t.dims) >= ndim and (not (finished and t.partial) or self.errs())

        found = [i for i, t in enumerate(self.types) if fits(t)]
        recent = found[-3:] if self.rng.random() < 0.7 else found
        self.skip_if(not found)
        return self.pick(recent)

    def program(self) -> Program:
        def dims():
            return tuple(Dim(self.pick([8, 16]), axes) for axes in self.axes(self.pick([1, 2, 2, 3])))

        for _ in range(3):
            self.types.append(Type(dims()))
        self.types.append(Type((Dim(16, self.pick([(), ("d",), ("t",)])),), kind="i"))
        self.types.append(Type(self.types[-1].dims, kind="i"))
        inputs, moves = tuple(self.types), [getattr(self, name) for name in dir(self) if name.startswith("make_")]
        count = len(inputs) + self.pick(range(3, 10))
        while len(self.types) < count:
            with contextlib.suppress(Skip):
                self.pick(moves)()
        if self.types[-1].partial and not self.errs():
            with contextlib.suppress(Skip):
                self.make_reduction_over_devices(len(self.types) - 1)
        result = self.types[-1]
        if result.dims and self.errs():
            k = self.rng.randrange(len(result.dims))
            axes = self.pick([(), ("d",), ("t",)])
            result = result._replace(dims=(*result.dims[:k], Dim(result.dims[k].size, axes), *result.dims[k + 1 :]))
        return Program(inputs, tuple(self.steps), result)

    def axes(self, ndim: int) -> list[tuple[str, ...]]:
        """How the dims of an input are sharded: each axis shards one at most."""
        found: list[tuple[str, ...]] = [()] * ndim
        for axis in self.rng.sample(AXES, 2):
            if self.rng.random() < 0.6:
                k = self.rng.randrange(ndim)
                found[k] = (*found[k], axis)
        return found

    def along(self, t: Type, is_free: bool = True) -> int:
        """A dim; one that is not sharded, if it must be."""
        found = [k for k, dim in enumerate(t.dims) if not (is_free and dim.axes)]
        k = self.pick(range(len(t.dims)) if t.dims and (self.errs() or not is_free) else found or [None])
        self.skip_if(k is None)
        return k

    def make_unary(self):
        table = LINEAR if self.rng.random() < 0.3 else UNARY
        i = self.value(finished=table is UNARY)
        name = self.pick(table)
        return self.add(name, (i,), self.types[i], lambda xp, _, x: table[name](xp, x))

    def make_binary(self):
        i, name = self.value(finished=self.rng.random() < 0.7), self.pick(BINARY)
        t = self.types[i]

        def fits(u):
            return u.kind == "f" and u.dims == t.dims and (u.partial == t.partial or self.errs())

        j = self.pick([k for k, u in enumerate(self.types) if fits(u)] or [i])
        self.skip_if(t.partial and name not in ("add", "sub") and not self.errs())
        return self.add(name, (i, j), t, lambda xp, _, x, y: BINARY[name](xp, x, y))

    def make_product_with_a_number(self):
        i = self.value(finished=False)
        t = self.types[i]
        k, over = self.along(t, is_free=False), self.rng.random() < 0.5
        self.skip_if(t.dims[k].axes and not self.errs())

        def number(x):
            return 1 / x.shape[k] if over else x.shape[k] / 16

        return self.add("size", (i,), t, lambda xp, _, x: x * number(x))

    def make_step_along(self):
        i, name = self.value(finished=self.rng.random() < 0.9), self.pick(ALONG)
        t = self.types[i]
        k = self.along(t)
        self.skip_if(t.partial and name not in ("cumsum", "flip", "roll") and not self.errs())
        return self.add(name, (i,), t, lambda xp, _, x: ALONG[name](xp, x, k))

    def make_reduction(self):
        i, name = self.value(finished=False), self.pick(["sum", "sum", "mean", "max", "min", "argmax"])
        t = self.types[i]
        k = self.along(t, is_free=name not in ("sum", "mean"))
        self.skip_if(t.partial and name not in ("sum", "mean") and not self.errs())
        rest, partial = (*t.dims[:k], *t.dims[k + 1 :]), t.partial | set(t.dims[k].axes)
        scale = math.prod
        if name == "mean":
            cut = t.dims[k].axes if not self.errs() else ()

            def local(xp, dev, x):
                return x.sum(axis=k) / (x.shape[k] * scale(dev.size(a) for a in cut))
        else:

            def local(xp, dev, x):
                return getattr(xp, name)(x, axis=k) * 1.0

        return self.add(name, (i,), Type(rest, partial), local)

    def make_product(self):
        i, j = self.value(finished=False, ndim=1), self.value(ndim=1)
        a, b = self.types[i], self.types[j]
        pairs = [(k, m) for k, x in enumerate(a.dims) for m, y in enumerate(b.dims) if x == y]
        self.skip_if(not pairs)
        k, m = self.pick(pairs)
        rest = (*a.dims[:k], *a.dims[k + 1 :], *b.dims[:m], *b.dims[m + 1 :])
        used = [axis for dim in rest for axis in dim.axes]
        partial = a.partial | b.partial | set(a.dims[k].axes)
        self.skip_if(len(rest) > 3 or ((len(set(used)) < len(used) or partial & set(used)) and not self.errs()))
        return self.add("dot", (i, j), Type(rest, partial), lambda xp, _, x, y: xp.tensordot(x, y, ((k,), (m,))) / 4)

    def make_transposition(self):
        i = self.value(finished=False, ndim=2)
        t, order = self.types[i], self.rng.sample(range(len(self.types[i].dims)), len(self.types[i].dims))
        t = t._replace(dims=tuple(t.dims[k] for k in order))
        return self.add("transpose", (i,), t, lambda xp, _, x: xp.transpose(x, order))

    def make_merge(self):
        i = self.value(finished=False, ndim=2)
        t = self.types[i]
        k = self.rng.randrange(len(t.dims) - 1)
        a, b = t.dims[k : k + 2]
        self.skip_if(b.axes and not self.errs() and self.rng.random() < 0.7)
        dims = (*t.dims[:k], Dim(a.size * b.size, a.axes + b.axes), *t.dims[k + 2 :])

        def merge(xp, _, x):
            return x.reshape(*x.shape[:k], x.shape[k] * x.shape[k + 1], *x.shape[k + 2 :])

        return self.add("merge", (i,), t._replace(dims=dims), merge)

    def make_split(self):
        i = self.value(finished=False, ndim=1)
        t = self.types[i]
        k, major = self.rng.randrange(len(t.dims)), self.rng.random() < 0.5
        dim = t.dims[k]
        self.skip_if(dim.size < 32 or (dim.axes and not major and not self.errs()))
        pair = [Dim(dim.size // 2, dim.axes), Dim(2)]

        def shape(n):
            return (n // 2, 2) if major else (2, n // 2)

        def split(xp, _, x):
            return x.reshape(*x.shape[:k], *shape(x.shape[k]), *x.shape[k + 1 :])

        pair = pair if major else pair[::-1]
        return self.add("split", (i,), t._replace(dims=(*t.dims[:k], *pair, *t.dims[k + 1 :])), split)

    def make_part(self):
        i = self.value(finished=False, ndim=1)
        t = self.types[i]
        k = self.along(t)
        self.skip_if(t.dims[k].size < 16)
        dims = (*t.dims[:k], t.dims[k]._replace(size=t.dims[k].size // 2), *t.dims[k + 1 :])

        def half(xp, _, x):
            return _rows(xp, x, 0, x.shape[k] // 2, k)

        return self.add("half", (i,), t._replace(dims=dims), half)

    def make_join(self):
        i = self.value(finished=False, ndim=1)
        t = self.types[i]
        k = self.along(t)
        self.skip_if(t.dims[k].size > 32)
        j = self.pick([m for m, u in enumerate(self.types) if (u.dims, u.partial, u.kind) == (t.dims, t.partial, "f")])
        dims = (*t.dims[:k], t.dims[k]._replace(size=2 * t.dims[k].size), *t.dims[k + 1 :])
        return self.add("join", (i, j), t._replace(dims=dims), lambda xp, _, x, y: xp.concatenate([x, y], axis=k))

    def make_positions(self):
        i = self.value(ndim=1)
        t = self.types[i]
        k = self.along(t, is_free=False)
        axes = t.dims[k].axes if not self.errs() else self.pick([(), ("d",), ("t",), ("d", "t"), ("t", "d")])

        def local(xp, device, x):
            n, start = x.shape[k], 0
            for axis in axes:
                start = start * device.size(axis) + device.index(axis)
            places = start * n + xp.arange(n)
            return x * xp.cos(places.reshape([-1 if m == k else 1 for m in range(x.ndim)]))

        return self.add("positions", (i,), t, local)

    def make_lookup(self):
        i, ids = self.value(ndim=1), self.pick([3, 4])
        t, u = self.types[i], self.types[ids]
        how, others = self.pick(LOOKUPS), 7 - ids
        axes = t.dims[0].axes if not self.errs() else (self.pick(AXES),)
        used = {a for dim in (*t.dims[1:], *u.dims) for a in dim.axes} | t.partial
        self.skip_if(len(axes) != 1 or t.dims[0].size != 16 or (set(axes) & used and not self.errs()))
        found = Type((*u.dims, *t.dims[1:]), t.partial | set(axes))
        return self.add(f"lookup, {how}", (i, ids, others), found, _looked_up(how, axes[0]))

    def make_scatter(self):
        i, ids, axis = self.value(ndim=1), self.pick([3, 4]), self.pick(AXES)
        t, u, how = self.types[i], self.types[ids], self.pick(["right"] * 5 + ["other ids", "not masked"])
        used = [a for dim in (*t.dims, Dim(16, (axis,))) for a in dim.axes]
        self.skip_if(t.dims[0] != u.dims[0] or (len(set(used)) < len(used) and not self.errs()))
        total = Type((Dim(16, (axis,)), *t.dims[1:]), t.partial | set(t.dims[0].axes))
        return self.add(f"scatter, {how}", (i, ids, 7 - ids), total, _added(how, axis, 16))

    def make_choice(self):
        i, j = self.value(), self.value()

        def go(x):
            return x.sum()

        free = not any(d.axes for d in self.types[j].dims) and not self.types[j].partial
        self.skip_if(not free and not self.errs())
        how = self.pick([_branch, _loop])
        return self.add(how.__name__, (i, j), self.types[i], lambda xp, _, x, y: how(xp, x, go(y)))

    def make_reduction_over_devices(self, i: int | None = None):
        i = self.value(finished=False) if i is None else i
        t = self.types[i]
        axis = self.pick(sorted(t.partial)) if t.partial and not self.errs() else self.pick(AXES)
        self.skip_if(axis not in t.partial and not self.errs())
        name = "psum" if not self.errs() else self.pick(["pmean", "pmax"])
        total = {"psum": sum, "pmean": lambda x: sum(x) / len(x), "pmax": lambda x: np.max(x, axis=0)}[name]
        done = t._replace(partial=t.partial - {axis})
        if done.partial:
            i = len(self.types)
        fn = getattr(lax, name)
        ok = self.add(name, (self.last(t, i),), done, together=reduced(axis, total), traced=lambda x: fn(x, axis))
        return self.make_reduction_over_devices(len(self.types) - 1) if done.partial and not self.errs() else ok

    def last(self, t: Type, i: int) -> int:
        return next(k for k in range(len(self.types) - 1, -1, -1) if self.types[k] is t) if i >= len(self.types) else i

    def make_scattered_sum(self):
        i = self.value(finished=False, ndim=1)
        t = self.types[i]
        axis = self.pick(sorted(t.partial)) if t.partial else self.pick(AXES)
        k = self.rng.randrange(len(t.dims))
        self.skip_if((axis not in t.partial or t.dims[k].size < 16) and not self.errs())
        dims = (*t.dims[:k], Dim(t.dims[k].size, (*t.dims[k].axes, axis)), *t.dims[k + 1 :])

        def scatter(x):
            return lax.psum_scatter(x, axis, scatter_dimension=k, tiled=True)

        t = Type(dims, t.partial - {axis})
        return self.add("psum_scatter", (i,), t, together=scattered(axis, k), traced=scatter)

    def make_gather(self):
        i = self.value(finished=False, ndim=1)
        t = self.types[i]
        k = self.rng.randrange(len(t.dims))
        axes = t.dims[k].axes
        self.skip_if(not axes)
        axis = axes[-1] if not self.errs() else axes[0]
        dims = (*t.dims[:k], Dim(t.dims[k].size, tuple(a for a in axes if a != axis)), *t.dims[k + 1 :])
        gathered = reduced(axis, lambda x: np.concatenate(x, axis=k))

        def gather(x):
            return lax.all_gather(x, axis, axis=k, tiled=True)

        return self.add("all_gather", (i,), t._replace(dims=dims), together=gathered, traced=gather)

    def make_exchange(self):
        i = self.value(finished=False, ndim=2)
        t = self.types[i]
        pairs = [(s, j) for s in range(len(t.dims)) for j, d in enumerate(t.dims) if s != j and d.axes]
        self.skip_if(not pairs)
        s, j = self.pick(pairs)
        axis = t.dims[j].axes[-1]
        dims = list(t.dims)
        dims[j] = Dim(dims[j].size, dims[j].axes[:-1])
        dims[s] = Dim(dims[s].size, (*dims[s].axes, axis))

        def swap(x):
            return lax.all_to_all(x, axis, split_axis=s, concat_axis=j, tiled=True)

        return self.add("all_to_all", (i,), t._replace(dims=tuple(dims)), together=exchanged(axis, s, j), traced=swap)

    def make_own_block(self):
        i, axis = self.value(finished=False, ndim=1), self.pick(AXES)
        t = self.types[i]
        used, k = {a for dim in t.dims for a in dim.axes} | t.partial, self.along(t)
        self.skip_if(axis in used and not self.errs())
        dims = (*t.dims[:k], Dim(t.dims[k].size, (*t.dims[k].axes, axis)), *t.dims[k + 1 :])

        def local(xp, device, x):
            n = x.shape[k] // device.size(axis)
            if xp is jnp:
                return lax.dynamic_slice_in_dim(x, device.index(axis) * n, n, axis=k)
            return _rows(xp, x, device.index(axis) * n, (device.index(axis) + 1) * n, k)

        return self.add("own block", (i,), t._replace(dims=dims), local)

    def make_index_of_device(self):
        i, axis = self.value(), self.pick(AXES)
        self.skip_if(not self.errs())
        return self.add("device", (i,), self.types[i], lambda xp, device, x: x * (1 + device.index(axis)))


# ---- verdicts -----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a program on a mesh."""

    accepted: bool
    differs: bool
    """From what it gives on one device."""


def outcome(program: Program, mesh: tuple[int, ...]) -> Outcome | None:
    """None for a program that does not run, or whose numbers overflow."""
    one, rng = dict.fromkeys(AXES, 1), np.random.default_rng(0)
    arrays = [
        rng.standard_normal([d.size for d in t.dims]) if t.kind == "f" else rng.integers(0, 16, [16])
        for t in program.inputs
    ]
    sizes = dict(zip(AXES, mesh, strict=True))
    axes = [axis for dim in program.result.dims for axis in dim.axes]
    if len(set(axes)) < len(axes):
        return None
    try:
        with np.errstate(all="raise", under="ignore"):
            (meant,), found = run(program, one, arrays), run(program, sizes, arrays)
    except (ValueError, IndexError, FloatingPointError, ZeroDivisionError):
        return None
    same = meant.shape == tuple(d.size for d in program.result.dims)

    def close(x, y):
        return x.shape == y.shape and np.allclose(x, y, rtol=1e-6, atol=1e-6 * np.abs(meant).max())

    for x, device in zip(found, devices_of(sizes), strict=True):
        same = same and close(x, block(meant, program.result, device))
    try:
        refused = findings(trace(program, sizes), trace(program, one))[0]
    except Different:
        refused = True
    return Outcome(not refused, not same)


def describe(program: Program) -> str:
    lines = [f"{i}: {t}" for i, t in enumerate(program.inputs)]
    lines += [f"{i}: {s.name} {s.operands}" for i, s in enumerate(program.steps, len(lines))]
    return "\n".join([*lines, f"-> {program.result}"])
