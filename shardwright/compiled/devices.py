"""What the devices executed of a program, from a trace of jax.profiler (xplane.pb).

Where a trace has it:

    /device:TPU:0 …   the line "XLA Modules" has one event for each execution, named jit_training_step(<number>), and
                      the line "XLA Ops" one for each operation, named by its whole instruction
    /device:GPU:0 …   the same lines where there are any; else lines "Stream #7(…)", one event for each kernel or copy.
                      Kernels have the stats hlo_module and hlo_op, but not the execution that they belong to
    /host:CPU         for CPU devices: on any thread one event for each operation, with the stats hlo_module, hlo_op,
                      run_id and device_ordinal
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple


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


def devices_of(profile: Any, module: str, steps: int) -> dict[str, Device]:
    """The devices that executed a program, by name.

    Args:
        profile: a jax.profiler.ProfileData. Its planes, lines and events are valid only as long as it lives.
        module: name of the program, such as jit_training_step.
        steps: number of whole executions in the trace. A part of another one may follow them.
    """
    found: dict[str, Device] = {}
    for plane in profile.planes:
        lines = [(line.name, line.events) for line in plane.lines]
        if plane.name == "/host:CPU":
            found |= _of_threads([events for _, events in lines], module)
        elif plane.name.startswith("/device:"):
            named = dict(lines)
            if "XLA Modules" in named:
                device = _of_modules(named["XLA Modules"], named.get("XLA Ops", ()), module)
            else:
                device = _of_streams([x for name, x in lines if name.startswith("Stream #")], module, steps)
            if device.executions or device.operations:
                found[plane.name] = device
    return found


def _span(event: Any) -> Span:
    return Span(event.start_ns, event.start_ns + event.duration_ns)


def _whole(spans: Iterable[Span]) -> Span:
    """From the start of the first to the end of the last."""
    starts, ends = zip(*spans, strict=True)
    return Span(min(starts), max(ends))


def _of_threads(threads: Iterable[Any], module: str) -> dict[str, Device]:
    found: dict[str, Device] = collections.defaultdict(Device)
    runs: dict[tuple[str, int], list[Span]] = collections.defaultdict(list)
    for event in (event for events in threads for event in events if not event.name.startswith("$")):  # $: of Python
        stats = dict(event.stats)
        if stats.get("hlo_module") == module and {"hlo_op", "run_id", "device_ordinal"} <= stats.keys():
            device = f"CPU:{stats['device_ordinal']}"
            found[device].operations.append((_span(event), stats["hlo_op"]))
            runs[device, stats["run_id"]].append(_span(event))
    for (device, _), spans in runs.items():
        found[device].executions.append(_whole(spans))
    return found


def _of_modules(modules: Iterable[Any], operations: Iterable[Any], module: str) -> Device:
    device = Device([_span(event) for event in modules if event.name.split("(")[0] == module])
    for event in operations:
        name = str(dict(event.stats).get("hlo_op", event.name)).split(" = ")[0].lstrip("%")
        if any(start <= event.start_ns < end for start, end in device.executions):
            device.operations.append((_span(event), name))
    return device


def _of_streams(streams: list[Any], module: str, steps: int) -> Device:
    """The program's kernels, and its executions.

    A program launches the same kernels in the same order each time. So on its busiest stream the names repeat, once in
    each execution.
    """
    device = Device()
    launched: list[list[tuple[Span, str]]] = []
    for stream in streams:
        kernels = []
        for event in stream:
            stats = dict(event.stats)
            if stats.get("hlo_module") == module and "hlo_op" in stats:
                device.operations.append((_span(event), stats["hlo_op"]))
            # Kernels of a CUDA graph may not name their module. Copies that do not are of data and checkpoints.
            if stats.get("hlo_module") == module or ("hlo_module" not in stats and not event.name.startswith("Mem")):
                kernels.append((_span(event), event.name))
        launched.append(sorted(kernels))
    busiest = max(launched, key=len, default=[])
    if device.operations and (length := _period([name for _, name in busiest], steps)):
        starts = [span.start for span, _ in busiest[::length]]
        every = [span for kernels in launched for span, _ in kernels]
        for start, until in zip(starts, [*starts[1:], float("inf")], strict=True):
            device.executions.append(_whole(span for span in every if start <= span.start < until))
    return device


def _period(names: list[str], times: int) -> int:
    """After how many names they repeat, if they come this many times, and in part once more; 0 if they do not."""
    lengths = range(len(names) // times, len(names) // (times + 1), -1)
    return next((n for n in lengths if names[n:] == names[:-n]), 0)
