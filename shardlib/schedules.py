"""Pipeline schedules as data: the ordered tasks of each device.

A model of p·v **stages** runs on p devices. A stage is on one device, as one of its v **chunks**. A **schedule** is a
function of p devices, m microbatches and v chunks per device. It returns the list of `Task`s of each device, in the
order in which the device runs them; so it says where the stages are, too. Any function that returns every forward and
backward once, without a deadlock and with neighbouring stages on neighbouring devices, is a schedule. `check_schedule`
checks that, and `tick_table` makes the table that the executor scans over. docs/pipeline.md shows the published
schedules and how to write another. This module does not import JAX.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable

from shardlib.parsing import did_you_mean
from shardlib.tasks import Stages, Task, check_schedule, check_sizes, in_a_ring, stages_of_devices

Schedule = Callable[[int, int, int], list[list[Task]]]
"""A function of (p, m, v)."""


# ---- published schedules ------------------------------------------------------------------------------------------


def gpipe(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """All forwards, then all backwards in the same order (arXiv 1811.06965, section 2.2). Any m; v is 1."""
    _check_chunks("gpipe", p, m, v)
    return _with_warmup(p, m, v, lambda device: m)


def one_f_one_b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B: each device runs only as many forwards ahead as it takes to fill the pipeline. Any m; v is 1.

    At most p - device activations are alive on a device (arXiv 2104.04473, section 2.2.1: PipeDream-Flush). A backward
    is listed as its two halves, one after the other, so that the stage before waits for the first alone.
    """
    return _in_halves("1f1b", p, m, v, later=lambda device: 0)


def eager_1f1b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B with twice the forwards ahead, so that a transfer has the time of a task to arrive. Any m; v is 1.

    At most 2(p - device) - 1 activations are alive on a device (arXiv 2211.05322).
    """
    _check_chunks("eager_1f1b", p, m, v)
    return _with_warmup(p, m, v, lambda device: 2 * (p - 1 - device))


def interleaved_1f1b(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B over v chunks per device, in groups of p microbatches (arXiv 2104.04473, section 2.2.2).

    At v = 1 it is `eager_1f1b`.

    Raises:
        ValueError: m is not a multiple of p.
    """
    check_sizes(p, m, v)
    if m % p:
        near = " or ".join(str(n) for n in (m - m % p, m - m % p + p) if n)
        raise ValueError(
            f"interleaved_1f1b takes microbatches in groups of one per device: {m} microbatches are not a multiple of "
            f"{p} devices. Use {near} microbatches, or {'v=1 and ' * (v > 1)}eager_1f1b, which takes any number."
        )
    return _with_warmup(p, m, v, lambda device: (v - 1) * p + 2 * (p - 1 - device))


def zb_h1(p: int, m: int, v: int = 1) -> list[list[Task]]:
    """1F1B whose weight gradients are computed later, where it would be idle (arXiv 2401.10241, 3.1). Any m; v is 1.

    At most p activations are alive on a device, until their weight gradients are done.
    """
    return _in_halves("zb_h1", p, m, v, later=lambda device: device)


def _in_halves(name: str, p: int, m: int, v: int, later: Callable[[int], int]) -> list[list[Task]]:
    """1F1B in halves: the half for the weights comes after `later(device)` more of the input halves."""
    _check_chunks(name, p, m, v)
    orders = []
    for device in range(p):
        ahead, names = min(p - 1 - device, m), []
        for k in range(m):
            names += ["F0"] * (ahead + k < m) + ["I0"] + ["W0"] * (k >= later(device))
        orders.append(_in_order([*["F0"] * ahead, *names, *["W0"] * later(device)], [device], m))
    return orders


def zb_v(p: int, m: int, v: int = 2) -> list[list[Task]]:
    """Stages down the devices and up again, weight gradients where it would be idle (arXiv 2401.10241, 6). v is 2.

    At most 2p activations of a chunk are alive on a device, as much as p of a device's layers. Any m.
    """
    _check_chunks("zb_v", p, m, v)
    orders = []
    for d in range(p):
        count = max(m, 2 * p - 1)  # those past m are left out below
        names = ["F0"] * (2 * (p - d) - 1) + ["F1", "F0"] * d + ["F1", "I1", "W1"] * (p - d)
        for k in range(2 * p - d - 1, count + p - d - 1):
            names += ["F0"] * (k < count) + ["I0", "W0", "F1", "I1", "W1"]
        names += ["I0", "I1"] * d + ["I0", "W0"] * (p - d) + ["W1"] * d + ["W0"] * d
        orders.append(_in_order(names, [d, 2 * p - 1 - d], m))
    return orders


