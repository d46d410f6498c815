"""Functions checked by `typed` and typeguard, and how `typed_shard_map` takes its arguments and gives its results."""

import functools
import sys
import traceback
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlib import shardops
from shardlib.shardtypes import (
    Scope,
    ShardError,
    bf16,
    bool_,
    dtype_name,
    f32,
    make_shardings,
    pytree_dataclass,
    register_with_typeguard,
    scope,
    typed,
    typed_shard_map,
)

pytestmark = pytest.mark.quick

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh_d4_t2():
    return jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture
def mesh(mesh_d4_t2):
    with jax.set_mesh(mesh_d4_t2):
        yield mesh_d4_t2


class Moments(NamedTuple):
    first: f32["M F/expert"]
    second: f32["M"]


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    bias: f32["F/t"] | None


# ---- typed ------------------------------------------------------------------------------------------------------


def test_arguments_and_result_by_name_and_with_defaults():
    @typed
    def fn(x: f32["B"], /, y: f32["B"] | None = None, *, z: f32["B"] = None, factor: float = 2.0) -> f32["B"]:
        """Adds."""
        return x * factor + (0 if y is None else y)

    x = jnp.ones(3)
    assert (fn.__name__, fn.__doc__) == ("fn", "Adds.")
    np.testing.assert_array_equal(fn(x, z=x), 2)
    np.testing.assert_array_equal(fn(x, x, z=x, factor=3.0), 4)
    with pytest.raises(
        ShardError,
        match=r"^\S+:\d+: fn, argument z: f32\['B'\]: a NoneType is not an array\n(.|\n)*remedy: pass an array",
    ):
        fn(x)
    with pytest.raises(ShardError, match=r"^\S+:\d+: fn, argument y: .*size mismatch: dim B is 3, but here it is 4"):
        fn(x, jnp.ones(4), z=x)
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: fn, result: .*rank mismatch: `B` has 1 dims, the array has 2: \[3, 3\]"
    ):
        fn(x, jnp.ones((3, 3))[0], z=x, factor=jnp.ones((3, 1)))
    with pytest.raises(TypeError, match=r"missing"):
        fn()


def test_tuples_and_dataclasses_name_their_parts():
    @typed
    def fn(pair: tuple[f32["B"], tuple[int, f32["B"]]], layer: Layer) -> tuple[f32["B"], Layer]:
        return pair[0], layer

    ones = lambda *shape: np.ones(shape, np.float32)
    layer = Layer(ones(2, 2), None)
    with jax.set_mesh(jax.make_mesh((1, 1), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)):
        fn((ones(2), (1, ones(2))), layer)
        with pytest.raises(
            ShardError, match=r"^\S+:\d+: fn, argument pair: \[1\]\[1\]: f32\['B'\]: size mismatch: dim B is 2"
        ):
            fn((ones(2), (1, ones(3))), layer)
        with pytest.raises(
            ShardError, match=r"^\S+:\d+: fn, argument pair: value: tuple\[.* needs a tuple of 2, not 3\n"
        ):
            fn((ones(2), 1, 2), layer)
        with pytest.raises(
            ShardError,
            match=r"^\S+:\d+: fn, argument layer: bias: f32\['F/t'\]: size mismatch: dim F is 2, but here it is 5",
        ):
            fn((ones(2), (1, ones(2))), Layer(ones(2, 2), ones(5)))


def test_annotated_locals_with_closures_and_nested_functions():
    factor = 3.0
    act = dtype_name("act")

    @typed
    def outer(x: f32["B"], shapes: tuple) -> f32["B"]:
        total = 0.0

        def inner(y):
            nonlocal total
            z: f32["C"] = y * factor
            total += 1.0
            return z

        plain: int = "of no interest"
        later: f32["B"]  # declared, not assigned
        a: act["B"] = x + 1
        inner(jnp.ones(shapes[0]))
        inner(jnp.ones(shapes[1]))
        later = a * total
        assert plain == "of no interest"
        return later

    with Scope(act=jnp.float32):
        np.testing.assert_array_equal(outer(jnp.ones(2), (4, 4)), 4)
        with pytest.raises(
            ShardError, match=r"^\S+:\d+: outer, local z: f32\['C'\]: size mismatch: dim C is 4, but here it is 5"
        ):
            outer(jnp.ones(2), (4, 5))
    with (
        Scope(act=jnp.bfloat16),
        pytest.raises(ShardError, match=r"^\S+:\d+: outer, local a: act\['B'\]: dtype mismatch: f32"),
    ):
        outer(jnp.ones(2), (4, 4))


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


