"""Traces a training step on a mesh, and computes the trace in f64."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.axes import axes_of_mesh
from shardlib.shardtypes import make_shardings
from shardwright.inspect.fresh import reimport
from shardwright.inspect.statistics.points import gradient_paths
from shardwright.inspect.statistics.rerun import Rerun
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import are_stacks, stacks_of
from shardwright.run.config import Config
from shardwright.run.reference import weights_of
from shardwright.run.stages import placement_of
from shardwright.run.step import Step, clock_of, open_steps, trace_step
from shardwright.tools.verify.inputs import Inputs, with_planted
from shardwright.tools.verify.meshes import Mesh, mesh_of

Found = dict[str, np.ndarray]
"""Host arrays to compare, by kind and name: `metric loss`, `gradient layers.w_q, layer 0`.

Kinds, in order: initial, metric, gradient, planted (which metrics are finite although a weight isn't), the weight after
the step, and the names of the optimizer's moments. An array is NaN if devices disagree on a replicated value.
"""


def assemble(blocks: list[tuple[Any, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """Assembles an array from the blocks of all devices, each with its index; NaN if copies of a block differ."""
    found = np.empty(shape, blocks[0][1].dtype)
    seen = {}
    for index, block in blocks:
        if seen.setdefault(str(index), block).tobytes() != block.tobytes():
            return np.full(shape, np.nan)
        found[index] = block.reshape(found[index].shape)
    return found


def on_host(x: jax.Array) -> np.ndarray:
    """Returns `assemble` of an array."""
    return assemble([(shard.index, np.asarray(shard.data)) for shard in x.addressable_shards], x.shape)


@contextlib.contextmanager
def step_on(c: Config, sizes: Mesh, planned: Mesh | None = None) -> Iterator[Step]:
    """Enters a mesh of these sizes and yields the training step on it, with the axes and kernels of a mesh `planned`.

    It imports train.py and the model again, so nothing traced on another mesh is reused.
    """
    with mesh_of(sizes, axes_of_mesh(planned or sizes)), reimport(trace_step(c, load_model(c.model))) as step:
        yield step.other(planned=planned or sizes)


def fresh_state(step: Step) -> Any:
    """Returns the initial state of a run on the current mesh, as host arrays, with layers in order."""
    init = jax.jit(lambda key: step.spec.init_state(key, step.config, step.model))
    return in_order(step.config, jax.tree.map(on_host, init(jax.random.key(step.config.training.seed))))


def type_check(c: Config, sizes: Mesh) -> None:
    """Traces the steps on a mesh of these sizes, without devices. Raises ValueError if they are rejected."""
    (step, *_) = open_steps(c, sizes)
    for name in ("training", "evaluation"):
        assert step.other(name=name).traced


# ---- the order of layers ------------------------------------------------------------------------------------------


def in_order(c: Config, tree: object, back: bool = False) -> Any:
    """Reorders the stacks of `tree` (weights or a State at rest on the current mesh) by layer; or back.

    They are host arrays.
    """
    order = placement_of(c, load_model(c.model)).order
    if order is None:
        return tree
    rows = order if back else np.argsort(order)
    return jax.tree.map(lambda stack, x: x[rows] if stack else x, are_stacks(tree), tree)


def by_layer(kind: str, weights: object) -> Found:
    """Yields the arrays of `weights` that are not None in the order of the forward pass; stacks layer by layer."""
    named = [
        (jax.tree_util.keystr(keys, simple=True, separator="."), x)
        for keys, x in jax.tree_util.tree_flatten_with_path(weights)[0]
    ]
    groups = {name: [*group] for name, group in itertools.groupby(named, lambda pair: pair[0].partition(".")[0])}
    # Without moments, or weights of a stack that are not trained, a group is missing.
    stacks = [name for name in stacks_of(type(weights)) if name in groups]
    others = [name for name in groups if name not in stacks[:-1]]
    at = others.index(stacks[-1]) if stacks else 0
    found = {}
    for name in (*others[:at], *stacks[:-1], *others[at:]):
        entries = groups[name]
        if name in stacks:
            found |= {f"{kind} {name}, layer {i}": x[i] for i in range(len(entries[0][1])) for name, x in entries}
        else:
            found |= {f"{kind} {name}": x for name, x in entries}
    return found


# ---- the step -----------------------------------------------------------------------------------------------------


def placed(step: Step, inputs: Inputs) -> list[jax.Array]:
    """Places the arguments of the step on the current mesh."""
    state = in_order(step.config, _as_classes_of(step.traced.out_info[0], inputs.state), back=True)
    pairs = zip(weights_of(step.config, step.spec), inputs.reference, strict=True)
    reference = [_put(type(shapes), _as_classes_of(shapes, weights)) for shapes, weights in pairs]
    state = _put(step.spec.State[type(state.weights)], state)
    batch = _put(step.spec.Batch, inputs.batch)
    clock = clock_of(step.config, step.spec, elapsed=0.5)
    return jax.tree.leaves((state, batch, jnp.int32(inputs.step), reference, clock))


def _put(kind: Any, tree: Any) -> Any:
    return jax.device_put(tree, make_shardings(kind, like=tree))


def _as_classes_of(shapes: Any, tree: object) -> Any:
    """The same arrays in the classes of the current modules, which may have been imported again."""
    return jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(tree))


def tensors_of_step(c: Config, inputs: Inputs, sizes: Mesh) -> Found:
    """Computes everything that is compared of a step on a mesh of these sizes, in f64. Traces and compiles once."""
    with step_on(c, sizes) as step:
        paths = gradient_paths(step.jaxpr, inputs.state.weights)
        replay = Rerun(step.jaxpr, {path: [0] for path in paths}, is_double=True)
        compiled = jax.jit(replay)

        def run(inputs: Inputs) -> tuple[Any, Any, Any]:
            """Returns the gradients on the host, the new state and the metrics."""
            arguments = placed(step, inputs)
            with jax.enable_x64(True):
                results, blocks = compiled(*arguments)
            state, metrics = jax.tree.unflatten(jax.tree.structure(step.traced.out_info), results)
            found = {note.path: x for note, x in zip(replay.notes, blocks, strict=True)}
            weights, tree = jax.tree.flatten(state.weights)
            gradients = [_sharded_as(like, found[path]) for path, like in zip(paths, weights, strict=True)]
            return jax.tree.unflatten(tree, gradients), state, metrics

        gradients, state, metrics = run(inputs)
        gradients = in_order(c, gradients)
        new = in_order(c, jax.tree.map(on_host, state))
        found = {}
        start = fresh_state(step)
        for name in (field.name for field in dataclasses.fields(start)):
            found |= by_layer("initial" if name == "weights" else f"initial {name}", getattr(start, name))
        found["metric loss"] = on_host(metrics.loss)
        # The backward pass computes the gradients of the last weights first.
        found |= dict(reversed(by_layer("gradient", gradients).items()))
        of_layers = metrics.layers.by_name() if metrics.layers else {}
        arrays = {name: x for name, x in {**vars(metrics), **of_layers}.items() if isinstance(x, jax.Array)}
        found |= {f"metric {name}": on_host(x) for name, x in arrays.items()}
        for name, planted in with_planted(inputs, c.model.vocab):
            seen = [np.asarray(x) for x in vars(run(planted)[2]).values() if isinstance(x, jax.Array)]
            flags = [x if x.dtype == np.bool_ else np.isfinite(x) for x in seen]
            found[f"planted {name}"] = np.array(flags, np.float32)
    for part in (field.name for field in dataclasses.fields(new)):
        found |= by_layer("weight" if part == "weights" else part, getattr(new, part))
    return found


def _sharded_as(like: jax.Array, blocks: jax.Array) -> np.ndarray:
    """Assembles the array of which devices hold `blocks`[*axes of the mesh, *block], sharded like `like`."""
    index_of = like.sharding.devices_indices_map(like.shape)
    return assemble(
        [(index_of[shard.device], np.asarray(shard.data)) for shard in blocks.addressable_shards], like.shape
    )
