"""The Llama with mixture of block attention (arXiv 2502.13189)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import train
from shardwright.modeling import settings
from shardwright.modeling.model import Tokens


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    module: str = "moba"
    block: int = 8
    best: int = 2


class Model(train.Llama):
    def attend(self, x: Any, w: Any, tokens: Tokens, attention: Any) -> Any:
        return super().attend(x, w, tokens, functools.partial(self.of_blocks, tokens))

    def of_blocks(self, tokens: Tokens, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """Attention to the own block, and to the best of those that begin in the query's document."""
        size, document, at = self.config.block, tokens.document, jnp.arange(k.shape[1])
        means = k.reshape(len(k), -1, size, *k.shape[2:]).mean(2)
        block = jnp.arange(means.shape[1])
        past = block < at[:, None] // size
        past &= document[:, ::size][:, None] == document[:, :, None]
        scores = jnp.einsum("blkqd,bnkd->bkqln", q, means)
        scores = jnp.where(past[:, None, None], scores, -jnp.inf)
        best = lax.top_k(scores, min(self.config.best, len(block)))[1]
        seen = jnp.any(best[..., None] == block, -2) & past[:, None, None]
        seen |= block == at[:, None] // size
        seen = jnp.repeat(seen, size, -1) & (at[:, None] >= at)
        seen &= (document[:, :, None] == document[:, None])[:, None, None]
        scores = jnp.einsum("blkqd,bskd->bkqls", jnp.float32(q), jnp.float32(k))
        scores = jnp.where(seen, scores * self.config.d_head**-0.5, -jnp.inf)
        return jnp.einsum("bkqls,bskd->blkqd", jax.nn.softmax(scores), v).astype(q.dtype)
