"""shardwright: pretraining of a decoder-only transformer, every shard and every collective written out.

    python -m train --config-name=local_test_synthetic

Read it from the top: weights, forward pass, loss, gradients, optimizer, training step, main loop. The settings, each
with its meaning, are in configuration.py.

Dims                                           Axes of the device mesh
  B  batch (sequences)      L  length            r  replicas: plain data parallel
  M  d_model                S  length, as keys   d  data parallel, weights sharded at rest (FSDP)
  K  kv heads               Q  queries per kv    t  tensor parallel
  D  head dim               F  d_ff              p  pipeline: each has other layers
  V  vocabulary

`f32['M/d F/t']` is an array whose M is in blocks over d and whose F is in blocks over t; `+t` is a partial sum over t,
still to be reduced; an axis that is not mentioned holds the same value everywhere. docs/sharding-types.md teaches the
types. Between layers the residual stream is `act['B/r/d L/t M']`: each device of t keeps its own positions.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import hydra
import jax
import jax.numpy as jnp
import numpy as np
from hydra.core.hydra_config import HydraConfig
from jax import lax
from omegaconf import OmegaConf

import attention as attention_paths
import fp8
import training_io
from configuration import (
    COMPUTE_DTYPES,
    Config,
    ModelConfig,
    OptimizerConfig,
    check_booleans,
    check_divides,
    check_resumes,
    fixed_by_weights,
    model_of,
    register_schema,
    to_config,
    with_defaults,
)
from input_loader import Prefetcher, TokenBatch, batch_shapes, make_loader, steps_for
from jax_extra import (
    explicit_activation_checkpointing,
    known_options,
    make_mesh,
    run_as,
    running,
    save_for_backward,
    start_devices,
    unrolled,
)
from loss_chunks import in_chunks
from optimizers import muon
from rope import rope_frequencies
from shardlib import shardops
from shardlib.pipeline import LayerNumbers, Parts, run_evaluation, run_training, skip_padding
from shardlib.shardtypes import (
    Array,
    Scope,
    Subset,
    bool_,
    dtype_name,
    f32,
    i32,
    make_shardings,
    pytree_dataclass,
    typed,
    typed_shard_map,
    u32,
)
from stages import describe_stages, evaluation_plan, has_stages, placement_of, stack_orders, training_plan
from training_io.samples import TrainingSamples
from weights import Weight, initialize, matrix, vector

act = dtype_name("act")  # the compute dtype, bound to config.training.compute_dtype where the step is traced

# ---- weights ----------------------------------------------------------------------------------------------------


@pytree_dataclass
class TransformerLayer:
    attention_norm: f32["M/t/d"]
    w_q: f32["M/d K/t Q D"]
    w_k: f32["M/d K/t D"]
    w_v: f32["M/d K/t D"]
    q_norm: f32["D/t/d"] | None  # None: no qk_norm
    k_norm: f32["D/t/d"] | None
    w_o: f32["K/t Q D M/d"]
    mlp_norm: f32["M/t/d"]
    w_gate: f32["M/d F/t"]
    w_up: f32["M/d F/t"]
    w_down: f32["F/t M/d"]


@pytree_dataclass
class Transformer:
    embed: f32["V/t M/d/p"]
    layers: Array["layers/p", TransformerLayer]
    final_norm: f32["M/t/d/p"]
    unembed: f32["V/t M/d/p"] | None  # None: embeddings are tied


def weight_table(c: ModelConfig) -> Transformer:
    """What each weight is, and how it starts: matrices at variance 1/fan-in, norms at 1."""
    n, scale = c.layers, c.weight_init_scale
    model, heads, hidden = (c.d_model,), (c.n_kv, c.n_q_per_kv, c.d_head), (c.d_ff,)
    by_embed = c.embed_init_scale or (c.d_model**-0.5 if c.tied_embeddings else 1.0)
    return Transformer(
        embed=Weight((c.vocab, c.d_model), "unembedding" if c.tied_embeddings else "embedding", by_embed),
        layers=TransformerLayer(
            attention_norm=vector(n, c.d_model, value=1),
            w_q=matrix(n, model, heads, scale),
            w_k=matrix(n, model, (c.n_kv, c.d_head), scale),
            w_v=matrix(n, model, (c.n_kv, c.d_head), scale),
            q_norm=vector(n, c.d_head, value=1) if c.qk_norm else None,
            k_norm=vector(n, c.d_head, value=1) if c.qk_norm else None,
            w_o=matrix(n, heads, model, scale),
            mlp_norm=vector(n, c.d_model, value=1),
            w_gate=matrix(n, model, hidden, scale),
            w_up=matrix(n, model, hidden, scale),
            w_down=matrix(n, hidden, model, scale),
        ),
        final_norm=vector(c.d_model, value=1),
        unembed=None if c.tied_embeddings else Weight((c.vocab, c.d_model), "unembedding", scale * c.d_model**-0.5),
    )


# ---- forward pass -----------------------------------------------------------------------------------------------


@typed
def rms_norm(x: act["B/r/d L/t M"], weight: f32["M/t/d"], epsilon: float) -> act["B/r/d L/t M"]:
    """Each position over its root mean square, times the weight; in f32. Each device of t norms its own positions."""
    weight = shardops.all_gather("M/t/d -> M", weight)
    return shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", unit_rms(x, epsilon), weight).astype(x.dtype)


def unit_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """x[…, N] over its root mean square along N (arXiv 1910.07467), in f32."""
    x32 = jnp.float32(x)
    return x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)


def head_norm(heads: str, x: jax.Array, weight: Any, epsilon: float) -> jax.Array:
    """RMSNorm of each head of x, whose type is `heads`. Nothing where the model has no such weight: without qk_norm."""
    if weight is None:
        return x
    weight = shardops.all_gather("D/t/d -> D", weight)
    return shardops.einsum_unreduced(f"{heads}, D -> {heads}", unit_rms(x, epsilon), weight).astype(x.dtype)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on x[B, L, …, D]: entry i of the first half and entry i of the second turn together, by rope[B, L, i]."""
    cos, sin = (table.reshape(*table.shape[:2], *[1] * (x.ndim - 3), table.shape[2]) for table in rope)
    a, b = jnp.split(jnp.float32(x), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@attention_paths.or_by_blocks  # as training.attention says: the same by attention.py, without the scores of all pairs
@typed
def attention(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d S K/t D"],
    v: act["B/r/d S K/t D"],
    document: i32["B/r/d L"],
    drop: Callable | None = None,
) -> act["B/r/d L K/t Q D"]:
    """Causal softmax attention within each document, heads split over t. The softmax is in f32; `drop`: its dropout."""
    scores = shardops.einsum_unreduced(
        "B/r/d L K/t Q D, B/r/d S K/t D -> B/r/d K/t Q L S", q, k, preferred_element_type=jnp.float32
    )
    length = q.shape[1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    visible = causal & (document[:, :, None] == document[:, None, :])
    scores = jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    weights = drop(weights) if drop else weights
    return shardops.einsum_unreduced("B/r/d K/t Q L S, B/r/d S K/t D -> B/r/d L K/t Q D", weights, v)


@typed
def layer(
    x: act["B/r/d L/t M"], w: TransformerLayer, rope: tuple, attend: Callable, cache: Any, c: ModelConfig
) -> tuple[act["B/r/d L/t M"], Any]:
    """One transformer layer. Weights arrive sharded and are cast, then gathered over d where they are used."""
    gather, einsum, dtype = shardops.all_gather, fp8.if_chosen(shardops.einsum_unreduced), x.dtype

    nx = gather("B/r/d L/t M -> B/r/d L M", rms_norm(x, w.attention_norm, c.norm_epsilon))
    w_q = gather("M/d K/t Q D -> M K/t Q D", w.w_q.astype(dtype))
    w_k = gather("M/d K/t D -> M K/t D", w.w_k.astype(dtype))
    w_v = gather("M/d K/t D -> M K/t D", w.w_v.astype(dtype))
    q = einsum("B/r/d L M, M K/t Q D -> B/r/d L K/t Q D", nx, w_q)
    k = einsum("B/r/d L M, M K/t D -> B/r/d L K/t D", nx, w_k)
    v = save_for_backward(einsum("B/r/d L M, M K/t D -> B/r/d L K/t D", nx, w_v))
    q = save_for_backward(rotate(head_norm("B/r/d L K/t Q D", q, w.q_norm, c.norm_epsilon), rope))
    k = save_for_backward(rotate(head_norm("B/r/d L K/t D", k, w.k_norm, c.norm_epsilon), rope))
    attended, cache = attend(q, k, v, cache)
    attended = save_for_backward(attended)
    w_o = gather("K/t Q D M/d -> K/t Q D M", w.w_o.astype(dtype))
    out = einsum("B/r/d L K/t Q D, K/t Q D M -> B/r/d L M +t", attended, w_o)
    x = save_for_backward(x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out))

    nx = gather("B/r/d L/t M -> B/r/d L M", rms_norm(x, w.mlp_norm, c.norm_epsilon))
    w_gate = gather("M/d F/t -> M F/t", w.w_gate.astype(dtype))
    w_up = gather("M/d F/t -> M F/t", w.w_up.astype(dtype))
    gate = save_for_backward(einsum("B/r/d L M, M F/t -> B/r/d L F/t", nx, w_gate))
    up = save_for_backward(einsum("B/r/d L M, M F/t -> B/r/d L F/t", nx, w_up))
    hidden: act["B/r/d L F/t"] = jax.nn.silu(gate) * up
    w_down = gather("F/t M/d -> F/t M", w.w_down.astype(dtype))
    out = einsum("B/r/d L F/t, F/t M -> B/r/d L M +t", hidden, w_down)
    return x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out), cache


