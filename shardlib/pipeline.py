"""The executor of any schedule of schedules.py: the microbatches of a step through the stages of axis p.

Every device runs the same program, a scan over the ticks of the schedule. In each tick it runs the forward that its
column of the table names, if any; the backward or the input half of one, if any; and the half for the weights, if any.
Then it sends results to the devices beside it on p. Values that wait for their task are in buffers with as many slots
as the schedule needs, so memory grows with the number of microbatches only if the schedule's does. A mesh without p has
one stage: a scan over microbatches, each forward and backward at once, which is gradient accumulation.

Within a task every value may differ over p (`pipeline_stage`), and a collective over p would wait forever. shardops
refuse such collectives, and those of jax.lax are refused once a tick is traced. docs/pipeline.md explains more.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib import marks
from shardlib.checks import Scope
from shardlib.halves import Halves
from shardlib.layers import Extras, LayerMetrics, LayerNumbers
from shardlib.op_checks import one_like, varying, wrap, zeros_like_traced
from shardlib.parsing import PIPELINE_AXIS, ShardError
from shardlib.placement import Placement
from shardlib.schedules import forward_only, schedule_of
from shardlib.tick_tables import TickTable, tick_table
from shardlib.values import mesh_axes, pipeline_stage

# ---- what runs where --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parts:
    """The loss of a microbatch as one function and as three: per-device functions that return f32 scalars.

    `w` is the model's weights, a dataclass whose field `layers` stacks the layers. `*part` is the arrays of a
    microbatch. The losses in the Extras of layers are added in training, averaged over microbatches.
    """

    whole: Callable
    """(w, *part) -> loss, Extras."""
    first: Callable
    """(w, *part) -> x, the input of the first layer. The first stage runs it."""
    layers: Callable
    """(w.layers, x, LayerNumbers, *part) -> x of the same type, Extras. Each stage runs it on its own layers."""
    last: Callable
    """(w, x, *part) -> loss. The last stage runs it."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Work of the executor.

    Attributes:
        placement: the layers of each stage.
        table: the tasks of each device in each tick.
        recompute: whether the backward of a stage computes its forward again from its input. Otherwise what the layers
            save for the backward pass is kept from forward to backward.
    """

    placement: Placement
    table: TickTable
    recompute: bool


def plan_training(placement: Placement, schedule: str, microbatches: int, recompute: bool) -> Plan:
    """The plan of a training step.

    Raises:
        ValueError: an unknown schedule, or one that does not allow so many devices, microbatches or chunks.
    """
    p, m, v = placement.p, microbatches, placement.v
    orders = schedule_of(schedule)(p, m, v)
    # With one stage, or where backwards compute forwards again, a forward of the last stage would be wasted.
    recompute = recompute or p == 1
    return Plan(placement, tick_table(orders, p, m, v, recompute=recompute, fuse_last=recompute), recompute)


def plan_evaluation(placement: Placement, microbatches: int) -> Plan:
    """The plan of an evaluation: the loss without gradients."""
    p, m, v = placement.p, microbatches, placement.v
    table = tick_table(forward_only(p, m, v, placement.stages), p, m, v, recompute=True, fuse_last=False)
    return Plan(placement, table, recompute=True)


# ---- the executor -----------------------------------------------------------------------------------------------


def run_training(
    parts: Parts, plan: Plan, w: Any, microbatches: Any, see: Callable | None = None
) -> tuple[Any, Any, Any, Any]:
    """The loss, summed over microbatches, and its gradients. Per-device code.

    Args:
        parts: the loss of a microbatch.
        plan: from `plan_training`.
        w: copies of the weights, made by replicate and all_gather, so that gradients are summed over microbatches
            before they are reduced over devices. `w.layers` has this device's rows. All other weights are copies over
            p.
        microbatches: a tuple of pytrees of arrays, each with one leading dim of microbatches.
        see: called with the gradients of each microbatch; None on a mesh with p, where no device has all of them.

    Returns:
        The loss. The gradients, like `w`, in f32, or f64 for f64 weights. The metrics of the layers, averaged over
        microbatches, or None. The results of `see`, with one leading dim of microbatches in the order of the batch,
        or None. On a mesh with p, the loss and the metrics are partial sums over p.
    """
    if PIPELINE_AXIS in mesh_axes():
        return *_run(parts, plan, w, microbatches, training=True), None
    count, layers = len(jax.tree.leaves(microbatches)[0]), len(jax.tree.leaves(w.layers)[0])
    order = plan.table.columns["backward_microbatch"][:, 0]
    if not np.array_equal(order, np.arange(len(order))):
        microbatches = jax.tree.map(lambda x: x[order], microbatches)

    def tick(sums, part):
        def loss_of(w):
            loss, extras = parts.whole(w, *part)
            extra = _extra_loss(extras, count)
            return loss if extra is None else loss + extra, extras.metrics

        (loss, metrics), g = jax.value_and_grad(loss_of, has_aux=True)(w)
        return jax.tree.map(lambda total, x: total + x, sums, (loss, g)), (metrics, see and see(g))

    (loss, g), (metrics, seen) = lax.scan(tick, (jnp.zeros(()), _accumulators(w)), microbatches)
    metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
    seen = jax.tree.map(lambda x: x[np.argsort(order)], seen)
    return loss, g, LayerMetrics.of_rows(metrics, jnp.arange(layers), layers), seen


def run_evaluation(parts: Parts, plan: Plan, w: Any, microbatches: Any) -> Any:
    """The loss of `run_training` without gradients and without the losses of layers. `plan` is of `plan_evaluation`."""
    if PIPELINE_AXIS in mesh_axes():
        return _run(parts, plan, w, microbatches, training=False)[0]
    return lax.scan(lambda total, part: (total + parts.whole(w, *part)[0], None), jnp.zeros(()), microbatches)[0]


def _extra_loss(extras: Extras, microbatches: int) -> Any:
    """Sum of the layers' own losses for a microbatch, divided by `microbatches`; None if the layers have none."""
    return None if extras.loss is None else jnp.sum(extras.loss) / microbatches


