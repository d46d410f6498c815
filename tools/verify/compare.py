"""Compares the step on each mesh with that on one device, in f64, and says what differs."""

import math
from collections.abc import Callable

import numpy as np

from shardwright.run.config import Config
from tools.verify.first_difference import TOLERANCE, causes
from tools.verify.inputs import make_inputs
from tools.verify.meshes import ONE_DEVICE, Mesh, mesh_name, mesh_of
from tools.verify.step import Found, fresh_state, tensors_of_step

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


def compare_meshes(c: Config, meshes: list[Mesh], log: Callable[[str], None]) -> tuple[str, list[str]]:
    """Compares the step on each of `meshes` with that on one device.

    Args:
        c: the run's configuration.
        meshes: with the devices that there are.
        log: prints the name of the mesh that comes next.

    Returns:
        A line on the largest difference, and lines on the meshes that differ; at last where one of them first computes
        another value, and what the proof finds in its step. None if all agree.
    """
    with mesh_of(ONE_DEVICE):
        inputs = make_inputs(c, fresh_state(c))
    oracle, largest, lines, wrong = tensors_of_step(c, inputs, ONE_DEVICE), (-1.0, ""), [], []
    if bad := [tensor for tensor, value in oracle.items() if not np.all(np.isfinite(value))]:
        raise ValueError(f"on one device the {bad[0]} is not finite already. Correct the step there first.")
    for sizes in meshes:
        log(mesh_name(sizes))
        errors = errors_of(tensors_of_step(c, inputs, sizes), oracle)
        tensor = max(errors, key=errors.get)
        largest = max(largest, (errors[tensor], f"{tensor} on {mesh_name(sizes)}"))
        if failures := [tensor for tensor, error in errors.items() if error > TOLERANCE]:
            wrong.append(sizes)
            lines.append(
                f"DIFFERS on {mesh_name(sizes)}: the first tensor that differs is the {failures[0]}, by "
                f"{errors[failures[0]]:.1e} (limit {TOLERANCE:.0e}); {len(failures)} of {len(errors)} tensors differ."
            )
    # Nothing within the schedule of stages can be compared. Where devices have one entry each, a trace may differ.
    if wrong:
        lines += causes(c, inputs, min(wrong, key=lambda sizes: (sizes["p"], max(sizes.values()))))
    return f"{len(oracle)} tensors; the largest difference is {largest[0]:.1e}, of the {largest[1]}", lines
