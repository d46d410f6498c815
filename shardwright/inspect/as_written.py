"""Compares the collectives of a traced program with those of its optimized HLO: does it communicate as written?

Each array counts on its own, with its executions in a step, so what XLA merges into one message or starts early still
matches. `_instead` has what compilers may put in place of a collective; nothing else counts as its counterpart.
"""

import collections
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwright.inspect.by_line import OPCODES
from shardwright.inspect.compiled.hlo import Computation, Program, Shape, parse
from shardwright.inspect.compiled.lines import WITHOUT_LINE, Places
from shardwright.inspect.compiled.operations import Message, axes_of, message_of, works_of
from shardwright.inspect.plan.graph import Graph, Node, Value, graph_of
from shardwright.inspect.tables import in_bytes
from shardwright.run.compiling import with_mesh

_AS_WRITTEN, _PADDED = "as written", "padded"
MOST = 10
"""Number of differences that are shown."""
_EXTREMES = {"pmax": "maximum", "pmin": "minimum"}


class Collective(NamedTuple):
    """A collective of one array, with opcodes and dtype as in HLO; `reduction` is "" for one that reduces nothing.

    `groups` has ids of devices; of a permutation, pairs. `entries` are those of the result of a gather, else operand.
    """

    kind: str
    reduction: str
    groups: frozenset
    dtype: str
    entries: int


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
        size = in_bytes(Shape(what.dtype, (what.entries,)).bytes)
        kind = what.kind + f" ({what.reduction})" * (what.reduction in _EXTREMES.values())
        lines.append(f"{line}: {kind} over {axes or '?'}, {what.dtype} {size}, {times:g} × a step, {verdict}")
    lines[MOST:] = [f"… and {len(lines) - MOST} more"] if lines[MOST:] else []
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
    return _canonical([[row[i] for i in part] for row in ids for part in parts], OPCODES[node.op])


def _canonical(groups: Iterable[Iterable[int]], kind: str) -> frozenset:
    """Groups without an order, in which only the members of an all-reduce have none either."""
    return frozenset((frozenset if kind == "all-reduce" else tuple)(map(int, group)) for group in groups)


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
        works = works_of(program, computation, instruction, chains, message_of)
        for message in (work for work in works if isinstance(work, Message)):
            line = (places.locate(computation, instruction).line or WITHOUT_LINE).removeprefix("~")
            groups = _canonical(message.groups or [range(program.devices)], message.kind)
            members = max(map(len, groups))
            sizes = [math.prod(array.dims) for array in message.arrays]
            if message.kind == "all-to-all" and len(sizes) == members:
                sizes = [sum(sizes)]  # it has an operand for each device of a group
            sizes = [size * members if message.kind == "all-gather" else size for size in sizes]
            kinds = [(message.kind, message.reduction, groups, array.dtype) for array in message.arrays]
            whats = [Collective(*kind, size) for kind, size in zip(kinds, sizes, strict=False)]
            read = instruction.operands
            is_alone = instruction.opcode.startswith(message.kind)
            if not is_alone or len(read) != len(whats):  # what a fusion sends is not what it reads
                read = [f"{instruction.name} {i}" for i in range(len(whats))]
            arrays = [*zip(whats, read, strict=True)]
            yield [Sent(array[0], line, times, again=array in sent) for array in arrays]
            sent.update(arrays)


def _instead(what: Collective, have: Iterable[Collective], platform: str) -> Iterator[tuple[str, Collective]]:
    """What may be compiled for a written collective: how it is changed, and one of those that the program has."""
    yield _AS_WRITTEN, what
    if what.dtype == "u64":  # a random key is two words
        yield _AS_WRITTEN, what._replace(dtype="u32", entries=2 * what.entries)
    if platform == "cpu" and (what.dtype == "bf16" or what.dtype.startswith("f8")):
        wider = "f32" if what.dtype == "bf16" else "f16"
        yield f"in {wider} for {what.dtype}", what._replace(dtype=wider)
    if platform == "tpu" and what.reduction in _EXTREMES.values():  # the same, of what was converted from bf16
        yield "in bf16 instead of f32", what._replace(dtype="bf16")
    if platform == "tpu" and what.kind in ("all-gather", "reduce-scatter"):
        groups = _canonical(what.groups, "all-reduce")
        yield "as all-reduce", what._replace(kind="all-reduce", reduction="add", groups=groups)
        sizes = (other.entries for other in have if 1 < other.entries / what.entries <= 1.125)
        yield from ((_PADDED, what._replace(entries=size)) for size in sizes)


