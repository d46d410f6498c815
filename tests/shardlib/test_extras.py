"""What layers give besides x is checked. That it is right is tested in tests/train/test_changing.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import train
from shardlib.layers import LayerAux
from shardlib.shardtypes import ShardError

DIFFERS = ".*; it must be a scalar, the same on every device"


@pytest.mark.parametrize(("given", "message"), [(jnp.mean, DIFFERS), (lambda x: jnp.zeros(3), r"f32\[3\]")])
def test_what_is_no_scalar_or_differs_is_refused(given, message):
    class Wrong(train.Llama):
        def layer(self, x, w, tokens, attend):
            return super().layer(x, w, tokens, attend), LayerAux(given(x))

    c = tiny.config(tiny.model())
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state, step = jax.eval_shape(lambda: tiny.state(c)), train.make_training_step(c, Wrong(c.model))
        with pytest.raises(ShardError, match=f"a layer gives loss in its LayerAux: {message}"):
            step.lower(state, tiny.place_batch(c), np.int32(0))
