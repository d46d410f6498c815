"""The part of tools/verify that computes: a process of its own, on simulated devices, with the program's copy.

python -m tools.verify_run <job.json>        started by tools.verify, which writes the job
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
import numpy as np
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

import configuration
from configuration import Config, check_divides
from tools.verify_measure import (
    AXES,
    NotTheSame,
    Tensor,
    fresh_state,
    layouts,
    loaded_batch,
    make_inputs,
    measure,
    mesh_of,
    random_batch,
)

KINDS = ("activation", "loss", "gradient", "step", "update", "moment")


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
    """The meshes of so many devices that divide the model's sizes and the batch; the others, each with the reason."""
    fit, others = [], []
    for sizes in itertools.product([n for n in range(1, devices + 1) if devices % n == 0], repeat=len(AXES)):
        mesh = dict(zip(AXES, sizes, strict=True))
        if math.prod(sizes) == devices:
            try:
                check_divides(c, mesh)
                fit.append(mesh)
            except ValueError as error:
                others.append((mesh, str(error)))
    return fit, others


def mesh_name(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def error_of(found: Any, oracle: np.ndarray) -> float:
    if isinstance(found, NotTheSame) or found is None or np.shape(found) != np.shape(oracle):
        return math.inf
    exact = np.asarray(oracle, np.float64)
    difference = np.max(np.abs(np.asarray(found, np.float64) - exact), initial=0.0)
    largest = np.max(np.abs(exact), initial=0.0)
    if not np.isfinite(difference):
        return math.inf
    return float(difference / largest if largest else difference)


def compare(mesh: MeshResult, found: Mapping[Tensor, Any], oracle: Mapping[Tensor, Any]) -> None:
    for tensor, exact in oracle.items():
        value = found.get(tensor)
        mesh.errors[tensor] = error_of(value, exact)
        if isinstance(value, NotTheSame):
            mesh.notes[tensor] = str(value)
        elif np.shape(value) != np.shape(exact):
            mesh.notes[tensor] = f"its shape is {np.shape(value)}, the oracle's {np.shape(exact)}"


def same_bits(tree, other) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
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
            batch, data = loaded_batch(c, step), f"the run's data, batch {step}"
        except (ValueError, OSError) as error:
            batch, data = random_batch(c), f"random tokens ({str(error).splitlines()[0]})"
        loaded = data.startswith("the run's")
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
        limits = {t: max(limit, floor(t)) for t, limit in limits.items()}
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
    picks.append(min(meshes, key=lambda m: max(m.values())))
    return [mesh for i, mesh in enumerate(picks) if mesh not in picks[:i]]


def floor(tensor: Tensor) -> float:
    """One rounding to the compute dtype, which happens or not to a tensor that has no other difference."""
    return 2.0**-8 if tensor.kind in ("activation", "gradient") else 2.0**-12


def failures(outcome: Outcome, result: MeshResult) -> list[Tensor]:
    return [tensor for tensor, error in result.errors.items() if error > outcome.limits[tensor]]


# ---- the report ---------------------------------------------------------------------------------------------------


def place_of(tensor: Tensor) -> str:
    return f"{Path(tensor.file).name}:{tensor.line}"


def label(tensor: Tensor) -> str:
    return tensor.name + "".join(f", layer {i}" for i in tensor.layers)


def show(outcome: Outcome, console: Console) -> bool:
    """Prints the tables; whether all is well."""
    by_mesh = Table(title="Largest difference from one device, by mesh", title_justify="left")
    for column in ("mesh", "initial weights", "batch", *KINDS, ""):
        by_mesh.add_column(column, justify="left" if column in ("mesh", "") else "right")
    for result in outcome.meshes:
        wrong = failures(outcome, result)
        worst = {k: max((e for t, e in result.errors.items() if t.kind == k), default=0.0) for k in KINDS}
        ok = not wrong and result.same_weights and result.same_batch
        cells = ["same" if same else "DIFFER" for same in (result.same_weights, result.same_batch)]
        cells += [f"{worst[k]:.1e}" + ("!" if any(t.kind == k for t in wrong) else "") for k in KINDS]
        by_mesh.add_row(mesh_name(result.sizes), *cells, "ok" if ok else "DIFFERS")
    console.print(by_mesh)

    by_tensor = Table(title="Largest difference over all meshes, by tensor", title_justify="left")
    for column in ("", "tensor", "source", "difference", "limit", "on"):
        by_tensor.add_column(column, justify="right" if column in ("difference", "limit") else "left")
    rows: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in outcome.limits:
        rows.setdefault((tensor.kind, tensor.name), []).append(tensor)
    last = ""
    for (kind, name), tensors in rows.items():
        pairs = [(result.errors[t] / max(outcome.limits[t], 1e-300), t, result) for t in tensors
                 for result in outcome.meshes]  # fmt: skip
        _, tensor, result = max(pairs, key=lambda pair: pair[0])
        error, limit = result.errors[tensor], outcome.limits[tensor]
        by_tensor.add_row(
            kind if kind != last else "",
            name,
            place_of(tensor),
            f"{error:.1e}" + "!" * (error > limit),
            f"{limit:.0e}",
            mesh_name(result.sizes) if error else "",
        )
        last = kind
    console.print(by_tensor)

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
    lines = Path(tensor.file).read_text().splitlines()
    return lines[tensor.line - 1].strip() if 0 < tensor.line <= len(lines) else ""


# ---- main ---------------------------------------------------------------------------------------------------------


def config_of(saved: dict[str, Any]) -> Config:
    configuration.register_schema()
    schema = ConfigStore.instance().load("config_schema.yaml").node
    return configuration.to_config(OmegaConf.merge(schema, saved))


def main(path: str) -> int:
    """Runs the job in the file `path`: 0 if all meshes agree, 1 if not, 2 with one line if the settings are wrong."""
    job = json.loads(Path(path).read_text())
    console = Console(width=None if sys.stdout.isatty() else 160)
    progress = Console(stderr=True)
    try:
        c = config_of(job["config"])
        meshes, others = all_meshes(c, job["devices"])
        if not meshes:
            raise ValueError(
                f"no mesh of {job['devices']} devices divides the model: {others[0][1]} verify.small=true has sizes "
                "that all meshes divide."
            )
        outcome = run(c, meshes, job["tolerance"], job["band"], lambda text: progress.print(text, style="dim"))
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    console.rule(job["title"])
    console.print(f"batch: {outcome.data}", soft_wrap=True, markup=False)
    for mesh, reason in others:
        console.print(f"not run: {mesh_name(mesh)}: {reason}", soft_wrap=True, markup=False)
    ok = show(outcome, console)
    console.print(job["agree"].format(count=len(meshes)) if ok else "The meshes DIFFER.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
