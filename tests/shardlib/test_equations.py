"""The table of primitives names those of JAX, and what follows a program by it computes what the program does."""

import collections
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from shardlib import equations

pytestmark = pytest.mark.quick
X = np.linspace(0.5, 2.0, 12, dtype=np.float32).reshape(3, 4)


def test_the_table_names_primitives_of_jax_each_once():
    jax.nn.gelu(jnp.zeros(1))  # some primitives are made where they are first used
    known = {x.name for x in gc.get_objects() if issubclass(type(x), core.Primitive)}
    counts = collections.Counter(name for names in equations._KINDS.values() for name in names.split())
    if jax.__version__.startswith("0.10."):  # whose names they are; a newer one has dropped some
        assert counts.keys() - known <= {"one_minus_square"}
    assert max(counts.values()) == 1, counts.most_common(3)


def program(x):
    start, table = jnp.float32(2) * jnp.sum(x), np.arange(4, dtype=np.float32)
    carry, rows = lax.scan(lambda c, row: (c + jnp.sum(row * start), c * row + table), start, x)
    halved = lax.while_loop(lambda c: c[0] > carry / 8, lambda c: (c[0] / 2, c[1] + 1), (carry, 0))
    return jax.jit(jnp.tanh)(rows), halved, jax.checkpoint(jnp.sin)(x)


def test_a_program_that_is_followed_equation_by_equation_computes_the_same():
    traced = jax.make_jaxpr(program)(X)

    def run(eqn, ins):
        if inner := equations.called(eqn):
            return equations.evaluate(inner, ins, run)
        if eqn.primitive.name == "scan":
            consts, carry, xs = equations.split_scan(eqn, ins)

            def body(c, row):
                return (lambda outs: (outs[: len(carry)], outs[len(carry) :]))(
                    equations.evaluate(eqn.params["jaxpr"], [*consts, *c, *row], run)
                )

            carried, rows = lax.scan(body, list(carry), list(xs))
            return [*carried, *rows]
        if eqn.primitive.name == "while":
            of_test, of_body, carry = equations.split_while(eqn, ins)

            def test(c):
                return equations.evaluate(eqn.params["cond_jaxpr"], [*of_test, *c], run)[0]

            return lax.while_loop(
                test, lambda c: equations.evaluate(eqn.params["body_jaxpr"], [*of_body, *c], run), list(carry)
            )
        return equations.run_again(eqn, ins)

    found = equations.evaluate(traced, [X], run)
    for a, b in zip(found, jax.tree.leaves(program(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(equations.arrays_in(traced)) == len(traced.consts)
