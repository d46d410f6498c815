"""A writer of one split of a flat-tokens dataset, and of further values for its tokens."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright_data.checks import check_range
from shardwright_data.flat_tokens.format import (
    FORMAT,
    FORMAT_VERSION,
    INNER_CHUNK,
    MAX_TOKEN_ID,
    STARTS_CODECS,
    STARTS_SHARD,
    TOKENS_CODECS,
    TOKENS_SHARD,
    V2_CHUNK,
    Encoded,
    Ids,
    Lengths,
    check_absent,
    delete_split,
    mark_starts,
    open_kvstore,
    read_file,
)
from shardwright_data.flat_tokens.growing_array import GrowingArray
from shardwright_data.flat_tokens.reader import Reader


class Writer:
    """Writes one split of a dataset.

    Readers see the split only after `close`: the group's metadata is written last, when each write before it has been
    checked. As a context manager it closes on a clean exit, and leaves the split incomplete on an exception.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        overwrite: replace a complete split. An incomplete one is always replaced, unless `resume` is given.
        resume: what `state` gave, to resume the split: its files become what they would have been. None to begin it.
        zarr_format: 3, or 2 for seqax and other readers of zarr v2.

    Raises:
        ValueError: the split is already there.
    """

    def __init__(
        self,
        filespec: str,
        split: str,
        *,
        overwrite: bool = False,
        resume: Mapping[str, np.ndarray] | None = None,
        zarr_format: int = 3,
    ):
        self.path = f"{filespec.rstrip('/')}/{split}"
        self._root = open_kvstore(filespec)
        self._split = split
        check_range("zarr_format", zarr_format, 2, 4)
        self._v2 = zarr_format == 2
        if not overwrite:
            check_absent(filespec, split)
        else:
            delete_split(filespec, split)

        def array(name: str, dtype: type, shard: int, codecs: list[Any] | None) -> GrowingArray:
            if self._v2:
                shard, codecs = V2_CHUNK, None
            state = None if resume is None else (int(resume[f"{name}.written"]), resume[f"{name}.pending"])
            where = self._root / f"{split}/{name}/"
            return GrowingArray(where, np.dtype(dtype), shard, INNER_CHUNK, codecs, state)

        self._arrays = {"encoded_tokens": array("encoded_tokens", np.uint32, TOKENS_SHARD, TOKENS_CODECS)}
        self._arrays["seq_starts"] = array("seq_starts", np.uint64, STARTS_SHARD, STARTS_CODECS)
        self.num_documents = self._arrays["seq_starts"].length
        """Documents appended so far."""
        self._max_token_id = 0 if resume is None else int(resume["max_token_id"])
        self.attributes: dict[str, Any] = {}
        """JSON values to be written with the format's own attributes, by name."""

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return self._arrays["encoded_tokens"].length

    def state(self) -> dict[str, np.ndarray]:
        """The arrays that `resume` needs beside the files: at most a shard of each array of the split.

        Raises:
            ValueError: a write failed.
        """
        result = {"max_token_id": np.array(self._max_token_id)}
        for name, array in self._arrays.items():
            written, pending = array.state()
            result |= {f"{name}.written": np.array(written), f"{name}.pending": pending}
        return result

    def append(self, ids: Ids, lengths: Lengths) -> None:
        """Adds whole documents: their token ids one after the other, and the number of tokens of each.

        Raises:
            ValueError: an id is outside [0, MAX_TOKEN_ID], a document is empty, the lengths do not add up to the
                tokens, or a write failed.
        """
        if ids.size and ((low := int(ids.min())) < 0 or (high := int(ids.max())) > MAX_TOKEN_ID):
            raise ValueError(f"{self.path}: token id {low if low < 0 else high} is outside [0, {MAX_TOKEN_ID}].")
        self.append_encoded(mark_starts(ids, lengths, self.path))

    def append_encoded(self, encoded: Encoded) -> None:
        """Adds tokens as they are stored. Those before the first mark continue the last document.

        Args:
            encoded: as `mark_starts` gives them.

        Raises:
            ValueError: a write failed.
        """
        if not encoded.size:
            return
        starts = np.flatnonzero(encoded & np.uint32(1)).astype(np.uint64)
        self._arrays["seq_starts"].append(starts + np.uint64(self.num_tokens))
        self._arrays["encoded_tokens"].append(encoded)
        self.num_documents += starts.size
        self._max_token_id = max(self._max_token_id, int(encoded.max()) >> 1)

    def close(self) -> None:
        """Writes what is left, then makes the split visible.

        Raises:
            ValueError: a write failed; the split stays incomplete.
        """
        self._arrays["seq_starts"].append(np.array([self.num_tokens], np.uint64))
        for array in self._arrays.values():
            array.close()
        own = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "max_token_id": self._max_token_id,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
        }
        self._write_group("", {})
        self._write_group(f"{self._split}/", self.attributes | own)

    def _write_group(self, prefix: str, attributes: Mapping[str, Any]) -> None:
        group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        if self._v2:  # the group last: it shows the split
            files = {"zarr.json": None, ".zattrs": attributes, ".zgroup": {"zarr_format": 2}}
        else:
            files = {".zgroup": None, "zarr.json": group}
        for name, content in files.items():
            text = None if content is None else json.dumps(content, indent=1).encode() + b"\n"
            self._root.write(prefix + name, text).result()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if exc_type is None:
            self.close()
        else:
            for array in self._arrays.values():
                array.abandon()


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
