"""What inspect_data prints."""

import io

import numpy as np
import pytest
from rich.console import Console

from shardwright.tools import inspect_data
from shardwright.tools.inspect_data import Settings
from tests.support.numpy_checks import check_modules
from tests.support.written_datasets import TEXTS, write

check_modules(inspect_data)


def show(**settings):
    console = Console(width=160, record=True, file=io.StringIO())
    inspect_data.run(Settings(**settings), console)
    return console.export_text()


def test_overview(tmp_path):
    dataset = write(tmp_path / "d")
    text = show(filespec=dataset)
    assert dataset in text
    lengths = np.array([len(text.encode()) + 1 for text in TEXTS])
    assert f"{lengths.sum():,}" in text
    assert "60, " in text
    assert f"{lengths.min()} to {lengths.max()} tokens, " in text
    assert f"median {int(np.median(lengths))}," in text
    for i in (0, 14, 29, 44, 59):
        assert TEXTS[i] in text
    with pytest.raises(ValueError, match=r"document is 60; .* has documents 0 to 59"):
        show(filespec=dataset, document=60)
