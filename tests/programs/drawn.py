"""Programs of jax.shard_map drawn by chance, right and wrong, as others write them: plain JAX, with
any specs.

A right one is a chain of steps that keep to the type of a value; each step knows ways to be wrong.
Whether a program computes on a mesh what it computes on one device is seen by running it on both.
"""

import dataclasses
import itertools
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
        steps: functions (value, arguments) -> value.
        wrong: for some steps, by number, other functions that are wrong in their place.
    """

    rng: random.Random
    mesh: dict[str, int]
    shapes: list = dataclasses.field(default_factory=list)
    specs: list = dataclasses.field(default_factory=list)
    dims: list = dataclasses.field(default_factory=list)
    sizes: list = dataclasses.field(default_factory=list)
    steps: list = dataclasses.field(default_factory=list)
    wrong: dict = dataclasses.field(default_factory=dict)

    def argument(self, dims: list, sizes: list) -> int:
        """Adds an argument; returns its number."""
        self.shapes.append(tuple(sizes))
        self.specs.append(P(*(axes or None for axes in dims)))
        return len(self.shapes) - 1

    def step(self, name: str, function: Callable, over: Axes = (), **wrong: Callable) -> None:
        """Adds a function of the value. What is wrong is so if there are several devices along
        `over`.
        """
        wrong = wrong if self.live(over) else {}
        self.wrong[len(self.steps)] = [
            (f"{name}: {how}", on_value(other)) for how, other in wrong.items()
        ]
        self.steps.append((name, on_value(function)))

    def live(self, axes: Axes) -> Axes:
        """Those of some axes along which there are several devices."""
        return tuple(axis for axis in axes if self.mesh[axis] > 1)

    def free(self) -> Axes:
        """Axes that do not shard the value, in an order of chance."""
        left = [axis for axis in self.mesh if axis not in itertools.chain(*self.dims)]
        return tuple(self.rng.sample(left, len(left)))


def some(rng: random.Random, axes: Axes) -> Axes:
    return axes[: rng.randint(0, len(axes))]


def on_value(function: Callable) -> Callable:
    """A step that takes the value alone."""
    return lambda x, args: function(x)


def block(x, i: int, axes: Axes, at: Callable = lax.axis_index):
    n = x.shape[i] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, at(axes) * n, n, i)


# ---- functions that keep the type: the function, what is wrong in its place


def normalized(d: Draft) -> tuple:
    axes = d.dims[1]

    def by(total):
        return lambda x: x / jnp.sqrt(1 + total(jnp.sum(x * x, 1, keepdims=True)))

    whole = (lambda x: lax.psum(x, axes)) if axes else lambda x: x
    return by(whole), axes, {"of a block": by(lambda x: x)}


def elementwise(d: Draft) -> tuple:
    function, axes = d.rng.choice([jnp.sin, lambda x: jax.nn.relu(x + 1) - 1]), tuple(d.mesh)
    wrong = {
        "times devices": lambda x: function(x) * lax.axis_size(axes),
        "plus an index": lambda x: function(x) + lax.axis_size(axes) - lax.axis_index(axes),
    }
    if d.live(d.dims[0]):
        wrong["by a local size"] = lambda x: function(x) / x.shape[0]
    return function, axes, wrong


def custom(f: Callable) -> Callable:
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: pull(ct))
    return g


AROUND = {"remat": jax.checkpoint, "custom_vjp": custom}


def keeping(d: Draft) -> None:
    kind = d.rng.choice([normalized, elementwise])
    function, over, wrong = kind(d)
    around = d.rng.choice(["", *AROUND])
    kept = AROUND.get(around, lambda f: f)
    wrong = {how: kept(f) for how, f in wrong.items()}
    d.step(f"{kind.__name__} {around}", kept(function), over, **wrong)


# ---- functions that change the type


def dot(d: Draft) -> None:
    out, axes = some(d.rng, d.free()), d.dims[1]
    at = d.argument([axes, out], [d.sizes[1], n := d.rng.choice(SIZES)])
    d.dims, d.sizes = [d.dims[0], out], [d.sizes[0], n]
    d.steps.append(("dot", lambda x, args: x @ args[at]))
    if axes:
        reduced(d, axes)


def reduced(d: Draft, axes: Axes) -> None:
    """Takes the partial sum over axes."""
    wrong = {
        "dropped": lambda x: x,
        "doubled": lambda x: lax.psum(lax.pcast(lax.psum(x, axes), axes, to="varying"), axes),
        "a mean": lambda x: lax.pmean(x, axes),
        "after a function": lambda x: lax.psum(jnp.sin(x), axes) * jnp.sin(1.0),
    }
    if other := next((axis for axis in d.mesh if axis not in axes), None):
        wrong["over another axis"] = lambda x: lax.psum(lax.pcast(x, other, to="varying"), other)
    d.step("psum", lambda x: lax.psum(x, axes), axes, **wrong)


def gathered(d: Draft) -> None:
    cut = [i for i, axes in enumerate(d.dims) if axes]
    if not cut:
        return sliced(d)
    i = d.rng.choice(cut)
    axis = d.dims[i][-1:]
    d.dims[i] = d.dims[i][:-1]

    def whole(x):
        return lax.all_gather(x, axis, axis=i, tiled=True)

    wrong = {
        "copies": lambda x: jnp.concatenate([x] * lax.axis_size(axis), i),
        "turned": lambda x: jnp.roll(whole(x), x.shape[i], i),
    }
    d.step("all_gather", whole, axis, **wrong)


def sliced(d: Draft) -> None:
    axes = d.free()[:1]
    fits = [i for i, others in enumerate(d.dims) if axes and not others]
    if not fits:
        return keeping(d)
    i = d.rng.choice(fits)
    d.dims[i] = axes
    wrong = {
        "the first": lambda x: block(x, i, axes, lambda axes: 0),
        "in reverse": lambda x: block(
            x, i, axes, lambda a: lax.axis_size(a) - 1 - lax.axis_index(a)
        ),
    }
    d.step("slice", lambda x: block(x, i, axes), axes, **wrong)


MOVES = keeping, keeping, dot, dot, gathered, sliced


@dataclasses.dataclass(frozen=True)
class Program:
    """What each device computes, with its specs; `how` says in which way it is wrong."""

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
        # small, so that a factor shows in what is normalized, and sines of sums are exact enough
        return [rng.uniform(0.05, 0.15, shape).astype(np.float32) for shape in self.shapes]

    def abstract(self) -> AbstractMesh:
        kinds = (AxisType.Auto,) * len(self.mesh)
        return AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=kinds)

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
        kinds = (AxisType.Auto,) * len(sizes)
        with jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)):
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
    d.dims, d.sizes = [(), ()], [rng.choice(SIZES) for _ in range(2)]
    for axis in some(rng, axes):
        i = rng.randrange(2)
        d.dims[i] = (*d.dims[i], axis)
    d.argument(d.dims, d.sizes)
    for _ in range(rng.randint(1, 4)):
        rng.choice(MOVES)(d)
    steps, outs = list(d.steps), P(*(axes or None for axes in d.dims))
    forms = [_program(d, seed, steps, outs, vma) for vma in (True, False)[rng.random() > 0.7 :]]
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
    (a, b), free = d.dims, d.free()[:1]
    found = [[b, a], [a[::-1], b], [a[:-1], b], [a, b[1:]], [a, (*b, *free)]]

    def live(dims):
        return list(map(d.live, dims))

    return [P(*(axes or None for axes in dims)) for dims in found if live(dims) != live(d.dims)]


def _program(d: Draft, seed: int, steps: list, outs: P, vma: bool, how: str = "") -> Program:
    def body(*args):
        x = args[0]
        for _, step in steps:
            x = step(x, args)
        return x

    name = f"{seed}: {' → '.join(name for name, _ in steps)}"
    return Program(name, body, d.mesh, tuple(d.shapes), tuple(d.specs), outs, how, vma)
