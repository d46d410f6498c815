"""Compares the collectives of a traced program with those of its optimized HLO: does it communicate as written?

Each array counts on its own, with all its executions in a step, so what XLA merges into one message, starts early or
moves to another loop still matches. What XLA may put in place of a collective is listed in `_INSTEAD`.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from shardwright.inspect.compiled.hlo import Computation, Program, Shape, parse
from shardwright.inspect.compiled.lines import WITHOUT_LINE, Places
from shardwright.inspect.compiled.operations import Message, axes_of, parts_of
from shardwright.inspect.compiled.table import in_bytes
from shardwright.inspect.plan.graph import Graph, Node, Value, graph_of
from shardwright.run.compiling import with_mesh

_KINDS = {
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Opcode of each collective of a plan's graph."""
_SHORT = {"float8_": "f8", "bfloat": "bf", "float": "f", "int": "s", "uint": "u", "complex": "c"}
_EXTREMES = {"pmax": "maximum", "pmin": "minimum"}


MOST = 10
"""Number of differences that are shown."""


class Collective(NamedTuple):
    """A collective of one array.

    Attributes:
        kind: opcode in HLO, such as "all-gather".
        reduction: opcode of its reduction, such as "add"; "" without one.
        groups: ids of the devices that communicate with each other; of a permutation, pairs of source and target.
        dtype: as HLO writes it.
        entries: of the whole array: the result of a gather, the operand of a scatter.
    """

    kind: str
    reduction: str
    groups: frozenset
    dtype: str
    entries: int


class Times(NamedTuple):
    """How often a step executes a collective: as written, and at least, if XLA moves it out of loops or merges equals.

    `most` is infinite in a loop of unknown length.
    """

    least: float
    most: float

    def __add__(self, other: Any) -> "Times":
        return Times(self.least + other.least, self.most + other.most)


Written = dict[Collective, dict[str, Times]]
"""How often a step executes each collective, by source line."""
Compiled = dict[Collective, dict[str, int]]


# ---- as written -----------------------------------------------------------------------------------------------------


def written_in(jaxpr: object, sizes: Mapping[str, int]) -> Written:
    """The collectives of a traced program on a mesh of these sizes."""
    found: Written = collections.defaultdict(lambda: collections.defaultdict(lambda: Times(0, 0)))
    graph = graph_of(jaxpr, sizes)
    for node, times in _nodes(graph, Times(1, 1), dict.fromkeys(graph.ins, 1), set()):
        groups, kind = _groups_of(node, sizes), _KINDS[node.op]
        members = max(map(len, groups))
        if members == 1:
            continue
        for out in node.outs:
            reduction = _EXTREMES.get(node.primitive, "add") if kind in ("all-reduce", "reduce-scatter") else ""
            entries = math.prod(out.shape) * (members if kind == "reduce-scatter" else 1)
            found[Collective(kind, reduction, groups, _dtype(out.dtype), entries)][node.site.line or WITHOUT_LINE] += (
                times
            )
    return found


def _nodes(graph: Graph, times: Times, least: dict[Value, float], before: set[tuple]) -> Iterator[tuple[Node, Times]]:
    """The collectives of a graph and of its loops and branches, and how often each is executed.

    Args:
        graph: the graph.
        times: how often it is executed.
        least: how often each of its inputs changes in a step.
        before: what the collectives before it compute. An equal one needs no execution of its own.
    """
    for node in graph.nodes:
        reads = tuple(x.root for x in node.ins)
        changes = max((least.get(x, 1) for x in reads), default=1)
        least |= dict.fromkeys((x.root for x in node.outs), changes)
        if node.op in _KINDS:
            what = node.primitive, str(node.params)
            same, of_line = (*what, *reads), (*what, node.site.line, *map(str, reads))
            is_known = same in before or (changes < times.least and of_line in before)
            yield node, Times(0 if is_known else changes, times.most)
            before |= {same, of_line}
        for body in node.bodies:
            turns = node.params.get("length", 1)
            inner = Times(times.least * turns, times.most * (math.inf if node.op == "while" else turns))
            fixed, changing = body.ins[: node.carried[0]], body.ins[node.carried[0] :]
            ins = dict.fromkeys(fixed, times.least) | dict.fromkeys(changing, inner.least)
            yield from _nodes(body, inner, ins, before)


