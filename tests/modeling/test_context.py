"""Attention on one device of c and on several, each way, in f64, against a dense computation;
paths that compute something else.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardlib.shardtypes import dtype_name, f32, i32
from shardwright.modeling import context as context_module
from shardwright.modeling.kernel_checks import check_paths
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
}
QUICK = [("ring", "sinks", "c=2 t=2"), ("gather", "learned", "c=2"), ("ulysses", "alibi", "c=8")]
QUICK += [("local", WINDOW, "d=2 t=2"), ("local", "learned", "d=2 t=2")]
QUICK += [("local, einsum", WINDOW, "d=2 t=2")]
LONG = [("local", "prefix", "d=2 t=2"), ("ring", WINDOW, "c=6"), ("ulysses", "sinks", "c=6")]


@pytest.mark.parametrize(
    ("kind", "name", "mesh"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_each_way_is_dense(kind, name, mesh):
    """Of six devices, three have a third of a kv head's queries each by ulysses; a ring of them has
    twelve chunks.
    """
    # train.softmax_attention has scores in f32.
    tolerance = 1e-12 if "einsum" not in kind else 2e-6
    pairs = zip(found(*KINDS[kind], name, mesh), expected(name), strict=True)
    for what, (a, b) in zip(("out", "q", "k", "v", "bias", "sinks"), pairs, strict=True):
        near = max(tolerance, 1e-6 * (what == "sinks"))  # which are f32, as is their gradient
        np.testing.assert_allclose(
            a, b, atol=near * max(np.abs(b).max(), 1e-9), rtol=0, err_msg=what
        )


@pytest.mark.parametrize(("length", "size"), [(1, 1), (64, 64), (1000, 3)])
def test_attended_keys_are_the_entries_of_the_mask(length, size):
    i, j = np.arange(length)[:, None], np.arange(length)
    masks = {
        (causal, same_document): j <= i,
        (causal, same_document, Window(size)): (j <= i) & (i - j < size),
        (Window(size), causal, Window(9)): (j <= i) & (i - j < min(size, 9)),
        (Window(size),): i - j < size,
        (): j >= 0,
        (causal, lambda q, k: q.index // 16 == k.index // 16): (j <= i) & (i // 16 == j // 16),
    }
    for visible, mask in masks.items():
        full = np.broadcast_to(mask, (length, length))
        assert AttentionMask(visible).attended(length) == pytest.approx(
            full.sum() / length, rel=1e-12
        )


# ---- paths that compute something else -----------------------------------------------------------


def test_a_path_that_computes_something_else_is_found(monkeypatch):
    """Heads in another order: the proof's one device divides them as the mesh does."""

    def wrong(spec, x):
        return shardops.all_to_all(spec, x[:, :, :, ::-1] if " H Q D -> " in spec else x)

    ops = types.SimpleNamespace(**vars(shardops) | {"all_to_all": wrong})
    monkeypatch.setattr(context_module, "shardops", ops)
    c = tiny.config(tiny.model(n_kv=2, n_q_per_kv=4), context="ulysses", attention="einsum")
    forward = tiny.forward(c)
    message = r"by ulysses, einsum is not what softmax_attention \(einsum\) computes"
    with jax.set_mesh(tiny.mesh("c=4")), pytest.raises(ValueError, match=message):
        check_paths(tiny.step_of(forward, 256))
