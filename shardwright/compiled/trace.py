"""Reads traces of jax.profiler: the time between steps, and the time by source line. A program, which a run starts.

Where a trace (xplane.pb) has what the devices executed:

    /device:TPU:0 …   the line "XLA Modules" has one event for each execution, named jit_training_step(<number>), and
                      the line "XLA Ops" one for each operation, named by its whole instruction
    /device:GPU:0 …   the same lines where there are any; else lines "Stream #7(…)", one event for each kernel or copy.
                      Kernels have the stats hlo_module and hlo_op, but not the execution that they belong to
    /host:CPU         for CPU devices: on any thread one event for each operation, with the stats hlo_module, hlo_op,
                      run_id and device_ordinal
"""

import collections
import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwright.compiled.files import read_step, write_json
from shardwright.compiled.times import Device, Span, line_times, step_bubble

LINES = "profile_by_line.json"
"""Name of the file beside the trace with the time by source line."""
PERFETTO = "perfetto_trace.json.gz"
"""Name of the file beside the trace that ui.perfetto.dev opens."""


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
            found |= _of_threads([event for _, events in lines for event in events], module)
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


def _of_threads(events: Iterable[Any], module: str) -> dict[str, Device]:
    found: dict[str, Device] = collections.defaultdict(Device)
    runs: dict[tuple[str, int], list[Span]] = collections.defaultdict(list)
    for event in (event for event in events if not event.name.startswith("$")):  # $: of Python
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
    names = [name for _, name in busiest]
    lengths = range(len(names) // steps, len(names) // (steps + 1), -1)
    length = next((n for n in lengths if names[n:] == names[:-n]), None)
    if device.operations and length:
        starts = [span.start for span, _ in busiest[::length]]
        every = [span for kernels in launched for span, _ in kernels]
        for start, until in zip(starts, [*starts[1:], float("inf")], strict=True):
            device.executions.append(_whole(span for span in every if start <= span.start < until))
    return device


def read_trace(trace: Path, module: str, steps: int, hlo: Path | None) -> dict[str, Any]:
    """The time between steps as "bubble" and the time by source line as "lines", or {"because": …} for each.

    Args:
        trace: the xplane.pb. The file LINES is written beside it.
        module: name of the traced program.
        steps: number of whole steps in the trace, which LINES has too.
        hlo: the program's HLO text; None if there is none.
    """
    from jax.profiler import ProfileData

    devices, found = devices_of(ProfileData.from_file(str(trace)), module, steps), {}
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
    """Writes the files, and prints what was found as JSON. `directory` is the one that jax.profiler wrote."""
    for trace in Path(directory).glob("*.trace.json.gz"):
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            content = json.load(file)
        content.pop("metadata", None)  # Perfetto does not accept it
        with gzip.open(trace.with_name(PERFETTO), "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(content, file)
    profiles = [*Path(directory).glob("*.xplane.pb")]
    if len(profiles) != 1:
        raise OSError(f"{len(profiles)} files *.xplane.pb in {directory}")
    print(json.dumps(read_trace(profiles[0], module, int(steps), Path(hlo) if hlo else None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
