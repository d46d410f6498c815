"""assert_sound for plain JAX programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardlib.shardtypes import ShardError
from shardlib.testing import assert_sound
from tests.support import examples

pytestmark = pytest.mark.quick

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)
SPECS = {"in_specs": (P("data", "model"), P("model")), "out_specs": P("data")}
MESHES = ["data=4 model=1", "data=2 model=2"]


def project(x, w):
    return lax.psum(x @ w, "model")


def mean(x, w):
    return project(x, w) / lax.axis_size("model")


def test_a_right_program_passes_on_each_mesh():
    def step(x, w):
        return jnp.sum(jax.shard_map(project, **SPECS)(x, w))

    assert_sound(project, X, W, meshes=MESHES, **SPECS)
    assert_sound(step, X, W, meshes=MESHES[1:])


def test_a_wrong_one_fails_with_its_mesh_and_line():
    line = mean.__code__.co_firstlineno + 1
    message = rf"^on the mesh data=2 model=2: \S*test_testing.py:{line}: .*: 2(.0)? here"
    with pytest.raises(ShardError, match=message):
        assert_sound(mean, X, W, meshes=MESHES, **SPECS)


def test_its_example():
    names = {"assert_sound": assert_sound, "jax": jax, "jnp": jnp, "lax": lax, "P": P}
    assert examples.run("assert_sound", assert_sound.__doc__, names) == 3


@pytest.mark.parametrize("mesh", ["", "data", "data=0", "data=2,model=2", "2x2"])
def test_what_is_no_mesh(mesh):
    with pytest.raises(ValueError, match=r"the mesh is .*; give the number of devices along each"):
        assert_sound(project, X, W, meshes=[mesh], **SPECS)


@pytest.mark.parametrize("meshes", [[], ["data=1 model=1"]])
def test_a_check_without_several_devices_is_none(meshes):
    with pytest.raises(ValueError, match="none with several devices, so nothing would be checked"):
        assert_sound(mean, X, W, meshes=meshes, **SPECS)
