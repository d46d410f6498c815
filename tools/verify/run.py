"""The part of tools/verify that computes: a process of its own, on simulated devices, with the program's copy.

python -m tools.verify.run <job.json>        started by tools.verify, which writes the job
"""

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from modeling.model import COMPUTE_DTYPES, load_model
from tools.verify.measure import (
    AXES,
    NotTheSame,
    Tensor,
    abstract_mesh_of,
    by_layer,
    fresh_state,
    layouts,
    loaded_batch,
    make_inputs,
    measure,
    mesh_of,
    random_batch,
    type_check,
)
from tools.verify.program import RECORD
from training_io.config import Config, check_divides, register_schema, to_config
from training_io.stages import training_plan

NOT_OF_WEIGHTS = ("activation", "loss", "step")
"""The kinds of tensors that are no part of a weight."""


@dataclasses.dataclass
class MeshResult:
    """How far one mesh is from the oracle."""

    sizes: dict[str, int]
    same_weights: bool = True
    same_batch: bool = True
    errors: dict[Tensor, float] = dataclasses.field(default_factory=dict)
    """Largest difference over the largest entry of the oracle's; infinity for what is not finite, or missing."""
    notes: dict[Tensor, str] = dataclasses.field(default_factory=dict)
    refused: str = ""
    """Why the program does not run on this mesh at all."""


def all_meshes(c: Config, devices: int) -> tuple[list[dict[str, int]], list[tuple[dict[str, int], str]]]:
    """The meshes of so many devices that divide the model's sizes and the batch, and whose devices of p the schedule
    and the layers are for; the others, each with the reason."""
    fit, others = [], []
    for sizes in itertools.product([n for n in range(1, devices + 1) if devices % n == 0], repeat=len(AXES)):
        mesh = dict(zip(AXES, sizes, strict=True))
        if math.prod(sizes) == devices:
            try:
                check_divides(c, mesh)
                with abstract_mesh_of(mesh):
                    training_plan(c, load_model(c.model))
                fit.append(mesh)
            except ValueError as error:
                others.append((mesh, str(error)))
    return fit, others


def chosen(names: list[str], meshes: list[dict[str, int]], others: list) -> tuple[list[dict[str, int]], list]:
    """Those of `meshes` and `others` that `names` ask for. Raises ValueError for one that is in neither."""
    short = lambda sizes: "x".join(str(n) for axis, n in sizes.items() if axis != "p" or n > 1)
    known = [short(sizes) for sizes in (*meshes, *(sizes for sizes, _ in others))]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"verify.meshes has {unknown[0]}; meshes of so many devices are {', '.join(known)} (p if it is not "
            "1, r, d, t)."
        )
    return [m for m in meshes if short(m) in names], [(m, why) for m, why in others if short(m) in names]


def mesh_name(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if axis != "p" or size > 1)


NEGLIGIBLE = 1e-4
"""A gradient whose entries are below this part of the largest gradient's is compared as if it were this large: one that
is 0 but for rounding, as that of a bias on keys, has no size of its own."""


def error_of(found: Any, oracle: np.ndarray, least: float = 0.0) -> float:
    """The largest difference over the oracle's largest entry, or over `least` if that is more; inf for no number."""
    if isinstance(found, NotTheSame) or found is None or np.shape(found) != np.shape(oracle):
        return math.inf
    exact = np.asarray(oracle, np.float64)
    difference = np.max(np.abs(np.asarray(found, np.float64) - exact), initial=0.0)
    largest = max(np.max(np.abs(exact), initial=0.0), least)
    if not np.isfinite(difference):
        return math.inf
    return float(difference / largest if largest else difference)


