"""`check` on functions of other projects: bodies with specs, functions that map, any kind of mesh."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib import shardops
from shardlib.parsing import ShardError
from shardlib.proof.check import check
from shardlib.shardtypes import f32, typed_shard_map

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
SPECS = {"in_specs": P("d", "t"), "out_specs": P("d", "t")}
MESHES = {
    "abstract": lambda kind: AbstractMesh((2, 4), ("d", "t"), axis_types=(kind,) * 2),
    "of devices": lambda kind: jax.make_mesh((2, 4), ("d", "t"), axis_types=(kind,) * 2),
}
both_kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
each_mesh = pytest.mark.parametrize("mesh", MESHES)


def right(x):
    return jnp.exp(x) / jax.lax.psum(jnp.sum(jnp.exp(x), axis=1, keepdims=True), "t")


def wrong(x):
    return jax.nn.softmax(x, axis=1)


def refused(*args, **options):
    with pytest.raises(ShardError, match=r"^\S*test_check.py:\d+: \w+: a maximum over this device's block is used"):
        check(*args, **options)


@both_kinds
@each_mesh
def test_a_body_with_its_specs(mesh, kind):
    mesh = MESHES[mesh](kind)
    check(right, X, mesh=mesh, **SPECS)
    check(right, np.ones((8, 16), np.float32), mesh=mesh, **SPECS)
    refused(wrong, X, mesh=mesh, **SPECS)
    refused(wrong, X, mesh=mesh, check_vma=False, **SPECS)


@pytest.mark.parametrize("options", [{}, {"check_vma": False}])
def test_in_the_hosts_memory_a_value_is_the_same(options):
    options |= {"mesh": MESHES["abstract"](AxisType.Auto), **SPECS}
    there_and_back = lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)
    check(lambda x: right(there_and_back(x)), X, **options)
    check(lambda x: jax.lax.psum(there_and_back(x.sum()), ("d", "t")) * x, X, **options)
    refused(lambda x: wrong(there_and_back(x)), X, **options)


@each_mesh
def test_a_function_that_maps(mesh):
    mesh = MESHES[mesh](AxisType.Explicit)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d", "t")))
    check(lambda x: 2 * jax.shard_map(right, **SPECS)(x), x, mesh=mesh)
    refused(lambda x: 2 * jax.shard_map(wrong, **SPECS)(x), x, mesh=mesh)
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        refused(jax.jit(lambda x: jax.shard_map(wrong, **SPECS)(x)), x)


@both_kinds
def test_a_typed_function(kind):
    def typed(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
        return wrong(x)

    refused(typed_shard_map(typed), X, mesh=MESHES["abstract"](kind))


def test_pytrees_of_arguments_and_results():
    def update(state, g):
        return {"w": [state["w"][0] - 0.1 * jax.lax.pmean(g, "d")]}

    state, g = {"w": [jax.ShapeDtypeStruct((16,), jnp.float32)]}, X
    specs = {"in_specs": (P("t"), P("d", "t")), "out_specs": P("t"), "mesh": MESHES["abstract"](AxisType.Auto)}
    check(lambda state, g: update(state, jnp.mean(g, axis=0)), state, g, **specs)
    with pytest.raises(ShardError, match="multiplied into a value"):
        check(lambda state, g: update(state, jnp.sum(g, axis=0) / 4), state, g, **specs)


def test_one_entry_of_a_dim_on_each_device():
    """JAX traces a slice of one entry as a squeeze."""
    first = lambda x: x + jax.lax.psum(x[:, 0], "d")[:, None]
    options = {"mesh": MESHES["abstract"](AxisType.Auto), "in_specs": P(None, "t"), "out_specs": P(None, "t")}
    for size in (4, 8):
        x = jax.ShapeDtypeStruct((6, size), jnp.float32)
        check(lambda x: x + jax.lax.pmax(jnp.max(x, axis=1), "t")[:, None], x, **options)
        with pytest.raises(ShardError, match="along dim"):
            check(first, x, **options)


def test_a_jitted_function_on_one_mesh_after_the_other():
    """Collectives along one device have another form, which JAX's cache of traced functions has to know."""

    @jax.jit
    @typed_shard_map
    def body(x: f32["B M/d"], w: f32["M F/t"]) -> f32["B F/t"]:
        x = shardops.replicate("... -> ... *t", shardops.all_gather("B M/d -> B M", x, replicated=True))
        return shardops.einsum_unreduced("B M, M F/t -> B F/t", x, w)

    for sizes in ((2, 4), (1, 8), (8, 1), (2, 4)):
        mesh = AbstractMesh(sizes, ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
        check(body, jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32), mesh=mesh)


def test_a_choice_by_the_number_of_entries_of_a_device():
    options = {"mesh": MESHES["abstract"](AxisType.Auto), "in_specs": P("t"), "out_specs": P("t")}
    for size in (4, 8):
        with pytest.raises(ShardError, match=r"operations depend|another one on this mesh"):
            check(
                lambda x: jnp.sin(x) if x.shape[0] < 4 else x, jax.ShapeDtypeStruct((size, 6), jnp.float32), **options
            )


