"""GPT-2 (Radford et al. 2019): a second model for train.py, chosen by `model.module: gpt2`.

    python -m train --config-name=gpt2_124m

Learned positions, LayerNorm with biases, GELU, one table for embedding and output, dropout. Dims and axes are those of
train.py, besides P, the learned positions. All that train.py and the tools ask of a model is here: the settings
(ModelConfig), the weights and what each is (weight_table), the math (embed, layers, logits), what is gathered ahead of
it (gather_ends, gather_layers), and the exchange with Hugging Face. docs/models.md builds a model along these lines.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp8
from configuration import check_ranges
from jax_extra import explicit_activation_checkpointing, save_for_backward, unrolled
from shardlib import shardops
from shardlib.pipeline import LayerNumbers, skip_padding
from shardlib.shardtypes import Array, dtype_name, f32, i32, pytree_dataclass, typed, u32
from weights import Weight, matrix, vector

act = dtype_name("act")


@dataclasses.dataclass
class ModelConfig:
    module: str = "gpt2"
    vocab: int = 50304
    """Token ids; GPT-2's are 50257, here rounded up for the mesh. Sharded over t."""
    positions: int = 1024
    """Learned positions: the longest sequence. Sharded over t."""
    d_model: int = 768
    """Width of the residual stream. A multiple of t·d·p devices."""
    layers: int = 12
    heads: int = 12
    """Sharded over t; their width d_model / heads is sharded over d at rest."""
    dropout: float = 0.0
    """Probability, in [0, 1), that an entry of embeddings, attention weights and layer outputs is 0 while training."""
    norm_epsilon: float = 1e-5
    """Added to the variance under the root of LayerNorm (arXiv 1607.06450)."""
    init_std: float = 0.02
    """Standard deviation of matrices and tables at init; of what is added to the residual stream over √(2·layers)."""
    bos_id: int = 50256
    """The token id that stands before the first of each document: <|endoftext|>."""

    sharded: ClassVar[dict[str, str]] = {
        "vocab": "t",
        "positions": "t",
        "d_model": "t·d·p",
        "heads": "t",
        "d_head": "d",
        "d_ff": "t·d",
    }

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    @property
    def d_ff(self) -> int:
        return 4 * self.d_model

    def check(self, seq_len: int) -> None:
        """Raises ValueError for a setting out of its range, and for sequences longer than there are positions."""
        check_ranges("model", self, dict.fromkeys(("positions", "d_model", "heads"), (1, 2**63)))
        check_ranges("model", self, {"dropout": (0, 1), "norm_epsilon": (0, math.inf), "init_std": (0, math.inf)})
        if self.d_model % self.heads:
            raise ValueError(f"model.d_model is {self.d_model}; it must be a multiple of model.heads = {self.heads}.")
        if seq_len > self.positions:
            raise ValueError(f"sequences have {seq_len} tokens, but model.positions is {self.positions}; raise it.")


# ---- weights ----------------------------------------------------------------------------------------------------


@pytree_dataclass
class GPT2Layer:
    attention_gain: f32["M/t/d"]
    attention_bias: f32["M/t/d"]
    w_q: f32["M/d K/t D"]
    w_k: f32["M/d K/t D"]
    w_v: f32["M/d K/t D"]
    b_q: f32["K/t D/d"]
    b_k: f32["K/t D/d"]
    b_v: f32["K/t D/d"]
    w_o: f32["K/t D M/d"]
    b_o: f32["M/t/d"]
    mlp_gain: f32["M/t/d"]
    mlp_bias: f32["M/t/d"]
    w_up: f32["M/d F/t"]
    b_up: f32["F/t/d"]
    w_down: f32["F/t M/d"]
    b_down: f32["M/t/d"]


@pytree_dataclass
class GPT2:
    embed: f32["V/t M/d/p"]
    positions: f32["P/t M/d/p"]
    layers: Array["layers/p", GPT2Layer]
    final_gain: f32["M/t/d/p"]
    final_bias: f32["M/t/d/p"]


