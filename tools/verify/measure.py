"""One training step of the program to verify on one mesh, with all tensors that are compared between meshes."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import train
from shardlib.array_types import ABSENT, arrays_of
from shardlib.layers import Extras, LayerNumbers
from shardlib.op_checks import varying
from shardlib.parsing import AXIS_ORDER, PIPELINE_AXIS
from shardlib.pipeline import StagedLoss
from shardlib.placement import LayerPlacement
from shardlib.shardtypes import make_partition_specs, make_shardings, u32
from shardlib.values import pipeline_stage
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import compute_scope, inputs_of, load_model
from shardwright.modeling.weights import are_stacks
from shardwright.run.config import Config
from shardwright.run.stages import has_stages, placement_of
from shardwright_data.loader import TokenBatch, batch_shapes, make_loader
from tools.verify.inputs import Inputs, random_batch, with_planted
from tools.verify.names import line_of_field, line_of_function, name_of_site
from tools.verify.record import Recorder, Site, recording, scan, summed_in_blocks

AXES = ("p", "r", "d", "t")
"""Axes of the mesh, major to minor."""
WITHIN_STAGES = AXES[1:]
"""Axes that shard activations."""
OfStep = tuple[train.Batch, u32["m B/r/d"] | None]
"""The batch of a step, and a random number for each of its sequences."""
Whole = tuple[TokenBatch, u32["B/r/d"] | None]
"""Likewise, with all sequences in one dim."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Key of a tensor that is compared: a saved activation, a loss, or a weight's gradient, update or moment."""

    kind: str
    """activation, loss, gradient, step (a metric), planted (which metrics are finite once a weight is not), update, or
    the name of one of the optimizer's moments."""
    name: str
    layers: tuple[int, ...] = ()
    file: str = ""
    line: int = 0


class NotTheSame(ValueError):
    """Devices that should hold the same value do not."""


def on_host(x: jax.Array) -> np.ndarray | NotTheSame:
    """Copies an array to the host. Returns NotTheSame if devices that should hold the same block do not."""
    blocks: dict[str, np.ndarray] = {}
    for shard in x.addressable_shards:
        block = np.asarray(shard.data)
        if blocks.setdefault(str(shard.index), block).tobytes() != block.tobytes():
            return NotTheSame("its copies on several devices are not the same")
    return np.asarray(x)


def mesh_name(mesh: Mapping[str, int]) -> str:
    """Returns `r=1 d=4 t=2`, with p if it is not 1."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items() if axis != "p" or size > 1)


@contextlib.contextmanager
def mesh_of(sizes: Mapping[str, int]) -> Iterator[jax.sharding.Mesh]:
    """Enters a mesh of these sizes on the first devices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(*(sizes[axis] for axis in WITHIN_STAGES), devices, sizes["p"])
    with jax.set_mesh(mesh):
        yield mesh


@contextlib.contextmanager
def abstract_mesh_of(sizes: Mapping[str, int]) -> Iterator[None]:
    """Enters the mesh that `mesh_of` makes, without devices."""
    sizes = {axis: size for axis, size in sizes.items() if axis != PIPELINE_AXIS or size > 1}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def fresh_state(c: Config) -> Any:
    """The state that a run starts from, initialized on the current mesh, by `on_host`, in the order of the layers."""
    state = jax.jit(functools.partial(train.init_state, c=c, model=load_model(c.model)))(
        jax.random.key(c.training.seed)
    )
    state = jax.tree.map(on_host, state)
    return in_order(c, state, state.weights)


def loaded_batch(c: Config, step: int) -> TokenBatch:
    """Loads the batch of `step` on the current mesh from the data of `c`. Raises ValueError if there is none."""
    if c.data.stream is not None:
        raise ValueError("a stream would have to be read from its start")
    t = c.training
    sizes = {"batch_size": t.batch_size, "seq_len": t.seq_len, "microbatches": t.microbatches}
    loader = make_loader(c.data, "train", **sizes, vocab_size=c.model.vocab, inputs=inputs_of(load_model(c.model)))
    return jax.tree.map(on_host, loader.load(step))