def _groups_of(node: Node, sizes: Mapping[str, int]) -> frozenset:
    others = [axis for axis in sizes if axis not in node.axes]
    order = [[*sizes].index(axis) for axis in (*others, *node.axes)]
    members = math.prod(sizes[axis] for axis in node.axes)
    ids = np.arange(math.prod(sizes.values())).reshape([*sizes.values()]).transpose(order).reshape(-1, members)
    pairs = node.params.get("perm") if node.op == "ppermute" else None
    parts = pairs or node.params.get("axis_index_groups") or [[*range(members)]]
    return _canonical([[row[i] for i in part] for row in ids for part in parts], _KINDS[node.op])


def _canonical(groups: Any, kind: str) -> frozenset:
    """Groups without an order, in which only the members of an all-reduce have none either."""
    return frozenset((frozenset if kind == "all-reduce" else tuple)(map(int, group)) for group in groups)


def _dtype(dtype: np.dtype) -> str:
    """How HLO writes a dtype."""
    short = re.sub("^(?:float8_|b?float|int|uint|complex)", lambda kind: _SHORT[kind[0]], dtype.name)
    return {"bool": "pred"}.get(dtype.name, short)


# ---- as compiled ----------------------------------------------------------------------------------------------------


def compiled_in(program: Program) -> tuple[Compiled, int]:
    """The collectives of an optimized program, and the number of messages in which it sends them."""
    found: Compiled = collections.defaultdict(collections.Counter)
    messages = 0
    for message, line, times in _messages(program, Places(program), program.entry, 1, set()):
        groups = _canonical(message.groups or [range(program.devices)], message.kind)
        members, sizes = max(map(len, groups)), [math.prod(array.dims) for array in message.arrays]
        if message.kind == "all-gather":
            sizes = [size * members for size in sizes]
        elif message.kind == "all-to-all" and len(sizes) == members:
            sizes = [sum(sizes)]  # an operand for each device of a group
        for array, entries in zip(message.arrays, sizes, strict=False):
            collective = Collective(message.kind, message.reduction, groups, array.dtype, entries)
            found[collective][(line or WITHOUT_LINE).removeprefix("~")] += times
        messages += times
    return found, messages


def _messages(
    program: Program, places: Places, computation: Computation, times: int, chains: set[str]
) -> Iterator[tuple[Message, str | None, int]]:
    """The messages of a computation and of its loops and branches, with their lines and executions."""
    for instruction in computation.instructions.values():
        called = [program.computations[name] for name in instruction.called]
        if instruction.opcode == "while":
            yield from _messages(program, places, called[-1], times * (program.turns(instruction) or 1), chains)
        elif instruction.opcode in ("call", "conditional"):
            for inside in called:
                yield from _messages(program, places, inside, times, chains)
        else:
            for _, _, message in parts_of(program, computation, instruction, chains):
                if message:
                    yield message, places.of(computation, instruction).line, times


# ---- the comparison -------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Executions in a step of a collective of a line without a counterpart: written but not compiled, or compiled."""

    line: str
    is_compiled: bool
    collective: Collective
    times: float


class Comparison(NamedTuple):
    """The collectives of a step as written, and as compiled.

    Attributes:
        matched: executions as written that have a counterpart.
        messages: executions as compiled, of which one may send several arrays.
        changed: how many of `matched` the compiler changed, by how.
        differences: those without a counterpart.
    """

    matched: float
    messages: int
    changed: Mapping[str, float]
    differences: list[Difference]


def compare(written: Written, compiled: Compiled, messages: int, platform: str) -> Comparison:
    """Finds a compiled collective for each written one, and the other way around. `platform`: cpu, gpu or tpu."""
    need = {what: sum(lines.values(), Times(0, 0)) for what, lines in written.items()}
    have = {what: sum(lines.values()) for what, lines in compiled.items()}
    changed: collections.Counter[str] = collections.Counter()
    for how, (platforms, is_instead) in _INSTEAD.items():
        for what, other in itertools.product(need, [*have] if platform in platforms else ()):
            if is_instead(what, other) and (taken := min(need[what].most, have[other])):
                have[other] -= taken
                need[what] = Times(need[what].least - taken, need[what].most - taken)
                changed[how] += taken
                for moves in (moves for moves in have if how == _PADDED and _is_shift(moves, what, other)):
                    have[moves] -= min(have[moves], taken)
    # What is sent as parts of larger or smaller arrays, such as a stack of the gradients of all layers: as many bytes.
    of_kind = lambda what: what._replace(entries=0)
    for kind in {of_kind(what) for what in need}:
        parts = [what for what in need if of_kind(what) == kind and need[what].most]
        wholes = [what for what in have if of_kind(what) == kind]
        if sum(need[what].most * what.entries for what in parts) == sum(have[what] * what.entries for what in wholes):
            changed["in other pieces"] += sum(need[what].most for what in parts)
            need |= dict.fromkeys(parts, Times(0, 0))
            have |= dict.fromkeys(wholes, 0)
    moved = sum(left.most for left in need.values() if left.least <= 0 < left.most < math.inf)
    changed["moved out of loops or equal to others"] += moved
    matched = sum(changed.values())
    del changed[_AS_WRITTEN]
    differences = [
        *(_differences(False, what, left.most, written, compiled) for what, left in need.items() if left.least > 0),
        *(_differences(True, what, left, written, compiled) for what, left in have.items() if left),
    ]
    return Comparison(matched, messages, +changed, sorted(itertools.chain(*differences)))


