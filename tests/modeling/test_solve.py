"""Triangular systems of the delta rule, against numpy in f64."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardwright.cluster.devices import make_mesh
from shardwright.jax_extra import solve_unit_lower


@pytest.mark.parametrize(
    ("shape", "ones"), [((1,), False), ((2, 3, 7), False), ((4, 64), True), ((48,), True)]
)
def test_it_solves_unit_triangles(shape, ones):
    """Ones below the diagonal too, as equal keys give: powers of such a matrix are up to 1e18."""
    generator = np.random.default_rng(0)
    square = (*shape, shape[-1])
    below = np.ones(square) if ones else generator.normal(size=square) / shape[-1] ** 0.5
    a, x = np.tril(below, -1) + np.eye(shape[-1]), generator.normal(size=(*shape, 5))
    found = solve_unit_lower(np.float32(a), np.float32(x))
    np.testing.assert_allclose(found, np.linalg.solve(a, x), rtol=1e-5, atol=1e-5)


def test_many_devices_solve_many_at_once():
    """LAPACK does not end here: eight devices hold the threads that its batches wait for."""
    generator, spec = np.random.default_rng(0), PartitionSpec("d")
    a = np.tril(generator.normal(size=(2048, 64, 64)) / 8, -1) + np.eye(64)
    x = generator.normal(size=(2048, 64, 4))
    with jax.set_mesh(make_mesh(jax.devices(), d=8)):
        solve = jax.jit(jax.shard_map(solve_unit_lower, in_specs=spec, out_specs=spec))
        found = solve(*(jax.device_put(np.float32(y), spec) for y in (a, x)))
    np.testing.assert_allclose(found, np.linalg.solve(a, x), rtol=1e-4, atol=1e-4)
