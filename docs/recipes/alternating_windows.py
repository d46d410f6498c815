"""The Llama of train.py, in which every other layer attends within a window of 5 positions:
model.module=alternating_windows.
"""

from typing import Any, cast

from shardlib.shardtypes import typed
from shardwright.modeling import masks
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from train import Llama
from train import ModelConfig as ModelConfig


class Model(Llama):
    """The model."""

    window = masks.AttentionMask(mask_mod=(masks.causal, masks.same_document, masks.Window(5)))
    period = 2

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        def within(q, k, v, mask):
            return attention(q, k, v, [self.window, mask][tokens.index_in_period])

        return super().attend(x, w, tokens, cast(Attention, within))
