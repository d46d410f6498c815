"""Check of a traced forward pass: the logits of a position depend on no later token, and on no other document.

It is interpreted over shardlib.proof.reach, at its own sizes, on one device. Token ids and weights are unknown; the
places of positions are known numbers, so that masks are. So is where documents begin: in one way, or in two that differ
after a position. What differs before it depends on documents that begin later. See docs/soundness.md.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shardlib import marks
from shardlib.equations import CALLS, body_of, equations_in, scan_counts
from shardlib.proof.equation import Equation
from shardlib.proof.lengths import arrays_in
from shardlib.proof.reach import (
    LATER,
    Reach,
    constant,
    entries_of,
    in_each_way,
    made,
    of_all,
    stacked,
    unknown,
)
from shardlib.proof.reach_moves import rows_added
from shardlib.proof.reach_rules import anything, apply
from shardlib.proof.reach_slots import is_in, together

LOGITS, TARGETS = "causality: logits", "causality: targets"
"""Names of the values (jax.ad_checkpoint.checkpoint_name) of which it is proved, and of what the loss is to predict."""
FORM = frozenset("broadcast_in_dim convert_element_type copy expand_dims pad reshape slice squeeze".split())  # noqa: SIM905
"""Primitives that JAX adds or leaves out by the sizes of dims."""
TURNS = 2**16
"""Largest number of passes of a loop that are followed one by one."""


def tokens(batch: int, length: int) -> Reach:
    """The tokens of a batch, [batch, length], each of which depends on itself."""
    number = np.arange(batch * length, dtype=np.int32).reshape(batch, length)
    return unknown((batch, length), np.dtype(np.uint32), number, number)


class Seen(NamedTuple):
    """The first and the last token that the logits of each position may depend on, [B, L] of both."""

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of_documents(cls, starts: np.ndarray, until: int | None = None) -> "Seen":
        """Where documents begin at `starts`, bool[B, L]. The first position of a sequence begins one.

        Entry [b, i] of the tokens is the target of position i, so that its logits may depend on those before it.
        Positions after `until` may depend on anything, those before it not on LATER.
        """
        number, place = np.arange(starts.size).reshape(starts.shape), np.arange(starts.shape[1])
        first, is_free = (
            np.maximum.accumulate(np.where(starts, number, number[:, :1]), axis=1),
            place > (until or 2**30),
        )
        return cls(np.where(is_free, 0, first), np.where(is_free, LATER, number - 1))

    def rows(self, start: int, stop: int) -> "Seen":
        """Of some sequences."""
        return Seen(self.first[start:stop], self.last[start:stop])


def find_later(program: Any, args: list[Reach], seen: Seen, rows: int, **options: Any) -> str | None:
    """Where the logits of a position come to depend on what the position must not see; None: nowhere.

    Args:
        program: a closed jaxpr, whose first result are the logits [B, L, V], or in which they have the name LOGITS, and
            their targets [B, L] TARGETS: those of a microbatch as a whole, or part by part along L.
        args: what is known of its arguments.
        seen: what the logits of all microbatches may depend on.
        rows: sequences of each microbatch.
        **options: of Interpreter.
    """
    interpreter = Interpreter(seen, rows, **options)
    result = interpreter.run(program, args)[0]
    for name, found in interpreter.named.items():
        parts, row = [], 0
        for x in found or ([result] if name == LOGITS else []):
            parts.append(x)
            if sum(part.shape[1] for part in parts) == seen.first.shape[1]:
                if problem := _problem_of(parts, seen.rows(row, row + rows), row, name == TARGETS):
                    place, of = next((x.why for x in parts if x.why), ("?", "the program"))
                    return f"the loss: targets: {problem}" if name == TARGETS else f"{place}: {of}: {problem}"
                parts, row = [], (row + rows) % len(seen.first)
    return interpreter.problem


def _problem_of(parts: list[Reach], seen: Seen, row: int, of_targets: bool) -> str | None:
    """What the logits of a microbatch see that they must not see; or a target that they may; None: nothing."""
    length, lead = seen.first.shape[1], lambda a: a.reshape(*a.shape[:2], -1)
    first = np.concatenate([np.broadcast_to(lead(x.first).min(-1), x.shape[:2]) for x in parts], 1)
    last = np.concatenate([np.broadcast_to(lead(x.last).max(-1), x.shape[:2]) for x in parts], 1)
    has = last >= 0
    if of_targets:
        for at in np.argwhere(has & (first <= seen.last) & (seen.last < LATER))[:1]:
            read = f"position {at[1]} is to predict the token of position {first[tuple(at)] % length}"
            return f"{read}, which it has read"
        return None
    for wrong, token in ((has & (last > seen.last), last), (has & (first < seen.first), first)):
        for at in np.argwhere(wrong)[:1]:
            (own, position), token = map(int, at), int(token[tuple(at)])
            if token == LATER:
                return f"the logits of position {position} depend on where later documents begin"
            of, token = divmod(token, length)
            if of != row + own:
                return "the logits of a sequence depend on tokens of another sequence of the batch"
            where = "in an earlier document" if token < position else "that it is to predict, or a later one"
            return f"the logits of position {position} depend on the token of position {token}, {where}"
    return None


class Interpreter:
    """What is known of the results of a program, from what is known of its arguments.

    Attributes:
        named: the values that have a name, LOGITS or TARGETS, in their order.
        problem: where a target first meets the logits of a later position, or of another sequence; None: nowhere. What
            logits and targets make together may go anywhere.
    """

    problem: str | None = None

    def __init__(
        self,
        seen: Seen,
        rows: int | None = None,
        unknown: frozenset[int] = frozenset(),
        growth: float = 1.0,
        free: tuple[str, ...] = (),
    ):
        """An interpreter.

        Args:
            seen: what a position may depend on.
            rows: sequences of each microbatch; None: all.
            unknown: ids of literals and arrays of which no number is known.
            growth: n positions stand for n to the power of it.
            free: labels of marks on values that depend on no token, though they are computed of all.
        """
        self.seen, self.rows, self.unknown, self.growth, self.free = (
            seen,
            rows or len(seen.first),
            unknown,
            growth,
            free,
        )
        self.named: dict[str, list[Reach]] = {LOGITS: [], TARGETS: []}
        self._entered = ""

    def run(self, jaxpr: Any, args: list[Reach], caller: Equation | None = None) -> list[Reach]:
        """What is known of the results of a jaxpr, closed or open, that the equation `caller` calls."""
        body, consts = body_of(jaxpr)
        env = dict(zip([*body.constvars, *body.invars], [*map(self._constant, consts, consts), *args], strict=True))
        read = lambda v: self._constant(v.val, v) if isinstance(v, core.Literal) else env[v]
        for eqn in body.eqns:
            results = self._results(Equation(eqn, caller=caller), list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def _constant(self, value: Any, source: Any) -> Reach:
        x = constant(value)
        return made(x.shape, x.number, False) if id(source) in self.unknown else x

    def _results(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        name = eq.name
        if name == "name":
            if (label := eq.params["name"]) in self.named:
                return [self._loss_gets(ins[0], label)]
            mark = marks.mark_of(eq.eqn)
            self._entered = mark.label if mark and mark.kind == "enters" else self._entered
            if (mark.label if mark else label) in self.free:
                return [unknown(x.shape, x.number.dtype) for x in ins]
        if marks.is_region(eq.eqn) and (rule := _region_rule(self._entered)):
            return self._worked(eq, ins, lambda eqn, ins: [rule(eqn, *ins) or anything(eqn, ins)[0]])
        if name in CALLS or name == "shard_map":
            return self.run(eq.params[CALLS.get(name, "jaxpr")], ins, eq)
        if name in ("scan", "while", "cond"):
            ins = list(map(_alone, ins))
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](eq, ins)
        return self._worked(eq, ins, apply)

    def _worked(self, eq: Equation, ins: list[Reach], how: Callable) -> list[Reach]:
        """The results by `how`, and where the values came to be wrong."""
        found = in_each_way(lambda ins: list(map(self._told_apart, how(eq.eqn, ins), eq.eqn.outvars)), ins)
        came = next((x.why for x in ins if x.why), None)
        for x, var in zip(found, eq.eqn.outvars, strict=True):
            assert x.shape == tuple(getattr(var.aval, "shape", ())), (eq.name, x.shape, var.aval)
            x.why = x.why or came
            if self._is_right(x):
                x.why = None
            elif not x.why and (place := eq.place()) != "?":
                x.why = place, eq.name
        if self.named[TARGETS]:
            self._meet(eq, ins, found)
        return found

    def _loss_gets(self, x: Reach, name: str) -> Reach:
        """What a loss knows of logits or targets: which they are, not what they depend on.

        They are numbered from the end, so that of what depends on both `first` is the last of the logits and `last` is
        the first of the targets, which have numbers past those of the logits.
        """
        (rows, count), (size, length) = x.shape[:2], (self.seen.first.size, self.seen.first.shape[1])
        row, at = divmod(sum(part.shape[1] for part in self.named[name]), length)
        self.named[name].append(x)
        number = (row * rows + np.arange(rows)[:, None]) * length + at + np.arange(count)
        number = (size if name == LOGITS else 2 * size) - 1 - number.reshape(rows, count, *[1] * (len(x.shape) - 2))
        if name == LOGITS:
            self.seen = Seen(*[size - 1 - np.arange(size).reshape(-1, length)] * 2)
        return unknown(x.shape, x.number.dtype, number, number)

    def _meet(self, eq: Equation, ins: list[Reach], found: list[Reach]) -> None:
        """Notes where a target first meets logits that may know it."""
        size, length = self.seen.first.size, self.seen.first.shape[1]
        has_met = lambda x: (x.first < size) & (x.last >= size) & (x.last < 2 * size)
        for x in found if not (self.problem or any(has_met(x).any() for x in ins)) else ():
            logits, target = np.broadcast_arrays(size - 1 - x.first, 2 * size - 1 - x.last)
            for at in np.argwhere(has_met(x) & (logits > target))[:1]:
                (row, read), (of, position) = (divmod(int(a[tuple(at)]), length) for a in (logits, target))
                place, name = next((x.why for x in ins if x.why and x.last.max() < size), (eq.place(), eq.name))
                which = f"position {read}" if row == of else "another sequence"
                self.problem = f"{place}: {name}: the target of position {position} meets the logits of {which}"

    def _told_apart(self, x: Reach, var: Any) -> Reach:
        """The value without its numbers, if in longer sequences there are more of them than its dtype has."""
        if self.growth == 1 or x.number.size == 1 or x.number.dtype.kind not in "iuf" or not x.known.any():
            return x
        dtype = var.aval.dtype
        bits = 8 * dtype.itemsize if x.number.dtype.kind in "iu" else jnp.finfo(dtype).nmant + 1
        for count in (lambda: x.number.size, lambda: len(np.unique(x.number))):
            if count() ** self.growth <= 2.0**bits:
                return x
        return made(x.shape, x.number, False, x.first, x.last)

    def _is_right(self, x: Reach) -> bool:
        """Whether a value has its positions along a dim, and entries that depend on nothing that these must not see."""
        parts = range(0, len(self.seen.first), self.rows)
        return x.is_free or any(_fits(x, self.seen.rows(i, i + self.rows)) for i in parts)

    # ---- loops and choices

    def _scan(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        consts, carried = scan_counts(eq.eqn)
        body, length = eq.params["jaxpr"], eq.params["length"]
        fixed, carry, xs = ins[:consts], ins[consts : consts + carried], ins[consts + carried :]
        rows: list[list[Reach]] = []
        known: dict[bytes, tuple] = {}
        reads = _reads(body)[consts + carried :]  # such as the number of a layer, which most models do not read
        for turn in range(length)[:: -1 if eq.params["reverse"] else 1]:
            args = [*fixed, *carry, *(_row(x, turn if read else 0) for x, read in zip(xs, reads, strict=True))]
            key, before = _digest(args), {name: len(found) for name, found in self.named.items()}
            if key not in known:
                results = list(map(_alone, self.run(body, args, eq)))
                known[key] = results, {name: self.named[name][n:] for name, n in before.items()}
            else:
                for name, found in known[key][1].items():
                    self.named[name] += found
            results = known[key][0]
            carry, out = results[:carried], results[carried:]
            rows.append(out)
        rows = rows[:: -1 if eq.params["reverse"] else 1]
        return [*carry, *(_stacked([row[i] for row in rows], var) for i, var in enumerate(eq.eqn.outvars[carried:]))]

    def _while(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        p = eq.params
        of_test, of_body = ins[: p["cond_nconsts"]], ins[p["cond_nconsts"] :][: p["body_nconsts"]]
        carry = ins[p["cond_nconsts"] + p["body_nconsts"] :]
        for _ in range(TURNS):
            (go,) = self.run(p["cond_jaxpr"], [*of_test, *carry], eq)
            if go.ways:
                return in_each_way(lambda ins: self._while(eq, ins), [*of_test, *of_body, *carry])
            if not go.is_known:
                break
            if not go.number.item():
                return carry
            carry = list(map(_alone, self.run(p["body_jaxpr"], [*of_body, *carry], eq)))
        return self._worked(eq, ins, anything)  # how often it runs is not known, and may depend on tokens

    def _cond(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        (which, *args), branches = ins, eq.params["branches"]
        if which.ways:
            return in_each_way(lambda ins: self._cond(eq, ins), ins)
        if which.is_known:
            return self.run(branches[int(np.clip(which.number.item(), 0, len(branches) - 1))], args, eq)
        return self._worked(eq, ins, anything)


def _fits(x: Reach, world: Seen) -> bool:
    """Whether a value has positions along a dim, and entries that depend on nothing that these must not see."""
    shape, (rows, length) = np.broadcast_shapes(x.first.shape, x.last.shape), world.first.shape
    first, last = (np.broadcast_to(a, shape) for a in (x.first, x.last))
    has = last >= 0
    by = lambda a, dims: a.reshape([n if i in dims else 1 for i, n in enumerate(shape)])
    fits = lambda lower, upper: not (has & ((last > upper) | (first < lower))).any()
    at = lambda size: [i for i, n in enumerate(shape) if n == size]
    if any(fits(by(world.first.ravel(), [i]), by(world.last.ravel(), [i])) for i in at(rows * length)):
        return True
    for batch in at(rows):
        places = np.arange(length)
        for i in at(length):
            own = (world.first, world.last) if batch < i else (world.first.T, world.last.T)
            if batch != i and fits(*(by(a, [batch, i]) for a in own)):
                return True
            for j in at(length):  # a query and a key
                if len({i, j, batch}) == 3 and i < j:
                    later = world.last[:, np.maximum.outer(places, places)]
                    later = np.moveaxis(later, 0, sum(dim < batch for dim in (i, j)))
                    if fits(by(world.first[:, 0], [batch]), by(later, [batch, i, j])):
                        return True
    return False


def _region_rule(label: str) -> Callable | None:
    """The rule of ops of shardops that mark code as per-device: each row by itself."""
    if label.startswith("products of rows by ids"):
        return _products_of_rows
    return _sums_of_rows if " are added by their ids" in label else None


def _products_of_rows(eqn: Any, rows: Reach, ids: Reach, matrices: Reach) -> Reach:
    if is_in(rows) != is_in(ids) or (is_in(rows) and rows.fact != ids.fact):
        rows, ids = together(rows), together(ids)
    (first, last), (low, high) = rows.over([len(rows.shape) - 1]), of_all([matrices])
    first, last = np.minimum(first, ids.first[..., None]), np.maximum(last, ids.last[..., None])
    shape = eqn.outvars[0].aval.shape
    found = unknown(shape, rows.number.dtype, np.minimum(first, low), np.maximum(last, high))
    return dataclasses.replace(found, fact=rows.fact if is_in(rows) else None)


def _sums_of_rows(eqn: Any, rows: Reach, ids: Reach) -> Reach | None:
    shape, count, of_ids = eqn.outvars[0].aval.shape, len(rows.shape), len(ids.shape)
    dim = len(shape) - 1 - (count - of_ids)
    at = {i: i for i in range(dim)} | {of_ids + i: dim + 1 + i for i in range(count - of_ids)}
    if not ids.is_known or (is_in(rows) and (not is_in(ids) or rows.fact != ids.fact)):
        return None
    return rows_added(unknown(shape, rows.number.dtype), dim, ids, {i: i for i in range(of_ids)}, rows, at)


def _reads(jaxpr: Any) -> list[bool]:
    """Which arguments of a jaxpr something is computed of, also in what it calls."""
    body, _ = body_of(jaxpr)
    read = {v for v in body.outvars if not isinstance(v, core.Literal)}
    for eqn in body.eqns:
        inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
        of = _reads(inner) if inner else [True] * len(eqn.invars)
        read |= {v for v, is_read in zip(eqn.invars, of, strict=True) if is_read and not isinstance(v, core.Literal)}
    return [v in read for v in body.invars]


def _alone(x: Reach) -> Reach:
    """A value without what is known of its entries together."""
    return dataclasses.replace(together(x), fact=None) if x.fact else x


def _row(x: Reach, at: int) -> Reach:
    return entries_of(x, 0, at, at + 1).moved(lambda a: a.squeeze(0), x.shape[1:])


def _stacked(rows: list[Reach], var: Any) -> Reach:
    if not rows:
        return constant(np.zeros(var.aval.shape))
    if all(row is rows[0] for row in rows):
        return rows[0].moved(lambda a: a[None], var.aval.shape)
    return in_each_way(lambda rows: [stacked(rows, 0, var.aval.shape)], rows)[0]


def _digest(args: list[Reach]) -> bytes:
    """The same for the same values."""
    arrays = [a for x in args for value in (x, *(x.ways or ())) for a in value.arrays()]
    form = repr([(x.shape, x.dtype.str) for x in arrays]).encode()
    return hashlib.sha256(b"".join([form, *(x.tobytes() for x in arrays)])).digest()


def text_of(program: Any) -> str:
    """The same for the same program, with the same arrays that were made outside of it."""
    number = lambda x: isinstance(getattr(x, "dtype", None), np.dtype)
    digests = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() if number(x) else id(x) for x in arrays_in(program)]
    return f"{program}{digests}"


def operations(program: Any) -> list[str]:
    """The primitives of a program that compute, in their order, also of what it calls."""
    return [eqn.primitive.name for eqn in equations_in(program) if eqn.primitive.name not in FORM]
