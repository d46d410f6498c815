"""Per-device programs with the functions that they are meant to compute, and how both are run.

A function becomes a program by a decorator, `@right` or `@wrong`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib.array_types import ArrayType

SIZES = {
    "B": 8,
    "L": 16,
    "S": 16,
    "M": 16,
    "N": 16,
    "F": 32,
    "K": 8,
    "D": 4,
    "V": 16,
    "E": 8,
    "T": 16,
}
SIZES |= {"H": 8, "W": 8, "C": 4, "R": 8, "layers": 2, "stages": 8}
"""Size of each dim. Each but C, D and layers divides by eight devices."""
BELOW = 16
"""Integers among the inputs are below this, which is the size of V."""
MESHES = {1: ((2,), (4,)), 2: ((2, 2), (4, 2), (2, 4)), 3: ((2, 2, 2),)}
"""Sizes of the meshes on which a program with so many axes is run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A per-device program, and the function on whole arrays that it is meant to compute.

    Attributes:
        name: what a researcher would call it.
        body: the function that `jax.shard_map` runs on each device.
        whole: the function on whole arrays; `one_device`: what the program computes on a mesh with
            one device along each axis.
        ins: the type of each argument, in dicts, lists and tuples as the argument.
        outs: the type of the result, in dicts, lists and tuples as the result.
        axes: axes of the mesh, major to minor.
        problem: part of what is said of it, where a test compares that.
        vma: the value of check_vma: False for a program that JAX refuses otherwise.
        hangs: whether devices wait for each other for ever, so that it may be traced but not run.
            Its `whole` is called by no test.
    """

    name: str
    body: Callable
    whole: Callable
    ins: dict[str, Any]
    outs: Any
    problem: str = ""
    axes: tuple[str, ...] = ("d", "t")
    vma: bool = True
    hangs: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the meshes to run it on."""
        return MESHES[len(self.axes)]


def one_device(*_):
    """In place of the function that a program is meant to compute: the program itself, on one
    device.
    """
    raise NotImplementedError


def program(body: Callable, *, whole: Callable = one_device, **options) -> Program:
    """The Program with this body.

    Its annotations are the types, its name is the program's; see Program for options.
    """
    ins = inspect.get_annotations(body)
    outs = ins.pop("return")
    return Program(body.__name__.replace("_", " "), body, whole, ins, outs, **options)


RIGHT: list[Program] = []
WRONG: list[Program] = []
"""What was registered, in the order of the files."""


def _register(programs: list[Program], body: Callable | None = None, **options):
    def register(body: Callable) -> Program:
        programs.append(program(body, **options))
        return programs[-1]

    return register(body) if body else register


right = functools.partial(_register, RIGHT)
"""Registers a body as a right program, which the check accepts."""
wrong = functools.partial(_register, WRONG)
"""Registers a body as a wrong program, whose problem is at the line that ends in `# here`."""


def abstract_mesh(program: Program, sizes: tuple[int, ...]) -> AbstractMesh:
    """The mesh of these sizes with the program's axes, without devices."""
    return AbstractMesh(sizes, program.axes, axis_types=(AxisType.Explicit,) * len(sizes))


def partition_spec(t: ArrayType, axes: tuple[str, ...]) -> PartitionSpec:
    """The PartitionSpec of a type. An axis that the mesh lacks shards nothing."""
    return PartitionSpec(
        *(tuple(axis for axis in dim.axes if axis in axes) or None for dim in t.spec.dims)
    )


def specs(program: Program) -> tuple[Any, Any]:
    """in_specs and out_specs of the program."""

    def spec(t):
        return partition_spec(t, program.axes)

    return jax.tree.map(spec, tuple(program.ins.values())), jax.tree.map(spec, program.outs)


def mapped(program: Program, mesh: jax.sharding.Mesh) -> Callable:
    """The function on global arrays that runs the body on each device of the mesh."""
    in_specs, out_specs = specs(program)
    return jax.shard_map(
        program.body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=program.vma
    )


def shape_of(t: ArrayType) -> tuple[int, ...]:
    """The whole shape of an array of type `t`."""
    return tuple(dim.literal_size or SIZES[dim.name] for dim in t.spec.dims)


def inputs(program: Program, seed: int = 0) -> list:
    """Whole arrays as arguments: normal floats, integers below 16, booleans, typed keys."""
    rng = np.random.default_rng(seed)

    def draw(t: ArrayType):
        shape = shape_of(t)
        if t.dtype == "key":
            return jax.random.wrap_key_data(rng.integers(0, 2**32, (*shape, 2), np.uint32))
        if t.dtype == "bool_":
            return rng.random(shape) < 0.5
        return (
            rng.standard_normal(shape, np.float32)
            if t.dtype == "f32"
            else rng.integers(0, BELOW, shape, np.int32)
        )

    return jax.tree.map(draw, list(program.ins.values()))


def traced(program: Program, sizes: tuple[int, ...]) -> jax.extend.core.ClosedJaxpr:
    """The jaxpr of one shard_map on a mesh of these sizes. It needs no devices."""
    mesh = abstract_mesh(program, sizes)
    dtypes = {
        "f32": np.float32,
        "i32": np.int32,
        "bool_": np.bool_,
        "key": jax.eval_shape(jax.random.key, 0).dtype,
    }

    def argument(t, spec):
        return jax.ShapeDtypeStruct(
            shape_of(t), dtypes[t.dtype], sharding=NamedSharding(mesh, spec)
        )

    with jax.sharding.use_abstract_mesh(mesh):
        arguments = jax.tree.map(argument, tuple(program.ins.values()), specs(program)[0])
        return jax.make_jaxpr(mapped(program, mesh))(*arguments)


def run(program: Program, sizes: tuple[int, ...], seed: int = 0):
    """The program's result on a mesh of these sizes, as global arrays."""
    mesh = jax.make_mesh(sizes, program.axes, axis_types=(AxisType.Explicit,) * len(sizes))
    with jax.set_mesh(mesh):

        def place(x, spec):
            return jax.device_put(x, NamedSharding(mesh, spec))

        arguments = jax.tree.map(place, tuple(inputs(program, seed)), specs(program)[0])
        return jax.jit(mapped(program, mesh))(*arguments)


def intended(program: Program, seed: int = 0):
    """The result that is meant: that of `whole` on one device."""
    if program.whole is one_device:
        return run(program, (1,) * len(program.axes), seed)
    return jax.jit(program.whole)(*inputs(program, seed))


def distance(result, meant) -> float:
    """Largest difference of any device's copy from what is meant, as a share of the largest entry
    of that array.
    """
    if jax.tree.structure(result) != jax.tree.structure(meant):
        return np.inf
    found = [0.0]
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(meant), strict=True):
        if a.shape != b.shape:
            return np.inf
        b = np.asarray(b, np.float64)
        largest = max(np.max(np.abs(b)), 1e-6)
        for shard in a.addressable_shards:
            differing = np.abs(np.asarray(shard.data, np.float64) - b[shard.index])
            found.append(np.max(differing, initial=0.0) / largest)
    return np.inf if np.isnan(found).any() else max(found)


def cases(programs: list[Program]):
    """A parametrization of a test by programs."""
    return pytest.mark.parametrize(
        "program", programs, ids=[program.name.replace(" ", "-") for program in programs]
    )
