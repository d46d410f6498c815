"""Time of the devices by source line, from a trace (jax.profiler.ProfileData) and the HLO text of the traced program.

Where a trace has the operations of a program on the devices:

    /device:TPU:0 …   the line "XLA Ops", within the events of the line "XLA Modules" that are named after the program
    /device:GPU:0 …   lines "Stream #7(…)", one event for each kernel, with the stats hlo_module and hlo_op
    /host:CPU         for CPU devices: on any thread one event for each operation, with the stats hlo_module, hlo_op and
                      device_ordinal
"""

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shardwright.compiled.hlo import Program
from shardwright.compiled.operations import COLLECTIVES, base_opcode, collective
from shardwright.compiled.step import Step
from shardwright.compiled.table import name_of

_CONTAINERS = ("while", "conditional", "call")
UNATTRIBUTED = "without a line"


class Event(NamedTuple):
    """One operation on a device: start and end in ns, and the name of the HLO instruction."""

    start: float
    end: float
    operation: str


def line_times(profile: Any, program: Program, step: Step, source: Mapping[str, str]) -> dict[str, Any]:
    """Time that devices spend on the operations of each source line.

    The time of an operation is its own: without that of the operations within it. A collective's includes the waiting
    for the other devices.

    Args:
        profile: a jax.profiler.ProfileData.
        program: the program that was traced.
        step: what `describe` says of the program.
        source: text of its lines.

    Returns:
        devices      number of devices
        seconds      sum over the devices of the time of all operations
        collective   the share of it that is of collectives
        exposed      the share of it that is of collectives while the device computes nothing
        lines        for each source line, the longest first: line, text, seconds, share, collective and exposed, of
                     which the last three are shares of all time. The line "without a line" has the rest.

    Raises:
        ValueError: the trace has no operation of the program.
    """
    line_of = {name: name_of(line.place) for line, _ in step.body.lines() for name in line.operations}
    spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    devices = _pieces(profile, program)
    for pieces in devices.values():
        computing = _Union((start, end) for start, end, _, kind in pieces if not _communicates(kind))
        for start, end, operation, kind in pieces:
            times = spent[line_of.get(operation, UNATTRIBUTED)]
            times[0] += end - start
            if _communicates(kind):
                times[1] += end - start
                times[2] += end - start - computing.overlap(start, end)
    total = sum(times[0] for times in spent.values())
    if not total:
        raise ValueError(f"the trace has no operation of {program.name}.")
    rows = []
    for line, (own, communicating, exposed) in sorted(spent.items(), key=lambda item: -item[1][0]):
        shares = {"share": own / total, "collective": communicating / total, "exposed": exposed / total}
        rows.append({"line": line, "text": source.get(line.removeprefix("~"), ""), "seconds": own / 1e9, **shares})
    return {
        "devices": len(devices),
        "seconds": total / 1e9,
        "collective": sum(row["collective"] for row in rows),
        "exposed": sum(row["exposed"] for row in rows),
        "lines": rows,
    }


def top_lines(found: Mapping[str, Any], count: int = 10, width: int = 80) -> str:
    """The lines that take longest, for a terminal of `width` columns.

    Args:
        found: what line_times returns, which may come from a file.
        count: number of lines.
        width: number of columns.
    """
    rows = found["lines"][:count]
    longest = max((len(row["line"]) for row in rows), default=0)
    text = ["slowest    source lines, by their share of the time that devices work"]
    if found["collective"]:
        text.append(f"           waits: for data of other devices; {100 * found['exposed']:.1f}% of all that time")
    text.append("  time   waits  line" if found["collective"] else "  time  line")
    for row in rows:
        exposed = f"{100 * row['exposed']:6.1f}%" if row["collective"] else " " * 7
        exposed = f" {exposed}" if found["collective"] else ""
        line = f"{100 * row['share']:5.1f}%{exposed}  {row['line'].ljust(longest)}  {row['text']}".rstrip()
        text.append(line if len(line) <= width else line[: width - 1] + "…")
    return "\n".join(text)


