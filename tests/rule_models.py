"""Small models whose layers attend by other rules than causal, and the same computed densely, in plain jax.numpy.

`dense_logits` shares nothing with the source: its masks are made with numpy, its softmax is over all pairs, and its
norms, RoPE and SwiGLU are its own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny

import train
from modeling.rules import Rule, Window, causal, same_document
from modeling.settings import ModelConfig
from modeling.weights import Weight
from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass

WINDOW, PREFIX, CAP = 4, 3, 1.5
MASKS = (causal, same_document)
SIZES = ModelConfig(vocab=32, d_model=16, layers=4, n_kv=4, n_q_per_kv=2, d_head=4, d_ff=16)
HEADS = SIZES.heads


def alibi(scores, q, k, heads):
    """A slope for each head, 2^(-8(h+1)/HEADS) (arXiv 2108.12409)."""
    return scores - 2.0 ** (-8 * (heads + 1) / HEADS) * (q.index - k.index)


def capped(scores, q, k, heads):
    return CAP * jnp.tanh(scores / CAP)


def prefix(q, k):
    """Each position sees those before it; the first PREFIX of a document see each other."""
    return (q.index >= k.index) | ((q.position < PREFIX) & (k.position < PREFIX))


class Ruled(train.Llama):
    """`rule` for all layers, or `rules` for those of a period."""

    rules: tuple = ()

    def layer(self, x, w, tokens, attend, einsum):
        if not self.rules:
            return super().layer(x, w, tokens, attend, einsum)
        of_turn = lambda q, k, v, _: attend(q, k, v, self.rules[tokens.turn])
        return super().layer(x, w, tokens, of_turn, einsum)


class NoPositions(train.Llama):
    """Every second layer without RoPE; in SmolLM3 and Llama 4 it is every fourth."""

    period = 2

    def layer(self, x, w, tokens, attend, einsum):
        if tokens.turn == 1:
            cos, sin = tokens.shared
            tokens = dataclasses.replace(tokens, shared=(jnp.ones_like(cos), jnp.zeros_like(sin)))
        return super().layer(x, w, tokens, attend, einsum)


@pytree_dataclass
class SinkLayer(train.TransformerLayer):
    sinks: f32["K/t/d Q"]


@pytree_dataclass
class SinkWeights(train.Transformer):
    layers: Array["layers/p", SinkLayer]


class Sinks(train.Llama):
    """Each head has a learned score of a key without a value (arXiv 2309.17453)."""

    Weights = SinkWeights

    def __init__(self, c: ModelConfig):
        super().__init__(c)
        fields = lambda tree: {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        sinks = Weight((c.layers, c.n_kv, c.n_q_per_kv), "vector", std=1.0)
        layers = SinkLayer(**fields(self.table.layers), sinks=sinks)
        self.table = SinkWeights(**{**fields(self.table), "layers": layers})

    def layer(self, x, w, tokens, attend, einsum):
        def with_sinks(q: train.act["B/r/d L K/t Q D"], k, v, rule):
            sinks = shardops.all_gather("K/t/d Q -> K/t Q", w.sinks)
            return attend(q, k, v, rule, sinks=repeated(q, sinks))

        return super().layer(x, w, tokens, with_sinks, einsum)


@train.typed
def repeated(q: train.act["B/r/d L K/t Q D"], sinks: f32["K/t Q"]) -> f32["B/r/d K/t Q"]:
    """The sinks for each sequence of the queries."""
    return shardops.broadcast("K/t Q -> B/r/d K/t Q", sinks)


def of(name: str, **fields) -> type:
    return type(name, (Ruled,), fields)


KINDS = {
    "window": of("OfWindow", rule=Rule((*MASKS, Window(WINDOW)))),
    "alibi": of("OfAlibi", rule=Rule(score=alibi)),
    "soft-cap": of("OfSoftCap", rule=Rule(score=capped)),
    "alternating": of("Alternating", period=2, rules=(Rule((*MASKS, Window(WINDOW))), Rule(scale=0.3))),
    "sinks": Sinks,
    "prefix": of("OfPrefix", rule=Rule((prefix, same_document))),
    "no positions": NoPositions,
}


@functools.cache
def host_weights(name: str):
    """Weights that are far enough from the first ones for texts that are not uniform and heads that differ."""
    rng, table = np.random.default_rng(3), KINDS[name](SIZES).table
    # Norms too differ from 1. The gain of 2 on matrices makes some scores large.
    value = lambda weight: np.float32(rng.normal(weight.mean, 2 * weight.std or 0.1, weight.shape))
    return jax.tree.map(value, table)


def placed_weights(name: str):
    """The same on the mesh in force."""
    return tiny.place(host_weights(name), KINDS[name].Weights)


# ---- densely ------------------------------------------------------------------------------------------------------


def dense_mask(name: str, layer: int, document: np.ndarray) -> np.ndarray:
    """Who sees whom in a layer: bool[B, L, L], of the number of each position's document."""
    rows, length = document.shape
    seen = np.zeros((rows, length, length), bool)
    for row in range(rows):
        first = np.searchsorted(document[row], document[row])  # where the document of each position begins
        for q in range(length):
            begin = first[q]
            if name == "window" or (name == "alternating" and layer % 2 == 0):
                begin = max(begin, q - WINDOW + 1)
            seen[row, q, begin : q + 1] = True
            if name == "prefix" and q < first[q] + PREFIX:
                together = slice(first[q], first[q] + PREFIX)
                seen[row, q, together] = document[row, together] == document[row, q]
    return seen


