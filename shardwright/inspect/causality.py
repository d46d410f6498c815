"""Proves that a model is causal, before a run, an evaluation and the first generated text. See docs/soundness.md."""

import functools
import math
import re
from collections.abc import Iterator, Set
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from shardlib.axes import OPTIONAL, PIPELINE_AXIS
from shardlib.marks import GIVEN
from shardlib.places import place as place_at
from shardlib.places import users_call
from shardlib.proof.causality import find_later, operations, tokens
from shardlib.proof.check import Finding, on_one_device
from shardlib.proof.lengths import compared
from shardlib.proof.reach import LATER, NONE, Reach, constant, dtype_of, make_reach, reshaped, unknown
from shardwright.data.loader import TokenBatch
from shardwright.inspect.soundness import Unproved, code_of, devices_of, refuse
from shardwright.modeling import fp8
from shardwright.modeling.attention_calls import mask_of, sees_later
from shardwright.modeling.masks import AttentionMask
from shardwright.run.best_effort import in_a_line
from shardwright.run.step import Step

ROWS, LENGTH = 2, 256
"""Number of sequences, and least number of positions in each, with which a model is checked."""
AT_MOST = 4096
"""Largest number of tokens, if ROWS of LENGTH would be another program or would not show all that it does."""
PURPOSE = "If the model is not causal on purpose, say so: AttentionMask(causal=False)"
REMEDIES = {
    "as far as it is followed": "use masked products, jnp.cumsum, or lax.scan over positions, so that "
    f"each position reads those before it. {PURPOSE}",
    "where later documents begin": "read tokens.positions and tokens.document of the position itself and of those "
    "before it, with no shift to the left, and no count or maximum over L",
    "another sequence": "keep sequences separate: take means, norms and choices over dims other than B",
    "in an earlier document": "leave out what comes from another document: attend by masks.same_document, set it to 0 "
    "by tokens.document or tokens.positions, or set training.document_mask=false",
    "receives no": "compute the loss of checked_logits and of Targets, as summed_loss in train.py does",
    "meets the logits": "compute the loss of a target from the logits of its own position, or of an earlier one",
    "is to predict the token": "give the loss of each position its own target, batch.targets at that position",
    ": (dot_general|reduce_max|select_n|while|scan): ": "leave later positions out of what is taken together: give "
    f"them weight 0, as masks.causal and jnp.where(q >= k, …) do. {PURPOSE}",
    ": (sort|top_k|arg...): ": "let each position choose by itself: a rank among all positions of a sequence depends "
    f"on later ones. {PURPOSE}",
    "the loss: the logits": "give a head targets that come after all tokens that it reads: Targets.of with later "
    "targets, as for the next token's embedding in multi-token prediction (docs/soundness.md#causality)",
    ": reduce_": f"take sums up to each position, jnp.cumsum(x, axis=1), or mask later positions out. {PURPOSE}",
    ": (slice|concatenate|pad|conv_general_dilated|dynamic_slice): ": "shift to the right, jnp.pad(x[:, :-n], "
    f"((0, 0), (n, 0), (0, 0))), so that a position reads those before it. {PURPOSE}",
    "": "let a position learn only from those before it in its document: through attention, by masks.causal and "
    "masks.same_document, or masked by tokens.document. docs/soundness.md#causality has what passes, such as blocks "
    f"that a top_k selects. {PURPOSE}",
}
"""The remedy, by a pattern that the message matches."""


def remedied(problem: str, form: str) -> Finding:
    """Adds the remedy to a problem of a program in a form."""
    remedy = next(text for part, text in REMEDIES.items() if re.search(part, problem))
    return Finding(f"{problem}\n  remedy: {remedy}", form=form)