def compare(
    written: list[Sent], compiled: list[Sent], platform: str
) -> tuple[Mapping[str, float], list[tuple[str, Collective, float, str]]]:
    """Finds a compiled collective for each written one, and the other way around. `platform`: cpu, gpu or tpu.

    Returns how many have a counterpart, by what the compiler changed, and those without one: their line, the
    collective, its executions, and where it is missing.
    """
    changed: dict[str, float] = collections.defaultdict(float)
    most, have = _totals(written, lambda sent: sent.what), _totals(compiled, lambda sent: sent.what)
    known = {sent.what for sent in compiled}
    fewer = collections.defaultdict[Collective, set[float]](lambda: {0.0})
    for sent in written:
        fewer[sent.what] |= {less + sent.times - sent.least for less in fewer[sent.what]}
    # An array that is sent again is no counterpart of another array.
    ways = [(how, what, other) for what in most for how, other in _instead(what, [*have], platform)]
    extra = _totals([sent for sent in compiled if sent.again], lambda sent: sent.what)
    for what in extra:  # but for those that are also written as equal
        equal = sum(max(fewer[of]) for _, of, other in ways if other == what)
        extra[what] = max(0.0, extra[what] - equal)
        have[what] -= extra[what]
    for how, what, other in sorted(ways, key=lambda way: way[0] != _AS_WRITTEN):
        if taken := min(most[what], have[other]):
            most[what] -= taken
            have[other] -= taken
            changed[how] += taken
            shift = Collective("collective-permute", "", what.groups, what.dtype, other.entries - what.entries)
            for moves in (moves for moves in have if how == _PADDED and _is_within(moves, shift)):
                have[moves] -= min(have[moves], taken)  # the parts of a padded array go to where they belong
    # What is sent in larger or smaller pieces, such as a stack of the gradients of all layers: as many bytes.
    for kind in {what._replace(entries=0) for what in most}:
        sent, received = ([what for what in counts if what._replace(entries=0) == kind] for counts in (most, have))
        if sum(most[what] * what.entries for what in sent) == sum(have[what] * what.entries for what in received):
            changed["in other pieces"] += sum(most[what] for what in sent)
            most |= dict.fromkeys(sent, 0.0)
            have |= dict.fromkeys(received, 0.0)
    for what, left in most.items():
        if left < math.inf:  # each one is moved out of its loop, or equal to another one, or not
            less = min((less for less in fewer[what] if less >= left), default=max(fewer[what]))
            changed["merged"] += min(less, left)
            most[what], have[what] = max(0.0, left - less), have[what] + max(0.0, less - left)
        elif what in known:
            most[what] = 0.0
    for what, times in extra.items():
        have[what] += times
    here, there = (_totals(sents, lambda sent: (sent.what, sent.line)) for sents in (written, compiled))
    missing = [(*row, "not compiled") for row in _lines_of(most, here, there)]
    more = [(*row, "not in the source") for row in _lines_of(have, there, here)]
    return changed, sorted(missing + more, key=lambda row: (row[0], row[3], row[1].entries))


def _totals(sents: list[Sent], key: Callable) -> dict[Any, float]:
    """The executions of all with the same key."""
    found: dict[Any, float] = collections.defaultdict(float)
    for sent in sents:
        found[key(sent)] += sent.times
    return found


def _is_within(part: Collective, whole: Collective) -> bool:
    """True if one communicates within the groups of the other, and less."""
    within = all(any({*pair} <= {*group} for group in whole.groups) for pair in part.groups)
    return within and part.entries < whole.entries and part[:2] == whole[:2] and part.dtype == whole.dtype


def _lines_of(left: dict[Collective, float], here: dict, there: dict) -> Iterator[tuple[str, Collective, float]]:
    """The lines of the executions that are left: of each collective first those that have more here than there."""
    for what, line in sorted(here, key=lambda at: there.get(at, 0.0) - here[at]):
        if taken := min(left[what], here[what, line]):
            yield line, what, taken
            left[what] -= taken
