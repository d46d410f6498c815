"""What one device does in a step, by source line: matmuls, attention, memory traffic and
messages.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from shardwright.inspect.operation import OPCODES, Operation, matmul, sent_in_ring
from shardwright.inspect.plan.graph import Graph, Node
from shardwright.inspect.plan.kernels import Kernel, kernels_of, product_shape
from shardwright.modeling.planned_attention import share_of

_HEAVY = ("matmul", "attention", "loop", "branch")
HOST = "host"
"""Prefix for what is moved to the device's host, or from it."""
STACK = "stack"
"""Prefix for what a loop that is not unrolled copies into, or out of, the values kept for the
backward pass."""
_TOGETHER = ("_first", "_last")
"""Suffixes of tasks that all stages compute together."""


def work_of(
    graph: Graph, sizes: Mapping[str, int], microbatches: int = 1, chunks: int = 1
) -> list[Operation]:
    """The operations of a graph and of its loops, in order.

    `sizes` are those of the mesh. `microbatches` and a device's `chunks` determine how often it
    runs each task of a pipeline stage.
    """
    found: list[Operation] = []
    loops = itertools.count()

    def walk(graph: Graph, count: float, carried: tuple[int, int] | None) -> None:
        """`carried`: for a loop's body, the numbers of constant and of carried operands; None
        outside loops.
        """
        kernels = kernels_of(graph)
        loop = next(loops)
        timings = _timings(kernels, graph, carried)
        for kernel in kernels:
            node = kernel.node
            if kernel.kind == "loop":
                turns = node.params.get("length", 1)
                found.extend(_stacked(node, count * turns, loop))
                walk(node.bodies[0], count * turns, node.carried)
            elif kernel.kind == "branch":
                body = max(node.bodies, key=lambda body: len(body.nodes))
                task = next((inner.site.task for inner in body.nodes if inner.site.task), "")
                times = microbatches * (1 if task.endswith(_TOGETHER) else chunks)
                walk(body, times if task else count, (0, len(body.ins)))
            else:
                op = operation_of(kernel, sizes)._replace(count=count, loop=loop)
                timing = timings.get(id(kernel), "") if op.kind == "collective" else ""
                found.extend([op._replace(timing=timing)] if op.flops + op.traffic else [])

    walk(graph, 1.0, None)
    return found


def _stacked(node: Node, count: float, loop: int) -> Iterator[Operation]:
    """The copies that a loop over layers makes, unless it is unrolled: one layer's part of what it
    keeps, per turn.
    """
    if node.op == "scan" and node.params["unroll"] < node.params["length"]:
        # constants may be literals
        before = len(node.ins) - len(node.bodies[0].ins) + sum(node.carried)
        stacks = node.ins[before:] + node.outs[node.carried[1] :]
        for x in dict.fromkeys(x.root for x in stacks if x.root.kind == "saved" and x.bytes):
            site = node.site._replace(line=x.site.line)._asdict()
            size = 2.0 * x.bytes / node.params["length"]
            yield Operation("memory", f"{STACK} {x}", **site, count=count, traffic=size, loop=loop)


def operation_of(kernel: Kernel, sizes: Mapping[str, int]) -> Operation:
    """One execution of a kernel that is neither a loop nor a branch, on a mesh of these sizes."""
    node = kernel.node
    made = max(kernel.node.outs, key=lambda x: x.bytes)
    operand = max(node.ins, key=lambda x: x.bytes, default=made)
    op = Operation(kernel.kind, str(made), dtype=operand.short_dtype)
    if kernel.kind == "matmul":
        widest = max((x.root for x in node.ins), key=lambda x: x.dtype.itemsize)
        shape = product_shape(node)
        op = matmul(*shape, widest.short_dtype)._replace(shape=shape)
    elif kernel.kind == "attention":
        q, k, v = node.ins[:3]
        pairs = math.prod(q.shape) * k.shape[1] * share_of(node.params["name"])
        # Scores and sums; the backward pass computes the scores again, and four gradients (arXiv
        # 2307.08691).
        width = v.shape[-1] / q.shape[-1]
        flops = 2 * pairs * (3 + 2 * width if node.site.phase == "backward" else 1 + width)
        op = op._replace(what=str(q), size=flops)
    elif kernel.kind == "collective":
        whole = made if node.op == "all_gather" else operand
        members = math.prod(sizes.get(axis, 1) for axis in node.axes)
        sent = sent_in_ring(OPCODES[node.op], whole.bytes, members)
        op = op._replace(what=node.op, axes=node.axes, size=sent)
        op = op._replace(bytes=float(whole.bytes), tensor=operand.name or str(operand))
    elif any(x.of_host for x in (*node.ins, *node.outs)):
        op = op._replace(what=f"{HOST} {made}")
    elif made.name:
        op = op._replace(tensor=made.name)  # the cast of a weight
    return op._replace(**node.site._asdict(), traffic=float(kernel.traffic))


def _timings(
    kernels: list[Kernel], graph: Graph, carried: tuple[int, int] | None
) -> dict[int, str]:
    """Timing of each collective, by the id of its kernel.

    Outside loops all of them are waited for.
    """
    if carried is None:
        return {id(kernel): "waited" for kernel in kernels}
    consts, count = carried
    late = {x.root for x in graph.ins[consts : consts + count]}
    waited = {x.root for x in graph.outs[:count]}
    found = {}
    for kernel in kernels:
        if late.intersection(kernel.reads):
            late.update(kernel.writes)
        else:
            found[id(kernel)] = "ahead"
    for kernel in reversed(kernels):
        if waited.intersection(kernel.writes) or kernel.kind in _HEAVY:
            waited.update(kernel.reads)
            found.setdefault(id(kernel), "waited")
    return {id(kernel): found.get(id(kernel), "after") for kernel in kernels}
