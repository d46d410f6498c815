"""Mixture of experts: the model of family.py with many MLPs, of which a router chooses a few for
each token.

    python -m train --config-name=local_experts

Attention is that of family.py, the Llama's without its switches. Dims and axes are those of
train.py, and

  E  experts, sharded over e                      C  slots of a pool for the tokens of one sequence
  P  pools of experts, sharded over e             N  experts of a pool
  F  hidden width of an expert                    H  hidden width of the shared experts together
  I  hidden width of the MLP in a layer without experts

A sequence is the group of tokens that shares the slots of a pool. Neither knows of devices: the
same tokens are dropped on every mesh. docs/parallelism.md shows how to use it.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import Array, bool_, f32, i32, pytree_dataclass, typed
from shardwright.data.checks import TUNABLE, above_0, at_least_0, one_of, within
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.attention import Attention
from shardwright.modeling.experts import pools_without_drops
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias, experts, matrix
from shardwright.models import family

SLOTS = 8
"""The slots of a pool for a sequence are a multiple of this, or of the length of sequences, which
the devices of c and t divide: else their number would depend on the mesh."""


@dataclasses.dataclass
class ModelConfig(family.ModelConfig):
    """Settings of family.py, and of the experts. `d_ff` is the hidden width of one expert."""

    module: str = "moe"
    experts: int = within(1, 2**16, kw_only=True)
    """Number of experts in each layer. Sharded over e."""
    experts_per_token: int = within(1, 2**16, kw_only=True)
    """Experts that the router chooses for each token."""
    scores: str = one_of(("softmax", "sigmoid"), default="softmax")
    """Scores of the experts, from the router's logits: softmax over the experts, or sigmoid of
    each."""
    normalize: bool = True
    """Whether the weights of a token's experts, which are their scores, are divided by their
    sum."""
    weight_scale: float = above_0(1.0)
    """Factor on the weights of a token's experts."""
    groups: int = within(1, 2**16, 1)
    """Groups of experts, in their order, of which a token chooses some before it chooses experts in
    them (arXiv 2412.19437). The score of a group is the sum of its two highest scores."""
    groups_per_token: int = within(1, 2**16, 1)
    """Groups that the router chooses for each token."""
    correction_bias: bool = False
    """Whether a learned bias is added to the scores of experts for choosing them, not for their
    weights. Its gradient is `bias_rate` times what an expert's share of the choices exceeds the
    mean by (arXiv 2408.15664)."""
    bias_rate: float = at_least_0(1e-3, TUNABLE)
    """Factor on the gradient of the correction bias. AdamW divides a gradient by its size."""
    shared_experts: int = within(0, 2**16, 0)
    """Experts that every token has, beside those that the router chooses: one MLP of so many times
    d_ff."""
    shared_scored: bool = False
    """Whether the output of the shared experts is multiplied by a score of the token: σ of its
    product with a learned vector (Qwen2-MoE)."""
    dense_layers: int = within(0, 2**16, 0)
    """Layers with one MLP that run before those with experts, which model.layers counts."""
    dense_d_ff: int | None = within(1, 2**24, None)
    """Hidden width of the MLP in these layers. Sharded over t. Null: d_ff."""
    pools: int | None = within(1, 2**16, None, TUNABLE)
    """Pools of experts, in their order, as many in each: those of a pool share its slots. Null:
    each has its own."""
    capacity_factor: float | None = above_0(None, TUNABLE)
    """Slots of a pool for each sequence, over those that it would fill if all experts were chosen
    equally often. A choice that finds no slot is dropped. Null: none is, and each expert computes
    all tokens. Only training drops: validation and sampling have slots for all choices."""
    balance_loss: float = at_least_0(0.0, TUNABLE)
    """Factor on the loss that balances experts: experts · Σ (choices for a token) · (mean score),
    of each sequence (arXiv 2101.03961), whose mean counts a sequence by its tokens. In arXiv
    2412.19437 it is 1/experts_per_token."""
    router_z_loss: float = at_least_0(0.0, TUNABLE)
    """Factor on the mean of log(Σ exp(router's logits))² (arXiv 2202.08906)."""
    expert_bias: bool = False
    """Biases of the router and of the experts (gpt-oss)."""

    dims: ClassVar[dict[str, str]] = family.ModelConfig.dims | {
        "E": "experts",
        "H": "shared_width",
        "I": "dense_width",
        "dense": "dense_layers",
    }

    @property
    def dense_width(self) -> int:
        """Hidden width of the MLP in layers without experts."""
        return self.dense_d_ff or self.d_ff

    @property
    def shared_width(self) -> int:
        """Hidden width of the shared experts together."""
        return self.shared_experts * self.d_ff

    @property
    def expert_share(self) -> float:
        """Share of the experts that a token has."""
        return self.experts_per_token / self.experts

    def check(self, seq_len: int) -> None:
        """Raises ValueError for settings that contradict each other."""
        super().check(seq_len)
        if self.shared_scored and not self.shared_experts:
            raise ValueError(
                "model.shared_scored is true, but model.shared_experts is 0: there is nothing to "
                "score."
            )
        per_group = self.experts // self.groups
        if self.experts % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"model.groups is {self.groups}, of which a token has {self.groups_per_token}; it "
                f"must divide model.experts = {self.experts}, and be no less than "
                "model.groups_per_token."
            )
        if self.dense_layers and self.period > 1:
            raise ValueError(
                f"model.dense_layers is {self.dense_layers}, but model.full_every or "
                f"model.no_rope_every makes layers differ; set both to null, or dense_layers to 0."
            )
        if self.experts % (self.pools or 1):
            raise ValueError(
                f"model.pools is {self.pools}; it must divide model.experts = {self.experts}."
            )
        if self.experts_per_token > self.groups_per_token * per_group:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token}, but the groups of a token "
                f"have only {self.groups_per_token * per_group} experts."
            )

    def slots(self, length: int) -> int | None:
        """Slots of a pool for a sequence of `length` tokens; None where all experts compute all
        tokens.
        """
        if self.capacity_factor is None:
            return None
        pools = self.pools or self.experts
        slots = SLOTS * math.ceil(
            self.capacity_factor * length * self.experts_per_token / pools / SLOTS
        )
        # what a sequence can fill
        most = length * min(self.experts_per_token, self.experts // pools)
        return min(slots, most) if slots < most or pools < self.experts else None


# ---- weights -------------------------------------------------------------------------------------


@pytree_dataclass
class Experts:
    """Weights of the experts of a layer."""

    w_gate: experts["M/fsdp -> F/t"]
    w_up: experts["M/fsdp -> F/t"]
    w_down: experts["F/t -> M/fsdp"]
    router: matrix["M/t/fsdp -> E", f32]
    router_bias: bias["E if correction_bias", f32]
    shared_gate: matrix["M/fsdp -> H/t if shared_experts"]
    shared_up: matrix["M/fsdp -> H/t if shared_experts"]
    shared_down: matrix["H/t -> M/fsdp if shared_experts"]
    shared_score: matrix["M/t/fsdp -> 1 if shared_scored", f32]
    b_router: bias["E if expert_bias", f32]
    b_gate: bias["E/e F/t if expert_bias"]
    b_up: bias["E/e F/t if expert_bias"]
    b_down: bias["E/e M if expert_bias"]


@pytree_dataclass
class DenseMlp:
    """Weights of the MLP of a layer without experts."""

    w_gate: matrix["M/fsdp -> I/t"]
    w_up: matrix["M/fsdp -> I/t"]
    w_down: matrix["I/t -> M/fsdp"]


@pytree_dataclass
class Layer(Experts, family.Layer):
    """Weights of one layer: those of attention, and the experts."""


@pytree_dataclass
class Dense(DenseMlp, family.Layer):
    """Weights of one layer without experts."""


@pytree_dataclass
class Weights(family.Weights):
    """Weights of the model."""

    layers: Array["layers/p", Layer]
    dense: Array["dense *p", Dense] | None


# ---- router --------------------------------------------------------------------------------------


@pytree_dataclass
class Routing:
    """The choices of the router for each position, in f32 whatever the compute dtype is."""

    logits: f32["B/b L/c/t E"]
    shares: f32["B/b L/c/t E"]
    """Scores over their sum."""
    weights: f32["B/b L/c/t E"]
    """Factors on the outputs of experts; 0 for those that are not chosen."""
    chosen: bool_["B/b L/c/t E"]


@typed
def route(x: act["B/b L/c/t M"], w: Experts, config: ModelConfig) -> Routing:
    """Chooses the experts of each position. Each device routes its own positions."""
    # else GPUs and TPUs round the operands
    product = functools.partial(jnp.einsum, precision="highest")
    spec = "B/b L/c/t M, M E -> B/b L/c/t E"
    router = shardops.all_gather("M/t/fsdp E -> M E", w.router)
    logits = shardops.einsum_unreduced(spec, jnp.float32(x), router, product=product)
    if w.b_router is not None:
        b_router = shardops.all_gather("E/t/fsdp -> E", w.b_router)
        logits = logits + shardops.broadcast("E -> B/b L/c/t E", b_router)
    scores = (
        jax.nn.softmax(logits, axis=-1) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    )
    ranked = lax.stop_gradient(scores)
    if w.router_bias is not None:
        router_bias = shardops.all_gather("E/t/fsdp -> E", w.router_bias)
        ranked += lax.stop_gradient(shardops.broadcast("E -> B/b L/c/t E", router_bias))
    if config.groups > 1:
        of_groups = ranked.reshape(*ranked.shape[:2], config.groups, -1)
        best = jnp.sum(lax.top_k(of_groups, min(2, of_groups.shape[-1]))[0], axis=-1)
        kept = among_best(best, config.groups_per_token)
        ranked = jnp.where(kept[..., None], of_groups, -jnp.inf).reshape(ranked.shape)
    chosen = among_best(ranked, config.experts_per_token)
    weights = jnp.where(chosen, scores, 0.0)
    sum_experts = functools.partial(jnp.sum, axis=-1, keepdims=True)
    weights = weights / (sum_experts(weights) + 1e-20) if config.normalize else weights
    return Routing(logits, scores / sum_experts(scores), config.weight_scale * weights, chosen)


def among_best(x: jax.Array, k: int) -> jax.Array:
    """Whether each entry of x[…, N] is one of the k largest along N; of equal ones the first
    are.
    """
    best = lax.top_k(x, k)[1]
    return jnp.any(best[..., None] == jnp.arange(x.shape[-1], dtype=best.dtype), axis=-2)


# ---- experts -------------------------------------------------------------------------------------


@typed
def mlp(
    x: act["P/e G/r/d C/c M"], expert: i32["P/e G/r/d C/c"], w: Experts, config: ModelConfig
) -> act["P/e G/r/d C/c M +t"]:
    """Gated MLP of the expert that each slot is for, without its last bias."""
    of_pool = expert % (config.experts // (config.pools or config.experts))

    def entries(matrix, bias):
        up = "P/e G/r/d C/c M, P/e G/r/d C/c, (P/e N) M F/t -> P/e G/r/d C/c F/t"
        matrix = shardops.all_gather("E/e M/c/d F/t -> E/e M F/t", matrix)
        y = save_for_backward(shardops.grouped_product(up, x, of_pool, matrix))
        if bias is None:
            return y
        bias = shardops.all_gather("E/e F/t/c/d -> E F/t", bias)
        return y + shardops.index_unreduced(
            "[E] F/t, P/e G/r/d C/c -> P/e G/r/d C/c F/t", bias, expert
        )

    hidden = family.gated(
        config.activation, entries(w.w_gate, w.b_gate), entries(w.w_up, w.b_up)
    ).astype(x.dtype)
    down = "P/e G/r/d C/c F/t, P/e G/r/d C/c, (P/e N) F/t M -> P/e G/r/d C/c M +t"
    w_down = shardops.all_gather("E/e F/t M/c/d -> E/e F/t M", w.w_down)
    return shardops.grouped_product(down, save_for_backward(hidden, cheap=True), of_pool, w_down)


@typed
def in_slots(
    x: act["B/b L/c/t M"],
    routing: Routing,
    counts: bool_["B/b L/c/t"],
    w: Experts,
    slots: int,
    config: ModelConfig,
) -> tuple[act["B/b L/c/t M"], f32[""]]:
    """Weighted sum of the outputs of each position's experts, whose pools have `slots` slots for
    each sequence.

    Also returns the number of choices that found a slot, on all devices, of positions that count.
    The first choices of a sequence in a pool have its slots. Each device of c and t sends and
    receives its own slots of each sequence.
    """
    n = config.experts // (config.pools or config.experts)
    k = config.experts_per_token

    def group_by_pool(x):
        """Moves experts next to positions: a choice of a pool is its number in L N, of a position
        in an expert.
        """
        return shardops.rearrange("B/b L (P N) -> B/b P (L N)", x, N=n)

    chosen = group_by_pool(
        shardops.all_gather("B/b L/c/t E -> B/b L E", routing.chosen, replicated=True)
    )
    length = shardops.size("L")
    choice = jnp.where(chosen, jnp.arange(length * n, dtype=jnp.int32), length * n)
    # The choice in each slot; past the end, as its position in the sequence, in a slot that stays
    # empty.
    choice: i32["B/b P C/c/t"] = shardops.shard(
        "B/b P C -> B/b P C/c/t", jnp.sort(choice, axis=-1)[..., :slots]
    )
    token = choice // n
    expert = choice % n + n * jnp.arange(config.experts // n, dtype=jnp.int32)[:, None]

    nx = shardops.all_gather("B/b L/c/t M -> B/b L M", x)
    sent = shardops.take_rows("B/b [L] M, B/b P C/c/t -> B/b P C/c/t M", nx, token, repeats=k)
    sent = shardops.rearrange("G/b P C/c/t M -> P G/b C/c/t M", sent)
    received = save_for_backward(shardops.all_to_all("P G/b C/c/t M -> P/e G/r/d C/c/t M", sent))
    received = shardops.all_gather("P/e G/r/d C/c/t M -> P/e G/r/d C/c M", received)
    bias = w.b_down
    if bias is not None:
        bias = shardops.all_gather("E/e M/t/c/d -> E M", bias)
        bias = shardops.index_unreduced("[E] M, B/b P C/c/t -> B/b P C/c/t M", bias, expert)
    expert = shardops.rearrange("G/b P C/c/t -> P G/b C/c/t", expert)
    expert = shardops.all_to_all("P G/b C/c/t -> P/e G/r/d C/c/t", expert)
    expert = shardops.all_gather("P/e G/r/d C/c/t -> P/e G/r/d C/c", expert, replicated=True)
    out = shardops.psum_scatter(
        "P/e G/r/d C/c M +t -> P/e G/r/d C/c/t M", mlp(received, expert, w, config)
    )
    out = save_for_backward(shardops.all_to_all("P/e G/r/d C/c/t M -> P G/b C/c/t M", out))
    out = shardops.rearrange("P G/b C/c/t M -> G/b P C/c/t M", out)
    out = out if bias is None else out + bias

    weights = group_by_pool(shardops.all_gather("B/b L/c/t E -> B/b L E", routing.weights))
    weights = shardops.take_rows(
        "B/b P [J], B/b P C/c/t -> B/b P C/c/t", weights, choice, repeats=1
    )
    out = (out * weights[..., None]).astype(x.dtype)
    out = shardops.add_rows("B/b P C/c/t M, B/b P C/c/t -> B/b [L] M +c +t", out, token, repeats=k)
    counts = shardops.all_gather("B/b L/c/t -> B/b L", jnp.int32(counts), replicated=True)
    filled = shardops.take_rows("B/b [L], B/b P C/c/t -> B/b P C/c/t", counts, token)
    filled = shardops.einsum_unreduced("B/b P C/c/t -> +b +c +t", jnp.float32(filled))
    filled = shardops.psum("+b +c +t ->", filled)
    return shardops.psum_scatter("B/b L M +c +t -> B/b L/c/t M", out), filled


@typed
def everywhere(
    x: act["B/b L/c/t M"], routing: Routing, w: Experts, config: ModelConfig
) -> act["B/b L/c/t M"]:
    """Weighted sum of the outputs of each position's experts, where each expert computes all
    positions.

    Nothing is dropped, and no position depends on another.
    """
    weights = shardops.all_to_all("B/b L/c/t E -> B/r/d L/c/t E/e", routing.weights)
    weights = shardops.all_gather("B/r/d L/c/t E/e -> B/r/d L/c E/e", weights.astype(x.dtype))
    product = shardops.einsum_unreduced
    nx = shardops.all_gather("B/b L/c/t M -> B/r/d L/c M", x)

    def entries(matrix, bias):
        matrix = shardops.all_gather("E/e M/c/d F/t -> E/e M F/t", matrix)
        y = save_for_backward(product("B/r/d L/c M, E/e M F/t -> E/e B/r/d L/c F/t", nx, matrix))
        if bias is None:
            return y
        bias = shardops.all_gather("E/e F/t/c/d -> E/e F/t", bias)
        return y + shardops.broadcast("E/e F/t -> E/e B/r/d L/c F/t", bias)

    hidden = family.gated(
        config.activation, entries(w.w_gate, w.b_gate), entries(w.w_up, w.b_up)
    ).astype(x.dtype)
    hidden = product("E/e B/r/d L/c F/t, B/r/d L/c E/e -> E/e B/r/d L/c F/t", hidden, weights)
    w_down = shardops.all_gather("E/e F/t M/c/d -> E/e F/t M", w.w_down)
    out = product("E/e B/r/d L/c F/t, E/e F/t M -> B/r/d L/c M +t +e", hidden, w_down)
    out = shardops.psum_scatter("B/r/d L/c M +t +e -> B/b L/c/t M", out)
    if w.b_down is None:
        return out
    b_down = shardops.all_gather("E/e M/t/c/d -> E M", w.b_down)
    return out + product("B/b L/c/t E, E M -> B/b L/c/t M", routing.weights.astype(x.dtype), b_down)


# ---- losses and metrics --------------------------------------------------------------------------


@typed
def aux_of(
    routing: Routing,
    filled: f32[""] | None,
    counts: bool_["B/b L/c/t"],
    targets: f32[""] | None,
    w: Experts,
    config: ModelConfig,
) -> LayerAux:
    """Losses and metrics of a layer: means over the tokens that count.

    No mesh changes them, and no microbatches.
    """
    total, product = shardops.psum, shardops.einsum_unreduced
    mask = jnp.float32(counts)
    chosen, shares = (mask[..., None] * x for x in (routing.chosen, routing.shares))
    # As floats: an integer would not fit into 32 bits.
    tokens = float(shardops.size("B") * shardops.size("L")) if targets is None else targets

    def sum_positions(x):
        return total("B/b E +c +t -> B/b E", product("B/b L/c/t E -> B/b E +c +t", x))

    choices = sum_positions(chosen)
    load: f32["E"] = total("E +b -> E", product("B/b E -> E +b", choices))
    dropped = jnp.float32(0) if filled is None else 1 - filled / (tokens * config.experts_per_token)

    loss = jnp.float32(0)
    if config.balance_loss:
        length = total("B/b +c +t -> B/b", product("B/b L/c/t -> B/b +c +t", mask))
        scores = sum_positions(shares) / jnp.maximum(length, 1)[:, None]
        balance = total("+b ->", product("B/b E, B/b E -> +b", choices, scores))
        loss += config.balance_loss * config.experts * balance / tokens
    if config.router_z_loss:
        square = mask * jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
        square = total("+b +c +t ->", product("B/b L/c/t -> +b +c +t", square))
        loss += config.router_z_loss * square / tokens
    if w.router_bias is not None:  # 0, with the gradient that moves the bias against the load
        excess = (chosen - mask[..., None] * (config.experts_per_token / config.experts)) / tokens
        router_bias = shardops.all_gather("E/t/fsdp -> E", w.router_bias)
        push = total("+b +c +t ->", product("B/b L/c/t E, E -> +b +c +t", excess, router_bias))
        loss += config.bias_rate * (push - lax.stop_gradient(push))
    loads = config.experts * load / (tokens * config.experts_per_token)
    return LayerAux(loss=loss, metrics={"largest_load": loads, "dropped": dropped})


class Model(family.Model):
    """The model of family.py, with experts in place of its MLP."""

    Weights = Weights
    config: ModelConfig

    def layer(self, x: jax.Array, w: Any, tokens: Tokens, attention: Attention) -> Any:
        """One transformer layer, with experts or without."""
        if isinstance(w, Experts):
            return self.layer_of_experts(x, w, tokens, attention)
        return super().layer(x, w, tokens, attention)

    @typed
    def layer_of_experts(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        """One transformer layer with experts. Their matmuls are not in FP8."""
        attended = save_for_backward(x + self.attend(x, w, tokens, attention))
        return self.with_experts(attended, w, tokens)

    @typed
    def with_experts(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        """What a layer does after attention."""
        config = self.config
        nx = self.normed(x, w.mlp_norm)
        routing: Routing = route(nx, w, config)
        counted = jnp.ones_like(tokens.ids, bool) if tokens.counted is None else tokens.counted
        counted = shardops.shard("B/b L/c -> B/b L/c/t", counted)
        length = shardops.size("L")
        slots = config.slots(length)
        if not tokens.training:
            pools = pools_without_drops(config.experts, config.experts_per_token)
            slots = None if pools is None else length * config.experts_per_token
            config = dataclasses.replace(config, pools=pools)
        filled = None
        if slots is None:
            out = everywhere(nx, routing, w, config)
        else:
            out, filled = in_slots(nx, routing, counted, w, slots, config)
        filled = filled if tokens.training else None
        if config.shared_experts:
            shared = family.gated_mlp(
                nx, w.shared_gate, w.shared_up, w.shared_down, config.activation
            )
            if w.shared_score is not None:
                score = shardops.all_gather("M/t/fsdp 1 -> M 1", w.shared_score)
                score = shardops.einsum_unreduced(
                    "B/b L/c/t M, M 1 -> B/b L/c/t 1", jnp.float32(nx), score
                )
                shared = (shared * jax.nn.sigmoid(score)).astype(x.dtype)
            out = out + shared
        aux = aux_of(routing, filled, counted, tokens.target_count, w, config)
        return x + self.normed(out, w.mlp_out_norm), aux
