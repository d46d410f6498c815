"""The meshes on which a step is verified."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import AbstractMesh, AxisType

from shardlib.parsing import PIPELINE_AXIS
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.run.config import Config, check_divides
from shardwright.run.stages import training_table

AXES = ("p", "r", "d", "t")
"""Axes of the mesh, major to minor."""
ONE_DEVICE = dict.fromkeys(AXES, 1)
Mesh = Mapping[str, int]
"""Number of devices along each of AXES."""


def mesh_name(mesh: Mesh) -> str:
    """`r=1 d=4 t=2`, with p if it is not 1."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items() if axis != "p" or size > 1)


@contextlib.contextmanager
def mesh_of(sizes: Mesh) -> Iterator[jax.sharding.Mesh]:
    """Enters a mesh of these sizes on the first devices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(*(sizes[axis] for axis in AXES[1:]), devices, sizes["p"])
    with jax.set_mesh(mesh):
        yield mesh


@contextlib.contextmanager
def abstract_mesh_of(sizes: Mesh) -> Iterator[None]:
    """Enters the mesh that `mesh_of` makes, without devices."""
    sizes = {axis: size for axis, size in sizes.items() if axis != PIPELINE_AXIS or size > 1}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def all_meshes(c: Config, devices: int, names: list[str] | None = None) -> tuple[list[Mesh], list[tuple[Mesh, str]]]:
    """The meshes of that many devices on which the step runs, and the others, each with the reason.

    The mesh must divide the sizes of the model and of the batch, and the schedule and the layers must fit its stages.
    `names`, such as 1x4x2, choose among them. Raises ValueError for a name that none has.
    """
    counts = itertools.product([n for n in range(1, devices + 1) if devices % n == 0], repeat=len(AXES))
    meshes = [dict(zip(AXES, sizes, strict=True)) for sizes in counts if math.prod(sizes) == devices]
    known = {"x".join(str(n) for axis, n in mesh.items() if axis != "p" or n > 1): mesh for mesh in meshes}
    if unknown := set(names or ()) - set(known):
        raise ValueError(
            f"verify.meshes has {min(unknown)}; choose among the meshes of so many devices: {', '.join(known)} (p if "
            "it is not 1, r, d, t)."
        )
    fit, others = [], []
    for mesh in (mesh for name, mesh in known.items() if names is None or name in names):
        try:
            check_divides(c, mesh)
            with abstract_mesh_of(mesh):
                training_table(c, load_model(c.model))
            fit.append(mesh)
        except ValueError as error:
            others.append((mesh, str(error)))
    return fit, others


def some_of(meshes: list[Mesh]) -> list[Mesh]:
    """A few of the meshes. Each set of axes that have several devices is in one of them, and each size of an axis."""
    of = lambda mesh: {tuple(axis for axis, n in mesh.items() if n > 1), *mesh.items()}
    chosen, seen = [], set()
    while missing := set().union(*map(of, meshes)) - seen:
        chosen.append(max(meshes, key=lambda mesh: len(of(mesh) & missing)))
        seen |= of(chosen[-1])
    return chosen
