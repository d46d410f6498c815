"""The kernels of a graph: what XLA runs at once, what each one reads and writes in memory, and how
long arrays live.

XLA fuses elementwise operations and reductions with their operands, so most of their results are
never in memory. An array is in memory if a matmul, a collective, attention or a loop makes or reads
it, if it is a result or is saved for the backward pass, or if it is a sum. For each array that a
fusion makes, it reads all arrays in memory on which that array depends; two fusions that read the
same array and do not depend on each other read it once.
"""

import dataclasses
import math
from collections.abc import Iterable

from shardlib.equations import REDUCTIONS
from shardwright.inspect.operation import matmul_sizes
from shardwright.inspect.plan.graph import COLLECTIVES, WRITING, Graph, Node, Value
from shardwright.modeling.planned_attention import KERNEL

ALONE = {
    *("scan", "while", "cond", "gather", "sort", "cumsum", "cummax", "top_k", "dynamic_slice"),
    *(KERNEL, *WRITING, *COLLECTIVES),
}
"""Operations that are not fused, apart from matmuls."""
PARTS = {"slice", "split"}
"""Operations that read a part of their operand."""


@dataclasses.dataclass(eq=False)
class Kernel:
    """Operations that run at once.

    Attributes:
        kind: matmul, attention, memory, collective, loop, or branch.
        node: its operation; for a fusion, the last one.
        reads: for each array in memory, the bytes that it reads.
        writes: arrays that it makes, or writes into.
        read_again: bytes of `reads` that a neighboring kernel already reads.
    """

    kind: str
    node: Node
    reads: dict[Value, int]
    writes: list[Value]
    read_again: int = 0

    @property
    def traffic(self) -> int:
        """Bytes that it reads and writes in memory.

        In-place writes and lookups count the size of what is moved.
        """
        ins, outs, op = self.node.ins, self.node.outs, self.node.op
        if op in WRITING:
            return 2 * ins[1 if op == "dynamic_update_slice" else -1].bytes
        if op in ("dynamic_slice", "gather"):
            return 2 * sum(out.bytes for out in outs)
        return sum(self.reads.values()) + sum(out.bytes for out in self.writes) - self.read_again


def product_shape(node: Node) -> tuple[int, int, int, int]:
    """Sizes b, m, k, n of a matmul: batch, rows, contracted size, columns."""
    left, right = (node.ins + node.ins)[:2]
    # each row is multiplied by the matrix of its group
    ragged = node.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else node.params["dimension_numbers"]
    groups = math.prod(right.shape[i] for i in ragged.rhs_group_dimensions) if ragged else 1
    contracted, batch = numbers
    return matmul_sizes(left.shape, right.shape, contracted, batch, groups)


def kind_of(node: Node) -> str:
    """Kind of the kernel of an operation; "fused" if it has none of its own."""
    if node.op in ("dot_general", "ragged_dot_general"):
        _, m, k, n = product_shape(node)
        # XLA turns an einsum that is not a matmul into a multiplication and a sum.
        return "matmul" if min(m, k, n) > 1 else "fused"
    if node.op in COLLECTIVES:
        return "collective"
    names = {KERNEL: "attention", "scan": "loop", "while": "loop", "cond": "branch"}
    return names.get(node.op, "memory" if node.op in ALONE else "fused")


def kernels_of(graph: Graph) -> list[Kernel]:
    """The kernels of a graph in order, without those inside loops and branches."""
    kinds = [kind_of(node) for node in graph.nodes]
    in_memory = {x.root for x in (*graph.ins, *graph.outs)}
    for node, kind in zip(graph.nodes, kinds, strict=True):
        if kind != "fused":
            in_memory |= {x.root for x in (*node.ins, *node.outs)}
        elif _sums(node):
            in_memory |= {out.root for out in node.outs}
        in_memory |= {out.root for out in node.outs if out.root.kind == "saved"}
    sources: dict[Value, dict[Value, int]] = {}  # for what is fused
    found: list[Kernel] = []
    for node, kind in zip(graph.nodes, kinds, strict=True):
        reads: dict[Value, int] = {}
        for x in node.ins:
            root = x.root
            for source, size in (
                {root: root.bytes} if root in in_memory else sources.get(root, {})
            ).items():
                reads[source] = max(reads.get(source, 0), size)
        if node.op in PARTS and kind == "fused":
            most = sum(out.bytes for out in node.outs)
            reads = {source: min(size, most) for source, size in reads.items()}
        if kind == "fused":
            made = [
                out
                for out in node.outs
                if out.root in in_memory and (out.shape or out.root in _roots(graph.outs))
            ]
            sources |= {out.root: reads for out in node.outs if out.root not in in_memory}
            if made:
                found.append(Kernel("memory", node, reads, [out.root for out in made]))
        else:
            found.append(Kernel(kind, node, reads, [out.root for out in node.outs]))
    _read_once(found)
    return found


def _sums(node: Node) -> bool:
    return node.op in REDUCTIONS | {"argmax", "argmin"} or (
        node.op == "dot_general" and product_shape(node)[2] > 1
    )


