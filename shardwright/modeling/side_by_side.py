"""Runs several microbatches at once, layer by layer, so that messages of one can run beside products of another.

A microbatch then is several, stacked along a first dim, and the residual stream is a tuple with that of each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax

from shardlib.layers import LayerAux
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import LanguageModel, period_of
from shardwright.modeling.weights import gather_ahead, outside_of_layers


def side_by_side(
    loss: Callable[..., Any], forward: Forward, head: Callable[..., Any], batch: Any, count: int
) -> tuple[Callable[..., Any], Any]:
    """Returns a function of weights and microbatches that computes `loss` for `count` microbatches at once, and these.

    Args:
        loss: (weights, *microbatch, forward, head) -> what is computed of one microbatch.
        forward: the forward pass of one microbatch.
        head: (weights, output of the last layer, TokenBatch) -> its loss.
        batch: pytrees of arrays [m, …], m a multiple of `count`. They become [m/count, count, …].
        count: number of microbatches that run at once.
    """

    def sum_of_heads(w: Any, xs: tuple, batch: Any) -> Any:
        losses = [head(w, x, each) for x, each in zip(xs, unstack(batch, count), strict=True)]
        return sum(losses[1:], losses[0])

    if count == 1:
        return functools.partial(loss, forward=forward, head=head), batch

    def loss_of(w: Any, *group: Any) -> Any:
        w = gather_ahead(w, outside_of_layers(forward.model.table))  # once for all
        return loss(w, *group, forward=together, head=sum_of_heads)

    fields: Any = {field.name: getattr(forward, field.name) for field in dataclasses.fields(forward)}
    together = ForwardSideBySide(**fields | {"model": SideBySide(forward.model)}, count=count)
    return loss_of, jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), batch)


def unstack(tree: Any, count: int) -> list[Any]:
    """The trees of which `tree` is the stack, along the first dim of each array."""
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Group:
    """The Tokens of each microbatch, or the Attention of each."""

    each: tuple[Any, ...]
    cache = None

    def prepared(self, model: "SideBySide") -> Self:
        """As Tokens.prepared."""
        return dataclasses.replace(self, each=tuple(x.prepared(model.of_each) for x in self.each))

    def in_layer(self, *layer: Any) -> Self:
        """As Tokens.in_layer and Attention.in_layer."""
        return dataclasses.replace(self, each=tuple(x.in_layer(*layer) for x in self.each))

    def updated_cache(self) -> None:
        """As Attention.updated_cache: training keeps no keys and values."""


class SideBySide:
    """The model of several microbatches, whose residual stream is a tuple, from the model `of_each`."""

    def __init__(self, of_each: LanguageModel):
        self.of_each = of_each
        self.config, self.Weights, self.table = of_each.config, of_each.Weights, of_each.table
        self.period = period_of(of_each)

    def embed(self, w: object, tokens: Group) -> tuple:
        """As LanguageModel.embed."""
        return tuple(self.of_each.embed(w, each) for each in tokens.each)

    def layer(self, x: tuple, w: Any, tokens: Group, attention: Group) -> tuple[tuple, LayerAux]:
        """As LanguageModel.layer."""
        w = gather_ahead(w)  # once for all
        each = zip(x, tokens.each, attention.each, strict=True)
        return LayerAux.merge([self.of_each.layer(x, w, tokens, attention) for x, tokens, attention in each])


@dataclasses.dataclass(frozen=True)
class ForwardSideBySide(Forward):
    """The forward pass of `count` microbatches."""

    count: int = 1

    def tokens(self, batch: Any, seeds: jax.Array | None = None) -> Any:
        """As Forward.tokens."""
        return Group(
            tuple(super(ForwardSideBySide, self).tokens(*each) for each in unstack((batch, seeds), self.count))
        )

    def attention(self, tokens: Any) -> Any:
        """As Forward.attention."""
        return Group(tuple(super(ForwardSideBySide, self).attention(each) for each in tokens.each))
