"""shardlib alone, with the axes of another trainer, or with none registered."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import jax, jax.numpy as jnp, sys
from shardlib import shardops
from shardlib.axes import register_axes
from shardlib.parsing import ShardError
from shardlib.shardtypes import f32, typed_shard_map

def squares(sharding):
    rows = f"B/{sharding}"

    @typed_shard_map
    def squares(x: f32[f"{rows} F/model"]) -> f32[rows]:
        formula = f"{rows} F/model, {rows} F/model -> {rows} +model"
        parts = shardops.einsum_unreduced(formula, x, x)
        return shardops.psum(f"{rows} +model -> {rows}", parts)

    return bool((squares(x) == (x**2).sum(1)).all())

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
x = jnp.arange(16.0).reshape(4, 4)
with jax.set_mesh(mesh):
    print(squares("data"))
    register_axes(("model", "data", "replica"), groups={"batch": ("data", "replica")})
    print(squares("data/replica"), squares("batch"))
    try:
        squares("replica/data")
    except ShardError as error:
        print(error)
assert not any(name.startswith("shardwright") for name in sys.modules)
"""


def test_axes_of_another_trainer():
    """Those that nobody registered follow the alphabet; a registered one may be absent."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unregistered, registered, wrong, *_ = done.stdout.splitlines()
    assert (unregistered, registered) == ("True", "True True")
    assert "dim B/replica/data has its axes in the wrong order" in wrong