def check_causal(step: Step, context: int | None = None) -> str:
    """Raises if the logits of a model depend on a later token of the document, or on another document or sequence.

    The evaluation and the training step of one microbatch are traced for one device, and not run; what their losses
    depend on is checked. In sampling, the forward pass is traced.

    Args:
        step: a step of a run, or of its model. It is checked once for the same programs and code.
        context: positions of a text, which is one document; None: check the run, not texts.

    Returns:
        Why nothing is proved; empty if the proof succeeds.

    Raises:
        ShardError: names the line where the token comes in that the position must not see.
    """
    if context is None:
        checked = [step.other(name=name) for name in ("evaluation", "training")]
    else:
        forms = "document mask", "one chunk", "einsum attention"
        one = on_one_device(step.mesh, OPTIONAL)
        checked = [step.other(*forms, name="logits", size=(ROWS, context), mesh=one)]
    patterns = [*(call.pattern for each in checked for call in each.calls), getattr(step.model, "mask", None)]
    if not all(pattern.causal for pattern in patterns if isinstance(pattern, AttentionMask)):
        return "the model's attention mask says causal=False"
    settings = step.model.config, checked[0].config.training, step.config.optimizer, context, devices_of(step.mesh)

    def key():
        return (*(each.digest for each in checked), "causality", settings)

    try:
        refuse(lambda: list(dict.fromkeys(_findings(checked))), key, *code_of(step))
    except Unproved as why:
        return str(why)
    return ""


def describe_causality(step: Step) -> str:
    """The line of a run's log: the model is causal, or why that is not proved. Raises ShardError like check_causal."""
    if unproved := check_causal(step):
        return f"causality  not proved: {unproved}"
    return "causality  no position sees a later token or another document"


def _findings(checked: list[Step]) -> Iterator[Finding]:
    for step in checked:
        for call in dict.fromkeys(step.calls):
            if sees_later(mask_of(step.forward, call), call, step.size[1]):  # at all distances
                stack = f" of {call.stack}" * (call.stack != "layers")
                place = f"layer {call.place}{stack}" + (", in training," if step.forward.in_training else "")
                mask = f"{call.pattern.made}: the attention mask `{call.pattern}`"
                yield Finding(
                    f"{mask} of {place} lets a position see later ones\n  "
                    f"remedy: add masks.causal to its mask_mod. {PURPOSE}",
                    is_wrong=True,
                )
                return
    for step in checked:
        name = step.name if step.name == "logits" else f"{step.name} loss"
        # einsum is checked; attention_calls.check_paths compares other implementations with it. With p, the parts of
        # the loss are run as stages run them, one after the other.
        forms = ["einsum attention", *(["layers in order"] if PIPELINE_AXIS in step.mesh.shape else [])]
        mesh = on_one_device(step.mesh, {*OPTIONAL} - {PIPELINE_AXIS})
        if found := list(_of_program(step.other(*forms, name=name, mesh=mesh))):
            yield from found
            return


def _of_program(step: Step) -> Iterator[Finding]:
    rows, length = step.size
    chunk = step.config.training.loss_chunk
    try:
        own = step.jaxpr
    except Exception as error:  # whatever the program does there
        yield _untraced(error, step, "one device")
        return
    failed: list[Finding] = []
    why = f"its operations on {rows} × {length} tokens are others than on fewer"
    doubt = ""
    is_made_for_length = False
    chunks = length // (chunk or length)  # as many, so that each has its part of the positions
    lengths = (math.ceil((LENGTH << i) / chunks) * chunks for i in range(length.bit_length()))
    shorter = [(ROWS, n) for n in lengths if n < length]
    for at in (*shorter, (ROWS, length), *((rows, n) for _, n in shorter), step.size):
        if math.prod(at) > max(AT_MOST, ROWS * LENGTH) or (is_made_for_length and at[1] < length):
            continue
        try:
            fewer = step.other(size=at)
            longer = step.other(size=(at[0], length)).jaxpr
            program = fewer.jaxpr
        except Exception as error:  # whatever the program does at this length; others are tried
            failed = failed or [_untraced(error, step, f"{at[0]} × {at[1]} tokens")]
            continue
        if operations(program) != operations(own):
            continue
        if of_rows := compared(own, longer, rows, at[0])[0]:
            why = f"{of_rows}: its sizes for {rows} sequences do not follow from those for {at[0]}"
            continue
        differs, unknown, is_made_for_length = compared(longer, program, length, at[1])
        if differs:
            why = f"{differs}: its sizes on {length} positions do not follow from those on {at[1]}"
            continue
        find = functools.partial(_first_problem, program, list(_runs(fewer)), growth=math.log(length, at[1]))
        if (doubted := find(unknown=unknown)) and unknown:
            if problem := find():  # a leak in the shorter program, whatever is unknown
                yield remedied(problem, fewer.form)
                return
            doubted = find(unknown=unknown, is_shown=True)
        elif doubted:
            yield remedied(doubted, fewer.form)
            return
        if not doubted:
            return
        doubt = f"{doubted}, as far as {at[1]} positions show"
        form = fewer.form
    if doubt and not is_made_for_length:
        yield remedied(doubt, form)
    elif failed and not doubt:
        yield from failed
    else:
        raise Unproved(doubt or why)


