"""A run whose newest checkpoint is damaged goes on from the newest whole one, and says so;
training.resume_step; checkpoints at a URL.
"""

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardwright.program import resume
from shardwright.program.checkpoint import Checkpointer, find_checkpoint
from shardwright.program.resume import choose_checkpoint
from shardwright.program.saved_config import check_resumes
from tests.support import exact_step, tiny
from tests.support.exact_step import exact
from tests.support.losses_of_runs import losses
from tests.support.s3_server import server

__all__ = ["exact", "server"]

DATA = Path(__file__).parents[2] / "synthetic_dataset.zarr"


# ---- the choice ----------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path):
    config = {"model": {}, "training": {"resume_step": None}}
    with Checkpointer(tmp_path) as checkpoints:
        for step in (5, 10, 15):
            checkpoints.save(step, {"x": jnp.ones(4)}, {"config": config})
    return checkpoints


def test_the_same_command_goes_on_with_the_run_that_went_back(checkpoints):
    """Unless other batches are left out that it has not reached; also when the step is deleted by
    then.
    """
    with Checkpointer(checkpoints.store.url) as again:
        config = {"model": {}, "training": {"resume_step": 10}, "data": {"skip_steps": [12]}}
        again.save(20, {"x": jnp.ones(4)}, {"config": config})
        again.wait()
        assert choose_checkpoint(again, 10, {}, [12])[0] == 20
        assert choose_checkpoint(again, 5, {})[0] == 5
        assert choose_checkpoint(again, 10, {}, [12, 14])[0] == 10
        assert choose_checkpoint(again, 10, {}, [12, 30])[0] == 20, "the batch is not reached yet"
        again.store.remove("0000000010")
        assert choose_checkpoint(again, 10, {}, [12])[0] == 20
        with pytest.raises(ValueError, match=r"step 7 in .*; it has \[5, 15, 20\]"):
            choose_checkpoint(again, 7, {})


@pytest.mark.parametrize(
    ("setting", "value", "refused"),
    [
        ("model.d_ff", 96, True),
        ("data.shuffle", False, True),
        ("mesh.d", 4, False),
        ("training.steps", 99, False),
    ],
)
def test_another_model_optimizer_or_data_is_refused_by_name(tmp_path, setting, value, refused):
    saved, c = dataclasses.asdict(tiny.config()), tiny.config()
    section, name = setting.split(".")
    setattr(getattr(c, section), name, value)
    message = f"\n  {setting}: checkpoint has {saved[section][name]}, this run has {value}\n"
    raises = pytest.raises(ValueError, match=re.escape(message))
    with raises if refused else contextlib.nullcontext():
        check_resumes(saved, c, tmp_path, 1)


# ---- runs ----------------------------------------------------------------------------------------


def run(directory: Path, steps: int, checkpoints: str | None = None, **changes) -> Path:
    model = tiny.model(vocab=1280, layers=1)
    c = tiny.config(model, checkpoint_interval=2, eval_batches=0, steps=steps, **changes)
    c.data.filespec = str(DATA)
    c.paths = dataclasses.replace(c.paths, checkpoints=checkpoints, model_name=directory.name)
    exact_step.train_on("one device", c, directory)
    return directory


def test_a_run_tells_what_is_damaged_and_what_it_sets_aside(tmp_path, capsys, exact):
    directory = run(tmp_path / "run", 6)
    checkpoints = directory / "checkpoints"
    files = (checkpoints / "0000000006/weights/layers/w/c").rglob("*")
    file = next(path for path in files if path.is_file())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.copytree(directory, tmp_path / "other")
    run(directory, 8)
    told = capsys.readouterr().out
    for text in (
        "the checkpoint of step 6 is not used: cannot read the array 'weights/layers/w'",
        f"resuming from step 4; the checkpoints [6] are moved to {checkpoints}/set_aside/",
    ):
        assert f"WARNING    {text}" in told
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "damaged_checkpoint"]
    assert (event["step"], event["damaged_step"]) == (4, 6)
    assert [path.name for path in checkpoints.glob("set_aside/*/*")] == ["0000000006"]
    run(directory, 8, resume_step=4)
    assert "resuming from step 4; the checkpoints [6, 8] are moved to" in capsys.readouterr().out
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"other/checkpoints/{step:010}")
    message = r"^no intact checkpoint in .* to resume from.* step 6: cannot read"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "other", 8)


@pytest.mark.long
def test_checkpoints_at_a_url(tmp_path, monkeypatch, exact, server):
    """The run's other files stay in its directory; another run begins with the weights there."""
    monkeypatch.setattr(resume, "read_weights", lambda path, like, *_: (like, {}))
    url = "s3://bucket/runs"
    directory = run(tmp_path / "run", 4, url)
    run(directory, 6, url)
    assert losses(directory) == losses(run(tmp_path / "local", 6))
    assert not (directory / "checkpoints").exists()
    found, step = find_checkpoint(f"{url}/run")
    assert (found.store.url, found.steps(), step) == (f"{url}/run/checkpoints", [2, 4, 6], 6)
    run(tmp_path / "next", 2, init_from=f"{url}/run/checkpoints/0000000004")
    # The place is forgotten, or given to a run that had none: no run begins again over the steps
    # that were done.
    for name, saved, given in (("run", url, None), ("local", "null", url)):
        message = f"Give paths.checkpoints={saved} paths.model_name={name}, or"
        with pytest.raises(ValueError, match=re.escape(message)):
            run(tmp_path / name, 6, given)
