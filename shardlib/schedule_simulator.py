"""Runs a pipeline schedule at made-up costs, with no devices: when each task starts and ends, the bubble, the memory.

Two models. **Asynchronous** devices take their tasks in order, each as soon as what it needs has arrived: what a
runtime with one program a device can reach. **Ticks** are how the executor runs: all devices begin each tick together,
do a forward, then a backward. `check_tick_table` runs a tick table on names in place of arrays.
Knows no JAX.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardlib.schedules import Orders, Task, TickTable, check_schedule, needs

# ---- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Times in one unit of any size, each at least 0."""

    forward: Sequence[float]
    """Of each stage, for one microbatch."""
    backward: Sequence[float]
    """Of each stage, from what its forward kept; a recomputed forward comes on top."""
    transfer: float = 0.0
    """From one device to the next, not hidden behind a task: between the two tasks, or once a tick."""
    recompute: bool = False
    """Every backward begins with the stage's forward."""
    fuse_last: bool = False
    """The last stage's forward is part of its backward, and is done once whether or not the others are recomputed."""

    def __post_init__(self):
        for name, values in (("forward", self.forward), ("backward", self.backward), ("transfer", [self.transfer])):
            for value in values:
                if not 0 <= value < float("inf"):
                    raise ValueError(f"a {name} costs {value}; a time is a number, at least 0.")
        if len(self.forward) != len(self.backward):
            raise ValueError(f"{len(self.forward)} forward costs and {len(self.backward)} backward costs: one a stage.")

    def fused(self, task: Task) -> bool:
        """`task` is the backward that its forward is part of."""
        return self.fuse_last and task.kind == "backward" and task.stage == len(self.forward) - 1

    def of(self, task: Task) -> float:
        """How long `task` takes. A forward that is part of its backward takes 0."""
        kind, stage, _ = task
        if kind == "forward":
            return 0.0 if self.fuse_last and stage == len(self.forward) - 1 else self.forward[stage]
        return self.backward[stage] + (self.forward[stage] if self.recompute or self.fused(task) else 0.0)


