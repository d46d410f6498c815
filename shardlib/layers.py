"""Runs a stack of layers, for any model: scan, checkpointing, unrolling and caches."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import jax_errors
from shardlib.axes import PIPELINE_AXIS
from shardlib.describe import describe
from shardlib.mesh import stage_axes
from shardlib.op_checks import zeros_like_traced
from shardlib.opaque import OpName, is_opaque
from shardlib.parsing import ShardError
from shardlib.places import place_of, place_of_caller
from shardlib.shardtypes import f32, pytree_dataclass


@pytree_dataclass
class LayerAux:
    """What a layer returns besides x. It must be the same on all devices of r, d and t."""

    loss: jax.Array | None = None
    """A scalar that is added to the training loss as it is, so include any factor."""
    metrics: dict[str, jax.typing.ArrayLike] = dataclasses.field(default_factory=dict)
    """Metrics of the layer for the log, by name: scalars or vectors. A vector is averaged over
    microbatches, and the log shows its largest entry, so the load of the largest expert is that of
    the whole batch."""
    place: OpName = dataclasses.field(
        default_factory=lambda: OpName(place_of_caller()), metadata={"static": True}
    )
    """Where the layer made it (`file.py:line`), for messages."""

    def check(self) -> None:
        """Raises ShardError for values of the wrong rank, or that differ between devices."""
        for name, x in {"loss": self.loss, **self.metrics}.items():
            if x is None:
                continue
            axes = (
                set()
                if is_opaque(x)
                else {*jax.typeof(x).manual_axis_type.varying} - {*stage_axes()}
            )
            if axes or is_opaque(x) or jnp.ndim(x) > (x is not self.loss):
                kind = "a scalar" if x is self.loss else "a scalar or a vector"
                raise ShardError(
                    f"a layer gives {name} in its LayerAux: {describe(x)}; it must be {kind}, the "
                    "same on every device",
                    "reduce it, over positions and over the axes that shard them, e.g. "
                    "psum('+r +d +t ->', …)",
                    place=str(self.place),
                    about=(x, axes) if axes else None,
                )

    def total(self, microbatches: int) -> Any:
        """What the layers, of which this is the stack, add to the loss of one of the microbatches.

        Their losses are averaged over microbatches. None if they have none.
        """
        return None if self.loss is None else jnp.sum(self.loss) / microbatches


def split_aux(result: Any) -> tuple[Any, LayerAux]:
    """Splits the result of a layer into x and its LayerAux."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], LayerAux)
    return result if is_pair else (result, LayerAux())


