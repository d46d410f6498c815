"""Compares the collectives of a traced program with those of its optimized HLO: does it communicate
as written?

Each array counts on its own, with its executions in a step, so what XLA merges into one message or
starts early still matches. `substitutes` has what compilers may put in place of a collective;
nothing else counts as its counterpart.
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
from shardwright.inspect.plan.graph import Graph, Node, graph_of
from shardwright.inspect.tables import in_bytes
from shardwright.program.compiling import with_mesh

_AS_WRITTEN = "as written"
MOST = 10
"""Number of differences that are shown."""
_EXTREMES = {"pmax": "maximum", "pmin": "minimum"}


class Sent(NamedTuple):
    """A collective of a line, and how often a step executes it: infinite in a loop of unknown
    length.
    """

    what: Collective
    line: str
    times: float


def compared(jaxpr: object, mesh: Any, text: str, strict: bool = False) -> tuple[str, list[str]]:
    """Compares a traced program with its optimized HLO text: a summary, and a line for each
    difference, at most MOST.

    Raises ValueError if the text is not one, or for a difference if `strict`.
    """
    program = parse(with_mesh(text, mesh.shape))
    messages = [*compiled_in(program, program.entry, Places(program), 1, set())]
    compiled = [sent for arrays in messages for sent in arrays]
    changed, differences = compare(
        [*written_in(jaxpr, mesh.shape)],
        compiled,
        getattr(mesh, "abstract_mesh", mesh).abstract_device.platform,
    )
    summary = [f"{sum(changed.values()):,.0f} collectives as written"]
    summary += [f"{sum(arrays[0].times for arrays in messages):,.0f} messages"]
    summary += [
        f"{count:,.0f} {how}" for how, count in changed.items() if count and how != _AS_WRITTEN
    ]
    lines = []
    for line, what, times in differences:
        axes = " ".join(axes_of(what.groups, program))
        kind = (
            f"{what.kind} ({what.reduction})" if what.reduction in _EXTREMES.values() else what.kind
        )
        size = f"{what.dtype} {in_bytes(what.bytes)}"
        lines.append(
            f"{line}: {kind} over {axes or '?'}, {size}, {times:g} × a step, not in the source"
        )
    if len(lines) > MOST:
        lines[MOST:] = [f"… and {len(lines) - MOST} more"]
    if strict and lines:
        remedy = "remedy: write what is compiled, or set hardware.strict=false to accept it"
        raise ValueError("\n  ".join([*lines, remedy]))
    return ", ".join(summary), lines


def written_in(jaxpr: object, sizes: Mapping[str, int]) -> Iterator[Sent]:
    """The collectives of a traced program on a mesh of these sizes."""

    def walk(graph: Graph, times: float) -> Iterator[Sent]:
        for node in graph.nodes:
            if kind := OPCODES.get(node.op):
                groups = _groups_of(node, sizes)
                reduction = (
                    _EXTREMES.get(node.primitive, "add")
                    if kind in ("all-reduce", "reduce-scatter")
                    else ""
                )
                for out in node.outs:
                    entries = math.prod(out.shape) * (
                        max(map(len, groups)) if kind == "reduce-scatter" else 1
                    )
                    what = Collective(kind, reduction, groups, _dtype(out.dtype), entries)
                    yield Sent(what, node.site.line or WITHOUT_LINE, times)
            turns = math.inf if node.op == "while" else node.params.get("length", 1)
            for body in node.bodies:
                yield from walk(body, times * turns)

    yield from walk(graph_of(jaxpr, sizes), 1)


def _groups_of(node: Node, sizes: Mapping[str, int]) -> frozenset:
    order = [
        [*sizes].index(axis)
        for axis in (*(axis for axis in sizes if axis not in node.axes), *node.axes)
    ]
    members = math.prod(sizes[axis] for axis in node.axes)
    ids = (
        np.arange(math.prod(sizes.values()))
        .reshape([*sizes.values()])
        .transpose(order)
        .reshape(-1, members)
    )
    parts = node.params.get("perm") or node.params.get("axis_index_groups") or [[*range(members)]]
    return canonical([[row[i] for i in part] for row in ids for part in parts], OPCODES[node.op])


def _dtype(dtype: np.dtype) -> str:
    """How HLO writes a dtype."""
    short = {
        "float8_": "f8",
        "bfloat": "bf",
        "float": "f",
        "int": "s",
        "uint": "u",
        "complex": "c",
        "bool": "pred",
    }
    return re.sub("^(float8_|b?float|u?int|complex|bool)", lambda kind: short[kind[0]], dtype.name)


def compiled_in(
    program: Program, computation: Computation, places: Places, times: int, chains: set[str]
) -> Iterator[list[Sent]]:
    """The messages of a computation that is executed `times`, and of its loops and branches: the
    arrays of each.
    """
    for instruction in computation.instructions.values():
        if instruction.opcode in ("while", "call", "conditional"):
            is_loop = instruction.opcode == "while"
            turns = (is_loop and program.turns(instruction)) or 1
            for name in instruction.called[-1:] if is_loop else instruction.called:
                yield from compiled_in(
                    program, program.computations[name], places, times * turns, chains
                )
            continue
        for _, _, message in messages_of(program, computation, instruction, chains):
            line = (places.locate(computation, instruction).line or WITHOUT_LINE).removeprefix("~")
            every = canonical([range(program.devices)], message[0].kind)
            yield [
                Sent(what._replace(groups=what.groups or every), line, times) for what in message
            ]


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
) -> tuple[Mapping[str, float], list[tuple[str, Collective, float]]]:
    """Finds a written collective for each compiled one. `platform`: cpu, gpu or tpu.

    A compiler may execute a written one less often: it merges equal ones, moves them out of loops
    and drops those whose results have no use. What it adds is a difference.

    Returns how many have a counterpart, by what the compiler changed, and the compiled ones
    without: their line, the collective, and its executions.
    """
    changed: dict[str, float] = collections.defaultdict(float)
    without = _totals(written, lambda sent: sent.what)
    unused = _totals(compiled, lambda sent: sent.what)
    ways = [(how, what, other) for what in without for how, other in substitutes(what, platform)]
    match_equal(without, unused, ways, changed)
    match_resized(without, unused, changed)
    changed["merged"] += sum(left for left in without.values() if left < math.inf)
    here, there = (
        _totals(sents, lambda sent: (sent.what, sent.line)) for sents in (compiled, written)
    )
    return changed, sorted(_lines_of(unused, here, there), key=lambda row: (row[0], row[1].entries))


def match_equal(
    without: Counts, unused: Counts, ways: list[tuple], changed: dict[str, float]
) -> None:
    """Matches collectives with equal ones, then with their substitutes."""
    for how, what, other in sorted(ways, key=lambda way: way[0] != _AS_WRITTEN):
        if taken := min(without[what], unused[other]):
            without[what] -= taken
            unused[other] -= taken
            changed[how] += taken


def match_resized(without: Counts, unused: Counts, changed: dict[str, float]) -> None:
    """Matches what is sent in larger or smaller pieces, as a stack of the gradients of all layers:
    as many bytes.
    """
    for kind in {what._replace(entries=0) for what in without}:
        sent, received = (
            [what for what in counts if what._replace(entries=0) == kind]
            for counts in (without, unused)
        )
        if sum(without[x] * x.entries for x in sent) == sum(
            unused[x] * x.entries for x in received
        ):
            changed["in other pieces"] += sum(without[x] for x in sent)
            without |= dict.fromkeys(sent, 0.0)
            unused |= dict.fromkeys(received, 0.0)


def _totals(sents: list[Sent], key: Callable) -> dict[Any, float]:
    """The executions of all with the same key."""
    found: dict[Any, float] = collections.defaultdict(float)
    for sent in sents:
        found[key(sent)] += sent.times
    return found


def _lines_of(
    left: dict[Collective, float], here: dict, there: dict
) -> Iterator[tuple[str, Collective, float]]:
    """The lines of the executions that are left: of each collective first those that have more here
    than there.
    """
    for what, line in sorted(here, key=lambda at: there.get(at, 0.0) - here[at]):
        if taken := min(left[what], here[what, line]):
            yield line, what, taken
            left[what] -= taken
