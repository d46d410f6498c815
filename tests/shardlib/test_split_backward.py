"""A program in halves gives what it gives as a whole, and no product is computed twice or too
early.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib.split_backward import SplitBackward

LAYERS, WIDTH, ROWS = 3, 8, 4
save_for_backward = functools.partial(checkpoint_name, name="saved")


def layer(x, w):
    y = save_for_backward(jnp.tanh((x / jnp.sqrt(jnp.mean(x**2) + 1)) * w["norm"] @ w["up"]))
    return x + jax.nn.silu(y) @ w["down"]


def plain(w, x):
    return layer(x, jax.tree.map(lambda stack: stack[0], w))


def looped(w, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def checkpointed(w, x):
    body = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("saved"))
    return lax.scan(lambda x, w: (body(x, w), None), x, w)[0]


def with_padding(w, x):
    """Layer 1 is skipped."""

    def turn(x, of_layer):
        w, i = of_layer
        return lax.cond(i != 1, layer, lambda x, w: x, x, w), None

    return lax.scan(turn, x, (w, jnp.arange(LAYERS)))[0]


def branches_that_differ(w, x):
    """A product in one branch, a sum in the other, both for the same weight."""
    first = jax.tree.map(lambda stack: stack[0], w)
    branches = [layer, lambda x, w: x * w["up"][0], layer]
    return lax.switch(jnp.int32(x.sum() > 1e9) + 1, branches, x, first)


PROGRAMS = [  # and whether the first half keeps what it reads for the second one
    (plain, True),
    (looped, False),
    (checkpointed, True),
    (with_padding, False),
    (branches_that_differ, True),
]


def backward_of(program):
    """The traced backward, as a function of the leaves of what it needs and of dy; its arguments;
    of which are dy.
    """
    rng = np.random.default_rng(0)
    shapes = {"norm": (WIDTH,), "up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}
    w = {name: jnp.float32(rng.standard_normal((LAYERS, *x)) / 3) for name, x in shapes.items()}
    x = jnp.float32(rng.standard_normal((ROWS, WIDTH)))
    y, vjp = jax.vjp(program, w, x)
    leaves, structure = jax.tree.flatten(vjp)

    def backward(leaves, dy):
        g, dx = jax.tree.unflatten(structure, leaves)(dy)
        return [dx, *jax.tree.leaves(g)]

    dy = jnp.float32(rng.standard_normal(y.shape))
    return jax.make_jaxpr(backward)(leaves, dy), [*leaves, dy], jax.jit(backward)(leaves, dy)


def products(program) -> int:
    return str(program).count("dot_general[")


@pytest.mark.parametrize(("program", "keeps"), PROGRAMS)
def test_split_backward_give_what_the_whole_gives(program, keeps):
    traced, args, expected = backward_of(program)
    halves = SplitBackward(traced, [True, False, False, False], [keeps] * (len(args) - 1) + [False])
    halves.defer([False, True, True, True])

    @jax.jit
    def first(args):
        outs, kept = halves.first(args)
        assert outs[1:] == [None] * 3
        return outs[0], kept

    @jax.jit
    def second(args, kept):
        outs = halves.second(args, kept)
        assert outs[0] is None
        return outs[1:]

    dx, kept = first(args)
    read = [x if is_read else None for x, is_read in zip(args, halves.reads, strict=True)]
    g = second(read, kept)
    for found, e in zip([dx, *g], expected, strict=True):
        np.testing.assert_allclose(found, e, rtol=1e-5, atol=1e-6)
    assert not halves.reads[-1], "the gradient of the result is not there any more"
    of_input = products(jax.make_jaxpr(first)(args))
    of_weights = products(jax.make_jaxpr(second)(args, kept))
    assert of_weights == (4 if program is branches_that_differ else 2)
    assert of_input + of_weights == products(traced)
