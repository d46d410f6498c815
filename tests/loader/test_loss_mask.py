"""data.loss_mask: the chats of docs/recipes/chats.py, whose targets are the answers, for the loss
and its gradients.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from shardwright.data.loader import DataConfig, make_loader

pytestmark = pytest.mark.quick

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
        found += [(byte + 3, answers) for byte in content.encode()]
        found.append((1, True) if answers else (ord("\n") + 3, False))
    return found


def rows_of(chats, length, packed):
    """The sequences of `length` tokens."""
    if not packed:
        return [chat[:length] for chat in chats]
    joined = [*itertools.chain(*chats)]
    return [joined[i : i + length] for i in range(0, len(joined) - length + 1, length)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    """The dataset that the program writes."""
    directory = tmp_path_factory.mktemp("chats")
    for split in ("train", "validation"):
        lines = [json.dumps([{"role": a, "content": b} for a, b in chat]) for chat in CHATS]
        (directory / f"chats_{split}.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        exec(PROGRAM.read_text(), {})
    path = str(directory / "data/chats.zarr")
    return DataConfig(filespec=path, shuffle=False, sequence_packing=False, loss_mask="answer")


@pytest.mark.parametrize("packed", [False, True])
def test_targets_are_the_answers(data, packed):
    config = dataclasses.replace(data, sequence_packing=packed)
    batch = make_loader(config, "validation", 2, LENGTH).sequences(0, np.arange(2))
    for i, row in enumerate(rows_of([*map(expected, CHATS)], LENGTH, packed)[:2]):
        ids, answers = map(np.array, zip(*row, strict=True))
        np.testing.assert_array_equal(batch.targets[i, : len(row)], ids)
        np.testing.assert_array_equal(batch.loss_mask[i, : len(row)], answers)
        assert not batch.loss_mask[i, len(row) :].any()
    plain = DataConfig(filespec=data.filespec)
    states = [make_loader(x, "train", 2, LENGTH).state(0) for x in (data, plain)]
    assert states[0] != states[1]