_AS_WRITTEN, _PADDED = "as written", "padded"
_Rule = Callable[[Collective, Collective], bool]
_INSTEAD: dict[str, tuple[str, _Rule]] = {
    _AS_WRITTEN: ("cpu gpu tpu", lambda what, other: what == other),
    "in f32 instead of bf16": ("cpu", lambda what, other: what.dtype == "bf16" and other == what._replace(dtype="f32")),
    "in bf16 instead of f32": (  # whose maximum is the same, if they were converted from bf16
        "tpu",
        lambda what, other: what.reduction in _EXTREMES.values() and other == what._replace(dtype="bf16"),
    ),
    "as all-reduce": (
        "tpu",
        lambda what, other: what.kind in ("all-gather", "reduce-scatter") and other == _as_all_reduce(what),
    ),
    _PADDED: (
        "tpu",
        lambda what, other: (
            what.entries < other.entries <= 1.125 * what.entries and other == what._replace(entries=other.entries)
        ),
    ),
}
"""What compilers put in place of a collective: on which platforms, and whether the second one is for the first."""


def _as_all_reduce(what: Collective) -> Collective:
    return what._replace(kind="all-reduce", reduction="add", groups=_canonical(what.groups, "all-reduce"))


def _is_shift(moves: Collective, what: Collective, padded: Collective) -> bool:
    """True if a permutation can be what moves the parts of a padded array to where they belong."""
    within = all(any({*pair} <= {*group} for group in what.groups) for pair in moves.groups)
    is_small = moves.entries < padded.entries - what.entries
    return moves.kind == "collective-permute" and moves.dtype == what.dtype and is_small and within


def _differences(
    is_compiled: bool, what: Collective, left: float, written: Written, compiled: Compiled
) -> Iterator[Difference]:
    """The lines of the executions that are left of a collective: first those with more than the other side has."""
    here = {line: times.most for line, times in written.get(what, {}).items()}
    there: Mapping[str, float] = compiled.get(what, {})
    here, there = (there, here) if is_compiled else (here, there)
    more = {line: times - there.get(line, 0) for line, times in here.items()}
    for line in sorted(more, key=lambda line: -more[line]):
        if taken := min(left, here[line]):
            yield Difference(line, is_compiled, what, taken)
            left -= taken


def compared(jaxpr: object, mesh: Any, text: str) -> tuple[str, list[str]]:
    """Compares a traced program with its optimized HLO text: a summary, and a line for each difference.

    Raises ValueError if the text is not one.
    """
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    program = parse(with_mesh(text, mesh.shape))
    found = compare(written_in(jaxpr, mesh.shape), *compiled_in(program), device.platform)
    sent = f"{found.matched:,.0f} collectives as written, in {found.messages:,} messages"
    summary = ", ".join([sent, *(f"{count:,.0f} {how}" for how, count in found.changed.items())])
    lines = []
    for line, is_compiled, what, times in found.differences:
        size = in_bytes(Shape(what.dtype, (what.entries,)).bytes)
        axes = " ".join(axes_of(what.groups, program)) or "some devices"
        reduction = f" ({what.reduction})" if what.reduction not in ("", "add") else ""
        verdict = "compiled, not written" if is_compiled else "written, not compiled"
        lines.append(f"{line}: {what.kind}{reduction} over {axes}, {what.dtype} {size}, {times:g} × a step: {verdict}")
    return summary, lines


def refuse(lines: list[str]) -> None:
    """Raises ValueError for these differences, if there are any."""
    if lines:
        remedy = "hardware.strict is true: write what is compiled, or set hardware.strict=false to accept it"
        raise ValueError("\n  ".join([*lines[:MOST], f"remedy: {remedy}"]))
