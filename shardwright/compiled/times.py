"""Times of what the devices executed: between the steps, and by source line."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwright.compiled.lines import WITHOUT_LINE
from shardwright.compiled.table import Table


class Span(NamedTuple):
    """A time in which something runs: start and end in ns."""

    start: float
    end: float


@dataclasses.dataclass
class Device:
    """What one device executed of a program.

    Attributes:
        executions: from the start of the first operation to the end of the last one. Empty if the trace does not show
            where they begin.
        operations: each with the name of its HLO instruction; loops too.
    """

    executions: list[Span] = dataclasses.field(default_factory=list)
    operations: list[tuple[Span, str]] = dataclasses.field(default_factory=list)


def step_bubble(devices: Mapping[str, Device], steps: int) -> dict[str, Any]:
    """Share of the time in which devices execute nothing between two steps.

    Args:
        devices: what `devices_of` gives.
        steps: number of steps, at least 2.

    Returns:
        step_bubble   share of the time from the start of the first step to the start of the last that is between the
                      end of a step and the start of the next; mean over devices
        gap_seconds   from the end of a step to the start of the next, mean over steps and devices
        step_seconds  from the start of a step to the start of the next, mean over steps and devices
        steps         number of steps
        devices       number of devices

    Raises:
        ValueError: the trace does not show the steps. The message says why, to follow "because".
    """
    if steps < 2:
        raise ValueError("a run of one step has nothing between steps")
    if not devices:
        raise ValueError("the trace has no execution of the step")
    gaps, periods = [], []
    for name, device in devices.items():
        if len(device.executions) < steps:
            raise ValueError(f"the trace shows {len(device.executions)} of {steps} steps of {name}")
        start, end = np.array(sorted(device.executions)[:steps]).T
        gaps.append(np.maximum(start[1:] - end[:-1], 0).mean())
        periods.append((start[-1] - start[0]) / (steps - 1))
    return {
        "step_bubble": float(np.mean(np.divide(gaps, periods))),
        "gap_seconds": float(np.mean(gaps)) / 1e9,
        "step_seconds": float(np.mean(periods)) / 1e9,
        "steps": steps,
        "devices": len(devices),
    }


def line_times(devices: Mapping[str, Device], table: Table) -> dict[str, Any]:
    """Time that devices spend on the operations of each source line.

    A loop has no time but that of the operations within it. A collective's includes the waiting for other devices.

    Args:
        devices: what `devices_of` gives.
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
    spent: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(3))
    count = 0
    for device in devices.values():
        lines = [(span, name, table.line_of.get(name, WITHOUT_LINE)) for span, name in device.operations]
        work = [(span, name in table.communicating, line) for span, name, line in lines if line is not None]
        computed = _busy([span for span, communicates, _ in work if not communicates])
        for (start, end), communicates, line in work:
            exposed = end - start - (computed(end) - computed(start))
            spent[line] += np.array([end - start, (end - start) * communicates, exposed * communicates])
        count += bool(work)
    if not count:
        raise ValueError("the trace has no operation of the step.")
    total, *shares = sum(spent.values())
    rows = [
        {"line": line, "text": table.text_of(line), "seconds": own / 1e9, "share": own / total}
        | {"collective": communicating / total, "exposed": exposed / total}
        for line, (own, communicating, exposed) in sorted(spent.items(), key=lambda item: -item[1][0])
    ]
    collective, exposed = (share / total for share in shares)
    return {"devices": count, "seconds": total / 1e9, "collective": collective, "exposed": exposed, "lines": rows}


def _busy(spans: list[Span]) -> Callable[[float], float]:
    """A function of a time: how long until then at least one of the spans ran."""
    if not spans:
        return lambda time: 0.0
    starts, ends = np.array(sorted(spans)).T
    ends = np.maximum.accumulate(ends)
    starts[1:] = np.maximum(starts[1:], ends[:-1])  # each from the end of those before it
    times = np.stack([starts, ends], axis=1).ravel()
    lengths = np.stack([np.zeros(len(starts)), ends - starts], axis=1).ravel()
    return lambda time: float(np.interp(time, times, np.cumsum(lengths)))


def top_lines(found: dict[str, Any]) -> str:
    """The ten lines that take longest, for a terminal of 80 columns, of what line_times returns."""
    text = ["slowest    source lines, by their share of the time that devices work"]
    text.append(f"           waits: for data of other devices; {100 * found['exposed']:.1f}% of all that time")
    text.append("  time   waits  line")
    rows = found["lines"][:10]
    longest = max((len(row["line"]) for row in rows), default=0)
    for row in rows:
        exposed = f"{100 * row['exposed']:6.1f}%" if row["collective"] else " " * 7
        line = f"{100 * row['share']:5.1f}% {exposed}  {row['line'].ljust(longest)}  {row['text']}".rstrip()
        text.append(line if len(line) <= 80 else line[:79] + "…")
    return "\n".join(text)