@typed
def embed(
    w: Transformer, ids: u32["B/r/d L"], positions: i32["B/r/d L"], c: ModelConfig, row_seeds: u32["B/r/d"] | None
) -> act["B/r/d L/t M"]:
    """What enters the first layer. `row_seeds` are for dropout, which this model has not."""
    # In f32 for the backward pass: a frequent token's row adds up thousands of gradients, which bf16 would round away.
    x = shardops.index_unreduced("[V/t] M, B/r/d L -> B/r/d L M +t", w.embed.astype(jnp.float32), ids)
    return shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", x.astype(act.dtype))


@typed
def layers(
    w: Array["layers/p", TransformerLayer],
    x: act["B/r/d L/t M"],
    positions: i32["B/r/d L"],
    c: ModelConfig,
    attend: Callable,
    caches: Any,
    numbers: LayerNumbers,
    row_seeds: u32["B/r/d"] | None,
) -> tuple[act["B/r/d L/t M"], Any]:
    """The layers `numbers`, one after the other: all of them, or those of a pipeline stage."""
    angles = jnp.float32(positions)[..., None] * rope_frequencies(c)
    rope = jnp.cos(angles), jnp.sin(angles)

    @explicit_activation_checkpointing(of_layers=len(numbers.index))
    @skip_padding
    def body(x, of_layer):
        layer_weights, _, cache = of_layer
        return layer(x, layer_weights, rope, attend, cache, c)

    return lax.scan(body, x, (w, numbers, caches), unroll=unrolled(len(numbers.index)))


