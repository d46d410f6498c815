"""What may enter and leave `typed_shard_map`, and where ops may stand: rejected with the argument, type and remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_mesh import MESH, on_mesh

from shardlib import shardops
from shardlib.shardops import (
    all_gather,
    all_to_all,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    replicate,
)
from shardlib.shardtypes import (
    Array,
    Scope,
    ShardError,
    dtype_name,
    f32,
    is_fully_sharded,
    make_shardings,
    pytree_dataclass,
    typed,
    typed_shard_map,
)

pytestmark = pytest.mark.quick


@pytree_dataclass
class Weights:
    w_up: f32["M/d F/t"]
    layers: Array["layers", f32["M/t/d"]]


def identity(x: f32["B/d M"]) -> f32["B/d M"]:
    return x


def x_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_dim_that_does_not_divide_by_its_axes():
    with jax.sharding.use_abstract_mesh(MESH):
        jax.eval_shape(typed_shard_map(identity), x_of(4, 3))
        with pytest.raises(
            ShardError,
            match=r"^\S+ identity, argument x: .*: dim B of size 3 is not divisible by its axes d, 2 devices\n"
            r"  value: f32\[3,3\] sharded as \(-, -\)\n.*mesh: d=2, t=2\n"
            r"  remedy: make B a multiple of 2, or shard it over fewer devices",
        ):
            jax.eval_shape(typed_shard_map(identity), x_of(3, 3))


def test_input_that_is_sharded_otherwise():
    with jax.sharding.use_abstract_mesh(MESH):
        like = lambda t: jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=make_shardings(t))
        jax.eval_shape(typed_shard_map(identity), like(f32["B/d M"]))
        jax.eval_shape(typed_shard_map(identity), like(f32["B M"]))  # replicated: only its own block is kept
        with pytest.raises(
            ShardError,
            match=r"^\S+:\d+: identity, argument x: f32\['B/d M'\]: the array is sharded as \(t, -\), but `B/d M` "
            r"says \(d, -\)\n"
            r"(.|\n)*remedy: place it with jax.device_put\(x, make_shardings\(type\)\), or inside jit with jax.reshard",
        ):
            jax.eval_shape(typed_shard_map(identity), like(f32["B/t M"]))


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (x_of(4), "rank mismatch: `B/d M` has 2 dims, the array has 1: [4]"),
        (x_of(4, 4, dtype=jnp.bfloat16), "dtype mismatch: bf16, where f32 is declared"),
        (np.zeros((4, 4), np.int32), "dtype mismatch: i32, where f32 is declared"),
    ],
)
def test_argument_of_another_type(argument, problem):
    with (
        jax.sharding.use_abstract_mesh(MESH),
        pytest.raises(ShardError, match=re.escape(f"identity, argument x: f32['B/d M']: {problem}\n  value: ")),
    ):
        jax.eval_shape(typed_shard_map(identity), argument)


def test_sizes_that_disagree_name_the_field():
    @typed_shard_map
    def fn(x: f32["B/d M"], w: Weights) -> f32["B/d M"]:
        return x

    weights = lambda m: Weights(w_up=x_of(m, 4), layers=x_of(3, m))
    with jax.sharding.use_abstract_mesh(MESH):
        jax.eval_shape(fn, x_of(4, 8), weights(8))
        with pytest.raises(
            ShardError,
            match=r"^\S+: fn, argument w: w_up: f32\['M/d F/t'\]: size mismatch: dim M is 8, but here it is 4\n",
        ):
            jax.eval_shape(fn, x_of(4, 8), weights(4))
        with pytest.raises(
            ShardError,
            match=r"^\S+ fn, argument w: value is dict .*, not a Weights\n  sizes so far: .*\n  remedy: pass a Weights",
        ):
            jax.eval_shape(fn, x_of(4, 8), {"w_up": x_of(8, 4)})


@pytest.mark.parametrize("mark", ["+t", "*t"])
def test_partial_sums_and_copies_cannot_cross_the_edge(mark):
    problem = (
        rf"f32\['B/d M \{mark}'\] has a \+ or \* mark: it exists inside shard_map only\n  remedy: reduce a partial sum"
    )

    def argument(x: f32[f"B/d M {mark}"]) -> f32["B/d M"]:
        return x

    def result(x: f32["B/d M"]) -> f32[f"B/d M {mark}"]:
        return x

    with pytest.raises(ShardError, match=rf"^\S+:\d+: typed_shard_map\(argument\): argument x: {problem}"):
        typed_shard_map(argument)
    with pytest.raises(ShardError, match=rf"^\S+:\d+: typed_shard_map\(result\): the result: {problem}"):
        typed_shard_map(result)


def test_annotation_is_missing():
    def argument(x, y: f32["B"]) -> f32["B"]:
        return y

    def result(y: f32["B"]):
        return y

    with pytest.raises(
        ShardError, match=r"^\S+:\d+: typed_shard_map\(argument\): argument x has no array type\n  remedy: annotate it"
    ):
        typed_shard_map(argument)
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: typed_shard_map\(result\): the result has no array type\n  remedy: annotate it"
    ):
        typed_shard_map(result)


def test_field_without_array_type_and_not_static():
    @pytree_dataclass
    class Loose:
        w: f32["M"]
        count: jax.Array

    def fn(w: Loose) -> f32["M"]:
        return w.w

    with pytest.raises(ShardError, match=r"argument w: count has no array type\n  remedy: .*metadata={'static': True}"):
        typed_shard_map(fn)


def test_gathered_array_as_the_result():
    def gathered(norm: f32["M/t/d"]) -> f32["M"]:
        return all_gather("M/t/d -> M", norm)

    with pytest.raises(
        ShardError,
        match=r"^\S+:\d+: fn, result: f32\['M'\]: a gathered array cannot leave shard_map\n"
        r"  value: f32\[8\] \{gathered over t, d\}\n"
        r"  remedy: return it as it was before, sharded over t, d",
    ):
        on_mesh(gathered, f32["M"])


def test_no_mesh_is_set():
    with pytest.raises(
        ShardError, match=r"^\S+:\d+: identity: no mesh is set\n  remedy: call it under `with jax.set_mesh\(mesh\):`"
    ):
        typed_shard_map(identity)(jnp.zeros((4, 4)))
    for needs_a_mesh in (make_shardings, is_fully_sharded):
        with pytest.raises(ShardError, match=r"^\S+:\d+: no mesh is set\n  remedy: run this under `with jax.set_mesh"):
            needs_a_mesh(Weights)


def test_shard_map_inside_shard_map():
    with pytest.raises(
        ShardError,
        match=r"^\S+:\d+: identity: called inside shard_map\n  remedy: decorate functions called there with typed",
    ):
        on_mesh(lambda losses: typed_shard_map(identity)(losses), f32["B/d L"])


OPS = {
    "all_gather": lambda x: all_gather("B/d M -> B M", x),
    "psum_scatter": lambda x: psum_scatter("B M +d -> B/d M", x),
    "psum": lambda x: psum("B M +d -> B M", x),
    "pmax": lambda x: pmax("B/d M -> M", x),
    "all_to_all": lambda x: all_to_all("B/d M -> B M/d", x),
    "ppermute": lambda x: ppermute("B/d M", x, axis="d", shift=1),
    "replicate": lambda x: replicate("B M -> B M *d", x),
    "axis_index": lambda x: shardops.axis_index("d"),
}


@pytest.mark.parametrize("name", OPS)
def test_collective_outside_of_shard_map(name):
    with (
        jax.sharding.use_abstract_mesh(MESH),
        pytest.raises(
            ShardError,
            match=rf"^\S+:\d+: {name}\('.*'\): called outside of shard_map, where no device is on its own\n(.|\n)*"
            r"remedy: call it under typed_shard_map",
        ),
    ):
        jax.eval_shape(OPS[name], x_of(4, 4))


def test_dtype_name_that_stands_for_nothing():
    act = dtype_name("act")

    @typed
    def fn(x: act["B"]) -> act["B"]:
        return x

    with Scope(act=jnp.bfloat16):
        fn(jnp.zeros(2, jnp.bfloat16))
        with pytest.raises(
            ShardError,
            match=r"^\S+:\d+: fn, argument x: act\['B'\]: dtype mismatch: f32, where bf16 \(act here\) is declared\n",
        ):
            fn(jnp.zeros(2, jnp.float32))
    with pytest.raises(
        ShardError, match=r"dtype name act is bound to no dtype here(.|\n)*remedy: run under `with Scope\(act=…\):`"
    ):
        fn(jnp.zeros(2, jnp.bfloat16))
