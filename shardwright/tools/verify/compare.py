"""Compares the step on each mesh with that on one device, in f64, and names the first line whose value differs.

It compares the results first. If they differ, it traces the step on the mesh and on one device. The proof then says
which global value each device's block belongs to, and both programs run equation by equation and return every result.
"""

import functools
import linecache
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardlib.axes import PIPELINE_AXIS, mesh_text
from shardlib.equations import CALLS
from shardlib.interpret import operations_in
from shardlib.proof.alignment import Different
from shardlib.proof.check import findings
from shardlib.proof.domain import UNIFORM, Value, devices
from shardwright.inspect.soundness import find_unsound
from shardwright.inspect.statistics.rerun import Path, Rerun, executed
from shardwright.run.config import Config
from shardwright.run.reference import read_reference
from shardwright.run.step import Step, open_steps
from shardwright.tools.verify.inputs import Inputs, make_inputs
from shardwright.tools.verify.meshes import ONE_DEVICE, Mesh
from shardwright.tools.verify.step import Found, fresh_state, placed, step_on, tensors_of_step

TOLERANCE = 1e-10
"""Largest difference that counts as rounding, relative to the largest entry of a value. Reordered sums differ by about
1e-15, bugs seldom by less than 1e-4."""
ROUNDING = 1e-12
"""Largest absolute difference that counts as rounding in a value within the step, which may be 0 up to rounding."""
NEGLIGIBLE = 1e-4
"""Floor for the size of a gradient in its relative error, as a fraction of the largest gradient. A gradient that is 0
up to rounding, such as that of a bias on keys, has no size of its own."""


def error_of(found: np.ndarray | None, oracle: np.ndarray, least: float = 0.0) -> float:
    """Returns the largest difference relative to the oracle's largest entry (at least `least`); inf if not finite."""
    if found is None or np.shape(found) != np.shape(oracle):
        return math.inf
    exact = np.asarray(oracle, np.float64)
    difference = np.max(np.abs(np.asarray(found, np.float64) - exact), initial=0.0)
    largest = max(np.max(np.abs(exact), initial=0.0), least)
    return float(difference / (largest or 1.0)) if np.isfinite(difference) else math.inf


def errors_of(found: Found, oracle: Found) -> dict[str, float]:
    """Returns `error_of` each tensor. NEGLIGIBLE bounds the size of gradients from below."""
    gradients = [tensor for tensor in oracle if tensor.startswith("gradient ")]
    least = NEGLIGIBLE * float(max((np.max(np.abs(oracle[x]), initial=0.0) for x in gradients), default=0.0))
    return {tensor: error_of(found.get(tensor), x, least * (tensor in gradients)) for tensor, x in oracle.items()}


def compare_meshes(c: Config, meshes: list[Mesh], log: Callable[[str], None]) -> tuple[str, list[str]]:
    """Compares the step on each of `meshes` with that on one device.

    Args:
        c: the run's configuration.
        meshes: meshes of the existing devices.
        log: prints the name of the next mesh.

    Returns:
        A line on the largest difference, and lines on the meshes that differ; for one of these also what the proof
        finds in its step, and the first value that differs. No lines if all agree.
    """
    with step_on(c, ONE_DEVICE) as step:
        inputs = make_inputs(c, fresh_state(step))
        inputs.reference = jax.tree.map(np.asarray, read_reference(c, step.spec))
    oracle = tensors_of_step(c, inputs, ONE_DEVICE)
    largest = (-1.0, "")
    lines = []
    wrong = []
    if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
        raise ValueError(f"the {bad[0]} is not finite on one device. Correct the step there first.")
    for sizes in meshes:
        log(mesh_text(sizes))
        errors = errors_of(tensors_of_step(c, inputs, sizes), oracle)
        tensor = max(errors, key=errors.__getitem__)
        largest = max(largest, (errors[tensor], f"{tensor} on {mesh_text(sizes)}"))
        if failures := [tensor for tensor, error in errors.items() if error > TOLERANCE]:
            wrong.append(sizes)
            lines.append(
                f"DIFFERS on {mesh_text(sizes)}: the first tensor that differs is the {failures[0]}, by "
                f"{errors[failures[0]]:.1e} (limit {TOLERANCE:.0e}); {len(failures)} of {len(errors)} tensors differ."
            )
    # Nothing within the pipeline's schedule can be compared. Where devices have one entry each, a trace may differ.
    if wrong:
        lines += causes(c, inputs, min(wrong, key=lambda sizes: (sizes["p"], max(sizes.values()))))
    return f"{len(oracle)} tensors; the largest difference is {largest[0]:.1e}, of the {largest[1]}", lines


