"""Times a step on a kind of chip: seconds of each operation, what overlaps with what, and what a
run costs.
"""

import collections
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardlib.tick_tables import Costs, simulate
from shardwright.cluster.chips import Chip
from shardwright.inspect.operation import Operation
from shardwright.inspect.plan.step import PlannedStep
from shardwright.inspect.plan.work import HOST

HIDDEN = ("ahead", "after")
"""Timings of collectives that overlap with the computation of the iteration."""
MESSAGE = 30 * 2**20
"""Bytes of the largest message into which XLA merges several, by default."""
PLANNED = (
    *(
        "line",
        "phase",
        "task",
        "kind",
        "what",
        "count",
        "size",
        "flops",
        "traffic",
        "shape",
        "dtype",
    ),
    *("axes", "bytes", "tensor", "timing", "loop", "seconds", "exposed"),
)
"""Fields of an operation in the data of a plan."""
OF_STAGES = ("forward", "backward", "weights")
"""Tasks that each stage of a pipeline runs on its own."""


class Plan(NamedTuple):
    """What a step and a run will cost.

    Attributes:
        step: the step.
        chip: the kind of its devices.
        rows: its operations with their times, in order.
        seconds: time of a step.
        bubble: seconds per step in which a device waits for other stages of its pipeline.
        steps: number of steps of the run.
    """

    step: PlannedStep
    chip: Chip
    rows: list[Operation]
    seconds: float
    bubble: float
    steps: int

    @property
    def range(self) -> tuple[float, float]:
        """Range of a step's seconds: four of five published runs were within such a range of their
        plans.
        """
        return self.seconds / (1 + self.chip.error), self.seconds * (1 + self.chip.error)

    @property
    def at_peaks(self) -> float:
        """Seconds of a step at the chip's peak rates, a lower bound."""
        return plan_of(self.step, self.chip.at_its_peaks, 0).seconds

    @property
    def limits(self) -> dict[str, float]:
        """What a step spends its time on, in words, with the share of the time, largest first."""
        names = {"matmul": "matmuls", "attention": "attention", "memory": "memory traffic"}
        spent = {
            words: sum(row.seconds for row in self.rows if row.kind == kind)
            for kind, words in names.items()
        }
        spent["waiting for messages"] = sum(
            row.exposed for row in self.rows if row.kind == "collective"
        )
        spent["slowed by messages"] = sum(row.exposed for row in self.rows) - sum(spent.values())
        spent["waiting for stages"] = self.bubble
        spent["starting layers"] = self.seconds - sum(spent.values())
        return {
            words: s / self.seconds for words, s in sorted(spent.items(), key=lambda item: -item[1])
        }

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.step.facts.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, in [0, 1]."""
        peak = self.chip.peak_of(self.step.facts.dtype) * self.step.devices
        return self.tokens_per_second * self.step.facts.flops_per_token / peak

    @property
    def days(self) -> float:
        """Days that the run takes."""
        return self.steps * self.seconds / 86400

    @property
    def dollars(self) -> float | None:
        """Cost of the run at the chip's on-demand price; None if that is unknown."""
        price = self.chip.price_per_hour
        return None if price is None else 24 * self.days * price * self.step.devices

    @property
    def offloads(self) -> bool:
        """True if values move to the host and back; the plan does not include the time for that."""
        return any(row.what.startswith(HOST) for row in self.rows)

    @property
    def fits(self) -> bool:
        """True if the peak fits in the memory of a device."""
        return self.step.peak <= self.chip.memory_bytes

    def as_data(self) -> dict[str, Any]:
        """All of it, for JSON. Bytes and FLOPs are those of one device in a step."""
        figures = ("seconds", "tokens_per_second", "mfu", "days", "dollars", "fits")
        found = {"chip": self.chip.name, "mesh": dict(self.step.mesh), **self.step.facts._asdict()}
        found |= {name: getattr(self, name) for name in figures} | {"bubble_seconds": self.bubble}
        found |= {"peak_bytes": self.step.peak, "memory_bytes": self.chip.memory_bytes}
        found["seconds_low"], found["seconds_high"] = self.range
        found["seconds_at_peaks"] = self.at_peaks
        found["memory"] = [held._asdict() for held in self.step.held]
        return found | {
            "work": [{name: getattr(row, name) for name in PLANNED} for row in self.rows]
        }


