"""Schedules equal the published ones, are refused where they cannot run, and every table reads what was written for it.

The outside oracles: task lists of jaxpp and torch.distributed.pipelining, closed formulas of the papers, the standard
library's topological sort. `check_tick_table` runs a table on names; that it sees faults is tested here too.
"""

import collections
import dataclasses
import graphlib
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tick_tables import check_tick_table

from shardlib.schedule_simulator import Costs, simulate, simulate_ticks
from shardlib.schedules import (
    CHUNKS,
    SCHEDULES,
    dualpipe_v,
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    schedule_of,
    stages_of,
    zb_h1,
    zb_v,
)
from shardlib.tasks import Task, check_schedule, in_a_ring, needs, stages_of_devices
from shardlib.tick_tables import tick_table

pytestmark = pytest.mark.quick

settings.register_profile("schedules", max_examples=60, deadline=None, database=None, derandomize=True)
settings.load_profile("schedules")


LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weights": "W"}


def short(orders):
    """[['F0.0', 'B0.0'], …]: kind, stage, microbatch."""
    return [[f"{LETTERS[task.kind]}{task.stage}.{task.microbatch}" for task in order] for order in orders]


def in_a_v(p):
    return tuple((device, 2 * p - 1 - device) for device in range(p))


def even_costs(p, v, transfer=0.0, **flags):
    """A device's layers take 1 forward and 2 backward, whatever the number of its chunks."""
    return Costs([1 / v] * p * v, [2 / v] * p * v, transfer, **flags)


# ---- task lists ---------------------------------------------------------------------------------------------------


def test_interleaved_as_jaxpp_prints_it():
    """The lists that jaxpp's tutorial shows of Interleaved1F1B for 4 microbatches, fused tasks taken apart."""
    expected = {
        (1, 2): "F2.0 F2.1 F2.2 B2.0 F2.3 B2.1 B2.2 B2.3",
        (1, 3): "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3",
        (2, 0): "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 B4.0 B4.1 B4.2 B4.3 B0.0 B0.1 B0.2 B0.3",
        (2, 3): "F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 B3.0 B3.1 B3.2 B3.3",
    }
    for (v, device), tasks in expected.items():
        assert short(interleaved_1f1b(4, 4, v))[device] == tasks.split()


def test_eager_as_jaxpp_defines_it():
    assert short(eager_1f1b(3, 5, 1)) == [
        ["F0.0", "F0.1", "F0.2", "F0.3", "F0.4", "B0.0", "B0.1", "B0.2", "B0.3", "B0.4"],
        ["F1.0", "F1.1", "F1.2", "B1.0", "F1.3", "B1.1", "F1.4", "B1.2", "B1.3", "B1.4"],
        ["F2.0", "B2.0", "F2.1", "B2.1", "F2.2", "B2.2", "F2.3", "B2.3", "F2.4", "B2.4"],
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 4), (4, 16)])
def test_eager_is_interleaved_with_one_chunk(p, m):
    assert eager_1f1b(p, m) == interleaved_1f1b(p, m, 1)


def torch_lists(schedule):
    """Tasks of a torch schedule, in our names; it also lists idle steps, pairs of tasks, and gradient reductions."""
    orders = []
    for device in sorted(schedule.pipeline_order):
        actions = [action for action in schedule.pipeline_order[device] if action is not None]
        texts = [str(part) for action in actions for part in action.sub_actions or [action]]
        found = [re.fullmatch(r"(\d+)([FBIW])(\d+)", text) for text in texts]
        orders.append([f"{kind}{stage}.{k}" for stage, kind, k in (match.groups() for match in found if match)])
    return orders


def torch_stage(p, v, chunk=0):
    torch = pytest.importorskip("torch")
    fields = {"group_size": p, "group_rank": 0, "num_stages": p * v, "stage_index": chunk * p, "is_first": chunk == 0}
    return SimpleNamespace(**fields, is_last=False, has_backward=True, submod=torch.nn.Identity())


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (4, 7), (4, 16), (8, 8), (8, 11)])
def test_gpipe_and_1f1b_as_in_torch(p, m):
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    assert short(gpipe(p, m)) == torch_lists(pipelining.ScheduleGPipe(torch_stage(p, 1), m))
    theirs = torch_lists(pipelining.Schedule1F1B(torch_stage(p, 1), m))
    # torch's list of the last device counts its forwards from 1.
    theirs[-1] = [f"F{p - 1}.{int(name.split('.')[1]) - 1}" if name[0] == "F" else name for name in theirs[-1]]
    halves = lambda name: [name.replace("B", "I"), name.replace("B", "W")] if name[0] == "B" else [name]
    assert short(one_f_one_b(p, m)) == [[half for name in order for half in halves(name)] for order in theirs]
    assert short(short_1f1b(p, m)) == theirs


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 19, 32])
def test_schedules_with_halves_as_in_torch(p, m):
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    in_chunks = [torch_stage(p, 2, chunk) for chunk in range(2)]
    assert short(zb_v(p, m)) == torch_lists(pipelining.ScheduleZBVZeroBubble(in_chunks, m))
    if m >= 2 * p:
        assert short(dualpipe_v(p, m)) == torch_lists(pipelining.ScheduleDualPipeV(in_chunks, m))
    if m % p == 0:
        theirs = pipelining.ScheduleInterleavedZeroBubble([torch_stage(p, 1)], m)
        assert short(zb_h1(p, m)) == torch_lists(theirs)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "groups"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_interleaved_as_in_torch(p, groups, v):
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    stages = [torch_stage(p, v, chunk) for chunk in range(v)]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, p * groups)
    assert short(interleaved_1f1b(p, p * groups, v)) == torch_lists(schedule)


