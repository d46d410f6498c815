"""One executor for any schedule of `schedules.py`: the microbatches of a step through the stages of axis p.

Every device runs the same program, a scan over the schedule's ticks. In each tick it does the forward that its column
of the table names, if any, passes the result on to the next device of p, does the backward, if any, and passes that
gradient back. What waits for its turn lies in buffers of as many slots as the schedule needs, so memory does not grow
with the number of microbatches where the schedule's does not. On a mesh without p there is one stage: the same scan
over microbatches, each forward and backward in one, which is gradient accumulation.

Within a task values differ over p by definition (`pipeline_stage`), and a collective over p would wait forever:
shardops refuse it there, and what reached p past them is refused once a tick is traced. docs/pipeline.md tells more.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.checks import Scope, scope
from shardlib.layers import Extras, LayerMetrics, LayerNumbers
from shardlib.op_checks import varying, zeros_like_traced
from shardlib.parsing import PIPELINE_AXIS, ShardError
from shardlib.placement import Placement
from shardlib.schedules import TickTable, forward_only, schedule_of, tick_table
from shardlib.values import Origin, Partial, mesh_axes, pipeline_stage

# ---- what runs where --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parts:
    """A microbatch's share of the loss, in one piece and in three; per-device code, f32 scalars.

    `w` is the model's weights, a dataclass whose field `layers` stacks the layers; `*part` the arrays of a microbatch.
    `Extras` are those of the layers: their losses are added in training, in the mean over microbatches.
    """

    whole: Callable
    """(w, *part) -> loss, Extras."""
    first: Callable
    """(w, *part) -> x, what enters the first layer. The first stage runs it."""
    layers: Callable
    """(w.layers, x, LayerNumbers, *part) -> x, of the same type, Extras. Each stage runs it on layers of its own."""
    last: Callable
    """(w, x, *part) -> loss. The last stage runs it."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the executor runs.

    Attributes:
        placement: the layers of each stage.
        table: what each device does in each tick.
        recompute: the backward of a stage computes its forward again from what entered it. Otherwise what
            save_for_backward marks is kept from forward to backward, and what explicit_activation_checkpointing keeps.
    """

    placement: Placement
    table: TickTable
    recompute: bool


def plan_training(placement: Placement, schedule: str, microbatches: int, recompute: bool) -> Plan:
    """The plan of a step.

    Raises:
        ValueError: an unknown schedule, or one that is not for so many devices, microbatches or chunks.
    """
    p, m, v = placement.p, microbatches, placement.v
    orders = schedule_of(schedule)(p, m, v)
    # Of one stage, and where the forward runs again in any case, the last stage's forward would be for nothing.
    recompute = recompute or p == 1
    return Plan(placement, tick_table(orders, p, m, v, recompute=recompute, fuse_last=recompute), recompute)


def plan_evaluation(placement: Placement, microbatches: int) -> Plan:
    """The plan of a loss without gradients."""
    p, m, v = placement.p, microbatches, placement.v
    table = tick_table(forward_only(p, m, v), p, m, v, recompute=True, fuse_last=False)
    return Plan(placement, table, recompute=True)


# ---- the executor -----------------------------------------------------------------------------------------------


def run_training(
    parts: Parts, plan: Plan, w: Any, microbatches: Any, see: Callable | None = None
) -> tuple[Any, Any, Any, Any]:
    """The loss, summed over microbatches, and its gradients; per-device code.

    Args:
        w: the weights, whose gradients are summed over microbatches before they are reduced over devices: copies, made
            by replicate and all_gather. The layers are this device's rows, those outside of them copies over p.
        microbatches: a tuple of pytrees of arrays, each array with one leading dim of microbatches.
        see: called with the gradients of each microbatch. None on a mesh with p, where none has them as a whole.

    Returns:
        The loss: on a mesh with p a partial sum over p. The gradients: shaped as `w`, in f32; of f64 weights, in f64.
        The metrics of the layers, in the mean over microbatches, on a mesh with p partial sums; None if there are none.
        What `see` gave, with one leading dim of microbatches, in the order of the batch; None without it.
    """
    if PIPELINE_AXIS in mesh_axes():
        return *_run(parts, plan, w, microbatches, training=True), None
    count, layers = len(jax.tree.leaves(microbatches)[0]), len(jax.tree.leaves(w.layers)[0])
    order = plan.table.columns["backward_microbatch"][:, 0]
    if not np.array_equal(order, np.arange(len(order))):
        microbatches = jax.tree.map(lambda x: x[order], microbatches)

    def tick(sums, part):
        @scope  # of a microbatch, whose B is not that of the batch
        def share(w):
            loss, extras = parts.whole(w, *part)
            extra = _extra_loss(extras, count)
            return loss if extra is None else loss + extra, extras.metrics

        (loss, metrics), g = jax.value_and_grad(share, has_aux=True)(w)
        return jax.tree.map(lambda total, x: total + x, sums, (loss, g)), (metrics, see and see(g))

    (loss, g), (metrics, seen) = lax.scan(tick, (jnp.zeros(()), _accumulators(w)), microbatches)
    metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
    seen = jax.tree.map(lambda x: x[np.argsort(order)], seen)
    return loss, g, LayerMetrics.of_rows(metrics, jnp.arange(layers), layers), seen


def run_evaluation(parts: Parts, plan: Plan, w: Any, microbatches: Any) -> Any:
    """The loss as `run_training` gives it, without gradients, on a mesh with p; `plan` is from `plan_evaluation`."""
    return _run(parts, plan, w, microbatches, training=False)[0]


def _extra_loss(extras: Extras, microbatches: int) -> Any:
    """A microbatch's share of what layers add to the loss; None where they add nothing."""
    return None if extras.loss is None else jnp.sum(extras.loss) / microbatches


