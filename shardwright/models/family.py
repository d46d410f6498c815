"""Relatives of the Llama: what Qwen2, Mistral, OLMo, SmolLM 3, Gemma, Phi-3 and gpt-oss change.

    python -m tools.huggingface_to_checkpoint model=<one of them> output=runs/<name>

Any combination trains. docs/huggingface.md says which become models of transformers. moe.py has the
same switches. Dims and axes are those of train.py.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardwright.data.checks import TUNABLE, above_0, at_least_1, one_of, setting, within
from shardwright.jax_extra import save_for_backward
from shardwright.modeling import masks, rope, settings
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias, embedding, gain, matrix, table_of, unembedding


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    """Settings of the Llama, and switches. Without any it is the Llama."""

    module: str = "family"
    family: str | None = setting(TUNABLE, default=None)
    """model_type that an export becomes, such as phi3. Null: the first with this math."""
    qkv_bias: bool = False
    """Biases of queries, keys and values (Qwen2)."""
    out_bias: bool = False
    """Bias of the output of attention (gpt-oss)."""
    gated: bool = False
    """Whether the output of attention is multiplied by σ of as many entries of its own, which come
    from the input as queries do (Qwen3-Next, arXiv 2505.06708)."""
    sinks: bool = False
    """A score for each head that belongs to no key (gpt-oss)."""
    norms: str = one_of(("before", "after", "both"), default="before")
    """Norms of attention and of the MLP: before, on their inputs; after, on their outputs (OLMo 2);
    both (Gemma 2)."""
    norm_offset: bool = False
    """Whether norms of positions, and of heads by qk_norm, multiply by 1 + weight (Gemma)."""
    qk_norm_all: bool = False
    """RMSNorm over all heads of the queries together, and over all of the keys (OLMo 2)."""
    window: int | None = at_least_1(None)
    """Positions that a query sees, including its own (Mistral 0.1). Null: all before it."""
    full_every: int | None = at_least_1(None)
    """Every n-th layer has no window; this is n (Gemma 2: 2). Null: all layers have it."""
    window_rope_base: float | None = above_0(None)
    """rope_base of layers with a window, which then lack rope_scaling (Gemma 3, OLMo 3). Null:
    those of all layers."""
    rotary_share: float = within(math.ulp(0), math.nextafter(1, 2), 1.0)
    """Share of the entries of a head that RoPE turns, the first ones (Phi-4-mini)."""
    no_rope_every: int | None = at_least_1(None)
    """Every n-th layer has no RoPE; this is n (SmolLM 3: 4). Null: all layers have it."""
    attention_softcap: float | None = above_0(None)
    """Scores x become softcap·tanh(x/softcap) (Gemma 2). Null: no cap."""
    attention_scalar: int | None = at_least_1(None)
    """Products of queries and keys are divided by its root (Gemma 2). Null: d_head."""
    embedding_scaled: bool = False
    """Whether the embedding is multiplied by √d_model (Gemma)."""
    activation: str = one_of(("silu", "gelu", "clamped"), default="silu")
    """Activation of the MLP: silu; gelu, approximated by tanh (Gemma); or clamped, as `gated` says
    (gpt-oss)."""

    dims: ClassVar[dict[str, str]] = settings.ModelConfig.dims | {"D_g": "query_and_gate"}

    @property
    def query_and_gate(self) -> int:
        """Entries of a query together with those of its gate."""
        return 2 * self.d_head

    @property
    def norms_before(self) -> bool:
        """Whether attention and MLP have norms before them."""
        return self.norms != "after"

    @property
    def norms_after(self) -> bool:
        """Whether attention and MLP have norms after them."""
        return self.norms != "before"

    @property
    def period(self) -> int:
        """Number of layers after which their pattern repeats."""
        period = math.lcm(self.full_every or 1, self.no_rope_every or 1)
        return self.layers if self.layers % period else period

    @property
    def turned(self) -> tuple[str, int]:
        name = "d_head" if self.rotary_share == 1 else "rotary_share"
        return name, int(self.d_head * self.rotary_share)

    def check(self, seq_len: int) -> None:
        """Raises ValueError for settings that contradict each other."""
        super().check(seq_len)
        if self.full_every and not self.window:
            raise ValueError(
                f"model.full_every is {self.full_every}, but no layer has a window; set "
                "model.window."
            )
        if self.gated and self.qkv_bias:
            raise ValueError(
                "model.gated and model.qkv_bias are both true; gated queries have no bias: choose "
                "one."
            )
        if self.qk_norm and self.qk_norm_all:
            raise ValueError(
                "model.qk_norm and model.qk_norm_all are both true; heads are normed once: choose "
                "one."
            )


# ---- weights -------------------------------------------------------------------------------------


@pytree_dataclass
class Layer:
    """Weights of one layer. Those that the settings do not ask for are None."""

    attention_norm: gain["M if norms_before"]
    w_q: matrix["M/fsdp -> K/t Q D if not gated"]
    w_q_and_gate: matrix["M/fsdp -> K/t Q D_g if gated"]
    w_k: matrix["M/fsdp -> K/t D"]
    w_v: matrix["M/fsdp -> K/t D"]
    q_norm: gain["D if qk_norm"]
    k_norm: gain["D if qk_norm"]
    w_o: matrix["K/t Q D -> M/fsdp"]
    mlp_norm: gain["M if norms_before"]
    w_gate: matrix["M/fsdp -> F/t"]
    w_up: matrix["M/fsdp -> F/t"]
    w_down: matrix["F/t -> M/fsdp"]
    attention_out_norm: gain["M if norms_after"]
    mlp_out_norm: gain["M if norms_after"]
    q_norm_all: gain["K/t Q D if qk_norm_all"]
    k_norm_all: gain["K/t D if qk_norm_all"]
    b_q: bias["K/t Q D if qkv_bias"]
    b_k: bias["K/t D if qkv_bias"]
    b_v: bias["K/t D if qkv_bias"]
    b_o: bias["M if out_bias"]
    sinks: bias["K/t Q if sinks", f32]


@pytree_dataclass
class Weights:
    """Weights of the model."""

    embed: embedding["V/t/p M/fsdp"]
    layers: Array["layers/p", Layer]
    final_norm: gain["M/p"]
    unembed: unembedding["V/t/p M/fsdp if not tied_embeddings"]


OFFSET = [
    "attention_norm",
    "mlp_norm",
    "attention_out_norm",
    "mlp_out_norm",
    "q_norm",
    "k_norm",
    "final_norm",
]
"""The norms that model.norm_offset changes: they begin at 0."""


# ---- the model -----------------------------------------------------------------------------------


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Hidden entries of an MLP, in f32. clamped is gpt-oss's: gate·σ(1.702·gate)·(up + 1), each at
    most 7 before.
    """
    gate = jnp.float32(gate)
    if activation != "clamped":
        return {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[activation](gate) * up
    gate = jnp.minimum(gate, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(jnp.float32(up), -7.0, 7.0) + 1)


@typed
def gated_mlp(
    x: act["B/b L/c/t M"],
    w_gate: f32["M/fsdp F/t"],
    w_up: f32["M/fsdp F/t"],
    w_down: f32["F/t M/fsdp"],
    activation: str,
) -> act["B/b L/c/t M"]:
    """Gated MLP of `x`, with weights at rest."""
    w_gate = shardops.all_gather("M/fsdp F/t -> M F/t", w_gate)
    w_up = shardops.all_gather("M/fsdp F/t -> M F/t", w_up)
    w_down = shardops.all_gather("F/t M/fsdp -> F/t M", w_down)
    nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", x)
    gate = save_for_backward(shardops.matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_gate))
    up = save_for_backward(shardops.matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_up))
    hidden: act["B/b L/c F/t"] = gated(activation, gate, up).astype(x.dtype)
    out = shardops.matmul(
        "B/b L/c F/t, F/t M -> B/b L/c M +t", save_for_backward(hidden, cheap=True), w_down
    )
    return shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)


