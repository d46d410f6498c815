"""shardwright: pretraining of a decoder-only transformer, with every shard and every collective written out.

    python -m train --config-name=local_test_synthetic

Read it from the top. The settings are in shardwright/run/config.py. The loop over layers is in shardlib/layers.py.

Dims                                                   Axes of the device mesh
  m  microbatches         L  positions, as queries       r  replicas: plain data parallel
  B  sequences of each    S  positions, as keys          d  data parallel, weights sharded at rest (FSDP)
  K  key/value heads      Q  query heads for each of K   t  tensor parallel
  M  d_model              D  entries of a head           c  context: each device has some positions
  V  vocabulary           F  d_ff                        e  experts, which are sharded over it; else like d
                                                         p  pipeline: each device has its own layers

`f32['M/d F/t']` is an array with M sharded over d and F sharded over t. `+t` marks a partial sum over t, which still
has to be reduced. Devices along an axis that a type does not name hold the same values. An axis that the mesh lacks is
read as one device. docs/sharding-types.md teaches the types. Between layers the residual stream is
`act['B/b L/c/t M']`: each device of c and t holds its own positions. `act` is the compute dtype, which
training.compute_dtype sets.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_extra import explicit_activation_checkpointing, save_for_backward
from shardlib import shardops, shardtypes
from shardlib.layers import Extras, LayerMetrics, run_layers
from shardlib.shardtypes import Array, Separate, Subset, bool_, f32, i32, pytree_dataclass, typed, typed_shard_map, u32
from shardlib.values import planned_devices
from shardwright.modeling import attention as attention_paths
from shardwright.modeling import context, fp8, rope, rules
from shardwright.modeling.loss_chunks import sum_in_chunks
from shardwright.modeling.model import LanguageModel, Tokens, act, checked_logits, compute_scope
from shardwright.modeling.settings import ModelConfig
from shardwright.modeling.weights import Weight, matrix, vector
from shardwright.optimizers import rates
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.muon import muon
from shardwright.run import stages, teacher
from shardwright.run.config import Config, TrainingConfig
from shardwright.run.launch import launched, program
from shardwright.run.run import Run
from shardwright.sampling.samples import TrainingSamples
from shardwright_data.loader import TokenBatch

# ---- weights ----------------------------------------------------------------------------------------------------


@pytree_dataclass
class TransformerLayer:
    """Weights of one layer, each as it is at rest >> as the layer uses it: see `gathered`."""

    attention_norm: f32["M/t/w"] >> f32["M"]
    w_q: f32["M/w K/t Q D"] >> act["M K/t Q D"]
    w_k: f32["M/w K/t D"] >> act["M K/t D"]
    w_v: f32["M/w K/t D"] >> act["M K/t D"]
    q_norm: f32["D/t/w"] >> f32["D"] | None  # None without qk_norm
    k_norm: f32["D/t/w"] >> f32["D"] | None
    w_o: f32["K/t Q D M/w"] >> act["K/t Q D M"]
    mlp_norm: f32["M/t/w"] >> f32["M"]
    w_gate: f32["M/w F/t"] >> act["M F/t"]
    w_up: f32["M/w F/t"] >> act["M F/t"]
    w_down: f32["F/t M/w"] >> act["F/t M"]


@pytree_dataclass
class Transformer:
    """Weights of the model."""

    embed: f32["V/t/p M/w"] >> act["V/t/p M"]
    layers: Array["layers/p", TransformerLayer]
    final_norm: f32["M/t/w/p"] >> f32["M"]
    unembed: f32["V/t/p M/w"] >> act["V/t/p M"] | None  # None with tied_embeddings


def weight_table(c: ModelConfig) -> Transformer:
    """Shape and initial values of each weight: matrices have variance 1/fan-in, norms are 1."""
    n, scale = c.layers, c.weight_init_scale
    model, heads, hidden = (c.d_model,), (c.n_kv, c.n_q_per_kv, c.d_head), (c.d_ff,)
    embed_std = c.embed_init_scale or (c.d_model**-0.5 if c.tied_embeddings else 1.0)
    return Transformer(
        embed=Weight((c.vocab, c.d_model), "unembedding" if c.tied_embeddings else "embedding", embed_std),
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


# ---- the model --------------------------------------------------------------------------------------------------


class Llama:
    """Decoder with RMSNorm, grouped-query attention, RoPE and SwiGLU. The setting `model.module: train` chooses it."""

    Weights = Transformer
    rule = rules.Rule(visible=(rules.causal, rules.same_document))

    def __init__(self, c: ModelConfig):
        self.c, self.table = c, weight_table(c)

    def prepare(self, tokens: Tokens) -> Tokens:
        """Adds the cosines and sines of RoPE to the tokens, once for all layers."""
        return dataclasses.replace(tokens, shared=rope.tables(self.c, tokens.positions))

    @typed
    def embed(self, w: Transformer, tokens: Tokens) -> act["B/b L/c/t M"]:
        """Residual stream before the first layer."""
        # f32, because the gradient of a frequent token is a sum of thousands, which bf16 would round.
        embed, spec = w.embed.astype(jnp.float32), "[V/t/p] M, B/b L/c -> B/b L/c M +t +p"
        x = shardops.index_unreduced(spec, embed, tokens.ids)
        x = shardops.psum_scatter("B/b L/c M +t +p -> B/b L/c/t M +p", x.astype(act.dtype))
        return shardops.psum("B/b L/c/t M +p -> B/b L/c/t M", x)

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: TransformerLayer, tokens: Tokens, attend: Callable, einsum: Callable
    ) -> act["B/b L/c/t M"]:
        """One transformer layer. Its weights are `gathered`."""
        dtype, epsilon = x.dtype, self.c.norm_epsilon
        x = self.with_attention(x, w, tokens, attend, einsum)
        nx = rms_norm(x, w.mlp_norm, epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        gate = save_for_backward(einsum("B/b L/c M, M F/t -> B/b L/c F/t", nx, w.w_gate))
        up = save_for_backward(einsum("B/b L/c M, M F/t -> B/b L/c F/t", nx, w.w_up))
        hidden: act["B/b L/c F/t"] = (jax.nn.silu(jnp.float32(gate)) * up).astype(dtype)
        out = einsum("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, w.w_down)
        return x + shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)

    @typed
    def with_attention(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attend: Callable, einsum: Callable
    ) -> act["B/b L/c/t M"]:
        """The first half of a layer: the residual stream after attention."""
        epsilon, angles = self.c.norm_epsilon, tokens.shared
        nx = rms_norm(x, w.attention_norm, epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        q = einsum("B/b L/c M, M K/t Q D -> B/b L/c K/t Q D", nx, w.w_q)
        k = einsum("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, w.w_k)
        v = save_for_backward(einsum("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, w.w_v))
        q = save_for_backward(rope.rotate(self.head_norm("B/b L/c K/t Q D", q, w, "q_norm"), angles))
        k = save_for_backward(rope.rotate(self.head_norm("B/b L/c K/t D", k, w, "k_norm"), angles))
        attended = save_for_backward(attend(q, k, v, self.rule))
        out = einsum("B/b L/c K/t Q D, K/t Q D M -> B/b L/c M +t", attended, w.w_o)
        x = save_for_backward(x + shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out))
        return x

    def head_norm(self, heads: str, x: jax.Array, w: Any, name: str) -> jax.Array:
        """RMSNorm of each head of queries or keys, of type `heads`, by the weight of this name, if there is one."""
        weight, epsilon = getattr(w, name), self.c.norm_epsilon
        if weight is None:
            return x
        return shardops.einsum_unreduced(f"{heads}, D -> {heads}", unit_rms(x, epsilon), weight).astype(x.dtype)

    @typed
    def logits(self, w: Transformer, x: act["B/b L/c/t M"]) -> act["B/b L/c V/t/p"]:
        """Logits of the token after each position; `x` is the residual stream after the last layer."""
        softcap, unembed = self.c.logit_softcap, w.embed if w.unembed is None else w.unembed
        nx = rms_norm(x, w.final_norm, self.c.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        logits = shardops.einsum_unreduced("B/b L/c M, V/t/p M -> B/b L/c V/t/p", nx, unembed)
        return logits if softcap is None else (softcap * jnp.tanh(jnp.float32(logits) / softcap)).astype(act.dtype)


Model = Llama


@typed
def rms_norm(x: act["B/b L/c/t M"], weight: f32["M"], epsilon: float) -> act["B/b L/c/t M"]:
    """RMSNorm of each position, in f32. Each device of t norms its own positions."""
    y = shardops.einsum_unreduced("B/b L/c/t M, M -> B/b L/c/t M", unit_rms(x, epsilon), weight)
    return y.astype(x.dtype)


def unit_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Divides x[…, N] by its root mean square along N (arXiv 1910.07467), in f32."""
    x32 = jnp.float32(x)
    return x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)


