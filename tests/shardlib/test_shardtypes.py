"""Types on values: scopes, shardings, dataclasses of arrays, functions under `typed`,
`typed_shard_map`.

What is refused, with its message, is in refused_types.txt.
"""

import contextlib
import dataclasses
import functools
import sys
import traceback
import warnings
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlib import shardops, shardtypes
from shardlib.shardtypes import (
    Array,
    Scope,
    ShardError,
    Subset,
    bf16,
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


@pytest.fixture(scope="module")
def mesh_d4_t2():
    return jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture
def mesh(mesh_d4_t2):
    with jax.set_mesh(mesh_d4_t2):
        yield mesh_d4_t2


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    bias: f32["F/t"] | None


@pytree_dataclass
class Model:
    layers: Array["layers", Layer]
    norm: f32["M/t/d"]
    pair: tuple[f32["M"], bf16["V/t M/d"]]


# ---- types and scopes ----------------------------------------------------------------------------


NAMES = {"bf16": "bfloat16", "bool_": "bool"} | {f"f{n}": f"float{n}" for n in (16, 32, 64)}
NAMES |= {f"{kind[0]}{n}": f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)}


def test_every_dtype_checks_its_own_name():
    for name, own in NAMES.items():
        declared = getattr(shardtypes, name)

        @typed
        def fn(x: declared["B"]):
            return x

        for other in NAMES.values():
            refused = pytest.raises(
                ShardError, match=r"^\S+:\d+: fn, argument x: .*: dtype mismatch: "
            )
            with contextlib.nullcontext() if other == own else refused:
                fn(np.zeros(2, jnp.dtype(other)))


def module_level(x: f32["B"]) -> f32["B"]:
    return x


def test_sizes_hold_within_a_call_of_one_function():
    @typed
    def outer(x: f32["B M"]) -> f32["B M"]:
        typed(module_level)(x[0])  # which is not nested, wherever it is decorated
        return x

    for rows in (2, 5):
        outer(jnp.ones((rows, 3)))


def test_a_check_that_fails_binds_nothing():
    @typed
    def outer(x: f32["A"]) -> f32["A"]:
        with pytest.raises(ShardError, match=r"dtype mismatch"):
            y: f32["B"] = jnp.ones(5, jnp.int32)
        y: f32["B"] = jnp.ones(3)
        return x + y[0]

    outer(jnp.ones(2))


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


# ---- shardings -----------------------------------------------------------------------------------


def test_partition_specs_of_nested_types(mesh):
    def specs_of(t, like=0):
        return jax.tree.map(lambda s: s.spec, make_shardings(t, like))

    specs = specs_of(Model, Model(Layer(0, 0), 0, (0, 0)))
    assert specs.layers == Layer(w=P(None, "d", "t"), bias=P(None, "t"))
    assert specs.norm == P(("t", "d"))
    assert specs.pair == (P(None), P("t", "d"))
    assert specs_of(tuple[f32["B/d"], Layer], (0, Layer(0, 0))) == (
        P("d"),
        Layer(w=P("d", "t"), bias=P("t")),
    )
    assert specs_of(Array["a b", Array["c", f32["M/d"]]]) == P(None, None, None, "d")
    assert specs_of(f32["M"] | None) == P(None)


def test_shardings_take_the_mesh_in_force(mesh):
    assert make_shardings(f32["M/d F/t"]) == NamedSharding(mesh, P("d", "t"))
    layer = Layer(w=np.zeros((8, 4), np.float32), bias=None)
    shardings = make_shardings(Layer, like=layer)
    assert shardings == Layer(w=NamedSharding(mesh, P("d", "t")), bias=None)
    assert jax.tree.map(jax.device_put, layer, shardings).w.sharding == shardings.w


def test_shardings_inside_jit_and_on_an_abstract_mesh(mesh):
    zeros = jax.jit(lambda: jnp.zeros((8, 4), out_sharding=make_shardings(f32["M/d F/t"])))
    assert zeros().sharding.spec == P("d", "t")
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    ):
        assert jax.eval_shape(zeros).sharding.spec == P("d", "t")


