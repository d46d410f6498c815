"""Compares the collectives of a traced program with those of its optimized HLO: does it communicate as written?

Each array counts on its own, with its executions in a step, so what XLA merges into one message or starts early still
matches. `substitutes` has what compilers may put in place of a collective; nothing else counts as its counterpart.
"""

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwright.inspect.compiled.hlo import Computation, Program, parse
from shardwright.inspect.compiled.lines import Places
from shardwright.inspect.compiled.operations import Collective, axes_of, canonical, messages_of
from shardwright.inspect.operation import OPCODES, WITHOUT_LINE
from shardwright.inspect.plan.graph import Graph, Node, Value, graph_of
from shardwright.inspect.tables import in_bytes
from shardwright.run.compiling import with_mesh

_AS_WRITTEN = "as written"
MOST = 10
"""Number of differences that are shown."""
_EXTREMES = {"pmax": "maximum", "pmin": "minimum"}


class Sent(NamedTuple):
    """A collective of a line, and how often a step executes it: infinite in a loop of unknown length.

    `least` is how often if XLA moves it out of its loop, merges it with an equal one, or leaves it out.
    `again` is True of a compiled one whose computation has already sent the array.
    """

    what: Collective
    line: str
    times: float
    least: float = 0.0
    again: bool = False


def compared(jaxpr: object, mesh: Any, text: str, strict: bool = False) -> tuple[str, list[str]]:
    """Compares a traced program with its optimized HLO text: a summary, and a line for each difference, at most MOST.

    Raises ValueError if the text is not one, or for a difference if `strict`.
    """
    program = parse(with_mesh(text, mesh.shape))
    messages = [*compiled_in(program, program.entry, Places(program), 1, set())]
    compiled = [sent for arrays in messages for sent in arrays]
    changed, differences = compare(
        [*written_in(jaxpr, mesh.shape)], compiled, getattr(mesh, "abstract_mesh", mesh).abstract_device.platform
    )
    summary = [f"{sum(changed.values()):,.0f} collectives as written"]
    summary += [f"{sum(arrays[0].times for arrays in messages):,.0f} messages"]
    summary += [f"{count:,.0f} {how}" for how, count in changed.items() if count and how != _AS_WRITTEN]
    lines = []
    for line, what, times, verdict in differences:
        axes = " ".join(axes_of(what.groups, program))
        kind = f"{what.kind} ({what.reduction})" if what.reduction in _EXTREMES.values() else what.kind
        size = f"{what.dtype} {in_bytes(what.bytes)}"
        lines.append(f"{line}: {kind} over {axes or '?'}, {size}, {times:g} × a step, {verdict}")
    if len(lines) > MOST:
        lines[MOST:] = [f"… and {len(lines) - MOST} more"]
    if strict and lines:
        remedy = "remedy: write what is compiled, or set hardware.strict=false to accept it"
        raise ValueError("\n  ".join([*lines, remedy]))
    return ", ".join(summary), lines


def written_in(jaxpr: object, sizes: Mapping[str, int]) -> Iterator[Sent]:
    """The collectives of a traced program on a mesh of these sizes."""
    changes: dict[Value, float] = {}  # how often a value changes in a step; once if it is not here
    itself: dict[Value, Value] = {}  # of each result and constant of a loop's body: itself, or what it is equal to
    before: dict[tuple, list[Value]] = {}  # results of an operation; an equal one needs no execution of its own
    fixed: set[Value] = set()  # what depends on no argument, so that a compiler may compute it

    def same_as(x: Value) -> Value:
        while x not in itself and x.of is not None:  # not .root, which has other values before and after a write
            x = x.of
        return itself.get(x, x)

    def walk(graph: Graph, times: float, least: float) -> Iterator[Sent]:
        needed = _needed_in(graph)
        for node in graph.nodes:
            reads = [*map(same_as, node.ins)]
            if fixed.issuperset(reads) and not node.bodies and node.op != "axis_index":
                fixed.update(node.outs)
            fewest = max((changes.get(x, 1) for x in reads), default=1)
            changes.update((x, fewest) for x in node.outs)
            what_it_computes = (node.primitive, str(node.params), node.literals, *(x.literal or x for x in reads))
            known = node.outs if node.bodies else before.setdefault(what_it_computes, node.outs)
            itself.update(zip(node.outs, known, strict=True))
            if kind := OPCODES.get(node.op):
                groups = _groups_of(node, sizes)
                reduction = _EXTREMES.get(node.primitive, "add") if kind in ("all-reduce", "reduce-scatter") else ""
                for out in node.outs:
                    entries = math.prod(out.shape) * (max(map(len, groups)) if kind == "reduce-scatter" else 1)
                    what = Collective(kind, reduction, groups, _dtype(out.dtype), entries)
                    is_sent = known is node.outs and out not in fixed and out.root in needed
                    yield Sent(what, node.site.line or WITHOUT_LINE, times, fewest if is_sent else 0)
            turns: float = node.params.get("length", 1)
            for body in node.bodies:
                changes.update(dict.fromkeys(body.ins, least * turns))
                itself.update((x, same_as(x.outer)) for x in body.ins[: node.carried[0]] if x.outer)
                is_unrolled = node.params.get("unroll", 0) >= turns
                if is_unrolled:  # loops over equal arrays read equal parts
                    stacks = [(x, same_as(x.outer)) for x in body.ins[sum(node.carried) :] if x.outer]
                    itself.update((x, before.setdefault(("part", of), [x])[0]) for x, of in stacks)
                yield from walk(body, times * (math.inf if node.op == "while" else turns), least * turns)
                if is_unrolled:  # and those over the stacks of another loop, what it made
                    made = zip(node.outs[node.carried[1] :], body.outs[node.carried[1] :], strict=True)
                    before.update((("part", same_as(stack)), [same_as(part)]) for stack, part in made)

    yield from walk(graph_of(jaxpr, sizes), 1, 1)


