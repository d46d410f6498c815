"""The check before a run, an evaluation and the first text that a model is causal: see soundness.causality."""

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType

from shardlib.axes import PIPELINE_AXIS
from shardlib.proof.causality import LOGITS, TARGETS, find_later, operations, tokens
from shardlib.proof.check import Finding
from shardlib.proof.lengths import compared
from shardlib.proof.reach import LATER, NONE, Reach, constant, dtype_of, entries_of, made, unknown
from shardlib.shardtypes import f32, typed_shard_map, u32
from shardlib.values import mesh_axes, pipeline_stage
from shardwright.inspect.soundness import Unproved, refuse
from shardwright.modeling import fp8
from shardwright.modeling.attention_calls import calls_of, rule_of, sees_later, with_path
from shardwright.modeling.model import act, compute_scope, inputs_of
from shardwright.modeling.rules import Rule
from shardwright.modeling.weights import shapes_of
from shardwright.run.provenance import text_of
from shardwright.run.stages import Parts
from shardwright.run.step import Step
from shardwright_data.loader import TokenBatch

ROWS, LENGTH = 2, 256
"""Sequences, and least positions of each, for which a model is checked."""
AT_MOST = 4096
"""Most tokens, where ROWS of LENGTH would be another program, or would not show all that it does."""
GIVEN = "causality: given"
"""Name of what a loss gets beside logits and targets, which counts for neither."""
PURPOSE = "A model that is not causal on purpose says so: Rule(causal=False)"
REMEDIES = {
    "where later documents begin": "read tokens.positions and tokens.document of the position itself and of those "
    "before it, with no shift to the left, and no count or maximum over L",
    "another sequence": "let each sequence be by itself: take means, norms and choices over other dims than B",
    "in an earlier document": "leave out what comes from another document: attend by rules.same_document, set to 0 by "
    "tokens.document or tokens.positions, or set training.document_mask=false",
    "meets the logits": "compute the loss of a target from the logits of its own position, or of an earlier one",
    "is to predict the token": "give the loss of each position its own target, batch.targets at that position",
    ": (dot_general|reduce_max|select_n|while|scan): ": "leave later positions out of what is taken together: let "
    f"their weights be 0, as rules.causal and jnp.where(q >= k, …) do. {PURPOSE}",
    ": (sort|top_k|arg...): ": "let each position choose by itself: a rank among all of a sequence depends on later "
    f"ones. {PURPOSE}",
    ": reduce_": "take sums up to each position, jnp.cumsum(x, axis=1), or leave later positions out by a mask. "
    f"{PURPOSE}",
    ": (slice|concatenate|pad|conv_general_dilated|dynamic_slice): ": "shift to the right, jnp.pad(x[:, :-n], "
    f"((0, 0), (n, 0), (0, 0))), so that a position reads those before it. {PURPOSE}",
    "": "let a position learn from those before it in its document alone: through attend, by rules.causal and "
    f"rules.same_document, or masked by tokens.document. {PURPOSE}",
}
"""What to do, by what a message has."""


def remedied(problem: str) -> str:
    """A problem, and what to do."""
    return f"{problem}\n  remedy: {next(text for part, text in REMEDIES.items() if re.search(part, problem))}"


def check_causal(
    forward: Any, length: int, source: Any = None, sampled: bool = False, rows: int = 2, optimizer: Any = None
) -> str:
    """Refuses a model whose logits depend on a later token of the document, or on another document or sequence.

    What training and evaluation run for a microbatch is traced for one device, and not run: MicrobatchLoss of the
    module of `forward`, and with pipeline stages its parts. In sampling it is the forward pass.

    Args:
        forward: train.Forward of the model.
        length: positions of a sequence.
        source: hashes of the source, from provenance.source_of, with which each is checked once; None: each time.
        sampled: whether each sequence is one document, as in sampling.
        rows: sequences of a microbatch.
        optimizer: settings of the training loss, which is then checked too.

    Returns:
        Why nothing is proved; empty where it is.

    Raises:
        ShardError: with the line where the token comes in that the position must not see.
    """
    alone = {"document_mask": True} if sampled else {}
    forward = dataclasses.replace(forward, training=dataclasses.replace(forward.training, **alone))
    forms = [dataclasses.replace(forward, in_training=x) for x in ((False,) if sampled else (False, True))]
    calls = {form.in_training: calls_of(form, length) for form in forms}
    rules = [*(call.rule for call in itertools.chain(*calls.values())), getattr(forward.model, "rule", None)]
    if not all(rule.causal for rule in rules if isinstance(rule, Rule)):
        return "the model's Rule says causal=False"
    staged = PIPELINE_AXIS in mesh_axes()
    settings = forward.model.c, forward.training, rows, length, sampled, staged, optimizer
    settings += (source and text_of(type(forward.model)),)

    find = lambda: list(dict.fromkeys(_findings(forms, (rows, length), calls, sampled, staged, optimizer)))
    try:
        refuse(find, source, "causality", settings)
    except Unproved as why:
        return str(why)
    return ""


