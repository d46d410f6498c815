"""Simulation of a pipeline schedule at given costs, without devices: start and end of each task, bubble, memory.

It is in the ticks in which the executor runs: all devices begin each tick together, run the tasks of the tick, and
send. This module does not import JAX.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardlib.schedules import Stages, Task
from shardlib.tick_tables import TickTable


@dataclass(frozen=True)
class Costs:
    """Times of tasks and transfers, in any one unit, each at least 0."""

    forward: Sequence[float]
    """Time of the forward of one microbatch through each stage."""
    backward: Sequence[float]
    """Time of the backward of one microbatch through each stage, without a recomputed forward."""
    transfer: float = 0.0
    """Time of a transfer to the next device, once in each tick."""
    weights: float = 0.5
    """Share of a backward that its half for the weights takes, in [0, 1]."""

    def of(self, task: Task, recompute: bool) -> float:
        """Time of `task`; `recompute`: a backward begins with the forward of its stage."""
        kind, stage, _ = task
        if kind == "forward":
            return self.forward[stage]
        if kind == "backward_weights":
            return self.weights * self.backward[stage]
        share = 1 - self.weights if kind == "backward_input" else 1
        return share * self.backward[stage] + (self.forward[stage] if recompute else 0.0)


class Span(NamedTuple):
    """A task with its start and end."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The tasks of every device in time."""

    spans: list[list[Span]]
    """Tasks of each device, in the order of time."""
    total: float
    """End of the last tick."""
    ticks: list[float]
    """Start of each tick."""
    stages: Stages
    """The stages of each device."""
    recompute: bool
    """Whether each backward begins with the forward of its stage."""

    @property
    def bubble(self) -> float:
        """Share of the time in which devices are idle, in [0, 1]."""
        busy = sum(span.end - span.start for device in self.spans for span in device)
        return 1 - busy / (len(self.spans) * self.total) if self.total else 0.0

    def most_alive(self) -> list[int]:
        """Largest number of activations alive at once on each device.

        An activation is alive from the start of its forward to the end of its backward. With halves it is alive to the
        end of the last half; but if the forward is repeated, the input of the stage is needed for the first half only.
        """
        last = "backward_input" if self.recompute else "backward_weights"
        found = []
        for spans in self.spans:
            changes = [(span.start, 1) for span in spans if span.task.kind == "forward"]
            changes += [(span.end, -1) for span in spans if span.task.kind in ("backward", last)]
            # An end comes before a start at the same time.
            found.append(int(max(np.cumsum([change for _, change in sorted(changes)]))))
        return found


def simulate(table: TickTable, costs: Costs) -> Timeline:
    """Timeline of a tick table, as the executor runs it: devices wait for each other, and pay a transfer, in each tick.

    They also wait for the slowest forward before the first backward, since they compute the loss together between
    these. It matters only if the costs of stages differ, and not where a tick has one task of each device.
    """
    columns, kinds = table.columns, {"forward": "forward", "backward": "backward"}
    if table.halves:
        kinds |= {"backward": "backward_input", "weights": "backward_weights"}
    ticks, p = columns["forward"].shape
    spans: list[list[Span]] = [[] for _ in range(p)]
    starts, now = [], 0.0
    for t in range(ticks):
        starts.append(now)
        free_at = [now] * p
        for slot, kind in kinds.items():
            if not table.one_message:
                free_at = [max(free_at)] * p
            for device in np.flatnonzero(columns[slot][t]).tolist():
                stage = table.stages[device][columns[f"{slot}_chunk"][t, device]]
                task = Task(kind, stage, int(columns[f"{slot}_microbatch"][t, device]))
                start, free_at[device] = free_at[device], free_at[device] + costs.of(task, table.recompute)
                spans[device].append(Span(task, start, free_at[device]))
        now = max(free_at) + costs.transfer
    return Timeline(spans, now, starts, table.stages, table.recompute)
