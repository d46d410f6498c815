"""Time in which devices execute nothing between training steps, from a trace.

Where a trace (xplane.pb, as jax.profiler writes it) has the executions of a program on the devices:

    /device:TPU:0 …   the line "XLA Modules" has one event for each execution, named jit_training_step(<number>)
    /device:GPU:0 …   the same line where there is one; else lines "Stream #7(…)", one event for each kernel or copy.
                      Kernels have the stat hlo_module, but not the execution that they belong to: see _by_first_kernels
    /host:CPU         for CPU devices: on any thread one event for each operation, with the stats hlo_module, run_id and
                      device_ordinal
"""

import collections
from typing import Any, NamedTuple

import numpy as np

MODULES_LINE = "XLA Modules"


class NotMeasured(Exception):
    """The trace does not have the executions. The message says why, to follow "because"."""


class Execution(NamedTuple):
    """One training step on one device: start of its first operation and end of its last, in ns."""

    start: float
    end: float


def step_bubble(profile: Any, module: str, steps: int) -> dict[str, Any]:
    """Share of the time in which devices execute nothing between two steps.

    Args:
        profile: a jax.profiler.ProfileData. Its planes, lines and events are valid only as long as it lives.
        module: name of the step's program, such as jit_training_step.
        steps: number of whole steps in the trace, at least 2. A part of another one may follow them.

    Returns:
        step_bubble   share of the time from the start of the first step to the start of the last that is between the
                      end of a step and the start of the next; mean over devices
        gap_seconds   from the end of a step to the start of the next, mean over steps and devices
        step_seconds  from the start of a step to the start of the next, mean over steps and devices
        steps         number of steps
        devices       number of devices

    Raises:
        NotMeasured: the trace has no such executions.
    """
    if steps < 2:
        raise NotMeasured("a run of one step has nothing between steps")
    planes = {plane.name: plane for plane in profile.planes}
    devices = [name for name in planes if name.startswith("/device:")]
    found = {name: executions for name in devices if (executions := _of_device(planes[name], module, steps))}
    if not found and "/host:CPU" in planes:
        found = _of_cpu_devices(planes["/host:CPU"], module)
    if not found:
        where = f"of the devices {', '.join(devices)}" if devices else "of any device"
        raise NotMeasured(f"the trace has no line {where} with executions of {module}")
    gaps, periods = [], []
    for device, executions in found.items():
        if len(executions) < steps:
            raise NotMeasured(f"the trace has {len(executions)} of {steps} executions of {module} on {device}")
        start, end = np.array(sorted(executions)[:steps]).T
        gaps.append(np.maximum(start[1:] - end[:-1], 0).mean())
        periods.append((start[-1] - start[0]) / (steps - 1))
    return {
        "step_bubble": float(np.mean(np.divide(gaps, periods))),
        "gap_seconds": float(np.mean(gaps)) / 1e9,
        "step_seconds": float(np.mean(periods)) / 1e9,
        "steps": steps,
        "devices": len(found),
    }


def _of_device(plane: Any, module: str, steps: int) -> list[Execution]:
    lines = list(plane.lines)
    for line in lines:
        if line.name == MODULES_LINE:
            events = [event for event in line.events if event.name.split("(")[0] == module]
            return [Execution(event.start_ns, event.start_ns + event.duration_ns) for event in events]
    streams = [_kernels(line, module) for line in lines if line.name.startswith("Stream #")]
    if not any(of_module for kernels in streams for *_, of_module in kernels):
        return []
    return _by_first_kernels([[kernel[:3] for kernel in kernels] for kernels in streams], steps)


def _kernels(stream: Any, module: str) -> list[tuple[float, float, str, bool]]:
    """Kernels that the module may have launched: start, end, name, and whether they name the module.

    Kernels of a CUDA graph may not name their module. Copies without a module belong to data loading and checkpoints.
    """
    kernels = []
    for event in stream.events:
        name = dict(event.stats).get("hlo_module")
        if name == module or (name is None and not event.name.startswith("Mem")):
            kernels.append((event.start_ns, event.start_ns + event.duration_ns, event.name, name == module))
    return sorted(kernels)


def _by_first_kernels(streams: list[list[tuple[float, float, str]]], steps: int) -> list[Execution]:
    """The executions, found by the kernels that each begins with.

    A program launches the same kernels in the same order each time. So on its busiest stream each execution begins with
    the shortest sequence of names that the trace begins with and that occurs once a step. The trace may have the
    beginning of one more execution than `steps`.
    """
    busiest = max(streams, key=len)
    names = [name for _, _, name in busiest]
    first = list(range(len(names)))
    for length in range(len(names) // steps):
        first = [i for i in first if names[i + length : i + length + 1] == [names[length]]]
        if len(first) <= steps + 1:
            break
    if not steps <= len(first) <= steps + 1:
        raise NotMeasured(f"the kernels do not show where each of the {steps} steps begins")
    starts = [busiest[i][0] for i in first]
    ends = [*starts[1:], float("inf")]
    every = [kernel for stream in streams for kernel in stream]
    return [
        Execution(start, max(end for began, end, _ in every if start <= began < until))
        for start, until in zip(starts, ends, strict=True)
    ]


def _of_cpu_devices(plane: Any, module: str) -> dict[str, list[Execution]]:
    executions: dict[tuple[int, int], Execution] = {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("$"):  # a Python function
                continue
            stats = dict(event.stats)
            if stats.get("hlo_module") != module or not {"run_id", "device_ordinal"} <= stats.keys():
                continue
            key = (stats["device_ordinal"], stats["run_id"])
            start, end = event.start_ns, event.start_ns + event.duration_ns
            known = executions.get(key, Execution(start, end))
            executions[key] = Execution(min(known.start, start), max(known.end, end))
    found = collections.defaultdict(list)
    for (device, _), execution in executions.items():
        found[f"CPU:{device}"].append(execution)
    return dict(found)
