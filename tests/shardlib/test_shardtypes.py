"""Array types: the sizes and dtypes bound in scopes, shardings and partition specs, dataclasses of arrays."""

import dataclasses
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib.shardtypes import (
    Array,
    ArrayType,
    Scope,
    ShardError,
    Subset,
    bf16,
    bool_,
    dtype_name,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    is_fully_sharded,
    make_partition_specs,
    make_shardings,
    pytree_dataclass,
    scope,
    typed,
    typed_shard_map,
    u8,
    u16,
    u32,
    u64,
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


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    bias: f32["F/t"] | None


@pytree_dataclass
class Model:
    layers: Array["layers", Layer]
    norm: f32["M/t/d"]
    pair: tuple[f32["M"], bf16["V/t M/d"]]


# ---- types and scopes -------------------------------------------------------------------------------------------


def test_types_are_equal_for_one_spec():
    assert f32["B/d  M"] == f32[b"B/d M"]
    assert f32["B/d M"] != bf16["B/d M"]
    assert repr(f32["B/d M +t"]) == "f32['B/d M +t']"
    assert repr(Array["layers", f32["M"]]) == "Array['layers', f32['M']]"
    assert isinstance(f32["B"], ArrayType)
    assert f32["B"] | None == f32["B"] | None


@pytest.mark.parametrize("spec", ["[V] M", "..."])
def test_marks_of_ops_are_no_type_of_an_array(spec):
    with pytest.raises(
        ShardError, match=r"is not the type of an array\n  remedy: \[dim\] and ... belong to the specs of ops"
    ):
        f32[spec]


def test_every_dtype_checks_its_own_name():
    every = {bf16: jnp.bfloat16, f16: "float16", f32: "float32", f64: "float64", bool_: "bool"}
    every |= {i8: "int8", i16: "int16", i32: "int32", i64: "int64", u8: "uint8", u16: "uint16", u32: "uint32"}
    every |= {u64: "uint64"}
    for declared in every:
        assert declared.dtype == jnp.dtype(every[declared])
        for dtype in every.values():
            value = np.zeros(2, dtype)

            def fn(x):
                return x

            fn.__annotations__ = {"x": declared["B"]}
            check = typed(fn)
            if value.dtype == declared.dtype:
                check(value)
            else:
                with pytest.raises(ShardError, match=r"^\S+:\d+: fn, argument x: .*: dtype mismatch: "):
                    check(value)


def test_sizes_hold_within_a_call_and_no_longer():
    @typed
    def same(x: f32["B M"], y: f32["B N"]) -> f32["M N"]:
        return x.T @ y

    assert same(jnp.ones((2, 3)), jnp.ones((2, 4))).shape == (3, 4)
    assert same(jnp.ones((5, 3)), jnp.ones((5, 4))).shape == (3, 4)
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: same, argument y: f32\['B N'\]: size mismatch: dim B is 2, but here it is 5\n"
    ):
        same(jnp.ones((2, 3)), jnp.ones((5, 4)))
    assert same(jnp.ones((5, 3)), jnp.ones((5, 4))).shape == (3, 4)


def test_functions_that_call_one_another_do_not_share_sizes():
    @typed
    def inner(x: f32["B"]) -> f32["B"]:
        return x

    # inner is nested in this test, which is no typed function, so nothing of the caller's is known to it.
    @typed
    def outer(x: f32["B M"]) -> f32["B M"]:
        inner(x[0])
        return x

    outer(jnp.ones((2, 3)))


def test_nested_functions_start_from_the_sizes_around_them():
    @typed
    def outer(x: f32["B M"], rows: int) -> f32["B M"]:
        @typed
        def inner(y: f32["B"]) -> f32["B"]:
            return y

        inner(jnp.ones(rows))
        return x

    outer(jnp.ones((2, 3)), 2)
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: inner, argument y: f32\['B'\]: size mismatch: dim B is 2, but here it is 3"
    ):
        outer(jnp.ones((2, 3)), 3)


def module_level(x: f32["B"]) -> f32["B"]:
    return x