def test_other_decorators_stand_above_typed():
    @jax.jit
    @jax.checkpoint
    @typed
    def fn(x: f32["B"]) -> f32["B"]:
        y: f32["B"] = x[:-1]
        return y

    with pytest.raises(ShardError, match=r"^\S+:\d+: fn, local y: .*size mismatch: dim B is 3, but here it is 2"):
        fn(jnp.ones(3))

    @typed
    @jax.checkpoint
    def arguments_only(x: f32["B"]) -> f32["B"]:
        return x

    arguments_only(jnp.ones(3))
    with pytest.raises(ShardError, match=r"is decorated below .*\n  remedy: put @typed directly above its def"):

        @typed
        @jax.checkpoint
        def hidden(x: f32["B"]) -> f32["B"]:
            y: f32["B"] = x
            return y


def test_shard_map_above_other_decorators(mesh):
    @typed_shard_map
    @jax.checkpoint
    @typed
    def fn(x: f32["B/d"]) -> f32["B/d"]:
        y: f32["B"] = x
        return y

    with pytest.raises(ShardError, match=r"^\S+:\d+: fn, local y: .*the value differs between devices of d"):
        fn(np.ones(8, np.float32))


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


def test_function_without_source_is_checked_but_for_its_locals():
    namespace = {"f32": f32}
    exec("def fn(x: f32['B']) -> f32['B']:\n  y: f32['B'] = x[:-1]\n  return x", namespace)
    with pytest.warns(
        UserWarning, match=r"typed\(fn\): Python finds no source for it, so its annotated locals go unchecked"
    ):
        fn = typed(namespace["fn"])
    fn(jnp.ones(3))
    with pytest.raises(ShardError, match=r"^\S+:\d+: fn, argument x"):
        fn(jnp.ones((3, 3)))


@pytest.mark.parametrize("annotation", [set[f32["B"]], f32["B"] | bf16["B"]])
def test_annotations_out_of_reach_are_errors_not_ignored(annotation):
    def fn(x):
        return x

    fn.__annotations__ = {"x": annotation}
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: the arrays in .* cannot be checked\n  remedy: annotate with array types"
    ):
        typed(fn)


def test_parts_of_lists_and_dicts_are_checked_by_name():
    @typed
    def fn(w: dict[str, f32["M N"]], xs: list[f32["M"]] | None = None) -> tuple[f32["M"], ...]:
        return tuple(xs or ())

    w = {"b": jnp.ones((3, 4)), "a": jnp.ones((3, 4))}
    assert fn(w) == ()
    assert len(fn(w, [jnp.ones(3)] * 2)) == 2
    for args, text in (
        (({"b": jnp.ones(3)},), r"fn, argument w: \['b'\]: f32\['M N'\]"),
        ((w, [jnp.ones(3), jnp.ones(4)]), r"fn, argument xs: \[1\]: f32\['M'\]: size mismatch"),
        ((w, (jnp.ones(3),)), r"argument xs: value is a tuple, not a list\n(.|\n)*remedy: pass a list"),
        (([w["a"]],), r"argument w: value is a list, not a dict"),
    ):
        with pytest.raises(ShardError, match=text):
            fn(*args)


def test_star_arguments_are_errors_not_ignored():
    def fn(*xs: f32["B"]):
        return xs

    with pytest.raises(ShardError, match=r"fn: array types on \*xs\n  remedy: name each argument"):
        typed(fn)


