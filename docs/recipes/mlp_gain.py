"""The Llama of train.py with a gain for each channel of the MLP's output, initialized to 1/2:
model.module=mlp_gain.
"""

from shardlib import shardops
from shardlib.shardtypes import Array, pytree_dataclass, typed
from shardwright.modeling.model import act
from shardwright.modeling.weights import gain
from train import Llama, Transformer, TransformerLayer
from train import ModelConfig as ModelConfig


@pytree_dataclass
class Layer(TransformerLayer):
    """Weights of one layer."""

    gain: gain["M", act]


@pytree_dataclass
class Weights(Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


class Model(Llama):
    """The model."""

    Weights = Weights

    def __init__(self, config: ModelConfig):
        super().__init__(config, gain={"mean": 0.5})

    @typed
    def mlp(self, x: act["B/b L/c/t M"], w: Layer) -> act["B/b L/c/t M"]:
        gain = shardops.all_gather("M/t/fsdp -> M", w.gain)
        return shardops.einsum_unreduced("B/b L/c/t M, M -> B/b L/c/t M", super().mlp(x, w), gain)
