"""Check of a traced forward pass: the logits of a position depend on no later token, and on no other document.

It is interpreted over shardlib.proof.reach, at its own sizes, on one device. Token ids and weights are unknown; the
places of positions and documents are known numbers, so that masks are. See docs/soundness.md.
"""

import hashlib
from typing import Any

import numpy as np
from jax.extend import core

from shardlib.equations import CALLS, body_of, equations_in, scan_counts
from shardlib.proof.equation import Equation
from shardlib.proof.reach import Reach, constant, entries_of, stacked, unknown
from shardlib.proof.reach_rules import anything, apply

FORM = frozenset("broadcast_in_dim convert_element_type copy expand_dims pad reshape slice squeeze".split())  # noqa: SIM905
"""Primitives that JAX adds or leaves out by the sizes of dims."""
TURNS = 2**16
"""Largest number of passes of a loop that are followed one by one."""


def tokens(batch: int, length: int) -> Reach:
    """The tokens of a batch, [batch, length], each of which depends on itself."""
    number = np.arange(batch * length, dtype=np.int32).reshape(batch, length)
    return unknown((batch, length), np.dtype(np.uint32), number, number)


def find_later(program: Any, args: list[Reach], starts: np.ndarray) -> str | None:
    """Where the logits of a position come to depend on a token that the position must not see; None: nowhere.

    Args:
        program: a closed jaxpr, whose first result are the logits [B, L, V].
        args: of its arguments, what is known.
        starts: bool[B, L], whether a document begins at a position. The first position of a sequence begins one.
            Entry [b, i] of the tokens is the target of position i, so that its logits may depend on those before it.
    """
    interpreter = Interpreter(starts)
    logits = interpreter.run(program, args)[0]
    if (problem := interpreter.problem_of(logits)) is None:
        return None
    place, name = logits.why or ("?", "the program")
    return f"{place}: {name}: {problem}"


