"""Small models whose layers keep a state while text is sampled."""

import jax
import jax.numpy as jnp

import train
from shardlib.shardtypes import f32, pytree_dataclass
from shardwright.modeling.masks import AttentionMask, Window, causal, same_document
from shardwright.modeling.state import KeyValues

DECAY = 0.9
SIZES = {
    "vocab": 32,
    "d_model": 16,
    "layers": 2,
    "n_kv": 4,
    "n_q_per_kv": 2,
    "d_head": 4,
    "d_ff": 16,
}


# ---- a delta rule, whose state is a matrix -------------------------------------------------------


@pytree_dataclass
class Memory:
    matrix: f32["B/b K/t D 4"]


def unit(x):
    """Of length 1, so that the delta rule forgets what it overwrites and no more."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def delta(q, k, v, document):
    """The gated delta rule of all positions: a triangular solve (arXiv 2412.06464). document[B, L]
    or None.
    """
    place = jnp.arange(k.shape[1])
    gap = jnp.log(DECAY) * (place[:, None] - place)
    seen = (place[:, None] >= place) & (document[:, :, None] == document[:, None])
    # of what position s wrote, at l: [B, 1, L, S]
    decay = jnp.exp(jnp.where(seen, gap, -jnp.inf))[:, None]
    rows = jnp.tril(jnp.einsum("blkd,bskd->bkls", k, k) * decay, -1) + jnp.eye(len(place))
    written = jax.scipy.linalg.solve_triangular(
        rows, jnp.moveaxis(v, 1, 2), lower=True, unit_diagonal=True
    )
    return jnp.einsum(
        "blkqd,bskd,bkls,bksn->blkqn", q, k, jnp.broadcast_to(decay, rows.shape), written
    )


def delta_step(state, q, k, v):
    matrix = state * DECAY
    written = v - jnp.einsum("bkd,bkdn->bkn", k, matrix)
    matrix = matrix + k[..., None] * written[:, :, None]
    return jnp.einsum("bkqd,bkdn->bkqn", q, matrix), matrix


def forgetful_step(state, q, k, v):
    """Forgets the decay."""
    return delta_step(state / DECAY, q, k, v)


class Delta(train.Llama):
    """The delta rule instead of attention."""

    State = Memory
    name, step = "matrix", staticmethod(delta_step)

    def layer(self, x, w, tokens, attention):
        def rule(q, k, v, _):
            def whole(*inputs):
                return delta(*inputs, tokens.document)

            inputs = (jnp.float32(y) for y in (q, unit(k), v))
            return attention.recur(self.name, whole, self.step, *inputs).astype(q.dtype)

        return super().layer(x, w, tokens, rule)


# ---- several states in a layer, or in a period of layers -----------------------------------------


@pytree_dataclass
class TwoCalls:
    kv: KeyValues
    near: KeyValues


class Twice(train.Llama):
    """Attends to all positions, and again to the last few."""

    State = TwoCalls

    def layer(self, x, w, tokens, attention):
        def both(q, k, v, mask):
            near = AttentionMask((causal, same_document, Window(4)))
            return attention(q, k, v, mask) - attention(q, 2 * k, v, near, keep="near")

        return super().layer(x, w, tokens, both)


@pytree_dataclass
class OfKinds:
    """The states of two kinds of layers."""

    kv: KeyValues
    recurrent: Memory


class Alternating(Delta):
    """The delta rule in every second layer, attention in the others."""

    State = OfKinds
    period, name = 2, "recurrent"

    def layer(self, x, w, tokens, attention):
        if tokens.index_in_period == 1:
            return train.Llama.layer(self, x, w, tokens, attention)
        return super().layer(x, w, tokens, attention)

    @staticmethod
    def step(state, *inputs):
        out, new = delta_step(state.matrix, *inputs)
        return out, Memory(new)


KINDS = {kind.__name__: kind for kind in (Twice, Alternating)}