def test_lists_dicts_and_named_tuples_on_axes_of_other_names():
    """Any number of arrays, in the order of the caller, under axes `x` and `expert`: as numpy computes it."""

    @typed_shard_map
    def step(
        w: dict[str, f32["M F/expert"]], xs: list[f32["B/x M"]], masks: tuple[bool_["B/x"], ...], m: Moments
    ) -> tuple[list[f32["B/x F/expert"]], dict[str, f32["M F/expert"]], Moments]:
        ys = [jnp.where(mask[:, None], x @ w["up"] + w["bias"][:1], 0.0) for x, mask in zip(xs, masks, strict=True)]
        return ys, {name: 2 * value for name, value in w.items()}, Moments(m.first + w["up"], m.second)

    draw = np.random.default_rng(0).standard_normal
    w = {"up": draw((6, 8), np.float32), "bias": draw((6, 8), np.float32)}
    xs, masks = [draw((4, 6), np.float32) for _ in range(3)], tuple(draw(4) > 0 for _ in range(3))
    for sizes in ((2, 4), (1, 1)):
        with jax.set_mesh(jax.make_mesh(sizes, ("x", "expert"), axis_types=(AxisType.Explicit,) * 2)):
            ys, doubled, m = jax.jit(step)(w, xs, masks, Moments(w["up"], xs[0][0]))
            assert jax.tree.map(lambda x: x.sharding, m) == make_shardings(Moments)
        for y, x, mask in zip(ys, xs, masks, strict=True):
            np.testing.assert_allclose(y, np.where(mask[:, None], x @ w["up"] + w["bias"][:1], 0), rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b), doubled, w)
        np.testing.assert_array_equal(m.first, 2 * w["up"])


def test_shardings_of_a_list_ask_for_its_length(mesh):
    x = [jnp.ones((4, 4))] * 2
    assert [s.spec for s in make_shardings(list[f32["M/d N"]], like=x)] == [P("d", None)] * 2
    with pytest.raises(ShardError, match=r"does not say how many arrays it holds\n  remedy: pass a value .* as `like`"):
        make_shardings(list[f32["M/d N"]])


# ---- typed_shard_map --------------------------------------------------------------------------------------------


@typed_shard_map
def double(x: f32["B/d M"], w: Layer, factor: f32[""]) -> tuple[f32["B/d M"], Layer]:
    return x * factor, w


X = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.mark.parametrize("jitted", [False, True])
def test_host_arrays_and_replicated_ones_are_placed(mesh, jitted):
    fn = jax.jit(double) if jitted else double
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    arguments = {
        "numpy": (X, Layer(w, w[0]), np.float32(2)),
        "uncommitted": (jnp.asarray(X), Layer(jnp.asarray(w), jnp.asarray(w[0])), jnp.float32(2)),
        "on one device": (jax.device_put(X, SingleDeviceSharding(jax.devices()[0])), Layer(w, None), np.float32(2)),
        "replicated": (jax.device_put(X, NamedSharding(mesh, P())), Layer(w, None), np.float32(2)),
        "exact": (jax.device_put(X, P("d")), Layer(jax.device_put(w, P("d", "t")), None), np.float32(2)),
    }
    if not jitted:
        arguments["python scalar"] = (X, Layer(w, None), 2.0)
    for name, (x, layer, factor) in arguments.items():
        if jitted and name == "on one device":
            continue  # jit itself refuses it beside a mesh
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
            ShardError, match=r"^\S+:\d+: double, argument x: f32\['B/d M'\]: the array is sharded as \("
        ):
            fn(jax.device_put(X, spec), layer, np.float32(2))
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: double, argument w: w: f32\['M/d F/t'\]: the array is sharded as \(t, d\)"
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


def test_keyword_only_and_positional_only_arguments(mesh):
    @typed_shard_map
    def fn(x: f32["B/d M"], /, *, y: f32["B/d M"]) -> f32["B/d M"]:
        return x - y

    np.testing.assert_array_equal(fn(X, y=X), 0)


def test_result_that_is_the_same_everywhere_fits_a_sharded_type(mesh):
    @typed_shard_map
    def zeros(x: f32["B/d M"]) -> tuple[f32["B/d M"], f32["M"]]:
        return jnp.zeros(x.shape, x.dtype), jnp.ones(x.shape[1])

    np.testing.assert_array_equal(zeros(X)[0], np.zeros((8, 4)))


@pytest.mark.parametrize("jitted", [False, True])
def test_mesh_of_auto_axes(jitted):
    """JAX then tells no shardings while it traces: only whole arrays and, outside of jit, placed ones are checked."""
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        fn = jax.jit(double) if jitted else double
        layer = Layer(np.ones((4, 8), np.float32), None)
        for x in (X, jax.device_put(X, P("d"))):
            np.testing.assert_array_equal(fn(x, layer, np.float32(2))[0], 2 * X)
        if not jitted:
            with pytest.raises(ShardError, match=r"the array is sharded as"):
                fn(jax.device_put(X, P("t")), layer, np.float32(2))


