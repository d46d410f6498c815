"""Entry points of the proof: trace a program on a mesh and on one device, and compare them.

`check` takes any function under jax.shard_map, `prove` takes the programs of a training step. Both
report values that are not blocks of what one device computes, and say whether each is wrong or not
proved.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardlib.axes import OPTIONAL, PIPELINE_AXIS
from shardlib.equations import frames_of
from shardlib.interpret import equations_in
from shardlib.parsing import MAY_BE_RIGHT, ShardError
from shardlib.places import place
from shardlib.proof.alignment import Different
from shardlib.proof.outside import Finding, findings, shard_maps_in
from shardlib.proof.sameness import differences
from shardlib.scopes import Scope
from shardlib.values import planned_for

WRONG = "wrong: it does not compute what is declared"
DIFFERS = (
    "wrong, unless what follows undoes it: one device does not compute this value, or a part of it"
)
NOT_PROVED = MAY_BE_RIGHT
UNTRACED = "the program does not trace on one device"
BOUND = (
    "the program is bound to a mesh, so it cannot be traced on one device: call jax.shard_map "
    "without `mesh`, anew in each call of the function (what it returns keeps its first mesh), or "
    "pass what each device computes, with its specs, as in check(body, *args, mesh=mesh, "
    "in_specs=..., out_specs=...)"
)
ONE_PROGRAM = (
    "let no choice, count or shape in the code depend on the number of devices: choose by values "
    "with jnp.where and lax.cond, get the global size of a dim from shardops.size(name), and "
    "reshape with shardops.rearrange"
)
OF_RINGS = (
    "let each turn of a ring do the same, and add up what the turns give, or write it at the "
    "position of its block; scatter a sum with lax.psum_scatter, gather a block with "
    "lax.all_gather, run stages with shardlib.pipeline"
)
OF_AXES = (
    "let no value depend on whether the mesh has an axis, or on where weights are gathered: "
    "types, shardops.axis_size and axis_index treat an axis that the mesh lacks as one of one "
    "device"
)
REPEATED = (
    "move what `layers` does besides its layers, which each stage repeats, to `embed` or "
    "`logits`; and let no value depend on how many layers there are, or on whether the mesh has "
    "an axis"
)
STAGES = (
    ("a pipeline stage", "one device"),
    "undo it, or change both: stages run the parts of a microbatch that run/stages.py names, one "
    "device runs `microbatch_loss`",
    REPEATED,
)
LACKING = ("this mesh", "one device"), OF_AXES, OF_AXES
"""STAGES and LACKING have the names of two programs, the remedy if these differ in a line that only
one of them runs, and the remedy if they differ in a line that both run."""
PLAIN = {
    r"shardops\.size\(name\)": "x.shape[i] * jax.lax.axis_size(axis)",
    r"shardops\.positions(\('.*?'\))?": "jnp.arange(n) + n * jax.lax.axis_index(axis)",
    r", by the dim and its axes, such as 'L/t'|, run stages with shardlib\.pipeline": "",
    r"shardops\.axis_size": "jax.lax.axis_size",
    r"shardops\.rearrange": "einops.rearrange",
    r"shardops\.index_unreduced looks up in a sharded dim;": (
        "look up by ids - n * jax.lax.axis_index(axis), and mask;"
    ),
    r"einsum_unreduced makes partial sums": 'leave out jax.lax.pcast(x, axis, to="unreduced")',
    r"declare it as it is, or convert it to what is declared: p": (
        "declare it in out_specs as it is, or take jax.lax.p"
    ),
    r"for a partial sum, all_gather": "for a partial sum, jax.lax.all_gather",
    r"\b(with|or) (psum|psum_scatter|pmax|pmin|all_gather|all_to_all)\b": r"\1 jax.lax.\2",
}
"""Patterns in remedies, and JAX's functions that replace them for code without shardlib."""
Programs = dict[str, tuple[Any, list]]
"""Jaxprs by name, each with the list that `tracing` yields: argument types of its shard_maps."""
Trace = Callable[[AbstractMesh], Programs]
"""A function that traces programs on a mesh."""


