"""Shows what a pipeline schedule does: a chart on the terminal, its bubble, its memory.

    python -m tools.schedule schedule=interleaved_1f1b p=4 m=16 v=2
    python -m tools.schedule schedule=1f1b p=4 m=16 recompute=true transfer=0.1 model=asynchronous
    python -m tools.schedule schedule=interleaved_1f1b p=4 m=16 forward=[1,1,1,1.5] backward=[2,2,2,3]
    python -m tools.schedule schedule=[gpipe,1f1b,interleaved_1f1b,my_schedules:mine] p=4 m=16 v=2

The last one compares. No devices are needed: times follow from the costs in the settings. docs/pipeline.md explains
the output.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlib.parsing import did_you_mean
from shardlib.schedule_simulator import Costs, Timeline, simulate, simulate_ticks
from shardlib.schedules import CHUNKS, schedule_of
from shardlib.tick_tables import TickTable, tick_table
from shardwright.settings.program import run_program
from shardwright.settings.words import for_console, picture_of
from shardwright_data.checks import within
from tools.schedule.gantt import Chart, draw_text, text_legend

_PICTURE_COLUMNS = 112


@dataclass
class Config:
    """Settings of the program."""

    schedule: Any = MISSING
    """gpipe, 1f1b, eager_1f1b, interleaved_1f1b, zb_h1, zb_v, dualpipe_v, or `module:function` of your own schedule; a
    list compares."""
    p: int = within(1, 2**12, MISSING)
    """Devices of the pipeline axis, at least 1."""
    m: int = within(1, 2**16, MISSING)
    """Microbatches of a step, at least 1."""
    v: Any = 1
    """Chunks of a device, at least 1. In a comparison: one number for all schedules that are defined for it (the others
    have the only number that they are defined for), or a list with one for each."""
    forward: Any = 1.0
    """Time of one microbatch's forward through a device's layers, all its chunks; or a list with one time a stage."""
    backward: Any = 2.0
    """Time of a backward, from what its forward kept, in the same form."""
    weights: float = within(0, 1, 0.5)
    """Share of a backward that its half for the weights takes, where a schedule has halves."""
    transfer: float = within(0, 1e9, 0.0)
    """Time from one device to the next, where no task hides it."""
    recompute: bool = False
    """The backward begins with the forward again: only stage inputs are kept. The last stage's forward is then part of
    its backward."""
    model: str = "ticks"
    """Times to draw. ticks: all devices begin a tick together, as in the executor; asynchronous: each device begins a
    task as soon as it can."""
    wait_between_slots: bool = True
    """In a tick all devices wait for the slowest forward before the first backward."""
    input_bytes: Any = None
    """Size of a stage's input, for one microbatch, on one device: a number, or 16MiB for example."""
    residual_bytes: Any = None
    """Size of what the backward through a device's layers, all its chunks, needs of one microbatch; likewise."""
    kept_bytes: Any = None
    """Size of what the half of a backward for the weights needs of the other half; likewise."""
    output: str | None = None
    """The .svg file to write, a picture of what is printed. Null: none. An existing one is replaced."""


@dataclass(frozen=True)
class Result:
    """One schedule, simulated."""

    name: str
    p: int
    m: int
    v: int
    table: TickTable
    ticks: Timeline
    asynchronous: Timeline
    alive_bytes: list[float] | None
    """Size of an activation of each stage that is alive: its input if only that is kept, otherwise its residuals."""
    buffer_bytes: float | None
    """Size of the executor's buffers on each device."""


# ---- settings -----------------------------------------------------------------------------------------------------


def simulated(config: Config) -> list[Result]:
    """Simulates every schedule of `config`.

    Raises:
        ValueError: a setting out of range, or a schedule that is not defined for it.
    """
    names = config.schedule if isinstance(config.schedule, list) else [config.schedule]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"schedule is {config.schedule}; give a name, or a list of names: schedule=[gpipe,1f1b].")
    return [_simulated(config, name, v) for name, v in zip(names, _chunks(config.v, names), strict=True)]


