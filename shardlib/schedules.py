"""Pipeline schedules as data: the ordered tasks of each device.

A model of p·v **stages** runs on p devices. A stage is on one device, as one of its v **chunks**. A
**schedule** is a function of p devices, m microbatches and v chunks per device. It returns the list
of `Task`s of each device in the order in which the device runs them, which also determines where
the stages are. Any function that returns every forward and backward once, without a deadlock, and
with neighboring stages on neighboring devices, is a schedule. `check_schedule` checks that, and
`tick_table` makes the table that the executor scans over. docs/parallelism.md compares the
published schedules and shows how to write another.

A backward has two halves, which a schedule may list separately: `backward_input` computes the
gradient of the stage's input, for which the previous stage waits, and `backward_weights` the
gradients of the stage's weights, for which none waits. This module does not import JAX.
"""

import collections
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardlib.parsing import named

KINDS = ("forward", "backward", "backward_input", "backward_weights")
HALVES = KINDS[2:]


class Task(NamedTuple):
    """The work of one stage on one microbatch."""

    kind: str
    """One of KINDS: `backward` is both halves at once."""
    stage: int
    """Index of the stage, in [0, p·v)."""
    microbatch: int
    """Index of the microbatch, in [0, m)."""

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage}, microbatch {self.microbatch}"

    @property
    def result(self) -> "Task":
        """The name under which `needs` lists this task.

        An input half stands for the whole backward.
        """
        return self._replace(kind="backward") if self.kind == "backward_input" else self


Orders = Sequence[Sequence[Task]]
"""The tasks of each device, in order."""
Schedule = Callable[[int, int, int], list[list[Task]]]
"""A function (p, m, v) -> the tasks of each device."""
Stages = tuple[tuple[int, ...], ...]
"""The stages of each device, in the order of its chunks."""


def needs(task: Task, stages: int) -> list[Task]:
    """The tasks, by their `Task.result`, that must run before `task`."""
    kind, stage, k = task
    if kind == "forward":
        return [Task("forward", stage - 1, k)] if stage else []
    if kind == "backward_weights":
        return [Task("backward", stage, k)]
    of_backward = [Task("forward", stage, k)]
    if stage < stages - 1:
        of_backward.append(Task("backward", stage + 1, k))
    return of_backward


def in_halves(task: Task) -> list[Task]:
    """Splits a backward into its two halves; returns any other task alone."""
    return [task._replace(kind=half) for half in HALVES] if task.kind == "backward" else [task]


def stages_of_devices(orders: Orders) -> Stages:
    """The stages of each device of a schedule, in the order of its chunks."""
    return tuple(tuple(sorted({task.stage for task in order})) for order in orders)


def in_a_ring(p: int, v: int) -> Stages:
    """The usual placement of stages: stage s is chunk s // p of device s % p."""
    return tuple(tuple(range(device, p * v, p)) for device in range(p))


def in_a_v(p: int) -> Stages:
    """Two chunks per device: stages go down the devices and back up."""
    return tuple((device, 2 * p - 1 - device) for device in range(p))


# ---- published schedules -------------------------------------------------------------------------


