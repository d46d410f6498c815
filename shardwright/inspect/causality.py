"""Checks that a model is causal, or does not read what it declares hidden, before a run, an
evaluation and the first generated text.

See docs/soundness.md.

The programs run on one device, at small sizes, in exact arithmetic (shardlib.exact); soundness.py
checks that the mesh computes the same. For several positions there are two batches, which only have
in common what the position may see. The logits of the second batch are put into the run of the
first one. If that changes the losses of the document up to this position, then their logits depend
on what differs, or these losses on logits of other positions.
"""

import contextlib
import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib.exact.endings import Undecided
from shardlib.exact.machine import Machine, Observer
from shardlib.exact.values import Exact, equal, join, move
from shardlib.findings import Finding, raise_for
from shardlib.interpret import Operation
from shardlib.places import place
from shardlib.tracing import on_one_device, tracing
from shardwright.axes import OPTIONAL
from shardwright.inspect.smaller import draw, make_small, slots_of
from shardwright.inspect.soundness import traced
from shardwright.modeling.attention_calls import mask_of, sees_later
from shardwright.modeling.masks import AttentionMask
from shardwright.modeling.model import HIDDEN, LOGITS
from shardwright.program.processes import in_all_processes
from shardwright.program.remembered import remembered
from shardwright.program.step import Step

RUN = "evaluation", "training"
BATCHES, LOGITS_OF = "batches", "logits of"
"""Leading dims of all values beside those of devices. Batches are in pairs; a dim has one entry
where all have the same. From the logits on there are two values for each batch: with its own
logits, and with those of its pair."""
ROWS, LONGER = 2, 2
"""Sequences of a microbatch, and how many times as many positions as the small program: more than a
top_k chooses."""
WINDOWS = 12
"""Number of positions of which it is tried what they see."""
TRIED = 20
"""Number of equations that are tried as the origin of a dependency."""
LATER = "a token in a later document"
OWN = "the token that it predicts"
HIDDEN_TOKEN = "a token that Model.hidden declares hidden"
READ = "targets that are not hidden from the model"
EARLIER = "a token in an earlier document"
OTHERS = "another sequence of the batch"
SINGLE = 16
"""Number of windows in which a leak is looked for, one by one."""
PURPOSE = "If the model is not causal on purpose, say so: AttentionMask(causal=False)"
NOT_CAUSAL = (
    "the model's attention mask says causal=False, so a position may see the token that it "
    "predicts, or another document; if the model predicts hidden tokens, declare them by its "
    "method `hidden` (docs/models.md)"
)
REMEDIES = {
    READ: "multiply the loss by the `counted` of its Targets, as head_loss in train.py does",
    HIDDEN_TOKEN: "replace the ids of hidden tokens before any are embedded, hashed or counted, "
    "and return from Model.hidden a weight of 0 for each target that is read",
    "later documents begin": "read tokens.positions and tokens.document of the position itself and "
    "of those before it, with no shift to the left, and no count or maximum over L",
    "targets count": "read tokens.counted of the position itself and of those before it",
    f"{EARLIER}|{LATER}|earlier documents begin": "leave out what comes from another document: "
    "attend by masks.same_document, set it to 0 by tokens.document or tokens.positions, or set "
    "training.document_mask=false",
    OTHERS: "keep sequences separate: take means, norms and choices over dims other than B",
    "is that of an earlier": "give the loss of each position its own target, batch.targets at that "
    "position",
    "see later ones": f"add masks.causal to its mask_mod. {PURPOSE}",
    ": the loss of": "compute the loss of a target from the logits of its own position, or of an "
    "earlier one; give a head that reads later tokens the targets after these: Targets.of with "
    "later targets",
    ": gather: .*predicts": "embed tokens.ids as they are, which a position reads before it "
    "predicts the next one",
    ": (slice|concatenate|pad|conv_general_dilated|rev): ": "shift to the right, jnp.pad(x[:, "
    f":-n], ((0, 0), (n, 0), (0, 0))), so that a position reads those before it. {PURPOSE}",
    ": (sort|top_k|arg...): ": "let each position choose by itself: a rank among all positions of "
    f"a sequence depends on later ones. {PURPOSE}",
    ": reduce_sum: ": f"take sums up to each position, jnp.cumsum(x, axis=1), or mask later "
    f"positions out. {PURPOSE}",
    "": "leave later positions out of what is taken together: give them weight 0, as masks.causal "
    f"and jnp.where(q >= k, …) do. {PURPOSE}",
}
"""The remedy, by a pattern that the message matches."""


