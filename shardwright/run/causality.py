"""The check before a run, an evaluation and the first text that a model is causal: see soundness.causality."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from shardlib.proof.causality import find_later, operations, tokens
from shardlib.proof.check import Finding
from shardlib.proof.reach import constant, dtype_of, unknown
from shardlib.shardtypes import typed_shard_map, u32
from shardwright.modeling.attention import KERNELS
from shardwright.modeling.attention_calls import Call, calls_of, distinct, path_of, sees_later, with_path
from shardwright.modeling.blockwise import small_blocks
from shardwright.modeling.model import act, compute_scope, inputs_of
from shardwright.modeling.rules import Rule
from shardwright.modeling.weights import shapes_of
from shardwright.run.soundness import Unproved, refuse, text_of
from shardwright_data.loader import TokenBatch

ROWS, LENGTH = 2, 256
"""Sequences, and most positions of each, for which a model is checked."""
AT_MOST = 2048
"""Most tokens, where ROWS of LENGTH would be another program."""
BLOCKS = 4
"""Blocks of attention at LENGTH positions."""
REMEDY = (
    "a position may learn from those before it in its document: through attend, by rules.causal and "
    "rules.same_document, or masked by tokens.document. A model that is not causal on purpose says so: "
    "Rule(causal=False)"
)


def check_causal(forward: Any, length: int, source: Any = None, sampled: bool = False, rows: int = 2) -> str:
    """Refuses a model whose logits depend on a later token of the document, or on another document or sequence.

    Its forward pass is traced for one device, and not run.

    Args:
        forward: train.Forward of the model.
        length: positions of a sequence.
        source: hashes of the source, from provenance.source_of, with which each is checked once; None: each time.
        sampled: whether each sequence is one document, as in sampling.
        rows: sequences of a microbatch.

    Returns:
        Why nothing is proved; empty where it is.

    Raises:
        ShardError: with the line where the token comes in that the position must not see.
    """
    calls = calls_of(forward, length)
    rules = [*(call.rule for call in calls), getattr(forward.model, "rule", None)]  # the last, used or not
    if not all(rule.causal for rule in rules if isinstance(rule, Rule)):
        return "the model's Rule says causal=False"
    # In FP8 the scale of a product is that of its largest entry, whichever position has it.
    alone = {"document_mask": True, "fp8": False} if sampled else {"fp8": False}
    forward = dataclasses.replace(forward, training=dataclasses.replace(forward.training, **alone))
    settings = forward.model.c, forward.training, rows, length, sampled, source and text_of(forward.model)

    def find() -> list[Finding]:
        return list(dict.fromkeys(_findings(forward, (rows, length), calls, sampled)))

    try:
        refuse(find, source, "causality", settings)
    except Unproved as why:
        return str(why)
    return ""


def describe_causality(forward: Any, source: Any) -> str:
    """The line of a run's log: the model is causal, or why that is not proved. Raises ShardError as check_causal."""
    t = forward.training
    rows = t.batch_size // t.microbatches
    if unproved := check_causal(forward, t.seq_len, source, rows=rows):
        return f"causality  not proved: {unproved}"
    return "causality  the logits of a position depend on no later token, and on no other document"


def _findings(forward: Any, sizes: tuple[int, int], calls: list[Call], sampled: bool) -> Iterator[Finding]:
    for call in distinct(calls):
        if sees_later(forward.rule(call.rule), sizes[1]):  # at all distances
            yield Finding(
                f"the rule `{call.rule}` of layer {call.place} lets a position see later ones\n  remedy: {REMEDY}",
                is_wrong=True,
            )
            return
    random = bool(getattr(forward.model.c, "dropout", 0)) and not sampled
    for seeds in (False, True) if random else (False,):
        paths = {path_of(forward, call._replace(dropout=call.dropout and seeds)) for call in calls} or {"einsum"}
        # Kernels are compared with einsum before the first step: modeling.attention_calls.check_paths.
        for path in sorted({"einsum" if path in KERNELS else path for path in paths}):
            more = sizes, sampled, seeds
            of_path = lambda path, more=more: list(_of_program(with_path(forward, path, "gather"), *more))
            if found := of_path(path):
                yield from of_path("einsum") or found  # whose lines are those of the formulas


def _of_program(forward: Any, sizes: tuple[int, int], sampled: bool, seeds: bool) -> Iterator[Finding]:
    trace = functools.cache(lambda sizes: _traced(forward, sizes, seeds))
    small = ROWS, min(sizes[1], LENGTH)
    is_large = sizes[0] < ROWS or math.prod(sizes) > AT_MOST
    try:
        own = operations(trace(sizes))
    except Exception as error:  # whatever the program does there
        lines = str(error).splitlines() or [""]
        raise Unproved(f"on one device its forward pass does not trace: {type(error).__name__}: {lines[0]}") from None
    try:
        others = own != operations(trace(small))
    except Exception:
        others = True
    if others and is_large:
        raise Unproved(f"its operations on {sizes[0]} × {sizes[1]} tokens are others than on {small[0]} × {small[1]}")
    rows, length = sizes if others else small
    starts = np.zeros((rows, length), bool)
    starts[:, 0] = True
    if not sampled:
        starts[::2, [length // 5, length // 5 + 1, length // 2]] = True
        starts[1::2, 2 * length // 3] = True
    targets = tokens(rows, length)
    inputs = targets.moved(lambda x: x[..., None], (rows, length, len(inputs_of(forward.model))))
    weights = [unknown(x.shape, dtype_of(x)) for x in jax.tree.leaves(shapes_of(forward.model.table))]
    batch = [targets, constant(starts), unknown(starts.shape, bool), *([inputs] if inputs.shape[-1] else [])]
    args = [*weights, *batch, *([unknown((rows,), np.dtype(np.uint32))] if seeds else [])]
    documents = starts if forward.training.document_mask else np.arange(length)[None] * np.ones((rows, 1)) == 0
    if problem := find_later(trace((rows, length)), args, documents):
        yield Finding(f"{problem}\n  remedy: {REMEDY}")


def _traced(forward: Any, sizes: tuple[int, int], seeds: bool) -> Any:
    """The forward pass of a batch on one device."""
    model = forward.model

    @typed_shard_map
    def logits(w: model.Weights, batch: TokenBatch, seeds: u32["B/r/d"] | None) -> act["B/r/d L V/t/p"]:
        read = forward.tokens(batch, seeds)
        return forward(forward.copies(w), (read,), model.logits)[0]

    shape = lambda dtype, *more: jax.ShapeDtypeStruct((*sizes, *more), dtype)
    count = len(inputs_of(model))
    batch = TokenBatch(
        targets=shape(jnp.uint32),
        is_seq_start=shape(bool),
        loss_mask=shape(bool),
        **({"inputs": shape(jnp.uint32, count)} if count else {}),
    )
    args = shapes_of(model.table), batch, jax.ShapeDtypeStruct(sizes[:1], jnp.uint32) if seeds else None
    one = AbstractMesh((1, 1, 1), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    # Through no mesh at all: JAX does not change from one mesh to another of a different size.
    none = AbstractMesh((), ())
    on_one = jax.sharding.use_abstract_mesh(one)
    blocks, dtype = small_blocks(-(-sizes[1] // BLOCKS)), compute_scope(forward.training.compute_dtype)
    with jax.sharding.use_abstract_mesh(none), on_one, blocks, dtype:
        return jax.jit(logits).trace(*args).jaxpr