def test_a_step_for_2048_devices_is_checked_without_any():
    @typed_shard_map
    def step(x: f32["B/d M"], w: f32["M/d F/t"]) -> tuple[f32[""], f32["M/d F/t"]]:
        def loss(w):
            y = shardops.einsum_unreduced(
                "B/d M, M F/t -> B/d F/t",
                shardops.replicate("B/d M -> B/d M *t", x),
                shardops.all_gather("M/d F/t -> M F/t", w),
            )
            return shardops.psum("+t +d ->", shardops.einsum_unreduced("B/d F/t, B/d F/t -> +t +d", y, y))

        return jax.value_and_grad(loss)(w)

    mesh = AbstractMesh((256, 8), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        loss, grad = jax.eval_shape(step, array(512, 1024), array(1024, 64))
        assert (loss.shape, grad.shape, grad.sharding.spec) == ((), (1024, 64), P("d", "t"))
        with pytest.raises(ShardError, match=r"dim M of size 1000 is not divisible by its axes d, 256 devices"):
            jax.eval_shape(step, array(512, 1000), array(1000, 64))


def test_inside_jit_grad_and_vmap_free_code(mesh):
    """The map is an ordinary differentiable function of whole arrays."""

    @typed_shard_map
    def total(x: f32["B/d M/t"]) -> f32[""]:
        return shardops.psum("+t +d ->", shardops.einsum_unreduced("B/d M/t -> +t +d", jnp.square(x)))

    grad = jax.jit(jax.grad(total))(X)
    np.testing.assert_allclose(grad, 2 * X)
    loop = lax.fori_loop(0, 3, lambda _, x: x - 0.5 * jax.grad(total)(x), jax.device_put(X, P("d", "t")))
    np.testing.assert_allclose(loop, 0)


# ---- typeguard --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def typechecked():
    typeguard = pytest.importorskip("typeguard")
    before = list(typeguard.checker_lookup_functions)
    register_with_typeguard()
    register_with_typeguard()
    assert len(typeguard.checker_lookup_functions) == len(before) + 1  # once is enough
    yield functools.partial(typeguard.typechecked, forward_ref_policy=typeguard.ForwardRefPolicy.ERROR)
    typeguard.checker_lookup_functions[:] = before


def test_typeguard_checks_arguments_locals_and_results(typechecked):
    import typeguard

    @scope
    @typechecked
    def fn(x: f32[b"B M"], y: f32[b"B"] | None, rows: int, layer: Layer | None = None) -> f32[b"M"]:
        z: f32[b"M B"] = x.T[:rows]
        return z[:, 0] if rows else x

    x = jnp.ones((2, 3))
    assert fn(x, None, 3).shape == (3,)
    assert fn(jnp.ones((4, 5)), jnp.ones(4), 5).shape == (5,)
    with pytest.raises(
        ShardError, match=r'^\S+:\d+: argument "x" .*: f32\[\'B M\'\]: rank mismatch: `B M` has 2 dims, the array has 1'
    ) as raised:
        fn(jnp.ones(2), None, 3)
    assert isinstance(raised.value, typeguard.TypeCheckError)
    with pytest.raises(
        typeguard.TypeCheckError, match=r'argument "y" (.|\n)*size mismatch: dim B is 2, but here it is 7'
    ):
        fn(x, jnp.ones(7), 3)
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: value assigned to z .*: f32\['M B'\]: size mismatch: dim M is 3, but here it is 2"
    ):
        fn(x, None, 2)
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: the return value .*: f32\['M'\]: rank mismatch|^\S+: value assigned to z"
    ):
        fn(x, None, 0)
    with pytest.raises(typeguard.TypeCheckError, match=r'argument "layer"(.|\n)*not a Layer'):
        fn(x, None, 3, {"w": x})


def test_typeguard_inside_shard_map(typechecked, mesh):
    @typed_shard_map
    @typechecked
    def fn(x: f32[b"B/d M"]) -> f32[b"B/d"]:
        total: f32[b"B"] = jnp.sum(x, axis=1)
        return total

    with pytest.raises(ShardError, match=r"^\S+:\d+: fn, local total: .*: the value differs between devices of d"):
        fn(X)
