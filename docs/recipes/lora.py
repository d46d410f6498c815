"""The Llama of train.py with LoRA (arXiv 2106.09685) of rank 8 on w_q and w_v: model.module=lora.

docs/changing.md has the settings.
"""

import dataclasses

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import Array, pytree_dataclass, typed
from shardwright.huggingface.families import from_huggingface as from_huggingface
from shardwright.huggingface.families import to_huggingface as to_huggingface
from shardwright.modeling.model import act
from shardwright.modeling.weights import matrix
from train import Llama, Transformer, TransformerLayer, rms_norm
from train import ModelConfig as ModelConfig


@pytree_dataclass
class Layer(TransformerLayer):
    """Weights of one layer."""

    lora_qa: matrix["M/t/fsdp -> 8"]
    lora_qb: matrix["8 -> K/t Q D/fsdp"]
    lora_va: matrix["M/t/fsdp -> 8"]
    lora_vb: matrix["8 -> K/t D/fsdp"]


@pytree_dataclass
class Weights(Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


class Model(Llama):
    """The model."""

    Weights = Weights

    def __init__(self, config: ModelConfig):
        super().__init__(config, lora_qb={"std": 0.0}, lora_vb={"std": 0.0})

    @typed
    def heads(
        self, x: act["B/b L/c/t M"], w: Layer
    ) -> tuple[act["B/b L/c K/t Q D"], act["B/b L/c K/t D"], act["B/b L/c K/t D"]]:
        q, k, v = super().heads(x, w)
        attention_norm = shardops.all_gather("M/t/fsdp -> M", w.attention_norm)
        nx = rms_norm(x, attention_norm, self.config.norm_epsilon)
        q_low, v_low = self.low(nx, w.lora_qa), self.low(nx, w.lora_va)
        qb = shardops.all_gather("8 K/t Q D/fsdp -> 8 K/t Q D", w.lora_qb)
        q = q + shardops.matmul("B/b L/c 8, 8 K/t Q D -> B/b L/c K/t Q D", q_low, qb)
        vb = shardops.all_gather("8 K/t D/fsdp -> 8 K/t D", w.lora_vb)
        v = v + shardops.matmul("B/b L/c 8, 8 K/t D -> B/b L/c K/t D", v_low, vb)
        return q, k, v

    def low(self, nx: jax.Array, factor: jax.Array) -> jax.Array:
        """Product with the first of two factors, whose 8 entries are gathered instead of M."""
        factor = shardops.all_gather("M/t/fsdp 8 -> M 8", factor)
        low = shardops.matmul("B/b L/c/t M, M 8 -> B/b L/c/t 8", nx, factor)
        return shardops.all_gather("B/b L/c/t 8 -> B/b L/c 8", low)

    def merged(self, w: Weights) -> Weights:
        """Weights of the model without the factors, which their products replace."""
        of = w.layers

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.einsum("lmr,lr...->lm...", a, b, precision="highest")

        new = {
            "w_q": of.w_q + product(of.lora_qa, of.lora_qb),
            "w_v": of.w_v + product(of.lora_va, of.lora_vb),
        }
        new |= dict.fromkeys(("lora_qa", "lora_qb", "lora_va", "lora_vb"))
        return dataclasses.replace(w, layers=dataclasses.replace(of, **new))
