"""Compares the step on each mesh with that on one device, in f64, and says what differs."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from shardwright.run.config import Config
from tools.verify.first_difference import TOLERANCE, causes
from tools.verify.inputs import make_inputs
from tools.verify.meshes import ONE_DEVICE, Mesh, mesh_name, mesh_of
from tools.verify.step import Found, fresh_state, tensors_of_step


@dataclasses.dataclass
class MeshResult:
    """Differences between one mesh and one device.

    Attributes:
        sizes: of the mesh.
        errors: `error_of` each tensor, in program order.
    """

    sizes: Mesh
    errors: dict[str, float]

    @property
    def failures(self) -> list[str]:
        """The tensors that differ by more than rounding."""
        return [tensor for tensor, error in self.errors.items() if error > TOLERANCE]


NEGLIGIBLE = 1e-4
"""Least size of a gradient, as a share of the largest gradient, for its relative error. A gradient that is 0 but for
rounding, as that of a bias on keys, has no size of its own."""


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
    gradients = [tensor for tensor in oracle if tensor.startswith("gradient ")]
    least = NEGLIGIBLE * float(max((np.max(np.abs(oracle[x]), initial=0.0) for x in gradients), default=0.0))
    return {tensor: error_of(found.get(tensor), x, least * (tensor in gradients)) for tensor, x in oracle.items()}


def compare_meshes(c: Config, meshes: list[Mesh], log: Callable[[str], None]) -> tuple[list[MeshResult], list[str]]:
    """Compares the step on each of `meshes` with that on one device.

    Args:
        c: the run's configuration.
        meshes: with the devices that there are.
        log: prints the name of the mesh that comes next.

    Returns:
        The result of each mesh; and where one of the meshes first computes another value, and what the proof finds in
        its step.
    """
    with mesh_of(ONE_DEVICE):
        inputs = make_inputs(c, fresh_state(c))
    oracle, results = tensors_of_step(c, inputs, ONE_DEVICE), []
    if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
        raise ValueError(f"on one device the {bad[0]} is not finite already. Correct the step there first.")
    for sizes in meshes:
        log(mesh_name(sizes))
        results.append(MeshResult(sizes, errors_of(tensors_of_step(c, inputs, sizes), oracle)))
    wrong = [result.sizes for result in results if result.failures]
    # Nothing within the schedule of stages can be compared. Where devices have one entry each, a trace may differ.
    best = min(wrong, key=lambda sizes: (sizes["p"], max(sizes.values())), default=None)
    return results, causes(c, inputs, best) if best else []


def differences(results: list[MeshResult]) -> list[str]:
    """Lines on the meshes that differ from one device."""
    return [
        f"DIFFERS on {mesh_name(result.sizes)}: the first tensor that differs is the {result.failures[0]}, by "
        f"{result.errors[result.failures[0]]:.1e} (limit {TOLERANCE:.0e}); {len(result.failures)} of "
        f"{len(result.errors)} tensors differ."
        for result in results
        if result.failures
    ]


def largest_difference(results: list[MeshResult]) -> str:
    """The number of tensors, and the one that differs most, with its mesh."""
    pairs = [(error, tensor, result.sizes) for result in results for tensor, error in result.errors.items()]
    error, tensor, sizes = max(pairs, key=lambda pair: pair[0])
    which = f"{error:.1e}, of the {tensor} on {mesh_name(sizes)}"
    return f"{len(results[0].errors)} tensors; the largest difference is {which}"
