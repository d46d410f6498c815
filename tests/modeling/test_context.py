"""Attention with positions sharded over c, each way, in f64, against a dense computation; and what a way refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import train
from shardlib.shardtypes import dtype_name, f32, i32
from shardwright.modeling.blockwise import small_blocks
from shardwright.modeling.model import Tokens
from shardwright.modeling.rules import CAUSAL, Rule, SoftCap, Window, causal, same_document

act = dtype_name("act")
ROWS, LENGTH, KV, QUERIES, WIDTH, NEAR = 2, 48, 2, 12, 4, 5
MASKS = (causal, same_document)


def alibi(scores, q, k, heads):
    return scores - 2.0 ** -(heads % 8 + 1) * (q.index - k.index)


def relative(scores, q, k, heads, bias):
    """A learned bias for each distance; bias: f32[B, NEAR]."""
    near = jnp.clip(q.index - k.index, 0, NEAR - 1)
    return scores + sum(bias[:, n, None, None, None, None] * (near == n) for n in range(NEAR))


RULES = {
    "causal": CAUSAL,
    "window": Rule((*MASKS, Window(7))),
    "one document": Rule((causal,)),
    "everything": Rule((), causal=False),
    "alibi": Rule(score=alibi),
    "soft-cap": Rule(score=SoftCap(1.5), scale=0.3),
    "learned": Rule(score=relative),
    "sinks": CAUSAL,
}


def documents() -> np.ndarray:
    """Documents whose borders are within blocks and chunks, and on them."""
    starts = np.zeros((ROWS, LENGTH), bool)
    starts[0, [3, 12, 24, 29, 30, 47]], starts[1, [24]] = True, True
    return np.cumsum(starts, axis=1, dtype=np.int32)


def dense(name: str, q, k, v, bias, sinks):
    """What the rule of this name means, all scores at once."""
    place, document = np.arange(LENGTH), documents()
    distance = place[:, None] - place[None]
    mask = np.broadcast_to((distance >= 0) | (name == "everything"), (ROWS, LENGTH, LENGTH))
    if name not in ("everything", "one document"):
        mask = mask & (document[:, :, None] == document[:, None, :])
    mask = mask & (distance < 7) if name == "window" else mask
    scores = jnp.einsum("blkqd,bskd->bkqls", q, k) * (0.3 if name == "soft-cap" else 0.5)
    if name == "alibi":
        scores -= 2.0 ** -(np.arange(KV * QUERIES) % 8 + 1.0).reshape(KV, QUERIES, 1, 1) * distance
    if name == "soft-cap":
        scores = 1.5 * jnp.tanh(scores / 1.5)
    if name == "learned":
        scores += bias[:, np.clip(distance, 0, NEAR - 1)][:, None, None]
    weights = jnp.where(mask[:, None, None], jnp.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (jnp.exp(sinks)[..., None, None] if name == "sinks" else 0)
    return jnp.einsum("bkqls,bskd->blkqd", weights / total, v)


def operands() -> list[np.ndarray]:
    """q, k, v, bias, sinks, and a gradient of the result."""
    rng = np.random.default_rng(0)
    kv, queries = (LENGTH, KV, WIDTH), (LENGTH, KV, QUERIES, WIDTH)
    shapes = queries, kv, kv, (NEAR,), (KV, QUERIES), queries
    return [rng.standard_normal((ROWS, *shape)).astype(np.float32) for shape in shapes]


def forward(how: str, path: str) -> train.Forward:
    return tiny.forward(tiny.config(context=how, attention=path))


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """The result and its gradients, in f64 on one device."""
    with jax.enable_x64(True):
        *given, g = map(jnp.float64, operands())
        out, vjp = jax.vjp(functools.partial(dense, name), *given)
        return [np.asarray(x) for x in (out, *vjp(g))]


def found(how: str, path: str, name: str, mesh: str) -> list[np.ndarray]:
    """The same, by a way on a mesh."""

    def both(
        q: act["B/r/d L/c K/t Q D"],
        k: act["B/r/d L/c K/t D"],
        v: act["B/r/d L/c K/t D"],
        bias: act["B/r/d N"],
        sinks: f32["B/r/d K/t Q"],
        document: i32["B/r/d L/c"],
        g: act["B/r/d L/c K/t Q D"],
    ) -> tuple[
        act["B/r/d L/c K/t Q D"],
        act["B/r/d L/c K/t Q D"],
        act["B/r/d L/c K/t D"],
        act["B/r/d L/c K/t D"],
        act["B/r/d N"],
        f32["B/r/d K/t Q"],
    ]:
        attend = forward(how, path).attend(Tokens(document, document, document))

        def run(q, k, v, bias, sinks):
            learned, sinks = (bias,) * (name == "learned"), sinks if name == "sinks" else None
            return attend(None, q, k, v, RULES[name], *learned, sinks=sinks)[0]

        out, vjp = jax.vjp(run, q, k, v, bias, sinks)
        return out, *vjp(g)

    *given, sinks, g = operands()
    with jax.enable_x64(True), jax.set_mesh(tiny.mesh(mesh)), small_blocks(5):
        exact = [np.float64(x) for x in (*given, g)]
        run = tiny.per_device(both, act="float64")
        return [np.asarray(x) for x in run(*exact[:-1], sinks, documents(), exact[-1])]


KINDS = {
    "ring": ("ring", "auto"),
    "gather": ("gather", "blockwise"),
    "ulysses": ("ulysses", "blockwise"),
    "gather, einsum": ("gather", "einsum"),
    "ulysses, einsum": ("ulysses", "einsum"),
}
MESHES = ("c=2", "c=2 t=2", "c=3", "c=4 d=2", "c=6", "c=8")
CASES = [(k, n, m) for k in KINDS for n in RULES for m in MESHES if (k[:7], n) != ("ulysses", "learned")]
QUICK = {
    ("ring", "causal", "c=3"),
    ("ring", "sinks", "c=2 t=2"),
    ("gather", "learned", "c=2"),
    ("ulysses", "alibi", "c=8"),
}


def marks(kind: str, name: str, mesh: str) -> list:
    """All rules on a mesh of c and t, and all meshes by the default rule, are long; others are slow."""
    is_long = mesh == "c=2 t=2" or name == "causal"
    return [] if (kind, name, mesh) in QUICK else [pytest.mark.long if is_long else pytest.mark.slow]


@pytest.mark.parametrize(("kind", "name", "mesh"), [pytest.param(*case, marks=marks(*case)) for case in CASES])
def test_each_way_is_dense(kind, name, mesh):
    """Six devices have part of one kv head each by ulysses, and a number of chunks that is no power of two by a ring."""
    tolerance = 1e-5 if "einsum" in kind else 1e-12  # train.attention has scores in f32
    pairs = zip(found(*KINDS[kind], name, mesh), expected(name), strict=True)
    for what, (a, b) in zip(("out", "q", "k", "v", "bias", "sinks"), pairs, strict=True):
        near = max(tolerance, 1e-6 * (what == "sinks"))  # which are f32, as is their gradient
        np.testing.assert_allclose(a, b, atol=near * max(np.abs(b).max(), 1e-9), rtol=0, err_msg=what)
