"""Layers that keep a state: sampled by its steps as by the forward pass of training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardlib.shardtypes import f32, pytree_dataclass
from shardwright.modeling.masks import AttentionMask, Window, causal, same_document
from shardwright.modeling.state import KeyValues
from shardwright.program.step import trace_step
from shardwright.sampling import cache
from shardwright.sampling import sampler as sampler_module
from shardwright.sampling.sampler import Sampler, Sampling
from tests.sampling.redrawn import redrawn
from tests.support import rule_models, tiny
from tests.support.own_model import MINE, SIZES, imported, with_state
from tests.support.token_shift import shifted

pytestmark = pytest.mark.usefixtures("not_remembered")

CONTEXT = 24
DRAWN = Sampling(max_tokens=12, temperature=1.5)
PROMPTS = [[5, 8, 13], [], list(range(1, 17)), [7] * 11]


def far_from_uniform(table):
    """Host weights, also norms that are not 1."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: np.float32(rng.normal(x.mean, 2 * x.std or 0.1, x.shape)), table)


DECAY = 0.9
SMALL = dataclasses.replace(rule_models.SIZES, layers=2)


# ---- a delta rule, whose state is a matrix -------------------------------------------------------


@pytree_dataclass
class Memory:
    matrix: f32["B/b K/t D 4"]


def unit(x):
    """Of length 1, so that the delta rule forgets what it overwrites and no more."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def delta(q, k, v, document):
    """The gated delta rule of all positions: a triangular solve (arXiv 2412.06464). document[B, L]
    or None.
    """
    place = jnp.arange(k.shape[1])
    gap = jnp.log(DECAY) * (place[:, None] - place)
    seen = (place[:, None] >= place) & (document[:, :, None] == document[:, None])
    # of what position s wrote, at l: [B, 1, L, S]
    decay = jnp.exp(jnp.where(seen, gap, -jnp.inf))[:, None]
    rows = jnp.tril(jnp.einsum("blkd,bskd->bkls", k, k) * decay, -1) + jnp.eye(len(place))
    written = jax.scipy.linalg.solve_triangular(
        rows, jnp.moveaxis(v, 1, 2), lower=True, unit_diagonal=True
    )
    return jnp.einsum(
        "blkqd,bskd,bkls,bksn->blkqn", q, k, jnp.broadcast_to(decay, rows.shape), written
    )


def delta_step(state, q, k, v):
    matrix = state * DECAY
    written = v - jnp.einsum("bkd,bkdn->bkn", k, matrix)
    matrix = matrix + k[..., None] * written[:, :, None]
    return jnp.einsum("bkqd,bkdn->bkqn", q, matrix), matrix


def forgetful_step(state, q, k, v):
    """Forgets the decay."""
    return delta_step(state / DECAY, q, k, v)


class Delta(train.Llama):
    """The delta rule instead of attention."""

    State = Memory
    name, step = "matrix", staticmethod(delta_step)

    def layer(self, x, w, tokens, attention):
        def rule(q, k, v, _):
            def whole(*inputs):
                return delta(*inputs, tokens.document)

            inputs = (jnp.float32(y) for y in (q, unit(k), v))
            return attention.recur(self.name, whole, self.step, *inputs).astype(q.dtype)

        return super().layer(x, w, tokens, rule)


# ---- several states in a layer, or in a period of layers -----------------------------------------


@pytree_dataclass
class TwoCalls:
    kv: KeyValues
    near: KeyValues


class Twice(train.Llama):
    """Attends to all positions, and again to the last few."""

    State = TwoCalls

    def layer(self, x, w, tokens, attention):
        def both(q, k, v, mask):
            near = AttentionMask((causal, same_document, Window(4)))
            return attention(q, k, v, mask) - attention(q, 2 * k, v, near, keep="near")

        return super().layer(x, w, tokens, both)


@pytree_dataclass
class OfKinds:
    """The states of two kinds of layers."""

    kv: KeyValues
    recurrent: Memory


class Alternating(Delta):
    """The delta rule in every second layer, attention in the others."""

    State = OfKinds
    period, name = 2, "recurrent"

    def layer(self, x, w, tokens, attention):
        if tokens.index_in_period == 1:
            return train.Llama.layer(self, x, w, tokens, attention)
        return super().layer(x, w, tokens, attention)

    @staticmethod
    def step(state, *inputs):
        out, new = delta_step(state.matrix, *inputs)
        return out, Memory(new)


# ---- texts ---------------------------------------------------------------------------------------

STATES = {kind.__name__: kind for kind in (Twice, Alternating)}
STATES |= {name: rule_models.KINDS[name] for name in ("alternating", "sinks")}


@pytest.mark.long
@pytest.mark.parametrize("name", STATES)
def test_texts_are_those_of_the_forward_pass(name, monkeypatch):
    """Prompts have several lengths: padding leaves a state."""
    monkeypatch.setattr(sampler_module, "CHUNK", 5)
    kind = STATES[name]
    c = tiny.config(SMALL)
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        model = kind(c.model)
        w = tiny.place(far_from_uniform(model.table), kind.Weights)
        sampler = Sampler(trace_step(c, model), DRAWN, CONTEXT)
        texts = sampler.generate(w, PROMPTS)
        assert redrawn(sampler.forward, w, PROMPTS, texts, DRAWN, CONTEXT) == texts
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


@pytest.mark.long
def test_the_model_of_the_page(tmp_path):
    source = with_state(MINE).replace("K/t D 16", f"K/t D {SIZES['d_head']}")
    with imported("recurrent", source, tmp_path) as module, jax.set_mesh(tiny.mesh("d=2 t=2")):
        c = tiny.config(module.ModelConfig(**SIZES, module="recurrent"))
        step = tiny.step(c)
        w = jax.tree.map(lambda x: 2 * x, tiny.state(c).weights)
        sampler = Sampler(step, DRAWN, CONTEXT)
        texts = sampler.generate(w, PROMPTS)
        assert redrawn(sampler.forward, w, PROMPTS, texts, DRAWN, CONTEXT) == texts


# ---- what is refused -----------------------------------------------------------------------------


def delta_of(name: str = "matrix", step=delta_step) -> type:
    return type("Wrong", (Delta,), {"name": name, "step": staticmethod(step)})


def in_bf16(state, *inputs):
    out, new = delta_step(state, *inputs)
    return out, jnp.bfloat16(new)


class HiddenShift(train.Llama):
    """With a weight that is 0 before training: the norms' are 1."""

    def layer(self, x, w, tokens, attention):
        before = jnp.float32(shifted(x))
        mlp_norm = shardops.all_gather("M/t/fsdp -> M", w.mlp_norm)
        scaled = shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", before, mlp_norm)
        return super().layer((x + scaled - before).astype(x.dtype), w, tokens, attention)


