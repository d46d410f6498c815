"""Interprets traced programs: the one place that goes through the equations of a jaxpr.

An analysis is a Domain: it defines which facts to keep about a value, and how facts about the
results of an equation follow from facts about its operands. `interpret` goes through a program in
order, and into the bodies of its calls, loops and branches.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shardlib.equations import (
    Eqn,
    body_of,
    called,
    frames_of,
    is_program,
    is_variable,
    jaxprs_of,
    params_of,
    split_scan,
    split_while,
    words,
)
from shardlib.places import is_users, place

V = TypeVar("V")
_JAX = str(Path(jax.__file__).parent)
_NOT_COMPUTED = words("ctx_mesh debug_info origin")
"""Parameters, and parts of them, that say where a function was traced and how a value is named."""
SHOWN = {
    "iota": "arange",
    "add_any": "add",
    "dot_general": "matmul",
    "select_n": "where",
    "convert_element_type": "astype",
}
"""Names that messages use for some primitives."""


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation of a jaxpr, with the equation that calls or runs this jaxpr.

    For example, `Operation(eqn).place()` is `model.py:12`.
    """

    eqn: Any
    caller: "Operation | None" = None

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def shown(self) -> str:
        """The name of the primitive in messages."""
        name = self.name.removesuffix("_p")  # which newer versions of JAX leave out
        return SHOWN.get(name, name.removesuffix("_invariant"))

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        return params_of(self.eqn)

    def body(self, name: str, i: int | None = None) -> Any:
        """Returns the jaxpr in a parameter, or the i-th if it holds several, for `Domain.run`."""
        return self.params[name] if i is None else self.params[name][i]

    @property
    def callers(self) -> list[Any]:
        """The loops, branches and calls around it, outermost first."""
        return [] if self.caller is None else [*self.caller.callers, self.caller]

    @property
    def path(self) -> tuple[int, ...]:
        """The ids of its callers and of its equation, which identify it within its shard_map.

        Callers outside of the shard_map, and the shard_map itself, are left out.
        """
        found = [id(self.eqn)]
        caller = self.caller
        while caller is not None and caller.name != "shard_map":
            found.append(id(caller.eqn))
            caller = caller.caller
        return tuple(found[::-1])

    def place(self) -> str:
        """Returns `file.py:line` of the user's code that made the equation; ? if there is none."""
        found = self.line()
        return place(*found) if found else "?"

    def line(self) -> tuple[str, int] | None:
        """Returns file and line of the user's code that made the equation; None if there is none.

        JAX traces its own jitted functions once, so their equations record only the first call.
        Their line is therefore that of the calling equation.
        """
        found = self.calls()
        return found[-1] if found else None

    def calls(self) -> list[tuple[str, int]]:
        """Returns file and line of each of the user's calls that led to the equation.

        The outermost comes first; see `line`.
        """
        if self.caller is not None and self.caller.is_of_jax():
            return self.caller.calls()
        users = [(file, line) for file, line in frames_of(self.eqn) if is_users(file)]
        return users if users or self.caller is None else self.caller.calls()

    def is_of_jax(self) -> bool:
        """Returns True if the equation calls a jitted function of JAX itself."""
        jaxpr = self.params.get("jaxpr")
        info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
        is_function = self.name in ("jit", "pjit", "call_hi_primitive")
        return is_function and _JAX in str(getattr(info, "func_src_info", ""))


class Domain(Generic[V]):
    """An analysis by abstract interpretation: each value has a fact, of type V.

    Subclasses derive the facts. For example, the number of additions that led to each value:

        class Additions(Domain[int]):
            def constant(self, x): return 0
            def apply(self, op, ins): return [sum(ins) + (op.name == "add")] * len(op.eqn.outvars)

        interpret(jax.make_jaxpr(lambda x: x + x + x)(1.0), Additions(), [0])  # [2]
    """

    def constant(self, x: Any) -> V:
        """Returns the fact about a literal, or about an array that the program holds."""
        raise NotImplementedError

    def apply(self, op: Operation, ins: list[V]) -> list[V]:
        """Derives facts about the results of an equation that is no call, loop or conditional."""
        raise NotImplementedError

    def join(self, op: Operation, a: V, b: V) -> V:
        """Joins two facts: the result holds for a value, computed by `op`, that has either."""
        raise NotImplementedError

    def run(self, program: Any, ins: list[V], op: Operation) -> list[V]:
        """Interprets a jaxpr that an equation runs: a callee, a loop body or a branch."""
        return interpret(program, self, ins, op)

    def follow(self, op: Operation, ins: list[V]) -> list[V]:
        """Derives facts about the results of any equation."""
        if (body := called(op.eqn)) is not None:
            return self.call(op, body, ins)
        if op.name == "scan":
            return self.scan(op, *split_scan(op.eqn, ins))
        if op.name == "while":
            return self.loop(op, *split_while(op.eqn, ins))
        if op.name == "cond":
            return self.branch(op, ins[0], ins[1:])
        return self.apply(op, ins)

    def call(self, op: Operation, body: Any, ins: list[V]) -> list[V]:
        """Interprets the callee of a call."""
        return self.run(body, ins, op)

    def scan(self, op: Operation, consts: list[V], carry: list[V], xs: list[V]) -> list[V]:
        """Finds facts that hold in every iteration of a scan over the rows of `xs`.

        The fact about an array is also used for its rows, and the other way round.
        """

        def turn(carry: list[V]) -> list[V]:
            return self.run(op.body("jaxpr"), [*consts, *carry, *xs], op)

        carry = fixed_point(carry, turn, functools.partial(self.join, op))
        return [*carry, *turn(carry)[len(carry) :]]

    def loop(self, op: Operation, of_test: list[V], of_body: list[V], carry: list[V]) -> list[V]:
        """Finds facts that hold after any number of iterations of a while loop."""

        def turn(carry: list[V]) -> list[V]:
            self.run(op.body("cond_jaxpr"), [*of_test, *carry], op)
            return self.run(op.body("body_jaxpr"), [*of_body, *carry], op)

        return fixed_point(carry, turn, functools.partial(self.join, op))

    def branch(self, op: Operation, which: V, args: list[V]) -> list[V]:
        """Finds facts about the results of a conditional that hold whichever branch runs."""
        count = len(op.params["branches"])
        outs = [self.run(op.body("branches", i), args, op) for i in range(count)]
        join = functools.partial(self.join, op)
        return [functools.reduce(join, found) for found in zip(*outs, strict=True)]


