"""Adds up XLA's predicted step time on GPUs, from the seconds that it annotates on the operations
of a program.
"""

import collections
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from shardwright.cluster.chips import Chip
from shardwright.inspect.compiled.hlo import Computation, Instruction, Program
from shardwright.inspect.compiled.operations import NO_WORK, works_of
from shardwright.inspect.compiled.table import CompiledStep
from shardwright.inspect.operation import WITHOUT_LINE

SCATTER = 400 / 374
"""Time of a reduce-scatter / time of an all-gather, for the largest messages of 8 H100s in XLA's
NCCL table."""
ATTENTION = 0.5
"""Rate of attention kernels as a fraction of the chip's peak, the same for all trainers."""


class Clock:
    """Simulates a program on two streams, one that computes in the order of the schedule and one
    that communicates.

    XLA annotates most operations with seconds ("reification_cost") from its tables of matmuls and
    of NCCL on H100. For these it has none or wrong ones, which are estimated instead:

    - batched matmuls, and those with wider results: by the roofline;
    - reduce-scatters and all-to-alls: by the all-gather over the same axes that is nearest in
      bytes, and SCATTER; by the chip's links if the program has none;
    - copies: by the bytes that they read and write, at the memory's bandwidth;
    - attention in cuDNN or Triton: by its FLOPs, at the fraction `attention` of the peak; no time
      if that is 0.

    A pipeline task takes its time in each tick in which a device has one. Kernel launches take no
    time.

    Attributes:
        lines: seconds of each source line, computing or waiting for its communication.
        exposed: of these, the seconds waiting.
    """

    def __init__(
        self,
        program: Program,
        table: CompiledStep,
        chip: Chip,
        facts: Mapping[str, Any],
        attention: float = 0.0,
    ):
        self.program = program
        self.line_of = table.line_of
        self.chip = chip
        self.facts = facts
        self.attention = attention
        self.communicating = table.communicating
        self.lines, self.exposed = (collections.defaultdict[str, float](float) for _ in range(2))
        every = [(of, i) for of in program.computations.values() for i in of.instructions.values()]
        gathers = ((*x, _annotated(x[1])) for x in every if x[1].opcode == "all-gather-start")
        self.gathers = [
            (*self.message(of, i), given) for of, i, given in gathers if given is not None
        ]

    def seconds(self, computation: Computation, times: float = 1.0) -> float:
        """Returns the seconds of a computation that runs this many times in a step."""
        now = 0.0
        sent = 0.0
        ready = {}
        for i in computation.instructions.values():
            called = [self.program.computations[name] for name in i.called]
            cost = 0.0
            if i.opcode in ("while", "conditional", "call"):
                body = max(called, key=lambda part: len(part.instructions))
                unknown = self.facts.get("unknown_turns", 1)
                turns = (
                    (self.program.turns(i) or unknown) if i.opcode == "while" else self.share(body)
                )
                now += turns * self.seconds(body, times * turns)
            elif i.opcode.endswith("-done") and i.operands[0] in ready:
                cost = max(0.0, ready[i.operands[0]] - now)
            elif i.opcode.endswith("-start"):
                sent = ready[i.name] = max(now, sent) + self.of_collective(computation, i)
            elif attention_matmuls(i):
                cost = self.of_attention(computation, i)
            elif i.opcode not in NO_WORK:
                cost = self.of_work(computation, i)
            line = (self.line_of.get(i.name) or WITHOUT_LINE).removeprefix("~")
            self.lines[line] += cost * times
            if i.name in self.communicating:
                self.exposed[line] += cost * times
            now += cost
        return now

    def share(self, body: Computation) -> float:
        """Returns the fraction of ticks in which a device runs the task of a branch; 1 if the
        branch is not a task.
        """
        task = next(
            (
                x[1]
                for i in body.instructions.values()
                if (x := re.search(r"\btask_(\w+)", i.op_name))
            ),
            None,
        )
        in_ticks = self.facts.get("of_any", {}).get(task, self.facts.get("local_attention"))
        return in_ticks / self.facts["ticks"] if task and in_ticks else 1.0

    def of_work(self, computation: Computation, i: Instruction) -> float:
        """Returns the seconds of an operation that computes."""
        products = [
            work for work in works_of(self.program, computation, i) if work.kind == "matmul"
        ]
        # without cuBLAS's workspace
        made = i.shapes[0].bytes if products and i.opcode == "custom-call" else i.bytes
        given = _annotated(i)
        moved = (made + _read(computation, i)) / self.chip.memory_bandwidth
        if any(": " in product.what or product.dtype != i.shapes[0].dtype for product in products):
            return max(sum(product.size for product in products) / self.chip.peak["bf16"], moved)
        return moved if given is None else given

    def of_attention(self, computation: Computation, i: Instruction) -> float:
        """Returns the seconds of causal attention (half of the pairs) for q and k [B, L, heads,
        D].
        """
        if not self.attention:
            return 0.0
        q, k = (computation.instructions[name].shapes[0].dims for name in i.operands[:2])
        return (
            attention_matmuls(i) * math.prod(q) * k[1] / (self.attention * self.chip.peak["bf16"])
        )

    def of_collective(self, computation: Computation, i: Instruction) -> float:
        """Returns the seconds of a collective."""
        given = _annotated(i)
        if given is not None or not self.gathers:
            return given or 0.0
        axes, size = self.message(computation, i)
        if alike := [x for x in self.gathers if x[0] == axes]:
            _, known, cost = min(alike, key=lambda gather: abs(math.log(gather[1] / size)))
            return SCATTER * cost * max(1.0, size / known)
        op = "psum_scatter" if i.opcode.startswith("reduce-scatter") else "all_to_all"
        return self.chip.collective_s(op, size, self.program.mesh, axes)

    def message(self, computation: Computation, i: Instruction) -> tuple[list[str], int]:
        """Returns the axes of a collective, and the bytes of the whole array."""
        axes = [axis for work in works_of(self.program, computation, i) for axis in work.axes]
        if not axes:
            raise ValueError(f"the devices of {i.name} are not known: {i.attributes[:200]}")
        members = math.prod(self.program.mesh[axis] for axis in axes)
        given = _read(computation, i)
        return axes, given * (members if i.opcode.startswith("all-gather") else 1)


def attention_matmuls(i: Instruction) -> int:
    """Returns the number of matmuls in an attention kernel (cuDNN or Triton): 2 forward, 5
    backward; otherwise 0.
    """
    of_cudnn = re.search(r'_target="__cudnn\$(\w+)', i.attributes)
    name = of_cudnn or (
        "xla.gpu.triton" in i.attributes and re.search(r"\bmha_(forward|backward)\b", i.op_name)
    )
    return 0 if not name else 5 if "backward" in name[1].lower() else 2


def _read(computation: Computation, i: Instruction) -> int:
    """Returns the bytes of the operands."""
    return sum(
        computation.instructions[name].bytes
        for name in i.operands
        if name in computation.instructions
    )


def _annotated(i: Instruction) -> float | None:
    """Returns the seconds that XLA annotated on an operation."""
    costs = re.search(r'"reification_cost":(\[[^\]]*\])', i.attributes)
    known = json.loads(costs[1]) if costs else []
    return known[-1]["exec_time_us"] / 1e6 if known else None