@typed
def logits(w: Transformer, x: act["B/r/d L/t M"], c: ModelConfig) -> f32["B/r/d L V/t"]:
    nx = shardops.all_gather("B/r/d L/t M -> B/r/d L M", rms_norm(x, w.final_norm, c.norm_epsilon))
    unembed = w.embed if w.unembed is None else w.unembed
    spec = "B/r/d L M, V/t M -> B/r/d L V/t"
    logits = shardops.einsum_unreduced(spec, nx, unembed, preferred_element_type=jnp.float32)
    return logits if c.logit_softcap is None else c.logit_softcap * jnp.tanh(logits / c.logit_softcap)


@typed
def gather_ends(w: Transformer) -> Transformer:
    """With the weights outside of the layers cast and gathered over d, and over p, where a stage could not do so."""
    cast = lambda x: shardops.all_gather("V/t M/d/p -> V/t M *d *p", x.astype(act.dtype))
    final_norm = shardops.all_gather("M/t/d/p -> M *t *d *p", w.final_norm)
    unembed = None if w.unembed is None else cast(w.unembed)
    return dataclasses.replace(w, embed=cast(w.embed), final_norm=final_norm, unembed=unembed)


@typed
def gather_layers(w: Array["layers/p", TransformerLayer]) -> Array["layers/p", TransformerLayer]:
    """The layers' weights cast and gathered over d, once for all microbatches; their gradients are scattered once."""
    cast = lambda spec, x: shardops.all_gather(spec, x.astype(act.dtype))
    norm = lambda x: shardops.all_gather("layers/p M/t/d -> layers/p M *t *d", x)
    head_norm = lambda x: None if x is None else shardops.all_gather("layers/p D/t/d -> layers/p D *t *d", x)
    return TransformerLayer(
        attention_norm=norm(w.attention_norm),
        w_q=cast("layers/p M/d K/t Q D -> layers/p M K/t Q D *d", w.w_q),
        w_k=cast("layers/p M/d K/t D -> layers/p M K/t D *d", w.w_k),
        w_v=cast("layers/p M/d K/t D -> layers/p M K/t D *d", w.w_v),
        q_norm=head_norm(w.q_norm),
        k_norm=head_norm(w.k_norm),
        w_o=cast("layers/p K/t Q D M/d -> layers/p K/t Q D M *d", w.w_o),
        mlp_norm=norm(w.mlp_norm),
        w_gate=cast("layers/p M/d F/t -> layers/p M F/t *d", w.w_gate),
        w_up=cast("layers/p M/d F/t -> layers/p M F/t *d", w.w_up),
        w_down=cast("layers/p F/t M/d -> layers/p F/t M *d", w.w_down),
    )