def compare(mesh: MeshResult, found: Mapping[Tensor, Any], oracle: Mapping[Tensor, Any]) -> None:
    gradients = [np.max(np.abs(x), initial=0.0) for tensor, x in oracle.items() if tensor.kind == "gradient"]
    for tensor, exact in oracle.items():
        value = found.get(tensor)
        least = NEGLIGIBLE * max(gradients, default=0.0) if tensor.kind == "gradient" else 0.0
        mesh.errors[tensor] = error_of(value, exact, float(least))
        if isinstance(value, NotTheSame):
            mesh.notes[tensor] = str(value)
        elif np.shape(value) != np.shape(exact):
            mesh.notes[tensor] = f"its shape is {np.shape(value)}, the oracle's {np.shape(exact)}"


def same_bits(tree, other) -> bool:
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
    if any(isinstance(x, NotTheSame) for pair in pairs for x in pair):
        return False
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


# ---- the run ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    meshes: list[MeshResult]
    limits: dict[Tensor, float]
    """The largest error that is rounding, for each tensor; in the program's order."""
    dtypes: set[str]
    data: str
    """Where the batch came from, in words."""
    blocks: list[dict[str, int]] = dataclasses.field(default_factory=list)
    """How the oracle's sums were taken apart to find the limits."""


ONE_DEVICE = dict.fromkeys(AXES, 1)


def run(c: Config, meshes: list[dict[str, int]], tolerance: float, band: float, say: Callable[[str], None]) -> Outcome:
    """Compares the step on each of `meshes` with that on one device.

    tolerance: the largest relative error that is rounding; 0: `band` times what comes from summing in another order.
    """
    with mesh_of(ONE_DEVICE):
        started = fresh_state(c)
        step = max(1, c.optimizer.warmup_steps)
        try:
            batch, loaded, data = loaded_batch(c, step), True, f"the run's data, step {step}"
        except (ValueError, OSError) as error:
            batch, loaded, data = random_batch(c), False, f"random tokens: {str(error).splitlines()[0]}"
        inputs = make_inputs(c, started, batch)
        begin = time.monotonic()
        oracle, dtypes = measure(c, inputs)
        say(f"one device: {time.monotonic() - begin:.0f} s")
        if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
            raise ValueError(f"on one device {bad[0].name} is not finite already ({place_of(bad[0])}).")
        blocks = [] if tolerance else reassociations(meshes)
        limits = dict.fromkeys(oracle, tolerance)
        for sizes in blocks:
            again = MeshResult(sizes)
            compare(again, measure(c, inputs, blocks=sizes)[0], oracle)
            limits = {t: max(limits[t], band * e) for t, e in again.errors.items()}
            say(f"one device, summed in blocks of {mesh_name(sizes)}: {time.monotonic() - begin:.0f} s")
    if blocks:
        limits = {t: max(limit, floor(t, c)) for t, limit in limits.items()}
    of_updates = rounding_of_updates(inputs.state.weights, oracle)
    limits = {t: max(limit, of_updates.get(t, 0.0)) for t, limit in limits.items()}
    largest = {axis: max(mesh[axis] for mesh in meshes) for axis in AXES}
    layout = layouts(c, largest)
    results = []
    for sizes in meshes:
        begin, result = time.monotonic(), MeshResult(sizes)
        with mesh_of(sizes):
            result.same_weights = same_bits(fresh_state(c), started)
            if loaded:
                result.same_batch = same_bits(loaded_batch(c, step), batch)
            compare(result, measure(c, inputs, layout)[0], oracle)
        results.append(result)
        say(f"{mesh_name(sizes)}: {time.monotonic() - begin:.0f} s")
    return Outcome(results, limits, dtypes, data, blocks)


def reassociations(meshes: list[dict[str, int]]) -> list[dict[str, int]]:
    """The meshes with most devices along d, along t, and one with both, as ways to take sums apart on one device."""
    picks = [max(meshes, key=lambda m: m["d"] * m["r"]), max(meshes, key=lambda m: m["t"])]
    picks.append(min(meshes, key=lambda m: (max(m.values()), m["p"])))
    return [mesh for i, mesh in enumerate(picks) if mesh not in picks[:i]]