# ---- dataclasses ---------------------------------------------------------------------------------


@pytree_dataclass
class Scaled:
    w: f32["M/d"]
    scale: float = dataclasses.field(metadata={"static": True})


@pytree_dataclass(frozen=True)
class Named:
    w: f32["M/d"]
    name: str = dataclasses.field(default="unnamed", metadata={"static": True})


def test_static_fields_pass_through_shard_map(mesh):
    @typed_shard_map
    def fn(x: Scaled) -> tuple[Scaled, Named]:
        return Scaled(x.w * x.scale, scale=x.scale + 1), Named(x.w, name="copied")

    scaled, named = fn(Scaled(np.arange(8, dtype=np.float32), scale=3.0))
    np.testing.assert_array_equal(scaled.w, 3 * np.arange(8))
    assert (scaled.scale, named.name) == (4.0, "copied")
    assert make_shardings(Scaled, like=scaled).scale == 4.0


def test_optional_parts_may_be_absent(mesh):
    @pytree_dataclass
    class Maybe:
        layer: Layer | None
        stack: Array["layers", Layer | None]
        x: f32["M"]

    @typed_shard_map
    def fn(x: Maybe) -> tuple[Maybe, f32["M"] | None]:
        return x, x.x if x.layer is None else None

    layer = Layer(w=np.ones((8, 4), np.float32), bias=None)
    stacked = jax.tree.map(lambda x: x[None], layer)
    for value in (
        Maybe(None, None, np.ones(8, np.float32)),
        Maybe(layer, stacked, np.ones(8, np.float32)),
    ):
        out, x = fn(value)
        assert jax.tree.structure(out) == jax.tree.structure(value)
        assert (x is None) == (value.layer is not None)


W = TypeVar("W")


@pytree_dataclass
class TwoWeights:
    a: f32["M/d"]
    b: f32["M/d N/t"]


@pytree_dataclass
class Moments(Generic[W]):
    weights: W
    second: Subset[W]
    average: W | None = None


@typed
def doubled(state: Moments[W], g: W) -> Moments[W]:
    return jax.tree.map(lambda x: 2 * x, state)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_generic_dataclass_is_checked_as_what_it_holds(mesh, is_whole):
    @typed_shard_map
    def step(state: Moments[TwoWeights], g: TwoWeights) -> Moments[TwoWeights]:
        return doubled(state, g)

    weights = TwoWeights(jnp.ones(8), jnp.ones((8, 4)))
    second = TwoWeights(jnp.ones(8), jnp.ones((8, 4)) if is_whole else None)
    out = jax.jit(step)(Moments(weights, second, weights if is_whole else None), weights)
    assert out.weights.b.sharding.spec == P("d", "t")
    np.testing.assert_array_equal(out.second.a, 2 * np.ones(8))
    assert (out.second.b is None) == (out.average is None) == (not is_whole)
    assert make_shardings(Moments[TwoWeights], like=out).weights.b.spec == P("d", "t")
    assert (make_shardings(Moments[TwoWeights], like=out).second.b is None) == (not is_whole)


# ---- typed ---------------------------------------------------------------------------------------


def test_arguments_and_result_by_name_and_with_defaults():
    @typed
    def fn(
        x: f32["B"], /, y: f32["B"] | None = None, *, z: f32["B"] = None, factor: float = 2.0
    ) -> f32["B"]:
        """Adds."""
        return x * factor + (0 if y is None else y)

    x = jnp.ones(3)
    assert (fn.__name__, fn.__doc__) == ("fn", "Adds.")
    np.testing.assert_array_equal(fn(x, z=x), 2)
    np.testing.assert_array_equal(fn(x, x, z=x, factor=3.0), 4)
    with pytest.raises(TypeError, match=r"missing"):
        fn()


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