def _simulated(config: Config, name: str, v: int) -> Result:
    p, m, stages = config.p, config.m, config.p * v
    orders = schedule_of(name)(p, m, v)
    forward, backward = (_times(which, getattr(config, which), stages, v) for which in ("forward", "backward"))
    costs = Costs(forward, backward, config.transfer, config.weights, config.recompute)
    table = tick_table(orders, p, m, v, recompute=config.recompute)
    of_input = as_bytes("input_bytes", config.input_bytes)
    of_device = (as_bytes(name, getattr(config, name)) for name in ("residual_bytes", "kept_bytes"))
    of_stage, of_half = (None if size is None else size / v for size in of_device)
    kept = of_input if config.recompute else of_stage
    alive = None if kept is None else [kept] * stages
    stored = [(table.arrivals, of_input), (table.residuals, of_stage), (table.kept, of_half)]
    buffers = None
    if not any(count and size is None for count, size in stored):
        buffers = sum(count * (size or 0.0) for count, size in stored)
    ticks = simulate_ticks(table, costs, wait_between_slots=config.wait_between_slots)
    return Result(name, p, m, v, table, ticks, simulate(orders, p, m, v, costs), alive, buffers)


def _chunks(v: Any, names: Sequence[str]) -> list[int]:
    """Number of chunks of each schedule."""
    if isinstance(v, list):
        if len(v) != len(names) or not all(type(value) is int for value in v):
            raise ValueError(
                f"v is {v} for {len(names)} schedules: give one number of chunks, or one for each of them."
            )
        return v
    if type(v) is not int or not 1 <= v < 2**10:
        raise ValueError(f"v is {v}; it must be a number of chunks, at least 1 and below 2**10.")
    return [CHUNKS.get(name, v) if len(names) > 1 else v for name in names]


