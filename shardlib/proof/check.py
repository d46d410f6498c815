"""Checks traced programs."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardlib.axes import OPTIONAL, PIPELINE_AXIS
from shardlib.equations import Eqn, body_of, equations_in, frames_of, jaxprs_of
from shardlib.parsing import ShardError
from shardlib.places import place
from shardlib.proof.alignment import Different
from shardlib.proof.domain import UNIFORM, Sizes, Value, describe, devices
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.interpreter import Interpreter, block_of, read_array
from shardlib.proof.origins import callers_text, use_of
from shardlib.proof.sameness import differences
from shardlib.scopes import Scope
from shardlib.values import Sharding, axes_of_spec, planned_for

AS_RUN = "as run"
"""Form of a program that is checked as it is run."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a program, or not proved: where, what the value is, what to do."""

    text: str
    is_wrong: bool = False
    """True: the value contradicts its type. False: nothing proves that the program is right."""
    form: str = AS_RUN
    """The form in which the program was traced."""

    def __str__(self) -> str:
        return self.text if self.form == AS_RUN else f"{self.text}\n  traced with: {self.form}"


Facts = dict[tuple[int, ...], tuple[Equation, list[Value]]]
"""Each equation inside a shard_map, with the facts about its results: Interpreter.noted."""


def findings(program: ClosedJaxpr, twin: object, types: list | None = None) -> tuple[list[Finding], Facts]:
    """Finds what is wrong in each jax.shard_map of a traced program, and what depends on the mesh outside of them.

    Args:
        program: the result of jax.make_jaxpr or of jax.jit(f).trace(...).jaxpr.
        twin: the same program traced on a mesh whose axes have one device each.
        types: the specs of the arguments of each shard_map, which give dims their names in messages; None: no names.

    Returns:
        The findings, and the facts about the results of each equation.

    Raises:
        Different: the twin has other operations.
    """
    facts: Facts = {}
    found = list(map(Finding, dict.fromkeys(_outside(program, twin))))
    ours, theirs = list(_shard_maps(program)), list(_shard_maps(twin))
    if len(ours) != len(theirs):
        raise Different(None, None)
    named = types if types and len(types) == len(ours) else [None] * len(ours)
    for eqn, other, specs in zip(ours, theirs, named, strict=True):
        found += _of_shard_map(eqn, other, specs, facts)
    return found, facts


def _shard_maps(program: Any) -> Iterator[Any]:
    """Iterates over the shard_maps that are not inside another one."""
    for eqn in body_of(program)[0].eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
        else:
            yield from itertools.chain.from_iterable(map(_shard_maps, jaxprs_of(eqn)))


def _outside(program: ClosedJaxpr, twin: object) -> Iterator[str]:
    """What depends on the mesh outside jax.shard_map: numbers, and arrays that become arguments of it."""
    remedy = "compute it inside jax.shard_map, or make it the same on every mesh"
    (ours, consts), (theirs, twin_consts) = body_of(program), body_of(twin)
    names = lambda jaxpr: [eqn.primitive.name for eqn in jaxpr.eqns]
    if names(ours) != names(theirs) or len(consts) != len(twin_consts):
        raise Different.between(ours.eqns, theirs.eqns)
    for value, here, var in zip(map(read_array, consts, twin_consts), consts, ours.constvars, strict=True):
        if value.unprovable or value.is_local or (value.is_constant and value.known[0] != value.known[1]):
            text = f"an array that was made outside of the program depends on the mesh: {here.dtype}{list(here.shape)}"
            use = use_of(var, ours)
            lines = [f"{Equation(use).place()}: {text}", *filter(None, [callers_text(use)])] if use else [text]
            yield "\n  ".join([*lines, f"remedy: {remedy}"])
    pairs = dict(zip([*ours.constvars, *ours.invars], [*theirs.constvars, *theirs.invars], strict=True))
    is_same = lambda a, b: isinstance(a, Literal) or pairs.get(a) is b
    are_same = lambda a, b: len(a) == len(b) and all(map(is_same, a, b))
    another = f"outside jax.shard_map, another value is used than on one device\n  remedy: {remedy}"
    for eqn, other in zip(ours.eqns, theirs.eqns, strict=True):
        if not are_same(eqn.invars, other.invars):
            yield f"{Equation(eqn).place()}: {another}"
        pairs.update(zip(eqn.outvars, other.outvars, strict=True))
        if eqn.primitive.name == "shard_map":
            continue
        if _numbers(eqn) != _numbers(other):
            problem = f"{eqn.primitive.name}: a number outside of jax.shard_map depends on the mesh"
            yield f"{Equation(eqn).place()}: {problem}\n  remedy: {remedy}"
        for inner, twins in zip(jaxprs_of(eqn), jaxprs_of(other), strict=True):
            yield from _outside(inner, twins)
    if not are_same(ours.outvars, theirs.outvars):
        yield another


