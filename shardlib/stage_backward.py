"""The backward pass of a pipeline stage, in tasks of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.halves import Halves
from shardlib.op_checks import one_like
from shardlib.parsing import PIPELINE_AXIS


class StageBackward:
    """jax.vjp(has_aux=True) of a stage, traced by itself: with its forward, as a whole, and in halves.

    Arrays are passed from the forward to the backward. The function that `jax.vjp` returns is a pytree, whose leaves
    are what the backward needs. Leaves that are weights are not passed, since the backward has the weights anyway.

    Attributes:
        saved_types: types of what is passed from the forward to the backward, first the results but y.
        kept_types: types of what the input half passes to the half for the weights.

    Args:
        stage: (stack, x, chunk, microbatch) -> (y, loss of the layers), metrics of the layers.
        stack, x, y: the types of the weights of a chunk, of the input and of the output.
        halves: whether the backward is done in halves.
    """

    def __init__(self, stage: Callable, stack: Any, x: Any, y: Any, halves: bool):
        self._stage = stage
        self._structure: Any = None
        self._results: Any = None
        self._weights: list[int | None] = []
        zero = jnp.int32(0)
        _, self.saved_types = jax.eval_shape(self.forward, stack, x, zero, zero)
        self.kept_types: list = []
        if halves:
            (program, results) = jax.make_jaxpr(self.whole, return_shape=True)(stack, self.saved_types, y)
            self._dx, self._g = jax.tree.structure(results[0]), jax.tree.structure(results[1])
            wanted = [True] * self._dx.num_leaves + [False] * self._g.num_leaves
            given = [True] * len(jax.tree.leaves(stack)) + [True] * len(self.saved_types) + [False]
            # What is passed from task to task varies over p, as its buffers do.
            self._halves = Halves(program, wanted, given, over=(PIPELINE_AXIS,))
            self._halves.defer([not is_wanted for is_wanted in wanted])
            _, self.kept_types = jax.eval_shape(self.input, stack, self.saved_types, y)

    def forward(self, stack: Any, x: jax.Array, i: jax.Array, k: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The output y of the stage; and its other results, then what the backward needs."""
        (y, extra), vjp, aux = jax.vjp(lambda stack, x: self._stage(stack, x, i, k), stack, x, has_aux=True)
        results, self._results = jax.tree.flatten((extra, aux))
        leaves, self._structure = jax.tree.flatten(vjp)
        known = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(stack))}
        self._weights = [known.get(id(leaf)) for leaf in leaves]
        return y, [*results, *(leaf for leaf in leaves if id(leaf) not in known)]

    def results(self, saved: list[jax.Array]) -> tuple[Any, Any]:
        """Loss of the layers, metrics of the layers."""
        return jax.tree.unflatten(self._results, saved[: self._results.num_leaves])

    def whole(self, stack: Any, saved: list[jax.Array], dy: jax.Array) -> tuple[jax.Array, Any]:
        """The gradients of the input and of the weights."""
        weights, others = jax.tree.leaves(stack), iter(saved[self._results.num_leaves :])
        leaves = [next(others) if n is None else weights[n] for n in self._weights]
        extra, _ = self.results(saved)
        g, dx = jax.tree.unflatten(self._structure, leaves)((dy, jax.tree.map(one_like, extra)))
        return dx, g

    def input(self, stack: Any, saved: list[jax.Array], dy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The gradient of the input, and what `weights` needs."""
        outs, kept = self._halves.first([*jax.tree.leaves(stack), *saved, dy])
        kept, self._kept = jax.tree.flatten(kept)
        return jax.tree.unflatten(self._dx, outs[: self._dx.num_leaves]), kept

    def weights(self, stack: Any, saved: list[jax.Array], kept: list[jax.Array]) -> Any:
        """The gradients of the weights."""
        outs = self._halves.second([*jax.tree.leaves(stack), *saved, None], jax.tree.unflatten(self._kept, kept))
        return jax.tree.unflatten(self._g, outs[self._dx.num_leaves :])
