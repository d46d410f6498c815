"""Executor of any schedule of schedules.py.

It runs the microbatches of a step through the stages of axis p. Every device runs the same program,
a scan over the ticks of the schedule. In each tick it runs what its column of the table names: a
forward, a backward or its input half, and a weights half, each if there is one. Then it sends
results to its neighbors on p. Before the forwards of the first stage all devices of p embed its
microbatch together, and before the backwards of the last stage they compute the loss together, each
for its part of the vocabulary. Values that wait for their task are in buffers with as many slots as
the schedule needs, so memory grows with the number of microbatches only if the schedule's does.

Within a task every value may differ over p (`pipeline_stage`), and a collective over p in the task
of a stage would wait forever. Such collectives are rejected once a tick is traced. docs/pipeline.md
explains more.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import marks
from shardlib.axes import PIPELINE_AXIS
from shardlib.equations import axes_of, equations_in, frames_of
from shardlib.layers import LayerMetrics
from shardlib.op_checks import one_like, varying, wrap, zeros_like_traced
from shardlib.parsing import ShardError, parse_shape
from shardlib.placement import LayerPlacement
from shardlib.places import is_users, place
from shardlib.scopes import Scope
from shardlib.split_backward import SplitBackward
from shardlib.tick_tables import TickTable
from shardlib.values import mesh_axes, on_mesh, pipeline_stage, planned_devices

# ---- the backward of a stage as separate tasks ---------------------------------------------------


class StageBackward:
    """jax.vjp(has_aux=True) of a stage, split into tasks.

    They are its forward, its whole backward, and the halves of the backward. Arrays are passed from
    the forward to the backward. The function that `jax.vjp` returns is a pytree whose leaves are
    what the backward needs. Leaves that are weights are not passed, since the backward has the
    weights anyway.

    Attributes:
        saved_types: types of what the forward passes to the backward, starting with its results
            other than y.
        kept_types: types of what the input half passes to the weights half.

    Args:
        stage: (stack, x, chunk, microbatch) -> (y, loss of the layers), metrics of the layers.
        stack, x, y: types of a chunk's weights, of the input and of the output.
        halves: True to split the backward in halves.
    """

    def __init__(
        self, stage: Callable[..., Any], stack: object, x: object, y: object, halves: bool
    ):
        self._stage = stage
        self._structure: Any = None
        self._results: Any = None
        self._weights: list[int | None] = []
        zero = jnp.int32(0)
        _, self.saved_types = jax.eval_shape(self.forward, stack, x, zero, zero)
        self.kept_types: list = []
        if halves:
            (program, results) = jax.make_jaxpr(self.whole, return_shape=True)(
                stack, self.saved_types, y
            )
            self._dx, self._g = jax.tree.structure(results[0]), jax.tree.structure(results[1])
            wanted = [True] * self._dx.num_leaves + [False] * self._g.num_leaves
            self._dy = [None] * len(jax.tree.leaves(y))  # what `weights` has instead of dy
            given = [True] * (len(jax.tree.leaves(stack)) + len(self.saved_types)) + [False] * len(
                self._dy
            )
            # What is passed from task to task varies over p, as its buffers do.
            self._halves = SplitBackward(program, wanted, given, over=(PIPELINE_AXIS,))
            self._halves.defer([not is_wanted for is_wanted in wanted])
            _, self.kept_types = jax.eval_shape(self.input, stack, self.saved_types, y)

    def forward(
        self, stack: object, x: Any, i: jax.Array, k: jax.Array
    ) -> tuple[Any, list[jax.Array]]:
        """Runs the stage.

        Returns its output y, and a list of its other results followed by what the backward needs.
        """
        (y, extra), vjp, aux = jax.vjp(
            lambda stack, x: self._stage(stack, x, i, k), stack, x, has_aux=True
        )
        results, self._results = jax.tree.flatten((extra, aux))
        leaves, self._structure = jax.tree.flatten(vjp)
        known = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(stack))}
        self._weights = [known.get(id(leaf)) for leaf in leaves]
        return y, [*results, *(leaf for leaf in leaves if id(leaf) not in known)]

    def results(self, saved: list[jax.Array]) -> tuple[Any, Any]:
        """Reads the loss and the metrics of the layers from what the forward saved."""
        return jax.tree.unflatten(self._results, saved[: self._results.num_leaves])

    def whole(self, stack: object, saved: list[jax.Array], dy: object) -> tuple[Any, Any]:
        """Computes the gradients of the input and of the weights."""
        weights, others = jax.tree.leaves(stack), iter(saved[self._results.num_leaves :])
        leaves = [next(others) if n is None else weights[n] for n in self._weights]
        extra, _ = self.results(saved)
        g, dx = jax.tree.unflatten(self._structure, leaves)((dy, jax.tree.map(one_like, extra)))
        return dx, g

    def input(
        self, stack: object, saved: list[jax.Array], dy: object
    ) -> tuple[Any, list[jax.Array]]:
        """Computes the gradient of the input, and what `weights` needs."""
        outs, kept = self._halves.first([*jax.tree.leaves(stack), *saved, *jax.tree.leaves(dy)])
        kept, self._kept = jax.tree.flatten(kept)
        return jax.tree.unflatten(self._dx, outs[: self._dx.num_leaves]), kept

    def weights(self, stack: object, saved: list[jax.Array], kept: list[jax.Array]) -> Any:
        """Computes the gradients of the weights."""
        outs = self._halves.second(
            [*jax.tree.leaves(stack), *saved, *self._dy], jax.tree.unflatten(self._kept, kept)
        )
        return jax.tree.unflatten(self._g, outs[self._dx.num_leaves :])


# ---- the executor --------------------------------------------------------------------------------


def run(
    loss: Any,
    placement: LayerPlacement,
    table: TickTable | None,
    w: Any,
    batch: object,
    training: bool,
) -> tuple:
    """Runs `run_schedule`, or without a table `run_in_order`.

    So both get the same loss, weights and microbatches.
    """
    if table is None:
        return run_in_order(loss, w, batch, training)
    return run_schedule(loss, placement, table, w, batch)


def run_schedule(
    loss: Any, placement: LayerPlacement, table: TickTable, w: Any, microbatches: object
) -> tuple:
    """Computes the loss, summed over microbatches, and its gradients, on a mesh with p.

    Per-device code. For a table made of `forwards` only, the loss leaves out the losses of layers,
    and gradients and metrics are None.

    Args:
        loss: the loss of a microbatch, in three per-device methods. All devices of p run two of
            them together: `first(w, *microbatch)` returns the input of the first layer, and
            `last(w, x, *microbatch)` the loss, an f32 scalar.
            `layers(w, x, layer_ids, *microbatch)` runs the layers `layer_ids` of one stage, and
            returns x and their LayerAux, whose losses are added in training, averaged over
            microbatches.
        placement: the layers of each stage.
        table: the tick table of the schedule.
        w: weights as Copies, made by replicate and all_gather, so that gradients are summed over
            microbatches before they are reduced over devices. `w.layers` has this device's rows.
        microbatches: a tuple of pytrees of arrays, each with a leading dim of microbatches.

    Returns:
        The loss, a partial sum over p. The gradients, like `w`, in f32, or f64 for f64 weights. The
        metrics of the layers, averaged over microbatches, a partial sum over p; or None.
    """
    p, count, training = (
        placement.p,
        len(jax.tree.leaves(microbatches)[0]),
        bool(table.columns["backward"].any()),
    )
    if count != (wanted := 1 + int(table.columns["forward_microbatch"].max())):
        problem = f"the batch has {count} microbatches, but the schedule is for {wanted}"
        raise ShardError(problem, "give both the same number: training.microbatches")
    label = marks.STAGES
    leaves, structure = jax.tree.flatten(w)
    w = structure.unflatten([marks.enter(x, f"{label} [{i}]") for i, x in enumerate(leaves)])
    me = lax.axis_index(PIPELINE_AXIS)
    layer_ids = jnp.asarray(placement.rows)[me]
    outer = {f.name: getattr(w, f.name) for f in dataclasses.fields(w) if f.name != "layers"}

    # Below, `stack` is the layers of chunk i, and k the index of a microbatch.
    batch = lambda k: _get(microbatches, k)
    own_batch = lambda k: jax.tree.map(_apart, batch(k))
    chunk = lambda tree, i: _part(tree, i, placement.chunk_rows) if placement.v > 1 else tree
    outside = lambda outer: dataclasses.replace(w, **outer)
    first = _task(lambda outer, k: loss.first(outside(outer), *batch(k)))
    layers = _task(lambda stack, x, i, k: loss.layers(stack, x, chunk(layer_ids, i), *own_batch(k)))
    last = _task(lambda outer, x, k: loss.last(outside(outer), _apart(x), *batch(k)))

    def stage(stack, x, i, k):
        y, aux = layers(stack, x, i, k)
        return (y, _loss_of_layers(aux, count)), aux.metrics

    zero = jnp.int32(0)
    x_type = jax.eval_shape(first, outer, zero)
    if others := [
        x.dtype for x in jax.tree.leaves(x_type) if not jnp.issubdtype(x.dtype, jnp.inexact)
    ]:
        remedy = "stages pass on floats, which have gradients: use .astype(act.dtype) in `embed`"
        raise ShardError(f"the residual stream has an array of {others[0]}", remedy)
    y_type, extras_type = jax.eval_shape(layers, chunk(w.layers, zero), x_type, zero, zero)
    backward_of: StageBackward | Any = None
    if training:
        backward_of = StageBackward(stage, chunk(w.layers, zero), x_type, y_type, table.halves)

    def forward(entry, carry):
        x = _get(carry["arrivals"], entry["forward_input"])
        i, k = entry["forward_chunk"], entry["forward_microbatch"]
        if not training:
            return layers(chunk(w.layers, i), x, i, k)[0], []
        y, keep = backward_of.forward(chunk(w.layers, i), x, i, k)
        return y, _put(carry["saved"], keep, entry["forward_residuals"])

    def backward(entry, carry):
        i = entry["backward_chunk"]
        stack = chunk(w.layers, i)
        saved = _get(carry["saved"], entry["backward_residuals"])
        extra, metrics = backward_of.results(saved)
        dy = _get(carry["arrivals"], entry["backward_cotangent"])
        g_stack, kept, total = carry["g_stack"], carry["kept"], carry["loss"]
        if table.halves:
            dx, keep = backward_of.input(stack, saved, dy)
            kept = _put(kept, keep, entry["backward_kept"])
        else:
            dx, g = backward_of.whole(stack, saved, dy)
            g_stack = add_to_chunk(g_stack, g, i)
        total = total if extra is None else total + extra
        metrics = jax.tree.map(lambda x: x / count, metrics)
        metrics = _add_part(carry["metrics"], metrics, i * (placement.v > 1), placement.chunk_rows)
        return dx, g_stack, kept, total, metrics

    def weights(entry, carry):
        i = entry["weights_chunk"]
        saved, kept = (
            _get(carry["saved"], entry["weights_residuals"]),
            _get(carry["kept"], entry["weights_kept"]),
        )
        return add_to_chunk(
            carry["g_stack"], backward_of.weights(chunk(w.layers, i), saved, kept), i
        )

    def add_to_chunk(total, g, i):
        return _add_part(total, g, i, placement.chunk_rows) if placement.v > 1 else _add(total, g)

    # Below, all devices work together on the microbatch k of one of them, where `own` is true.

    def embed(carry, k, own, entry):
        slot = jnp.where(own, entry["forward_input"], table.arrivals)
        return (_put(carry["arrivals"], first(outer, k), slot),)

    def embed_backward(carry, k, own, dx):
        (g,) = jax.vjp(lambda outer: first(outer, k), outer)[1](_where(own, dx))
        return (_add(carry["g_outer"], g),)

    def loss_of(outer, y, k, own):
        return _where(own, last(outer, lax.psum(_where(own, y), PIPELINE_AXIS), k))

    def head(carry, k, own, entry):
        slot = jnp.where(own, entry["backward_cotangent"], table.arrivals)
        total, (g, dy) = jax.value_and_grad(loss_of, argnums=(0, 1))(
            outer, _get(carry["arrivals"], slot), k, own
        )
        return _put(carry["arrivals"], dy, slot), _add(carry["g_outer"], g), carry["loss"] + total

    def on_all_stages(row, which, fn, names, carry, *args):
        """Replaces `names` in `carry` if any device's task in this tick is `which`.

        Their new values are fn(carry, k, own, *args).
        """
        own, k = row[which], row[which.split("_")[0] + "_microbatch"]
        new = jax.named_scope(f"task_{which}")(
            lambda: fn(carry, jnp.sum(own * k), own[me] == 1, *args)
        )
        found = lax.cond(jnp.any(own == 1), new, lambda: tuple(carry[name] for name in names))
        return dict(carry, **dict(zip(names, found, strict=True)))

    def tick(carry, row):
        entry = {name: column[me] for name, column in row.items()}
        arrivals = carry["arrivals"]
        for way, result in carry["sent"].items():
            arrivals = _put(arrivals, result, entry[way])
        carry = on_all_stages(
            row, "forward_first", embed, ["arrivals"], dict(carry, arrivals=arrivals), entry
        )
        with_head = lambda carry: on_all_stages(
            row, "backward_last", head, ["arrivals", "g_outer", "loss"], carry, entry
        )
        if training and table.one_message:
            carry = with_head(carry)
        idle = lambda: (_zeros(x_type), carry["saved"])
        run = jax.named_scope("task_forward")(lambda: forward(entry, carry))
        y, saved = lax.cond(entry["forward"] == 1, run, idle)
        carry, dx = dict(carry, saved=saved), y
        if not training:
            add = lambda carry, k, own: (carry["loss"] + loss_of(outer, y, k, own),)
            carry = on_all_stages(row, "forward_last", add, ["loss"], carry)
        if training:
            carry["arrivals"] = _put(carry["arrivals"], y, entry["forward_output"])
            if not table.one_message:
                carry = with_head(carry)
            # If no device has two results in a tick, one message carries whichever it has.
            names = "g_stack", "kept", "loss", "metrics"
            idle = lambda: (
                y if table.one_message else _zeros(x_type),
                *(carry[name] for name in names),
            )
            run = jax.named_scope("task_backward")(lambda: backward(entry, carry))
            dx, *sums = lax.cond(entry["backward"] == 1, run, idle)
            carry = dict(carry, **dict(zip(names, sums, strict=True)))
        if table.halves:
            run = jax.named_scope("task_weights")(lambda: weights(entry, carry))
            carry["g_stack"] = lax.cond(entry["weights"] == 1, run, lambda: carry["g_stack"])
        # Work of all devices together comes before or after all slots, as far as possible: between
        # them, a stage without a forward would wait for the forwards of the others.
        if training:
            carry = on_all_stages(row, "backward_first", embed_backward, ["g_outer"], carry, dx)
        y = dx if table.one_message else y
        sent = {
            "from_left": lambda: _shift(y, p, +1),
            "from_right": lambda: _shift(dx, p, -1),
            "from_self": lambda: y,
        }
        return dict(carry, sent={way: sent[way]() for way in carry["sent"]}), None

    ways = [
        way
        for way in ("from_left", "from_right", "from_self")
        if (table.columns[way] < table.arrivals).any()
    ]
    carry = {
        "arrivals": _zeros(x_type, (table.arrivals + 1,)),
        "saved": _zeros(backward_of.saved_types, (table.residuals,)) if training else [],
        "sent": {way: _zeros(x_type) for way in ways},
        "loss": _apart(jnp.zeros(())),
    }
    if training:
        of_rows = lambda x: _apart(
            jnp.zeros((placement.v * placement.chunk_rows, *x.shape[1:]), x.dtype)
        )
        carry |= {
            "kept": _zeros(backward_of.kept_types, (table.kept,)),
            "g_outer": _accumulators(outer),
            "g_stack": _accumulators(w.layers),
            "metrics": jax.tree.map(of_rows, extras_type.metrics),
        }
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    _refuse_collectives(jax.make_jaxpr(tick)(carry, jax.tree.map(lambda x: x[0], columns)).jaxpr)
    carry, _ = lax.scan(tick, carry, columns)
    total = _of_stages("+p", marks.leave(carry["loss"], label, "+p"))
    if not training:
        return total, None, None
    metrics = LayerMetrics.of_rows(carry["metrics"], layer_ids, placement.rows.size)
    metrics = jax.tree.map(
        lambda x: _of_stages("N depth +p", marks.leave(x, label, "N depth +p")), metrics
    )
    g = dataclasses.replace(w, layers=carry["g_stack"], **carry["g_outer"])
    g = [marks.leave_like(x, f"{label} [{i}]") for i, x in enumerate(jax.tree.leaves(g))]
    return total, structure.unflatten(g), metrics


def run_in_order(loss: Any, w: Any, microbatches: Any, training: bool = True) -> tuple:
    """Computes the same as `run_schedule`, with the parts of the loss one after the other.

    This form is proved. Every device runs all layers of each microbatch, even on a mesh without p:
    those of the first stage, then the others, because what holds for two stages holds for more. The
    rows of a stack count as its layers in order: the schedule, and its placement of layers, are
    checked separately.
    """
    count, rows = (len(jax.tree.leaves(x)[0]) for x in (microbatches, w.layers))
    layers = rows * mesh_axes().get(PIPELINE_AXIS, 1)
    of_first = layers // planned_devices(PIPELINE_AXIS)

    def loss_of(w, microbatch):
        with pipeline_stage():
            x = jax.tree.map(_the_same, loss.first(w, *microbatch))
        found = []
        stacks = jax.tree.map(_of_all_stages, w.layers), marks.layer_numbers(layers)
        for stack, layer_ids in _in_two(stacks, of_first):
            x, aux = loss.layers(stack, x, layer_ids, *microbatch)
            found.append(aux)
        aux = jax.tree.map(lambda *parts: lax.concatenate(parts, 0), *found)
        with pipeline_stage():
            total = loss.last(w, jax.tree.map(_apart, x), *microbatch)
        extra = _loss_of_layers(aux, count) if training else None
        return total if extra is None else total + extra, aux.metrics

    if not training:
        add_loss = lambda total, microbatch: (total + loss_of(w, microbatch)[0], None)
        return (
            _of_stages("+p", _share(lax.scan(add_loss, jnp.zeros(()), microbatches)[0])),
            None,
            None,
        )

    def add(sums, group):
        microbatch = jax.tree.map(lambda x: x[0], group)
        (value, metrics), g = jax.value_and_grad(loss_of, has_aux=True)(w, microbatch)
        return jax.tree.map(jnp.add, sums, (value, g)), metrics

    groups = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[1:]), microbatches)
    (total, g), metrics = lax.scan(add, (jnp.zeros(()), _accumulators(w)), groups)
    metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
    metrics = LayerMetrics.of_rows(metrics, jnp.arange(layers), layers)
    metrics = jax.tree.map(lambda x: _of_stages("N depth +p", _share(x)), metrics)
    return _of_stages("+p", _share(total)), g, metrics


def _loss_of_layers(aux: Any, count: int) -> jax.Array | None:
    """What the layers add to the loss of one of `count` microbatches; None if they add nothing."""
    return None if aux.loss is None else jnp.sum(aux.loss) / count


def _of_stages(spec: str, x: jax.Array) -> Any:
    """Marks `x` as a partial sum over p, of type `spec`; returns `x` itself on a mesh without p."""
    return wrap(x, on_mesh(parse_shape(spec)), (), "the pipeline")


def _share(x: jax.Array) -> jax.Array:
    """Divides `x`, which all devices of p hold, into equal shares."""
    return _apart(x / lax.axis_size(PIPELINE_AXIS)) if PIPELINE_AXIS in mesh_axes() else x


def _the_same(x: jax.Array) -> jax.Array:
    """Tells JAX's types that `x` is the same on all devices of p."""
    is_varying = PIPELINE_AXIS in jax.typeof(x).manual_axis_type.varying
    return lax.psum(x, PIPELINE_AXIS) / lax.axis_size(PIPELINE_AXIS) if is_varying else x


