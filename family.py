"""Relatives of the Llama: what Qwen2, Mistral, OLMo 2, SmolLM 3, Gemma 2 and Phi-3 change in train.py's, as switches.

    python -m tools.huggingface_to_checkpoint model=<one of them> output=runs/<name>

Any combination trains. docs/huggingface.md says which become models of transformers. Dims and axes are those of
train.py.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import train
from jax_extra import save_for_backward
from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardwright.modeling import rope, rules, settings
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.norms import rms_norm_of_heads
from shardwright.modeling.weights import vector
from shardwright_data.checks import above_0, at_least_1, check_choice


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    """Settings of the Llama, and switches. Without any it is the Llama."""

    module: str = "family"
    family: str | None = None
    """model_type that an export becomes, such as phi3. Null: the first with this math."""
    qkv_bias: bool = False
    """Biases of queries, keys and values (Qwen2)."""
    norms: str = "before"
    """Norms of attention and of the MLP: before, on their inputs; after, on their outputs (OLMo 2); both (Gemma 2)."""
    norm_offset: bool = False
    """Whether norms of positions multiply by 1 + weight (Gemma)."""
    qk_norm_all: bool = False
    """RMSNorm over all heads of the queries together, and over all of the keys (OLMo 2)."""
    window: int | None = at_least_1(None)
    """Positions that a query sees, including its own (Mistral 0.1). Null: all before it."""
    full_every: int | None = at_least_1(None)
    """Every so-manieth layer has no window (Gemma 2: 2). Null: all have it."""
    no_rope_every: int | None = at_least_1(None)
    """Every so-manieth layer has no RoPE (SmolLM 3: 4). Null: all have it."""
    attention_softcap: float | None = above_0(None)
    """Scores x become softcap·tanh(x/softcap) (Gemma 2). Null: no cap."""
    attention_scalar: int | None = at_least_1(None)
    """Products of queries and keys are divided by its root (Gemma 2). Null: d_head."""
    embedding_scaled: bool = False
    """Whether the embedding is multiplied by √d_model (Gemma)."""
    activation: str = "silu"
    """Activation of the MLP: silu, or gelu, approximated by tanh (Gemma)."""

    @property
    def sharded(self) -> dict[str, str]:
        """Sizes that axes of the mesh must divide, and the axes."""
        return settings.ModelConfig.sharded | ({"d_head": "c·d·e"} if self.qk_norm_all or self.qkv_bias else {})

    @property
    def period(self) -> int:
        """Number of layers after which their pattern repeats."""
        return math.lcm(self.full_every or 1, self.no_rope_every or 1)

    def check(self, seq_len: int) -> None:
        """Raises ValueError for settings that contradict each other."""
        super().check(seq_len)
        check_choice("model.norms", self.norms, ("before", "after", "both"))
        check_choice("model.activation", self.activation, ("silu", "gelu"))
        if self.layers % self.period:
            raise ValueError(
                f"model.layers is {self.layers}; full_every and no_rope_every ask for a multiple of {self.period}."
            )
        if self.full_every and not self.window:
            raise ValueError(f"model.full_every is {self.full_every}, but no layer has a window; set model.window.")
        if self.qk_norm and self.qk_norm_all:
            raise ValueError("model.qk_norm and model.qk_norm_all are both true; heads are normed once: choose one.")


# ---- weights ----------------------------------------------------------------------------------------------------


@pytree_dataclass
class Layer(train.TransformerLayer):
    """Weights of one layer. Those that the settings do not ask for are None."""

    attention_norm: f32["M/t/c/d/e"] >> f32["M"] | None
    mlp_norm: f32["M/t/c/d/e"] >> f32["M"] | None
    attention_out_norm: f32["M/t/c/d/e"] >> f32["M"] | None
    mlp_out_norm: f32["M/t/c/d/e"] >> f32["M"] | None
    q_norm_all: f32["K/t Q D/c/d/e"] >> f32["K/t Q D"] | None
    k_norm_all: f32["K/t D/c/d/e"] >> f32["K/t D"] | None
    b_q: f32["K/t Q D/c/d/e"] >> act["K/t Q D"] | None
    b_k: f32["K/t D/c/d/e"] >> act["K/t D"] | None
    b_v: f32["K/t D/c/d/e"] >> act["K/t D"] | None


@pytree_dataclass
class Weights(train.Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


def weight_table(c: ModelConfig) -> Weights:
    """Shape and initial values of each weight: those of the Llama, biases of 0, and norms that multiply by 1."""
    base, n, one = train.weight_table(c), c.layers, 0 if c.norm_offset else 1
    queries, keys = (c.n_kv, c.n_q_per_kv, c.d_head), (c.n_kv, c.d_head)
    when = lambda wanted, *shape, value=one: vector(n, *shape, value=value) if wanted else None
    changed = {
        "attention_norm": when(c.norms != "after", c.d_model),
        "mlp_norm": when(c.norms != "after", c.d_model),
        "attention_out_norm": when(c.norms != "before", c.d_model),
        "mlp_out_norm": when(c.norms != "before", c.d_model),
        "q_norm_all": when(c.qk_norm_all, *queries, value=1),
        "k_norm_all": when(c.qk_norm_all, *keys, value=1),
        "b_q": when(c.qkv_bias, *queries, value=0),
        "b_k": when(c.qkv_bias, *keys, value=0),
        "b_v": when(c.qkv_bias, *keys, value=0),
    }
    same = {field.name: getattr(base.layers, field.name) for field in dataclasses.fields(base.layers)}
    return Weights(base.embed, Layer(**same | changed), vector(c.d_model, value=one), base.unembed)


# ---- the model --------------------------------------------------------------------------------------------------


class Model(train.Llama):
    """The Llama, with the switches of ModelConfig."""

    Weights = Weights

    def __init__(self, c: ModelConfig):
        self.c, self.table, self.period = c, weight_table(c), c.period

    def rule_at(self, place: int) -> rules.Rule:
        """Who attends to whom in the layer at this place of its period."""
        c = self.c
        window = c.window and not (c.full_every and (place + 1) % c.full_every == 0)
        return rules.Rule(
            visible=(rules.causal, rules.same_document, *([rules.Window(c.window)] if window else [])),
            score=rules.SoftCap(c.attention_softcap) if c.attention_softcap else None,
            scale=c.attention_scalar**-0.5 if c.attention_scalar else None,
        )

    @typed
    def embed(self, w: Weights, tokens: Tokens) -> act["B/r/d/e L/c/t M"]:
        """Residual stream before the first layer."""
        x = super().embed(w, tokens)
        return x * math.sqrt(self.c.d_model) if self.c.embedding_scaled else x

    def normed(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        """RMSNorm of each position, in f32; without a weight, `x` itself."""
        if weight is None:
            return x
        unit = train.unit_rms(x, self.c.norm_epsilon)
        scaled = shardops.einsum_unreduced("B/r/d/e L/c/t M, M -> B/r/d/e L/c/t M", unit, weight)
        return (unit + scaled if self.c.norm_offset else scaled).astype(x.dtype)

    @typed
    def layer(
        self, x: act["B/r/d/e L/c/t M"], w: Layer, tokens: Tokens, attend: Callable, einsum: Callable
    ) -> act["B/r/d/e L/c/t M"]:
        """One transformer layer. Its weights are gathered."""
        out = self.attention(self.normed(x, w.attention_norm), w, tokens, attend, einsum)
        x = save_for_backward(x + self.normed(out, w.attention_out_norm))
        out = self.mlp(self.normed(x, w.mlp_norm), w, einsum)
        return x + self.normed(out, w.mlp_out_norm)

    @typed
    def attention(
        self, x: act["B/r/d/e L/c/t M"], w: Layer, tokens: Tokens, attend: Callable, einsum: Callable
    ) -> act["B/r/d/e L/c/t M"]:
        """Output of attention to `x`."""
        every, at, queries, keys = self.c.no_rope_every, "B/r/d/e L/c", "K/t Q D", "K/t D"
        nx = shardops.all_gather("B/r/d/e L/c/t M -> B/r/d/e L/c M", x)

        def heads(dims, weight, bias):
            y = einsum(f"{at} M, M {dims} -> {at} {dims}", nx, weight)
            return y if bias is None else y + shardops.broadcast(f"{dims} -> {at} {dims}", bias)

        def turned(dims, y, name):
            y = self.head_norm(f"{at} {dims}", y, w, name)
            return save_for_backward(y if every and (tokens.place + 1) % every == 0 else rope.rotate(y, tokens.shared))

        q = turned(queries, heads(queries, w.w_q, w.b_q), "q_norm")
        k = turned(keys, heads(keys, w.w_k, w.b_k), "k_norm")
        v = save_for_backward(heads(keys, w.w_v, w.b_v))
        attended = save_for_backward(attend(q, k, v, self.rule_at(tokens.place)))
        out = einsum("B/r/d/e L/c K/t Q D, K/t Q D M -> B/r/d/e L/c M +t", attended, w.w_o)
        return shardops.psum_scatter("B/r/d/e L/c M +t -> B/r/d/e L/c/t M", out)

    def head_norm(self, heads: str, x: jax.Array, w: Layer, name: str) -> jax.Array:
        """RMSNorm of each head of queries or keys, or of all together, if there is a weight for it."""
        if (weight := getattr(w, f"{name}_all")) is None:
            return super().head_norm(heads, x, w, name)
        return rms_norm_of_heads(heads, x, weight, self.c.norm_epsilon)

    @typed
    def mlp(self, x: act["B/r/d/e L/c/t M"], w: Layer, einsum: Callable) -> act["B/r/d/e L/c/t M"]:
        """Gated MLP of `x`."""
        activation = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[self.c.activation]
        nx = shardops.all_gather("B/r/d/e L/c/t M -> B/r/d/e L/c M", x)
        gate = save_for_backward(einsum("B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t", nx, w.w_gate))
        up = save_for_backward(einsum("B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t", nx, w.w_up))
        hidden: act["B/r/d/e L/c F/t"] = (activation(jnp.float32(gate)) * up).astype(x.dtype)
        out = einsum("B/r/d/e L/c F/t, F/t M -> B/r/d/e L/c M +t", hidden, w.w_down)
        return shardops.psum_scatter("B/r/d/e L/c M +t -> B/r/d/e L/c/t M", out)

    @typed
    def logits(self, w: Weights, x: act["B/r/d/e L/c/t M"]) -> act["B/r/d/e L/c V/t/p"]:
        """Logits of the token after each position."""
        softcap, unembed = self.c.logit_softcap, w.embed if w.unembed is None else w.unembed
        nx = shardops.all_gather("B/r/d/e L/c/t M -> B/r/d/e L/c M", self.normed(x, w.final_norm))
        logits = shardops.einsum_unreduced("B/r/d/e L/c M, V/t/p M -> B/r/d/e L/c V/t/p", nx, unembed)
        return logits if softcap is None else (softcap * jnp.tanh(jnp.float32(logits) / softcap)).astype(act.dtype)
