"""The hash of all equations of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from shardlib.interpret import digest_of

pytestmark = pytest.mark.quick
X = np.linspace(0.5, 2.0, 12, dtype=np.float32).reshape(3, 4)


def of_rows(index):
    """A Pallas program that copies rows as `index` says."""
    rows = pl.BlockSpec((1, 4), index)
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)

    def kernel(x, out):
        out[...] = x[...]

    return pl.pallas_call(kernel, out_shape=shape, grid=(3,), in_specs=[rows], out_specs=rows)


def test_a_digest_tells_programs_apart_and_not_where_they_are_written():
    def digest(f, *args):
        return digest_of(jax.make_jaxpr(f)(*args))

    table = np.arange(4.0, dtype=np.float32)
    same = lambda x: jnp.sin(x) + table  # noqa: E731
    others = [
        lambda x: jnp.cos(x) + table,
        lambda x: jnp.sin(x) + table[::-1].copy(),
        lambda x: jnp.sin(x) - table,
        lambda x: jnp.sin(x + table),
        lambda x: jnp.sum(jnp.sin(x) + table, 0),
        lambda x: lax.scan(lambda c, row: (c, jnp.sin(row) + table), 0.0, x)[1],
        lambda x: lax.scan(lambda c, row: (c, jnp.cos(row) + table), 0.0, x)[1],
        of_rows(lambda i: (i, 0)),
        of_rows(lambda i: (2 - i, 0)),
    ]
    assert digest(same, X) == digest(lambda y: jnp.sin(y) + np.arange(4.0, dtype=np.float32), X)
    assert digest(others[-2], X) == digest(of_rows(lambda turn: (turn, 0)), X)
    assert len({digest(f, X) for f in [same, *others]}) == len(others) + 1
    assert digest(same, X) != digest(same, X.astype(np.float16))


HOLDS = {
    "the program": lambda x, held: x + held,
    "scan": lambda x, held: lax.scan(lambda c, _: (c + held, None), x, None, length=3)[0],
    "shard_map": lambda x, held: jax.shard_map(lambda x: x + held, in_specs=P(), out_specs=P())(x),
}


@pytest.mark.parametrize("where", HOLDS)
def test_a_digest_has_every_digit_of_every_number_that_a_program_holds(where):
    """In an array of 9,999 entries too, and in a float64, of which numpy shows eight digits."""
    arrays = [np.linspace(0.0, 1.0, 9999) for _ in range(2)]
    arrays[1][5000] = np.nextafter(arrays[1][5000], 2)
    numbers = [np.float64(0.1), np.nextafter(np.float64(0.1), 1)]
    with jax.enable_x64(True), jax.set_mesh(jax.make_mesh((1,), ("d",))):
        for pair in (arrays, numbers):
            a, b = (
                jax.make_jaxpr(lambda x, held=held: HOLDS[where](x, held))(jnp.zeros(9999))
                for held in pair
            )
            assert digest_of(a) != digest_of(b)
