"""training.reference in runs: what is saved, what resumes, what is refused. Steps with it: test_changing.py."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.modeling.model import load_model
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.checkpoint_arrays import saved_arrays
from shardwright.run.reference import model_of, read_reference, reference_record
from shardwright.run.resuming import saved_config
from tests.support import tiny
from tests.support.losses_of_runs import losses
from tests.support.recipes import changed, module_of

ROOT = Path(__file__).parents[2]


def saved(directory: Path, model, step: int = 3, seed: int = 0, schedule: str = "gpipe") -> str:
    """A run with a checkpoint of random weights."""
    c = tiny.config(model)
    c.pipeline.schedule = schedule
    with jax.set_mesh(tiny.mesh("d=2")), Checkpointer(directory / "checkpoints") as checkpoints:
        weights = jax.tree.map(lambda x: x + 0.01 * seed, tiny.weights(model))
        checkpoints.save(step, {"weights": weights}, {"config": dataclasses.asdict(c), "loader": {}})
    return str(directory)


def config(reference: str | None, **training):
    c = tiny.config(tiny.model(module="changed_train", vocab=1280, layers=1), reference=reference, **training)
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    return c


def run(directory: Path, steps: int, reference: str | None) -> Path:
    """A run of the recipe of distillation."""
    c = config(reference, checkpoint_interval=2, eval_batches=0, microscope_interval=3)
    c.training.steps, c.paths = steps, dataclasses.replace(c.paths, model_name=directory.name)
    directory.mkdir(exist_ok=True)
    with module_of(changed("distillation")) as train, jax.set_mesh(tiny.mesh("d=2 t=2")):
        train.train(c, load_model(c.model), directory)
    return directory


@pytest.mark.slow
def test_a_run_resumes_with_its_reference_alone(tmp_path, capsys):
    teacher = saved(tmp_path / "teacher", tiny.model(vocab=1280, layers=2, d_model=64))
    whole = run(tmp_path / "whole", 4, teacher)
    assert f"reference  {teacher}, after 3 steps; it is not trained" in capsys.readouterr().out
    directory = run(tmp_path / "run", 2, teacher)
    moved = shutil.copytree(teacher, tmp_path / "moved")
    assert losses(run(directory, 4, str(moved / "checkpoints" / "0000000003"))) == losses(whole)
    with Checkpointer(directory / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest(2)
    assert manifest["metadata"]["reference"] == reference_record_of(teacher)
    saved_config(manifest["metadata"])
    sizes = {array.shape[-1] for name, array in saved_arrays(manifest).items() if name.endswith("final_norm")}
    assert sizes == {32}, "no array is the reference's"
    other = saved(tmp_path / "other", tiny.model(vocab=1280, layers=2, d_model=64), seed=1)
    for given, shown in ((other, f"{other} after 3 steps"), (None, "none")):
        message = f"training.reference is {shown}, and the run was made with {moved}/checkpoints/0000000003 after 3"
        with pytest.raises(ValueError, match=re.escape(message)):
            run(directory, 6, given)


def reference_record_of(path: str):
    with module_of(changed("distillation")), jax.set_mesh(tiny.mesh("d=2 t=2")):
        return reference_record(config(path))


@pytest.mark.long
def test_what_the_step_cannot_run_is_refused_by_name(tmp_path):
    fits = saved(tmp_path / "fits", tiny.model(vocab=1280, layers=2))
    words = saved(tmp_path / "words", tiny.model())
    heads = saved(tmp_path / "heads", tiny.model(vocab=1280, n_kv=1))
    cases = [
        (str(tmp_path / "none"), "t=2", f"training.reference is {tmp_path}/none: no complete checkpoint in"),
        (words, "t=2", f"training.reference is {words}: it has 64 token ids. Choose one with model.vocab = 1280."),
        (heads, "t=2", "model.n_kv is 1; on the mesh"),
        (fits, "p=2", f"training.reference is {fits}: it cannot run with pipeline stages. Set mesh.p=1."),
    ]
    for path, mesh, message in cases:
        with jax.set_mesh(tiny.mesh(mesh)), pytest.raises(ValueError, match=re.escape(message)) as raised:
            model_of(dataclasses.replace(config(path), model=tiny.model(vocab=1280)))
        assert "\n" not in str(raised.value)
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        assert model_of(config(None)) is None
        c = dataclasses.replace(config(fits), model=tiny.model(vocab=1280))
        (w,) = read_reference(c, dataclasses.replace(tiny.train.SPEC, takes_reference=True))
        with pytest.raises(ValueError, match="train trains without a reference: apply one of docs/recipes"):
            read_reference(c, tiny.train.SPEC)
        assert w.layers.w_q.addressable_shards[0].data.size == w.layers.w_q.size // 4
        np.testing.assert_array_equal(w.embed, np.asarray(tiny.weights(tiny.model(vocab=1280, layers=2)).embed))


@pytest.mark.long
def test_no_code_that_a_reference_names_is_imported(tmp_path, monkeypatch):
    (tmp_path / "of_a_stranger.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    path = saved(tmp_path / "teacher", tiny.model(vocab=1280), schedule="of_a_stranger:schedule")
    with jax.set_mesh(tiny.mesh("d=2")):
        assert model_of(dataclasses.replace(config(path), model=tiny.model(vocab=1280))) is not None
