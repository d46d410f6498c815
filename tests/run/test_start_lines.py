"""What a run says of its data at the start, from datasets whose targets are counted by hand, and
the id before each document: as given, or as the datasets record it.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.data import flat_tokens
from shardwright.data.loader import DataConfig, make_loader
from shardwright.run.introduction import describe_data
from shardwright.run.launch import composed, take_recorded_bos_id
from tests.support import tiny, written_datasets

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


def lines(data: DataConfig, length: int, batch: int = 2) -> list[str]:
    c = tiny.config(seq_len=length, eval_batches=1)
    c.data = data
    run: Any = SimpleNamespace(config=c, passes={})
    run.loader = make_loader(data, "train", batch, length)
    run.validation = make_loader(data, "validation", batch, length)
    return describe_data(run)


def test_the_share_of_targets(filespec):
    padded = {"sequence_packing": False, "shuffle": False}
    assert lines(DataConfig(filespec=filespec), 8) == []
    found = lines(DataConfig(filespec=filespec, **padded, loss_mask="answer"), 8)
    # 4 of 6 and 4 of 8 tokens of the last two documents; validation reads the first two.
    assert found == [
        "targets    25% of positions in the first 4 documents, and 2 of them have none",
        "WARNING    no target in the batches of validation, so it gives no loss (data.loss_mask)",
    ]
    whole = lines(DataConfig(filespec=filespec, **padded, loss_mask="answer"), 8, batch=4)
    assert whole == found[:1], "its one batch has all documents"


def test_data_without_targets_are_refused(filespec):
    data = DataConfig(filespec=filespec, sequence_packing=False, loss_mask="answer")
    with pytest.raises(ValueError, match=r"none of the first 4 documents .* a target in 2 tokens"):
        lines(data, 2)


# ---- the id before each document -----------------------------------------------------------------


def taken(given: int | None, *overrides: str) -> int:
    given_too = [] if given is None else [f"model.bos_id={given}"]
    c = composed("local_test_synthetic", *overrides, *given_too)
    take_recorded_bos_id(c, given)
    return c.model.bos_id


@pytest.mark.parametrize(
    ("attributes", "given", "expected"),
    [({"bos_id": 1}, None, 1), ({}, None, 0), ({}, 2, 2)],
)
def test_a_recorded_id_is_taken_where_none_is_given(attributes, given, expected, tmp_path):
    path = written_datasets.write(tmp_path / "d", attributes=attributes)
    assert taken(given, f"data.filespec={path}") == expected


def test_contradictions_are_refused(tmp_path):
    one = written_datasets.write(tmp_path / "one", attributes={"bos_id": 1})
    two = written_datasets.write(tmp_path / "two", attributes={"bos_id": 2})
    with pytest.raises(ValueError, match=r"one records bos_id 1, but model\.bos_id is 0"):
        taken(0, f"data.filespec={one}")
    mixture = f"+data.mixture.a.filespec={one}", f"+data.mixture.b.filespec={two}"
    with pytest.raises(ValueError, match=r"two records bos_id 2, but model\.bos_id is 1"):
        taken(None, "data.filespec=null", *mixture)
    with pytest.raises(ValueError, match=r"two records bos_id 2"):
        taken(None, f"data.filespec={one}", f"training.changes=[{{step: 1, data.filespec: {two}}}]")
