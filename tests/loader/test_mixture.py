"""Mixtures against counting by hand, and against their sources read alone; the length of a run;
skipped batches.
"""

import contextlib
import itertools
import json
import shutil
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import (
    DataConfig,
    SourceConfig,
    config,
    make_loader,
    opening,
    order,
    steps_for,
)
from shardwright.data.loader.config import batch_of, check_skips
from shardwright.data.loader.order import BLOCK, PERIOD, Quotas
from shardwright.program.differences import config_differences
from shardwright.program.saved_config import fixed_settings
from tests.support.numpy_checks import check_modules

check_modules(config, opening, order)

pytestmark = pytest.mark.quick

SEQ_LEN = 8
ROWS = {"web": 300, "books": 50, "code": 7}


@pytest.fixture(scope="module")
def filespecs(tmp_path_factory):
    """Three datasets of ROWS rows of SEQ_LEN tokens; a token says its source and its row."""
    root = tmp_path_factory.mktemp("data")
    for i, (name, rows) in enumerate(ROWS.items()):
        for split in ("train", "validation"):
            with Writer(str(root / name), split) as writer:
                writer.append(
                    np.repeat(np.arange(rows), SEQ_LEN) + 1000 * i, np.full(rows, SEQ_LEN)
                )
    return {name: str(root / name) for name in ROWS}


def data(filespecs, weights, **settings):
    sources = {name: SourceConfig(filespecs[name], weight) for name, weight in weights.items()}
    return DataConfig(mixture=sources, **settings)


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1e6, 1, 3e4]])
def test_shares_are_exact(weights):
    """In each block within one row, in a period to within 1 / 2**20; every source's rows are
    numbered in order, and counted before each row.
    """
    quotas = Quotas(weights, seed=3)
    share = np.array(weights) / np.sum(weights)
    total = BLOCK * PERIOD
    assert quotas.shares.sum() == total
    assert np.abs(quotas.shares - share * total).max() < 1
    # The blocks around the end of a period, and some far away.
    for periods, before in ((0, 0), (1, 2), (10**6, 1)):
        first = PERIOD * periods - before
        source, _ = quotas.locate(np.arange(first * BLOCK, PERIOD * periods * BLOCK))
        expected = periods * quotas.shares - np.bincount(source, minlength=3)
        for block in range(first, first + 4):
            source, number = quotas.locate(np.arange(block * BLOCK, (block + 1) * BLOCK))
            counts = np.bincount(source, minlength=3)
            assert np.abs(counts - quotas.shares / PERIOD).max() < 1
            for i in range(3):
                numbers = expected[i] + np.arange(counts[i])
                np.testing.assert_array_equal(number[source == i], numbers)
            for n in (0, 476):
                so_far = expected + np.bincount(source[:n], minlength=3)
                np.testing.assert_array_equal(quotas.before(block * BLOCK + n), so_far)
            expected = expected + counts


def test_mixture_is_pinned():
    """Other values would give runs that resume other batches."""
    quotas = Quotas([0.6, 0.3, 0.1], seed=7)
    source, number = quotas.locate(np.array([0, 1, 2, 3, 4, 5, 1024, 10**6, 10**12]))
    assert source.tolist() == [2, 1, 0, 0, 0, 1, 1, 0, 1]
    assert number.tolist() == [0, 0, 0, 1, 2, 1, 307, 600002, 300000190735]


