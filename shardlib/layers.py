"""The loop over a stack of layers, for any model: scan, checkpointing, unrolling, caches."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import jax_errors, marks
from shardlib.axes import PIPELINE_AXIS
from shardlib.op_checks import zeros_like_traced
from shardlib.parsing import ShardError
from shardlib.places import place_of, place_of_caller
from shardlib.shardtypes import f32, pytree_dataclass
from shardlib.values import OpName, describe, is_opaque, stage_axes


@pytree_dataclass
class LayerAux:
    """Further results of a layer, besides x, the same on all devices of r, d and t."""

    loss: jax.Array | None = None
    """A scalar, added to the training loss as it is, so it includes any factor."""
    metrics: dict[str, jax.typing.ArrayLike] = dataclasses.field(default_factory=dict)
    """Metrics of the layer, which the log shows, by name: scalars, or vectors. Of a vector the log has the largest
    entry, once it is averaged over microbatches: the load of the largest expert is that of the whole batch."""
    place: OpName = dataclasses.field(default_factory=lambda: OpName(place_of_caller()), metadata={"static": True})
    """Where the layer made it, for messages."""

    def check(self) -> None:
        """Raises ShardError for values that are not scalars, or that differ between devices."""
        for name, x in {"loss": self.loss, **self.metrics}.items():
            if x is None:
                continue
            axes = set() if is_opaque(x) else {*jax.typeof(x).manual_axis_type.varying} - {*stage_axes()}
            if axes or is_opaque(x) or jnp.ndim(x) > (x is not self.loss):
                kind = "a scalar" if x is self.loss else "a scalar or a vector"
                raise ShardError(
                    f"a layer gives {name} in its LayerAux: {describe(x)}; it must be {kind}, the same on every device",
                    "reduce it, over positions and over the axes that shard them, e.g. psum('+r +d +t ->', …)",
                    place=str(self.place),
                    about=(x, axes) if axes else None,
                )

    @classmethod
    def joined(cls, results: list[Any]) -> tuple[tuple, Self]:
        """Joins the results of a layer for several microbatches: a tuple of each x, and the means of their LayerAux."""
        xs, aux = zip(*map(split_aux, results), strict=True)
        for each in aux[1:] and aux:  # that of one is checked where the layers are run
            each.check()
        return xs, aux[0] if len(aux) == 1 else jax.tree.map(lambda *values: sum(values) / len(values), *aux)


def __getattr__(name: str) -> Any:
    if name == "Extras":  # in models written for version 0.1
        warnings.warn("shardlib.layers.Extras is now LayerAux.", FutureWarning, stacklevel=2)
        return LayerAux
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def split_aux(result: Any) -> tuple[Any, LayerAux]:
    """The parts x and LayerAux of a layer's result."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], LayerAux)
    return result if is_pair else (result, LayerAux())