def gpipe(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """All forwards, then all backwards in the same order (arXiv 1811.06965, section 2.2).

    Any m; v is 1.
    """
    _check_sizes("gpipe", p, m, v)
    return _whole_backwards(p, m, v, ahead=lambda device: m)


def one_f_one_b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B: each device runs only as many forwards ahead as it takes to fill the pipeline.

    Any m; v is 1. At most p - device activations are alive on a device (arXiv 2104.04473, section
    2.2.1: PipeDream-Flush). A backward is listed as two halves, one after the other, so that the
    previous stage waits only for the first.
    """
    return _in_halves("1f1b", p, m, v, later=lambda device: 0)


def interleaved_1f1b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B over v chunks per device, in groups of p microbatches (arXiv 2104.04473, section 2.2.2).

    With v = 1 it takes any m, and runs twice as many forwards ahead as 1F1B, so that a transfer has
    the time of one task to arrive (arXiv 2211.05322: eager 1F1B).

    Raises:
        ValueError: m is not a multiple of p, for v above 1.
    """
    _check_sizes("interleaved_1f1b", p, m, v)
    if v > 1 and m % p:
        raise ValueError(
            f"interleaved_1f1b takes microbatches in groups of one per device: {m} microbatches "
            f"are not a multiple of {p} devices. Use {m - m % p + p} microbatches, or v=1, which "
            "takes any number."
        )
    return _whole_backwards(p, m, v, ahead=lambda device: (v - 1) * p + 2 * (p - 1 - device))


def zb_h1(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B with weight gradients delayed into idle time (arXiv 2401.10241, section 3.1).

    Any m; v is 1.
    At most p activations are alive on a device, counted until their weight gradients are done.
    """
    return _in_halves("zb_h1", p, m, v, later=lambda device: device)


def zb_v(p: int, m: int, v: int = 2) -> list[list[Task]]:
    """Stages down the devices and back up, weight gradients in idle time.

    This is section 6 of arXiv 2401.10241. v is 2. At most 2p activations of a chunk are alive on a
    device, as many as p of all its layers. Any m.
    """
    _check_sizes("zb_v", p, m, v)
    orders = []
    for d, stages in enumerate(in_a_v(p)):
        count = max(m, 2 * p - 1)  # those past m are left out below
        names = ["F0"] * (2 * (p - d) - 1) + ["F1", "F0"] * d + ["F1", "I1", "W1"] * (p - d)
        for k in range(2 * p - d - 1, count + p - d - 1):
            names += ["F0"] * (k < count) + ["I0", "W0", "F1", "I1", "W1"]
        names += ["I0", "I1"] * d + ["I0", "W0"] * (p - d) + ["W1"] * d + ["W0"] * d
        orders.append(_tasks(names, stages, m))
    return orders


def forwards(orders: Orders) -> list[list[Task]]:
    """Only the forwards of a schedule, for evaluation."""
    return [[task for task in order if task.kind == "forward"] for order in orders]


def _whole_backwards(p: int, m: int, v: int, ahead: Callable[[int], int]) -> list[list[Task]]:
    """A schedule with stages in a ring, whose devices run `ahead(device)` forwards ahead."""
    # p microbatches pass through one chunk, then through the next.
    chunks = [i // p % v for i in range(m * v)]
    forwards = [f"F{i}" for i in chunks]
    backwards = [[f"B{v - 1 - i}"] for i in chunks]
    rings = enumerate(in_a_ring(p, v))
    return [
        _tasks(_in_turn(forwards, backwards, ahead(device)), stages, m) for device, stages in rings
    ]


def _in_halves(name: str, p: int, m: int, v: int, later: Callable[[int], int]) -> list[list[Task]]:
    """1F1B in halves: each weights half comes `later(device)` input halves later."""
    _check_sizes(name, p, m, v)
    orders = []
    for device in range(p):
        backwards = [["I0"] + ["W0"] * (k >= later(device)) for k in range(m)]
        names = _in_turn(["F0"] * m, backwards, ahead=p - 1 - device)
        orders.append(_tasks(names + ["W0"] * later(device), [device], m))
    return orders


def _in_turn(forwards: list[str], backwards: list[list[str]], ahead: int) -> list[str]:
    """`ahead` forwards, then forwards and backwards in turn, then the remaining backwards.

    A turn is one forward and the tasks of one backward.
    """
    names = forwards[:ahead]
    for i, backward in enumerate(backwards, ahead):
        names += forwards[i : i + 1] + backward
    return names


_KIND_OF = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weights"}


def _tasks(names: list[str], stages: Sequence[int], m: int) -> list[Task]:
    """Expands a device's tasks from short names.

    F0 and I1 mean its chunk 0 or 1, each time for the next microbatch. Microbatches from m on are
    dropped.
    """
    counts = collections.Counter()
    order = []
    for name in names:
        if counts[name] < m:
            order.append(Task(_KIND_OF[name[0]], stages[int(name[1:])], counts[name]))
        counts[name] += 1
    return order


# ---- schedules by name ---------------------------------------------------------------------------

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}

CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2}
"""The only allowed v, for schedules that fix it."""


def schedule_of(name: str) -> Schedule:
    """Finds a schedule by name: one of SCHEDULES, or `module:function` of the user's own file.

    Each call of a user's function is checked by `check_schedule`.

    Raises:
        ValueError: the name, module or function does not exist.
    """
    function = named("schedule", name, SCHEDULES, "p, m, v")
    if name in SCHEDULES:
        return function
    return lambda p, m, v: check_schedule(function(p, m, v), p, m, v)


def stages_of(name: str, p: int, m: int, v: int) -> Stages:
    """The stages of each device in the schedule called `name`.

    Raises ValueError like schedule_of.
    """
    if name not in SCHEDULES:
        return stages_of_devices(schedule_of(name)(p, m, v))
    _check_sizes(name, p, m, v)
    return in_a_v(p) if name == "zb_v" else in_a_ring(p, v)


# ---- validity ------------------------------------------------------------------------------------


def _check_sizes(name: str, p: int, m: int, v: int) -> None:
    """Raises ValueError for a size below 1, or a number of chunks that is not the schedule's."""
    for value, what in (
        (p, "devices of the axis p"),
        (m, "microbatches"),
        (v, "chunks per device (v)"),
    ):
        if operator.index(value) < 1:
            raise ValueError(f"{value} {what}: there must be at least 1.")
    if v != CHUNKS.get(name, v):
        one = "one chunk" if CHUNKS[name] == 1 else "two chunks"
        raise ValueError(
            f"{name} is defined for {one} per device, not for v={v}. Use v={CHUNKS[name]}, or "
            "interleaved_1f1b."
        )


def check_schedule(orders: Orders, p: int, m: int, v: int) -> list[list[Task]]:
    """Checks a schedule of forwards and backwards. A task may be any (kind, stage, microbatch).

    Returns the orders, with every entry as a `Task`.

    Raises:
        ValueError: a task is missing or listed twice, a stage is on two devices or not next to the
            previous one, or devices wait for each other forever.
    """
    try:
        orders = [[Task(*entry) for entry in order] for order in orders]
    except TypeError as error:
        raise ValueError(
            f"the schedule is not a list of (kind, stage, microbatch) for each device: {error}."
        ) from error
    if len(orders) != p:
        raise ValueError(f"the schedule lists tasks for {len(orders)} devices, not for {p}.")
    listed = collections.Counter(
        half for order in orders for task in order for half in in_halves(task)
    )
    expected = dict.fromkeys(
        Task(kind, s, k) for kind in ("forward", *HALVES) for s in range(p * v) for k in range(m)
    )
    for task in [*expected, *listed]:
        if listed[task] != 1 or task not in expected:
            raise ValueError(
                f"{task} is listed {listed[task]} times. List every forward and every backward (or "
                f"both its halves {' and '.join(HALVES)}) once, for stages 0..{p * v - 1} and "
                f"microbatches 0..{m - 1}."
            )
    stages = stages_of_devices(orders)
    for device, own in enumerate(stages):
        if len(own) != v:
            raise ValueError(
                f"device {device} has tasks of the stages {[*own]}; each device must have {v}, "
                "with all tasks of each."
            )
    device_of = {stage: device for device, own in enumerate(stages) for stage in own}
    for stage in range(1, p * v):
        here = device_of[stage - 1]
        there = device_of[stage]
        if (there - here) % p not in (0, 1, p - 1):
            raise ValueError(
                f"stage {stage - 1} is on device {here} and stage {stage} on device {there}. Place "
                f"consecutive stages on the same device or on neighbors in the ring of {p}."
            )
    place_in_ticks(orders)
    return orders


# ---- ticks ---------------------------------------------------------------------------------------


def place_in_ticks(orders: Orders) -> dict[Task, int]:
    """The earliest tick in which each task can run.

    A device takes tasks off its list, in order, as long as the tick has room and their inputs are
    there. In one tick a device runs one forward and one backward; the forward runs first, even if
    it comes later in the list. In a schedule with halves it runs one task per tick, so that the
    next stage does not wait longer for its result. The same holds if stages are not in a ring: a
    result may then go either way, and a tick sends only one.

    Raises:
        ValueError: devices wait for each other forever.
    """
    stages = sum(map(len, stages_of_devices(orders)))
    tasks = ((device, task) for device, order in enumerate(orders) for task in order)
    takes_any_slot = any(
        task.kind == "backward_weights" or task.stage % len(orders) != device
        for device, task in tasks
    )
    reached = [0] * len(orders)
    at = {}
    tick = 0
    done: set[Task] = set()
    while any(i < len(order) for i, order in zip(reached, orders, strict=True)):
        new: dict[Task, Task] = {}
        for device, order in enumerate(orders):
            used = set()
            while reached[device] < len(order):
                task = order[reached[device]]
                slot = "any" if takes_any_slot else task.kind
                if slot in used:
                    break
                # Results of other stages arrive in the next tick; a forward is one slot before its
                # own backward.
                missing = [q for q in needs(task, stages) if q not in done]
                if any(q not in new or q.stage != task.stage for q in missing):
                    break
                new[task.result] = task
                used.add(slot)
                reached[device] += 1
        if not new:
            waiting = []
            for device, order in enumerate(orders):
                if reached[device] < len(order):
                    missing = next(
                        q for q in needs(order[reached[device]], stages) if q not in done
                    )
                    waiting.append(f"device {device} waits for {missing}")
            raise ValueError(f"the schedule never finishes: {'; '.join(waiting)}.")
        done.update(new)
        at.update(dict.fromkeys(new.values(), tick))
        tick += 1
    return at