def describe_causality(step: Step, source: Any) -> str:
    """The line of a run's log: the model is causal, or why that is not proved. Raises ShardError as check_causal."""
    t, forward = step.c.training, step.trainer.Forward(step.model, step.c.training)
    rows = t.batch_size // t.microbatches
    if unproved := check_causal(forward, t.seq_len, source, rows=rows, optimizer=step.c.optimizer):
        return f"causality  not proved: {unproved}"
    return "causality  the logits of a position depend on no later token, and on no other document"


def _findings(
    forms: list, sizes: tuple[int, int], calls: dict, sampled: bool, staged: bool, optimizer: Any
) -> Iterator[Finding]:
    for form in forms:
        for call in dict.fromkeys(calls[form.in_training]):
            if sees_later(rule_of(form, call), call, sizes[1]):  # at all distances
                place = f"layer {call.place}" + (", in training," if form.in_training else "")
                yield Finding(
                    f"the rule `{call.rule}` of {place} lets a position see later ones\n  remedy: add rules.causal to "
                    f"its `visible`. {PURPOSE}",
                    is_wrong=True,
                )
                return
    for form in forms:
        seeds = form.in_training and bool(getattr(form.model.c, "dropout", 0))
        form = with_path(form, "einsum", "gather")  # with which others are compared: attention_calls.check_paths
        for parts in (False, True) if staged and not sampled else (False,):
            if found := list(_of_program(form, sizes, (sampled, seeds, parts, optimizer))):
                yield from found
                return


