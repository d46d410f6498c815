"""Compares the step on each mesh with that on one device, and reports what differs."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from shardwright.modeling.model import COMPUTE_DTYPES
from shardwright.run.config import Config
from shardwright.settings.words import for_console
from tools.verify.first_difference import causes
from tools.verify.inputs import Inputs, make_inputs, random_batch
from tools.verify.meshes import ONE_DEVICE, Mesh, mesh_name, mesh_of
from tools.verify.step import Found, Step, fresh_state, loaded_batch

# ---- differences --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MeshResult:
    """Differences between one mesh and one device.

    Attributes:
        sizes: of the mesh.
        errors: `error_of` each tensor.
        others: sentences on inputs that are not those of one device.
    """

    sizes: Mesh
    errors: dict[str, float]
    others: list[str]


@dataclasses.dataclass
class Outcome:
    """The results of all meshes in one precision, and the limits that they are held to.

    Attributes:
        limits: the largest error of each tensor that counts as rounding, in program order.
        meshes: the results.
    """

    limits: dict[str, float]
    meshes: list[MeshResult] = dataclasses.field(default_factory=list)

    def failures(self, result: MeshResult) -> list[str]:
        """The tensors of a mesh that are beyond their limits."""
        return [tensor for tensor, error in result.errors.items() if error > self.limits[tensor]]

    def wrong(self) -> list[Mesh]:
        """The meshes that differ, first those where a difference is best found.

        Nothing within the schedule of stages can be compared. Where devices have one entry each, a trace may differ.
        """
        found = [result.sizes for result in self.meshes if result.others or self.failures(result)]
        return sorted(found, key=lambda sizes: (sizes["p"], max(sizes.values())))


NEGLIGIBLE = 1e-4
"""Least size of a gradient, as a share of the largest gradient, for its relative error. A gradient that is 0 but for
rounding, as that of a bias on keys, has no size of its own."""


def kind_of(tensor: str) -> str:
    """`gradient` of `gradient embed`."""
    return tensor.partition(" ")[0]


def error_of(found: np.ndarray | None, oracle: np.ndarray, least: float = 0.0) -> float:
    """Largest difference over the oracle's largest entry, or over `least` if that is more; inf without a number."""
    if found is None or np.shape(found) != np.shape(oracle):
        return math.inf
    exact = np.asarray(oracle, np.float64)
    difference = np.max(np.abs(np.asarray(found, np.float64) - exact), initial=0.0)
    largest = max(np.max(np.abs(exact), initial=0.0), least)
    return float(difference / (largest or 1.0)) if np.isfinite(difference) else math.inf


def errors_of(found: Found, oracle: Found) -> dict[str, float]:
    """`error_of` each tensor. A gradient has at least the size that is not NEGLIGIBLE."""
    gradients = [np.max(np.abs(x), initial=0.0) for tensor, x in oracle.items() if kind_of(tensor) == "gradient"]
    least = {"gradient": NEGLIGIBLE * float(max(gradients, default=0.0))}
    return {tensor: error_of(found.get(tensor), x, least.get(kind_of(tensor), 0.0)) for tensor, x in oracle.items()}


