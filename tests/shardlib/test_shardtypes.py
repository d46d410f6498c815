"""Types on values: scopes, shardings, dataclasses of arrays, functions under `typed`,
`typed_shard_map`.

What is refused, with its message, is in refused_types.txt.
"""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlib import shardops, shardtypes
from shardlib.shardtypes import (
    Scope,
    ShardError,
    dtype_name,
    f32,
    make_shardings,
    pytree_dataclass,
    scope,
    typed,
    typed_shard_map,
)

pytestmark = pytest.mark.quick

P = PartitionSpec
X = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture
def mesh():
    found = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(found):
        yield found


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    bias: f32["F/t"] | None


# ---- types and scopes ----------------------------------------------------------------------------


def test_scope_names_dtypes_inwards():
    act = dtype_name("act")

    @scope
    def bound():
        return act.dtype

    with Scope(act=jnp.bfloat16):
        assert bound() == jnp.bfloat16
        with contextlib.suppress(KeyError), Scope(act=jnp.float32):
            assert bound() == jnp.float32
            raise KeyError("left")
        assert bound() == jnp.bfloat16
    with pytest.raises(ShardError, match=r"dtype name act is not bound to a dtype"):
        bound()


# ---- typed ---------------------------------------------------------------------------------------


def test_annotated_locals_with_closures_and_nested_functions():
    factor = 3.0

    @typed
    def outer(x: f32["B"]) -> f32["B"]:
        total = 0.0

        def inner(y):
            nonlocal total
            z: f32["C"] = y * factor
            total += 1.0
            return z

        later: f32["B"]  # declared, not assigned
        a: f32["B"] = x + 1
        assert inner(jnp.ones(4))[0] == inner(jnp.ones(4))[0] == factor
        later = a * total
        return later

    np.testing.assert_array_equal(outer(jnp.ones(2)), 4)


def test_locals_that_cannot_be_checked_are_told():
    def fn(x: f32["B"]) -> f32["B"]:
        y: f32["B"] = x[:-1]
        return x + y[0]

    def without_locals(x: f32["B"]) -> f32["B"]:
        return x

    names = {"f32": f32}
    exec("def fn(x: f32['B']) -> f32['B']:\n  y: f32['B'] = x[:-1]\n  return x + y[0]", names)
    warning = r"typed\(\S*fn\): its annotated locals go unchecked: put @typed directly"
    for unseen in (names["fn"], jax.checkpoint(fn)):
        with pytest.warns(UserWarning, match=warning):
            unseen = typed(unseen)
        unseen(jnp.ones(3))
        with pytest.raises(ShardError, match=r"^\S+:\d+: fn, argument x"):
            unseen(jnp.ones((3, 3)))
    with warnings.catch_warnings(action="error"):
        typed(jax.checkpoint(without_locals))


# ---- typed_shard_map -----------------------------------------------------------------------------


@typed_shard_map
def double(x: f32["B/d M"], w: Layer, factor: f32[""]) -> tuple[f32["B/d M"], Layer]:
    return x * factor, w


@pytest.mark.parametrize("jitted", [False, True])
def test_host_arrays_and_replicated_ones_are_placed(mesh, jitted):
    fn = jax.jit(double) if jitted else double
    w, two = X.reshape(4, 8), np.float32(2)
    arguments = [
        (jnp.asarray(X), Layer(jnp.asarray(w), jnp.asarray(w[0])), jnp.float32(2)),
        (jax.device_put(X, NamedSharding(mesh, P())), Layer(w, None), two),
    ]
    if not jitted:  # jit itself refuses an array on one device beside a mesh
        on_one = jax.device_put(X, SingleDeviceSharding(jax.devices()[0]))
        exact = jax.device_put(X, P("d")), Layer(jax.device_put(w, P("d", "t")), None)
        arguments = [(X, Layer(w, w[0]), two), (on_one, Layer(w, None), 2.0), (*exact, two)]
    for x, layer, factor in arguments:
        out, weights = fn(x, layer, factor)
        np.testing.assert_array_equal(out, 2 * X)
        assert out.sharding.spec == P("d", None)
        assert weights.w.sharding.spec == P("d", "t")
        assert (weights.bias is None) == (layer.bias is None)


