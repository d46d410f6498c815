"""Compares the collectives of a traced program with those of its optimized HLO: does it communicate as written?

Each array counts on its own, with its executions in a step, so what XLA merges into one message or starts early still
matches. `_INSTEAD` has what compilers may put in place of a collective; nothing else counts as its counterpart.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from shardwright.inspect.compiled.hlo import Computation, Program, Shape, parse
from shardwright.inspect.compiled.lines import WITHOUT_LINE, Places
from shardwright.inspect.compiled.operations import Message, axes_of, parts_of
from shardwright.inspect.compiled.table import in_bytes
from shardwright.inspect.plan.graph import Graph, Node, Value, graph_of
from shardwright.run.compiling import with_mesh

MOST = 10
"""Number of differences that are shown."""
_KINDS = {
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Opcode of each collective of a plan's graph."""
_EXTREMES = {"pmax": "maximum", "pmin": "minimum"}
_SHORT = {"float8_": "f8", "bfloat": "bf", "float": "f", "int": "s", "uint": "u", "complex": "c"}


class Collective(NamedTuple):
    """A collective of one array.

    Attributes:
        kind: opcode in HLO, such as "all-gather".
        reduction: opcode of its reduction, such as "add"; "" without one.
        groups: ids of the devices that communicate with each other; for a permutation, pairs of source and target.
        dtype: as HLO writes it.
        entries: of the whole array: the result of a gather, the operand of a scatter.
    """

    kind: str
    reduction: str
    groups: frozenset
    dtype: str
    entries: int


class Sent(NamedTuple):
    """A collective of a source line, and how often a step executes it: as it stands in the program, and at least.

    It is less if XLA moves it out of loops or merges equal ones. `times` is infinite in a loop of unknown length.
    """

    what: Collective
    line: str
    times: float
    least: float = 0.0


def compared(jaxpr: object, mesh: Any, text: str) -> tuple[str, list[str]]:
    """Compares a traced program with its optimized HLO text: a summary, and a line for each difference.

    Raises ValueError if the text is not one.
    """
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    program = parse(with_mesh(text, mesh.shape))
    compiled, messages = compiled_in(program)
    changed, differences = compare([*written_in(jaxpr, mesh.shape)], compiled, device.platform)
    summary = [f"{sum(changed.values()):,.0f} collectives as written, in {messages:,} messages"]
    summary += [f"{count:,.0f} {how}" for how, count in changed.items() if count and how != _AS_WRITTEN]
    lines = []
    for line, what, times, verdict in differences:
        size, axes = in_bytes(Shape(what.dtype, (what.entries,)).bytes), " ".join(axes_of(what.groups, program))
        kind = what.kind + f" ({what.reduction})" * (what.reduction in _EXTREMES.values())
        lines.append(f"{line}: {kind} over {axes or '?'}, {what.dtype} {size}, {times:g} × a step: {verdict}")
    return ", ".join(summary), lines


def refuse(lines: list[str]) -> None:
    """Raises ValueError for these differences, if there are any."""
    if lines:
        remedy = "hardware.strict is true: write what is compiled, or set hardware.strict=false to accept it"
        raise ValueError("\n  ".join([*lines[:MOST], f"remedy: {remedy}"]))


# ---- as written -----------------------------------------------------------------------------------------------------


def written_in(jaxpr: object, sizes: Mapping[str, int]) -> Iterator[Sent]:
    """The collectives of a traced program on a mesh of these sizes."""
    graph = graph_of(jaxpr, sizes)
    for node, times, least in _nodes(graph, 1, 1, dict.fromkeys(graph.ins, 1), set()):
        kind, groups = _KINDS[node.op], _groups_of(node, sizes)
        reduction = _EXTREMES.get(node.primitive, "add") if kind in ("all-reduce", "reduce-scatter") else ""
        whole = max(map(len, groups)) if kind == "reduce-scatter" else 1
        for out in node.outs:
            entries = math.prod(out.shape) * whole
            what = Collective(kind, reduction, groups, _dtype(out.dtype), entries)
            yield Sent(what, node.site.line or WITHOUT_LINE, times, least)


