"""Chooses the meshes on which to verify a step."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import jax

from shardlib.axes import AXES, axes_of_mesh
from shardwright.cluster.devices import explicit_mesh
from shardwright.modeling.model import load_model
from shardwright.run.config import Config, check_divides
from shardwright.run.stages import training_table

ONE_DEVICE = dict.fromkeys(AXES, 1)
Mesh = Mapping[str, int]
"""Number of devices along each of AXES."""


@contextlib.contextmanager
def mesh_of(sizes: Mesh, axes: Iterable[str] = ()) -> Iterator[jax.sharding.Mesh]:
    """Enters a mesh of these sizes on the first devices. It keeps axes of size 1."""
    names = {*axes_of_mesh(sizes), *axes}
    devices = jax.devices()[: math.prod(sizes.values())]
    shape = {axis: sizes.get(axis, 1) for axis in AXES if axis in names}
    mesh = explicit_mesh(shape, devices)
    with jax.set_mesh(mesh):
        yield mesh


def abstract_mesh_of(sizes: Mesh) -> contextlib.AbstractContextManager:
    """Enters the mesh that `mesh_of` makes, without devices."""
    return jax.sharding.use_abstract_mesh(explicit_mesh(axes_of_mesh(sizes)))


def all_meshes(c: Config, devices: int, names: list[str] | None = None) -> tuple[list[Mesh], list[tuple[Mesh, str]]]:
    """Returns the meshes of this many devices on which the step can run, and the others, each with the reason.

    A mesh must divide the sizes of the model and the batch, and schedule and layers must fit its stages. `names` select
    some of them: `1x4x2` for r, d and t, preceded by p if it is not 1, or `d2e2c2` by axis, in any order. Without
    names, e and c have one device unless the mesh of `c` has more. Raises ValueError for an unknown name.
    """
    counts = itertools.product([n for n in range(1, devices + 1) if devices % n == 0], repeat=len(AXES))
    meshes = [dict(zip(AXES, sizes, strict=True)) for sizes in counts if math.prod(sizes) == devices]
    few = [axis for axis in AXES if axis not in "prdt" and getattr(c.mesh, axis) == 1]
    plain = [mesh for mesh in meshes if mesh["e"] == mesh["c"] == 1]
    known = {"x".join(str(n) for n in axes_of_mesh(mesh).values()): mesh for mesh in plain}
    by_axis = {frozenset(f"{axis}{n}" for axis, n in mesh.items() if n > 1): mesh for mesh in meshes}
    named = {name: known.get(name, by_axis.get(frozenset(re.findall(r"[a-z]\d+|.", name)))) for name in names or ()}
    if unknown := [name for name, mesh in named.items() if mesh is None]:
        raise ValueError(
            f"verify.meshes has {min(unknown)}; name a mesh of {devices} devices, such as {', '.join([*known][:3])} (p "
            f"if it is not 1, r, d, t), or by axis, such as c{devices}."
        )
    chosen = [mesh for mesh in meshes if all(mesh[axis] == 1 for axis in few)]
    fit, others = [], []
    for mesh in chosen if names is None else filter(None, named.values()):
        try:
            check_divides(c, mesh)
            with abstract_mesh_of(mesh):
                training_table(c, load_model(c.model))
            fit.append(mesh)
        except ValueError as error:
            others.append((mesh, str(error)))
    return fit, others


def some_of(meshes: list[Mesh]) -> list[Mesh]:
    """Returns a sample of the meshes, with each set of axes that have several devices, and each size of an axis."""
    chosen = []
    seen = set()
    while missing := set().union(*map(_features, meshes)) - seen:
        chosen.append(max(meshes, key=lambda mesh: len(_features(mesh) & missing)))
        seen |= _features(chosen[-1])
    return chosen


def _features(mesh: Mesh) -> set[tuple]:
    """The axes that have several devices, together, and the size of each axis."""
    return {tuple(axis for axis, n in mesh.items() if n > 1), *mesh.items()}
