"""Traces programs on a mesh of which no device need exist, and on one device."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.planned import planned_for
from shardlib.scopes import Scope

BOUND = (
    "the program is bound to a mesh, so it cannot be traced on one device: call jax.shard_map "
    "without `mesh`, anew in each call of the function (what it returns keeps its first mesh), or "
    "pass what each device computes, with its specs, as in check(body, *args, mesh=mesh, "
    "in_specs=..., out_specs=...)"
)


def on_one_device(mesh: Mesh | AbstractMesh, without: Collection[str] = ()) -> AbstractMesh:
    """Makes a mesh like `mesh`, of the same kind of device, with one device along each axis.

    It lacks the axes in `without`.
    """
    kinds = {
        axis: kind
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis not in without
    }
    of: Any = getattr(mesh, "abstract_mesh", mesh)
    return AbstractMesh(
        (1,) * len(kinds),
        tuple(kinds),
        axis_types=tuple(kinds.values()),
        abstract_device=of.abstract_device,
    )


def without_mesh() -> contextlib.AbstractContextManager:
    """Returns a context without a mesh, in which JAX's functions run on the first device."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@contextlib.contextmanager
def tracing(mesh: Any, planned: Mapping[str, int] | None = None) -> Iterator[list]:
    """Sets the mesh on which a program is traced.

    The program chooses fast implementations as on a mesh of sizes `planned`; None: those of `mesh`.
    Yields a list that holds, after tracing, the argument types of the program's shard_maps. Raises
    ValueError if a shard_map is bound to another mesh.
    """
    enter: Any = jax.sharding.use_abstract_mesh if isinstance(mesh, AbstractMesh) else jax.set_mesh
    with (
        without_mesh(),  # JAX does not change from one mesh to another of a different size
        enter(mesh),
        planned_for(sizes=tuple(sorted((planned or mesh.shape).items()))),
        Scope() as scope,
    ):
        scope.arguments = types = []
        try:
            yield types
        except ValueError as error:
            if "mesh passed to shard_map" in str(error):
                raise ValueError(BOUND) from None
            raise
