"""Builds the table of ticks that the executor runs from the tasks of a schedule.

It also simulates the table at given costs. A **tick** is a forward slot, a backward slot and a
weights slot on every device. `place_in_ticks` decides which of them a device uses at once. The
result of a task is sent at the end of the tick and arrives at the start of the next one. This
module does not import JAX.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardlib.schedules import (
    Orders,
    Stages,
    Task,
    in_a_ring,
    in_halves,
    place_in_ticks,
    stages_of_devices,
)

COLUMNS = (
    *("forward", "forward_first", "forward_last", "forward_chunk", "forward_microbatch"),
    *("forward_input", "forward_output", "forward_residuals"),
    *("backward", "backward_first", "backward_last", "backward_chunk", "backward_microbatch"),
    *("backward_cotangent", "backward_residuals", "backward_kept"),
    *("weights", "weights_chunk", "weights_microbatch", "weights_residuals", "weights_kept"),
    *("from_left", "from_right", "from_self"),
)


@dataclass(frozen=True)
class TickTable:
    """The task and the buffer slots of every device in every tick."""

    columns: dict[str, np.ndarray]
    """Columns by name, each int32 [ticks, p], 0 where a device is idle unless noted.

    forward, backward, weights: 1 where the slot of the tick has a task. With `halves`, `backward`
        is the input half of a backward and `weights` its other half; otherwise `backward` is all of
        it. For that task:
    …_first, …_last: 1 if its stage is the first or the last.
    …_chunk in [0, v), …_microbatch in [0, m).
    forward_input: the slot of `arrivals` with the stage's input. That of the first stage is written
        at the start of its forward's tick.
    forward_output: the slot of `arrivals` that the last stage writes, for the loss; `arrivals` for
        other stages.
    backward_cotangent: the slot of `arrivals` with the gradient of the stage's output. For the last
        stage it is that of forward_output, in which the gradient replaces the output.
    forward_residuals, backward_residuals, weights_residuals: the slot of `residuals` to write, and
        to read.
    backward_kept, weights_kept: the slot of `kept` to write, and to read.
    from_left, from_right, from_self: the slot of `arrivals` for what device d - 1, d + 1 or d
        itself sent in the tick before. It is written before anything is read. Where nothing arrives
        it is `arrivals`: one slot past the last, which is never read.
    """
    stages: Stages
    """The stages of each device."""
    arrivals: int
    """Number of slots for what arrives, inputs of stages and gradients of their outputs, on the
    fullest device."""
    residuals: int
    """Number of slots for what a forward keeps for its backward."""
    kept: int
    """Number of slots for what the input half of a backward keeps for the other half."""

    @property
    def halves(self) -> bool:
        """True if backwards run in two halves."""
        return bool(self.columns["weights"].any())

    @property
    def one_message(self) -> bool:
        """True if no device has two results to send in one tick."""
        return not (self.columns["forward"] & self.columns["backward"]).any()


def tick_table(orders: Orders) -> TickTable:
    """Places tasks in ticks, as early as their order allows.

    It also assigns a slot to everything that is kept. `orders` is a schedule, or its `forwards`:
    the columns of backwards are then 0. If a schedule has any backward in halves, all its backwards
    run as two halves, one after the other. A stage's input is kept until its forward, and residuals
    from the forward to the end of the backward. The last stage keeps its output until its backward.
    """
    by_device = stages_of_devices(orders)
    device_of = {stage: device for device, own in enumerate(by_device) for stage in own}
    if any(task.kind == "backward_weights" for order in orders for task in order):
        orders = [[half for task in order for half in in_halves(task)] for order in orders]
    at = place_in_ticks(orders)
    lifetimes = _lifetimes(at)
    arrival_slots, arrivals = _give_slots(lifetimes.arrivals, device_of)
    residual_slots, residuals = _give_slots(lifetimes.residuals, device_of)
    kept_slots, kept = _give_slots(lifetimes.kept, device_of)
    slots = _Buffers(arrival_slots, residual_slots, kept_slots)

    ticks = 1 + max(at.values())
    p = len(by_device)
    last = len(device_of) - 1
    columns = {name: np.zeros((ticks, p), np.int32) for name in COLUMNS}
    for name in ("forward_output", *WAYS.values()):
        columns[name][:] = arrivals
    for task, t in at.items():
        device, slot = device_of[task.stage], _SLOTS[task.kind]
        entries = _entries_of(task, slots, last, nowhere=arrivals)
        for name, value in entries.items():
            if slot + name in columns:
                columns[slot + name][t, device] = value
        columns[f"{slot}_chunk"][t, device] = by_device[device].index(task.stage)
        to = task.stage + 1 if slot == "forward" else task.stage - 1
        if slot != "weights" and 0 <= to <= last:
            way = _way(task.stage, to, by_device, device_of)
            columns[way][t + 1, device_of[to]] = arrival_slots[slot, to, task.microbatch]
    return TickTable(columns, by_device, arrivals, residuals, kept)


_SLOTS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weights": "weights",
}
"""The slot of a tick in which a task of each kind runs."""
WAYS = {1: "from_left", -1: "from_right", 0: "from_self"}
"""The column of what arrives, by how many devices to the right it was sent."""
_Kept = tuple[str, int, int]  # what, stage, microbatch


class _Buffers(NamedTuple):
    """An entry for each value that is kept in a buffer: a slot, or a first and a last tick."""

    arrivals: dict[_Kept, Any]
    residuals: dict[_Kept, Any]
    kept: dict[_Kept, Any]


def _lifetimes(at: dict[Task, int]) -> _Buffers:
    """The ticks in which each value is written and last read, if tasks run in the ticks `at`."""

    def ticks_of(*kinds: str) -> dict[tuple[int, int], int]:
        return {(task.stage, task.microbatch): t for task, t in at.items() if task.kind in kinds}

    f = ticks_of("forward")
    b = ticks_of("backward", "backward_input")
    w = ticks_of("backward_weights")
    last = max(stage for stage, _ in f)
    found = _Buffers({}, {}, {})
    for stage, k in f:
        written = f[stage - 1, k] + 1 if stage else f[stage, k]
        found.arrivals["forward", stage, k] = written, f[stage, k]
        if b:
            written = f[stage, k] if stage == last else b[stage + 1, k] + 1
            found.arrivals["backward", stage, k] = written, b[stage, k]
            found.residuals["forward", stage, k] = f[stage, k], (w or b)[stage, k]
        if w:
            found.kept["backward", stage, k] = b[stage, k], w[stage, k]
    return found


def _entries_of(task: Task, slots: _Buffers, last: int, nowhere: int) -> dict[str, int]:
    """What the columns of a task's slot say of it, except its chunk; see `TickTable.columns`."""
    _, stage, k = task
    output = nowhere
    if stage == last:
        output = slots.arrivals.get(("backward", stage, k), nowhere)
    return {
        "": 1,
        "_first": stage == 0,
        "_last": stage == last,
        "_microbatch": k,
        "_input": slots.arrivals["forward", stage, k],
        "_output": output,
        "_cotangent": slots.arrivals.get(("backward", stage, k), 0),
        "_residuals": slots.residuals.get(("forward", stage, k), 0),
        "_kept": slots.kept.get(("backward", stage, k), 0),
    }


