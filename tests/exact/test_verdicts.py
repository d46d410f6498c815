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
AUTO, EXPLICIT = (MESHES["abstract"](kind) for kind in (AxisType.Auto, AxisType.Explicit))
both_kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
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


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_lookup_of_other_than_all_rows_of_a_block_is_refused(count):
    def first(x):
        return jnp.take(x, lax.iota(jnp.int32, count), axis=0, mode="clip")

    verdict(
        r"test_verdicts.py:\d+: gather: .*(device d=0, t=0 only|only its own block)",
        first,
        X,
        **SPECS,
    )


@both_kinds
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


@both_kinds
def test_a_typed_function(kind):
    def typed(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
        return wrong(x)

    refused(typed_shard_map(typed), X, mesh=MESHES["abstract"](kind))


def there_and_back(x):
    return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)


def on_host(x):
    return jax.pure_callback(np.sort, x, x)


def update(state, g):
    return {"w": [state["w"][0] - 0.1 * lax.pmean(g, "d")]}


STATE = {"w": [shape(16)]}
OF_STATE = {"in_specs": (P("t"), BLOCKS), "out_specs": P("t")}
FIRST: dict[str, Any] = {"in_specs": P(None, "t"), "out_specs": P(None, "t")}
# the body, its arguments, its specs, what is wrong; other bodies are in tests/programs
BODIES: dict = {
    "to a host and back": (lambda x: right(there_and_back(x)), [X], SPECS, None),
    "reduced from a host": (
        lambda x: lax.psum(there_and_back(x.sum()), ("d", "t")) * x,
        [X],
        SPECS,
        None,
    ),
    "wrong on a host": (lambda x: wrong(there_and_back(x)), [X], SPECS, OWN_MAXIMUM),
    "pytrees": (lambda state, g: update(state, g.mean(0)), [STATE, X], OF_STATE, None),
    # JAX traces a slice of one entry as a squeeze.
    "first of one": (
        lambda x: x + lax.psum(x[:, 0], "d")[:, None],
        [shape(6, 4)],
        FIRST,
        "it is right on device d=0, t=0 only",
    ),
    "largest of one": (lambda x: x + lax.pmax(x.max(1), "t")[:, None], [shape(6, 4)], FIRST, None),
    "wrong": (
        lambda x: x.sum(1),
        [X],
        {**SPECS, "out_specs": P("d")},
        r"\nwrong: it does not compute[^\n]*$",
    ),
    "of no rule": (on_host, [X], SPECS, r"\nnot decided, though it may be right[^\n]*$"),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("is_unchecked", [False, True])
def test_a_body(name, is_unchecked):
    body, args, specs, problem = BODIES[name]
    if name == "wrong" and not is_unchecked:
        pytest.skip("JAX refuses it")
    verdict(problem, body, *args, check_vma=not is_unchecked, **specs)


def double(x):
    return jax.shard_map(lambda x: 2 * x, in_specs=P("d"), out_specs=P("d"))(x)


def devices():
    return jax.sharding.get_abstract_mesh().shape["t"]


OUTSIDE = {  # functions that map: what is wrong outside of jax.shard_map
    "the same": (lambda x, y: double(x) + y, None),
    "another operand": (lambda x, y: double(x if devices() > 1 else y), WRONG),
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


def in_chunks(of_chunk):
    """Sums of_chunk(rows, all weights of these) over chunks, each of some rows of each of the four
    blocks of rows.

    There are three chunks on a mesh, and one on one device.
    """

    def run(x: f32["L/t M"], w: f32["L M"]) -> tuple[f32["L/t M"], f32["M M"]]:
        blocks, n = 4 // lax.axis_size("t"), 1 if lax.axis_size("t") == 1 else 3

        def cut(x, blocks):
            return jnp.swapaxes(x.reshape(blocks, n, -1, 16), 0, 1).reshape(n, -1, 16)

        def turn(total, chunk):
            value, y = of_chunk(*chunk)
            return total + value, y

        total, ys = lax.scan(turn, jnp.zeros((16, 16)), (cut(x, blocks), cut(w, 4)))
        return jnp.swapaxes(ys.reshape(n, blocks, -1, 16), 0, 1).reshape(x.shape), total

    return typed_shard_map(run)


def scattered(x):
    return lax.psum_scatter(lax.pcast(x, "t", to="varying"), "t", tiled=True) / lax.axis_size("t")


CHUNKS = {  # what is computed of each chunk, and what is wrong with it
    "gathered and scattered": (lambda x, w: (gathered(x).T @ w, scattered(gathered(x) * w)), None),
    "other weights": (lambda x, w: (gathered(x).T @ w[::-1], x), WRONG),
    "a mean": (lambda x, w: (gathered(x).T @ w / len(w), x), WRONG),
    "a softmax": (lambda x, w: (jax.nn.softmax(gathered(x), 0).T @ w, x), WRONG),
    "running sums": (
        lambda x, w: (gathered(x).T @ w, scattered(jnp.cumsum(gathered(x), 0))),
        WRONG,
    ),
}


def gathered(x):
    return jnp.sin(lax.all_gather(x, "t", tiled=True, to="invarying"))


@pytest.mark.parametrize("name", CHUNKS)
def test_as_many_chunks_as_a_mesh_has_devices_or_more(name):
    function, problem = CHUNKS[name]
    mesh = AbstractMesh((4,), ("t",), axis_types=(AxisType.Explicit,))
    args = shape(24, 16), shape(24, 16)
    verdict(
        problem and rf"(?s)^\S*test_verdicts.py:\d+: .*{problem}",
        in_chunks(function),
        *args,
        mesh=mesh,
    )


def test_what_cannot_be_traced_on_several_meshes():
    mesh = MESHES["of devices"](AxisType.Auto)
    with pytest.raises(
        ValueError, match=r"bound to a mesh.* in check\(body, \*args, mesh=mesh, in_specs="
    ):
        check(jax.shard_map(right, mesh=mesh, **SPECS), X, mesh=mesh)
    with pytest.raises(ValueError, match="no mesh is set: pass one"):
        check(right, X, **SPECS)


def test_the_gradient_of_a_function_that_calls_shard_map():
    def loss(x, w):
        y = jax.shard_map(
            lambda x, w: lax.psum(x @ w, "t"), in_specs=(P("d", "t"), P("t")), out_specs=P("d")
        )(x, w)
        return jnp.mean(y**2)

    check(jax.grad(loss, argnums=1), shape(8, 16), shape(16, 4), mesh=AUTO)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_ring_may_draw_by_a_key(is_made):
    def body(key, x):
        total, n = jnp.float32(0), lax.axis_size("d")
        for _ in range(n):
            scale = jax.random.normal(jax.random.fold_in(key, 3) if is_made else key)
            total, x = (
                total + scale * jnp.sum(x),
                lax.ppermute(x, "d", [(i, (i + 1) % n) for i in range(n)]),
            )
        return total

    mesh, specs = AbstractMesh((2,), ("d",)), (P(), P("d"))
    args = jax.random.key(0), shape(8, 4)
    check(body, *args, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "log_softmax"])
def test_activations_of_this_jax_are_proved(name):
    """With their gradients, for which a new jax may have primitives of its own."""
    function = getattr(jax.nn, name)

    def gradient(x):
        return jax.grad(lambda x: function(x).sum())(x)

    mesh = jax.sharding.AbstractMesh((2,), ("d",))
    check(gradient, jnp.ones((4, 8)), mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def unit(x, axis):
    return x * lax.rsqrt(jnp.mean(x * x, axis=axis, keepdims=True))


def along(axis):
    def body(x, y):
        first = unit(x, axis)
        return first, unit(y, axis)

    return body


def test_two_calls_of_one_function_of_which_one_is_wrong():
    """Along dim 0 both are cut, along dim 1 only what the second line passes."""
    specs = P("d"), P("d", "t")
    for axis in (0, 1):
        line = unit.__code__.co_firstlineno + 1
        verdict(
            rf"(?s)^\S*test_verdicts.py:{line}: div: ",
            along(axis),
            X,
            X,
            in_specs=specs,
            out_specs=specs,
        )


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


def until(limit):
    """Halves its rows, each device until its own are small."""

    def body(x):
        return lax.while_loop(lambda y: jnp.abs(y).max() > limit, lambda y: 0.5 * y, x)

    return body


@pytest.mark.long
def test_loops_may_end_at_any_time():
    halve = jax.vmap(until(1e-3))
    check(
        lambda x: halve(x),
        shape(8, 4),
        mesh=AUTO,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=False,
    )


@pytest.mark.parametrize(
    "perm", [[(0, 4)], [(4, 0)], [(0, 1), (0, 2)]], ids=["to none", "from none", "twice"]
)
def test_a_permutation_names_devices_that_exist_once(perm):
    def body(x):
        return lax.ppermute(x, "t", perm if lax.axis_size("t") > 1 else [(0, 0)])

    verdict(
        r"test_verdicts.py:\d+: ppermute: .*of 4 devices, .* has one twice, or one that does not",
        body,
        X,
        **SPECS,
    )


def test_a_collective_in_a_branch_that_not_all_devices_take_names_the_branch():
    def body(x):
        return lax.cond(lax.axis_index("t") == 0, lambda x: lax.psum(x, "t"), lambda x: 2 * x, x)

    problem = (
        r"test_verdicts.py:\d+: psum: not all devices of t reach it: cond at "
        r"\S*test_verdicts.py:\d+ decides"
    )
    verdict(problem, body, X, **SPECS, check_vma=False)


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


def norm_of_norms(x):
    return jnp.sqrt(lax.psum(jnp.square(jnp.linalg.norm(x)), ("d", "t")))


@pytest.mark.parametrize(
    ("problem", "function"),
    [(None, norm_of_norms), (WRONG, lambda x: jnp.sqrt(lax.psum(jnp.linalg.norm(x), ("d", "t"))))],
)
def test_a_norm_of_the_norms_of_devices_is_right(problem, function):
    verdict(problem, function, X, in_specs=BLOCKS, out_specs=P())


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


@pytest.mark.parametrize("number", [77, -100])
@pytest.mark.parametrize("ids", [shape(dtype=jnp.int32), shape(8, dtype=jnp.uint8)], ids=str)
def test_integers_reach_the_numbers_with_which_they_are_compared(ids, number):
    def masked(wrong):
        def body(x, ids):
            chosen = jnp.broadcast_to(ids.astype(jnp.int32), 8)[:, None] == number
            return jnp.where(chosen, x + wrong * lax.axis_index("d"), 2 * x)

        return body

    is_reached = 0 <= number < 256 or ids.dtype != jnp.uint8
    specs: dict[str, Any] = {"in_specs": (P(), P()), "out_specs": P(), "check_vma": False}
    verdict(None, masked(0), shape(8, 4), ids, **specs)
    verdict("axis_index" if is_reached else None, masked(1), shape(8, 4), ids, **specs)


def test_integers_that_nothing_bounds_are_also_far_from_0():
    def far(x, step):
        return jnp.where(step // 100 > 50, x + lax.axis_index("d"), x) + jnp.where(step < 0, 1, 0)

    def look_up_masked(x, ids):
        known = (ids >= 0) & (ids < 8)
        return (
            jnp.where(known[:, None], x[jnp.where(known, ids, 0)], 0)
            + x[ids % 8]
            + jnp.eye(8)[:, ids[:4] % 8]
        )

    specs: dict[str, Any] = {"in_specs": (P(), P()), "out_specs": P(), "check_vma": False}
    verdict("axis_index", far, shape(8, 4), shape(dtype=jnp.int32), **specs)
    check(look_up_masked, shape(8, 4), shape(8, dtype=jnp.int32), mesh=AUTO, **specs)
    check(
        lambda x, n: lax.fori_loop(0, n, lambda _, y: -y, x),
        X,
        shape(dtype=jnp.int32),
        mesh=AUTO,
        **specs,
    )