@typed
def attention(
    q: act["B/b L K/t Q D"],
    k: act["B/b S K/t D"],
    v: act["B/b S K/t D"],
    places: tuple[rules.Places, rules.Places],
    rule: rules.Rule,
    learned: tuple = (),
    sinks: f32["B/b K/t Q"] | None = None,
    drop: Callable | None = None,
) -> act["B/b L K/t Q D"]:
    """Softmax attention by `rule`, in f32, with heads sharded over t. `drop` is dropout of attention weights.

    `places` are those of the queries and of the keys.
    """
    scores = shardops.einsum_unreduced(
        "B/b L K/t Q D, B/b S K/t D -> B/b K/t Q L S", q, k, preferred_element_type=jnp.float32
    )
    heads = rules.head_numbers(*q.shape[2:4])
    scores = rule.scores(scores, q.shape[-1], places[0].as_queries(), places[1].as_keys(), heads, learned)
    weights = rules.softmax(scores, sinks).astype(v.dtype)
    weights = drop(weights) if drop else weights
    return shardops.einsum_unreduced("B/b K/t Q L S, B/b S K/t D -> B/b L K/t Q D", weights, v)


# ---- forward pass of any model ----------------------------------------------------------------------------------

W = TypeVar("W")  # class of a model's weights, such as Transformer
Batch = Array["m", TokenBatch]  # the batch of a step


