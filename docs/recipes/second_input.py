"""The Llama of train.py with a second id per token, from the dataset's array `kind`:
model.module=second_input.

It is looked up in the same table as the token.
"""

import dataclasses

from shardlib.shardtypes import typed
from shardwright.modeling.model import Tokens, act
from train import Llama, Transformer
from train import ModelConfig as ModelConfig


class Model(Llama):
    """The model."""

    inputs = ("kind",)

    @typed
    def embed(self, w: Transformer, tokens: Tokens) -> act["B/b L/c/t M"]:
        kinds = dataclasses.replace(tokens, ids=tokens.inputs[..., 0])
        return super().embed(w, tokens) + super().embed(w, kinds)