def check_causal(step: Step, context: int | None = None) -> str:
    """Raises if losses or logits depend on a later token of the document, or on another document or
    sequence; or, with causal=False, on a token that the model declares hidden.

    Args:
        step: a step of a run, or of its model.
        context: positions of a text, which is one document; None: check the run, not texts.

    Returns:
        Why nothing is known; empty if the model is causal.

    Raises:
        ShardError: names the line where what a position must not see comes in; or what the check
            cannot decide, unless training.accept_undecided accepts it.
    """
    names = RUN if context is None else ("logits",)
    is_causal = says_causal(step, names)
    if not is_causal and (context is not None or not hasattr(step.model, "hidden")):
        return NOT_CAUSAL

    def check() -> dict[str, str]:
        try:
            programs = (small_program(step, name) for name in names)
            found = next(filter(None, (find_leaks(small, is_causal) for small in programs)), [])
            raise_for(found, wrong="wrong: a position depends on what it must not see")
        except Undecided as error:
            if step.config.training.accept_undecided:
                return {"why": str(error)}
            remedy = (
                "training.accept_undecided=true runs without knowing whether the model is causal"
            )
            raise_for([Finding(f"{error}\n  remedy: {remedy}")])
        return {}

    def known() -> dict[str, str]:
        return remembered(step, f"causal {' '.join(names)}", check)[0]

    return in_all_processes(lambda: known() if jax.process_index() == 0 else {}).get("why", "")


def describe_causality(step: Step) -> str:
    """Says what positions do not see, or `not known: …`. Raises ShardError like check_causal."""
    if why := check_causal(step):
        return f"not known: {why}"
    shown = ["a later token"] if says_causal(step) else []
    shown += ["a hidden token"] if hasattr(step.model, "hidden") else []
    return f"no position sees {' or '.join([*shown, 'another document'])}"


def says_causal(step: Step, names: Sequence[str] = RUN) -> bool:
    """Returns False if an attention mask of the model, in programs of a step, has causal=False."""
    calls = [call for name in names for call in step.other(name=name).calls]
    patterns = [*(call.pattern for call in calls), getattr(step.model, "mask", None)]
    return all(pattern.causal for pattern in patterns if isinstance(pattern, AttentionMask))


def small_program(step: Step, name: str) -> Step:
    """Returns a program of a step, on one device, at sizes that show what positions see."""
    small = make_small(step).step
    rows, length = small.size
    with contextlib.suppress(ValueError):  # a model for so many positions
        small.config.model.check(LONGER * length)
        length *= LONGER
    t = small.config.training
    chunk = t.loss_chunk and t.loss_chunk * length // t.seq_len
    edits = {"training.batch_size": min(rows, ROWS) * t.microbatches, "training.seq_len": length}
    edits |= {
        "training.loss_chunk": chunk,
        "training.document_mask": t.document_mask or name == "logits",
    }
    return small.other(edits, name=name, mesh=on_one_device(small.mesh, OPTIONAL))


