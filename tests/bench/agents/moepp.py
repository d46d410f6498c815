"""The mixture of experts of moe.py with zero, copy and constant experts (MoE++, arXiv 2410.07348)."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import Array, bool_, f32, pytree_dataclass, typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias, matrix
from shardwright.models import moe


@dataclasses.dataclass
class ModelConfig(moe.ModelConfig):
    module: str = "moepp"
    tau: float = 0.5
    dims: ClassVar[dict[str, str]] = moe.ModelConfig.dims | {"Z": "outputs"}

    @property
    def outputs(self) -> int:
        return self.experts + 3


@pytree_dataclass
class Layer(moe.Layer):
    router: matrix["M/t/fsdp -> Z", f32]
    mix: matrix["M/t/fsdp -> 2", f32]
    constant: bias["M", f32]


@pytree_dataclass
class Weights(moe.Weights):
    layers: Array["layers/p", Layer]


class Model(moe.Model):
    Weights = Weights

    @typed
    def layer_of_experts(
        self, x: act["B/b L/c/t M"], w: Layer, tokens: Tokens, attention: Attention
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        config = self.config
        product = functools.partial(jnp.einsum, precision="highest")
        attended = x + self.attend(x, w, tokens, attention)
        nx = self.mlp_input(x, attended, w)
        router = shardops.all_gather("M/t/fsdp Z -> M Z", w.router)
        formula = "B/b L/c/t M, M Z -> B/b L/c/t Z"
        logits = shardops.einsum_unreduced(formula, jnp.float32(nx), router, product=product)
        scores: f32["B/b L/c/t Z"] = jax.nn.softmax(logits, axis=-1)
        chosen: bool_["B/b L/c/t Z"] = moe.among_best(jax.lax.stop_gradient(scores), config.experts_per_token)
        weights = jnp.where(chosen, scores, 0.0)
        mlps: f32["B/b L/c/t E"] = weights[..., : config.experts]
        of_mlps = moe.Routing(mlps, mlps, mlps, chosen[..., : config.experts])
        out = moe.everywhere(nx, of_mlps, w, config)
        mix = shardops.all_gather("M/t/fsdp 2 -> M 2", w.mix)
        mix = shardops.einsum_unreduced("B/b L/c/t M, M 2 -> B/b L/c/t 2", jnp.float32(nx), mix)
        mix = jax.nn.softmax(mix, axis=-1)
        constant = shardops.all_gather("M/t/fsdp -> M", w.constant)
        copied, fixed = weights[..., -2], weights[..., -1]
        out = out + ((copied + fixed * mix[..., 0])[..., None] * nx).astype(x.dtype)
        part: f32["B/b L/c/t"] = fixed * mix[..., 1]
        part = shardops.einsum_unreduced("B/b L/c/t, M -> B/b L/c/t M", part, constant)
        counted = jnp.ones_like(tokens.ids, bool) if tokens.counted is None else tokens.counted
        counted = shardops.shard("B/b L/c -> B/b L/c/t", counted)
        loss = self.balance(scores, chosen, counted, tokens.target_count)
        return attended + self.branch(out + part.astype(x.dtype), w.mlp_out_norm), LayerAux(loss, {})

    @typed
    def balance(
        self,
        scores: f32["B/b L/c/t Z"],
        chosen: bool_["B/b L/c/t Z"],
        counted: bool_["B/b L/c/t"],
        targets: f32[""] | None,
    ) -> f32[""]:
        """The loss that balances all outputs of the router."""
        total, product = shardops.psum, shardops.einsum_unreduced
        mask = jnp.float32(counted)
        tokens = float(shardops.size("B") * shardops.size("L")) if targets is None else targets

        def sum_positions(x):
            return total("B/b Z +c +t -> B/b Z", product("B/b L/c/t Z -> B/b Z +c +t", mask[..., None] * x))

        length = total("B/b +c +t -> B/b", product("B/b L/c/t -> B/b +c +t", mask))
        mean = sum_positions(scores) / jnp.maximum(length, 1)[:, None]
        factors = jnp.array([1.0] * self.config.experts + [self.config.tau] * 3)
        choices = sum_positions(chosen) * factors
        loss = total("+b ->", product("B/b Z, B/b Z -> +b", choices, mean))
        return self.config.balance_loss * self.config.outputs * loss / tokens

    def check_paths(self, options: dict | None = None) -> None:
        """Has one path only."""
