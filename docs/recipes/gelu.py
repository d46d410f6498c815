"""The Llama of train.py with GELU in place of SiLU: model.module=gelu."""

import jax

import train
from train import ModelConfig as ModelConfig


class Model(train.Llama):
    """The model."""

    activation = staticmethod(jax.nn.gelu)
