"""The intervals of a program's integers hold what exact execution computes; decisions that were not
seen are named.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from shardlib.exact.coverage import Coverage
from shardlib.exact.intervals import UNKNOWN, Interval, Intervals
from shardlib.exact.machine import Machine
from shardlib.exact.values import Exact, is_float, is_key
from shardlib.interpret import interpret
from tests.programs.corpus import RIGHT
from tests.programs.program import inputs, traced


class Noted(Intervals):
    """Intervals that keep the facts about the results of each equation."""

    def __init__(self, axes):
        super().__init__(axes)
        self.facts = {}

    def follow(self, op, ins):
        outs = super().follow(op, ins)
        if self._is_noting:
            self.facts[op.path] = outs
        return outs


def outside(jaxpr, axes, args):
    """The equations with a result outside of its interval, in a run on these whole arrays."""
    domain = Noted(axes)
    interpret(jaxpr, domain, [bounds_of(arg) for arg in args])
    found = []

    def observe(machine, op, ins, outs):
        for x, bounds in zip(outs, domain.facts.get(op.path, ()), strict=False):
            if isinstance(x, Exact) and x.value.size and x.value.dtype.kind in "bif":
                low, high = x.value.min(), x.value.max()
                if low < bounds.low - 1e-3 * abs(low) or high > bounds.high + 1e-3 * abs(high):
                    found.append(f"{op.place()}: {op.name}: {low} to {high} outside of {bounds}")

    machine = Machine(axes, observe)
    machine.run(jaxpr, [machine.whole(arg) for arg in args])
    return found


def bounds_of(arg):
    if is_key(arg.dtype) or is_float(arg.dtype):
        return UNKNOWN._replace(of_data=True)
    return Interval(int(arg.min()), int(arg.max()))


def test_integers_of_right_programs_are_inside_their_intervals():
    for program in RIGHT:
        for sizes in program.meshes[:1]:
            args = jax.tree.leaves(inputs(program))
            axes = dict(zip(program.axes, sizes, strict=True))
            assert outside(traced(program, sizes), axes, args) == [], program


def arithmetic(n):
    x = jnp.arange(-5, 6) + n
    signs = jnp.sign(x), jnp.abs(x), -x, x**2, ~x, x.astype(jnp.uint8), x.astype(jnp.float32) / 3
    quotients = x // 3, x % 3, x // -3, lax.rem(x, 4), lax.div(x, -2), x % -4
    bits = x & 3, x | 4, x ^ 5, x << 2, x >> 1, jnp.abs(x) >> n
    extremes = (
        jnp.clip(x, -1, 2),
        jnp.maximum(x, n),
        x.max(),
        x.argmin(),
        jnp.sort(x),
        lax.top_k(x, 2),
    )
    sums = (
        x.sum(),
        jnp.cumsum(x),
        jnp.where(x > 2, x, 7),
        jnp.pad(x, 2),
        lax.optimization_barrier((x, -x)),
    )
    lookups = (
        x[n],
        x.at[n].set(99),
        x.at[n].add(50),
        lax.dynamic_slice(x, (n,), (2,)),
        lax.cond(n > 1, lambda: 1, lambda: n),
        lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 3, c[1]), (n, jnp.int32(20))),
    )
    return signs, quotients, bits, extremes, sums, lookups


@pytest.mark.parametrize("n", [0, 5])
def test_integers_of_each_rule_are_inside_their_intervals(n):
    n = np.int32(n)
    assert outside(jax.make_jaxpr(arithmetic)(n), {}, [n]) == []


def undecided(function, *args, bounds=()):
    """The texts about a function, without places, after a run on these arrays."""
    jaxpr = jax.make_jaxpr(function)(*args)
    coverage = Coverage()
    machine = Machine({}, coverage.observe)
    machine.run(jaxpr, [machine.whole(arg) for arg in args])
    return [text.partition(": ")[2] for text in coverage.undecided(jaxpr, {}, bounds=bounds)]


THREE = np.int32(3)


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (lambda n: n < 5, ["lt: always true in what was run"]),
        (
            lambda n: lax.switch(n, [lambda: 1] * 5),
            ["clamp: always smaller in what was run", "cond: always 3 in what was run"],
        ),
        (lambda n: n + 2_147_483_640, ["add: 2,147,483,682 does not fit int32"]),
        (lambda n: jnp.zeros(64)[n], []),
        (lambda n: jnp.floor((n + 24) / 24), ["floor: always 1.0 in what was run"]),
        (lambda n: (n + jnp.arange(24)) // 24, []),
        (lambda n: jnp.arange(32)[n], ["dynamic_slice: always smaller in what was run"]),
        (lambda n: n ^ 32, ["xor: always smaller in what was run"]),
    ],
)
def test_an_outcome_that_the_run_may_have_is_named(function, texts):
    assert undecided(function, THREE, bounds=[(0, 42)]) == texts


def traced_on(devices, function):
    """The jaxpr of a function of two rows a device, and its mesh."""
    mesh = AbstractMesh((devices,), ("d",))
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(function, in_specs=P("d"), out_specs=P("d"))
        return jax.make_jaxpr(mapped)(jnp.ones(2 * devices)), {"d": devices}


@pytest.mark.parametrize("differs", [False, True])
def test_devices_that_may_decide_otherwise_must_have_done_so(differs):
    jaxpr, axes = traced_on(2, lambda x: lax.cond(x[0] > 0, lambda x: 2 * x, lambda x: x, x))
    coverage = Coverage()
    machine = Machine(axes, coverage.observe)
    for sign in (1, -1):
        x = np.float32([1, 1, -1, -1]) if differs else np.full(4, sign, np.float32)
        machine.run(jaxpr, [machine.whole(x)])
    texts = [text.partition(": ")[2] for text in coverage.undecided(jaxpr, axes)]
    assert texts == ["cond: never different over d in what was run"] * (not differs)


@pytest.mark.parametrize(("degree", "is_decided"), [(2, True), (3, False)])
def test_a_polynomial_in_the_index_of_a_device_needs_more_devices_than_its_degree(
    degree, is_decided
):
    def program(x):
        i = lax.axis_index("d")
        return x * functools.reduce(jnp.multiply, [i - n for n in range(degree)])

    coverage = Coverage()
    small, axes = traced_on(3, program)
    machine = Machine(axes, coverage.observe)
    machine.run(small, [machine.whole(np.ones(6, np.float32))])
    texts = coverage.undecided(*traced_on(8, program), small)
    assert any("a polynomial of so many degrees" in text for text in texts) != is_decided


def test_exp_of_one_number_is_no_mask():
    assert undecided(jnp.exp, np.float32(1)) == []
