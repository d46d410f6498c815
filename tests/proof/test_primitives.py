"""Primitives that the proof knows by their row in shardlib.dims alone: along which dims they may be sharded."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from shardlib.parsing import ShardError
from shardlib.proof.check import check

MESH = AbstractMesh((2, 4), ("d", "t"))
ROWS, BOTH, NONE = P("d"), P("d", "t"), P()


def conv(groups):
    return lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=groups)


def mean_pool(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID")


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


def of_partial(function):
    """A function of a matmul whose contracted dim is sharded, summed afterwards."""
    return lambda x, w: lax.psum(function(x @ w), "t")


def pulled_back(x, w):
    """The gradient of a pool for a cotangent that is a partial sum."""
    return lax.psum(jax.vjp(max_pool, jnp.sin(jnp.arange(8.0)) + jnp.zeros((len(x), 8)))[1]((x @ w)[:, ::2])[0], "t")


def two_sums(x):
    return lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))


def of_gamma(x):
    return jax.vmap(jax.grad(lambda a: lax.igamma(a, 0.5)))(x[:, 0])


def householder(x):
    return lax.linalg.householder_product(x, x[:, 0])[:, 0]


def subtracted(x, y):
    return x.at[:, jnp.array([2, 0])].subtract(y)


def channels_alone(x):
    """Of a convolution in as many groups as channels, whose filters are all alike: as many here as on one device."""
    numbers = ("NWC", "WIO", "NWC")
    k = jnp.ones((3, 1, 2))
    options = {"dimension_numbers": numbers, "feature_group_count": x.shape[-1]}
    return lax.psum(lax.conv_general_dilated(x, k, (1,), "SAME", **options).sum(-1), "d")


def whole_block(x):
    """Writes a window of 4 rows, which are all that a device has."""
    numbers = lax.ScatterDimensionNumbers((0, 1), (), (1,))
    return lax.scatter(x, jnp.array([0]), jnp.full((4, 1), 5.0), numbers)


def filled(value):
    return lambda x: x.at[:, jnp.array([0, 9, 2])].get(mode="fill", fill_value=value)


def widened(x, w):
    return lax.psum(lax.dot(jnp.sum(x, 0, dtype=x.dtype)[None], w, preferred_element_type=jnp.int32), "d")


SEQUENCES, IMAGE = (8, 4, 16), (8, 16)
SQUARES, PRODUCT = (8, 8, 8), [(BOTH, (8, 16)), (P("t"), (16, 8))]
CASES = {  # a function, how its arguments are sharded with their shapes, and its result, and what is wrong
    "convolution in groups": (conv(2), [(ROWS, SEQUENCES), (NONE, (6, 2, 2))], ROWS, None),
    "its channels": (conv(2), [(P(None, "d"), (8, 8, 16)), (P(None, "d"), (6, 4, 2))], NONE, "along dim 1"),
    "kernel of size 1": (conv(1), [(P("d", None, "t"), SEQUENCES), (NONE, (6, 4, 1))], P("d", None, "t"), None),
    "kernel of size 2": (
        conv(1),
        [(P("d", None, "t"), SEQUENCES), (NONE, (6, 4, 2))],
        P("d", None, "t"),
        "along dim 2",
    ),
    "fft": (lambda x: jnp.fft.rfft(x).real, [(ROWS, IMAGE)], ROWS, None),
    "fft along a sharded dim": (
        lambda x: jnp.fft.fft(x).real,
        [(BOTH, IMAGE)],
        BOTH,
        "fft_lengths depends on the mesh",
    ),
    "fft of a partial sum": (of_partial(lambda x: jnp.fft.rfft(x).real), PRODUCT, ROWS, None),
    "pool of a partial sum": (of_partial(mean_pool), PRODUCT, ROWS, None),
    "maximum of a partial sum": (of_partial(max_pool), PRODUCT, ROWS, "partial sum"),
    "gradient of a pool": (pulled_back, PRODUCT, ROWS, None),
    "reduce": (two_sums, [(ROWS, IMAGE)], (ROWS, ROWS), None),
    "reduce along a sharded dim": (two_sums, [(BOTH, IMAGE)], (ROWS, ROWS), "along dim 1"),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x)[0], [(ROWS, SQUARES)], ROWS, None),
    "householder_product": (householder, [(ROWS, SQUARES)], ROWS, None),
    "columns of a matrix": (householder, [(P("d", None, "t"), SQUARES)], ROWS, "along dim 2"),
    "derivative of igamma": (of_gamma, [(ROWS, IMAGE)], ROWS, None),
    "keys": (lambda x: jax.random.key_data(jax.random.wrap_key_data(x)), [(ROWS, (8, 2))], ROWS, None),
    "clones": (jax.random.clone, [(ROWS, (8,))], ROWS, None),
    "subtracted": (subtracted, [(ROWS, IMAGE), (ROWS, (8, 2))], ROWS, None),
    "one channel of each device": (channels_alone, [(P(None, None, "d"), (2, 6, 2))], NONE, "along dim 2"),
    "a window of a block": (whole_block, [(ROWS, (8, 4))], ROWS, "a part is written"),
    "filled in, of a partial sum": (of_partial(filled(5.0)), PRODUCT, ROWS, "partial sum"),
    "0 filled in, of a partial sum": (of_partial(filled(0.0)), PRODUCT, ROWS, None),
    "NaN filled in, of a partial sum": (of_partial(filled(None)), PRODUCT, ROWS, None),
    "sums of 8 bits in a matmul of 32": (widened, [(ROWS, IMAGE), (NONE, (16, 4))], NONE, "partial sum"),
    "subtracted along a sharded dim": (subtracted, [(BOTH, IMAGE), (ROWS, (8, 2))], BOTH, "16 on one device"),
}
DTYPES = {"keys": jnp.uint32, "clones": jax.random.key(0).dtype}
DTYPES |= {"sums of 8 bits in a matmul of 32": jnp.int8}


@pytest.mark.parametrize("case", CASES)
def test_which_dims_may_be_sharded(case):
    function, args, out, problem = CASES[case]
    shapes = [jax.ShapeDtypeStruct(shape, DTYPES.get(case, jnp.float32)) for _, shape in args]
    specs = {"in_specs": tuple(spec for spec, _ in args), "out_specs": out, "check_vma": False}
    if problem is None:
        return check(function, *shapes, mesh=MESH, **specs)
    with pytest.raises(ShardError, match=problem):
        check(function, *shapes, mesh=MESH, **specs)