def dualpipe_v(p: int, m: int, v: int = 2) -> list[list[Task]]:
    """DualPipe cut in half: the stages of `zb_v`, a forward beside each backward (arXiv 2412.19437, 3.2.1). v is 2.

    At most 2p + 1 activations of a chunk are alive on a device. The lists are those of github.com/deepseek-ai/DualPipe.

    Raises:
        ValueError: m is below 2p.
    """
    _check_chunks("dualpipe_v", p, m, v)
    if m < 2 * p:
        raise ValueError(
            f"dualpipe_v fills the devices from both ends: {m} microbatches are too few for {p} devices. Use at least "
            f"{2 * p} microbatches, or zb_v, which takes any number."
        )
    orders = []
    for d in range(p):
        names = ["F0"] * (2 * (p - d - 1)) + ["F0", "F1"] * (d + 1) + ["I1", "W", "F1"] * (p - d - 1)
        names += ["F0", "B1", "F1", "B0"] * (m - 2 * p + d + 1) + ["B1", "F1", "B0"] * (p - d - 1)
        names += [("B" if i <= d else "I") + "10"[i % 2] for i in range(2 * d + 2)]
        names += ["W", "I0"] * (p - d - 1) + ["W"] * (d + 1)
        orders.append(_in_order(names, [d, 2 * p - 1 - d], m))
    return orders


def forward_only(p: int, m: int, v: int = 1, stages: Stages | None = None) -> list[list[Task]]:
    """Only forwards, for evaluation: of those that can run, a device takes the one of its last stage.

    `stages` has the stages of each device, as `stages_of_devices` gives them; None: in a ring.
    """
    check_sizes(p, m, v)
    stages = in_a_ring(p, v) if stages is None else stages
    done, orders = [m] + [0] * (p * v), [[] for _ in range(p)]  # numbers of microbatches, of stage s at s + 1
    while done[-1] < m:
        can_run = [max((s for s in own if done[s] > done[s + 1]), default=-1) for own in stages]
        for device, stage in enumerate(can_run):
            if stage >= 0:
                orders[device].append(Task("forward", stage, done[stage + 1]))
                done[stage + 1] += 1
    return orders


def _check_chunks(name: str, p: int, m: int, v: int) -> None:
    """Raises ValueError for a number below 1, or another number of chunks than the schedule's."""
    check_sizes(p, m, v)
    if v != CHUNKS[name]:
        one = "one chunk" if CHUNKS[name] == 1 else "two chunks"
        raise ValueError(
            f"{name} is defined for {one} per device, not for v={v}. Use v={CHUNKS[name]}, or interleaved_1f1b."
        )


_KIND_OF = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weights"}


def _in_order(names: list[str], stages: list[int], m: int) -> list[Task]:
    """Tasks of a device by short names, such as F0 and B1: of its chunk 0 or 1, each time of the next microbatch.

    A name without a chunk, W, is the one of the input half that has waited longest for its other half. Microbatches
    from m on are left out.
    """
    next_of: dict[tuple[str, str], int] = {}
    order, waiting = [], []
    for name in names:
        if name == "W":
            chunk, k = waiting.pop(0)
        else:
            chunk, counted = name[1], "I" if name[0] == "B" else name[0]
            k = next_of.get((counted, chunk), 0)
            next_of[counted, chunk] = k + 1
            waiting += [(chunk, k)] if name[0] == "I" else []
        order += [Task(_KIND_OF[name[0]], stages[int(chunk)], k)] if k < m else []
    return order


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


# ---- schedules by name --------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}

CHUNKS = {"gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}
"""The only v of the schedules that are not defined for all."""


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


def stages_of(name: str, p: int, m: int, v: int) -> Stages:
    """Where the schedule of this name has the stages. Raises ValueError as that does."""
    # Those of SCHEDULES have them in one place for all m, also for an m that they refuse.
    return stages_of_devices(schedule_of(name)(p, 2 * p if name in SCHEDULES else m, v))
