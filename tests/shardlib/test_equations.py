"""The table of primitives names those of JAX, and its kinds say what they compute.

Their dims are in test_dims.py.
"""

import collections
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from shardlib import equations
from tests.support.primitive_calls import call_of

pytestmark = pytest.mark.quick


def test_the_table_names_primitives_of_jax_each_once():
    jax.nn.gelu(jnp.zeros(1))  # some primitives are made where they are first used
    known = {x.name for x in gc.get_objects() if issubclass(type(x), core.Primitive)}
    counts = collections.Counter(
        name for names in equations._KINDS.values() for name in names.split()
    )
    if jax.__version__.startswith("0.10."):  # whose names they are; a newer one has dropped some
        assert counts.keys() - known <= {"one_minus_square"}
    assert max(counts.values()) == 1, counts.most_common(3)


def names_of(*kinds):
    return sorted(name for kind in kinds for name in equations._KINDS[kind].split())


@pytest.mark.parametrize("name", names_of("linear", "addition"))
def test_a_linear_one_is_linear(name):
    call, operands = call_of(name)
    others = [np.flip(x) for x in operands]
    sums = [x + y for x, y in zip(operands, others, strict=True)]
    a, b, both = (np.asarray(call(*xs)[0]) for xs in (operands, others, sums))
    # Rounding: reduce_precision and a cast to f16 keep ten bits of the mantissa.
    np.testing.assert_allclose(both, a + b, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("name", names_of("view"))
def test_a_view_has_the_entries_of_its_operand(name):
    call, (x,) = call_of(name)
    assert {*np.asarray(call(x)[0]).ravel().tolist()} == {*x.ravel().tolist()}