class Span(NamedTuple):
    """A task, and when it is done."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every device does, and when."""

    spans: list[list[Span]]
    """Of each device, in the order of time. A forward that is part of its backward has none."""
    total: float
    """The end of the last task, and in ticks the end of the last tick."""
    ticks: list[float] | None
    """When each tick starts; None of asynchronous devices."""
    costs: Costs

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they have nothing to do, in [0, 1]."""
        busy = sum(span.end - span.start for device in self.spans for span in device)
        return 1 - busy / (len(self.spans) * self.total) if self.total else 0.0

    def peak_of_devices(self) -> list[int]:
        """The most activations that are alive at once on each device."""
        return [_peak(device, self.costs) for device in self.spans]

    def peak_of_stages(self) -> list[int]:
        """The most activations that are alive at once of each stage."""
        p = len(self.spans)
        of_stage = lambda stage: [span for span in self.spans[stage % p] if span.task.stage == stage]
        return [_peak(of_stage(stage), self.costs) for stage in range(len(self.costs.forward))]

    def peak_bytes_of_devices(self, bytes_of_stages: Sequence[float]) -> list[float]:
        """The most bytes alive at once on each device, where an activation of stage s has `bytes_of_stages[s]`."""
        return [_peak(device, self.costs, lambda task: bytes_of_stages[task.stage]) for device in self.spans]


def _peak(spans: Iterable[Span], costs: Costs, weight: Callable[[Task], float] = lambda task: 1) -> float:
    """The largest sum of weights alive at once. An activation is alive from the start of its forward to the end of its
    backward, or for ever if there is none; with a forward inside its backward, from the start of that."""
    changes = []
    for task, start, end in spans:
        if task.kind == "forward" or costs.fused(task):
            changes.append((start, 1, weight(task)))
        if task.kind == "backward":
            changes.append((end, 0, -weight(task)))
    alive = peak = 0
    for _, _, change in sorted(changes):  # what ends at a time makes room for what starts at it
        alive += change
        peak = max(peak, alive)
    return peak


def simulate(orders: Orders, p: int, m: int, v: int, costs: Costs) -> Timeline:
    """Asynchronous devices: a task starts when its device is free and what it needs has arrived.

    Raises:
        ValueError: as `check_schedule`, or costs of another number of stages.
    """
    orders = check_schedule(orders, p, m, v)
    _check_stages(costs, p * v)
    end: dict[Task, float] = {}
    spans: list[list[Span]] = [[] for _ in range(p)]
    place, free_at = [0] * p, [0.0] * p
    while any(place[device] < len(order) for device, order in enumerate(orders)):
        for device, order in enumerate(orders):
            while place[device] < len(order):
                task = order[place[device]]
                before = needs(task, p * v)
                if not all(q in end for q in before):
                    break
                arrivals = [end[q] + (costs.transfer if q.stage % p != device else 0.0) for q in before]
                start = max([free_at[device], *arrivals])
                end[task] = free_at[device] = start + costs.of(task)
                place[device] += 1
                if not (costs.fuse_last and task.kind == "forward" and task.stage == p * v - 1):
                    spans[device].append(Span(task, start, end[task]))
    return Timeline(spans, max(end.values()), None, costs)


def simulate_ticks(table: TickTable, costs: Costs, *, wait_between_slots: bool = True) -> Timeline:
    """Ticks, as the executor runs them: in each, the devices wait for each other at the end, and a transfer is paid.

    Args:
        table: made by `tick_table` with the same `recompute` and `fuse_last` as `costs`.
        wait_between_slots: they also wait for the slowest forward before the first backward: so it is where sending a
            forward's result blocks, as on CPUs. It makes a difference only between stages of unequal costs.
    """
    columns = table.columns
    ticks, p = columns["forward"].shape
    spans: list[list[Span]] = [[] for _ in range(p)]
    starts, now = [], 0.0
    for t in range(ticks):
        starts.append(now)
        free_at = [now] * p
        for kind in ("forward", "backward"):
            if wait_between_slots:
                free_at = [max(free_at)] * p
            for device in np.flatnonzero(columns[kind][t]).tolist():
                task = _task_at(columns, kind, t, device)
                start, free_at[device] = free_at[device], free_at[device] + costs.of(task)
                spans[device].append(Span(task, start, free_at[device]))
        now = max(free_at) + costs.transfer
    return Timeline(spans, now, starts, costs)


def _task_at(columns: Mapping[str, np.ndarray], kind: str, tick: int, device: int) -> Task:
    chunk, k = columns[f"{kind}_chunk"][tick, device], columns[f"{kind}_microbatch"][tick, device]
    return Task(kind, int(chunk) * columns[kind].shape[1] + device, int(k))


def _check_stages(costs: Costs, stages: int) -> None:
    if len(costs.forward) != stages:
        raise ValueError(f"costs of {len(costs.forward)} stages for a schedule of {stages}: give one a stage.")


# ---- validity of a tick table -------------------------------------------------------------------------------------


def check_tick_table(table: TickTable, p: int, m: int, v: int, *, recompute: bool, fuse_last: bool, training=True):
    """Runs `table` on names: every slot holds the name of what an array would hold, and every read is compared.

    What is overwritten before its last read, read before it arrived, done twice or not at all is found this way.

    Args:
        recompute, fuse_last: those of `tick_table`.
        training: the table has backwards.

    Raises:
        ValueError: names the tick, the device and the task.
    """
    run = _Run(table, p, m, v, recompute, fuse_last, training)
    for tick in range(len(table.columns["forward"])):
        run.tick(tick)
    kinds = ("forward", "backward") if training else ("forward",)
    for task in (Task(kind, stage, k) for kind in kinds for stage in range(p * v) for k in range(m)):
        if task not in run.done and not (task.kind == "forward" and run.fused(task.stage)):
            raise ValueError(f"the table lacks {task}.")


class _Run:
    """The buffers of all devices between two ticks."""

    def __init__(self, table: TickTable, p: int, m: int, v: int, recompute: bool, fuse_last: bool, training: bool):
        self.table, self.p, self.m, self.v = table, p, m, v
        self.recompute, self.fuse_last, self.training = recompute, fuse_last, training
        self.inputs: list[list[Task | None]] = [[None] * (table.inputs + 1) for _ in range(p)]
        self.cotangents: list[list[Task | None]] = [[None] * (table.cotangents + 1) for _ in range(p)]
        self.residuals: list[list[Task | None]] = [[None] * table.residuals for _ in range(p)]
        self.sent_up: list[Task | None] = [None] * p
        self.sent_down: list[Task | None] = [None] * p
        self.done: set[Task] = set()

    def fused(self, stage: int) -> bool:
        return self.fuse_last and stage == self.p * self.v - 1

    def tick(self, tick: int) -> None:
        rows = [
            {name: int(column[tick, device]) for name, column in self.table.columns.items()} for device in range(self.p)
        ]
        for device, row in enumerate(rows):
            self.inputs[device][row["arriving_input"]] = self.sent_up[(device - 1) % self.p]
            self.cotangents[device][row["arriving_cotangent"]] = self.sent_down[(device + 1) % self.p]
        where = lambda device: f"tick {tick}, device {device}"
        self.sent_up = [self.forward(device, row, where(device)) for device, row in enumerate(rows)]
        self.sent_down = [self.backward(device, row, where(device)) for device, row in enumerate(rows)]

    def forward(self, device: int, row: Mapping[str, int], where: str) -> Task | None:
        task = self.task("forward", device, row, where)
        if task is None:
            return None
        _, stage, k = task
        if self.fused(stage):
            raise ValueError(f"{where}: {task} is part of its backward, and a forward too.")
        if stage:
            _compare(where, task, "inputs", self.inputs[device], row["forward_input"], Task("forward", stage - 1, k))
        if self.training and not self.recompute:
            self.residuals[device][row["forward_residuals"]] = task
        return task

    def backward(self, device: int, row: Mapping[str, int], where: str) -> Task | None:
        task = self.task("backward", device, row, where)
        if task is None:
            return None
        _, stage, k = task
        forward = Task("forward", stage, k)
        if not self.fused(stage) and forward not in self.done:
            raise ValueError(f"{where}: {task} is before {forward}.")
        if not (self.recompute or self.fused(stage)):
            _compare(where, task, "residuals", self.residuals[device], row["backward_residuals"], forward)
        elif stage:
            _compare(where, task, "inputs", self.inputs[device], row["backward_input"], Task("forward", stage - 1, k))
        if stage < self.p * self.v - 1:
            needed = Task("backward", stage + 1, k)
            _compare(where, task, "cotangents", self.cotangents[device], row["backward_cotangent"], needed)
        return task

    def task(self, kind: str, device: int, row: Mapping[str, int], where: str) -> Task | None:
        """The task in a slot, once its flags and ranges are found right."""
        if not row[kind]:
            if marked := [name for name, value in row.items() if name.startswith(kind) and value]:
                raise ValueError(f"{where}: no {kind}, but {', '.join(marked)} not 0.")
            return None
        chunk, k = row[f"{kind}_chunk"], row[f"{kind}_microbatch"]
        task = Task(kind, chunk * self.p + device, k)
        if not (0 <= chunk < self.v and 0 <= k < self.m):
            raise ValueError(f"{where}: {task} does not exist.")
        is_first, is_last = task.stage == 0, task.stage == self.p * self.v - 1
        if (row[f"{kind}_first"], row[f"{kind}_last"]) != (is_first, is_last):
            raise ValueError(f"{where}: {task} is marked wrongly as first or last stage.")
        if task in self.done:
            raise ValueError(f"{where}: {task} is done a second time.")
        self.done.add(task)
        return task


def _compare(where: str, task: Task, buffer: str, slots: Sequence[Task | None], slot: int, needed: Task) -> None:
    held = slots[slot] if 0 <= slot < len(slots) else "nothing: there is no such slot"
    if held != needed:
        raise ValueError(f"{where}: {task} reads slot {slot} of {buffer}, which holds {held}, not {needed}.")
