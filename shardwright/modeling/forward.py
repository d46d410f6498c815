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
from shardwright.modeling.weights import at_rest, gather_ahead, gathers_ahead


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward pass of a model: embed and layers. Per-device code.

    Attributes:
        model: the model.
        training: the settings of that section, of which attention, save, unroll and others matter here.
        einsum: softmax_attention of train.py.
        in_training: True in a training step, False in evaluation and sampling.
        target_count: as in Tokens, for the losses of layers.
    """

    model: LanguageModel
    training: Any
    einsum: Callable[..., jax.Array]
    in_training: bool = False
    target_count: Any = None

    def tokens(self, batch: Any, seeds: jax.Array | None = None) -> Tokens:
        """Tokens that the model reads to predict a TokenBatch. `seeds`: a random number for each sequence, or None."""
        mask = self.training.document_mask
        bos_id = self.model.config.bos_id
        tokens = Tokens.before(batch.targets, batch.is_seq_start, bos_id, seeds, mask, batch.inputs)
        counted = None
        if self.target_count is not None:
            counted = shardops.shard("B/b L -> B/b L/c", batch.loss_mask)
        return dataclasses.replace(tokens, training=self.in_training, counted=counted, target_count=self.target_count)

    def attention(self, tokens: Tokens) -> Attention:
        """Attention within `tokens`, by training.attention and training.context."""
        return Attention(self.einsum, self.training, tokens)

    def layers(
        self, w: Any, x: Any, tokens: Tokens, layer_ids: Any = None, attention: Any = None
    ) -> tuple[Any, Any, LayerAux]:
        """The residual stream `x` after the layers with weights `w`, their caches, and their LayerAux.

        `layer_ids` are those of the layers of a pipeline stage; None: all layers. `attention` has a stack of caches;
        None: that of training.
        """
        caches = attention and attention.cache
        of_all = attention or self.attention(tokens)
        prepared = tokens.prepared(self.model)

        def layer(w, x, index, index_in_period, cache):
            of_layer = of_all.in_layer(cache)
            with shardops.products(fp8.product if self.training.fp8 else None):
                y = self.model.layer(x, w, prepared.in_layer(index, index_in_period), of_layer)
            return y, of_layer.updated_cache()

        checkpoint = functools.partial(explicit_activation_checkpointing, save=self.training.save)
        options = {"checkpoint": checkpoint, "unroll": self.training.unroll, "period": period_of(self.model)}
        return run_layers(layer, w, x, layer_ids, caches, **options)

    def hidden(self, w: Any, tokens: Tokens, attention: Any = None) -> tuple[Any, Any]:
        """The output of the last layer, and the layers' caches."""
        x, caches, _ = self.layers(w.layers, self.model.embed(w, tokens), tokens, attention=attention)
        return x, caches

    def logits(self, w: Any, tokens: Tokens) -> Any:
        """Logits of the token after each position, act['B/b L/c V/t/p']."""
        return self.model.logits(w, self.hidden(w, tokens)[0])

    @property
    def gathers_ahead(self) -> bool:
        """True if weights are gathered once per step, by training.gather_weights; False: where a layer says so.

        `auto` does so where nothing has to be gathered, which saves casting each weight again in the backward pass.
        """
        return gathers_ahead(self.training.gather_weights)

    def gatherable(self, w: Any) -> Any:
        """Wraps weights for the all_gather of embed, layers and logits, or gathers all of them now."""
        w = at_rest(w, self.training.reduce_dtype)
        return gather_ahead(w) if self.gathers_ahead else w
