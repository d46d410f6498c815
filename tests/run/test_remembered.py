"""What was found out about a program holds for the same source, settings and program alone."""

import jax
import pytest

import train
from shardwright.inspect import soundness
from shardwright.inspect.causality import check_causal
from shardwright.program import remembered, source
from shardwright.program.step import trace_step, with_settings
from tests.support import tiny

MESH = "d=2"


def step_of(c):
    return trace_step(c, tiny.WithoutAttention(c.model))


def found_of(c):
    """What is said of these settings, of which another thing would be found out now."""
    with jax.set_mesh(tiny.mesh(MESH)):
        return remembered.remembered(step_of(c), "a", lambda: {"new": 1})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    before = jax.config.values["jax_compilation_cache_dir"]
    directory = tmp_path_factory.mktemp("cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    yield directory
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def known(cache):
    c = tiny.config(tiny.model(layers=1))
    with jax.set_mesh(tiny.mesh(MESH)):
        step = step_of(c)
        remembered.remembered(step, "a", lambda: {"old": 1})
        found, day = remembered.remembered(step, "a", lambda: {"new": 1})
    assert found == {"old": 1}
    assert day
    return c


def test_another_seed_is_the_same_program(known):
    assert found_of(with_settings(known, {"training.seed": 3, "data.seed": 4}))[0] == {"old": 1}


def test_other_settings_are_not(known):
    assert found_of(with_settings(known, {"optimizer.clip_norm": 0.5})) == ({"new": 1}, "")


def test_another_source_or_package_is_not(known, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "source_of", lambda: source.source_of() | {"mine.py": "1"})
        assert found_of(known) == ({"new": 1}, "")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "other-1.0.dist-info").mkdir()
    assert found_of(known) == ({"new": 1}, "")


def test_another_program_of_the_same_source_is_not(known, monkeypatch):
    """As when it reads a file or the environment while it is traced."""
    monkeypatch.setattr(train.Llama, "activation", staticmethod(jax.nn.relu))
    assert found_of(known) == ({"new": 1}, "")


def test_another_program_of_one_device_is_not(known, monkeypatch):
    """The mesh is compared with it, and it may change alone."""

    def activation(x):
        is_one = jax.sharding.get_abstract_mesh().size == 1
        return jax.nn.relu(x) if is_one else jax.nn.silu(x)

    monkeypatch.setattr(train.Llama, "activation", staticmethod(activation))
    assert found_of(known) == ({"new": 1}, "")


def test_a_damaged_entry_is_found_out_again(known, cache):
    for path in (cache / "checked").glob("*_a.json"):
        path.write_text('{"day": "2026-12-03"')
    assert found_of(known) == ({"new": 1}, "")


@pytest.mark.long
def test_checks_are_remembered_and_what_they_reject_is_not(cache, monkeypatch):
    with jax.set_mesh(tiny.mesh(MESH)):
        c = tiny.config(tiny.model(layers=1))
        first = soundness.check_steps(step_of(c))
        assert check_causal(step_of(c)) == ""
        monkeypatch.setattr(soundness, "examine", lambda *_: pytest.fail("examined again"))
        again = soundness.check_steps(step_of(c))
    assert again.how.startswith(f"{first.how}; on 20")
    assert again.results == first.results
