"""Kernels and primitives without rules: refused by name, and with a reference checked as that."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from shardlib.exact import check, reference
from shardlib.parsing import ShardError

MESH = AbstractMesh((2, 4), ("d", "t"))
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
ROWS, BLOCKS = P("d"), P("d", "t")


def center_in_place(x, out):
    out[...] = x[...] - x[...].mean(-1, keepdims=True)


def center_on_host(x):
    return x - x.mean(-1, keepdims=True)


def by_pallas(x):
    return pl.pallas_call(
        center_in_place, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


def by_callback(x):
    return jax.pure_callback(center_on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


centered = Primitive("centered")
centered.def_abstract_eval(lambda x, *, dim: x)


def by_primitive(x):
    return centered.bind(x, dim=1)


def center(x, dim=1):
    return x - x.mean(dim, keepdims=True)


KERNELS = {
    "center_in_place": by_pallas,
    "center_on_host": by_callback,
    "centered": by_primitive,
}


def specs(spec):
    return {"in_specs": spec, "out_specs": spec, "check_vma": False}


@pytest.mark.parametrize("name", KERNELS)
def test_what_has_no_rule_is_checked_as_its_reference(name):
    kernel = KERNELS[name]
    message = (
        rf"test_references.py:\d+: \w+: .* no rule for {name}: .*exact.reference\('{name}', "
        rf"function\)`\nnot decided"
    )
    with pytest.raises(ShardError, match=message):
        check(kernel, X, mesh=MESH, **specs(ROWS))
    with reference(name, center):
        check(kernel, X, mesh=MESH, **specs(ROWS))
        with pytest.raises(ShardError, match=r"\nwrong: "):
            check(kernel, X, mesh=MESH, **specs(BLOCKS))
    with pytest.raises(ShardError, match="no rule"):
        check(kernel, X, mesh=MESH, **specs(ROWS))


def test_a_function_with_a_partitioning_of_its_own_is_looked_into():
    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(None, None, sharding_rule="i j -> i j")
    check(double, X, mesh=MESH, **specs(BLOCKS))
    with pytest.raises(ShardError, match=r"\nwrong: "):
        check(lambda x: jax.lax.psum(double(x), "t"), X, mesh=MESH, **specs(BLOCKS))