class Base:
    factor = 2.0

    def scale(self):
        return self.factor


class Method(Base):
    @typed
    def scale(self, x: f32["B"]) -> f32["B"]:
        y: f32["B"] = x * super().scale()
        return y

    @staticmethod
    @typed
    def double(x: f32["B"]) -> f32["B"]:
        text = """
a line at the left margin, which dedenting the source would trip over
"""
        y: f32["B C"] = x[:, None]
        assert len(text.splitlines()) == 2
        return y


def test_methods():
    np.testing.assert_array_equal(Method().scale(jnp.ones(2)), 2)
    with pytest.raises(ShardError, match=r"^\S+:\d+: double, result: .*rank mismatch"):
        Method.double(jnp.ones(2))


def test_locals_that_cannot_be_checked_are_told():
    def fn(x: f32["B"]) -> f32["B"]:
        y: f32["B"] = x[:-1]
        return x + y[0]

    def without_locals(x: f32["B"]) -> f32["B"]:
        return x

    without_source = {"f32": f32}
    exec(
        "def fn(x: f32['B']) -> f32['B']:\n  y: f32['B'] = x[:-1]\n  return x + y[0]",
        without_source,
    )
    for unseen in (without_source["fn"], jax.checkpoint(fn)):
        with pytest.warns(
            UserWarning,
            match=r"typed\(\S*fn\): its annotated locals go unchecked: put @typed directly",
        ):
            unseen = typed(unseen)
        unseen(jnp.ones(3))
        with pytest.raises(ShardError, match=r"^\S+:\d+: fn, argument x"):
            unseen(jnp.ones((3, 3)))
    with warnings.catch_warnings(action="error"):
        typed(jax.checkpoint(without_locals))


def test_tracebacks_show_the_lines_of_the_file():
    @typed
    def fn(x: f32["B"]) -> f32["B"]:
        y: f32["B"] = x

        raise KeyError(y.shape)

    try:
        fn(jnp.ones(2))
    except KeyError:
        frame = traceback.extract_tb(sys.exc_info()[2])[-1]
    assert (frame.filename, frame.name, frame.line) == (__file__, "fn", "raise KeyError(y.shape)")
    assert fn.__wrapped__.__code__.co_firstlineno + 4 == frame.lineno


def test_tuples_on_axes_of_other_names():
    """Under axes `x` and `expert`: as numpy computes it."""
    Pair = tuple[f32["M F/expert"], f32["M"]]

    @typed_shard_map
    def step(x: f32["B/x M"], w: Pair) -> tuple[f32["B/x F/expert"], Pair]:
        return (x * w[1]) @ w[0], (2 * w[0], 2 * w[1])

    draw = np.random.default_rng(0).standard_normal
    x, w = draw((4, 6), np.float32), (draw((6, 8), np.float32), draw(6, np.float32))
    for sizes in ((2, 4), (1, 1)):
        with jax.set_mesh(
            jax.make_mesh(sizes, ("x", "expert"), axis_types=(AxisType.Explicit,) * 2)
        ):
            y, doubled = jax.jit(step)(x, w)
            assert jax.tree.map(lambda x: x.sharding, doubled) == make_shardings(Pair, like=doubled)
        np.testing.assert_allclose(y, (x * w[1]) @ w[0], rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b), doubled, w)


# ---- typed_shard_map -----------------------------------------------------------------------------


@typed_shard_map
def double(x: f32["B/d M"], w: Layer, factor: f32[""]) -> tuple[f32["B/d M"], Layer]:
    return x * factor, w


