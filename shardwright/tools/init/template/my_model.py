"""The Llama of shardwright's train.py, with an MLP of squared ReLU (arXiv 2109.08668) in place of
SwiGLU.
"""

import dataclasses

import jax

from shardlib import shardops
from shardlib.shardtypes import Array, pytree_dataclass, typed
from shardwright.jax_extra import save_for_backward
from shardwright.modeling import settings
from shardwright.modeling.model import act
from shardwright.modeling.weights import gain, matrix
from shardwright.train import Llama, Transformer, rms_norm


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    """Settings of the model."""

    module: str = "my_model"


@pytree_dataclass
class Layer:
    """Weights of a layer: inputs -> outputs, sharded as at rest.

    A layer gathers them over the axes of fsdp.
    """

    attention_norm: gain["M"]
    w_q: matrix["M/fsdp -> K/t Q D"]
    w_k: matrix["M/fsdp -> K/t D"]
    w_v: matrix["M/fsdp -> K/t D"]
    q_norm: gain["D if qk_norm"]
    k_norm: gain["D if qk_norm"]
    w_o: matrix["K/t Q D -> M/fsdp"]
    mlp_norm: gain["M"]
    w_up: matrix["M/fsdp -> F/t"]
    w_down: matrix["F/t -> M/fsdp"]


@pytree_dataclass
class Weights(Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


class Model(Llama):
    """The model, whose layers have no gate."""

    Weights = Weights

    @typed
    def mlp(self, x: act["B/b L/c/t M"], w: Layer) -> act["B/b L/c/t M"]:
        mlp_norm = shardops.all_gather("M/t/fsdp -> M", w.mlp_norm)
        nx = rms_norm(x, mlp_norm, self.config.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        w_up = shardops.all_gather("M/fsdp F/t -> M F/t", w.w_up)
        up = save_for_backward(shardops.matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_up))
        hidden = jax.nn.relu(up) ** 2
        w_down = shardops.all_gather("F/t M/fsdp -> F/t M", w.w_down)
        out = shardops.matmul("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, w_down)
        return shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
