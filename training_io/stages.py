"""The pipeline of a run: which layers its stages have, what they do when, and how weights lie at rest for that.

A stack of layers is `layers/p` at rest, in the order that shardlib/placement.py says: where each device of p has one
chunk, and all have the same number of layers, that is the order of the layers.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cluster.devices import make_mesh
from modeling.model import LanguageModel, period_of
from modeling.weights import are_stacks, initialize, is_stack
from shardlib import pipeline, shardops
from shardlib.array_types import ABSENT, arrays_of
from shardlib.parsing import PIPELINE_AXIS
from shardlib.pipeline import Parts, Plan, plan_evaluation, plan_training
from shardlib.placement import Placement, StackOrder, place_layers
from shardlib.shardtypes import make_shardings
from shardlib.values import mesh_axes
from training_io.config import Config, check_divides


def has_stages() -> bool:
    """Whether the mesh in force has an axis p."""
    return PIPELINE_AXIS in mesh_axes()


def placement_of(c: Config, model: LanguageModel) -> Placement:
    """Where the layers of a run are, on the mesh in force. Raises ValueError if they cannot be placed so."""
    p, v, counts = mesh_axes().get(PIPELINE_AXIS, 1), c.pipeline.virtual_stages, c.pipeline.layers_per_stage
    if p == 1:
        v, counts = 1, None
    period = period_of(model)
    if counts == "balanced":
        counts = balanced(c.model.layers // period, p * v, head_cost(c, model.table) / period)
        counts = [period * count for count in counts]
    return place_layers(c.model.layers, p, v, counts, period)


def training_plan(c: Config, model: LanguageModel) -> Plan:
    """What the devices of p do in a step. Raises ValueError for a schedule that is not for so many microbatches."""
    schedule = c.pipeline.schedule if has_stages() else "gpipe"
    return plan_training(placement_of(c, model), schedule, c.training.microbatches, c.pipeline.recompute)


def run_training(
    c: Config, model: LanguageModel, parts: Parts, w: Any, rows: Any, see: Callable | None = None
) -> tuple[Any, Any, Any, Any]:
    """The loss, its gradients, and the metrics of the layers, as c.pipeline.schedule says. Per-device code.

    Args:
        parts: the loss of a microbatch.
        w: copies of the weights.
        rows: a tuple of pytrees of arrays, of the whole batch.
        see: called with the gradients of each microbatch.

    Returns:
        As shardlib.pipeline.run_training does: the loss is a partial sum over p; the metrics are reduced.

    Raises:
        ValueError: `see` where there are stages.
    """
    if see and has_stages():
        raise ValueError(
            f"the gradients of each microbatch are to be seen, but mesh.p is {mesh_axes()[PIPELINE_AXIS]}: the stages "
            "are at different microbatches at a time; set mesh.p=1, or leave `see` out of loss_and_gradients."
        )
    rows = microbatches(rows, c.training.microbatches)
    loss, g, metrics, seen = pipeline.run_training(parts, training_plan(c, model), w, rows, see)
    if metrics is not None:
        metrics = dataclasses.replace(metrics, values=shardops.psum("N depth +p -> N depth", metrics.values))
    return loss, g, metrics, seen


def run_evaluation(c: Config, model: LanguageModel, parts: Parts, w: Any, rows: Any) -> Any:
    """The loss as `run_training` gives it, without gradients: of the whole batch at once where there are no stages."""
    if not has_stages():
        return parts.whole(w, *rows)[0]
    plan = plan_evaluation(placement_of(c, model), c.training.microbatches)
    return pipeline.run_evaluation(parts, plan, w, microbatches(rows, c.training.microbatches))


def microbatches(rows: Any, count: int) -> Any:
    """Each device's own rows [B, …] cut into microbatches: [count, B / count, …]."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)


def fresh_weights(c: Config, model: LanguageModel, key: jax.Array) -> Any:
    """Weights at init, as they are at rest on the mesh in force. Under jit; see modeling.weights.initialize."""
    return initialize(model.table, key, placement_of(c, model).order)


