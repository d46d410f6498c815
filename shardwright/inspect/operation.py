"""An operation of a source line, as a plan predicts it and as the compiler writes it.

Does not import JAX.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwright.inspect.tables import in_bytes, in_flops

WITHOUT_LINE = "without a line"
OPCODES = {
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Opcode in HLO of each collective of a plan."""


class Operation(NamedTuple):
    """Equal executions of one operation on one device.

    Attributes:
        kind: matmul; attention, by a kernel of its own; memory, for fused operations and pure
            moves; collective; kept, for an array that the backward pass reads, which only a plan
            has; or other.
        what: sizes of a matmul, name of a collective, or the array that is made.
        line: as in lines.Site.
        phase: "forward", "backward", "again" for what the backward pass recomputes of the forward
            pass, or "".
        count: executions in a step; of a compiled one, in one turn of the loops around it.
        size: of one execution: FLOPs of a matmul or of attention; bytes that a device sends if the
            devices of a group form a ring; bytes of a kept array; else 0.
        dtype: dtype of the operands.
        axes: for a collective, its axes; empty if unknown.

    Planned:
        task: the task of a pipeline stage, or "".
        traffic: bytes that one execution reads and writes in the device's memory.
        shape: for a matmul its sizes b, m, k, n; else ().
        bytes: for a collective, bytes of the whole array: the result of a gather, the operand of a
        scatter. tensor: for a collective, the name of its weight, or its operand; for the cast of a
        weight, the weight's name. timing: for a collective. ahead: its operand is available when
        the iteration begins; after: nothing in the
            iteration reads its result; waited: neither.
        loop: index of the loop body that contains it.
        seconds: time of all executions in a step, on a kind of chip.
        exposed: by how much they lengthen the step. For a message, the time in which the device
        computes nothing else;
            for computation, all of its time, plus the slowdown by concurrent messages.

    Compiled:
        where: loops around it, outermost first, and "again" for what is recomputed.
        section: index of its section in the table.
        turns: number of turns of the loops in a step.
        sometimes: True if it is conditional, so a device may do fewer than are counted.
        overlapped: for a collective, True if the program computes between its start and its end.
        None: it has no start
            and end.
    """

    kind: str
    what: str
    line: str = ""
    phase: str = ""
    count: float = 1
    size: float = 0
    dtype: str = ""
    axes: tuple[str, ...] = ()
    task: str = ""
    traffic: float = 0.0
    shape: tuple[int, ...] = ()
    bytes: float = 0.0
    tensor: str = ""
    timing: str = ""
    loop: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    where: str = ""
    section: int = 0
    turns: int = 1
    sometimes: bool = False
    overlapped: bool | None = None

    @property
    def flops(self) -> float:
        """FLOPs of one execution; 0 for what is neither a matmul nor attention."""
        return self.size if self.kind in ("matmul", "attention") else 0.0

    @property
    def total(self) -> float:
        """`size` of all executions in a step."""
        return self.size * self.count * self.turns

    @property
    def times(self) -> str:
        """How often it is compiled: `2 × 16` for two in each of 16 turns."""
        return f"{self.count} × {self.turns}" if self.turns > 1 else str(self.count)

    @property
    def words(self) -> str:
        """What it is, in words."""
        if self.kind == "collective":
            overlapped = {None: "", True: ", overlapped", False: ", not overlapped"}[
                self.overlapped
            ]
            return f"{self.what} {' '.join(self.axes) or '?'}{overlapped}"
        return f"{self.what} {self.dtype}".strip()


def amount(kind: str, size: float) -> str:
    """Formats a number of FLOPs or bytes, whichever this kind of operation has."""
    return (in_flops if kind in ("matmul", "attention") else in_bytes)(size)


def matmul_sizes(
    left: Sequence[int],
    right: Sequence[int],
    contracted: tuple[Iterable[int], Iterable[int]],
    batch: tuple[Iterable[int], Iterable[int]],
    groups: int = 1,
) -> tuple[int, int, int, int]:
    """Sizes b, m, k, n of a matmul: batch, rows, contracted size, columns.

    `left` and `right` are the shapes of the operands, of which `contracted` and `batch` are dims,
    and `groups` is the number of matrices of the right one, if each row of the left one is
    multiplied by one of them.
    """

    def entries(shape: Sequence[int], dims: Iterable[int]) -> int:
        return math.prod(shape[i] for i in dims)

    b, k = entries(left, batch[0]), entries(left, contracted[0])
    m = math.prod(left) // max(1, b * k)
    n = math.prod(right) // max(1, b * groups * entries(right, contracted[1]))
    return b, m, k, n


def matmul(b: int, m: int, k: int, n: int, dtype: str) -> Operation:
    """A matmul of these sizes."""
    what = f"{b}: {m}×{k}×{n}" if b > 1 else f"{m}×{k}×{n}"
    return Operation("matmul", what, size=2 * b * m * k * n, dtype=dtype)


def sent_in_ring(opcode: str, size: int, members: int) -> int:
    """Bytes that each of so many devices sends in a ring, in a collective of a whole array of
    `size` bytes.
    """
    if opcode in ("collective-permute", "collective-broadcast"):
        return size
    return size * (members - 1) * (2 if opcode == "all-reduce" else 1) // members
