"""shardlib alone, with the axes of another trainer, or with none registered."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

PROGRAM = """
import jax, jax.numpy as jnp, sys
from shardlib import shardops
from shardlib.axes import register_axes
from shardlib.parsing import ShardError
from shardlib.shardtypes import f32, typed_shard_map

REGISTER

def squares(sharding):
    @typed_shard_map
    def squares(x: f32[f"B/{sharding} F/model"]) -> f32[f"B/{sharding}"]:
        parts = shardops.einsum_unreduced(f"B/{sharding} F/model, B/{sharding} F/model -> B/{sharding} +model", x, x)
        return shardops.psum(f"B/{sharding} +model -> B/{sharding}", parts)
    return squares

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
x = jnp.arange(16.0).reshape(4, 4)
with jax.set_mesh(mesh):
    for sharding in sys.argv[1:]:
        try:
            print(bool((squares(sharding)(x) == (x**2).sum(1)).all()))
        except ShardError as error:
            print(str(error).splitlines()[0])
assert not any(name.startswith("shardwright") for name in sys.modules)
"""


def printed(register: str, *shardings: str) -> list[str]:
    program = PROGRAM.replace("REGISTER", register)
    command = [sys.executable, "-c", program, *shardings]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_axes_that_nobody_registered_follow_the_alphabet():
    assert printed("", "data") == ["True"]


def test_a_registered_axis_may_be_absent_and_the_order_is_that_of_the_register():
    register = 'register_axes(("model", "data", "replica"), groups={"batch": ("data", "replica")})'
    ordered, grouped, wrong = printed(register, "data/replica", "batch", "replica/data")
    assert (ordered, grouped) == ("True", "True")
    assert "dim B/replica/data has its axes in the wrong order" in wrong