def _run(parts: Parts, plan: Plan, w: Any, microbatches: Any, training: bool) -> tuple[Any, Any, Any]:
    """The loss, the gradients and the metrics of the layers, by the schedule; the last two None if not `training`."""
    placement, table, p = plan.placement, plan.table, plan.placement.p
    count = len(jax.tree.leaves(microbatches)[0])
    label = "the stages of a pipeline run different tasks at a time, by a schedule that is checked by itself"
    leaves, structure = jax.tree.flatten(w)
    w = structure.unflatten([marks.enter(x, f"{label} [{i}]") for i, x in enumerate(leaves)])
    me = lax.axis_index(PIPELINE_AXIS)
    numbers = LayerNumbers(jnp.asarray(placement.rows)[me], placement.padded)
    outer = {f.name: getattr(w, f.name) for f in dataclasses.fields(w) if f.name != "layers"}
    microbatches = jax.tree.map(lambda x: varying(x, (PIPELINE_AXIS,)), microbatches)

    # Below, `stack` is the layers of chunk i, and k the number of a microbatch.
    batch = lambda k: jax.tree.map(lambda x: _get(x, k), microbatches)
    chunk = lambda tree, i: _part(tree, i, placement.chunk_rows) if placement.v > 1 else tree
    task = lambda fn: functools.partial(_in_stage, fn)
    first = task(lambda outer, k: parts.first(dataclasses.replace(w, **outer), *batch(k)))
    layers = task(lambda stack, x, i, k: parts.layers(stack, x, chunk(numbers, i), *batch(k)))
    last = task(lambda outer, x, k: parts.last(dataclasses.replace(w, **outer), x, *batch(k)))

    def stage(stack, x, i, k):
        y, extras = layers(stack, x, i, k)
        return (y, _extra_loss(extras, count)), extras.metrics

    zero = jnp.int32(0)
    x_type = _traced(first, outer, zero)
    y_type, extras_type = _traced(layers, chunk(w.layers, zero), x_type, zero, zero)
    _traced(last, outer, y_type, zero)
    backward_of, saved_types = None, []
    if training:
        backward_of = _Backward(stage, chunk(w.layers, zero), x_type, y_type, table.halves, not plan.recompute)
        saved_types = [] if plan.recompute else backward_of.saved_types

    def forward(entry, carry):
        read = lambda: _get(carry["arrivals"], entry["forward_input"])
        embed = lambda: first(outer, entry["forward_microbatch"])
        x = lax.cond(entry["forward_first"] == 1, embed, read)
        i, k = entry["forward_chunk"], entry["forward_microbatch"]
        saved, total = carry["saved"], carry["loss"]
        if training and not plan.recompute:
            keep = backward_of.forward(chunk(w.layers, i), x, i, k)
            y = keep[0]
            saved = _put_all(saved, keep, entry["forward_residuals"])
        else:
            y, _ = layers(chunk(w.layers, i), x, i, k)
        if not training:
            total = lax.cond(entry["forward_last"] == 1, lambda: total + last(outer, y, k), lambda: total)
        return y, saved, total

    def backward(entry, carry):
        i, k = entry["backward_chunk"], entry["backward_microbatch"]
        stack = chunk(w.layers, i)
        if plan.recompute:
            read = lambda: _get(carry["arrivals"], entry["backward_input"])
            x = lax.cond(entry["backward_first"] == 1, lambda: first(outer, k), read)
            saved = backward_of.forward(stack, x, i, k)
        else:
            saved = [_get(buffer, entry["backward_residuals"]) for buffer in carry["saved"]]
        (y, extra), metrics = backward_of.results(saved)

        def at_end(g, total):
            loss, (g_outer, dy) = jax.value_and_grad(last, argnums=(0, 1))(outer, y, k)
            return _add(g, g_outer), total + loss, dy

        def elsewhere(g, total):
            return g, total, _get(carry["arrivals"], entry["backward_cotangent"])

        g_outer, total, dy = lax.cond(entry["backward_last"] == 1, at_end, elsewhere, carry["g_outer"], carry["loss"])
        g_stack, kept = carry["g_stack"], carry["kept"]
        if table.halves:
            dx, keep = backward_of.input(stack, saved, dy)
            kept = _put_all(kept, keep, entry["backward_kept"])
        else:
            dx, g = backward_of.whole(stack, saved, dy)
            g_stack = add_to_chunk(g_stack, g, i)
        total = total if extra is None else total + extra
        at_start = lambda g: _add(g, jax.vjp(lambda outer: first(outer, k), outer)[1](dx)[0])
        g_outer = lax.cond(entry["backward_first"] == 1, at_start, lambda g: g, g_outer)
        metrics = jax.tree.map(lambda x: x / count, metrics)
        metrics = _add_part(carry["metrics"], metrics, i * (placement.v > 1), placement.chunk_rows)
        return dx, g_outer, g_stack, kept, total, metrics

    def weights(entry, carry):
        i = entry["weights_chunk"]
        saved = [_get(buffer, entry["weights_residuals"]) for buffer in carry["saved"]]
        kept = [_get(buffer, entry["weights_kept"]) for buffer in carry["kept"]]
        return add_to_chunk(carry["g_stack"], backward_of.weights(chunk(w.layers, i), saved, kept), i)

    def add_to_chunk(total, g, i):
        return _add_part(total, g, i, placement.chunk_rows) if placement.v > 1 else _add(total, g)

    def tick(carry, entry):
        entry = {name: column[me] for name, column in entry.items()}
        arrivals = carry["arrivals"]
        for way, result in carry["sent"].items():
            arrivals = _put(arrivals, result, entry[way])
        carry = dict(carry, arrivals=arrivals)
        idle = lambda: (_zeros(x_type), carry["saved"], carry["loss"])
        y, saved, total = lax.cond(entry["forward"] == 1, lambda: forward(entry, carry), idle)
        carry, dx = dict(carry, saved=saved, loss=total), y
        if training:
            # If no device has two results in a tick, one message holds whichever it has.
            names = "g_outer", "g_stack", "kept", "loss", "metrics"
            idle = lambda: (y if table.one_message else _zeros(x_type), *(carry[name] for name in names))
            dx, *sums = lax.cond(entry["backward"] == 1, lambda: backward(entry, carry), idle)
            carry = dict(carry, **dict(zip(names, sums, strict=True)))
        if table.halves:
            carry["g_stack"] = lax.cond(entry["weights"] == 1, lambda: weights(entry, carry), lambda: carry["g_stack"])
        # Sent after all slots: between them, a stage without a forward would wait for the forwards of the others.
        y = dx if table.one_message else y
        sent = {"from_left": lambda: _shift(y, p, +1), "from_right": lambda: _shift(dx, p, -1), "from_self": lambda: y}
        return dict(carry, sent={way: sent[way]() for way in carry["sent"]}), None

    ways = [way for way in ("from_left", "from_right", "from_self") if (table.columns[way] < table.arrivals).any()]
    carry = {
        "arrivals": _zeros(x_type, (table.arrivals + 1,)),
        "saved": [_zeros(t, (table.residuals,)) for t in saved_types],
        "sent": {way: _zeros(x_type) for way in ways},
        "loss": varying(jnp.zeros(()), (PIPELINE_AXIS,)),
    }
    if training:
        carry |= {"kept": [_zeros(t, (table.kept,)) for t in backward_of.kept_types]}
        carry |= {"g_outer": _accumulators(outer), "g_stack": _accumulators(w.layers)}
        of_rows = lambda x: varying(jnp.zeros(placement.v * placement.chunk_rows, x.dtype), (PIPELINE_AXIS,))
        carry |= {"metrics": jax.tree.map(of_rows, extras_type.metrics)}
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    _refuse_collectives(jax.make_jaxpr(tick)(carry, jax.tree.map(lambda x: x[0], columns)).jaxpr, in_task=False)
    carry, _ = lax.scan(tick, carry, columns)
    total = wrap(marks.leave(carry["loss"], label, "+p"), (PIPELINE_AXIS,), (), "the pipeline")
    if not training:
        return total, None, None
    metrics = LayerMetrics.of_rows(carry["metrics"], numbers.index, sum(placement.counts))
    metrics = jax.tree.map(lambda x: marks.leave(x, label, "N depth +p"), metrics)
    metrics = jax.tree.map(lambda x: wrap(x, (PIPELINE_AXIS,), (), "the pipeline"), metrics)
    g = dataclasses.replace(w, layers=carry["g_stack"], **carry["g_outer"])
    g = [marks.leave_like(x, f"{label} [{i}]") for i, x in enumerate(jax.tree.leaves(g))]
    return total, structure.unflatten(g), metrics


