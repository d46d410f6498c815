"""`check` on functions of other projects: bodies with specs, functions that map, any kind of
mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib import shardops
from shardlib.exact import check
from shardlib.parsing import ShardError
from shardlib.shardtypes import f32, typed_shard_map

MESHES = {
    "abstract": lambda kind: AbstractMesh((2, 4), ("d", "t"), axis_types=(kind,) * 2),
    "of devices": lambda kind: jax.make_mesh((2, 4), ("d", "t"), axis_types=(kind,) * 2),
}
AUTO = MESHES["abstract"](AxisType.Auto)
each_mesh = pytest.mark.parametrize("mesh", MESHES)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, BLOCKS = shape(8, 16), P("d", "t")
SPECS: dict[str, Any] = {"in_specs": BLOCKS, "out_specs": BLOCKS}
OWN_MAXIMUM = "operand 1 is this device's maximum, used as if it were that over t"
WRONG = r"\nwrong: it does not compute what one device computes"


def verdict(problem, function, *args, mesh=AUTO, **specs):
    """Accepted, or refused with what the regular expression `problem` finds, at a line of this
    file.
    """
    if problem is None:
        return check(function, *args, mesh=mesh, **specs)
    with pytest.raises(ShardError, match=problem):
        check(function, *args, mesh=mesh, **specs)


def refused(*args, **options):
    verdict(rf"^\S*test_verdicts.py:\d+: sub: {OWN_MAXIMUM}", *args, **options)


def right(x):
    return jnp.exp(x) / lax.psum(jnp.sum(jnp.exp(x), axis=1, keepdims=True), "t")


def wrong(x):
    return jax.nn.softmax(x, axis=1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@each_mesh
def test_a_body_with_its_specs(mesh, kind):
    mesh = MESHES[mesh](kind)
    check(right, X, mesh=mesh, **SPECS)
    check(right, np.ones((8, 16), np.float32), mesh=mesh, **SPECS)
    refused(wrong, X, mesh=mesh, **SPECS)
    refused(wrong, X, mesh=mesh, check_vma=False, **SPECS)


@each_mesh
def test_a_function_that_maps(mesh):
    mesh = MESHES[mesh](AxisType.Explicit)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, BLOCKS))
    check(lambda x: 2 * jax.shard_map(right, **SPECS)(x), x, mesh=mesh)
    refused(lambda x: 2 * jax.shard_map(wrong, **SPECS)(x), x, mesh=mesh)
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        refused(jax.jit(lambda x: jax.shard_map(wrong, **SPECS)(x)), x, mesh=None)


def there_and_back(x):
    return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)


def on_host(x):
    return jax.pure_callback(np.sort, x, x)


BODIES: dict = {  # the body, its out_specs, what is wrong; other bodies are in tests/programs
    "to a host and back": (lambda x: right(there_and_back(x)), BLOCKS, None),
    "wrong on a host": (lambda x: wrong(there_and_back(x)), BLOCKS, OWN_MAXIMUM),
    "wrong": (lambda x: x.sum(1), P("d"), r"\nwrong: it does not compute[^\n]*$"),
    "of no rule": (on_host, BLOCKS, r"\nnot decided, though it may be right[^\n]*$"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body(name):
    body, outs, problem = BODIES[name]
    verdict(problem, body, X, in_specs=BLOCKS, out_specs=outs, check_vma=False)


def double(x):
    return jax.shard_map(lambda x: 2 * x, in_specs=P("d"), out_specs=P("d"))(x)


def devices():
    return jax.sharding.get_abstract_mesh().shape["t"]


OUTSIDE = {  # functions that map: what is wrong outside of jax.shard_map
    "the same": (lambda x, y: double(x) + y, None),
    "another result": (lambda x, y: (double(x), y)[devices() > 1], WRONG),
    "a slice": (lambda x, y: double(x)[devices() - 1 :], WRONG),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_shard_map(name):
    function, problem = OUTSIDE[name]
    verdict(problem, function, X, X)


def test_a_jitted_function_on_one_mesh_after_the_other():
    """Collectives along one device have another form, which JAX's cache of traced functions has to
    know.
    """

    @jax.jit
    @typed_shard_map
    def body(x: f32["B M/d"], w: f32["M F/t"]) -> f32["B F/t"]:
        x = shardops.replicate(
            "... -> ... *t", shardops.all_gather("B M/d -> B M", x, replicated=True)
        )
        return shardops.einsum_unreduced("B M, M F/t -> B F/t", x, w)

    for sizes in ((2, 4), (1, 8), (8, 1), (2, 4)):
        mesh = AbstractMesh(sizes, ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
        check(body, shape(16, 16), shape(16, 32), mesh=mesh)


def test_what_cannot_be_traced_on_several_meshes():
    mesh = MESHES["of devices"](AxisType.Auto)
    with pytest.raises(
        ValueError, match=r"bound to a mesh.* in check\(body, \*args, mesh=mesh, in_specs="
    ):
        check(jax.shard_map(right, mesh=mesh, **SPECS), X, mesh=mesh)
    with pytest.raises(ValueError, match="no mesh is set: pass one"):
        check(right, X, **SPECS)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "log_softmax"])
def test_activations_of_this_jax_are_proved(name):
    """With their gradients, for which a new jax may have primitives of its own."""
    function = getattr(jax.nn, name)

    def gradient(x):
        return jax.grad(lambda x: function(x).sum())(x)

    mesh = jax.sharding.AbstractMesh((2,), ("d",))
    check(gradient, jnp.ones((4, 8)), mesh=mesh, in_specs=P("d"), out_specs=P("d"))


# ---- what a verdict stands on


def test_dtypes_that_depend_on_the_mesh_are_named():
    def body(x):
        dtype = jnp.bfloat16 if lax.axis_size("t") > 1 else jnp.float32
        return (2 * x.astype(dtype)).astype(jnp.float32)

    problem = (
        r"test_verdicts.py:\d+: computes bfloat16 on the mesh, float32 on one device\n  "
        r"remedy: compute in one dtype"
    )
    verdict(problem, body, X, **SPECS)


def test_large_shapes_are_refused_before_anything_is_run():
    problem = (
        "^the program cannot be run: it computes .* entries, more than .*: pass smaller shapes"
    )
    verdict(problem, right, shape(2**14, 2**14), **SPECS)


def look_up(shift):
    """Rows of a table whose dim 0 is sharded, by ids of the whole."""

    def body(table, ids):
        n = table.shape[0]
        own = ids - n * lax.axis_index("t")
        is_own = (own >= 0) & (own < n)
        rows = table[jnp.where(is_own, own + jnp.where(own == 1, shift, 0), 0)]
        return lax.psum(jnp.where(is_own[:, None], rows, 0), "t")

    return body


@pytest.mark.parametrize(
    "ids", [shape(4, dtype=jnp.int32), jnp.zeros(4, jnp.int32)], ids=["a type", "one value"]
)
def test_integers_reach_all_that_they_look_up(ids):
    specs: dict[str, Any] = {"in_specs": (P("t"), P()), "out_specs": P()}
    check(look_up(0), shape(24, 3), ids, mesh=AUTO, **specs)
    verdict("test_verdicts.py", look_up(1), shape(24, 3), ids, **specs)


def test_integers_of_several_values_are_taken_as_they_are():
    """A permutation writes each row once; with other integers, rows of several devices would be
    added up.
    """

    def body(x, rows):
        return lax.psum(jnp.zeros((8, 16)).at[rows].set(x), "d")

    specs: dict[str, Any] = {"in_specs": (P("d"), P("d")), "out_specs": P()}
    check(body, X, jnp.array([3, 1, 0, 2, 7, 6, 5, 4], jnp.int32), mesh=AUTO, **specs)
    verdict(WRONG, body, X, shape(8, dtype=jnp.int32), **specs)


def test_what_is_nan_in_all_inputs_is_not_decided():
    """Its images are equal, whatever the rest of the program does."""

    def roots_of_both_signs(x):
        return jnp.sqrt(x) + jnp.sqrt(-x) + lax.axis_index("d")

    problem = "^result 0: NaN in all inputs that were run, so nothing was compared"
    verdict(problem, roots_of_both_signs, X, **SPECS)


def test_roots_of_drawn_numbers_are_compared_where_these_are_positive():
    """As second moments of an optimizer are, which are arguments of a step."""
    check(lambda x: jnp.log(x) / jnp.sqrt(x), X, mesh=AUTO, **SPECS)
    verdict(WRONG, lambda x: jnp.log(x) / jnp.sqrt(x) + lax.axis_index("d"), X, **SPECS)


@pytest.mark.parametrize(("number", "is_reached"), [(77, True), (-100, False)])
def test_integers_reach_the_numbers_with_which_they_are_compared(number, is_reached):
    def masked(wrong):
        def body(x, ids):
            chosen = ids.astype(jnp.int32)[:, None] == number
            return jnp.where(chosen, x + wrong * lax.axis_index("d"), 2 * x)

        return body

    args = shape(8, 4), shape(8, dtype=jnp.uint8)
    specs: dict[str, Any] = {"in_specs": (P(), P()), "out_specs": P(), "check_vma": False}
    verdict(None, masked(0), *args, **specs)
    verdict("axis_index" if is_reached else None, masked(1), *args, **specs)


def turned(x, n):
    return lax.fori_loop(0, n, lambda _, y: -y, x)


def test_integers_that_nothing_bounds_are_also_far_from_0():
    def far(x, step):
        return jnp.where(step // 100 > 50, x + lax.axis_index("d"), x) + jnp.where(step < 0, 1, 0)

    specs: dict[str, Any] = {"in_specs": (P(), P()), "out_specs": P(), "check_vma": False}
    verdict("axis_index", far, shape(8, 4), shape(dtype=jnp.int32), **specs)
    check(turned, X, shape(dtype=jnp.int32), mesh=AUTO, **specs)
