"""What a layer returns: its checks, and the metrics of all layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib import jax_errors, shardops
from shardlib.describe import describe
from shardlib.mesh import stage_axes
from shardlib.op_checks import zeros_like_traced
from shardlib.opaque import OpName, is_opaque
from shardlib.parsing import ShardError, sort_axes
from shardlib.places import place_of, place_of_caller
from shardlib.shardtypes import f32, pytree_dataclass


@pytree_dataclass
class LayerAux:
    """What a layer returns besides x. It must be the same on all devices of r, d and t."""

    loss: jax.Array | None = None
    """A scalar that is added to the training loss as it is, so include any factor."""
    metrics: dict[str, jax.typing.ArrayLike] = dataclasses.field(default_factory=dict)
    """Metrics of the layer for the log and for optimizers, by name: scalars or vectors. For the log
    a vector is averaged over microbatches, and its largest entry is shown, so the load of the
    largest expert is that of the whole batch."""
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
                    "psum('+r +d +t ->', …); or, if it is made of weights alone, the same on all "
                    f"devices, jax.lax.pmean(x, {sort_axes(axes)!r})",
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
    def of_rows(cls, metrics: dict[str, jax.Array], order: np.ndarray | None) -> Any:
        """Metrics of all layers, averaged over microbatches; None without metrics.

        Args:
            metrics: [m layers/p …], a value or a vector for each microbatch and each row that a
                device of p has of the stack of layers.
            order: the layer of each row; None: they are in order.
        """
        if not metrics:
            return None
        names = tuple(sorted(metrics))

        def take_largest(x: jax.Array) -> jax.Array:
            return jnp.max(jnp.mean(x, axis=0).reshape(x.shape[1], -1), axis=1).astype(jnp.float32)

        values = jnp.stack([take_largest(metrics[name]) for name in names])
        spec = "_metric _layer/p -> _metric _layer"
        values = shardops.all_gather(spec, values, replicated=True)
        return cls(values if order is None else values[:, np.argsort(order)], names)

    def by_name(self) -> dict[str, jax.Array]:
        """Returns each metric as a vector over the layers."""
        return dict(zip(self.names, self.values, strict=True))


def check_result(
    result: Any, layer: Callable[..., Any], given: tuple[Any, ...]
) -> tuple[Any, LayerAux]:
    """Splits the `result` of layer(*given) into the new x and its LayerAux.

    Raises ShardError unless the new x has the type of the one given first, and the LayerAux is as
    described.
    """
    y, aux = split_aux(result)
    try:
        aux.check()
    except ShardError as error:
        jax_errors.add_origin(error, lambda: split_aux(layer(*given))[1].check())
        raise
    if problem := _changed(given[0], y):
        raise ShardError(
            f"a layer is given {problem}",
            "return the residual stream alone, with the shape, dtype and axes of x; reduce or "
            "gather it over any further axes first (psum, all_gather)",
            place=place_of(layer),
        )
    return y, aux


def run_period(layer_at: Sequence[Callable[..., Any]], x: Any, rows: Any) -> tuple[Any, Any]:
    """Runs the layers of one period. Returns the new x, and their caches and LayerAux, stacked.

    Each of `layer_at` is (x, row) -> (x, (cache, LayerAux)), and takes one of `rows`.
    """
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