def _way(stage: int, to: int, by_device: Stages, device_of: dict[int, int]) -> str:
    """The column by which the result of `stage` arrives at the stage `to`."""
    p = len(by_device)
    v = len(by_device[0])
    # With one or two devices, both ways lead to the same one: in a ring, forwards go right and
    # backwards left.
    step = to - stage if by_device == in_a_ring(p, v) else device_of[to] - device_of[stage]
    return WAYS.get(step) or WAYS[step - p if step > 0 else step + p]  # around the ring


def _give_slots(
    kept: dict[_Kept, tuple[int, int]], device_of: dict[int, int]
) -> tuple[dict[_Kept, int], int]:
    """Assigns each kept value a slot in a buffer.

    Also returns the number of slots on the fullest device. In the order of their first ticks, each
    gets the lowest slot that is free by then, which takes the fewest slots.
    """
    slots: dict[_Kept, int] = {}
    busy_until: dict[int, list[int]] = {device: [] for device in device_of.values()}
    for key, (first, last) in sorted(kept.items(), key=lambda item: item[1]):
        ends = busy_until[device_of[key[1]]]
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot : slot + 1] = [last]
        slots[key] = slot
    return slots, max(map(len, busy_until.values()))


# ---- simulation ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Times in any unit, each at least 0. Those of tasks are for all layers of a device."""

    forward: float = 1.0
    """Time of the forward of one microbatch."""
    backward: float = 2.0
    """Time of the backward of one microbatch, both halves."""
    transfer: float = 0.0
    """Time of a transfer to the next device, once in each tick."""
    weights: float = 0.5
    """Share of a backward spent in its weights half, in [0, 1]."""


class Span(NamedTuple):
    """A task with its start and end."""

    kind: str
    """forward; backward, whole or its input half; or weights, its other half."""
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

        An activation is alive from the start of its forward to the end of its backward, including
        both halves.
        """
        columns = self.table.columns
        first = columns["forward"]
        last = columns["weights" if self.table.halves else "backward"]
        # In a tick the forward comes first.
        return (np.cumsum(first, axis=0) - np.cumsum(last, axis=0) + last).max(axis=0).tolist()


def simulate(table: TickTable, costs: Costs) -> Timeline:
    """Times a tick table as the executor runs it.

    In each tick, devices wait for each other and pay one transfer. They also wait for all forwards
    before a backward, because they compute the loss together in between, unless each device has one
    task per tick.
    """
    columns = table.columns
    ticks, p = columns["forward"].shape
    backward = (1 - costs.weights if table.halves else 1) * costs.backward
    times = {
        "forward": costs.forward,
        "backward": backward,
        "weights": costs.weights * costs.backward,
    }
    spans: list[list[Span]] = [[] for _ in range(p)]
    starts = []
    now = 0.0
    for t in range(ticks):
        starts.append(now)
        free_at = [now] * p
        for slot, time in times.items():
            if not table.one_message:
                free_at = [max(free_at)] * p
            for device in np.flatnonzero(columns[slot][t]).tolist():
                stage = table.stages[device][columns[f"{slot}_chunk"][t, device]]
                k = int(columns[f"{slot}_microbatch"][t, device])
                start = free_at[device]
                free_at[device] = start + time / len(table.stages[device])
                spans[device].append(Span(slot, stage, k, start, free_at[device]))
        now = max(free_at) + costs.transfer
    return Timeline(table, spans, now, starts)