def _needed_in(graph: Graph) -> set[Value]:
    """What its results depend on. JAX keeps all operands of a barrier, of which some have no use."""
    needed = {x.root for x in graph.outs}
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(x.root for x in node.outs):
            needed |= {x.root for x in node.ins}
    return needed


def _groups_of(node: Node, sizes: Mapping[str, int]) -> frozenset:
    order = [[*sizes].index(axis) for axis in (*(axis for axis in sizes if axis not in node.axes), *node.axes)]
    members = math.prod(sizes[axis] for axis in node.axes)
    ids = np.arange(math.prod(sizes.values())).reshape([*sizes.values()]).transpose(order).reshape(-1, members)
    parts = node.params.get("perm") or node.params.get("axis_index_groups") or [[*range(members)]]
    return canonical([[row[i] for i in part] for row in ids for part in parts], OPCODES[node.op])


def _dtype(dtype: np.dtype) -> str:
    """How HLO writes a dtype."""
    short = {"float8_": "f8", "bfloat": "bf", "float": "f", "int": "s", "uint": "u", "complex": "c", "bool": "pred"}
    return re.sub("^(float8_|b?float|u?int|complex|bool)", lambda kind: short[kind[0]], dtype.name)


def compiled_in(
    program: Program, computation: Computation, places: Places, times: int, chains: set[str]
) -> Iterator[list[Sent]]:
    """The messages of a computation that is executed `times`, and of its loops and branches: the arrays of each."""
    sent: set[tuple[Collective, str]] = set()
    for instruction in computation.instructions.values():
        if instruction.opcode in ("while", "call", "conditional"):
            is_loop = instruction.opcode == "while"
            turns = (is_loop and program.turns(instruction)) or 1
            for name in instruction.called[-1:] if is_loop else instruction.called:
                yield from compiled_in(program, program.computations[name], places, times * turns, chains)
            continue
        for _, _, message in messages_of(program, computation, instruction, chains):
            line = (places.locate(computation, instruction).line or WITHOUT_LINE).removeprefix("~")
            every = canonical([range(program.devices)], message[0].kind)
            read = instruction.operands
            is_alone = instruction.opcode.startswith(message[0].kind)
            if not is_alone or len(read) != len(message):  # what a fusion sends is not what it reads
                read = [f"{instruction.name} {i}" for i in range(len(message))]
            arrays = [(what._replace(groups=what.groups or every), x) for what, x in zip(message, read, strict=True)]
            yield [Sent(array[0], line, times, again=array in sent) for array in arrays]
            sent.update(arrays)


def substitutes(what: Collective, platform: str) -> Iterator[tuple[str, Collective]]:
    """What may be compiled for a written collective, and how it is changed."""
    yield _AS_WRITTEN, what
    if what.dtype == "u64":  # a random key is two words
        yield _AS_WRITTEN, what._replace(dtype="u32", entries=2 * what.entries)
    if platform == "cpu" and (what.dtype == "bf16" or what.dtype.startswith("f8")):
        wider = "f32" if what.dtype == "bf16" else "f16"
        yield f"in {wider} for {what.dtype}", what._replace(dtype=wider)
    if platform == "tpu" and what.kind in ("all-gather", "reduce-scatter"):
        groups = canonical(what.groups, "all-reduce")
        yield "as all-reduce", what._replace(kind="all-reduce", reduction="add", groups=groups)


