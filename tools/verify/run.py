"""The part of tools/verify that computes: a process of its own, on simulated devices, with a copy of the program.

python -m tools.verify.run <job.json>        started by tools.verify, which writes the job
"""

import contextlib
import dataclasses
import itertools
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from shardlib.places import shown_path
from shardwright.modeling.blockwise import small_blocks
from shardwright.modeling.model import COMPUTE_DTYPES, load_model
from shardwright.run.config import Config, check_divides
from shardwright.run.resuming import config_of
from shardwright.run.stages import training_table
from shardwright.settings.program import refusal
from shardwright.settings.words import for_console
from tools.verify.first_difference import causes
from tools.verify.inputs import make_inputs, random_batch
from tools.verify.measure import (
    AXES,
    NotTheSame,
    Tensor,
    abstract_mesh_of,
    by_layer,
    fresh_state,
    layouts,
    loaded_batch,
    measure,
    mesh_name,
    mesh_of,
    type_check,
)
from tools.verify.names import line_at

NOT_OF_WEIGHTS = ("activation", "loss", "step", "planted")
"""Kinds of tensors that are not part of a weight."""

# ---- meshes -------------------------------------------------------------------------------------------------------

Mesh = dict[str, int]
"""Number of devices along each of AXES."""


def all_meshes(c: Config, devices: int) -> tuple[list[Mesh], list[tuple[Mesh, str]]]:
    """All meshes of that many devices on which the step runs, and the others, each with the reason.

    The mesh must divide the sizes of the model and of the batch, and the schedule and the layers must fit its stages.
    """
    fit, others = [], []
    for sizes in itertools.product([n for n in range(1, devices + 1) if devices % n == 0], repeat=len(AXES)):
        mesh = dict(zip(AXES, sizes, strict=True))
        if math.prod(sizes) == devices:
            try:
                check_divides(c, mesh)
                with abstract_mesh_of(mesh):
                    training_table(c, load_model(c.model))
                fit.append(mesh)
            except ValueError as error:
                others.append((mesh, str(error)))
    return fit, others


def chosen(names: list[str], meshes: list[Mesh], others: list[tuple[Mesh, str]]) -> tuple[list[Mesh], list]:
    """Selects from `meshes` and `others` by names such as 1x4x2. Raises ValueError for a name that is in neither."""
    short = lambda mesh: "x".join(str(n) for axis, n in mesh.items() if axis != "p" or n > 1)
    known = [short(mesh) for mesh in (*meshes, *(mesh for mesh, _ in others))]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"verify.meshes has {unknown[0]}; choose among the meshes of so many devices: {', '.join(known)} (p if "
            "it is not 1, r, d, t)."
        )
    return [m for m in meshes if short(m) in names], [(m, why) for m, why in others if short(m) in names]