def gathered(w: W, which: Callable[[str], bool] = lambda name: True, reduce_dtype: str = "compute") -> W:
    """Weights as they are used: each is cast, and gathered over the axes that its type drops, into a copy.

    `which` says by its name, such as `layers.w_q`, whether a weight is to be used next; others stay at rest. Its
    gradient is reduced over r and those axes in the dtype of its uses, or with reduce_dtype="f32" in its own.
    """

    def gather(name, t, x):
        if not which(name):
            return x
        used = t.used or t
        x = x.astype(used.jax_dtype) if reduce_dtype == "compute" else x
        x = shardops.replicate("... -> ... *r", x)
        if used.spec == t.spec:
            return x.astype(used.jax_dtype)
        return shardops.all_gather(f"{t.spec} -> {used.spec}", x, dtype=used.jax_dtype)

    return shardtypes.map_arrays(gather, w)


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward pass of a model, the same in training, evaluation and sampling.

    `training` has the settings that matter here, such as attention, save and unroll. `in_training` is whether this is a
    training step, of which the gradients are taken. `targets` is that of Tokens, for the losses of layers.
    """

    model: LanguageModel
    training: TrainingConfig
    in_training: bool = False
    targets: Any = None

    def __call__(
        self, w: W, microbatches: Callable | tuple, head: Callable, attend: Callable | None = None, caches: Any = None
    ) -> tuple[Any, Any, Extras]:
        """Result of head(w, *xs) on the outputs of the last layer, the caches of the layers, and their Extras.

        `microbatches` are the Tokens of each, or a function that makes them. `attend` maps (cache, q, k, v, rule,
        *learned, sinks, drop) to attention and the new cache; None: no caches.
        """
        w = self.outside(w)
        tokens = microbatches() if callable(microbatches) else microbatches
        xs = tuple(self.model.embed(w, each) for each in tokens)
        xs, caches, extras = self.layers(w.layers, xs, tokens, None, attend, caches)
        return head(w, *xs), caches, extras

    def layers(
        self, w: Any, xs: tuple, tokens: tuple, numbers: Any = None, attend: Callable | None = None, caches: Any = None
    ) -> tuple[tuple, Any, Extras]:
        """Residual streams `xs` of microbatches after the layers, the caches of the layers, and their Extras.

        Each layer gathers its weights once for all, and collectives of one can run beside products of another. With
        caches it is one microbatch. `numbers` are those of the layers of a pipeline stage; None: all layers.
        """
        t, parts = self.training, [(part.prepared(self.model), attend or self.attend(part)) for part in tokens]

        def layer(w, xs, index, place, attend):
            w = w if self.once else self.gathered(w)
            one = lambda x, part, own: self.model.layer(
                x, w, part.in_layer(index, place), functools.partial(attend, own), self.einsum
            )
            return Extras.joined([one(x, *part) for x, part in zip(xs, parts, strict=True)])

        checkpoint = functools.partial(explicit_activation_checkpointing, save=t.save)
        options = {"checkpoint": checkpoint, "unroll": t.unroll, "period": getattr(self.model, "period", 1)}
        with_cache = lambda cache, own, *args, **given: own(cache, *args, **given)
        return run_layers(layer, w, xs, numbers, with_cache, caches, **options)

    def gathered(self, w: W, which: Callable[[str], bool] = lambda name: True) -> W:
        """Weights as they are used, with training.reduce_dtype."""
        return gathered(w, which, self.training.reduce_dtype)

    @property
    def einsum(self) -> Callable:
        """Product with the weights of a layer."""
        return fp8.einsum if self.training.fp8 else shardops.einsum_unreduced

    def attend(self, tokens: Tokens) -> Callable:
        """Attention within `tokens`, by the path that training.attention names. It leaves caches as they are.

        Where positions are sharded over c, training.context says how queries meet the keys of other devices.
        """

        def of_device(q, k, v, places, rule, learned=(), sinks=None, drop=None):
            path = attention_paths.choose(self.training.attention, rule, q, bool(drop), sinks is not None, k.shape[1])
            if path != "einsum":
                return attention_paths.run(path, q, k, v, places, rule, learned, sinks)
            return attention(q, k, v, places, rule, learned, sinks, drop)

        def attend(cache, q, k, v, rule, *learned, sinks=None, drop=None):
            way = context.way(self.training, q, learned, bool(drop))
            return way(of_device, q, k, v, tokens.places, self.rule(rule), learned, sinks, drop), cache

        return attend

    def rule(self, rule: rules.Rule) -> rules.Rule:
        """Rule of a layer. Without training.document_mask, each sequence is one document."""
        return rule if self.training.document_mask else rule.without(rules.same_document)

    def tokens(self, batch: TokenBatch, seeds: jax.Array | None = None) -> Tokens:
        """Tokens that the model reads to predict the batch. `seeds` is a random number for each sequence, or None."""
        mask, bos_id = self.training.document_mask, self.model.c.bos_id
        tokens = Tokens.before(batch.targets, batch.is_seq_start, bos_id, seeds, mask, batch.inputs)
        counts = None if self.targets is None else shardops.shard("B/b L -> B/b L/c", batch.loss_mask)
        return dataclasses.replace(tokens, training=self.in_training, counts=counts, targets=self.targets)

    @property
    def once(self) -> bool:
        """Whether weights are gathered once for all microbatches, by training.gather_weights.

        `auto`: where c, d and e are 1. Nothing is gathered there, but each weight is cast once, not again in the
        backward pass.
        """
        how = self.training.gather_weights
        return how == "step" or (how == "auto" and planned_devices("cde") == 1)

    def copies(self, w: W) -> W:
        """Copies of the weights: their gradients are reduced over r, and over d if `once`, for all microbatches."""
        return self.gathered(w) if self.once else shardops.replicate("... -> ... *r", w)

    def outside(self, w: W) -> W:
        """The weights with those outside of the layers gathered, once for the microbatches that are side by side."""
        return w if self.once else self.gathered(w, lambda name: not name.startswith("layers."))


# ---- loss and gradients -----------------------------------------------------------------------------------------


@typed
def cross_entropy(logits: act["B/b L/c V/t/p"], targets: u32["B/b L/c"], z_loss: float = 0.0) -> f32["B/b L/c"]:
    """-log softmax(logits)[target] in nats, plus z_loss · log(normalizer)². The backward pass keeps the logits only."""
    logits = jnp.float32(logits)
    peak = save_for_backward(shardops.pmax("B/b L/c V/t/p -> B/b L/c", lax.stop_gradient(logits)))
    terms = shardops.einsum_unreduced("B/b L/c V/t/p -> B/b L/c +t +p", jnp.exp(logits - peak[..., None]))
    log_normalizer = jnp.log(save_for_backward(shardops.psum("B/b L/c +t +p -> B/b L/c", terms))) + peak
    at_target = shardops.index_unreduced("B/b L/c [V/t/p], B/b L/c -> B/b L/c +t +p", logits, targets)
    at_target = shardops.psum("B/b L/c +t +p -> B/b L/c", at_target)
    return log_normalizer - at_target + z_loss * jnp.square(log_normalizer)


@typed
def training_loss(
    logits: act["B/b L/c V/t/p"],
    targets: u32["B/b L/c"],
    mask: bool_["B/b L/c"],
    reference: act["B/b L/c V/t/p"] | None,
    c: OptimizerConfig,
) -> f32["B/b L/c"]:
    """Loss of each target that training minimizes; validation takes cross_entropy. `reference`: another's logits."""
    return cross_entropy(logits, targets, c.z_loss)


