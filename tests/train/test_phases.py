"""Settings that change during a run: mixtures, left-out batches, and what is refused.

What batches and losses a run has then, however it is resumed, is in tests/run/test_resuming.py.
"""

import dataclasses
import shutil
from fractions import Fraction

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


def test_epochs_before_a_batch_count_those_of_other_sizes(data):
    grows = [{"step": step, "training.batch_size": 8 * step} for step in (2, 4)]
    sequences = 2 * 8 + 2 * 16 + 4 * 32
    assert loader_at(config(data, grows), 8).epochs_before(8) == Fraction(sequences, 250)


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


def test_two_sources_of_one_dataset_go_on_each_from_its_own_place(tmp_path):
    source = dataclasses.asdict(SourceConfig(written(tmp_path / "a", 3200)))
    mixture = {"a": source | {"weight": 3.0}, "b": source}
    changes = [
        {"step": 1, "data.filespec": None, "data.mixture": mixture},
        {"step": 4, "training.batch_size": 24},
    ]
    c = config(source["filespec"], changes, shuffle=False)
    read = {"a": [], "b": []}
    for step, size in ((1, 8), (2, 8), (3, 8), (4, 24)):
        for name, _, numbers in loader_at(c, step).locate(step, np.arange(size)):
            read[name] += [*numbers]
    for numbers in read.values():
        assert np.diff(numbers).tolist() == [1] * (len(numbers) - 1)


def test_batches_that_are_left_out_move_no_earlier_one(data):
    c, skips = config(data, shuffle=False), config(data, shuffle=False, skip_steps=[4])

    def numbers(c, batch, step):
        return loader_at(c, step).sequences(batch, np.arange(8)).targets[:8]

    np.testing.assert_array_equal(numbers(skips, 3, 3), numbers(c, 3, 3))
    np.testing.assert_array_equal(numbers(skips, 5, 4), numbers(c, 5, 5))
    assert loader_at(skips, 6).state(6).keys() == {"before", "first", "dataset"}


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"step": 3, "training.seq_lne": 32},
            "has training.seq_lne, which may not change .* Did you mean training.seq_len",
        ),
        ({"step": 3, "model.layers": 2}, "has model.layers, which may not change during a run"),
        ({"step": 3, "optimizer.algorithm": "muon"}, "has optimizer.algorithm, which may not"),
        ({"step": 2}, r"changes\[1\].step is 2; it must be a whole number above 2"),
        ({"training.seq_len": 32}, r"changes\[1\].step is None"),
        ({"step": 3, "training.seq_len": "long"}, "after step 3: training.seq_len is long; it"),
        ({"step": 3, "training.seq_len": 0}, "after step 3: training.seq_len is 0; it must be at"),
        (
            {"step": 3, "data.mixture.web.weight": 2},
            "after step 3: no value for data.mixture.web.filespec; give",
        ),
        ({"step": 3, "optimizer.schedule": "wsd"}, "after step 3: optimizer.schedule is wsd and"),
    ],
)
def test_a_wrong_entry_gets_one_line(data, change, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_config(config(data, [{"step": 2}, change]))
    assert "\n" not in str(refused.value)


MIXTURE = {"a": SourceConfig("a"), "b": SourceConfig("b")}


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            LENGTHS[:1],
            {"seq_len": 64},
            r"seq_len: checkpoint has 16, this run has 64.*change training.seq_len from step 4 on, "
            r"add",
        ),
        (
            [],
            {},
            r"other settings after step 3:\n  training.seq_len: checkpoint has 32, this run has 16",
        ),
        ([{"step": 2, "training.seq_len": 8}, *LENGTHS], {}, "other settings after step 2:"),
        (
            LENGTHS,
            {"filespec": None, "mixture": MIXTURE},
            r"does not have it, this run has 1.0.*change data.mixture from step 4 on, add",
        ),
    ],
)
def test_what_was_done_does_not_change(tmp_path, data, changes, settings, message):
    saved = {"config": dataclasses.asdict(config(data, LENGTHS))}
    with pytest.raises(ValueError, match="(?s)" + message):
        check_resumes(saved_config(saved), config(data, changes, **settings), tmp_path, 4)


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
    mixture = {name: {"filespec": data} for name in ("a", "b")}
    for change, settings, message in [
        ({"data.filespec": str(train_only)}, {"eval_batches": 1}, "validation"),
        (
            {"data.filespec": None, "data.mixture": mixture},
            {"eval_epochs": 1.0},
            "Only a single flat-tokens dataset",
        ),
    ]:
        c = config(data, [{"step": 3, **change}], **settings)
        with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match=message):
            train.train(c, load_model(c.model), tmp_path)
        assert not (tmp_path / "metrics.jsonl").exists()
