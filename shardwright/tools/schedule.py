"""Shows what a pipeline schedule does: the tasks of each tick, its bubble, its memory.

    python -m tools.schedule schedule=interleaved_1f1b p=4 m=16 v=2
    python -m tools.schedule schedule=1f1b p=4 m=16 transfer=0.1
    python -m tools.schedule 'schedule=[gpipe,1f1b,interleaved_1f1b,my_schedules:mine]' p=4 m=16 v=2

The last one compares. No devices are needed: times follow from the costs in the settings. docs/parallelism.md explains
the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING
from rich.console import Console

from shardlib.schedules import CHUNKS, schedule_of
from shardlib.tick_tables import Costs, Timeline, simulate, tick_table
from shardwright.data.checks import within
from shardwright.settings.program import run_program
from shardwright.tools.report.screen import print_line, print_table


@dataclass
class Settings:
    """Settings of the program."""

    schedule: Any = MISSING
    """gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, or `module:function` of your own schedule; a list compares."""
    p: int = within(1, 2**12, MISSING)
    """Devices of the pipeline axis, at least 1."""
    m: int = within(1, 2**16, MISSING)
    """Microbatches of a step, at least 1."""
    v: int = within(1, 2**10, 1)
    """Chunks of a device, at least 1. In a comparison, of the schedules that are defined for any number of them."""
    forward: float = within(0, 1e9, 1.0)
    """Time of one microbatch's forward through a device's layers, all its chunks."""
    backward: float = within(0, 1e9, 2.0)
    """Time of a backward, from what its forward kept."""
    weights: float = within(0, 1, 0.5)
    """Share of a backward that its half for the weights takes, where a schedule has halves."""
    transfer: float = within(0, 1e9, 0.0)
    """Time that devices take after each tick to send their results."""


def simulated(config: Settings) -> list[tuple[str, Timeline]]:
    """Simulates every schedule of `config`.

    Raises:
        ValueError: a setting out of range, or a schedule that is not defined for it.
    """
    names = config.schedule if isinstance(config.schedule, list) else [config.schedule]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"schedule is {config.schedule}; give a name, or a list of names: schedule=[gpipe,1f1b].")
    found = []
    for name in names:
        v = CHUNKS.get(name, config.v) if len(names) > 1 else config.v
        table = tick_table(schedule_of(name)(config.p, config.m, v))
        costs = Costs(config.forward, config.backward, config.transfer, config.weights)
        found.append((name, simulate(table, costs)))
    return found


def ticks_of(timeline: Timeline) -> list[str]:
    """A line for each tick: its start, and the tasks of each device, such as F2.0: forward, stage 2, microbatch 0."""
    columns, stages = timeline.table.columns, timeline.table.stages

    def task(kind: str, tick: int, device: int) -> str:
        chunk, microbatch = (columns[f"{kind}_{name}"][tick, device] for name in ("chunk", "microbatch"))
        return f"{kind[0].upper()}{stages[device][chunk]}.{microbatch}"

    def tasks(tick: int, device: int) -> str:
        kinds = [kind for kind in ("forward", "backward", "weights") if columns[kind][tick, device]]
        return " ".join(task(kind, tick, device) for kind in kinds) or "·"

    devices = range(len(stages))
    rows = [("start", *map(str, devices))]
    rows += [(f"{start:.4g}", *(tasks(i, device) for device in devices)) for i, start in enumerate(timeline.ticks)]
    width = max(len(cell) for row in rows for cell in row)
    return ["  ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows]


def show(results: Sequence[tuple[str, Timeline]], console: Console) -> None:
    """Prints a line for each schedule; before it, of a single one, its ticks."""
    if len(results) == 1:
        ((_, timeline),) = results
        for line in [*ticks_of(timeline), ""]:
            print_line(console, line)
    rows = []
    for name, t in results:
        slots = f"{t.table.arrivals}+{t.table.residuals}+{t.table.kept}"
        times = f"{t.total:.4g}", f"{t.bubble:.1%}", len(t.ticks)
        rows.append((name, len(t.table.stages[0]), *times, max(t.most_alive()), slots))
    print_table(console, ["schedule", "v", "time", "bubble", "ticks", "alive", "slots"], rows)
    print_line(console, "\nalive: activations at once on a device, at most.", "dim")
    print_line(console, "slots of a device: arrivals + residuals + kept for weights.", "dim")


def run(config: Settings, console: Console | None = None) -> None:
    """Prints the schedules. Raises ValueError as `simulated`."""
    show(simulated(config), console or Console())


if __name__ == "__main__":
    run_program("schedule", Settings, run)