def whole(batch: Any) -> Any:
    """Host arrays [m, B, …], each as [m·B, …]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def type_check(c: Config, sizes: Mapping[str, int]) -> None:
    """Traces the training step on a mesh of these sizes, without devices. Raises ValueError if it is refused."""
    t, model = c.training, load_model(c.model)
    with abstract_mesh_of(sizes):
        state = jax.eval_shape(lambda: train.init_state(jax.random.key(t.seed), c, model))
        step = jax.ShapeDtypeStruct((), np.int32)
        batch = batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(inputs_of(model)))
        after, _ = jax.eval_shape(train.make_training_step(c, model), state, batch, step)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    if kinds(after) != kinds(state):
        raise ValueError("the training step returns a state of other shapes or dtypes than its argument has.")


# ---- the order of layers ------------------------------------------------------------------------------------------


def in_order(c: Config, tree: Any, weights: Any) -> Any:
    """Puts the stacks of `tree`, host arrays at rest on the current mesh, in the order of the layers.

    A stack whose padding is not 0 becomes NotTheSame. `weights` are at rest too.
    """
    order = placement_of(c, load_model(c.model)).order

    def reordered(x):
        if isinstance(x, NotTheSame):
            return x
        if np.any(x[order.padding]):
            return NotTheSame("the rows that only make stages the same size are not 0")
        return order.to_layers(x)

    return tree if order is None else _map_stacks(reordered, tree, weights)


def at_rest(c: Config, tree: Any, weights: Any) -> Any:
    """Reverses `in_order`: `tree` and `weights` are in the order of the layers."""
    order = placement_of(c, load_model(c.model)).order
    return tree if order is None else _map_stacks(order.to_rows, tree, weights)


def _map_stacks(fn: Any, tree: Any, weights: Any) -> Any:
    """Maps `fn` over the stacks of layers in `tree`, which is like `weights`, or a State of such trees."""
    if not isinstance(tree, type(weights)):
        parts = {f.name: _map_stacks(fn, getattr(tree, f.name), weights) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **parts)
    return jax.tree.map(lambda stack, x: fn(x) if stack and x is not None else x, are_stacks(weights), tree)


# ---- forward pass and gradients -----------------------------------------------------------------------------------


KEEP = (
    "tools.verify calls it to look into the step. Keep its name, arguments and results, or adapt Probe in " + __name__
)


def of_train(name: str, *args: Any, **options: Any) -> Any:
    """`train.<name>(*args, **options)`. Raises ValueError if train.py has none, or one of other arguments."""
    function = getattr(train, name, None)
    if function is None:
        raise ValueError(f"train.py has no {name}: {KEEP}")
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        raise ValueError(f"train.{name}: {error}: {KEEP}") from None
    return function(*args, **options)


class Probe:
    """The forward pass and the gradients on the current mesh, with the values that are saved for the backward pass."""

    def __init__(self, c: Config):
        self._config, self.model = c, load_model(c.model)
        self.sites: list[Site] = []
        self.varying: list[frozenset[str]] = []
        """Axes over which each saved value varies, according to JAX."""
        self.holders: list[int] = []
        """On a mesh with p: the device of p that holds each saved value."""

    def forward_and_gradients(self, weights: Any, whole: Whole, of_step: OfStep) -> tuple[list, Any, Any, Any]:
        """Returns the saved values, the summed loss, the mean loss and the gradients. Under jit.

        The first two are computed for all sequences at once, the last two by microbatches.

        A saved value is that of all devices, [p, r, d, t, *block]; on a mesh without p, [r, d, t, *block].
        """
        c = self._config
        # Only marked values, and a plain loop, can be recorded.
        training = dataclasses.replace(c.training, save="marked", unroll=1)
        forward = of_train("Forward", self.model, training)
        # A value that is recorded inside jax.checkpoint could not leave it.
        plain = of_train("Forward", self.model, dataclasses.replace(training, save=None, loss_chunk=None), scan)

        def per_device(weights, whole, of_step):
            recorder = Recorder()
            with recording(recorder):
                copies = plain.copies(weights)
                parts = of_train("MicrobatchLoss", plain, functools.partial(of_train, "training_loss", c=c.optimizer))
                if has_stages():
                    placement = placement_of(c, self.model)
                    total, self.holders = stage_by_stage(placement, parts, recorder, copies, *whole)
                else:
                    total, extras = parts(copies, *whole)
                    total += added_loss(extras)
            self.sites = recorder.sites
            self.varying = [jax.typeof(x).manual_axis_type.varying for x in recorder.values]
            batch, seeds = of_step
            loss, gradients, *_ = of_train("loss_and_gradients", weights, batch, c, forward, seeds)
            if jax.tree.structure(gradients) != jax.tree.structure(weights):
                raise ValueError(f"train.loss_and_gradients must give (loss, gradients, …): {KEEP}")
            return [_own_block(x) for x in recorder.values], total, loss, gradients

        specs = make_partition_specs(type(weights), like=weights)
        in_specs = specs, make_partition_specs(Whole), make_partition_specs(OfStep)
        with compute_scope(c.training.compute_dtype):
            out_specs = P(*jax.sharding.get_abstract_mesh().axis_names), P(), P(), specs
            run = jax.shard_map(per_device, in_specs=in_specs, out_specs=out_specs)
            return run(weights, whole, of_step)


def stage_by_stage(
    placement: LayerPlacement, parts: StagedLoss, recorder: Recorder, w: Any, *batch: Any
) -> tuple[jax.Array, list[int]]:
    """Runs the stages one after the other on the whole batch, without a schedule: nothing in its loop can be recorded.

    Each stage runs on all devices of p. Only the result of the device that has its layers counts, and is sent to all.
    Returns the loss, and for each saved value the device whose value counts.
    """
    me, holders = lax.axis_index(PIPELINE_AXIS), []
    batch = varying(batch, (PIPELINE_AXIS,))

    def run(fn, device, *args, alone=True):
        with pipeline_stage(alone):
            y = fn(*args, *batch)
        holders.extend([device] * (len(recorder.values) - len(holders)))
        of_device = lambda y: jnp.where(me == device, y, jnp.zeros_like(y))
        return jax.tree.map(lambda y: lax.psum(of_device(varying(y, (PIPELINE_AXIS,))), PIPELINE_AXIS), y)

    x, first, added = run(parts.first, placement.place_of(0)[0], w, alone=False), 0, 0.0
    for stage, count in enumerate(placement.counts):
        device, chunk = placement.place_of(stage)
        begin, seen = chunk * placement.chunk_rows, len(recorder.sites)
        own = jax.tree.map(lambda x, chunk=slice(begin, begin + count): x[chunk], w.layers)
        numbers = varying(jnp.arange(first, first + count, dtype=jnp.int32), (PIPELINE_AXIS,))
        x, extras = run(parts.layers, device, own, varying(x, (PIPELINE_AXIS,)), LayerNumbers(numbers))
        added += added_loss(extras)
        for i, site in enumerate(recorder.sites[seen:], seen):
            turn, *inner = site.layers
            recorder.sites[i] = dataclasses.replace(site, layers=(first + turn, *inner))
        first += count
    total = run(parts.last, device, w, varying(x, (PIPELINE_AXIS,)), alone=False)
    return total + added, holders


def added_loss(extras: Extras) -> Any:
    """The sum of what the layers add to the loss."""
    return 0.0 if extras.loss is None else jnp.sum(extras.loss)


def _own_block(x: jax.Array) -> jax.Array:
    axes = jax.sharding.get_abstract_mesh().axis_names
    return varying(x, axes)[(None,) * len(axes)]


def layouts(c: Config, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """For each saved value, the dim that each axis shards: the one that shrinks where only that axis has devices.

    `sizes`: devices along each axis, which divide the model's sizes. An axis of 1 shards nothing.
    """
    none = dict.fromkeys(WITHIN_STAGES, 1)
    whole = _block_shapes(c, none)
    found: list[dict[str, int]] = [{} for _ in whole]
    for axis, size in sizes.items():
        if size > 1 and axis in WITHIN_STAGES:
            for layout, before, after in zip(found, whole, _block_shapes(c, none | {axis: size}), strict=True):
                cut = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
                if len(cut) == 1:
                    layout[axis] = cut[0]
    return found


def _block_shapes(c: Config, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    with abstract_mesh_of(sizes):
        model = load_model(c.model)
        weights = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model)).weights
        batch = random_batch(c)
        seeds = np.zeros(batch.targets.shape[:2], np.uint32) if getattr(c.model, "dropout", 0) else None
        shaped = lambda tree, kind: jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, make_shardings(kind, like=tree)
        )
        probe, of_step = jax.jit(Probe(c).forward_and_gradients), (batch, seeds)
        arguments = shaped(weights, type(weights)), shaped(whole(of_step), Whole), shaped(of_step, OfStep)
        blocks, *_ = jax.eval_shape(probe, *arguments)
    return [block.shape[len(sizes) :] for block in blocks]


def whole_array(blocks: np.ndarray, layout: Mapping[str, int], varying: frozenset[str]) -> np.ndarray:
    """Assembles the array of which the devices hold `blocks`[r, d, t, *block].

    Along an axis that shards no dim, all devices hold the same, or, if JAX knows that they vary, parts of a sum.
    Raises NotTheSame if they vary and JAX does not know it.
    """
    axes, summed = list(WITHIN_STAGES), blocks
    for axis in WITHIN_STAGES:
        if axis not in layout:
            at = axes.index(axis)
            first = np.take(summed, [0], at)
            if np.array_equal(np.broadcast_to(first, summed.shape), summed, equal_nan=summed.dtype.kind == "f"):
                summed = np.take(summed, 0, at)
            elif axis in varying:
                summed = np.sum(summed, at)
            else:
                raise NotTheSame(f"it should be the same on every device of {axis}, and is not")
            axes.remove(axis)
    # Each axis moves before its dim, in the order of AXIS_ORDER, and is merged with it.
    for axis in sorted(axes, key=AXIS_ORDER.index, reverse=True):
        at, dim = axes.index(axis), layout[axis]
        axes.remove(axis)
        place = len(axes) + dim
        summed = np.moveaxis(summed, at, place)
        shape = summed.shape
        summed = summed.reshape(*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])
    return summed


# ---- all of a step ------------------------------------------------------------------------------------------------


def placed(tree: Any, kind: Any) -> Any:
    """`tree`, of the type `kind`, on the current mesh."""
    return jax.device_put(tree, make_shardings(kind, like=tree))


def placed_state(c: Config, inputs: Inputs) -> Any:
    """The state of `inputs` on the current mesh."""
    old = inputs.state.weights
    return placed(at_rest(c, inputs.state, old), train.State[type(old)])


def measure(
    c: Config, inputs: Inputs, layout: list[dict[str, int]] | None = None, blocks: Mapping[str, int] | None = None
) -> tuple[dict[Tensor, np.ndarray | NotTheSame], set[str]]:
    """Runs one step on the current mesh. Returns its tensors, in the program's order, and the program's float dtypes.

    `layout`: from `layouts`; None on one device. `blocks`: as for `summed_in_blocks`.
    """
    old, of_step = inputs.state.weights, (inputs.batch, inputs.seeds)
    state = placed_state(c, inputs)
    arguments = state.weights, placed(whole(of_step), Whole), placed(of_step, OfStep)
    batch, probe = arguments[2][0], Probe(c)
    with summed_in_blocks(**(blocks or {})):
        forward = jax.jit(probe.forward_and_gradients).trace(*arguments)
        saved, total, loss, gradients = forward.lower().compile()(*arguments)
        step = train.make_training_step(c, probe.model).trace(state, batch, np.int32(inputs.step))
        compiled = step.lower().compile()
        new, metrics = compiled(state, batch, np.int32(inputs.step))

    found: dict[Tensor, np.ndarray | NotTheSame] = {}
    for i, (site, value) in enumerate(zip(probe.sites, saved, strict=True)):
        name = name_of_site(site)
        tensor = Tensor("activation", name, site.layers, site.file, site.line)
        for again in itertools.count(2):  # several values may be saved on one line
            if tensor not in found:
                break
            tensor = dataclasses.replace(tensor, name=f"{name} {again}")
        blocks_of = np.asarray(value)[probe.holders[i]] if probe.holders else np.asarray(value)
        try:
            found[tensor] = whole_array(blocks_of, layout[i] if layout else {}, probe.varying[i])
        except NotTheSame as error:
            found[tensor] = error
    found[Tensor("loss", "summed loss", (), *line_of_function(train.MicrobatchLoss.last))] = on_host(total)
    found[Tensor("loss", "mean loss", (), *line_of_function(train.loss_and_gradients))] = on_host(loss)
    # The backward pass computes the gradients of the last weights first.
    gradients = in_order(c, jax.tree.map(on_host, gradients), state.weights)
    found |= dict(reversed(by_layer("gradient", gradients, old)))
    of_layers = metrics.layers.by_name() if metrics.layers else {}
    for name, value in {**vars(metrics), **of_layers}.items():
        if isinstance(value, jax.Array):
            found[Tensor("step", name, (), *line_of_function(train.make_training_step))] = on_host(value)
    for name, planted in with_planted(inputs, c.model.vocab):
        batch = placed(planted.batch, train.Batch)
        _, seen = compiled(placed_state(c, planted), batch, np.int32(inputs.step))
        values = [np.asarray(value) for value in vars(seen).values() if isinstance(value, jax.Array)]
        flags = np.array([x if x.dtype == np.bool_ else np.isfinite(x) for x in values], np.float32)
        found[Tensor("planted", name, (), *line_of_function(train.make_training_step))] = flags
    new = in_order(c, jax.tree.map(on_host, new), new.weights)
    minus = lambda after, before: after if isinstance(after, NotTheSame) else after - before
    change = jax.tree.map(minus, new.weights, old)
    found |= dict(by_layer("update", change, old))
    for part in (field.name for field in dataclasses.fields(new) if field.name != "weights"):
        found |= dict(by_layer(part, getattr(new, part), old))
    dtypes = {dtype for traced in (forward, step) for dtype in re.findall(r"\b(b?f\d+)\[", str(traced.jaxpr))}
    return found, dtypes


def by_layer(kind: str, tree: Any, weights: Any) -> list[tuple[Tensor, np.ndarray]]:
    """The arrays of `tree`, which is like `weights`, in the order of the forward pass; of stacks, each layer's."""
    whole = [
        (path, array, part)
        for path, array, part in arrays_of(type(weights), tree)
        if part is not ABSENT and part is not None
    ]
    found = []
    for stacked, group in itertools.groupby(whole, lambda entry: entry[1].spec.names[:1] == ("layers",)):
        entries = list(group)
        field_of = lambda path: functools.reduce(getattr, path.split("."), weights)
        for i in range(len(field_of(entries[0][0])) if stacked else 1):
            for path, _, value in entries:
                tensor = Tensor(kind, path, (i,) if stacked else (), *line_of_field(weights, path))
                found.append((tensor, value[i] if stacked and not isinstance(value, NotTheSame) else value))
    return found