@pytest.mark.parametrize("jitted", [False, True])
def test_host_arrays_and_replicated_ones_are_placed(mesh, jitted):
    fn = jax.jit(double) if jitted else double
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    arguments = {
        "uncommitted": (jnp.asarray(X), Layer(jnp.asarray(w), jnp.asarray(w[0])), jnp.float32(2)),
        "replicated": (jax.device_put(X, NamedSharding(mesh, P())), Layer(w, None), np.float32(2)),
    }
    if not jitted:  # jit itself refuses an array on one device beside a mesh
        arguments = {
            "numpy": (X, Layer(w, w[0]), np.float32(2)),
            "on one device": (
                jax.device_put(X, SingleDeviceSharding(jax.devices()[0])),
                Layer(w, None),
                2.0,
            ),
            "exact": (
                jax.device_put(X, P("d")),
                Layer(jax.device_put(w, P("d", "t")), None),
                np.float32(2),
            ),
        }
    for x, layer, factor in arguments.values():
        out, weights = fn(x, layer, factor)
        np.testing.assert_array_equal(out, 2 * X)
        assert out.sharding.spec == P("d", None)
        assert weights.w.sharding.spec == P("d", "t")
        assert (weights.bias is None) == (layer.bias is None)


def test_exact_arrays_go_in_as_they_are(mesh, monkeypatch):
    x = jax.device_put(X, P("d"))
    layer = Layer(jax.device_put(X.reshape(4, 8), P("d", "t")), None)
    factor = jax.device_put(np.float32(2), P())
    monkeypatch.setattr(jax, "device_put", None)
    double(x, layer, factor)


@pytest.mark.parametrize("jitted", [False, True])
def test_arrays_sharded_otherwise_are_rejected(mesh, jitted):
    fn = jax.jit(double) if jitted else double
    layer = Layer(np.ones((4, 8), np.float32), None)
    for spec in (P("t"), P(None, "d"), P(("d", "t")), P("d", "t")):
        with pytest.raises(
            ShardError,
            match=r"^\S+:\d+: double, argument x: f32\['B/d M'\]: the array is sharded as \(",
        ):
            fn(jax.device_put(X, spec), layer, np.float32(2))
    with pytest.raises(
        ShardError,
        match=r"^\S+:\d+: double, argument w.w: f32\['M/d F/t'\]: the array is sharded as \(t, d\)",
    ):
        fn(X, Layer(jax.device_put(layer.w, P("t", "d")), None), np.float32(2))


def test_axes_of_one_device_shard_nothing():
    mesh = jax.make_mesh((8, 1), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("d", "t"))  # the same placement as ('d',)
        np.testing.assert_array_equal(typed_shard_map(identity)(x), X)
        np.testing.assert_array_equal(jax.jit(typed_shard_map(identity))(x), X)


def identity(x: f32["B/d M"]) -> f32["B/d M"]:
    return x


def test_result_that_is_the_same_everywhere_fits_a_sharded_type(mesh):
    @typed_shard_map
    def zeros(x: f32["B/d M"]) -> tuple[f32["B/d M"], f32["M"]]:
        return jnp.zeros(x.shape, x.dtype), jnp.ones(x.shape[1])

    np.testing.assert_array_equal(zeros(X)[0], np.zeros((8, 4)))


@pytest.mark.parametrize("jitted", [False, True])
def test_mesh_of_auto_axes(jitted):
    """JAX then tells no shardings while it traces: only whole arrays and, outside of jit, placed
    ones are checked.
    """
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        fn = jax.jit(double) if jitted else double
        layer = Layer(np.ones((4, 8), np.float32), None)
        for x in (X, jax.device_put(X, P("d"))):
            np.testing.assert_array_equal(fn(x, layer, np.float32(2))[0], 2 * X)
        if not jitted:
            with pytest.raises(ShardError, match=r"the array is sharded as"):
                fn(jax.device_put(X, P("t")), layer, np.float32(2))


# ---- the example of seqax's README, with its names: specs as bytes, typeguard, shardings by the ty


@pytest.fixture
def typechecked():
    typeguard = pytest.importorskip("typeguard")
    before = list(typeguard.checker_lookup_functions)
    shardtypes.register_with_typeguard()
    shardtypes.register_with_typeguard()
    assert len(typeguard.checker_lookup_functions) == len(before) + 1  # once is enough
    yield functools.partial(
        typeguard.typechecked, forward_ref_policy=typeguard.ForwardRefPolicy.ERROR
    )
    typeguard.checker_lookup_functions[:] = before