# ---- loss and gradients: of any model ---------------------------------------------------------------------------

W = TypeVar("W")
"""The model's weights: Transformer, or those of another module."""


@explicit_activation_checkpointing
@typed
def cross_entropy(logits: f32["B/r/d L V/t"], targets: u32["B/r/d L"], z_loss: float) -> f32["B/r/d L"]:
    """-log softmax(logits)[target] in nats, plus z_loss·log(normalizer)². The backward pass keeps the logits only."""
    peak = save_for_backward(shardops.pmax("B/r/d L V/t -> B/r/d L", lax.stop_gradient(logits)))
    terms = shardops.einsum_unreduced("B/r/d L V/t -> B/r/d L +t", jnp.exp(logits - peak[..., None]))
    log_normalizer = jnp.log(save_for_backward(shardops.psum("B/r/d L +t -> B/r/d L", terms))) + peak
    at_target = shardops.index_unreduced("B/r/d L [V/t], B/r/d L -> B/r/d L +t", logits, targets)
    at_target = shardops.psum("B/r/d L +t -> B/r/d L", at_target)
    return log_normalizer - at_target + z_loss * jnp.square(log_normalizer)


@typed
def count_targets(batch: TokenBatch) -> f32[""]:
    """How many targets loss_mask selects in the whole batch."""
    return shardops.psum("+r +d ->", shardops.einsum_unreduced("B/r/d L -> +r +d", jnp.float32(batch.loss_mask)))


@typed
def forward(
    w: W,
    ids: u32["B/r/d L"],
    positions: i32["B/r/d L"],
    c: ModelConfig,
    attend: Callable,
    caches: Any = None,
    row_seeds: u32["B/r/d"] | None = None,
) -> tuple[f32["B/r/d L V/t"], Any]:
    """Logits for the token after each of `ids`, which stands at `positions` of its document.

    attend(q, k, v, the layer's cache) gives what each query reads, and the cache as it is then: here is all that one
    token learns from others, so sampling runs this function on tokens of different texts. `caches` are stacked over
    layers, as those returned. `row_seeds`: a random number for each row, for dropout; None: none.
    """
    model, numbers = model_of(c.module), LayerNumbers(jnp.arange(c.layers))
    w = model.gather_ends(w)
    x = model.embed(w, ids, positions, c, row_seeds)
    x, caches = model.layers(w.layers, x, positions, c, attend, caches, numbers, row_seeds)
    return model.logits(w, x, c), caches


@typed
def inputs_of(batch: TokenBatch, c: ModelConfig) -> tuple[u32["B/r/d L"], i32["B/r/d L"], Callable]:
    """The token before each target (c.bos_id before the first of a document), its position, and attention within it."""
    place = jnp.arange(batch.targets.shape[1], dtype=jnp.int32)
    starts: bool_["B/r/d L"] = batch.is_seq_start
    if not running().document_mask:
        starts = jnp.zeros_like(starts).at[:, 0].set(True)  # a row is one document
    before = jnp.pad(batch.targets[:, :-1], ((0, 0), (1, 0)), constant_values=c.bos_id)
    ids: u32["B/r/d L"] = jnp.where(starts, jnp.uint32(c.bos_id), before)
    document: i32["B/r/d L"] = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    positions: i32["B/r/d L"] = place - lax.cummax(jnp.where(starts, place, 0), axis=1)
    return ids, positions, lambda q, k, v, cache, drop=None: (attention(q, k, v, document, drop), cache)


