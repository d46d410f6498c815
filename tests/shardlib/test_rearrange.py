"""rearrange against numpy on whole arrays, values and gradients, and every refusal with its message."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_mesh import drop, on_mesh
from jax import lax
from jax.sharding import AxisType

from shardlib.shardops import all_gather, einsum_unreduced, psum, rearrange, replicate
from shardlib.shardtypes import Copy, Partial, ShardError, bf16, f32, i32, typed, typed_shard_map

SIZES = {"B": 4, "L": 3, "K": 8, "Q": 2, "D": 6, "M": 12, "N": 12, "1": 1}
MESHES = {"d=2 t=2": {"d": 2, "t": 2}, "t=4": {"d": 1, "t": 4}}


@functools.cache
def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    axis_types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices)


@pytest.fixture(params=MESHES)
def mesh(request):
    with jax.set_mesh(mesh_of(**MESHES[request.param])):
        yield


def per_device(body, operands, result):
    """`body` under typed_shard_map, with these types on its arguments and result."""

    def fn(*args):
        return body(*args)

    names = [f"x{i}" for i in range(len(operands))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fn.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    fn.__annotations__ = dict(zip(names, operands, strict=True)) | {"return": result}
    return typed_shard_map(fn)


def numbers(t, seed: int = 0) -> np.ndarray:
    """Random numbers of a type; a dim such as KQ has the size of K times that of Q."""
    shape = [math.prod(SIZES[letter] for letter in dim.name) for dim in t.spec.dims]
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_rearranges(body, operand, result, split, order, merged):
    """body(x) is x.reshape(split).transpose(order).reshape(merged) of whole arrays, and its gradient the inverse."""
    x, fn = numbers(operand), per_device(body, [operand], result)
    out, vjp = jax.vjp(jax.jit(fn), x)
    np.testing.assert_array_equal(out, x.reshape(split).transpose(order).reshape(merged))
    g = numbers(result, 1)
    between = np.array(split)[list(order)]
    np.testing.assert_array_equal(vjp(g)[0], g.reshape(between).transpose(np.argsort(order)).reshape(x.shape))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("spec", "sizes", "operand", "result", "split", "order", "merged"),
    [
        ("M/d N/t -> N/t M/d", {}, "M/d N/t", "N/t M/d", (12, 12), (1, 0), (12, 12)),
        ("B/d L M/t -> M/t B/d L", {}, "B/d L M/t", "M/t B/d L", (4, 3, 12), (2, 0, 1), (12, 4, 3)),
        ("B/d L (K/t Q) -> B/d K/t Q L", {"Q": 2}, "B/d L KQ/t", "B/d K/t Q L", (4, 3, 8, 2), (0, 2, 3, 1), None),
        ("B/d L (K/t Q) -> B/d K/t Q L", {"K": 8}, "B/d L KQ/t", "B/d K/t Q L", (4, 3, 8, 2), (0, 2, 3, 1), None),
        ("B/d (KQ/t) -> B/d (KQ/t)", {}, "B/d KQ/t", "B/d KQ/t", (4, 16), (0, 1), None),
        ("B/d K/t Q L -> B/d L (K/t Q)", {}, "B/d K/t Q L", "B/d L KQ/t", (4, 8, 2, 3), (0, 3, 1, 2), (4, 3, 16)),
        ("B/d L K/t -> (B/d L) K/t", {}, "B/d L K/t", "BL/d K/t", (4, 3, 8), (0, 1, 2), (12, 8)),
        ("(B/d L) K/t -> L K/t B/d", {"L": 3}, "BL/d K/t", "L K/t B/d", (4, 3, 8), (1, 2, 0), None),
        ("(K/t/d Q) D -> (K/t/d D) Q", {"Q": 2}, "KQ/t/d D", "KD/t/d Q", (8, 2, 6), (0, 2, 1), (48, 2)),
        ("B/d L K/t -> B/d 1 L (K/t 1) ()", {}, "B/d L K/t", "B/d 1 L K/t 1", (4, 3, 8), (0, 1, 2), (4, 1, 3, 8, 1)),
        ("B/d 1 M/t -> M/t B/d", {}, "B/d 1 M/t", "M/t B/d", (4, 12), (1, 0), None),
        (b"M/d N/t -> N/t M/d", {}, "M/d N/t", "N/t M/d", (12, 12), (1, 0), (12, 12)),
    ],
)
def test_against_numpy(spec, sizes, operand, result, split, order, merged, mesh):
    merged = merged or tuple(np.array(split)[list(order)])
    assert_rearranges(lambda x: rearrange(spec, x, **sizes), f32[operand], f32[result], split, order, merged)


def grouped(rng, names: list[str], shardings: dict[str, str]) -> list[list[str]]:
    """The names in groups, which a sharded name always begins."""
    groups: list[list[str]] = []
    for name in names:
        if groups and not shardings[name] and rng.random() < 0.5:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


@pytest.mark.parametrize("seed", range(10))
def test_random_pattern_against_numpy(seed, mesh):
    rng = np.random.default_rng(seed)
    names = ["B", "L", "K", "Q", "D"]
    shardings = dict.fromkeys(names, "") | ({"B": "/d", "K": "/t"} if seed % 2 else {"K": "/t/d"})
    sides = [grouped(rng, list(rng.permutation(names)), shardings) for _ in range(2)]
    dim = lambda name: name + shardings[name]
    text = [
        " ".join(f"({' '.join(map(dim, group))})" if len(group) > 1 else dim(group[0]) for group in s) for s in sides
    ]
    flat = [[name for group in side for name in group] for side in sides]
    types = [f32[" ".join("".join(group) + shardings[group[0]] for group in side)] for side in sides]
    assert_rearranges(
        lambda x: rearrange(" -> ".join(text), x, **{name: SIZES[name] for name in names}),
        *types,
        split=[SIZES[name] for name in flat[0]],
        order=[flat[0].index(name) for name in flat[1]],
        merged=[math.prod(SIZES[name] for name in group) for group in sides[1]],
    )


def test_partial_sums_stay_partial(mesh):
    def body(h, w):
        out = einsum_unreduced("B/d K/t, K/t M -> B/d M +t", h, w)
        out = rearrange("B/d (Q D) +t -> B/d D Q +t", out, Q=2)
        assert isinstance(out, Partial)
        return psum("B/d D Q +t -> B/d D Q", out)

    operands = f32["B/d K/t"], f32["K/t M/d"]
    h, w = numbers(operands[0]), numbers(operands[1], 1)
    fn = per_device(lambda h, w: body(h, all_gather("K/t M/d -> K/t M", w)), operands, f32["B/d D Q"])
    dense = lambda h, w: (h @ w).reshape(4, 2, 6).transpose(0, 2, 1)
    check_values_and_gradients(fn, dense, h, w)


def check_values_and_gradients(fn, dense, *arrays):
    with jax.set_mesh(mesh_of(d=1, t=1)):
        expected, g = dense(*arrays), lambda f: jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1))
        gradients = g(dense)(*map(jnp.asarray, arrays))
    np.testing.assert_allclose(fn(*arrays), expected, rtol=1e-5, atol=1e-5)
    for found, right in zip(jax.jit(g(fn))(*arrays), gradients, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gathered_ahead", [True, False])
def test_copies_and_gathered_arrays(gathered_ahead, mesh):
    """A weight after its gather: what takes it checks and reduces its gradient as before."""

    def body(x, w):
        mark = " *d" * gathered_ahead
        w = all_gather(f"M/d KQ/t -> M KQ/t{mark}", w)
        w = rearrange(f"M (K/t Q){mark} -> K/t Q M{mark}", w, Q=2)
        assert isinstance(w, Copy) == gathered_ahead
        if gathered_ahead:  # a copy passes through a scan
            w = lax.scan(lambda w, _: (w, None), w, length=2)[0]
        return einsum_unreduced("B/d M, K/t Q M -> B/d K/t Q", x, w)

    operands = f32["B/d M"], f32["M/d KQ/t"]
    x, w = numbers(operands[0]), numbers(operands[1], 1)
    fn = per_device(lambda x, w: body(replicate("B/d M -> B/d M *t", x), w), operands, f32["B/d K/t Q"])
    check_values_and_gradients(fn, lambda x, w: (x @ w).reshape(4, 8, 2), x, w)


def test_sizes_come_from_the_enclosing_function_and_are_bound_there(mesh):
    @typed
    def heads(x: f32["B/d L KQ/t"], like: f32["B/d K/t Q"]) -> f32["B/d L K/t Q"]:
        return rearrange("B/d L (K/t Q) -> B/d L K/t Q", x)

    @typed
    def twice(x: f32["B/d L KQ/t"]) -> f32["B/d L KQ/t"]:
        x = rearrange("B/d L (K/t Q) -> B/d K/t Q L", x, Q=2)
        x = rearrange("B/d K/t Q L -> B/d (K/t Q) L", x)
        return rearrange("B/d K/t Q L -> B/d L (K/t Q)", rearrange("B/d (K/t Q) L -> B/d K/t Q L", x))

    x, like = numbers(f32["B/d L KQ/t"]), numbers(f32["B/d K/t Q"])
    operands = f32["B/d L KQ/t"], f32["B/d K/t Q"]
    np.testing.assert_array_equal(per_device(heads, operands, f32["B/d L K/t Q"])(x, like), x.reshape(4, 3, 8, 2))
    np.testing.assert_array_equal(per_device(twice, operands[:1], operands[0])(x), x)


@pytest.mark.parametrize("dtype", [i32, bf16])
def test_other_dtypes(dtype, mesh):
    x = np.arange(144).reshape(12, 12)
    x = x.astype(jnp.bfloat16 if dtype is bf16 else np.int32)
    fn = per_device(lambda x: rearrange("M/d N/t -> N/t M/d", x), [dtype["M/d N/t"]], dtype["N/t M/d"])
    np.testing.assert_array_equal(fn(x), x.T)


def test_one_operation_for_one_transposition():
    with jax.set_mesh(mesh_of(d=2, t=2)):
        fn = per_device(lambda x: rearrange("M/d N/t -> N/t M/d", x), [f32["M/d N/t"]], f32["N/t M/d"])
        text = jax.jit(fn).lower(numbers(f32["M/d N/t"])).as_text()
    assert text.count("stablehlo.transpose") == 1
    assert "stablehlo.reshape" not in text


# ---- refusals ---------------------------------------------------------------------------------------------------

ONE_SIZE = "leave it out, or use another name; sizes are those of whole dims, over all devices"
OUTERMOST = "shard only the outermost dim of a group: write {} first, or all_gather it before"
INTERLEAVE = (
    "in ({}) the inner dim {} is sharded: each device has a part for every {}, so that the blocks of the group "
    "would interleave"
)
MOVES = "{} in the operand becomes {} in the result: rearrange moves nothing between devices"
ALL_TO_ALL = "keep the axes of each name; all_to_all moves an axis from one dim to another, before or after it"
PAIR = "spec '{}' has a parenthesis without its pair, or inside of others"
TWICE = "a device has one coordinate on {0}: gather or reduce over {0} first, or use another axis"
MARKS = "keep + and * on both sides: psum and psum_scatter reduce, all_gather and replicate make copies"

# On w_square, f32["M/d N/t"] of 8 × 8.
REFUSALS = [
    # -- an axis moved: among them the transposition of a square block
    ("M/d N/t -> N/d M/t", {}, MOVES.format("M/d", "M/t"), ALL_TO_ALL),
    ("M/d N/t -> N/t/d M", {}, MOVES.format("M/d", "M"), ALL_TO_ALL),
    (
        "M/d N/t -> N/t M",
        {},
        MOVES.format("M/d", "M"),
        "all_gather('… M/d … -> … M …') before or after it makes M whole",
    ),
    (
        "M N/t -> N/t M/d",
        {},
        MOVES.format("M", "M/d"),
        "write M in the result: a device holds all of it, and only psum_scatter or all_to_all leave a block",
    ),
    ("M +d -> M/d", {}, MOVES.format("M", "M/d"), "psum_scatter turns +d into /d, before or after it"),
    (
        "M N/d/p -> N/d M",
        {},
        MOVES.format("N/d/p", "N/d"),
        "all_gather('… N/d/p … -> … N/d …') before or after it makes N whole",
    ),
    # -- a sharded dim inside of a group
    ("M/d N/t -> (M/d N/t)", {}, INTERLEAVE.format("M/d N/t", "N/t", "M"), OUTERMOST.format("N/t")),
    ("M/d (A N/t) -> A M/d N/t", {}, INTERLEAVE.format("A N/t", "N/t", "A"), OUTERMOST.format("N/t")),
    # -- names
    (
        "M/d N/t -> M/d",
        {},
        "N/t of the operand is not in the result: rearrange keeps every entry",
        "name it in the result; to sum it, einsum_unreduced; to drop a dim of size 1, write it as 1",
    ),
    (
        "M/d N/t -> M/d N/t A",
        {},
        "A of the result is not in the operand",
        "name a dim of the operand; a new dim of size 1 is written 1, and broadcast repeats along a new dim",
    ),
    ("M/d M/t -> M/t M/d", {}, "the operand `M/d M/t` names M twice", "use two names"),
    ("M/d N/t -> M/d M/t", {}, "the result `M/d M/t` names M twice", "use two names"),
    ("M/d N/t -> M/d N/t 3", {}, "3 in the result has no name", "name it, and give its size: rearrange(…, N=3)"),
    ("M/d N/t -> M/d N 1/t", {}, "1/t in the result has no name", None),
    # -- marks
    ("M/d N +t -> M/d N", {}, "`M/d N +t` to `M/d N` changes the marks", MARKS),
    ("M/d N -> M/d N *t", {}, "`M/d N` to `M/d N *t` changes the marks", MARKS),
    # -- notation
    ("M/d (N/t -> N/t M/d", {}, PAIR.format("M/d (N/t"), "write `(K Q)`"),
    ("M/d N/t -> (M/d (N))", {}, PAIR.format("(M/d (N))"), "write `(K Q)`"),
    ("M/d N/t -> ) M/d N/t", {}, PAIR.format(") M/d N/t"), "write `(K Q)`"),
    ("... -> ...", {}, "`...` has '...'", "only replicate takes any dims: name them"),
    ("M/d ... -> ... M/d", {}, "spec 'M/d ...' has dims beside '...'", "'...' means all dims: name each dim instead"),
    ("M/d [N/t] -> [N/t] M/d", {}, "`M/d [N/t]` has a [dim]", "only the first operand of index_unreduced has one"),
    (
        "M/d N-1 -> N-1 M/d",
        {},
        "'N-1' is not a dim of a spec",
        "write a name or a size, then axes: `B`, `B/d`, `M/t/d`, `3`",
    ),
    ("M/d (N/d A) -> A N/d M", {}, "spec 'M/d (N/d A)' names axis d more than once", TWICE.format("d")),
    ("M/d N/t", {}, "spec 'M/d N/t' has no single '->'", "write `operand, operand -> result`"),
    ("M/d, N/t -> N/t", {}, "the spec has 2 operands, the call 1", "write one operand spec for each operand"),
    # -- sizes
    (
        "M/d (K/t Q) -> K/t Q M/d",
        {},
        "(K/t Q) is 8 in all, but the sizes of K and Q are not known here",
        "give the whole size of all but one: rearrange(…, Q=…)",
    ),
    (
        "M/d (K/t Q) -> K/t Q M/d",
        {"Q": 3},
        "size mismatch: (K/t Q) is 8, which is not a multiple of Q=3",
        "correct the size, or use other names; sizes are those of whole dims, over all devices",
    ),
    (
        "M/d (K/t Q) -> K/t Q M/d",
        {"Q": 2, "K": 2},
        "size mismatch: (K/t Q) is 8, which is not K=2 · Q=2",
        "correct the size, or use other names; sizes are those of whole dims, over all devices",
    ),
    (
        "M/d (K/t Q) -> K/t Q M/d",
        {"Q": 8},
        "dim K of size 1 is not divisible by its axes t, 2 devices",
        "make K a multiple of 2, or shard it over fewer devices",
    ),
    ("M/d N/t -> N/t M/d", {"N": 4}, "size mismatch: dim N is 8, but N=4 was given", ONE_SIZE),
    ("M/d N/t -> N/t M/d", {"K": 4}, "K=4, but no dim has this name", "name a dim of the spec"),
    ("M/d N/t -> N/t M/d", {"N": 0}, "N=0 is no size of a dim", "give the whole size, an int of at least 1"),
    ("M/d N/t -> N/t M/d", {"N": 8.0}, "N=8.0 is no size of a dim", "give the whole size, an int of at least 1"),
    # -- the value is not what the left side says
    (
        "M/d N -> N M/d",
        {},
        "operand 1 `M/d N`: the value differs between devices of t, which `M/d N` does not mention",
        None,
    ),
    (
        "N/d M/t K -> N/d M/t K",
        {},
        "operand 1 `N/d M/t K`: rank mismatch: `N/d M/t K` has 3 dims, the array has 2: [4, 4]",
        "name each dim of the array once",
    ),
    (
        "M/d N/t +q -> N/t M/d +q",
        {},
        "axis q is not an axis of the mesh (the mesh has d, t)",
        "name one of the mesh's axes, or give the mesh an axis q of one device",
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("spec", "sizes", "problem", "remedy"), REFUSALS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused(spec, sizes, problem, remedy):
    with pytest.raises(ShardError) as raised:
        on_mesh(lambda w_square: drop(rearrange(spec, w_square, **sizes)))
    first, *context = str(raised.value).splitlines()
    first = first.partition(".py:")[2].partition(": ")[2]
    where = f"rearrange({spec!r}): "
    assert first in (where + problem, f"{where}operand 1 `{spec.split(' ->')[0]}`: {problem}")
    assert context[0] == "  operand 1: `M/d N/t`, f32[4,4] {varying over t, d}"
    assert context[1].endswith("mesh: d=2, t=2")
    assert remedy is None or context[2:] == [f"  remedy: {remedy}"]


def test_a_whole_value_is_no_block():
    with pytest.raises(
        ShardError, match="operand 1 `H/d N` is the same on every device of d, over which the result va"
    ):
        on_mesh(lambda whole: drop(rearrange("H/d N -> N H/d", whole)))
    on_mesh(lambda whole: drop(rearrange("H N -> N H", whole)))


def test_a_partial_sum_names_its_axes():
    total = lambda h: einsum_unreduced("B/d L F/t -> B/d L +t", h)
    with pytest.raises(ShardError, match=r"the value is a partial sum over t, `B/d L` has no \+ mark"):
        on_mesh(lambda h: drop(rearrange("B/d L -> L B/d", total(h))))
    on_mesh(lambda h: drop(rearrange("B/d L +t -> L B/d +t", total(h))))


def test_only_on_a_device_and_only_groups_here():
    with pytest.raises(ShardError, match="called outside of shard_map, where no device is on its own"):
        rearrange("M N -> N M", jnp.ones((2, 2)))
    with pytest.raises(ShardError, match=r"'\(M/d' is not a dim of a spec"):
        on_mesh(lambda w_square: drop(einsum_unreduced("(M/d N/t) -> M/d", w_square)))
