"""What source made a run: kept, and compared as programs where the text differs."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.program import provenance
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.config import PipelineConfig
from shardwright.program.step import trace_step
from shardwright.tools import checkpoint_to_huggingface
from tests.support import tiny
from tests.support.edits import Change
from tests.support.huggingface_models import settings
from tests.support.recipes import SOURCE, module_of


def programs(source: str, mesh=(1, 1, 1, 1), model=(), optimizer=(), **training) -> dict[str, str]:
    """Hashes of the programs of a source of train.py."""
    c = tiny.config(tiny.model(**{"module": "changed_train", **dict(model)}), **training)
    c.optimizer = tiny.optimizer(**dict(optimizer))
    p, r, d, t = mesh
    with (
        module_of(source) as module,
        jax.set_mesh(make_mesh(jax.devices()[: p * r * d * t], r=r, d=d, t=t, p=p)),
    ):
        return provenance.provenance_of(trace_step(c, load_model(c.model), spec=module.SPEC))[
            "programs"
        ]


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    return programs(SOURCE)


BOTH, TRAINING = {"training", "evaluation"}, {"training"}
OTHER = {
    "the activation": ({"model": {"module": "gelu"}}, BOTH),
    "label smoothing": ({"optimizer": {"loss": "label_smoothing:loss"}}, TRAINING),
    "Adam's epsilon": (
        Change(
            "jnp.sqrt(unbiased_nu) + config.adam_epsilon * update.epsilon",
            "jnp.sqrt(unbiased_nu + config.adam_epsilon * update.epsilon)",
            within="adamw",
        ),
        TRAINING,
    ),
    "what only microbatches have": (
        Change(
            "return total, g, layers",
            "half = 0.5 if config.training.microbatches > 1 else 1\n"
            "return total, jax.tree.map(lambda x: x * half, g), layers",
            within="loss_and_gradients",
        ),
        TRAINING,
    ),
    "a loop within a loop": (
        Change(
            "self.mlp(x, w)",
            "self.mlp(lax.scan(lambda h, _: (jnp.tanh(h), None), x, None, length=2)[0], w)",
            within="Llama.layer",
        ),
        BOTH,
    ),
}
FREE = {
    "stages, and how it is computed": {
        "mesh": (2, 1, 2, 2), "microbatches": 2,
        "attention": "blockwise", "save": "nothing", "loss_chunk": 8, "gather_weights": "step",
    },
    "microbatches": {"mesh": (1, 2, 2, 2), "microbatches": 4},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.quick
def test_what_computes_the_same_has_the_same_hash(plain):
    """With a comment more, and another name of a function."""
    assert "unit_rms" in SOURCE
    assert programs(f"# A comment.\n{SOURCE.replace('unit_rms', 'over_rms')}") == plain


@pytest.mark.parametrize(
    "name", ["stages, and how it is computed", pytest.param("microbatches", marks=pytest.mark.long)]
)
def test_what_a_run_may_change_makes_no_difference(plain, name):
    assert programs(SOURCE, **FREE[name]) == plain


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", OTHER)
def test_what_computes_something_else_has_another(plain, name):
    change, differs = OTHER[name]
    if isinstance(change, Change):
        found = programs(change.apply(SOURCE))
    else:
        found = programs(SOURCE, **change)
    assert {which for which in plain if found[which] != plain[which]} == differs


@pytest.mark.long
def test_a_loss_of_pairs_has_both_hashes():
    c = tiny.config()
    c.optimizer = tiny.optimizer(loss="preferences:simpo")
    with jax.set_mesh(tiny.mesh("one device")):
        found = provenance.provenance_of(tiny.step(c))
    assert "untraced" not in found
    assert found["programs"].keys() == BOTH


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
        assert "it computes the same in evaluation" in compared(other), (
            "what is not asked for does not matter"
        )
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
    assert (kept / "train.py").read_text() == (provenance.ROOT / "train.py").read_text()
    about = json.loads((kept / "provenance.json").read_text())
    assert about["packages"]["jax"] == jax.__version__
    assert about["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert "key" not in about["environment"].values()
    assert about["programs"] == {"training": "hash"}
    assert about["command"] == sys.orig_argv


def test_of_two_modules_of_one_name_both_are_source(tmp_path, monkeypatch):
    """They are hashed, and kept."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("mine_a", "mine_b"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"NAME = {package!r}")
        importlib.import_module(package)
    after = provenance.source_of()["__init__.py"]
    for _ in range(2):  # a start again at this step
        provenance.keep_source(tmp_path / "run", 12, load_model(tiny.model()), {})
    kept = tmp_path / "run/source/0000000012"
    found = {path.name: path.read_text() for path in kept.glob("*__init__.py")}
    assert found == {"__init__.py": "NAME = 'mine_a'", "mine_b____init__.py": "NAME = 'mine_b'"}
    for package in ("mine_a", "mine_b"):
        (tmp_path / package / "__init__.py").write_text("NAME = 0")
        provenance.bytes_of.cache_clear()  # as another start
        before, after = after, provenance.source_of()["__init__.py"]
        assert before != after


