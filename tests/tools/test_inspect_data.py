"""What inspect_data prints."""

import io

import numpy as np
import pytest
from rich.console import Console

from shardwright.data.text.definitions import train_bpe
from shardwright.data.text.tokenizers import Tokenizer
from shardwright.tools import inspect_data
from shardwright.tools.inspect_data import Settings
from tests.support.numpy_checks import check_modules
from tests.support.written_datasets import TEXTS, write

check_modules(inspect_data)


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "d")


def show(**settings):
    console = Console(width=160, record=True, file=io.StringIO())
    inspect_data.run(Settings(**settings), console)
    return console.export_text()


def test_overview(dataset):
    text = show(filespec=dataset)
    lengths = np.array([len(text.encode()) + 1 for text in TEXTS])
    assert f"{lengths.sum():,}" in text
    assert "60, " in text
    assert f"{lengths.min()} to {lengths.max()} tokens, " in text
    assert f"median {int(np.median(lengths))}," in text
    for i in (0, 14, 29, 44, 59):
        assert TEXTS[i] in text


def test_decoding_with_the_datasets_tokenizer(tmp_path):
    definition = train_bpe(TEXTS, 300)
    tokenizer = Tokenizer(definition, end_token="<|end|>")
    path = write(tmp_path / "d", tokenizer, {"tokenizer": {"kind": "train_bpe"}})
    (tmp_path / "d/tokenizer.json").write_text(definition)
    assert f"{TEXTS[3]}<|end|>" in show(filespec=path, document=3)


def test_without_a_tokenizer(tmp_path):
    path = write(tmp_path / "d", attributes={})
    assert "71 114 102" in show(filespec=path, document=0)


def test_a_document_that_is_not_there(dataset):
    with pytest.raises(ValueError, match=r"document is 60; .* has documents 0 to 59"):
        show(filespec=dataset, document=60)
