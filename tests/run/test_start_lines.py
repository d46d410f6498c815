"""What a run prints of its data at the start, from datasets whose targets and passes are counted by
hand.
"""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.data import flat_tokens
from shardwright.data.loader import DataConfig, make_loader
from shardwright.run.introduction import describe_data
from tests.support import tiny

pytestmark = pytest.mark.quick

LENGTHS, ANSWER = (20, 30, 6, 8), 4
"""Tokens of the documents, the last ANSWER of which are the answer."""


@pytest.fixture(scope="module")
def filespec(tmp_path_factory):
    place = str(tmp_path_factory.mktemp("data") / "cut.zarr")
    for split in ("train", "validation"):
        with flat_tokens.Writer(place, split) as writer:
            writer.append(np.ones(sum(LENGTHS), np.uint32), np.array(LENGTHS))
        answers = np.concatenate([np.arange(n) >= n - ANSWER for n in LENGTHS])
        flat_tokens.add_input(place, split, "answer", answers.astype(np.uint32))
    return place


def lines(data: DataConfig, length: int, passes=None, batch: int = 2) -> list[str]:
    c = tiny.config(seq_len=length, eval_batches=1)
    c.data = data
    train, validation = (
        make_loader(data, split, batch, length) for split in ("train", "validation")
    )
    run: Any = SimpleNamespace(config=c, loader=train, validation=validation, passes=passes or {})
    return describe_data(run)


def test_the_share_of_targets(filespec):
    padded = {"sequence_packing": False, "shuffle": False}
    assert lines(DataConfig(filespec=filespec), 8) == []
    assert lines(DataConfig(filespec=filespec, **padded), 32) == [
        "targets    50% of positions in the first 4 documents"
    ]
    found = lines(DataConfig(filespec=filespec, **padded, loss_mask="answer"), 8)
    # 4 of 6 and 4 of 8 tokens of the last two documents; validation reads the first two.
    assert found == [
        "targets    25% of positions in the first 4 documents, and 2 of them have none",
        "WARNING    no target in the batches of validation, so it gives no loss (data.loss_mask)",
    ]
    whole = lines(DataConfig(filespec=filespec, **padded, loss_mask="answer"), 8, batch=4)
    assert whole == found[:1], "its one batch has all documents"
    assert all(len(line) <= 80 for line in found[:1])


def test_data_without_targets_are_refused(filespec):
    data = DataConfig(filespec=filespec, sequence_packing=False, loss_mask="answer")
    with pytest.raises(
        ValueError,
        match=r"none of the first 4 documents .* a target in 2 tokens\. Raise training\.seq_len",
    ):
        lines(data, 2)


def test_passes_over_the_sources(filespec):
    data = DataConfig(filespec=filespec)
    assert lines(data, 8, {filespec: Fraction(1)}) == []
    assert lines(data, 8, {filespec: Fraction(5, 2)}) == [f"passes     {filespec} 2.5x in this run"]
    data.mixture = {"big": None, "tiny": None}  # type: ignore[dict-item]
    many = {
        "big": Fraction(1, 2),
        "tiny": Fraction(88),
        **{str(i): Fraction(1, 4) for i in range(58)},
    }
    run: Any = SimpleNamespace(config=SimpleNamespace(data=data, training=None), passes=many)
    run.loader = SimpleNamespace(count_targets=lambda: None)
    (line,) = describe_data(run)
    assert (
        line == "passes     tiny 88x, big 0.5x, 0 0.25x, 1 0.25x, 2 0.25x and 55 more in this run"
    )
