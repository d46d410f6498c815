"""Gradient accumulation: the same gradients as the whole batch, in the memory of a part,
communicating as it says.
"""

import jax
import pytest

import train
from tests.support import tiny
from tests.support.step_text import collectives, compile_step


@pytest.mark.long
def test_weights_are_gathered_once_a_step():
    """Only t's collectives, for the activations, are left in the loops.

    In a microbatch: the embeddings' scatter, the last norm's gather, each with its transpose; of
    the loss, one maximum and three sums. Outside: each weight's gather and scatter over d, its
    gradient's sum over r; the targets' count and the norm.
    """
    weights = len(jax.tree.leaves(train.Llama(tiny.model()).table))
    expected = {
        "forward": {"all-gather": 2, "reduce-scatter": 2},
        "backward": {"all-gather": 4, "reduce-scatter": 2},
        "microbatches": {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 4},
        "outside": {"all-gather": weights, "reduce-scatter": weights, "all-reduce": weights + 2},
    }
    text = compile_step("r=2 d=2 t=2", microbatches=2, gather_weights="step").as_text()
    assert {part: collectives(text)[part] for part in expected} == expected
