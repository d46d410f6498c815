"""Check of traced programs."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from shardlib.parsing import ShardError
from shardlib.values import noting_arguments, planned_for
from soundness.domain import UNIFORM, Value, describe, devices
from soundness.equation import WHOLE_SIZE, Equation, Refused
from soundness.interpreter import Different, Interpreter, block_of, read_array
from soundness.rules import jaxprs_of


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a program: where, what the value is, what to do."""

    text: str

    def __str__(self) -> str:
        return self.text


def findings(program: Any, twin: Any = None, types: list | None = None) -> list[Finding]:
    """What is wrong with each jax.shard_map in a traced program, and what depends on the mesh outside of it.

    Args:
        program: what jax.make_jaxpr or jax.jit(f).trace(...).jaxpr gives.
        twin: the same program traced on a mesh whose axes have one device each. Without it, numbers and sizes that
            depend on the mesh are taken for whole ones: `x.shape[0]` is not noticed.
        types: the specs of the arguments of each shard_map, whose names of dims messages show; None: no names.

    Raises:
        Different: the twin has other operations.
    """
    found: list[Finding] = []
    theirs = list(_shard_maps(twin)) if twin is not None else None
    ours = list(_shard_maps(program))
    if theirs is not None and len(theirs) != len(ours):
        raise Different(getattr(program, "jaxpr", program), getattr(twin, "jaxpr", twin))
    found += map(Finding, dict.fromkeys(_outside(program, twin)) if twin is not None else ())
    for i, eqn in enumerate(ours):
        other = theirs[i] if theirs is not None else None
        found += _of_shard_map(eqn, other, types[i] if types and len(types) == len(ours) else None)
    return found


