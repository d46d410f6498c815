"""Finds the calls of attention in a model's layers, by tracing them, and the implementation of
each.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib import shardops
from shardlib.axes import PIPELINE_AXIS
from shardlib.layers import split_aux
from shardlib.mesh import mesh_axes, pipeline_stage, stage_axes
from shardlib.opaque import varying
from shardlib.shardtypes import Of, f32, typed_shard_map, u32
from shardwright.data.loader import TokenBatch, batch_shapes, widths_of
from shardwright.modeling import context
from shardwright.modeling.attention import Attention
from shardwright.modeling.attention_paths import choose
from shardwright.modeling.forward import Forward
from shardwright.modeling.masks import AttentionMask, Positions, same_document
from shardwright.modeling.model import compute_scope, inputs_of, period_of
from shardwright.modeling.weights import shapes_of, stacks_before_layers

PAIRS = 2**22
"""Largest number of position pairs times query heads whose scores are computed at once."""


class Call(NamedTuple):
    """One call of attention in a layer, on each device."""

    place: int
    """Index of the layer in its period."""
    pattern: AttentionMask
    q: Any
    """Shape and dtype of the queries. `learned` and `sinks` have those of the weights and sinks, if
    any."""
    learned: tuple
    sinks: Any
    dropout: bool
    stack: str = "layers"
    """Name of the stack that has the layer."""
    layers: int = 1
    """Number of layers that make this call."""
    values: int = 0
    """Entries of a value; 0: those of a query."""

    @property
    def d_value(self) -> int:
        """Entries of a value."""
        return self.values or self.q.shape[-1]


def calls_of(forward: Forward, length: int, sequences: int = 1) -> list[Call]:
    """The calls of attention in the layers of one period, on the current mesh.

    Args:
        forward: of the model.
        length: positions of a sequence.
        sequences: sequences of a microbatch, over all devices; each device has at least one.
    """
    model = forward.model
    period = period_of(model)
    calls = []

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    class Noted(Attention):
        """Notes its calls; queries stand for the output. Its cache tells which layers make them."""

        def __call__(self, q, k, v, pattern, *learned, sinks=None, drop=None, keep="kv"):
            shapes = jax.tree.map(shape, (learned, sinks))
            place, stack, layers = self.cache
            of_layer = {"stack": stack, "layers": layers, "values": v.shape[-1]}
            calls.append(
                Call(place, pattern, shape(q), *shapes, dropout=drop is not None, **of_layer)
            )
            return (
                q
                if q.shape[-1] == v.shape[-1]
                else jnp.broadcast_to(q[..., :1], (*q.shape[:-1], v.shape[-1]))
            )

    # Tokens are an argument, since a constant would have another type than what a run computes from
    # its batch.
    @typed_shard_map
    def per_device(w: Of[model.Weights], batch: TokenBatch, seeds: u32["B/b"] | None) -> f32[""]:
        with pipeline_stage():
            tokens = forward.tokens(batch, seeds)
            attention = Noted(forward.einsum, forward.training, tokens)
            tokens = tokens.prepared(model)
            w = forward.gatherable(w)
            x = varying(model.embed(w, tokens), stage_axes())
            each = [
                (0, name, len(jax.tree.leaves(stack)[0]))
                for name, stack in stacks_before_layers(w).items()
            ]
            each += [(place, "layers", model.config.layers // period) for place in range(period)]
            for index, which in enumerate(each):
                place, name, _ = which
                w_layer = jax.tree.map(lambda stack, place=place: stack[place], getattr(w, name))
                of_layer = tokens.in_layer(jnp.int32(index), place)
                x, _ = split_aux(model.layer(x, w_layer, of_layer, attention.in_layer(which)))
        return jnp.zeros(())

    # One period of layers in each stage; the number of layers does not matter.
    w = shapes_of(model.table)
    count = period * mesh_axes().get(PIPELINE_AXIS, 1)
    of_a_period = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), w.layers
    )
    rows = max(sequences, shardops.axis_size("r d e"))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        batch_shapes(rows, length, 1, sum(widths_of(inputs_of(model)).values())),
    )
    seeds = (
        jax.ShapeDtypeStruct((rows,), jnp.uint32) if getattr(model.config, "dropout", 0) else None
    )
    with compute_scope(forward.training.compute_dtype):
        jax.eval_shape(per_device, dataclasses.replace(w, layers=of_a_period), batch, seeds)
    return calls


def describe_attention(step: Any) -> list[str]:
    """Lists the implementation in each layer of a period.

    Raises ValueError if training.attention cannot compute it.
    """
    forward = step.forward
    period = period_of(step.model)
    lines = []
    for call in step.calls:
        layer = f"layer {call.place} of {period}: " if period > 1 else ""
        layer = layer if call.stack == "layers" else f"{call.stack}: "
        lines.append(f"{path_of(forward, call)}; {layer}{mask_of(forward, call)}")
    return lines


def mask_of(forward: Forward, call: Call) -> AttentionMask:
    """The mask of a call as it runs: without training.document_mask, each sequence is one
    document.
    """
    return call.pattern if forward.training.document_mask else call.pattern.without(same_document)


def path_of(forward: Forward, call: Call) -> str:
    """Implementation of a call: `ring`, or one of PATHS.

    Raises ValueError if the settings cannot compute it.
    """
    setting = forward.training.attention
    how = context.way_of(forward.training)
    context.strategy(forward.training, call.q, call.learned, call.dropout)
    q, keys = context.on_device(how, call.q)
    if how == "ring":
        return "ring"
    return choose(
        setting, mask_of(forward, call), q, call.dropout, call.sinks is not None, keys, call.d_value
    )


def sees_later(pattern: AttentionMask, call: Call, length: int) -> bool:
    """True if the mask of a call lets a position in a text of `length` tokens attend to a later
    one.

    A score of -inf, whatever the products are, also excludes a position.
    """
    heads = jnp.arange(math.prod(call.q.shape[2:4]), dtype=jnp.int32).reshape(
        *call.q.shape[2:4], 1, 1
    )
    learned = tuple(jnp.ones((1, *x.shape[1:]), x.dtype) for x in call.learned)

    # Positions are arguments: XLA would evaluate what follows from constants while it compiles.
    @jax.jit
    def sees(q: Positions, k: Positions) -> jax.Array:
        q, k = q.as_queries(), k.as_keys()
        later = pattern.sees(q, k) & (k.index > q.index)
        if pattern.score_mod is None:
            return jnp.any(later)
        products = jnp.zeros((1, *heads.shape[:2], q.index.shape[3], length))
        return jnp.any(
            later & ~jnp.isneginf(pattern.changed(products, call.q.shape[-1], q, k, heads, learned))
        )

    pairs = PAIRS // heads.size if pattern.score_mod else 4 * PAIRS
    queries = min(length, max(1, pairs // length))
    index = np.arange(length, dtype=np.int32)[None]
    positions = Positions.in_one_document
    return any(
        bool(sees(positions(index[:, i : i + queries]), positions(index)))
        for i in range(0, length, queries)
    )
