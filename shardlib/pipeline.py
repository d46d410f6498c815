"""Executor of any schedule of schedules.py.

It runs the microbatches of a step through the stages of axis p. Every device runs the same program,
a scan over the ticks of the schedule. In each tick it runs what its column of the table names: a
forward, a backward or its input half, and a weights half, each if there is one. Then it sends
results to its neighbors on p. Before the forwards of the first stage all devices of p embed its
microbatch together, and before the backwards of the last stage they compute the loss together, each
for its part of the vocabulary. Values that wait for their task are in buffers with as many slots as
the schedule needs, so memory grows with the number of microbatches only if the schedule's does.

Within a task every value may differ over p (`pipeline_stage`), and a collective over p in the task
of a stage would wait forever. Such collectives are rejected once a tick is traced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.axes import PIPELINE_AXIS
from shardlib.equations import axes_of, frames_of
from shardlib.interpret import equations_in
from shardlib.mesh import mesh_axes, on_mesh, pipeline_stage, stage_axes
from shardlib.op_checks import one_like, varying, wrap, zeros_like_traced
from shardlib.parsing import ShardError, parse_shape
from shardlib.placement import LayerPlacement
from shardlib.places import is_users, place
from shardlib.scopes import Scope
from shardlib.split_backward import SplitBackward
from shardlib.tick_tables import WAYS, TickTable

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
            program, results = jax.make_jaxpr(self.run_whole, return_shape=True)(
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

    def run_whole(self, stack: object, saved: list[jax.Array], dy: object) -> tuple[Any, Any]:
        """Computes the gradients of the input and of the weights."""
        weights = jax.tree.leaves(stack)
        others = iter(saved[self._results.num_leaves :])
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
        metrics of the layers in this device's rows, [m layers/p …].
    """
    count = len(jax.tree.leaves(microbatches)[0])
    if count != (wanted := 1 + int(table.columns["forward_microbatch"].max())):
        problem = f"the batch has {count} microbatches, but the schedule is for {wanted}"
        raise ShardError(problem, "give both the same number: training.microbatches")
    executor = _Executor(loss, placement, table, w, microbatches)
    carry = executor.start()
    columns = {name: jnp.asarray(column) for name, column in table.columns.items()}
    first_row = jax.tree.map(lambda x: x[0], columns)
    _refuse_collectives(jax.make_jaxpr(executor.tick)(carry, first_row).jaxpr)
    carry, _ = lax.scan(executor.tick, carry, columns)
    return executor.results(carry)


