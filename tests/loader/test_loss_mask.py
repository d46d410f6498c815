"""data.loss_mask: the chats of docs/recipes/chats.py, whose targets are the answers, for the loss
and its gradients.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from shardwright.data.loader import DataConfig, StreamConfig, flat, make_loader

PROGRAM = Path(__file__).parents[2] / "docs" / "recipes" / "chats.py"
LENGTH = 60  # of the first chat with all of its answers
CHATS = [
    [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4, of course")],
    [("system", "be brief"), ("user", "who?"), ("assistant", "I")],
    [("user", "a question that is cut")],
]


def expected(chat) -> list[tuple[int, bool]]:
    """Each token by hand, and whether it is of an answer: bytes + 3, and 1 at the end of an
    answer.
    """
    found = []
    for role, content in chat:
        answers = role == "assistant"
        found += [(byte + 3, False) for byte in f"{role}: ".encode()]
        found += [(byte + 3, answers) for byte in content.encode()] + [
            (1, True) if answers else (ord("\n") + 3, False)
        ]
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    """The dataset that the program writes."""
    directory = tmp_path_factory.mktemp("chats")
    for split in ("train", "validation"):
        lines = [
            json.dumps([dict(zip(("role", "content"), m, strict=True)) for m in chat])
            for chat in CHATS
        ]
        (directory / f"chats_{split}.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        exec(PROGRAM.read_text(), {})
    return DataConfig(
        filespec=str(directory / "data/chats.zarr"),
        shuffle=False,
        sequence_packing=False,
        loss_mask="answer",
    )


@pytest.mark.quick
@pytest.mark.parametrize("packed", [False, True])
def test_targets_are_the_answers(data, packed):
    data.sequence_packing = packed
    batch = make_loader(data, "validation", 2, LENGTH).sequences(0, np.arange(2))
    data.sequence_packing = False
    chats = [expected(chat) for chat in CHATS]
    joined = [*itertools.chain(*chats)]
    rows = (
        [joined[:LENGTH], joined[LENGTH : 2 * LENGTH]]
        if packed
        else [chat[:LENGTH] for chat in chats[:2]]
    )
    for i, row in enumerate(rows):
        ids, answers = map(np.array, zip(*row, strict=True))
        np.testing.assert_array_equal(batch.targets[i, : len(row)], ids)
        np.testing.assert_array_equal(batch.loss_mask[i, : len(row)], answers)
        assert not batch.loss_mask[i, len(row) :].any()
    assert make_loader(data, "train", 2, LENGTH).state(0) != make_loader(
        DataConfig(filespec=data.filespec), "train", 2, LENGTH
    ).state(0)


@pytest.mark.quick
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [8, LENGTH])
def test_targets_are_counted(data, packed, length):
    """By hand: with 8 tokens, the answers of no chat are reached."""
    chats = [[answers for _, answers in expected(chat)] for chat in CHATS]
    joined = [*itertools.chain(*chats)]
    rows = (
        [joined[i : i + length] for i in range(0, len(joined) - length + 1, length)]
        if packed
        else chats
    )
    rows = [row[:length] for row in rows]
    data = dataclasses.replace(data, sequence_packing=packed)
    found = make_loader(data, "train", 2, length).count_targets()
    assert found.tolist() == [*map(sum, rows)]


@pytest.mark.quick
def test_targets_of_many_sequences_are_counted_in_the_first(data, monkeypatch):
    monkeypatch.setattr(flat, "MOST_COUNTED", 2 * LENGTH)
    found = make_loader(data, "train", 2, LENGTH).count_targets()
    assert found.size == 2
    assert found.all()
    assert (
        make_loader(DataConfig(filespec=data.filespec), "train", 2, LENGTH).count_targets() is None
    )


@pytest.mark.quick
def test_a_mask_that_is_not_there_is_refused(data):
    with pytest.raises(ValueError, match="input_prompt"):
        make_loader(DataConfig(filespec=data.filespec, loss_mask="prompt"), "train", 2, LENGTH)
    with pytest.raises(ValueError, match="answer, but streams have no inputs"):
        make_loader(
            DataConfig(stream=StreamConfig(dataset="x"), loss_mask="answer"), "train", 2, LENGTH
        )
