"""A training step as a plan sees it: what one device computes, sends and keeps, by source line.

It uses no devices.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from shardlib.equations import is_variable
from shardlib.interpret import equations_in
from shardlib.tick_tables import TickTable
from shardwright.inspect.operation import Operation
from shardwright.inspect.plan.graph import NOWHERE, Graph, Value, graph_of
from shardwright.inspect.plan.kernels import Held as AtPeak
from shardwright.inspect.plan.kernels import kernels_of, peak_of
from shardwright.inspect.plan.work import STACK, work_of


class Held(NamedTuple):
    """An array that is in memory at the moment of peak memory.

    Attributes:
        line: where it is made.
        what: the name of a weight, or the array's type.
        kind: weights, optimizer, batch, gradients, saved for the backward pass, gathered copies of
            weights, or working.
        bytes: on one device.
        again: FLOPs per step to recompute it instead of saving it; 0 if it is not saved.
    """

    line: str
    what: str
    kind: str
    bytes: float
    again: float = 0.0


class Facts(NamedTuple):
    """What a plan needs to know of a configuration.

    Attributes:
        tokens: tokens of a step, on all devices.
        flops_per_token: model FLOPs, from flops.flops_of_model.
        dtype: compute dtype.
        layers, microbatches: how many there are.
    """

    tokens: int
    flops_per_token: float
    dtype: str
    layers: int
    microbatches: int


class PlannedStep(NamedTuple):
    """A training step on a mesh.

    Attributes:
        ops: the operations of one device, in order.
        held: what is in memory at the peak.
        mesh: number of devices along each axis.
        facts: facts about its configuration.
        table: tick table of the pipeline; None without stages.
    """

    ops: list[Operation]
    held: list[Held]
    mesh: Mapping[str, int]
    facts: Facts
    table: TickTable | None = None

    @property
    def peak(self) -> float:
        """Peak memory of a device, in bytes."""
        return sum(array.bytes for array in self.held)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())


def step_of(
    traced: jax.stages.Traced,
    sizes: Mapping[str, int],
    platform: str,
    facts: Facts,
    table: TickTable | None,
) -> PlannedStep:
    """Reads a traced step on an abstract mesh of these sizes.

    `table`: that of its pipeline, if any.
    """
    (eqn,) = (eqn for eqn in equations_in(traced.jaxpr) if eqn.primitive.name == "shard_map")
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[0])[0]]
    outer = dict(zip(traced.jaxpr.jaxpr.invars, paths, strict=True))
    inside = eqn.params["jaxpr"]
    given = []
    for var, inner in zip(eqn.invars, inside.invars, strict=True):
        path = outer.get(var, ()) if is_variable(var) else ()
        name = jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("0.")
        argument = str(getattr(path[0], "idx", "")) if path else ""
        kind = {"0": "optimizer", "1": "batch"}.get(argument, "")
        kind = "weights" if name.startswith("weights.") else kind
        shape = inner.aval.shape
        dtype = np.dtype(inner.aval.dtype)
        given.append(Value(shape, dtype, NOWHERE, kind, name.removeprefix("weights.")))
    graph = graph_of(inside, sizes, given)
    chunks = 1 if table is None else len(table.stages[0])
    ops = work_of(graph, sizes, facts.microbatches, chunks)
    times = facts.microbatches * chunks
    if platform != "gpu":  # the compiler for TPUs writes the results of matmuls into stacks
        ops = [op for op in ops if not op.what.startswith(STACK)]
    donated = {value for value in given if value.kind in ("weights", "optimizer")}
    held = _held(graph, given, peak_of(graph, donated, platform), times)
    return PlannedStep(ops, held, dict(sizes), facts, table)


def _held(graph: Graph, given: list[Value], peak: AtPeak, times: int) -> list[Held]:
    """Lists what is in memory at the peak. `times`: how often a step computes what is saved."""
    found = [Held("", value.name, value.kind, value.bytes) for value in given if value.kind]
    again = _again(graph)
    names = iter([value.name for value in given if value.kind == "weights"])
    gradients = (
        x for node in graph.nodes for x in node.outs if x.root is x and x.kind == "gradients"
    )
    of = {value: next(names, "") for value in gradients}
    for value, size in peak:
        what = of.get(value, "") or value.name or str(value)
        kind = value.kind or ("gathered" if value.name else "working")
        found.append(
            Held(
                value.site.line, what, kind, size, times * again.get(value, 0.0) * (kind == "saved")
            )
        )
    return found


def _again(graph: Graph) -> dict[Value, float]:
    """FLOPs to recompute each array that a loop stacks up, from the other saved values."""
    found = {}
    for node in graph.nodes:
        for body in node.bodies:
            found |= _again(body)
        if node.op != "scan":
            continue
        body, turns = node.bodies[0], node.params["length"]
        made = {value: kernel for kernel in kernels_of(body) for value in kernel.writes}
        stacked = dict(zip(node.outs[node.carried[1] :], body.outs[node.carried[1] :], strict=True))
        known = {x.root for x in stacked.values()}
        for out, inside in stacked.items():
            found[out] = turns * _flops(inside.root, made, known - {inside.root})
    return found


def _flops(value: Value, made: dict, known: set[Value]) -> float:
    """FLOPs to compute a value from known ones, counting each kernel once."""
    left = [value]
    found = {}
    while left:
        at = left.pop()
        kernel = None if at in known else made.get(at)
        if kernel is not None and kernel not in found:
            found[kernel] = sum(op.flops for op in work_of(Graph([], [kernel.node], []), {}))
            left += kernel.reads
    return sum(found.values())