@pytree_dataclass
class LayerMetrics:
    """The metrics in the LayerAux of a model's layers, in the order of the layers."""

    values: f32["N depth"]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Names of the N metrics."""

    @classmethod
    def of_rows(cls, metrics: dict[str, jax.Array], rows: jax.Array, layers: int) -> Any:
        """Metrics of the layers in one device's rows, 0 for other layers; None without metrics.

        `metrics` has a value or a vector for each row, and `rows` the number of its layer.
        """
        if not metrics:
            return None
        names = tuple(sorted(metrics))
        largest = lambda x: jnp.max(x.reshape(len(rows), -1), axis=1).astype(jnp.float32)
        of_rows = jnp.stack([largest(metrics[name]) for name in names])
        values = jnp.zeros((len(names), layers), jnp.float32)
        return cls(values.at[:, rows].add(of_rows), names)

    def by_name(self) -> dict[str, jax.Array]:
        """Each metric, a vector over the layers."""
        return dict(zip(self.names, self.values, strict=True))


def run_layers(
    layer: Callable[..., Any],
    w: object,
    x: object,
    layer_ids: jax.Array | None,
    attend: Callable[..., Any],
    caches: object = None,
    *,
    period: int = 1,
    checkpoint: Callable[..., Any] | None = None,
    unroll: int | None = 1,
) -> tuple[Any, Any, LayerAux]:
    """`x` after all layers of a stack, the new caches of the layers, and their LayerAux, stacked. Per-device code.

    Args:
        layer: (weights, x, index, index_in_period, attend) -> x of one layer, or a tuple of x and its LayerAux. x keeps
            its type. `index_in_period` is an int and counts from 0. `attend` is described below.
        w: weights of the layers, each array with one leading dim of rows.
        x: the residual stream: an array, or a pytree of arrays.
        layer_ids: index in the model of the layer in each row. None: the rows are the layers in order.
        attend: (cache, q, k, v, …) -> the output of attention, and the new cache of the layer. A layer calls it without
            the cache, exactly once if there are caches.
        caches: caches of the layers, each array with one leading dim of rows; or None.
        period: number of layers after which the model's pattern of layers repeats. It divides the rows.
        checkpoint: (fn, prevent_cse) -> `fn`, whose forward pass keeps less for its backward pass, such as
            jax.checkpoint; None: `fn` itself.
        unroll: number of layers in one iteration of the loop, at least 1; None: all.

    Raises:
        ShardError: a layer that does not return x and LayerAux as described, or does not call `attend` once.
    """
    if layer_ids is None:
        if PIPELINE_AXIS in stage_axes():
            raise ShardError(
                "the layers of a pipeline stage are run without their numbers",
                "pass on the `layer_ids` that it is given",
            )
        layer_ids = marks.layer_numbers(len(jax.tree.leaves(w)[0]))
    periods = len(layer_ids) // period
    at_once = periods if unroll is None else min(max(1, unroll // period), periods)
    # XLA must not replace a recomputed value by that of the forward pass. If both passes are loops, it cannot, and
    # prevent_cse would only make the gathers of each layer wait for the gradient that arrives there.
    prevent_cse = at_once == periods or periods % at_once != 0  # no loop, or layers left over after it

    def run(place, x, of_layer):
        weights, number, cache = of_layer

        given, calls = cache, 0

        def attend_in_layer(*args, **options):
            nonlocal cache, calls
            calls += 1
            read, cache = attend(given, *args, **options)
            return read

        y, aux = split_aux(layer(weights, x, number, place, attend_in_layer))
        try:
            aux.check()
        except ShardError as error:
            again = lambda: split_aux(layer(weights, x, number, place, attend_in_layer))[1].check()
            jax_errors.add_origin(error, again)
            raise
        if problem := _changed(x, y):
            raise ShardError(
                f"a layer is given {problem}",
                "return the residual stream, in the shape and the dtype of x and over its axes, and nothing else: what "
                "differs over more axes is reduced or gathered over them first (psum, all_gather)",
                place=place_of(layer),
            )
        if jax.tree.leaves(cache) and calls != 1:
            raise ShardError(
                f"a layer calls attend {calls} times, and its cache holds the keys and values of one call",
                "call attend once in each layer to sample with a cache",
            )
        return y, (cache, aux)

    layer_at = [functools.partial(run, place) for place in range(period)]
    if checkpoint is not None:
        layer_at = [checkpoint(run, prevent_cse=prevent_cse) for run in layer_at]
    stack = w, layer_ids, caches
    if period == 1:
        x, found = lax.scan(layer_at[0], x, stack, unroll=at_once)
        return x, *found

    def run_period(x, of_period):
        found = []
        for place in range(period):
            x, row = layer_at[place](x, jax.tree.map(lambda stack, place=place: stack[place], of_period))
            found.append(row)
        losses = [aux.loss for _, aux in found if aux.loss is not None]
        if 0 < len(losses) < period:  # a layer without a loss has 0
            zero = zeros_like_traced(jax.typeof(losses[0]))
            with_loss = lambda aux: dataclasses.replace(aux, loss=zero if aux.loss is None else aux.loss)
            found = [(cache, with_loss(aux)) for cache, aux in found]
        return x, jax.tree.map(lambda *rows: jnp.stack(rows), *found)

    in_periods = jax.tree.map(lambda x: x.reshape(-1, period, *x.shape[1:]), stack)
    x, found = lax.scan(run_period, x, in_periods, unroll=at_once)
    return x, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


def _changed(x: Any, y: Any) -> str | None:
    """Words for how the residual stream `y` after a layer is of another type than `x` before it; None if it is not."""
    if type(x) is type(y) is tuple and len(x) == len(y):
        return next(filter(None, map(_changed, x, y)), None)
    (before, of_x), (after, of_y) = (jax.tree_util.tree_flatten_with_path(stream) for stream in (x, y))
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
