"""Whether two programs compute the same on one device, against what they compute; also beside an axis of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardlib.proof.sameness import differences

pytestmark = pytest.mark.quick
X = np.linspace(0.5, 2.0, 12, dtype=np.float32).reshape(3, 4)


def by_kernel(of=lambda row: row * 2, index=lambda i: (i, 0)):
    """Applies `of` to each row in a Pallas kernel; `index` says to which row in each turn."""

    def kernel(row, out):
        out[...] = of(row[...])

    shape, own = jax.ShapeDtypeStruct((3, 4), np.float32), pl.BlockSpec((1, 4), lambda i: (i, 0))
    rows = pl.BlockSpec((1, 4), index)
    return pl.pallas_call(kernel, out_shape=shape, grid=(3,), in_specs=[rows], out_specs=own, interpret=True)


def by_kernel_of_other_names(x):
    def kernel(taken, given):
        given[...] = taken[...] * 2

    each = pl.BlockSpec((1, 4), lambda step: (step, 0))
    shape = jax.ShapeDtypeStruct((3, 4), np.float32)
    return pl.pallas_call(kernel, out_shape=shape, grid=(3,), in_specs=[each], out_specs=each, interpret=True)(x)


def in_place(change, is_read_first=False):
    """Changes an array in place; gives what it was before, or what it is after."""

    def run(x):
        array = jax.new_ref(x)
        before = array[...]
        change(array)
        return before if is_read_first else array[...]

    return run


def write(array):
    array[0] = array[1] * 2


def over_columns(x, y):
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())))


def scanned(step, x, *consts):
    return lax.scan(lambda carry, row: (step(carry, row, *consts), carry), x[0], x)


def weighted(order):
    """A loop that takes its constants in one order or the other."""

    def run(x):
        a, b = jnp.cos(x[0]), jnp.exp(x[1])
        step = (lambda c, r: c * a + r * b) if order else (lambda c, r: r * b + c * a)
        return scanned(step, x)

    return run


def in_parts(step, between=lambda c: c, rows=2):
    """A loop over rows, as one and as two: the gradients of its carry and of what it gives for each row."""
    start = np.ones(4, np.float32)

    def apart(x):
        first, second = lax.split(x, (rows, len(x) - rows))
        c, ys = lax.scan(step, start, first)
        c, more = lax.scan(step, between(c), second)
        return c, jnp.concatenate([ys, more])

    def gradient(run):
        return jax.grad(lambda x: sum(map(jnp.sum, run(x))))

    return gradient(apart), gradient(lambda x: lax.scan(step, start, x))


def in_pairs(parts):
    """A loop over pairs of rows, as one or in two parts."""

    def run(x):
        c, found = x[0], []
        for rows in lax.split(jnp.cos(jnp.concatenate([x, x])), parts):
            pairs = rows.reshape(-1, 2, *x.shape[1:])
            c, ys = lax.scan(lambda c, pair: (c + jnp.sin(pair[0]) * pair[1], c * pair), c, pairs)
            found.append(ys.reshape(-1, *x.shape[1:]))
        return c, jnp.concatenate(found)

    return run


def doubled_until(limit):
    return lambda x: lax.while_loop(lambda state: state[0] < limit, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]


SAME = {
    "a kernel": (by_kernel(), by_kernel_of_other_names),
    "an array that changes in place": (in_place(write), in_place(write)),
    "a loop in two parts": in_parts(lambda c, r: (jnp.sin(c) * r, c * r)),
    "a loop over pairs of rows in two parts": (in_pairs((2, 4)), in_pairs((6,))),
    "products in another order": (
        lambda x: jnp.einsum("ij,kj->ki", x, jnp.cos(x)),
        lambda x: jnp.einsum("ij,kj->ik", x, jnp.cos(x)).T,
    ),
    "a product that is transposed": (lambda x: over_columns(x, jnp.cos(x)), lambda x: over_columns(jnp.cos(x), x).T),
    "a reshape that is undone": (lambda x: jnp.sin(x.reshape(4, 3).reshape(3, 4)), jnp.sin),
    "constants of a loop": (weighted(True), weighted(False)),
    "a slice of everything": (lambda x: lax.dynamic_slice(x, (jnp.int32(x[0, 0]), 0), x.shape) + 1, lambda x: x + 1),
    "an offset of zero": (lambda x: x[jnp.arange(3) + 0 * jnp.int32(2)], lambda x: x[jnp.arange(3)]),
    "a call": (lambda x: jax.jit(jnp.tanh)(x), jnp.tanh),
}


def summed(c, rows):
    return c + rows[0] * rows[1], None


def without_a_row(x):
    """A loop over the first and the last row."""

    def step(c, r):
        return (c * r + r, None)

    return lax.scan(step, lax.scan(step, jnp.ones(4), x[:1])[0], x[2:])[0]


OTHER = {
    "what a kernel computes": (by_kernel(), by_kernel(lambda row: row * 3)),
    "the rows that a kernel reads": (by_kernel(), by_kernel(index=lambda i: (2 - i, 0))),
    "the changes of an array": (in_place(write), in_place(lambda array: None)),
    "when an array is read": (in_place(write), in_place(write, is_read_first=True)),
    "a row that is left out": (without_a_row, lambda x: lax.scan(lambda c, r: (c * r + r, None), jnp.ones(4), x)[0]),
    "rows beside the next ones": (
        lambda x: lax.scan(summed, jnp.zeros(4), (x[:-1], x[1:]))[0],
        lambda x: lax.scan(summed, jnp.zeros(4), (x[:-1], x[:-1]))[0],
    ),
    "what is between two parts of a loop": in_parts(lambda c, r: (jnp.sin(c) * r, c * r), between=lambda c: 2 * c),
    "the second part of a loop from the start": (
        lambda x: lax.scan(lambda c, r: (c * r, None), lax.scan(lambda c, r: (c * r, None), x[0], x[:2])[0], x[:1])[0],
        lambda x: lax.scan(lambda c, r: (c * r, None), x[0], x)[0],
    ),
    "the parts of a loop in the other order": (
        lambda x: lax.scan(
            lambda c, r: (c * r + r, None), lax.scan(lambda c, r: (c * r + r, None), x[0], x[2:])[0], x[:2]
        )[0],
        lambda x: lax.scan(lambda c, r: (c * r + r, None), x[0], x)[0],
    ),
    "parts of a loop that are joined in the other order": (
        lambda x: jnp.concatenate([lax.scan(lambda c, r: (c, jnp.sin(r)), 0, y)[1] for y in (x[2:], x[:2])]),
        lambda x: lax.scan(lambda c, r: (c, jnp.sin(r)), 0, x)[1],
    ),
    "a literal": (lambda x: x * 2, lambda x: x * 3),
    "an axis": (lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, 1)),
    "a transposition": (lambda x: over_columns(x, jnp.cos(x)), lambda x: over_columns(jnp.cos(x), x)),
    "an array": (lambda x: x + np.arange(4), lambda x: x + np.arange(4)[::-1]),
    "a loop that runs backwards": (
        lambda x: lax.scan(lambda c, r: (c * r, c), x[0], x),
        lambda x: lax.scan(lambda c, r: (c * r, c), x[0], x, reverse=True),
    ),
    "which of two carries": (
        lambda x: lax.scan(lambda c, r: ((c[0] + r, c[1] * r), None), (x[0], x[1]), x)[0][0],
        lambda x: lax.scan(lambda c, r: ((c[0] + r, c[1] * r), None), (x[0], x[1]), x)[0][1],
    ),
    "a branch": (
        lambda x: lax.cond(x[0, 0] > 1, jnp.sin, jnp.cos, x),
        lambda x: lax.cond(x[0, 0] > 1, jnp.cos, jnp.sin, x),
    ),
    "a key": (
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
        lambda x: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
    ),
    "a slice": (lambda x: x[:2], lambda x: x[1:3]),
    "a dtype": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), lambda x: x),
    "a loop's end": (doubled_until(3), doubled_until(4)),
}


def beside_an_axis(function, axes: str):
    """The function on a mesh with these axes of one device each, traced."""
    mesh = AbstractMesh((1,) * len(axes), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(lambda x: jax.shard_map(function, in_specs=P(), out_specs=P(), check_vma=False)(x))(X)


WITH_C = {  # one with an axis c, the other without it, and whether they are the same
    "a sum of an array with itself": (lambda x: x + lax.psum(x, "c"), lambda x: x, False),
    "collectives": (lambda x: lax.all_gather(lax.psum(x, "c"), "c", axis=1, tiled=True), lambda x: x, True),
    "its own block": (lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index("c") * 3, 3), lambda x: x, True),
    "moved before or after": (lambda x: jnp.sin(x.T).T * 2, lambda x: jnp.sin(x) * 2, True),
}


@pytest.mark.parametrize("name", WITH_C)
def test_an_axis_of_one_device_changes_nothing_by_itself(name):
    one, other, is_same = WITH_C[name]
    programs = beside_an_axis(one, "dc"), beside_an_axis(other, "d")
    texts = list(differences(*programs, ("this mesh", "one device"), "remove it"))
    assert [text.endswith("remedy: remove it") for text in texts] == [True] * (not is_same)


def parted(ours, theirs) -> list[str]:
    return list(differences(jax.make_jaxpr(ours)(X), jax.make_jaxpr(theirs)(X), ("one", "the other"), "edit both"))


def equal(ours, theirs) -> bool:
    pairs = zip(jax.tree.leaves(ours(X)), jax.tree.leaves(theirs(X)), strict=True)
    return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("name", SAME)
def test_what_computes_the_same_is_the_same(name):
    assert equal(*SAME[name])
    assert parted(*SAME[name]) == []


@pytest.mark.parametrize("name", OTHER)
def test_what_computes_another_thing_is_not(name):
    assert not equal(*OTHER[name])
    assert len(parted(*OTHER[name])) == 1
    assert len(parted(*OTHER[name][::-1])) == 1


def rounded(dtype, at=lambda x: x):
    """Rounds and widens again what `at` gives: an array, or in a loop its rows."""
    return lambda x: at(x).astype(dtype).astype(x.dtype)


BF16, F8, EACH = jnp.bfloat16, jnp.float8_e4m3fn, lambda of: lambda x: lax.scan(lambda c, row: (c, of(row)), 0.0, x)[1]
ROUNDED = {  # two programs, and whether they round to the same dtypes
    "ahead of a loop": (EACH(jnp.sin), EACH(lambda row: jnp.sin(rounded(BF16)(row))), False),
    "in it or ahead": (
        lambda x: EACH(jnp.sin)(rounded(BF16)(x)),
        EACH(lambda row: jnp.sin(rounded(BF16)(row))),
        True,
    ),
    "another dtype": (rounded(BF16), rounded(F8), False),
    "again what was": (lambda x: rounded(BF16)(jnp.sin(rounded(BF16)(x))), lambda x: jnp.sin(rounded(BF16)(x)), False),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_the_dtypes_to_which_numbers_are_rounded_are_compared_not_the_places(name):
    *programs, is_same = ROUNDED[name]
    texts = list(differences(*(jax.make_jaxpr(f)(X) for f in programs), ("one", "the other"), "edit both", True))
    assert bool(texts) != is_same
    assert all("only " in text and " rounds this to " in text for text in texts)
    if not is_same:
        assert not np.array_equal(programs[0](X), programs[1](X))


def test_no_gradient_is_not_the_same():
    """Which the values do not show."""
    (text,) = parted(lambda x: lax.stop_gradient(jnp.sin(x)), jnp.sin)
    assert "stop_gradient: one runs this, and the other does not" in text
