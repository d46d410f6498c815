"""Further arrays of a split, with a value for each token: what a model reads beside the tokens."""

import numpy as np

from shardwright_data.flat_tokens.format import INNER_CHUNK, TOKENS_CODECS, TOKENS_SHARD, open_kvstore, read_file
from shardwright_data.flat_tokens.growing_array import GrowingArray
from shardwright_data.flat_tokens.reader import Reader


def add_input(filespec: str, split: str, name: str, values: np.ndarray, *, overwrite: bool = False) -> None:
    """Adds the array `input_<name>` to a complete split, in zarr v3.

    If the call is interrupted, the array is shorter than the tokens or lacks its last file. Readers refuse it.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        name: of the input; letters, digits, _ and -.
        values: uint32[num_tokens], or of a smaller unsigned type: one for each token, in their order. It is read a
            part at a time, so it may be a np.memmap.
        overwrite: replace an array of that name, or the part of one that an interrupted call left.

    Raises:
        ValueError: the split is missing or in zarr v2, it has such an array already, `values` have another length or
            type, or a write failed.
    """
    reader = Reader(filespec, split)
    where = f"{reader.path}/input_{name}"
    kvstore = open_kvstore(filespec) / f"{reader.input_key(split, name)}/"
    if values.shape != (reader.num_tokens,):
        raise ValueError(
            f"{where}: values of shape {values.shape}; there are {reader.num_tokens} tokens, one for each."
        )
    if not np.can_cast(values.dtype, np.uint32):
        raise ValueError(
            f"{where}: values are {values.dtype}, not uint32; give values.astype(np.uint32), or of numbers in float32 "
            "their bits, values.view(np.uint32)."
        )
    if not overwrite and read_file(kvstore, "zarr.json") is not None:
        raise ValueError(f"{where} is already there, or was begun; overwrite=True replaces it.")
    array = GrowingArray(kvstore, np.dtype(np.uint32), TOKENS_SHARD, INNER_CHUNK, TOKENS_CODECS)
    for start in range(0, reader.num_tokens, TOKENS_SHARD):
        array.append(np.asarray(values[start : start + TOKENS_SHARD], np.uint32))
    array.close()