def _run(parts: Parts, plan: Plan, w: Any, microbatches: Any, training: bool) -> tuple[Any, Any, Any]:
    placement, table, p = plan.placement, plan.table, plan.placement.p
    count = len(jax.tree.leaves(microbatches)[0])
    me = lax.axis_index(PIPELINE_AXIS)
    rows = LayerNumbers(jnp.asarray(placement.rows)[me], placement.padded)
    ends = {f.name: getattr(w, f.name) for f in dataclasses.fields(w) if f.name != "layers"}
    microbatches = jax.tree.map(lambda x: varying(x, (PIPELINE_AXIS,)), microbatches)

    batch = lambda k: jax.tree.map(lambda x: _get(x, k), microbatches)
    chunk = lambda tree, i: _part(tree, i, placement.chunk_rows) if placement.v > 1 else tree
    task = lambda fn: functools.partial(_in_stage, fn)
    first = task(lambda ends, k: parts.first(dataclasses.replace(w, **ends), *batch(k)))
    layers = task(lambda layers, x, i, k: parts.layers(layers, x, chunk(rows, i), *batch(k)))
    last = task(lambda ends, x, k: parts.last(dataclasses.replace(w, **ends), x, *batch(k)))

    def stage(own, x, i, k):
        y, extras = layers(own, x, i, k)
        return (y, _extra_loss(extras, count)), extras.metrics

    residuals_of = _Residuals(stage)
    zero = jnp.int32(0)
    _, x_type = _traced(first, ends, zero)
    _, (y_type, extras_type) = _traced(layers, chunk(w.layers, zero), x_type, zero, zero)
    _traced(last, ends, y_type, zero)
    saved_types = []
    if training and not plan.recompute:
        saved_types = jax.eval_shape(residuals_of.forward, chunk(w.layers, zero), x_type, zero, zero)

    def forward(row, carry):
        read = lambda: _get(carry["inputs"], row["forward_input"])
        embed = lambda: first(ends, row["forward_microbatch"])
        x = lax.cond(row["forward_first"] == 1, embed, read)
        i, k = row["forward_chunk"], row["forward_microbatch"]
        saved, total = carry["saved"], carry["loss"]
        if training and not plan.recompute:
            keep = residuals_of.forward(chunk(w.layers, i), x, i, k)
            y = keep[0]
            saved = [_put(ring, value, row["forward_residuals"]) for ring, value in zip(saved, keep, strict=True)]
        else:
            y, _ = layers(chunk(w.layers, i), x, i, k)
        if not training:
            total = lax.cond(row["forward_last"] == 1, lambda: total + last(ends, y, k), lambda: total)
        return y, saved, total

    def backward(row, carry):
        i, k = row["backward_chunk"], row["backward_microbatch"]
        own = chunk(w.layers, i)
        if plan.recompute:
            read = lambda: _get(carry["inputs"], row["backward_input"])
            x = lax.cond(row["backward_first"] == 1, lambda: first(ends, k), read)
            (y, extra), vjp, metrics = jax.vjp(lambda own, x: stage(own, x, i, k), own, x, has_aux=True)
        else:
            saved = [_get(ring, row["backward_residuals"]) for ring in carry["saved"]]
            (y, extra), vjp, metrics = residuals_of.backward(own, saved)

        def at_end(g, total):
            share, (g_ends, dy) = jax.value_and_grad(last, argnums=(0, 1))(ends, y, k)
            return _add(g, g_ends), total + share, dy

        def elsewhere(g, total):
            return g, total, _get(carry["cotangents"], row["backward_cotangent"])

        g_ends, total, dy = lax.cond(row["backward_last"] == 1, at_end, elsewhere, carry["g_ends"], carry["loss"])
        g_own, dx = vjp((dy, jax.tree.map(_one_like, extra)))
        total = total if extra is None else total + extra
        at_start = lambda g: _add(g, jax.vjp(lambda ends: first(ends, k), ends)[1](dx)[0])
        g_ends = lax.cond(row["backward_first"] == 1, at_start, lambda g: g, g_ends)
        if placement.v > 1:
            g_layers = _add_part(carry["g_layers"], g_own, i, placement.chunk_rows)
        else:
            g_layers = _add(carry["g_layers"], g_own)
        metrics = jax.tree.map(lambda x: x / count, metrics)
        metrics = _add_part(carry["metrics"], metrics, i * (placement.v > 1), placement.chunk_rows)
        return dx, g_ends, g_layers, total, metrics

    def tick(carry, row):
        row = {name: column[me] for name, column in row.items()}
        carry = dict(carry, inputs=_put(carry["inputs"], carry["y"], row["arriving_input"]))
        idle = lambda: (_zeros(x_type), carry["saved"], carry["loss"])
        y, saved, total = lax.cond(row["forward"] == 1, lambda: forward(row, carry), idle)
        carry = dict(carry, saved=saved, loss=total)
        if training:
            carry = dict(carry, cotangents=_put(carry["cotangents"], carry["dx"], row["arriving_cotangent"]))
            names = "g_ends", "g_layers", "loss", "metrics"
            idle = lambda: (_zeros(x_type), *(carry[name] for name in names))
            dx, *sums = lax.cond(row["backward"] == 1, lambda: backward(row, carry), idle)
            carry = dict(carry, **dict(zip(names, sums, strict=True)), dx=_shift(dx, p, -1))
        # Not between the two slots, where a stage without a forward would wait for the others'.
        carry = dict(carry, y=_shift(y, p, +1))
        return carry, None

    carry = {
        "inputs": _ring(x_type, table.inputs + 1),
        "saved": [_ring(t, table.residuals) for t in saved_types],
        "y": _zeros(x_type),
        "loss": varying(jnp.zeros(()), (PIPELINE_AXIS,)),
    }
    if training:
        carry |= {"cotangents": _ring(x_type, table.cotangents + 1), "dx": _zeros(x_type)}
        carry |= {"g_ends": _accumulators(ends), "g_layers": _accumulators(w.layers)}
        of_rows = lambda x: varying(jnp.zeros(placement.v * placement.chunk_rows, x.dtype), (PIPELINE_AXIS,))
        carry |= {"metrics": jax.tree.map(of_rows, extras_type.metrics)}
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    _refuse_collectives(jax.make_jaxpr(tick)(carry, jax.tree.map(lambda x: x[0], columns)).jaxpr, in_task=False)
    carry, _ = lax.scan(tick, carry, columns)
    total = Partial(carry["loss"], (PIPELINE_AXIS,), Origin("the pipeline"))
    if not training:
        return total, None, None
    metrics = LayerMetrics.of_rows(carry["metrics"], rows.index, sum(placement.counts))
    metrics = jax.tree.map(lambda x: Partial(x, (PIPELINE_AXIS,), Origin("the pipeline")), metrics)
    return total, dataclasses.replace(w, layers=carry["g_layers"], **carry["g_ends"]), metrics


