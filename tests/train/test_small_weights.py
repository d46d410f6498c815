"""Weights smaller than the mesh: hyper-connections (arXiv 2409.19606) of three streams, and a
number for each layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardlib.shardtypes import Array, pytree_dataclass, typed
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling import settings
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias, gain
from tests.support import tiny


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    streams: int = 3
    dims = settings.ModelConfig.dims | {"N": "streams", "O": "streams"}


@pytree_dataclass
class Layer(train.TransformerLayer):
    read: gain["N"]
    mix: bias["N O"]
    scale: gain[""]
    factor: gain["1"]


@pytree_dataclass
class Weights(train.Transformer):
    layers: Array["layers/p", Layer]


@pytree_dataclass
class Streams:
    x: act["B/b L/c/t N M"]


class Hyper(train.Llama):
    Weights = Weights

    def __init__(self, c: ModelConfig):
        super().__init__(c, mix={"std": 0.3}, scale={"mean": 0.5})

    @typed
    def embed(self, w: Weights, tokens: Tokens) -> Streams:
        return Streams(jnp.stack([super().embed(w, tokens)] * self.config.streams, 2))

    @typed
    def layer(self, s: Streams, w: Layer, tokens: Tokens, attention: object) -> Streams:
        read = shardops.all_gather("N/t/fsdp -> N", w.read)
        x = shardops.einsum_unreduced(
            "B/b L/c/t N M, N -> B/b L/c/t M", jnp.float32(s.x), read
        ).astype(s.x.dtype)
        y = super().layer(x, w, tokens, attention) - x
        scale, factor = (
            shardops.all_gather("->", w.scale),
            shardops.all_gather("1/t/fsdp -> 1", w.factor),
        )
        y = shardops.einsum_unreduced("B/b L/c/t M, , 1 -> B/b L/c/t M", y, scale, factor).astype(
            s.x.dtype
        )
        mix = shardops.all_gather("N O/t/fsdp -> N O", w.mix)
        mixed = shardops.einsum_unreduced("B/b L/c/t N M, N O -> B/b L/c/t O M", s.x, mix)
        return Streams(s.x + mixed + y[:, :, None])

    @typed
    def logits(self, w: Weights, s: Streams) -> act["B/b L/c V/t/p"]:
        return super().logits(w, jnp.mean(s.x, 2))


def trained(mesh: str) -> tuple:
    """Loss, gradient norm and first moments of a step, and what the proof refuses."""
    sizes = dataclasses.asdict(tiny.model(layers=4))
    c = tiny.config(ModelConfig(**sizes), microbatches=2, gather_weights="layer")
    model = Hyper(c.model)
    with jax.set_mesh(tiny.mesh(mesh)):
        state = jax.jit(lambda key: train.init_state(key, c, model))(jax.random.key(0))
        step = train.make_training_step(c, model)
        state, metrics = step(state, tiny.place_batch(c), np.int32(0))
        found = find_unsound(tiny.step_of(tiny.forward_of(model, c.training, True), rows=4))
        return (
            float(metrics.loss),
            float(metrics.grad_norm),
            jax.tree.map(np.asarray, state.adam_mu),
            found,
        )


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("mesh", ["d=4 t=2", "p=2 d=2 t=2"])
def test_a_step_is_that_of_one_device_and_is_proved(mesh):
    loss, norm, moments, found = trained(mesh)
    expected = trained("one device")
    np.testing.assert_allclose((loss, norm), expected[:2], rtol=1e-5)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())

    jax.tree.map(close, moments, expected[2])
    assert np.abs(moments.layers.scale).min() > 0, "it learns"
    assert not found
