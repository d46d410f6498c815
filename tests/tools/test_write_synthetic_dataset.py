"""The documents of each synthetic task, and that the dataset in the repository is what the tool
writes.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from shardwright.data import flat_tokens, synthetic
from shardwright.tools import write_synthetic_dataset as tool
from tests.support.numpy_checks import check_modules

check_modules(flat_tokens, synthetic, tool)

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
CHECKED_IN = ROOT / "synthetic_dataset.zarr"


def documents(path, split):
    group = zarr.open_group(str(path), mode="r")[split]
    tokens, starts = group["encoded_tokens"][:], group["seq_starts"][:]
    return np.split(tokens >> 1, starts[1:-1].astype(np.int64))


@pytest.mark.long
def test_checked_in_dataset_is_what_the_tool_writes(tmp_path):
    command = [sys.executable, "-m", "tools.write_synthetic_dataset", "out=d.zarr"]
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(ROOT)}, "text": True}
    run = subprocess.run(command, capture_output=True, check=True, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["d.zarr"]
    assert "d.zarr/train: 262,147 tokens in 6,950 documents" in run.stdout
    for split in ("train", "validation"):
        both = (CHECKED_IN, tmp_path / "d.zarr")
        ours, fresh = (zarr.open_group(str(path), mode="r")[split] for path in both)
        assert ours.attrs.asdict() == fresh.attrs.asdict()
        for name in ("encoded_tokens", "seq_starts"):
            np.testing.assert_array_equal(ours[name][:], fresh[name][:])
        assert ours["encoded_tokens"][:].max() >> 1 < 1280


def check_copy(data, step=1):
    n = (data.size - 1) // 2
    assert data[n] == synthetic.SEPARATOR
    np.testing.assert_array_equal(data[n + 1 :], data[:n][::step])
    return data[:n]


def check_copy_at(data):
    distance, digits = int(data[0]) - synthetic.FIRST_DISTANCE, data[1:]
    assert 1 <= distance <= 16
    np.testing.assert_array_equal(digits[distance:], digits[:-distance])
    return digits


def check_copy_at_unknown(data):
    assert any((data[d:] == data[:-d]).all() for d in range(1, 17))
    return data


def test_documents_are_their_tasks():
    checks = {
        synthetic.COPY: check_copy,
        synthetic.REVERSE: lambda data: check_copy(data, -1),
        synthetic.COPY_AT: check_copy_at,
        synthetic.COPY_AT_UNKNOWN: check_copy_at_unknown,
    }
    by_task = {task: [] for task in [*checks, synthetic.GAUSSIANS]}
    for document in documents(CHECKED_IN, "train"):
        by_task[int(document[0])].append(document[1:])
    for task, check in checks.items():
        digits = np.concatenate([check(data) for data in by_task[task]]) - synthetic.FIRST_DIGIT
        np.testing.assert_allclose(np.bincount(digits, minlength=10) / digits.size, 0.1, atol=0.02)
    for task, some in by_task.items():
        lengths = {data.size for data in some}
        assert 0.18 < len(some) / 6950 < 0.22
        assert len(lengths) > 35, task