def _times(name: str, value: Any, stages: int, v: int) -> list[float]:
    """Time of each stage."""
    is_time = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    if is_time(value):
        return [value / v] * stages
    if not isinstance(value, list) or not all(map(is_time, value)):
        raise ValueError(f"{name} is {value}; give a time, or a list with one for each of {stages} stages.")
    if len(value) != stages:
        raise ValueError(
            f"{name} lists {len(value)} times; there are {stages} stages. Give one for each, or one number."
        )
    return [float(x) for x in value]


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def as_bytes(name: str, value: Any) -> float | None:
    """Parses a number of bytes, or text such as 16MiB; None stays None."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([a-zA-Z]*)", str(value))
    try:
        number, unit = found.groups()
        return float(number) * _UNITS[unit]
    except (AttributeError, KeyError, ValueError):
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{name} is {value}; give a number of bytes, or one with a unit ({units}): 16MiB.") from None


def bytes_text(size: float | None) -> str:
    """Formats a size, as 1.5 MiB for example."""
    if size is None:
        return "–"
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= _UNITS[unit]), "B")
    return f"{size / _UNITS[unit]:.4g} {unit}"


# ---- terminal -----------------------------------------------------------------------------------------------------


def chart_of(result: Result, model: str) -> Chart:
    """The chart of a schedule, with its times in ticks or of asynchronous devices."""
    timeline = result.ticks if model == "ticks" else result.asynchronous
    count = lambda n, noun: f"{n} {noun}{'' if n == 1 else 's'}"
    parts = [count(result.p, "device"), count(result.m, "microbatch" + "e" * (result.m != 1))]
    parts += [count(result.v, "chunk") + " each"] * (result.v > 1)
    parts += ["recomputed"] * timeline.costs.recompute
    when = count(len(timeline.ticks), "tick") if timeline.ticks else "asynchronous devices"
    subtitle = f"{', '.join(parts)} · {when} · time {timeline.total:.4g} · bubble {timeline.bubble:.1%}"
    return Chart(result.name, subtitle, timeline, result.m)


def show(result: Result, model: str, console: Console) -> None:
    """Prints the chart of one schedule, and a line for each device."""
    chart = chart_of(result, model)
    timeline, stages_of = chart.timeline, lambda device: result.table.stages[device]
    of_devices, of_stages = timeline.peak_of_devices(), timeline.peak_of_stages()
    table = _table(["device", "stages", "busy", "alive at most", "of each stage"])
    if result.alive_bytes:
        bytes_of_devices = timeline.peak_bytes_of_devices(result.alive_bytes)
        for header in ("bytes", "of each stage"):
            table.add_column(header, justify="right", no_wrap=True)
    for device in range(result.p):
        busy = sum(span.end - span.start for span in timeline.spans[device]) / (timeline.total or 1.0)
        cells = [str(device), " ".join(map(str, stages_of(device))), f"{busy:.1%}", str(of_devices[device])]
        cells.append(" ".join(str(of_stages[stage]) for stage in stages_of(device)))
        if result.alive_bytes:
            cells.append(bytes_text(bytes_of_devices[device]))
            sizes = (bytes_text(of_stages[stage] * result.alive_bytes[stage]) for stage in stages_of(device))
            cells.append(", ".join(sizes))
        table.add_row(*cells)
    t = result.table
    size = "" if result.buffer_bytes is None else f"; {bytes_text(result.buffer_bytes)} together"
    halves = f", kept for weights {t.kept}" if t.halves else ""
    slots = f"arrivals {t.arrivals}, residuals {t.residuals}{halves}{size}"
    write = lambda line="": console.print(line, soft_wrap=True, no_wrap=True, crop=False)
    write(Text(chart.title, style="bold"))
    write(Text(chart.subtitle))
    write()
    for line in draw_text(chart, console.width):
        write(line)
    write(text_legend(chart))
    write()
    console.print(table)
    write()
    bubble = f"Bubble: ticks {result.ticks.bubble:.1%}, asynchronous devices {result.asynchronous.bubble:.1%}"
    write(Text(for_console(bubble, console)))
    write(Text(for_console(f"Slots in the buffers of a device: {slots}", console)))


def show_comparison(results: Sequence[Result], console: Console) -> None:
    """Prints a line for each schedule."""
    headers = ["schedule", "v", "time", "bubble", "async", "ticks", "alive", "slots"]
    has_bytes = any(result.buffer_bytes is not None for result in results)
    table = _table([*headers, *["buffers"] * has_bytes])
    table.columns[0].justify = "left"
    for r in results:
        t, alive = r.table, max(r.ticks.peak_of_devices())
        cells = [r.v, f"{r.ticks.total:.4g}", f"{r.ticks.bubble:.1%}", f"{r.asynchronous.bubble:.1%}"]
        cells += [len(r.ticks.ticks or []), alive, f"{t.arrivals}+{t.residuals}+{t.kept}"]
        table.add_row(r.name, *map(str, cells), *[bytes_text(r.buffer_bytes)] * has_bytes)
    console.print(table)
    console.print()
    for line in (
        "time, bubble: in ticks.  async: bubble of asynchronous devices.  alive: activations at",
        "once on a device, at most.  slots of a device: arrivals + residuals + kept for weights.",
    ):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _table(headers: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


# ---- main ---------------------------------------------------------------------------------------------------------


def run(config: Config, console: Console | None = None) -> None:
    """Prints the schedules, and writes a picture of that if there is an `output`.

    Raises:
        ValueError: a setting out of range, or a schedule that is not defined for it.
    """
    console = console or Console()
    if config.model not in ("ticks", "asynchronous"):
        near = did_you_mean(config.model, ("ticks", "asynchronous"))
        raise ValueError(f"model is {config.model}; it must be ticks or asynchronous.{near}")
    if config.output is not None and Path(config.output).suffix != ".svg":
        raise ValueError(f"output is {config.output}; its name must end in .svg.")
    results = simulated(config)
    show_all(results, config.model, console)
    if config.output is not None:
        picture = Console(record=True, width=_PICTURE_COLUMNS, file=io.StringIO(), force_terminal=True)
        show_all(results, config.model, picture)
        output = Path(config.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(picture_of(picture, ", ".join(result.name for result in results)), encoding="utf-8")
        console.print()
        console.print(Text(for_console(f"Picture: {output}", console)), soft_wrap=True)


def show_all(results: Sequence[Result], model: str, console: Console) -> None:
    """Prints the one schedule, or compares several."""
    if len(results) == 1:
        show(results[0], model, console)
    else:
        show_comparison(results, console)


if __name__ == "__main__":
    run_program("schedule", Config, run)
