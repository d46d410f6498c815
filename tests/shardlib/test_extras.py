"""What layers give besides x: losses that are added in training, metrics in layer order; on any stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import train
from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import ShardError
from shardwright.cluster.devices import make_mesh
from shardwright.run.config import PipelineConfig
from shardwright_data.loader import TokenBatch

LAYERS, ROWS = 6, 16


def mean_square(x: jax.Array) -> jax.Array:
    """Of all entries of act['B/r/d L/t M'], on all devices."""
    total = shardops.einsum_unreduced("B/r/d L/t M -> +r +d +t", jnp.square(x.astype(jnp.float32)))
    count = x.size * shardops.axis_size("r") * shardops.axis_size("d") * shardops.axis_size("t")
    return shardops.psum("+r +d +t ->", total) / count


class Penalized(train.Llama):
    """Large residual streams cost."""

    def layer(self, x, w, tokens, attend):
        y = super().layer(x, w, tokens, attend)
        size = mean_square(y)
        return y, LayerAux(0.1 * size, {"stream": size, "grown": size - mean_square(x)})


CASES = {  # name: p, r, d, t, of the pipeline, gather_weights
    "d=4 t=2": (1, 1, 4, 2, {}, "step"),
    "side by side": (1, 1, 2, 2, {}, "layer"),
    "1f1b": (2, 1, 2, 2, {"schedule": "1f1b"}, "layer"),
    "gpipe": (2, 1, 2, 1, {"schedule": "gpipe"}, "layer"),
    "interleaved": (2, 1, 1, 2, {"virtual_stages": 3}, "step"),
}


def batch() -> TokenBatch:
    rng = np.random.default_rng(0)
    shape = ROWS, tiny.LENGTH
    targets = rng.integers(0, 64, shape).astype(np.uint32)
    return TokenBatch(targets, is_seq_start=rng.random(shape) < 0.2, loss_mask=rng.random(shape) < 0.9)


@functools.cache
def trained(case: str | None, kind: type = Penalized) -> tuple:
    """Losses and norms of three steps, the last one's metrics, and the loss of an evaluation before them."""
    p, r, d, t, pipeline, gather = CASES[case] if case else (1, 1, 1, 1, {}, "layer")
    c = tiny.config(tiny.model(layers=LAYERS), microbatches=4, gather_weights=gather)
    c.training.batch_size, c.pipeline = ROWS, PipelineConfig(**pipeline)
    c.training.side_by_side = 2 if case == "side by side" else 1
    model = kind(c.model)
    with jax.set_mesh(make_mesh(jax.devices()[: p * r * d * t], r=r, d=d, t=t, p=p)):
        state = jax.jit(functools.partial(train.init_state, c=c, model=model))(jax.random.key(0))
        data = tiny.place_batch(c, batch())
        nats, targets = train.make_evaluation_step(c, model)(state.weights, data)
        step, steps = train.make_training_step(c, model), []
        for i in range(3):
            state, metrics = step(state, data, np.int32(i))
            steps.append((float(metrics.loss), float(metrics.grad_norm)))
        layers = metrics.layers and {name: np.asarray(x) for name, x in metrics.layers.by_name().items()}
    return steps, layers, float(nats / targets)


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.long if x == "side by side" else pytest.mark.slow) for x in CASES]
)
def test_they_are_those_of_one_device(case):
    (steps, layers, evaluation), (expected, expected_layers, expected_evaluation) = trained(case), trained(None)
    np.testing.assert_allclose(steps, expected, rtol=1e-5)
    assert layers.keys() == expected_layers.keys()
    for name, values in layers.items():
        np.testing.assert_allclose(values, expected_layers[name], rtol=1e-4)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)


@pytest.mark.slow
def test_the_loss_is_that_of_the_plain_model_and_what_is_added():
    (steps, layers, evaluation), (plain, nothing, plain_evaluation) = trained(None), trained(None, train.Llama)
    assert nothing is None
    assert evaluation == plain_evaluation, "it is left out of evaluation"
    assert layers["stream"].shape == (LAYERS,)
    # The first step has rate 0, so the second sees the same weights, as the first metrics would.
    assert steps[1][0] > plain[1][0]
    assert np.all(np.diff(layers["stream"]) > 0), "in the order of the layers: the stream grows"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda x: jnp.mean(x),
            r"a layer gives loss in its LayerAux: .*; it must be a scalar, the same on every device",
        ),
        (lambda x: jnp.zeros(3), r"a layer gives loss in its LayerAux: f32\[3\]"),
    ],
    ids=["of its own part", "a vector"],
)
def test_what_is_no_scalar_or_differs_is_refused(given, message):
    class Wrong(train.Llama):
        def layer(self, x, w, tokens, attend):
            return super().layer(x, w, tokens, attend), LayerAux(given(x))

    c = tiny.config(tiny.model())
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state, step = jax.eval_shape(lambda: tiny.state(c)), train.make_training_step(c, Wrong(c.model))
        with pytest.raises(ShardError, match=message):
            step.lower(state, tiny.place_batch(c), np.int32(0))
