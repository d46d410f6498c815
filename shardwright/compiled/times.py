"""Time of the devices by source line, from a trace (jax.profiler.ProfileData) and the HLO text of the traced program.

Where a trace has the operations of a program on the devices:

    /device:TPU:0 …   the line "XLA Ops", within the events of the line "XLA Modules" that are named after the program
    /device:GPU:0 …   lines "Stream #7(…)", one event for each kernel, with the stats hlo_module and hlo_op
    /host:CPU         for CPU devices: on any thread one event for each operation, with the stats hlo_module, hlo_op and
                      device_ordinal
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shardwright.compiled.hlo import Program
from shardwright.compiled.lines import WITHOUT_LINE
from shardwright.compiled.operations import COLLECTIVES, base_opcode, collective
from shardwright.compiled.table import Table

_CONTAINERS = ("while", "conditional", "call")


class Span(NamedTuple):
    """A time in which an operation runs: start and end in ns, and the name of the HLO instruction."""

    start: float
    end: float
    operation: str


def line_times(profile: Any, program: Program, table: Table) -> dict[str, Any]:
    """Time that devices spend on the operations of each source line.

    A loop has no time but that of the operations within it. A collective's includes the waiting for other devices.

    Args:
        profile: a jax.profiler.ProfileData.
        program: the program that was traced.
        table: what `describe` says of the program.

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
    opcodes, devices = _opcodes(program), _devices(profile, program)
    spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for spans in devices.values():
        communicating = [_communicates(opcodes.get(span.operation, "")) for span in spans]
        computed = _busy([span for span, is_one in zip(spans, communicating, strict=True) if not is_one])
        for (start, end, operation), is_one in zip(spans, communicating, strict=True):
            exposed = end - start - (computed(end) - computed(start))
            times = spent[table.line_of.get(operation, WITHOUT_LINE)]
            for i, time in enumerate((end - start, (end - start) * is_one, exposed * is_one)):
                times[i] += time
    total = sum(own for own, *_ in spent.values())
    rows = [
        {"line": line, "text": table.text_of(line), "seconds": own / 1e9, "share": own / total}
        | {"collective": communicating / total, "exposed": exposed / total}
        for line, (own, communicating, exposed) in sorted(spent.items(), key=lambda item: -item[1][0])
    ]
    shares = {name: sum(row[name] for row in rows) for name in ("collective", "exposed")}
    return {"devices": len(devices), "seconds": total / 1e9, **shares, "lines": rows}


def top_lines(found: dict[str, Any], count: int = 10, width: int = 80) -> str:
    """The lines that take longest, for a terminal.

    Args:
        found: what line_times returns, which may come from a file.
        count: number of lines.
        width: number of columns.
    """
    text = ["slowest    source lines, by their share of the time that devices work"]
    text.append(f"           waits: for data of other devices; {100 * found['exposed']:.1f}% of all that time")
    text.append("  time   waits  line")
    rows = found["lines"][:count]
    longest = max((len(row["line"]) for row in rows), default=0)
    for row in rows:
        exposed = f"{100 * row['exposed']:6.1f}%" if row["collective"] else " " * 7
        line = f"{100 * row['share']:5.1f}% {exposed}  {row['line'].ljust(longest)}  {row['text']}".rstrip()
        text.append(line if len(line) <= width else line[: width - 1] + "…")
    return "\n".join(text)


def _opcodes(program: Program) -> dict[str, str]:
    """The opcode of each operation; "copy" of a collective in which each device is a group of its own."""
    found = {}
    for computation in program.computations.values():
        for i in computation.instructions.values():
            found[i.name] = opcode = base_opcode(program, i)
            starts = opcode in COLLECTIVES and not i.opcode.endswith(("-done", "-update"))
            if starts and collective(program, computation, i) is None:
                found[i.name] = "copy"
    return found


def _communicates(opcode: str) -> bool:
    return opcode.removesuffix("-done").removesuffix("-update") in COLLECTIVES or opcode == "async-done"


def _devices(profile: Any, program: Program) -> dict[str, list[Span]]:
    """By device, the spans of the operations of a program that are no loops or branches.

    Raises:
        ValueError: there is none.
    """
    found: dict[str, list[Span]] = collections.defaultdict(list)
    opcodes = {i.name: i.opcode for i in program.instructions()}
    for device, spans in _threads(profile, program.name):
        found[device] += [span for span in spans if opcodes.get(span.operation) not in _CONTAINERS]
    if not any(found.values()):
        raise ValueError(f"the trace has no operation of {program.name}.")
    return {device: spans for device, spans in found.items() if spans}


def _threads(profile: Any, module: str) -> Iterator[tuple[str, list[Span]]]:
    """Name of a device, and the operations of a program in one of its streams or threads, loops too."""
    for plane in profile.planes:
        lines = [*plane.lines]
        modules = [
            (event.start_ns, event.start_ns + event.duration_ns)
            for line in lines
            if line.name == "XLA Modules"
            for event in line.events
            if event.name.split("(")[0] == module
        ]
        for line in lines:
            if plane.name.startswith("/device:") and line.name == "XLA Ops":
                name = lambda event: str(dict(event.stats).get("hlo_op", event.name)).split(" = ")[0].lstrip("%")
                found = [_span(event, name(event)) for event in line.events]
                yield plane.name, [x for x in found if any(start <= x.start < end for start, end in modules)]
            elif plane.name == "/host:CPU" or line.name.startswith("Stream #"):
                threads = collections.defaultdict(list)
                for event in line.events:
                    if event.name.startswith("$"):  # a Python function
                        continue
                    stats = dict(event.stats)
                    device = f"CPU:{stats.get('device_ordinal')}" if plane.name == "/host:CPU" else plane.name
                    if stats.get("hlo_module") == module and "hlo_op" in stats and device != "CPU:None":
                        threads[device].append(_span(event, stats["hlo_op"]))
                yield from threads.items()


def _span(event: Any, operation: str) -> Span:
    return Span(event.start_ns, event.start_ns + event.duration_ns, operation)


def _busy(spans: list[Span]) -> Callable[[float], float]:
    """A function of a time: how long until then at least one of the spans ran."""
    if not spans:
        return lambda time: 0.0
    starts, ends = np.array(sorted((span.start, span.end) for span in spans)).T
    ends = np.maximum.accumulate(ends)
    starts[1:] = np.maximum(starts[1:], ends[:-1])  # each from the end of those before it
    times = np.stack([starts, ends], axis=1).ravel()
    lengths = np.stack([np.zeros(len(starts)), ends - starts], axis=1).ravel()
    return lambda time: float(np.interp(time, times, np.cumsum(lengths)))
