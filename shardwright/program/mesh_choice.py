"""Chooses a mesh for a program that reads a saved run: of its settings, or of the devices that
there are.
"""

import dataclasses
from dataclasses import dataclass

import jax

from shardwright.cluster.devices import make_mesh, simulate_devices
from shardwright.data.checks import within
from shardwright.modeling.attention_paths import KERNELS
from shardwright.program.config import Config, check_divides


@dataclass
class MeshChoice:
    """Number of devices along each axis; -1: the remaining devices; None: not chosen."""

    r: int | None = within(-1, 2**20, None)
    d: int | None = within(-1, 2**20, None)
    t: int | None = within(-1, 2**20, None)


@dataclass
class StepChoice(MeshChoice):
    """Number of devices along each axis except p, as in MeshChoice."""

    e: int | None = within(-1, 2**20, None)
    c: int | None = within(-1, 2**20, None)


@dataclass
class StagesChoice(StepChoice):
    """Number of devices along each axis, as in MeshChoice."""

    p: int | None = within(1, 2**20, None)


def mesh_for(choice: MeshChoice, c: Config) -> jax.sharding.Mesh:
    """Makes the mesh of `choice`, with the remaining devices along d; if nothing is chosen, that of
    c.mesh.

    Of c.mesh, axes that `choice` does not have are dropped. If the rest does not fit the devices,
    all devices are along d, except for a StagesChoice. If this platform lacks the attention
    implementation of `c`, sets it to `auto` in `c`.

    Raises ValueError if the mesh does not fit the devices or does not divide the weights. A
    StepChoice must also divide the sequence length, and a StagesChoice, which is for training, also
    the batch size.
    """
    simulate_devices(c.hardware)
    chosen = {axis: size for axis, size in dataclasses.asdict(choice).items() if size is not None}
    in_training = isinstance(choice, StagesChoice)
    sizes = {"d": -1} | chosen if chosen else dataclasses.asdict(c.mesh)
    try:
        mesh = make_mesh(
            jax.devices(), **{axis: n for axis, n in sizes.items() if hasattr(choice, axis)}
        )
    except ValueError:
        if chosen or in_training:
            raise
        mesh = make_mesh(jax.devices(), d=-1)
    check_divides(c, mesh.shape, of_batch=in_training, of_sequences=isinstance(choice, StepChoice))
    platform = mesh.devices.flat[0].platform
    if KERNELS.get(c.training.attention, platform) != platform:
        c.training.attention = "auto"
    return mesh
