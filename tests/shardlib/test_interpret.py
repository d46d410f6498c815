"""What follows the equations of a program: its results, against the program itself, and by which
modules it is used.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from shardlib.interpret import (
    Copies,
    Domain,
    Operation,
    arrays_in,
    digest_of,
    interpret,
    literal_of,
    needed_for,
    operations_in,
    run_again,
)

pytestmark = pytest.mark.quick
X = np.linspace(0.5, 2.0, 12, dtype=np.float32).reshape(3, 4)


def program(x):
    start, table = jnp.float32(2) * jnp.sum(x), np.arange(4, dtype=np.float32)
    carry, rows = lax.scan(lambda c, row: (c + jnp.sum(row * start), c * row + table), start, x)
    halved = lax.while_loop(lambda c: c[0] > carry / 8, lambda c: (c[0] / 2, c[1] + 1), (carry, 0))
    either = lax.cond(carry > 3, jnp.sin, jnp.cos, x)
    return jax.jit(jnp.tanh)(rows), halved, jax.checkpoint(jnp.sin)(x), either


class Values(Domain):
    """The arrays themselves."""

    def constant(self, x):
        return literal_of(x)

    def apply(self, op, ins):
        return run_again(op.eqn, ins)

    def scan(self, op, consts, carry, xs):
        def turn(carry, rows):
            outs = interpret(op.params["jaxpr"], self, [*consts, *carry, *rows], op)
            return outs[: len(carry)], outs[len(carry) :]

        carry, stacks = lax.scan(turn, carry, xs)
        return [*carry, *stacks]

    def loop(self, op, of_test, of_body, carry):
        while interpret(op.params["cond_jaxpr"], self, [*of_test, *carry], op)[0]:
            carry = interpret(op.params["body_jaxpr"], self, [*of_body, *carry], op)
        return carry

    def branch(self, op, which, args):
        return interpret(op.params["branches"][int(which)], self, args, op)


def test_a_program_that_is_followed_equation_by_equation_computes_the_same():
    traced = jax.make_jaxpr(program)(X)
    found = interpret(traced, Values(), [X])
    for a, b in zip(found, jax.tree.leaves(program(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(arrays_in(traced)) == len(traced.consts)


class Reads(Domain):
    """The names of the arguments that a value is computed from, in any turn of a loop and in any
    branch.
    """

    def constant(self, x):
        return frozenset()

    def apply(self, op, ins):
        return [frozenset().union(*ins)] * len(op.eqn.outvars)

    def join(self, op, a, b):
        return a | b


def shifted(a, b, c, d):
    """Passes d on to c, c to b, and b to a, turn by turn."""
    turned, _ = lax.scan(
        lambda carry, _: ((carry[1], carry[2], carry[2]), None), (a, b, c), None, length=3
    )
    whiled = lax.while_loop(lambda x: x[0] > d, lambda x: (x[1], x[1]), (a, b))
    return *turned, *whiled, lax.cond(d > 0, lambda x, y: x, lambda x, y: y, a, c)


def test_facts_of_a_loop_hold_in_all_turns_and_those_of_branches_in_all_of_them():
    found = interpret(jax.make_jaxpr(shifted)(1.0, 2.0, 3.0, 4.0), Reads(), map(frozenset, "abcd"))
    assert list(map("".join, map(sorted, found))) == ["abc", "bc", "c", "ab", "b", "ac"]


class Unsettled(Reads):
    def join(self, op, a, b):
        return object()


def test_facts_of_a_loop_that_do_not_settle_end_in_an_error():
    with pytest.raises(AssertionError, match="does not settle"):
        interpret(jax.make_jaxpr(shifted)(1.0, 2.0, 3.0, 4.0), Unsettled(), map(frozenset, "abcd"))


def test_the_path_of_an_equation_names_its_callers_and_its_line_is_theirs():
    traced = jax.make_jaxpr(program)(X)
    paths = [op.path for op in operations_in(traced)]
    assert len(set(paths)) == len(paths)
    assert {len(path) for path in paths} >= {1, 2}
    (tanh,) = (op for op in operations_in(traced) if op.name == "tanh")
    assert [caller.name for caller in tanh.callers] == ["jit"]
    assert Operation(traced.eqns[0]).place().startswith("tests/shardlib/test_interpret.py:")


def test_a_copy_has_new_variables_and_computes_the_same():
    traced = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X)
    copies = Copies()
    outs = interpret(traced, copies, traced.jaxpr.invars)
    assert not set(outs) & set(traced.jaxpr.outvars)
    copied = traced.jaxpr.replace(eqns=copies.found, outvars=outs)
    (found,) = (
        jax.core.eval_jaxpr(copied, [], X)
        if hasattr(jax.core, "eval_jaxpr")
        else interpret(copied, Values(), [X])
    )
    np.testing.assert_allclose(found, np.sin(X) * 2, rtol=1e-6)


def test_what_no_variable_depends_on_is_not_needed():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x) + 1))(X).jaxpr
    found, used = needed_for(jaxpr, jaxpr.outvars[1:])
    assert [eqn.primitive.name for eqn in found] == ["cos", "add"]
    assert used == {*jaxpr.invars, *jaxpr.outvars[1:], *found[0].outvars}

    def reads(eqn, is_used):
        return [] if is_used or eqn.primitive.name == "sin" else None

    found, used = needed_for(jaxpr, jaxpr.outvars[1:], reads)
    assert [eqn.primitive.name for eqn in found] == ["sin", "add"]
    assert used == {*jaxpr.outvars[1:]}


def test_a_digest_tells_programs_apart_and_not_where_they_are_written():
    def digest(f, *args):
        return digest_of(jax.make_jaxpr(f)(*args))

    table = np.arange(4.0, dtype=np.float32)
    same = [lambda x: jnp.sin(x) + table, lambda y: jnp.sin(y) + np.arange(4.0, dtype=np.float32)]
    others = [
        lambda x: jnp.cos(x) + table,
        lambda x: jnp.sin(x) + table[::-1].copy(),
        lambda x: jnp.sin(x) - table,
        lambda x: jnp.sin(x + table),
        lambda x: jnp.sum(jnp.sin(x) + table, 0),
        lambda x: lax.scan(lambda c, row: (c, jnp.sin(row) + table), 0.0, x)[1],
        lambda x: lax.scan(lambda c, row: (c, jnp.cos(row) + table), 0.0, x)[1],
    ]

    def of_rows(index):
        rows = pl.BlockSpec((1, 4), index)
        shape = jax.ShapeDtypeStruct(X.shape, X.dtype)

        def kernel(x, out):
            out[...] = x[...]

        return pl.pallas_call(kernel, out_shape=shape, grid=(3,), in_specs=[rows], out_specs=rows)

    assert digest(of_rows(lambda i: (i, 0)), X) == digest(of_rows(lambda turn: (turn, 0)), X)
    others += [of_rows(lambda i: (i, 0)), of_rows(lambda i: (2 - i, 0))]
    assert len({digest(f, X) for f in same}) == 1
    assert len({digest(f, X) for f in [same[0], *others]}) == len(others) + 1
    assert digest(same[0], X) != digest(same[0], X.astype(np.float16))


HOLDS = {
    "the program": lambda x, held: x + held,
    "jit": lambda x, held: jax.jit(lambda x: x + held)(x),
    "scan": lambda x, held: lax.scan(lambda c, _: (c + held, None), x, None, length=3)[0],
    "cond": lambda x, held: lax.cond(x[0] > 0, lambda x: x + held, lambda x: x, x),
    "while": lambda x, held: lax.while_loop(lambda c: c[0] < 9, lambda c: c + held, x),
    "shard_map": lambda x, held: jax.shard_map(lambda x: x + held, in_specs=P(), out_specs=P())(x),
    "checkpoint": lambda x, held: jax.grad(
        lambda x: jax.checkpoint(lambda x: jnp.sin(x + held))(x).sum()
    )(x),
}


@pytest.mark.parametrize("where", HOLDS)
def test_a_digest_has_every_digit_of_every_number_that_a_program_holds(where):
    """In an array of 9,999 entries too, and in a float64, of which numpy shows eight digits."""
    arrays = [np.linspace(0.0, 1.0, 9999) for _ in range(2)]
    arrays[1][5000] = np.nextafter(arrays[1][5000], 2)
    numbers = [np.float64(0.1), np.nextafter(np.float64(0.1), 1)]
    with jax.enable_x64(True), jax.set_mesh(jax.make_mesh((1,), ("d",))):
        for held in (arrays, numbers):
            programs = [
                jax.make_jaxpr(lambda x, one=one: HOLDS[where](x, one))(jnp.zeros(9999))
                for one in held
            ]
            assert digest_of(programs[0]) != digest_of(programs[1])
