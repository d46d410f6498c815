"""The dataset in the repository is what the tool writes."""

from pathlib import Path

import numpy as np
import zarr

from shardwright.tools import write_synthetic_dataset as tool

CHECKED_IN = Path(__file__).parents[2] / "synthetic_dataset.zarr"


def test_checked_in_dataset_is_what_the_tool_writes(tmp_path, capsys):
    tool.write(tool.Settings(out=str(tmp_path / "d.zarr")))
    assert "d.zarr/train: 262,147 tokens in 6,950 documents" in capsys.readouterr().out
    for split in ("train", "validation"):
        both = (CHECKED_IN, tmp_path / "d.zarr")
        ours, fresh = (zarr.open_group(str(path), mode="r")[split] for path in both)
        assert ours.attrs.asdict() == fresh.attrs.asdict()
        for name in ("encoded_tokens", "seq_starts"):
            np.testing.assert_array_equal(ours[name][:], fresh[name][:])