def _numbers(eqn: Eqn) -> list:
    """The literals of an equation, and the parameters that are numbers."""
    literals = [str(var.val) if isinstance(var, Literal) else "" for var in eqn.invars]
    return literals + [(name, value) for name, value in eqn.params.items() if _is_plain(value)]


def _is_plain(parameter: object) -> bool:
    """True if a parameter consists of numbers only."""
    return isinstance(parameter, int | float) or (isinstance(parameter, tuple) and all(map(_is_plain, parameter)))


def _place_of(var: Any, body: Any) -> str:
    """`file.py:line: ` of the code that makes a result."""
    made = {out: eqn for eqn in body.eqns for out in eqn.outvars}
    while (eqn := made.get(var)) is not None:
        place = Equation(eqn).place()
        if place != "?":  # "?": a cast that JAX added
            return f"{place}: "
        var = eqn.invars[0] if not isinstance(eqn.invars[0], Literal) else None
    return ""


def _whole_shape(aval: Any, axes: Sharding, sizes: Any) -> tuple[int, ...]:
    return tuple(n * devices(sizes, a) for n, a in zip(aval.shape, axes, strict=True))


def _of_shard_map(eqn: Eqn, twin: Eqn, types: list | None, facts: Facts) -> list[Finding]:
    manual = eqn.params["newly_manual_axes"]  # over others the compiler shards, without a trace in the program
    sizes = Sizes({axis: n for axis, n in eqn.params["mesh"].shape.items() if axis in manual})
    twin_sizes = dict(twin.params["mesh"].shape)
    interpreter = Interpreter(sizes, twin_sizes, is_unchecked=not eqn.params.get("check_vma", True))
    (body, _), (other, _) = body_of(eqn.params["jaxpr"]), body_of(twin.params["jaxpr"])
    # Constants of the caller come before the arguments.
    known = [[dim.name for dim in spec.dims] for spec in types or ()]
    names = [None] * (len(body.invars) - len(known)) + known
    args = [
        block_of(axes_of_spec(spec, len(var.aval.shape)), var.aval.shape, sizes, names=name)
        for spec, var, name in zip(eqn.params["in_specs"], body.invars, names, strict=True)
    ]
    outs = interpreter.run(eqn.params["jaxpr"], twin.params["jaxpr"], args)
    facts |= interpreter.noted
    found = [Finding(str(unprovable)) for unprovable in interpreter.problems.values()]
    results = zip(eqn.params["out_specs"], outs, body.outvars, other.outvars, strict=True)
    for i, (spec, value, var, there) in enumerate(results):
        axes = axes_of_spec(spec, len(var.aval.shape))
        if value.unprovable:
            found.append(Finding(str(value.unprovable)))
        elif value.folded or (value.ratio != 1.0 and value.scaled is not None):
            origin = value.folding if value.folded else value.scaled
            try:
                origin.unscaled(origin.unfolded(value))
            except Refused as refusal:
                found.append(Finding(str(interpreter.explain(origin, refusal)), is_wrong=True))
        elif problem := _leaving(value, axes, var.aval, sizes, _whole_shape(there.aval, axes, twin_sizes)):
            found.append(Finding(f"{_place_of(var, body)}result {i} {problem}", is_wrong=True))
    return list(dict.fromkeys(found))


def _leaving(value: Value, axes: Sharding, aval: Any, sizes: Any, there: tuple[int, ...]) -> str | None:
    """What is wrong with a result that is declared as sharded over `axes`; None if nothing is."""
    declared = block_of(axes, aval.shape, sizes)
    fits = all(d is UNIFORM or d == w for d, w in zip(value.dims, declared.dims, strict=True))
    here = _whole_shape(aval, axes, sizes)
    if not (value.is_block and fits and value.ratio == 1.0) or value.partial or value.extreme:
        text = f"is {describe(value, aval.shape, aval.dtype, sizes)}, and is declared "
        return f"{text}{describe(declared, aval.shape, aval.dtype, sizes)}\n  remedy: {DECLARED}"
    if here == there:
        return None
    return (
        f"has shape {here} here and {there} on one device\n  remedy: compute the shape from global sizes, "
        "shardops.size(name); declare what does not grow with the mesh without axes"
    )