def find_leaks(step: Step, is_causal: bool = True) -> list[Finding]:
    """Finds what a program, at small sizes on one device, lets a position see that it must not; at
    most one line.

    Without `is_causal`, a position may see later tokens of its document that are not hidden.

    Raises:
        Undecided: the program cannot be run exactly.
    """
    program = _Program(step, is_causal)
    pairs = program.pairs()
    first = pairs[0]
    last = dataclasses.replace(first, changed={OWN: first.changed[OWN]})
    *ordinary, of_last = program.run([*pairs, last])
    if step.name != "logits" and not program.has_logits:
        remedy = "compute the loss by Forward.losses, as head_loss in train.py does"
        return [Finding(f"the {step.name} loss: it receives no logits\n  remedy: {remedy}")]
    if of_last.ignores_targets and is_causal:
        within = dataclasses.replace(first, changed={OWN: {"targets": first.first["loss_mask"]}})
        if not program.run([within])[0].ignores_targets:
            problem = (
                f"the {step.name} loss: the target of a position is that of an earlier position"
            )
            return [_finding(problem)]
    leaking = [pair for pair, losses in zip(pairs, ordinary, strict=True) if losses.differ]
    if not leaking:
        of_read = [pair.of_read() for pair in pairs if pair.hidden is not None]
        if of_read and program.leaking(of_read):
            return [_finding(f"the {step.name} loss: it counts {READ}")]
        return []
    for call in dict.fromkeys(step.calls) if is_causal else ():
        if sees_later(mask := mask_of(step.forward, call), call, step.size[1]):
            stack = f" of {call.stack}" * (call.stack != "layers")
            where = f"layer {call.place}{stack}" + ", in training," * step.forward.in_training
            return [
                _finding(
                    f"{mask.made}: the attention mask `{mask}` of {where} lets a position see "
                    "later ones"
                )
            ]
    single = [
        program.pair(pair.first, [window], pair.hidden)
        for pair in leaking
        for window in pair.windows
    ]
    leaking = program.leaking(single[:SINGLE]) or leaking
    for kind in leaking[0].changed:
        alone = program.leaking(
            [dataclasses.replace(pair, changed={kind: pair.changed[kind]}) for pair in leaking]
        )
        if alone:
            return [program.finding(alone[0], kind)]
    return [program.finding(leaking[0], "what it must not see")]


# ---- batches -------------------------------------------------------------------------------------

Batch = dict[str, np.ndarray]
"""The arrays of a TokenBatch, by field."""
TOKENS = "targets", "inputs"
"""Fields with values of each token."""