def floor(tensor: Tensor, c: Config) -> float:
    """Two roundings to the compute dtype, which may turn out the other way; for what is in f32, a part of that.

    Never less than eight roundings of f32: in which order a product sums depends on the sizes of its blocks too.
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


def failures(outcome: Outcome, result: MeshResult) -> list[Tensor]:
    return [tensor for tensor, error in result.errors.items() if error > outcome.limits[tensor]]


# ---- the report ---------------------------------------------------------------------------------------------------


def worst_of(outcome: Outcome, tensors: list[Tensor]) -> tuple[str, str]:
    """`<difference> of <limit>` for the one of `tensors` that comes nearest to its limit, and the mesh it is on."""
    pairs = [
        (result.errors[t] / max(outcome.limits[t], 1e-300), t, result) for t in tensors for result in outcome.meshes
    ]
    _, tensor, result = max(pairs, key=lambda pair: pair[0])
    error, limit = result.errors[tensor], outcome.limits[tensor]
    return f"{error:.1e} of {limit:.0e}" + " !" * (error > limit), mesh_name(result.sizes) if error else ""


def place_of(tensor: Tensor) -> str:
    return f"{Path(tensor.file).name}:{tensor.line}"


def label(tensor: Tensor) -> str:
    return tensor.name + "".join(f", layer {i}" for i in tensor.layers)


def show(outcome: Outcome, console: Console) -> bool:
    """Prints the tables; whether all is well."""
    kinds = list(dict.fromkeys(tensor.kind for tensor in outcome.limits))
    by_mesh = Table(title="Largest difference from one device, by mesh", title_justify="left")
    for column in ("mesh", "initial weights", "batch", *kinds, ""):
        by_mesh.add_column(column, justify="left" if column in ("mesh", "") else "right")
    for result in outcome.meshes:
        wrong = failures(outcome, result)
        worst = {k: max((e for t, e in result.errors.items() if t.kind == k), default=0.0) for k in kinds}
        ok = not wrong and result.same_weights and result.same_batch
        cells = ["same" if same else "DIFFER" for same in (result.same_weights, result.same_batch)]
        cells += [f"{worst[k]:.1e}" + ("!" if any(t.kind == k for t in wrong) else "") for k in kinds]
        by_mesh.add_row(mesh_name(result.sizes), *cells, "ok" if ok else "DIFFERS")
    console.print(by_mesh)

    tensors: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in outcome.limits:
        tensors.setdefault((tensor.kind, tensor.name), []).append(tensor)
    cells = {key: worst_of(outcome, of_name) for key, of_name in tensors.items()}

    values = Table(
        title="Values: the difference nearest to its limit, over all meshes and layers", title_justify="left"
    )
    for column in ("", "value", "source", "difference of limit", "on"):
        values.add_column(column)
    for (kind, name), (cell, mesh) in cells.items():
        if kind in NOT_OF_WEIGHTS:
            values.add_row(kind, name, place_of(tensors[kind, name][0]), cell, mesh)
    console.print(values)

    weights = Table(
        title="Weights: the differences nearest to their limits, over all meshes and layers", title_justify="left"
    )
    of_weights = [kind for kind in kinds if kind not in NOT_OF_WEIGHTS]
    for column in ("weight", "source", *of_weights):
        weights.add_column(column)
    for kind, name in cells:
        if kind == of_weights[0]:
            row = [cells[k, name][0] if (k, name) in cells else "" for k in of_weights]
            weights.add_row(name, place_of(tensors[kind, name][0]), *row)
    console.print(weights)

    ok = True
    for result in outcome.meshes:
        wrong = failures(outcome, result)
        found = []
        if not result.same_weights:
            found.append("its initial weights are not those of one device, bit by bit")
        if not result.same_batch:
            found.append("its batch is not that of one device, bit by bit")
        if wrong:
            first = wrong[0]
            found.append(
                f"the first tensor that differs is the {first.kind} {label(first)} at {place_of(first)}, "
                f"by {result.errors[first]:.1e} (limit {outcome.limits[first]:.0e}); {len(wrong)} of "
                f"{len(result.errors)} tensors differ. {result.notes.get(first, '')}".rstrip()
                + f"\n    {source_line(first)}"
            )
        for text in found:
            ok = False
            console.print(f"DIFFERS on {mesh_name(result.sizes)}: {text}", soft_wrap=True, markup=False)
    return ok


def source_line(tensor: Tensor) -> str:
    """The line of the source that made a tensor, as it is in the original of the copy."""
    lines = Path(tensor.file).read_text().splitlines()
    line = lines[tensor.line - 1].strip() if 0 < tensor.line <= len(lines) else ""
    return line.replace(f"{RECORD}.save_for_backward", "save_for_backward")


def type_check_all(c: Config, meshes: list[dict[str, int]], others: list, console: Console) -> None:
    """Traces the step on each mesh and says so; ValueError if it is refused."""
    for mesh, reason in others:
        console.print(f"{mesh_name(mesh)}: {reason}", soft_wrap=True, markup=False)
    for mesh in meshes:
        begin = time.monotonic()
        type_check(c, mesh)
        console.print(f"{mesh_name(mesh)}: type-checks, in {time.monotonic() - begin:.1f} s", soft_wrap=True)
    console.print(f"The step type-checks on {len(meshes)} of {len(meshes) + len(others)} meshes; no device was used.")


def how_stages_ran(c: Config) -> str:
    settings = " ".join(f"{f.name}={getattr(c.pipeline, f.name)}" for f in dataclasses.fields(c.pipeline))
    return (
        "activations and the summed loss are of the stages run one after the other; the mean loss, gradients and all "
        f"that follows are of the schedule, {c.training.microbatches} microbatches, {settings}"
    )


# ---- main ---------------------------------------------------------------------------------------------------------


def config_of(saved: dict[str, Any]) -> Config:
    register_schema()
    schema = ConfigStore.instance().load("config_schema.yaml").node
    return to_config(OmegaConf.merge(schema, saved))


def main(path: str) -> int:
    """Runs the job in the file `path`: 0 if all meshes agree, 1 if not, 2 with one line if the settings are wrong."""
    job = json.loads(Path(path).read_text())
    console = Console(width=None if sys.stdout.isatty() else 160)
    progress = Console(stderr=True)
    try:
        c = config_of(job["config"])
        if c.training.fp8:
            raise ValueError(
                "training.fp8 is true: each device then rounds its own blocks by a scale of its own, so that no mesh "
                "gives what another does. Verify the step with training.fp8=false."
            )
        meshes, others = all_meshes(c, job["devices"])
        if job["meshes"] is not None:
            meshes, others = chosen(job["meshes"], meshes, others)
        if not meshes:
            raise ValueError(
                f"no mesh of {job['devices']} devices divides the model: {others[0][1]} verify.small=true has sizes "
                "that all meshes divide."
            )
        if job["only_types"]:
            type_check_all(c, meshes, others, console)
            return 0
        outcome = run(c, meshes, job["tolerance"], job["band"], lambda text: progress.print(text, style="dim"))
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    console.rule(job["title"])
    console.print(f"batch: {outcome.data}", soft_wrap=True, markup=False)
    if any(mesh["p"] > 1 for mesh in meshes):
        console.print(f"with p: {how_stages_ran(c)}", soft_wrap=True, markup=False)
    for mesh, reason in others:
        console.print(f"not run: {mesh_name(mesh)}: {reason}", soft_wrap=True, markup=False)
    if job["tolerance"] and (other := sorted(outcome.dtypes - {"f64"})):
        console.print(
            f"not all is f64: the program makes {', '.join(other)} too, which rounds more than the limit allows"
        )
    ok = show(outcome, console)
    console.print(job["agree"].format(count=len(meshes)) if ok else "The meshes DIFFER.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