@typed
def batch_logits(w: W, batch: TokenBatch, c: ModelConfig, row_seeds: u32["B/r/d"] | None = None) -> f32["B/r/d L V/t"]:
    ids, positions, attend = inputs_of(batch, c)
    return forward(w, ids, positions, c, attend, row_seeds=row_seeds)[0]


@typed
def summed_loss(
    w: W, x: act["B/r/d L/t M"], targets: u32["B/r/d L"], mask: bool_["B/r/d L"], c: ModelConfig, z_loss: float
) -> f32["+r +d"]:
    """Cross-entropy in nats, summed over the targets that `mask` selects; `x`: what the last layer gives."""
    losses = cross_entropy(model_of(c.module).logits(w, x, c), targets, z_loss)
    # Each device of t holds the same losses: the sum is over r and d alone.
    return shardops.einsum_unreduced("B/r/d L -> +r +d", losses * mask)


def parts_of_loss(c: ModelConfig, z_loss: float = 0.0, targets: Any = 1.0, chunk: int | None = None) -> Parts:
    """summed_loss over `targets`, of (TokenBatch, row_seeds), in one piece and as the stages of a pipeline run it."""
    model = model_of(c.module)

    def first(w, batch, row_seeds):
        ids, positions, _ = inputs_of(batch, c)
        return model.embed(w, ids, positions, c, row_seeds)

    def layers(w, x, numbers, batch, row_seeds):
        _, positions, attend = inputs_of(batch, c)
        return model.layers(w, x, positions, c, attend, None, numbers, row_seeds)[0]

    def last(w, x, batch, _):
        share = functools.partial(summed_loss, c=c, z_loss=z_loss)
        return shardops.psum("+r +d ->", in_chunks(share, chunk, w, x, batch.targets, batch.loss_mask)) / targets

    def whole(w, *part):
        w = model.gather_ends(w)
        return last(w, layers(w.layers, first(w, *part), LayerNumbers(jnp.arange(c.layers)), *part), *part)

    return Parts(whole, first, layers, last)


@typed
def copies_for_step(w: W, c: ModelConfig, gather: bool = False) -> W:
    """The weights as the microbatches of a step use them: a copy for each replica, gathered over d too if `gather`.

    What lies outside of the layers is gathered in any case where there are stages: they cannot communicate over p. The
    gradients of copies are reduced where the copies were made: here, once a step.
    """
    model, w = model_of(c.module), shardops.replicate("... -> ... *r", w)
    if gather or has_stages():
        w = model.gather_ends(w)
    return dataclasses.replace(w, layers=model.gather_layers(w.layers)) if gather else w


def microbatches(rows: Any, c: Config) -> Any:
    """Each device's own rows [B, …] of a batch cut into microbatches: [microbatches, B / microbatches, …]."""
    return jax.tree.map(lambda x: x.reshape(c.training.microbatches, -1, *x.shape[1:]), rows)


@typed
def loss_and_gradients(w: W, batch: TokenBatch, c: Config, row_seeds: u32["B/r/d"] | None = None) -> tuple[f32[""], W]:
    """Mean loss in nats a token, and its gradients; microbatch by microbatch, as c.pipeline.schedule says."""
    gather = c.training.gather_weights == "step"
    copies, reduce_gradients = jax.vjp(lambda w: copies_for_step(w, c.model, gather), w)
    loss = parts_of_loss(c.model, c.optimizer.z_loss, count_targets(batch), c.training.loss_chunk)
    loss, g = run_training(loss, training_plan(c), copies, microbatches((batch, row_seeds), c))
    (g,) = reduce_gradients(jax.tree.map(lambda x, copy: x.astype(copy.dtype), g, copies))
    return shardops.psum("+p ->", loss), g


# ---- optimizer --------------------------------------------------------------------------------------------------


@pytree_dataclass
class State(Generic[W]):
    """All that a checkpoint holds: f32, each array in blocks over t, d and p."""

    weights: W
    adam_mu: W  # of matrices under Muon: its momentum
    adam_nu: Subset[W]  # of matrices under Muon: None


