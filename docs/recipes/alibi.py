"""The Llama of train.py with ALiBi instead of RoPE (arXiv 2108.12409): model.module=alibi.

The farther a key, the lower its score. The slope of head h of H is 2^(-8h/H), h from 1; H is HEADS.
"""

from typing import Any

from shardwright.modeling import masks
from shardwright.modeling.model import Tokens
from train import Llama
from train import ModelConfig as ModelConfig

HEADS = 16


def lowered(scores: Any, q: masks.Positions, k: masks.Positions, heads: Any) -> Any:
    """Scores of heads, which count from 0, lowered by the distance."""
    return scores - 2.0 ** (-8 * (heads + 1) / HEADS) * (q.index - k.index)


class Model(Llama):
    """The model."""

    mask = masks.AttentionMask(mask_mod=(masks.causal, masks.same_document), score_mod=lowered)

    def prepare(self, tokens: Tokens) -> Tokens:
        return tokens  # without the angles of RoPE