DECLARED = (
    "declare it as it is, or convert it to what is declared: psum or psum_scatter for a partial sum, all_gather for "
    "blocks, this device's block, at axis_index times its size, for what is whole"
)
WRONG = "wrong: it does not compute what is declared"
NOT_PROVED = "not proved, though it may be right: docs/refused.md has right programs of this kind, and how they pass"
UNTRACED = "the program does not trace on one device"
BOUND = (
    "the program is bound to a mesh, so it cannot be traced on one device: pass what each device computes, with "
    "its specs, as in check(body, *args, mesh=mesh, in_specs=..., out_specs=...)"
)
ONE_PROGRAM = (
    "let no choice, count or shape in the code depend on the number of devices: choose by values with jnp.where and "
    "lax.cond, get the global size of a dim from shardops.size(name), and reshape with shardops.rearrange"
)
OF_RINGS = (
    "let each turn of a ring do the same, and add up what the turns give, or write it at the position of its block; "
    "scatter a sum with lax.psum_scatter, gather a block with lax.all_gather, run stages with shardlib.pipeline"
)
OF_AXES = (
    "let no value depend on whether the mesh has an axis, or on where weights are gathered: types, shardops.axis_size "
    "and axis_index treat an axis that the mesh lacks as one of one device"
)
REPEATED = (
    "move what `layers` does besides its layers, which each stage repeats, to `embed` or `logits`; and let no value "
    "depend on how many layers there are, or on whether the mesh has an axis"
)
STAGES = (
    ("a pipeline stage", "one device"),
    "undo it, or change both: stages run the parts of a microbatch that run/stages.py names, one device runs "
    "`Forward` and `InTurn`",
    REPEATED,
)
LACKING = ("this mesh", "one device"), OF_AXES, OF_AXES
"""Who runs the two forms of a program, and the remedy if they differ: in a line that one form runs, or both."""
Programs = dict[str, tuple[Any, list]]
"""Jaxprs by name, each with the types of the arguments of its shard_maps."""
Trace = Callable[[AbstractMesh], Programs]
"""Traces programs on a mesh."""


def prove(trace: Trace, mesh: Any = None, singles: Mapping[Trace, bool] | None = None) -> list[Finding]:
    """Finds what is wrong with programs on a mesh. They are traced there and on one device, and not run.

    Args:
        trace: traces the programs.
        mesh: the mesh; None: the current one.
        singles: functions that trace the programs that a single device runs on its own mesh, which lacks the axes of
            OPTIONAL. What `trace` gives on one device along each axis must compute the same; True: up to rounding.

    Raises:
        ValueError: a shard_map is bound to a mesh.
    """
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    mesh = getattr(mesh, "abstract_mesh", mesh)
    ours = trace(mesh)
    try:
        theirs = trace(on_one_device(mesh))
    except Exception as error:  # whatever the program does there
        return [_untraced(error)]
    found: list[Finding] = []
    for name, (program, types) in ours.items():
        twin, _ = theirs[name]
        if any(dict(eqn.params["mesh"].shape) != dict.fromkeys(mesh.shape, 1) for eqn in _shard_maps(twin)):
            raise ValueError(BOUND)
        try:
            found += findings(program, twin, types)[0]
        except Different as different:
            remedy = OF_RINGS if "ppermute here" in str(different) else ONE_PROGRAM
            found.append(Finding(f"{different.place}: {different}\n  remedy: {remedy}"))
    names, remedy, of_both = STAGES if PIPELINE_AXIS in mesh.shape else LACKING
    for single, rounding in (singles or {}).items():
        if found:
            break
        try:
            expected = single(on_one_device(mesh, without=OPTIONAL))
        except Exception as error:
            return [_untraced(error)]
        for name, (program, _) in theirs.items():
            texts = list(differences(program, expected[name][0], names, remedy, rounding))
            of_line = lambda form: {place(*frame) for eqn in equations_in(form) for frame in frames_of(eqn)}
            forms = [of_line(form) for form in (program, expected[name][0])] if texts else []
            for text in texts:
                both = all(lines.issuperset(re.findall(r"(?:^|; )(\S+:\d+): ", text)) for lines in forms)
                found.append(Finding(text.replace(remedy, of_both) if both else text))
    return found


