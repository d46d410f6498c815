"""What source made a run: kept, and compared as programs where the text differs."""

import dataclasses
import importlib
import json

import jax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.program import provenance, source
from shardwright.program.config import PipelineConfig
from shardwright.program.step import trace_step
from tests.support import tiny


def programs(spec=train.SPEC, kind=train.Llama, mesh="one device", **training) -> dict[str, str]:
    """Hashes of the programs of a SPEC and a kind of models."""
    c = tiny.config(**training)
    with jax.set_mesh(tiny.mesh(mesh)):
        found = provenance.provenance_of(trace_step(c, kind(c.model), spec=spec))
    assert "untraced" not in found
    return found["programs"]


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    return programs()


class Scaled(train.Llama):
    def logits(self, w, x):
        return 2 * super().logits(w, x)


class Same(train.Llama):
    def prepare(self, given):
        return super().prepare(tokens=given)


def with_epsilon(config, model):
    """A step with another epsilon of Adam where there are several microbatches."""
    if config.training.microbatches > 1:
        optimizer = dataclasses.replace(config.optimizer, adam_epsilon=1e-3)
        config = dataclasses.replace(config, optimizer=optimizer)
    return train.make_training_step(config, model)


WITH_EPSILON = dataclasses.replace(train.SPEC, make_training_step=with_epsilon)
FREE = {
    "mesh": "p=2 d=2 t=2", "microbatches": 2, "attention": "blockwise", "save": "nothing",
    "loss_chunk": 8, "gather_weights": "step",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"kind": Same}, set()),
        (FREE, set()),
        ({"kind": Scaled}, {"training", "evaluation"}),
        ({"spec": WITH_EPSILON}, {"training"}),
    ],
)
def test_the_hash_of_a_program_is_of_what_it_computes(plain, changes, differs):
    """Where a run may change how it is computed, it has the same."""
    found = programs(**changes)
    assert {which for which in plain if found[which] != plain[which]} == differs


def test_other_source_is_said_or_refused():
    c = tiny.config()
    c.pipeline = PipelineConfig()
    with jax.set_mesh(tiny.mesh("one device")):
        model = load_model(c.model)
        saved = provenance.provenance_of(trace_step(c, model))

        def compared(old, allow="other_source=true"):
            return provenance.compare_source(old, saved, ("evaluation",), allow)

        assert compared(saved) is None
        source = saved["source"] | {"train.py": "other"}
        said = compared(saved | {"source": source})
        assert said.startswith("train.py: the source differs from that of the checkpoint; it comp")
        unseen = saved | {"programs": {"evaluation": "other"}}
        with pytest.raises(ValueError, match="not compared changed the program, and it computes"):
            compared(unseen)
        untraced = saved | {"source": source, "programs": {}, "untraced": "ValueError: of two rows"}
        assert "cannot tell if it computes the same" in compared(untraced)
        other = saved | {"source": source, "programs": {"training": "other", "evaluation": "other"}}
        with pytest.raises(ValueError, match=r"something else in evaluation\. Use .*other_source="):
            compared(other)
        assert "something else in evaluation" in compared(other, allow=None)


def test_a_run_keeps_its_source(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("A_SECRET", "key")
    about = {"programs": {"training": "hash"}}
    provenance.keep_source(tmp_path, 12, load_model(tiny.model()), about)
    kept = tmp_path / "source" / "0000000012"
    assert (kept / "train.py").read_text() == (source.ROOT / "train.py").read_text()
    about = json.loads((kept / "provenance.json").read_text())
    assert about["packages"]["jax"] == jax.__version__
    assert about["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert "key" not in about["environment"].values()
    assert about["programs"] == {"training": "hash"}


def test_a_module_beside_train_py_is_source_too(tmp_path, monkeypatch):
    """What was proved of a step is looked up by these hashes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_parts.py").write_text("FACTOR = 1.0")
    importlib.import_module("mine_parts")
    before = source.source_of()
    (tmp_path / "mine_parts.py").write_text("FACTOR = 0.5")
    assert source.source_of() == before, "what runs is still the source before"
    provenance.keep_source(tmp_path, 3, load_model(tiny.model()), {})
    assert (tmp_path / "source/0000000003/mine_parts.py").read_text() == "FACTOR = 1.0"
    source.bytes_of.cache_clear()  # as another start
    changed = before.items() ^ source.source_of().items()
    assert {name for name, _ in changed} == {"mine_parts.py"}
    assert not [name for name in before if "numpy" in name or "jax/" in name or "tests" in name]