def _nodes(
    graph: Graph, times: float, least: float, changes: dict[Value, float], before: set[tuple]
) -> Iterator[tuple[Node, float, float]]:
    """The collectives of a graph and of its loops and branches, each with `times` and `least` as in Sent.

    `times` and `least` are those of the graph, `changes` is how often each of its inputs changes in a step, and
    `before` is what the collectives before it compute: an equal one needs no execution of its own.
    """
    for node in graph.nodes:
        reads = tuple(x.root for x in node.ins)
        fewest = max((changes.get(x, 1) for x in reads), default=1)
        changes |= dict.fromkeys((x.root for x in node.outs), fewest)
        if node.op in _KINDS:
            what = node.primitive, str(node.params)
            same, of_line = (*what, *reads), (*what, node.site.line, *map(str, reads))
            is_known = same in before or (fewest < least and of_line in before)
            yield node, times, 0 if is_known else fewest
            before |= {same, of_line}
        turns = node.params.get("length", 1)
        for body in node.bodies:
            ins = dict.fromkeys(body.ins, least * turns) | dict.fromkeys(body.ins[: node.carried[0]], least)
            yield from _nodes(body, times * (math.inf if node.op == "while" else turns), least * turns, ins, before)


def _groups_of(node: Node, sizes: Mapping[str, int]) -> frozenset:
    order = [[*sizes].index(axis) for axis in (*(axis for axis in sizes if axis not in node.axes), *node.axes)]
    members = math.prod(sizes[axis] for axis in node.axes)
    ids = np.arange(math.prod(sizes.values())).reshape([*sizes.values()]).transpose(order).reshape(-1, members)
    parts = node.params.get("perm") or node.params.get("axis_index_groups") or [[*range(members)]]
    return _canonical([[row[i] for i in part] for row in ids for part in parts], _KINDS[node.op])


def _canonical(groups: Iterable[Iterable[int]], kind: str) -> frozenset:
    """Groups without an order, in which only the members of an all-reduce have none either."""
    return frozenset((frozenset if kind == "all-reduce" else tuple)(map(int, group)) for group in groups)


def _dtype(dtype: np.dtype) -> str:
    """How HLO writes a dtype."""
    short = re.sub("^(?:float8_|b?float|u?int|complex)", lambda kind: _SHORT[kind[0]], dtype.name)
    return {"bool": "pred"}.get(dtype.name, short)


# ---- as compiled ----------------------------------------------------------------------------------------------------


def compiled_in(program: Program) -> tuple[list[Sent], int]:
    """The collectives of an optimized program, and the number of messages in which it sends them."""
    found, messages = [], 0
    for message, line, times in _messages(program, Places(program), program.entry, 1, set()):
        groups = _canonical(message.groups or [range(program.devices)], message.kind)
        members, sizes = max(map(len, groups)), [math.prod(array.dims) for array in message.arrays]
        if message.kind == "all-to-all" and len(sizes) == members:
            sizes = [sum(sizes)]  # it has an operand for each device of a group
        for array, size in zip(message.arrays, sizes, strict=False):
            entries = size * members if message.kind == "all-gather" else size
            what = Collective(message.kind, message.reduction, groups, array.dtype, entries)
            found.append(Sent(what, (line or WITHOUT_LINE).removeprefix("~"), times))
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

_AS_WRITTEN, _PADDED = "as written", "padded"
_INSTEAD: dict[str, tuple[str, Callable[[Collective, Collective], bool]]] = {
    _AS_WRITTEN: ("cpu gpu tpu", lambda what, other: what == other),
    "in f32 instead of bf16": ("cpu", lambda what, other: what.dtype == "bf16" and other == what._replace(dtype="f32")),
    "in bf16 instead of f32": (  # whose maximum is the same, if they were converted from bf16
        "tpu", lambda what, other: what.reduction in _EXTREMES.values() and other == what._replace(dtype="bf16"),
    ),
    "as all-reduce": (
        "tpu", lambda what, other: what.kind in ("all-gather", "reduce-scatter") and other == what._replace(
            kind="all-reduce", reduction="add", groups=_canonical(what.groups, "all-reduce")
        ),
    ),
    _PADDED: (
        "tpu", lambda what, other: 1 < other.entries / what.entries <= 1.125
        and other == what._replace(entries=other.entries),
    ),
}  # fmt: skip
"""What compilers put in place of a collective: on which platforms, and whether the second one is for the first."""


