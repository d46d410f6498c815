"""The Llama of train.py, in which each query attends to the last 5 positions of its document:
model.module=sliding_window.
"""

from shardwright.modeling import masks
from train import Llama
from train import ModelConfig as ModelConfig


class Model(Llama):
    """The model."""

    mask = masks.AttentionMask(mask_mod=(masks.causal, masks.same_document, masks.Window(5)))