def weight_table(c: ModelConfig) -> GPT2:
    """What each weight is, and how it starts: normal with init_std, gains at 1, biases at 0."""
    n, model, heads, hidden = c.layers, (c.d_model,), (c.heads, c.d_head), (c.d_ff,)
    into = lambda outputs: matrix(n, model, outputs, c.init_std * math.sqrt(c.d_model))
    to_stream = lambda inputs: matrix(n, inputs, model, c.init_std * math.sqrt(math.prod(inputs) / (2 * n)))
    return GPT2(
        embed=Weight((c.vocab, c.d_model), "unembedding", c.init_std),
        positions=Weight((c.positions, c.d_model), "embedding", c.init_std),
        layers=GPT2Layer(
            attention_gain=vector(n, c.d_model, value=1),
            attention_bias=vector(n, c.d_model, value=0),
            w_q=into(heads),
            w_k=into(heads),
            w_v=into(heads),
            b_q=vector(n, *heads, value=0),
            b_k=vector(n, *heads, value=0),
            b_v=vector(n, *heads, value=0),
            w_o=to_stream(heads),
            b_o=vector(n, c.d_model, value=0),
            mlp_gain=vector(n, c.d_model, value=1),
            mlp_bias=vector(n, c.d_model, value=0),
            w_up=into(hidden),
            b_up=vector(n, c.d_ff, value=0),
            w_down=to_stream(hidden),
            b_down=vector(n, c.d_model, value=0),
        ),
        final_gain=vector(c.d_model, value=1),
        final_bias=vector(c.d_model, value=0),
    )


# ---- forward pass -----------------------------------------------------------------------------------------------


@typed
def layer_norm(x: act["B/r/d L/t M"], gain: f32["M/t/d"], bias: f32["M/t/d"], epsilon: float) -> act["B/r/d L/t M"]:
    """Each position to mean 0 and variance 1, times the gain, plus the bias (arXiv 1607.06450); in f32."""
    x32 = jnp.float32(x)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centered * lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    gain, bias = (shardops.all_gather("M/t/d -> M", vector) for vector in (gain, bias))
    scaled = shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", normed, gain)
    return (scaled + shardops.broadcast("M -> B/r/d L/t M", bias)).astype(x.dtype)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """`x` with entries 0 with probability `rate`, the others over 1 - rate; `keys`: one for each leading index."""
    if keys is None:
        return x
    trailing = x.shape[keys.ndim :]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, trailing))(keys.reshape(-1)).reshape(x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class DropoutKeys:
    """Keys that depend on the row, and on where in it an entry stands: not on the mesh, nor on microbatches."""

    rows: jax.Array | None
    """A key for each row of this device, in this layer; None for no dropout."""

    def of_positions(self, site: int, length: int) -> jax.Array | None:
        """keys[B, length / t]: for each of this device's own positions."""
        return self._of_blocks(site, length // shardops.axis_size("t"))

    def of_heads(self, site: int, heads: int) -> jax.Array | None:
        """keys[B, heads]: for each of this device's own heads."""
        return self._of_blocks(site, heads)

    def _of_blocks(self, site: int, own: int) -> jax.Array | None:
        if self.rows is None:
            return None
        index = shardops.axis_index("t") * own + jnp.arange(own)
        at = lambda row: jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(row, site), i))(index)
        return jax.vmap(at)(self.rows)


