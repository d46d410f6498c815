"""What one device does in a step, by source line: matmuls, attention, memory traffic and messages."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwright.inspect.plan.graph import Graph, Node
from shardwright.inspect.plan.kernels import Kernel, kernels_of, product_shape
from shardwright.modeling.planned_attention import share_of

_HEAVY = ("matmul", "attention", "loop", "branch")
HOST = "host"
"""Prefix for what is moved to the device's host, or from it."""
STACK = "stack"
"""Prefix for what a loop that is not unrolled copies into, or out of, the values kept for the backward pass."""
_TOGETHER = ("_first", "_last")
"""Suffixes of tasks that all stages compute together."""


class Op(NamedTuple):
    """Equal executions of one operation.

    Attributes:
        line, phase, task: as in a graph's Site.
        kind: matmul; attention, by a kernel of its own; memory, for fused operations and pure moves; or collective.
        what: sizes of a matmul, name of a collective, or the array that is made.
        count: executions in a step, on one device.
        flops: FLOPs of one execution.
        traffic: bytes that one execution reads and writes in the device's memory.
        shape: for a matmul its sizes b, m, k, n; else ().
        dtype: dtype of the operands.
        axes: for a collective, its axes.
        bytes: for a collective, bytes of the whole array: the result of a gather, the operand of a scatter.
        tensor: for a collective, the name of its weight, or its operand; for the cast of a weight, the weight's name.
        timing: for a collective. ahead: its operand is available when the iteration begins; after: nothing in the
            iteration reads its result; waited: neither.
        loop: index of the loop body that contains it.
        seconds: time of all executions in a step, on a kind of chip.
        exposed: by how much they lengthen the step. For a message, the time in which the device computes nothing else;
            for computation, all of its time, plus the slowdown by concurrent messages.
    """

    line: str
    phase: str
    task: str
    kind: str
    what: str
    count: float
    flops: float
    traffic: float
    shape: tuple[int, ...] = ()
    dtype: str = ""
    axes: tuple[str, ...] = ()
    bytes: float = 0.0
    tensor: str = ""
    timing: str = ""
    loop: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


def work_of(graph: Graph, microbatches: int = 1, chunks: int = 1) -> list[Op]:
    """The operations of a graph and of its loops, in order.

    `microbatches` and a device's `chunks` determine how often it runs each task of a pipeline stage.
    """
    return list(_work(graph, 1.0, itertools.count(), None, (microbatches, chunks)))


def _work(
    graph: Graph, count: float, loops: Iterator[int], carried: tuple[int, int] | None, of_stage: tuple[int, int]
) -> Iterator[Op]:
    """`carried`: for a loop's body, the numbers of constant and of carried operands; None outside loops."""
    kernels, loop = kernels_of(graph), next(loops)
    timings = _timings(kernels, graph, carried)
    for kernel in kernels:
        node = kernel.node
        if kernel.kind == "loop":
            turns = node.params.get("length", 1)
            yield from _stacked(node, count * turns, loop)
            yield from _work(node.bodies[0], count * turns, loops, node.carried, of_stage)
        elif kernel.kind == "branch":
            body = max(node.bodies, key=lambda body: len(body.nodes))
            task = next((inner.site.task for inner in body.nodes if inner.site.task), "")
            times = of_stage[0] * (1 if task.endswith(_TOGETHER) else of_stage[1])
            yield from _work(body, times if task else count, loops, (0, len(body.ins)), of_stage)
        elif op := _op(kernel, count, loop, timings.get(id(kernel), "")):
            yield op


def _stacked(node: Node, count: float, loop: int) -> Iterator[Op]:
    """The copies that a loop over layers makes, unless it is unrolled: one layer's part of what it keeps, per turn."""
    if node.op == "scan" and node.params["unroll"] < node.params["length"]:
        before = len(node.ins) - len(node.bodies[0].ins) + sum(node.carried)  # constants may be literals
        stacks = node.ins[before:] + node.outs[node.carried[1] :]
        for x in dict.fromkeys(x.root for x in stacks if x.root.kind == "saved" and x.bytes):
            site = node.site._replace(line=x.site.line)
            size = 2.0 * x.bytes / node.params["length"]
            yield Op(*site, "memory", f"{STACK} {x}", count, 0.0, size, loop=loop)


def _op(kernel: Kernel, count: float, loop: int, timing: str) -> Op | None:
    node = kernel.node
    made = max(kernel.node.outs, key=lambda x: x.bytes)
    operand = max(node.ins, key=lambda x: x.bytes, default=made)
    what = str(made)
    flops = 0.0
    more: dict[str, Any] = {"dtype": str(operand).partition("[")[0]}
    if kernel.kind == "matmul":
        b, m, k, n = more["shape"] = product_shape(node)
        more["dtype"] = str(max((x.root for x in node.ins), key=lambda x: x.dtype.itemsize)).partition("[")[0]
        what = f"{b}: {m}×{k}×{n}" if b > 1 else f"{m}×{k}×{n}"
        flops = 2.0 * b * m * k * n
    elif kernel.kind == "attention":
        q, k, v = node.ins[:3]
        pairs = math.prod(q.shape) * k.shape[1] * share_of(node.params["name"])
        # Scores and sums; the backward pass computes the scores again, and four gradients (arXiv 2307.08691).
        what = str(q)
        width = v.shape[-1] / q.shape[-1]
        flops = 2 * pairs * (3 + 2 * width if node.site.phase == "backward" else 1 + width)
    elif kernel.kind == "collective":
        whole = made if node.op == "all_gather" else operand
        what = node.op
        more |= {
            "axes": node.axes,
            "bytes": float(whole.bytes),
            "tensor": operand.name or str(operand),
            "timing": timing,
        }
    elif any(x.of_host for x in (*node.ins, *node.outs)):
        what = f"{HOST} {what}"
    elif made.name:
        more["tensor"] = made.name  # the cast of a weight
    if not flops + kernel.traffic:
        return None
    return Op(*node.site, kernel.kind, what, count, flops, float(kernel.traffic), loop=loop, **more)


def _timings(kernels: list[Kernel], graph: Graph, carried: tuple[int, int] | None) -> dict[int, str]:
    """Timing of each collective, by the id of its kernel. Outside loops all of them are waited for."""
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
