"""Runs a tick table on names: every slot holds the name of what an array would hold, and every read is compared."""

from collections.abc import Mapping, Sequence

from shardlib.schedules import Task, TickTable


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
