"""Schedules equal the published ones, are refused where they cannot run, and every table reads what
was written for it.

The outside oracles: task lists of jaxpp and torch.distributed.pipelining, closed formulas of the
papers. `check_tick_table` runs a table on names.
"""

import collections
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardlib import schedules
from shardlib.schedules import (
    CHUNKS,
    SCHEDULES,
    Task,
    check_schedule,
    forwards,
    gpipe,
    interleaved_1f1b,
    needs,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from shardlib.tick_tables import Costs, TickTable, simulate, tick_table
from tests.support import golden

pytestmark = pytest.mark.quick

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies
settings.register_profile(
    "schedules", max_examples=25, deadline=None, database=None, derandomize=True
)
settings.load_profile("schedules")

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weights": "W"}


def short(orders):
    """[['F0.0', 'B0.0'], …]: kind, stage, microbatch."""
    return [
        [f"{LETTERS[task.kind]}{task.stage}.{task.microbatch}" for task in order]
        for order in orders
    ]


def simulated(orders, transfer=0.0):
    """A device's layers take 1 forward and 2 backward, whatever the number of its chunks."""
    return simulate(tick_table(orders), Costs(transfer=transfer))


# ---- task lists ----------------------------------------------------------------------------------


def torch_lists(schedule):
    """Tasks of a torch schedule, in our names; it also lists idle steps, pairs of tasks, and
    gradient reductions.
    """
    orders = []
    for device in sorted(schedule.pipeline_order):
        actions = [action for action in schedule.pipeline_order[device] if action is not None]
        texts = [str(part) for action in actions for part in action.sub_actions or [action]]
        found = re.findall(r"^(\d+)([FBIW])(\d+)$", "\n".join(texts), re.M)
        orders.append([f"{kind}{stage}.{k}" for stage, kind, k in found])
    return orders


def torch_stage(p, v, chunk=0):
    torch = pytest.importorskip("torch")
    fields = {
        "group_size": p,
        "group_rank": 0,
        "num_stages": p * v,
        "stage_index": chunk * p,
        "is_first": chunk == 0,
    }
    return SimpleNamespace(**fields, is_last=False, has_backward=True, submod=torch.nn.Identity())


def test_schedules_as_in_torch():
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    for p, m in itertools.product((1, 2, 4, 5), (1, 3, 8, 19, 20)):
        compare_with_torch(pipelining, p, m)


def compare_with_torch(pipelining, p, m):
    def halves(name):
        return [name.replace("B", "I"), name.replace("B", "W")] if name[0] == "B" else [name]

    if m >= p:  # else torch refuses them
        assert short(gpipe(p, m)) == torch_lists(pipelining.ScheduleGPipe(torch_stage(p, 1), m))
        theirs = torch_lists(pipelining.Schedule1F1B(torch_stage(p, 1), m))
        # torch's list of the last device counts its forwards from 1.
        theirs[-1] = [
            f"F{p - 1}.{int(name.split('.')[1]) - 1}" if name[0] == "F" else name
            for name in theirs[-1]
        ]
        assert short(one_f_one_b(p, m)) == [
            [half for name in order for half in halves(name)] for order in theirs
        ]

    def in_chunks(v):
        return [torch_stage(p, v, chunk) for chunk in range(v)]

    assert short(zb_v(p, m)) == torch_lists(pipelining.ScheduleZBVZeroBubble(in_chunks(2), m))
    if m % p == 0:
        assert short(zb_h1(p, m)) == torch_lists(
            pipelining.ScheduleInterleavedZeroBubble(in_chunks(1), m)
        )
        for v in (1, 2, 3, 4):
            theirs = pipelining.ScheduleInterleaved1F1B(in_chunks(v), m)
            assert short(interleaved_1f1b(p, m, v)) == torch_lists(theirs)


# ---- bubbles and memory --------------------------------------------------------------------------

IDLE = {
    "gpipe": lambda p, v: 3 * (p - 1),  # arXiv 2104.04473, 2.2.1
    "interleaved_1f1b": lambda p, v: 3 * (p - 1) / v,  # 2.2.2
    # a microbatch's forwards and input halves through the other devices
    "1f1b": lambda p, v: 2 * (p - 1),
    # arXiv 2401.10241, table 2: (p - 1)(forward + input half - weights half)
    "zb_h1": lambda p, v: p - 1,
    # until the first microbatch arrives at the last device; half a forward each
    "zb_v": lambda p, v: (p - 1) / 2,
}
"""Time that a device of the schedule is idle, of which a forward of all its layers is 1, and a
backward 2."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_the_formulas(name):
    p, m = 4, 8
    for v in (CHUNKS[name],) if name in CHUNKS else (1, 2, 4):
        timeline, idle = simulated(SCHEDULES[name](p, m, v)), IDLE[name](p, v)
        assert timeline.total == pytest.approx(3 * m + idle)
        assert timeline.bubble == pytest.approx(idle / (3 * m + idle))


# ---- any schedule --------------------------------------------------------------------------------


@st.composite
def published(draw):
    """(orders, p, m, v) of a published schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p, v = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    v = CHUNKS.get(name, v)
    m = p * draw(st.integers(1, 4)) if name == "interleaved_1f1b" else draw(st.integers(1, 20))
    return SCHEDULES[name](p, m, v), p, m, v


@st.composite
def any_valid(draw):
    """(orders, p, m, v) in which every device follows one random order of all tasks that respects
    what they need.

    Some backwards are whole and some in halves, and stages are in a ring or go down the devices and
    up again.
    """
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    random, halved, down_and_up = (
        draw(st.randoms(use_true_random=False)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    kinds, tasks = ("forward", "backward"), itertools.product(range(p * v), range(m))
    waiting = [Task(kind, s, k) for s, k in tasks for kind in kinds]
    for task in [task for task in waiting if task.kind == "backward"]:
        if halved and random.random() < 0.7:
            waiting.remove(task)
            waiting += [task._replace(kind=f"backward_{half}") for half in ("input", "weights")]
    done, orders = set(), [[] for _ in range(p)]
    while waiting:
        ready = [task for task in waiting if done.issuperset(needs(task, p * v))]
        task = random.choice(ready)
        waiting.remove(task)
        done.add(task.result)
        is_up = down_and_up and v == 2 and task.stage >= p
        orders[2 * p - 1 - task.stage if is_up else task.stage % p].append(task)
    return orders, p, m, v


def check_tick_table(table: TickTable, m: int, training: bool = True) -> None:
    """Asserts that nothing is overwritten before its last read, read before it arrived, done twice
    or not at all, with `m` microbatches. The `stages` and `halves` of the table are trusted.
    """
    columns, p = table.columns, len(table.stages)
    last = sum(map(len, table.stages)) - 1
    one_message = not (columns["forward"] * columns["backward"]).any()
    held = [collections.defaultdict(dict) for _ in range(p)]
    sizes = {"arrivals": table.arrivals, "residuals": table.residuals, "kept": table.kept}
    sent: list[tuple[Task | None, Task | None]] = [(None, None)] * p
    done = collections.Counter()

    def run(tick: int, device: int) -> tuple[Task | None, Task | None]:
        """Does what a device does in a tick; what it sends: results of a forward and a backward."""
        row = {name: int(column[tick, device]) for name, column in columns.items()}
        buffers, tasks = held[device], {}

        def write(buffer: str, column: str, task: Task | None) -> None:
            # the last slot of arrivals takes what nobody reads
            assert row[column] < sizes[buffer] + (buffer == "arrivals"), (tick, device, column)
            buffers[buffer][row[column]] = task

        def read(buffer: str, column: str, needed: Task) -> None:
            found = buffers[buffer].get(row[column])
            assert found == needed, (tick, device, buffer, row[column], found, needed)

        def head() -> None:
            """The loss: its gradient replaces the output of the last stage."""
            if row["backward_last"]:
                k = row["backward_microbatch"]
                read("arrivals", "backward_cotangent", Task("forward", last, k))
                write("arrivals", "backward_cotangent", Task("backward", last + 1, k))

        for slot in ("forward", "backward", "weights"):
            if row[slot]:
                stage, k = table.stages[device][row[f"{slot}_chunk"]], row[f"{slot}_microbatch"]
                tasks[slot] = Task(slot, stage, k)
                if slot != "weights":
                    ends = row[f"{slot}_first"], row[f"{slot}_last"]
                    assert ends == (stage == 0, stage == last), (tick, device, tasks[slot])
        done.update(tasks.values())
        if row["forward_first"]:
            write("arrivals", "forward_input", Task("forward", -1, row["forward_microbatch"]))
        if one_message:
            head()
        if forward := tasks.get("forward"):
            read("arrivals", "forward_input", forward._replace(stage=forward.stage - 1))
            if training:
                write("residuals", "forward_residuals", forward)
        write("arrivals", "forward_output", forward)
        if not one_message:
            head()
        if backward := tasks.get("backward"):
            read("residuals", "backward_residuals", backward._replace(kind="forward"))
            read("arrivals", "backward_cotangent", backward._replace(stage=backward.stage + 1))
            if table.halves:
                write("kept", "backward_kept", backward)
        if weights := tasks.get("weights"):
            read("kept", "weights_kept", weights._replace(kind="backward"))
            read("residuals", "weights_residuals", weights._replace(kind="forward"))
        return forward, backward

    for tick in range(len(columns["forward"])):
        for device in range(p):
            (left, left_back), (right_forward, right) = sent[device - 1], sent[(device + 1) % p]
            # A device that has only one result sends it everywhere.
            arrived = {
                "from_left": left or (left_back if one_message else None),
                "from_right": right or (right_forward if one_message else None),
                "from_self": sent[device][0] or sent[device][1],
            }
            for column, task in arrived.items():
                held[device]["arrivals"][int(columns[column][tick, device])] = task
        sent = [run(tick, device) for device in range(p)]
    kinds = ("forward", *(("backward",) * training), *(("weights",) * table.halves))
    every = [Task(kind, s, k) for kind in kinds for s in range(last + 1) for k in range(m)]
    assert done == collections.Counter(every)


@given(st.one_of(published(), any_valid()))
def test_tables_read_what_was_written_for_them(schedule):
    """In training, and in the forwards alone of an evaluation."""
    orders, p, m, v = schedule
    assert check_schedule(orders, p, m, v) == orders
    check_tick_table(tick_table(orders), m)
    of_forwards = tick_table(forwards(orders))
    check_tick_table(of_forwards, m, training=False)
    assert (of_forwards.residuals, of_forwards.kept) == (0, 0)


# ---- what cannot run -----------------------------------------------------------------------------


F, B, W = "forward", "backward", "backward_weights"
ONE = [[(F, 0, 0), (B, 0, 0)], [(F, 1, 0), (B, 1, 0)]]  # of two devices and one microbatch
REFUSED = Path(__file__).parent / "refused_schedules.txt"


def message_of(program: str) -> str:
    with pytest.raises(ValueError, match=" ") as raised:
        exec(program, {**vars(schedules), **globals()})
    return str(raised.value)


@pytest.mark.parametrize("name", golden.read(REFUSED))
def test_what_is_no_schedule(name):
    golden.check(REFUSED, name, message_of)


def test_no_jax():
    modules = "shardlib.schedules, shardlib.tick_tables"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
