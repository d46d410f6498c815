"""The loop over a stack of layers, for any model: scan, checkpointing, unrolling, padding, caches."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_extra import explicit_activation_checkpointing
from shardlib.array_types import pytree_dataclass
from shardlib.parsing import ShardError
from shardlib.values import describe


@pytree_dataclass
class LayerNumbers:
    """Which layer of the model each row of a stack of layers is."""

    index: jax.Array
    """i32[rows], or one of them in the loop over layers. -1: none; the row only makes all stages the same size."""
    padded: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether there are such rows."""


def run_layers(
    layer: Callable,
    w: Any,
    x: Any,
    numbers: LayerNumbers | None,
    attend: Callable,
    caches: Any = None,
    *,
    save: str = "marked",
    unroll: int | None = 1,
    scan: Callable = lax.scan,
) -> tuple[Any, Any]:
    """`x` after all layers of a stack, one after the other, and the caches as they are then. Per-device code.

    Args:
        layer: (weights, x, index, attend) -> x of one layer. x keeps its type; `attend` is what follows.
        w: weights of the layers, each array with one leading dim of rows.
        numbers: of these rows. Rows that are no layer leave x as it is. None: the rows are the layers in order.
        attend: (q, k, v, cache, dropout) -> what each query reads, and the layer's cache then. A layer calls it without
            the cache, once if there are caches.
        caches: of the layers, each array with one leading dim of rows; or None.
        save: what the backward pass of a layer gets from its forward pass, one of jax_extra.KEPT.
        unroll: layers in one turn of the loop, at least 1; None: all.
        scan: `lax.scan`, or what takes its place for a tool that looks into the loop.
    """
    if numbers is None:
        numbers = LayerNumbers(jnp.arange(len(jax.tree.leaves(w)[0])))
    rows = len(numbers.index)
    turn = rows if unroll is None else min(unroll, rows)
    # In a loop nothing need keep XLA from taking what is computed again from the forward pass, which is another loop.
    # And what would (prevent_cse) ties each layer's gathers to the gradient that comes to it.
    prevent_cse = turn == rows or rows % turn != 0  # no loop, or layers that are left over after it

    def run(x, of_layer):
        weights, number, cache = of_layer

        given, calls = cache, 0

        def attend_in_layer(q, k, v, drop=None):
            nonlocal cache, calls
            calls += 1
            read, cache = attend(q, k, v, given, drop)
            return read

        y = layer(weights, x, number.index, attend_in_layer)
        if (getattr(y, "shape", None), getattr(y, "dtype", None)) != (x.shape, x.dtype):
            raise ShardError(
                f"a layer is given {describe(x)}, and gives {describe(y)}",
                "return the residual stream, in the shape and the dtype of x, and nothing else",
            )
        if jax.tree.leaves(cache) and calls != 1:
            raise ShardError(
                f"a layer calls attend {calls} times, and its cache holds the keys and values of one call",
                "call attend once in each layer to sample with a cache",
            )
        return y, cache

    @functools.partial(explicit_activation_checkpointing, save=save, prevent_cse=prevent_cse)
    def run_if_layer(x, of_layer):
        _, number, cache = of_layer
        if not number.padded:
            return run(x, of_layer)
        return lax.cond(number.index >= 0, run, lambda x, _: (x, cache), x, of_layer)

    return scan(run_if_layer, x, (w, numbers, caches), unroll=turn)