def learning_rate(step: i32[""], c: OptimizerConfig) -> f32[""]:
    """Linear warmup to the peak at warmup_steps, then the decay of c.schedule to its floor at schedule_steps."""
    step, end = jnp.float32(step), c.schedule_steps
    peak_left = 1.0
    if c.schedule != "constant":
        begin = end - c.cooldown_steps if c.schedule == "wsd" else c.warmup_steps
        progress = jnp.clip((step - begin) / (end - begin), 0, 1)
        peak_left = 0.5 * (1 + jnp.cos(jnp.pi * progress)) if c.schedule == "cosine" else 1 - progress
    decay = c.final_fraction + (1 - c.final_fraction) * peak_left
    return c.learning_rate * jnp.where(step < c.warmup_steps, step / max(c.warmup_steps, 1), decay)


@typed
def squared_norm(x: f32["N/t/d/p"]) -> f32["+t +d +p"]:
    return shardops.einsum_unreduced("N/t/d/p -> +t +d +p", jnp.square(x))


@typed
def clip_by_global_norm(g: W, limit: float) -> tuple[W, f32[""]]:
    """Gradients scaled down to a global norm of `limit` where theirs is larger, and the norm before that."""
    # Every array is in blocks over t, d and p (is_fully_sharded), so flattened blocks cover each entry once.
    squares = [squared_norm(leaf.reshape(-1)) for leaf in jax.tree.leaves(g)]
    norm = jnp.sqrt(shardops.psum("+t +d +p ->", functools.reduce(lambda a, b: a + b, squares)))
    scale = limit / jnp.maximum(norm, limit)
    return jax.tree.map(lambda leaf: leaf * scale, g), norm


@typed
def adamw(state: State[W], g: W, step: i32[""], rate: f32[""], c: OptimizerConfig, table: Any) -> State[W]:
    """One AdamW update (arXiv 1711.05101, algorithm 2) of the weights that have an adam_nu. Steps count from 0.

    Elementwise on each device's own blocks. `table` is the model's weight_table: which weights decay depends on it.
    """
    count = jnp.float32(step + 1)

    def update(w, g, mu, nu, weight: Weight):
        if nu is None:
            return w, mu, nu
        mu = c.adam_b1 * mu + (1 - c.adam_b1) * g
        nu = c.adam_b2 * nu + (1 - c.adam_b2) * jnp.square(g)
        unbiased_mu, unbiased_nu = mu / (1 - c.adam_b1**count), nu / (1 - c.adam_b2**count)
        decay = c.weight_decay if weight.kind in c.decay_on else 0.0
        return w - rate * (unbiased_mu / (jnp.sqrt(unbiased_nu) + c.adam_epsilon) + decay * w), mu, nu

    new = jax.tree.map(update, state.weights, g, state.adam_mu, state.adam_nu, table)
    return State(*(jax.tree.map(lambda _, triple, i=i: triple[i], g, new) for i in range(3)))


# ---- training step ----------------------------------------------------------------------------------------------


@pytree_dataclass
class Metrics:
    loss: f32[""]
    grad_norm: f32[""]
    learning_rate: f32[""]


def init_state(key: jax.Array, c: Config) -> State:
    """Fresh weights, and zeros for the optimizer. Under jit; the values do not depend on the mesh."""
    table = model_of(c.model.module).weight_table(c.model)
    weights = initialize(table, key, placement_of(c).order)
    has_nu = lambda weight: c.optimizer.algorithm == "adamw" or weight.kind != "matrix"
    nu = jax.tree.map(lambda weight, x: jnp.zeros_like(x) if has_nu(weight) else None, table, weights)
    return State(weights, jax.tree.map(jnp.zeros_like, weights), nu)


def make_training_step(c: Config):
    """The jitted training step: (state, batch, step) -> (state, metrics). The state's memory is used again."""
    table = model_of(c.model.module).weight_table(c.model)
    Weights = type(table)

    @typed_shard_map
    def per_device(
        state: State[Weights], batch: TokenBatch, step: i32[""], row_seeds: u32["B/r/d"] | None
    ) -> tuple[State[Weights], Metrics]:
        loss, g = loss_and_gradients(state.weights, batch, c, row_seeds)
        g, grad_norm = clip_by_global_norm(g, c.optimizer.clip_norm)
        rate = learning_rate(step, c.optimizer)
        if c.optimizer.algorithm == "muon":
            state = muon(state, g, rate, c.optimizer, table)
        state = adamw(state, g, step, rate, c.optimizer, table)
        return state, Metrics(loss=loss, grad_norm=grad_norm, learning_rate=rate)

    @functools.partial(jax.jit, donate_argnums=0)
    def training_step(state: State, batch: TokenBatch, step: jax.Array) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(c.training.seed), step)
        row_seeds = jax.random.bits(key, batch.targets.shape[:1]) if getattr(c.model, "dropout", 0) else None
        with Scope(act=COMPUTE_DTYPES[c.training.compute_dtype]), run_as(c.training):
            return per_device(state, batch, step, row_seeds)

    return training_step