class Window(NamedTuple):
    """Positions begin, …, end - 1 of a sequence, in one document.

    `row` is the index of the sequence.
    """

    row: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two batches that have in common what positions in some windows may see.

    Attributes:
        windows: at most one in a sequence.
        first: a batch, in which the targets in the windows count.
        changed: where the other one differs, by field, for each kind of what the positions must not
            see.
        hidden: the targets that Model.hidden declares hidden; None without this method.
    """

    windows: Sequence[Window]
    first: Batch
    changed: dict[str, Batch]
    hidden: Any = None

    def of_read(self) -> "Pair":
        """Returns a pair in which only targets that the model may read count, and differ."""
        read = self.first["loss_mask"] & ~np.asarray(self.hidden)
        first = {**self.first, "loss_mask": read}
        return Pair(self.windows, first, {READ: dict.fromkeys(TOKENS, read)})

    def second(self, vocab: int) -> Batch:
        """Makes the other batch."""
        found = dict(self.first)
        for field, where in (
            change for of_kind in self.changed.values() for change in of_kind.items()
        ):
            if field not in found:
                continue
            x = self.first[field]
            other = (
                ~x
                if x.dtype == bool
                else (x + 1 + np.arange(x.size).reshape(x.shape) % (vocab - 1)) % vocab
            )
            where = where.reshape(where.shape + (1,) * (x.ndim - where.ndim))
            found[field] = np.where(where, other, found[field]).astype(x.dtype)
        return found


# ---- programs ------------------------------------------------------------------------------------


class _Program:
    """A program that computes a loss, or the logits of texts, on one device."""

    def __init__(self, step: Step, is_causal: bool):
        self._is_causal = is_causal
        self._jaxpr = traced(step)
        info = step.traced.out_info
        with tracing(step.mesh):
            if step.name != "logits":
                loss = info[1].loss if step.name == "training" else info[0]
                used = [x is loss for x in jax.tree.leaves(info)]
                self._jaxpr = ClosedJaxpr(
                    dce_jaxpr(step.jaxpr.jaxpr, used, instantiate=True)[0], step.jaxpr.consts
                )
        self._step = step
        self._args = draw(step, 0)
        paths = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(step.traced.args_info)
        ]
        fields = "targets", "inputs", "is_seq_start", "loss_mask"
        of_batch = [
            (i, path.rpartition(".")[2])
            for i, path in enumerate(paths)
            if path.startswith("[0][1]")
        ]
        self._at = {field: i for i, field in of_batch if field in fields}
        self._is_whole = not step.config.training.document_mask
        if step.name == "logits":  # each text is a document
            self._is_whole = True
            i = self._at.pop("is_seq_start")
            self._args[i] = np.broadcast_to(np.arange(step.size[1]) == 0, self._args[i].shape)
        self.has_logits = False
        self.drops = step.name == "training" and bool(slots_of(step))
        """True if experts drop tokens, by what earlier documents of the sequence need."""

    def pairs(self) -> list[Pair]:
        """Draws pairs of batches with windows in half of the sequences, which end at several
        positions.
        """
        rng = np.random.default_rng(0)
        of_step = {field: self._args[i] for field, i in self._at.items()}
        *rows, length = of_step["targets"].shape
        halves = [
            half for half in np.array_split(rng.permutation([*np.ndindex(*rows)]), 2) if len(half)
        ]
        places = rng.permuted(np.linspace(1, length, min(length, WINDOWS)).round())
        ends = itertools.cycle(places)
        found = []
        for half in itertools.islice(
            itertools.cycle(halves), max(2, math.ceil(len(places) / len(halves[-1])))
        ):
            windows = []
            for row in half:
                end = int(next(ends))
                begin = 0 if self._is_whole else int(rng.integers(end))
                end = length if self._is_whole and not self._is_causal else end
                windows.append(Window(tuple(map(int, row)), begin, end))
            batch = {field: rng.permuted(x) for field, x in of_step.items()}
            found.append(self.pair(batch, windows))
        if self._step.name == "logits" or not hasattr(self._step.model, "hidden"):
            return found
        hidden = self._hidden([pair.first for pair in found])
        return [
            self.pair(pair.first, pair.windows, of) for pair, of in zip(found, hidden, strict=True)
        ]

    def _hidden(self, batches: Sequence[Batch]) -> np.ndarray:
        """Returns the targets of each batch that the model declares hidden; all others are read."""
        found = []

        def observe(machine: Machine, operation: Operation, ins: list, outs: list) -> None:
            if _is_named(operation, HIDDEN):
                found.append(outs[0].value[:, 0] != 0)

        self._run(batches, observe)
        shape = len(batches), *batches[0]["targets"].shape
        parts = [x.reshape(len(x), 1, *shape[2:]) for x in found]  # of each microbatch
        hidden = np.broadcast_to(np.concatenate(parts, 1) if parts else False, shape)
        if parts and not hidden.any():
            raise Undecided("Model.hidden gives 0 for all targets")
        return hidden

    def pair(
        self, batch: Batch, windows: Sequence[Window], hidden: np.ndarray | None = None
    ) -> Pair:
        """Makes a pair of batches; the first one is like `batch`.

        `windows` and `hidden` are as in Pair. If experts drop tokens, earlier documents matter.
        """
        within, begins, own, earlier, later, rows = (
            np.zeros(batch["targets"].shape, bool) for _ in range(6)
        )
        for row, begin, end in windows:
            rows[row] = True
            earlier[row][:begin] = True
            begins[row][begin] = True
            within[row][begin:end] = True
            own[row][end - 1] = True
            later[row][end:] = True
            if not self._is_causal:  # the window is a whole document
                begins[row][end : end + 1] = True
        changed = {
            "a later token" if self._is_causal else LATER: dict.fromkeys(TOKENS, later),
            OWN: dict.fromkeys(TOKENS, own) if self._is_causal else {},
            HIDDEN_TOKEN: {} if hidden is None else dict.fromkeys(TOKENS, within & hidden),
            "where later documents begin": {"is_seq_start": later & ~begins},
            "which other targets count": {"loss_mask": ~within},
            EARLIER: {} if self.drops else dict.fromkeys(TOKENS, earlier),
            "where earlier documents begin": {} if self.drops else {"is_seq_start": earlier},
            OTHERS: dict.fromkeys((*TOKENS, "is_seq_start"), ~rows),
        }
        starts = np.where(within | begins, begins, batch.get("is_seq_start", begins))
        first = {**batch, "is_seq_start": starts, "loss_mask": within}
        return Pair(windows, first, changed, hidden)

    def leaking(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Returns the pairs of which the losses or logits differ."""
        return [pair for pair, losses in zip(pairs, self.run(pairs), strict=True) if losses.differ]

    def run(self, pairs: Sequence[Pair], observe: Observer | None = None) -> list["Losses"]:
        """Runs pairs of batches."""
        vocab = self._step.config.model.vocab
        batches = [batch for pair in pairs for batch in (pair.first, pair.second(vocab))]

        def exchange(machine: Machine, operation: Operation, ins: list, outs: list) -> None:
            if _is_named(operation, LOGITS):
                self.has_logits = True
                outs[0] = move(_with_other, outs[0])
            if observe is not None:
                observe(machine, operation, ins, outs)

        out = self._run(batches, exchange)
        of_texts = self._step.name == "logits"
        out = move(_with_other, out) if of_texts else out
        out = move(lambda a: np.broadcast_to(a, (len(batches), 2, *a.shape[2:])), out)
        found = []
        for i, pair in enumerate(pairs):
            part = (..., pair.first["loss_mask"], slice(None)) if of_texts else ...
            places = (2 * i, 0), (2 * i, 1), (2 * i + 1, 1)
            losses = Losses(*(move(lambda a, place=place: a[place][part], out) for place in places))  # noqa: B023
            if not np.isfinite(losses.own.value).all():
                raise Undecided("the loss is not finite if the targets of few documents count")
            found.append(losses)
        return found

    def _run(self, batches: Sequence[Batch], observe: Observer) -> Exact:
        """Runs the program on each batch, and returns its result."""
        machine = Machine({BATCHES: len(batches), LOGITS_OF: 2, **self._step.mesh.shape}, observe)
        args = [machine.whole(x) for x in self._args]
        for field, i in self._at.items():
            args[i] = join(np.concatenate, [machine.whole(batch[field]) for batch in batches])
        (out,) = machine.run(self._jaxpr, args)
        return out

    def finding(self, pair: Pair, kind: str) -> Finding:
        """Names the line at which something that a position must not see comes into what is
        computed for it.
        """
        (before,) = self.run([pair])
        modules = (sys.modules.get(base.__module__) for base in type(self._step.model).__mro__)
        files = [getattr(module, "__file__", None) or "" for module in modules]
        found = _Differences(pair, kind, files)
        self.run([pair], found)
        changing = []
        for path, problem in list(found.candidates.items())[:TRIED]:
            (after,) = self.run([pair], _Without(found, path))
            if not after.differ:  # from the loss on all that differs mends it
                changing = changing if changing and ": the loss" in problem else [problem]
                break
            if not equal(before.other, after.other).all():
                changing.append(problem)
        changing.append(f"the {self._step.name} step: the loss of a position depends on {kind}")
        if before.differ_by_rounding:
            raise Undecided(f"{changing[0]}, or exact arithmetic has no law for it")
        return _finding(changing[0])


