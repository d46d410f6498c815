"""The protocol of bench.forecast: the large run has four times the parameters, and each seed splits the text anew."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.forecast import BOTH, LARGE, LENGTHS, SIZES, ladders, read_table, split
from shardwright.modeling.model import load_model
from shardwright.run.launch import composed
from shardwright.run.report import parameters_without_embeddings
from shardwright.tools.forecast import summary_of

DATA = Path(__file__).parents[1] / "data"


def test_the_large_run_has_four_times_the_parameters_of_the_largest_small_one_and_its_length():
    _, *both = BOTH
    small = composed("track", *both, f"model={SIZES[-1]}", f"optimizer={LENGTHS[-1]}")
    large = composed("track", *both, *LARGE)
    assert large.training.steps == small.training.steps == small.optimizer.schedule_steps
    of_large, of_small = (parameters_without_embeddings(load_model(c.model)) for c in (large, small))
    assert math.isclose(of_large / of_small, 4, rel_tol=0.02)


def test_a_split_has_each_chapter_once_and_depends_on_the_seed(tmp_path):
    def chapters(seed):
        files = [setting.partition("=")[2].strip("[]") for setting in split(seed, tmp_path)]
        return [[json.loads(line)["text"] for line in Path(file).read_text().splitlines()] for file in files]

    (validation, train), (others, _) = chapters(0), chapters(1)
    assert (len(validation), len(train), len({*validation, *train})) == (27, 243, 270)
    assert len({*validation} & {*others}) < 10


TABLES = [("104_models", [34, 35, 35]), ("141_runs", [68, 73])]


@pytest.mark.parametrize(("table", "counts"), TABLES)
def test_published_ladders_forecast_models_of_more_compute(table, counts):
    found = read_table(DATA / f"losses_of_{table}.csv")
    assert [len(runs.loss) for runs in found.values()] == counts
    for runs in found.values():
        compute = runs.params * runs.tokens
        kinds = []
        for kind, small, large in ladders(runs, np.random.default_rng(0)):
            kinds.append(kind)
            assert len(small) == 9 if kind == "nine" else 17 <= len(small) <= 30
            assert 1 <= len(large) <= 12
            assert compute[small].max() <= compute[large].min()
            assert compute[large].max() <= 100 * compute[small].max()
        assert kinds == ["many"] * 2 + ["nine"] * 10


@pytest.mark.parametrize(("high", "is_open"), [(1.61, True), (1.59, False)])
def test_a_forecast_says_how_wide_it_is_and_whether_it_excludes_no_gain(high, is_open):
    end = {"loss": 1.5, "low": 1.44, "high": high}
    runs = [{"loss": 1.8}, {"loss": 1.6}]
    found = {"params": 1000, "tokens": 2000, "metric": "val", "widened": 1.5}
    found |= {"end": end, "runs": runs}
    text = "\n".join(summary_of(found))
    assert f"interval 1.440 to {high:.3f}, {(high - 1.44) / 1.5:.0%} wide" in text
    assert ("no better than that of the best run, 1.600" in text) == is_open
    assert "90%" not in text
