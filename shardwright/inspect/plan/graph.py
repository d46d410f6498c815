"""Turns a traced program into a graph of what one device computes: calls inlined, aliases followed,
with lines.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib import equations
from shardlib.equations import (
    IDENTITIES,
    Atom,
    Eqn,
    axes_of,
    body_of,
    called,
    is_variable,
    kinds,
    words,
)
from shardlib.interpret import Domain, Operation, interpret
from shardlib.places import place
from shardwright.inspect.compiled.lines import Site, phase_of
from shardwright.jax_extra import SAVED
from shardwright.modeling.planned_attention import KERNEL

ALIASES = IDENTITIES | kinds("unreduced") | words("reshape squeeze transpose copy reduce_precision")
"""Primitives whose result shares the operand's memory: XLA chooses layouts so that a transpose
moves nothing."""
COLLECTIVES = {
    "all_gather": kinds("gather"),
    "psum_scatter": kinds("scatter"),
    "psum": kinds("sum", "extreme"),
    "ppermute": {"ppermute"},
    "all_to_all": {"all_to_all"},
}
"""Primitives of JAX for each name of a collective in a plan."""
WRITING = equations.SCATTERS | {"dynamic_update_slice"}
"""Primitives that write into their first operand, in place."""
_NAMED = kinds("gather") | {"convert_element_type", "dynamic_slice"}
"""Primitives whose result is a weight if the operand is."""
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_COLLECTIVE_OF = {primitive: name for name, names in COLLECTIVES.items() for primitive in names}
TASK = "task_"
"""Prefix of the name of a scope around the task of a pipeline stage."""


NOWHERE = Site()


@dataclasses.dataclass(eq=False)
class Value:
    """An array of one device.

    Attributes:
        shape, dtype: as in numpy.
        site: where it is made.
        kind: weights, optimizer, batch, gradients or saved; "" for others.
        name: name of a weight; "" for others.
        of: the value whose memory it shares, for an alias and for in-place writes.
        of_host: True if it is in the memory of the device's host, and takes none of the device's.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    site: Site
    kind: str = ""
    name: str = ""
    of: "Value | None" = None
    of_host: bool = False

    @property
    def root(self) -> "Value":
        """The value that owns the memory."""
        found = self
        while found.of is not None:
            found = found.of
        return found

    @property
    def bytes(self) -> int:
        """Bytes of the array in the device's memory."""
        return 0 if self.of_host else math.prod(self.shape) * self.dtype.itemsize

    @property
    def short_dtype(self) -> str:
        """The dtype as in bf16, f32 or s32."""
        known = {"bfloat16": "bf16", "bool": "bool", **dict.fromkeys(_FP8, "fp8")}
        return known.get(self.dtype.name) or f"{self.dtype.kind}{8 * self.dtype.itemsize}"

    def __str__(self) -> str:
        return f"{self.short_dtype}[{','.join(map(str, self.shape))}]"


class Node(NamedTuple):
    """An operation that is not an alias.

    Attributes:
        op: name of the primitive, or of the collective, or KERNEL.
        ins: operands, without literals.
        outs: results.
        params: JAX's parameters.
        site: where it is written.
        bodies: one for a loop, one per branch for a condition.
        axes: axes of a collective.
        carried: for a scan, how many operands are constants of its body, and how many are carried.
        primitive: name of JAX's primitive.
    """

    op: str
    ins: list[Value]
    outs: list[Value]
    params: Mapping[str, Any]
    site: Site
    bodies: list["Graph"]
    axes: tuple[str, ...] = ()
    carried: tuple[int, int] = (0, 0)
    primitive: str = ""


class Graph(NamedTuple):
    """Operations in order, with inputs and outputs."""

    ins: list[Value]
    nodes: list[Node]
    outs: list[Value]


