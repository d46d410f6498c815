"""GPT-2 (Radford et al. 2019), a second model for train.py.

The setting `model.module: gpt2` chooses it.

    python -m train --config-name=gpt2_124m

It has learned positions, LayerNorm with biases, GELU, one table for embedding and output, and
dropout. Dims and axes are those of train.py, and P, the learned positions. A model has these parts:
its settings (ModelConfig), its weights, its math (Model), and the exchange with Hugging Face.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardwright.data.checks import TUNABLE, at_least_0, check_ranges, within
from shardwright.huggingface import Layers, Names, check_fixed
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.attention import Attention
from shardwright.modeling.masks import CAUSAL
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias, embedding, gain, matrix, table_of, unembedding


@dataclasses.dataclass
class ModelConfig:
    """Settings of GPT-2."""

    module: str = "gpt2"
    vocab: int = 50304
    """Number of token ids: the 50257 of GPT-2, rounded up for the mesh. Sharded over t and p."""
    positions: int = within(1, 2**25, 1024)
    """Number of learned positions, the length of the longest sequence. Sharded over t and p."""
    d_model: int = within(1, 2**24, 768)
    """Width of the residual stream. A multiple of c·d·e devices, and of p."""
    layers: int = within(1, 2**16, 12)
    heads: int = within(1, 2**24, 12)
    """Sharded over t. Each has d_model / heads entries."""
    dropout: float = within(0, 1, 0.0, TUNABLE)
    """Probability, in [0, 1), that an entry of embeddings, attention weights and layer outputs is 0
    while training."""
    norm_epsilon: float = at_least_0(1e-5)
    """Added to the variance under the root of LayerNorm (arXiv 1607.06450)."""
    init_std: float = at_least_0(0.02, TUNABLE)
    """Standard deviation of matrices and tables at init; divided by √(2·layers) for w_o and
    w_down."""
    bos_id: int = 50256
    """Token id before the first of each document: <|endoftext|>."""

    dims: ClassVar[dict[str, str]] = {
        "V": "vocab",
        "P": "positions",
        "M": "d_model",
        "K": "heads",
        "D": "d_head",
        "F": "d_ff",
    }

    @property
    def d_head(self) -> int:
        """Number of entries of a head."""
        return self.d_model // self.heads

    @property
    def d_ff(self) -> int:
        """Width of the MLP."""
        return 4 * self.d_model

    def check(self, seq_len: int) -> None:
        """Raises ValueError if `heads` do not divide `d_model`, and for sequences longer than
        `positions`.
        """
        if self.d_model % self.heads:
            raise ValueError(
                f"model.d_model is {self.d_model}; it must be a multiple of model.heads = "
                f"{self.heads}."
            )
        if seq_len > self.positions:
            raise ValueError(
                f"sequences have {seq_len} tokens, but model.positions is {self.positions}; raise "
                "it."
            )


# ---- weights -------------------------------------------------------------------------------------


@pytree_dataclass
class GPT2Layer:
    """Weights of one layer: inputs -> outputs, sharded as at rest."""

    attention_gain: gain["M"]
    attention_bias: bias["M", f32]
    w_q: matrix["M/fsdp -> K/t D"]
    w_k: matrix["M/fsdp -> K/t D"]
    w_v: matrix["M/fsdp -> K/t D"]
    b_q: bias["K/t D"]
    b_k: bias["K/t D"]
    b_v: bias["K/t D"]
    w_o: matrix["K/t D -> M/fsdp"]
    b_o: bias["M"]
    mlp_gain: gain["M"]
    mlp_bias: bias["M", f32]
    w_up: matrix["M/fsdp -> F/t"]
    b_up: bias["F/t"]
    w_down: matrix["F/t -> M/fsdp"]
    b_down: bias["M"]


@pytree_dataclass
class GPT2:
    """Weights of the model."""

    embed: unembedding["V/t/p M/fsdp"]
    positions: embedding["P/t/p M/fsdp", f32]
    layers: Array["layers/p", GPT2Layer]
    final_gain: gain["M/p"]
    final_bias: bias["M/p", f32]


# ---- forward pass --------------------------------------------------------------------------------


@typed
def layer_norm(
    x: act["B/b L/c/t M"], gain: f32["M"], bias: f32["M"], epsilon: float
) -> act["B/b L/c/t M"]:
    """LayerNorm of each position (arXiv 1607.06450), in f32: mean 0 and variance 1, times the gain,
    plus the bias.
    """
    x32 = jnp.float32(x)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centered * lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    scaled = shardops.einsum_unreduced("B/b L/c/t M, M -> B/b L/c/t M", normed, gain)
    normed = scaled + shardops.broadcast("M -> B/b L/c/t M", bias)
    return save_for_backward(normed.astype(x.dtype), cheap=True)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Sets entries of x to 0 with probability `rate`, and divides the others by 1 - rate.

    `keys` has a random key for each leading index of x. None: x stays as it is.
    """
    if keys is None:
        return x
    trailing = x.shape[keys.ndim :]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, trailing))(
        keys.reshape(-1)
    ).reshape(x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def keys_at(keys: jax.Array | None, site: int, count: int, axes: str = "c t") -> jax.Array | None:
    """Keys [B, count] of this device's own positions or heads, which do not depend on the mesh or
    on microbatches.

    Args:
        keys: key of each sequence of this device, in this layer; None without dropout.
        site: number of this use of dropout in the layer.
        count: number of the positions or heads that this device has.
        axes: those that shard them, major to minor.
    """
    if keys is None:
        return None
    device = functools.reduce(
        lambda i, axis: i * shardops.axis_size(axis) + shardops.axis_index(axis), axes.split(), 0
    )
    index = device * count + jnp.arange(count)

    def fold_in(key):
        return jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, site), i))(index)

    return jax.vmap(fold_in)(keys)