def _untraced(error: Exception, step: Step, on: str) -> Finding:
    """An error of a program, whatever it is, which is a rejection unless the settings say otherwise."""
    problem = f"the {step.name} does not trace on {on}: {in_a_line(error)}"
    if step.config.training.unproved_causality:
        raise Unproved(problem)
    call = users_call(error)
    where = f"{place_at(call.tb_frame.f_code.co_filename, call.tb_lineno)}: " if call else ""
    remedy = "mend the error; training.unproved_causality=true runs without a proof that the model is causal"
    return Finding(f"{where}{problem}\n  remedy: {remedy}", form=step.form)


def _first_problem(program: ClosedJaxpr, runs: list, unknown: Set[int] = frozenset(), **options: Any) -> str:
    found = (find_later(program, unknown=unknown, free=(GIVEN, fp8.PEAK), **options, **run) for run in runs)
    return next(filter(None, found), "")


def _runs(step: Step) -> Iterator[dict[str, Any]]:
    """Arguments of find_later: for later tokens, for tokens of other documents, and for where later documents begin."""
    rows, length = step.size
    sampled = step.name == "logits"

    def is_batch(x):
        return isinstance(x, TokenBatch)

    parts = jax.tree.leaves(step.traced.args_info[0], is_leaf=is_batch)
    (batch,) = filter(is_batch, parts)
    until = length // 2
    place = np.arange(length)
    shape = batch.targets.shape
    count = math.prod(shape[:-1]) // rows
    starts = np.broadcast_to(place == 0, (count * rows, length)).copy()
    if not sampled:  # more documents than positions before `until`, and of other rows one
        starts[::2, 2 * length // 5 : 19 * length // 20] = starts[::2, -2:-1] = True
        starts[::2, length // 5 : length // 5 + 2] = True
    whole = constant(starts.copy())
    starts[1::2, 3:4] = not sampled  # a long document that is not the first
    other = starts & (place <= until)
    other[::2, 3 * length // 4] = other[1::2, until + 1 : until + 2] = other[1::2, -1:] = True
    documents = starts if step.config.training.document_mask else starts & (place == 0)
    same = starts == other
    either = make_reach(same.shape, starts, same, np.where(same, NONE, LATER))
    either.ways = constant(starts), constant(other)

    def run(begin: Reach, seen: np.ndarray, is_forward: bool = True) -> dict[str, Any]:
        number = tokens(*same.shape, is_forward=is_forward)
        before = np.where(documents, NONE, number - 1 if is_forward else number + 1)
        targets = unknown(same.shape, np.uint32, number)
        mask = unknown(same.shape, bool, before)
        own = [x.moved(lambda a, x=x: reshaped(a, x.shape, shape), shape) for x in (targets, begin, mask)]
        further = [x.shape for x in (batch.inputs, batch.loss_inputs) if x is not None]
        own += (own[0].moved(lambda a: a[..., None], shape) for shape in further)
        args = []
        for x in parts:
            args += own if is_batch(x) else [unknown(x.shape, dtype_of(x))]
        return {"args": args, "seen": seen, "rows": rows, "is_forward": is_forward}

    number = tokens(*same.shape)
    first = np.maximum.accumulate(np.where(documents, number, number[:, :1]), axis=1)
    yield run(whole, number - 1)
    yield run(constant(starts), number.size - 1 - first, is_forward=False)
    if not sampled:
        yield run(either, np.where(place > until, LATER, number - 1))
