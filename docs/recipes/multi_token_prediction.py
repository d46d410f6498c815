"""The Llama of train.py, whose last layer is a head that predicts the token after the next (arXiv
2404.19737): model.module=multi_token_prediction.

Both heads share `unembed`. Validation and sampling read the first one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.shardtypes import pytree_dataclass, typed
from shardwright.data.loader import TokenBatch
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Targets, Tokens, act
from train import Llama, Transformer
from train import ModelConfig as ModelConfig


@pytree_dataclass
class Stream:
    """The residual stream, and what the last layer reads, then its output."""

    x: act["B/b L/c/t M"]
    ahead: act["B/b L/c/t M"]


class Model(Llama):
    """The model."""

    @typed
    def embed(self, w: Transformer, tokens: Tokens) -> Stream:
        x = super().embed(w, tokens)
        return Stream(x, x)

    @typed
    def layer(self, s: Stream, w: Any, tokens: Tokens, attention: Attention) -> Stream:
        is_last = tokens.layer == self.config.layers - 1
        given = jnp.where(is_last, s.ahead, s.x)
        y = super().layer(given, w, tokens, attention)
        return Stream(jnp.where(is_last, s.x, y), jnp.where(is_last, y, given))

    @typed
    def logits(self, w: Transformer, s: Stream) -> act["B/b L/c V/t/p"]:
        return super().logits(w, s.x)

    def more_predictions(self, s: Stream, batch: TokenBatch) -> list[tuple[Stream, Targets]]:
        """The second head, and its targets: the tokens after the next in the same document."""

        def shift(x: jax.Array) -> jax.Array:
            return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

        mask = shift(batch.loss_mask & ~batch.is_seq_start)
        later = dataclasses.replace(batch, targets=shift(batch.targets), loss_mask=mask)
        return [(Stream(s.ahead, s.x), Targets.of(later))]
