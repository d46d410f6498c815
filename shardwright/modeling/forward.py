"""Forward pass of any model, the same in training, evaluation and sampling."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib import shardops
from shardlib.axes import PIPELINE_AXIS
from shardlib.layers import LayerAux, check_result, run_period
from shardlib.mesh import stage_axes
from shardlib.opaque import varying
from shardlib.parsing import ShardError
from shardlib.shardtypes import scope
from shardwright.jax_extra import explicit_activation_checkpointing
from shardwright.modeling import fp8
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import (
    HIDDEN,
    LanguageModel,
    Targets,
    Tokens,
    checked_logits,
    inputs_of,
    period_of,
)
from shardwright.modeling.weights import (
    at_rest,
    count_layers,
    gather_ahead,
    gathers_ahead,
    scope_of,
    stacks_before_layers,
)


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward pass of a model, up to its loss. Per-device code.

    Attributes:
        model: the model.
        training: the settings of that section, of which attention, save, unroll and others matter
            here.
        einsum: softmax_attention of train.py.
        in_training: True in a training step, False in evaluation and sampling.
        target_count: as in Tokens, for the losses of layers.
        loss: (logits, Targets) -> the loss of each target; None where none is computed.
        count: what the sum of these losses is divided by: in training the number of targets in the
            whole batch.
    """

    model: LanguageModel
    training: Any
    einsum: Callable[..., jax.Array]
    in_training: bool = False
    target_count: Any = None
    loss: Any = None
    count: Any = 1.0

    def tokens(self, batch: Any, seeds: jax.Array | None = None) -> Tokens:
        """Tokens that the model reads to predict a TokenBatch.

        `seeds`: a random number for each sequence, or None.
        """
        mask = self.training.document_mask
        bos_id = self.model.config.bos_id
        tokens = Tokens.before(batch.targets, batch.is_seq_start, bos_id, seeds, mask, batch.inputs)
        counted = None
        if self.target_count is not None:
            counted = shardops.shard("B/b L -> B/b L/c", batch.loss_mask)
        declared = tuple(inputs_of(self.model).items())
        of_step = {"training": self.in_training, "counted": counted, "declared": declared}
        return dataclasses.replace(tokens, target_count=self.target_count, **of_step)

    def attention(self, tokens: Tokens) -> Attention:
        """Attention within `tokens`, by training.attention and training.context."""
        return Attention(self.einsum, self.training, tokens)

    def embed(self, w: Any, tokens: Tokens) -> Any:
        """The residual stream before `layers`: after the model's embed, and the stacks before
        `layers`.
        """
        return self._embed(w, tokens, None)[0]

    def _embed(self, w: Any, tokens: Tokens, attention: Any) -> tuple[Any, list[Any]]:
        """As `embed`. Also returns the caches of each stack."""
        x = self.model.embed(w, tokens)
        found = []
        first = 0
        for name, stack in stacks_before_layers(w).items():
            x = varying(x, stage_axes())
            ids = jnp.arange(len(jax.tree.leaves(stack)[0]))
            with jax.named_scope(scope_of(name)):
                x, caches, aux = self.layers(stack, x, tokens, ids, attention, first)
            if jax.tree.leaves(aux):
                raise ShardError(
                    f"a layer of the stack `{name}` returns a loss or metrics",
                    "return x alone: only layers of the stack `layers` have a LayerAux",
                    place=str(aux.place),
                )
            found.append(caches)
            first += len(ids)
        return x, found

    def layers(
        self,
        w: Any,
        x: Any,
        tokens: Tokens,
        layer_ids: Any = None,
        attention: Attention | None = None,
        first: int | None = None,
    ) -> tuple[Any, Any, LayerAux]:
        """Runs a stack of layers with weights `w` on the residual stream `x`.

        Args:
            w: weights of the stack.
            x: the residual stream before its first layer.
            tokens: the tokens at its positions.
            layer_ids: those of the layers of a pipeline stage; None: all layers of the stack.
            attention: attention with the caches of all layers; None: that of training.
            first: index in the model of the stack's first layer; None: the stack is `layers`.

        Returns:
            The new residual stream, and the layers' new caches and LayerAux, stacked.
        """
        is_main = first is None
        before = count_layers(self.model.table) - self.model.config.layers if is_main else first
        period = period_of(self.model) if is_main else 1
        attention = attention or self.attention(tokens)
        count = len(jax.tree.leaves(w)[0])
        rows = slice(before, before + count)
        caches = jax.tree.map(
            lambda cache: cache if rows == slice(0, len(cache)) else cache[rows], attention.cache
        )
        prepared = tokens.prepared(self.model)
        if layer_ids is None and PIPELINE_AXIS in stage_axes():
            raise ShardError(
                "the layers of a pipeline stage are run without their layer_ids",
                "pass on the `layer_ids` that the stage is given",
            )

        def layer(index_in_period, x, row):
            w, index, cache = row
            attention_here = attention.in_layer(cache)
            tokens_here = prepared.in_layer(index + before if before else index, index_in_period)
            given = x, w, tokens_here, attention_here
            with shardops.products(fp8.product if self.training.fp8 else None):
                x, aux = check_result(self.model.layer(*given), self.model.layer, given)
            return x, (attention_here.updated_cache(), aux)

        periods = count // period
        unroll = self.training.unroll
        at_once = periods if unroll is None else min(max(1, unroll // period), periods)
        # XLA must not replace a recomputed value by the one from the forward pass. It cannot if
        # both passes are loops, and prevent_cse would then only delay each layer's gathers until
        # the gradient arrives.
        # True: no loop, or layers left after it.
        prevent_cse = at_once == periods or periods % at_once != 0
        save = {"save": self.training.save, "prevent_cse": prevent_cse}
        layer_at = [
            explicit_activation_checkpointing(functools.partial(layer, i), **save)
            for i in range(period)
        ]
        stack = w, jnp.arange(count) if layer_ids is None else layer_ids, caches
        if period == 1:
            x, results = lax.scan(layer_at[0], x, stack, unroll=at_once)
            return x, *results

        in_periods = jax.tree.map(lambda x: x.reshape(-1, period, *x.shape[1:]), stack)
        x, results = lax.scan(
            functools.partial(run_period, layer_at), x, in_periods, unroll=at_once
        )
        return x, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    def hidden(self, w: Any, tokens: Tokens, attention: Any = None) -> tuple[Any, Any]:
        """The output of the last layer, and the layers' caches."""
        x, before = self._embed(w, tokens, attention)
        x, caches, _ = self.layers(w.layers, x, tokens, attention=attention)
        return x, jax.tree.map(
            lambda *parts: jnp.concatenate(parts), *before, caches
        ) if before else caches

    def logits(self, w: Any, tokens: Tokens) -> Any:
        """Logits of the token after each position, act['B/b L/c V/t/p']."""
        return self.model.logits(w, self.hidden(w, tokens)[0])

    def predictions(self, x: Any, batch: Any) -> list[tuple[Any, Targets]]:
        """What the loss sums over: what the model's `logits` reads, and the Targets of it.

        The output `x` of the last layer and the targets of a TokenBatch. In training, a model may
        add others by its method `more_predictions`.
        """
        more = getattr(self.model, "more_predictions", None) if self.in_training else None
        targets = Targets.of(batch)
        if hidden := getattr(self.model, "hidden", None):
            weights = checkpoint_name(lax.stop_gradient(hidden(x)), HIDDEN)
            targets = dataclasses.replace(targets, counted=targets.counted * weights)
        pairs = [(x, targets), *(more(x, batch) if more else ())]
        return [
            (x, dataclasses.replace(t, counted=lax.stop_gradient(jnp.float32(t.counted))))
            for x, t in pairs
        ]

    @scope
    def read_by_logits(self, w: Any, x: Any) -> Any:
        """The first of a pair of `predictions`: what it is, or as a function of (weights, Forward)
        returns.
        """
        if not callable(x):
            return x
        return explicit_activation_checkpointing(lambda w: x(w, self), save=self.training.save)(w)

    def losses(self, w: Any, x: Any, targets: Targets) -> Any:
        """The loss of each target, f32['B/b L/c'], from the output `x` of the last layer.

        Of the loss itself, the backward pass gets what training.save says, and computes the rest
        again.
        """
        loss = explicit_activation_checkpointing(self.loss, save=self.training.save)
        if self.training.loss_chunk is None:
            targets = dataclasses.replace(targets, target_count=self.target_count)
        return loss(checked_logits(self.model, w, x), targets)

    @property
    def gathers_ahead(self) -> bool:
        """True if weights are gathered once per step, by training.gather_weights; False: where a
        layer says so.

        `auto` does so where nothing has to be gathered, which saves casting each weight again in
        the backward pass.
        """
        return gathers_ahead(self.training.gather_weights)

    def gatherable(self, w: Any) -> Any:
        """Wraps weights for the all_gather of embed, layers and logits, or gathers all of them
        now.
        """
        w = at_rest(w, self.training.reduce_dtype)
        return gather_ahead(w) if self.gathers_ahead else w
