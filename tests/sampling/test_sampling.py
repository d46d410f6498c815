"""Sampling: the cache against training's forward pass, the draw against numpy and transformers,
texts on every mesh.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import train
from shardlib.shardtypes import f32, i32, u32
from shardwright.sampling.sampler import Sampler, Sampling, choose, lowest_kept
from tests.sampling.redrawn import kept_by_numpy
from tests.support import tiny
from tests.support.transformers_models import exported

NUCLEUS = Sampling(max_tokens=20, temperature=0.9, top_k=20, top_p=0.9, seed=5)
# the third leaves room for 11 tokens
PROMPTS = [[5, 8, 13], [], list(range(1, 30)), [7] * 11, [3, 4]]
CONTEXT = 40


# ---- texts ---------------------------------------------------------------------------------------


@functools.cache
def weights(mesh):
    if mesh == "one device":
        with jax.set_mesh(tiny.mesh(mesh)):
            return tiny.weights(tiny.model())
    on_host = jax.tree.map(np.asarray, weights("one device"))
    with jax.set_mesh(tiny.mesh(mesh)):
        return tiny.place(on_host, train.Transformer)


def generate(mesh, settings=NUCLEUS, prompts=PROMPTS, batch=64, **changes):
    with jax.set_mesh(tiny.mesh(mesh)), tiny.unproved():
        return Sampler(tiny.step(tiny.config(**changes)), settings, CONTEXT, batch).generate(
            weights(mesh), prompts
        )


@pytest.fixture(scope="module")
def texts():
    """Those of PROMPTS, all at once on one device."""
    return generate("one device")


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "gather", "batch"), [("one device", "layer", 2), ("r=2 d=2 t=2", "step", 64)]
)
def test_texts_are_the_same_on_every_mesh_and_in_any_batch(mesh, gather, batch, texts):
    """With weights gathered in each layer, or ahead."""
    assert generate(mesh, batch=batch, gather_weights=gather) == texts


@pytest.mark.long
def test_a_stop_token_ends_its_text_alone(texts):
    stop = next(token for token in texts[0] if any(token not in text for text in texts))
    drawn = generate("one device", dataclasses.replace(NUCLEUS, stop=(stop,)))
    for found, whole in zip(drawn, texts, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert found == whole[:end]
    assert len(drawn[0]) < max(map(len, drawn)) == 20
    assert [*map(len, texts)] == [20, 20, 11, 20, 20], "the third fills the context"


@pytest.mark.long
def test_greedy_text_is_that_of_llama():
    torch = pytest.importorskip(
        "torch", reason="the Llama oracle needs torch, installed on Python 3.11 only"
    )
    c, prompts = tiny.model(), PROMPTS[:2] + PROMPTS[3:]
    drawn = generate("one device", Sampling(max_tokens=20, temperature=0), prompts)
    model = exported(c, weights("one device"))
    for prompt, found in zip(prompts, drawn, strict=True):
        ids = torch.tensor([[c.bos_id, *prompt]])
        options = {
            "max_new_tokens": 20,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert found == out[0, ids.shape[1] :].tolist()


# ---- the draw ------------------------------------------------------------------------------------


FILTERS = [
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(top_k=99, top_p=1e-6),
    Sampling(temperature=1.5, top_k=9, top_p=0.9, min_p=0.3),
]


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(1).normal(0, 2, (50, 40)).astype(np.float32)


@pytest.mark.parametrize("s", FILTERS)
def test_top_k_top_p_and_min_p_leave_what_transformers_leaves(s, logits):
    torch = pytest.importorskip(
        "torch", reason="transformers' warpers need torch, installed on Python 3.11 only"
    )
    pytest.importorskip("transformers", reason="the warpers are those of transformers")
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    expected = TemperatureLogitsWarper(float(s.temperature))(None, torch.tensor(logits))
    if s.top_k is not None:
        expected = TopKLogitsWarper(s.top_k)(None, expected)
    if s.top_p < 1:
        expected = TopPLogitsWarper(s.top_p)(None, expected)
    if s.min_p:
        expected = MinPLogitsWarper(s.min_p)(None, expected)
    scaled = logits / s.temperature
    found = np.where(scaled >= lowest_kept(scaled, s), scaled, -np.inf)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_tokens_are_as_frequent_as_the_softmax_says():
    """Chi-square of 131,072 draws, on devices that each have a part of the vocabulary."""
    s = Sampling(temperature=0.8, top_k=6, top_p=0.9, seed=2)
    rng, draws = np.random.default_rng(0), 2**17
    row = rng.normal(0, 1.5, 16).astype(np.float32)

    def run(
        logits: f32["B/r/d L V/t"], number: i32["B/r/d L"], place: i32["B/r/d L"]
    ) -> u32["B/r/d L"]:
        return choose(logits, number, place, s)

    shape = (8, draws // 8)
    number, place = (
        np.int32(np.arange(draws).reshape(shape) // 64),
        np.int32(np.arange(draws).reshape(shape) % 64),
    )
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        drawn = np.asarray(tiny.per_device(run)(np.broadcast_to(row, (*shape, 16)), number, place))
    scaled = row / np.float32(s.temperature)
    kept = kept_by_numpy(scaled, s)
    p = np.zeros(16)
    p[kept] = np.exp(scaled[kept])
    counts = np.bincount(drawn.reshape(-1), minlength=16)
    expected = draws * p / p.sum()
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, (counts, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, r"top_p is 0.0; it must be above 0 and at most 1"),
        ({"stop": (64,)}, r"stop has the token id 64; those of the model are 0 to 63"),
    ],
)
def test_settings_out_of_range(settings, message):
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match=message):
        Sampler(tiny.step(tiny.config()), Sampling(**settings), CONTEXT)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], [64]], r"prompt 1 has the token id 64; those of the model are 0 to 63"),
        ([[1], [2] * 8], r"prompt 1 has 8 tokens; it must have fewer than 8"),
    ],
)
def test_prompts_out_of_range(prompts, message):
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match=message):
        Sampler(tiny.step(tiny.config()), Sampling(), context=8).generate(None, prompts)
