"""What source made a run: kept, and compared as programs where the text differs."""

import dataclasses
import importlib
import json
import subprocess
import sys

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


def with_epsilon(is_changed):
    """A SPEC with another epsilon of Adam where the settings are such."""

    def make_training_step(config, model):
        if is_changed(config.training):
            config = dataclasses.replace(
                config, optimizer=dataclasses.replace(config.optimizer, adam_epsilon=1e-3)
            )
        return train.make_training_step(config, model)

    return {"spec": dataclasses.replace(train.SPEC, make_training_step=make_training_step)}


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
        (with_epsilon(lambda training: True), {"training"}),
        (with_epsilon(lambda training: training.microbatches > 1), {"training"}),
    ],
)
def test_the_hash_of_a_program_is_of_what_it_computes(plain, changes, differs):
    """Where a run may change how it is computed, it has the same."""
    found = programs(**changes)
    assert {which for which in plain if found[which] != plain[which]} == differs


def test_other_source_is_said_or_refused(monkeypatch):
    c = tiny.config()
    c.pipeline = PipelineConfig()
    with jax.set_mesh(tiny.mesh("one device")):
        model = load_model(c.model)
        saved = provenance.provenance_of(trace_step(c, model))

        def compared(old, allow="other_source=true"):
            return provenance.compare_source(old, saved, ("evaluation",), allow)

        assert compared(saved) is None
        assert compared(None) is None, "an imported checkpoint"
        source = saved["source"] | {"train.py": "other"}
        assert compared(saved | {"source": source}) == (
            "train.py: the source differs from that of the checkpoint; it computes the same in "
            "evaluation"
        )
        other = saved | {"source": source, "programs": saved["programs"] | {"training": "other"}}
        assert "it computes the same in evaluation" in compared(other)
        unseen = saved | {"programs": {"evaluation": "other"}}
        with pytest.raises(
            ValueError, match="not compared changed the program, and it computes something else"
        ):
            compared(unseen)
        untraced = saved | {"source": source, "programs": {}, "untraced": "ValueError: of two rows"}
        assert compared(untraced).endswith(
            "cannot tell if it computes the same: ValueError: of two rows"
        )
        other = saved | {"source": source, "programs": {"training": "other", "evaluation": "other"}}
        with pytest.raises(
            ValueError, match=r"something else in evaluation\. Use .* or give other_source=true"
        ):
            compared(other)
        assert "something else in evaluation" in compared(other, allow=None)
        assert "computes the same: the checkpoint was traced by jax 0.1" in compared(
            other | {"traced_by": "jax 0.1 on gpu"}
        )


def test_a_run_keeps_its_source(tmp_path, monkeypatch):
    c = tiny.config()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("A_SECRET", "key")
    model = load_model(dataclasses.replace(c.model))
    provenance.keep_source(tmp_path, 12, model, {"programs": {"training": "hash"}})
    kept = tmp_path / "source" / "0000000012"
    assert (kept / "train.py").read_text() == (source.ROOT / "train.py").read_text()
    about = json.loads((kept / "provenance.json").read_text())
    assert about["packages"]["jax"] == jax.__version__
    assert about["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert "key" not in about["environment"].values()
    assert about["programs"] == {"training": "hash"}
    assert about["command"] == sys.orig_argv


def test_a_module_beside_train_py_is_source_too(tmp_path, monkeypatch):
    """What was proved of a step is looked up by these hashes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_parts.py").write_text("FACTOR = 1.0")
    importlib.import_module("mine_parts")
    before = source.source_of()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "mine_parts.py").write_text("FACTOR = 0.5")
    assert source.source_of() == before, "what runs is still the source before"
    provenance.keep_source(tmp_path, 3, load_model(tiny.model()), {})
    assert (tmp_path / "source/0000000003/mine_parts.py").read_text() == "FACTOR = 1.0"
    about = json.loads((tmp_path / "source/0000000003/provenance.json").read_text())
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert about["project_commit"] == commit
    source.bytes_of.cache_clear()  # as another start
    assert {name for name, _ in before.items() ^ source.source_of().items()} == {"mine_parts.py"}
    assert not [name for name in before if "numpy" in name or "jax/" in name or "tests" in name]
