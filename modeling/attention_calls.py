"""What the layers of a model ask of attention, found by tracing them; and the check that a path computes it.

`training.attention` may name a path that computes attention in another way than train.attention does. Before the first
step such a path is compared with it, on random tokens in several documents, forward and gradients.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from modeling.attention import choose
from modeling.blockwise import small_blocks
from modeling.model import Tokens, blank_inputs, compute_scope, period_of
from modeling.rules import Places, Rule
from modeling.weights import shapes_of
from shardlib import gathers, shardops
from shardlib.layers import split_extras
from shardlib.op_checks import varying
from shardlib.program_hash import hash_of
from shardlib.shardtypes import f32, typed_shard_map
from shardlib.values import mesh_axes, pipeline_stage, stage_axes

TOLERANCE = {"bf16": 2**-4, "f32": 2**-12}
"""How far apart two paths may be, as a part of the largest entry: four times what rounding made of random tokens."""
PAIRS = 2**22
"""Pairs of positions, times query heads of a device, of the comparison; at most."""
BLOCKS, DOCUMENTS = 4, 5
"""Of the comparison: blocks of a path that computes in blocks, and documents of the sequence."""
SEEING = 64
"""Positions, from each of three places in a document, of which it is looked at whether they see any."""


class Call(NamedTuple):
    """One call of `attend` in a layer, on each device."""

    turn: int
    """Place of the layer in its period."""
    rule: Rule
    q: Any
    """Shape and dtype of the queries; `learned`, and `sinks` if not None, likewise."""
    learned: tuple
    sinks: Any
    dropout: bool

    def __str__(self) -> str:
        return f"layers {self.turn}, …: {self.rule}"


def calls_of(forward: Any, length: int) -> list[Call]:
    """The calls of `attend` in the layers of one period, on the mesh in force.

    Args:
        forward: train.Forward of the model.
        length: positions of a sequence.
    """
    model, found = forward.model, []
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    def note(turn, q, k, v, rule, *learned, sinks=None, drop=None):
        found.append(Call(turn, rule, shape(q), *jax.tree.map(shape, (learned, sinks)), drop is not None))
        return q

    def layers(w: Any) -> None:
        zeros = varying(jnp.zeros((1, length), jnp.int32), stage_axes())
        drops = getattr(model.c, "dropout", 0)
        keys = jax.vmap(jax.random.key)(jnp.uint32(zeros[:, 0])) if drops else None
        tokens = Tokens(jnp.uint32(zeros), zeros, zeros, keys, inputs=blank_inputs(model, zeros)).prepared(model)
        x = model.embed(w, tokens)
        for turn in range(period_of(model)):
            attend = functools.partial(note, turn)
            of_layer = jax.tree.map(lambda stack, turn=turn: stack[turn], w.layers)
            tokens = tokens.in_layer(jnp.int32(turn), turn)
            x, _ = split_extras(model.layer(x, of_layer, tokens, attend, forward.einsum))

    @typed_shard_map
    def per_device(w: model.Weights) -> f32[""]:
        with pipeline_stage():
            gathers.note_gathers(layers, shardops.replicate("... -> ... *r", w))
        return jnp.zeros(())

    with compute_scope(forward.training.compute_dtype):
        jax.eval_shape(per_device, shapes_of(model.table))
    return found


def describe_attention(forward: Any, length: int, device: jax.Device) -> list[str]:
    """Which path the layers take, and why. Raises ValueError where training.attention names one that cannot."""
    found = []
    for call in calls_of(forward, length):
        path, why = _path_of(forward, call, length, device)
        found.append((call.turn, f"{path} (auto: {why})" if why else path, str(call.rule)))
    period = period_of(forward.model)
    return [f"{how}; layer {turn} of {period}: {rule}" if period > 1 else f"{how}; {rule}" for turn, how, rule in found]


def _path_of(forward: Any, call: Call, length: int, device: jax.Device | None = None) -> tuple[str, str]:
    rule = forward.rule(call.rule)
    dropout, sinks = call.dropout, call.sinks is not None
    return choose(forward.training.attention, rule, length, call.q.shape[-1], call.q.dtype, dropout, sinks, device)


def check_paths(forward: Any, length: int, cache: Path | None = None) -> None:
    """Compares each path that the layers take, other than einsum, with train.attention: result and gradients.

    On the mesh in force, with the sizes of the run, but for one sequence of DOCUMENTS documents on each device, no
    longer than PAIRS says and in BLOCKS blocks at least. In f32, where the path takes it: rounding hides less then.

    Args:
        forward: train.Forward of the model.
        length: positions of a sequence.
        cache: a directory that remembers what was compared: the same programs are compared once. None: nothing is.

    Raises:
        ValueError: they differ by more than TOLERANCE, or a rule lets some position see none.
    """
    check_rules(forward, length)
    dense = dataclasses.replace(forward, training=dataclasses.replace(forward.training, attention="einsum"))
    for call in dict.fromkeys(call._replace(turn=0) for call in calls_of(forward, length)):
        path, _ = _path_of(forward, call, length)
        if path == "einsum":
            continue
        # As choose has it of the whole length; a shorter sequence alone might take another.
        chosen = dataclasses.replace(forward, training=dataclasses.replace(forward.training, attention=path))
        heads = call.q.shape[2] * call.q.shape[3]
        shorter = min(length, max(2, int((PAIRS / heads) ** 0.5) // 64 * 64))
        program = _comparison(chosen.attend, dense.attend, call, shorter, keep_dtype=path == "cudnn")
        dtype = forward.training.compute_dtype if path == "cudnn" else "f32"
        with compute_scope(dtype), small_blocks(-(-shorter // BLOCKS)):
            compared = jax.jit(program).trace()
            made_by = (
                jax.__version__,
                importlib.metadata.version("jaxlib"),
                jax.devices()[0].device_kind,
                os.environ.get("XLA_FLAGS"),
            )
            key = hashlib.sha256(repr((hash_of(compared), made_by)).encode())
            known = cache and cache / f"{path}-{key.hexdigest()[:32]}"
            if known and known.exists():
                continue
            errors = {name: float(error) for name, error in compared.lower().compile()().items()}
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        tolerance = TOLERANCE[dtype]
        if not errors[worst] <= tolerance:
            raise ValueError(
                f"attention by {path} is not what train.attention (einsum) computes for the rule `{call.rule}`: of "
                f"{shorter} positions, {worst} differs by {errors[worst]:.2g} of its largest entry, more than "
                f"{tolerance:.2g}. State who attends to whom in the model's Rule, which all paths follow; or set "
                "training.attention=einsum."
            )
        if known:
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()


def check_rules(forward: Any, length: int) -> None:
    """Raises ValueError for a rule by which some position sees none, not even itself: its attention would be NaN.

    Looked at are positions from the beginning, the middle and the end of one document.
    """
    index = np.arange(length, dtype=np.int32)
    at = np.unique(np.concatenate([index[:SEEING], index[length // 2 :][:SEEING], index[-SEEING:]]))
    places = lambda index: Places(index[None], index[None], np.zeros_like(index)[None])
    for call in dict.fromkeys(calls_of(forward, length)):
        if call.sinks is not None:
            continue
        seen = jax.jit(forward.rule(call.rule).sees)(places(at).as_queries(), places(index).as_keys())
        seen = np.broadcast_to(np.any(np.asarray(seen), -1)[0, 0, 0], at.shape)
        if not seen.all():
            raise ValueError(
                f"by the rule `{call.rule}` of layer {call.turn} position {at[~seen][0]} of a document sees no key, so "
                "that its attention is NaN; let each position see itself at least."
            )


def _comparison(
    attend_of: Callable, reference_of: Callable, call: Call, length: int, keep_dtype: bool = True
) -> Callable:
    """A program that gives how far apart two ways to attend are, as a part of the largest entry, by what differs."""
    axes = tuple(mesh_axes())
    names = ["the result"] + [f"the gradient of {x}" for x in ("the queries", "the keys", "the values")]
    names += ["the gradient of the rule's weights"] * len(call.learned)
    names += ["the gradient of the sinks"] * (call.sinks is not None)

    def operands() -> tuple[Tokens, list, Any]:
        """Tokens of several documents; what attend is given; and a gradient of the result. The same on all devices."""
        keys = iter(jax.random.split(jax.random.key(0), 8))
        # Large enough that some weights are near 1: one pair that only one way sees is not lost in all the others.
        drawn = lambda *shape: 2 * jax.random.normal(next(keys), shape)
        random = lambda *shape, like=call.q: drawn(*shape).astype(like.dtype if keep_dtype else jnp.float32)
        kv, queries, width = call.q.shape[2:]
        q, g = random(1, length, kv, queries, width), random(1, length, kv, queries, width)
        k, v = random(1, length, kv, width), random(1, length, kv, width)
        learned, sinks = jax.tree.map(lambda x: random(*x.shape, like=x), (call.learned, call.sinks))
        # A long one, for what is far apart, and others of different lengths.
        ends = [length - (length >> i) for i in range(3, 2 + DOCUMENTS)]
        starts = jnp.zeros((1, length), bool).at[0, jnp.array([0, *ends])].set(True)
        place = jnp.arange(length, dtype=jnp.int32)[None]
        first = jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
        tokens = Tokens(jnp.zeros((1, length), jnp.uint32), place - first, jnp.cumsum(starts, 1, dtype=jnp.int32))
        return tokens, [q, k, v, learned, sinks], g

    @typed_shard_map
    def per_device() -> f32["N"]:
        tokens, given, g = jax.tree.map(lambda x: varying(x, axes), operands())

        def run(attend: Callable) -> list[jax.Array]:
            of = lambda q, k, v, learned, sinks: attend(None, q, k, v, call.rule, *learned, sinks=sinks)[0]
            out, vjp = jax.vjp(of, *given)
            return [jnp.float32(x) for x in jax.tree.leaves((out, vjp(g)))]

        pairs = zip(run(attend_of(tokens)), run(reference_of(tokens)), strict=True)
        far = [jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30) for a, b in pairs]
        return jax.lax.pmax(jnp.stack(far), axes)

    return lambda: dict(zip(names, per_device(), strict=True))