def test_rows_of_a_source_are_those_it_gives_alone(filespecs):
    """Of any step, and of any rows of it."""
    mixed = data(filespecs, {"web": 2, "books": 1, "code": 1}, seed=5)
    loader = make_loader(mixed, "train", 256, SEQ_LEN)
    every = {step: loader.sequences(step, np.arange(256)) for step in (10**9, 3, 2, 1, 0)}
    for rows in (np.array([15, 0, 3]), np.array([4])):
        some = jax.tree.map(lambda x, rows=rows: x[rows], every[10**9])
        jax.tree.map(np.testing.assert_array_equal, loader.sequences(10**9, rows), some)
    targets = np.concatenate([every[step].targets for step in range(4)])
    source = targets[:, 0] // 1000
    for i, name in enumerate(ROWS):
        mine = targets[source == i]
        single = DataConfig(filespec=filespecs[name], seed=5)
        alone = make_loader(single, "train", len(mine), SEQ_LEN)
        np.testing.assert_array_equal(mine, alone.sequences(0, np.arange(len(mine))).targets)
        # Exact epochs: before a row comes for the n-th time, each has come n - 1 times.
        counts = np.bincount(mine[: len(mine) // ROWS[name] * ROWS[name], 0] - 1000 * i)
        assert set(counts) == {len(mine) // ROWS[name]}


def of_web(filespecs, batch_size=7):
    return make_loader(DataConfig(filespec=filespecs["web"]), "train", batch_size, SEQ_LEN)


def test_run_length(filespecs):
    loader = of_web(filespecs)
    assert loader.epochs_before(10**6) == Fraction(7 * 10**6, 300)
    assert steps_for(loader, steps=10**9) == 10**9
    for tokens, steps in ((56, 1), (111, 1), (112, 2), (10**11, 10**11 // 56)):
        assert steps_for(loader, tokens=tokens) == steps
    for epochs, steps in ((1, 42), (2, 85), (0.5, 21), (0.7, 30), (7, 300)):
        assert steps_for(loader, epochs=epochs) == steps
    # Batches 0 to 84: batch 84 is named twice, and 85 comes after them.
    assert steps_for(loader, epochs=2, skip_steps=[0, 84, 85, 84]) == 83
    assert steps_for(loader, steps=85, skip_steps=[0, 84]) == 85
    # Whole epochs end with a whole batch here, which no rounding may take away.
    found = [steps_for(of_web(filespecs, 50), epochs=n) for n in range(1, 9)]
    assert found == [n * 6 for n in range(1, 9)]
    with pytest.raises(ValueError, match="minutes; given: steps=1, tokens=5"):
        steps_for(loader, steps=1, tokens=5)


SKIPS = [skips for count in range(6) for skips in itertools.combinations(range(5), count)]


def batches(skips, steps: int) -> list[int]:
    """The batches of the first steps."""
    found = [batch for batch in range(steps + len(skips)) if batch not in skips][:steps]
    assert [batch_of(step, [*skips, *skips][::-1]) for step in range(steps)] == found
    return found


@pytest.mark.parametrize("done", [0, 2, 6])
def test_batches_that_were_trained_on_stay(done):
    """Other batches may be skipped where, and only where, the batches of the steps done are the
    same.
    """
    for saved, current in itertools.product(SKIPS, SKIPS):
        same = batches(saved, done) == batches(current, done)
        with contextlib.nullcontext() if same else pytest.raises(ValueError, match="skip_steps"):
            check_skips(saved, current, done)


BOOKS = SourceConfig("books")
CONTRADICTIONS = [
    ({"filespec": "web", "mixture": {"a": BOOKS}}, "data.filespec and data.mixture is set"),
    ({"mixture": {"a": SourceConfig("web", 0)}}, "mixture.a.weight is 0; it must be above 0"),
    (
        {"mixture": {"a": SourceConfig("web", 1e9), "b": BOOKS}},
        "data.mixture.b.weight is 1.0, less than one sequence in 1048576",
    ),
]


@pytest.mark.parametrize(("settings", "message"), CONTRADICTIONS)
def test_contradictory_settings(filespecs, settings, message, monkeypatch):
    monkeypatch.chdir(Path(filespecs["web"]).parent)
    with pytest.raises(ValueError, match=message):
        make_loader(DataConfig(**settings), "train", 4, SEQ_LEN)


def test_datasets_may_move_but_not_change_nor_their_order(filespecs, tmp_path):
    def opened(mixture, state=None):
        found = make_loader(mixture, "train", 4, SEQ_LEN, state=state).state(3)
        return json.loads(json.dumps(found))

    shutil.copytree(filespecs["web"], tmp_path / "moved")
    moved = filespecs | {"web": str(tmp_path / "moved")}
    single, single_moved = (DataConfig(filespec=x["web"]) for x in (filespecs, moved))
    state = opened(single)
    assert opened(single_moved, state) == state
    before, after = ({"data": asdict(x), "training": {}} for x in (single, single_moved))
    assert config_differences(before, after, fixed_settings(before, after)) == []
    with pytest.raises(ValueError, match=r"with other data: dataset of .*; this run has .* tokens"):
        opened(DataConfig(filespec=filespecs["code"]), state)

    weights = {"web": 1, "code": 2}
    state = opened(data(filespecs, weights))
    assert list(state) == ["mixture.web", "mixture.code"]
    opened(data(moved, weights), state)
    message = r"mixture.web of .*; this run has mixture.code of .*, mixture.web of"
    with pytest.raises(ValueError, match=message):
        opened(data(filespecs, {"code": 2, "web": 1}), state)
    changed = filespecs | {"web": filespecs["code"], "code": filespecs["web"]}
    with pytest.raises(ValueError, match=r"made with other data: mixture.web of"):
        opened(data(changed, weights), state)


def test_validation_is_in_order(filespecs):
    mixed = data(filespecs, {"web": 1, "code": 1})
    for each in (DataConfig(filespec=filespecs["web"]), mixed):
        loader = make_loader(each, "validation", 64, SEQ_LEN)
        first = loader.sequences(0, np.arange(64)).targets[:, 0]
        assert first[first < 1000].tolist() == list(range((first < 1000).sum()))