class Model:
    """The Llama, with the switches of ModelConfig."""

    Weights = Weights

    def __init__(self, config: ModelConfig):
        self.config = config
        self.table = table_of(
            self.Weights,
            config,
            lambda fan_in: config.weight_init_scale / fan_in**0.5,
            self.changes(),
        )
        self.period = config.period

    def changes(self) -> dict[str, dict]:
        """Attributes of weights that differ from what their declarations say, as for table_of."""
        c = self.config
        changes: dict[str, dict] = {name: {"mean": 0.0} for name in OFFSET if c.norm_offset}
        std = c.embed_init_scale or (c.d_model**-0.5 if c.tied_embeddings else 1.0)
        return changes | {
            "embed": {"std": std, "kind": "unembedding" if c.tied_embeddings else "embedding"}
        }

    def prepare(self, tokens: Tokens) -> Tokens:
        """Adds the cosines and sines of RoPE in layers without a window, and with one."""
        config = dataclasses.replace(
            self.config, d_head=int(self.config.d_head * self.config.rotary_share)
        )
        other = (
            {"rope_base": config.window_rope_base, "rope_scaling": None}
            if config.window_rope_base
            else {}
        )
        tables = [
            rope.tables(x, tokens.row_positions)
            for x in (config, dataclasses.replace(config, **other))
        ]
        return dataclasses.replace(tokens, shared=tables)

    def window_at(self, place: int) -> int | None:
        """Positions that a query sees in the layer at this place of its period; None: all before
        it.
        """
        full = self.config.full_every and (place + 1) % self.config.full_every == 0
        return None if full else self.config.window

    def mask_at(self, place: int) -> masks.AttentionMask:
        """Who attends to whom in the layer at this place of its period."""
        config = self.config
        window = self.window_at(place)
        return masks.AttentionMask(
            mask_mod=(
                masks.causal,
                masks.same_document,
                *([masks.Window(window)] if window else []),
            ),
            score_mod=masks.SoftCap(config.attention_softcap) if config.attention_softcap else None,
            scale=config.attention_scalar**-0.5 if config.attention_scalar else None,
        )

    @typed
    def embed(self, w: Weights, tokens: Tokens) -> act["B/b L/c/t M"]:
        """Residual stream before the first layer."""
        embed = shardops.all_gather("V/t/p M/fsdp -> V/t/p M", w.embed)
        # f32, because the gradient of a frequent token is a sum of thousands, which bf16 would
        # round.
        embed = embed.astype(jnp.float32)
        x = shardops.index_unreduced("[V/t/p] M, B/b L/c -> B/b L/c M +t +p", embed, tokens.ids)
        x = shardops.psum_scatter("B/b L/c M +t +p -> B/b L/c/t M +p", x.astype(act.dtype))
        x = shardops.psum("B/b L/c/t M +p -> B/b L/c/t M", x)
        return x * math.sqrt(self.config.d_model) if self.config.embedding_scaled else x

    def normed(
        self,
        x: jax.Array,
        weight: jax.Array | None,
        dims: str = "B/b L/c/t M",
        at_rest: str = "M/t/fsdp",
        epsilon: float | None = None,
    ) -> jax.Array:
        """RMSNorm over the last dim, in f32; without a weight, `x` itself.

        `epsilon` replaces norm_epsilon.
        """
        if weight is None:
            return x
        weight = shardops.all_gather(f"{at_rest} -> {dims[-1]}", weight)
        x32 = jnp.float32(x)
        epsilon = self.config.norm_epsilon if epsilon is None else epsilon
        unit = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
        scaled = shardops.einsum_unreduced(f"{dims}, {dims[-1]} -> {dims}", unit, weight)
        return (unit + scaled if self.config.norm_offset else scaled).astype(x.dtype)

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """One transformer layer."""
        attended = save_for_backward(x + self.attend(x, w, tokens, attention))
        nx = self.normed(attended, w.mlp_norm)
        out = gated_mlp(nx, w.w_gate, w.w_up, w.w_down, self.config.activation)
        return attended + self.normed(out, w.mlp_out_norm)

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Layer, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """Output of the attention of a layer, which is added to the residual stream."""
        every = self.config.no_rope_every
        at = "B/b L/c"
        queries = "K/t Q D"
        keys = "K/t D"
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", self.normed(x, w.attention_norm))
        angles = tokens.shared[self.window_at(tokens.index_in_period) is not None]

        def heads(dims, weight, bias):
            weight = shardops.all_gather(f"M/fsdp {dims} -> M {dims}", weight)
            y = shardops.matmul(f"{at} M, M {dims} -> {at} {dims}", nx, weight)
            if bias is None:
                return y
            bias = shardops.all_gather(f"{dims}/fsdp -> {dims}", bias)
            return y + shardops.broadcast(f"{dims} -> {at} {dims}", bias)

        def turned(dims, y, weight, of_all):
            y = self.head_norm(f"{at} {dims}", y, weight, of_all)
            return save_for_backward(
                y if every and (tokens.index_in_period + 1) % every == 0 else rope.rotate(y, angles)
            )

        if w.w_q is None:
            q, gate = jnp.split(heads("K/t Q D_g", w.w_q_and_gate, None), 2, axis=-1)
        else:
            q, gate = heads(queries, w.w_q, w.b_q), None
        q = turned(queries, q, w.q_norm, w.q_norm_all)
        k = turned(keys, heads(keys, w.w_k, w.b_k), w.k_norm, w.k_norm_all)
        v = save_for_backward(heads(keys, w.w_v, w.b_v))
        sinks = w.sinks
        if sinks is not None:
            sinks = shardops.all_gather("K/t Q/fsdp -> K/t Q", sinks)
        attended = save_for_backward(
            attention(q, k, v, self.mask_at(tokens.index_in_period), sinks=sinks)
        )
        if gate is not None:
            attended = (attended * jax.nn.sigmoid(jnp.float32(save_for_backward(gate)))).astype(
                x.dtype
            )
        w_o = shardops.all_gather("K/t Q D M/fsdp -> K/t Q D M", w.w_o)
        out = shardops.matmul("B/b L/c K/t Q D, K/t Q D M -> B/b L/c M +t", attended, w_o)
        out = shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
        if w.b_o is not None:
            b_o = shardops.all_gather("M/t/fsdp -> M", w.b_o)
            out = out + shardops.broadcast("M -> B/b L/c/t M", b_o)
        return self.normed(out, w.attention_out_norm)

    def head_norm(self, heads: str, x: jax.Array, weight: Any, of_all: Any = None) -> jax.Array:
        """RMSNorm of each head of queries or keys by `weight`, or of all together by `of_all`, if
        it has the weight.
        """
        if of_all is None:
            return self.normed(x, weight, heads, at_rest="D/t/fsdp")
        product = shardops.einsum_unreduced
        position = "B/b L/c"
        x32 = jnp.float32(x)
        square = shardops.psum(
            f"{position} +t -> {position}", product(f"{heads} -> {position} +t", jnp.square(x32))
        )
        mean = square / (math.prod(x.shape[2:]) * shardops.axis_size("t"))
        scale = shardops.replicate(
            f"{position} -> {position} *t", lax.rsqrt(mean + self.config.norm_epsilon)
        )
        scaled = product(f"{heads}, {position} -> {heads}", x32, scale)
        dims = heads.removeprefix(position)
        of_all = shardops.all_gather(f"{dims}/fsdp -> {dims}", of_all)
        return product(f"{heads}, {dims} -> {heads}", scaled, of_all).astype(x.dtype)

    def final_normed(self, w: Any, x: Any) -> jax.Array:
        """The output of the last layer, normed."""
        return self.normed(x, w.final_norm, at_rest="M/t/fsdp/p")

    @typed
    def logits(self, w: Weights, x: Any) -> act["B/b L/c V/t/p"]:
        """Logits of the token after each position."""
        softcap = self.config.logit_softcap
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", self.final_normed(w, x))
        unembed = shardops.all_gather(
            "V/t/p M/fsdp -> V/t/p M", w.embed if w.unembed is None else w.unembed
        )
        logits = shardops.einsum_unreduced("B/b L/c M, V/t/p M -> B/b L/c V/t/p", nx, unembed)
        return (
            logits
            if softcap is None
            else (softcap * jnp.tanh(jnp.float32(logits) / softcap)).astype(act.dtype)
        )