class Losses(NamedTuple):
    """Losses of a pair of batches, or logits.

    Attributes:
        own: those of the first batch.
        other: those of the first batch with the logits of the second.
        of_other: those of the second batch with the logits of the first.
    """

    own: Exact
    other: Exact
    of_other: Exact

    @property
    def differ(self) -> bool:
        """True if what is computed for the windows depends on what their positions must not see."""
        return not equal(self.own, self.other).all()

    @property
    def differ_by_rounding(self) -> bool:
        """True if they only differ as floats do."""
        return np.allclose(self.own.value, self.other.value, rtol=1e-12, atol=1e-12)

    @property
    def ignores_targets(self) -> bool:
        """True if the loss does not depend on the targets in which the batches differ."""
        return bool(equal(self.own, self.of_other).all())


def _is_named(operation: Operation, name: str) -> bool:
    return operation.name == "name" and operation.params["name"] == name


def _with_other(a: np.ndarray) -> np.ndarray:
    """Returns logits with those of the other batch of each pair beside them."""
    if len(a) == 1:
        return a
    a = a[:, 0]
    return np.stack([a, a[np.arange(len(a)) ^ 1]], 1)


def _finding(problem: str) -> Finding:
    remedy = next(text for part, text in REMEDIES.items() if re.search(part, problem))
    return Finding(f"{problem}\n  remedy: {remedy}", is_wrong=True)


# ---- the line ------------------------------------------------------------------------------------