@pytest.mark.parametrize("jitted", [False, True])
def test_arrays_sharded_otherwise_are_rejected(mesh, jitted):
    fn = jax.jit(double) if jitted else double
    w = np.ones((4, 8), np.float32)
    message = r"^\S+:\d+: double, argument {}: f32\['{}'\]: the array is sharded as \("
    for spec in (P("t"), P(None, "d"), P(("d", "t")), P("d", "t")):
        with pytest.raises(ShardError, match=message.format("x", "B/d M")):
            fn(jax.device_put(X, spec), Layer(w, None), np.float32(2))
    with pytest.raises(ShardError, match=message.format("w.w", "M/d F/t") + r"t, d\)"):
        fn(X, Layer(jax.device_put(w, P("t", "d")), None), np.float32(2))


def test_lists_dicts_and_options(mesh):
    """Of any number of arrays, in arguments and results; an option is a number of Python, and no
    data.
    """

    @typed_shard_map
    def fn(
        xs: list[f32["B/d M"]], w: dict[str, f32["N/d M"]], *, scale: float = 2.0, both: bool = True
    ) -> dict[str, tuple[f32["B/d N"], ...]]:
        whole = {name: shardops.all_gather("N/d M -> N M *d", x).T for name, x in w.items()}
        product = functools.partial(shardops.einsum_unreduced, "B/d M, M N -> B/d N")
        out = {name: tuple(scale * product(x, y) for x in xs) for name, y in whole.items()}
        return out if both else {"b": out["b"]}

    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(8, 4)).astype(np.float32) for _ in range(3)]
    w = {name: rng.normal(size=(16, 4)).astype(np.float32) for name in "ba"}
    found = jax.jit(fn)(xs, w), jax.jit(lambda *args: fn(*args, scale=3, both=False))(xs, w)
    both = {name: tuple(2 * x @ y.T for x in xs) for name, y in w.items()}
    expected = both, {"b": tuple(1.5 * x for x in both["b"])}
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, found, expected)
    with pytest.raises(ShardError, match=r"fn: option scale is f32.*, but an array needs a type"):
        fn(xs, w, scale=jnp.float32(1))
    with pytest.raises(ShardError, match="does not say how many it has"):
        make_shardings(list[f32["B/d M"]])


# ---- as seqax: specs as bytes, typeguard ---------------------------------------------------------


@pytest.fixture
def typechecked():
    typeguard = pytest.importorskip("typeguard")
    before = [*typeguard.checker_lookup_functions]
    for _ in range(2):
        shardtypes.register_with_typeguard()
    assert len(typeguard.checker_lookup_functions) == len(before) + 1  # once is enough
    policy = typeguard.ForwardRefPolicy.ERROR
    yield functools.partial(typeguard.typechecked, forward_ref_policy=policy)
    typeguard.checker_lookup_functions[:] = before


def test_typeguard_checks_arguments_locals_and_results(typechecked):
    import typeguard

    @scope
    @typechecked
    def fn(x: f32[b"B M"], y: f32[b"B"] | None, rows: int) -> f32[b"M"]:
        z: f32[b"M B"] = x.T[:rows]
        return z[:, 0] if rows else x

    x = jnp.ones((2, 3))
    assert fn(x, None, 3).shape == (3,)
    for args, message in (
        ((jnp.ones(2), None, 3), r"argument \"x\" .*f32\['B M'\]: rank mismatch: `B M` has 2 dims"),
        ((x, jnp.ones(7), 3), r'argument "y" (.|\n)*size mismatch: dim B is 2, but here it is 7'),
        ((x, None, 2), r"assigned to z .*: f32\['M B'\]: size mismatch: dim M is 3, but here it"),
    ):
        with pytest.raises(typeguard.TypeCheckError, match=message):
            fn(*args)