def test_forward_only_lists():
    assert short(forward_only(2, 3, 2)) == [
        ["F0.0", "F0.1", "F2.0", "F2.1", "F0.2", "F2.2"],
        ["F1.0", "F1.1", "F3.0", "F3.1", "F1.2", "F3.2"],
    ]
    assert short(forward_only(2, 3, 2, in_a_v(2))) == [
        ["F0.0", "F0.1", "F0.2", "F3.0", "F3.1", "F3.2"],
        ["F1.0", "F2.0", "F1.1", "F2.1", "F1.2", "F2.2"],
    ]


# ---- bubbles and memory -------------------------------------------------------------------------------------------


def idle(name, p, v):
    """Time that a device of the schedule is idle, of which a forward of all its layers is 1, and a backward 2."""
    if name == "zb_h1":  # arXiv 2401.10241, table 2: (p - 1)(forward + input half - weights half)
        return p - 1
    if name == "1f1b":  # a microbatch's forwards and input halves through the other devices
        return 2 * (p - 1)
    if name in ("zb_v", "dualpipe_v"):  # until the first microbatch arrives at the last device; half a forward each
        return (p - 1) / 2
    return 3 * (p - 1) / v  # arXiv 2104.04473, sections 2.2.1 and 2.2.2


@pytest.mark.parametrize("m", [8, 16, 32])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_the_formulas(name, m):
    """On asynchronous devices; and in the executor's ticks, where a task or two of equal length fill a tick."""
    p = 4
    for v in (CHUNKS[name],) if name in CHUNKS else (1, 2, 4):
        orders = SCHEDULES[name](p, m, v)
        table = tick_table(orders, p, m, v, recompute=False)
        for timeline in (simulate(orders, p, m, v, even_costs(p, v)), simulate_ticks(table, even_costs(p, v))):
            assert timeline.total == pytest.approx(3 * m + idle(name, p, v))
            assert timeline.bubble == pytest.approx(idle(name, p, v) / (3 * m + idle(name, p, v)))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("name", "fewest"), [("zb_h1", lambda p: p), ("zb_v", lambda p: 2 * p - 1)])
