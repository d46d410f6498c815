"""The id before each document: as given, or as the datasets record it."""

import pytest

from shardwright.data import flat_tokens
from shardwright.run.launch import composed, take_recorded_bos_id
from tests.support import written_datasets

pytestmark = pytest.mark.quick
RECORDS_1 = {"bos_id": 1}


def taken(given: int | None, *overrides: str) -> int:
    c = composed(
        "local_test_synthetic", *overrides, *([] if given is None else [f"model.bos_id={given}"])
    )
    take_recorded_bos_id(c, given)
    return c.model.bos_id


@pytest.mark.parametrize(
    ("attributes", "given", "expected"),
    [(RECORDS_1, None, 1), (RECORDS_1, 1, 1), ({}, None, 0), ({}, 2, 2)],
)
def test_a_recorded_id_is_taken_where_none_is_given(attributes, given, expected, tmp_path):
    path = written_datasets.write(tmp_path / "d", attributes=attributes)
    assert taken(given, f"data.filespec={path}") == expected


def test_contradictions_are_refused(tmp_path):
    one = written_datasets.write(tmp_path / "one", attributes=RECORDS_1)
    two = written_datasets.write(tmp_path / "two", attributes={"bos_id": 2})
    with pytest.raises(
        ValueError, match=r"one records bos_id 1, but model\.bos_id is 0\. Give model\.bos_id=1"
    ):
        taken(0, f"data.filespec={one}")
    mixture = (
        "data.filespec=null",
        f"+data.mixture.a.filespec={one}",
        f"+data.mixture.b.filespec={two}",
    )
    with pytest.raises(ValueError, match=r"two records bos_id 2, but model\.bos_id is 1"):
        taken(None, *mixture)
    with pytest.raises(ValueError, match=r"two records bos_id 2"):
        taken(None, f"data.filespec={one}", f"training.changes=[{{step: 1, data.filespec: {two}}}]")
    large = written_datasets.write(tmp_path / "large", attributes={"bos_id": 5000})
    with pytest.raises(
        ValueError, match=r"model\.bos_id is 5000; it must be at least 0 and below 1280"
    ):
        taken(None, f"data.filespec={large}")


def test_what_is_no_dataset_is_left_to_its_reader(tmp_path):
    assert taken(None, f"data.filespec={tmp_path}/none") == 0
    damaged = written_datasets.write(tmp_path / "damaged", attributes={"bos_id": "one"})
    assert taken(None, f"data.filespec={damaged}") == 0
    with pytest.raises(ValueError, match=r"bos_id is 'one'; it must be a whole number"):
        flat_tokens.Reader(damaged, "train")
