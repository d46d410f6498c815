"""Finds the calls of attention in a model's layers, by tracing them, and checks them before the first step.

einsum is softmax_attention. Any other implementation that `training.attention` names, and `ulysses`, is compared with
einsum over gathered keys: results and gradients, in exact arithmetic, and kernels as the devices compute them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from shardlib import shardops
from shardlib.axes import PIPELINE_AXIS
from shardlib.exact.compare import run
from shardlib.exact.endings import Undecided
from shardlib.exact.values import ZERO, equal
from shardlib.layers import split_aux
from shardlib.shardtypes import Of, f32, typed_shard_map, u32
from shardlib.tracing import tracing
from shardlib.values import mesh_axes, pipeline_stage, stage_axes, varying
from shardwright.data.loader import TokenBatch, batch_shapes
from shardwright.modeling import context
from shardwright.modeling.attention import Attention
from shardwright.modeling.attention_paths import KERNELS, choose
from shardwright.modeling.forward import Forward
from shardwright.modeling.masks import AttentionMask, Positions, same_document
from shardwright.modeling.model import Tokens, act, compute_scope, inputs_of, period_of
from shardwright.modeling.splash import LANES
from shardwright.modeling.weights import shapes_of, stacks_before_layers

TOLERANCE = {"bf16": 2**-4, "f32": 2**-12}
"""Largest difference of two implementations, over the largest entry: 4x what rounding causes on random tokens."""
PAIRS = 2**22
"""Largest number of position pairs times query heads per device to compare; at least LANES positions are compared."""
EXACT_PAIRS = 2**19
"""The same in exact arithmetic."""
LEAST_BLOCKS, DOCUMENTS = 4, 5
"""Smallest number of blocks, and the number of documents, in the sequence that is compared."""


class Call(NamedTuple):
    """One call of attention in a layer, on each device."""

    place: int
    """Index of the layer in its period."""
    pattern: AttentionMask
    q: Any
    """Shape and dtype of the queries. `learned` and `sinks` have those of the weights and sinks, if any."""
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


class Queries(Attention):
    """Computes nothing: queries stand for the output of attention."""

    def __init__(self, tokens: Tokens):
        self.tokens = tokens

    def __call__(self, q, k, v, *_, **__):
        """Queries of the shape of the output."""
        return q if q.shape[-1] == v.shape[-1] else jnp.broadcast_to(q[..., :1], (*q.shape[:-1], v.shape[-1]))


def calls_of(forward: Forward, length: int, sequences: int = 1) -> list[Call]:
    """The calls of attention in the layers of one period, on the current mesh.

    Args:
        forward: of the model.
        length: positions of a sequence.
        sequences: sequences of a microbatch, over all devices; each device has at least one.
    """
    model = forward.model
    calls = []

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    class Noted(Queries):
        """Notes its calls. Its cache tells which layers make them."""

        def __call__(self, q, k, v, pattern, *learned, sinks=None, drop=None, keep="kv"):
            shapes = jax.tree.map(shape, (learned, sinks))
            place, stack, layers = self.cache
            of_layer = {"stack": stack, "layers": layers, "values": v.shape[-1]}
            calls.append(Call(place, pattern, shape(q), *shapes, dropout=drop is not None, **of_layer))
            return super().__call__(q, k, v)

    # Tokens are an argument, since a constant would have another type than what a run computes from its batch.
    @typed_shard_map
    def per_device(w: Of[model.Weights], batch: TokenBatch, seeds: u32["B/b"] | None) -> f32[""]:
        with pipeline_stage():
            tokens = forward.tokens(batch, seeds)
            layers(forward.gatherable(w), tokens.prepared(model), Noted(tokens))
        return jnp.zeros(())

    def layers(w: Any, tokens: Tokens, attention: Noted) -> None:
        x = varying(model.embed(w, tokens), stage_axes())
        each = [(0, name, len(jax.tree.leaves(stack)[0])) for name, stack in stacks_before_layers(w).items()]
        count = model.config.layers // period_of(model)
        for index, which in enumerate([*each, *((place, "layers", count) for place in range(period_of(model)))]):
            place, name, _ = which
            w_layer = jax.tree.map(lambda stack, place=place: stack[place], getattr(w, name))
            of_layer = tokens.in_layer(jnp.int32(index), place)
            x, _ = split_aux(model.layer(x, w_layer, of_layer, attention.in_layer(which)))

    # One period of layers in each stage; the number of layers does not matter.
    w = shapes_of(model.table)
    count = period_of(model) * mesh_axes().get(PIPELINE_AXIS, 1)
    of_a_period = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), w.layers)
    rows = max(sequences, shardops.axis_size("r d e"))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        batch_shapes(rows, length, 1, len(inputs_of(model))),
    )
    seeds = jax.ShapeDtypeStruct((rows,), jnp.uint32) if getattr(model.config, "dropout", 0) else None
    with compute_scope(forward.training.compute_dtype):
        jax.eval_shape(per_device, dataclasses.replace(w, layers=of_a_period), batch, seeds)
    return calls


def distinct(calls: list[Call]) -> list[Call]:
    """Removes repeated calls; those that differ only in their layers count as one, with `place` 0."""
    return list(dict.fromkeys(call._replace(place=0, stack="layers", layers=1) for call in calls))


def describe_attention(step: Any) -> list[str]:
    """Lists the implementation in each layer of a period. Raises ValueError if training.attention cannot compute it."""
    forward = step.forward
    period = period_of(step.model)
    lines = []
    for call in step.calls:
        layer = f"layer {call.place} of {period}: " if period > 1 else ""
        layer = layer if call.stack == "layers" else f"{call.stack}: "
        lines.append(f"{path_of(forward, call)}; {layer}{mask_of(forward, call)}")
    return lines


def mask_of(forward: Forward, call: Call) -> AttentionMask:
    """The mask of a call as it runs: without training.document_mask, each sequence is one document."""
    return call.pattern if forward.training.document_mask else call.pattern.without(same_document)


def path_of(forward: Forward, call: Call) -> str:
    """Implementation of a call: `ring`, or one of PATHS. Raises ValueError if the settings cannot compute it."""
    setting = forward.training.attention
    how = context.way_of(forward.training)
    context.strategy(forward.training, call.q, call.learned, call.dropout)
    q, keys = context.on_device(how, call.q)
    if how == "ring":
        return "ring"
    return choose(setting, mask_of(forward, call), q, call.dropout, call.sinks is not None, keys, call.d_value)


def with_path(forward: Forward, path: str, how: str, block: int | None = None) -> Any:
    """The same forward pass with other settings `training.attention`, `context` and `attention_block`."""
    path = "blockwise" if path == "ring" else path  # a ring computes in its blocks
    settings = {"attention": path, "context": how, "attention_block": block}
    return dataclasses.replace(forward, training=dataclasses.replace(forward.training, **settings))


def check_paths(step: Any, options: dict[str, Any] | None = None) -> None:
    """Compares each implementation that the layers use with softmax_attention over gathered keys.

    Blockwise attention, rings and ulysses are run in exact arithmetic. Kernels cannot be looked into: blockwise
    attention is run so in their place, and they are compared with softmax_attention on the run's devices, in f32 if
    they take it. Each device has one sequence of DOCUMENTS documents and LEAST_BLOCKS blocks, with its own number of
    heads. EXACT_PAIRS and PAIRS limit the length of the sequence.

    Args:
        step: the training step, a Step. Its evaluation may use other masks.
        options: compiler options of the run.

    Raises:
        ValueError: they differ, or are NaN, for example because a position attends to no key.
    """
    forward, (_, length) = step.forward, step.size
    how = context.way_of(forward.training)
    devices = shardops.axis_size("c")

    def compare(differ: Callable[..., str], call: Call, path: str, pairs: int) -> str:
        heads = math.prod(call.q.shape[2:4])
        compared = max(LANES, int((pairs / heads) ** 0.5))
        compared = min(length, -(-compared // (2 * devices)) * 2 * devices)
        # By name, since `auto` might choose another implementation for a shorter sequence.
        own = with_path(forward, path, how, -(-compared // devices // LEAST_BLOCKS))
        reference = with_path(forward, "einsum", "gather")
        differs = differ(functools.partial(_difference, own.attention, reference.attention, call, compared))
        return differs and f"over {compared} positions, the result or a gradient differs{differs}"

    for call in distinct([*step.other(name="evaluation").calls, *step.calls]):
        path = path_of(forward, call)
        if path == "einsum" and how != "ulysses":
            continue
        differs = compare(_differ, call, "blockwise" if path in KERNELS else path, EXACT_PAIRS)
        if path in KERNELS and not differs:
            on_devices = functools.partial(_differ_on_devices, forward.training.compute_dtype, options)
            differs = compare(on_devices, call, path, PAIRS)
        if differs:
            name = f"{how}, {path}" if how == "ulysses" else path
            raise ValueError(
                f"{call.pattern.made}: attention by {name} is not what softmax_attention (einsum) computes for the "
                f"attention mask `{call.pattern}`: {differs}. Let the model's AttentionMask depend on positions of "
                "queries and keys, not on the sizes of its arguments, which are blocks; let each position attend to "
                "itself; or set training.attention=einsum."
            )


def _differ(difference: Callable[[], Any]) -> str:
    """Runs two ways to attend in exact arithmetic. Returns "" if they compute the same."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    # Devices of other axes have other sequences.
    sizes = {axis: n if axis == "c" else min(n, 2) if axis == "t" else 1 for axis, n in mesh.shape.items()}
    kinds = {"axis_types": mesh.axis_types, "abstract_device": mesh.abstract_device}
    with compute_scope("f32"), tracing(AbstractMesh((*sizes.values(),), (*sizes,), **kinds), mesh.shape):
        program = jax.jit(difference).trace().jaxpr
    try:
        return "" if equal(run(program, sizes, [])[1][1], ZERO).all() else " in exact arithmetic"
    except Undecided as error:
        return f", or cannot be run in exact arithmetic: {error}"


