"""training.save and training.unroll: the same numbers, and what they change in the compiled program."""

import functools
import re

import jax
import numpy as np
import pytest
import tiny
from gradients import assert_same, loss_and_gradients

from input_loader import batch_shapes
from training_io.config import check_config

LAYERS = 5


@functools.cache
def run(save: str, unroll: int):
    c = tiny.config(tiny.model(layers=LAYERS, n_kv=2), save=save, unroll=unroll, attention="einsum")
    return loss_and_gradients(c, tiny.mesh("one device"))


def kept(hlo: str) -> int:
    """Arrays that the backward loop over layers carries with a part for each: weights, gradients, and what was kept."""
    loops = [line.split(" while(")[0] for line in hlo.splitlines() if " while(" in line]
    return max(len(re.findall(rf"\w+\[{LAYERS},", loop)) for loop in loops)


@pytest.mark.slow
def test_each_keeps_what_it_says():
    marked, nothing, dots, everything = (kept(run(save, 1)[0]) for save in ("marked", "nothing", "dots", "everything"))
    # Beside the layer's input, which all keep: 7 marked values. Dots are q, k, v, gate, up, and what attention adds.
    assert marked == nothing + 7
    assert dots == nothing + 6
    assert everything > marked + 7


@pytest.mark.long
@pytest.mark.parametrize(
    ("save", "unroll"), [("nothing", 1), ("dots", 1), ("everything", 1), ("marked", 2), ("marked", None)]
)
def test_the_numbers_are_the_same(save, unroll):
    (loss, g), (expected, g_expected) = run(save, unroll)[1], run("marked", 1)[1]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_same(g, g_expected, 1e-6)


@pytest.mark.long
def test_unrolling_makes_fewer_turns():
    loops = lambda unroll: run("marked", unroll)[0].count(" while(")
    assert loops(LAYERS) == loops(None) == loops(1) - 2, "no loop over layers, forward and backward"
    dots = lambda unroll: run("marked", unroll)[0].count(" dot(")
    assert dots(LAYERS) > 3 * dots(1)


@pytest.mark.parametrize(("unroll", "barriers"), [(1, 1), (2, 2), (LAYERS, 2), (None, 2)])
def test_only_without_a_loop_is_what_is_computed_again_kept_from_the_forward_pass(unroll, barriers):
    """By a barrier before it, around a layer's arguments; the other one is the loss's, which is in no loop.

    Of 5 layers in turns of 2, one is left over, behind the loop.
    """
    c = tiny.config(tiny.model(layers=LAYERS, n_kv=2), unroll=unroll)
    with jax.set_mesh(tiny.mesh("one device")):
        state = jax.eval_shape(lambda: tiny.state(c))
        shapes = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        program = tiny.training_step(c).lower(state, shapes, np.int32(0)).as_text()
    assert len(re.findall(r"%\d+:\d+ = stablehlo.optimization_barrier", program)) == barriers


def test_settings_are_checked():
    c = tiny.config(save="some")
    with pytest.raises(ValueError, match=r"training\.save is 'some'; choose one of marked, nothing, dots, everything"):
        check_config(c)
    c.training.save, c.training.unroll = "dots", 0
    with pytest.raises(ValueError, match=r"training\.unroll is 0; it must be at least 1"):
        check_config(c)
