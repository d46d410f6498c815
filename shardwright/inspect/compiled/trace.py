"""Reads traces of jax.profiler: the time between steps, and the time by source line.

A run starts it as a program.

Where a trace (xplane.pb) records what the devices executed:

    /device:TPU:0 …   the line "XLA Modules" has one event for each execution, named
    jit_training_step(<number>), and
                      the line "XLA Ops" one for each operation, named by its whole instruction
    /device:GPU:0 …   the same lines where there are any; else lines "Stream #7(…)", one event for
    each kernel or copy.
                      Kernels have the stats hlo_module and hlo_op, but not the execution that they
                      belong to
    /host:CPU         for CPU devices: on any thread one event for each operation, with the stats
    hlo_module, hlo_op,
                      run_id and device_ordinal
"""

import collections
import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.inspect.compiled.files import read_step
from shardwright.inspect.compiled.table import CompiledStep
from shardwright.inspect.operation import WITHOUT_LINE
from shardwright.inspect.tables import align, fit
from shardwright.program.files import write_json

LINES = "profile_by_line.json"
"""Name of the file next to the trace with the time by source line."""
PERFETTO = "perfetto_trace.json.gz"
"""Name of the file next to the trace that ui.perfetto.dev opens."""
GRAPHS = "in CUDA graphs"
"""The line of kernels in CUDA graphs: XLA names them by the graph, a command buffer, instead of
their operation."""
FOR_LINES = "++hardware.compiler_options.xla_gpu_enable_command_buffer="
"""Setting that keeps XLA from putting most kernels into CUDA graphs."""

Span = tuple[float, float]
"""A time in which something runs: start and end in ns."""


@dataclasses.dataclass
class Device:
    """What one device executed of a program.

    Attributes:
        executions: from the start of the first operation to the end of the last. Empty if the trace
            does not show where they begin.
        operations: each with the name of its HLO instruction, including loops.
    """

    executions: list[Span] = dataclasses.field(default_factory=list)
    operations: list[tuple[Span, str]] = dataclasses.field(default_factory=list)


def devices_of(profile: Any, module: str, steps: int) -> dict[str, Device]:
    """The devices that executed a program, by name.

    Args:
        profile: a jax.profiler.ProfileData. Its planes, lines and events are valid only as long as
            it lives.
        module: name of the program, such as jit_training_step.
        steps: number of complete executions in the trace. Part of another one may follow, which is
            left out.
    """
    found: dict[str, Device] = {}
    for plane in profile.planes:
        lines = [(line.name, line.events) for line in plane.lines]
        if plane.name == "/host:CPU":
            found |= _of_threads([event for _, events in lines for event in events], module)
        elif plane.name.startswith("/device:"):
            named = dict(lines)
            if "XLA Modules" in named:
                device = _of_modules(named["XLA Modules"], named.get("XLA Ops", ()), module)
            else:
                device = _of_streams(
                    [x for name, x in lines if name.startswith("Stream #")], module, steps
                )
            if device.executions or device.operations:
                found[plane.name] = device
    for device in found.values():
        end = max((until for _, until in sorted(device.executions)[:steps]), default=float("inf"))
        device.operations = [x for x in device.operations if x[0][0] < end]
    return found


def _span(event: Any) -> Span:
    return event.start_ns, event.start_ns + event.duration_ns


def _whole(spans: Iterable[Span]) -> Span:
    """From the start of the first to the end of the last."""
    starts, ends = zip(*spans, strict=True)
    return min(starts), max(ends)


def _of_threads(events: Iterable[Any], module: str) -> dict[str, Device]:
    runs: dict[tuple[str, int], list[tuple[Span, str]]] = collections.defaultdict(list)
    for event in (event for event in events if not event.name.startswith("$")):  # $: of Python
        stats = dict(event.stats)
        if (
            stats.get("hlo_module") == module
            and {"hlo_op", "run_id", "device_ordinal"} <= stats.keys()
        ):
            runs[f"CPU:{stats['device_ordinal']}", stats["run_id"]].append(
                (_span(event), stats["hlo_op"])
            )
    found: dict[str, Device] = collections.defaultdict(Device)
    for (device, _), operations in runs.items():
        found[device].executions.append(_whole(span for span, _ in operations))
        found[device].operations += operations
    return found