def test_the_example_of_seqax(mesh, typechecked):
    @pytree_dataclass
    class Weights:
        w1: f32["in hidden1/d"]
        w2: f32["hidden1 hidden2/d"]
        w3: f32["hidden2/d"]

    @typed_shard_map
    @typechecked
    def forward_pass(x: f32[b"batch/d in"], w: Weights) -> f32[b"batch/d"]:
        w1 = shardops.all_gather("in hidden1/d -> in hidden1", w.w1)
        y: f32[b"batch/d hidden1"] = jax.nn.relu(
            shardops.einsum_unreduced(b"batch/d in, in hidden1 -> batch/d hidden1", x, w1)
        )
        w2 = shardops.all_gather("hidden1 hidden2/d -> hidden1 hidden2", w.w2)
        z = jax.nn.relu(
            shardops.einsum_unreduced("batch/d hidden1, hidden1 hidden2 -> batch/d hidden2", y, w2)
        )
        w3 = shardops.all_gather("hidden2/d -> hidden2", w.w3)
        return shardops.einsum_unreduced("batch/d hidden2, hidden2 -> batch/d", z, w3)

    def draw(*shape):
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)

    x, dense = draw(32, 8), Weights(draw(8, 8), draw(8, 16), draw(16))
    w = jax.tree.map(jax.device_put, dense, make_shardings(Weights))
    expected = np.maximum(np.maximum(x @ dense.w1, 0) @ dense.w2, 0) @ dense.w3
    np.testing.assert_allclose(forward_pass(x, w), expected, rtol=1e-5)


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
        (
            (jnp.ones(2), None, 3),
            r"argument \"x\" .*: value: f32\['B M'\]: rank mismatch: `B M` has 2 dims",
        ),
        ((x, jnp.ones(7), 3), r'argument "y" (.|\n)*size mismatch: dim B is 2, but here it is 7'),
        (
            (x, None, 2),
            r"value assigned to z .*: f32\['M B'\]: size mismatch: dim M is 3, but here it is 2",
        ),
    ):
        with pytest.raises(typeguard.TypeCheckError, match=message):
            fn(*args)


def test_lists_dicts_and_options(mesh):
    """Of any number of arrays, in arguments and results; an option is a number of Python, and no
    data.
    """

    @typed_shard_map
    def fn(
        xs: list[f32["B/d M"]], w: dict[str, f32["N/d M"]], *, scale: float = 2.0, both: bool = True
    ) -> dict[str, tuple[f32["B/d N"], ...]]:
        whole = {name: shardops.all_gather("N/d M -> N M *d", x).T for name, x in w.items()}
        out = {
            name: tuple(scale * shardops.einsum_unreduced("B/d M, M N -> B/d N", x, y) for x in xs)
            for name, y in whole.items()
        }
        return out if both else {"b": out["b"]}

    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(8, 4)).astype(np.float32) for _ in range(3)]
    w = {name: rng.normal(size=(16, 4)).astype(np.float32) for name in "ba"}
    with jax.set_mesh(mesh):
        found, less = (
            jax.jit(fn)(xs, w),
            jax.jit(lambda *args: fn(*args, scale=3, both=False))(xs, w),
        )
        with pytest.raises(
            ShardError, match=r"fn: option scale is f32.*, but an array needs a type"
        ):
            fn(xs, w, scale=jnp.float32(1))
        with pytest.raises(ShardError, match="does not say how many it has"):
            make_shardings(list[f32["B/d M"]])
    expected = {name: tuple(x @ y.T for x in xs) for name, y in w.items()}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-4, atol=1e-5), found, expected
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-4, atol=1e-5),
        less,
        {"b": expected["b"]},
    )
