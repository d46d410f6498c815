"""Runs a tick table on names: every slot holds the name of what an array would hold, and every read is compared."""

from collections.abc import Callable, Mapping, Sequence

from shardlib.schedules import Task
from shardlib.tick_tables import TickTable


def check_tick_table(
    table: TickTable,
    p: int,
    m: int,
    v: int,
    *,
    recompute: bool,
    training: bool = True,
    is_v: bool = False,
    halves: bool = False,
):
    """Runs `table` on names: every slot holds the name of what an array would hold, and every read is compared.

    What is overwritten before its last read, read before it arrived, done twice or not at all is found this way.

    Args:
        recompute: that of `tick_table`.
        training: the table has backwards.
        is_v: stages go down the devices and up again; otherwise stage s is on device s % p.
        halves: backwards are done in two halves.

    Raises:
        ValueError: names the tick, the device and the task.
    """
    device_of = lambda stage: 2 * p - 1 - stage if is_v and stage >= p else stage % p
    stages = [[stage for stage in range(p * v) if device_of(stage) == device] for device in range(p)]
    run = _Run(table, p, m, v, recompute, training, halves, stages)
    for tick in range(len(table.columns["forward"])):
        run.tick(tick)
    kinds = ("forward", *(("backward",) * training), *(("weights",) * halves))
    for task in (Task(kind, stage, k) for kind in kinds for stage in range(p * v) for k in range(m)):
        if task not in run.done:
            raise ValueError(f"the table lacks {task}.")


class _Run:
    """The buffers of all devices between two ticks. Tasks have the names of their slots."""

    def __init__(self, table, p, m, v, recompute, training, halves, stages):
        self.table, self.p, self.m, self.v, self.stages = table, p, m, v, stages
        self.recompute, self.training, self.halves = recompute, training, halves
        self.arrivals: list[list[Task | None]] = [[None] * (table.arrivals + 1) for _ in range(p)]
        self.residuals: list[list[Task | None]] = [[None] * table.residuals for _ in range(p)]
        self.kept: list[list[Task | None]] = [[None] * table.kept for _ in range(p)]
        self.forwards: list[Task | None] = [None] * p
        self.backwards: list[Task | None] = [None] * p
        self.done: set[Task] = set()
        columns = table.columns
        self.one_message = not any((columns["forward"] * columns["backward"]).flat)

    def tick(self, tick: int) -> None:
        rows = [
            {name: int(column[tick, device]) for name, column in self.table.columns.items()} for device in range(self.p)
        ]
        for device, row in enumerate(rows):
            before, after = (device - 1) % self.p, (device + 1) % self.p
            # A device that has only one result sends it everywhere.
            any_of = lambda d: self.forwards[d] or self.backwards[d]
            left = any_of(before) if self.one_message else self.forwards[before]
            right = any_of(after) if self.one_message else self.backwards[after]
            for name, sent in (("from_left", left), ("from_right", right), ("from_self", any_of(device))):
                self.arrivals[device][row[name]] = sent
        where = lambda device: f"tick {tick}, device {device}"
        for device, row in enumerate(rows):
            if row["forward_first"]:
                self.arrivals[device][row["forward_input"]] = Task("forward", -1, row["forward_microbatch"])
        if self.one_message:
            self.head(rows, where)
        self.forwards = [self.forward(device, row, where(device)) for device, row in enumerate(rows)]
        for device, row in enumerate(rows):
            self.arrivals[device][min(row["forward_output"], self.table.arrivals)] = self.forwards[device]
        if not self.one_message:
            self.head(rows, where)
        self.backwards = [self.backward(device, row, where(device)) for device, row in enumerate(rows)]
        for device, row in enumerate(rows):
            self.weights(device, row, where(device))

    def head(self, rows: Sequence[Mapping[str, int]], where: Callable[[int], str]) -> None:
        """The loss: its gradient replaces the output of the last stage."""
        for device, row in enumerate(rows):
            if row["backward_last"]:
                slots, slot, last, k = (
                    self.arrivals[device],
                    row["backward_cotangent"],
                    self.p * self.v - 1,
                    row["backward_microbatch"],
                )
                task = Task("backward", last + 1, k)
                _compare(where(device), task, "arrivals", slots, slot, Task("forward", last, k))
                slots[slot] = task

    def forward(self, device: int, row: Mapping[str, int], where: str) -> Task | None:
        task = self.task("forward", device, row, where)
        if task is None:
            return None
        _, stage, k = task
        needed = Task("forward", stage - 1, k)
        _compare(where, task, "arrivals", self.arrivals[device], row["forward_input"], needed)
        if self.training and not self.recompute:
            self.residuals[device][row["forward_residuals"]] = task
        return task

    def backward(self, device: int, row: Mapping[str, int], where: str) -> Task | None:
        task = self.task("backward", device, row, where)
        if task is None:
            return None
        _, stage, k = task
        forward = Task("forward", stage, k)
        if self.recompute:
            needed = Task("forward", stage - 1, k)
            _compare(where, task, "arrivals", self.arrivals[device], row["backward_input"], needed)
        else:
            _compare(where, task, "residuals", self.residuals[device], row["backward_residuals"], forward)
        needed = Task("backward", stage + 1, k)
        _compare(where, task, "arrivals", self.arrivals[device], row["backward_cotangent"], needed)
        if self.halves:
            self.kept[device][row["backward_kept"]] = task
        return task

    def weights(self, device: int, row: Mapping[str, int], where: str) -> None:
        task = self.task("weights", device, row, where)
        if task is None:
            return
        _, stage, k = task
        _compare(where, task, "kept", self.kept[device], row["weights_kept"], Task("backward", stage, k))
        if not self.recompute:
            needed = Task("forward", stage, k)
            _compare(where, task, "residuals", self.residuals[device], row["weights_residuals"], needed)

    def task(self, slot: str, device: int, row: Mapping[str, int], where: str) -> Task | None:
        """The task in a slot, once its flags and ranges are found right."""
        if not row[slot]:
            idle = {"forward_output": self.table.arrivals}
            if marked := [name for name, value in row.items() if name.startswith(slot) and value != idle.get(name, 0)]:
                raise ValueError(f"{where}: no {slot}, but {', '.join(marked)} not 0.")
            return None
        chunk, k = row[f"{slot}_chunk"], row[f"{slot}_microbatch"]
        if not (0 <= chunk < self.v and 0 <= k < self.m):
            raise ValueError(f"{where}: the {slot} of chunk {chunk}, microbatch {k} does not exist.")
        task = Task(slot, self.stages[device][chunk], k)
        is_first, is_last = task.stage == 0, task.stage == self.p * self.v - 1
        if slot != "weights" and (row[f"{slot}_first"], row[f"{slot}_last"]) != (is_first, is_last):
            raise ValueError(f"{where}: {task} is marked wrongly as first or last stage.")
        if task in self.done:
            raise ValueError(f"{where}: {task} is done a second time.")
        self.done.add(task)
        return task


def _compare(where: str, task: Task, buffer: str, slots: Sequence[Task | None], slot: int, needed: Task) -> None:
    held = slots[slot] if 0 <= slot < len(slots) else "nothing: there is no such slot"
    if held != needed:
        raise ValueError(f"{where}: {task} reads slot {slot} of {buffer}, which holds {held}, not {needed}.")
