"""An optimizer and a loss of the user's own file. A step by them: tests/train/test_oracles.py."""

import importlib
import sys

import jax
import pytest

from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import check_steps
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
            {"loss": "no_such_file:loss"},
            r"'no_such_file:loss' is not a loss \(No module named 'no_such_file'\)",
        ),
        ({"schedule": "no_such_file:rise"}, r"'no_such_file:rise' is not a schedule"),
        ({"loss": "cross_entropi"}, r"Did you mean cross_entropy\?"),
        (
            {"algorithm": "os:system"},
            r"'os:system' is not an optimizer: too many .* function of \(state, g, step, rate",
        ),
        ({"loss": "os:sep"}, r"'os:sep' is not a loss: '/' is not a callable object"),
        (
            {"schedule": "os:path"},
            r"'os:path' is not a schedule: .* Write a function of \(step, config\)",
        ),
        (
            {"algorithm": "tests.support.own_parts:forgets"},
            r"forgets returns NoneType None, not a State",
        ),
        (
            {"loss": "tests.support.own_parts:forgets_loss"},
            r"forgets_loss returns NoneType None for targets u32\[",
        ),
        (
            {"algorithm": "tests.support.own_parts:by_another_train"},
            "is a State of train, not of shardwright.train",
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


@pytest.mark.long
def test_a_function_of_its_modules_name_stays_an_attribute_of_the_package(tmp_path, monkeypatch):
    """The modules are imported anew for a trace, and put back."""
    (tmp_path / "own_losses").mkdir()
    source = (
        "import train\n\n\ndef half(logits, targets, c):\n    return 0.5 * "
        "train.cross_entropy(logits, targets.ids)\n"
    )
    (tmp_path / "own_losses/half.py").write_text(source)
    (tmp_path / "own_losses/__init__.py").write_text("from own_losses.half import half\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("own_losses")
    function = package.half
    c = tiny.config(tiny.model(layers=1), batch_size=4, seq_len=8)
    c.optimizer = tiny.optimizer(loss="own_losses:half")
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        check_steps(tiny.step(c))
    assert sys.modules["own_losses"] is package
    assert package.half is function