def make_evaluation_step(c: Config, options: dict[str, Any] | None = None):
    """The jitted sums of loss and targets of a validation batch: (weights, batch) -> (nats, number of targets).

    `options`: for the compiler.
    """
    Weights = type(model_of(c.model.module).weight_table(c.model))

    @typed_shard_map
    def per_device(w: Weights, batch: TokenBatch) -> tuple[f32[""], f32[""]]:
        copies, loss = copies_for_step(w, c.model), parts_of_loss(c.model, chunk=c.training.loss_chunk)
        if not has_stages():
            return loss.whole(copies, batch, None), count_targets(batch)
        total = run_evaluation(loss, evaluation_plan(c), copies, microbatches((batch, None), c))
        return shardops.psum("+p ->", total), count_targets(batch)

    @functools.partial(jax.jit, compiler_options=options)
    def evaluation_step(w: Any, batch: TokenBatch):
        with Scope(act=COMPUTE_DTYPES[c.training.compute_dtype]), run_as(c.training):
            return per_device(w, batch)

    return evaluation_step


# ---- main -------------------------------------------------------------------------------------------------------


def last_checkpoint(c: Config, checkpoints: training_io.Checkpointer) -> tuple[int, dict]:
    """Steps behind the last checkpoint, and what the loader needs to go on from there; 0 and nothing without one."""
    done = checkpoints.latest_step()
    if done is None:
        return 0, {}
    metadata = checkpoints.metadata(done)
    check_resumes(metadata["config"], c, checkpoints.directory.parent)
    return done, metadata["loader"]


def start_state(c: Config, checkpoints: training_io.Checkpointer, done: int) -> State:
    """The state after `done` steps, from the checkpoint; a fresh one if that is 0."""
    init = functools.partial(init_state, c=c)
    key = jax.random.key(c.training.seed)
    if done == 0:
        state, source = jax.jit(init)(key), c.training.init_from
        if source is not None:
            fixed = fixed_by_weights(dataclasses.asdict(c))
            orders, settings = stack_orders(placement_of(c), State, state), dataclasses.asdict(c)
            state.weights = training_io.read_weights(source, state.weights, settings, with_defaults, fixed, orders)
        return state
    shapes = jax.eval_shape(init, key)
    shardings = make_shardings(State[type(shapes.weights)], like=shapes)
    sharded = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    orders = stack_orders(placement_of(c), State, shapes)
    return checkpoints.restore(done, jax.tree.map(sharded, shapes, shardings), orders=orders)


