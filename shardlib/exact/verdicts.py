"""Checks that a function computes on a mesh what it computes on one device, by running both.

The function is traced on the mesh and on one device, and both programs run on the same drawn
inputs, in exact arithmetic.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardlib.equations import is_integer
from shardlib.exact.compare import Run, compare_results, not_compared, run, with_positive
from shardlib.exact.endings import Undecided, Wrong
from shardlib.exact.inputs import IDS, draw
from shardlib.exact.intervals import pairs_of
from shardlib.exact.machine import Machine
from shardlib.exact.origin import origins
from shardlib.exact.rounding import differing_dtypes
from shardlib.exact.values import is_key
from shardlib.exact.work import MOST, refuse_beyond, work_of
from shardlib.findings import Finding, raise_for
from shardlib.interpret import Operation, equations_in
from shardlib.tracing import BOUND, on_one_device, tracing

CLAMPED = jax.lax.GatherScatterMode.CLIP
FAR = 2**14
"""Integers that no lookup bounds are drawn as this too, and as its negative."""
FEWEST, MOST_PAIRS = 2, 16
"""Number of pairs of inputs that are drawn, at least and at most."""


def check(function: Callable[..., Any], *args: Any, mesh: Any = None, **specs: Any) -> None:
    """Raises unless a function computes, on a mesh, what it computes on one device.

    It is traced, and run in exact arithmetic on drawn inputs; nothing is compiled, and no devices
    are needed. With mesh = jax.make_mesh((2,), ("d",)) and x = jnp.ones((8, 4)),

        check(lambda x: jnp.cumsum(x, 0), x, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    raises with the line of cumsum, because each device sees only its own block of dim 0. cumsum
    along dim 1 passes.

    Args:
        function: what each device computes, with `specs`; without them, a function that calls
            typed_shard_map, or jax.shard_map without its `mesh`, since it is traced on several
            meshes.
        *args: its arguments, with global shapes: arrays, jax.ShapeDtypeStruct, and pytrees of them.
            Small shapes are enough, and large ones are rejected. Only types are used of floats, and
            of arrays with one value; other integers and bools are taken as they are. Integers of
            types are drawn within what the program looks up, and else near each of its numbers.
        mesh: the mesh, a jax.sharding.Mesh or AbstractMesh; None: the current one.
        **specs: in_specs, out_specs and other options of jax.shard_map.

    Raises:
        ShardError: names file and line of what is wrong, with the remedy; or says what cannot be
            decided, such as a primitive without a rule.
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

    def trace() -> Any:
        return jax.make_jaxpr(run)(*jax.tree.map(_placed, args))

    raise_for(find_in(trace, mesh, jax.tree.leaves(args)))


def find_in(
    trace: Callable[[], Any], mesh: Any = None, given: Sequence[Any] | None = None
) -> list[Finding]:
    """Finds where a program computes something else on a mesh than on one device.

    Args:
        trace: returns the program's jaxpr, traced on the current mesh.
        mesh: the mesh, a jax.sharding.Mesh or AbstractMesh; None: the current one.
        given: its arguments, arrays or types; None: as traced.

    Raises:
        ValueError: a shard_map is bound to a mesh.
    """
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    mesh = getattr(mesh, "abstract_mesh", mesh)
    one = on_one_device(mesh)
    with tracing(mesh):
        program = trace()
    try:
        with tracing(one, mesh.shape):
            twin = trace()
    except Exception as error:  # whatever the program does there
        if str(error) == BOUND:
            raise
        first = next(iter(str(error).splitlines()), "")
        problem = "the program does not trace on one device"
        return [Finding(f"{problem}: {type(error).__name__}: {first}")]
    maps = (eqn for eqn in equations_in(twin) if eqn.primitive.name == "shard_map")
    if any(dict(eqn.params["mesh"].shape) != dict(one.shape) for eqn in maps):
        raise ValueError(BOUND)
    return find(program, twin, mesh.shape, given)


def find(
    program: Any, twin: Any, sizes: Mapping[str, int], given: Sequence[Any] | None = None
) -> list[Finding]:
    """Finds where a program computes something else than its twin on one device.

    Args:
        program: a jaxpr, traced for a mesh.
        twin: the jaxpr of the same function, traced for one device along each axis.
        sizes: number of devices along each axis of the mesh.
        given: its arguments, arrays or types; None: types.
    """
    found = [Finding(text, is_wrong=True) for text in differing_dtypes(program, twin)]
    if len(program.out_avals) != len(twin.out_avals):
        counts = f"{len(program.out_avals)} arrays, on one device {len(twin.out_avals)}"
        found.append(Finding(f"the program returns {counts}", is_wrong=True))
    if found:
        return found
    one = dict.fromkeys(sizes, 1)
    undecided: list[Finding] = []
    try:
        refuse_beyond(MOST, work_of(program) + work_of(twin))
        inputs = _inputs(twin, one, program.in_avals if given is None else given)
    except Undecided as error:
        return [Finding(f"the program cannot be run: {error}")]
    runs: list[Run] = []
    for args in with_positive(inputs, runs):
        try:
            found = _find_on(args, program, twin, sizes, runs)
        except Undecided as error:
            undecided = [Finding(str(error))]
        if found:
            return found
    return undecided or [Finding(difference.text) for difference in not_compared(runs)]


def _find_on(
    args: list[Any],
    program: Any,
    twin: Any,
    sizes: Mapping[str, int],
    runs: list[Run],
) -> list[Finding]:
    """Finds what differs on these inputs, and adds the run of one device to `runs`."""
    try:
        here, outs = run(program, sizes, args)
        there, expected = run(twin, dict.fromkeys(sizes, 1), args)
        runs.append((there, expected))
    except Wrong as error:
        return [Finding(str(error), is_wrong=True)]
    differing = compare_results(here, outs, there, expected)
    if not differing:
        return []
    try:
        lines = [*map(str, origins(program, twin, sizes, args))]
    except Undecided:
        lines = []
    texts = lines or [difference.text for difference in differing]
    return [Finding(text, is_wrong=True) for text in texts]


# ---- inputs --------------------------------------------------------------------------------------


def _inputs(twin: Any, one: Mapping[str, int], given: Sequence[Any]) -> list[list[Any]]:
    """Makes whole arguments: first the arrays that were given, and then drawn ones.

    Integers and bools that were given with several values stay, because a program may want them in
    an order, or each once. In the last, integers that no lookup bounds are far from 0, or near a
    number of the program, which may compare them with it.
    """
    avals = twin.in_avals
    arrays = [_array_of(x, aval) for x, aval in zip(given, avals, strict=True)]
    kept = [x if _is_kept(x) else None for x in arrays]
    drawn_below = _bounds(twin, one, kept)
    drawn = [draw(avals, seed, bounds) for seed, bounds in enumerate(drawn_below)]
    inputs = [_replaced(args, kept) for args in drawn]
    if any(x is not None for x in arrays):
        inputs.insert(0, _replaced(drawn[0], arrays))
    numbers = _numbers(twin)
    free = [i for i, x in enumerate(kept) if x is None and _is_free(twin, one, i)]
    fewest = min((max(math.prod(avals[i].shape), 1) for i in free), default=len(numbers))
    far = [
        [_far(x, numbers, seed) if i in free else x for i, x in enumerate(inputs[seed])]
        for seed in range(min(-(-len(numbers) // fewest), len(inputs)) if free else 0)
    ]
    return inputs + far


def _replaced(args: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [x if other is None else other for x, other in zip(args, others, strict=True)]


def _numbers(program: Any) -> list[int]:
    """Returns FAR, and what is at most 1 from a number of the program, as a mask by -100 is."""
    operands = (var for eqn in equations_in(program) for var in eqn.invars)
    arrays = [np.asarray(var.val) for var in operands if isinstance(var, core.Literal)]
    literals = [float(a) for a in arrays if a.ndim == 0 and a.dtype.kind in "iuf"]
    numbers = {int(x) for x in literals if abs(x) < 2**31 and x == round(x)}
    return [-FAR, FAR, *sorted({n + more for n in numbers for more in (-1, 0, 1)})]


def _far(x: Any, numbers: Sequence[int], seed: int) -> np.ndarray:
    """Returns integers like `x`, of which each seed takes the next of some numbers."""
    limits = np.iinfo(x.dtype)
    allowed = np.array([min(max(n, limits.min), limits.max) for n in numbers], x.dtype)
    at = np.arange(seed * x.size, (seed + 1) * x.size) % len(numbers)
    return allowed[at].reshape(x.shape)


def _is_free(twin: Any, one: Mapping[str, int], number: int) -> bool:
    """Returns True for integers that no lookup of the program on one device bounds.

    None are in a program with a `while`, which may take as many turns.
    """
    if any(eqn.primitive.name == "while" for eqn in equations_in(twin)):
        return False
    args = [np.zeros_like(x) if is_integer(x.dtype) else x for x in draw(twin.in_avals, 0)]
    if not is_integer(args[number].dtype):
        return False
    for n in (-FAR, FAR):
        args[number] = _far(args[number], [n], 0)
        try:
            if not _is_in_range(twin, one, args):
                return False
        except (Undecided, Wrong):
            return False
    return True


def _array_of(x: Any, aval: Any) -> Any:
    """Returns a given argument as an array; None: it is only a type, or a key."""
    is_type = not isinstance(x, bool | int | float | complex | np.ndarray | np.generic | jax.Array)
    return None if is_type or is_key(aval.dtype) else np.asarray(x).astype(aval.dtype)


def _is_kept(x: Any) -> bool:
    """Returns True for integers and bools of several values."""
    return x is not None and x.dtype.kind in "iub" and x.size > 0 and (x != x.flat[0]).any()


def _bounds(twin: Any, one: Mapping[str, int], kept: Sequence[Any]) -> list[tuple[int | None, ...]]:
    """Chooses for each input below which number the integers of each argument are drawn.

    These are sizes of dims of the arguments with which no lookup of the program on one device is
    out of range, each in two inputs, and the largest in as many as all integers below it take.
    """
    avals = twin.in_avals
    sizes = sorted({IDS, *(n for aval in avals for n in aval.shape if n > 1)}, reverse=True)
    args = [np.zeros_like(x) if is_integer(x.dtype) else x for x in draw(avals, 0)]
    allowed: list[list[Any]] = [[None]] * len(avals)
    pairs = FEWEST
    for i, aval in enumerate(avals):
        if not is_integer(aval.dtype) or kept[i] is not None:
            continue
        for skipped, bound in enumerate(sizes):
            args[i] = np.full(aval.shape, min(bound, np.iinfo(aval.dtype).max) - 1, aval.dtype)
            allowed[i] = sizes[skipped:]
            if _is_in_range(twin, one, args):
                break
        needed = -(-allowed[i][0] // max(math.prod(aval.shape), 1))
        pairs = max(pairs, len(allowed[i]) - 1 + needed)
    return [
        tuple(found[max(len(found) - 1 - pair, 0)] for found in allowed)
        for pair in range(min(pairs, MOST_PAIRS))
        for _ in range(2)
    ]


def _is_in_range(program: Any, sizes: Mapping[str, int], args: list[Any]) -> bool:
    """Returns True if no index into an array is out of range, unless clamping it is meant."""
    found = []

    def observe(m: Machine, op: Operation, ins: list, outs: list) -> None:
        if op.name in ("gather", "dynamic_slice") and op.params.get("mode") != CLAMPED:
            pairs = pairs_of(op, [x.value for x in ins], np.abs, np.asarray)
            found.extend((x > y).any() for x, y in pairs[1::2])

    run(program, sizes, args, observe)
    return not any(found)


# ---- tracing -------------------------------------------------------------------------------------


def _call_in_shard_map(function: Callable[..., Any], specs: Mapping, *args: Any) -> Any:
    """Calls a new shard_map, because JAX binds one to the mesh of its first trace."""
    return jax.shard_map(function, **specs)(*args)


def _placed(x: Any) -> Any:
    """Returns the shape, dtype and PartitionSpec (on the current mesh) of an array; else `x`."""
    if not hasattr(x, "dtype"):
        return x
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    sharding = None if spec is None else NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