def compare(
    written: list[Sent], compiled: list[Sent], platform: str
) -> tuple[Mapping[str, float], list[tuple[str, Collective, float, str]]]:
    """Finds a compiled collective for each written one, and the other way around. `platform`: cpu, gpu or tpu.

    Returns how many have a counterpart, by what the compiler changed, and those without one: their line, the
    collective, its executions, and where it is missing.
    """
    changed: dict[str, float] = collections.defaultdict(float)
    most, have = _totals(written, lambda sent: sent.what), _totals(compiled, lambda sent: sent.what)
    known, fewer = {sent.what for sent in compiled}, collections.defaultdict[Collective, set[float]](lambda: {0.0})
    for sent in written:
        fewer[sent.what] |= {less + sent.times - sent.least for less in fewer[sent.what]}
    for how, (platforms, is_instead) in _INSTEAD.items():
        for what, other in itertools.product(most, [*have] if platform in platforms else ()):
            if is_instead(what, other) and (taken := min(most[what], have[other])):
                most[what] -= taken
                have[other] -= taken
                changed[how] += taken
                for moves in (moves for moves in have if how == _PADDED and _is_shift(moves, what, other)):
                    have[moves] -= min(have[moves], taken)
    # What is sent in larger or smaller pieces, such as a stack of the gradients of all layers: as many bytes.
    pieces = lambda counts, kind: [what for what in counts if what._replace(entries=0) == kind]
    total = lambda counts, kind: sum(counts[what] * what.entries for what in pieces(counts, kind))
    for kind in {what._replace(entries=0) for what in most}:
        if total(most, kind) == total(have, kind):
            changed["in other pieces"] += sum(most[what] for what in pieces(most, kind))
            most |= dict.fromkeys(pieces(most, kind), 0.0)
            have |= dict.fromkeys(pieces(have, kind), 0.0)
    for what, left in most.items():
        if left < math.inf:  # each one is moved out of its loop, or equal to another one, or not
            less = min((less for less in fewer[what] if less >= left), default=max(fewer[what]))
            changed["moved out of loops or equal to others"] += min(less, left)
            most[what], have[what] = max(0.0, left - less), have[what] + max(0.0, less - left)
        elif what in known:
            most[what] = 0.0
    here, there = (_totals(sents, lambda sent: (sent.what, sent.line)) for sents in (written, compiled))
    missing = [(*row, "written, not compiled") for row in _lines_of(most, here, there)]
    more = [(*row, "compiled, not written") for row in _lines_of(have, there, here)]
    return changed, sorted(missing + more, key=lambda row: (row[0], row[3], row[1].entries))


def _totals(sents: list[Sent], key: Callable) -> dict[Any, float]:
    """The executions of all with the same key."""
    found: dict[Any, float] = collections.defaultdict(float)
    for sent in sents:
        found[key(sent)] += sent.times
    return found


def _is_shift(moves: Collective, what: Collective, padded: Collective) -> bool:
    """True if a permutation can be what moves the parts of a padded array to where they belong."""
    within = all(any({*pair} <= {*group} for group in what.groups) for pair in moves.groups)
    is_small = moves.entries < padded.entries - what.entries
    return moves.kind == "collective-permute" and moves.dtype == what.dtype and is_small and within


def _lines_of(left: dict[Collective, float], here: dict, there: dict) -> Iterator[tuple[str, Collective, float]]:
    """The lines of the executions that are left: of each collective first those that have more here than there."""
    for what, line in sorted(here, key=lambda at: there.get(at, 0.0) - here[at]):
        if taken := min(left[what], here[what, line]):
            yield line, what, taken
            left[what] -= taken
