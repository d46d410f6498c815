"""Runs the microbatches of a step, one after another or in pipeline stages, and places the layers on the stages.

At rest a stack of layers is sharded `layers/p`, in the order of shardlib/placement.py: layer order if each device of p
has one chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib import pipeline, shardops
from shardlib.array_types import ABSENT, arrays_of
from shardlib.axes import ALWAYS, PIPELINE_AXIS
from shardlib.layers import LayerMetrics
from shardlib.placement import LayerPlacement, place_layers
from shardlib.proof.causality import GIVEN, LOGITS, TARGETS
from shardlib.schedules import Orders, forwards, in_a_ring, schedule_of, stages_of
from shardlib.shardtypes import make_shardings
from shardlib.tick_tables import TickTable, tick_table
from shardlib.values import mesh_axes, pipeline_stage
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import LanguageModel, period_of
from shardwright.modeling.weights import are_stacks, initialize, is_stack
from shardwright.optimizers.scales import initial_table
from shardwright.run.config import Config, check_divides

IN_ORDER = "in order"
"""Instead of a schedule: each device runs all layers, by shardlib.pipeline.run_in_order. Used for verification."""
LOSS, LOSS_IN_PARTS = "loss", "loss in parts"
"""Instead of a schedule: LossAlone, of which causality is proved; also in the parts that stages run."""


def has_stages() -> bool:
    """Returns whether the current mesh has an axis p."""
    return PIPELINE_AXIS in mesh_axes()


def placement_of(c: Config, model: LanguageModel) -> LayerPlacement:
    """Places the layers of a run on the stages of the current mesh. Raises ValueError if they cannot be."""
    p, v = mesh_axes().get(PIPELINE_AXIS, 1), c.pipeline.virtual_stages
    if p == 1 or c.pipeline.schedule == IN_ORDER:
        return place_layers(c.model.layers, in_a_ring(p, 1), period_of(model))
    try:
        stages = stages_of(c.pipeline.schedule, p, c.training.microbatches, v)
    except ValueError as error:
        names = "p is mesh.p, v pipeline.virtual_stages, the number of microbatches training.microbatches"
        raise ValueError(f"pipeline.schedule={c.pipeline.schedule}: {error} ({names})") from None
    return place_layers(c.model.layers, stages, period_of(model))


def training_table(c: Config, model: LanguageModel) -> TickTable:
    """Makes the tick table of a training step. Raises ValueError if the schedule rejects training.microbatches."""
    return tick_table(_orders(c, placement_of(c, model)))


def _orders(c: Config, placement: LayerPlacement) -> Orders:
    schedule = schedule_of(c.pipeline.schedule if has_stages() else "gpipe")
    return schedule(placement.p, c.training.microbatches, placement.v)


def executor(c: Config, model: LanguageModel) -> "InTurn | InStages | LossAlone":
    """Returns what runs the microbatches of a step on the current mesh: in turn, or with p by pipeline.schedule."""
    if c.pipeline.schedule in (LOSS, LOSS_IN_PARTS):
        return LossAlone(in_parts=c.pipeline.schedule == LOSS_IN_PARTS)
    return InStages(c, model) if has_stages() else InTurn(c.training.microbatches, c.training.side_by_side)


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Runs microbatches one after another, or `side_by_side` at a time. Per-device code."""

    microbatches: int
    side_by_side: int

    @property
    def adds_up(self) -> bool:
        """True if gradients of several microbatches are accumulated."""
        return self.microbatches > self.side_by_side

    def gradients(self, loss: Callable[..., Any], w: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Computes loss and gradients, summed over the microbatches in `batch`, and the mean of the layers' metrics.

        `loss` maps w and `side_by_side` microbatches to the sum of their losses and the mean of their LayerAux.
        """
        batch = jax.tree.map(lambda x: x.reshape(-1, self.side_by_side, *x.shape[1:]), batch)
        groups, layers = (len(jax.tree.leaves(x)[0]) for x in (batch, w.layers))

        def loss_of(w, group):
            one = lambda i: jax.tree.map(lambda x: x[i], group)
            total, aux = loss(w, *map(one, range(self.side_by_side)))
            return total if aux.loss is None else total + jnp.sum(aux.loss) / groups, aux.metrics

        def add(sums, group):
            (loss, metrics), g = jax.value_and_grad(loss_of, has_aux=True)(w, group)
            return jax.tree.map(jnp.add, sums, (loss, g)), metrics

        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w)
        (total, g), metrics = lax.scan(add, (jnp.zeros(()), zeros), batch)
        metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
        return total, g, LayerMetrics.of_rows(metrics, jnp.arange(layers), layers)

    def loss(self, loss: Callable[..., Any], w: object, batch: object) -> jax.Array:
        """Computes the loss of `gradients`, without the layers' auxiliary losses."""
        return lax.scan(lambda sum, part: (sum + loss(w, part)[0], None), jnp.zeros(()), batch)[0]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Splits a train.MicrobatchLoss into embed, layers and head, as shardlib.pipeline.run_schedule needs them."""

    loss: Any

    def first(self, w: object, *microbatch: object) -> Any:
        """Computes the input of the first layer."""
        return self.loss.forward.model.embed(w, self.loss.forward.tokens(*microbatch))

    def layers(self, w: object, x: object, layer_ids: jax.Array, *microbatch: object) -> tuple[Any, Any]:
        """Applies the layers `layer_ids` of a stage to `x`. Also returns their LayerAux."""
        forward = self.loss.forward
        (x,), _, aux = forward.layers(w, (x,), (forward.tokens(*microbatch),), layer_ids)
        return x, aux

    def last(self, w: object, x: object, *microbatch: object) -> Any:
        """Computes the loss from the output of the last layer."""
        return self.loss.head(w, x, *microbatch)


@dataclasses.dataclass(frozen=True)
class LossAlone:
    """Computes the loss that a step gives to its executor, without gradients, and names what it receives."""

    in_parts: bool
    adds_up = True

    def gradients(self, loss: Any, w: Any, batch: Any) -> tuple[Any, Any, Any]:
        """The loss of all microbatches side by side, and gradients of 0."""
        of = lambda i: jax.tree.map(lambda x: x[i], batch)
        count = 1 if self.in_parts else len(jax.tree.leaves(batch)[0])
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w)
        return self._of(loss, w, *map(of, range(count))), zeros, None

    def loss(self, loss: Any, w: Any, batch: Any) -> jax.Array:
        """The loss of the first microbatch."""
        return self._of(loss, w, jax.tree.map(lambda x: x[0], batch))

    def _of(self, loss: Any, w: Any, *microbatches: Any) -> Any:
        own = loss.loss
        given = lambda x: jax.tree.map(lambda x: checkpoint_name(x, GIVEN), x)

        def named(logits, targets, *rest, **options):
            received = checkpoint_name(logits, LOGITS), checkpoint_name(targets, TARGETS)
            return own(*received, *given(rest), **given(options))

        loss = dataclasses.replace(loss, loss=named)
        if not self.in_parts:
            return loss(w, *microbatches)[0]
        with pipeline_stage():
            parts, layers = Parts(loss), len(jax.tree.leaves(w.layers)[0])
            (microbatch,) = microbatches
            x = parts.first(w, *microbatch)
            x, _ = parts.layers(w.layers, x, jnp.arange(layers), *microbatch)
            return parts.last(w, x, *microbatch)


@dataclasses.dataclass(frozen=True)
class InStages:
    """Runs microbatches through the stages of axis p. Per-device code."""

    c: Config
    model: LanguageModel
    adds_up = True

    def gradients(self, loss: object, w: Any, batch: Any) -> tuple[Any, Any, Any]:
        """As InTurn.gradients."""
        total, g, metrics = self._run(loss, w, batch, training=True)
        if metrics is not None:
            metrics = dataclasses.replace(metrics, values=shardops.psum("N depth +p -> N depth", metrics.values))
        return shardops.psum("+p ->", total), g, metrics

    def loss(self, loss: object, w: object, batch: object) -> jax.Array:
        """Computes the loss of `gradients`, without the layers' auxiliary losses."""
        return shardops.psum("+p ->", self._run(loss, w, batch, training=False)[0])

    def _run(self, loss: object, w: object, batch: object, training: bool) -> tuple[Any, Any, Any]:
        placement = placement_of(self.c, self.model)
        # All that differs between the schedule and IN_ORDER, which is proved, is the table.
        return pipeline.run(Parts(loss), placement, self._table(placement, training), w, batch, training)

    def _table(self, placement: LayerPlacement, training: bool) -> TickTable | None:
        if self.c.pipeline.schedule == IN_ORDER:
            return None
        orders = _orders(self.c, placement)
        return tick_table(orders if training else forwards(orders))


def fresh_weights(c: Config, model: LanguageModel, key: jax.Array) -> Any:
    """Initializes weights, as modeling.weights.initialize, in their order at rest on the current mesh. Under jit."""
    placement = placement_of(c, model)  # raises if the layers do not divide into stages
    return initialize(initial_table(c.optimizer, model), key, placement.order)


def stack_orders(placement: LayerPlacement, kind: object, like: object) -> dict[str, np.ndarray]:
    """Returns the order of each stack in `like`, of type `kind`, by name in a checkpoint; {} if all in layer order."""
    if placement.order is None:
        return {}
    found = [(path, array) for path, array, part in arrays_of(kind, like) if part is not ABSENT]
    return {path.replace(".", "/"): placement.order for path, array in found if is_stack(array)}


def folded_mesh(c: Config) -> jax.sharding.Mesh:
    """Folds the current mesh into axes r, d and t: d takes all devices except t's, or r if they do not divide."""
    mesh = jax.sharding.get_mesh()
    if {*mesh.shape} <= {*ALWAYS}:
        return mesh
    # JAX moves arrays only between meshes with the same order of devices.
    others = mesh.size // mesh.shape["t"]
    try:
        check_divides(c, sizes := {"d": others, "t": mesh.shape["t"]}, of_batch=False, of_sequences=False)
    except ValueError:
        sizes = {"r": others, "d": 1, "t": mesh.shape["t"]}
    return make_mesh([*mesh.devices.flat], **sizes)


def without_stages(weights: object, placement: LayerPlacement, mesh: jax.sharding.Mesh) -> Any:
    """Moves weights to a `folded_mesh`, with layers in layer order, one array at a time."""
    if mesh == jax.sharding.get_mesh():
        return weights
    order, stacked = placement.order, are_stacks(weights)

    @jax.jit
    def in_order(x):
        return x.at[np.argsort(order)].get(out_sharding=PartitionSpec(None, *jax.typeof(x).sharding.spec[1:]))

    with jax.set_mesh(mesh):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        shardings = make_shardings(type(weights), like=shapes)
    place = lambda x, sharding, stack: jax.device_put(in_order(x) if stack and order is not None else x, sharding)
    return jax.tree.map(place, weights, shardings, stacked)


def describe_stages(c: Config, model: LanguageModel) -> list[str]:
    """Describes the schedule and its stages in one line; empty without stages."""
    if not has_stages():
        return []
    placement, ticks = placement_of(c, model), len(training_table(c, model).columns["forward"])
    schedule = f"{c.pipeline.schedule}, {c.training.microbatches} microbatches in {ticks} ticks"
    return [f"{schedule}; {placement.p * placement.v} stages of {placement.chunk_rows} layers"]
