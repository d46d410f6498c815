"""Tasks of pipeline stages, what each needs, and the check that lists of them can run.

A backward has two halves, which a schedule may list by themselves: `backward_input` computes the gradient of the
stage's input, for which the stage before waits, and `backward_weights` the gradients of the stage's weights, for which
nobody waits. This module does not import JAX.
"""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

KINDS = ("forward", "backward", "backward_input", "backward_weights")


class Task(NamedTuple):
    """What is done with one microbatch in one stage."""

    kind: str
    """One of KINDS: `backward` is both halves at once."""
    stage: int
    """Number of the stage, in [0, p·v)."""
    microbatch: int
    """Number of the microbatch, in [0, m)."""

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage}, microbatch {self.microbatch}"

    @property
    def result(self) -> "Task":
        """The name under which `needs` lists it: an input half gives what the whole backward gives to others."""
        return self._replace(kind="backward") if self.kind == "backward_input" else self


Orders = Sequence[Sequence[Task]]
"""The tasks of each device, in order."""


def needs(task: Task, stages: int) -> list[Task]:
    """The `Task.result` of the tasks that `task` needs."""
    kind, stage, k = task
    if kind == "forward":
        return [Task("forward", stage - 1, k)] if stage else []
    if kind == "backward_weights":
        return [Task("backward", stage, k)]
    return [Task("forward", stage, k)] + ([Task("backward", stage + 1, k)] if stage < stages - 1 else [])


# ---- validity -----------------------------------------------------------------------------------------------------


def check_schedule(orders: Orders, p: int, m: int, v: int) -> list[list[Task]]:
    """Checks a schedule of forwards and backwards, in which a task is any (kind, stage, microbatch).

    Returns the orders, with every task as a `Task`.

    Raises:
        ValueError: a task is missing or listed twice, a stage is on two devices or far from the stage before, or
            devices wait for each other forever.
    """
    orders = check_tasks(orders, p, m, v, training=True)
    place(orders, p * v)
    return orders


def check_sizes(p: int, m: int, v: int) -> None:
    """Raises ValueError for a number below 1."""
    for value, what in ((p, "devices of the axis p"), (m, "microbatches"), (v, "chunks per device (v)")):
        if operator.index(value) < 1:
            raise ValueError(f"{value} {what}: there must be at least 1.")


def check_tasks(orders: Orders, p: int, m: int, v: int, training: bool) -> list[list[Task]]:
    """As `check_schedule`, without the search for devices that wait forever. Only forwards if not `training`."""
    check_sizes(p, m, v)
    if isinstance(orders, str | Mapping) or not isinstance(orders, Sequence) or len(orders) != p:
        size = f"a list of {len(orders)}" if isinstance(orders, Sequence) else f"{type(orders).__name__}"
        raise ValueError(f"a schedule is a list of tasks for each of {p} devices, not {size}.")
    kinds = KINDS if training else KINDS[:1]
    checked = []
    for device, order in enumerate(orders):
        if not isinstance(order, Iterable):
            raise ValueError(f"the tasks of device {device} are {order!r}; give a list of them.")
        checked.append([_as_task(task, i, device, kinds, p * v, m) for i, task in enumerate(order)])
    device_of = _check_devices(checked, p, v)
    seen: set[Task] = set()
    for device, order in enumerate(checked):
        for task in order:
            if task in seen:
                raise ValueError(f"{task} is twice in the list of device {device}. Every task runs once.")
            seen.add(task)
    for stage, k in itertools.product(range(p * v), range(m)):
        whole, *halves = (Task(kind, stage, k) for kind in KINDS[1:])
        if whole in seen and (half := next((task for task in halves if task in seen), None)):
            raise ValueError(f"{half} is listed beside {whole}, of which it is a half. List one or the other.")
        wanted = [Task("forward", stage, k)]
        if training:
            wanted += halves if any(task in seen for task in halves) else [whole]
        for task in wanted:
            if task not in seen:
                raise ValueError(f"{task} is missing from the list of device {device_of[stage]}.")
    return checked


def _as_task(task: object, i: int, device: int, kinds: Sequence[str], stages: int, m: int) -> Task:
    where = f"entry {i} of device {device}"
    try:
        kind, stage, k = task  # type: ignore[misc]
        task = Task(kind, operator.index(stage), operator.index(k))
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {task!r}; a task is Task(kind, stage, microbatch).") from None
    if kind not in kinds:
        raise ValueError(f"{where} has the kind {kind!r}; it must be {' or '.join(kinds)}.")
    for value, size, what in ((task.stage, stages, "stage"), (task.microbatch, m, "microbatch")):
        if not 0 <= value < size:
            raise ValueError(f"{where} is {task}; the {what} must be in 0..{size - 1}.")
    return task