@typed
def count_targets(batch: Batch) -> f32[""]:
    """Number of targets in the whole batch that loss_mask selects."""
    count = shardops.einsum_unreduced("m B/b L -> +b", jnp.float32(batch.loss_mask))
    return shardops.psum("+b ->", count)


@typed
def summed_loss(
    w: W,
    x: Any,
    targets: u32["B/b L/c"],
    mask: bool_["B/b L/c"],
    reference: act["B/b L/c V/t/p"] | None,
    forward: Forward,
    loss: Callable,
) -> f32["+b +c"]:
    """Sum of loss(logits, targets, …) over the targets that `mask` selects; `x` is the output of the last layer."""
    loss = explicit_activation_checkpointing(loss, save=forward.training.save)
    losses = loss(checked_logits(forward.model, w, x), targets, mask, reference)
    # Each device of t holds the same losses: there is no sum over t.
    return shardops.einsum_unreduced("B/b L/c -> +b +c", losses * mask)


@dataclasses.dataclass(frozen=True)
class MicrobatchLoss:
    """Loss of microbatches side by side, and the parts of that of one, which pipeline stages run.

    It is the sum of loss(logits, targets, mask, logits of `reference`), divided by `targets`, the number of targets in
    the whole batch. `reference` maps a TokenBatch to the logits of another model. A microbatch is a TokenBatch, and
    seeds or None.
    """

    forward: Forward
    loss: Callable = lambda logits, targets, *_: cross_entropy(logits, targets)
    targets: Any = 1.0
    reference: Callable | None = None

    def __call__(self, w: W, *microbatches: Any) -> tuple[Any, Extras]:
        """The sum of the losses, and the means of the layers' Extras."""
        tokens = lambda: tuple(self.forward.tokens(*each) for each in microbatches)
        losses = lambda w, *xs: [self.last(w, x, *each) for x, each in zip(xs, microbatches, strict=True)]
        found, _, extras = self.forward(w, tokens, losses)
        return sum(found[1:], found[0]), extras

    def outside(self, w: W) -> W:
        """The weights for `first` and `last`."""
        return self.forward.outside(w)

    def first(self, w: W, *microbatch: Any) -> Any:
        """The input of the first layer."""
        return self.forward.model.embed(w, self.forward.tokens(*microbatch))

    def layers(self, w: Any, x: Any, numbers: Any, *microbatch: Any) -> tuple[Any, Extras]:
        """`x` after the layers of a stage, of these numbers, and their Extras."""
        (x,), _, extras = self.forward.layers(w, (x,), (self.forward.tokens(*microbatch),), numbers)
        return x, extras

    def last(self, w: W, x: Any, batch: TokenBatch, seeds: Any) -> Any:
        """The loss, from the output of the last layer."""
        summed = functools.partial(summed_loss, forward=self.forward, loss=self.loss)
        own = functools.partial(shardops.shard, "B/b L -> B/b L/c")
        given = own(batch.targets), own(batch.loss_mask), self.reference and self.reference(batch)
        loss = sum_in_chunks(summed, self.forward.training.loss_chunk, w, x, *given)
        return shardops.psum("+b +c ->", loss) / self.targets