# ---- the first value that differs --------------------------------------------------------------------------------


def assembled(
    blocks: np.ndarray, value: Value, loops: int, here: Mapping[str, int], sizes: Mapping[str, int]
) -> np.ndarray:
    """Assembles the global value of which devices hold `blocks`[*axes, *loops, *block]: [*axes, *loops, *whole].

    An axis has one entry if it shards a dim, or if a sum or extreme over it was pending. The others have one per
    device, and all should be equal. `value` has the facts on a mesh of the sizes `here`; the blocks come from the same
    program on a mesh of `sizes`.
    """
    places = {axis: i for i, axis in enumerate(sizes)}

    def positions(axes: Iterable[str]) -> tuple[int, ...]:
        return tuple(places[axis] for axis in axes)

    if value.extreme:
        kind, over = value.extreme
        blocks = (np.max if kind == "max" else np.min)(blocks, axis=positions(over), keepdims=True)
    if value.partial:
        blocks = np.sum(blocks, axis=positions(value.partial), keepdims=True)
    lead = len(sizes) + loops
    parts = list(blocks.shape[:lead])
    groups = []
    for dim, size in zip(value.dims, blocks.shape[lead:], strict=True):
        groups.append([])
        for n, over in [(size, ())] if dim is UNIFORM else dim.parts:
            groups[-1] += [*positions(over), len(parts)]
            parts.append(n * devices(here, over) // devices(sizes, over))
    cut = {i for group in groups for i in group}
    order = [i for i in range(lead) if i not in cut] + [i for group in groups for i in group]
    kept = [1 if i in cut else parts[i] for i in range(lead)]
    return blocks.reshape(parts).transpose(order).reshape(*kept, *(math.prod(parts[i] for i in g) for g in groups))


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns |a - b|, and 0 where both are the same infinity or NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))


class First(NamedTuple):
    """The first value of a step, in execution order, that differs from one device.

    Attributes:
        order: when it is computed.
        place: `file.py:line` of the code that computes it.
        operation: name of the primitive.
        turns: iteration of each enclosing loop.
        error: the largest difference, relative to the largest entry on one device.
    """

    order: list[int]
    place: str
    operation: str
    turns: tuple[int, ...]
    error: float


def _is_number(aval: Any) -> bool:
    return isinstance(getattr(aval, "dtype", None), np.dtype) and aval.dtype != jax.dtypes.float0


def _is_known(value: Value, sizes: Mapping[str, int]) -> bool:
    """True if a device holds a block of a known global value, in the global order."""
    axes = {axis for dim in value.dims if dim is not UNIFORM for axis in dim.axes}
    return value.unprovable is None and value.is_block and axes <= {*sizes}


