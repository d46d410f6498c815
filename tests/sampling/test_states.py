"""Layers that keep a state: sampled by its steps as by the forward pass of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib.parsing import ShardError
from shardlib.shardtypes import f32, pytree_dataclass
from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig
from shardwright.program.step import trace_step
from shardwright.sampling import cache
from shardwright.sampling import sampler as sampler_module
from shardwright.sampling.sampler import Sampler, Sampling
from tests.support import state_models as models
from tests.support import tiny
from tests.support.own_model import MINE, SIZES, imported, with_state
from tests.support.redrawn import redrawn

MESHES = ("one device", "r=2 d=2 t=2")
CONTEXT = 24
DRAWN = Sampling(max_tokens=12, temperature=1.5)
PROMPTS = [[5, 8, 13], [], list(range(1, 17)), [7] * 11]


def check_of(kind: type, mesh: str = "one device", context: int = CONTEXT):
    c = tiny.config(ModelConfig(**models.SIZES))
    with jax.set_mesh(tiny.mesh(mesh)):
        cache.check_cache(tiny.forward_of(kind(c.model), c.training), context)


@pytest.mark.long
def test_a_step_that_errs_far_from_the_beginning_is_refused():
    """What a block of 64 positions keeps is read by the next one."""
    check_of(models.Blocks, context=160)
    blind = type("Blind", (models.Blocks,), {"step": staticmethod(models.blind_step)})
    with pytest.raises(
        ValueError, match="with the states kv, block, the logits of random texts differ"
    ):
        check_of(blind, context=160)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", models.KINDS)
def test_logits_by_states_are_those_of_the_forward_pass(name, mesh):
    check_of(models.KINDS[name], mesh)


@functools.cache
def host_weights(name: str):
    """Far from the first ones, for texts that are not uniform."""
    rng, table = np.random.default_rng(3), models.KINDS[name](ModelConfig(**models.SIZES)).table
    return jax.tree.map(lambda x: np.float32(rng.normal(x.mean, 2 * x.std or 0.1, x.shape)), table)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", models.KINDS)
def test_texts_are_those_of_the_forward_pass(name, mesh, monkeypatch):
    """Prompts have several lengths: padding leaves a state.

    On several devices, the programs are proved.
    """
    monkeypatch.setattr(sampler_module, "CHUNK", 5)
    kind = models.KINDS[name]
    c = tiny.config(ModelConfig(**models.SIZES))
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.place(host_weights(name), kind.Weights)
        sampler = Sampler(trace_step(c, kind(c.model)), DRAWN, CONTEXT)
        texts = sampler.generate(w, PROMPTS)
        assert redrawn(sampler.forward, w, PROMPTS, texts, DRAWN, CONTEXT) == texts
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


def looped(q, k, v, starts):
    """The gated delta rule, position by position."""
    out = np.zeros(q.shape[:-1] + v.shape[-1:])
    for row in range(len(q)):
        for head in range(k.shape[2]):
            memory = np.zeros((k.shape[-1], v.shape[-1]))
            for i in range(k.shape[1]):
                memory = 0 * memory if starts[row, i] else models.DECAY * memory
                key = k[row, i, head]
                memory = memory + np.outer(key, v[row, i, head] - memory.T @ key)
                out[row, i, head] = q[row, i, head] @ memory
    return out


def test_the_delta_rule_is_a_loop():
    """By steps without documents, and by the solve with them."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(2, 9, 3, *dims)).astype(np.float32) for dims in ((2, 4), (4,), (5,))
    )
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    state, found = np.zeros((2, 3, 4, 5), np.float32), []
    for i in range(9):
        out, state = models.delta_step(state, q[:, i], k[:, i], v[:, i])
        found.append(out)
    np.testing.assert_allclose(np.stack(found, 1), looped(q, k, v, np.zeros((2, 9))), atol=1e-5)
    starts = rng.random((2, 9)) < 0.3
    np.testing.assert_allclose(
        models.delta(q, k, v, starts.cumsum(1)), looped(q, k, v, starts), atol=1e-5
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_model_of_the_page(dtype, tmp_path):
    """It trains, is proved, and is sampled, on several devices."""
    source = with_state(MINE).replace("K/t D 16", f"K/t D {SIZES['d_head']}")
    with imported("recurrent", source, tmp_path) as module, jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        c = tiny.config(module.ModelConfig(**SIZES, module="recurrent"), compute_dtype=dtype)
        step = tiny.step(c)
        assert find_unsound(step) == []
        assert check_causal(step) == ""
        w = jax.tree.map(lambda x: 2 * x, tiny.state(c).weights)
        sampler = Sampler(step, DRAWN, CONTEXT)
        texts = sampler.generate(w, PROMPTS)
        if dtype == "f32":
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


class Cut(models.Both):
    """A state of the positions of one device of t."""

    def layer(self, x, w, tokens, attention):
        attention.recur("last", lambda x: x, models.convolution_step, x)
        return super().layer(x, w, tokens, attention)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            delta_of(step=models.forgetful_step),
            "with the states matrix, the logits of random texts differ from",
        ),
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
    ],
)
def test_wrong_states_are_refused(kind, message):
    with pytest.raises((ValueError, ShardError), match=message):
        check_of(kind, "d=4 t=2")


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