# ---- differences --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MeshResult:
    """Differences between one mesh and the oracle."""

    sizes: Mesh
    same_weights: bool = True
    same_batch: bool = True
    errors: dict[Tensor, float] = dataclasses.field(default_factory=dict)
    """Largest difference over the oracle's largest entry; infinity for a tensor that is not finite, or missing."""
    notes: dict[Tensor, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
    """The results of all meshes, and the limits that they are held to."""

    meshes: list[MeshResult]
    limits: dict[Tensor, float]
    """The largest error of each tensor that counts as rounding, in the program's order."""
    dtypes: set[str]
    data: str
    """The origin of the batch."""
    causes: list[str] = dataclasses.field(default_factory=list)
    """Where a mesh first computes another value, and what the proof finds in its step."""

    def failures(self, result: MeshResult) -> list[Tensor]:
        """The tensors of a mesh that are beyond their limits."""
        return [tensor for tensor, error in result.errors.items() if error > self.limits[tensor]]


NEGLIGIBLE = 1e-4
"""Least size of a gradient, as a share of the largest gradient, for its relative error. A gradient that is 0 but for
rounding, as that of a bias on keys, has no size of its own."""


def error_of(found: Any, oracle: np.ndarray, least: float = 0.0) -> float:
    """Largest difference over the oracle's largest entry, or over `least` if that is more; inf without a number."""
    if isinstance(found, NotTheSame) or found is None or np.shape(found) != np.shape(oracle):
        return math.inf
    exact = np.asarray(oracle, np.float64)
    difference = np.max(np.abs(np.asarray(found, np.float64) - exact), initial=0.0)
    largest = max(np.max(np.abs(exact), initial=0.0), least)
    if not np.isfinite(difference):
        return math.inf
    return float(difference / largest if largest else difference)


def compare(result: MeshResult, found: Mapping[Tensor, Any], oracle: Mapping[Tensor, Any]) -> None:
    """Fills in `errors` and `notes`."""
    gradients = [np.max(np.abs(x), initial=0.0) for tensor, x in oracle.items() if tensor.kind == "gradient"]
    for tensor, exact in oracle.items():
        value = found.get(tensor)
        least = NEGLIGIBLE * max(gradients, default=0.0) if tensor.kind == "gradient" else 0.0
        result.errors[tensor] = error_of(value, exact, float(least))
        if isinstance(value, NotTheSame):
            result.notes[tensor] = str(value)
        elif np.shape(value) != np.shape(exact):
            result.notes[tensor] = f"its shape is {np.shape(value)}, the oracle's {np.shape(exact)}"


def same_bits(tree: Any, other: Any) -> bool:
    """Whether two trees of host arrays are equal, bit by bit."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
    if any(isinstance(x, NotTheSame) for pair in pairs for x in pair):
        return False
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


# ---- limits -------------------------------------------------------------------------------------------------------


def reassociations(meshes: list[Mesh]) -> list[Mesh]:
    """Ways to split sums on one device: the meshes with most devices along d, along t, and one with both."""
    picks = [max(meshes, key=lambda m: m["d"] * m["r"]), max(meshes, key=lambda m: m["t"])]
    picks.append(min(meshes, key=lambda m: (max(m.values()), m["p"])))
    return [mesh for i, mesh in enumerate(picks) if mesh not in picks[:i]]


def least_limit(tensor: Tensor, c: Config) -> float:
    """Two roundings to the compute dtype, of which each may go the other way; for a tensor in f32, a part of that.

    Never less than eight roundings of f32: the order in which a product sums depends on the sizes of its blocks too.
    """
    rounding = float(jnp.finfo(COMPUTE_DTYPES[c.training.compute_dtype]).eps)
    return max(2 * rounding if tensor.kind in ("activation", "gradient") else rounding / 32, 2.0**-20)


def rounding_of_updates(weights: Any, oracle: Mapping[Tensor, np.ndarray]) -> dict[Tensor, float]:
    """Four roundings of a weight, relative to its update: an update is a difference of weights, and far smaller."""
    found = {}
    for tensor, before in by_layer("update", weights, weights):
        largest = np.max(np.abs(oracle[tensor]), initial=0.0)
        found[tensor] = float(4 * np.finfo(before.dtype).eps * np.max(np.abs(before)) / largest) if largest else 0.0
    return found


# ---- the run ------------------------------------------------------------------------------------------------------


def run(c: Config, meshes: list[Mesh], tolerance: float, band: float, log: Callable[[str], None]) -> Outcome:
    """Compares the step on each of `meshes` with that on one device.

    Args:
        c: the run's configuration.
        meshes: with the devices that there are.
        tolerance: the largest relative error that is rounding; 0: found by summing in other orders on one device.
        band: factor between the errors that other orders of sums give and the limit.
        log: prints a line on the progress.
    """
    with mesh_of(dict.fromkeys(AXES, 1)):
        started = fresh_state(c)
        step = max(1, c.optimizer.warmup_steps)
        try:
            batch, loaded, data = loaded_batch(c, step), True, f"the run's data, step {step}"
        except (ValueError, OSError) as error:
            why = str(error).splitlines()[0].split(". ")[0]  # without its remedy: nothing has to be mended
            batch, loaded, data = random_batch(c), False, f"random tokens, not the run's data: {why}"
        inputs = make_inputs(c, started, batch)
        begin = time.monotonic()
        oracle, dtypes = measure(c, inputs)
        log(f"one device: {time.monotonic() - begin:.0f} s")
        if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
            raise ValueError(
                f"on one device {bad[0].name} is not finite already ({place_of(bad[0])}). Correct the step there first."
            )
        limits = dict.fromkeys(oracle, tolerance)
        for sizes in [] if tolerance else reassociations(meshes):
            again = MeshResult(sizes)
            compare(again, measure(c, inputs, blocks=sizes)[0], oracle)
            limits = {t: max(limits[t], band * e) for t, e in again.errors.items()}
            log(f"one device, summed in blocks of {mesh_name(sizes)}: {time.monotonic() - begin:.0f} s")
    if not tolerance:
        limits = {t: max(limit, least_limit(t, c)) for t, limit in limits.items()}
    of_updates = rounding_of_updates(inputs.state.weights, oracle)
    limits = {t: max(limit, of_updates.get(t, 0.0)) for t, limit in limits.items()}
    layout = layouts(c, {axis: max(mesh[axis] for mesh in meshes) for axis in AXES})
    results = []
    for sizes in meshes:
        begin, result = time.monotonic(), MeshResult(sizes)
        with mesh_of(sizes):
            result.same_weights = same_bits(fresh_state(c), started)
            if loaded:
                result.same_batch = same_bits(loaded_batch(c, step), batch)
            compare(result, measure(c, inputs, layout)[0], oracle)
        results.append(result)
        log(f"{mesh_name(sizes)}: {time.monotonic() - begin:.0f} s")
    outcome = Outcome(results, limits, dtypes, data)
    wrong = [result.sizes for result in results if outcome.failures(result)]
    # Nothing within the schedule of stages can be compared, and where devices have one entry each, a trace may differ.
    for sizes in sorted(wrong, key=lambda sizes: (sizes["p"], max(sizes.values())))[: 1 if tolerance else 0]:
        outcome.causes = causes(c, inputs, sizes, tolerance)
    return outcome


# ---- the report ---------------------------------------------------------------------------------------------------


def worst_of(outcome: Outcome, tensors: list[Tensor]) -> tuple[str, str]:
    """`<difference> of <limit>` of the tensor that comes nearest to its limit, and the mesh on which it does."""
    pairs = [(t, result) for t in tensors for result in outcome.meshes]
    tensor, result = max(pairs, key=lambda pair: pair[1].errors[pair[0]] / max(outcome.limits[pair[0]], 1e-300))
    error, limit = result.errors[tensor], outcome.limits[tensor]
    return f"{error:.1e} of {limit:.0e}" + " !" * (error > limit), mesh_name(result.sizes) if error else ""


def place_of(tensor: Tensor) -> str:
    """File and line of a tensor: `train.py:142`."""
    return f"{Path(tensor.file).name}:{tensor.line}"


def show(outcome: Outcome, console: Console) -> bool:
    """Prints the tables and the differences, or a line if there are none; True if there are none."""
    differences = [(result, text) for result in outcome.meshes for text in _differences(outcome, result)]
    if not differences:
        cell, mesh = worst_of(outcome, list(outcome.limits))
        console.print(f"{len(outcome.limits)} tensors; nearest to its limit: {cell}{mesh and f' on {mesh}'}")
        return True
    _show_meshes(outcome, console)
    _show_tensors(outcome, console)
    for result, text in differences:
        text = for_console(f"DIFFERS on {mesh_name(result.sizes)}: {text}", console)
        console.print(text, soft_wrap=True, markup=False)
    for text in outcome.causes:
        console.print(for_console(text, console), soft_wrap=True, markup=False)
    return False


def _show_meshes(outcome: Outcome, console: Console) -> None:
    kinds = list(dict.fromkeys(tensor.kind for tensor in outcome.limits))
    table = Table(title="Largest difference from one device, by mesh", title_justify="left")
    for column in ("mesh", "initial weights", "batch", *kinds, ""):
        table.add_column(column, justify="left" if column in ("mesh", "") else "right")
    for result in outcome.meshes:
        wrong = {tensor.kind for tensor in outcome.failures(result)}
        worst = {k: max((e for t, e in result.errors.items() if t.kind == k), default=0.0) for k in kinds}
        same = [result.same_weights, result.same_batch]
        cells = ["same" if x else "DIFFER" for x in same] + [f"{worst[k]:.1e}" + "!" * (k in wrong) for k in kinds]
        table.add_row(mesh_name(result.sizes), *cells, "DIFFERS" if wrong or not all(same) else "ok")
    console.print(table)


def _show_tensors(outcome: Outcome, console: Console) -> None:
    tensors: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in outcome.limits:
        tensors.setdefault((tensor.kind, tensor.name), []).append(tensor)
    cells = {key: worst_of(outcome, of_name) for key, of_name in tensors.items()}
    of_weights = list(dict.fromkeys(kind for kind, _ in tensors if kind not in NOT_OF_WEIGHTS))

    title = "Values: the difference nearest to its limit, over all meshes and layers"
    values = Table("", "value", "source", "difference of limit", "on", title=title, title_justify="left")
    title = "Weights: the differences nearest to their limits, over all meshes and layers"
    weights = Table("weight", "source", *of_weights, title=title, title_justify="left")
    for (kind, name), (cell, mesh) in cells.items():
        place = place_of(tensors[kind, name][0])
        if kind in NOT_OF_WEIGHTS:
            values.add_row(kind, name, place, cell, mesh)
        elif kind == of_weights[0]:
            weights.add_row(name, place, *(cells.get((k, name), ("", ""))[0] for k in of_weights))
    console.print(values)
    console.print(weights)


def _differences(outcome: Outcome, result: MeshResult) -> list[str]:
    found = []
    if not result.same_weights:
        found.append("its initial weights are not those of one device, bit by bit")
    if not result.same_batch:
        found.append("its batch is not that of one device, bit by bit")
    if wrong := outcome.failures(result):
        first = wrong[0]
        layers = "".join(f", layer {i}" for i in first.layers)
        found.append(
            f"the first tensor that differs is the {first.kind} {first.name}{layers} at {place_of(first)}, "
            f"by {result.errors[first]:.1e} (limit {outcome.limits[first]:.0e}); {len(wrong)} of "
            f"{len(result.errors)} tensors differ. {result.notes.get(first, '')}".rstrip()
            + f"\n    {line_at(f'{first.file}:{first.line}')}"
        )
    return found


def type_check_all(c: Config, meshes: list[Mesh], others: list[tuple[Mesh, str]], console: Console) -> None:
    """Traces the step on each mesh and prints a line for it. Raises ValueError if it is refused."""
    for mesh, reason in others:
        console.print(for_console(f"{mesh_name(mesh)}: {reason}", console), soft_wrap=True, markup=False)
    for mesh in meshes:
        begin = time.monotonic()
        type_check(c, mesh)
        console.print(f"{mesh_name(mesh)}: type-checks, in {time.monotonic() - begin:.1f} s", soft_wrap=True)
    console.print(f"The step type-checks on {len(meshes)} of {len(meshes) + len(others)} meshes; no device was used.")


def how_stages_ran(c: Config) -> str:
    """Explains which values come from the schedule."""
    settings = " ".join(f"{f.name}={getattr(c.pipeline, f.name)}" for f in dataclasses.fields(c.pipeline))
    return (
        "activations and the summed loss are of the stages run one after the other; the mean loss, gradients and all "
        f"that follows are of the schedule, {c.training.microbatches} microbatches, {settings}"
    )


# ---- main ---------------------------------------------------------------------------------------------------------


def main(path: str) -> int:
    """Runs the job in the file `path`: 0 if all meshes agree, 1 if not, 2 with the message if something is refused."""
    job = json.loads(Path(path).read_text())
    settings, double = job["settings"], job["double"]
    console = Console(width=None if sys.stdout.isatty() else 160)
    progress, copy = Console(stderr=True), shown_path(str(Path(path).parent / "program"))
    try:
        c = config_of(job["config"], trust=True)  # what the user composed
        meshes, others = all_meshes(c, settings["devices"])
        if settings["meshes"] is not None:
            meshes, others = chosen(settings["meshes"], meshes, others)
        if not meshes:
            raise ValueError(
                f"no mesh of {settings['devices']} devices divides the model: {others[0][1]} verify.small=true has "
                "sizes that all meshes divide."
            )
        if settings["only_types"]:
            type_check_all(c, meshes, others, console)
            return 0
        tolerance = settings["tolerance"] if double else 0.0
        log = lambda text: progress.print(text, style="dim")
        # So that blockwise attention has several blocks even for the sequences of verify.small.
        with small_blocks(c.training.seq_len // 4) if settings["small"] else contextlib.nullcontext():
            outcome = run(c, meshes, tolerance, settings["band"], log)
        outcome.causes = [text.replace(f"{copy}/", "") for text in outcome.causes]
    except Exception as error:
        message = refusal(error) or "".join(traceback.format_exception(error))
        print(message.replace(f"{copy}/", ""), file=sys.stderr)
        return 2
    dtype = "f64" if double else c.training.compute_dtype
    console.rule(f"{job['title']}: {dtype}")
    t = c.training
    settings = f"training.microbatches={t.microbatches} attention={t.attention} fp8={str(t.fp8).lower()}"
    console.print(for_console(f"batch: {outcome.data}; {settings}", console), soft_wrap=True, markup=False)
    if any(mesh["p"] > 1 for mesh in meshes):
        console.print(for_console(f"with p: {how_stages_ran(c)}", console), soft_wrap=True, markup=False)
    if others:
        names = "; ".join(mesh_name(mesh) for mesh, _ in others)
        text = for_console(f"not run: {names}. The first: {others[0][1]}", console)
        console.print(text, soft_wrap=True, markup=False)
    if double and (other := sorted(outcome.dtypes - {"f64"})):
        console.print(
            f"not all is f64: the program makes {', '.join(other)} too, which rounds more than the limit allows"
        )
    same = show(outcome, console)
    console.print(f"In {dtype}, all {len(meshes)} meshes agree with one device." if same else "The meshes DIFFER.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