def test_halves_fill_waits_from_so_many_microbatches_on(name, fewest, p):
    v = CHUNKS[name]
    waits = lambda m: simulate(SCHEDULES[name](p, m, v), p, m, v, even_costs(p, v)).total - 3 * m
    assert [waits(m) for m in range(fewest(p), 4 * p)] == pytest.approx([idle(name, p, v)] * (4 * p - fewest(p)))
    assert waits(p // 2) > idle(name, p, v)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_memory_of_schedules_with_halves(p):
    """Activations until their weight gradients are done: p of a device's layers (arXiv 2401.10241), or a chunk more."""
    m = 4 * p
    alive = lambda name, v: simulate(SCHEDULES[name](p, m, v), p, m, v, even_costs(p, v)).peak_of_devices()
    assert alive("1f1b", 1) == [*range(p, 0, -1)]
    assert alive("zb_h1", 1) == [p] * p
    assert alive("zb_v", 2) == [2 * p] * p
    assert alive("dualpipe_v", 2) == [2 * p + 1] * p


# Bubbles of 4 devices for m = 8, 16, 32, measured with another implementation: asynchronous devices without transfer
# and with one of 0.1, ticks without and with; then the activations alive at once on each device, at m = 16.
MEASURED = {
    ("gpipe", 1): (".27/.16/.09", ".29/.17/.09", ".27/.16/.09", ".32/.21/.14", [16, 16, 16, 16]),
    ("interleaved_1f1b", 1): (".27/.16/.09", ".29/.17/.09", ".27/.16/.09", ".30/.19/.12", [7, 5, 3, 1]),
    ("interleaved_1f1b", 2): (".16/.09/.05", ".20/.11/.06", ".16/.09/.05", ".23/.15/.11", [11, 9, 7, 5]),
}


@pytest.mark.parametrize(("name", "v"), MEASURED)
def test_bubbles_and_peaks_as_measured(name, v):
    p, bubbles = 4, [[], [], [], []]
    for m in (8, 16, 32):
        orders = SCHEDULES[name](p, m, v)
        table = tick_table(orders, p, m, v, recompute=False)
        for i, transfer in enumerate((0.0, 0.1)):
            bubbles[i].append(simulate(orders, p, m, v, even_costs(p, v, transfer)).bubble)
            bubbles[2 + i].append(simulate_ticks(table, even_costs(p, v, transfer)).bubble)
    measured = [[float(figure) for figure in text.split("/")] for text in MEASURED[name, v][:4]]
    np.testing.assert_allclose(bubbles, measured, rtol=0, atol=0.0053)  # to the digits given
    timeline = simulate(SCHEDULES[name](p, 16, v), p, 16, v, even_costs(p, v))
    assert timeline.peak_of_devices() == MEASURED[name, v][4]


def short_1f1b(p, m, v=1):
    """1F1B as arXiv 2104.04473 has it, with whole backwards."""
    orders = []
    for d in range(p):
        forwards, backwards = ([Task(kind, d, k) for k in range(m)] for kind in ("forward", "backward"))
        ahead = min(p - 1 - d, m)
        pairs = [task for pair in zip(forwards[ahead:], backwards, strict=False) for task in pair]
        orders.append([*forwards[:ahead], *pairs, *backwards[m - ahead :]])
    return orders


def test_ticks_keep_one_forward_more():
    """A forward that stands behind a backward in the list runs before it in their tick."""
    table = tick_table(short_1f1b(4, 16), 4, 16, 1, recompute=False)
    assert simulate_ticks(table, even_costs(4, 1)).peak_of_devices() == [5, 4, 3, 1]
    assert table.residuals == 5
    asynchronous = simulate(short_1f1b(4, 16), 4, 16, 1, even_costs(4, 1))
    assert asynchronous.peak_of_devices() == [4, 3, 2, 1]


@pytest.mark.parametrize(("name", "arrivals"), [("interleaved_1f1b", 8), ("eager_1f1b", 8), ("gpipe", 32)])
def test_stage_inputs_stored_with_recompute(name, arrivals):
    """Those of another implementation, 5 and 16; one gradient; and outputs of the last stage, for the loss."""
    table = tick_table(SCHEDULES[name](4, 16, 1), 4, 16, 1, recompute=True)
    assert (table.arrivals, table.residuals, table.kept) == (arrivals, 0, 0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("1f1b", 1),
        ("eager_1f1b", 1),
        ("interleaved_1f1b", 1),
        ("interleaved_1f1b", 2),
        ("zb_h1", 1),
        ("zb_v", 2),
        ("dualpipe_v", 2),
    ],
)
def test_memory_does_not_grow_with_microbatches(name, v, recompute):
    def slots(name, m, v):
        table = tick_table(SCHEDULES[name](4, m, v), 4, m, v, recompute=recompute)
        return table.arrivals, table.residuals, table.kept

    assert slots(name, 16, v) == slots(name, 64, v)
    assert max(slots("gpipe", 64, 1)) >= 64


def test_gradient_accumulation_is_the_schedule_of_one_device():
    table = tick_table(eager_1f1b(1, 3), 1, 3, 1, recompute=True)
    assert (table.arrivals, table.residuals, table.kept) == (2, 0, 0)
    for slot in ("forward", "backward"):
        assert table.columns[slot].T.tolist() == [[1, 1, 1]]
        assert table.columns[f"{slot}_microbatch"].T.tolist() == [[0, 1, 2]]


# Of 4 devices and 32 microbatches, where the last stage takes so much longer than the others.
HEAVIER = {0.0: 105, 0.33: 137, 0.66: 168}


@pytest.mark.parametrize("more", HEAVIER)
def test_a_heavier_last_stage_as_measured(more):
    """Times of another implementation."""
    p, m = 4, 32
    orders = interleaved_1f1b(p, m, 1)
    costs = Costs([1, 1, 1, 1 + more], [2, 2, 2, 2 + 2 * more])
    table = tick_table(orders, p, m, 1, recompute=False)
    assert round(simulate_ticks(table, costs, wait_between_slots=False).total) == HEAVIER[more]
    assert simulate_ticks(table, costs).total >= simulate(orders, p, m, 1, costs).total