class _Backward:
    """jax.vjp(has_aux=True) of a stage, traced by itself: with its forward, as a whole, and in halves.

    Arrays are passed from the forward to the backward. The function that `jax.vjp` returns is a pytree, whose leaves
    are what the backward needs. Leaves that are weights are not passed, since the backward has the weights anyway.

    Attributes:
        saved_types: types of what is passed from the forward to the backward, the results of the stage first.
        kept_types: types of what the input half passes to the half for the weights.

    Args:
        stage: (stack, x, chunk, microbatch) -> (y, loss of the layers), metrics of the layers.
        stack, x, y: the types of the weights of a chunk, of the input and of the output.
        halves: whether the backward is done in halves.
        is_saved: whether what the forward passes is still there for the half for the weights.
    """

    def __init__(self, stage: Callable, stack: Any, x: Any, y: Any, halves: bool, is_saved: bool):
        self._stage = stage
        self._structure: Any = None
        self._results: Any = None
        self._weights: list[int | None] = []
        zero = jnp.int32(0)
        self.saved_types = jax.eval_shape(self.forward, stack, x, zero, zero)
        self.kept_types: list = []
        if halves:
            (program, results) = jax.make_jaxpr(self.whole, return_shape=True)(stack, self.saved_types, y)
            self._dx, self._g = jax.tree.structure(results[0]), jax.tree.structure(results[1])
            wanted = [True] * self._dx.num_leaves + [False] * self._g.num_leaves
            given = [True] * len(jax.tree.leaves(stack)) + [is_saved] * len(self.saved_types) + [False]
            self._halves = Halves(program, wanted, given)
            self._halves.give_late([not is_wanted for is_wanted in wanted])
            _, self.kept_types = jax.eval_shape(self.input, stack, self.saved_types, y)

    def forward(self, stack: Any, x: jax.Array, i: jax.Array, k: jax.Array) -> list[jax.Array]:
        """The results of the stage, then what the backward needs."""
        *results, vjp, aux = jax.vjp(lambda stack, x: self._stage(stack, x, i, k), stack, x, has_aux=True)
        results, self._results = jax.tree.flatten((*results, aux))
        leaves, self._structure = jax.tree.flatten(vjp)
        known = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(stack))}
        self._weights = [known.get(id(leaf)) for leaf in leaves]
        return [*results, *(leaf for leaf in leaves if id(leaf) not in known)]

    def results(self, saved: list[jax.Array]) -> tuple[Any, Any]:
        """The results of the stage: (y, loss of the layers), metrics of the layers."""
        return jax.tree.unflatten(self._results, saved[: self._results.num_leaves])

    def whole(self, stack: Any, saved: list[jax.Array], dy: jax.Array) -> tuple[jax.Array, Any]:
        """The gradients of the input and of the weights."""
        weights, others = jax.tree.leaves(stack), iter(saved[self._results.num_leaves :])
        leaves = [next(others) if n is None else weights[n] for n in self._weights]
        (_, extra), _ = self.results(saved)
        g, dx = jax.tree.unflatten(self._structure, leaves)((dy, jax.tree.map(one_like, extra)))
        return dx, g

    def input(self, stack: Any, saved: list[jax.Array], dy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The gradient of the input, and what `weights` needs."""
        outs, kept = self._halves.first([*jax.tree.leaves(stack), *saved, dy])
        kept, self._kept = jax.tree.flatten(kept)
        return jax.tree.unflatten(self._dx, outs[: self._dx.num_leaves]), kept

    def weights(self, stack: Any, saved: list[jax.Array], kept: list[jax.Array]) -> Any:
        """The gradients of the weights. `saved` may be empty, if it is not there any more."""
        saved = saved or [None] * len(self.saved_types)
        outs = self._halves.second([*jax.tree.leaves(stack), *saved, None], jax.tree.unflatten(self._kept, kept))
        return jax.tree.unflatten(self._g, outs[self._dx.num_leaves :])


def _in_stage(fn: Callable, *args):
    with pipeline_stage(), Scope():
        return jax.tree.map(lambda x: varying(x, (PIPELINE_AXIS,)), fn(*args))


def _traced(task: Callable, *args) -> Any:
    """The type of task(*args). Raises ShardError if the task has a collective over p."""
    jaxpr, result = jax.make_jaxpr(task, return_shape=True)(*args)
    _refuse_collectives(jaxpr.jaxpr, in_task=True)
    return result


def _refuse_collectives(jaxpr: Any, in_task: bool) -> None:
    """Raises ShardError for a collective over p in a task. shardops do not see those of jax.lax and of gradients.

    `in_task` says whether all of `jaxpr` is in a task, or only the branches of its conditionals.
    """
    for equation in jaxpr.eqns:
        over = [equation.params.get(name) for name in ("axes", "axis_name")]
        axes = {axis for value in over for axis in (value if isinstance(value, tuple | list) else (value,))}
        name = equation.primitive.name
        if in_task and PIPELINE_AXIS in axes and name not in ("pvary", "pcast", "axis_index"):
            raise ShardError(
                f"a pipeline stage runs {name} over {PIPELINE_AXIS}: the stages run different tasks at a time, so "
                "that it would wait forever",
                "leave it out; or, if it is the gradient of a value that is the same on all stages, make that value "
                "one of the weights, or put lax.stop_gradient around it",
            )
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    _refuse_collectives(getattr(part, "jaxpr", part), in_task or name == "cond")


def _shift(x: jax.Array, p: int, by: int) -> jax.Array:
    return lax.ppermute(x, PIPELINE_AXIS, [(i, (i + by) % p) for i in range(p)])


def _zeros(like: Any, leading: tuple[int, ...] = ()) -> jax.Array:
    """Zeros like a traced value, with dims `leading` before its own, that also vary over p, as all values of tasks."""
    return varying(zeros_like_traced(like, leading), (PIPELINE_AXIS,))


def _accumulators(w: Any) -> Any:
    """Zeros to which gradients of `w` are added."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w)


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, i, 0)


def _put_all(buffers: list[jax.Array], values: list[jax.Array], i: jax.Array) -> list[jax.Array]:
    return [_put(buffer, value, i) for buffer, value in zip(buffers, values, strict=True)]


def _part(tree: Any, i: jax.Array, rows: int) -> Any:
    """Rows [i·rows, (i+1)·rows) of each array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * rows, rows, 0), tree)


def _add(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, more)


def _add_part(total: Any, more: Any, i: jax.Array, rows: int) -> Any:
    added = _add(_part(total, i, rows), more)
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * rows, 0), total, added)
