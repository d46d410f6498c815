"""Pipeline schedules as data: the ordered tasks of each device, and the table of ticks that the executor runs.

A model of p·v **stages** runs on p devices. Stage s is on device s % p, as that device's **chunk** s // p. A
**schedule** is a function of p devices, m microbatches and v chunks per device. It returns the list of `Task`s of each
device, in the order in which the device runs them. Any function that returns every forward and backward once, on its
device and without a deadlock, is a schedule. `check_schedule` checks that, and `tick_table` makes the table that the
executor scans over. docs/pipeline.md shows the published schedules and how to write another.

A **tick** is one forward slot and then one backward slot on every device. The result of a task is sent to the
neighbouring device at the end of its slot, and arrives at the start of the next tick. This module does not import JAX.
"""

import importlib
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from configuration.checks import did_you_mean


class Task(NamedTuple):
    """The forward or the backward of one microbatch through one stage."""

    kind: str
    """`forward` or `backward`."""
    stage: int
    """Number of the stage, in [0, p·v)."""
    microbatch: int
    """Number of the microbatch, in [0, m)."""

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage}, microbatch {self.microbatch}"


Orders = Sequence[Sequence[Task]]
"""The tasks of each device, in order."""
Schedule = Callable[[int, int, int], list[list[Task]]]
"""A function of (p, m, v)."""


# ---- published schedules ------------------------------------------------------------------------------------------


