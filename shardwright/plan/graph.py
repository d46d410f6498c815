"""A traced program as a graph of what one device computes: calls inlined, renamings followed, each with its line."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jax_extra import SAVED
from shardlib.equations import CALLS, axes_of, body_of, frames_of, is_variable, scan_counts
from shardlib.places import is_users, place
from shardwright.compiled.lines import phase_of
from shardwright.modeling.planned_attention import KERNEL

ALIASES = {
    *("reshape", "squeeze", "transpose", "name", "copy", "copy_p", "stop_gradient", "optimization_barrier"),
    *("pvary", "preduced", "vary_unreduced_cast_p", "reduced_vary_cast_p", "reduce_precision", "sharding_constraint"),
}
"""Primitives whose result is the operand, in memory: XLA chooses layouts so that a transposition moves nothing."""
COLLECTIVES = {
    "all_gather": ("all_gather", "all_gather_invariant", "all_gather_reduced"),
    "psum_scatter": ("reduce_scatter", "unreduced_reduce_scatter"),
    "psum": ("psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin"),
    "ppermute": ("ppermute",),
    "all_to_all": ("all_to_all",),
}
"""Names of JAX's primitives, by the name of the collective in a plan."""
WRITING = ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")
"""Primitives that write into their first operand, in place."""
_NAMED = ("convert_element_type", "all_gather", "all_gather_invariant", "all_gather_reduced", "dynamic_slice")
"""Primitives whose result is a weight if the operand is."""
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_COLLECTIVE_OF = {primitive: name for name, names in COLLECTIVES.items() for primitive in names}
TASK = "task_"
"""Beginning of the name of a scope around the task of a pipeline stage."""


class Site(NamedTuple):
    """Source of an operation: `train.py:158`, its phase as `compiled.lines.phase_of`, and the task of a stage or ""."""

    line: str
    phase: str
    task: str


NOWHERE = Site("", "", "")