def _roots(values: Iterable[Value]) -> set[Value]:
    return {value.root for value in values}


def _read_once(kernels: list[Kernel]) -> None:
    """Records what fusions read that an earlier fusion, on which they do not depend, reads too."""
    made_by = {}
    before = []
    for i, kernel in enumerate(kernels):
        ancestors = 0
        for source in kernel.reads:
            if (j := made_by.get(source)) is not None:
                ancestors |= before[j] | 1 << j
        before.append(ancestors)
        made_by |= dict.fromkeys(kernel.writes, i)
    readers: dict[Value, list[int]] = {}
    entries = [max((math.prod(x.shape) for x in kernel.writes), default=0) for kernel in kernels]
    for i, kernel in enumerate(kernels):
        if kernel.kind != "memory" or kernel.node.op in ALONE:
            continue
        for source, size in kernel.reads.items():
            beside = readers.setdefault(source, [])
            if any(not before[i] >> j & 1 and entries[i] == entries[j] for j in beside):
                kernel.read_again += size
            beside.append(i)


# ---- memory --------------------------------------------------------------------------------------


Held = list[tuple[Value, int]]
"""Arrays in memory at one moment, with their bytes."""
WORKSPACE = 2**25
"""Bytes besides its operands that XLA gives to a matmul on GPUs: for cuBLAS on Hopper."""
LANES = 128
"""Entries in a row of a TPU's register. What attention reads has whole rows, so small heads are
padded."""


def peak_of(graph: Graph, donated: set[Value], platform: str, stacked: int | None = None) -> Held:
    """Arrays in memory at the peak, without the graph's inputs, as XLA assigns memory on a
    platform.

    The constants above, and `_reuse`, say how platforms differ.

    Args:
        graph: the graph.
        donated: inputs whose memory results may take.
        platform: gpu, tpu or cpu.
        stacked: index of the first result that a loop writes into a stack, whose bytes the loop
            around it counts. None: results are not stacked.
    """
    kernels = kernels_of(graph)
    given, results = _roots(graph.ins), list(graph.outs)
    kept = _roots(results if stacked is None else results[:stacked])
    in_stacks = _roots(results[stacked:]) if stacked is not None else set()
    first, last = {}, {}
    for i, kernel in enumerate(kernels):
        for value in kernel.writes:
            first.setdefault(value, i)
            last[value] = max(last.get(value, i), i)
        for value in kernel.reads:
            last[value] = i
    last |= dict.fromkeys(kept, len(kernels))
    size = {value: 0 if value in given else _padded(value, platform) for value in first}
    _reuse(kernels, size, last, given, donated, platform)
    for value in in_stacks & size.keys():
        made = kernels[first[value]]
        if made.kind == "memory" and last[value] == first[value]:
            size[value] = 0  # it is written directly into the stack
    alive: dict[Value, int] = {}
    ends: dict[int, list[Value]] = {}
    for value, at in last.items():
        ends.setdefault(at, []).append(value)
    best: Held = []
    for i, kernel in enumerate(kernels):
        alive |= {value: size[value] for value in kernel.writes if size.get(value)}
        held = [*alive.items()]
        if kernel.kind == "matmul" and platform == "gpu":
            made = kernel.node.outs[0]
            held.append(
                (Value(made.shape, made.dtype, made.site, "working", "workspace"), WORKSPACE)
            )
        bodies, (consts, count) = kernel.node.bodies, kernel.node.carried
        if kernel.node.op == "scan":
            inside = [
                peak_of(bodies[0], _roots(bodies[0].ins[consts : consts + count]), platform, count)
            ]
        else:
            inside = [peak_of(body, _roots(body.ins), platform) for body in bodies]
        best = max(best, [*held, *max(inside, key=_bytes, default=[])], key=_bytes)
        for value in ends.get(i, ()):
            alive.pop(value, None)
    return best


def _bytes(held: Held) -> int:
    return sum(size for _, size in held)


def _padded(value: Value, platform: str) -> int:
    last = value.shape[-1] if len(value.shape) > 3 else 1
    return value.bytes * LANES // last if platform == "tpu" and 1 < last < LANES else value.bytes


def _reuse(
    kernels: list[Kernel],
    size: dict,
    last: dict,
    given: set[Value],
    donated: set[Value],
    platform: str,
) -> None:
    """Lets a result of a fusion reuse the memory of an array of the same size that nothing reads
    afterwards.

    On GPUs only the memory of inputs: their fusions seldom write where they read.
    """
    for i, kernel in enumerate(kernels):
        if kernel.kind != "memory":
            continue
        free = [
            x
            for x in kernel.reads
            if last[x] == i and (x in donated or x not in given) and x not in kernel.writes
        ]
        for made in kernel.writes:
            match = next((x for x in free if x.bytes == made.bytes), None)
            if match is not None:
                free.remove(match)
                if match in given:
                    size[made] = 0
                elif platform != "gpu":
                    last[match] = i - 1