class _Residuals:
    """A vjp, with has_aux, whose forward and backward are traced apart: what passes between them is a list of arrays.

    `jax.vjp` returns a function that is a pytree: its leaves are what the backward keeps. Those that are weights are
    there in the backward anyway, and are left out of the list.
    """

    def __init__(self, fn: Callable):
        self._fn = fn
        self._structure: Any = None
        self._results: Any = None
        self._weights: list[int | None] = []

    def forward(self, w: Any, x: jax.Array, i: jax.Array, k: jax.Array) -> list[jax.Array]:
        """What `backward` needs of fn(w, x, i, k), its results first."""
        *results, vjp, aux = jax.vjp(lambda w, x: self._fn(w, x, i, k), w, x, has_aux=True)
        results, self._results = jax.tree.flatten((*results, aux))
        leaves, self._structure = jax.tree.flatten(vjp)
        known = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(w))}
        self._weights = [known.get(id(leaf)) for leaf in leaves]
        return [*results, *(leaf for leaf in leaves if id(leaf) not in known)]

    def backward(self, w: Any, saved: list[jax.Array]) -> tuple[Any, Callable, Any]:
        """What `jax.vjp` gives for the call of `forward`: its result, the function for gradients, and the rest."""
        count = self._results.num_leaves
        result, aux = jax.tree.unflatten(self._results, saved[:count])
        weights, others = jax.tree.leaves(w), iter(saved[count:])
        leaves = [next(others) if n is None else weights[n] for n in self._weights]
        return result, jax.tree.unflatten(self._structure, leaves), aux


