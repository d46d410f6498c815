"""Simulation of a pipeline schedule at given costs, without devices: start and end of each task, bubble, memory.

It is in the ticks in which the executor runs: all devices begin each tick together, run the tasks of the tick, and
send. This module does not import JAX.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardlib.tick_tables import TickTable


@dataclass(frozen=True)
class Costs:
    """Times in any one unit, each at least 0. Those of tasks are of all layers of a device."""

    forward: float = 1.0
    """Time of the forward of one microbatch."""
    backward: float = 2.0
    """Time of the backward of one microbatch, both halves."""
    transfer: float = 0.0
    """Time of a transfer to the next device, once in each tick."""
    weights: float = 0.5
    """Share of a backward that its half for the weights takes, in [0, 1]."""

    def of(self, kind: str, halves: bool) -> float:
        """Time of a task in the slot `kind` of a tick; `halves`: its half for the weights is not part of a backward."""
        backward = (1 - self.weights if halves else 1) * self.backward
        return {"forward": self.forward, "backward": backward, "weights": self.weights * self.backward}[kind]


class Span(NamedTuple):
    """A task with its start and end."""

    kind: str
    """forward; backward, or its input half; weights, its other half."""
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The tasks of every device in time."""

    table: TickTable
    spans: list[list[Span]]
    """Tasks of each device, in the order of time."""
    total: float
    """End of the last tick."""
    ticks: list[float]
    """Start of each tick."""

    @property
    def bubble(self) -> float:
        """Share of the time in which devices are idle, in [0, 1]."""
        busy = sum(span.end - span.start for device in self.spans for span in device)
        return 1 - busy / (len(self.spans) * self.total) if self.total else 0.0

    def most_alive(self) -> list[int]:
        """Largest number of activations alive at once on each device.

        An activation is alive from the start of its forward to the end of its backward, of both halves.
        """
        last = "weights" if self.table.halves else "backward"
        found = []
        for spans in self.spans:
            changes = [(span.start, 1) for span in spans if span.kind == "forward"]
            changes += [(span.end, -1) for span in spans if span.kind == last]
            # An end comes before a start at the same time.
            found.append(int(max(np.cumsum([change for _, change in sorted(changes)]))))
        return found


def simulate(table: TickTable, costs: Costs) -> Timeline:
    """Timeline of a tick table, as the executor runs it: devices wait for each other, and pay a transfer, in each tick.

    They also wait for the forwards of others before a backward, since they compute the loss together between these; but
    not where a tick has one task of each device.
    """
    columns = table.columns
    ticks, p = columns["forward"].shape
    spans: list[list[Span]] = [[] for _ in range(p)]
    starts, now = [], 0.0
    for t in range(ticks):
        starts.append(now)
        free_at = [now] * p
        for slot in ("forward", "backward", "weights"):
            if not table.one_message:
                free_at = [max(free_at)] * p
            for device in np.flatnonzero(columns[slot][t]).tolist():
                stage = table.stages[device][columns[f"{slot}_chunk"][t, device]]
                k = int(columns[f"{slot}_microbatch"][t, device])
                start = free_at[device]
                free_at[device] = start + costs.of(slot, table.halves) / len(table.stages[device])
                spans[device].append(Span(slot, stage, k, start, free_at[device]))
        now = max(free_at) + costs.transfer
    return Timeline(table, spans, now, starts)