class Model:
    """The math of GPT-2."""

    Weights = GPT2

    def __init__(self, config: ModelConfig):
        """Weights begin normal with init_std, gains at 1, biases at 0."""
        into_stream = {"std": config.init_std / math.sqrt(2 * config.layers)}
        changes = {"positions": {"std": config.init_std}, "w_o": into_stream, "w_down": into_stream}
        self.config = config
        self.table = table_of(GPT2, config, lambda fan_in: config.init_std, changes)

    @typed
    def embed(self, w: GPT2, tokens: Tokens) -> act["B/b L/c/t M"]:
        """Residual stream before the first layer."""
        # f32, because the gradient of a frequent token is a sum of thousands, which bf16 would
        # round.
        embed = shardops.all_gather("V/t/p M/fsdp -> V/t/p M", w.embed).astype(jnp.float32)
        positions = shardops.all_gather("P/t/p M/fsdp -> P/t/p M", w.positions)
        x = shardops.index_unreduced("[V/t/p] M, B/b L/c -> B/b L/c M +t +p", embed, tokens.ids)
        x = x + shardops.index_unreduced(
            "[P/t/p] M, B/b L/c -> B/b L/c M +t +p", positions, tokens.positions
        )
        x = shardops.psum_scatter("B/b L/c M +t +p -> B/b L/c/t M +p", x.astype(act.dtype))
        x = shardops.psum("B/b L/c/t M +p -> B/b L/c/t M", x)
        return dropout(x, self.config.dropout, keys_at(tokens.keys, 3, x.shape[1]))

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: GPT2Layer, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """One transformer layer."""
        gather, broadcast = shardops.all_gather, shardops.broadcast
        rate = self.config.dropout
        epsilon = self.config.norm_epsilon
        keys = tokens.keys

        gain = gather("M/t/fsdp -> M", w.attention_gain)
        bias = gather("M/t/fsdp -> M", w.attention_bias)
        nx = gather("B/b L/c/t M -> B/b L/c M", layer_norm(x, gain, bias, epsilon))

        def heads(weight, bias):
            weight = gather("M/fsdp K/t D -> M K/t D", weight)
            product = shardops.matmul("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, weight)
            bias = gather("K/t D/fsdp -> K/t D", bias)
            return save_for_backward(product + broadcast("K/t D -> B/b L/c K/t D", bias))

        q: act["B/b L/c K/t D"] = heads(w.w_q, w.b_q)
        k: act["B/b L/c K/t D"] = heads(w.w_k, w.b_k)
        v: act["B/b L/c K/t D"] = heads(w.w_v, w.b_v)

        def drop(weights):
            return dropout(weights, rate, keys_at(keys, 0, weights.shape[1], "t"))

        # One query head for each key head.
        attended = attention(q[..., None, :], k, v, CAUSAL, drop=None if keys is None else drop)
        attended: act["B/b L/c K/t D"] = save_for_backward(attended[..., 0, :])
        w_o = gather("K/t D M/fsdp -> K/t D M", w.w_o)
        out = shardops.matmul("B/b L/c K/t D, K/t D M -> B/b L/c M +t", attended, w_o)
        out = shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
        b_o = gather("M/t/fsdp -> M", w.b_o)
        out = out + broadcast("M -> B/b L/c/t M", b_o)
        x = save_for_backward(x + dropout(out, rate, keys_at(keys, 1, x.shape[1])))

        gain = gather("M/t/fsdp -> M", w.mlp_gain)
        bias = gather("M/t/fsdp -> M", w.mlp_bias)
        nx = gather("B/b L/c/t M -> B/b L/c M", layer_norm(x, gain, bias, epsilon))
        w_up = gather("M/fsdp F/t -> M F/t", w.w_up)
        up = shardops.matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_up)
        b_up = gather("F/t/fsdp -> F/t", w.b_up)
        up = save_for_backward(up + broadcast("F/t -> B/b L/c F/t", b_up))
        hidden: act["B/b L/c F/t"] = jax.nn.gelu(up, approximate=True)
        hidden = save_for_backward(hidden, cheap=True)
        w_down = gather("F/t M/fsdp -> F/t M", w.w_down)
        out = shardops.matmul("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, w_down)
        out = shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
        b_down = gather("M/t/fsdp -> M", w.b_down)
        out = out + broadcast("M -> B/b L/c/t M", b_down)
        return x + dropout(out, rate, keys_at(keys, 2, x.shape[1]))

    @typed
    def logits(self, w: GPT2, x: act["B/b L/c/t M"]) -> act["B/b L/c V/t/p"]:
        """Logits of the token after each position."""
        final_gain = shardops.all_gather("M/t/fsdp/p -> M", w.final_gain)
        final_bias = shardops.all_gather("M/t/fsdp/p -> M", w.final_bias)
        nx = layer_norm(x, final_gain, final_bias, self.config.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        unembed = shardops.all_gather("V/t/p M/fsdp -> V/t/p M", w.embed)
        return shardops.einsum_unreduced("B/b L/c M, V/t/p M -> B/b L/c V/t/p", nx, unembed)


# ---- exchange with transformers: docs/huggingface.md describes the two functions -----------------

_SETTINGS = {
    "vocab": "vocab_size",
    "positions": "n_positions",
    "d_model": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "dropout": "resid_pdrop",
    "norm_epsilon": "layer_norm_epsilon",
    "init_std": "initializer_range",
}
_FIXED = {  # our math, under transformers' names
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_NAMES = Names(
    family="GPT-2",
    whole={
        "embed": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "final_gain": "transformer.ln_f.weight",
        "final_bias": "transformer.ln_f.bias",
    },
    layers=[
        Layers(
            {
                "transformer.h.{}.ln_1.weight": ("attention_gain",),
                "transformer.h.{}.ln_1.bias": ("attention_bias",),
                "transformer.h.{}.attn.c_attn.weight": ("w_q", "w_k", "w_v"),
                "transformer.h.{}.attn.c_attn.bias": ("b_q", "b_k", "b_v"),
                "transformer.h.{}.attn.c_proj.weight": ("w_o",),
                "transformer.h.{}.attn.c_proj.bias": ("b_o",),
                "transformer.h.{}.ln_2.weight": ("mlp_gain",),
                "transformer.h.{}.ln_2.bias": ("mlp_bias",),
                "transformer.h.{}.mlp.c_fc.weight": ("w_up",),
                "transformer.h.{}.mlp.c_fc.bias": ("b_up",),
                "transformer.h.{}.mlp.c_proj.weight": ("w_down",),
                "transformer.h.{}.mlp.c_proj.bias": ("b_down",),
            }
        )
    ],
    transposed=False,
    base="transformer.",
    unused=r"lm_head\.weight|\.attn\.(masked_)?bias",  # older versions saved masks
)


def to_huggingface(weights: GPT2, c: ModelConfig) -> tuple[dict, dict[str, np.ndarray]]:
    """Content of config.json and tensors of a GPT2LMHeadModel.

    Raises ValueError for weights that it does not have.
    """
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    config |= {theirs: getattr(c, ours) for ours, theirs in _SETTINGS.items()}
    config |= {"embd_pdrop": c.dropout, "attn_pdrop": c.dropout, "n_inner": c.d_ff}
    return config | _FIXED, _NAMES.to_tensors(weights, Model(c).table)


def from_huggingface(config: dict, tensors: Mapping) -> tuple[ModelConfig, GPT2]:
    """The model section and the weights of a GPT2LMHeadModel or GPT2Model.

    Raises:
        ValueError: config.json has other math or a value out of range, or a tensor is missing or
            unknown.
    """
    dropout_rate = config["resid_pdrop"]
    if others := [
        name
        for name in ("attn_pdrop", "embd_pdrop")
        if config.get(name, dropout_rate) != dropout_rate
    ]:
        raise ValueError(
            f"config.json: {others[0]} is {config[others[0]]} and resid_pdrop {dropout_rate}; make "
            "them the same."
        )
    check_fixed(
        config, _FIXED | {"n_inner": None if config["n_inner"] is None else 4 * config["n_embd"]}
    )
    settings = {ours: config[theirs] for ours, theirs in _SETTINGS.items()}
    c = ModelConfig(**settings, bos_id=config["bos_token_id"])
    check_ranges("config.json, as a run has it: model", c)
    c.check(seq_len=1)
    return c, _NAMES.from_tensors(tensors, Model(c).table)
