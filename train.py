"""shardwright: pretraining of a decoder-only transformer, with its collectives written out.

    python -m train --config-name=local_test_synthetic

Read it from the top. The settings are in shardwright/program/config.py, the forward pass of any
model and the loop over its layers in shardwright/modeling/forward.py.

Dims
  m  microbatches               B  sequences of each        M  d_model
  L  positions, as queries      S  positions, as keys       F  d_ff
  K  key/value heads            Q  query heads for each K   D  head_dim
  V  vocabulary
Axes of the device mesh
  r  replicas: plain data parallel
  d  data parallel, weights sharded at rest (FSDP)
  e  shards the experts; otherwise like d
  t  tensor parallel
  c  context: each device has some positions
  p  pipeline: each device has its own layers
Groups of axes
  b     r/d/e, which shard the batch
  fsdp  c/d/e, over which weights are sharded at rest, and gathered for use

`f32['M/d F/t']` is an array with M sharded over d and F sharded over t. `+t` marks a partial sum
over t, still to be reduced; `*t` marks equal copies, whose gradients are summed over t. Devices
along an axis that a type does not name hold the same values, except along p in a pipeline stage.
An axis that the mesh lacks counts as one device. docs/sharding-types.md teaches the types.

Between layers the residual stream is `act['B/b L/c/t M']`: each device along c and t holds its own
positions. `act` is the compute dtype, which training.compute_dtype sets. The declaration of a
weight states its inputs, outputs and sharding at rest.

Collectives that this file only calls: attention across c is in shardwright/modeling/context.py,
the loss in chunks in modeling/loss_chunks.py, Muon in optimizers/muon.py, and pipelines are in
program/stages.py and shardlib/pipeline.py.
"""

if __name__ == "__main__":  # first, because the imports below take seconds
    from shardwright.settings import starting

    starting.run("train")  # not as __main__: tools load this file as the module `train`

import dataclasses
import functools
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib import shardops, shardtypes
from shardlib.layers import LayerMetrics
from shardlib.shardtypes import Array, Of, f32, i32, pytree_dataclass, typed, u32
from shardwright.data.loader import TokenBatch
from shardwright.jax_extra import save_for_backward
from shardwright.modeling import masks, rope
from shardwright.modeling.attention import Attention
from shardwright.modeling.forward import Forward
from shardwright.modeling.loss_chunks import sum_in_chunks
from shardwright.modeling.model import LanguageModel, Targets, Tokens, act, compute_scope
from shardwright.modeling.settings import ModelConfig
from shardwright.modeling.weights import embedding, gain, matrix, table_of, unembedding
from shardwright.optimizers import rates
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.muon import muon
from shardwright.program import stages
from shardwright.program.config import Config
from shardwright.program.spec import StepSpec
from shardwright.program.step import Numbers, with_numbers
from shardwright.run import launch, listeners
from shardwright.run.run import Run
from shardwright.sampling import samples

# ---- weights -------------------------------------------------------------------------------------


@pytree_dataclass
class TransformerLayer:
    """Weights of one layer, as sharded at rest. A matrix is declared as `inputs -> outputs`."""

    attention_norm: gain["M"]
    w_q: matrix["M/fsdp -> K/t Q D"]
    w_k: matrix["M/fsdp -> K/t D"]
    w_v: matrix["M/fsdp -> K/t D"]
    q_norm: gain["D if qk_norm"]
    k_norm: gain["D if qk_norm"]
    w_o: matrix["K/t Q D -> M/fsdp"]
    mlp_norm: gain["M"]
    w_gate: matrix["M/fsdp -> F/t"]
    w_up: matrix["M/fsdp -> F/t"]
    w_down: matrix["F/t -> M/fsdp"]


@pytree_dataclass
class Transformer:
    """Weights of the model."""

    embed: embedding["V/t/p M/fsdp"]  # each stage of p looks up the tokens of its rows of V
    layers: Array["layers/p", TransformerLayer]  # stacked; each stage of p has its own
    final_norm: gain["M/p"]  # all stages compute the logits together, so each has its part
    unembed: unembedding["V/t/p M/fsdp if not tied_embeddings"]


# ---- the model -----------------------------------------------------------------------------------