def accumulate(loss: Callable, w: W, batch: Any, side_by_side: int = 1) -> tuple[Any, W, LayerMetrics | None]:
    """Loss and gradients, summed over the microbatches in `batch`, and the mean of the layers' metrics.

    `loss` maps w and the microbatches that are side by side to the sum of their losses and the means of their Extras.
    """
    batch = jax.tree.map(lambda x: x.reshape(-1, side_by_side, *x.shape[1:]), batch)
    groups, layers = (len(jax.tree.leaves(x)[0]) for x in (batch, w.layers))

    def loss_of(w, group):
        one = lambda i: jax.tree.map(lambda x: x[i], group)
        total, extras = loss(w, *map(one, range(side_by_side)))
        return total if extras.loss is None else total + jnp.sum(extras.loss) / groups, extras.metrics

    def add(sums, group):
        (loss, metrics), g = jax.value_and_grad(loss_of, has_aux=True)(w, group)
        return jax.tree.map(jnp.add, sums, (loss, g)), metrics

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w)
    (total, g), metrics = lax.scan(add, (jnp.zeros(()), zeros), batch)
    metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
    return total, g, LayerMetrics.of_rows(metrics, jnp.arange(layers), layers)


@typed
def loss_and_gradients(
    w: W, batch: Batch, c: Config, forward: Forward, seeds: u32["m B/b"] | None = None, reference: Any = None
) -> tuple[f32[""], W, LayerMetrics | None]:
    """Mean loss in nats a token, its gradients, and the metrics of the layers."""
    # Whether gradients are reduced over r once, after all. Else each layer does so, beside the backward pass of others.
    ahead = forward.once or c.training.microbatches > c.training.side_by_side or stages.has_stages()
    copies, vjp = jax.vjp(forward.copies if ahead else lambda w: w, w)
    reduced = lambda g: vjp(jax.tree.map(lambda x, copy: x.astype(copy.dtype), g, copies))[0]
    targets = count_targets(batch)
    forward = dataclasses.replace(forward, targets=targets / c.training.microbatches)
    loss = MicrobatchLoss(forward, functools.partial(training_loss, c=c.optimizer), targets, reference)
    if stages.has_stages():
        total, g, layers = stages.run_training(c, forward.model, loss, copies, (batch, seeds))
    else:
        total, g, layers = accumulate(loss, copies, (batch, seeds), c.training.side_by_side)
    return shardops.psum("+p ->", total), reduced(g), layers