@typed
def layer(
    x: act["B/r/d L/t M"], w: GPT2Layer, attend: Callable, cache: Any, keys: DropoutKeys, c: ModelConfig
) -> tuple[act["B/r/d L/t M"], Any]:
    gather, broadcast, dtype = shardops.all_gather, shardops.broadcast, x.dtype
    einsum = fp8.if_chosen(shardops.einsum_unreduced)

    nx = gather("B/r/d L/t M -> B/r/d L M", layer_norm(x, w.attention_gain, w.attention_bias, c.norm_epsilon))

    def heads(weight, bias):
        product = einsum(
            "B/r/d L M, M K/t D -> B/r/d L K/t D", nx, gather("M/d K/t D -> M K/t D", weight.astype(dtype))
        )
        bias = gather("K/t D/d -> K/t D", bias.astype(dtype))
        return save_for_backward(product + broadcast("K/t D -> B/r/d L K/t D", bias))

    q: act["B/r/d L K/t D"] = heads(w.w_q, w.b_q)
    k: act["B/r/d L K/t D"] = heads(w.w_k, w.b_k)
    v: act["B/r/d L K/t D"] = heads(w.w_v, w.b_v)
    drop_weights = lambda weights: dropout(weights, c.dropout, keys.of_heads(0, weights.shape[1]))
    drop_weights = None if keys.rows is None else drop_weights
    attended, cache = attend(q[..., None, :], k, v, cache, drop_weights)  # one query head for each of keys
    attended: act["B/r/d L K/t D"] = save_for_backward(attended[..., 0, :])
    w_o = gather("K/t D M/d -> K/t D M", w.w_o.astype(dtype))
    out = einsum("B/r/d L K/t D, K/t D M -> B/r/d L M +t", attended, w_o)
    out = shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)
    out = out + broadcast("M -> B/r/d L/t M", gather("M/t/d -> M", w.b_o.astype(dtype)))
    x = save_for_backward(x + dropout(out, c.dropout, keys.of_positions(1, nx.shape[1])))

    nx = gather("B/r/d L/t M -> B/r/d L M", layer_norm(x, w.mlp_gain, w.mlp_bias, c.norm_epsilon))
    up = einsum("B/r/d L M, M F/t -> B/r/d L F/t", nx, gather("M/d F/t -> M F/t", w.w_up.astype(dtype)))
    up = save_for_backward(up + broadcast("F/t -> B/r/d L F/t", gather("F/t/d -> F/t", w.b_up.astype(dtype))))
    hidden: act["B/r/d L F/t"] = jax.nn.gelu(up, approximate=True)
    w_down = gather("F/t M/d -> F/t M", w.w_down.astype(dtype))
    out = einsum("B/r/d L F/t, F/t M -> B/r/d L M +t", hidden, w_down)
    out = shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)
    out = out + broadcast("M -> B/r/d L/t M", gather("M/t/d -> M", w.b_down.astype(dtype)))
    return x + dropout(out, c.dropout, keys.of_positions(2, nx.shape[1])), cache


@typed
def embed(
    w: GPT2, ids: u32["B/r/d L"], positions: i32["B/r/d L"], c: ModelConfig, row_seeds: u32["B/r/d"] | None
) -> act["B/r/d L/t M"]:
    """What enters the first layer. `row_seeds`: a random number for each row, for dropout; None: none."""
    # In f32 for the backward pass, where a frequent token's row adds up thousands of gradients.
    x = shardops.index_unreduced("[V/t] M, B/r/d L -> B/r/d L M +t", w.embed.astype(jnp.float32), ids)
    x = x + shardops.index_unreduced("[P/t] M, B/r/d L -> B/r/d L M +t", w.positions, positions)
    x = shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", x.astype(act.dtype))
    return dropout(x, c.dropout, DropoutKeys(row_keys(row_seeds)).of_positions(3, ids.shape[1]))


def row_keys(row_seeds: jax.Array | None) -> jax.Array | None:
    return None if row_seeds is None else jax.vmap(jax.random.key)(row_seeds)


@typed
def layers(
    w: Array["layers/p", GPT2Layer],
    x: act["B/r/d L/t M"],
    positions: i32["B/r/d L"],
    c: ModelConfig,
    attend: Callable,
    caches: Any,
    numbers: LayerNumbers,
    row_seeds: u32["B/r/d"] | None,
) -> tuple[act["B/r/d L/t M"], Any]:
    """The layers `numbers`: all of them, or those of a pipeline stage. train.forward tells about `attend`, `caches`."""
    rows = row_keys(row_seeds)

    @explicit_activation_checkpointing(of_layers=len(numbers.index))
    @skip_padding
    def body(x, of_layer):
        layer_weights, number, cache = of_layer
        in_layer = None if rows is None else jax.vmap(lambda key: jax.random.fold_in(key, number.index))(rows)
        return layer(x, layer_weights, attend, cache, DropoutKeys(in_layer), c)

    return lax.scan(body, x, (w, numbers, caches), unroll=unrolled(len(numbers.index)))


