"""Attention on one device of c and on several, each way, in f64, against a dense computation; what
a way refuses.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import train
from shardlib import shardops
from shardlib.exact import check
from shardlib.shardtypes import ShardError, dtype_name, f32, i32, typed_shard_map
from shardwright.modeling import attention_paths
from shardwright.modeling.attention_calls import Call, path_of
from shardwright.modeling.masks import CAUSAL, AttentionMask, SoftCap, Window, causal, same_document
from shardwright.modeling.model import Tokens
from tests.support import tiny

act = dtype_name("act")
ROWS, LENGTH, KV, QUERIES, WIDTH, NEAR = 2, 48, 2, 12, 4, 5
MASKS = (causal, same_document)


def alibi(scores, q, k, heads):
    return scores - 2.0 ** -(heads % 8 + 1) * (q.index - k.index)


def relative(scores, q, k, heads, bias):
    """A learned bias for each head and distance; bias: [B, K, Q, NEAR]."""
    near = jnp.clip(q.index - k.index, 0, NEAR - 1)
    return scores + sum(bias[..., n][..., None, None] * (near == n) for n in range(NEAR))


WINDOW = "window, soft-cap, scale"
RULES = {
    WINDOW: AttentionMask((*MASKS, Window(7)), SoftCap(1.5), 0.3),
    "prefix": AttentionMask((lambda q, k: (q.index >= k.index) | (k.index < 4),), causal=False),
    "alibi": AttentionMask(score_mod=alibi),
    "learned": AttentionMask(score_mod=relative),
    "sinks": CAUSAL,
}
VALUES = {WINDOW: 3, "prefix": 6, "alibi": WIDTH, "learned": 3, "sinks": 6}
"""Entries of a value, which may be fewer or more than those of a key."""


def documents() -> np.ndarray:
    """Documents whose borders are within blocks and chunks, and on them."""
    starts = np.zeros((ROWS, LENGTH), bool)
    starts[0, [3, 12, 24, 29, 30, 47]], starts[1, [24]] = True, True
    return np.cumsum(starts, axis=1, dtype=np.int32)


def dense(name: str, q, k, v, bias, sinks):
    """What the pattern of this name means, all scores at once."""
    place, document = np.arange(LENGTH), documents()
    distance = place[:, None] - place[None]
    if name == "prefix":
        mask = np.broadcast_to((distance >= 0) | (place < 4), (ROWS, LENGTH, LENGTH))
    else:
        mask = (distance >= 0) & (document[:, :, None] == document[:, None, :])
    scores = jnp.einsum("blkqd,bskd->bkqls", q, k) * (0.3 if name == WINDOW else 0.5)
    if name == WINDOW:
        mask = mask & (distance < 7)
        scores = 1.5 * jnp.tanh(scores / 1.5)
    if name == "alibi":
        scores -= 2.0 ** -(np.arange(KV * QUERIES) % 8 + 1.0).reshape(KV, QUERIES, 1, 1) * distance
    if name == "learned":
        scores += bias[..., np.clip(distance, 0, NEAR - 1)]
    weights = jnp.where(mask[:, None, None], jnp.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (
        jnp.exp(sinks)[..., None, None] if name == "sinks" else 0
    )
    return jnp.einsum("bkqls,bskd->blkqd", weights / total, v)


def operands(name: str) -> list[np.ndarray]:
    """q, k, v, bias, sinks, and a gradient of the result."""
    rng = np.random.default_rng(0)
    keys, queries = (LENGTH, KV), (LENGTH, KV, QUERIES)
    width, values = (WIDTH,), (VALUES[name],)
    shapes = (
        queries + width,
        keys + width,
        keys + values,
        (KV, QUERIES, NEAR),
        (KV, QUERIES),
        queries + values,
    )
    return [rng.standard_normal((ROWS, *shape)).astype(np.float32) for shape in shapes]


def forward(how: str, path: str) -> train.Forward:
    return tiny.forward(tiny.config(context=how, attention=path, attention_block=5))


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """The result and its gradients, in f64 on one device."""
    with jax.enable_x64(True):
        *given, g = map(jnp.float64, operands(name))
        out, vjp = jax.vjp(functools.partial(dense, name), *given)
        return [np.asarray(x) for x in (out, *vjp(g))]


def found(how: str, path: str, name: str, mesh: str) -> list[np.ndarray]:
    """The same, by a way on a mesh."""

    def both(
        q: act["B/r/d L/c K/t Q D"],
        k: act["B/r/d L/c K/t D"],
        v: act["B/r/d L/c K/t D_v"],
        bias: act["B/r/d K/t Q N"],
        sinks: f32["B/r/d K/t Q"],
        document: i32["B/r/d L/c"],
        g: act["B/r/d L/c K/t Q D_v"],
    ) -> tuple[
        act["B/r/d L/c K/t Q D_v"],
        act["B/r/d L/c K/t Q D"],
        act["B/r/d L/c K/t D"],
        act["B/r/d L/c K/t D_v"],
        act["B/r/d K/t Q N"],
        f32["B/r/d K/t Q"],
    ]:
        attend = forward(how, path).attention(Tokens(document, document, document))

        def run(q, k, v, bias, sinks):
            learned, sinks = (bias,) * (name == "learned"), sinks if name == "sinks" else None
            return attend(q, k, v, RULES[name], *learned, sinks=sinks)

        out, vjp = jax.vjp(run, q, k, v, bias, sinks)
        return out, *vjp(g)

    *given, sinks, g = operands(name)
    with jax.enable_x64(True), jax.set_mesh(tiny.mesh(mesh)):
        exact = [np.float64(x) for x in (*given, g)]
        run = tiny.per_device(both, act="float64")
        return [np.asarray(x) for x in run(*exact[:-1], sinks, documents(), exact[-1])]


KINDS = {
    "local": ("gather", "blockwise"),
    "local, einsum": ("gather", "einsum"),
    "ring": ("ring", "auto"),
    "gather": ("gather", "blockwise"),
    "ulysses": ("ulysses", "blockwise"),
    "gather, einsum": ("gather", "einsum"),
}
QUICK = [("ring", "sinks", "c=2 t=2"), ("gather", "learned", "c=2"), ("ulysses", "alibi", "c=8")]
QUICK += [("local", WINDOW, "d=2 t=2"), ("local", "learned", "d=2 t=2")]
QUICK += [("local, einsum", WINDOW, "d=2 t=2"), ("local, einsum", "alibi", "d=2 t=2")]
LONG = [("local", "prefix", "d=2 t=2"), ("local", "sinks", "d=2 t=2"), ("ring", WINDOW, "c=6")]
LONG += [("gather", "sinks", "c=4 d=2"), ("ulysses", "sinks", "c=6")]
LONG += [("gather, einsum", "prefix", "c=3")]


@pytest.mark.parametrize(
    ("kind", "name", "mesh"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_each_way_is_dense(kind, name, mesh):
    """Of six devices, three have a third of a kv head's queries each by ulysses; a ring of them has
    twelve chunks.
    """
    # train.softmax_attention has scores in f32.
    tolerance = 1e-12 if "einsum" not in kind else 2e-6 if "local" in kind else 1e-5
    pairs = zip(found(*KINDS[kind], name, mesh), expected(name), strict=True)
    for what, (a, b) in zip(("out", "q", "k", "v", "bias", "sinks"), pairs, strict=True):
        near = max(tolerance, 1e-6 * (what == "sinks"))  # which are f32, as is their gradient
        np.testing.assert_allclose(
            a, b, atol=near * max(np.abs(b).max(), 1e-9), rtol=0, err_msg=what
        )


TWO_HEADS = (1, 8, 2, 1, 4)

# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "path", "queries", "options", "reason"),
    [
        ("ulysses", "auto", (1, 8, 1, 1, 4), {}, "1 query heads of a kv head do not divide amo"),
        ("ulysses", "auto", TWO_HEADS, {"learned": True}, "has learned weights, whose heads it"),
        ("ring", "einsum", TWO_HEADS, {}, "in blocks, and training.attention is einsum"),
        ("ring", "auto", (1, 7, 2, 1, 4), {}, "a device of c has 7 positions, not two equal chu"),
        ("gather", "einsum", TWO_HEADS, {"drop": len}, "attention weights have dropout"),
    ],
)
def test_a_way_that_cannot_do_it_says_so(how, path, queries, options, reason):
    """In a line, where a step is traced, and where a run says how it attends, which is before."""
    q = jax.ShapeDtypeStruct(queries, np.float32)
    learned = (q,) if options.pop("learned", False) else ()
    tokens = Tokens(None, jnp.zeros((1, queries[1]), jnp.int32))
    message = rf"training\.context is {how}, which cannot do this: .*{reason}.*\. To continue, "
    with jax.set_mesh(tiny.mesh("c=2")):
        with pytest.raises(ValueError, match=message):
            forward(how, path).attention(tokens)(q, q, q, CAUSAL, *learned, **options)
        with pytest.raises(ValueError, match=message):
            path_of(forward(how, path), Call(0, CAUSAL, q, learned, None, "drop" in options))


def test_kernels_that_count_from_0_take_no_part_of_the_queries(monkeypatch):
    device = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0"
    )
    monkeypatch.setattr(attention_paths, "target_device", lambda: device)
    q = jax.ShapeDtypeStruct((1, 1024, 2, 2, 64), jnp.bfloat16)
    for kernel, pattern in (("triton", CAUSAL), ("cudnn", CAUSAL.without(same_document))):
        assert attention_paths.choose("auto", pattern, q) == kernel
        assert attention_paths.choose("auto", pattern, q, keys=2048) == "blockwise"
        with pytest.raises(
            ValueError, match=f"is {kernel}, which cannot do this: 1024 queries of 2048 positions"
        ):
            attention_paths.choose(kernel, pattern, q, keys=2048)


# ---- zigzag order --------------------------------------------------------------------------------


def test_zigzag_order_is_chunks_from_both_ends():
    """Device i has chunks i and 2n - 1 - i. The way back undoes it."""

    @jax.jit
    @typed_shard_map
    def there_and_back(x: i32["L/c M"]) -> tuple[i32["Z/c M"], i32["L/c M"]]:
        z = shardops.zigzag("L/c M -> Z/c M", x)
        return z, shardops.zigzag("Z/c M -> L/c M", z)

    devices = 3
    x = np.arange(4 * devices * 3, dtype=np.int32).reshape(-1, 3)  # chunks of two
    chunks = x.reshape(2 * devices, 2, 3)
    expected = [chunks[j] for i in range(devices) for j in (i, 2 * devices - 1 - i)]
    with jax.set_mesh(tiny.mesh(f"c={devices}")):
        z, back = there_and_back(x)
    np.testing.assert_array_equal(z, np.concatenate(expected))
    np.testing.assert_array_equal(back, x)


ON_C = AbstractMesh((2,), ("c",), axis_types=(AxisType.Explicit,))


def positions_of_the_other_order(x: f32["L/c"]) -> f32["L/c"]:
    """A mask by positions of the one order on what is in the other."""
    z = shardops.zigzag("L/c -> Z/c", x)
    return shardops.zigzag("Z/c -> L/c", jnp.where(shardops.positions("L/c") > 5, z, 0))


def shifted_in_the_order(x: f32["L/c"]) -> f32["L/c"]:
    return shardops.zigzag("Z/c -> L/c", jnp.roll(shardops.zigzag("L/c -> Z/c", x), 1))


@pytest.mark.parametrize("wrong", [positions_of_the_other_order, shifted_in_the_order])
def test_two_orders_never_meet(wrong):
    with pytest.raises(
        ShardError, match=r"test_context.py:\d+: .*\n.*\nwrong: it does not compute"
    ):
        check(typed_shard_map(wrong), jax.ShapeDtypeStruct((16,), np.float32), mesh=ON_C)


@pytest.mark.parametrize("spec", ["L/c -> M/c", "L/c -> Z", "L/c/t -> Z/c/t"])
def test_a_spec_that_is_no_zigzag_order_is_refused(spec):
    axes = P(*[tuple(word.split("/")[1:]) for word in spec.split(" -> ")[0].split()])
    run = jax.shard_map(lambda x: shardops.zigzag(spec, x), in_specs=axes, out_specs=axes)
    with jax.set_mesh(tiny.mesh("c=2 t=2")):
        x = jax.device_put(
            jnp.zeros((8,) * len(axes)), jax.NamedSharding(tiny.mesh("c=2 t=2"), axes)
        )
        with pytest.raises(ShardError, match="name Z on one side"):
            run(x)