def interpret(
    program: object,
    domain: Domain[V],
    ins: Iterable[V],
    caller: Operation | None = None,
    operations: Iterable[Operation] | None = None,
) -> list[V]:
    """Interprets a program over a domain. Returns the facts about its results.

    Args:
        program: a jaxpr, closed or open.
        domain: the analysis.
        ins: facts about its arguments, or about its constants and its arguments.
        caller: the equation that runs it; None: none does.
        operations: what `domain.follow` gets for each equation; None: an Operation.
    """
    walk = steps(program, domain.constant, ins, caller, operations)
    op, values = next(walk)
    while op is not None:
        op, values = walk.send(domain.follow(op, values))
    return values


def steps(
    program: object,
    constant: Callable[[Any], V],
    ins: Iterable[V],
    caller: Operation | None = None,
    operations: Iterable[Operation] | None = None,
) -> Generator[tuple[Operation | None, list[V]], Iterable[V]]:
    """Goes through a program like `interpret`, as a generator whose caller derives the facts.

    Yields each operation with the facts about its operands, and is sent the facts about its
    results. At the end it yields None and the facts about the results of the program.
    """
    jaxpr, consts = body_of(program)
    ins = [*ins]
    if len(ins) == len(jaxpr.invars):
        ins = [*map(constant, consts), *ins]
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], ins, strict=True))

    def read(variables: Iterable) -> list[V]:
        return [env[var] if is_variable(var) else constant(var) for var in variables]

    if operations is None:
        operations = (Operation(eqn, caller) for eqn in jaxpr.eqns)
    for eqn, op in zip(jaxpr.eqns, operations, strict=True):
        outs = yield op, read(eqn.invars)
        env.update(zip(eqn.outvars, outs, strict=True))
    yield None, read(jaxpr.outvars)


def fixed_point(
    carry: list[V], turn: Callable[[list[V]], Sequence[V]], join: Callable[[V, V], V]
) -> list[V]:
    """Finds facts about carried values that hold before and after every iteration of a loop.

    For example, let a fact be a number, or None for any number, as `join` of two different numbers
    returns. If each iteration adds 1 to a carry that starts as 0, the fact about it is None.

    Args:
        carry: the facts before the first iteration.
        turn: derives the facts after an iteration from those before it.
        join: returns a fact that holds if either of two facts does.

    Raises:
        AssertionError: the facts still change after 4 * len(carry) + 8 iterations.
    """
    for _ in range(4 * len(carry) + 8):
        after = turn(carry)[: len(carry)]
        new = [join(a, b) for a, b in zip(carry, after, strict=True)]
        if new == carry:
            return carry
        carry = new
    raise AssertionError("what is known of the carried values of a loop does not settle")


# ---- the equations of a program ------------------------------------------------------------------


def operations_in(
    program: object, caller: Operation | None = None, inside: bool = True
) -> Iterator[Operation]:
    """Iterates over the equations of a jaxpr, closed or open, in program order.

    Each equation comes before those of the jaxprs in its parameters, which `inside=False` leaves
    out.
    """
    for eqn in body_of(program)[0].eqns:
        op = Operation(eqn, caller)
        yield op
        for inner in jaxprs_of(eqn) if inside else ():
            yield from operations_in(inner, op)


def equations_in(program: object, inside: bool = True) -> Iterator[Any]:
    """Iterates over the equations that `operations_in` yields, without their callers."""
    return (op.eqn for op in operations_in(program, inside=inside))