@typed
def logits(w: GPT2, x: act["B/r/d L/t M"], c: ModelConfig) -> f32["B/r/d L V/t"]:
    nx = shardops.all_gather("B/r/d L/t M -> B/r/d L M", layer_norm(x, w.final_gain, w.final_bias, c.norm_epsilon))
    spec = "B/r/d L M, V/t M -> B/r/d L V/t"
    return shardops.einsum_unreduced(spec, nx, w.embed, preferred_element_type=jnp.float32)


@typed
def gather_ends(w: GPT2) -> GPT2:
    """With the weights outside of the layers gathered over d, and over p, where a pipeline stage could not do so."""
    gather, vector = shardops.all_gather, "M/t/d/p -> M *t *d *p"
    return dataclasses.replace(
        w,
        embed=gather("V/t M/d/p -> V/t M *d *p", w.embed.astype(act.dtype)),
        positions=gather("P/t M/d/p -> P/t M *d *p", w.positions),
        final_gain=gather(vector, w.final_gain),
        final_bias=gather(vector, w.final_bias),
    )


@typed
def gather_layers(w: Array["layers/p", GPT2Layer]) -> Array["layers/p", GPT2Layer]:
    """The layers' weights cast and gathered over d, once for all microbatches; their gradients are scattered once."""
    cast = lambda spec, x: shardops.all_gather(spec, x.astype(act.dtype))
    vectors = lambda x: shardops.all_gather("layers/p M/t/d -> layers/p M *t *d", x)
    biases = lambda x: cast("layers/p M/t/d -> layers/p M *t *d", x)
    into_heads = lambda x: cast("layers/p M/d K/t D -> layers/p M K/t D *d", x)
    of_heads = lambda x: cast("layers/p K/t D/d -> layers/p K/t D *d", x)
    return GPT2Layer(
        attention_gain=vectors(w.attention_gain),
        attention_bias=vectors(w.attention_bias),
        w_q=into_heads(w.w_q),
        w_k=into_heads(w.w_k),
        w_v=into_heads(w.w_v),
        b_q=of_heads(w.b_q),
        b_k=of_heads(w.b_k),
        b_v=of_heads(w.b_v),
        w_o=cast("layers/p K/t D M/d -> layers/p K/t D M *d", w.w_o),
        b_o=biases(w.b_o),
        mlp_gain=vectors(w.mlp_gain),
        mlp_bias=vectors(w.mlp_bias),
        w_up=cast("layers/p M/d F/t -> layers/p M F/t *d", w.w_up),
        b_up=cast("layers/p F/t/d -> layers/p F/t *d", w.b_up),
        w_down=cast("layers/p F/t M/d -> layers/p F/t M *d", w.w_down),
        b_down=biases(w.b_down),
    )


# ---- exchange with transformers: docs/huggingface.md says what the two functions take and give -----------------------

