"""The model that docs/models.md begins with: sampled with a cache, and refused without
declarations.
"""

import sys

import jax
import pytest

from shardwright.modeling.model import load_model
from shardwright.sampling.sampler import Sampler, Sampling
from tests.support import tiny
from tests.support.own_model import MINE, SIZES, imported
from tests.support.redrawn import redrawn


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    with imported("mine", MINE, tmp_path_factory.mktemp("mine")) as module:
        yield module


def config(module="mine", **training):
    return tiny.config(sys.modules[module].ModelConfig(**SIZES), **training)


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


PLAIN = f"""{MINE}
from shardlib.shardtypes import f32


@pytree_dataclass
class Plain:
    embed: f32["V/t/p M/fsdp"]
    layers: Array["layers/p", Layer]


class Model(Model):
    Weights = Plain

    def __init__(self, c):
        super().__init__(c)
        self.table = Plain(self.table.embed, self.table.layers)
"""


@pytest.mark.quick
def test_a_weight_that_is_not_declared_as_one_is_refused_in_one_line(tmp_path):
    refused = (
        r"^model.module is 'plain', whose weight embed has the type f32\['V/t/p M/fsdp'\]; "
        r"declare it by matrix, .*$"
    )
    with imported("plain", PLAIN, tmp_path) as plain, pytest.raises(ValueError, match=refused):
        load_model(plain.ModelConfig(**SIZES, module="plain"))