def graph_of(
    jaxpr: object,
    sizes: Mapping[str, int],
    ins: Sequence[Value] | None = None,
    caller: Operation | None = None,
) -> Graph:
    """Builds the graph of a jaxpr, closed or open.

    Args:
        jaxpr: per-device code.
        sizes: number of devices along each axis. A collective over one device is an alias.
        ins: its arguments; None: new values.
        caller: the loop or branch whose body it is.
    """
    body, consts = body_of(jaxpr)
    if caller is None:  # a compiler drops what no result needs, also inside loops
        body = dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)[0]
    ins = [_value(var.aval, NOWHERE) for var in body.invars] if ins is None else list(ins)
    adding = _Adding(sizes)
    outs = zip(
        body.outvars, interpret(core.ClosedJaxpr(body, consts), adding, ins, caller), strict=True
    )
    return Graph(ins, adding.nodes, [x or _value(var.aval, NOWHERE) for var, x in outs])


def _value(aval: object, site: Site, **more: Any) -> Value:
    dtype = getattr(aval, "dtype", np.dtype("float32"))
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)  # random keys: two words
    of_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    shape = tuple(getattr(aval, "shape", ()))
    return Value(shape, np.dtype("uint64" if is_key else dtype), site, of_host=of_host, **more)


def _site(op: Operation) -> Site:
    stack = "/".join(str(each.eqn.source_info.name_stack) for each in (*op.callers, op))
    tasks = [
        part
        for part in stack.replace("(", "/").replace(")", "/").split("/")
        if part.startswith(TASK)
    ]
    line = op.line()
    return Site(
        place(*line) if line else "", phase_of(stack), tasks[-1].removeprefix(TASK) if tasks else ""
    )


class _Adding(Domain[Value | None]):
    """Adds the operations of a program to `nodes`.

    Of a value it knows its array; None for a literal.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.nodes: list[Node] = []
        self._sizes = sizes

    def constant(self, x: Any) -> Value | None:
        return _value(jax.typeof(x), NOWHERE) if is_variable(x) else None

    def follow(self, at: Operation, ins: list[Value | None]) -> list[Value | None]:
        """The results of an equation, which is added to the nodes unless it is an alias."""
        eqn = at.eqn
        if not eqn.outvars:
            return []
        op = at.name
        site = _site(at)
        operands = [x for x in ins if x is not None]
        name = str(eqn.params.get("name", ""))
        # JAX moves part of a kernel's call out ahead of it; that part does not have queries, keys
        # and values.
        is_kernel = name.startswith(KERNEL) and len(operands) > 2
        axes = (
            tuple(axis for axis in axes_of(eqn) if self._sizes.get(axis, 1) > 1)
            if op in _COLLECTIVE_OF
            else ()
        )

        def rename(variables: Sequence, values: Sequence) -> list[Any]:
            return [_renamed(var, x, site) for var, x in zip(variables, values, strict=True)]

        # XLA takes a scan of one turn out of its loop.
        if (called(eqn) and not is_kernel) or (op == "scan" and eqn.params["length"] == 1):
            body = called(eqn) or eqn.params["jaxpr"]
            return rename(
                eqn.outvars, interpret(body, self, rename(body_of(body)[0].invars, ins), at)
            )
        if (
            op in ALIASES
            or _keeps_size(eqn)
            or (op in _COLLECTIVE_OF and not axes)
            or _scales_fp8(op, ins)
        ):
            outs = rename(eqn.outvars, ins[: len(eqn.outvars)])
            if op == "name":
                _mark(outs[0].root, name, site)
            return outs
        parts = (
            [*equations.jaxprs_of(eqn)][op == "while" :] if op in ("scan", "while", "cond") else []
        )
        # of a while loop without its condition
        bodies = [_body(part, ins, self._sizes, at) for part in parts]
        outs: list[Any] = [_value(var.aval, site) for var in eqn.outvars]
        kind = KERNEL if is_kernel else _COLLECTIVE_OF.get(op, op)
        carried = equations.scan_counts(eqn) if op == "scan" else (0, 0)
        self.nodes.append(Node(kind, operands, outs, eqn.params, site, bodies, axes, carried, op))
        if op in _NAMED and operands:
            outs[0].name = operands[0].name
        if op in WRITING:
            _write(outs[0], ins[0], ins[1 if op == "dynamic_update_slice" else -1])
        elif bodies:
            _write_in_place(self.nodes[-1], ins)
        return outs


def _scales_fp8(op: str, ins: list[Value | None]) -> bool:
    """True if an equation casts an fp8 array or multiplies it by its scale, which its matmul does
    while reading.
    """
    return (
        op in ("convert_element_type", "mul")
        and ins[0] is not None
        and ins[0].root.dtype.name in _FP8
    )


def _keeps_size(eqn: Eqn) -> bool:
    """True if an equation only adds dims of size 1."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    before, after = (
        math.prod(getattr(var.aval, "shape", ())) for var in (eqn.invars[0], eqn.outvars[0])
    )
    return before == after


