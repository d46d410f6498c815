"""An optimizer and a loss of the user's own file. A step by them: tests/train/test_oracles.py."""

import jax
import pytest

from shardwright.inspect.causality import check_causal
from shardwright.optimizers.config import GroupConfig
from tests.support import tiny


@pytest.mark.long
def test_an_own_optimizer_has_both_moments_and_a_group_may_name_it():
    c = tiny.config()
    c.optimizer = tiny.optimizer(
        algorithm="muon",
        groups=[GroupConfig(match="layers.w_q", algorithm="tests.support.own_parts:sgd")],
    )
    with jax.set_mesh(tiny.mesh("one device")):
        state = tiny.state(c)
    assert state.adam_nu.layers.w_q is not None
    assert state.adam_nu.layers.w_k is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": "tests.support.own_parts:sgdd"},
            r"'tests.support.own_parts:sgdd' is not an optimizer \(.*'sgdd'",
        ),
        (
            {"schedule": "os:path"},
            r"'os:path' is not a schedule: .* Write a function of \(step, config\)",
        ),
        (
            {"algorithm": "tests.support.own_parts:forgets"},
            r"forgets returns NoneType None, not a State",
        ),
    ],
)
def test_a_name_of_none_or_of_another_kind(changes, message):
    c = tiny.config()
    c.optimizer = tiny.optimizer(**changes)
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match=message):
        assert tiny.step(c).traced


@pytest.mark.long
def test_an_own_loss_is_proved_with_the_step():
    c = tiny.config(tiny.model(layers=1))
    c.optimizer = tiny.optimizer(loss="tests.support.own_parts:mixes_sequences")
    with (
        jax.set_mesh(tiny.mesh("one device")),
        pytest.raises(ValueError, match=r"own_parts\.py:.* another sequence"),
    ):
        check_causal(tiny.step(c))