def _of_all_stages(x: jax.Array) -> jax.Array:
    """Gathers the layers of all stages into one stack."""
    return (
        lax.all_gather(x, PIPELINE_AXIS, axis=0, tiled=True, to="invarying")
        if PIPELINE_AXIS in mesh_axes()
        else x
    )


def _in_two(tree: object, rows: int) -> list[Any]:
    """Splits each array into its first `rows` rows and the others."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [lax.split(x, (rows, len(x) - rows)) for x in leaves]
    return [structure.unflatten(part) for part in zip(*parts, strict=True)]


def _task(fn: Callable[..., Any]) -> Callable:
    def task(*args):
        with pipeline_stage(), Scope():
            return jax.tree.map(_apart, fn(*args))

    return task


def _apart(x: jax.Array) -> jax.Array:
    """Marks `x` as varying over p, if the mesh has it."""
    return varying(x, {PIPELINE_AXIS} & {*mesh_axes()})


def _refuse_collectives(jaxpr: object) -> None:
    """Raises ShardError for a collective over p in the task of a stage.

    A task is a conditional whose test varies over p.
    """
    choices = (eqn for eqn in equations_in(jaxpr) if eqn.primitive.name == "cond")
    tasks = (eqn for eqn in choices if PIPELINE_AXIS in eqn.invars[0].aval.manual_axis_type.varying)
    for equation in (
        inner
        for task in tasks
        for branch in task.params["branches"]
        for inner in equations_in(branch)
    ):
        name = equation.primitive.name
        if PIPELINE_AXIS in axes_of(equation) and name not in ("pvary", "axis_index"):
            raise ShardError(
                f"a pipeline stage runs {name} over {PIPELINE_AXIS}, which would wait forever: "
                "stages run different tasks at the same time",
                "do it in `embed` or `logits`, which the stages run together, or before or after "
                "the schedule; if it is the gradient of a value that is the same on all stages, "
                "make that value one of the weights, or put lax.stop_gradient around it",
                place=next(
                    (place(*call) for call in reversed(frames_of(equation)) if is_users(call[0])),
                    "",
                ),
            )


# Values of tasks, such as the residual stream, are arrays or pytrees of arrays.


def _shift(x: object, p: int, by: int) -> Any:
    return lax.ppermute(x, PIPELINE_AXIS, [(i, (i + by) % p) for i in range(p)])


def _zeros(like: object, leading: tuple[int, ...] = ()) -> Any:
    """Zeros like traced values, with extra leading dims `leading`.

    They vary also over p like all values of tasks.
    """
    return jax.tree.map(lambda x: _apart(zeros_like_traced(x, leading)), like)


def _accumulators(w: object) -> Any:
    """Zeros to accumulate the gradients of `w`."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w)


def _get(buffers: object, i: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), buffers)


def _put(buffers: object, values: object, i: jax.Array) -> Any:
    return jax.tree.map(
        lambda x, value: lax.dynamic_update_index_in_dim(x, value, i, 0), buffers, values
    )


def _where(own: jax.Array, x: object) -> Any:
    """`x` on devices where `own` is true, 0 on the others."""
    return jax.tree.map(lambda x: jnp.where(own, x, jnp.zeros_like(x)), x)


def _part(tree: object, i: jax.Array, rows: int) -> Any:
    """Rows [i·rows, (i+1)·rows) of each array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * rows, rows, 0), tree)


def _add(total: object, more: object) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, more)


def _add_part(total: object, more: object, i: jax.Array, rows: int) -> Any:
    added = _add(_part(total, i, rows), more)
    return jax.tree.map(
        lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * rows, 0), total, added
    )