def first_difference(here: Step, there: Step, arguments: Sequence[list]) -> tuple[list[str], First | None]:
    """Returns what the proof finds in a step on a mesh, and the first value that differs from one device.

    Args:
        here: the step on the mesh.
        there: the same step with one device along each axis, except those that `there` keeps.
        arguments: of both steps, each on its mesh.

    Raises:
        Different: the program has other operations on one device.
    """
    found, facts = findings(here.jaxpr, there.jaxpr)
    # The proof also has equations that no program has as they stand, such as one turn in place of a ring.
    paths = [{op.path for op in operations_in(step.jaxpr)} for step in (here, there)]
    wanted: dict[Path, list[int]] = {}
    twins: dict[Path, Path] = {}
    for path, (eq, values) in facts.items():
        twin = tuple(id(each.twin) for each in (*eq.callers, eq))
        if eq.name not in CALLS and path in paths[0] and twin in paths[1]:
            pairs = zip(values, eq.eqn.outvars, strict=True)
            wanted[path] = [
                i for i, (value, var) in enumerate(pairs) if _is_known(value, here.mesh.shape) and _is_number(var.aval)
            ]
            twins[path] = twin
    replay = Rerun(here.jaxpr, wanted, is_double=True)
    alone = Rerun(there.jaxpr, {twins[path]: which for path, which in wanted.items()}, is_double=True)
    ours, theirs = map(_values, (here, there), (replay, alone), arguments)
    sizes = here.mesh.shape
    axes = len(here.mesh.shape)
    first = None
    for note, twin, x, exact in zip(replay.notes, alone.notes, ours, theirs, strict=True):
        assert (twins[note.path], note.order) == (twin.path, twin.order)
        eq, values = facts[note.path]
        value = values[note.result]
        loops = len(note.loops)
        x = assembled(x, value, loops, sizes, sizes) * (value.ratio if value.ratio != 1 else 1)
        exact = assembled(exact, value, loops, sizes, there.mesh.shape)
        others = tuple(i for i in range(x.ndim) if not axes <= i < axes + loops)
        of_turn = functools.partial(np.max, axis=others, initial=0.0)  # the largest entry in each iteration
        for i, dim in enumerate(value.dims, axes + loops):
            if dim is UNIFORM and x.shape[i] != exact.shape[i]:
                exact = np.take(exact, [0], i)
        error = of_turn(difference(x, exact))
        scale = of_turn(np.where(np.isfinite(exact), np.abs(np.float64(exact)), 0))
        for turn in np.argwhere(error > np.maximum(TOLERANCE * scale, ROUNDING)):
            turns = tuple(map(int, turn))
            relative = float(error[turns] / (scale[turns] or 1.0))
            this = First(executed(note, turns), eq.place(), eq.name, turns, relative)
            first = this if first is None else min(first, this)
    return list(map(str, found)), first


def _values(step: Step, replay: Rerun, arguments: list) -> list[np.ndarray]:
    """Returns what the equations compute, on the host."""
    with jax.set_mesh(step.mesh), jax.enable_x64(True):
        return list(map(np.asarray, jax.jit(replay)(*arguments)[1]))


def causes(c: Config, inputs: Inputs, sizes: Mesh) -> list[str]:
    """Describes what the proof finds in the step, and the first value that differs from one device (of each stage)."""
    alone = {axis: n if axis == PIPELINE_AXIS else 1 for axis, n in sizes.items()}
    found = list(map(str, find_unsound(open_steps(c, sizes)[0])))
    first = None
    try:
        steps, arguments = [], []
        for each in (sizes, alone):
            with step_on(c, each, sizes) as step:
                steps.append(step)
                arguments.append(placed(step, inputs))
        more, first = first_difference(*steps, arguments=arguments)
        found = found or more
    except Different as different:
        found = found or [f"{different.place}: {different}"]
    if first is not None:
        turns = "".join(f", turn {i}" for i in first.turns)
        (file, _, line) = first.place.rpartition(":")
        found.append(
            f"the first value that differs is made by {first.operation} at {first.place}{turns}, by {first.error:.1e}"
            f"\n    {linecache.getline(file, int(line)).strip() if line.isdecimal() else ''}"
        )
    elif not found and sizes["p"] > 1:
        found.append("all values equal those of one device per stage: suspect the schedule or the number of stages")
    return [f"on {mesh_text(sizes)}, {text}" for text in found]