def gpipe(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """All forwards, then all backwards in the same order (arXiv 1811.06965, section 2.2). Any m; v is 1."""
    return _one_chunk("gpipe", p, m, v, warmup=lambda device: m)


def one_f_one_b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B: each device runs only as many forwards ahead as it takes to fill the pipeline. Any m; v is 1.

    At most p - device activations are alive on a device. arXiv 2104.04473, section 2.2.1, calls it PipeDream-Flush.
    """
    return _one_chunk("1f1b", p, m, v, warmup=lambda device: p - 1 - device)


def eager_1f1b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B with twice the forwards ahead, so that a transfer has the time of a task to arrive. Any m; v is 1.

    At most 2(p - device) - 1 activations are alive on a device (arXiv 2211.05322).
    """
    return _one_chunk("eager_1f1b", p, m, v, warmup=lambda device: 2 * (p - 1 - device))


def interleaved_1f1b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B over v chunks per device, in groups of p microbatches (arXiv 2104.04473, section 2.2.2).

    At v = 1 it is `eager_1f1b`: the warmup of (v - 1)p + 2(p - 1 - device) forwards is that of Megatron, not the
    shorter one of plain 1F1B.

    Raises:
        ValueError: m is not a multiple of p.
    """
    _check_sizes(p, m, v)
    if m % p:
        near = " or ".join(str(n) for n in (m - m % p, m - m % p + p) if n)
        raise ValueError(
            f"interleaved_1f1b takes microbatches in groups of one per device: {m} microbatches are not a multiple of "
            f"{p} devices. Use {near} microbatches, or {'v=1 and ' * (v > 1)}eager_1f1b, which takes any number."
        )
    return _with_warmup(p, m, v, lambda device: (v - 1) * p + 2 * (p - 1 - device))


def forward_only(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """Only forwards, for evaluation: groups of p microbatches (the last one may be smaller), chunk by chunk."""
    _check_sizes(p, m, v)
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    return [
        [Task("forward", chunk * p + device, k) for group in groups for chunk in range(v) for k in group]
        for device in range(p)
    ]


def _one_chunk(name: str, p: int, m: int, v: int, warmup: Callable[[int], int]) -> list[list[Task]]:
    _check_sizes(p, m, v)
    if v != 1:
        raise ValueError(f"{name} is defined for one chunk per device, not for v={v}. Use v=1, or interleaved_1f1b.")
    return _with_warmup(p, m, v, warmup)


def _with_warmup(p: int, m: int, v: int, warmup: Callable[[int], int]) -> list[list[Task]]:
    """On each device `warmup(device)` forwards, then one forward and one backward in turn, then remaining backwards."""
    # (chunk, microbatch): p microbatches pass through one chunk, then through the next, then the next p.
    passes = [(i // p % v, i // (p * v) * p + i % p) for i in range(m * v)]
    orders = []
    for device in range(p):
        forwards = [Task("forward", chunk * p + device, k) for chunk, k in passes]
        backwards = [Task("backward", (v - 1 - chunk) * p + device, k) for chunk, k in passes]
        ahead = min(warmup(device), m * v)
        pairs = zip(forwards[ahead:], backwards, strict=False)
        orders.append([*forwards[:ahead], *itertools.chain(*pairs), *backwards[m * v - ahead :]])
    return orders


def _check_sizes(p: int, m: int, v: int) -> None:
    for value, what in ((p, "devices of the axis p"), (m, "microbatches"), (v, "chunks per device (v)")):
        if operator.index(value) < 1:
            raise ValueError(f"{value} {what}: there must be at least 1.")


# ---- schedules by name --------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "eager_1f1b": eager_1f1b,
}

ONE_CHUNK = ("gpipe", "1f1b", "eager_1f1b")
"""Names of the schedules that are defined only for v = 1."""


def schedule_of(name: str) -> Schedule:
    """The schedule of this name: one of SCHEDULES, or `module:function` of the user's own file.

    Each call of a user's function is checked by `check_schedule`.

    Raises:
        ValueError: there is no such name, module or function, or it does not take (p, m, v).
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    module_name, colon, function_name = name.partition(":")
    choices = f"Choose {', '.join(SCHEDULES)}, or write module:function of your own schedule."
    if not (module_name and colon and function_name):
        raise ValueError(f"no schedule is called {name!r}. {choices}{did_you_mean(name, SCHEDULES)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        # If the user's own file lacks a module, its traceback says so.
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise
        raise ValueError(
            f"schedule {name!r}: there is no module {module_name!r}. It is looked for as by `import {module_name}`, "
            f"from the directory in which the program starts. {choices}"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"schedule {name!r}: {module_name} has no function {function_name!r}. {choices}")
    try:
        inspect.signature(function).bind(1, 1, 1)
    except TypeError as e:
        raise ValueError(
            f"schedule {name!r} cannot be called as {function_name}(p, m, v): {e}. It must take the numbers of devices "
            "along p, of microbatches, and of chunks per device."
        ) from None

    def checked(p: int, m: int, v: int) -> list[list[Task]]:
        try:
            return check_schedule(function(p, m, v), p, m, v)
        except ValueError as e:
            raise ValueError(f"schedule {name!r} for p={p}, m={m}, v={v}: {e}") from e

    return checked


# ---- validity -----------------------------------------------------------------------------------------------------


def check_schedule(orders: Orders, p: int, m: int, v: int) -> list[list[Task]]:
    """Checks a schedule of forwards and backwards, in which a task is any (kind, stage, microbatch).

    Returns the orders, with every task as a `Task`.

    Raises:
        ValueError: a task is missing, listed twice or on another device's list, or devices wait for each other forever.
    """
    orders = _check_tasks(orders, p, m, v, training=True)
    _place(orders, p * v, fuse_last=False)
    return orders


def _check_tasks(orders: Orders, p: int, m: int, v: int, training: bool) -> list[list[Task]]:
    _check_sizes(p, m, v)
    if isinstance(orders, str | Mapping) or not isinstance(orders, Sequence) or len(orders) != p:
        size = f"a list of {len(orders)}" if isinstance(orders, Sequence) else f"{type(orders).__name__}"
        raise ValueError(f"a schedule is a list of tasks for each of {p} devices, not {size}.")
    kinds = ("forward", "backward") if training else ("forward",)
    seen: set[Task] = set()
    checked = []
    for device, order in enumerate(orders):
        if not isinstance(order, Iterable):
            raise ValueError(f"the tasks of device {device} are {order!r}; give a list of them.")
        checked.append([_as_task(task, i, device, kinds, p * v, m) for i, task in enumerate(order)])
        for task in checked[-1]:
            if task.stage % p != device:
                raise ValueError(
                    f"{task} is on device {device}, but stage {task.stage} is on device {task.stage % p} "
                    f"(stage s is on device s % {p})."
                )
            if task in seen:
                raise ValueError(f"{task} is twice in the list of device {device}. Every task runs once.")
            seen.add(task)
    for task in itertools.starmap(Task, itertools.product(kinds, range(p * v), range(m))):
        if task not in seen:
            raise ValueError(f"{task} is missing from the list of device {task.stage % p}.")
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


def needs(task: Task, stages: int) -> list[Task]:
    """The tasks whose results `task` needs."""
    kind, stage, k = task
    if kind == "forward":
        return [Task("forward", stage - 1, k)] if stage else []
    return [Task("forward", stage, k)] + ([Task("backward", stage + 1, k)] if stage < stages - 1 else [])


def _place(orders: Orders, stages: int, *, fuse_last: bool) -> tuple[dict[Task, int], int]:
    """The earliest tick of each task, and the number of ticks.

    A device takes tasks off its list, in order, as long as their slots in this tick are free and their inputs are
    there. A backward and the forward after it in the list may share a tick; then the forward runs first. With
    `fuse_last` a forward of the last stage takes no slot, as it is part of its backward.
    """
    place, done, tick = [0] * len(orders), {}, 0
    while any(i < len(order) for i, order in zip(place, orders, strict=True)):
        new: set[Task] = set()
        for device, order in enumerate(orders):
            used = set()
            while place[device] < len(order) and order[place[device]].kind not in used:
                task = order[place[device]]
                # Results of other stages arrive at the next tick; a forward is one slot before its own backward.
                if not all(q in done or (q in new and q.stage == task.stage) for q in needs(task, stages)):
                    break
                new.add(task)
                if not (fuse_last and task.kind == "forward" and task.stage == stages - 1):
                    used.add(task.kind)
                place[device] += 1
        if not new:
            raise ValueError(_deadlock(orders, place, done, stages))
        done.update(dict.fromkeys(new, tick))
        tick += 1
    return done, tick


def _deadlock(orders: Orders, place: Sequence[int], done: Mapping[Task, int], stages: int) -> str:
    """Message that names the devices that wait for each other: each one, then the one that it waits for."""
    device = next(d for d, order in enumerate(orders) if place[d] < len(order))
    path: list[int] = []
    waits = {}
    while device not in path:
        path.append(device)
        task = orders[device][place[device]]
        missing = next(q for q in needs(task, stages) if q not in done)
        holder = missing.stage % len(orders)
        waits[device] = f"device {device} cannot do {task} before {missing}, which comes later on device {holder}"
        device = holder
    return f"the schedule never ends: {'; '.join(waits[d] for d in path[path.index(device) :])}."


# ---- the table of ticks -------------------------------------------------------------------------------------------

COLUMNS = (
    *("forward", "forward_first", "forward_last", "forward_chunk", "forward_microbatch"),
    *("forward_input", "forward_residuals"),
    *("backward", "backward_first", "backward_last", "backward_chunk", "backward_microbatch"),
    *("backward_input", "backward_cotangent", "backward_residuals"),
    *("arriving_input", "arriving_cotangent"),
)


@dataclass(frozen=True)
class TickTable:
    """The task and the buffer slots of every device in every tick."""

    columns: dict[str, np.ndarray]
    """Columns by name, each int32 [ticks, p], 0 where a device is idle if not said otherwise.

    forward, backward: 1 where the slot of the tick has a task. Of that task:
    …_first, …_last: 1 if its stage is the first (which embeds) or the last (which computes the loss in its backward).
    …_chunk in [0, v), …_microbatch in [0, m).
    forward_input, backward_input: the slot of `inputs` to read; the first stage reads none.
    backward_cotangent: the slot of `cotangents` to read; the last stage reads none.
    forward_residuals, backward_residuals: the slot of `residuals` to write, and to read.
    arriving_input, arriving_cotangent: the slot to write what arrives at the start of this tick, before anything is
    read. Where nothing arrives it is `inputs` or `cotangents`: one slot past the last, which is never read.
    """
    inputs: int
    """Number of slots for stage inputs: the most that any device needs."""
    cotangents: int
    """Number of slots for gradients with respect to a stage's output."""
    residuals: int
    """Number of slots for what a forward keeps for its backward."""


def tick_table(orders: Orders, p: int, m: int, v: int, *, recompute: bool, fuse_last: bool) -> TickTable:
    """Places the tasks in ticks, as early as their order allows, and assigns a slot to everything that is kept.

    `orders` is a schedule or `forward_only`, for which the columns of backwards are 0. With `recompute` a backward
    starts from the input of its stage, which is kept until then, and there are no residuals. Otherwise the input is
    kept until the forward, and residuals from the forward to the backward. With `fuse_last` the forward of the last
    stage is part of its backward: the table has no such forward, and the stage keeps its input until the backward.

    Raises:
        ValueError: as `check_schedule` does; or `fuse_last` without backwards.
    """
    training = any(tuple(task)[:1] == ("backward",) for order in orders for task in order)
    if fuse_last and not training:
        raise ValueError("fuse_last=True makes the last forward part of its backward, but there are no backwards here.")
    orders = _check_tasks(orders, p, m, v, training)
    stages = p * v
    at, ticks = _place(orders, stages, fuse_last=fuse_last)
    f = {(task.stage, task.microbatch): t for task, t in at.items() if task.kind == "forward"}
    b = {(task.stage, task.microbatch): t for task, t in at.items() if task.kind == "backward"}
    fused = lambda stage: fuse_last and stage == stages - 1

    # For what is kept of each stage and microbatch, the tick in which it is written, and in which it is last read.
    kept_inputs, kept_cotangents, kept_residuals = {}, {}, {}
    for stage, k in f:
        if stage:
            last_read = b if training and (recompute or fused(stage)) else f
            kept_inputs[stage, k] = f[stage - 1, k] + 1, last_read[stage, k]
        if training and stage < stages - 1:
            kept_cotangents[stage, k] = b[stage + 1, k] + 1, b[stage, k]
        if training and not recompute and not fused(stage):
            kept_residuals[stage, k] = f[stage, k], b[stage, k]
    input_slots, inputs = _give_slots(kept_inputs, p)
    cotangent_slots, cotangents = _give_slots(kept_cotangents, p)
    residual_slots, residuals = _give_slots(kept_residuals, p)

    columns = {name: np.zeros((ticks, p), np.int32) for name in COLUMNS}
    columns["arriving_input"][:] = inputs
    columns["arriving_cotangent"][:] = cotangents
    for task, t in at.items():
        kind, stage, k = task
        device = stage % p
        if kind == "forward" and fused(stage):
            continue
        values = {
            "": 1,
            "_first": stage == 0,
            "_last": stage == stages - 1,
            "_chunk": stage // p,
            "_microbatch": k,
            "_residuals": residual_slots.get((stage, k), 0),
        }
        if kind == "forward" or recompute or fused(stage):
            values["_input"] = input_slots.get((stage, k), 0)
        if kind == "backward":
            values["_cotangent"] = cotangent_slots.get((stage, k), 0)
        for name, value in values.items():
            columns[kind + name][t, device] = value
        if kind == "forward" and stage < stages - 1:
            columns["arriving_input"][t + 1, (device + 1) % p] = input_slots[stage + 1, k]
        if kind == "backward" and stage > 0:
            columns["arriving_cotangent"][t + 1, (device - 1) % p] = cotangent_slots[stage - 1, k]
    return TickTable(columns, inputs, cotangents, residuals)


def _give_slots(kept: dict[tuple[int, int], tuple[int, int]], p: int) -> tuple[dict[tuple[int, int], int], int]:
    """The slot of each kept (stage, microbatch) in a buffer, and the number of slots on the fullest of p devices.

    In the order of the first ticks each gets the lowest slot that is free by then, which takes the fewest slots.
    """
    slots, busy_until = {}, [[] for _ in range(p)]
    for (stage, k), (first, last) in sorted(kept.items(), key=lambda item: item[1]):
        ends = busy_until[stage % p]
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot : slot + 1] = [last]
        slots[stage, k] = slot
    return slots, max(map(len, busy_until))
