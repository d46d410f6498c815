"""Small models whose layers attend by other rules than causal."""

import train
from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass
from shardwright.modeling.masks import AttentionMask, Window, causal, same_document
from shardwright.modeling.settings import ModelConfig
from shardwright.modeling.weights import bias

WINDOW, PREFIX = 4, 3
MASKS = (causal, same_document)
SIZES = ModelConfig(vocab=32, d_model=16, layers=4, n_kv=4, n_q_per_kv=2, d_head=4, d_ff=16)
HEADS = SIZES.heads


def alibi(scores, q, k, heads):
    """A slope for each head, 2^(-8(h+1)/HEADS) (arXiv 2108.12409)."""
    return scores - 2.0 ** (-8 * (heads + 1) / HEADS) * (q.index - k.index)


def prefix(q, k):
    """Each position sees those before it; the first PREFIX of a document see each other."""
    return (q.index >= k.index) | ((q.position < PREFIX) & (k.position < PREFIX))


class Ruled(train.Llama):
    """Rules for the layers of a period."""

    rules: tuple = ()

    def layer(self, x, w, tokens, attention):
        def of_turn(q, k, v, _):
            return attention(q, k, v, self.rules[tokens.index_in_period])

        return super().layer(x, w, tokens, of_turn)


@pytree_dataclass
class SinkLayer(train.TransformerLayer):
    sinks: bias["K/t Q", f32]


@pytree_dataclass
class SinkWeights(train.Transformer):
    layers: Array["layers/p", SinkLayer]


class Sinks(train.Llama):
    """Each head has a learned score of a key without a value (arXiv 2309.17453)."""

    Weights = SinkWeights

    def __init__(self, c: ModelConfig):
        super().__init__(c, sinks={"std": 1.0})

    def layer(self, x, w, tokens, attention):
        def with_sinks(q, k, v, rule):
            sinks = shardops.all_gather("K/t Q/fsdp -> K/t Q", w.sinks)
            return attention(q, k, v, rule, sinks=sinks)

        return super().layer(x, w, tokens, with_sinks)


EACH_WAY = AttentionMask((*MASKS, Window(WINDOW))), AttentionMask(scale=0.3)
KINDS = {
    "alibi": type("OfAlibi", (train.Llama,), {"mask": AttentionMask(score_mod=alibi)}),
    "alternating": type("Alternating", (Ruled,), {"period": 2, "rules": EACH_WAY}),
    "sinks": Sinks,
    "prefix": type(
        "OfPrefix", (train.Llama,), {"mask": AttentionMask((prefix, same_document), causal=False)}
    ),
}
