"""The time of a step that XLA predicts for GPUs, from the seconds that it writes beside the operations of a program."""

import collections
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from shardwright.compiled.hlo import Computation, Instruction, Program
from shardwright.compiled.lines import WITHOUT_LINE
from shardwright.compiled.operations import NO_WORK, works_of
from shardwright.compiled.table import Table

SCATTER = 400 / 374
"""Time of a reduce-scatter by that of an all-gather: of the largest messages of 8 H100 in XLA's table of NCCL."""


class Clock:
    """The seconds of computations, on a stream that computes in the order of the schedule and one that communicates.

    XLA writes the seconds of most operations ("reification_cost") from its tables of products and of NCCL on H100. It
    has none, or wrong ones, for:

    - batched products, of which its table has but few: here the roofline;
    - reduce-scatters: here those of the program's all-gather that is nearest in bytes, by SCATTER, over as many devices
      where there is one;
    - copies: here the bytes that they read and write, by the memory's bandwidth;
    - cuDNN's attention: no time here.

    A task of a pipeline stage takes its time in each tick in which a device has one. No launch of a kernel takes time.

    Attributes:
        lines: seconds of each line: computing, or waiting for what it sends.
        kinds: seconds of products, batched products, other operations, and waiting.
    """

    def __init__(self, program: Program, table: Table, bandwidth: float, peak: float, facts: Mapping[str, Any]):
        self.program, self.line_of, self.facts = program, table.line_of, facts
        self.bandwidth, self.peak = bandwidth, peak
        self.lines, self.kinds = collections.Counter[str](), collections.Counter[str]()
        self.gathers = [  # devices, bytes of the whole array, seconds
            (*self.message(computation, i), cost)
            for computation in program.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "all-gather-start" and (cost := _told(i)) is not None
        ]

    def seconds(self, computation: Computation, times: float = 1.0) -> float:
        """Seconds of a computation that runs so many times in a step."""
        now, sent, ready = 0.0, 0.0, {}
        for i in computation.instructions.values():
            called = [self.program.computations[name] for name in i.called]
            if i.opcode == "while":
                turns = self.program.turns(i) or 1
                now += turns * self.seconds(called[-1], times * turns)
            elif i.opcode == "conditional":
                body = max(called, key=lambda branch: len(branch.instructions))
                share = self.share(body)
                now += share * self.seconds(body, times * share)
            elif i.opcode == "call":
                now += self.seconds(called[0], times)
            elif i.opcode.endswith("-done") and i.operands[0] in ready:
                waited = max(0.0, ready[i.operands[0]] - now)
                self.spend(i, "waiting", waited * times)
                now += waited
            elif i.opcode.endswith("-start"):
                sent = ready[i.name] = max(now, sent) + self.of_collective(computation, i)
            elif i.opcode not in NO_WORK and '_target="__cudnn' not in i.attributes:
                kind, cost = self.of_work(computation, i)
                self.spend(i, kind, cost * times)
                now += cost
        return now

    def spend(self, i: Instruction, kind: str, seconds: float) -> None:
        """Adds to the sums."""
        self.lines[(self.line_of.get(i.name) or WITHOUT_LINE).removeprefix("~")] += seconds
        self.kinds[kind] += seconds

    def share(self, body: Computation) -> float:
        """Share of the ticks in which a device does the task that a branch is; 1 of other branches."""
        task = next((x[1] for i in body.instructions.values() if (x := re.search(r"\btask_(\w+)", i.op_name))), None)
        if task is None or "ticks" not in self.facts:
            return 1.0
        return self.facts["of_any"].get(task, self.facts["of_device"]) / self.facts["ticks"]

    def of_work(self, computation: Computation, i: Instruction) -> tuple[str, float]:
        """Kind and seconds of what computes."""
        products = [work for work in works_of(self.program, computation, i) if work.kind == "matmul"]
        moved = i.bytes + _read(computation, i)
        if any(": " in product.what for product in products):
            return "batched", max(sum(x.size for x in products) / self.peak, moved / self.bandwidth)
        told = _told(i)
        return "matmul" if products else "other", moved / self.bandwidth if told is None else told

    def of_collective(self, computation: Computation, i: Instruction) -> float:
        """Seconds of a collective."""
        told = _told(i)
        if told is not None or not self.gathers:
            return told or 0.0
        members, size = self.message(computation, i)
        alike = [x for x in self.gathers if x[0] == members] or self.gathers
        _, known, cost = min(alike, key=lambda gather: abs(math.log(gather[1] / size)))
        return SCATTER * cost * max(1.0, size / known)

    def message(self, computation: Computation, i: Instruction) -> tuple[int, int]:
        """Number of devices of a group, and the bytes of the whole array."""
        axes = [axis for work in works_of(self.program, computation, i) for axis in work.axes.split()]
        members, given = math.prod(self.program.mesh[axis] for axis in axes), _read(computation, i)
        return members, given * (members if i.opcode.startswith("all-gather") else 1)


def _read(computation: Computation, i: Instruction) -> int:
    """Bytes of the operands."""
    return sum(computation.instructions[name].bytes for name in i.operands if name in computation.instructions)


def _told(i: Instruction) -> float | None:
    """Seconds that XLA wrote beside an operation."""
    costs = re.search(r'"reification_cost":(\[[^\]]*\])', i.attributes)
    known = json.loads(costs[1]) if costs else []
    return known[-1]["exec_time_us"] / 1e6 if known else None