def _task(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Traces a function as the task of a stage: all that it returns varies over p."""

    @functools.wraps(fn)
    def task(*args):
        with pipeline_stage(), Scope():
            return jax.tree.map(_apart, fn(*args))

    return task


Carry = dict[str, Any]
"""What the scan over ticks carries.

    arrivals: what other stages sent, and what waits for the last stage, in slots.
    saved: what forwards keep for backwards, in slots.
    kept: what input halves keep for weights halves, in slots.
    sent: the results of the tick before, by the way they go.
    loss: the sum over the tasks so far.
    metrics: of the tasks so far, by microbatch and row.
    g_outer, g_stack: sums of gradients, of the weights outside of the layers and of the layers.
"""
Entry = dict[str, jax.Array]
"""A row of the tick table, for all devices or for this one."""


class _Executor:
    """Runs the ticks of a schedule on each device.

    `stack` is the layers of chunk i, and k the index of a microbatch.

    Args:
        loss, placement, table, w, microbatches: as of `run_schedule`.
    """

    def __init__(
        self, loss: Any, placement: LayerPlacement, table: TickTable, w: Any, microbatches: Any
    ):
        self._loss, self._placement, self._table = loss, placement, table
        self._w, self._microbatches = w, microbatches
        self._count = len(jax.tree.leaves(microbatches)[0])
        self._training = bool(table.columns["backward"].any())
        self._device = lax.axis_index(PIPELINE_AXIS)
        self._layer_ids = jnp.asarray(placement.rows)[self._device]
        names = [f.name for f in dataclasses.fields(w) if f.name != "layers"]
        self._outer = {name: getattr(w, name) for name in names}
        zero = jnp.int32(0)
        self._x_type = jax.eval_shape(self._first, self._outer, zero)
        _check_floats(self._x_type)
        y_type, aux_type = jax.eval_shape(
            self._layers, self._chunk(w.layers, zero), self._x_type, zero, zero
        )
        self._metrics_type = aux_type.metrics
        self._stage_backward: StageBackward | Any = None
        if self._training:
            self._stage_backward = StageBackward(
                self._stage, self._chunk(w.layers, zero), self._x_type, y_type, table.halves
            )

    # -- parts of the loss

    def _batch(self, k: jax.Array) -> Any:
        return _get(self._microbatches, k)

    def _own_batch(self, k: jax.Array) -> Any:
        return jax.tree.map(_apart, self._batch(k))

    def _chunk(self, tree: object, i: jax.Array) -> Any:
        """The rows of chunk i in the arrays of this device."""
        return _part(tree, i, self._placement.chunk_rows) if self._placement.v > 1 else tree

    def _with_outer(self, outer: dict) -> Any:
        return dataclasses.replace(self._w, **outer)

    @_task
    def _first(self, outer: dict, k: jax.Array) -> Any:
        return self._loss.first(self._with_outer(outer), *self._batch(k))

    @_task
    def _layers(self, stack: object, x: Any, i: jax.Array, k: jax.Array) -> Any:
        return self._loss.layers(stack, x, self._chunk(self._layer_ids, i), *self._own_batch(k))

    @_task
    def _last(self, outer: dict, x: Any, k: jax.Array) -> Any:
        return self._loss.last(self._with_outer(outer), _apart(x), *self._batch(k))

    def _stage(self, stack: object, x: Any, i: jax.Array, k: jax.Array) -> tuple:
        """What `StageBackward` differentiates."""
        y, aux = self._layers(stack, x, i, k)
        return (y, aux.total(self._count)), aux.metrics

    # -- tasks of this device alone

    def _forward(self, entry: Entry, carry: Carry) -> tuple:
        """Runs a stage. Returns its output, and `saved` with what its backward needs."""
        x = _get(carry["arrivals"], entry["forward_input"])
        i, k = entry["forward_chunk"], entry["forward_microbatch"]
        stack = self._chunk(self._w.layers, i)
        if not self._training:
            return self._layers(stack, x, i, k)[0], []
        y, keep = self._stage_backward.forward(stack, x, i, k)
        return y, _put(carry["saved"], keep, entry["forward_residuals"])

    def _backward(self, entry: Entry, carry: Carry) -> tuple:
        """Runs the backward of a stage, or its input half.

        Returns the gradient of its input, and what `carry` then has of `_BACKWARD_SUMS`.
        """
        i, k = entry["backward_chunk"], entry["backward_microbatch"]
        stack = self._chunk(self._w.layers, i)
        saved = _get(carry["saved"], entry["backward_residuals"])
        extra, metrics = self._stage_backward.results(saved)
        dy = _get(carry["arrivals"], entry["backward_cotangent"])
        g_stack, kept, total = carry["g_stack"], carry["kept"], carry["loss"]
        if self._table.halves:
            dx, keep = self._stage_backward.input(stack, saved, dy)
            kept = _put(kept, keep, entry["backward_kept"])
        else:
            dx, g = self._stage_backward.run_whole(stack, saved, dy)
            g_stack = self._add_to_chunk(g_stack, g, i)
        total = total if extra is None else total + extra
        chunk = k * self._placement.v + i * (self._placement.v > 1)
        metrics = _add_part(carry["metrics"], metrics, chunk, self._placement.chunk_rows)
        return dx, g_stack, kept, total, metrics

    def _weights(self, entry: Entry, carry: Carry) -> Any:
        """Runs the weights half of a backward. Returns `g_stack` with its gradients added."""
        i = entry["weights_chunk"]
        saved = _get(carry["saved"], entry["weights_residuals"])
        kept = _get(carry["kept"], entry["weights_kept"])
        g = self._stage_backward.weights(self._chunk(self._w.layers, i), saved, kept)
        return self._add_to_chunk(carry["g_stack"], g, i)

    def _add_to_chunk(self, total: object, g: object, i: jax.Array) -> Any:
        if self._placement.v == 1:
            return _add(total, g)
        return _add_part(total, g, i, self._placement.chunk_rows)

    # -- tasks of all devices together, on the microbatch k of the one where `own` is true

    def _embed(self, carry: Carry, k: jax.Array, own: jax.Array, entry: Entry) -> tuple:
        slot = jnp.where(own, entry["forward_input"], self._table.arrivals)
        return (_put(carry["arrivals"], self._first(self._outer, k), slot),)

    def _embed_backward(self, carry: Carry, k: jax.Array, own: jax.Array, dx: object) -> tuple:
        _, pull_back = jax.vjp(lambda outer: self._first(outer, k), self._outer)
        (g,) = pull_back(_where(own, dx))
        return (_add(carry["g_outer"], g),)

    def _loss_of(self, outer: dict, y: object, k: jax.Array, own: jax.Array) -> Any:
        y = lax.psum(_where(own, y), PIPELINE_AXIS)
        return _where(own, self._last(outer, y, k))

    def _head(self, carry: Carry, k: jax.Array, own: jax.Array, entry: Entry) -> tuple:
        """Computes the loss, and replaces the output of the last stage by its gradient."""
        slot = jnp.where(own, entry["backward_cotangent"], self._table.arrivals)
        y = _get(carry["arrivals"], slot)
        with_gradients = jax.value_and_grad(self._loss_of, argnums=(0, 1))
        total, (g, dy) = with_gradients(self._outer, y, k, own)
        arrivals = _put(carry["arrivals"], dy, slot)
        return arrivals, _add(carry["g_outer"], g), carry["loss"] + total

    def _add_loss(self, carry: Carry, k: jax.Array, own: jax.Array, y: object) -> tuple:
        return (carry["loss"] + self._loss_of(self._outer, y, k, own),)

    def _on_all_stages(
        self,
        row: Entry,
        which: str,
        fn: Callable[..., tuple],
        names: list[str],
        carry: Carry,
        *args: Any,
    ) -> Carry:
        """Replaces `names` in `carry` if any device's task in this tick is `which`.

        Their new values are fn(carry, k, own, *args).
        """
        own = row[which]
        k = row[which.split("_")[0] + "_microbatch"]
        new = jax.named_scope(f"task_{which}")(
            lambda: fn(carry, jnp.sum(own * k), own[self._device] == 1, *args)
        )
        found = lax.cond(jnp.any(own == 1), new, lambda: tuple(carry[name] for name in names))
        return dict(carry, **dict(zip(names, found, strict=True)))

    # -- a tick

    def tick(self, carry: Carry, row: Entry) -> tuple[Carry, None]:
        """Runs one row of the table, as the body of a scan.

        Work of all devices together comes before or after all slots, as far as possible: between
        them, a stage without a forward would wait for the forwards of the others.
        """
        entry = {name: column[self._device] for name, column in row.items()}
        one_message = self._table.one_message
        carry = self._receive(entry, carry)
        carry = self._on_all_stages(row, "forward_first", self._embed, ["arrivals"], carry, entry)
        if self._training and one_message:
            carry = self._run_head(row, entry, carry)
        y, carry = self._run_forward(entry, carry)
        dx = y
        if self._training:
            carry = dict(carry, arrivals=_put(carry["arrivals"], y, entry["forward_output"]))
            if not one_message:
                carry = self._run_head(row, entry, carry)
            dx, carry = self._run_backward(entry, carry, y)
        else:
            carry = self._on_all_stages(row, "forward_last", self._add_loss, ["loss"], carry, y)
        if self._table.halves:
            carry = self._run_weights(entry, carry)
        if self._training:
            carry = self._on_all_stages(
                row, "backward_first", self._embed_backward, ["g_outer"], carry, dx
            )
        return self._send(carry, dx if one_message else y, dx), None

    def _receive(self, entry: Entry, carry: Carry) -> Carry:
        arrivals = carry["arrivals"]
        for way, result in carry["sent"].items():
            arrivals = _put(arrivals, result, entry[way])
        return dict(carry, arrivals=arrivals)

    def _run_head(self, row: Entry, entry: Entry, carry: Carry) -> Carry:
        names = ["arrivals", "g_outer", "loss"]
        return self._on_all_stages(row, "backward_last", self._head, names, carry, entry)

    def _run_forward(self, entry: Entry, carry: Carry) -> tuple[Any, Carry]:
        """Runs the forward slot, if it has a task. Returns the stage's output, or zeros."""
        run = jax.named_scope("task_forward")(lambda: self._forward(entry, carry))

        def skip():
            return _zeros(self._x_type), carry["saved"]

        y, saved = lax.cond(entry["forward"] == 1, run, skip)
        return y, dict(carry, saved=saved)

    def _run_backward(self, entry: Entry, carry: Carry, y: object) -> tuple[Any, Carry]:
        """Runs the backward slot, if it has a task. Returns the gradient of the stage's input.

        If no device has two results in a tick, one message carries whichever it has: without a task
        the result is then that of the forward slot, `y`, otherwise zeros.
        """

        def skip():
            dx = y if self._table.one_message else _zeros(self._x_type)
            return dx, *(carry[name] for name in _BACKWARD_SUMS)

        run = jax.named_scope("task_backward")(lambda: self._backward(entry, carry))
        dx, *sums = lax.cond(entry["backward"] == 1, run, skip)
        return dx, dict(carry, **dict(zip(_BACKWARD_SUMS, sums, strict=True)))

    def _run_weights(self, entry: Entry, carry: Carry) -> Carry:
        """Runs the weights slot, if it has a task."""
        run = jax.named_scope("task_weights")(lambda: self._weights(entry, carry))
        g_stack = lax.cond(entry["weights"] == 1, run, lambda: carry["g_stack"])
        return dict(carry, g_stack=g_stack)

    def _send(self, carry: Carry, y: object, dx: object) -> Carry:
        """Sends `y` to the right and `dx` to the left, along the ways that the table uses."""
        p = self._placement.p
        sent = {}
        for way in carry["sent"]:
            if way == "from_left":
                sent[way] = _shift(y, p, +1)
            elif way == "from_right":
                sent[way] = _shift(dx, p, -1)
            else:
                sent[way] = y
        return dict(carry, sent=sent)

    # -- before the first tick, and after the last

    def start(self) -> Carry:
        """What the first tick carries: empty buffers, and sums of nothing."""
        table = self._table
        ways = [way for way in WAYS.values() if (table.columns[way] < table.arrivals).any()]
        saved_types = self._stage_backward.saved_types if self._training else []
        carry = {
            "arrivals": _zeros(self._x_type, (table.arrivals + 1,)),
            "saved": _zeros(saved_types, (table.residuals,)) if self._training else [],
            "sent": {way: _zeros(self._x_type) for way in ways},
            "loss": _apart(jnp.zeros(())),
        }
        if not self._training:
            return carry
        return carry | {
            "kept": _zeros(self._stage_backward.kept_types, (table.kept,)),
            "g_outer": _accumulators(self._outer),
            "g_stack": _accumulators(self._w.layers),
            "metrics": jax.tree.map(self._zeros_of_rows, self._metrics_type),
        }

    def _zeros_of_rows(self, x: Any) -> jax.Array:
        """Zeros for all microbatches' rows of all chunks, where `x` has those of one."""
        rows = self._count * self._placement.rows.shape[1]
        return _apart(jnp.zeros((rows, *x.shape[1:]), x.dtype))

    def results(self, carry: Carry) -> tuple:
        """The results of `run_schedule`, from what the last tick carries."""
        total = _of_stages("+p", carry["loss"])
        if not self._training:
            return total, None, None
        rows = self._count, self._placement.rows.shape[1]
        metrics = jax.tree.map(lambda x: x.reshape(*rows, *x.shape[1:]), carry["metrics"])
        g = dataclasses.replace(self._w, layers=carry["g_stack"], **carry["g_outer"])
        return total, g, metrics


_BACKWARD_SUMS = ("g_stack", "kept", "loss", "metrics")
"""The names in `Carry` of what a backward changes."""


def _check_floats(x_type: object) -> None:
    """Raises ShardError if the residual stream has an array of another kind."""
    dtypes = [x.dtype for x in jax.tree.leaves(x_type)]
    if others := [dtype for dtype in dtypes if not jnp.issubdtype(dtype, jnp.inexact)]:
        raise ShardError(
            f"the residual stream has an array of {others[0]}",
            "stages pass on floats, which have gradients: use .astype(act.dtype) in `embed`",
        )


def _of_stages(spec: str, x: jax.Array) -> Any:
    """Marks `x` as a partial sum over p, of type `spec`; returns `x` itself on a mesh without p."""
    return wrap(x, on_mesh(parse_shape(spec)), (), "the pipeline")


def _apart(x: jax.Array) -> jax.Array:
    """Marks `x` as varying over p, if the mesh has it."""
    return varying(x, {PIPELINE_AXIS} & {*mesh_axes()} | {*stage_axes()})


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
