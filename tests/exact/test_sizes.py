"""Programs that are wrong only at large sizes: each is refused or named from runs at small
sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardlib.exact import sizes
from shardlib.exact.compare import compare
from shardlib.exact.coverage import Coverage
from shardlib.exact.machine import Machine
from shardlib.exact.monomials import Monomials
from shardlib.shardtypes import f32
from tests.programs import program as programs
from tests.programs.program import inputs, program, traced

DIMS = {"L": (256, 16, 24), "K": (16, 8, 12), "B": (32, 8, 15), "layers": (8, 2, 3)}
AXES = {"d": (4, 2, 3), "t": (4, 2, 3)}


def heads(x: f32["L K/t"]) -> f32["L K/t"]:
    return x * jnp.float32(1 + lax.axis_index("t") + jnp.arange(x.shape[1]))


def first_head(x: f32["L K/t"]) -> f32["L K/t"]:
    return x + x[:, :1]


def late(x: f32["L K/t"]) -> f32["L K/t"]:
    return jnp.where(jnp.arange(x.shape[0])[:, None] < 32, x, x * (1 + lax.axis_index("t")))


def late_in_a_table(x: f32["L/d K"]) -> f32["L/d K"]:
    return x * np.where(np.arange(x.shape[0]) < 32, 1, 2).astype(np.float32)[:, None]


def one_turn(x: f32["B/d L"]) -> f32["L"]:
    n = lax.axis_size("d")
    s = x.sum(0)
    return lax.pmean(s + lax.ppermute(s, "d", [(i, (i + 1) % n) for i in range(n)]), "d")


def parity(x: f32["B/d L"]) -> f32["B L"]:
    whole = jnp.zeros((lax.axis_size("d"), *x.shape), x.dtype).at[lax.axis_index("d") % 2].set(x)
    return lax.psum(whole, "d").reshape(-1, x.shape[1])


def counted(x: f32["layers B/d L"]) -> f32["B/d L"]:
    def body(carry):
        i, s = carry
        return i + 1, s * jnp.where(i > 2, 1.0 + lax.axis_index("d"), 1.0)

    return lax.while_loop(lambda carry: carry[0] < x.shape[0], body, (0, x.sum(0)))[1]


def capacity(x: f32["B/d L"]) -> f32["L"]:
    return jnp.float32(lax.psum(jnp.minimum((x > 0).sum(0), 6), "d"))


def clamped_slice(x: f32["L/d K"]) -> f32["L/d K"]:
    table = jnp.arange(40.0)
    return x * lax.dynamic_slice(table, (lax.axis_index("d") * x.shape[0],), (1,))


def overflow(x: f32["L/d K"]) -> f32["L/d K"]:
    n = x.shape[0]
    first = (lax.axis_index("d").astype(jnp.int8) * np.asarray(n).astype(np.int8)).astype(jnp.int32)
    return x * jnp.float32(1 + first + jnp.arange(n))[:, None]


WRONG = [
    heads,
    first_head,
    late,
    late_in_a_table,
    one_turn,
    parity,
    counted,
    capacity,
    clamped_slice,
    overflow,
]


def with_scale(x: f32["B/d L K/t"]) -> f32["B/d L K/t"]:
    """Right: a mean, a scale, positions and an index of a device, at any size."""
    row = lax.axis_index("d") * x.shape[0] + jnp.arange(x.shape[0])
    column = lax.axis_index("t") * x.shape[2] + jnp.arange(x.shape[2])
    total = lax.psum((x / np.sqrt(x.shape[1])).sum((0, 1)), "d") / (x.shape[0] * lax.axis_size("d"))
    return jnp.where(row[:, None, None] % 2 == column % 2, x, 0.0) + total


def ring(x: f32["B/d L"]) -> f32["L"]:
    """Right: a ring of as many turns as there are devices, with an index of the block that
    arrives.
    """
    n = lax.axis_size("d")

    def body(i, carry):
        s, y = carry
        source = (lax.axis_index("d") + n - i) % n
        s = lax.dynamic_update_slice(s, y.sum(0)[None], (source, 0))
        return s, lax.ppermute(y, "d", [(i, (i + 1) % n) for i in range(n)])

    start = lax.pcast(jnp.zeros((n, x.shape[1])), "d", to="varying")
    blocks, _ = lax.fori_loop(0, n, body, (start, x))
    return lax.pmean(blocks.sum(0), "d")


def at(body, number, monkeypatch):
    """The program and its jaxpr in the trace of this number, and its mesh."""
    monkeypatch.setattr(
        programs, "SIZES", programs.SIZES | {name: of[number] for name, of in DIMS.items()}
    )
    it = program(body)
    mesh = {axis: AXES[axis][number] for axis in it.axes}
    return it, traced(it, tuple(mesh.values())), mesh


def findings(body, monkeypatch):
    """What is found of the real program without running it: by sizes, by small runs, by
    coverage.
    """
    (_, real, mesh), *small = [at(body, number, monkeypatch) for number in range(3)]
    other = sizes.compare([real, *(jaxpr for _, jaxpr, _ in small)], DIMS, AXES)
    differences, undecided = [], []
    for number, (it, jaxpr, axes) in enumerate(small, 1):
        at(body, number, monkeypatch)  # sets the sizes
        one = traced(it, (1,) * len(axes))
        coverage = Coverage()
        for seed in (0, 1):
            args = jax.tree.leaves(inputs(it, seed))
            differences += compare(jaxpr, one, axes, args)
            machine = Machine(axes, coverage.observe)
            machine.run(jaxpr, [machine.whole(arg) for arg in args])
        if not other:
            undecided.append(set(coverage.undecided(real, mesh, jaxpr)))
    return other, differences, set.intersection(*undecided) if undecided else set()


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
def test_what_is_wrong_only_at_large_sizes_is_found_from_small_ones(body, monkeypatch):
    assert any(findings(body, monkeypatch))


@pytest.mark.parametrize("body", [with_scale, ring], ids=lambda body: body.__name__)
def test_right_programs_are_decided(body, monkeypatch):
    assert findings(body, monkeypatch) == ([], [], set())


N = (512, 12, 20)
"""A size in three traces."""


def other(function):
    """What does not correspond between traces of a function of an array and its size."""
    traces = [jax.make_jaxpr(function, static_argnums=1)(jnp.zeros(n), n) for n in N]
    return sizes.compare(traces, {"N": N}, {})


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x.mean() + x / np.sqrt(n) + n - 1,
        lambda x, n: x * np.arange(n) + np.arange(n, 0, -1),
        lambda x, n: lax.scan(lambda c, y: (c + y, None), 0.0, x, length=n)[0],
        lambda x, n: x + jnp.pad(x, (3, 0))[:n],
    ],
)
def test_numbers_that_sizes_give_are_one_program(function):
    assert other(function) == []


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda x, n: x[: 11 if n < 100 else 500],
            "500 (11 and 11 in the small programs) of limit_indices is no product",
        ),
        (
            lambda x, n: x + (n + 2),
            "a constant that no product of sizes explains: 514.0 (14.0 and 22.0",
        ),
        (
            lambda x, n: x * np.where(np.arange(n) < 32, 1.0, 2.0),
            "a constant that no product of sizes explains: (512,)",
        ),
        (
            lambda x, n: x.reshape(-1, max(n // 512, 1) if n > 100 else 2),
            "one entry is another case",
        ),
        (lambda x, n: x - x * 2 if n < 100 else x * 2 - x, "another operand"),
        (lambda x, n: jnp.sin(x) if n < 100 else jnp.cos(x), "another equation: cos (sin and sin"),
        (lambda x, n: lax.cumsum(x, reverse=n > 100), "reverse: True (False and False"),
    ],
)
def test_what_sizes_do_not_give_is_another_program(function, text):
    found = other(function)
    assert any(text in of for of in found), found
    assert all("test_sizes.py:" in of for of in found if "constant" not in of), found


def test_a_number_that_sizes_do_not_give_is_hardly_mistaken():
    dims = {"M": (4096, 24, 90), "F": (14336, 28, 99), "L": (4096, 16, 28), "B": (128, 8, 12)}
    monomials = Monomials(dims, {"d": (64, 2, 3)})
    right = [(4096, 16, 28), (4096 * 14336, 24 * 28, 90 * 99), (4095, 15, 27), (64, 12, 30)]
    assert all(map(monomials.explain, right))
    for n, *small in right:
        for changed in (2 * n, 3 * n, n + 2):
            assert not monomials.explain((changed, *small)), (changed, *small)
    assert not monomials.explain((4098, 18, 30))


def test_a_ring_of_two_stands_for_no_larger_one(monkeypatch):
    real, small, _ = [at(ring, number, monkeypatch)[1] for number in range(3)]
    dims, axes = ({name: of[:2] for name, of in sizes_of.items()} for sizes_of in (DIMS, AXES))
    assert any("its own reverse" in text for text in sizes.compare([real, small], dims, axes))
