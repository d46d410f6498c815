"""training.save and training.unroll: what they change in the compiled program.

The numbers: test_oracles.py.
"""

import collections
import re

import jax
import numpy as np
import pytest

from shardlib.equations import jaxprs_of
from shardwright.data.loader import batch_shapes
from tests.support import tiny

LAYERS = 5


def equations_of(jaxpr):
    """All equations of a traced program, those of loops and calls too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations_of(inner)


def traced(c, mesh: str) -> list:
    """The equations of the training step, as it is traced."""
    with jax.set_mesh(tiny.mesh(mesh)):
        state = jax.eval_shape(lambda: tiny.state(c))
        shapes = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        return list(equations_of(tiny.training_step(c).trace(state, shapes, np.int32(0)).jaxpr))


def kept(equations: list) -> list:
    """What the forward loop over layers gives with a part for each: the layers' inputs, and what
    the backward reads.
    """
    forward = next(
        eqn for eqn in equations if eqn.primitive.name == "scan" and eqn.params["length"] == LAYERS
    )
    return [var.aval for var in forward.outvars if var.aval.shape[:1] == (LAYERS,)]


@pytest.mark.long
def test_each_keeps_what_it_says():
    def number(save):
        return len(
            kept(traced(tiny.config(tiny.model(layers=LAYERS, n_kv=2), save=save), "one device"))
        )

    marked, nothing, dots, more, everything = map(
        number, ("marked", "nothing", "dots", "more", "everything")
    )
    assert nothing == 1  # the layer's input
    assert marked == nothing + 7
    assert dots == nothing + 6  # q, k, v, gate, up, and what attention adds
    assert more == marked + 3  # both norms, and SwiGLU's output
    assert everything > more


def test_offloading_is_of_what_is_marked():
    """In the program as traced: a CPU has one memory, so nothing moves in what is compiled for
    it.
    """
    equations = traced(tiny.config(tiny.model(layers=LAYERS, n_kv=2), save="offload"), "one device")
    moved = [eqn for eqn in equations if eqn.primitive.name == "device_put"]
    found = collections.Counter(
        (eqn.params["devices"][0], eqn.invars[0].aval.shape) for eqn in moved
    )
    heads, hidden, model = (8, 16, 2, 4), (8, 16, 48), (8, 16, 32)
    marked = {(8, 16, 2, 2, 4): 2, heads: 2, hidden: 2, model: 1, (8, 16): 2}
    both_ways = (jax.memory.Space.Host, jax.memory.Space.Device)
    assert found == {
        (place, shape): count for place in both_ways for shape, count in marked.items()
    }


@pytest.mark.parametrize(("unroll", "barriers"), [(1, 1), (2, 2)])
def test_only_without_a_loop_is_what_is_computed_again_kept_from_the_forward_pass(unroll, barriers):
    """By a barrier before it, around a layer's arguments; the other one is the loss's, which is in
    no loop.

    Of 5 layers in turns of 2, one is left over, behind the loop. Before jax 0.12 they call one
    function with a barrier; from then on each has its own, around as many arrays.
    """
    c = tiny.config(tiny.model(layers=LAYERS, n_kv=2), unroll=unroll)
    with jax.set_mesh(tiny.mesh("one device")):
        state = jax.eval_shape(lambda: tiny.state(c))
        shapes = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        program = tiny.training_step(c).lower(state, shapes, np.int32(0)).as_text()
    assert len({*re.findall(r"%\d+:(\d+) = stablehlo.optimization_barrier", program)}) == barriers