# ---- optimizer --------------------------------------------------------------------------------------------------


@pytree_dataclass
class State(Generic[W]):
    """Contents of a checkpoint: f32 arrays, sharded over every axis but r."""

    weights: W
    adam_mu: Subset[W]  # momentum of matrices under Muon; None for frozen weights
    adam_nu: Subset[W]  # None for matrices under Muon and for frozen weights


@typed
def squared_norm(x: f32["N/t/w/p"]) -> f32["+t +w +p"]:
    """Sum of the squares of a flattened array."""
    return shardops.einsum_unreduced("N/t/w/p -> +t +w +p", jnp.square(x))


@typed
def global_norm(g: W) -> f32[""]:
    """Root of the sum of the squares of all entries."""
    # Every array is sharded over all axes but r, so that the flattened blocks of all devices hold each entry once.
    squares = [squared_norm(leaf.reshape(-1)) for leaf in jax.tree.leaves(g)]
    return jnp.sqrt(shardops.psum("+t +w +p ->", functools.reduce(lambda a, b: a + b, squares)))


@typed
def clip_by_global_norm(g: W, limit: float) -> tuple[W, f32[""]]:
    """Gradients scaled down to a global norm of at most `limit`, and their norm before that."""
    norm = global_norm(g)
    scale = limit / jnp.maximum(norm, limit)
    return jax.tree.map(lambda leaf: leaf * scale, g), norm


