"""shardwright/tools/verify/compare.py: the first value of a program that differs from one device, and its line."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib import marks
from shardlib.proof.domain import UNIFORM, Dim, Part, Value, cut, whole
from shardwright.tools.verify.compare import assembled, first_difference
from tests.support import tiny

SIZES = {"r": 2, "d": 2, "t": 2}


def scaled_in_one_turn(h, number):
    """`h`, times 2 in turn 1 of the loop on one device of t; declared to be right."""
    factor = jnp.where((number == 1) & (lax.axis_index("t") == 1), 2.0, 1.0)
    return marks.leave(h * factor, "a test says so", "B/d F/t")


def right(h, number):
    return h


def with_rules(forward, backward):
    """`forward`, with `backward` for its gradient."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda h, number: (forward(h, number), number), lambda number, g: (backward(g, number), None))
    return function


def softmax(h, number):
    return jax.nn.softmax(h)  # along a sharded dim


def program(change):
    """Three layers, and their gradient."""

    def per_device(x, w):
        def layer(x, number):
            h = change(jnp.tanh(x @ w), number)  # JAX gives what a custom_vjp computes the line of its call
            return x + lax.psum(h @ w.T, "t"), None

        return jax.grad(lambda x: jnp.sum(jnp.square(lax.scan(layer, x, jnp.arange(3))[0])))(x)

    return lambda *args: jax.shard_map(per_device, in_specs=(P("d"), P(None, "t")), out_specs=P("d"))(*args)


def traced(change, name: str) -> tuple[types.SimpleNamespace, list]:
    """What is read of a Step, and its arguments."""
    rng, mesh = np.random.default_rng(0), tiny.mesh(name)
    x, w = rng.standard_normal((8, 6)), rng.standard_normal((6, 10)) / 3

    def place(a, *spec):
        return jax.device_put(jnp.float32(a), NamedSharding(mesh, P(*spec)))

    arguments = [place(x, "d"), place(w, None, "t")]
    with jax.set_mesh(mesh):
        jaxpr = jax.jit(program(change)).trace(*arguments).jaxpr
    return types.SimpleNamespace(mesh=mesh, jaxpr=jaxpr), arguments


def first_of(change):
    steps, arguments = zip(*(traced(change, name) for name in ("r=2 d=2 t=2", "one device")), strict=True)
    return first_difference(*steps, arguments)


def line_with(comment: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    return f"test_verify_compare.py:{number}"


@pytest.mark.long
def test_of_a_program_that_is_right_no_value_differs():
    assert first_of(right) == ([], None)


@pytest.mark.parametrize(
    "rules", [pytest.param((scaled_in_one_turn, right), marks=pytest.mark.long), (right, scaled_in_one_turn)]
)
def test_the_first_value_that_differs_has_its_line_and_its_turn(rules):
    """The loop of the gradient runs backwards: what is wrong in turn 1 comes to turn 0, and not to turn 2."""
    found, first = first_of(with_rules(*rules))
    assert not found
    assert first.place.endswith(line_with("JAX gives what a custom_vjp computes the line of its call"))
    assert (first.operation, first.turns) == ("name", (1,))
    assert 0.1 < first.error < 2


def test_what_is_no_block_is_named_by_the_check():
    (finding, *_), first = first_of(softmax)
    assert line_with("along a sharded dim") in finding
    assert first is None


def test_blocks_are_assembled_as_the_facts_say():
    """A dim cut over two axes, a merged dim, and one that all devices hold, in a loop of 3 turns."""
    array = np.arange(3 * 8 * (2 * 2 * 2 * 3) * 5.0).reshape(3, 2, 2, 2, 2, 2, 2, 3, 5)
    # Dims: the turn; t, r and this device's 2 entries; then t's part of 2, which r does not cut, and d's of 3.
    array = array.reshape(3, 8, 24, 5)
    value = Value((cut(2, ("t", "r")), Dim((Part(2, ()), Part(6, ("d",)))), whole(5)))
    blocks = np.zeros((2, 2, 2, 3, 2, 12, 5))
    for r, d, t in np.ndindex(2, 2, 2):
        rows = array[:, 2 * (2 * t + r) :][:, :2]
        blocks[r, d, t] = rows.reshape(3, 2, 2, 12, 5)[:, :, :, 6 * d : 6 * d + 6].reshape(3, 2, 12, 5)
    np.testing.assert_array_equal(assembled(blocks, value, 1, SIZES, SIZES), array[None, None, None])
    alone = dict.fromkeys(SIZES, 1)
    same = assembled(array[None, None, None], value, 1, SIZES, alone)
    np.testing.assert_array_equal(same, array[None, None, None])


def test_what_is_still_to_be_reduced_is_reduced():
    parts = np.arange(24.0).reshape(2, 2, 2, 3)
    partial = Value((UNIFORM,), partial=frozenset("dt"))
    np.testing.assert_array_equal(assembled(parts, partial, 0, SIZES, SIZES), parts.sum((1, 2), keepdims=True))
    extreme = Value((UNIFORM,), extreme=("max", frozenset("r")))
    np.testing.assert_array_equal(assembled(parts, extreme, 0, SIZES, SIZES), parts.max(0, keepdims=True))