def test_a_choice_outside_of_shard_map():
    mesh = MESHES["abstract"](AxisType.Auto)
    double = lambda x: jax.shard_map(lambda x: 2 * x, in_specs=P("d"), out_specs=P("d"))(x)
    is_many = lambda: jax.sharding.get_abstract_mesh().shape["t"] > 1
    check(lambda x, y: double(x) + y, X, X, mesh=mesh)
    for wrong in (lambda x, y: double(x if is_many() else y), lambda x, y: (double(x), y)[is_many()]):
        with pytest.raises(ShardError, match=r"another value is used outside of jax\.shard_map"):
            check(wrong, X, X, mesh=mesh)


LOOKED_UP = {  # the entries of a block that an index finds, zero elsewhere
    "selected": lambda block, i, n: jnp.where(((i >= 0) & (i < n))[:, None], jnp.take(block, i, axis=0), 0),
    "clipped": lambda block, i, n: jnp.take(block, i, axis=0, mode="clip") * ((i >= 0) & (i < n))[:, None],
    "NaN times 0": lambda block, i, n: jnp.take(block, i, axis=0) * ((i >= 0) & (i < n))[:, None],
}


@pytest.mark.parametrize("how", LOOKED_UP)
def test_a_lookup_by_blocks(how):
    def lookup(table, ids):
        n = table.shape[0]
        return jax.lax.psum(LOOKED_UP[how](table, ids - n * jax.lax.axis_index("t"), n), "t")

    args = jax.ShapeDtypeStruct((16, 6), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    specs = {"in_specs": (P("t"), P()), "out_specs": P(), "mesh": MESHES["abstract"](AxisType.Auto)}
    if how != "NaN times 0":
        return check(lookup, *args, **specs)
    with pytest.raises(ShardError, match="are NaN, which a product with a mask does not remove"):
        check(lookup, *args, **specs)


def test_whole_positions_are_looked_up_by_blocks():
    def lookup(table):
        n = table.shape[0]
        i = jnp.arange(12) - n * jax.lax.axis_index("t")
        return jax.lax.psum(LOOKED_UP["selected"](table, i, n), "t")

    check(lookup, X, mesh=MESHES["abstract"](AxisType.Auto), in_specs=P("t"), out_specs=P())


def test_integers_are_compared_exactly():
    specs = {"in_specs": P("t"), "out_specs": P("t"), "mesh": MESHES["abstract"](AxisType.Auto)}
    draw = lambda seed: lambda x: x * jax.random.normal(jax.random.key(seed(x)))
    check(draw(lambda x: 20240101), X, **specs)
    with pytest.raises(ShardError):
        check(draw(lambda x: 20240101 + x.shape[0]), X, **specs)


def test_unsigned_partial_sums_wrap_around():
    specs = {"in_specs": P("d", "t"), "out_specs": P("t"), "mesh": MESHES["abstract"](AxisType.Auto)}
    x = jax.ShapeDtypeStruct(X.shape, jnp.uint32)
    late = lambda x: jax.lax.psum(jnp.sum(x, axis=0).astype(jnp.float32), "d")
    check(lambda x: jax.lax.psum(jnp.sum(x, axis=0), "d").astype(jnp.float32), x, **specs)
    with pytest.raises(ShardError, match="partial sum"):
        check(late, x, **specs)


def test_gradients_through_a_ring_of_python():
    """What the ring keeps for the backward pass differs in number between meshes."""

    def ring(x):
        total, n = jnp.sin(x), jax.lax.axis_size("t")
        for _ in range(n - 1):
            x = jax.lax.ppermute(x, "t", [(i, (i + 1) % n) for i in range(n)])
            total += jnp.sin(x)
        return total

    def loss(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
        run = lambda x: shardops.per_device("B/d M/t", ring, x, reason="the test says so")
        return jax.grad(lambda x: jnp.sum(run(x) ** 2))(x)

    check(typed_shard_map(loss), X, mesh=MESHES["abstract"](AxisType.Explicit))


def test_what_cannot_be_traced_on_several_meshes():
    mesh = MESHES["of devices"](AxisType.Auto)
    with pytest.raises(ValueError, match=r"bound to a mesh.* in check\(body, \*args, mesh=mesh, in_specs="):
        check(jax.shard_map(right, mesh=mesh, **SPECS), X, mesh=mesh)
    with pytest.raises(ValueError, match="no mesh is given, and none is in force"):
        check(right, X, **SPECS)


def test_the_example_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "soundness.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "AbstractMesh" in block)
    names = {"jax": jax, "jnp": jnp, "P": P, "AbstractMesh": AbstractMesh, "check": check}
    with pytest.raises(ShardError, match="a maximum over this device's block"):
        exec(code, names)


@pytest.mark.parametrize("verdict", ["wrong: it does not compute", "not proved, though it may be right"])
def test_wrong_and_not_proved_are_different_words(verdict):
    body = {"wrong": lambda x: x.sum(1), "not proved": wrong}[re.match("wrong|not proved", verdict)[0]]
    specs = {**SPECS, "out_specs": P("d") if verdict.startswith("wrong") else P("d", "t")}
    with pytest.raises(ShardError, match=rf"\n{verdict}[^\n]*$"):
        check(body, X, mesh=MESHES["abstract"](AxisType.Auto), check_vma=False, **specs)