def plan_of(step: PlannedStep, chip: Chip, steps: int) -> Plan:
    """Plans a run of this many steps."""
    # Simulated devices share cores, so nothing overlaps, and none waits while others compute.
    overlaps = chip.platform != "cpu"
    merged = _merged(step.ops) if overlaps else {}
    timed = [
        op._replace(seconds=op.count * seconds_of(op, step, chip, merged.get(op)))
        for op in step.ops
    ]
    shares = _exposed(timed, chip.interference) if overlaps else [1.0] * len(timed)
    rows = [
        row._replace(exposed=row.seconds * share) for row, share in zip(timed, shares, strict=True)
    ]
    spent: dict[str, float] = collections.defaultdict(float)
    for row in rows:
        spent["transfer" if row.what == "ppermute" and not row.task else row.task] += row.exposed
    facts = step.facts
    bubble = 0.0
    host = chip.layer_s * facts.layers / step.mesh.get("p", 1) * facts.microbatches
    for task, share in (
        {"": 1.0}.items() if step.table is None else {"forward": 1 / 3, "backward": 2 / 3}.items()
    ):
        spent[task] = math.hypot(spent[task], share * host)  # about the slower of the two
    total = sum(spent.values())
    if step.table is not None and overlaps:
        ticks = len(step.table.columns["forward"])
        m = facts.microbatches
        backward = spent["backward"] + spent["weights"]
        costs = Costs(
            spent["forward"] / m,
            backward / m,
            spent["transfer"] / ticks,
            spent["weights"] / (backward or 1),
        )
        run = simulate(step.table, costs).total
        bubble = run - sum(spent[task] for task in (*OF_STAGES, "transfer"))
        total += bubble
    return Plan(step, chip, rows, total, bubble, steps)


def seconds_of(op: Operation, step: PlannedStep, chip: Chip, merged: float | None = None) -> float:
    """Seconds of one execution on its own.

    `merged`: bytes of the message that a collective is part of.
    """
    if op.kind == "collective":
        message = merged or op.bytes
        return chip.collective_s(op.what, message, dict(step.mesh), op.axes) * op.bytes / message
    computing_s = 0.0
    if op.kind == "matmul":
        computing_s = chip.matmul_s(*op.shape, dtype=op.dtype)
    elif op.kind == "attention":
        computing_s = op.flops / (chip.peak_of(op.dtype) * chip.attention_share)
    launch_s = 0.0 if op.tensor else chip.launch_s  # XLA casts many weights in one kernel
    return launch_s + max(computing_s, op.traffic / (chip.memory_bandwidth * chip.memory_share))


def _merged(ops: Iterable[Operation]) -> dict[Operation, float]:
    """Bytes of the message in which XLA sends each collective that need not be sent on its own.

    XLA merges similar ones, up to MESSAGE bytes: those of an iteration that are sent ahead or
    after, and those sent before or after all loops.
    """
    alike: dict[tuple, float] = collections.defaultdict(float)
    joined = [op for op in ops if op.kind == "collective" and (op.timing in HIDDEN or op.loop == 0)]
    for op in joined:
        alike[_kind(op)] += op.bytes
    return {
        op: max(op.bytes, alike[_kind(op)] / math.ceil(alike[_kind(op)] / MESSAGE))
        for op in joined
        if op.bytes
    }


def _kind(op: Operation) -> tuple:
    """What is equal for collectives that XLA merges."""
    return op.loop, op.phase, op.what, op.axes, op.timing


def _exposed(rows: list[Operation], interference: float) -> Iterable[float]:
    """By how much each row lengthens the step, as a share of its own time.

    In each loop, what is sent ahead or after overlaps with what the loop computes, and slows it
    down; the rest is waited for. Messages take multiprocessors, memory bandwidth and power (arXiv
    2507.03114).
    """
    computed: dict[int, float] = collections.defaultdict(float)
    sent: dict[int, float] = collections.defaultdict(float)
    for row in rows:
        (sent if row.timing in HIDDEN else computed)[row.loop] += row.seconds * (
            row.timing != "waited"
        )
    for row in rows:
        work, messages = computed[row.loop], sent[row.loop]
        if row.timing in HIDDEN:
            yield max(0.0, 1 - work / messages) if messages else 1.0
        else:
            slowed = (
                interference * min(work, messages) / work
                if work and row.timing != "waited"
                else 0.0
            )
            yield 1 + slowed
