"""Simulation of a pipeline schedule at given costs, without devices: start and end of each task, bubble, memory.

There are two models. **Asynchronous** devices run their tasks in order, each as soon as its inputs have arrived: a
runtime with one program for each device can reach that. **Ticks** are how the executor runs: all devices begin each
tick together, run the tasks of the tick, and send. This module does not import JAX.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardlib.tasks import Orders, Stages, Task, check_schedule, needs, stages_of_devices
from shardlib.tick_tables import TickTable


@dataclass(frozen=True)
class Costs:
    """Times of tasks and transfers, in any one unit, each at least 0."""

    forward: Sequence[float]
    """Time of the forward of one microbatch through each stage."""
    backward: Sequence[float]
    """Time of the backward of one microbatch through each stage, without a recomputed forward."""
    transfer: float = 0.0
    """Time of a transfer to the next device, which no task hides: between two tasks, or once in each tick."""
    weights: float = 0.5
    """Share of a backward that its half for the weights takes, in [0, 1]."""
    recompute: bool = False
    """Whether each backward begins with the forward of its stage."""

    def __post_init__(self):
        for name, values in (("forward", self.forward), ("backward", self.backward), ("transfer", [self.transfer])):
            for value in values:
                if not 0 <= value < float("inf"):
                    raise ValueError(f"a {name} costs {value}; a time is a number, at least 0.")
        if not 0 <= self.weights <= 1:
            raise ValueError(f"weights is {self.weights}; it is a share of a backward, in [0, 1].")
        if len(self.forward) != len(self.backward):
            raise ValueError(f"{len(self.forward)} forward costs and {len(self.backward)} backward costs: one a stage.")

    def of(self, task: Task) -> float:
        """Time of `task`."""
        kind, stage, _ = task
        if kind == "forward":
            return self.forward[stage]
        if kind == "backward_weights":
            return self.weights * self.backward[stage]
        share = 1 - self.weights if kind == "backward_input" else 1
        return share * self.backward[stage] + (self.forward[stage] if self.recompute else 0.0)


class Span(NamedTuple):
    """A task with its start and end."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The tasks of every device in time."""

    spans: list[list[Span]]
    """Tasks of each device, in the order of time. A forward that is part of its backward has no span."""
    total: float
    """End of the last task, or of the last tick."""
    ticks: list[float] | None
    """Start of each tick; None for asynchronous devices."""
    costs: Costs
    """The costs that were simulated."""
    stages: Stages
    """The stages of each device."""

    @property
    def bubble(self) -> float:
        """Share of the time in which devices are idle, in [0, 1]."""
        busy = sum(span.end - span.start for device in self.spans for span in device)
        return 1 - busy / (len(self.spans) * self.total) if self.total else 0.0

    def peak_of_devices(self) -> list[int]:
        """Largest number of activations alive at once on each device."""
        return [_peak(device, self.costs) for device in self.spans]

    def peak_of_stages(self) -> list[int]:
        """Largest number of activations of each stage alive at once."""
        of_stage = lambda stage: [span for device in self.spans for span in device if span.task.stage == stage]
        return [_peak(of_stage(stage), self.costs) for stage in range(len(self.costs.forward))]

    def peak_bytes_of_devices(self, bytes_of_stages: Sequence[float]) -> list[float]:
        """Largest number of bytes alive at once on each device; an activation of stage s has `bytes_of_stages[s]`."""
        return [_peak(device, self.costs, lambda task: bytes_of_stages[task.stage]) for device in self.spans]


def _peak(spans: Iterable[Span], costs: Costs, weight: Callable[[Task], float] = lambda task: 1) -> float:
    """Largest sum of the weights of activations alive at once.

    An activation is alive from the start of its forward to the end of its backward, or to the end of the schedule if
    there is none. With halves it is alive to the end of the last half; but if the forward is repeated, the input of the
    stage is needed for the first half only.
    """
    changes, last = [], "backward_input" if costs.recompute else "backward_weights"
    for task, start, end in spans:
        if task.kind == "forward":
            changes.append((start, 1, weight(task)))
        if task.kind in ("backward", last):
            changes.append((end, 0, -weight(task)))
    alive = peak = 0
    for _, _, change in sorted(changes):  # an end comes before a start at the same time
        alive += change
        peak = max(peak, alive)
    return peak


def simulate(orders: Orders, p: int, m: int, v: int, costs: Costs) -> Timeline:
    """Timeline of asynchronous devices: a task starts when its device is idle and its inputs have arrived.

    Raises:
        ValueError: as `check_schedule` does, or for costs of another number of stages.
    """
    orders = check_schedule(orders, p, m, v)
    if len(costs.forward) != p * v:
        raise ValueError(f"costs of {len(costs.forward)} stages for a schedule of {p * v}: give one a stage.")
    end: dict[Task, tuple[float, int]] = {}  # by result, its time and the device that has it
    spans: list[list[Span]] = [[] for _ in range(p)]
    place, free_at = [0] * p, [0.0] * p
    while any(place[device] < len(order) for device, order in enumerate(orders)):
        for device, order in enumerate(orders):
            while place[device] < len(order):
                task = order[place[device]]
                before = needs(task, p * v)
                if not all(q in end for q in before):
                    break
                arrivals = [time + (costs.transfer if at != device else 0.0) for time, at in (end[q] for q in before)]
                start = max([free_at[device], *arrivals])
                free_at[device] = start + costs.of(task)
                end[task.result] = free_at[device], device
                place[device] += 1
                spans[device].append(Span(task, start, free_at[device]))
    return Timeline(spans, max(free_at), None, costs, stages_of_devices(orders))


def simulate_ticks(table: TickTable, costs: Costs, *, wait_between_slots: bool = True) -> Timeline:
    """Timeline of ticks, as the executor runs them: devices wait for each other, and pay a transfer, after each tick.

    Args:
        table: made by `tick_table` with the `recompute` of `costs`.
        costs: times of the tasks of each stage.
        wait_between_slots: whether devices also wait for the slowest forward before the first backward, as they do
            where sending the result of a forward blocks (CPUs). It matters only if the costs of stages differ, and
            not where a tick has one task of each device.
    """
    columns, wait_between_slots = table.columns, wait_between_slots and not table.one_message
    kinds = {"forward": "forward", "backward": "backward"}
    if table.halves:
        kinds |= {"backward": "backward_input", "weights": "backward_weights"}
    ticks, p = columns["forward"].shape
    spans: list[list[Span]] = [[] for _ in range(p)]
    starts, now = [], 0.0
    for t in range(ticks):
        starts.append(now)
        free_at = [now] * p
        for slot, kind in kinds.items():
            if wait_between_slots:
                free_at = [max(free_at)] * p
            for device in np.flatnonzero(columns[slot][t]).tolist():
                stage = table.stages[device][columns[f"{slot}_chunk"][t, device]]
                task = Task(kind, stage, int(columns[f"{slot}_microbatch"][t, device]))
                start, free_at[device] = free_at[device], free_at[device] + costs.of(task)
                spans[device].append(Span(task, start, free_at[device]))
        now = max(free_at) + costs.transfer
    return Timeline(spans, now, starts, costs, table.stages)