def _shard_maps(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
            continue
        for inner in jaxprs_of(eqn):
            yield from _shard_maps(inner)


def _outside(program: Any, twin: Any) -> Iterator[str]:
    """What depends on the mesh outside of jax.shard_map: numbers, and arrays that become arguments of it."""
    remedy = "compute it within jax.shard_map, or let it be the same on every mesh"
    ours, theirs = (getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in (program, twin))
    consts, twin_consts = (getattr(jaxpr, "consts", ()) for jaxpr in (program, twin))
    names = lambda jaxpr: [eqn.primitive.name for eqn in jaxpr.eqns]
    if names(ours) != names(theirs) or len(consts) != len(twin_consts):
        raise Different(ours, theirs)
    for value, here in zip(map(read_array, consts, twin_consts), consts, strict=True):
        if value.wild or value.is_local or (value.is_constant and value.known[0] != value.known[1]):
            text = f"{here.dtype}{list(here.shape)}"
            yield f"an array that was made outside of the program depends on the mesh: {text}\n  remedy: {remedy}"
    for eqn, other in zip(ours.eqns, theirs.eqns, strict=True):
        if eqn.primitive.name == "shard_map":
            continue
        if _numbers(eqn) != _numbers(other):
            place = Equation(eqn, None, [], {}, {}).place()
            problem = f"{eqn.primitive.name}: a number outside of jax.shard_map depends on the mesh"
            yield f"{place}: {problem}\n  remedy: {remedy}"
        for inner, twins in zip(jaxprs_of(eqn), jaxprs_of(other), strict=True):
            yield from _outside(inner, twins)


def _numbers(eqn: Any) -> list:
    """The literals of an equation, and the parameters that are numbers."""
    literals = [str(var.val) if isinstance(var, Literal) else "" for var in eqn.invars]
    return literals + [(name, value) for name, value in eqn.params.items() if _is_plain(value)]


def _is_plain(parameter: Any) -> bool:
    """Whether a parameter is made of numbers alone."""
    return isinstance(parameter, int | float) or (isinstance(parameter, tuple) and all(map(_is_plain, parameter)))


def _axes(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    entries = [*spec, *([None] * (ndim - len(spec)))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _place_of(var: Any, body: Any) -> str:
    """`file.py:line: ` of the code that makes a result."""
    made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
    while (eqn := made.get(var)) is not None:
        place = Equation(eqn, None, [], {}, {}).place()
        if place != "?":  # but for a cast that JAX added
            return f"{place}: "
        var = eqn.invars[0] if not isinstance(eqn.invars[0], Literal) else None
    return ""


def _whole_shape(aval: Any, axes: list, sizes: Any) -> tuple[int, ...]:
    return tuple(n * devices(sizes, a) for n, a in zip(aval.shape, axes, strict=True))


def _of_shard_map(eqn: Any, twin: Any, types: list | None) -> list[Finding]:
    manual = eqn.params["newly_manual_axes"]  # over others the compiler shards, without a trace in the program
    sizes = {axis: n for axis, n in eqn.params["mesh"].shape.items() if axis in manual}
    twin_sizes = dict(twin.params["mesh"].shape) if twin is not None else dict.fromkeys(sizes, 1)
    interpreter = Interpreter(sizes, twin_sizes, is_unchecked=not eqn.params.get("check_vma", True))
    inner, other = eqn.params["jaxpr"], twin.params["jaxpr"] if twin is not None else None
    body = getattr(inner, "jaxpr", inner)
    # Constants of the caller come before the arguments.
    known = [[dim.name for dim in spec.dims] for spec in types or ()]
    names = [None] * (len(body.invars) - len(known)) + known
    args = [
        block_of(_axes(spec, len(var.aval.shape)), var.aval.shape, sizes, names=name)
        for spec, var, name in zip(eqn.params["in_specs"], body.invars, names, strict=True)
    ]
    if twin is None:
        interpreter.twin_sizes = sizes  # numbers are as they are on this mesh
    outs = interpreter.run(inner, other, args)
    found = [str(wild) for wild in interpreter.problems]
    for i, (spec, value, var) in enumerate(zip(eqn.params["out_specs"], outs, body.outvars, strict=True)):
        axes = _axes(spec, len(var.aval.shape))
        there = (
            None if other is None else _whole_shape(getattr(other, "jaxpr", other).outvars[i].aval, axes, twin_sizes)
        )
        if value.wild:
            found.append(str(value.wild))
        elif value.ratio != 1.0 and value.scaled is not None:
            try:
                value.scaled.unscaled(value)
            except Refused as refusal:
                found.append(str(interpreter.explain(value.scaled, refusal)))
        elif problem := _leaving(value, axes, var.aval, sizes, there):
            found.append(f"{_place_of(var, body)}result {i} {problem}")
    return [Finding(text) for text in dict.fromkeys(found)]


def _leaving(value: Value, axes: list, aval: Any, sizes: Any, there: Any) -> str | None:
    """What is wrong with a result that is declared to be sharded over `axes`; None if nothing is."""
    declared = block_of(axes, aval.shape, sizes)
    fits = all(d is UNIFORM or d == w for d, w in zip(value.dims, declared.dims, strict=True))
    here = _whole_shape(aval, axes, sizes)
    if value.is_finished and fits and value.ratio == 1.0:
        if there is None or here == there:
            return None
        return f"is of shape {here} here and {there} on one device: compute the shape from whole sizes"
    text = f"is {describe(value, aval.shape, aval.dtype, sizes)}, and is declared "
    text += describe(declared, aval.shape, aval.dtype, sizes)
    return text if value.ratio == 1.0 else f"{text}\n  remedy: {WHOLE_SIZE}"


Trace = Callable[[], dict[str, Any]]
"""Traces programs on the mesh in force; gives the jaxpr of each by its name."""


def prove(trace: Trace, mesh: Any = None, keep: tuple[str, ...] = (), larger: Trace | None = None) -> list[Finding]:
    """What is wrong with programs on a mesh. They are traced there and on one device, and not run.

    JAX traces other operations where a device has one entry of a dim. Such a program is checked at larger sizes, or
    compared on smaller meshes.

    Args:
        trace: traces the programs, on the mesh in force.
        mesh: the mesh; None: the one in force.
        keep: axes that keep their number of devices on the mesh of comparison, instead of one.
        larger: traces the same source at sizes of which no device has a single entry; None: there are none.

    Raises:
        ValueError: a shard_map names its mesh.
    """
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    mesh = getattr(mesh, "abstract_mesh", mesh)
    sizes = dict(mesh.shape)
    alone = {axis: n if axis in keep else 1 for axis, n in sizes.items()}
    halves = {axis: n if axis in keep else min(n, 2) for axis, n in sizes.items()}
    singly = [alone | {axis: n} for axis, n in halves.items() if n > alone[axis]]

    @functools.cache
    def on(numbers: tuple[int, ...], trace: Trace) -> dict[str, tuple[Any, list]]:
        abstract = AbstractMesh(numbers, mesh.axis_names, axis_types=mesh.axis_types)
        # Through no mesh at all: JAX does not change from one mesh to another of a different size.
        none = AbstractMesh((), ())
        on_mesh = jax.sharding.use_abstract_mesh(abstract)
        with jax.sharding.use_abstract_mesh(none), on_mesh, planned_for(sizes), noting_arguments() as types:
            programs = trace()
        counts = itertools.accumulate((len(list(_shard_maps(p))) for p in programs.values()), initial=0)
        spans = itertools.pairwise(counts)
        return {name: (programs[name], types[a:b]) for name, (a, b) in zip(programs, spans, strict=True)}

    ours = on(tuple(sizes.values()), trace)
    if larger is not None and any(_has_single_entries(program) for program, _ in ours.values()):
        trace = larger
        ours = on(tuple(sizes.values()), trace)
    try:
        theirs = on(tuple(alone.values()), trace)
    except Exception as error:  # whatever the program does there
        lines = str(error).splitlines() or [""]
        return [Finding(f"on one device the program does not trace: {type(error).__name__}: {lines[0]}")]
    found: list[Finding] = []
    for name, (program, types) in ours.items():
        twin = theirs[name][0]
        if any(dict(eqn.params["mesh"].shape) != alone for eqn in _shard_maps(twin)):
            raise ValueError(
                "the program cannot be traced on one device, as it names its mesh: leave `mesh` out of jax.shard_map, "
                "which then takes the mesh in force"
            )
        try:
            found += findings(program, twin, types)
            continue
        except Different as different:
            first = different
        compared: set[str] = set()
        # The smaller meshes stand for this one only where JAX has a reason to trace it differently.
        for smaller in (halves, *singly) if _has_single_entries(program) else ():
            axes = {axis for axis, n in smaller.items() if n > alone[axis]}
            if axes <= compared:
                continue
            try:
                found += findings(on(tuple(smaller.values()), trace)[name][0], twin, types)
                compared |= axes
            except Different:
                continue
        if missing := [axis for axis, n in halves.items() if n > alone[axis] and axis not in compared]:
            found.append(Finding(f"{first.place}: {first}: the operations depend on the size of {', '.join(missing)}"))
    return list({str(finding): finding for finding in found}.values())


def _has_single_entries(program: Any) -> bool:
    """Whether a device has one entry of a sharded dim of an argument."""
    for eqn in _shard_maps(program):
        for spec, var in zip(eqn.params["in_specs"], eqn.invars, strict=True):
            parts = [math.prod(eqn.params["mesh"].shape[a] for a in axes) for axes in _axes(spec, len(var.aval.shape))]
            if any(1 < n == size for n, size in zip(parts, var.aval.shape, strict=True)):
                return True
    return False


def check(function: Callable, *args: Any, mesh: Any = None) -> None:
    """Refuses a function that does not compute, on a mesh, what it computes on one device. It is traced, not run.

    Args:
        function: calls jax.shard_map, or a typed_shard_map, over the mesh in force.
        *args: its arguments, arrays or jax.ShapeDtypeStruct.
        mesh: the mesh, a jax.sharding.Mesh or AbstractMesh; None: the one in force.

    Raises:
        ShardError: with file and line of the first value that is not a block of what one device computes.
    """
    found = prove(lambda: {"": jax.make_jaxpr(function)(*args)}, mesh)
    if found:
        raise ShardError("\n".join(map(str, found)), "")
