"""Settings that change during a run: mixtures, left-out batches, and what is refused.

What batches and losses a run has then, however it is resumed, is in tests/run/test_resuming.py.
"""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import train
from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import SourceConfig
from shardwright.modeling.model import load_model
from shardwright.program.changes import loader_at, steps_of, tokens_before
from shardwright.program.checks import check_config
from shardwright.program.saved_config import check_resumes, saved_config
from tests.support import tiny
from tests.support.exact_step import exact, train_on
from tests.support.losses_of_runs import losses

__all__ = ["exact"]

LENGTHS = [
    {"step": 3, "training.seq_len": 32},
    {"step": 6, "training.batch_size": 16, "optimizer.learning_rate": 1e-3},
]


def written(path, tokens: int, low: int = 0) -> str:
    """A dataset of documents of ten tokens, token i of which is low + i % 29."""
    for split in ("train", "validation"):
        with Writer(str(path), split) as writer:
            writer.append(low + np.arange(tokens, dtype=np.uint32) % 29, np.full(tokens // 10, 10))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("data") / "a.zarr", 4000)


def config(data, changes=LENGTHS, **settings):
    changes = [dict(change) for change in changes]
    c = tiny.config(tiny.model(layers=1), eval_batches=0, changes=changes, steps=9)
    c.data.filespec = data
    c.training.checkpoint_interval = 2
    for name, value in settings.items():
        section = next(x for x in (c.optimizer, c.data, c.training) if hasattr(x, name))
        setattr(section, name, value)
    return c


# ---- batches -------------------------------------------------------------------------------------


def test_tokens_before_a_step_and_steps_of_tokens(data):
    c = config(data)
    found = [tokens_before(c, step) for step in (3, 6, 9)]
    assert found == [3 * 128, 3 * 128 + 3 * 256, 3 * 128 + 3 * 256 + 3 * 512]
    steps = {127: 0, 128: 1, 384: 3, 640: 4, 1152: 6, 1663: 6, 1664: 7}
    assert {tokens: steps_of(c, tokens) for tokens in steps} == steps


def test_the_sources_of_a_mixture_go_on_and_new_data_begins(tmp_path):
    """Each source comes in its order, without a gap: also what was the only dataset, and one that
    is added.
    """
    files = {name: written(tmp_path / name, 1600, low) for name, low in {"a": 0, "b": 30}.items()}
    mixture = {name: dataclasses.asdict(SourceConfig(file)) for name, file in files.items()}
    changes = [
        {"step": 2, "data.filespec": None, "data.mixture": mixture},
        {"step": 4, "data.mixture.b.weight": 3.0},
        {"step": 5, "training.batch_size": 24},
    ]
    c = config(files["a"], changes, shuffle=False)
    loaders = [loader_at(c, step) for step in range(7)]
    rows = np.concatenate(
        [x.sequences(i, np.arange(x.batch_size)).targets for i, x in enumerate(loaders)]
    )
    of_b = (rows >= 30).any(1)
    for low, which in ((0, ~of_b), (30, of_b)):
        read = rows[which].reshape(-1)
        np.testing.assert_array_equal(read, low + np.arange(read.size) % 29)
    assert not of_b[:16].any()
    assert 3 < of_b[16:32].sum() < 13
    assert of_b[32:].sum() > 0.6 * len(of_b[32:])


def test_batches_that_are_left_out_move_no_earlier_one(data):
    c, skips = config(data, shuffle=False), config(data, shuffle=False, skip_steps=[4])

    def numbers(c, batch, step):
        return loader_at(c, step).sequences(batch, np.arange(8)).targets[:8]

    np.testing.assert_array_equal(numbers(skips, 3, 3), numbers(c, 3, 3))
    np.testing.assert_array_equal(numbers(skips, 5, 4), numbers(c, 5, 5))


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_setting_of_the_model_changes(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    c, expected = config(data, [{"step": 2, "model.rope_base": 5.0}], steps=4), []
    other = dataclasses.replace(c, model=dataclasses.replace(c.model, rope_base=5.0))
    with jax.set_mesh(tiny.mesh("one device")):
        train.Run.to_the_end(lambda: train.train(c, load_model(c.model), tmp_path))
        state = tiny.state(c)
        for step in range(4):
            training_step = tiny.training_step(c if step < 2 else other)
            state, metrics = training_step(state, loader_at(c, step).load(step), np.int32(step))
            expected.append(float(metrics.loss))
    assert losses(tmp_path) == expected
    assert "model.rope_base 10000.0 -> 5.0" in capsys.readouterr().out


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 3, "model.module": "gpt2"}, "has model.module, which may not change during a"),
        ({"step": 3, "model.d_ff": 64}, r"step 3: the shape of layers/w_down would be \(1, 64, 32"),
        ({"step": 2}, r"changes\[1\].step is 2; it must be a whole number above 2"),
        ({"step": 3, "training.seq_len": 0}, "after step 3: training.seq_len is 0; it must be at"),
    ],
)
def test_a_wrong_entry_is_refused(data, change, message):
    with pytest.raises(ValueError, match=message):
        check_config(config(data, [{"step": 2}, change]))


def test_what_was_done_does_not_change(tmp_path, data):
    saved = {"config": dataclasses.asdict(config(data, LENGTHS))}
    message = r"(?s)checkpoint has 16, this run has 64.*change training.seq_len from step 4 on, add"
    with pytest.raises(ValueError, match=message):
        check_resumes(saved_config(saved), config(data, LENGTHS[:1], seq_len=64), tmp_path, 4)


def run(directory, c):
    directory.mkdir(parents=True, exist_ok=True)
    c.paths.model_name = directory.name
    return train_on("one device", c, directory)


def test_other_data_is_refused_with_the_remedy(data, tmp_path, exact):
    at = tmp_path / "run"
    run(at, config(data, [], steps=2))
    other = written(tmp_path / "b.zarr", 2000, 30)
    with pytest.raises(ValueError, match="change them from this step on"):
        run(at, config(other, [], steps=4))
    run(at, config(data, [{"step": 2, "data.filespec": other}], steps=4))
    assert len(losses(at)) == 4
    message = r"The checkpoint was made with other data.*first of 2,.*this run has .*first of 3,"
    with pytest.raises(ValueError, match=message):
        run(at, config(data, [{"step": 3, "data.filespec": other}], steps=6))


def test_data_of_later_phases_is_checked_before_the_first_step(data, tmp_path):
    train_only = shutil.copytree(data, tmp_path / "b.zarr")
    shutil.rmtree(train_only / "validation")
    c = config(data, [{"step": 3, "data.filespec": str(train_only)}], eval_batches=1)
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match="validation"):
        train.train(c, load_model(c.model), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