class _Differences:
    """An observer of one pair that notes which equations have other values at positions of the
    window.

    An array has an entry for each position if neighboring dims have the size of a sequence
    together. Where other sequences differ, it is the entries of the own one that count, in the
    first dim of the number of sequences.
    """

    def __init__(self, pair: Pair, kind: str, files: list[str]):
        self.candidates: dict[tuple[int, ...], str] = {}
        self._window = pair.windows[0]
        self._kind = kind
        self._files = files
        self._shape = pair.first["targets"].shape
        self._made: dict[int, tuple[Any, Operation, list]] = {}
        self._is_loss = False

    def __call__(self, machine: Machine, operation: Operation, ins: list, outs: list) -> None:
        """See shardlib.exact.machine.Observer."""
        self._is_loss |= _is_named(operation, LOGITS)
        for x in outs:
            if isinstance(x, Exact):
                self._made.setdefault(id(x), (x, operation, ins))
        if not _is_named(operation, LOGITS) and any(self._differs(machine, x) for x in outs):
            origin = self._origin(machine, operation, ins)
            subject = (
                "loss of a position depends" if self._is_loss else "logits of a position depend"
            )
            text = f"{origin.place()}: {origin.shown}: the {subject} on {self._kind}"
            text += self._call(origin)
            self.candidates.setdefault(operation.path, text)

    def _call(self, operation: Operation) -> str:
        """Names the call of a method of a base class, such as super().embed, that led to it."""
        calls = operation.calls()
        file = calls[-1][0] if calls else ""
        derived = self._files[: self._files.index(file)] if file in self._files else []
        above = [call for call in calls if call[0] in derived]
        return f", by the call at {place(*above[-1])}" if above else ""

    def _origin(self, machine: Machine, operation: Operation, ins: list) -> Operation:
        """Goes back to what took the positions together, from values without an entry for each."""
        while True:
            values = [x for x in ins if isinstance(x, Exact) and id(x) in self._made]
            mixed = [
                x for x in values if self.window(machine.shape(x)) is None and not self._is_same(x)
            ]
            if not mixed:
                return operation
            _, operation, ins = self._made[id(mixed[0])]

    def _differs(self, machine: Machine, x: Any) -> bool:
        is_of_tokens = self._kind in (OWN, HIDDEN_TOKEN)
        if not isinstance(x, Exact) or (is_of_tokens and x.image is None):
            return False
        window = self.window(machine.shape(x))
        return window is not None and not self._is_same(x, window)

    def _is_same(self, x: Exact, window: Any = True) -> bool:
        """True if the batches have the same; from the logits on, the first one with either of
        them.
        """
        dim = 1 if self._is_loss else 0
        if x.value.shape[dim] == 1:
            return True
        a, b = (move(lambda a, k=k: a[(0,) * dim + (k,)], x) for k in range(2))
        return not (~equal(a, b) & window).any()

    def window(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """True for the entries of an array that belong to the window; None if it has no such
        dims.
        """
        *rows, length = self._shape
        if self._kind == OTHERS:
            for i in range(len(shape)):
                for of_rows, row in ((rows, self._window.row), (rows[-1:], self._window.row[-1:])):
                    if [*shape[i : i + len(of_rows)]] == of_rows:
                        found = np.zeros(shape, bool)
                        found[(slice(None),) * i + row] = True
                        return found
            return None
        found = None
        for i in range(len(shape)):
            for j in range(i + 1, len(shape) + 1):
                if np.prod(shape[i:j]) == length and shape[i] > 1 and shape[j - 1] > 1:
                    at = np.arange(length).reshape((1,) * i + shape[i:j] + (1,) * (len(shape) - j))
                    within = (self._window.begin <= at) & (at < self._window.end)
                    found = within if found is None else found & within
        return found


class _Without:
    """An observer that gives the results of one equation the values of the first batch at the
    window.
    """

    def __init__(self, differences: _Differences, path: tuple[int, ...]):
        self._differences = differences
        self._path = path

    def __call__(self, machine: Machine, operation: Operation, ins: list, outs: list) -> None:
        """See shardlib.exact.machine.Observer."""
        if operation.path != self._path:
            return
        for i, x in enumerate(outs):
            window = self._differences.window(machine.shape(x)) if isinstance(x, Exact) else None
            if window is not None:
                outs[i] = move(lambda a, window=window: np.where(window, a[:1, :1], a), x)