def test_a_module_beside_train_py_is_source_too(tmp_path, monkeypatch):
    """What was proved of a step is looked up by these hashes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_parts.py").write_text("FACTOR = 1.0")
    importlib.import_module("mine_parts")
    before = provenance.source_of()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "mine_parts.py").write_text("FACTOR = 0.5")
    assert provenance.source_of() == before, "what runs is still the source before"
    provenance.keep_source(tmp_path, 3, load_model(tiny.model()), {})
    assert (tmp_path / "source/0000000003/mine_parts.py").read_text() == "FACTOR = 1.0"
    about = json.loads((tmp_path / "source/0000000003/provenance.json").read_text())
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert about["project_commit"] == commit
    provenance.bytes_of.cache_clear()  # as another start
    assert {name for name, _ in before.items() ^ provenance.source_of().items()} == {
        "mine_parts.py"
    }
    assert not [name for name in before if "numpy" in name or "jax/" in name or "tests" in name]


OWN = """
import jax, mine
from shardlib.places import shown_path
from shardwright.program.provenance import own_modules
print(own_modules() == [__import__("pathlib").Path(mine.__file__)], shown_path(jax.__file__))
"""


@pytest.mark.long
def test_packages_by_pythonpath_are_no_source_and_a_project_in_its_environment_is(tmp_path):
    """As modules of a cluster bring jax.

    It counted as the user's, and was imported again for each trace.
    """
    packages = tmp_path / "deps"
    packages.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not re.search("editable|[.]pth|shardwright|shardlib", entry.name):
            (packages / entry.name).symlink_to(entry)
    project = tmp_path / "project"
    venv.create(project, symlinks=True)  # without pip
    (project / "mine.py").write_text("")
    env = os.environ | {"PYTHONPATH": f"{packages}:{provenance.ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [project / "bin" / "python", "-c", OWN]
    done = subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "True jax/__init__.py\n", done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A run whose checkpoint was made by other source."""
    c, directory = settings(tiny.model(), "unused"), tmp_path_factory.mktemp("run")
    with (
        jax.set_mesh(tiny.mesh("one device")),
        Checkpointer(directory / "checkpoints") as checkpoints,
    ):
        model, state = load_model(c.model), tiny.state(c)
        made_by = provenance.provenance_of(trace_step(c, model))
        made_by = made_by | {
            "source": {"train.py": "other"},
            "programs": {"training": "other", "evaluation": "other"},
        }
        checkpoints.save(
            3, state, {"config": dataclasses.asdict(c), "loader": {}, "provenance": made_by}
        )
    return directory, np.asarray(state.weights.embed)


@pytest.mark.slow
def test_an_export_is_refused_by_other_source(run_directory, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    directory, embed = run_directory
    config = {"run": str(directory), "output": str(tmp_path / "exported"), "check": False}
    with pytest.raises(
        ValueError, match=r"it computes something else in evaluation\. .* or give other_source=true"
    ):
        checkpoint_to_huggingface.run(checkpoint_to_huggingface.Settings(**config))
    assert not (tmp_path / "exported").exists()
    said = []
    checkpoint_to_huggingface.run(
        checkpoint_to_huggingface.Settings(**config, other_source=True), said.append
    )
    assert any(line.startswith("source     ") for line in said)
    tensors = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], embed)


def test_the_script_of_an_installer_is_no_source(tmp_path, monkeypatch):
    (tmp_path / "shardwright").write_text("#!/usr/bin/python\n")
    (tmp_path / "mine.py").write_text("")
    for name in ("shardwright", "mine.py"):
        monkeypatch.setitem(
            sys.modules, f"loaded_{name}", SimpleNamespace(__file__=str(tmp_path / name))
        )
    assert [path.name for path in provenance.own_modules() if path.parent == tmp_path] == [
        "mine.py"
    ]