def needed_for(
    jaxpr: Any,
    variables: Iterable,
    reads: Callable[[Eqn, bool], Iterable | None] = lambda eqn, is_used: (
        eqn.invars if is_used else None
    ),
) -> tuple[list[Any], set]:
    """Finds the equations and variables of an open jaxpr that some of its variables depend on.

    Args:
        jaxpr: the program. Bodies are not looked into.
        variables: some of its variables, and literals.
        reads: gets an equation, and True if one of its results is needed. Returns the operands that
            the equation reads; None if the equation is not needed.

    Returns:
        The equations, in program order, and the variables, among them `variables`.
    """
    used = set(filter(is_variable, variables))
    found = []
    for eqn in reversed(jaxpr.eqns):
        operands = reads(eqn, not used.isdisjoint(eqn.outvars))
        if operands is not None:
            found.append(eqn)
            used |= set(filter(is_variable, operands))
    return found[::-1], used


# ---- as a hash -----------------------------------------------------------------------------------


def digest_of(program: object) -> str:
    """Hashes a program, by its operations, their parameters and constants, to 20 hex digits.

    Source lines and names of values do not matter: lambda x: 2 * x and lambda y: 2 * y have the
    same hash, lambda x: 3 * x has another.
    """
    return _digest_of(program, {})


class _Digest(Domain[str]):
    """Hashes equations, with their values numbered in order. `known` caches hashes of bodies."""

    def __init__(self, known: dict[int, str]):
        self.hash = hashlib.sha256()
        self._known = known
        self._count = 0

    def write(self, *parts: Any) -> None:
        """Adds to the hash."""
        self.hash.update(repr(parts).encode())

    def number(self, var: Any) -> str:
        """Returns the next number, with the type of a new variable."""
        self._count += 1
        return f"{self._count}:{var.aval}"

    def constant(self, x: Any) -> str:
        return f"{in_words(x.val)}:{x.aval}" if hasattr(x, "val") else in_words(x)

    def follow(self, op: Operation, ins: list[str]) -> list[str]:
        own = {name: x for name, x in op.params.items() if name not in _NOT_COMPUTED}
        outs = list(map(self.number, op.eqn.outvars))
        self.write(op.name, in_words(own, self._known), ins, outs)
        return outs


def _digest_of(program: Any, known: dict[int, str]) -> str:
    if found := known.get(id(program)):
        return found
    domain = _Digest(known)
    arguments = list(map(domain.number, body_of(program)[0].invars))
    domain.write(arguments)
    domain.write(interpret(program, domain, arguments))
    return known.setdefault(id(program), domain.hash.hexdigest()[:20])


def in_words(x: Any, known: dict[int, str] | None = None) -> str:
    """Describes a parameter of an equation. Parameters that mean the same have the same text.

    Programs are described by their hash, arrays by a hash of their content, functions without
    addresses. `known` caches hashes of programs.
    """
    if x is None or isinstance(x, int | float | str | np.dtype):
        return repr(x)
    known = {} if known is None else known
    if is_program(x):
        return _digest_of(x, known)
    if isinstance(x, np.ndarray | jax.Array):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        content = np.asarray(jax.random.key_data(x) if is_key else x).tobytes()
        return f"{jax.typeof(x)}:{hashlib.sha256(content).hexdigest()}"
    if isinstance(x, dict):
        return f"{{{', '.join(sorted(f'{key}: {in_words(y, known)}' for key, y in x.items()))}}}"
    if isinstance(x, set | frozenset):
        return f"{{{', '.join(sorted(in_words(part, known) for part in x))}}}"
    if isinstance(x, tuple | list):
        return f"[{', '.join([in_words(part, known) for part in x])}]"
    if dataclasses.is_dataclass(x) and not callable(x):
        names = [field.name for field in dataclasses.fields(x)]
        own = {name: getattr(x, name) for name in names if name not in _NOT_COMPUTED}
        return f"{type(x).__name__}{in_words(own, known)}"
    return re.sub(r"0x[0-9a-f]{6,}", "", repr(x))


# ---- running equations again ---------------------------------------------------------------------


def program_of(eqn: Eqn, operands: Iterable) -> Any:
    """Builds a jaxpr of one equation, whose arguments are the variables `operands`."""
    return _nothing().replace(
        invars=[*operands], outvars=[*eqn.outvars], eqns=[eqn], effects=eqn.effects
    )


@functools.cache
def _nothing() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr


def run_again(eqn: Eqn, ins: list) -> list[jax.Array]:
    """Evaluates an equation on the operands `ins`, with the source line of the equation."""
    operands = {var: value for var, value in zip(eqn.invars, ins, strict=True) if is_variable(var)}
    return core.jaxpr_as_fun(core.ClosedJaxpr(program_of(eqn, operands), []))(*operands.values())


def literal_of(x: Any) -> Any:
    """Returns the number of a literal; returns an array that a jaxpr holds as it is."""
    if isinstance(x, core.Literal):
        aval: Any = x.aval
        return np.asarray(x.val, aval.dtype)
    return x
