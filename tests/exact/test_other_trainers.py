"""Bugs of public JAX libraries in their smallest form (docs/other-trainers.md)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardlib.exact import check
from shardlib.parsing import ShardError


def chunks(ids):
    """The ids, read in two chunks, but at positions of the whole sequence."""
    n = ids.shape[0] // 2
    first = lax.axis_index("t") * 2 * n
    return jnp.concatenate([lax.dynamic_slice_in_dim(ids, first + i * n, n) for i in range(2)])


def dropped(x):
    """Dropout by the same key on each device."""
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.7, x.shape), x, 0)


def log_sum_exp(x):
    """NaN if a block is −∞ alone. With `top` in place of `own` it needs no factor and is right."""
    own, top = x.max(), lax.pmax(x.max(), "t")
    return top + jnp.log(lax.psum(jnp.exp(x - own).sum() * jnp.exp(own - top), "t"))


BUGS = chunks, dropped, log_sum_exp


@pytest.mark.parametrize("body", BUGS)
def test_the_bugs_in_their_smallest_form(body):
    """Each differs on four devices."""
    specs: dict[str, Any] = {
        "in_specs": P("t"),
        "out_specs": P() if body is log_sum_exp else P("t"),
    }
    x = jnp.where(jnp.arange(16) < 12, jnp.arange(16.0), -jnp.inf if body is log_sum_exp else 20.0)
    mesh = AbstractMesh((4,), ("t",), axis_types=(AxisType.Auto,))
    with pytest.raises(ShardError, match=r"test_other_trainers.py:\d+: (?s:.*)\nwrong: "):
        check(body, x, mesh=mesh, check_vma=False, **specs)
    found = []
    for n in (4, 1):
        mesh = jax.make_mesh((n,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
        found.append(
            np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **specs))(x))
        )
    assert np.isfinite(found[1]).all()
    assert not np.allclose(*found)