def test_a_function_of_a_module_is_not_nested_wherever_it_is_decorated():
    @typed
    def outer(x: f32["B M"]) -> f32["B M"]:
        typed(module_level)(x[0])
        return x

    outer(jnp.ones((2, 3)))


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
        with Scope(act=jnp.float32):
            assert bound() == jnp.float32
        assert bound() == jnp.bfloat16
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: dtype name act is bound to no dtype here\n  remedy: run under `with Scope\(act="
    ):
        bound()
    with pytest.raises(ShardError, match=r"'f32' is a dtype already"):
        dtype_name("f32")


def test_scopes_end_when_an_error_leaves_them():
    act = dtype_name("act")
    with pytest.raises(KeyError, match=r"left"), Scope(act=jnp.float32):
        raise KeyError("left")
    with pytest.raises(ShardError, match=r"is bound to no dtype"):
        _ = act.dtype


# ---- shardings --------------------------------------------------------------------------------------------------


def test_partition_specs_of_nested_types():
    specs = make_partition_specs(Model)
    assert specs.layers == Layer(w=P(None, "d", "t"), bias=P(None, "t"))
    assert specs.norm == P(("t", "d"))
    assert specs.pair == (P(None), P("t", "d"))
    assert make_partition_specs(tuple[f32["B/d"], Layer]) == (P("d"), Layer(w=P("d", "t"), bias=P("t")))
    assert make_partition_specs(Array["a b", Array["c", f32["M/d"]]]) == P(None, None, None, "d")
    assert make_partition_specs(f32["M"] | None) == P(None)


def test_partition_specs_of_a_type_without_arrays():
    for wrong in (int, tuple[int, int]):
        with pytest.raises(ShardError, match=r"holds no array types\n  remedy: use f32\["):
            make_partition_specs(wrong)
    with pytest.raises(ShardError, match=r"f32\['M \+t'\] has a \+ or \* mark"):
        make_partition_specs(f32["M +t"])


def test_shardings_take_the_mesh_in_force(mesh):
    assert make_shardings(f32["M/d F/t"]) == NamedSharding(mesh, P("d", "t"))
    layer = Layer(w=np.zeros((8, 4), np.float32), bias=None)
    shardings = make_shardings(Layer, like=layer)
    assert shardings == Layer(w=NamedSharding(mesh, P("d", "t")), bias=None)
    placed = jax.tree.map(jax.device_put, layer, shardings)
    assert placed.w.sharding == shardings.w
    with pytest.raises(ShardError, match=r"^\S+:\d+: axis q is not an axis of the mesh \(the mesh has d, t\)"):
        make_shardings(f32["M/q"])
    with pytest.raises(ShardError, match=r"^\S+:\d+: value is tuple .*, not a Layer"):
        make_shardings(Layer, like=(1, 2))


def test_shardings_inside_jit_and_on_an_abstract_mesh(mesh):
    zeros = jax.jit(lambda: jnp.zeros((8, 4), out_sharding=make_shardings(f32["M/d F/t"])))
    assert zeros().sharding.spec == P("d", "t")
    with jax.sharding.use_abstract_mesh(AbstractMesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)):
        assert jax.eval_shape(zeros).sharding.spec == P("d", "t")


def test_fully_sharded_means_every_one_of_d_t_p(mesh):
    assert is_fully_sharded(f32["M/t/d"])
    assert is_fully_sharded(f32["M/d F/t"])
    assert not is_fully_sharded(f32["M/d F"])
    assert not is_fully_sharded(Layer)  # its bias is not sharded over d
    assert is_fully_sharded(Array["layers", f32["M/t/d"]])
    with pytest.raises(ShardError, match=r"holds no array types"):
        is_fully_sharded(int)


def test_fully_sharded_does_not_ask_for_axes_the_mesh_lacks_nor_for_replicas():
    for axes, spec in ((("r", "d"), "M/d"), (("r",), "M"), (("d", "t", "p"), "M/t/d/p")):
        with jax.sharding.use_abstract_mesh(
            AbstractMesh((2,) * len(axes), axes, axis_types=(AxisType.Explicit,) * len(axes))
        ):
            assert is_fully_sharded(f32[spec])


# ---- dataclasses ------------------------------------------------------------------------------------------------


@pytree_dataclass
class Scaled:
    w: f32["M/d"]
    scale: float = dataclasses.field(metadata={"static": True})


@pytree_dataclass(frozen=True)
class Named:
    w: f32["M/d"]
    name: str = dataclasses.field(default="unnamed", metadata={"static": True})


def test_static_fields_are_structure_not_data(mesh):
    value = Scaled(np.arange(8, dtype=np.float32), scale=3.0)
    assert jax.tree.leaves(value) == [value.w]
    assert make_shardings(Scaled, like=value).scale == 3.0
    assert make_partition_specs(Scaled, like=value).w == P("d")
    assert make_partition_specs(Named) == Named(P("d"))
    with pytest.raises(
        ShardError,
        match=r"^\S+:\d+: Scaled.scale is static and has no default\n  remedy: pass a value of the type as `like`",
    ):
        make_shardings(Scaled)


def test_static_fields_pass_through_shard_map(mesh):
    @typed_shard_map
    def fn(x: Scaled) -> tuple[Scaled, Named]:
        return Scaled(x.w * x.scale, scale=x.scale + 1), Named(x.w, name="copied")

    scaled, named = fn(Scaled(np.arange(8, dtype=np.float32), scale=3.0))
    np.testing.assert_array_equal(scaled.w, 3 * np.arange(8))
    assert (scaled.scale, named.name) == (4.0, "copied")


def test_frozen_dataclasses():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Named(jnp.zeros(2)).name = "other"


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
    for value in (Maybe(None, None, np.ones(8, np.float32)), Maybe(layer, stacked, np.ones(8, np.float32))):
        out, x = fn(value)
        assert jax.tree.structure(out) == jax.tree.structure(value)
        assert (x is None) == (value.layer is not None)


# ---- generic dataclasses, subsets ---------------------------------------------------------------------------------

W = TypeVar("W")


@pytree_dataclass
class TwoWeights:
    a: f32["M/d"]
    b: f32["M/d N/t"]


@pytree_dataclass
class OneWeight:
    a: f32["M/d"]


@pytree_dataclass
class Moments(Generic[W]):
    weights: W
    second: Subset[W]


def moments(second=True) -> Moments:
    return Moments(
        TwoWeights(jnp.ones(8), jnp.ones((8, 4))), TwoWeights(jnp.ones(8), jnp.ones((8, 4)) if second else None)
    )


@typed
def doubled(state: Moments[W], g: W) -> Moments[W]:
    return jax.tree.map(lambda x: 2 * x, state)


@pytest.mark.parametrize("second", [True, False])
def test_a_generic_dataclass_is_checked_as_what_it_holds(mesh, second):
    @typed_shard_map
    def step(state: Moments[TwoWeights], g: TwoWeights) -> Moments[TwoWeights]:
        return doubled(state, g)

    out = jax.jit(step)(moments(second), moments().weights)
    assert out.weights.b.sharding.spec == P("d", "t")
    np.testing.assert_array_equal(out.second.a, 2 * np.ones(8))
    assert (out.second.b is None) == (not second)
    assert make_shardings(Moments[TwoWeights], like=out).weights.b.spec == P("d", "t")
    assert make_partition_specs(Moments[TwoWeights], like=out).second.b == (P("d", "t") if second else None)


def test_a_type_variable_is_one_class_in_a_call(mesh):
    @typed_shard_map
    def step(state: Moments[TwoWeights], g: OneWeight) -> Moments[TwoWeights]:
        return doubled(state, g)

    with pytest.raises(
        ShardError, match="doubled, argument g: value is a OneWeight, but ~W is TwoWeights in this call"
    ):
        jax.jit(step)(moments(), OneWeight(jnp.ones(8)))


def test_what_a_type_variable_holds_is_checked(mesh):
    @typed
    def kept(w: W) -> W:
        return w

    @typed_shard_map
    def step(state: Moments[TwoWeights]) -> Moments[TwoWeights]:
        return Moments(
            kept(TwoWeights(jax.lax.all_gather(state.weights.a, "d", tiled=True), state.weights.b)), state.second
        )

    with pytest.raises(ShardError, match=r"kept, argument w: b: f32\['M/d N/t'\]: size mismatch: dim M is 32"):
        jax.jit(step)(moments())

    with pytest.raises(ShardError, match="where ~W must be a dataclass of arrays"):
        kept(3)


def test_arrays_outside_of_a_subset_may_not_be_absent(mesh):
    @typed_shard_map
    def step(state: Moments[TwoWeights]) -> Moments[TwoWeights]:
        return state

    state = moments()
    state.weights.b = None
    with pytest.raises(ShardError, match=r"weights\.b: f32\['M/d N/t'\]"):
        jax.jit(step)(state)


def test_the_boundary_needs_to_know_the_class():
    with pytest.raises(ShardError, match=r"argument state: weights: ~W is bound to no class here"):

        @typed_shard_map
        def step(state: Moments) -> Moments[TwoWeights]:
            return state
