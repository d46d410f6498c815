"""Each row of shardlib.dims against what its primitive does on random numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardlib import dims
from shardlib.dims import dims_of
from shardlib.equations import called
from shardlib.interpret import Domain, interpret, literal_of, run_again
from tests.support.primitive_calls import NO_FUNCTION, call_of

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
KEYS = jax.random.split(jax.random.key(0), 3)


def floats(*shape):
    return RANDOM.uniform(0.1, 0.9, shape).astype(np.float32)


def ids(most, *shape):
    return RANDOM.integers(0, most, shape).astype(np.int32)


def symmetric(n, *batch):
    x = floats(*batch, n, n)
    return x + np.swapaxes(x, -1, -2) + 4 * np.eye(n, dtype=np.float32)


def conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1,), **{"padding": "VALID", **options})


def window(x, reducer, start, **options):
    return lax.reduce_window(x, start, reducer, (1, 2), (1, 1), **{"padding": "VALID", **options})


def of_gradient(function):
    return jax.grad(lambda x: jnp.sum(function(x) ** 2))


def tangent_of(function):
    return lambda x: jax.jvp(function, (x,), (x[::-1],))


X = floats(3, 4)
CASES = {
    "random_fold_in": [(jax.vmap(jax.random.fold_in), KEYS, ids(99, 3))],
    "threefry2x32": [
        (
            lambda key, x: jax.extend.random.threefry_2x32(key, x),
            ids(99, 2).astype(np.uint32),
            ids(99, 6).astype(np.uint32),
        )
    ],
    "random_clone": [(jax.random.clone, KEYS)],
    "random_bits": [(jax.vmap(lambda key: jax.random.bits(key, (2,))), KEYS)],
    "random_split": [(jax.vmap(jax.random.split), KEYS)],
    "random_wrap": [(jax.random.wrap_key_data, jax.random.key_data(KEYS))],
    "random_unwrap": [(jax.random.key_data, KEYS)],
    "random_seed": [(jax.vmap(jax.random.key), ids(99, 3))],
    "bitcast_convert_type": [
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
        (lambda x: lax.bitcast_convert_type(x, jnp.int8), floats(3)),
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), ids(99, 3, 4).astype(np.int8)),
    ],
    "slice": [(lambda x: x[:, 1:3], X), (lambda x: x[::2, ::-1], X)],
    "dynamic_slice": [(lambda x, i: lax.dynamic_slice(x, (0, i), (3, 2)), X, np.int32(1))],
    "dynamic_update_slice": [
        (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i)), X, floats(3, 2), np.int32(1)),
        (lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)), X, floats(3, 4)),
    ],
    "split": [(lambda x: lax.split(x, (1, 3), 1), X)],
    "stack": [(lambda x, y: lax.stack([x, y], 1), X, X + 1)],
    "unstack": [(lambda x: lax.unstack(x, 1), X)],
    "top_k": [(lambda x: lax.top_k(x, 2), X), (lambda x: lax.top_k(x, 4), X)],
    "approx_top_k": [(lambda x: lax.approx_max_k(x, 2, reduction_dimension=0), floats(4, 3))],
    "sort": [
        (lambda x: lax.sort(x, dimension=1), X),
        (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), X, X + 1),
    ],
    "concatenate": [(lambda x, y: jnp.concatenate([x, y], 1), X, floats(3, 2))],
    "rev": [(lambda x: lax.rev(x, (1,)), X)],
    "pad": [
        (lambda x, y: lax.pad(x, y, ((0, 0, 0), (1, 0, 0))), X, np.float32(3)),
        (lambda x, y: lax.pad(x, y, ((-1, 1, 0), (0, 0, 0))), X, np.float32(3)),
    ],
    "iota": [(lambda: lax.broadcasted_iota(np.int32, (3, 4), 1),)],
    "reshape": [
        (lambda x: lax.reshape(x, (3, 2, 2)), X),
        (lambda x: lax.reshape(x, (4, 3)), X),
        (lambda x: lax.reshape(x, (3, 1, 8)), floats(3, 4, 2)),
        (lambda x: lax.reshape(x, (12, 5)), floats(3, 4, 5)),
        (lambda x: lax.reshape(x, (4, 3), (1, 0)), X),
        (lambda x: lax.reshape(x, (4, 15), (1, 2, 0)), floats(3, 4, 5)),
    ],
    "broadcast_in_dim": [
        (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), X),
        (lambda x: lax.broadcast_in_dim(x, (3, 4), (0, 1)), floats(3, 1)),
    ],
    "transpose": [(lambda x: lax.transpose(x, (2, 0, 1)), floats(3, 4, 5))],
    "squeeze": [(lambda x: lax.squeeze(x, (1,)), floats(3, 1, 4))],
    "reduce": [
        (lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)), X, X + 1),
    ],
    **{
        f"reduce_{name}": [(lambda x, reduce=reduce: reduce(x, axis=1), floats(3, 4, 2))]
        for name, reduce in {"max": jnp.max, "min": jnp.min, "prod": jnp.prod, "sum": jnp.sum}.items()
    },
    "reduce_and": [(lambda x: jnp.all(x, axis=0), ids(4, 3, 4) > 0)],
    "reduce_or": [(lambda x: jnp.any(x, axis=0), ids(4, 3, 4) == 0)],
    "reduce_xor": [(lambda x: lax.reduce_xor(x, (1,)), ids(9, 3, 4))],
    "argmax": [(lambda x: lax.argmax(x, 1, np.int32), X)],
    "argmin": [(lambda x: lax.argmin(x, 0, np.int32), X)],
    "reduce_window": [(lambda x: window(x, lax.mul, 1.0), X), (lambda x: window(x, lax.mul, 1.0, padding="SAME"), X)],
    "reduce_window_sum": [
        (lambda x: window(x, lax.add, 0.0), X),
        (lambda x: window(x, lax.add, 0.0, padding=((1, 0), (0, 1))), X),
        (lambda x: window(x, lax.add, 0.0, padding="SAME"), X),
    ],
    "reduce_window_max": [(lambda x: window(x, lax.max, -np.inf), X)],
    "reduce_window_min": [(lambda x: window(x, lax.min, np.inf), X)],
    "select_and_gather_add": [(tangent_of(lambda x: window(x, lax.max, -np.inf)), X)],
    "select_and_scatter_add": [(of_gradient(lambda x: window(x, lax.max, -np.inf)), X)],
    "cholesky": [(lambda x: lax.linalg.cholesky(x, symmetrize_input=False), symmetric(2, 3))],
    "eig": [(lax.linalg.eig, symmetric(2, 3))],
    "eigh": [(lax.linalg.eigh, symmetric(2, 3))],
    "hessenberg": [(lax.linalg.hessenberg, floats(4, 3, 3))],
    "householder_product": [(lax.linalg.householder_product, floats(3, 4, 2), floats(3, 2))],
    "lu": [(lax.linalg.lu, floats(4, 3, 3))],
    "lu_pivots_to_permutation": [(lambda x: lax.linalg.lu_pivots_to_permutation(x, 3), ids(2, 4, 2))],
    "qr": [(lambda x: lax.linalg.qr(x, full_matrices=False), floats(3, 4, 2))],
    "schur": [(lax.linalg.schur, floats(4, 3, 3))],
    "svd": [(lambda x: lax.linalg.svd(x, full_matrices=False), floats(3, 4, 2))],
    "tridiagonal": [(lambda x: lax.linalg.tridiagonal(x, lower=True), symmetric(3, 4))],
    "triangular_solve": [
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), symmetric(2, 3), floats(3, 2, 4)),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False, lower=True), symmetric(2, 3), floats(3, 4, 2)),
    ],
    "fft": [(lambda x: lax.fft(x, "rfft", (4,)), X), (lambda x: lax.fft(x + 0j, "fft", (3, 4)), floats(2, 3, 4))],
    "dot_general": [
        (lambda x, y: jnp.einsum("bik,bkj->bij", x, y), floats(3, 2, 4), floats(3, 4, 5)),
        (lambda x, y: jnp.einsum("kib,jbk->bij", x, y), floats(4, 2, 3), floats(5, 3, 4)),
    ],
    "conv_general_dilated": [
        (conv, floats(3, 2, 6), floats(5, 2, 2)),  # [sequences, channels, positions]
        (conv, floats(3, 2, 6), floats(5, 2, 1)),
        (functools.partial(conv, feature_group_count=5), floats(3, 5, 4), floats(5, 1, 2)),
        (functools.partial(conv, feature_group_count=2), floats(3, 4, 5), floats(6, 2, 2)),
        (functools.partial(conv, feature_group_count=2), floats(3, 2, 6), floats(4, 1, 2)),
        (functools.partial(conv, batch_group_count=3), floats(3, 2, 6), floats(3, 2, 2)),
        (functools.partial(conv, padding=((-1, 1),)), floats(3, 2, 6), floats(5, 2, 1)),
        (functools.partial(conv, padding="SAME"), floats(3, 2, 6), floats(5, 2, 2)),
    ],
    "gather": [
        (lambda x, i: x[i], X, ids(3, 5)),
        (lambda x, i: x[:, i], X, ids(4, 5)),
        (lambda x, i: x.at[i].get(mode="fill"), X, ids(4, 5)),
        (lambda x, i: jnp.take_along_axis(x, i, 1), X, ids(4, 3, 2)),
        (lambda x, i: jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 5)))(x, i), floats(3, 4, 5), ids(3, 3)),
    ],
    "scatter": [
        (lambda x, y: x.at[jnp.array([2, 0])].set(y, unique_indices=True), X, floats(2, 4)),
        (lambda x, y: x.at[:, 1:3].set(y), X, floats(3, 2)),
    ],
    "scatter-add": [
        (lambda x, i, y: x.at[i].add(y), X, ids(3, 5), floats(5, 4)),
        (lambda x, i, y: jax.vmap(lambda x, i, y: x.at[i].add(y))(x, i, y), X, ids(4, 3, 5), floats(3, 5)),
    ],
    "scatter-sub": [(lambda x, i, y: x.at[i].subtract(y), X, ids(3, 5), floats(5, 4))],
    "scatter-max": [(lambda x, i, y: x.at[i].max(y), X, ids(3, 5), floats(5, 4))],
    "scatter-min": [(lambda x, i, y: x.at[:, i].min(y), X, ids(4, 5), floats(3, 5))],
    "scatter-mul": [(lambda x, i, y: x.at[:, i].mul(y), X, ids(4, 5), floats(3, 5))],
}
"""For each primitive: functions of JAX that call it, with operands. Sizes that differ tell dims apart."""
NO_CALL = NO_FUNCTION | {"select_and_scatter", "one_minus_square", "regularized_incomplete_beta"}
"""Primitives that no public function of JAX calls, or calls on the CPU."""


def cases():
    return [
        pytest.param(name, function, operands, id=name)
        for name in sorted(dims.ROWS)
        for function, *operands in CASES.get(name, [(None,)])
    ]


class Found(Exception):
    """An equation, and its operands."""


class Running(Domain):
    """Runs a program up to the first equation of a primitive, and raises that as Found."""

    def __init__(self, name):
        self.name = name

    def constant(self, x):
        return literal_of(x)

    def follow(self, op, ins):
        if op.name == self.name:
            raise Found(op.eqn, [x if is_key(x) else np.asarray(x) for x in ins])
        return self.call(op, body, ins) if (body := called(op.eqn)) else run_again(op.eqn, ins)


def called_by(name, function, *operands):
    """The first equation of a primitive in a function, and its operands there."""
    with pytest.raises(Found) as raised:
        interpret(jax.make_jaxpr(function)(*operands), Running(name), operands)
    return raised.value.args


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def numbers_of(x):
    """The entries of an array; those of keys as numbers."""
    if not is_key(x):
        return np.asarray(x)
    words = np.asarray(jax.random.key_data(x)).astype(np.uint64)
    return words[..., 0] << np.uint64(32) | words[..., 1]


def are_equal(a, b):
    return (a == b) | ((a != a) & (b != b))


def changed(x, at):
    """Arrays that differ from `x` in one entry."""
    if is_key(x):
        return [x.at[at].set(jax.random.key(7))]
    found = []
    for other in (0, 5, np.nan) if x.dtype.kind in "fc" else (0, 1, 5):
        found.append(np.array(x))
        found[-1][at] = other
    return found


def rolled(x, dim):
    if dim is None:
        return x
    return jnp.roll(x, -1, dim) if is_key(x) else np.roll(x, -1, dim)


class Primitive:
    """What changes with the entries of the operands of an equation."""

    def __init__(self, eqn, ins):
        self.ins = ins
        self.run = jax.jit(lambda *ins: run_again(eqn, list(ins)))
        self.before = self.call(ins)
        self.changes = [[] for _ in ins]  # for each operand: where it changes, and where the results do
        for k, x in enumerate(ins):
            for at in np.ndindex(x.shape):
                for other in changed(x, at):
                    after = self.call([other if i == k else y for i, y in enumerate(ins)])
                    where = [np.argwhere(~are_equal(a, b)) for a, b in zip(self.before, after, strict=True)]
                    self.changes[k].append((at, where))

    def call(self, ins):
        return [*map(numbers_of, self.run(*ins))]

    def changes_with(self, k, r):
        """True if result r changes with operand k."""
        return any(len(where[r]) for _, where in self.changes[k])

    def follows(self, r, j, k, i):
        """True if result r changes along dim j where operand k does along dim i, and nowhere else."""
        return self.before[r].shape[j] == self.ins[k].shape[i] and all(
            {*where[r][:, j].tolist()} <= {at[i]} for at, where in self.changes[k]
        )

    def dims_followed(self, r, j):
        """For each operand with which result r changes, the dim that dim j of the result follows."""
        found = []
        for k, x in enumerate(self.ins):
            dims = [i for i in range(x.ndim) if self.changes_with(k, r) and self.follows(r, j, k, i)]
            assert len(dims) < 2, "use other sizes: two dims could be the same"
            found.append(dims[0] if dims else None)
        return found

    def moves_with(self, operands):
        """True if results move as these dims of the operands do, along the dims that follow them."""
        results = []
        for r, x in enumerate(self.before):
            dims = [j for j in range(x.ndim) if self.dims_followed(r, j) == operands]
            results.append(dims[0] if dims else None)
        return self.moves(operands, results)

    def moves(self, operands, results):
        """True if the results move along these dims as the operands do along theirs."""
        after = self.call([rolled(x, dim) for x, dim in zip(self.ins, operands, strict=True)])
        expected = [rolled(x, dim) for x, dim in zip(self.before, results, strict=True)]
        return all(np.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in zip(after, expected, strict=True))


def dims_of_label(row, label):
    """For each operand, and each result, the dim with a label."""
    return [[None if label not in labels else labels.index(label) for labels in of] for of in row]


@pytest.mark.parametrize(("name", "function", "operands"), cases())
def test_a_row_says_what_the_primitive_does(name, function, operands):
    if function is None:
        if (found := call_of(name)) is None:
            pytest.skip("this jax has no function that calls it")
        function, operands = found
        if name in ("eq", "ne"):
            operands = operands[:1] * 2  # else one entry more that differs changes nothing
    eqn, ins = called_by(name, function, *operands)
    row, primitive = dims_of(eqn), Primitive(eqn, ins)
    labels = {label for of in (*row.operands, *row.results) for label in of} - {None}
    for label in labels:
        assert primitive.moves(*dims_of_label(row, label)), f"{label} of {row}"
    for r, j in [(r, j) for r, of in enumerate(row.results) for j in range(len(of))]:
        label = row.results[r][j]
        said = dims_of_label(row, label)[0] if label is not None else [None] * len(ins)
        said = [i if primitive.changes_with(k, r) else None for k, i in enumerate(said)]
        found = primitive.dims_followed(r, j)
        assert found == said or (label is None and not primitive.moves_with(found)), (r, j, found, row)


def test_each_row_has_a_case():
    missing = {name for name in dims.ROWS if not CASES.get(name) and call_of(name) is None}
    assert missing <= NO_CALL
    assert CASES.keys() <= dims.ROWS.keys()
