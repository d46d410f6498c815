"""The loop over a stack of layers against a loop in Python: values, gradients, caches, however it
is run.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.parsing import ShardError
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.forward import Forward

ROWS, WIDTH = 5, 6


def layer(w, x, index, place, attend):
    """Depends on all that it is given."""
    q = save_for_backward(jnp.tanh(x @ w["q"]))
    read = save_for_backward(attend(q, x @ w["k"], x + w["b"], lambda weights: weights * 0.5))
    return x + read * (1 + 0.1 * index)


def attend(cache, q, k, v, drop):
    """What is read, and the cache with what is new; None is a cache of zeros."""
    seen = 0.0 if cache is None else cache
    return jnp.sin(q) * drop(k) + v + seen, seen + k


class Place(NamedTuple):
    """The Tokens of a layer, which knows where it is."""

    index: Any = None
    in_period: Any = None

    def prepared(self, model):
        return self

    def in_layer(self, index, in_period):
        return Place(index, in_period)


class Attention:
    """With the cache of its call of `attend`."""

    def __init__(self, cache):
        self.cache = cache

    def in_layer(self, cache):
        return Attention(cache)

    def __call__(self, *given):
        read, self.cache = attend(self.cache, *given)
        return read

    def updated_cache(self):
        return self.cache


def run_layers(layer, w, x, numbers=None, caches=None, save=None, unroll=1):
    """Forward.layers of a model with the `layer` (w, x, index, place, attend) -> x."""

    def of_model(x, w, tokens, attention):
        return layer(w, x, tokens.index, tokens.in_period, attention)

    training = SimpleNamespace(save=save, unroll=unroll, fp8=False)
    forward = Forward(SimpleNamespace(layer=of_model), training, attend)
    return forward.layers(w, x, Place(), numbers, Attention(caches), first=0)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    w = {"q": array(ROWS, WIDTH, WIDTH), "k": array(ROWS, WIDTH, WIDTH), "b": array(ROWS, WIDTH)}
    return w, array(4, WIDTH), array(ROWS, 4, WIDTH)


def by_hand(w, x, caches, numbers):
    found = []
    for row, index in enumerate(numbers):
        own = None if caches is None else caches[row]

        def attend_and_keep(q, k, v, drop, own=own):
            read, cache = attend(own, q, k, v, drop)
            found.append(cache)
            return read

        x = layer(jax.tree.map(lambda w, row=row: w[row], w), x, index, 0, attend_and_keep)
    return x, jnp.stack(found)


def loop(w, x, caches, numbers=None, **options):
    rows = None if numbers is None else jnp.array(numbers, jnp.int32)
    return run_layers(layer, w, x, rows, caches, **options)[:2]


def with_gradients(run, w, x, caches):
    """(values, gradients) of all that goes in, as all that comes out depends on it."""

    def total(w, x, caches):
        out = run(w, x, caches)
        return sum(jnp.sum(jnp.cos(part)) for part in jax.tree.leaves(out)), out

    argnums = (0, 1) if caches is None else (0, 1, 2)
    (_, out), g = jax.jit(jax.value_and_grad(total, argnums, has_aux=True))(w, x, caches)
    return jax.tree.map(np.asarray, (out, g))


def assert_same(found, expected, name=""):
    assert jax.tree.structure(found) == jax.tree.structure(expected), name
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=name)


SOME = [("marked", 2), ("nothing", ROWS), ("offload", None)]
OTHERS = [("dots", 1), ("everything", 2 * ROWS), ("marked", 1)]


@pytest.mark.parametrize(
    "pairs", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"]
)
def test_values_gradients_and_caches_are_those_of_a_loop_in_python(pairs):
    w, x, caches = inputs()
    expected = with_gradients(functools.partial(by_hand, numbers=range(ROWS)), w, x, caches)
    for save, unroll in pairs:
        run = functools.partial(loop, save=save, unroll=unroll)
        assert_same(with_gradients(run, w, x, caches), expected, f"{save}, unroll={unroll}")


def test_without_caches_they_are_what_attend_gives():
    w, x, _ = inputs()
    found = with_gradients(loop, w, x, None)
    assert_same(found, with_gradients(functools.partial(by_hand, numbers=range(ROWS)), w, x, None))
    assert found[0][1].shape == (ROWS, 4, WIDTH)
    x, caches, _ = run_layers(lambda w, x, index, place, attend: x, w, x)
    assert caches is None


def test_a_stage_has_layers_of_its_own_numbers():
    w, x, caches = inputs()
    numbers = 9, 2, 4, 0, 1
    found = with_gradients(functools.partial(loop, numbers=numbers), w, x, caches)
    assert_same(found, with_gradients(functools.partial(by_hand, numbers=numbers), w, x, caches))


def test_a_layer_that_gives_something_else():
    w, x, _ = inputs()
    of_pair = {"x": x, "first": x}
    for x, wrong, message in [
        (x, lambda x: (x, x), r"a layer is given f32\[4,6\].*, and gives a tuple"),
        (x, lambda x: x[:, :3], r"gives f32\[4,3\]"),
        (x, lambda x: x.astype(jnp.bfloat16), r"gives bf16\[4,6\]"),
        (x, lambda x: None, "gives NoneType None"),
        (
            of_pair,
            lambda x: x | {"first": jnp.bfloat16(x["first"])},
            r"f32\[4,6\].*, and gives bf16.*, at \['first'\]",
        ),
    ]:
        with pytest.raises(ShardError, match=message + "(?s:.*)return the residual stream"):
            run_layers(lambda w, x, index, place, attend, wrong=wrong: wrong(x), w, x)


def test_the_residual_stream_may_be_any_pytree():
    """With a second array that keeps what the first layer was given."""
    w, x, caches = jax.tree.map(lambda x: 0.3 * x, inputs())

    def with_first(w, x, index, place, attend):
        first = jnp.where(index == 0, x["x"], x["first"])
        return {"x": layer(w, x["x"], index, place, attend) - 0.1 * first, "first": first}

    def in_python(w, x, caches):
        first, found = x, []
        for row in range(ROWS):

            def keep(*args, row=row):
                return (pair := attend(caches[row], *args), found.append(pair[1]))[0][0]

            x = layer(jax.tree.map(lambda w, row=row: w[row], w), x, row, 0, keep) - 0.1 * first
        return {"x": x, "first": first}, jnp.stack(found)

    def loop(w, x, caches):
        start = {"x": x, "first": jnp.zeros_like(x)}
        return run_layers(with_first, w, start, None, caches, save="marked")[:2]

    assert_same(with_gradients(loop, w, x, caches), with_gradients(in_python, w, x, caches))


def test_a_layer_that_changes_what_x_varies_over_is_named_by_its_own_line():
    """Not by the line of the loop, where JAX finds its carry changed."""

    def layer(x, w, tokens, attention):
        return x + jnp.zeros_like(x) * jax.lax.axis_index("d")

    mesh = jax.sharding.AbstractMesh((2,), ("d",))

    def run(w, x):
        training = SimpleNamespace(save=None, unroll=1, fp8=False)
        forward = Forward(SimpleNamespace(layer=layer), training, attend)
        return forward.layers(w, x, Place(), attention=Attention(None), first=0)[0]

    spec = jax.sharding.PartitionSpec()
    body = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    with pytest.raises(ShardError, match="varying over d") as raised:
        jax.eval_shape(
            body,
            jax.ShapeDtypeStruct((2, 6), jnp.float32),
            jax.ShapeDtypeStruct((4, 6), jnp.float32),
        )
    assert raised.value.place.endswith(f"test_layers.py:{layer.__code__.co_firstlineno}")