def train(c: Config, directory: Path) -> str | None:
    """The whole run, on the mesh in force: leaves everything in `directory`; the signal, if one stopped it."""
    say = print if jax.process_index() == 0 else lambda *_: None
    t, m, mesh = c.training, c.model, jax.sharding.get_mesh()
    check_divides(c, mesh.shape)
    sizes, placement = (t.batch_size, t.seq_len, m.vocab), placement_of(c)
    with contextlib.ExitStack() as cleanup:
        checkpoints = training_io.Checkpointer(directory / "checkpoints", keep=t.keep_checkpoints)
        cleanup.enter_context(checkpoints)
        start, loader_state = last_checkpoint(c, checkpoints)
        loader = make_loader(c.data, "train", *sizes, state=loader_state)
        validation = make_loader(c.data, "validation", *sizes) if t.eval_batches else None
        steps = steps_for(loader, steps=t.steps, tokens=t.tokens, epochs=t.epochs)
        state = start_state(c, checkpoints, start)
        options = known_options(c.hardware.compiler_options, say)
        evaluation_step = make_evaluation_step(c, options)
        table = model_of(m.module).weight_table(m)
        flops = training_io.flops_of_model(table, m, t.seq_len)
        peak = training_io.peak_flops(mesh.devices.flatten(), COMPUTE_DTYPES[t.compute_dtype])
        parameters = sum(math.prod(weight.shape) for weight in jax.tree.leaves(table))
        model = f"{parameters:,} parameters, {t.compute_dtype} compute" + ", products with weights in fp8" * t.fp8
        training_io.say_start(directory, start, mesh, model, c.data, loader, steps)
        say(f"attention  {attention_paths.describe(t, m, mesh.devices.flat[0])}")
        for line in describe_stages(c):
            say(f"pipeline   {line}")
        speed = {"tokens_per_step": loader.tokens_per_batch, "flops": flops, "peak": peak}
        log = training_io.RunLog(directory, total_steps=steps, start_step=start, print_every=t.log_interval, **speed)
        cleanup.enter_context(log)
        evaluation = lambda weights: training_io.evaluate(evaluation_step, weights, validation, t.eval_batches)
        if start >= steps:
            if validation and not training_io.has_event(directory, start - 1, "validation"):
                log.log_event(start - 1, "validation", functools.partial(evaluation, state.weights))
            say(f"{start} steps are done already, of {steps}; to go on, train for longer (training.steps).")
            return
        training_io.save_config(directory, c)

        samples = TrainingSamples(c, directory, start, steps, log) if t.sample_interval else None
        # Tracing checks every type of the step: what communicates wrongly does not get past this line.
        lowered = make_training_step(c).lower(state, batch_shapes(t.batch_size, t.seq_len), np.int32(start))
        training_step, graph = training_io.compile_with_hlo_dump(lowered, directory, options)
        if graph is None:
            say(
                "HLO graph: none, the step is from the compile cache; with hardware.compilation_cache=null there is one"
            )
        rendering = None
        profiler = training_io.StepProfiler(directory, steps=steps - start, log=log, start=start, **speed)
        cleanup.callback(profiler.close)
        batches = Prefetcher(loader.load, start, steps, c.data.prefetch, loader.parallel_loads)
        batches = training_io.watched_batches(cleanup.enter_context(batches), start)
        stop = cleanup.enter_context(training_io.StopRequest())
        if samples:
            samples.after(start, state.weights)
        for step in range(start, steps):
            profiler.before_step(step - start)
            state, metrics = training_step(state, next(batches), np.int32(step))
            log.log(step, vars(metrics), loader.source_tokens(step))
            stopped_by = stop.after(step)
            profiler.after_step(step - start, metrics)
            if step == start:
                log.log_event(step, "memory", training_io.peak_memory(training_step, metrics))
            if samples:
                samples.after(step + 1, state.weights)
            if (step + 1) % t.checkpoint_interval == 0 or step + 1 == steps or stopped_by:
                check = functools.partial(training_io.check_finite, metrics.loss, step + 1, checkpoints.latest_step)
                metadata = {"config": dataclasses.asdict(c), "loader": loader.state(step + 1)}
                checkpoints.save(step + 1, state, metadata, stack_orders(placement, State, state), check=check)
            if validation and (step + 1 == steps or (t.eval_interval and (step + 1) % t.eval_interval == 0)):
                log.log_event(step, "validation", functools.partial(evaluation, state.weights))
            if graph and (step - start == 6 or step + 1 == steps) and rendering is None:
                rendering = training_io.start_rendering(graph)
            if stopped_by and step + 1 < steps:
                checkpoints.wait()
                say(f"{stopped_by}: stopped and saved after {step + 1} steps of {steps}.")
                say(f"To go on: the same command, with paths.model_name={c.paths.model_name}")
                return stopped_by

        log.close()
        checkpoints.wait()
        trace = profiler.close()
        training_io.say_end(directory, steps, float(metrics.loss), loader, trace, rendering)


@hydra.main(version_base="1.3", config_path="configs")
@training_io.PickledByName
def main(config) -> str | None:
    if not config:
        raise ValueError("name a run: --config-name=<file in configs/>")
    c = to_config(config)
    check_booleans(HydraConfig.get().overrides.task, OmegaConf.structured(c))
    start_devices(c.distributed, c.hardware)
    if c.paths.model_name is None:
        c.paths.model_name = f"{HydraConfig.get().job.config_name}_{time.strftime('%Y_%m_%d_%H_%M_%S')}"
    directory = Path(c.paths.root_working_dir) / c.paths.model_name
    mesh = make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, jax.devices(), c.mesh.p)
    with training_io.Watch(c.distributed), jax.set_mesh(mesh):
        directory.mkdir(parents=True, exist_ok=True)
        return train(c, directory)


if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]  # what model.module=train imports is this module, not a second one
    register_schema()
    main()