def head_cost(c: Config, table: Any) -> float:
    """FLOPs of unembedding over those of a layer, forward, a token; attention counted half, as it is causal."""
    m = c.model
    size = lambda tree, kinds: sum(math.prod(w.shape) for w in jax.tree.leaves(tree) if w.kind in kinds)
    layer = 2 * size(table.layers, ("matrix",)) / m.layers + 2 * m.heads * m.d_head * c.training.seq_len
    return 2 * size(table, ("unembedding",)) / layer


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """Layers of each stage such that the slowest is as fast as can be, if the last one's head costs `head` layers.

    Raises:
        ValueError: fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} stages: each has at least 1. Make p smaller.")
    counts = [1] * stages
    load = [(1.0, stage) for stage in range(stages - 1)] + [(1.0 + head, stages - 1)]
    heapq.heapify(load)
    # All layers cost the same, so that each next one goes where there is the least to do.
    for _ in range(layers - stages):
        cost, stage = heapq.heappop(load)
        counts[stage] += 1
        heapq.heappush(load, (cost + 1, stage))
    return counts


def stack_orders(placement: Placement, kind: Any, like: Any) -> dict[str, StackOrder]:
    """The order of every stack in `like`, of type `kind`, by its name in a checkpoint.

    None of them where all are in the order of the layers.
    """
    if placement.order is None:
        return {}
    found = [(path, array) for path, array, part in arrays_of(kind, like) if part is not ABSENT]
    return {path.replace(".", "/"): placement.order for path, array in found if is_stack(array)}


def folded_mesh(c: Config) -> jax.sharding.Mesh:
    """The mesh in force without stages: p and r as parts of d; p as a part of r where that does not divide it."""
    mesh = jax.sharding.get_mesh()
    if PIPELINE_AXIS not in mesh.shape:
        return mesh
    # The order of the devices stays: JAX moves arrays between meshes of one order only.
    p, r, d, t = (mesh.shape[axis] for axis in ("p", "r", "d", "t"))
    try:
        check_divides(c, {"r": 1, "d": p * r * d, "t": t}, of_batch=False)
        sizes = 1, p * r * d, t
    except ValueError:
        sizes = p * r, d, t
    return make_mesh(*sizes, devices=mesh.devices.reshape(-1))


def without_stages(weights: Any, placement: Placement, mesh: jax.sharding.Mesh) -> Any:
    """The weights on a `folded_mesh`, layers in their order; one array after the other."""
    if PIPELINE_AXIS not in jax.sharding.get_mesh().shape:
        return weights
    order, stacked = placement.order, are_stacks(weights)

    @jax.jit
    def in_order(x):
        return order.to_layers(x, out_sharding=PartitionSpec(None, *jax.typeof(x).sharding.spec[1:]))

    with jax.set_mesh(mesh):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        shardings = make_shardings(type(weights), like=shapes)
    place = lambda x, sharding, stack: jax.device_put(in_order(x) if stack and order is not None else x, sharding)
    return jax.tree.map(place, weights, shardings, stacked)


def describe_stages(c: Config, model: LanguageModel) -> list[str]:
    """The schedule, and for each stage its device of p, its layers, and its weights in f32; nothing without stages."""
    if not has_stages():
        return []
    placement, m, table = placement_of(c, model), c.model, model.table
    size = lambda tree: 4 * sum(math.prod(w.shape) for w in jax.tree.leaves(tree))
    of_layer, ends = size(table.layers) // m.layers, size(table) - size(table.layers)
    ticks = len(training_plan(c, model).table.columns["forward"])
    keeps = "recompute" if c.pipeline.recompute else "what is marked is saved"
    lines, first = [f"{c.pipeline.schedule}, {c.training.microbatches} microbatches in {ticks} ticks, {keeps}"], 0
    for stage, count in enumerate(placement.counts):
        extra = {0: ", embedding", len(placement.counts) - 1: ", final norm, unembedding"}.get(stage, "")
        which = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
        where = f"p={stage % placement.p}" + f" chunk {stage // placement.p}" * (placement.v > 1)
        lines.append(f"stage {stage}: {where}: {which}{extra}; {count * of_layer / 2**20:,.4g} MiB of layers")
        first += count
    lines.append(f"weights outside of the layers, {ends / 2**20:,.4g} MiB, are at rest in blocks over p too")
    return lines
