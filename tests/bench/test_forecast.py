"""The protocol of bench.forecast: the large run has four times the parameters, and each seed splits the text anew."""

import json
import math
from pathlib import Path

from shardwright.bench.forecast import BOTH, LARGE, LENGTHS, SIZES, split
from shardwright.modeling.model import load_model
from shardwright.run.launch import composed
from shardwright.run.report import parameters_without_embeddings


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