def _differ_on_devices(dtype: str, options: Any, difference: Callable[[], Any]) -> str:
    """Runs two ways to attend on the current mesh. Returns by how much they differ, if by more than TOLERANCE."""
    # Some devices round f32 operands otherwise.
    with compute_scope(dtype), jax.default_matmul_precision("highest"):
        far = float(jax.jit(difference, compiler_options=options)()[0])
    limit = TOLERANCE[dtype]
    return "" if far <= limit else f" by {far:.2g} of its largest entry, more than {limit:.2g}"


def sees_later(pattern: AttentionMask, call: Call, length: int) -> bool:
    """True if the mask of a call lets a position in a text of `length` tokens attend to a later one.

    A score of -inf, whatever the products are, also excludes a position.
    """
    heads = jnp.arange(math.prod(call.q.shape[2:4]), dtype=jnp.int32).reshape(*call.q.shape[2:4], 1, 1)
    learned = tuple(jnp.ones((1, *x.shape[1:]), x.dtype) for x in call.learned)

    # Positions are arguments: XLA would evaluate what follows from constants while it compiles.
    @jax.jit
    def sees(q: Positions, k: Positions) -> jax.Array:
        q, k = q.as_queries(), k.as_keys()
        later = pattern.sees(q, k) & (k.index > q.index)
        if pattern.score_mod is None:
            return jnp.any(later)
        products = jnp.zeros((1, *heads.shape[:2], q.index.shape[3], length))
        return jnp.any(later & ~jnp.isneginf(pattern.changed(products, call.q.shape[-1], q, k, heads, learned)))

    pairs = PAIRS // heads.size if pattern.score_mod else 4 * PAIRS
    queries = min(length, max(1, pairs // length))
    index = np.arange(length, dtype=np.int32)[None]
    positions = Positions.in_one_document
    return any(bool(sees(positions(index[:, i : i + queries]), positions(index))) for i in range(0, length, queries))


def largest(x: jax.Array) -> jax.Array:
    """Largest magnitude in x; infinity if x has NaN, which XLA may leave out of a maximum."""
    return jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)))