def same_bits(tree: Any, other: Any) -> bool:
    """Whether two trees of host arrays are equal, bit by bit."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


# ---- limits -------------------------------------------------------------------------------------------------------

SAMPLES = 3
"""Number of inputs from which the rounding on one device is known."""


def least_limit(tensor: str, c: Config) -> float:
    """Two roundings to the compute dtype, of which each may go the other way; for a tensor in f32, a part of that.

    Of weights, which an update hardly changes, and at least, eight roundings of f32: the order in which a product sums
    depends on the sizes of its blocks too.
    """
    rounding = float(jnp.finfo(COMPUTE_DTYPES[c.training.compute_dtype]).eps)
    return max({"gradient": 2 * rounding, "weight": 0.0}.get(kind_of(tensor), rounding / 32), 2.0**-20)


def limits_of(c: Config, alone: Step, inputs: Inputs, oracle: Found, band: float) -> dict[str, float]:
    """The limits in the configured dtypes: `band` times the largest rounding of a few steps on one device."""
    limits = {tensor: least_limit(tensor, c) for tensor in oracle}
    for sample in range(SAMPLES):
        other = make_inputs(c, inputs.state, inputs.batch, sample + 2, scale=0.1)
        rounding = errors_of(alone.tensors(other, is_double=False), alone.tensors(other, is_double=True))
        limits = {tensor: max(limit, band * rounding[tensor]) for tensor, limit in limits.items()}
    return limits


# ---- the run ------------------------------------------------------------------------------------------------------


def compare_meshes(
    c: Config, meshes: list[Mesh], precisions: list[str], tolerance: float, band: float, log: Callable[[str], None]
) -> tuple[dict[str, Outcome], list[str], str]:
    """Compares the step on each of `meshes` with that on one device.

    Args:
        c: the run's configuration.
        meshes: with the devices that there are.
        precisions: f64, configured, or both.
        tolerance: the largest relative error in f64 that is rounding.
        band: factor between the rounding on one device and the limit in the configured dtypes.
        log: prints a line on the progress.

    Returns:
        The outcome of each precision; where one of the meshes first computes another value, and what the proof finds in
        its step; the origin of the batch.
    """
    begin = time.monotonic()
    # Where moments are rounded to bf16, a rounding of f64 before that may show.
    of_f64 = dataclasses.replace(c, optimizer=dataclasses.replace(c.optimizer, state_dtype="f32"))
    configs = {precision: of_f64 if precision == "f64" else c for precision in precisions}
    with mesh_of(ONE_DEVICE):
        started, step = fresh_state(c), max(1, c.optimizer.warmup_steps)
        try:
            batch, loaded, data = loaded_batch(c, step), True, f"the run's data, step {step}"
        except (ValueError, OSError) as error:
            why = str(error).splitlines()[0].split(". ")[0]  # without its remedy: nothing has to be mended
            batch, loaded, data = random_batch(c), False, f"random tokens, not the run's data: {why}"
    inputs, oracles, outcomes = make_inputs(c, started, batch), {}, {}
    for precision, config in configs.items():
        is_double, alone = precision == "f64", Step(config, inputs)
        oracle = oracles[precision] = alone.tensors(inputs, is_double)
        if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
            raise ValueError(f"on one device the {bad[0]} is not finite already. Correct the step there first.")
        limits = dict.fromkeys(oracle, tolerance) if is_double else limits_of(c, alone, inputs, oracle, band)
        outcomes[precision] = Outcome(limits)
    log(f"one device: {time.monotonic() - begin:.0f} s")
    for sizes in meshes:
        begin, others = time.monotonic(), []
        with mesh_of(sizes):
            if not same_bits(fresh_state(c), started):
                others.append("its initial weights are not those of one device, bit by bit")
            if loaded and not same_bits(loaded_batch(c, step), batch):
                others.append("its batch is not that of one device, bit by bit")
        steps = {}
        for precision, config in configs.items():
            dtype = config.optimizer.state_dtype
            steps[dtype] = steps.get(dtype) or Step(config, inputs, sizes)
            found = steps[dtype].tensors(inputs, precision == "f64")
            outcomes[precision].meshes.append(MeshResult(sizes, errors_of(found, oracles[precision]), others))
        log(f"{mesh_name(sizes)}: {time.monotonic() - begin:.0f} s")
    wrong = next(filter(None, (outcome.wrong() for outcome in outcomes.values())), [])
    return outcomes, causes(of_f64, inputs, wrong[0], tolerance) if wrong else [], data


# ---- the report ---------------------------------------------------------------------------------------------------


def worst_of(outcome: Outcome) -> str:
    """`<difference> of <limit>` of the tensor that comes nearest to its limit, and the mesh on which it does."""
    pairs = [(tensor, result) for tensor in outcome.limits for result in outcome.meshes]
    tensor, result = max(pairs, key=lambda pair: pair[1].errors[pair[0]] / max(outcome.limits[pair[0]], 1e-300))
    error, limit = result.errors[tensor], outcome.limits[tensor]
    return f"{error:.1e} of {limit:.0e}" + f", the {tensor} on {mesh_name(result.sizes)}" * bool(error)


def show(outcome: Outcome, console: Console) -> bool:
    """Prints the differences, with a table by mesh and kind, or a line if there are none; True if there are none."""
    if not outcome.wrong():
        console.print(f"{len(outcome.limits)} tensors; nearest to its limit: {worst_of(outcome)}", soft_wrap=True)
        return True
    kinds = list(dict.fromkeys(map(kind_of, outcome.limits)))
    table = Table(title="Largest difference from one device, by mesh", title_justify="left")
    for column in ("mesh", *kinds, ""):
        table.add_column(column, justify="left" if column in ("mesh", "") else "right")
    for result in outcome.meshes:
        wrong = set(map(kind_of, outcome.failures(result)))
        worst = {k: max((e for t, e in result.errors.items() if kind_of(t) == k), default=0.0) for k in kinds}
        cells = [f"{worst[k]:.1e}" + "!" * (k in wrong) for k in kinds]
        table.add_row(mesh_name(result.sizes), *cells, "DIFFERS" if wrong or result.others else "ok")
    console.print(table)
    for result in outcome.meshes:
        failures = outcome.failures(result)
        first = [
            f"the first tensor that differs is the {tensor}, by {result.errors[tensor]:.1e} (limit "
            f"{outcome.limits[tensor]:.0e}); {len(failures)} of {len(result.errors)} tensors differ."
            for tensor in failures[:1]
        ]
        for text in result.others + first:
            text = for_console(f"DIFFERS on {mesh_name(result.sizes)}: {text}", console)
            console.print(text, soft_wrap=True, markup=False)
    return False
