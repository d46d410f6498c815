"""Copies token files of nanoGPT, llm.c, Megatron-LM or NumPy into a split of a dataset
(docs/data.md).

    python docs/recipes/token_files.py data/mine.zarr train 50256 train.bin more.bin

50256 is the id that separates documents, here GPT-2's <|endoftext|>.
"""

import sys
from pathlib import Path

import numpy as np

from shardwright.data import flat_tokens

LLM_C = {20240520: np.uint16, 20240801: np.uint32}  # by the first number of a header of 256
MEGATRON = {3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # by a byte of the .idx beside


def open_tokens(path: Path) -> np.ndarray:
    """Maps the tokens of a file into memory."""
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")
    index = path.with_suffix(".idx")
    if index.exists():
        return np.memmap(path, MEGATRON[index.read_bytes()[17]], "r")
    first = int(np.fromfile(path, "<i4", 1)[0])
    return (
        np.memmap(path, LLM_C[first], "r", 1024)
        if first in LLM_C
        else np.memmap(path, np.uint16, "r")
    )


dataset, split, end, *files = sys.argv[1:]
separator = int(end)
before = np.array([separator], np.uint32)  # the last id: a document begins after a separator
with flat_tokens.Writer(dataset, split) as writer:
    for tokens in map(open_tokens, map(Path, files)):
        for start in range(0, tokens.size, 2**24):
            ids = tokens[start : start + 2**24].astype(np.uint32)
            is_start = np.concatenate([before, ids[:-1]]) == separator
            writer.append_encoded(ids << 1 | is_start)
            before = ids[-1:]
