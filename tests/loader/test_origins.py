"""The origin of a batch: taken apart, it is the one that the loader gives."""

import numpy as np
import pytest

from shardwright.data.loader import DataConfig, SourceConfig, make_loader
from shardwright.data.text.tokenizers import open_tokenizer
from tests.support.written_datasets import TEXTS, write


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "d")


@pytest.mark.parametrize(("packing", "mixed"), [(True, False), (False, False), (True, True)])
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
            own = [piece for piece in pieces if piece.sequence == number]
            documents = [(TEXTS[piece.document] + "\0").encode() for piece in own]
            parts = [
                document[piece.start : piece.start + piece.length]
                for document, piece in zip(documents, own, strict=True)
            ]
            text = b"".join(parts).decode().replace("\0", "")
            mask = batch.loss_mask[number]
            assert tokenizer.decode(batch.targets[number][mask].tolist()) == text
            begins = [piece.position for piece in own if piece.start == 0]
            assert begins == np.flatnonzero(batch.is_seq_start[number]).tolist()
            assert {piece.source for piece in own} <= ({"one", "two"} if mixed else {None})