@typed
def adamw(state: State[W], g: W, step: i32[""], rate: f32[""], c: OptimizerConfig, updates: Any) -> State[W]:
    """One AdamW update (arXiv 1711.05101, algorithm 2) of the weights that `updates` assigns to adamw.

    Steps count from 0. Each device updates its own blocks.
    """
    count = jnp.float32(step + 1)

    def updated(update: rates.Update, w, g, mu, nu):
        if update.algorithm != "adamw":
            return w, mu, nu
        mu = c.adam_b1 * mu + (1 - c.adam_b1) * g
        nu = c.adam_b2 * nu + (1 - c.adam_b2) * jnp.square(g)
        unbiased_mu, unbiased_nu = mu / (1 - c.adam_b1**count), nu / (1 - c.adam_b2**count)
        change = unbiased_mu / (jnp.sqrt(unbiased_nu) + c.adam_epsilon) + update.decay * w
        return w - rate * update.rate * change, mu, nu

    new = jax.tree.map(updated, updates, state.weights, g, state.adam_mu, state.adam_nu)
    weights, mu, nu = (jax.tree.map(lambda _, triple, i=i: triple[i], g, new) for i in range(3))
    return dataclasses.replace(state, weights=weights, adam_mu=mu, adam_nu=nu)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
"""Optimizers by name, as in optimizer.algorithm. Each updates its own weights and returns the State."""


@typed
def update_state(state: State[W], g: W, step: i32[""], c: Config, updates: Any) -> tuple[State[W], f32[""], f32[""]]:
    """State after an update with the gradients `g`, their norm before clipping, and the learning rate."""
    g = jax.tree.map(lambda u, g: jnp.zeros_like(g) if u.algorithm == rates.FROZEN else g, updates, g)
    g, norm = clip_by_global_norm(g, c.optimizer.clip_norm)
    rate = rates.learning_rate(step, c.optimizer)
    for optimizer in OPTIMIZERS.values():
        state = optimizer(state, g, step, rate, c.optimizer, updates)
    return state, norm, rate


# ---- training step ----------------------------------------------------------------------------------------------


@pytree_dataclass
class Metrics:
    """Metrics of a step, logged under these names."""

    loss: f32[""]
    grad_norm: f32[""]
    learning_rate: f32[""]
    layers: LayerMetrics | None
    skipped: bool_[""]  # loss or grad_norm is not finite, so that the state stayed as it was


def init_state(key: jax.Array, c: Config, model: LanguageModel) -> State:
    """Fresh weights, and zeros for the optimizer. Runs under jit. The values do not depend on the mesh."""
    weights, updates = stages.fresh_weights(c, model, key), rates.updates_of(c.optimizer, model.table, OPTIMIZERS)
    mu = jax.tree.map(lambda u, w: None if u.algorithm == rates.FROZEN else jnp.zeros_like(w), updates, weights)
    nu = jax.tree.map(lambda u, w: jnp.zeros_like(w) if u.algorithm == "adamw" else None, updates, weights)
    return State(weights, mu, nu)


def make_training_step(c: Config, model: LanguageModel):
    """The jitted training step: (state, batch, step, weights of training.reference or None) -> (state, metrics).

    It reuses the old state's memory.
    """
    forward, other = Forward(model, c.training, in_training=True), Forward(teacher.model_of(c) or model, c.training)
    Weights, Other = model.Weights, Separate[other.model.Weights]
    updates = rates.updates_of(c.optimizer, model.table, OPTIMIZERS)

    @typed_shard_map
    def per_device(
        state: State[Weights], batch: Batch, step: i32[""], seeds: u32["m B/b"] | None, fixed: Other | None
    ) -> tuple[State[Weights], Metrics]:
        others = fixed and teacher.logits_of(other, fixed)
        loss, g, layers = loss_and_gradients(state.weights, batch, c, forward, seeds, others)
        new, grad_norm, rate = update_state(state, checkpoint_name(g, "gradient"), step, c, updates)
        skipped = ~jnp.isfinite(loss + grad_norm)
        state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state, new)
        return state, Metrics(loss, grad_norm, rate, layers, skipped)

    @functools.partial(jax.jit, donate_argnums=0)
    def training_step(state: State, batch: Batch, step: jax.Array, fixed: Any = None) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(c.training.seed), step)
        seeds = jax.random.bits(key, batch.targets.shape[:2]) if getattr(c.model, "dropout", 0) else None
        with compute_scope(c.training.compute_dtype):
            return per_device(state, batch, step, seeds, fixed)

    return training_step


