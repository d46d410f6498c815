"""Layers that keep a state: sampled by its steps as by the forward pass of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardlib.parsing import ShardError
from shardlib.shardtypes import f32, pytree_dataclass
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig
from shardwright.program.step import trace_step
from shardwright.sampling import cache
from shardwright.sampling import sampler as sampler_module
from shardwright.sampling.sampler import Sampler, Sampling
from tests.sampling import state_models as models
from tests.support import rule_models, tiny
from tests.support.own_model import MINE, SIZES, imported, with_state
from tests.support.redrawn import redrawn
from tests.support.token_shift import shifted

CONTEXT = 24
DRAWN = Sampling(max_tokens=12, temperature=1.5)
PROMPTS = [[5, 8, 13], [], list(range(1, 17)), [7] * 11]


def check_of(kind: type, mesh: str = "one device", context: int = CONTEXT):
    c = tiny.config(ModelConfig(**models.SIZES))
    with jax.set_mesh(tiny.mesh(mesh)):
        cache.check_cache(tiny.forward_of(kind(c.model), c.training), context)


def far_from_uniform(table):
    """Host weights, also norms that are not 1."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: np.float32(rng.normal(x.mean, 2 * x.std or 0.1, x.shape)), table)


STATES = models.KINDS | {name: rule_models.KINDS[name] for name in ("alternating", "sinks")}


@pytest.mark.long
@pytest.mark.parametrize("name", STATES)
def test_texts_are_those_of_the_forward_pass(name, monkeypatch):
    """Prompts have several lengths: padding leaves a state."""
    monkeypatch.setattr(sampler_module, "CHUNK", 5)
    kind = STATES[name]
    c = tiny.config(ModelConfig(**models.SIZES))
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        model = kind(c.model)
        w = tiny.place(far_from_uniform(model.table), kind.Weights)
        sampler = Sampler(trace_step(c, model), DRAWN, CONTEXT)
        texts = sampler.generate(w, PROMPTS)
        assert redrawn(sampler.forward, w, PROMPTS, texts, DRAWN, CONTEXT) == texts
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


@pytest.mark.long
def test_the_model_of_the_page(tmp_path):
    """It is proved, and sampled, on several devices."""
    source = with_state(MINE).replace("K/t D 16", f"K/t D {SIZES['d_head']}")
    with imported("recurrent", source, tmp_path) as module, jax.set_mesh(tiny.mesh("d=2 t=2")):
        c = tiny.config(module.ModelConfig(**SIZES, module="recurrent"))
        step = tiny.step(c)
        assert find_unsound(step) == []
        w = jax.tree.map(lambda x: 2 * x, tiny.state(c).weights)
        sampler = Sampler(step, DRAWN, CONTEXT)
        texts = sampler.generate(w, PROMPTS)
        assert redrawn(sampler.forward, w, PROMPTS, texts, DRAWN, CONTEXT) == texts


# ---- what is refused -----------------------------------------------------------------------------


def delta_of(name: str = "matrix", state: type = models.Memory, step=models.delta_step) -> type:
    return type(
        "Wrong", (models.Delta,), {"name": name, "State": state, "step": staticmethod(step)}
    )


def ends(change):
    """The step, with another new state."""

    def step(state, *inputs):
        out, new = models.delta_step(state, *inputs)
        return out, change(new)

    return step


@pytree_dataclass
class NoSize:
    matrix: f32["B/b K/t Z 4"]


class TwiceInOne(models.Delta):
    def layer(self, x, w, tokens, attention):
        return super().layer(super().layer(x, w, tokens, attention), w, tokens, attention)


class Cut(models.Convolution):
    """A state of the positions of one device of t."""

    def layer(self, x, w, tokens, attention):
        attention.recur("last", lambda x: x, models.convolution_step, x)
        return super().layer(x, w, tokens, attention)


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
        (delta_of(step=models.forgetful_step), f"with the states matrix, {OTHER}"),
        (
            delta_of("matrx"),
            "state_models.py:.*: a layer keeps `matrx`, which the model's Memory does not declare",
        ),
        (delta_of(state=NoSize), r"a state f32\['B/b K/t Z 4'\]: dim Z has no size"),
        (
            delta_of(step=ends(lambda x: x[..., :2])),
            r"state_models.py:.*: the state matrix, .*: size mismatch",
        ),
        (delta_of(step=ends(jnp.bfloat16)), r"the state matrix, f32.*: its dtype is bfloat16"),
        (
            delta_of(step=ends(lambda x: (x, x))),
            "a layer keeps 2 arrays as `matrix`, of which the model's State has 1",
        ),
        (delta_of(step=lambda *x: models.delta_step(*x)[0]), "a step of a state returns f32"),
        (TwiceInOne, "a layer keeps `matrix` twice"),
        (Cut, r"an input of the state `last` has the shape \[2, 6, 16\], .* positions \[2, 12\]"),
        (HiddenShift, f"with a KV cache, {OTHER} training's forward pass"),
    ],
)
def test_wrong_states_are_refused(kind, message):
    with pytest.raises((ValueError, ShardError), match=message):
        check_of(kind, "d=4 t=2")


class Statistics(train.Llama):
    """A layer that learns from later positions."""

    def layer(self, x, w, tokens, attention):
        x = (x - x.mean(axis=1, keepdims=True)).astype(x.dtype)
        return super().layer(x, w, tokens, attention)


class OtherTexts(train.Llama):
    """A layer that learns from the other texts."""

    def layer(self, x, w, tokens, attention):
        return super().layer(x - jnp.mean(x, axis=0, keepdims=True), w, tokens, attention)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Statistics, "reduce_sum: the logits of a position depend on a later token"),
        (
            OtherTexts,
            "reduce_sum: the logits of a position depend on another sequence of the batch",
        ),
        (
            rule_models.KINDS["prefix"],
            r"cannot sample texts, .* not known .* causal: the model's attention mask says "
            r"causal=False",
        ),
    ],
)
def test_what_sees_ahead_or_other_texts_is_not_sampled(kind, message):
    c = tiny.config(ModelConfig(**models.SIZES))
    with jax.set_mesh(tiny.mesh("d=2 t=2")), pytest.raises(ValueError, match=message):
        Sampler(trace_step(c, kind(c.model)), DRAWN, CONTEXT).check(PROMPTS)


@pytree_dataclass
class OfTheBatch:
    matrix: f32["K/t D 4"]


@pytree_dataclass
class LatePositions:
    matrix: f32["B/b K/t S"]


@pytest.mark.parametrize("state", [OfTheBatch, LatePositions])
def test_a_type_that_is_not_that_of_a_state_is_refused(state, monkeypatch):
    monkeypatch.setattr(train.Llama, "State", state, raising=False)
    with pytest.raises(
        ValueError,
        match=r"the model's State.matrix: f32\['.*'\]: a state begins with B/b, the sequences",
    ):
        load_model(tiny.model())