@pytree_dataclass
class LayerMetrics:
    """The layers' metrics, in the order of the layers."""

    values: f32["_metric _layer"]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Names of the metrics."""

    @classmethod
    def of_rows(cls, metrics: dict[str, jax.Array], rows: jax.Array, layers: int) -> Any:
        """Metrics of the layers in one device's rows, 0 for all other layers; None without metrics.

        `metrics` has a value or a vector for each row, and `rows` the index of its layer.
        """
        if not metrics:
            return None
        names = tuple(sorted(metrics))

        def take_largest(x: jax.Array) -> jax.Array:
            return jnp.max(x.reshape(len(rows), -1), axis=1).astype(jnp.float32)

        of_rows = jnp.stack([take_largest(metrics[name]) for name in names])
        values = jnp.zeros((len(names), layers), jnp.float32)
        return cls(values.at[:, rows].add(of_rows), names)

    @classmethod
    def of_microbatches(cls, metrics: dict[str, jax.Array], layers: int) -> Any:
        """Metrics of all layers, averaged over microbatches; None without metrics.

        `metrics` has a value or a vector for each microbatch and layer.
        """
        means = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
        return cls.of_rows(means, jnp.arange(layers), layers)

    def by_name(self) -> dict[str, jax.Array]:
        """Returns each metric as a vector over the layers."""
        return dict(zip(self.names, self.values, strict=True))


def run_layers(
    layer: Callable[..., Any],
    w: object,
    x: object,
    layer_ids: jax.Array | None,
    caches: object = None,
    *,
    period: int = 1,
    checkpoint: Callable[..., Any] | None = None,
    unroll: int | None = 1,
) -> tuple[Any, Any, LayerAux]:
    """Runs a stack of layers. Per-device code.

    Args:
        layer: (weights, x, index, index_in_period, cache) -> (result, cache of the layer). The
            result is x, or a tuple of x and a LayerAux. x must keep its type. `index_in_period` is
            an int that counts from 0.
        w: weights of the layers; each array has a leading dim of rows.
        x: the residual stream: an array, or a pytree of arrays.
        layer_ids: index in the model of the layer in each row. None: the rows are all layers.
        caches: caches of the layers; each array has a leading dim of rows. Or None.
        period: number of layers after which the model's layer pattern repeats. It must divide the
            number of rows.
        checkpoint: (fn, prevent_cse) -> a version of `fn` that saves less for the backward pass,
            such as jax.checkpoint; None: `fn` itself.
        unroll: number of layers in one iteration of the loop, at least 1; None: all layers.

    Returns:
        The new `x`, and the layers' new caches and LayerAux, stacked.

    Raises:
        ShardError: a layer does not return x and LayerAux as described.
    """
    layer_ids = _ids_of_all_layers(w) if layer_ids is None else layer_ids
    periods = len(layer_ids) // period
    at_once = periods if unroll is None else min(max(1, unroll // period), periods)
    # XLA must not replace a recomputed value by the one from the forward pass. It cannot if both
    # passes are loops, and prevent_cse would then only delay each layer's gathers until the
    # gradient arrives.
    prevent_cse = at_once == periods or periods % at_once != 0  # no loop, or layers left after it

    layer_at = [functools.partial(_run_layer, layer, index) for index in range(period)]
    if checkpoint is not None:
        layer_at = [checkpoint(run, prevent_cse=prevent_cse) for run in layer_at]
    stack = w, layer_ids, caches
    if period == 1:
        x, results = lax.scan(layer_at[0], x, stack, unroll=at_once)
        return x, *results

    in_periods = jax.tree.map(lambda x: x.reshape(-1, period, *x.shape[1:]), stack)
    run_period = functools.partial(_run_period, layer_at)
    x, results = lax.scan(run_period, x, in_periods, unroll=at_once)
    return x, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


def _ids_of_all_layers(w: object) -> jax.Array:
    """Indices of the rows of `w`, which are all layers. Raises ShardError in a pipeline stage."""
    if PIPELINE_AXIS in stage_axes():
        raise ShardError(
            "the layers of a pipeline stage are run without their layer_ids",
            "pass on the `layer_ids` that the stage is given",
        )
    return jnp.arange(len(jax.tree.leaves(w)[0]))


def _run_layer(layer: Callable[..., Any], index_in_period: int, x: Any, row: tuple) -> tuple:
    """Runs a layer on its row of weights, ids and caches, and checks its result."""
    weights, index, cache = row
    result, new_cache = layer(weights, x, index, index_in_period, cache)
    y, aux = split_aux(result)
    try:
        aux.check()
    except ShardError as error:

        def repeat():
            split_aux(layer(weights, x, index, index_in_period, cache)[0])[1].check()

        jax_errors.add_origin(error, repeat)
        raise
    if problem := _changed(x, y):
        raise ShardError(
            f"a layer is given {problem}",
            "return the residual stream alone, with the shape, dtype and axes of x; reduce or "
            "gather it over any further axes first (psum, all_gather)",
            place=place_of(layer),
        )
    return y, (new_cache, aux)


def _run_period(layer_at: list[Callable[..., Any]], x: Any, rows: Any) -> tuple:
    """Runs the layers of one period, and stacks their caches and LayerAux."""
    results = []
    for index, layer in enumerate(layer_at):
        x, result = layer(x, jax.tree.map(lambda stack, index=index: stack[index], rows))
        results.append(result)
    losses = [aux.loss for _, aux in results if aux.loss is not None]
    if 0 < len(losses) < len(results):  # a layer without a loss has 0
        zero = zeros_like_traced(jax.typeof(losses[0]))
        results = [
            (cache, aux if aux.loss is not None else dataclasses.replace(aux, loss=zero))
            for cache, aux in results
        ]
    return x, jax.tree.map(lambda *arrays: jnp.stack(arrays), *results)


def _changed(x: Any, y: Any) -> str | None:
    """Describes how the residual stream `y` after a layer differs in type from `x` before it.

    None if it does not.
    """
    (before, of_x), (after, of_y) = (
        jax.tree_util.tree_flatten_with_path(stream) for stream in (x, y)
    )
    if of_x != of_y:
        return f"{describe(x)}, and gives {describe(y)}"
    for (path, old), (_, new) in zip(before, after, strict=True):
        if _kind(old) != _kind(new):
            return f"{describe(old)}, and gives {describe(new)}" + (
                f", at {jax.tree_util.keystr(path)}" if path else ""
            )
    return None


def _kind(x: object) -> tuple:
    """Shape and dtype of an array, and the axes over which it differs."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None) if isinstance(x, jax.Array) else None
    return getattr(x, "shape", None), getattr(x, "dtype", None), kind
