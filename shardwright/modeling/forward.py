"""Forward pass of any model, the same in training, evaluation and sampling."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from shardlib import shardops
from shardlib.layers import LayerAux, run_layers
from shardwright.jax_extra import explicit_activation_checkpointing
from shardwright.modeling import fp8
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import LanguageModel, Tokens, period_of
from shardwright.modeling.weights import at_rest, gather_ahead, gathers_ahead, outside_of_layers


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward pass of a model: embed, layers, head. Per-device code.

    Attributes:
        model: the model.
        training: the settings of that section, of which attention, save, unroll and others matter here.
        einsum: softmax_attention of train.py.
        in_training: True in a training step, False in evaluation and sampling.
        targets: as in Tokens, for the losses of layers.
    """

    model: LanguageModel
    training: Any
    einsum: Callable[..., jax.Array]
    in_training: bool = False
    targets: Any = None

    def __call__(
        self, w: Any, microbatches: tuple[Tokens, ...], head: Callable, attention: Attention | None = None
    ) -> tuple[Any, Any, LayerAux]:
        """Result of head(w, *xs) on the outputs of the last layer, the caches of the layers, and their LayerAux."""
        w = gather_ahead(w, outside_of_layers(self.model.table)) if len(microbatches) > 1 else w  # once for all
        xs = tuple(self.model.embed(w, tokens) for tokens in microbatches)
        xs, caches, aux = self.layers(w.layers, xs, microbatches, None, attention)
        return head(w, *xs), caches, aux

    def layers(
        self, w: Any, xs: tuple, microbatches: tuple[Tokens, ...], layer_ids: Any = None, attention: Any = None
    ) -> tuple[tuple, Any, LayerAux]:
        """Residual streams `xs` of microbatches after the layers, the caches of the layers, and their LayerAux.

        Each layer gathers its weights once for all, and collectives of one can run beside products of another.
        `attention` is that of a single microbatch, with a stack of caches; None: that of training. `layer_ids` are
        those of the layers of a pipeline stage; None: all layers.
        """
        attentions = [attention or self.attention(tokens) for tokens in microbatches]
        prepared = [tokens.prepared(self.model) for tokens in microbatches]

        def layer(w, xs, index, index_in_period, cache):
            w = gather_ahead(w) if len(xs) > 1 else w  # once for all
            results = []
            with shardops.products(fp8.product if self.training.fp8 else None):
                for x, tokens, of_all in zip(xs, prepared, attentions, strict=True):
                    of_layer = of_all.in_layer(cache)
                    results.append(self.model.layer(x, w, tokens.in_layer(index, index_in_period), of_layer))
                    cache = of_layer.kept()
            return LayerAux.joined(results), cache

        checkpoint = functools.partial(explicit_activation_checkpointing, save=self.training.save)
        options = {"checkpoint": checkpoint, "unroll": self.training.unroll, "period": period_of(self.model)}
        return run_layers(layer, w, xs, layer_ids, attention and attention.cache, **options)

    def attention(self, tokens: Tokens) -> Attention:
        """Attention within `tokens`, by training.attention and training.context."""
        return Attention(self.einsum, self.training, tokens)

    def tokens(self, batch: Any, seeds: jax.Array | None = None) -> Tokens:
        """Tokens that the model reads to predict a TokenBatch. `seeds`: a random number for each sequence, or None."""
        mask, bos_id = self.training.document_mask, self.model.c.bos_id
        tokens = Tokens.before(batch.targets, batch.is_seq_start, bos_id, seeds, mask, batch.inputs)
        counts = None if self.targets is None else shardops.shard("B/b L -> B/b L/c", batch.loss_mask)
        return dataclasses.replace(tokens, training=self.in_training, counts=counts, targets=self.targets)

    @property
    def gathers_ahead(self) -> bool:
        """True if weights are gathered once per step, by training.gather_weights; False: where a layer says so.

        `auto` does so where nothing has to be gathered, which saves casting each weight again in the backward pass.
        """
        return gathers_ahead(self.training.gather_weights)

    def prepare(self, w: Any, once: bool = True) -> Any:
        """The weights that embed, layers and logits gather. Gradients are reduced over r here if `once`, else there."""
        if self.gathers_ahead:
            return gather_ahead(at_rest(w, self.training.reduce_dtype))
        return at_rest(shardops.replicate("... -> ... *r", w) if once else w, self.training.reduce_dtype)