def on_one_device(mesh: Mesh | AbstractMesh, without: Collection[str] = ()) -> AbstractMesh:
    """A mesh of one device, of the same kind, along each axis of `mesh`, except the axes in `without`."""
    kinds = {axis: kind for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if axis not in without}
    of: Any = getattr(mesh, "abstract_mesh", mesh)
    return AbstractMesh(
        (1,) * len(kinds), tuple(kinds), axis_types=tuple(kinds.values()), abstract_device=of.abstract_device
    )


@contextlib.contextmanager
def tracing(mesh: Any, planned: Mapping[str, int] | None = None) -> Iterator[list]:
    """Context for tracing a program on a mesh, with the choices for speed of a mesh of sizes `planned`.

    Yields a list that holds, after tracing, the argument types of the program's shard_maps.
    """
    enter: Any = jax.sharding.use_abstract_mesh if isinstance(mesh, AbstractMesh) else jax.set_mesh
    # First leave any mesh: JAX does not change from one mesh to another of a different size.
    none = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with none, enter(mesh), planned_for(sizes=tuple(sorted((planned or mesh.shape).items()))), Scope() as scope:
        scope.arguments = types = []
        try:
            yield types
        except ValueError as error:
            if "mesh passed to shard_map" in str(error):
                raise ValueError(BOUND) from None
            raise


def prove_function(function: Callable[[], Any], mesh: Any = None) -> list[Finding]:
    """`prove` for a program whose jaxpr `function` returns; it is traced on the current mesh."""
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()

    def trace(at: AbstractMesh) -> Programs:
        with tracing(at, mesh.shape) as types:
            return {"": (function(), types)}

    return prove(trace, mesh)


def _untraced(error: Exception) -> Finding:
    return Finding(f"{UNTRACED}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def check(function: Callable[..., Any], *args: Any, mesh: Any = None, **specs: Any) -> None:
    """Raises unless a function computes, on a mesh, what it computes on one device. It is traced, not run.

    Args:
        function: what each device computes, with `specs`; without them, a function that calls typed_shard_map, or
            jax.shard_map without its `mesh`, since it is traced on several meshes.
        *args: its arguments, with global shapes: arrays, jax.ShapeDtypeStruct, and pytrees of them.
        mesh: the mesh, a jax.sharding.Mesh or AbstractMesh; None: the current one.
        **specs: in_specs, out_specs and other options of jax.shard_map.

    Raises:
        ShardError: names file and line of the first value that is not a block of what one device computes, and says
            whether the function is wrong or not proved.
        ValueError: there is no mesh, or the function is bound to one.
    """
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    mesh = getattr(mesh, "abstract_mesh", mesh)
    if mesh.empty:
        raise ValueError("no mesh is set: pass one, check(..., mesh=jax.make_mesh((2, 4), ('d', 't')))")
    run = function
    if specs:
        run = lambda *args: jax.shard_map(function, **specs)(*args)  # not bound to the mesh of an earlier trace
        kinds = (AxisType.Auto,) * len(mesh.axis_names)  # arguments need not be sharded
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)

    raise_for(prove_function(lambda: jax.make_jaxpr(run)(*jax.tree.map(_placed, args)), mesh))


def raise_for(found: list[Finding], shown: int | None = None) -> None:
    """Raises ShardError if anything was found, with the first `shown` findings, or all, and the verdict."""
    if found:
        verdict = WRONG if any(finding.is_wrong for finding in found) else NOT_PROVED
        place_and_remedy = lambda text: (text.partition(": ")[0], text.rpartition("\n")[2])
        found = list({place_and_remedy(finding.text): finding for finding in reversed(found)}.values())[::-1]
        more = [f"… and {len(found) - shown} more"] if shown is not None and len(found) > shown else []
        raise ShardError("\n".join([*map(str, found[:shown]), *more]), context=verdict, place="")


def _placed(x: Any) -> Any:
    """An array's shape, dtype and PartitionSpec, for the current mesh."""
    if not hasattr(x, "dtype"):
        return x
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    sharding = None if spec is None else NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