_LAYER = {  # transformers' name in a layer: our weights of it, side by side along its output dim
    "ln_1.weight": ("attention_gain",),
    "ln_1.bias": ("attention_bias",),
    "attn.c_attn.weight": ("w_q", "w_k", "w_v"),
    "attn.c_attn.bias": ("b_q", "b_k", "b_v"),
    "attn.c_proj.weight": ("w_o",),
    "attn.c_proj.bias": ("b_o",),
    "ln_2.weight": ("mlp_gain",),
    "ln_2.bias": ("mlp_bias",),
    "mlp.c_fc.weight": ("w_up",),
    "mlp.c_fc.bias": ("b_up",),
    "mlp.c_proj.weight": ("w_down",),
    "mlp.c_proj.bias": ("b_down",),
}
_WHOLE = {
    "wte.weight": "embed",
    "wpe.weight": "positions",
    "ln_f.weight": "final_gain",
    "ln_f.bias": "final_bias",
}
_FIXED = {  # what our math does, under transformers' names
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_huggingface(weights: GPT2, c: ModelConfig) -> tuple[dict, dict[str, Callable[[], np.ndarray]]]:
    """config.json and tensors of a GPT2LMHeadModel."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocab,
        "n_positions": c.positions,
        "n_embd": c.d_model,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.d_ff,
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "layer_norm_epsilon": c.norm_epsilon,
        "initializer_range": c.init_std,
        **_FIXED,
    }

    def in_layer(i: int, names: tuple[str, ...]) -> np.ndarray:
        rows = c.d_ff if names == ("w_down",) else c.d_model
        parts = [getattr(weights.layers, name)[i] for name in names]
        return np.concatenate(
            [x.reshape(rows, -1) if name[0] == "w" else x.ravel() for name, x in zip(names, parts, strict=True)], -1
        )

    tensors = {f"transformer.{name}": partial(np.asarray, getattr(weights, ours)) for name, ours in _WHOLE.items()}
    for i in range(c.layers):
        tensors |= {f"transformer.h.{i}.{name}": partial(in_layer, i, ours) for name, ours in _LAYER.items()}
    return config, tensors


def from_huggingface(config: dict, tensors: Mapping) -> tuple[ModelConfig, GPT2]:
    """The model section and the weights of a GPT2LMHeadModel or GPT2Model.

    Raises:
        ValueError: config.json asks for other math, or a tensor is missing, unknown or of another shape.
    """
    for name, ours in _FIXED.items():
        if config.get(name, ours) != ours:
            raise ValueError(f"{name} is {config[name]!r} in config.json; gpt2.py has {ours!r} only.")
    rates = {config.get(f"{name}_pdrop", 0.1) for name in ("resid", "embd", "attn")}
    if len(rates) > 1:
        raise ValueError(f"resid_pdrop, embd_pdrop and attn_pdrop are {sorted(rates)}; gpt2.py has one rate for all.")
    sizes = {
        "vocab": "vocab_size",
        "positions": "n_positions",
        "d_model": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
    }
    absent = [name for name in sizes.values() if not isinstance(config.get(name), int)]
    if absent:
        raise ValueError(f"config.json gives no whole number for {', '.join(absent)}.")
    c = ModelConfig(
        **{ours: config[name] for ours, name in sizes.items()},
        dropout=rates.pop(),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        init_std=config.get("initializer_range", 0.02),
        bos_id=config["bos_token_id"],
    )
    if (config.get("n_inner") or c.d_ff) != c.d_ff:
        raise ValueError(f"n_inner is {config['n_inner']} in config.json; gpt2.py has 4·n_embd = {c.d_ff} only.")
    table = weight_table(c)
    prefix = "transformer." if "transformer.wte.weight" in tensors else ""
    used = {prefix + name for name in _WHOLE} | {f"{prefix}h.{i}.{name}" for i in range(c.layers) for name in _LAYER}
    # Masks that older versions saved, and the tied output projection.
    known = {f"{prefix}h.{i}.attn.{name}" for i in range(c.layers) for name in ("bias", "masked_bias")} | {
        "lm_head.weight"
    }
    for what, names in (("lacks", used - set(tensors)), ("has, beyond GPT-2's,", set(tensors) - used - known)):
        if names:
            raise ValueError(f"the model {what} {len(names)} tensors, among them {min(names)}.")

    def read(name: str, ours: tuple[str, ...], part: int) -> np.ndarray:
        shape = getattr(table.layers, ours[part]).shape[1:]
        whole = tensors[prefix + name]
        if whole.size != len(ours) * math.prod(shape):
            raise ValueError(
                f"{prefix}{name} is {list(whole.shape)}; config.json asks for {len(ours)} of {list(shape)}."
            )
        return np.split(whole, len(ours), axis=-1)[part].reshape(shape)

    layers = {}
    for name, ours in _LAYER.items():
        for part, field in enumerate(ours):
            layers[field] = [partial(read, f"h.{i}.{name}", ours, part) for i in range(c.layers)]
    whole = {ours: partial(tensors.__getitem__, prefix + name) for name, ours in _WHOLE.items()}
    return c, GPT2(layers=GPT2Layer(**layers), **whole)
