"""Runs a tick table on names: every slot holds the name of what an array would hold, and every read
is compared.
"""

from collections.abc import Mapping

from shardlib.schedules import Task
from shardlib.tick_tables import TickTable


def check_tick_table(table: TickTable, m: int, training: bool = True) -> None:
    """Finds what is overwritten before its last read, read before it arrived, done twice or not at
    all.

    Args:
        table: the table. Its `stages` and `halves` are trusted.
        m: the number of microbatches.
        training: the table has backwards.

    Raises:
        ValueError: names the tick, the device and the task.
    """
    p, stages = len(table.stages), sum(map(len, table.stages))
    devices = [_Device(table, device, stages - 1, training) for device in range(p)]
    one_message = not (table.columns["forward"] * table.columns["backward"]).any()
    for tick in range(len(table.columns["forward"])):
        sent = [(device.forward, device.backward) for device in devices]
        for device in devices:
            device.begin(tick)
            # A device that has only one result sends it everywhere.
            (left, left_back), (right_forward, right) = (
                sent[device.number - 1],
                sent[(device.number + 1) % p],
            )
            own, own_back = sent[device.number]
            device.arrivals[device.row["from_left"]] = left or (left_back if one_message else None)
            device.arrivals[device.row["from_right"]] = right or (
                right_forward if one_message else None
            )
            device.arrivals[device.row["from_self"]] = own or own_back
        for device in devices:
            device.run(one_message)
    kinds = ("forward", *(("backward",) * training), *(("weights",) * table.halves))
    done = set().union(*(device.done for device in devices))
    for task in (
        Task(kind, stage, k) for kind in kinds for stage in range(stages) for k in range(m)
    ):
        if task not in done:
            raise ValueError(f"the table lacks {task}.")


class _Device:
    """The buffers of a device. Tasks have the names of their slots in the table."""

    def __init__(self, table: TickTable, number: int, last: int, training: bool):
        self.table, self.number, self.stages, self.last = table, number, table.stages[number], last
        self.saves = training
        self.arrivals: list[Task | None] = [None] * (table.arrivals + 1)
        self.residuals: list[Task | None] = [None] * table.residuals
        self.kept: list[Task | None] = [None] * table.kept
        self.forward: Task | None = None
        self.backward: Task | None = None
        self.done: set[Task] = set()

    def begin(self, tick: int) -> None:
        self.row: Mapping[str, int] = {
            name: int(c[tick, self.number]) for name, c in self.table.columns.items()
        }
        self.where = f"tick {tick}, device {self.number}"

    def run(self, one_message: bool) -> None:
        row, forward, backward, weights = (
            self.row,
            *map(self.task, ("forward", "backward", "weights")),
        )
        if row["forward_first"]:
            self.arrivals[row["forward_input"]] = Task("forward", -1, row["forward_microbatch"])
        if one_message:
            self.head()
        if forward:
            self.compare(
                forward, "arrivals", "forward_input", forward._replace(stage=forward.stage - 1)
            )
            if self.saves:
                self.residuals[row["forward_residuals"]] = forward
        self.forward = forward
        self.arrivals[row["forward_output"]] = forward
        if not one_message:
            self.head()
        if backward:
            _, stage, k = backward
            self.compare(backward, "residuals", "backward_residuals", Task("forward", stage, k))
            self.compare(backward, "arrivals", "backward_cotangent", Task("backward", stage + 1, k))
            if self.table.halves:
                self.kept[row["backward_kept"]] = backward
        self.backward = backward
        if weights:
            self.compare(weights, "kept", "weights_kept", weights._replace(kind="backward"))
            self.compare(
                weights, "residuals", "weights_residuals", weights._replace(kind="forward")
            )

    def head(self) -> None:
        """The loss: its gradient replaces the output of the last stage."""
        if self.row["backward_last"]:
            task = Task("backward", self.last + 1, self.row["backward_microbatch"])
            self.compare(
                task, "arrivals", "backward_cotangent", Task("forward", self.last, task.microbatch)
            )
            self.arrivals[self.row["backward_cotangent"]] = task

    def task(self, slot: str) -> Task | None:
        """The task in a slot, once its flags are found right."""
        if not self.row[slot]:
            return None
        task = Task(slot, self.stages[self.row[f"{slot}_chunk"]], self.row[f"{slot}_microbatch"])
        is_end = task.stage == 0, task.stage == self.last
        if slot != "weights" and (self.row[f"{slot}_first"], self.row[f"{slot}_last"]) != is_end:
            raise ValueError(f"{self.where}: {task} is marked wrongly as first or last stage.")
        if task in self.done:
            raise ValueError(f"{self.where}: {task} is done a second time.")
        self.done.add(task)
        return task

    def compare(self, task: Task, buffer: str, column: str, needed: Task) -> None:
        slots, slot = getattr(self, buffer), self.row[column]
        held = slots[slot] if slot < len(slots) else "nothing: there is no such slot"
        if held != needed:
            raise ValueError(
                f"{self.where}: {task} reads slot {slot} of {buffer}, which holds {held}, not "
                f"{needed}."
            )