class Interpreter:
    """What is known of the results of a program, from what is known of its arguments.

    Attributes:
        last: last token that the logits of each position may depend on, [B, L].
        first: first such token.
    """

    def __init__(self, starts: np.ndarray):
        rows, length = starts.shape
        self.shape = rows, length
        number = np.arange(rows * length).reshape(rows, length)
        self.first = np.maximum.accumulate(np.where(starts, number, number[:, :1]), axis=1)
        self.last = number - 1

    def problem_of(self, logits: Reach) -> str | None:
        """Which token a position sees that it must not see; None if there is none."""
        lead = lambda x: x.reshape((*x.shape[:2], -1))
        first, last = lead(logits.first).min(-1), lead(logits.last).max(-1)
        first, last = (np.broadcast_to(x, self.shape) for x in (first, last))
        has = last >= 0
        for wrong, token in (((last > self.last) & has, last), ((first < self.first) & has, first)):
            if wrong.any():
                row, position = (int(i) for i in np.argwhere(wrong)[0])
                of, at = divmod(int(token[row, position]), self.shape[1])
                if of != row:
                    return "the logits of a sequence depend on tokens of another sequence of the batch"
                where = "in an earlier document" if at < position else "that it is to predict, or a later one"
                return f"the logits of position {position} depend on the token of position {at}, {where}"
        return None

    def _is_right(self, x: Reach) -> bool:
        """Whether a value has its positions along a dim, and entries that depend on nothing that these must not see."""
        if x.is_free:
            return True
        shape, (rows, length) = np.broadcast_shapes(x.first.shape, x.last.shape), self.shape
        first, last = (np.broadcast_to(a, shape) for a in (x.first, x.last))
        has = last >= 0
        by = lambda a, dims: a.reshape([n if i in dims else 1 for i, n in enumerate(shape)])
        fits = lambda lower, upper: not (has & ((last > upper) | (first < lower))).any()
        at = lambda size: [i for i, n in enumerate(shape) if n == size]
        if any(fits(by(self.first.ravel(), [i]), by(self.last.ravel(), [i])) for i in at(rows * length)):
            return True
        for batch in at(rows):
            start, places = np.arange(rows) * length, np.arange(length)
            for i in at(length):
                own = (self.first, self.last) if batch < i else (self.first.T, self.last.T)
                if batch != i and fits(*(by(a, [batch, i]) for a in own)):
                    return True
                for j in at(length):  # a query and a key
                    if len({i, j, batch}) == 3 and i < j:
                        later = np.maximum(by(places, [i]), by(places, [j])) - 1
                        if fits(by(start, [batch]), by(start, [batch]) + later):
                            return True
        return False

    def run(self, jaxpr: Any, args: list[Reach], caller: Equation | None = None) -> list[Reach]:
        """What is known of the results of a jaxpr, closed or open, that the equation `caller` calls."""
        body, consts = body_of(jaxpr)
        env = dict(zip([*body.constvars, *body.invars], [*map(constant, consts), *args], strict=True))
        read = lambda v: constant(np.asarray(v.val)) if isinstance(v, core.Literal) else env[v]
        for eqn in body.eqns:
            results = self._results(Equation(eqn, caller=caller), list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def _results(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        name = eq.name
        if name in CALLS or name == "shard_map":
            return self.run(eq.params[CALLS.get(name, "jaxpr")], ins, eq)
        if name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](eq, ins)
        found = apply(eq.eqn, ins)
        came = next((x.why for x in ins if x.why), None)
        for x, var in zip(found, eq.eqn.outvars, strict=True):
            assert x.shape == tuple(getattr(var.aval, "shape", ())), (name, x.shape, var.aval)
            x.why = None if self._is_right(x) else x.why or came or (eq.place(), name)
        return found

    # ---- loops and choices

    def _scan(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        consts, carried = scan_counts(eq.eqn)
        body, length = eq.params["jaxpr"], eq.params["length"]
        fixed, carry, xs = ins[:consts], ins[consts : consts + carried], ins[consts + carried :]
        rows: list[list[Reach]] = []
        known: dict[bytes, list[Reach]] = {}
        turns = range(length)[::-1] if eq.params["reverse"] else range(length)
        for turn in turns:
            args = [*fixed, *carry, *(_row(x, turn) for x in xs)]
            key = _digest(args)
            if key not in known:
                known[key] = self.run(body, args, eq)
            carry, out = known[key][:carried], known[key][carried:]
            rows.append(out)
        rows = rows[:: -1 if eq.params["reverse"] else 1]
        shapes = [var.aval.shape for var in eq.eqn.outvars[carried:]]
        return [*carry, *(_stacked([row[i] for row in rows], shape) for i, shape in enumerate(shapes))]

    def _while(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        p = eq.params
        of_test, of_body = ins[: p["cond_nconsts"]], ins[p["cond_nconsts"] :][: p["body_nconsts"]]
        carry = ins[p["cond_nconsts"] + p["body_nconsts"] :]
        for _ in range(TURNS):
            (go,) = self.run(p["cond_jaxpr"], [*of_test, *carry], eq)
            if not go.is_known:
                break
            if not go.number.item():
                return carry
            carry = self.run(p["body_jaxpr"], [*of_body, *carry], eq)
        return anything(eq.eqn, ins)  # how often it runs is not known, and may depend on tokens

    def _cond(self, eq: Equation, ins: list[Reach]) -> list[Reach]:
        which, *args = ins
        branches = eq.params["branches"]
        if which.is_known:
            return self.run(branches[int(np.clip(which.number.item(), 0, len(branches) - 1))], args, eq)
        return anything(eq.eqn, ins)


def _row(x: Reach, at: int) -> Reach:
    return entries_of(x, 0, at, at + 1).moved(lambda a: a.squeeze(0), x.shape[1:])


def _stacked(rows: list[Reach], shape: tuple[int, ...]) -> Reach:
    if not rows:
        return constant(np.zeros(shape))
    if all(row is rows[0] for row in rows):
        return rows[0].moved(lambda a: a[None], shape)
    return stacked(rows, 0, shape)


def _digest(values: list[Reach]) -> bytes:
    """The same for the same values."""
    arrays = [x for value in values for x in value.arrays()]
    form = repr([(x.shape, x.dtype.str) for x in arrays]).encode()
    return hashlib.sha256(b"".join([form, *(x.tobytes() for x in arrays)])).digest()


def operations(program: Any) -> list[str]:
    """The primitives of a program that compute, in their order, also of what it calls."""
    return [eqn.primitive.name for eqn in equations_in(program) if eqn.primitive.name not in FORM]