def _in_stage(fn: Callable, *args):
    with pipeline_stage(), Scope():
        return jax.tree.map(lambda x: varying(x, (PIPELINE_AXIS,)), fn(*args))


def _traced(task: Callable, *args) -> tuple[Any, Any]:
    """The jaxpr of task(*args), and the type of its result. Raises ShardError if it has a collective over p."""
    jaxpr, result = jax.make_jaxpr(task, return_shape=True)(*args)
    _refuse_collectives(jaxpr.jaxpr, in_task=True)
    return jaxpr.jaxpr, result


def _refuse_collectives(jaxpr: Any, in_task: bool) -> None:
    """Raises ShardError for a collective over p within a task, one that shardops did not see: gradients have some too.

    `in_task`: whether all of `jaxpr` is a task, or only what its conditionals decide on is.
    """
    for equation, is_in_task in _equations(jaxpr, in_task):
        over = [equation.params.get(name) for name in ("axes", "axis_name")]
        axes = {axis for value in over for axis in (value if isinstance(value, tuple | list) else (value,))}
        name = equation.primitive.name
        if is_in_task and PIPELINE_AXIS in axes and name not in ("pvary", "pcast", "axis_index"):
            raise ShardError(
                f"a pipeline stage runs {name} over {PIPELINE_AXIS}: the stages run different tasks at a time, so "
                "that it would wait forever",
                "leave it out; or, if it is the gradient of a value that is the same on all stages, let that be "
                "one of the weights, or put lax.stop_gradient around it",
            )


def _equations(jaxpr: Any, in_branch: bool = False) -> Iterator[tuple[Any, bool]]:
    """Those of `jaxpr` and of all inside them, each with whether it is in a branch of a conditional."""
    for equation in jaxpr.eqns:
        yield equation, in_branch
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from _equations(getattr(part, "jaxpr", part), in_branch or equation.primitive.name == "cond")


def _shift(x: jax.Array, p: int, by: int) -> jax.Array:
    return lax.ppermute(x, PIPELINE_AXIS, [(i, (i + by) % p) for i in range(p)])


def _one_like(x: jax.Array) -> jax.Array:
    """The cotangent of a scalar that is a part of the loss."""
    return varying(jnp.ones((), x.dtype), jax.typeof(x).manual_axis_type.varying)


def _zeros(like: Any, leading: tuple[int, ...] = ()) -> jax.Array:
    """Zeros of a traced value's shape and dtype, a loop's start or a branch that does nothing: they vary as it does,
    and over p, as all does that depends on the task."""
    return varying(zeros_like_traced(like, leading), (PIPELINE_AXIS,))


def _accumulators(w: Any) -> Any:
    """Zeros to add gradients of `w` to."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w)


def _ring(like: Any, slots: int) -> jax.Array:
    return _zeros(like, (slots,))


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, i, 0)


def _part(tree: Any, i: jax.Array, rows: int) -> Any:
    """Rows [i·rows, (i+1)·rows) of each array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * rows, rows, 0), tree)


def _add(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, more)


def _add_part(total: Any, more: Any, i: jax.Array, rows: int) -> Any:
    added = _add(_part(total, i, rows), more)
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * rows, 0), total, added)