OTHER = "the logits of random texts differ from"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (delta_of(step=forgetful_step), f"with the states matrix, {OTHER}"),
        (
            delta_of("matrx"),
            "test_states.py:.*: a layer keeps `matrx`, which the model's Memory does not declare",
        ),
        (delta_of(step=in_bf16), r"the state matrix, f32.*: its dtype is bfloat16"),
        (HiddenShift, f"with a KV cache, {OTHER} training's forward pass"),
    ],
)
def test_wrong_states_are_refused(kind, message):
    c = tiny.config(SMALL)
    with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ValueError, match=message):
        cache.check_cache(tiny.forward_of(kind(c.model), c.training), CONTEXT)


class Statistics(train.Llama):
    """A layer that learns from later positions."""

    def layer(self, x, w, tokens, attention):
        x = (x - x.mean(axis=1, keepdims=True)).astype(x.dtype)
        return super().layer(x, w, tokens, attention)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Statistics, "reduce_sum: the logits of a position depend on a later token"),
        (
            rule_models.KINDS["prefix"],
            r"cannot sample texts, .* not known .* causal: the model's attention mask says "
            r"causal=False",
        ),
    ],
)
def test_what_sees_ahead_or_other_texts_is_not_sampled(kind, message):
    c = tiny.config(SMALL)
    with jax.set_mesh(tiny.mesh("d=2 t=2")), pytest.raises(ValueError, match=message):
        Sampler(trace_step(c, kind(c.model)), DRAWN, CONTEXT).check(PROMPTS)