@dataclasses.dataclass(eq=False)
class Value:
    """An array of one device.

    Attributes:
        shape, dtype: of the array.
        site: where it is made.
        kind: of what is known by name: weights, optimizer, batch, gradients, saved; "" for others.
        name: of a weight; "" for others.
        of: the value in whose memory it is, for a renaming and for what is written in place.
        of_host: whether it is in the memory of the device's host, where it takes none of the device's.
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

    def __str__(self) -> str:
        short = {"bfloat16": "bf16", "bool": "bool", **dict.fromkeys(_FP8, "fp8")}.get(self.dtype.name)
        return f"{short or self.dtype.kind + str(8 * self.dtype.itemsize)}[{','.join(map(str, self.shape))}]"


class Node(NamedTuple):
    """An operation that is no renaming.

    Attributes:
        op: name of the primitive, or of the collective, or KERNEL.
        ins: operands; literals are left out.
        outs: results.
        params: as JAX has them.
        site: where it is written.
        bodies: of a loop one, of a condition one for each branch.
        axes: of a collective.
        carried: of a scan, how many operands are constants of its body, and how many are carried.
    """

    op: str
    ins: list[Value]
    outs: list[Value]
    params: Mapping[str, Any]
    site: Site
    bodies: list["Graph"]
    axes: tuple[str, ...] = ()
    carried: tuple[int, int] = (0, 0)


class Graph(NamedTuple):
    """Operations in their order, with what goes in and comes out."""

    ins: list[Value]
    nodes: list[Node]
    outs: list[Value]


class _Scope(NamedTuple):
    """What is known of the equations of a jaxpr from outside of it."""

    stack: str
    line: str
    sizes: Mapping[str, int]


def graph_of(jaxpr: Any, sizes: Mapping[str, int], ins: Sequence[Value] | None = None, scope: Any = None) -> Graph:
    """The graph of a jaxpr, closed or open.

    Args:
        jaxpr: per-device code.
        sizes: number of devices along each axis. A collective over one device is a renaming.
        ins: its arguments; None: new values.
        scope: of the call around it.
    """
    body, _ = body_of(jaxpr)
    if scope is None:  # what no result needs, of loops too, a compiler leaves out
        body, scope = dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)[0], _Scope("", "", sizes)
    ins = [_value(var, NOWHERE) for var in body.invars] if ins is None else list(ins)
    env = dict(zip(body.invars, ins, strict=True))
    env |= {var: _value(var, NOWHERE) for var in body.constvars}
    nodes: list[Node] = []
    _add(body, env, nodes, scope)
    outs = [env[var] if is_variable(var) else _value(var, NOWHERE) for var in body.outvars]
    return Graph(ins, nodes, outs)


def _value(var: Any, site: Site, **more: Any) -> Value:
    dtype = getattr(var.aval, "dtype", np.dtype("float32"))
    is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)  # of random numbers: two words
    shape, of_host = (
        tuple(getattr(var.aval, "shape", ())),
        getattr(var.aval, "memory_space", None) == jax.memory.Space.Host,
    )
    return Value(shape, np.dtype("uint64" if is_key else dtype), site, of_host=of_host, **more)


@functools.cache
def _place(frames: tuple[tuple[str, int], ...]) -> str:
    return next((place(file, line) for file, line in reversed(frames) if is_users(file)), "")


def _site(eqn: Any, scope: _Scope) -> tuple[Site, str]:
    stack = f"{scope.stack}/{eqn.source_info.name_stack}"
    tasks = [part for part in stack.replace("(", "/").replace(")", "/").split("/") if part.startswith(TASK)]
    line = _line_of(eqn) or scope.line
    return Site(line, phase_of(stack), tasks[-1].removeprefix(TASK) if tasks else ""), stack


_lines: dict[int, tuple[Any, str]] = {}


def _line_of(eqn: Any) -> str:
    trace = eqn.source_info.traceback
    if (known := _lines.get(id(trace))) is None:
        known = _lines[id(trace)] = (trace, _place(tuple(frames_of(eqn))))  # kept, so that the id stays its own
    return known[1]


def _add(body: Any, env: dict, nodes: list[Node], scope: _Scope) -> None:
    for eqn in (eqn for eqn in body.eqns if eqn.outvars):
        op, (site, stack) = eqn.primitive.name, _site(eqn, scope)
        inner = _Scope(stack, site.line, scope.sizes)
        name = str(eqn.params.get("name", ""))
        # JAX takes a part out of a kernel's call ahead of it, which does not have queries, keys and values.
        is_kernel = name.startswith(KERNEL) and sum(map(is_variable, eqn.invars)) > 2
        axes = tuple(axis for axis in axes_of(eqn) if scope.sizes.get(axis, 1) > 1) if op in _COLLECTIVE_OF else ()
        # XLA takes a scan of one turn out of its loop.
        if (op in CALLS and not is_kernel) or op == "shard_map" or (op == "scan" and eqn.params["length"] == 1):
            _inline(eqn, env, nodes, inner, site)
        elif op in ALIASES or _keeps_size(eqn) or (op in _COLLECTIVE_OF and not axes) or _scales_fp8(eqn, env):
            for var, out in zip(eqn.invars, eqn.outvars, strict=False):
                env[out] = _renamed(out, var, env, site)
                if op == "name":
                    _mark(env[out].root, name, site)
        else:
            bodies = [_body(part, eqn, env, inner) for part in _bodies(eqn)]
            ins = [env[var] if is_variable(var) else None for var in eqn.invars]
            outs = [_value(var, site) for var in eqn.outvars]
            env |= dict(zip(eqn.outvars, outs, strict=True))
            kind = KERNEL if is_kernel else _COLLECTIVE_OF.get(op, op)
            carried = scan_counts(eqn) if op == "scan" else (0, 0)
            operands = [x for x in ins if x is not None]
            nodes.append(Node(kind, operands, outs, eqn.params, site, bodies, axes, carried))
            if op in _NAMED and operands:
                outs[0].name = operands[0].name
            if op in WRITING:
                _write(outs[0], ins[0], ins[1 if op == "dynamic_update_slice" else -1])
            elif bodies:
                _write_in_place(nodes[-1], ins)


def _scales_fp8(eqn: Any, env: dict) -> bool:
    """Whether an equation casts an array of fp8 or multiplies it by its scale, as its product does while it reads."""
    first = env[eqn.invars[0]] if eqn.invars and is_variable(eqn.invars[0]) else None
    return eqn.primitive.name in ("convert_element_type", "mul") and first is not None and first.root.dtype.name in _FP8


def _keeps_size(eqn: Any) -> bool:
    """Whether an equation only adds dims of size 1."""
    size = lambda var: math.prod(getattr(var.aval, "shape", ()))
    return eqn.primitive.name == "broadcast_in_dim" and size(eqn.invars[0]) == size(eqn.outvars[0])


def _bodies(eqn: Any) -> list[Any]:
    p = eqn.params
    of = {"scan": lambda: [p["jaxpr"]], "while": lambda: [p["body_jaxpr"]], "cond": lambda: list(p["branches"])}
    return of.get(eqn.primitive.name, list)()


def _body(jaxpr: Any, eqn: Any, env: dict, scope: _Scope) -> Graph:
    """The body of a loop or a branch, whose operands have the names of those outside."""
    body, _ = body_of(jaxpr)
    operands = eqn.invars[len(eqn.invars) - len(body.invars) :]
    names = (env[var].name if is_variable(var) else "" for var in operands)
    ins = [_value(var, NOWHERE, name=name) for var, name in zip(body.invars, names, strict=True)]
    return graph_of(jaxpr, scope.sizes, ins, scope)


def _renamed(var: Any, of: Any, env: dict, site: Site) -> Value:
    """A value for `var` in the memory of the variable `of`; of its own where that is a literal."""
    known = env[of] if is_variable(of) else None
    return _value(var, site, of=known, name=known.name if known else "")


def _inline(eqn: Any, env: dict, nodes: list[Node], scope: _Scope, site: Site) -> None:
    body, _ = body_of(eqn.params[CALLS.get(eqn.primitive.name, "jaxpr")])
    inner = {var: _renamed(var, outer, env, site) for var, outer in zip(body.invars, eqn.invars, strict=True)}
    inner |= {var: _value(var, site) for var in body.constvars}
    _add(body, inner, nodes, scope)
    env |= {out: _renamed(out, var, inner, site) for out, var in zip(eqn.outvars, body.outvars, strict=True)}


# ---- what is in whose memory --------------------------------------------------------------------------------------


def _mark(value: Value, name: str, site: Site) -> None:
    """Notes what a name says of a value: that it is a gradient, or saved at this line."""
    if name == SAVED:
        value.kind, value.site = value.kind or "saved", site
    elif name == "gradient":
        value.kind = value.kind or "gradients"


def _write(into: Value, owner: Value | None, written: Value) -> None:
    """Notes that `into` is in the memory of `owner`, of which is known what is written there."""
    into.of = owner
    if written.root.site.line:
        into.root.site = written.root.site
        into.root.kind = into.root.kind or _stack_kind(written.root)


def _stack_kind(made: Value) -> str:
    """Kind of an array in which a loop keeps what `made` is in each iteration."""
    return {"forward": "saved", "backward": "gradients"}.get(made.site.phase, "") if made.shape else ""


def _write_in_place(node: Node, ins: list[Value | None]) -> None:
    """Notes which results of a loop or of branches take the memory of an operand, and where others are made."""
    consts, carried = node.carried
    roots_of = [out.root for out in node.bodies[0].outs]
    for i, out in enumerate(node.outs):
        roots = [body.outs[i].root for body in node.bodies]
        made = max(roots, key=lambda root: bool(root.site.line))
        if node.op == "scan" and i >= carried:  # a stack; what is carried in has no line
            out.site = made.site if made.site.line else node.site
            out.kind = _stack_kind(made if made.site.line else out)
            # Where the loop is unrolled whole, two stacks of one value are one: of what attention keeps, and of its
            # result, which a layer marks.
            whole = node.params["unroll"] >= node.params["length"]
            before = zip(node.outs[carried:i], roots_of[carried:i], strict=True) if whole else ()
            out.of = next((stack for stack, root in before if root is made), None)
        elif node.op == "scan":
            _write(out, ins[consts + i], made)
        elif node.op == "while":
            out.of = ins[len(ins) - len(node.outs) + i]
        else:
            at = next((j for j, x in enumerate(node.bodies[0].ins) if x is roots[0]), None)
            if at is not None and all(body.ins[at] is root for body, root in zip(node.bodies, roots, strict=True)):
                _write(out, ins[1 + at], made)
            else:
                out.site = made.site
