"""Checks in a traced forward pass that logits depend on no later token and on no other document.

The pass, as traced on one device, is interpreted over facts about each entry of its arrays: the
last token that it may depend on, and its value if that is known (shardlib/proof/reach.py). Tokens
are numbered from the first on to find later ones, and from the last on to find those of earlier
documents. Token ids and weights are unknown, but positions are known numbers, so masks are too. The
starts of documents are known: in one layout, or in two that are the same up to a position. Logits
before that position that differ between the two depend on later documents. See docs/soundness.md.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib import marks
from shardlib.equations import (
    Atom,
    Eqn,
    kinds,
    shape_of,
    split_scan,
    words,
)
from shardlib.interpret import Domain, Operation, equations_in, interpret, literal_of
from shardlib.marks import LOGITS, TARGETS
from shardlib.places import place
from shardlib.proof import reach
from shardlib.proof.reach import LATER, NONE, Reach
from shardlib.proof.reach_moves import rows_added
from shardlib.proof.reach_rules import anything, apply
from shardlib.proof.reach_slots import have_same_slots, is_in, of_sorted, together

FORM = (kinds("view") | words("convert_element_type copy pad slice")) - {"transpose"}
"""Primitives that JAX adds or leaves out depending on the sizes of dims."""
MET = np.int32(2**29)
"""Stands in place of a token for a value that was computed from both logits and a target."""
TURNS = 2**16
"""Largest number of iterations of a while loop that are followed one by one."""


def tokens(batch: int, length: int, is_forward: bool = True) -> np.ndarray:
    """Returns the numbers of a batch's tokens, [batch, length].

    Token i of sequence b has number b·L + i; without `is_forward`, numbers count from the last
    token. Token i is the target of position i, whose logits may depend on the tokens before it.
    tokens(2, 3) is [[0, 1, 2], [3, 4, 5]], and [[5, 4, 3], [2, 1, 0]] counted from the last.
    """
    number = np.arange(batch * length, dtype=np.int32).reshape(batch, length)
    return number if is_forward else number[::-1, ::-1]


def find_later(
    program: ClosedJaxpr, args: list[Reach], seen: np.ndarray, rows: int, **options: Any
) -> str | None:
    """Finds where the logits of a position first depend on what this position must not see.

    Returns a message; None if they never do. A mean over positions that is added to the embeddings
    gives `model.py:7: reduce_sum: the logits of position 0 depend on the token of position 2, which
    it is to predict, or a later one`.

    Args:
        program: a closed jaxpr. Its first result is the logits [B, L, V]; or it tags logits with
            the name LOGITS and targets [B, L] with TARGETS, per microbatch, as a whole or in parts
            along L.
        args: the facts about its arguments.
        seen: the number (see `tokens`) of the last token that the logits of each position may
            depend on, [B, L] for all microbatches; LATER: they may depend on any.
        rows: sequences per microbatch.
        **options: passed to Interpreter.
    """
    interpreter = Interpreter(seen, rows, **options)
    result = interpret(program, interpreter, map(reach.ordinary, args))[0]
    named, is_forward = interpreter.named, interpreter.is_forward
    if not named[LOGITS] and result.shape[:2] != seen.shape:
        return "the loss: it receives no logits"
    if named[LOGITS] and not named[TARGETS]:
        return "the loss: it receives no targets"
    own = Part(result, tokens(*seen.shape)[:rows])
    for name, found in {**named, LOGITS: named[LOGITS] or [own]}.items():
        parts = []
        row = 0
        for part in found:
            parts.append(part)
            if sum(math.prod(part.x.shape[1:2]) for part in parts) == seen.shape[1]:
                if problem := _problem_of(name, parts, seen, row, is_forward):
                    return problem
                parts = []
                row = (row + rows) % len(seen)
        if parts:
            return (
                f"the loss: {parts[-1].x.shape}: its {name} are not those of the {seen.shape[1]} "
                "positions"
            )
    return interpreter.problem


def _problem_of(
    name: str, parts: list["Part"], seen: np.ndarray, row: int, is_forward: bool
) -> str | None:
    """Describes a forbidden dependency of logits or targets of a microbatch; None: there is none.

    `name` is LOGITS or TARGETS; the microbatch begins with sequence `row`.
    """
    last = np.concatenate([_last_of_positions(part.x) for part in parts], 1)
    ahead = np.concatenate([part.predicted for part in parts], 1)
    size = seen.size
    length = seen.shape[1]
    most = np.full(seen.shape, LATER) if is_forward else tokens(*seen.shape, is_forward=False)
    if name == LOGITS:
        ends = (row + 1 + np.arange(len(last))[:, None]) * length - 1
        most = seen.ravel()[np.minimum(ahead, ends)] + np.maximum(ahead - ends, 0)
    else:
        most = most[row : row + len(last)]
    for at in np.argwhere(last > most)[:1]:
        own, position = map(int, at)
        token = int(last[tuple(at)])
        of, read = divmod(token if is_forward else size - 1 - token, length)
        if name == TARGETS:
            return (
                f"the loss: targets: position {position} is to predict the token of position "
                f"{read}, which it has read"
            )
        place, primitive, blurred = next(
            (part.x.why for part in parts if part.x.why), (parts[0].place, "the loss", False)
        )
        line = f"{place}: {primitive}: the logits of"
        if token == LATER:
            return f"{line} position {position} depend on where later documents begin"
        if blurred:
            return (
                f"{line} position {position} depend on all that {primitive} reads, as far as it is "
                "followed"
            )
        if of != row + own:
            return f"{line} a sequence depend on tokens of another sequence of the batch"
        where = "which it is to predict, or a later one" if is_forward else "in an earlier document"
        return f"{line} position {position} depend on the token of position {read}, {where}"
    return None


class Part(NamedTuple):
    """Logits or targets of some positions, as a loss gets them.

    Attributes:
        x: the facts about them.
        predicted: the token that each position predicts, which is the last one that its target
            depends on; past the end of the sequence if there is none.
        place: the call by which the step computes this loss.
    """

    x: Reach
    predicted: np.ndarray
    place: str = "?"


def _last_of_positions(x: Reach) -> np.ndarray:
    return np.broadcast_to(x.last.reshape(*x.last.shape[:2], -1).max(-1), x.shape[:2])


class Interpreter(Domain[Reach]):
    """Derives facts about the results of a program from facts about its arguments.

    Attributes:
        named: the values named LOGITS or TARGETS, in order.
        problem: a message about the first operation that combines a target with the logits of a
            later position or of another sequence; None: none does.
    """

    problem: str | None = None

    def __init__(
        self,
        seen: np.ndarray,
        rows: int | None = None,
        is_forward: bool = True,
        unknown: frozenset[int] = frozenset(),
        growth: float = 1.0,
        free: tuple[str, ...] = (),
        is_shown: bool = False,
    ):
        """Creates an interpreter.

        Args:
            seen: the last token that each position may depend on, [B, L].
            rows: sequences per microbatch; None: all.
            is_forward: True if tokens are numbered from the first one.
            unknown: the id() of each literal and array whose numbers count as unknown.
            growth: a value with n numbers here has n**growth of them in longer sequences.
            free: names and mark labels of values that are taken as independent of tokens, although
                they are computed from some.
            is_shown: True if no problem was found with an empty `unknown`. Then, if the mask of a
                position depends on `unknown` alone, a position that sees a key in this program is
                assumed to see one in longer sequences too.
        """
        self.seen = seen
        self.rows = rows or len(seen)
        self.is_forward = is_forward
        self.unknown, self.growth, self.free, self.is_shown = unknown, growth, free, is_shown
        self.named: dict[str, list[Part]] = {LOGITS: [], TARGETS: []}
        self._entered = ""

    def constant(self, source: object) -> Reach:
        """Returns the fact about a literal, or about an array that the program holds."""
        x = reach.constant(literal_of(source))  # whose number may be one that its dtype lacks
        if id(source) not in self.unknown:
            return x
        if not x.shape and x.number.dtype.kind == "f":
            bound = reach.bounds(x)
        else:
            bound = reach.sizes(x).max(initial=0)
        return reach.make_reach(x.shape, bound, False, dtype=x.number.dtype)

    def follow(self, eq: Operation, ins: list[Reach]) -> list[Reach]:
        """Derives facts about the results of an equation."""
        name = eq.name
        if name == "name":
            if (label := eq.params["name"]) in self.named:
                return [self._loss_gets(eq, ins[0], label)]
            mark = marks.mark_of(eq.eqn)
            self._entered = mark.label if mark and mark.kind == "enters" else self._entered
            if (mark.label if mark else label) in self.free:
                return [reach.ordinary(reach.unknown(x.shape, x.number.dtype)) for x in ins]
        if marks.is_region(eq.eqn) and (rule := _region_rule(self._entered)):
            return self._worked(eq, ins, functools.partial(_in_region, rule))
        if name in ("scan", "while", "cond"):
            ins = list(map(_drop_fact, ins))
        return super().follow(eq, ins)

    def apply(self, eq: Operation, ins: list[Reach]) -> list[Reach]:
        """Derives facts about the results of an equation that is no call, loop or conditional."""
        name = eq.name
        if name == "select_n" and self.is_shown and not (ins[0].known | (ins[0].last >= 0)).all():
            return self._worked(eq, ins, self._shown)
        if name == "sort" and len(ins) == 1:
            return self._worked(eq, ins, self._sort)
        return self._worked(eq, ins, apply)

    def _shown(self, eqn: Eqn, ins: list[Reach]) -> list[Reach]:
        return [reach.at_most(apply(eqn, ins)[0], [together(x) for x in ins])]

    def _sort(self, eqn: Eqn, ins: list[Reach]) -> Any:
        choices = of_sorted(ins[0], eqn.params["dimension"], self.is_forward)
        return [choices] if choices else apply(eqn, ins)

    def _worked(self, eq: Operation, ins: list[Reach], how: Callable[..., Any]) -> list[Reach]:
        """Applies the rule `how`. Notes where values first depend on more than `seen` (_fits)."""

        def work(ins: list[Reach]) -> list[Reach]:
            results = zip(how(eq.eqn, ins), eq.eqn.outvars, strict=False)
            return [self._drop_overflow(reach.sized(x, ins), var) for x, var in results]

        found = reach.in_each_way(work, ins)
        came = next((x.why for x in ins if x.why), None)
        for x, var in zip(found, eq.eqn.outvars, strict=True):
            assert x.shape == shape_of(var), (eq.name, x.shape, var.aval)
            x.why = x.why or came
            parts = range(0, len(self.seen), self.rows)
            if (x.last < 0).all() or any(
                _fits(x.last, self.seen[i : i + self.rows]) for i in parts
            ):
                x.why = None
            elif not x.why and (place := eq.place()) != "?":
                x.why = place, eq.name, x.blurred
        if self.named[TARGETS]:
            self._meet(eq, ins, found, how)
        return found

    def _loss_gets(self, eq: Operation, x: Reach, name: str) -> Reach:
        """Returns logits or targets as the loss gets them: dependent only on their own positions.

        The tokens of targets get numbers beyond those of logits, in reverse order, so that the
        largest number, which facts keep, is that of the first target, which `_meet` needs.
        """
        rows, count = x.shape[:2]
        size, length = (self.seen.size, self.seen.shape[1])
        done = sum(part.x.shape[1] for part in self.named[name])
        group, at = divmod(done, length)
        row = group % max(1, len(self.seen) // rows)
        number = (row * rows + np.arange(rows)[:, None]) * length + at + np.arange(count)
        if name == TARGETS and self.is_forward:
            last = _last_of_positions(x)
            is_own = (last >= number) & (last // length == number // length)
            shift = np.where(is_own, last - number, 0)
            # A constant target, past the end, is taken to be as far ahead as others of its head.
            number = number + np.where(last < 0, shift.max(1, keepdims=True), shift)
        elif group and self.named[TARGETS]:  # not of the first head, which is sampled
            parts = [part.predicted for part in self.named[TARGETS]]
            of_targets = np.concatenate(parts, 1)[:, done : done + count]
            number = of_targets if of_targets.shape == number.shape else number
        calls = eq.calls()
        of_step = [*itertools.takewhile(lambda call: call[0] == calls[0][0], calls)]
        where = place(*of_step[-1]) if of_step else "?"
        self.named[name].append(Part(x, number, where))
        if not self.is_forward:
            return reach.ordinary(reach.unknown(x.shape, x.number.dtype))
        if name == LOGITS:
            self.seen = tokens(*self.seen.shape)
        number = np.minimum(number, (row * rows + np.arange(rows)[:, None] + 1) * length - 1)
        number = number if name == LOGITS else 2 * size - 1 - number
        number = number.reshape(rows, count, *[1] * (len(x.shape) - 2))
        return reach.ordinary(reach.unknown(x.shape, x.number.dtype, number))

    def _meet(
        self, eq: Operation, ins: list[Reach], found: list[Reach], how: Callable[..., Any]
    ) -> None:
        """Records the first operation that combines a target with logits that may depend on it."""
        size = self.seen.size
        length = self.seen.shape[1]
        parts = (0, size), (size, 2 * size)
        if self.problem or not all(any(_reads(x, *part).any() for x in ins) for part in parts):
            return
        pairs = (how(eq.eqn, [_keep_reads(x, *part) for x in ins]) for part in parts)
        for x, of_logits, of_targets in zip(found, *pairs, strict=True):
            target = np.where(of_targets.last < 0, size, 2 * size - 1 - of_targets.last)
            logits, target = np.broadcast_arrays(of_logits.last, target)
            for at in np.argwhere(logits > target)[:1]:
                (row, read), (of, position) = (
                    divmod(int(a[tuple(at)]), length) for a in (logits, target)
                )
                why = (x.why for x in ins if x.why and x.last.max() < size)
                place, name, _ = next(why, (eq.place(), eq.name, False))
                which = f"position {read}" if row == of else "another sequence"
                self.problem = (
                    f"{place}: {name}: the target of position {position} meets the logits of "
                    f"{which}"
                )
            x.last = np.where((logits >= 0) & (target < size), MET, x.last)

    def _drop_overflow(self, x: Reach, var: Atom) -> Reach:
        """Drops the known numbers of a value whose dtype cannot hold those of longer sequences.

        In longer sequences, the value would have more different numbers than the dtype can hold.
        """
        if (
            self.growth == 1
            or x.number.size == 1
            or x.number.dtype.kind not in "iuf"
            or not x.known.any()
        ):
            return x
        dtype = var.aval.dtype
        bits = 8 * dtype.itemsize if x.number.dtype.kind in "iu" else jnp.finfo(dtype).nmant + 1
        for count in (lambda: x.number.size, lambda: len(np.unique(x.number))):
            if count() ** self.growth <= 2.0**bits:
                return x
        number = reach.bounds(x) if x.number.dtype.kind == "f" else x.number
        found = reach.make_reach(x.shape, number, False, x.last)
        return dataclasses.replace(found, fact=x.fact if is_in(x) else None)

    # ---- loops and choices

    def scan(
        self, eq: Operation, fixed: list[Reach], carry: list[Reach], xs: list[Reach]
    ) -> list[Reach]:
        """Interprets a scan iteration by iteration."""
        body, length = eq.params["jaxpr"], eq.params["length"]
        carried = len(carry)
        rows: list[list[Reach]] = []
        known: dict[bytes, list[Reach]] = {}
        _, used = dce_jaxpr(body.jaxpr, [True] * len(eq.eqn.outvars))
        # Not, for example, the index of a layer, which most models do not read.
        reads = split_scan(eq.eqn, used)[2]
        for turn in range(length)[:: -1 if eq.params["reverse"] else 1]:
            args = [
                *fixed,
                *carry,
                *(_row(x, turn if read else 0) for x, read in zip(xs, reads, strict=True)),
            ]
            key = _digest(args)
            if key not in known:
                known[key] = list(map(_drop_fact, interpret(body, self, args, eq)))
            carry, out = known[key][:carried], known[key][carried:]
            rows.append(out)
        rows = rows[:: -1 if eq.params["reverse"] else 1]
        return [
            *carry,
            *(
                _stacked([row[i] for row in rows], var)
                for i, var in enumerate(eq.eqn.outvars[carried:])
            ),
        ]

    def loop(
        self, eq: Operation, of_test: list[Reach], of_body: list[Reach], carry: list[Reach]
    ) -> list[Reach]:
        """Interprets a while loop iteration by iteration, as long as its condition is known."""
        ins = [*of_test, *of_body, *carry]
        for _ in range(TURNS):
            (go,) = interpret(eq.params["cond_jaxpr"], self, [*of_test, *carry], eq)
            if go.ways:
                return reach.in_each_way(functools.partial(self.follow, eq), ins)
            if not go.is_known:
                break
            if not go.number.item():
                return carry
            turn = interpret(eq.params["body_jaxpr"], self, [*of_body, *carry], eq)
            carry = list(map(_drop_fact, turn))
        # The number of iterations is not known, and may depend on tokens.
        return self._worked(eq, ins, anything)

    def branch(self, eq: Operation, which: Reach, args: list[Reach]) -> list[Reach]:
        """Interprets the branch taken; if it is unknown, results may depend on all operands."""
        branches = eq.params["branches"]
        if which.ways:
            return reach.in_each_way(functools.partial(self.follow, eq), [which, *args])
        if which.is_known:
            taken = int(np.clip(which.number.item(), 0, len(branches) - 1))
            return interpret(branches[taken], self, args, eq)
        return self._worked(eq, [which, *args], anything)


def _reads(x: Reach, start: int, end: int) -> np.ndarray:
    """Returns True at entries whose last token is in range(start, end)."""
    return (start <= x.last) & (x.last < end)


def _keep_reads(x: Reach, start: int, end: int) -> Reach:
    """Drops the dependence of a value on tokens outside of range(start, end)."""

    def kept(last: np.ndarray) -> np.ndarray:
        return np.where((start <= last) & (last < end), last, NONE)

    fact = x.fact._replace(chosen=kept(x.fact.chosen)) if is_in(x) else x.fact
    return dataclasses.replace(x, last=kept(x.last), fact=fact, ways=None)


def _fits(last: np.ndarray, seen: np.ndarray) -> bool:
    """Returns True if some dims are those of `seen`, and no entry depends on a later token."""

    def fits(upper: np.ndarray, *dims: int) -> bool:
        """Returns True if no entry is above `upper`, whose dims are `dims` of `last`."""
        shape = [n if i in dims else 1 for i, n in enumerate(last.shape)]
        return not (last > upper.reshape(shape)).any()

    def find_dims(size: int) -> list[int]:
        return [i for i, n in enumerate(last.shape) if n == size]

    if any(fits(seen.ravel(), i) for i in find_dims(seen.size)):
        return True
    for batch, i in itertools.product(*map(find_dims, seen.shape)):
        if batch != i and fits(seen if batch < i else seen.T, batch, i):
            return True
        for j in find_dims(seen.shape[1]):  # a query and a key
            if len({i, j, batch}) == 3 and i < j:
                # A later sum over keys shows tokens of other documents, if there are any.
                most = np.maximum.accumulate(seen, axis=1)
                both = np.maximum(most[:, :, None], most[:, None])
                both = np.moveaxis(both, 0, (batch > i) + (batch > j))
                if fits(both, batch, i, j):
                    return True
    return False


def _region_rule(label: str) -> tuple[Callable, int] | None:
    """Returns the rule of a shardop whose code is marked as per-device, and its operand count.

    Returns None for another label. These ops treat each row separately.
    """
    if label.startswith("products of rows by ids"):
        return _products_of_rows, 3
    return (_sums_of_rows, 2) if " are added by their ids" in label else None


def _in_region(rule: tuple[Callable, int], eqn: Eqn, ins: list[Reach]) -> list[Reach]:
    """Applies a result of `_region_rule`. In gradients, JAX passes constants after the operands."""
    of_operands, count = rule
    if any((x.last >= 0).any() for x in ins[count:]):
        return anything(eqn, ins)
    return [of_operands(eqn, *ins[:count]) or anything(eqn, ins)[0]]


def _products_of_rows(eqn: Eqn, rows: Reach, ids: Reach, matrices: Reach) -> Reach:
    if (is_in(rows) or is_in(ids)) and not have_same_slots(rows, ids):
        rows, ids = together(rows), together(ids)
    last = np.maximum(rows.over([len(rows.shape) - 1]), ids.last[..., None])
    found = reach.unknown(
        eqn.outvars[0].aval.shape, rows.number.dtype, np.maximum(last, reach.of_all([matrices]))
    )
    return dataclasses.replace(found, fact=rows.fact._replace(chosen=last) if is_in(rows) else None)


def _sums_of_rows(eqn: Eqn, rows: Reach, ids: Reach) -> Reach | None:
    shape = eqn.outvars[0].aval.shape
    count = len(rows.shape)
    of_ids = len(ids.shape)
    dim = len(shape) - 1 - (count - of_ids)
    at = {i: i for i in range(dim)} | {of_ids + i: dim + 1 + i for i in range(count - of_ids)}
    if not ids.is_known or (is_in(rows) and not have_same_slots(rows, ids)):
        return None
    return rows_added(
        reach.unknown(shape, rows.number.dtype), dim, ids, {i: i for i in range(of_ids)}, rows, at
    )


def _drop_fact(x: Reach) -> Reach:
    """Drops the facts that relate the entries of a value to each other: Among, Sums or Slots."""
    return dataclasses.replace(together(x), fact=None) if x.fact else x


def _row(x: Reach, at: int) -> Reach:
    return reach.entries_of(x, 0, at, at + 1).moved(lambda a: a.squeeze(0), x.shape[1:])


def _stacked(rows: list[Reach], var: Atom) -> Reach:
    if not rows:
        return reach.constant(np.zeros(var.aval.shape))
    if all(row is rows[0] for row in rows):
        return rows[0].moved(lambda a: a[None], var.aval.shape)
    return reach.in_each_way(lambda rows: [reach.stacked(rows, 0, var.aval.shape)], rows)[0]


def _digest(args: list[Reach]) -> bytes:
    """Hashes values: equal values have equal hashes."""
    arrays = [a for x in args for value in (x, *(x.ways or ())) for a in value.arrays()]
    form = repr([(x.shape, x.dtype.str) for x in arrays]).encode()
    return hashlib.sha256(b"".join([form, *(x.tobytes() for x in arrays)])).digest()


def operations(program: ClosedJaxpr) -> list[str]:
    """Lists the names of a program's primitives, except FORM, in order and including its calls."""
    return [eqn.primitive.name for eqn in equations_in(program) if eqn.primitive.name not in FORM]
