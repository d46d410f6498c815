"""Programs for sequences of two lengths, of which the proof of causality reads the shorter one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.proof.lengths import compared

pytestmark = pytest.mark.quick

OPERANDS = {
    "one for each block": lambda x: jnp.concatenate([x[:1]] * (len(x) // 8)),
    "an array for each block": lambda x: x + sum(np.arange(len(x)) * k for k in range(len(x) // 8)),
}
CONSTANTS = np.arange(3.0), np.arange(4.0)


@pytest.mark.parametrize("program", OPERANDS.values(), ids=OPERANDS)
def test_programs_with_other_numbers_of_operands_differ(program):
    longer, shorter = (jax.make_jaxpr(program)(jnp.zeros(length)) for length in (64, 32))
    assert compared(longer, longer, 64, 64)[0] == ""
    differs, unknown, _ = compared(longer, shorter, 64, 32)
    print(differs, unknown)
    assert differs.endswith("concatenate") or unknown


def test_programs_with_other_numbers_of_arrays_differ():
    longer, shorter = (jax.make_jaxpr(lambda x, n=n: [x * c for c in CONSTANTS[:n]])(2.0) for n in (2, 1))
    assert compared(longer, shorter, 64, 32)[0]
