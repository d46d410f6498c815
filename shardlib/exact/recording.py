"""Keeps what a program computes, and runs it again with some of it changed."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlib.exact.machine import UNCHANGED, Machine
from shardlib.exact.values import Exact
from shardlib.interpret import Operation


@dataclasses.dataclass(eq=False)
class Execution:
    """An equation that was run.

    Attributes:
        operation: the equation.
        number: how often it was run before.
        index: number of executions that began before it.
        active: which devices use the results; others run a branch that they do not take.
        ins: operands.
        outs: results.
        bodies: of each run of a jaxpr inside it, the arguments, the results and `active`.
    """

    operation: Operation
    number: int
    index: int
    active: np.ndarray
    ins: list[Any]
    outs: list[Any] = dataclasses.field(default_factory=list)
    bodies: list[tuple[list, list, np.ndarray]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def place(self) -> str:
        """File and line of the user's code."""
        return self.operation.place()

    @functools.cached_property
    def name(self) -> str:
        """The primitive, whether or not its result is typed as the same on all devices."""
        return self.operation.name.removesuffix("_invariant")

    @functools.cached_property
    def key(self) -> Any:
        """The same for executions that may be paired."""
        ranks = tuple(len(var.aval.shape) for var in self.operation.eqn.outvars)
        return self.name, tuple(self.operation.calls()), ranks


class Recorder(Machine):
    """A machine that keeps what it runs.

    Attributes:
        executions: what was run, in the order in which it ended.
        makers: by the id of a value, the innermost execution with that result.
        sources: by the id of another argument of a body, the execution that runs the body, and the
            number of the operand that it is or is a part of.
        arguments: by the id of a jaxpr, the arguments of each run.
        known: results by the ids of an equation and of its operands.
    """

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__(dict(sizes))
        self.executions: list[Execution] = []
        self.makers: dict[int, Execution] = {}
        self.sources: dict[int, tuple[Execution, int]] = {}
        self.arguments: dict[int, list[Sequence]] = collections.defaultdict(list)
        self.known: dict[tuple[int, ...], list] = {}
        self._counts: dict[Any, int] = collections.Counter()
        self._active = np.ones((1,) * self.rank, bool)
        self._open: list[Execution] = []
        self._begun = 0

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """Runs a jaxpr; see Machine."""
        self.arguments[id(program)].append(args)
        if not self._open:
            return super().run(program, args)
        caller = self._open[-1]
        first = len(caller.ins) - len(args)
        for i, x in enumerate(args, start=first):
            if id(x) not in self.makers and all(x is not operand for operand in caller.ins):
                self.sources.setdefault(id(x), (caller, i))
        before = self._active
        if caller.name == "cond":
            branches = caller.operation.params["branches"]
            taken = np.clip(caller.ins[0].value, 0, len(branches) - 1)
            number = next(i for i, branch in enumerate(branches) if branch is program)
            self._active = before & (taken == number)
        results = super().run(program, args)
        caller.bodies.append(([*args], [*results], self._active))
        self._active = before
        return results

    def _equation(self, operation: Operation, ins: list[Any]) -> list[Any]:
        if operation.name in UNCHANGED:
            return ins
        number = self._counts[operation.path]
        self._counts[operation.path] += 1
        execution = Execution(operation, number, self._begun, self._active, [*ins])
        self._begun += 1
        self._open.append(execution)
        outs = super()._equation(operation, ins)
        self._open.pop()
        execution.outs = [*outs]
        self.executions.append(execution)
        for x in outs:
            if all(x is not operand for operand in ins):
                self.makers.setdefault(id(x), execution)
        values = all(isinstance(x, Exact) for x in (*ins, *outs))
        if values and execution.name != "shard_map":  # which notes problems
            self.known[id(operation.eqn), *map(id, ins)] = outs
        return outs


def record(
    program: Any, sizes: Mapping[str, int], args: Sequence[Any]
) -> tuple[Recorder, list[Exact]]:
    """Runs a jaxpr like shardlib.exact.compare.run, and keeps what it computes."""
    machine = Recorder(sizes)
    return machine, machine.run(program, [machine.whole(arg) for arg in args])


Change = Callable[["Rerun", Operation, list], list]
"""Gets the operands of an execution; returns other results."""


class Rerun(Machine):
    """A machine that runs a program again with other results of some executions.

    What does not depend on these is not computed again.

    Attributes:
        work: number of equations that were computed.
    """

    def __init__(self, first: Recorder, changes: Mapping[Execution, Change]):
        super().__init__(first.sizes)
        self.work = 0
        self._first = first
        self._literals = first._literals
        self._changes = {(e.operation.path, e.number): x for e, x in changes.items()}
        self._paths = {path for path, _ in self._changes}
        self._around = {id(caller.eqn) for e in changes for caller in e.operation.callers}
        self._counts: dict[Any, int] = collections.Counter()
        self._runs: dict[int, int] = collections.Counter()

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """Runs a jaxpr; see Machine."""
        number = self._runs[id(program)]
        self._runs[id(program)] += 1
        before = self._first.arguments[id(program)][number : number + 1]
        for old in before:
            args = [b if _is_equal(a, b) else a for a, b in zip(args, old, strict=True)]
        return super().run(program, args)

    def _equation(self, operation: Operation, ins: list[Any]) -> list[Any]:
        if operation.path in self._paths:
            at = operation.path, self._counts[operation.path]
            self._counts[operation.path] += 1
            if at in self._changes:
                return self._changes[at](self, operation, ins)
        known = self._first.known.get((id(operation.eqn), *map(id, ins)))
        if known is not None and id(operation.eqn) not in self._around:
            return known
        return self.compute(operation, ins)

    def compute(self, operation: Operation, ins: list[Any]) -> list[Any]:
        """Runs an equation as it is."""
        self.work += 1
        return super()._equation(operation, ins)


def _is_equal(a: Any, b: Any) -> bool:
    if a is b or not (isinstance(a, Exact) and isinstance(b, Exact)):
        return a is b
    return len(a.parts) == len(b.parts) and all(map(np.array_equal, a.parts, b.parts))