def test_slots_that_wait_cost_time_where_stages_differ():
    """The first stage is long forward and the last one backward: at different times, if devices wait between slots."""
    table = tick_table(interleaved_1f1b(2, 32, 1), 2, 32, 1, recompute=False)
    costs = Costs([2, 1], [1, 2])
    waiting, free = (simulate_ticks(table, costs, wait_between_slots=wait).total for wait in (True, False))
    assert waiting == pytest.approx(free + 31)


def test_costs_of_recomputed_tasks():
    recomputed = Costs([1, 1], [2, 2], recompute=True)
    assert [recomputed.of(Task(kind, stage, 0)) for kind in ("forward", "backward") for stage in (0, 1)] == [1, 1, 3, 3]


def test_bytes_alive():
    timeline = simulate(interleaved_1f1b(4, 16, 2), 4, 16, 2, even_costs(4, 2))
    assert timeline.peak_of_stages() == [8, 8, 7, 5, 4, 4, 3, 1]
    assert timeline.peak_bytes_of_devices([10.0] * 8) == [110, 90, 70, 50]
    assert timeline.peak_bytes_of_devices([0.0] * 4 + [10.0] * 4) == [40, 40, 30, 10]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs([1.0, -1.0], [2.0, 2.0]), "a forward costs -1.0; a time is a number, at least 0"),
        (lambda: Costs([1.0], [float("nan")]), "a backward costs nan"),
        (lambda: Costs([1.0], [2.0], float("inf")), "a transfer costs inf"),
        (lambda: Costs([1.0], [2.0, 2.0]), "1 forward costs and 2 backward costs: one a stage"),
        (lambda: simulate(gpipe(2, 2), 2, 2, 1, Costs([1.0], [2.0])), "costs of 1 stages for a schedule of 2"),
    ],
)
def test_bad_costs(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- any schedule -------------------------------------------------------------------------------------------------


@st.composite
def published(draw):
    """(orders, p, m, v) of a published schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p, v = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    v = CHUNKS.get(name, v)
    m = p * draw(st.integers(1, 4)) if name == "interleaved_1f1b" else draw(st.integers(1, 20))
    m += 2 * p if name == "dualpipe_v" else 0
    return SCHEDULES[name](p, m, v), p, m, v


@st.composite
def any_valid(draw):
    """(orders, p, m, v) in which every device follows one random order of all tasks that respects what they need.

    Some backwards are whole and some in halves, and stages are in a ring or go down the devices and up again.
    """
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    random, halved, down_and_up = draw(st.randoms(use_true_random=False)), draw(st.booleans()), draw(st.booleans())
    waiting = all_tasks(p, m, v)
    for task in [task for task in waiting if task.kind == "backward" and halved and random.random() < 0.7]:
        waiting.remove(task)
        waiting += [task._replace(kind="backward_input"), task._replace(kind="backward_weights")]
    done, orders = set(), [[] for _ in range(p)]
    while waiting:
        task = random.choice([task for task in waiting if done.issuperset(what_is_needed(task, p * v))])
        waiting.remove(task)
        done.add(as_needed(task))
        is_up = down_and_up and v == 2 and task.stage >= p
        orders[2 * p - 1 - task.stage if is_up else task.stage % p].append(task)
    return orders, p, m, v


def all_tasks(p, m, v):
    return [Task(kind, s, k) for kind in ("forward", "backward") for s in range(p * v) for k in range(m)]


def what_is_needed(task, stages):
    """`needs`, written a second time; an input half counts as the backward."""
    found = []
    if task.kind == "backward_weights":
        found.append(("backward", task.stage, task.microbatch))
    elif task.kind != "forward":
        found.append(("forward", task.stage, task.microbatch))
        found += [("backward", task.stage + 1, task.microbatch)] * (task.stage + 1 < stages)
    else:
        found += [("forward", task.stage - 1, task.microbatch)] * (task.stage > 0)
    return found


def as_needed(task):
    return ("backward" if task.kind == "backward_input" else task.kind, *task[1:])


def kinds_of(orders):
    """What `check_tick_table` has to know of a schedule."""
    tasks = [(device, task) for device, order in enumerate(orders) for task in order]
    halves = any(task.kind == "backward_weights" for _, task in tasks)
    return {"halves": halves, "is_v": any(task.stage % len(orders) != device for device, task in tasks)}


@given(any_valid())
def test_needs_are_those_written_here(schedule):
    orders, p, _, v = schedule
    for task in itertools.chain(*orders):
        assert list(map(tuple, needs(task, p * v))) == what_is_needed(task, p * v)
        assert task.result == as_needed(task)


@given(st.one_of(published(), any_valid()), st.booleans())
def test_tables_read_what_was_written_for_them(schedule, recompute):
    orders, p, m, v = schedule
    check_schedule(orders, p, m, v)
    table = tick_table(orders, p, m, v, recompute=recompute)
    check_tick_table(table, p, m, v, recompute=recompute, **kinds_of(orders))
    assert table.halves == kinds_of(orders)["halves"]
    assert table.stages == (in_a_v(p) if kinds_of(orders)["is_v"] else in_a_ring(p, v))
    if not recompute:
        assert not table.columns["backward_input"].any()
    assert {column.dtype for column in table.columns.values()} == {np.dtype(np.int32)}
    assert {column.shape[1] for column in table.columns.values()} == {p}


@given(st.one_of(published(), any_valid()), st.booleans())
def test_buffers_have_no_slot_too_many(schedule, recompute):
    """As many slots as there are things kept at the same time on the fullest device: never fewer, and never more."""
    orders, p, m, v = schedule
    table = tick_table(orders, p, m, v, recompute=recompute)
    last = p * v - 1
    at = {}
    for kind in ("forward", "backward", "weights"):
        for t, d in zip(*np.nonzero(table.columns[kind]), strict=True):
            stage = table.stages[d][table.columns[f"{kind}_chunk"][t, d]]
            at[kind, stage, table.columns[f"{kind}_microbatch"][t, d]] = t
    counts = {"arrivals": collections.Counter(), "residuals": collections.Counter(), "kept": collections.Counter()}

    def keep(what, stage, first, end):
        device = next(d for d, stages in enumerate(table.stages) if stage in stages)
        counts[what].update((device, t) for t in range(first, end + 1))

    for stage, k in itertools.product(range(p * v), range(m)):
        forward, backward = at["forward", stage, k], at["backward", stage, k]
        begin = at["forward", stage - 1, k] + 1 if stage else forward
        keep("arrivals", stage, begin, backward if recompute else forward)
        keep("arrivals", stage, at["backward", stage + 1, k] + 1 if stage < last else forward, backward)
        if not recompute:
            keep("residuals", stage, at["forward", stage, k], at.get(("weights", stage, k), backward))
        if table.halves:
            keep("kept", stage, backward, at["weights", stage, k])
    for name, kept in counts.items():
        assert getattr(table, name) == max(kept.values(), default=0), name


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_forward_only_tables(p, m, v):
    orders = forward_only(p, m, v)
    table = tick_table(orders, p, m, v, recompute=False)
    check_tick_table(table, p, m, v, recompute=False, training=False)
    assert (table.residuals, table.kept) == (0, 0)
    assert table.arrivals <= 1, "what arrives is done at once"
    assert not any(column.any() for name, column in table.columns.items() if name.startswith("backward"))
    assert table.columns["forward_last"].sum() == m


@given(st.integers(1, 8), st.integers(1, 20))
def test_forward_only_tables_of_stages_down_and_up(p, m):
    table = tick_table(forward_only(p, m, 2, in_a_v(p)), p, m, 2, recompute=False)
    check_tick_table(table, p, m, 2, recompute=False, training=False, is_v=p > 1)
    assert len(table.columns["forward"]) == 2 * (m + p - 1), "no device is idle but to fill and to drain"


@given(st.one_of(published(), any_valid()), st.booleans(), st.floats(0, 2))
def test_simulated_times_respect_what_tasks_need(schedule, recompute, transfer):
    orders, p, m, v = schedule
    costs = even_costs(p, v, transfer, recompute=recompute)
    in_order = simulate(orders, p, m, v, costs)
    ticks = simulate_ticks(tick_table(orders, p, m, v, recompute=recompute), costs)
    halved = [task for order in orders for task in order if task.kind == "backward" and kinds_of(orders)["halves"]]
    device_of = {task.stage: device for device, order in enumerate(orders) for task in order}
    for timeline, more in ((in_order, 0), (ticks, len(halved))):
        spans = {as_needed(span.task): span for device in timeline.spans for span in device}
        assert len(spans) == sum(map(len, orders)) + more
        for device in timeline.spans:
            for before, after in itertools.pairwise(device):
                assert before.end <= after.start + 1e-9
        for span in spans.values():
            for q in what_is_needed(span.task, p * v):
                away = transfer if device_of[q[1]] != device_of[span.task.stage] else 0
                assert spans[q].end + away <= span.start + 1e-9
        assert 0 <= timeline.bubble < 1
        work = sum(costs.of(span.task) for span in spans.values())
        assert timeline.total <= 1e-9 + work + transfer * len(spans) * 2
    listed = [[span.task for span in device] for device in in_order.spans]
    assert listed == [list(order) for order in orders]


# ---- what cannot run ----------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.randoms(use_true_random=False))
def test_deadlocks_are_the_circles_of_a_topological_sort(p, m, v, random):
    orders = [[task for task in all_tasks(p, m, v) if task.stage % p == device] for device in range(p)]
    for order in orders:
        for _ in range(random.randrange(4)):
            i, j = random.randrange(len(order)), random.randrange(len(order))
            order[i], order[j] = order[j], order[i]
    graph = {task: set(what_is_needed(task, p * v)) for order in orders for task in order}
    for order in orders:
        for before, after in itertools.pairwise(order):
            graph[after].add(before)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        with pytest.raises(ValueError, match=r"never ends: device \d cannot do"):
            check_schedule(orders, p, m, v)
    else:
        check_schedule(orders, p, m, v)


def test_deadlock_names_the_circle():
    orders = gpipe(2, 2)
    orders[0] = [Task("forward", 0, 0), Task("backward", 0, 0), Task("forward", 0, 1), Task("backward", 0, 1)]
    with pytest.raises(ValueError, match="never ends") as caught:
        check_schedule(orders, 2, 2, 1)
    assert str(caught.value) == (
        "the schedule never ends: device 0 cannot do the backward of stage 0, microbatch 0 before the backward of stage"
        " 1, microbatch 0, which comes later on device 1; device 1 cannot do the forward of stage 1, microbatch 1 "
        "before the forward of stage 0, microbatch 1, which comes later on device 0."
    )


@given(published(), st.data())
def test_mutated_schedules_are_refused(schedule, data):
    orders, p, m, v = schedule
    orders = [list(order) for order in orders]
    device = data.draw(st.integers(0, p - 1))
    i = data.draw(st.integers(0, len(orders[device]) - 1))
    task = orders[device][i]
    kind = data.draw(st.sampled_from(["missing", "doubled", "moved", "kind", "stage", "microbatch", "late forward"]))
    match kind:
        case "missing":
            del orders[device][i]
            message = f"{task} is missing from the list of device {device}"
        case "doubled":
            orders[device].append(task)
            message = f"{task} is twice in the list of device {device}"
        case "moved" if p > 1:
            del orders[device][i]
            orders[(device + 1) % p].append(task)
            message = "All tasks of a stage are on one device"
        case "stage":
            orders[device][i] = task._replace(stage=p * v)
            message = f"the stage must be in 0..{p * v - 1}"
        case "microbatch":
            orders[device][i] = task._replace(microbatch=-1)
            message = f"the microbatch must be in 0..{m - 1}"
        case "late forward":
            forward = next(t for t in orders[device] if t.kind == "forward")
            orders[device].remove(forward)
            orders[device].append(forward)
            message = "the schedule never ends"
        case _:
            orders[device][i] = task._replace(kind="weights")
            message = f"entry {i} of device {device} has the kind 'weights'; it must be forward or backward or"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schedule(orders, p, m, v)
    if any(task.kind == "backward" for order in orders for task in order):  # otherwise it has become another thing
        with pytest.raises(ValueError, match=re.escape(message)):
            tick_table(orders, p, m, v, recompute=True)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ({0: []}, "a schedule is a list of tasks for each of 2 devices, not dict"),
        ("ab", "a schedule is a list of tasks for each of 2 devices, not a list of 2"),
        ([[]], "a schedule is a list of tasks for each of 2 devices, not a list of 1"),
        (None, "a schedule is a list of tasks for each of 2 devices, not NoneType"),
        ([["F0"], []], "entry 0 of device 0 is 'F0'; a task is Task"),
        ([[5], []], "entry 0 of device 0 is 5; a task is Task"),
        ([[("forward", 0.5, 0)], []], "entry 0 of device 0 is .*a task is Task"),
        (forward_only(2, 1), "the backward of stage 0, microbatch 0 is missing"),
        ([gpipe(2, 1)[0], []], "no device has a task of stage 1; there are 2 stages"),
        (
            [[*order, ("backward_weights", d, 0)] for d, order in enumerate(gpipe(2, 1))],
            "the backward_weights of stage 0, microbatch 0 is listed beside the backward of stage 0",
        ),
        (
            [[task for task in order if task.kind != "backward_weights"] for order in zb_h1(2, 1)],
            "the backward_weights of stage 0, microbatch 0 is missing from the list of device 0",
        ),
    ],
)
def test_what_is_no_schedule(orders, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(orders, 2, 1, 1)


def test_stages_that_are_too_far():
    orders = gpipe(4, 1)
    orders[1], orders[2] = orders[2], orders[1]
    with pytest.raises(ValueError, match="stage 0 is on device 0 and stage 1 on device 2"):
        check_schedule(orders, 4, 1, 1)
    with pytest.raises(ValueError, match=r"device 0 has 2 stages: \[0, 1\]. Each device has 1"):
        check_schedule([[*gpipe(2, 1)[0], *gpipe(2, 1)[1]], []], 2, 1, 1)


def test_any_triple_is_a_task():
    orders = [[("forward", np.int64(0), 0), ["backward", 0, 0]]]
    assert check_schedule(orders, 1, 1, 1) == gpipe(1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interleaved_1f1b(4, 6, 2), "not a multiple of 4 devices. Use 4 or 8 microbatches, or v=1 and"),
        (
            lambda: interleaved_1f1b(4, 3, 1),
            "not a multiple of 4 devices. Use 4 microbatches, or eager_1f1b, which takes",
        ),
        (
            lambda: gpipe(4, 8, 2),
            "gpipe is defined for one chunk per device, not for v=2. Use v=1, or interleaved_1f1b",
        ),
        (lambda: one_f_one_b(4, 8, 2), "1f1b is defined for one chunk per device"),
        (lambda: eager_1f1b(4, 8, 2), "eager_1f1b is defined for one chunk per device"),
        (lambda: zb_v(4, 8, 1), "zb_v is defined for two chunks per device, not for v=1. Use v=2, or interleaved_1f1b"),
        (lambda: dualpipe_v(4, 7), "7 microbatches are too few for 4 devices. Use at least 8 microbatches, or zb_v"),
        (lambda: gpipe(0, 8), "0 devices of the axis p: there must be at least 1"),
        (lambda: interleaved_1f1b(1, 0), "0 microbatches: there must be at least 1"),
        (lambda: forward_only(1, 1, 0), "0 chunks per device"),
    ],
)
def test_sizes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# ---- faults in tables are seen ------------------------------------------------------------------------------------


@given(st.one_of(published(), any_valid()), st.booleans(), st.data())
def test_any_change_of_a_used_cell_is_seen(schedule, recompute, data):
    orders, p, m, v = schedule
    table = tick_table(orders, p, m, v, recompute=recompute)
    columns, used = table.columns, []
    sizes = {"_residuals": table.residuals, "_kept": table.kept, "_chunk": v, "_microbatch": m}
    sizes |= {"_input": table.arrivals, "_cotangent": table.arrivals, "_output": table.arrivals + 1}
    for slot in ("forward", "backward", "weights"):
        for t, d in zip(*np.nonzero(columns[slot]), strict=True):
            names = ["", "_chunk", "_microbatch"] + ["_first", "_last"] * (slot != "weights")
            last = table.stages[d][columns[f"{slot}_chunk"][t, d]] == p * v - 1
            # That of the first stage is written where it is read: any slot will do, if no backward reads it.
            first = table.stages[d][columns[f"{slot}_chunk"][t, d]] == 0
            names += ["_input"] * ((slot == "forward" and not first) or (slot != "weights" and recompute))
            names += ["_output"] * (slot == "forward" and last)
            names += ["_cotangent"] * (slot == "backward") + ["_residuals"] * (not recompute)
            names += ["_kept"] * (slot != "forward" and table.halves)
            used += [(slot + name, t, d, sizes.get(name, 2)) for name in names]
    for way in ("from_left", "from_right", "from_self"):
        arriving = zip(*np.nonzero(columns[way] < table.arrivals), strict=True)
        used += [(way, t, d, table.arrivals + 1) for t, d in arriving]
    name, t, d, size = data.draw(st.sampled_from([cell for cell in used if cell[3] > 1]))
    columns[name][t, d] = data.draw(st.integers(0, size - 1).filter(lambda x: x != columns[name][t, d]))
    with pytest.raises(ValueError, match=r"tick \d+, device \d|the table lacks"):
        check_tick_table(table, p, m, v, recompute=recompute, **kinds_of(orders))


@pytest.mark.parametrize(
    ("buffer", "names"),
    [
        (
            "arrivals",
            [
                "forward_input",
                "forward_output",
                "backward_input",
                "backward_cotangent",
                "from_left",
                "from_right",
                "from_self",
            ],
        ),
        ("residuals", ["forward_residuals", "backward_residuals", "weights_residuals"]),
        ("kept", ["backward_kept", "weights_kept"]),
    ],
)
def test_a_buffer_that_is_written_over_is_seen(buffer, names):
    table = tick_table(zb_v(4, 8), 4, 8, 2, recompute=buffer == "arrivals")
    size = getattr(table, buffer)
    for name in names:
        column = table.columns[name]
        column[column == size - 1] = 0
    with pytest.raises(ValueError, match=rf"reads slot 0 of {buffer}, which holds the (forward|backward) of stage"):
        check_tick_table(table, 4, 8, 2, recompute=buffer == "arrivals", halves=True, is_v=True)


def edited(orders, p, m, v, edits):
    """A table with cells set to other values: {(column, tick, device): value}."""
    table = tick_table(orders, p, m, v, recompute=True)
    for (name, t, d), value in edits.items():
        table.columns[name][t, d] = value
    return table


@pytest.mark.parametrize(
    ("p", "edits", "message"),
    [
        (1, {("forward_microbatch", 1, 0): 0}, "tick 1, device 0: the forward of stage 0, .* a second time"),
        (1, {("forward", 1, 0): 0}, "no forward, but forward_first, forward_last, forward_microbatch"),
        (1, {("forward_first", 0, 0): 0}, "marked wrongly as first or last"),
        (1, {("forward_chunk", 0, 0): 1}, "the forward of chunk 1, microbatch 0 does not exist"),
        (1, {("forward_output", 0, 0): 9}, "which holds None, not the forward of stage 0, microbatch 0"),
        (
            2,
            {("from_left", 1, 1): 1},
            "reads slot 0 of arrivals, which holds None, not the forward of stage 0",
        ),
        (
            2,
            {("backward_cotangent", 2, 0): 5},
            "slot 5 of arrivals, which holds nothing: there is no such slot",
        ),
    ],
)
def test_faults_of_tables_are_named(p, edits, message):
    table = edited(gpipe(p, 2) if p == 1 else short_1f1b(p, 2), p, 2, 1, edits)
    with pytest.raises(ValueError, match=message):
        check_tick_table(table, p, 2, 1, recompute=True)


def test_what_a_table_lacks_is_named():
    table = tick_table(gpipe(1, 2), 1, 2, 1, recompute=True)
    columns = {name: column[:2] for name, column in table.columns.items()}
    with pytest.raises(ValueError, match="the table lacks the backward of stage 0, microbatch 1"):
        check_tick_table(dataclasses.replace(table, columns=columns), 1, 2, 1, recompute=True)


# ---- schedules by name --------------------------------------------------------------------------------------------


def test_names():
    assert {name: schedule_of(name) for name in SCHEDULES} == SCHEDULES
    assert set(SCHEDULES) == {"gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"}


MINE = """
from shardlib.schedules import Task

def one_after_the_other(p, m, v):
    stages = lambda d: range(d, p * v, p)
    return [
        [
            task
            for k in range(m)
            for task in [("forward", s, k) for s in stages(d)] + [("backward", s, k) for s in stages(d)[::-1]]
        ]
        for d in range(p)
    ]

def forgets(p, m, v):
    return [order[:-1] for order in one_after_the_other(p, m, v)]

def of_two(p, m):
    return []

def of_one_device(p, m, v):
    return [None] * p

number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_schedules.py").write_text(MINE)
    (tmp_path / "broken_schedules.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = "my_schedules", "broken_schedules"
    for name in names:  # of another test
        sys.modules.pop(name, None)
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_a_schedule_of_ones_own(mine):
    schedule = schedule_of("my_schedules:one_after_the_other")
    orders = schedule(2, 2, 2)
    assert short(orders)[1] == ["F1.0", "F3.0", "B3.0", "B1.0", "F1.1", "F3.1", "B3.1", "B1.1"]
    assert isinstance(orders[0][0], Task)
    with pytest.raises(ValueError, match="'my_schedules:forgets' for p=2, m=1, v=1: the backward of stage 0, micro"):
        schedule_of("my_schedules:forgets")(2, 1, 1)
    with pytest.raises(ValueError, match="p=2, m=1, v=1: the tasks of device 0 are None; give a list of them"):
        schedule_of("my_schedules:of_one_device")(2, 1, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_bubble", "no schedule is called 'zero_bubble'. Choose gpipe, 1f1b, eager_1f1b, interleaved_1f1b, zb_h1"),
        ("my_schedules:", "no schedule is called 'my_schedules:'"),
        ("nowhere:f", "there is no module 'nowhere'. It is looked for as by `import nowhere`"),
        ("my_schedules:absent", "my_schedules has no function 'absent'"),
        ("my_schedules:number", "my_schedules has no function 'number'"),
        ("my_schedules:of_two", "'my_schedules:of_two' cannot be called as of_two(p, m, v): too many positional"),
    ],
)
def test_names_of_no_schedule(mine, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule_of(name)


def test_where_the_stages_are(mine):
    assert stages_of("interleaved_1f1b", 4, 6, 2) == in_a_ring(4, 2), "also for microbatches that it refuses"
    assert stages_of("zb_v", 4, 6, 2) == stages_of("dualpipe_v", 4, 6, 2) == in_a_v(4)
    assert stages_of("my_schedules:one_after_the_other", 2, 3, 2) == in_a_ring(2, 2)
    assert stages_of_devices(zb_v(3, 1)) == in_a_v(3)


def test_what_ones_own_file_lacks_is_not_hidden(mine):
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        schedule_of("broken_schedules:f")


def test_no_jax():
    modules = "shardlib.schedules, shardlib.tick_tables, shardlib.schedule_simulator"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