def _of_program(forward: Any, sizes: tuple[int, int], options: tuple) -> Iterator[Finding]:
    length, t = sizes[1], forward.training

    @functools.cache
    def trace(at: tuple[int, int]) -> Any:
        scaled = dataclasses.replace(t, loss_chunk=t.loss_chunk and t.loss_chunk * at[1] // length)
        return _traced(dataclasses.replace(forward, training=scaled), at, *options)

    try:
        own = trace(sizes)
    except Exception as error:  # whatever the program does there
        lines = str(error).splitlines() or [""]
        raise Unproved(f"on one device its forward pass does not trace: {type(error).__name__}: {lines[0]}") from None
    why, doubt = f"its operations on {sizes[0]} × {length} tokens are others than on fewer", ""
    is_made_for_length = False
    chunks = length // (t.loss_chunk or length)  # as many, so that each has its part of the positions
    lengths = (math.ceil((LENGTH << i) / chunks) * chunks for i in range(length.bit_length()))
    shorter = [(ROWS, n) for n in lengths if n < length]
    for at in (*shorter, (ROWS, length), *((sizes[0], n) for _, n in shorter), sizes):
        if math.prod(at) > max(AT_MOST, ROWS * LENGTH) or (is_made_for_length and at[1] < length):
            continue
        try:
            program, longer = trace(at), trace((at[0], length))
        except Exception as error:  # whatever the program does at this length; others are tried
            lines = str(error).splitlines() or [""]
            why = f"on {at[0]} × {at[1]} tokens it does not trace: {type(error).__name__}: {lines[0]}"
            continue
        if operations(program) != operations(own):
            continue
        if of_rows := compared(own, longer, *sizes[:1], at[0])[0]:
            why = f"{of_rows}: its sizes for {sizes[0]} sequences do not follow from those for {at[0]}"
            continue
        differs, unknown, is_made_for_length = compared(longer, program, length, at[1])
        if differs:
            why = f"{differs}: its sizes on {length} positions do not follow from those on {at[1]}"
            continue
        runs = list(_runs(forward, *at, *options[:2]))
        find = functools.partial(_first_problem, program, runs, math.log(length, at[1]))
        if not (doubted := find(unknown)):
            return
        if problem := find(frozenset()) if unknown else doubted:  # a leak of the shorter program, whatever is unknown
            yield Finding(remedied(problem))
            return
        doubt = f"{doubted}, as far as {at[1]} positions show"
    if not doubt or is_made_for_length:
        raise Unproved(doubt or why)
    yield Finding(remedied(doubt))


def _first_problem(program: Any, runs: list, growth: float, unknown: frozenset[int]) -> str:
    found = (find_later(program, unknown=unknown, growth=growth, free=(GIVEN, fp8.PEAK), **run) for run in runs)
    return next(filter(None, found), "")


def _runs(forward: Any, rows: int, length: int, sampled: bool, seeds: bool) -> Iterator[dict[str, Any]]:
    """Arguments of find_later: for later tokens, for those of other documents, and for where later documents begin."""
    (w, *microbatches), until = _arguments(forward, (rows, length), seeds), length // 2
    count, place = len(microbatches), np.arange(length)
    starts = np.broadcast_to(place == 0, (count * rows, length)).copy()
    if not sampled:  # more documents than positions before `until`, and of other rows one
        starts[::2, 2 * length // 5 : 19 * length // 20] = starts[::2, -2:-1] = True
        starts[::2, length // 5 : length // 5 + 2] = True
        starts[1::2, 3:4] = True  # a long document that is not the first
    other = starts & (place <= until)
    other[::2, 3 * length // 4] = other[1::2, until + 1 : until + 2] = other[1::2, -1:] = True
    documents = starts if forward.training.document_mask else starts & (place == 0)
    same = starts == other
    either = made(same.shape, starts, same, np.where(same, NONE, LATER))
    either.ways = constant(starts), constant(other)
    free = lambda tree: [unknown(x.shape, dtype_of(x)) for x in jax.tree.leaves(tree)]

    def run(begin: Reach, seen: np.ndarray, is_forward: bool = True) -> dict[str, Any]:
        number, known = tokens(*same.shape, is_forward), free(w)
        before = np.where(documents, NONE, number - 1 if is_forward else number + 1)
        targets, mask = unknown(same.shape, np.uint32, number), unknown(same.shape, bool, before)
        for i, (batch, of_seeds) in enumerate(microbatches):
            part = lambda x, i=i: entries_of(x, 0, i * rows, (i + 1) * rows)
            known += map(part, (targets, begin, mask))
            if batch.inputs is not None:
                known.append(part(targets.moved(lambda x: x[..., None], (count * rows, *batch.inputs.shape[1:]))))
            known += free(of_seeds)
        return {"args": known, "seen": seen, "rows": rows, "is_forward": is_forward}

    number = tokens(*same.shape)
    first = np.maximum.accumulate(np.where(documents, number, number[:, :1]), axis=1)
    yield run(constant(starts), number - 1)
    yield run(constant(starts), number.size - 1 - first, is_forward=False)
    if not sampled:
        yield run(either, np.where(place > until, LATER, number - 1))


def _arguments(forward: Any, sizes: tuple[int, int], seeds: bool) -> tuple:
    """Shapes of the weights, and of the microbatches side by side, each a batch and its seeds."""
    inputs, t = len(inputs_of(forward.model)), forward.training
    shape = lambda dtype, *more: jax.ShapeDtypeStruct((*sizes, *more), dtype)
    more = {"inputs": shape(jnp.uint32, inputs)} if inputs else {}
    batch = TokenBatch(targets=shape(jnp.uint32), is_seq_start=shape(bool), loss_mask=shape(bool), **more)
    microbatch = batch, jax.ShapeDtypeStruct(sizes[:1], jnp.uint32) if seeds else None
    # Of those side by side, one that could see the other is enough.
    return shapes_of(forward.model.table), *[microbatch] * (min(2, t.side_by_side) if forward.in_training else 1)


def _traced(
    forward: Any, sizes: tuple[int, int], sampled: bool, seeds: bool, parts: bool, optimizer: Any = None
) -> Any:
    """What a microbatch goes through on one device, until its loss. What its loss gets has names."""
    model = forward.model

    def of_logits(logits, targets, mask, _):
        module = _module_of(forward)
        reference = checkpoint_name(0 * logits, GIVEN) if forward.training.reference else None
        own = functools.partial(module.training_loss, c=optimizer)
        own = own if forward.in_training and optimizer else module.MicrobatchLoss(forward).loss
        named = checkpoint_name(logits, LOGITS), checkpoint_name(targets, TARGETS), checkpoint_name(mask, GIVEN)
        return own(*named, reference)

    Microbatch = tuple[TokenBatch, u32["B/r/d"] | None]

    @typed_shard_map
    def logits(w: model.Weights, microbatch: Microbatch) -> act["B/r/d L V/t/p"]:
        return forward(forward.prepare(w), (forward.tokens(*microbatch),), model.logits)[0]

    @typed_shard_map
    def loss(w: model.Weights, first: Microbatch, second: Microbatch | None = None) -> f32[""]:
        module, run = _module_of(forward), forward
        if forward.in_training:  # as in the step, in which a model reads these
            run = dataclasses.replace(run, targets=module.count_targets(jax.tree.map(lambda x: x[None], first[0])))
        w, loss = run.prepare(w), module.MicrobatchLoss(run, of_logits)
        if not parts:
            return loss(w, first, *([second] if second else []))[0]
        with pipeline_stage():
            stages, layers = Parts(loss), len(jax.tree.leaves(w.layers)[0])
            outer = stages.gather_outer(w)
            x, _ = stages.layers(w.layers, stages.first(outer, *first), jnp.arange(layers), *first)
            return stages.last(outer, x, *first)

    return _on_one_device(forward, logits if sampled else loss, _arguments(forward, sizes, seeds))


def _module_of(forward: Any) -> Any:
    """The module that trains, train.py, whose MicrobatchLoss runs `forward`."""
    modules = [sys.modules[kind.__module__] for kind in type(forward).__mro__]
    return next(module for module in modules if hasattr(module, "MicrobatchLoss"))


def _on_one_device(forward: Any, program: Any, args: tuple) -> Any:
    """The jaxpr of a program."""
    one = AbstractMesh((1, 1, 1), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    # Through no mesh at all: JAX does not change from one mesh to another of a different size.
    none = AbstractMesh((), ())
    on_one = jax.sharding.use_abstract_mesh(one)
    with jax.sharding.use_abstract_mesh(none), on_one, compute_scope(forward.training.compute_dtype):
        return jax.jit(program).trace(*args).jaxpr