# ---- where the stages are -----------------------------------------------------------------------------------------


Stages = tuple[tuple[int, ...], ...]
"""The stages of each device, in the order of its chunks."""


def stages_of_devices(orders: Orders) -> Stages:
    """Where a schedule has the stages. The chunks of a device are in the order of its stages."""
    return tuple(tuple(sorted({task.stage for task in order})) for order in orders)


def in_a_ring(p: int, v: int) -> Stages:
    """The usual place of stages: stage s is chunk s // p of device s % p."""
    return tuple(tuple(range(device, p * v, p)) for device in range(p))


def _check_devices(orders: Orders, p: int, v: int) -> dict[int, int]:
    """The device of each stage, by whose list has its tasks.

    Raises:
        ValueError: a stage is on two devices, a device has not v stages, or results would have to go further than to
            the next device.
    """
    first: dict[int, tuple[Task, int]] = {}
    for device, order in enumerate(orders):
        for task in order:
            other, at = first.setdefault(task.stage, (task, device))
            if at != device:
                raise ValueError(
                    f"{task} is on device {device}, but {other} is on device {at}. All tasks of a stage are on one "
                    "device."
                )
    device_of = {stage: device for stage, (_, device) in sorted(first.items())}
    for stage in range(p * v):
        if stage not in device_of:
            raise ValueError(f"no device has a task of stage {stage}; there are {p * v} stages.")
    for device in range(p):
        found = [stage for stage, at in device_of.items() if at == device]
        if len(found) != v:
            raise ValueError(f"device {device} has {len(found)} stages: {found}. Each device has {v}.")
    for stage in range(1, p * v):
        here, there = device_of[stage - 1], device_of[stage]
        if (there - here) % p not in (0, 1, p - 1):
            raise ValueError(
                f"stage {stage - 1} is on device {here} and stage {stage} on device {there}. A result goes to the same "
                f"device or to a neighbour in the ring of {p}."
            )
    return device_of


# ---- ticks --------------------------------------------------------------------------------------------------------


def one_a_tick(orders: Orders, p: int) -> bool:
    """Whether a device does one task in a tick. Otherwise it may do a forward and a backward.

    With halves, a task is so short that the next stage should not wait longer for its result. Where stages are not in
    a ring, a result may go either way, and a tick sends one.
    """
    tasks = ((device, task) for device, order in enumerate(orders) for task in order)
    return any(task.kind == "backward_weights" or task.stage % p != device for device, task in tasks)


def place(orders: Orders, stages: int) -> tuple[dict[Task, int], int]:
    """The earliest tick of each task, and the number of ticks.

    A device takes tasks off its list, in order, as long as the tick has room for them (`one_a_tick`) and their inputs
    are there. If a backward and the forward after it in the list share a tick, the forward runs first.

    Raises:
        ValueError: devices wait for each other forever.
    """
    alone = one_a_tick(orders, len(orders))
    reached, at, tick = [0] * len(orders), {}, 0
    done: set[Task] = set()
    while any(i < len(order) for i, order in zip(reached, orders, strict=True)):
        new: dict[Task, Task] = {}
        for device, order in enumerate(orders):
            used = set()
            while reached[device] < len(order):
                task = order[reached[device]]
                slot = "any" if alone else task.kind
                if slot in used:
                    break
                # Results of other stages arrive at the next tick; a forward is one slot before its own backward.
                if not all(q in done or (q in new and q.stage == task.stage) for q in needs(task, stages)):
                    break
                new[task.result] = task
                used.add(slot)
                reached[device] += 1
        if not new:
            raise ValueError(_deadlock(orders, reached, done, stages))
        done.update(new)
        at.update(dict.fromkeys(new.values(), tick))
        tick += 1
    return at, tick


def _deadlock(orders: Orders, reached: Sequence[int], done: set[Task], stages: int) -> str:
    """Message that names the devices that wait for each other: each one, then the one that it waits for."""
    holder_of = {task.result: (task, device) for device, order in enumerate(orders) for task in order}
    device = next(d for d, order in enumerate(orders) if reached[d] < len(order))
    path: list[int] = []
    waits = {}
    while device not in path:
        path.append(device)
        task = orders[device][reached[device]]
        missing, holder = holder_of[next(q for q in needs(task, stages) if q not in done)]
        waits[device] = f"device {device} cannot do {task} before {missing}, which comes later on device {holder}"
        device = holder
    return f"the schedule never ends: {'; '.join(waits[d] for d in path[path.index(device) :])}."