def _body(
    jaxpr: object, operands: list[Value | None], sizes: Mapping[str, int], caller: Operation
) -> Graph:
    """The body of a loop or branch, whose operands keep the names that they have outside."""
    variables = body_of(jaxpr)[0].invars
    outside = operands[len(operands) - len(variables) :]
    ins = [
        _value(var.aval, NOWHERE, name=x.name if x else "")
        for var, x in zip(variables, outside, strict=True)
    ]
    return graph_of(jaxpr, sizes, ins, caller)


def _renamed(var: Atom, of: Value | None, site: Site) -> Value:
    """A value for `var` in the memory of `of`; in memory of its own if `of` is a literal."""
    return _value(var.aval, site, of=of, name=of.name if of else "")


# ---- what is in whose memory ---------------------------------------------------------------------


def _mark(value: Value, name: str, site: Site) -> None:
    """Records what a name says of a value: that it is a gradient, or saved at this line."""
    if name == SAVED:
        value.kind = value.kind or "saved"
        value.site = site
    elif name == "gradient":
        value.kind = value.kind or "gradients"


def _write(into: Value, owner: Value | None, written: Value | Any) -> None:
    """Records that `into` is in the memory of `owner`, and what is written there."""
    into.of = owner
    if written.root.site.line:
        into.root.site = written.root.site
        into.root.kind = into.root.kind or _stack_kind(written.root)


def _stack_kind(made: Value) -> str:
    """Kind of an array in which a loop stacks up the `made` of each iteration."""
    return (
        {"forward": "saved", "backward": "gradients"}.get(made.site.phase, "") if made.shape else ""
    )


def _write_in_place(node: Node, ins: list[Value | None]) -> None:
    """Records which results of a loop or of branches take the memory of an operand, and where
    others are made.
    """
    consts, carried = node.carried
    roots_of = [out.root for out in node.bodies[0].outs]
    for i, out in enumerate(node.outs):
        roots = [body.outs[i].root for body in node.bodies]
        made = max(roots, key=lambda root: bool(root.site.line))
        if node.op == "scan" and i >= carried:  # a stack; what is carried in has no line
            out.site = made.site if made.site.line else node.site
            out.kind = _stack_kind(made if made.site.line else out)
            # If the loop is fully unrolled, two stacks of one value are one: what attention keeps,
            # and its result, which a layer marks.
            whole = node.params["unroll"] >= node.params["length"]
            before = zip(node.outs[carried:i], roots_of[carried:i], strict=True) if whole else ()
            out.of = next((stack for stack, root in before if root is made), None)
        elif node.op == "scan":
            _write(out, ins[consts + i], made)
        elif node.op == "while":
            out.of = ins[len(ins) - len(node.outs) + i]
        else:
            at = next((j for j, x in enumerate(node.bodies[0].ins) if x is roots[0]), None)
            if at is not None and all(
                body.ins[at] is root for body, root in zip(node.bodies, roots, strict=True)
            ):
                _write(out, ins[1 + at], made)
            else:
                out.site = made.site
