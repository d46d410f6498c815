"""Check of a traced forward pass: the logits of a position depend on no later token, and on no other document.

It is interpreted over shardlib.proof.reach, at its own sizes, on one device. Token ids and weights are unknown; the
places of positions are known numbers, so that masks are. Where documents begin is known too, in two ways at a time that
differ after a position: what differs before it depends on documents that begin later. See docs/soundness.md.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.extend import core

from shardlib import marks
from shardlib.equations import CALLS, body_of, equations_in, jaxprs_of, scan_counts
from shardlib.proof.elementwise import ELEMENTWISE
from shardlib.proof.equation import Equation
from shardlib.proof.reach import LAST, Reach, constant, dtype_of, entries_of, highest, made, of_all, stacked, unknown
from shardlib.proof.reach_rules import anything, apply, rows_added
from shardlib.proof.reach_slots import is_in, together

LOGITS, TARGETS = "causality: logits", "causality: targets"
"""Names of the values (jax.ad_checkpoint.checkpoint_name) of which it is proved, and of what the loss is to predict."""

FORM = frozenset("broadcast_in_dim convert_element_type copy expand_dims pad reshape slice squeeze".split())  # noqa: SIM905
"""Primitives that JAX adds or leaves out by the sizes of dims."""
MOST_NUMBERS = 2**12
"""Largest number of entries of a constant that is looked through."""
TURNS = 2**16
"""Largest number of passes of a loop that are followed one by one."""


def tokens(batch: int, length: int) -> Reach:
    """The tokens of a batch, [batch, length], each of which depends on itself."""
    number = np.arange(batch * length, dtype=np.int32).reshape(batch, length)
    return unknown((batch, length), np.dtype(np.uint32), number, number)


Values = tuple[Reach, ...]
"""A value, in each of the worlds that an Interpreter follows."""


@dataclasses.dataclass(frozen=True)
class World:
    """What a program may depend on, where documents begin in one way.

    Attributes:
        first: first token that the logits of each position may depend on, [B, L].
        last: last such token.
        until: None; or the last position that must not depend on the documents after it.
    """

    first: np.ndarray
    last: np.ndarray
    until: int | None = None

    @classmethod
    def of_documents(cls, starts: np.ndarray) -> "World":
        """Where documents begin at `starts`, bool[B, L]. The first position of a sequence begins one.

        Entry [b, i] of the tokens is the target of position i, so that its logits may depend on those before it.
        """
        number = np.arange(starts.size).reshape(starts.shape)
        return cls(np.maximum.accumulate(np.where(starts, number, number[:, :1]), axis=1), number - 1)

    @classmethod
    def of_difference(cls, shape: tuple[int, int], until: int) -> "World":
        """Of what differs between two others, whose documents are the same until a position. There token 0 is that."""
        last = np.where(np.arange(shape[1]) <= until, LAST, 2**30)
        return cls(np.full(shape, LAST), np.broadcast_to(last, shape), until)

    def rows(self, start: int, stop: int) -> "World":
        """Of some sequences."""
        return World(self.first[start:stop], self.last[start:stop], self.until)


def find_later(
    program: Any, args: list[Values], worlds: list[World], rows: int, beyond: frozenset[int] = frozenset()
) -> tuple[str | None, list[int]]:
    """Where the logits of a position come to depend on what the position must not see; None: nowhere.

    Also the numbers among `beyond` that positions meet.

    Args:
        program: a closed jaxpr, whose first result are the logits [B, L, V], or in which they have the name LOGITS, and
            their targets [B, L] TARGETS.
        args: of its arguments, what is known in each world.
        worlds: one; or two, and what differs between them.
        rows: sequences of each microbatch, whose logits are named one after the other.
        beyond: numbers that positions reach in longer sequences only. What positions and these make is not known.
    """
    interpreter = Interpreter(worlds, rows, beyond)
    result = interpreter.run(program, args)[0]
    named = interpreter.named[LOGITS] or [result], interpreter.named[TARGETS]
    for of_targets, found in enumerate(named):
        for i, values in enumerate(found):
            for which, x in enumerate(values):
                if problem := interpreter.problem_of(x, which, i, bool(of_targets)):
                    place, name = ("the loss", "targets") if of_targets else x.why or ("?", "the program")
                    return f"{place}: {name}: {problem}", sorted(interpreter.met)
    return None, sorted(interpreter.met)


def find_met(program: Any, shape: tuple[int, int]) -> str | None:
    """Where a target first meets the logits of a later position, or of another sequence; None: nowhere.

    Args:
        program: a closed jaxpr of logits [B, L, V], targets [B, L], and values that count for neither.
        shape: B and L.
    """
    size, number = np.prod(shape), np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    # Of what depends on logits and on targets, the last of the logits and the first of the targets are kept.
    tokens = [(size - 1 - number)[..., None], 2 * size - 1 - number]
    args = [unknown(var.aval.shape, dtype_of(var.aval)) for var in body_of(program)[0].invars]
    args[:2] = [unknown(x.shape, x.number.dtype, a, a) for x, a in zip(args, tokens, strict=False)]
    interpreter = Meetings(shape)
    interpreter.run(program, [(x,) for x in args])
    return interpreter.problem


class Interpreter:
    """What is known of the results of a program, from what is known of its arguments, in each of several worlds.

    Attributes:
        named: the values that have a name, LOGITS or TARGETS, in their order.
        met: numbers among `beyond` that positions met.
    """

    def __init__(self, worlds: list[World], rows: int | None = None, beyond: frozenset[int] = frozenset()):
        self.worlds, self.rows, self.beyond = worlds, rows or len(worlds[0].first), beyond
        self.met: set[int] = set()
        self.named: dict[str, list[Values]] = {LOGITS: [], TARGETS: []}
        self._entered = ""

    def problem_of(self, x: Reach, which: int, microbatch: int = 0, of_targets: bool = False) -> str | None:
        """What the logits of a position see that they must not see; or a target that they may; None: nothing."""
        world, rows = self.worlds[which], self.rows
        length, at = world.first.shape[1], microbatch * rows % len(world.first)
        world, lead = world.rows(at, at + rows), lambda x: x.reshape((*x.shape[:2], -1))
        first, last = lead(x.first).min(-1), lead(x.last).max(-1)
        first, last = (np.broadcast_to(a, world.first.shape) for a in (first, last))
        has = last >= 0
        if of_targets:
            wrong = has & (first <= world.last) & (world.until is None)
            row, position = (int(i) for i in np.argwhere(wrong)[0]) if wrong.any() else (0, 0)
            read = int(first[row, position]) % length
            return (
                f"position {position} is to predict the token of position {read}, which it has read"
                if wrong.any()
                else None
            )
        for wrong, token in (((last > world.last) & has, last), ((first < world.first) & has, first)):
            if wrong.any():
                row, position = (int(i) for i in np.argwhere(wrong)[0])
                if world.until is not None:
                    return f"the logits of position {position} depend on where later documents begin"
                of, token = divmod(int(token[row, position]), length)
                if of != row + at:
                    return "the logits of a sequence depend on tokens of another sequence of the batch"
                where = "in an earlier document" if token < position else "that it is to predict, or a later one"
                return f"the logits of position {position} depend on the token of position {token}, {where}"
        return None

    def _is_right(self, x: Reach, which: int) -> bool:
        """Whether a value has its positions along a dim, and entries that depend on nothing that these must not see."""
        parts = range(0, len(self.worlds[which].first), self.rows)
        return x.is_free or any(_fits(x, self.worlds[which].rows(i, i + self.rows)) for i in parts)

    def run(self, jaxpr: Any, args: list[Values], caller: Equation | None = None) -> list[Values]:
        """What is known of the results of a jaxpr, closed or open, that the equation `caller` calls."""
        body, consts = body_of(jaxpr)
        same = lambda x: (constant(x),) * len(self.worlds)
        env = dict(zip([*body.constvars, *body.invars], [*map(same, consts), *args], strict=True))
        read = lambda v: same(np.asarray(v.val)) if isinstance(v, core.Literal) else env[v]
        for eqn in body.eqns:
            results = self._results(Equation(eqn, caller=caller), list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def _results(self, eq: Equation, ins: list[Values]) -> list[Values]:
        name = eq.name
        if name == "name":
            self.named.get(eq.params["name"], []).extend(ins)
            mark = marks.mark_of(eq.eqn)
            self._entered = mark.label if mark and mark.kind == "enters" else self._entered
        if marks.is_region(eq.eqn) and (rule := _region_rule(self._entered)):
            return self._worked(eq, ins, lambda eqn, ins: [rule(eqn, *ins) or anything(eqn, ins)[0]])
        if name in CALLS or name == "shard_map":
            return self.run(eq.params[CALLS.get(name, "jaxpr")], ins, eq)
        if name in ("scan", "while", "cond"):
            ins = [tuple(map(_alone, values)) for values in ins]
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](eq, ins)
        return self._worked(eq, ins, apply)

    def _worked(self, eq: Equation, ins: list[Values], how: Callable) -> list[Values]:
        """The results by `how`, in each world, and where the values came to be wrong."""
        found: list[list[Reach]] = []
        for which in range(len(self.worlds)):
            if which and all(x[which] is x[0] for x in ins):
                found.append(found[0])
                continue
            found.append(self._within(eq, [x[which] for x in ins], how(eq.eqn, [x[which] for x in ins])))
        results = [self._settled(values) for values in zip(*found, strict=True)]
        for which in range(len(self.worlds)):
            came = next((x[which].why for x in ins if x[which].why), None)
            for values, var in zip(results, eq.eqn.outvars, strict=True):
                x = values[which]
                assert x.shape == tuple(getattr(var.aval, "shape", ())), (eq.name, x.shape, var.aval)
                if self._is_right(x, which):
                    x.why = None
                elif not (x.why or came) and (place := eq.place()) != "?":
                    x.why = place, eq.name
                else:
                    x.why = x.why or came
        return results

    def _within(self, eq: Equation, ins: list[Reach], found: list[Reach]) -> list[Reach]:
        """The results, but for numbers that positions and what is beyond them make."""
        if not self.beyond or eq.name not in ELEMENTWISE or not any(x.number.size > 1 and x.known.any() for x in ins):
            return found
        numbers = [*self.beyond, *(-x for x in self.beyond)]
        at = [x.known & np.isin(x.number, numbers) for x in ins if x.number.dtype.kind in "iuf"]
        if any(a.any() for a in at):
            self.met.update(int(abs(n)) for x in ins for n in np.unique(x.number) if abs(n) in self.beyond)
            far = functools.reduce(np.logical_or, at)
            return [made(x.shape, x.number, x.known & ~far, x.first, x.last, x.number.dtype) for x in found]
        return found

    @staticmethod
    def _settled(values: Values) -> Values:
        """Values of two worlds, and what differs between them: known numbers that differ, and what these make."""
        if len(values) < 3 or values[2] is values[0]:
            return values
        if any(map(is_in, values)) and not all(map(is_in, values)):
            values = tuple(map(together, values))
        a, b, x = values
        same = a.known & b.known & ((a.number == b.number) | ((a.number != a.number) & (b.number != b.number)))
        is_float = a.number.dtype.kind == "f"
        other = np.maximum(a.number, b.number) if is_float else highest(a.number.dtype)
        last = np.where((a.known | b.known) & ~same, 0, x.last)
        last = last if is_in(x) else np.where(same, LAST, last)
        first = np.full((1,) * len(x.shape), LAST)
        return a, b, Reach(x.shape, np.where(same, a.number, other), same, first, last, x.why, x.fact)

    def _apart(self, eq: Equation, ins: list[Values], how: str) -> list[Values]:
        """The results of a loop or a choice that is another one in each of two worlds: there they differ."""
        found = []
        for which in (0, 1):
            alone = Interpreter([self.worlds[which]], self.rows, self.beyond)
            alone.met = self.met
            found.append([x for (x,) in getattr(alone, how)(eq, [(x[which],) for x in ins])])
        differ = [unknown(x.shape, x.number.dtype, np.int32(0), np.int32(0)) for x in found[0]]
        return [self._settled(values) for values in zip(*found, differ, strict=True)]

    def _anything(self, eq: Equation, ins: list[Values]) -> list[Values]:
        return self._worked(eq, ins, anything)

    # ---- loops and choices

    def _scan(self, eq: Equation, ins: list[Values]) -> list[Values]:
        consts, carried = scan_counts(eq.eqn)
        body, length = eq.params["jaxpr"], eq.params["length"]
        fixed, carry, xs = ins[:consts], ins[consts : consts + carried], ins[consts + carried :]
        rows: list[list[Values]] = []
        known: dict[bytes, list[Values]] = {}
        turns = range(length)[::-1] if eq.params["reverse"] else range(length)
        reads = _reads(body)[consts + carried :]  # such as the number of a layer, which most models do not read
        for turn in turns:
            rows_of = zip(xs, reads, strict=True)
            own = [_each(x, lambda x, at=turn if read else 0: _row(x, at)) for x, read in rows_of]
            args = [*fixed, *carry, *own]
            key = _digest(args)
            if key not in known:
                known[key] = [_each(values, _alone) for values in self.run(body, args, eq)]
            carry, out = known[key][:carried], known[key][carried:]
            rows.append(out)
        rows = rows[:: -1 if eq.params["reverse"] else 1]
        shapes, worlds = [var.aval.shape for var in eq.eqn.outvars[carried:]], range(len(self.worlds))
        of = lambda i, shape: tuple(_stacked([row[i][which] for row in rows], shape) for which in worlds)
        return [*carry, *(of(i, shape) for i, shape in enumerate(shapes))]

    def _while(self, eq: Equation, ins: list[Values]) -> list[Values]:
        p = eq.params
        of_test, of_body = ins[: p["cond_nconsts"]], ins[p["cond_nconsts"] :][: p["body_nconsts"]]
        carry = ins[p["cond_nconsts"] + p["body_nconsts"] :]
        for _ in range(TURNS):
            (go,) = self.run(p["cond_jaxpr"], [*of_test, *carry], eq)
            if not go[-1].is_known:
                if all(x.is_known for x in go[:2]) and len(go) > 2:
                    return self._apart(eq, [*of_test, *of_body, *carry], "_while")
                break
            if not go[0].number.item():
                return carry
            carry = [_each(x, _alone) for x in self.run(p["body_jaxpr"], [*of_body, *carry], eq)]
        return self._anything(eq, ins)  # how often it runs is not known, and may depend on tokens

    def _cond(self, eq: Equation, ins: list[Values]) -> list[Values]:
        which, *args = ins
        branches = eq.params["branches"]
        if which[-1].is_known:
            return self.run(branches[int(np.clip(which[0].number.item(), 0, len(branches) - 1))], args, eq)
        if len(which) > 2 and all(x.is_known for x in which[:2]):
            return self._apart(eq, ins, "_cond")
        return self._anything(eq, ins)


class Meetings(Interpreter):
    """What `find_met` follows. What targets and logits make together may go anywhere."""

    def __init__(self, shape: tuple[int, int]):
        self.size, self.problem = int(np.prod(shape)), None
        own = self.size - 1 - np.arange(self.size).reshape(shape)
        super().__init__([World(own, own)])

    def _worked(self, eq: Equation, ins: list[Values], how: Callable) -> list[Values]:
        found, length = super()._worked(eq, ins, how), self.worlds[0].first.shape[1]
        has_met = lambda x: (x.first < self.size) & (x.last >= self.size)
        if self.problem or any(has_met(x).any() for (x,) in ins):
            return found
        for (x,) in found:
            logits, target = self.size - 1 - x.first, 2 * self.size - 1 - x.last
            wrong = has_met(x) & (logits > target)
            if wrong.any():
                (row, at), (of, target) = (
                    divmod(int(np.broadcast_to(a, wrong.shape)[wrong][0]), length) for a in (logits, target)
                )
                place, name = next((x.why for (x,) in ins if x.why and x.last.max() < self.size), (eq.place(), eq.name))
                which = f"position {at}" if row == of else "another sequence"
                self.problem = f"{place}: {name}: the target of position {target} meets the logits of {which}"
        return found


def _fits(x: Reach, world: World) -> bool:
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


def _each(values: Values, of: Callable) -> Values:
    return tuple(map(of, values))


def _alone(x: Reach) -> Reach:
    """A value without what is known of its entries together."""
    return dataclasses.replace(together(x), fact=None) if x.fact else x


def _row(x: Reach, at: int) -> Reach:
    return entries_of(x, 0, at, at + 1).moved(lambda a: a.squeeze(0), x.shape[1:])


def _stacked(rows: list[Reach], shape: tuple[int, ...]) -> Reach:
    if not rows:
        return constant(np.zeros(shape))
    if all(row is rows[0] for row in rows):
        return rows[0].moved(lambda a: a[None], shape)
    return stacked(rows, 0, shape)


def _digest(args: list[Values]) -> bytes:
    """The same for the same values."""
    arrays = [x for values in args for value in values for x in value.arrays()]
    form = repr([(x.shape, x.dtype.str) for x in arrays]).encode()
    return hashlib.sha256(b"".join([form, *(x.tobytes() for x in arrays)])).digest()


def numbers_of(program: Any) -> frozenset[int]:
    """The whole numbers among the constants of a program, also of what it calls."""
    found = {0}
    for jaxpr in _jaxprs(program):
        body, consts = body_of(jaxpr)
        literals = [v.val for eqn in body.eqns for v in eqn.invars if isinstance(v, core.Literal)]
        for value in (*literals, *consts):
            kind = getattr(getattr(value, "dtype", None), "kind", "")
            if kind in "iuf" and kind and np.size(value) <= MOST_NUMBERS:
                array = np.asarray(value, float)
                found.update(
                    np.abs(array[np.isfinite(array) & (array == np.trunc(array))]).astype(int).ravel().tolist()
                )
    return frozenset(found)


def text_of(program: Any) -> str:
    """The same for the same program, with the same arrays that were made outside of it."""
    consts = [x for jaxpr in _jaxprs(program) for x in body_of(jaxpr)[1]]
    number = lambda x: isinstance(getattr(x, "dtype", None), np.dtype)
    digests = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() if number(x) else id(x) for x in consts]
    return f"{program}{digests}"


def cuts_of(program: Any, length: int) -> dict[int, str]:
    """Where a program cuts dims of `length` entries, and by which line."""
    found = {}
    for eqn in equations_in(program):
        if eqn.primitive.name == "slice":
            bounds = zip(
                eqn.invars[0].aval.shape, eqn.params["start_indices"], eqn.params["limit_indices"], strict=True
            )
            found.update((i, Equation(eqn).place()) for n, *ends in bounds if n == length for i in ends)
    return found


def _jaxprs(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for eqn in body_of(jaxpr)[0].eqns:
        for inner in jaxprs_of(eqn):
            yield from _jaxprs(inner)


def operations(program: Any) -> list[str]:
    """The primitives of a program that compute, in their order, also of what it calls."""
    return [eqn.primitive.name for eqn in equations_in(program) if eqn.primitive.name not in FORM]
