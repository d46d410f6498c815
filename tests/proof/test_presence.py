"""Programs on a mesh with an axis of one device, against those on a mesh without it: shardlib/proof/sameness.py."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardlib.proof.sameness import differences

pytestmark = pytest.mark.quick
SHAPES = [jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)]


def traced(function, axes: str):
    mesh = AbstractMesh((1,) * len(axes), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    none = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(mesh):
        run = lambda *args: jax.shard_map(function, in_specs=(P(), P()), out_specs=P(), check_vma=False)(*args)
        return jax.make_jaxpr(run)(*SHAPES)


def found(one, other) -> list[str]:
    return list(differences(traced(one, "dc"), traced(other, "d"), ("this mesh", "one device"), "remove it"))


def sums(turn, reverse=False):
    """The rows of x and y through turn(sum, row of x, row of y)."""
    step = lambda sum, rows: (turn(sum, *rows), sum)
    return lambda x, y: lax.scan(step, jnp.zeros(4), (x, y), reverse=reverse)[1]


def twice(inner):
    """inner(row of x in the outer loop, row of x in the inner one), summed over both loops."""
    rows = lambda x, outer: lax.scan(lambda sum, row: (sum + inner(outer, row), None), jnp.zeros(4), x)[0]
    return lambda x, y: lax.scan(lambda sum, row: (sum + rows(x, row), None), jnp.zeros(4), x)[0]


def until(limit):
    return lambda x, y: lax.while_loop(lambda state: state[0] < limit, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]


DIFFERENT = {
    "a number": (lambda x, y: x * 2.0, lambda x, y: x * 3.0),
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "a slice": (lambda x, y: x[:2], lambda x, y: x[1:3]),
    "a transpose": (lambda x, y: x + y.T, lambda x, y: x + y),
    "a product": (lambda x, y: x @ y, lambda x, y: y @ x),
    "a product of a transpose": (lambda x, y: x @ y.T, lambda x, y: x @ y),
    "a sum's dim": (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    "a reshape": (lambda x, y: x.reshape(2, 8).T, lambda x, y: x.reshape(8, 2)),
    "a dtype": (lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32), lambda x, y: x),
    "the order of a scan": (sums(lambda s, a, b: s + a), sums(lambda s, a, b: s + a, reverse=True)),
    "the rows of a scan": (sums(lambda s, a, b: s * a + b), sums(lambda s, a, b: s * b + a)),
    "rows of two loops": (twice(lambda a, b: a - b), twice(lambda a, b: b - a)),
    "a loop's end": (until(3), until(4)),
    "a branch": (
        lambda x, y: lax.cond(x[0, 0] > 0, lambda: x, lambda: y),
        lambda x, y: lax.cond(x[0, 0] > 0, lambda: y, lambda: x),
    ),
    "a permute of nothing": (lambda x, y: lax.ppermute(x, "c", []), lambda x, y: x),
    "a sum of an array with itself": (lambda x, y: x + lax.psum(x, "c"), lambda x, y: x),
}
SAME = {
    "collectives": (lambda x, y: lax.all_gather(lax.psum(x, "c"), "c", axis=1, tiled=True), lambda x, y: x),
    "its own block": (lambda x, y: lax.dynamic_slice_in_dim(x, lax.axis_index("c") * 4, 4), lambda x, y: x),
    "products in another order": (lambda x, y: jnp.einsum("ij,jk->ki", x, y), lambda x, y: (x @ y).T),
    "moved before or after": (lambda x, y: jnp.sin(x.T).T * 2, lambda x, y: jnp.sin(x) * 2),
    "a scan": (sums(lambda s, a, b: s + lax.psum(a, "c") * b), sums(lambda s, a, b: s + a * b)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_programs_differ(name):
    (text,) = found(*DIFFERENT[name])
    assert text.endswith("remedy: remove it")


@pytest.mark.parametrize("name", SAME)
def test_the_same_program_without_an_axis_is_the_same(name):
    assert found(*SAME[name]) == []