class Llama:
    """Decoder with RMSNorm, grouped-query attention, RoPE and SwiGLU.

    The setting `model.module: train` chooses it.
    """

    Weights = Transformer
    mask = masks.AttentionMask(mask_mod=(masks.causal, masks.same_document))
    activation = staticmethod(jax.nn.silu)

    def __init__(self, config: ModelConfig, **changes: dict):
        """Initial std: weight_init_scale/√fan-in (embed: embed_init_scale); gains start at 1.

        `changes` sets attributes of weights, by name; see table_of.
        """
        std = config.embed_init_scale or (config.d_model**-0.5 if config.tied_embeddings else 1.0)
        changes["embed"] = {
            "std": std,
            "kind": "unembedding" if config.tied_embeddings else "embedding",
        }

        def std_of_matrix(fan_in: int) -> float:
            return config.weight_init_scale / fan_in**0.5

        self.config = config
        self.table = table_of(self.Weights, config, std_of_matrix, changes)

    def prepare(self, tokens: Tokens) -> Tokens:
        """Adds the cosines and sines of RoPE to the tokens, once for all layers."""
        return dataclasses.replace(tokens, shared=rope.tables(self.config, tokens.row_positions))

    @typed
    def embed(self, w: Transformer, tokens: Tokens) -> act["B/b L/c/t M"]:
        """Residual stream before the first layer."""
        embed = shardops.all_gather("V/t/p M/fsdp -> V/t/p M", w.embed)
        # f32, because the gradient of a frequent token sums thousands of terms, which bf16 would
        # round.
        embed = embed.astype(jnp.float32)
        x = shardops.index_unreduced("[V/t/p] M, B/b L/c -> B/b L/c M +t +p", embed, tokens.ids)
        x = shardops.psum_scatter("B/b L/c M +t +p -> B/b L/c/t M +p", x.astype(act.dtype))
        return shardops.psum("B/b L/c/t M +p -> B/b L/c/t M", x)

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """One transformer layer."""
        x = save_for_backward(x + self.attend(x, w, tokens, attention))
        return x + self.mlp(x, w)

    @typed
    def mlp(self, x: act["B/b L/c/t M"], w: Any) -> act["B/b L/c/t M"]:
        """Output of the MLP of a layer, which is added to the residual stream."""
        mlp_norm = shardops.all_gather("M/t/fsdp -> M", w.mlp_norm)
        nx = rms_norm(x, mlp_norm, self.config.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        w_gate = shardops.all_gather("M/fsdp F/t -> M F/t", w.w_gate)
        gate = save_for_backward(shardops.matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_gate))
        w_up = shardops.all_gather("M/fsdp F/t -> M F/t", w.w_up)
        up = save_for_backward(shardops.matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_up))
        hidden: act["B/b L/c F/t"] = (self.activation(jnp.float32(gate)) * up).astype(x.dtype)
        hidden = save_for_backward(hidden, cheap=True)
        w_down = shardops.all_gather("F/t M/fsdp -> F/t M", w.w_down)
        out = shardops.matmul("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, w_down)
        return shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """Output of the attention of a layer, which is added to the residual stream."""
        angles = tokens.shared
        q, k, v = self.heads(x, w)
        v = save_for_backward(v)
        q = save_for_backward(rope.rotate(self.head_norm("B/b L/c K/t Q D", q, w.q_norm), angles))
        k = save_for_backward(rope.rotate(self.head_norm("B/b L/c K/t D", k, w.k_norm), angles))
        attended = save_for_backward(attention(q, k, v, self.mask))
        w_o = shardops.all_gather("K/t Q D M/fsdp -> K/t Q D M", w.w_o)
        out = shardops.matmul("B/b L/c K/t Q D, K/t Q D M -> B/b L/c M +t", attended, w_o)
        return shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)

    @typed
    def heads(
        self, x: act["B/b L/c/t M"], w: Any
    ) -> tuple[act["B/b L/c K/t Q D"], act["B/b L/c K/t D"], act["B/b L/c K/t D"]]:
        """Queries, keys and values of a layer, before their norms and RoPE."""
        attention_norm = shardops.all_gather("M/t/fsdp -> M", w.attention_norm)
        nx = rms_norm(x, attention_norm, self.config.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        w_q = shardops.all_gather("M/fsdp K/t Q D -> M K/t Q D", w.w_q)
        q = shardops.matmul("B/b L/c M, M K/t Q D -> B/b L/c K/t Q D", nx, w_q)
        w_k = shardops.all_gather("M/fsdp K/t D -> M K/t D", w.w_k)
        k = shardops.matmul("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, w_k)
        w_v = shardops.all_gather("M/fsdp K/t D -> M K/t D", w.w_v)
        return q, k, shardops.matmul("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, w_v)

    def head_norm(self, heads: str, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        """RMSNorm over D of queries or keys `x` of spec `heads`; without `weight`, `x` as it is."""
        if weight is None:
            return x
        weight = shardops.all_gather("D/t/fsdp -> D", weight)
        normed = unit_rms(x, self.config.norm_epsilon)
        return shardops.einsum_unreduced(f"{heads}, D -> {heads}", normed, weight).astype(x.dtype)

    @typed
    def logits(self, w: Transformer, x: act["B/b L/c/t M"]) -> act["B/b L/c V/t/p"]:
        """Logits of the token after each position, from the output `x` of the last layer."""
        final_norm = shardops.all_gather("M/t/fsdp/p -> M", w.final_norm)
        nx = rms_norm(x, final_norm, self.config.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        unembed = shardops.all_gather(
            "V/t/p M/fsdp -> V/t/p M", w.embed if w.unembed is None else w.unembed
        )
        # Not shardops.matmul, whose product training.fp8 replaces: only layers compute in FP8.
        logits = shardops.einsum_unreduced("B/b L/c M, V/t/p M -> B/b L/c V/t/p", nx, unembed)
        softcap = self.config.logit_softcap
        return (
            logits
            if softcap is None
            else (softcap * jnp.tanh(jnp.float32(logits) / softcap)).astype(act.dtype)
        )


Model = Llama


@typed
def rms_norm(x: act["B/b L/c/t M"], weight: f32["M"], epsilon: float) -> act["B/b L/c/t M"]:
    """RMSNorm of each position, computed in f32. Each device of t normalizes its positions."""
    y = shardops.einsum_unreduced("B/b L/c/t M, M -> B/b L/c/t M", unit_rms(x, epsilon), weight)
    return save_for_backward(y.astype(x.dtype), cheap=True)


def unit_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Divides x[…, N] by its root mean square along N (arXiv 1910.07467), in f32."""
    x32 = jnp.float32(x)
    return x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)


@typed
def softmax_attention(
    q: act["B/b L K/t Q D"], k: act["B/b S K/t D"], v: act["B/b S K/t D_v"], mask: masks.Mask
) -> act["B/b L K/t Q D_v"]:
    """Softmax attention with heads sharded over t. Scores and softmax are in f32.

    `mask` turns the scores q·k into attention weights of the dtype of `v`.
    """
    formula = "B/b L K/t Q D, B/b S K/t D -> B/b K/t Q L S"
    products = shardops.einsum_unreduced(formula, q, k, preferred_element_type=jnp.float32)
    weights = mask.weights(products, d_head=q.shape[-1], dtype=v.dtype)
    return shardops.einsum_unreduced("B/b K/t Q L S, B/b S K/t D_v -> B/b L K/t Q D_v", weights, v)


W = TypeVar("W", bound=Any)  # class of a model's weights, such as Transformer
Batch = Array["m", TokenBatch]  # the batch of a step


# ---- loss and gradients --------------------------------------------------------------------------


@typed
def cross_entropy(
    logits: act["B/b L/c V/t/p"], targets: u32["B/b L/c"], z_loss: float = 0.0
) -> f32["B/b L/c"]:
    """-log softmax(logits)[target] in nats, plus z_loss · log(normalizer)².

    With training.save=marked, it saves `logits` and two numbers per position for the backward pass.
    """
    logits = jnp.float32(logits)
    peak = save_for_backward(shardops.pmax("B/b L/c V/t/p -> B/b L/c", lax.stop_gradient(logits)))
    terms = jnp.exp(logits - peak[..., None])
    terms = shardops.einsum_unreduced("B/b L/c V/t/p -> B/b L/c +t +p", terms)
    normalizer = save_for_backward(shardops.psum("B/b L/c +t +p -> B/b L/c", terms))
    log_normalizer = jnp.log(normalizer) + peak
    formula = "B/b L/c [V/t/p], B/b L/c -> B/b L/c +t +p"
    at_target = shardops.index_unreduced(formula, logits, targets)
    at_target = shardops.psum("B/b L/c +t +p -> B/b L/c", at_target)
    return log_normalizer - at_target + z_loss * jnp.square(log_normalizer)


@typed
def training_loss(
    logits: act["B/b L/c V/t/p"], targets: Targets, config: OptimizerConfig
) -> f32["B/b L/c"]:
    """Training loss of each target: cross_entropy with z_loss, which validation leaves out."""
    return cross_entropy(logits, targets.ids, config.z_loss)


def validation_loss(logits: act["B/b L/c V/t/p"], targets: Targets) -> f32["B/b L/c"]:
    """Validation loss of each target: cross_entropy without z_loss."""
    return cross_entropy(logits, targets.ids)


@typed
def count_targets(batch: Batch, weights: f32["m B/b L"] | None = None) -> f32[""]:
    """Number of targets in the whole batch that loss_mask selects, or the sum of their weights."""
    counted = jnp.float32(batch.loss_mask)
    counted = counted if weights is None else counted * weights
    count = shardops.einsum_unreduced("m B/b L -> +b", counted)
    return shardops.psum("+b ->", count)


def head_loss(w: W, x: object, batch: TokenBatch, forward: Forward) -> f32[""]:
    """Loss of a microbatch, summed over the targets that count, and divided by forward.count.

    `x` is the output of the last layer.
    """

    def summed(w: W, x: object, targets: Targets) -> f32["+b +c"]:  # over all positions, or a chunk
        losses = forward.losses(w, x, targets)
        # Each device of t holds the same losses: there is no sum over t.
        return shardops.einsum_unreduced("B/b L/c -> +b +c", losses * targets.counted)

    parts = (sum_in_chunks(summed, forward, w, *part) for part in forward.predictions(x, batch))
    total = functools.reduce(lambda a, b: a + b, parts)
    return shardops.psum("+b +c ->", total) / forward.count


def microbatch_loss(
    w: W, batch: TokenBatch, seeds: u32["B/b"] | None, forward: Forward
) -> tuple[f32[""], dict[str, Any]]:
    """Loss of a microbatch, and the metrics of its layers.

    In training, it includes the auxiliary losses, as their mean over the step's microbatches.
    """
    tokens = forward.tokens(batch, seeds)
    x = forward.embed(w, tokens)
    x, _, aux = forward.layers(w.layers, x, tokens)
    loss = head_loss(w, x, batch, forward)
    if forward.in_training and aux.loss is not None:
        loss = loss + jnp.sum(aux.loss) / forward.training.microbatches
    return loss, aux.metrics


@typed
def dropout_seeds(batch: Batch, step: i32[""], config: Config) -> u32["m B/b"] | None:
    """Dropout seed of each sequence of step `step`; None if the model has no dropout."""
    if not getattr(config.model, "dropout", 0):
        return None
    key = jax.random.fold_in(jax.random.key(config.training.seed), step)
    seeds = jax.random.bits(key, (config.training.microbatches, shardops.size("B")))
    return shardops.shard("m B -> m B/b", seeds)


@typed
def loss_and_gradients(
    w: W, batch: Batch, seeds: u32["m B/b"] | None, config: Config, forward: Forward
) -> tuple[f32[""], W, dict[str, Any]]:
    """Mean training loss per target plus auxiliary losses, its gradients, and metrics of layers.

    Of these it has those of each microbatch and of this device's layers, [m layers/p …].
    """
    m = config.training.microbatches
    count = jnp.maximum(count_targets(batch), 1)  # without targets the loss is 0, not NaN
    loss = rates.loss_of(config.optimizer, LOSSES)
    forward = dataclasses.replace(forward, loss=loss, count=count, target_count=count / m)
    if (weights := rates.weights_of_targets(config.optimizer, batch)) is not None:
        total = count_targets(batch, weights)
        forward = dataclasses.replace(forward, count=jnp.where(total > 0, total, 1))
    adds_up = stages.has_stages() or m > 1

    # Gradients are summed over microbatches before they are reduced over r. So the loss is
    # differentiated by the gathered weights, and the sum of these gradients goes back through
    # `prepare` once, by `reduce`. With a single microbatch, each gather reduces its own gradient
    # over r during the backward pass.
    def prepare(w: W) -> W:
        if adds_up and not forward.gathers_ahead:
            w = shardops.replicate("... -> ... *r", w)  # its transpose sums gradients over r
        return forward.gatherable(w)

    gathered, reduce = jax.vjp(prepare, w)
    if stages.has_stages():
        total, g, layers = stages.run(
            config, forward, head_loss, gathered, (batch, seeds), training=True
        )
    else:
        loss_and_gradient = jax.value_and_grad(microbatch_loss, has_aux=True)

        def add(sums: tuple, microbatch: tuple) -> tuple:
            (loss, metrics), g = loss_and_gradient(gathered, *microbatch, forward)
            return jax.tree.map(jnp.add, sums, (loss, g)), metrics

        def zeros(w: jax.Array) -> jax.Array:  # to which gradients are added, in f32 at least
            return jnp.zeros_like(w, jnp.promote_types(w.dtype, jnp.float32))

        zero = jnp.zeros_like(count, float), jax.tree.map(zeros, gathered)
        (total, g), layers = lax.scan(add, zero, (batch, seeds))
    (g,) = reduce(jax.tree.map(lambda g, w: g.astype(w.dtype), g, gathered))
    return total, g, layers


# ---- optimizer -----------------------------------------------------------------------------------


@pytree_dataclass
class State(Generic[W]):
    """Contents of a checkpoint: f32 arrays, sharded as the weights are at rest."""

    weights: W
    adam_mu: shardtypes.Subset[W]  # momentum of matrices under Muon; None for frozen weights
    adam_nu: shardtypes.Subset[W]  # None for matrices under Muon and for frozen weights
    average: W | None = None  # of the weights over steps; None without training.eval_average


@typed
def global_norm(g: W) -> f32[""]:
    """Root of the sum of the squares of all entries."""

    # An array is sharded over all axes but r, so that the flattened blocks of all devices hold each
    # entry once. N differs between arrays, so each call has a scope.
    @shardtypes.scope
    def sum_of_squares(x: jax.Array) -> Any:
        return shardops.einsum_unreduced("N/t/fsdp/p -> +t +fsdp +p", jnp.square(x.reshape(-1)))

    # A small vector may be replicated along some axes: it must not be counted once per device.
    def squares_of_small(kind: shardtypes.ArrayType, x: jax.Array) -> jax.Array:
        marks = " ".join(f"+{axis}" for axis in sorted(kind.spec.sharded))
        square = shardops.einsum_unreduced(f"{kind.spec} -> {marks}", jnp.square(x))
        return shardops.psum(f"{marks} ->", square) if marks else square

    kinds = [(kind, leaf) for _, kind, leaf in shardtypes.arrays_in(type(g), g)]
    squares = [sum_of_squares(leaf) for kind, leaf in kinds if not kind.whole]
    total = shardops.psum("+t +fsdp +p ->", functools.reduce(lambda a, b: a + b, squares))
    small = [squares_of_small(kind, leaf) for kind, leaf in kinds if kind.whole]
    return jnp.sqrt(functools.reduce(jnp.add, small, total))


@typed
def clip_by_global_norm(g: W, limit: float) -> tuple[W, f32[""]]:
    """Gradients scaled down to a global norm of at most `limit`, and their norm before that."""
    norm = global_norm(g)
    scale = limit / jnp.maximum(norm, limit)
    return jax.tree.map(lambda leaf: leaf * scale, g), norm


@typed
def adamw(
    state: State[W], g: W, step: i32[""], rate: f32[""], config: OptimizerConfig, updates: object
) -> State[W]:
    """One AdamW update (arXiv 1711.05101, algorithm 2).

    It changes the weights whose rates.Update in the tree `updates` names adamw. Steps count from 0.
    Each device updates its own blocks.
    """
    count = jnp.float32(step + 1)

    def updated(update: rates.Update, w, g, mu, nu):
        if update.algorithm != "adamw":
            return w, mu, nu
        mu = config.adam_b1 * mu + (1 - config.adam_b1) * g
        nu = config.adam_b2 * nu + (1 - config.adam_b2) * jnp.square(g)
        unbiased_mu = mu / (1 - config.adam_b1**count)
        unbiased_nu = nu / (1 - config.adam_b2**count)
        change = unbiased_mu / (jnp.sqrt(unbiased_nu) + config.adam_epsilon * update.epsilon)
        change = change + update.decay * w
        return w - rate * update.rate * change, mu, nu

    new = jax.tree.map(updated, updates, state.weights, g, state.adam_mu, state.adam_nu)
    weights, mu, nu = (jax.tree.map(lambda _, triple, i=i: triple[i], g, new) for i in range(3))
    return dataclasses.replace(state, weights=weights, adam_mu=mu, adam_nu=nu)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
"""By their name in optimizer.algorithm. Each updates the weights assigned to it in the State."""
LOSSES = {"cross_entropy": training_loss}
"""By name, as in optimizer.loss."""


@typed
def update_state(
    state: State[W],
    g: W,
    step: i32[""],
    config: Config,
    updates: object,
    schedule_step: f32[""] | None = None,
    layers: dict[str, Any] | None = None,
) -> tuple[State[W], f32[""], f32[""]]:
    """Applies `g`. Returns the new State, the norm of `g` before clipping, and the rate.

    `schedule_step` is where the learning rate's schedule is, if not at `step`. `layers` are the
    metrics that loss_and_gradients returns, for optimizers of your own that take them.
    """

    def zero_if_frozen(update: rates.Update, g: jax.Array) -> jax.Array:
        return jnp.zeros_like(g) if update.algorithm == rates.FROZEN else g

    g = rates.row_major(jax.tree.map(zero_if_frozen, updates, g))
    g, norm = clip_by_global_norm(g, config.optimizer.clip_norm)
    rate = rates.learning_rate(step, config.optimizer, schedule_step)
    at = step if schedule_step is None else schedule_step
    updates = rates.decayed(updates, at, config.optimizer)
    # Each changes the weights that `updates` assigns to it, and leaves the others.
    for optimizer in rates.algorithms(config.optimizer, OPTIMIZERS, layers).values():
        state = optimizer(state, g, step, rate, config.optimizer, updates)
    return rates.averaged(state, step, config.training), norm, rate


# ---- training step -------------------------------------------------------------------------------


@pytree_dataclass
class Metrics:
    """Metrics of a step, logged under these names."""

    loss: f32[""]
    grad_norm: f32[""]
    learning_rate: f32[""]
    layers: LayerMetrics | None
    skipped: shardtypes.bool_[""]  # loss or grad_norm is not finite: the state stayed as it was
    targets: f32[""]  # their number; if 0, the loss of the step is 0 and is not logged


def init_state(key: jax.Array, config: Config, model: LanguageModel) -> State:
    """Fresh weights, and zeros for the optimizer, the same on every mesh. Runs under jit."""
    weights = stages.fresh_weights(config, model, key)
    updates = rates.updates_of(config.optimizer, model, OPTIMIZERS)

    def first_mu(update: rates.Update, w: jax.Array) -> jax.Array | None:
        return None if update.algorithm == rates.FROZEN else jnp.zeros_like(w)

    def first_nu(update: rates.Update, w: jax.Array) -> jax.Array | None:
        return jnp.zeros_like(w) if rates.has_nu(update) else None

    mu = jax.tree.map(first_mu, updates, weights)
    nu = jax.tree.map(first_nu, updates, weights)
    average = jax.tree.map(jnp.copy, weights) if config.training.eval_average else None
    return rates.begun(State(weights, mu, nu, average), config.optimizer, updates)


def make_training_step(config: Config, model: LanguageModel):
    """The jitted training step: (state, batch, step) -> (state, metrics).

    It donates the state. With training.minutes, it also takes the position in the learning rate's
    schedule, which the host computes from the time. Runs that differ in `numbers` share the step.
    """
    forward = Forward(model, config.training, softmax_attention, in_training=True)
    Trained = State[model.Weights]

    @functools.partial(jax.jit, donate_argnums=0)
    @compute_scope(config.training.compute_dtype)
    @shardtypes.typed_shard_map
    def training_step(
        state: Of[Trained],
        batch: Batch,
        step: i32[""],
        schedule_step: f32[""] | None = None,
        numbers: Numbers | None = None,
    ) -> tuple[Of[Trained], Metrics]:
        c = with_numbers(config, numbers)
        updates = rates.updates_of(c.optimizer, model, OPTIMIZERS)
        seeds = dropout_seeds(batch, step, c)
        loss, g, layers = loss_and_gradients(state.weights, batch, seeds, config, forward)
        g = checkpoint_name(g, "gradient")  # the name by which statistics find them
        new, grad_norm, rate = update_state(state, g, step, c, updates, schedule_step, layers)
        skipped = ~jnp.isfinite(loss + grad_norm)
        state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state, new)
        layers = LayerMetrics.of_rows(layers, stages.placement_of(config, model).order)
        return state, Metrics(loss, grad_norm, rate, layers, skipped, count_targets(batch))

    return training_step


def make_evaluation_step(
    config: Config, model: LanguageModel, options: dict[str, Any] | None = None
):
    """Jitted with XLA `options`: (weights, batch) -> (summed loss in nats, number of targets)."""
    forward = Forward(model, config.training, softmax_attention, loss=validation_loss)
    Weights = model.Weights

    @functools.partial(jax.jit, compiler_options=options)
    @compute_scope(config.training.compute_dtype)
    @shardtypes.typed_shard_map
    def evaluation_step(w: Of[Weights], batch: Batch) -> tuple[f32[""], f32[""]]:
        gathered = forward.gatherable(w)

        def add(total: jax.Array, microbatch: TokenBatch) -> tuple[jax.Array, None]:
            loss, _ = microbatch_loss(gathered, microbatch, None, forward)
            return total + loss, None

        if stages.has_stages():
            total, _, _ = stages.run(
                config, forward, head_loss, gathered, (batch, None), training=False
            )
        else:
            total, _ = lax.scan(add, jnp.zeros(()), batch)
        return total, count_targets(batch)

    return evaluation_step


SPEC = StepSpec(
    State=State,
    Batch=Batch,
    attention=softmax_attention,
    cross_entropy=cross_entropy,
    optimizers=OPTIMIZERS,
    init_state=init_state,
    make_training_step=make_training_step,
    make_evaluation_step=make_evaluation_step,
)
"""The parts of this file that runs, checks and tools use."""


# ---- main ----------------------------------------------------------------------------------------

LISTENERS = (
    listeners.Statistics,
    listeners.Skips,
    listeners.Profile,
    listeners.Summary,
    listeners.Picture,
    listeners.Report,
    samples.Samples,
    samples.Tasks,
    listeners.Validation,
    listeners.Checkpoints,  # last: saves after the others logged, so resuming logs nothing twice
)
"""What happens around each step, in this order."""


def train(
    config: Config, model: LanguageModel, directory: Path, spec: StepSpec = SPEC
) -> str | None:
    """Runs training on the current mesh to its end, or to the next of training.changes.

    Returns the name of the signal that stopped it, run.CHANGES if settings change next, or None.
    """
    with Run(config, model, directory, spec, LISTENERS) as run:
        state = run.begin()  # of the last checkpoint, or of init_state
        if run.is_over:  # resumed after its last step
            return run.end()
        # These raise unless the training and evaluation steps compute on this mesh what they do on
        # one device, no token sees a later one, and kernels of this platform match their reference.
        run.check()
        run.check_kernels()
        training_step = run.compile()  # as it was checked
        for step, batch in run.steps():
            run.before(step, state, batch)  # tells the listeners
            state, metrics = training_step(state, batch, np.int32(step), *run.arguments)
            # Tells them, and logs the metrics of the step before, so that devices never wait.
            run.after(step, state, metrics)
        return run.end()


@launch.program
def main(config: Config, model: LanguageModel, directory: Path) -> str | None:
    """Runs the configuration that Hydra composed. Returns the signal that stopped it, if any."""
    return Run.to_the_end(lambda: train(config, model, directory))
