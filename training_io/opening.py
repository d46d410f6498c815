"""A run that a tool opens: a mesh for the devices at hand, and the weights of a checkpoint on it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from cluster.devices import make_mesh, simulate_devices
from configuration.checks import within
from modeling.model import LanguageModel
from modeling.weights import shapes_of
from shardlib.shardtypes import make_shardings
from training_io import config as run_config
from training_io.checkpoint import Checkpointer


@dataclass
class MeshChoice:
    """Devices along each axis; None: not chosen."""

    r: int | None = within(-1, 2**20, None)
    d: int | None = within(-1, 2**20, None)
    t: int | None = within(-1, 2**20, None)


def mesh_for(choice: MeshChoice, c: run_config.Config) -> jax.sharding.Mesh:
    """Makes the mesh. Raises ValueError if it does not fit the devices, or the model does not fit it."""
    simulate_devices(c.hardware)
    devices, chosen = jax.devices(), dataclasses.asdict(choice)
    if any(size is not None for size in chosen.values()):
        sizes = {"r": 1, "t": 1} | {axis: size for axis, size in chosen.items() if size is not None}
        mesh = make_mesh(sizes["r"], sizes.get("d", -1), sizes["t"], devices)
    else:
        try:
            mesh = make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, devices)
        except ValueError:
            mesh = make_mesh(1, -1, 1, devices)
    run_config.check_divides(c, mesh.shape, of_batch=False)
    return mesh


def restore_weights(checkpoints: Checkpointer, step: int, model: LanguageModel, which: str) -> Any:
    """Reads `weights` or `ema` of a checkpoint, sharded as in training on the current mesh."""
    shapes = shapes_of(model.table)
    like = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, make_shardings(model.Weights, like=shapes))
    return checkpoints.restore(step, {which: like}, part=f"{which}/")[which]
