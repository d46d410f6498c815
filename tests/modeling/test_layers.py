"""A layer that gives something else than the residual stream is named."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from shardlib.parsing import ShardError
from shardwright.modeling.forward import Forward


class Place:
    """The Tokens of a layer."""

    def prepared(self, model):
        return self

    def in_layer(self, index, in_period):
        return self


class Attention:
    cache = None

    def in_layer(self, cache):
        return self

    def updated_cache(self):
        return None


def of_layers(layer):
    """The layers of a model with this one."""
    training = SimpleNamespace(save=None, unroll=1, fp8=False)
    forward = Forward(SimpleNamespace(layer=layer), training, None)

    def run(w, x):
        return forward.layers(w, x, Place(), attention=Attention(), first=0)[0]

    return run


X, W = jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((2, 6), jnp.float32)


@pytest.mark.parametrize(
    ("x", "wrong", "message"),
    [
        (X, lambda x: (x, x), r"a layer is given f32\[4,6\].*, and gives a tuple"),
        (X, lambda x: x[:, :3], r"gives f32\[4,3\]"),
        (X, lambda x: x.astype(jnp.bfloat16), r"gives bf16\[4,6\]"),
        (X, lambda x: None, "gives NoneType None"),
        (
            {"x": X, "first": X},
            lambda x: x | {"first": jnp.bfloat16(x["first"])},
            r"f32\[4,6\].*, and gives bf16.*, at \['first'\]",
        ),
    ],
)
def test_a_layer_that_gives_something_else(x, wrong, message):
    def layer(x, w, tokens, attention):
        return wrong(x)

    with pytest.raises(ShardError, match=message + "(?s:.*)return the residual stream"):
        jax.eval_shape(of_layers(layer), W, x)


def test_a_layer_that_changes_what_x_varies_over_is_named_by_its_own_line():
    """Not by the line of the loop, where JAX finds its carry changed."""

    def layer(x, w, tokens, attention):
        return x + jnp.zeros_like(x) * jax.lax.axis_index("d")

    mesh, spec = jax.sharding.AbstractMesh((2,), ("d",)), jax.sharding.PartitionSpec()
    body = jax.shard_map(of_layers(layer), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    with pytest.raises(ShardError, match="varying over d") as raised:
        jax.eval_shape(body, W, X)
    assert raised.value.place.endswith(f"test_layers.py:{layer.__code__.co_firstlineno}")
