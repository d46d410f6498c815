"""Runs the microbatches of a step in pipeline stages, and places the layers on the stages.

At rest, a stack of layers is sharded `layers/p`, with rows in the order of shardlib/placement.py:
layer order if each device of p has one stage.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardlib import pipeline, shardops
from shardlib.array_types import ABSENT, arrays_of
from shardlib.axes import PIPELINE_AXIS
from shardlib.mesh import mesh_axes
from shardlib.placement import LayerPlacement, place_layers
from shardlib.schedules import Orders, forwards, in_a_ring, schedule_of, stages_of
from shardlib.shardtypes import make_shardings
from shardlib.tick_tables import TickTable, tick_table
from shardwright.axes import ALWAYS
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import TokenBatch
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import LanguageModel, period_of
from shardwright.modeling.weights import are_stacks, initialize, is_stack
from shardwright.optimizers.scales import initial_table
from shardwright.program.config import Config, check_divides


def has_stages() -> bool:
    """Returns True if the current mesh has an axis p."""
    return PIPELINE_AXIS in mesh_axes()


def placement_of(c: Config, model: LanguageModel) -> LayerPlacement:
    """Places the layers of a run on the stages of the current mesh.

    Raises ValueError if they cannot be.
    """
    p = mesh_axes().get(PIPELINE_AXIS, 1)
    v = c.pipeline.virtual_stages
    if p == 1:
        return place_layers(c.model.layers, in_a_ring(p, 1), period_of(model))
    try:
        stages = stages_of(c.pipeline.schedule, p, c.training.microbatches, v)
    except ValueError as error:
        names = (
            "p is mesh.p, v pipeline.virtual_stages, the number of microbatches "
            "training.microbatches"
        )
        raise ValueError(f"pipeline.schedule={c.pipeline.schedule}: {error} ({names})") from None
    return place_layers(c.model.layers, stages, period_of(model))


def training_table(c: Config, model: LanguageModel) -> TickTable:
    """Makes the tick table of a training step.

    Raises ValueError if the schedule rejects training.microbatches.
    """
    return tick_table(_orders(c, placement_of(c, model)))


def _orders(c: Config, placement: LayerPlacement) -> Orders:
    schedule = schedule_of(c.pipeline.schedule if has_stages() else "gpipe")
    return schedule(placement.p, c.training.microbatches, placement.v)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The loss of a microbatch as `first`, `layers` and `last`, for shardlib.pipeline.run_schedule.

    Attributes:
        forward: the forward pass.
        head: (weights, output of the last layer, TokenBatch, forward) -> the loss.
    """

    forward: Forward
    head: Callable[..., Any]

    def first(self, w: object, *microbatch: Any) -> Any:
        """Computes the input of the first layer."""
        return self.forward.embed(w, self.forward.tokens(*microbatch))

    def layers(
        self, w: object, x: object, layer_ids: jax.Array, *microbatch: Any
    ) -> tuple[Any, Any]:
        """Applies the layers `layer_ids` of a stage to `x`. Also returns their LayerAux."""
        x, _, aux = self.forward.layers(w, x, self.forward.tokens(*microbatch), layer_ids)
        return x, aux

    def last(self, w: object, x: object, batch: TokenBatch, seeds: object) -> Any:
        """Computes the loss from the output of the last layer."""
        return self.head(w, x, batch, self.forward)


def run(
    c: Config, forward: Forward, head: Callable[..., Any], w: Any, batch: Any, training: bool
) -> tuple[Any, Any, Any]:
    """Runs the microbatches of a step through the stages of axis p. Per-device code.

    Args:
        c: the settings, with the schedule.
        forward: the forward pass of one microbatch.
        head: as in Parts.
        w: weights, as shardlib.pipeline.run_schedule takes them.
        batch: a tuple of arrays or pytrees, each with a leading dim of microbatches.
        training: False runs only the forward pass.

    Returns:
        The sum of the losses, its gradients, and the metrics of this device's layers, by
        microbatch. Without `training`, the sum leaves out the auxiliary losses of layers, and
        gradients and metrics are None.
    """
    placement = placement_of(c, forward.model)
    orders = _orders(c, placement)
    table = tick_table(orders if training else forwards(orders))
    total, g, metrics = pipeline.run_schedule(Parts(forward, head), placement, table, w, batch)
    return shardops.psum("+p ->", total), g, metrics


def fresh_weights(c: Config, model: LanguageModel, key: jax.Array) -> Any:
    """Initializes weights (modeling.weights.initialize), layers in the order of the mesh's stages.

    Call under jit.
    """
    placement = placement_of(c, model)  # raises if the layers do not divide into stages
    return initialize(initial_table(c.optimizer, model), key, placement.order)


def stack_orders(placement: LayerPlacement, kind: object, like: object) -> dict[str, np.ndarray]:
    """Returns the `orders` that Checkpointer takes for `like`, of type `kind`; {} if all stacks are
    in layer order.
    """
    if placement.order is None:
        return {}
    found = [(path, array) for path, array, part in arrays_of(kind, like) if part is not ABSENT]
    return {path.replace(".", "/"): placement.order for path, array in found if is_stack(array)}


def folded_mesh(c: Config) -> jax.sharding.Mesh:
    """Returns the current mesh with all axes but t folded into d, or into r if d would not divide
    the weights.
    """
    mesh = jax.sharding.get_mesh()
    if {*mesh.shape} <= {*ALWAYS}:
        return mesh
    # JAX moves arrays only between meshes with the same order of devices.
    others = mesh.size // mesh.shape["t"]
    try:
        check_divides(
            c, sizes := {"d": others, "t": mesh.shape["t"]}, of_batch=False, of_sequences=False
        )
    except ValueError:
        sizes = {"r": others, "d": 1, "t": mesh.shape["t"]}
    return make_mesh([*mesh.devices.flat], **sizes)


def without_stages(weights: object, placement: LayerPlacement, mesh: jax.sharding.Mesh) -> Any:
    """Moves weights to a `folded_mesh`, with layers in layer order, one array at a time."""
    if mesh == jax.sharding.get_mesh():
        return weights
    order = placement.order
    stacked = are_stacks(weights)

    @jax.jit
    def in_order(x):
        return x.at[np.argsort(order)].get(
            out_sharding=PartitionSpec(None, *jax.typeof(x).sharding.spec[1:])
        )

    with jax.set_mesh(mesh):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        shardings = make_shardings(type(weights), like=shapes)

    def place(x, sharding, stack):
        return jax.device_put(in_order(x) if stack and order is not None else x, sharding)

    return jax.tree.map(place, weights, shardings, stacked)


def describe_stages(c: Config, model: LanguageModel) -> list[str]:
    """Describes the schedule and its stages in a list of one line; [] without stages."""
    if not has_stages():
        return []
    placement = placement_of(c, model)
    ticks = len(training_table(c, model).columns["forward"])
    schedule = f"{c.pipeline.schedule}, {c.training.microbatches} microbatches in {ticks} ticks"
    return [f"{schedule}; {placement.p * placement.v} stages of {placement.chunk_rows} layers"]
