"""The model that docs/models.md begins with, on any mesh, as a pipeline, and sampled with a cache."""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from own_model import MINE, SIZES, imported
from redrawn import redrawn

from shardwright.modeling.model import load_model
from shardwright.sampling.sampler import Sampler, Sampling

PLACES = ("d=4 t=2", "p=2 d=2 t=2")


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    with imported("mine", MINE, tmp_path_factory.mktemp("mine")) as module:
        yield module


def config(module="mine", **training):
    return tiny.config(sys.modules[module].ModelConfig(**SIZES), **training)


@functools.cache
def losses(place: str, gather: str, module: str = "mine") -> list[float]:
    """Of steps on one batch, and last that of the evaluation."""
    c = config(module, microbatches=2, gather_weights=gather)
    with jax.set_mesh(tiny.mesh(place)):
        state, batch = tiny.state(c), tiny.place_batch(c)
        step, found = tiny.training_step(c), []
        for i in range(6):
            state, metrics = step(state, batch, np.int32(i))
            found.append(float(metrics.loss))
        nats, targets = tiny.evaluation_step(c)(state.weights, batch)
        return [*found, float(nats / targets)]


@pytest.mark.long
@pytest.mark.parametrize("gather", ["layer", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_it_trains_the_same_on_every_mesh(place, gather):
    expected, found = losses("one device", "layer"), losses(place, gather)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.5, "it learns"


@pytest.mark.long
def test_it_is_sampled_with_the_cache_as_without():
    """Each token is drawn again without it."""
    prompts = [[5, 8, 13], [], list(range(1, 30)), [7] * 11]
    nucleus = Sampling(max_tokens=20, temperature=0.9, top_k=20, top_p=0.9, seed=5)
    c = config(unroll=2)
    forward = tiny.forward(c)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        # Twice as large as at first, so that what is drawn is far from uniform.
        w = jax.tree.map(lambda x: 2 * x, tiny.state(c).weights)
        drawn = Sampler(tiny.step(c), nucleus, context=40).generate(w, prompts)
        assert redrawn(forward, w, prompts, drawn, nucleus, 40) == drawn
    assert len({tuple(text) for text in drawn}) == len(prompts)


OLDER = (Path(__file__).parents[1] / "data/model_with_two_types.txt").read_text().replace('"mine"', '"older"')


@pytest.mark.quick
def test_a_layer_that_takes_einsum_is_refused_in_one_line(tmp_path):
    refused = r"^model.module is 'older', whose layer takes `einsum`; drop it, and call shardops.matmul instead; .*"
    with imported("older", OLDER, tmp_path) as older, pytest.raises(ValueError, match=f"{refused}$"):
        load_model(older.ModelConfig(**SIZES))


@pytest.mark.long
def test_without_einsum_a_model_with_two_types_and_its_own_table_trains(tmp_path):
    source = OLDER.replace("attend, einsum)", "attend)").replace(" einsum(", " matmul(")
    source = source.replace("index_unreduced, psum,", "index_unreduced, matmul, psum,")
    with imported("older", source, tmp_path):
        expected, found = (losses(place, "layer", "older") for place in ("one device", "d=2 t=2"))
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.5, "it learns"