def _operands(call: Call, length: int) -> tuple[Any, ...]:
    """Random q, k, v, learned weights, sinks and gradient for `call`, for one sequence.

    Each device of c has its own positions, and the same learned weights and sinks.
    """
    heads, width = call.q.shape[2:4], call.q.shape[4]
    shapes = (*heads, width), (heads[0], width), (heads[0], call.d_value), (*heads, call.d_value)
    q, k, v, g = (jax.ShapeDtypeStruct((1, length, *shape), call.q.dtype) for shape in shapes)
    leaves, structure = jax.tree.flatten((q, k, v, call.learned, call.sinks, g))
    is_own = jax.tree.leaves((True, True, True, *jax.tree.map(lambda _: False, (call.learned, call.sinks)), True))
    keys = [jax.random.fold_in(jax.random.key(i), own * shardops.axis_index("c")) for i, own in enumerate(is_own)]
    # Large enough that some weights are near 1: a pair that only one implementation sees is then not lost among others.
    drawn = [2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]

    def dtype(x):
        return act.dtype if x.dtype == call.q.dtype else x.dtype

    return structure.unflatten([value.astype(dtype(x)) for value, x in zip(drawn, leaves, strict=True)])


def _difference(attention_of: Callable, reference_of: Callable, call: Call, length: int) -> tuple[jax.Array, jax.Array]:
    """Compares two ways to attend, by the result and all gradients.

    Returns the largest difference, of each over its largest entry, and the sum of all differences times random numbers,
    which in exact arithmetic is 0 only if all are.
    """
    axes = tuple(mesh_axes())
    # One long document, for pairs that are far apart, and shorter ones that begin inside blocks.
    starts = np.array([0, *(length - (length >> i) - 1 for i in range(3, 2 + DOCUMENTS))])

    @typed_shard_map
    def per_device() -> tuple[f32[""], f32[""]]:
        is_start = varying(jnp.isin(jnp.arange(length), starts)[None], ("r", "d"))
        tokens = Tokens.before(varying(jnp.zeros((1, length), jnp.uint32), ("r", "d")), is_start, bos_id=0)
        tokens = varying(tokens, {*axes} - {"t"})  # whose devices have the same tokens
        *given, g = varying(_operands(call, length // shardops.axis_size("c")), axes)

        def run(attention: Attention) -> list[jax.Array]:
            def of(q, k, v, learned, sinks):
                return attention(q, k, v, call.pattern, *learned, sinks=sinks)

            out, vjp = jax.vjp(of, *given)
            return [jnp.float32(x) for x in jax.tree.leaves((out, vjp(g)))]

        with pipeline_stage():
            pairs = [*zip(run(attention_of(tokens)), run(reference_of(tokens)), strict=True)]
        far = [largest(a - b) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30) for a, b in pairs]
        key = jax.random.key(len(given))
        parts = [jnp.sum((a - b) * jax.random.normal(key, a.shape)) for a, b in pairs]
        return jax.lax.pmax(jnp.max(jnp.stack(far)), axes), jax.lax.psum(sum(parts), axes)

    return per_device()
