"""Programs of jax.shard_map drawn by chance, right and wrong, as others write them: plain JAX, with
any specs.

A right one is a chain of steps that keep to the type of a value; each step knows ways to be wrong.
Whether a program computes on a mesh what it computes on one device is seen by running it on both.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

MESHES = ({"d": 2, "t": 4}, {"d": 4, "t": 2}, {"d": 2, "t": 2}, {"d": 1, "t": 4}, {"t": 8})
SIZES = 8, 16
Axes = tuple[str, ...]


@dataclasses.dataclass
class Draft:
    """A program as far as it is drawn.

    Attributes:
        shapes, specs: of the arguments.
        dims: of the value so far, the axes that shard each dim.
        sizes: its whole sizes.
        partial: axes over which it is a partial sum.
        steps: functions (value, arguments) -> value.
        wrong: for some steps, by number, other functions that are wrong in their place.
    """

    rng: random.Random
    mesh: dict[str, int]
    shapes: list = dataclasses.field(default_factory=list)
    specs: list = dataclasses.field(default_factory=list)
    dims: list = dataclasses.field(default_factory=list)
    sizes: list = dataclasses.field(default_factory=list)
    partial: Axes = ()
    steps: list = dataclasses.field(default_factory=list)
    wrong: dict = dataclasses.field(default_factory=dict)

    def argument(self, dims: list, sizes: list) -> int:
        """Adds an argument; returns its number."""
        self.shapes.append(tuple(sizes))
        self.specs.append(P(*(axes or None for axes in dims)))
        return len(self.shapes) - 1

    def step(self, name: str, function: Callable, **wrong: Callable) -> None:
        self.wrong[len(self.steps)] = [(f"{name}: {how}", other) for how, other in wrong.items()]
        self.steps.append((name, function))

    def live(self, axes: Axes) -> Axes:
        """Those of some axes along which there are several devices."""
        return tuple(axis for axis in axes if self.mesh[axis] > 1)

    def free(self) -> Axes:
        """Axes that neither shard the value nor are still to be summed over, in an order of
        chance.
        """
        used = {*itertools.chain(*self.dims), *self.partial}
        return tuple(
            self.rng.sample(left := [axis for axis in self.mesh if axis not in used], len(left))
        )


def some(rng: random.Random, axes: Axes) -> Axes:
    return axes[: rng.randint(0, len(axes))]


def on_value(function: Callable) -> Callable:
    """A step that takes the value alone."""
    return lambda x, args: function(x)


def index(axes: Axes):
    return lax.axis_index(axes) if axes else 0


def block(x, i: int, axes: Axes, at: Callable = index):
    n = x.shape[i] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, at(axes) * n, n, i)


# ---- functions of a value that keep its type


def normalized(d: Draft) -> tuple:
    i, (axes,) = len(d.dims) - 1, d.dims[-1:]

    def by(total):
        return lambda x: x / jnp.sqrt(1 + total(jnp.sum(x * x, i, keepdims=True)))

    whole = (lambda x: lax.psum(x, axes)) if axes else lambda x: x
    return "norm", by(whole), {"of a block": by(lambda x: x)} if d.live(axes) else {}


def softmax(d: Draft) -> tuple:
    i, (axes,) = len(d.dims) - 1, d.dims[-1:]

    def whole(x):
        top = jnp.max(lax.stop_gradient(x), i, keepdims=True)
        e = jnp.exp(x - (lax.pmax(top, axes) if axes else top))
        total = jnp.sum(e, i, keepdims=True)
        return e / (lax.psum(total, axes) if axes else total)

    return "softmax", whole, {"of a block": lambda x: jax.nn.softmax(x, i)} if d.live(axes) else {}


def positions(d: Draft) -> tuple:
    i, axes = len(d.dims) - 1, d.dims[-1][:1] if len(d.dims[-1]) < 2 else ()
    if axes != d.dims[-1]:
        return "sin", jnp.sin, {}

    def by(start):
        return lambda x: x * jnp.cos(jnp.arange(x.shape[i]) + start(x.shape[i]) + 0.0)

    return (
        "positions",
        by(lambda n: index(axes) * n),
        {"of a block": by(lambda n: 0)} if d.live(axes) else {},
    )


def centered(d: Draft) -> tuple:
    i, (axes,) = len(d.dims) - 1, d.dims[-1:]

    def by(mean):
        return lambda x: x - mean(jnp.mean(x, i, keepdims=True))

    if not d.live(axes):
        return "centered", by(lambda x: x), {}
    wrong = {"mean of a block": by(lambda x: x), "sum of means": by(lambda x: lax.psum(x, axes))}
    return "centered", by(lambda x: lax.pmean(x, axes)), wrong


def elementwise(d: Draft) -> tuple:
    function = d.rng.choice(
        [jnp.sin, lambda x: jax.nn.relu(x + 1) - 1, lambda x: x, lambda x: jnp.tanh(x) * x]
    )
    axes = tuple(d.mesh)
    wrong = {
        "times devices": lambda x: function(x) * lax.axis_size(axes),
        "plus an index": lambda x: function(x) + lax.axis_size(axes) - index(axes),
    }
    if d.live(d.dims[0]):
        wrong["by a local size"] = lambda x: function(x) / x.shape[0]
    return "elementwise", function, wrong


KEEPING = normalized, softmax, positions, centered, elementwise, elementwise


def custom(f: Callable) -> Callable:
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: pull(ct))
    return g


def repeated(f: Callable) -> Callable:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]


AROUND = {"remat": jax.checkpoint, "custom_vjp": custom, "scan": repeated, "jit": jax.jit}


def keeping(d: Draft) -> None:
    name, function, wrong = d.rng.choice(KEEPING)(d)
    around = d.rng.choice(["", "", *AROUND])
    kept = AROUND.get(around, lambda f: f)
    if d.rng.random() < 0.3:
        kept, around = (lambda kept: lambda f: conditional(d, kept(f)))(kept), f"{around} cond"
        d.step(
            f"{name} {around}",
            conditional(d, function),
            **{h: conditional(d, f) for h, f in wrong.items()},
        )
    else:
        d.step(
            f"{name} {around}",
            on_value(kept(function)),
            **{h: on_value(kept(f)) for h, f in wrong.items()},
        )


def conditional(d: Draft, f: Callable) -> Callable:
    """f, or the value as it is, by an argument that all devices have."""
    at = next((i for i, shape in enumerate(d.shapes) if shape == ()), None)
    at = d.argument([], []) if at is None else at
    return lambda x, args: lax.cond(args[at] > 0, f, lambda x: x, x)


def rows(d: Draft) -> None:
    """A function of each row, under vmap or in a loop, for rows that no axis shards."""
    if len(d.dims) < 2 or d.dims[0]:
        return keeping(d)
    inner = dataclasses.replace(d, dims=d.dims[1:], sizes=d.sizes[1:])
    name, function, wrong = d.rng.choice(KEEPING)(inner)
    how, kept = d.rng.choice([("vmap", jax.vmap), ("rows", lambda f: lambda x: lax.map(f, x))])
    wrong = {h: on_value(kept(f)) for h, f in wrong.items() if h != "by a local size"}
    d.step(f"{name} {how}", on_value(kept(function)), **wrong)


# ---- functions that change the type


def transposed(d: Draft) -> None:
    d.dims, d.sizes = d.dims[::-1], d.sizes[::-1]
    d.step("transpose", on_value(jnp.transpose))


def raveled(d: Draft) -> None:
    if len(d.dims) != 2 or d.dims[1]:
        return transposed(d)
    d.dims, d.sizes = d.dims[:1], [math.prod(d.sizes)]
    d.step("ravel", on_value(jnp.ravel))


def scaled(d: Draft) -> None:
    at = d.argument(d.dims[-1:], d.sizes[-1:])
    d.step("scale", lambda x, args: x * args[at])


def dot(d: Draft) -> None:
    out = some(d.rng, d.free())
    at = d.argument([d.dims[-1], out], [d.sizes[-1], n := d.rng.choice(SIZES)])
    d.partial = (*d.partial, *d.dims[-1])
    d.dims, d.sizes = [*d.dims[:-1], out], [*d.sizes[:-1], n]
    d.step("dot", lambda x, args: x @ args[at])
    reduced(d)


def summed(d: Draft) -> None:
    if len(d.dims) < 2:
        return keeping(d)
    i = d.rng.randrange(len(d.dims))
    d.partial, mean = d.dims[i], d.rng.random() < 0.3
    d.dims, d.sizes = d.dims[:i] + d.dims[i + 1 :], d.sizes[:i] + d.sizes[i + 1 :]
    d.step("mean" if mean else "sum", on_value(lambda x: (jnp.mean if mean else jnp.sum)(x, i)))
    reduced(d, mean)


def reduced(d: Draft, mean: bool = False) -> None:
    """Takes the partial sum."""
    if not (axes := d.partial):
        return
    d.partial, other = (), next((axis for axis in d.mesh if axis not in axes), None)
    fits = [
        i
        for i, n in enumerate(d.sizes)
        if n % math.prod(d.mesh[a] for a in (*d.dims[i], *axes)) == 0
    ]
    if fits and not mean and d.rng.random() < 0.4:
        i = d.rng.choice(fits)
        d.dims = [*d.dims[:i], (*d.dims[i], *axes), *d.dims[i + 1 :]]

        def scatter(x):
            return lax.psum_scatter(x, axes, scatter_dimension=i, tiled=True)

        wrong = {
            "not summed": on_value(lambda x: block(x, i, axes)),
            "times devices": on_value(lambda x: scatter(x) * lax.axis_size(axes)),
        }
        d.step("scatter", on_value(scatter), **(wrong if d.live(axes) else {}))
        return
    take = lax.pmean if mean else lax.psum
    wrong = {
        "dropped": lambda x: x,
        "doubled": lambda x: lax.psum(lax.pcast(take(x, axes), axes, to="varying"), axes),
        "of the other kind": lambda x: (lax.psum if mean else lax.pmean)(x, axes),
        "after a function": lambda x: take(jnp.sin(x), axes) * jnp.sin(1.0),
    }
    if not d.live(axes):
        wrong = {}
    if other and d.live((*axes, other)):
        wrong["over another axis"] = lambda x: take(lax.pcast(x, other, to="varying"), other)
    d.step(
        take.__name__,
        on_value(lambda x: take(x, axes)),
        **{how: on_value(f) for how, f in wrong.items()},
    )


def gathered(d: Draft) -> None:
    cut = [i for i, axes in enumerate(d.dims) if axes]
    if not cut:
        return sliced(d)
    i = d.rng.choice(cut)
    axis, n = d.dims[i][-1:], d.mesh[d.dims[i][-1]]
    d.dims = [*d.dims[:i], d.dims[i][:-1], *d.dims[i + 1 :]]

    def whole(x):
        return lax.all_gather(x, axis, axis=i, tiled=True)

    wrong = {
        "copies": lambda x: jnp.concatenate([x] * lax.axis_size(axis), i),
        "turned": lambda x: jnp.roll(whole(x), x.shape[i], i),
    }
    d.step(
        "all_gather",
        on_value(whole),
        **({how: on_value(f) for how, f in wrong.items()} if n > 1 else {}),
    )


def sliced(d: Draft) -> None:
    axes = d.free()[:1]
    fits = [i for i, n in enumerate(d.sizes) if not d.dims[i] and axes and n % d.mesh[axes[0]] == 0]
    if not fits:
        return keeping(d)
    i = d.rng.choice(fits)
    d.dims = [*d.dims[:i], axes, *d.dims[i + 1 :]]
    wrong = {
        "the first": lambda x: block(x, i, axes, lambda axes: 0),
        "in reverse": lambda x: block(
            x, i, axes, lambda axes: lax.axis_size(axes) - 1 - index(axes)
        ),
    }
    wrong = {how: on_value(f) for how, f in wrong.items()} if d.live(axes) else {}
    d.step("slice", on_value(lambda x: block(x, i, axes)), **wrong)


def exchanged(d: Draft) -> None:
    if len(d.dims) != 2 or not (cut := [i for i, axes in enumerate(d.dims) if axes]):
        return sliced(d)
    i = d.rng.choice(cut)
    axis, j = d.dims[i][-1:], 1 - i
    if d.sizes[j] % math.prod(d.mesh[a] for a in (*d.dims[j], *axis)):
        return gathered(d)
    d.dims = [d.dims[k][:-1] if k == i else (*d.dims[k], *axis) for k in (0, 1)]
    d.step("all_to_all", on_value(lambda x: lax.all_to_all(x, axis[0], j, i, tiled=True)))


MOVES = (
    keeping,
    keeping,
    rows,
    rows,
    transposed,
    raveled,
    scaled,
    dot,
    dot,
    summed,
    gathered,
    sliced,
    exchanged,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """What each device computes, with its specs; wrong in the way that `how` says, if it says
    one.
    """

    name: str
    body: Callable
    mesh: dict[str, int]
    shapes: tuple
    specs: tuple
    outs: P
    how: str = ""
    vma: bool = True

    def function(self, inside: Callable = lambda body: body) -> Callable:
        options = {"in_specs": self.specs, "out_specs": self.outs, "check_vma": self.vma}
        return lambda *args: jax.shard_map(inside(self.body), **options)(*args)

    @property
    def args(self) -> list[np.ndarray]:
        rng = np.random.default_rng(len(self.name))
        return [rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in self.shapes]

    def abstract(self, sizes: dict[str, int] | None = None) -> AbstractMesh:
        sizes = sizes or self.mesh
        return AbstractMesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
        )

    def traces(self) -> bool:
        """False if JAX itself refuses it."""
        try:
            with jax.sharding.use_abstract_mesh(self.abstract()):
                jax.eval_shape(self.function(), *self.args)
        except (ValueError, TypeError, NotImplementedError):
            return False
        return True

    def results(self, transform: Callable, is_one: bool) -> list[np.ndarray]:
        """What the program computes, on its mesh or on one device."""
        sizes = dict.fromkeys(self.mesh, 1) if is_one else self.mesh
        with jax.set_mesh(
            jax.make_mesh(
                tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
            )
        ):
            return list(map(np.asarray, jax.tree.leaves(jax.jit(transform(self))(*self.args))))

    def differs(self, transform: Callable) -> bool:
        """True if it computes something else on its mesh than on one device."""
        ours, theirs = (self.results(transform, is_one) for is_one in (False, True))

        def close(a, b):
            return a.shape == b.shape and np.allclose(
                a, b, rtol=1e-4, atol=1e-4 * max(1, np.abs(b).max())
            )

        return len(ours) != len(theirs) or not all(map(close, ours, theirs))


def draw(seed: int) -> list[Program]:
    """A right program and, if there is one, a wrong one that differs from it in one place."""
    rng = random.Random(seed)
    d = Draft(rng, rng.choice(MESHES))
    axes = tuple(rng.sample(list(d.mesh), len(d.mesh)))
    ndim = rng.choice([1, 2, 2, 2, 3])
    d.dims, d.sizes = [()] * ndim, [rng.choice(SIZES) for _ in range(ndim)]
    for axis in some(rng, axes):
        i = rng.randrange(ndim)
        d.dims[i] = (*d.dims[i], axis)
    d.argument(d.dims, d.sizes)
    for _ in range(rng.randint(1, 4)):
        rng.choice(MOVES)(d)
    steps, outs = list(d.steps), P(*(axes or None for axes in d.dims))
    forms = [
        _program(d, seed, steps, outs, vma)
        for vma in ((True, False) if rng.random() < 0.7 else (False,))
    ]
    right = next(p for p in forms if p.traces())
    wrong = [
        (how, [*steps[:k], (how, other), *steps[k + 1 :]], outs)
        for k in d.wrong
        for how, other in d.wrong[k]
    ]
    wrong += [(f"declared {spec}", steps, spec) for spec in _other_specs(d)]
    rng.shuffle(wrong)
    found = (
        _program(d, seed, steps, spec, vma, how)
        for how, steps, spec in wrong
        for vma in (True, False)
    )
    return [right, *itertools.islice((p for p in found if p.traces()), 1)]


def _other_specs(d: Draft) -> list[P]:
    """Specs of the result that are not its own."""
    own, found = [*d.dims], []
    for i, axes in enumerate(own):
        others = [axes[::-1], axes[:-1], axes[1:], (*axes, *d.free()[:1])]
        found += [[*own[:i], other, *own[i + 1 :]] for other in others]
    found += [own[::-1], [own[-1], *own[:-1]]] if own else []

    def live(dims):
        return list(map(d.live, dims))

    return [P(*(axes or None for axes in dims)) for dims in found if live(dims) != live(own)]


def _program(d: Draft, seed: int, steps: list, outs: P, vma: bool, how: str = "") -> Program:
    def body(*args):
        x = args[0]
        for _, step in steps:
            x = step(x, args)
        return x

    name = f"{seed}: {' → '.join(name for name, _ in steps)}"
    return Program(name, body, d.mesh, tuple(d.shapes), tuple(d.specs), outs, how, vma)