def prove(
    trace: Trace, mesh: Any = None, singles: Mapping[Trace, bool] | None = None
) -> list[Finding]:
    """Finds where programs compute something else on a mesh than on one device.

    They are traced on both, and not run. Returns an empty list if the proof succeeds.

    Args:
        trace: traces the programs.
        mesh: the mesh; None: the current one.
        singles: functions that trace the programs for a single device, whose mesh lacks the axes of
            OPTIONAL. Each program must compute what that of `trace` computes with one device along
            each axis; if the function's value is True, up to rounding.

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
    found = _findings_on_mesh(ours, theirs, mesh)
    texts = STAGES if PIPELINE_AXIS in mesh.shape else LACKING
    for single, rounding in (singles or {}).items():
        if found:
            break
        try:
            expected = single(on_one_device(mesh, without=OPTIONAL))
        except Exception as error:
            return [_untraced(error)]
        for name, (program, _) in theirs.items():
            found += _findings_on_one_device(program, expected[name][0], texts, rounding)
    if any(types for _, types in ours.values()):
        return found
    return [dataclasses.replace(finding, text=_in_plain_jax(finding.text)) for finding in found]


def _findings_on_mesh(ours: Programs, theirs: Programs, mesh: Any) -> list[Finding]:
    """Compares programs on a mesh with the same programs on one device along each axis."""
    found: list[Finding] = []
    for name, (program, types) in ours.items():
        twin, _ = theirs[name]
        one_device = dict.fromkeys(mesh.shape, 1)
        if any(dict(eqn.params["mesh"].shape) != one_device for eqn in shard_maps_in(twin)):
            raise ValueError(BOUND)
        try:
            found += findings(program, twin, types)[0]
        except Different as different:
            remedy = OF_RINGS if "ppermute here" in str(different) else ONE_PROGRAM
            found.append(Finding(f"{different.place}: {different}\n  remedy: {remedy}"))
    return found


def _findings_on_one_device(
    program: Any, expected: Any, texts: tuple, rounding: bool
) -> list[Finding]:
    """Finds where a program differs from the `expected` one, both traced on one device.

    `texts` is STAGES or LACKING.
    """
    names, remedy, of_both = texts
    differing = list(differences(program, expected, names, remedy, rounding))
    if not differing:
        return []
    lines = [_lines_of(form) for form in (program, expected)]
    found = []
    for text in differing:
        named = re.findall(r"(?:^|; )(\S+:\d+): ", text)
        both = all(of_form.issuperset(named) for of_form in lines)
        found.append(Finding(text.replace(remedy, of_both) if both else text))
    return found


def _lines_of(program: Any) -> set[str]:
    """Returns the source lines of the calls that led to the equations of a program."""
    return {place(*frame) for eqn in equations_in(program) for frame in frames_of(eqn)}


def _in_plain_jax(text: str) -> str:
    """Rewrites the remedies of a finding for code that does not use shardlib.

    `shardops.axis_size` becomes `jax.lax.axis_size`.
    """
    for pattern, plain in PLAIN.items():
        text = re.sub(pattern, plain, text)
    return text


def on_one_device(mesh: Mesh | AbstractMesh, without: Collection[str] = ()) -> AbstractMesh:
    """Makes a mesh like `mesh`, of the same kind of device, with one device along each axis.

    It lacks the axes in `without`.
    """
    kinds = {
        axis: kind
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis not in without
    }
    of: Any = getattr(mesh, "abstract_mesh", mesh)
    return AbstractMesh(
        (1,) * len(kinds),
        tuple(kinds),
        axis_types=tuple(kinds.values()),
        abstract_device=of.abstract_device,
    )


@contextlib.contextmanager
def tracing(mesh: Any, planned: Mapping[str, int] | None = None) -> Iterator[list]:
    """Sets the mesh on which a program is traced.

    The program chooses fast implementations as on a mesh of sizes `planned`; None: those of `mesh`.
    Yields a list that holds, after tracing, the argument types of the program's shard_maps. Raises
    ValueError if a shard_map is bound to another mesh.
    """
    enter: Any = jax.sharding.use_abstract_mesh if isinstance(mesh, AbstractMesh) else jax.set_mesh
    # First leave any mesh: JAX does not change from one mesh to another of a different size.
    none = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with (
        none,
        enter(mesh),
        planned_for(sizes=tuple(sorted((planned or mesh.shape).items()))),
        Scope() as scope,
    ):
        scope.arguments = types = []
        try:
            yield types
        except ValueError as error:
            if "mesh passed to shard_map" in str(error):
                raise ValueError(BOUND) from None
            raise


def prove_function(function: Callable[[], Any], mesh: Any = None) -> list[Finding]:
    """Calls `prove` for one program, whose jaxpr `function` returns.

    The function must trace it on the current mesh.
    """
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()

    def trace(at: AbstractMesh) -> Programs:
        with tracing(at, mesh.shape) as types:
            return {"": (function(), types)}

    return prove(trace, mesh)


def _untraced(error: Exception) -> Finding:
    return Finding(f"{UNTRACED}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def check(function: Callable[..., Any], *args: Any, mesh: Any = None, **specs: Any) -> None:
    """Raises unless a function computes, on a mesh, what it computes on one device.

    It is traced, not run. With mesh = jax.make_mesh((2,), ("d",)) and x = jnp.ones((8, 4)),

        check(lambda x: jnp.cumsum(x, 0), x, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    raises "cumsum: entries are taken together along dim 0, which is sharded over d: each device
    sees only its own block", with the line and a remedy. cumsum along dim 1 passes.

    Args:
        function: what each device computes, with `specs`; without them, a function that calls
            typed_shard_map, or jax.shard_map without its `mesh`, since it is traced on several
            meshes.
        *args: its arguments, with global shapes: arrays, jax.ShapeDtypeStruct, and pytrees of them.
        mesh: the mesh, a jax.sharding.Mesh or AbstractMesh; None: the current one.
        **specs: in_specs, out_specs and other options of jax.shard_map.

    Raises:
        ShardError: names file and line of each value not proved to be a block of what one device
            computes, and says whether the function is wrong or not proved.
        ValueError: there is no mesh, it has Manual axes, or the function is bound to a mesh.
    """
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    mesh = getattr(mesh, "abstract_mesh", mesh)
    if mesh.empty:
        raise ValueError(
            "no mesh is set: pass one, check(..., mesh=jax.make_mesh((2, 4), ('d', 't')))"
        )
    run = function
    if specs:
        run = functools.partial(_call_in_shard_map, function, specs)
        kinds = (AxisType.Auto,) * len(mesh.axis_names)  # arguments need not be sharded
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(
            f"{mesh} has Manual axes, as inside of jax.shard_map: make them AxisType.Auto or "
            "Explicit"
        )
    raise_for(prove_function(lambda: jax.make_jaxpr(run)(*jax.tree.map(_placed, args)), mesh))


def _call_in_shard_map(function: Callable[..., Any], specs: Mapping, *args: Any) -> Any:
    """Calls a new shard_map, because JAX binds one to the mesh of its first trace."""
    return jax.shard_map(function, **specs)(*args)


def _place_and_remedy(finding: Finding) -> tuple[str, str]:
    return finding.text.partition(": ")[0], finding.text.rpartition("\n")[2]


def raise_for(found: list[Finding], shown: int | None = None) -> None:
    """Raises ShardError if anything was found.

    The error has the verdict and the first `shown` findings (None: all), of which one is kept for
    each place and remedy.
    """
    if found:
        if any(finding.is_wrong for finding in found):
            verdict = WRONG
        elif any(finding.differs for finding in found):
            verdict = DIFFERS
        else:
            verdict = NOT_PROVED
        found = list({_place_and_remedy(finding): finding for finding in reversed(found)}.values())[
            ::-1
        ]
        more = (
            [f"… and {len(found) - shown} more"] if shown is not None and len(found) > shown else []
        )
        raise ShardError("\n".join([*map(str, found[:shown]), *more]), context=verdict, place="")


def _placed(x: Any) -> Any:
    """Returns the shape, dtype and PartitionSpec (on the current mesh) of an array; else `x`."""
    if not hasattr(x, "dtype"):
        return x
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    sharding = None if spec is None else NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
