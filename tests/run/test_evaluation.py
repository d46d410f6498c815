"""Loss and bits a byte of a validation split, and when it is evaluated, against counts by hand."""

import math
import types
from fractions import Fraction

import pytest

from shardwright.run.evaluation import evaluate
from shardwright.run.schedule import Schedule

pytestmark = pytest.mark.quick

SUMS = [(30.0, 10), (8.0, 6), (100.0, 1), (7.0, 7)]  # of each batch: nats, targets
BYTES = [41, 23, 5, 28]


def split(rounds: dict[str, float], sizes: list | None = None):
    """A loader with so many batches in a pass, that hands out their numbers, and the bytes of each."""

    def utf8_bytes(step):
        return None if sizes is None else sizes[step]

    return types.SimpleNamespace(epoch_steps=lambda: rounds, utf8_bytes=utf8_bytes, load=lambda step: step)


def evaluated(validation, batches: int) -> dict[str, float]:
    return evaluate(lambda weights, step: SUMS[step], None, validation, batches)


def test_the_mean_is_over_targets_and_bits_over_bytes():
    result = evaluated(split({"a": 9.0}, BYTES), batches=2)
    assert result["loss"] == pytest.approx(38 / 16)
    assert result["targets"] == 16
    assert result["utf8_bytes"] == 64
    assert result["bits_per_byte"] == pytest.approx(38 / math.log(2) / 64)


def test_no_bits_where_nobody_knows_the_bytes():
    assert "bits_per_byte" not in evaluated(split({}), batches=4)


@pytest.mark.parametrize(
    ("rounds", "batches", "targets"),
    [([2.9], 4, 16), ([0.4], 4, 10), ([9.0], 3, 17), ([9.0], 1, 10), ([1.5, 3.2], 4, 17), ([3.2, 0.4], 4, 17)],
)
def test_no_row_counts_twice_but_one_batch_always_does(rounds, batches, targets):
    """Of several sources, the longest counts."""
    assert evaluated(split(dict(zip("ab", rounds, strict=False))), batches)["targets"] == targets


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, [3, 5, 8]), (0.5, [2, 3, 4, 5, 7, 8, 9])])
def test_a_validation_is_due_where_an_epoch_ends(epochs, expected):
    """20 sequences in an epoch, 8 in a step: step 5 ends the second epoch with its last sequence."""

    def is_due(done):
        loader = types.SimpleNamespace(epochs_before=lambda step: Fraction(8 * step, 20))
        at = types.SimpleNamespace(done=done, is_over=False, loader=loader, batch_of=lambda step: step)
        return Schedule.due(at, None, epochs)

    assert [done for done in range(1, 10) if is_due(done)] == expected


def test_a_validation_without_targets_is_refused():
    with pytest.raises(
        ValueError, match=r"first 2 validation batches have no target\. Check that data\.loss_mask names"
    ):
        evaluate(lambda weights, step: (0.0, 0), None, split({"a": 9.0}), 2)
