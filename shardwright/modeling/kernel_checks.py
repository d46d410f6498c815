"""Compares the implementations of attention that a step uses with softmax_attention, before the
first step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from shardlib import shardops
from shardlib.exact.compare import run
from shardlib.exact.endings import Undecided
from shardlib.exact.values import ZERO, equal
from shardlib.mesh import mesh_axes, pipeline_stage
from shardlib.opaque import varying
from shardlib.shardtypes import f32, typed_shard_map
from shardlib.tracing import tracing
from shardwright.modeling import context
from shardwright.modeling.attention import Attention
from shardwright.modeling.attention_calls import Call, path_of
from shardwright.modeling.attention_paths import KERNELS
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import Tokens, act, compute_scope
from shardwright.modeling.splash import LANES

TOLERANCE = {"bf16": 2**-4, "f32": 2**-12}
"""Largest difference of two implementations, over the largest entry: 4x what rounding causes on
random tokens."""
PAIRS = 2**22
"""Largest number of position pairs times query heads per device to compare; at least LANES
positions are compared."""
EXACT_PAIRS = 2**19
"""The same in exact arithmetic."""
LEAST_BLOCKS, DOCUMENTS = 4, 5
"""Smallest number of blocks, and the number of documents, in the sequence that is compared."""


def check_paths(step: Any, options: dict[str, Any] | None = None) -> None:
    """Compares each implementation that the layers use with softmax_attention (einsum) over
    gathered keys.

    Results and gradients of blockwise attention, rings and ulysses are compared in exact
    arithmetic. Kernels cannot be looked into: blockwise attention is run so in their place, and
    they are compared with softmax_attention on the run's devices, in f32 if they take it. Each
    device has one sequence of DOCUMENTS documents and LEAST_BLOCKS blocks, with its own number of
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
        differs = differ(
            functools.partial(_difference, own.attention, reference.attention, call, compared)
        )
        return differs and f"over {compared} positions, the result or a gradient differs{differs}"

    calls = [*step.other(name="evaluation").calls, *step.calls]
    for call in dict.fromkeys(call._replace(place=0, stack="layers", layers=1) for call in calls):
        path = path_of(forward, call)
        if path == "einsum" and how != "ulysses":
            continue
        differs = compare(_differ, call, "blockwise" if path in KERNELS else path, EXACT_PAIRS)
        if path in KERNELS and not differs:
            on_devices = functools.partial(
                _differ_on_devices, forward.training.compute_dtype, options
            )
            differs = compare(on_devices, call, path, PAIRS)
        if differs:
            name = f"{how}, {path}" if how == "ulysses" else path
            raise ValueError(
                f"{call.pattern.made}: attention by {name} is not what softmax_attention (einsum) "
                f"computes for the attention mask `{call.pattern}`: {differs}. Let the model's "
                f"AttentionMask depend on positions of queries and keys, not on the sizes of its "
                "arguments, which are blocks; let each position attend to itself; or set "
                "training.attention=einsum."
            )


def _differ(difference: Callable[[], Any]) -> str:
    """Runs two ways to attend in exact arithmetic. Returns "" if they compute the same."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    # Devices of other axes have other sequences.
    sizes = {
        axis: n if axis == "c" else min(n, 2) if axis == "t" else 1
        for axis, n in mesh.shape.items()
    }
    kinds = {"axis_types": mesh.axis_types, "abstract_device": mesh.abstract_device}
    with (
        compute_scope("f32"),
        tracing(AbstractMesh((*sizes.values(),), (*sizes,), **kinds), mesh.shape),
    ):
        program = jax.jit(difference).trace().jaxpr
    try:
        return "" if equal(run(program, sizes, [])[1][1], ZERO).all() else " in exact arithmetic"
    except Undecided as error:
        return f", or cannot be run in exact arithmetic: {error}"


def _differ_on_devices(dtype: str, options: Any, difference: Callable[[], Any]) -> str:
    """Runs two ways to attend on the current mesh.

    Returns by how much they differ, if by more than TOLERANCE.
    """
    # Some devices round f32 operands otherwise.
    with compute_scope(dtype), jax.default_matmul_precision("highest"):
        far = float(jax.jit(difference, compiler_options=options)()[0])
    limit = TOLERANCE[dtype]
    return "" if far <= limit else f" by {far:.2g} of its largest entry, more than {limit:.2g}"


def with_path(forward: Forward, path: str, how: str, block: int | None = None) -> Any:
    """The same forward pass with other settings `training.attention`, `context` and
    `attention_block`.
    """
    path = "blockwise" if path == "ring" else path  # a ring computes in its blocks
    settings = {"attention": path, "context": how, "attention_block": block}
    return dataclasses.replace(forward, training=dataclasses.replace(forward.training, **settings))


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
    is_own = jax.tree.leaves(
        (True, True, True, *jax.tree.map(lambda _: False, (call.learned, call.sinks)), True)
    )
    keys = [
        jax.random.fold_in(jax.random.key(i), own * shardops.axis_index("c"))
        for i, own in enumerate(is_own)
    ]
    # Large enough that some weights are near 1: a pair that only one implementation sees is then
    # not lost among others.
    drawn = [2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]

    def dtype(x):
        return act.dtype if x.dtype == call.q.dtype else x.dtype

    return structure.unflatten(
        [value.astype(dtype(x)) for value, x in zip(drawn, leaves, strict=True)]
    )


def _difference(
    attention_of: Callable, reference_of: Callable, call: Call, length: int
) -> tuple[jax.Array, jax.Array]:
    """Compares two ways to attend, by the result and all gradients.

    Returns the largest difference, of each over its largest entry, and the sum of all differences
    times random numbers, which in exact arithmetic is 0 only if all are.
    """
    axes = tuple(mesh_axes())
    # One long document, for pairs that are far apart, and shorter ones that begin inside blocks.
    starts = np.array([0, *(length - (length >> i) - 1 for i in range(3, 2 + DOCUMENTS))])

    @typed_shard_map
    def per_device() -> tuple[f32[""], f32[""]]:
        is_start = varying(jnp.isin(jnp.arange(length), starts)[None], ("r", "d"))
        tokens = Tokens.before(
            varying(jnp.zeros((1, length), jnp.uint32), ("r", "d")), is_start, bos_id=0
        )
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