def make_evaluation_step(c: Config, model: LanguageModel, options: dict[str, Any] | None = None):
    """The jitted evaluation step: (weights, batch) -> (sum of losses in nats, number of targets)."""
    forward, Weights = Forward(model, c.training), model.Weights

    @typed_shard_map
    def per_device(w: Weights, batch: Batch) -> tuple[f32[""], f32[""]]:
        loss, w = MicrobatchLoss(forward), forward.copies(w)
        if stages.has_stages():
            total = stages.run_evaluation(c, model, loss, w, (batch, None))
        else:
            total, _ = lax.scan(lambda sum, part: (sum + loss(w, part)[0], None), jnp.zeros(()), (batch, None))
        return shardops.psum("+p ->", total), count_targets(batch)

    @functools.partial(jax.jit, compiler_options=options)
    def evaluation_step(w: Any, batch: Batch):
        with compute_scope(c.training.compute_dtype):
            return per_device(w, batch)

    return evaluation_step


def programs(c: Config, model: LanguageModel, batch: Batch, which: str = "both") -> dict[str, jax.stages.Traced]:
    """The two steps, traced, of which a checkpoint keeps hashes; or `which`: one, "start" (init_state), or "all"."""
    start, other = jax.jit(lambda: init_state(jax.random.key(0), c, model)), teacher.weights_of(c)
    state = jax.eval_shape(start)
    trace = {
        "training": lambda: make_training_step(c, model).trace(state, batch, np.int32(0), other),
        "evaluation": lambda: make_evaluation_step(c, model).trace(state.weights, batch),
        "start": lambda: start.trace(),
    }
    names = {"both": ("training", "evaluation"), "all": trace}.get(which, (which,))
    return {name: trace[name]() for name in names}


# ---- main -------------------------------------------------------------------------------------------------------


def train(c: Config, model: LanguageModel, directory: Path) -> str | None:
    """A run on the current mesh to its end, or to the next of training.changes. Returns what Run.end does."""
    with Run(c, functools.partial(Forward, model), directory, programs) as run:
        state = run.begin(functools.partial(init_state, c=c, model=model), State)
        if run.is_over:  # resumed after its last step
            return run.end()
        c, t = run.c, run.c.training  # with the changes until here
        samples = TrainingSamples(c, run.forward, run) if t.sample_interval else None
        run.prove()  # both steps compute on this mesh what they compute on one device, and no token sees a later one
        run.compare_forms()  # what has another form on this platform, such as `attention`, computes the same
        training_step = run.compile(make_training_step(c, model), state)
        evaluation_step = make_evaluation_step(c, model, run.options)
        if samples and run.start == 0:
            samples.write(state.weights)
        for step, batch in run.steps():
            run.look(step, state, batch)  # statistics, every training.microscope_interval steps
            state, metrics = training_step(state, batch, np.int32(step), run.reference)
            run.log(step, metrics)  # reads the metrics of the step before, so that devices never wait
            if samples and run.due(t.sample_interval):
                samples.write(state.weights)
            if run.due(t.eval_interval, t.eval_epochs):
                run.validate(evaluation_step, state.weights)
            if run.due(t.checkpoint_interval) or run.stopped_by:
                run.save(state)  # after what is logged of these steps, which a run resumed from here does not log again
        return run.end()


@program
def main(config) -> str | None:
    """Runs the configuration that Hydra composed. Returns the signal that stopped the run, if any."""
    with launched(config) as (c, model, directory):
        return Run.to_the_end(lambda: train(c, model, directory))


if __name__ == "__main__":
    from train import main  # as the module `train`, the name by which other modules import this file

    main()
