"""Functions of jax.numpy take a gathered weight, and its gradient is still reduced once."""

import collections
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import train
from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.parsing import ShardError
from shardlib.shardtypes import typed
from shardwright.inspect.soundness import find_unsound
from tests.support import tiny


class Ideas(train.Llama):
    """Functions of weights that people write."""

    @typed
    def mlp(self, x: train.act["B/b L/c/t M"], w) -> train.act["B/b L/c/t M"]:
        norm = shardops.all_gather("M/t/fsdp -> M", w.mlp_norm)
        nx = train.unit_rms(x, self.config.norm_epsilon).astype(x.dtype) * (norm + 1)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        up = shardops.all_gather("M/fsdp F/t -> M F/t", w.w_up)
        up = up / jnp.linalg.norm(up, axis=0)  # as nGPT does
        gate = shardops.all_gather("M/fsdp F/t -> M F/t", w.w_gate)
        scale = jnp.max(jnp.abs(gate), axis=0) / 127  # fake quantization by channel
        rounded = jnp.round(gate / scale) * scale
        gate = gate + jax.lax.stop_gradient(rounded - gate)
        both = jnp.concatenate([gate, jnp.where(up > 0, up, 0.5 * up)], axis=1)
        hidden = nx @ both
        hidden = jax.nn.silu(hidden[..., : gate.shape[1]]) * hidden[..., gate.shape[1] :]
        hidden: train.act["B/b L/c F/t"] = hidden
        down = shardops.all_gather("F/t M/fsdp -> F/t M", w.w_down)
        out = shardops.matmul("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, down + 0.01)
        return shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)


class Unreduced(train.Llama):
    """Takes the mean of activations of one device's sequences for that of all."""

    @typed
    def mlp(self, x: train.act["B/b L/c/t M"], w) -> train.act["B/b L/c/t M"]:
        mean: train.act["L/c/t M"] = jnp.mean(x, axis=0)
        return super().mlp(x - mean, w)


class Penalized(train.Llama):
    """Adds the mean square of the gates to the loss."""

    axes: tuple[str, ...] = ("r", "d", "t")

    def layer(self, x, w, tokens, attention):
        gate = shardops.all_gather("M/fsdp F/t -> M F/t", w.w_gate)
        penalty = jax.lax.pmean(0.1 * jnp.mean(jnp.square(gate)), self.axes)
        return super().layer(x, w, tokens, attention), LayerAux(penalty)


class Counted(Penalized):
    """Each device adds its own."""

    axes = ("t",)


def found_in(kind, mesh):
    """What is wrong with the steps of a model."""
    with jax.set_mesh(tiny.mesh(mesh)):
        model = kind(tiny.model(layers=1))
        return find_unsound(tiny.step_of(tiny.forward_of(model, tiny.config().training, True)))


@pytest.mark.parametrize("mesh", ["r=2 d=2 t=2", "d=4 t=2"])
@pytest.mark.parametrize("kind", [Ideas, Penalized])
def test_any_function_of_a_weight_is_right_on_a_mesh(kind, mesh):
    assert found_in(kind, mesh) == []


def test_a_missing_sum_is_named():
    (found,) = found_in(Unreduced, "d=4 t=2")
    line = inspect.getsourcelines(Unreduced.mlp)[1] + 2
    assert f"test_weights_as_arrays.py:{line}: div: a number that depends on the mesh" in found.text


def test_a_number_made_of_weights_is_not_added_once_per_device():
    with pytest.raises(ShardError, match=r"pmean\(x, \('r', 'd'\)\)"):
        found_in(Counted, "d=4 t=2")


def collectives_of(kind) -> collections.Counter:
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        model = kind(tiny.model(layers=1))
        step = tiny.step_of(tiny.forward_of(model, tiny.config().training, True))
        text = step.lowered.as_text()
    return collections.Counter(re.findall(r"stablehlo\.(all_reduce|reduce_scatter)", text))


def test_gradients_are_reduced_as_often_as_without():
    assert collectives_of(Ideas) == collectives_of(train.Llama)
