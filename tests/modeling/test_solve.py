"""Triangular systems of the delta rule, against numpy in f64."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardwright.cluster.devices import make_mesh
from shardwright.jax_extra import solve_unit_lower


def triangles(generator, *shape):
    return np.tril(generator.normal(size=shape) / shape[-1] ** 0.5, -1) + np.eye(shape[-1])


@pytest.mark.parametrize("shape", [(1,), (2, 3, 7), (4, 64), (48,)])
@pytest.mark.parametrize("ones", [False, True])
def test_it_solves_unit_triangles(shape, ones):
    """Ones below the diagonal too, as equal keys give: powers of such a matrix are up to 1e18."""
    generator = np.random.default_rng(0)
    a = np.tril(np.ones((*shape, shape[-1]))) if ones else triangles(generator, *shape, shape[-1])
    x = generator.normal(size=(*shape, 5))
    assert np.allclose(
        solve_unit_lower(np.float32(a), np.float32(x)), np.linalg.solve(a, x), rtol=1e-5, atol=1e-5
    )


def test_many_devices_solve_many_at_once():
    """LAPACK does not end here: eight devices hold the threads that its batches wait for."""
    mesh = make_mesh(jax.devices(), d=8)
    generator = np.random.default_rng(0)
    a, x = triangles(generator, 2048, 64, 64), generator.normal(size=(2048, 64, 4))
    with jax.set_mesh(mesh):
        solve = jax.jit(
            jax.shard_map(
                solve_unit_lower, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
            )
        )
        given = [
            jax.device_put(np.float32(y), jax.NamedSharding(mesh, PartitionSpec("d")))
            for y in (a, x)
        ]
        assert np.allclose(solve(*given), np.linalg.solve(a, x), rtol=1e-4, atol=1e-4)