def _of_modules(modules: Iterable[Any], operations: Iterable[Any], module: str) -> Device:
    device = Device([_span(event) for event in modules if event.name.split("(")[0] == module])
    for event in operations:
        name = str(dict(event.stats).get("hlo_op", event.name)).split(" = ")[0].lstrip("%")
        if any(start <= event.start_ns < end for start, end in device.executions):
            device.operations.append((_span(event), name))
    return device


def _of_streams(streams: list[Any], module: str, steps: int) -> Device:
    """Finds the program's kernels, and its executions.

    A program launches the same kernels in the same order each time, so on its busiest stream the
    names repeat once per execution.
    """
    device = Device()
    launched: list[list[tuple[Span, str]]] = []
    for stream in streams:
        kernels = []
        for event in stream:
            stats = dict(event.stats)
            if stats.get("hlo_module") == module and "hlo_op" in stats:
                device.operations.append((_span(event), stats["hlo_op"]))
            # Kernels of a CUDA graph may not name their module. Copies that do not are of data and
            # checkpoints.
            if stats.get("hlo_module") == module or (
                "hlo_module" not in stats and not event.name.startswith("Mem")
            ):
                kernels.append((_span(event), event.name))
        launched.append(sorted(kernels))
    busiest = max(launched, key=len, default=[])
    names = [name for _, name in busiest]
    lengths = range(len(names) // steps, len(names) // (steps + 1), -1)
    length = next((n for n in lengths if names[n:] == names[:-n]), None)
    if device.operations and length:
        starts = [start for (start, _), _ in busiest[::length]]
        every = [span for kernels in launched for span, _ in kernels]
        for start, until in zip(starts, [*starts[1:], float("inf")], strict=True):
            device.executions.append(_whole(span for span in every if start <= span[0] < until))
    return device


def step_bubble(devices: Mapping[str, Device], steps: int) -> dict[str, Any]:
    """Measures the share of the time in which devices execute nothing between two steps.

    Returns:
        step_bubble   share of the time from the start of the first step to the start of the last
        that is between the
                      end of a step and the start of the next; mean over devices
        gap_seconds   from the end of a step to the start of the next, mean over steps and devices
        step_seconds  from the start of a step to the start of the next, mean over steps and devices
        steps         number of steps
        devices       number of devices

    Raises:
        ValueError: the trace does not show the steps. The message is the reason, to follow
            "because".
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


def _line_of(name: str, table: CompiledStep) -> str | None:
    """The source line of an operation; None for one whose parts are other operations."""
    return table.line_of.get(name, GRAPHS if name.startswith("command_buffer") else WITHOUT_LINE)


def line_times(devices: Mapping[str, Device], table: CompiledStep) -> dict[str, Any]:
    """Measures the time that devices spend on the operations of each source line.

    A loop only has the time of the operations inside it. A collective's time includes waiting for
    other devices.

    Returns:
        devices      number of devices
        seconds      sum over the devices of the time of all operations
        collective   the share of it that is of collectives
        exposed      the share of it that is of collectives while the device computes nothing
        lines        for each source line, the longest first: line, text, seconds, share, collective
        and exposed, of
                     which the last three are shares of all time. The line "without a line" has the
                     rest, and GRAPHS the kernels of CUDA graphs.

    Raises:
        ValueError: the trace has no operation of the program.
    """
    spent: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(3))
    count = 0
    for device in devices.values():
        lines = [(span, name, _line_of(name, table)) for span, name in device.operations]
        work = [
            (span, name in table.communicating, line)
            for span, name, line in lines
            if line is not None
        ]
        if not work:
            continue
        computed = _busy([span for span, communicates, _ in work if not communicates])
        start, end = np.array([span for span, _, _ in work]).T
        exposed = end - start - (computed(end) - computed(start))
        communicates = np.array([communicates for _, communicates, _ in work])
        times = np.stack(
            [end - start, (end - start) * communicates, exposed * communicates], axis=1
        )
        for (_, _, line), time in zip(work, times, strict=True):
            spent[line] += time
        count += 1
    if not count:
        raise ValueError("the trace has no operation of the step.")
    total, *shares = sum(spent.values(), np.zeros(3))
    rows = [
        {"line": line, "text": table.text_of(line), "seconds": own / 1e9, "share": own / total}
        | {"collective": communicating / total, "exposed": exposed / total}
        for line, (own, communicating, exposed) in sorted(
            spent.items(), key=lambda item: -item[1][0]
        )
    ]
    collective, exposed = (share / total for share in shares)
    return {
        "devices": count,
        "seconds": total / 1e9,
        "collective": collective,
        "exposed": exposed,
        "lines": rows,
    }


def _busy(spans: list[Span]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of times: how long, up to then, at least one of the spans ran."""
    if not spans:
        return np.zeros_like
    starts, ends = np.array(sorted(spans)).T
    ends = np.maximum.accumulate(ends)
    starts[1:] = np.maximum(starts[1:], ends[:-1])  # each from the end of those before it
    times = np.stack([starts, ends], axis=1).ravel()
    until = np.cumsum(np.stack([np.zeros(len(starts)), ends - starts], axis=1).ravel())
    return lambda time: np.interp(time, times, until)


def top_lines(found: dict[str, Any]) -> str:
    """The ten slowest lines from the result of line_times, for a terminal of 80 columns."""
    text = ["slowest    source lines, by their share of the time that devices work"]
    text.append(
        f"           waits: for data of other devices; {100 * found['exposed']:.1f}% of all that "
        "time"
    )
    rows = [("  time", "waits", "line", "")]
    for row in found["lines"][:10]:
        exposed = f"{100 * row['exposed']:.1f}%" if row["collective"] else ""
        rows.append((f"{100 * row['share']:5.1f}%", exposed, row["line"], row["text"]))
    text += map(fit, align(rows, {0, 1}))
    if any(row["line"] == GRAPHS for row in found["lines"][:10]):
        text += [
            "           Their source lines, with slower small kernels:",
            f"           {FOR_LINES}",
        ]
    return "\n".join(text)


def read_trace(trace: Path, module: str, steps: int, hlo: Path | None) -> dict[str, Any]:
    """The time between steps as "bubble" and the time by source line as "lines"; for each,
    {"because": …} if unknown.

    Args:
        trace: the xplane.pb. The file LINES is written next to it.
        module: name of the traced program.
        steps: number of complete steps in the trace, also written to LINES.
        hlo: the program's HLO text; None if there is none.
    """
    from jax.profiler import ProfileData

    devices = devices_of(ProfileData.from_file(str(trace)), module, steps)
    found = {}
    try:
        found["bubble"] = step_bubble(devices, steps)
    except ValueError as reason:
        found["bubble"] = {"because": str(reason)}
    try:
        if hlo is None:
            raise ValueError("there is no HLO text of the step")
        found["lines"] = {"steps": steps, **line_times(devices, read_step(hlo))}
        write_json(trace.with_name(LINES), found["lines"])
    except (ValueError, OSError) as error:
        found["lines"] = {"because": str(error)}
    return found


def main(directory: str, module: str, steps: str, hlo: str = "") -> None:
    """Writes the files, and prints what was found as JSON.

    `directory` is the one that jax.profiler wrote.
    """
    for trace in Path(directory).glob("*.trace.json.gz"):
        with gzip.open(trace) as file:
            # Perfetto does not accept it
            content = re.sub(rb'"metadata":{[^{}]*},', b"", file.read(), count=1)
        # this process may be ended for taking too long
        unfinished = trace.with_name(f"{PERFETTO}.tmp")
        unfinished.write_bytes(gzip.compress(content, compresslevel=5))
        unfinished.replace(trace.with_name(PERFETTO))
    profiles = [*Path(directory).glob("*.xplane.pb")]
    if len(profiles) != 1:
        raise OSError(f"{len(profiles)} files *.xplane.pb in {directory}, not one")
    print(json.dumps(read_trace(profiles[0], module, int(steps), Path(hlo) if hlo else None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