def _pieces(profile: Any, program: Program) -> dict[str, list[tuple[float, float, str, str]]]:
    """By device, the spans in which each operation itself runs: start and end in ns, its name and its opcode."""
    kinds = {i.name: base_opcode(program, i) for i in program.instructions()}
    for computation in program.computations.values():
        for i in computation.instructions.values():
            is_copy = kinds[i.name] in COLLECTIVES and not i.opcode.endswith(("-done", "-update"))
            if is_copy and collective(program, computation, i) is None:  # each device is a group of its own
                kinds[i.name] = "copy"
    found = {}
    for device, lines in _devices(profile, program.name).items():
        pieces = [(*piece, kinds.get(piece[2], "")) for events in lines for piece in _own(events)]
        found[device] = [piece for piece in pieces if piece[3] not in _CONTAINERS]
    return found


def _communicates(opcode: str) -> bool:
    return opcode.removesuffix("-done").removesuffix("-update") in COLLECTIVES or opcode == "async-done"


def _devices(profile: Any, module: str) -> dict[str, list[list[Event]]]:
    """The operations of a program on each device, by stream or thread."""
    found: dict[str, list[list[Event]]] = collections.defaultdict(list)
    for plane in profile.planes:
        if plane.name.startswith("/device:"):
            lines = {line.name: line for line in plane.lines}
            if "XLA Ops" in lines:
                events = [_of_tpu(lines, module)]
            else:
                events = [_of_stream(line, module) for name, line in lines.items() if name.startswith("Stream #")]
            if any(events):
                found[plane.name] = events
        elif plane.name == "/host:CPU":
            for line in plane.lines:
                threads = collections.defaultdict(list)
                for event, stats in _of_module(line, module):
                    if "device_ordinal" in stats:
                        threads[f"CPU:{stats['device_ordinal']}"].append(_event(event, stats["hlo_op"]))
                for device, events in threads.items():
                    found[device].append(events)
    return dict(found)


def _of_module(line: Any, module: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    for event in line.events:
        if not event.name.startswith("$"):  # a Python function
            stats = dict(event.stats)
            if stats.get("hlo_module") == module and "hlo_op" in stats:
                yield event, stats


def _of_stream(line: Any, module: str) -> list[Event]:
    return [_event(event, stats["hlo_op"]) for event, stats in _of_module(line, module)]


def _of_tpu(lines: Mapping[str, Any], module: str) -> list[Event]:
    runs = lines["XLA Modules"].events if "XLA Modules" in lines else ()
    spans = [(e.start_ns, e.start_ns + e.duration_ns) for e in runs if e.name.split("(")[0] == module]
    inside = _Union(spans)
    found = []
    for event in lines["XLA Ops"].events:
        if inside.overlap(event.start_ns, event.start_ns + event.duration_ns) or not event.duration_ns:
            name = str(dict(event.stats).get("hlo_op", event.name)).split(" = ")[0].lstrip("%")
            found.append(_event(event, name))
    return found


def _event(event: Any, operation: str) -> Event:
    return Event(event.start_ns, event.start_ns + event.duration_ns, operation)


def _own(events: Iterable[Event]) -> Iterator[Event]:
    """The parts of each event in which no event within it runs. Events of one thread are apart or within each other."""
    stack: list[list] = []  # of the events around: end, operation, and how far its time is given

    def close(until: float) -> Iterator[Event]:
        while stack and stack[-1][0] <= until:
            end, operation, given = stack.pop()
            if given < end:
                yield Event(given, end, operation)
            if stack:
                stack[-1][2] = max(stack[-1][2], end)

    for start, end, operation in sorted(events, key=lambda event: (event.start, -event.end)):
        yield from close(start)
        if stack:
            if stack[-1][2] < start:
                yield Event(stack[-1][2], start, stack[-1][1])
            stack[-1][2] = start
            end = min(end, stack[-1][0])
        stack.append([end, operation, start])
    yield from close(float("inf"))


class _Union:
    """A union of spans of time."""

    def __init__(self, spans: Iterable[tuple[float, float]]):
        merged: list[list[float]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._spans, self._starts = merged, [start for start, _ in merged]

    def overlap(self, start: float, end: float) -> float:
        """Length of the part of a span that is in the union."""
        i, total = max(0, bisect.bisect_right(self._starts, start) - 1), 0.0
        while i < len(self._spans) and self._spans[i][0] < end:
            total += max(0.0, min(end, self._spans[i][1]) - max(start, self._spans[i][0]))
            i += 1
        return total
