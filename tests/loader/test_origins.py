"""The origin of a batch: taken apart, it is the one that the loader gives."""

import numpy as np
import pytest
import zarr

from shardwright.data.flat_tokens import Reader
from shardwright.data.loader import DataConfig, SourceConfig, make_loader
from shardwright.data.text.tokenizers import open_tokenizer
from tests.support.written_datasets import TEXTS, write


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "d")


def test_documents_at(dataset):
    reader = Reader(dataset, "train")
    starts = zarr.open_array(dataset, path="train/seq_starts", mode="r")[:]
    places = np.arange(reader.num_tokens)
    expected = np.searchsorted(starts, places, side="right") - 1
    np.testing.assert_array_equal(reader.documents_at(places), expected)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_is_the_loaders(tmp_path, dataset, packing, mixed):
    if mixed:
        sources = {"one": SourceConfig(dataset, 3), "two": SourceConfig(write(tmp_path / "e"))}
        data = DataConfig(mixture=sources, sequence_packing=packing)
    else:
        data = DataConfig(filespec=dataset, sequence_packing=packing, seed=3)
    loader = make_loader(data, "train", 16, 50)
    tokenizer = open_tokenizer("bytes")
    for step in (0, 7, 10**6):
        batch = loader.sequences(step, np.arange(16))
        pieces = loader.pieces(step)
        assert [piece.sequence for piece in pieces] == sorted(piece.sequence for piece in pieces)
        for number in range(16):
            of_sequence = [piece for piece in pieces if piece.sequence == number]
            text = "".join(
                (TEXTS[piece.document] + "\0")
                .encode()[piece.start : piece.start + piece.length]
                .decode()
                for piece in of_sequence
            )
            mask = batch.loss_mask[number]
            assert tokenizer.decode(batch.targets[number][mask].tolist()) == text.replace("\0", "")
            begins = [piece.position for piece in of_sequence if piece.start == 0]
            assert begins == np.flatnonzero(batch.is_seq_start[number]).tolist()
            assert {piece.source for piece in of_sequence} <= ({"one", "two"} if mixed else {None})
