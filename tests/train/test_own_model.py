"""The model that docs/models.md begins with, on any mesh, as a pipeline, and sampled with a cache."""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import step_text
import tiny
from own_model import MINE, QUOTED, SIZES, imported
from redrawn import redrawn

from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.run.pipeline_config import PipelineConfig
from shardwright.sampling.drawing import Sampling
from shardwright.sampling.sampler import Sampler

UNEVEN = "p=2 t=2, of 3 layers and 1"
PLACES = ("d=4 t=2", "p=2 d=2 t=2", UNEVEN)


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    with imported("mine", MINE, tmp_path_factory.mktemp("mine")) as module:
        yield module


@pytest.mark.parametrize("number", range(len(QUOTED)))
def test_what_the_page_quotes_of_gpt2_is_there(number):
    assert len(QUOTED) >= 4
    assert QUOTED[number] in (Path(__file__).parents[2] / "gpt2.py").read_text()


def config(place: str, **training):
    c = tiny.config(sys.modules["mine"].ModelConfig(**SIZES), **training)
    c.pipeline = PipelineConfig(layers_per_stage=[3, 1] if place == UNEVEN else None)
    return c


@functools.cache
def losses(place: str, gather: str) -> list[float]:
    """Of steps on one batch, and last that of the evaluation."""
    c = config(place, microbatches=2, gather_weights=gather)
    with jax.set_mesh(tiny.mesh(place)):
        state, batch = tiny.state(c), tiny.place_batch(c)
        step, found = tiny.training_step(c), []
        for i in range(6):
            state, metrics = step(state, batch, np.int32(i))
            found.append(float(metrics.loss))
        nats, targets = tiny.evaluation_step(c)(state.weights, batch)
        return [*found, float(nats / targets)]


def test_it_has_forty_lines_and_nothing_of_the_trainers():
    assert len([line for line in MINE.splitlines() if line.strip()]) <= 45
    for word in ("scan", "checkpoint", "cache", "unroll", "padd", "stage"):
        assert word not in MINE


@pytest.mark.long
@pytest.mark.parametrize("gather", ["layer", pytest.param("step", marks=pytest.mark.slow)])
def test_every_collective_has_its_line_in_it_or_in_train(gather):
    files = step_text.files_of_collectives(
        config("d=4 t=2", microbatches=2, gather_weights=gather), tiny.mesh("d=4 t=2")
    )
    assert {Path(file).name for file in files} == {"mine.py", "train.py"}


@pytest.mark.long
@pytest.mark.parametrize("gather", ["layer", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_it_trains_the_same_on_every_mesh(place, gather):
    expected, found = losses("one device", "layer"), losses(place, gather)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.5, "it learns"


PROMPTS = [[5, 8, 13], [], list(range(1, 30)), [7] * 11]
NUCLEUS = Sampling(max_tokens=20, temperature=0.9, top_k=20, top_p=0.9, seed=5)


@functools.cache
def weights():
    """On the host; twice as large as at first, so that what is drawn is far from uniform."""
    with jax.set_mesh(tiny.mesh("one device")):
        w = jax.jit(lambda key: initialize(load_model(config("one device").model).table, key))(jax.random.key(3))
        return jax.tree.map(lambda x: 2 * np.asarray(x), w)


@functools.cache
def texts(mesh: str, gather: str, unroll: int | None = 1):
    """What is drawn with the cache; each token is drawn again without it."""
    c = config("one device", gather_weights=gather, unroll=unroll)
    with jax.set_mesh(tiny.mesh(mesh)):
        sampler = Sampler(tiny.forward(c), NUCLEUS, context=16)
        w = tiny.place(weights(), sampler.forward.model.Weights)
        drawn = sampler.generate(w, PROMPTS)
        assert redrawn(tiny.forward(c), w, PROMPTS, drawn, NUCLEUS, 16) == drawn
    return drawn


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "gather", "unroll"),
    [
        pytest.param("one device", "step", None, marks=pytest.mark.slow),
        ("d=4 t=2", "layer", 2),
        pytest.param("r=2 d=2 t=2", "step", 1, marks=pytest.mark.slow),
    ],
)
def test_it_is_sampled_with_the_cache_as_without(mesh, gather, unroll):
    found = texts(mesh, gather, unroll)
    assert found == texts("one device", "layer")
    assert len({tuple(text) for text in found}) == len(PROMPTS)
