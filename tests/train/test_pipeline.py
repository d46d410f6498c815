"""The executor of pipeline schedules in the training step: dropout, what stages may not do.

Whole steps: test_oracles.py; the executor in f64 against NumPy: test_microbatches.py.
"""

import jax
import numpy as np
import pytest
from jax import lax

import train
from shardlib import shardops
from shardlib.shardtypes import ShardError, f32, u32
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.models import gpt2
from shardwright.program.config import PipelineConfig
from tests.support import tiny

STAGES = "p=2 t=2"


def dropout_step(mesh: str):
    """Loss and gradients of GPT-2 with dropout, on the host."""
    sizes = {"vocab": 64, "positions": 16, "d_model": 64, "heads": 4, "layers": 4, "bos_id": 0}
    c = tiny.config(gpt2.ModelConfig(**sizes, dropout=0.3), microbatches=4)
    c.pipeline = PipelineConfig("1f1b")
    seeds = np.arange(tiny.BATCH, dtype=np.uint32).reshape(4, -1)

    def per_device(
        w: gpt2.GPT2, batch: train.Batch, seeds: u32["m B/r/d"]
    ) -> tuple[f32[""], gpt2.GPT2]:
        return tiny.loss_and_gradients(w, batch, c, seeds)

    with jax.set_mesh(tiny.mesh(mesh)):
        model = load_model(c.model)
        w = jax.jit(lambda key: initialize(model.table, key))(jax.random.key(1))
        loss, g = tiny.per_device(per_device)(w, tiny.place_batch(c), seeds)
        found = vars(g.layers) | {"embed": g.embed}
        return float(loss), {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.long
def test_dropout_is_that_of_one_device():
    """A mask depends on row and layer, not on stage, microbatch or mesh."""
    (loss, found), (expected_loss, expected) = map(dropout_step, ("p=2 d=2 t=2", "one device"))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    # What is added to all keys of a softmax has no gradient but rounding.
    np.testing.assert_allclose(found.pop("b_k"), 0, atol=1e-6)
    for name, x in found.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-5 * scale, err_msg=name)


# ---- what a stage may not do ---------------------------------------------------------------------


def shifted_by_shardops(x):
    return shardops.ppermute("X/r/d/p Y/t Z", x, axis="p", shift=1)


def summed_past_shardops(x):
    return x + lax.pcast(0 * lax.psum(x, "p"), ("p",), to="varying")


@jax.custom_vjp
def summed_in_the_backward_pass(x):
    return x


summed_in_the_backward_pass.defvjp(lambda x: (x, None), lambda _, g: (summed_past_shardops(g),))
WAITS = "a pipeline stage runs {} over p, which would wait forever"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (shifted_by_shardops, r"test_pipeline.py:\d+: " + WAITS.format("ppermute")),
        (summed_in_the_backward_pass, WAITS.format(r"psum\w*")),
    ],
)
def test_a_collective_over_p_in_a_stage_is_refused(reduce, message, monkeypatch):
    layer = train.Llama.layer
    monkeypatch.setattr(train.Llama, "layer", lambda self, x, *args: layer(self, reduce(x), *args))
    with jax.set_mesh(tiny.mesh(STAGES)), pytest.raises(ShardError, match=message):
        assert tiny.step(tiny.config(tiny.model(layers=4), microbatches=4)).traced
