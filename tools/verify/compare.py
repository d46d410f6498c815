"""Compares the step on each mesh with that on one device, in f64, and says what differs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardwright.run.config import Config
from tools.verify.first_difference import causes
from tools.verify.inputs import make_inputs
from tools.verify.meshes import ONE_DEVICE, Mesh, mesh_name, mesh_of
from tools.verify.step import Found, fresh_state, tensors_of_step


@dataclasses.dataclass
class MeshResult:
    """Differences between one mesh and one device.

    Attributes:
        sizes: of the mesh.
        errors: `error_of` each tensor, in program order.
        is_same_start: whether its initial weights are those of one device, bit by bit.
    """

    sizes: Mesh
    errors: dict[str, float]
    is_same_start: bool

    def failures(self, tolerance: float) -> list[str]:
        """The tensors whose difference is above the tolerance."""
        return [tensor for tensor, error in self.errors.items() if error > tolerance]


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


def same_bits(tree: Any, other: Any) -> bool:
    """Whether two trees of host arrays are equal, bit by bit."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def compare_meshes(
    c: Config, meshes: list[Mesh], tolerance: float, log: Callable[[str], None]
) -> tuple[list[MeshResult], list[str]]:
    """Compares the step on each of `meshes` with that on one device.

    Args:
        c: the run's configuration.
        meshes: with the devices that there are.
        tolerance: the largest relative error that is rounding.
        log: prints the name of the mesh that comes next.

    Returns:
        The result of each mesh; and where one of the meshes first computes another value, and what the proof finds in
        its step.
    """
    # Where moments are rounded to bf16, a rounding of f64 before that may show.
    c = dataclasses.replace(c, optimizer=dataclasses.replace(c.optimizer, state_dtype="f32"))
    with mesh_of(ONE_DEVICE):
        started = fresh_state(c)
    inputs, results = make_inputs(c, started), []
    oracle = tensors_of_step(c, inputs, ONE_DEVICE)
    if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
        raise ValueError(f"on one device the {bad[0]} is not finite already. Correct the step there first.")
    for sizes in meshes:
        log(mesh_name(sizes))
        with mesh_of(sizes):
            is_same_start = same_bits(fresh_state(c), started)
        results.append(MeshResult(sizes, errors_of(tensors_of_step(c, inputs, sizes), oracle), is_same_start))
    wrong = [result.sizes for result in results if not result.is_same_start or result.failures(tolerance)]
    # Nothing within the schedule of stages can be compared. Where devices have one entry each, a trace may differ.
    best = min(wrong, key=lambda sizes: (sizes["p"], max(sizes.values())), default=None)
    return results, causes(c, inputs, best, tolerance) if best else []


def differences(results: list[MeshResult], tolerance: float) -> list[str]:
    """Lines on the meshes that differ from one device."""
    lines = []
    for result in results:
        failures, on = result.failures(tolerance), f"DIFFERS on {mesh_name(result.sizes)}: "
        if not result.is_same_start:
            lines.append(f"{on}its initial weights are not those of one device, bit by bit")
        if failures:
            lines.append(
                f"{on}the first tensor that differs is the {failures[0]}, by {result.errors[failures[0]]:.1e} (limit "
                f"{tolerance:.0e}); {len(failures)} of {len(result.errors)} tensors differ."
            )
    return lines


def largest_difference(results: list[MeshResult]) -> str:
    """The number of tensors, and the one that differs most, with its mesh."""
    pairs = [(error, tensor, result.sizes) for result in results for tensor, error in result.errors.items()]
    error, tensor, sizes = max(pairs, key=lambda pair: pair[0])
    which = f"{error:.1e}, of the {tensor} on {mesh_name(sizes)}"
    return f"{len(results[0].errors)} tensors; the largest difference is {which}"