Counts = dict[Collective, float]
"""Executions in a step of each collective."""


def compare(
    written: list[Sent], compiled: list[Sent], platform: str
) -> tuple[Mapping[str, float], list[tuple[str, Collective, float, str]]]:
    """Finds a compiled collective for each written one, and the other way around. `platform`: cpu, gpu or tpu.

    Returns how many have a counterpart, by what the compiler changed, and those without one: their line, the
    collective, its executions, and where it is missing.
    """
    changed: dict[str, float] = collections.defaultdict(float)
    without = _totals(written, lambda sent: sent.what)
    unused = _totals(compiled, lambda sent: sent.what)
    known = {*unused}
    ways = [(how, what, other) for what in without for how, other in substitutes(what, platform)]
    may_drop = _may_drop(written)
    repeated = _take_repeated(compiled, unused, ways, may_drop)
    match_equal(without, unused, ways, changed)
    match_resized(without, unused, changed)
    drop_merged(without, unused, may_drop, known, changed)
    for what, times in repeated.items():
        unused[what] += times
    here, there = (_totals(sents, lambda sent: (sent.what, sent.line)) for sents in (written, compiled))
    missing = [(*row, "not compiled") for row in _lines_of(without, here, there)]
    more = [(*row, "not in the source") for row in _lines_of(unused, there, here)]
    return changed, sorted(missing + more, key=lambda row: (row[0], row[3], row[1].entries))


def _may_drop(written: list[Sent]) -> dict[Collective, set[float]]:
    """Numbers of executions that XLA may leave out: each line is moved out of its loop, or equal to another, or not."""
    found = collections.defaultdict[Collective, set[float]](lambda: {0.0})
    for sent in written:
        found[sent.what] |= {dropped + sent.times - sent.least for dropped in found[sent.what]}
    return found


def _take_repeated(
    compiled: list[Sent], unused: Counts, ways: list[tuple], may_drop: dict[Collective, set[float]]
) -> Counts:
    """Takes arrays that are sent again from `unused`, beyond those that are also written as equal.

    An array that is sent again is no counterpart of another array.
    """
    found = _totals([sent for sent in compiled if sent.again], lambda sent: sent.what)
    for what in found:
        equal = sum(max(may_drop[of]) for _, of, other in ways if other == what)
        found[what] = max(0.0, found[what] - equal)
        unused[what] -= found[what]
    return found


def match_equal(without: Counts, unused: Counts, ways: list[tuple], changed: dict[str, float]) -> None:
    """Matches collectives with equal ones, then with their substitutes."""
    for how, what, other in sorted(ways, key=lambda way: way[0] != _AS_WRITTEN):
        if taken := min(without[what], unused[other]):
            without[what] -= taken
            unused[other] -= taken
            changed[how] += taken


def match_resized(without: Counts, unused: Counts, changed: dict[str, float]) -> None:
    """Matches what is sent in larger or smaller pieces, as a stack of the gradients of all layers: as many bytes."""
    for kind in {what._replace(entries=0) for what in without}:
        sent, received = ([what for what in counts if what._replace(entries=0) == kind] for counts in (without, unused))
        if sum(without[x] * x.entries for x in sent) == sum(unused[x] * x.entries for x in received):
            changed["in other pieces"] += sum(without[x] for x in sent)
            without |= dict.fromkeys(sent, 0.0)
            unused |= dict.fromkeys(received, 0.0)


def drop_merged(
    without: Counts,
    unused: Counts,
    may_drop: dict[Collective, set[float]],
    known: set[Collective],
    changed: dict[str, float],
) -> None:
    """Drops what XLA may have left out, and loops of unknown length if they are compiled at all."""
    for what, left in without.items():
        if left < math.inf:
            dropped = min((x for x in may_drop[what] if x >= left), default=max(may_drop[what]))
            changed["merged"] += min(dropped, left)
            without[what] = max(0.0, left - dropped)
            unused[what] += max(0.0, dropped - left)
        elif what in known:
            without[what] = 0.0


def _totals(sents: list[Sent], key: Callable) -> dict[Any, float]:
    """The executions of all with the same key."""
    found: dict[Any, float] = collections.defaultdict(float)
    for sent in sents:
        found[key(sent)] += sent.times
    return found


def _lines_of(left: dict[Collective, float], here: dict, there: dict) -> Iterator[tuple[str, Collective, float]]:
    """The lines of the executions that are left: of each collective first those that have more here than there."""
    for what, line in sorted(here, key=lambda at: there.get(at, 0.0) - here[at]):
        if taken := min(left[what], here[what, line]):
            yield line, what, taken
            left[what] -= taken