def dense_logits(name: str, w, ids, positions, masks) -> jax.Array:
    """f32[B, L, V]; `masks`: dense_mask of each layer."""
    gain = lambda x, weight: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + SIZES.norm_epsilon) * weight
    half = SIZES.d_head // 2
    angles = positions[..., None] / SIZES.rope_base ** (jnp.arange(half) / half)

    def turned(x, layer):
        """As complex numbers, whose parts are the two halves of a head."""
        if name == "no positions" and layer % 2 == 1:
            return x
        by = jnp.exp(1j * angles).reshape(*angles.shape[:2], *[1] * (x.ndim - 3), half)
        z = (x[..., :half] + 1j * x[..., half:]) * by
        return jnp.concatenate([z.real, z.imag], axis=-1)

    x = w.embed[ids]
    distance = np.arange(ids.shape[1])[:, None] - np.arange(ids.shape[1])
    slopes = np.array([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]).reshape(SIZES.n_kv, -1, 1, 1)
    for i, mask in enumerate(masks):
        layer = jax.tree.map(lambda stack, i=i: stack[i], w.layers)
        nx = gain(x, layer.attention_norm)
        q = turned(jnp.einsum("blm,mkqd->blkqd", nx, layer.w_q), i)
        k = turned(jnp.einsum("blm,mkd->blkd", nx, layer.w_k), i)
        v = jnp.einsum("blm,mkd->blkd", nx, layer.w_v)
        scores = jnp.einsum("blkqd,bskd->bkqls", q, k)
        scores = scores * (0.3 if name == "alternating" and i % 2 == 1 else SIZES.d_head**-0.5)
        scores = scores - slopes * distance if name == "alibi" else scores
        scores = CAP * jnp.tanh(scores / CAP) if name == "soft-cap" else scores
        weights = jnp.exp(jnp.where(mask[:, None, None], scores, -jnp.inf))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        total = total + jnp.exp(layer.sinks)[..., None, None] if name == "sinks" else total
        read = jnp.einsum("bkqls,bskd->blkqd", weights / total, v)
        x = x + jnp.einsum("blkqd,kqdm->blm", read, layer.w_o)
        nx = gain(x, layer.mlp_norm)
        gate = nx @ layer.w_gate
        x = x + (gate / (1 + jnp.exp(-gate)) * (nx @ layer.w_up)) @ layer.w_down
    return gain(x, w.final_norm) @ w.unembed.T


def dense_inputs(targets: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, positions and documents, of targets[B, L] where documents begin at `starts`."""
    ids, positions, document = (np.zeros(targets.shape, np.int32) for _ in range(3))
    for row in range(len(targets)):
        for at in range(targets.shape[1]):
            if at == 0 or starts[row, at]:
                ids[row, at], document[row, at] = SIZES.bos_id, at
            else:
                ids[row, at] = targets[row, at - 1]
                positions[row, at], document[row, at] = positions[row, at - 1] + 1, document[row, at - 1]
    return ids, positions, document


def dense_masks(name: str, document: np.ndarray) -> list[np.ndarray]:
    return [dense_mask(name, layer, document) for layer in range(SIZES.layers)]
