"""A writer of one split of a flat-tokens dataset, and of further values for its tokens."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from shardwright_data.checks import check_range
from shardwright_data.flat_tokens.format import (
    FORMAT,
    FORMAT_VERSION,
    MAX_TOKEN_ID,
    Encoded,
    Ids,
    Lengths,
    check_absent,
    delete_split,
    mark_starts,
    open_kvstore,
    read_file,
)
from shardwright_data.flat_tokens.reader import Reader

INNER_CHUNK = 2**13
"""Elements compressed together: what reading one sequence costs."""
TOKENS_SHARD = 2**24
"""Tokens in one file, 64 MiB uncompressed: what the writer holds in memory."""
STARTS_SHARD = 2**22
"""Entries of seq_starts in one file, 32 MiB uncompressed."""
V2_CHUNK = 2**20
"""Elements in one file of zarr v2, which is read and unpacked whole."""

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
BITSHUFFLE = {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle", "typesize": 8, "blocksize": 0}
COMPRESSION = {
    np.uint32: {"name": "zstd", "configuration": {"level": 3}},
    np.uint64: {"name": "blosc", "configuration": BITSHUFFLE},
}
V2_COMPRESSION = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 2, "blocksize": 0}


class GrowingArray:
    """An array of rank 1 that grows by whole files, each written once, and that resumes after a kill.

    It holds up to a file in memory, and the file that is being written.

    Args:
        kvstore: the array's directory.
        dtype: np.uint32 for tokens, np.uint64 for seq_starts.
        zarr_format: 3 or 2.
        resume: what `state` gave, to resume the array; None to begin it.
    """

    def __init__(
        self, kvstore: ts.KvStore, dtype: type, zarr_format: int = 3, resume: tuple[int, np.ndarray] | None = None
    ):
        self._kvstore, self._dtype, self._v2 = kvstore, dtype, zarr_format == 2
        self._shard = V2_CHUNK if self._v2 else TOKENS_SHARD if dtype == np.uint32 else STARTS_SHARD
        written, pending = resume or (0, np.zeros(0, dtype))
        self._pending, self._num_pending = [pending], pending.size
        self._array: ts.TensorStore | None = None
        self._write: ts.WriteFutures | None = None
        self.length = written + pending.size
        if written:
            # Shards after these, if any, will be written again, with the same bytes.
            self._array = self._open(self._shard, open=True).resize(exclusive_max=[written]).result()
        else:
            # What an interrupted writer left must not mix with what comes.
            kvstore.delete_range(ts.KvStore.KeyRange()).result()

    def append(self, values: np.ndarray) -> None:
        """Adds elements. Raises ValueError if an earlier write failed."""
        self._pending.append(values)
        self._num_pending += values.size
        self.length += values.size
        if self._num_pending >= self._shard:
            *whole, rest = np.split(
                np.concatenate(self._pending), range(self._shard, self._num_pending + 1, self._shard)
            )
            for shard in whole:
                self._write_shard(shard)
            self._pending, self._num_pending = [rest.copy()], rest.size

    def state(self) -> tuple[int, np.ndarray]:
        """The number of elements in complete files, and the other elements. Raises ValueError if a write failed."""
        self._wait()
        return self.length - self._num_pending, np.concatenate(self._pending)

    def close(self) -> None:
        """Writes what is left. Raises ValueError if a write failed."""
        if self._num_pending or self._array is None:
            self._write_shard(np.concatenate(self._pending))
        self._wait()

    def abandon(self) -> None:
        """Waits for the write under way: it would land in what another writer puts here."""
        if self._write is not None:
            # Whether it fails does not matter.
            self._write.exception()

    def _write_shard(self, values: np.ndarray) -> None:
        self._wait()
        if self._array is None:
            # The index of a shard has a fixed size, so an array smaller than a shard takes a smaller one.
            chunks = min(self._shard, max(self.length, 1) + INNER_CHUNK - 1) // INNER_CHUNK
            self._array = self._open(chunks * INNER_CHUNK, create=True, shape=[0])
        start = self._array.shape[0]
        self._array = self._array.resize(exclusive_max=[start + values.size], expand_only=True).result()
        self._write = self._array[start:].write(values)

    def _wait(self) -> None:
        if self._write is not None:
            self._write.result()
            self._write = None

    def _open(self, shard: int, **how: Any) -> ts.TensorStore:
        sharding = {
            "chunk_shape": [INNER_CHUNK],
            "codecs": [LITTLE_ENDIAN, COMPRESSION[self._dtype], CRC],
            "index_codecs": [LITTLE_ENDIAN, CRC],
        }
        metadata = {
            "data_type": np.dtype(self._dtype).name,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        if self._v2:
            dtype = np.dtype(self._dtype).newbyteorder("<").str
            metadata = {
                "dtype": dtype,
                "fill_value": 0,
                "chunks": [shard],
                "compressor": V2_COMPRESSION,
                "filters": None,
            }
        spec = {
            "driver": "zarr" if self._v2 else "zarr3",
            "kvstore": self._kvstore.spec().to_json(),
            # Readers take a missing chunk for damage, so chunks of zeros are stored too.
            "store_data_equal_to_fill_value": True,
            "metadata": metadata,
        }
        try:
            return ts.open(spec, **how).result()
        except ValueError as error:
            reason = str(error).partition(" [")[0]
            raise ValueError(f"cannot write the dataset: {reason}. Check the path and its permissions.") from error


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

        def array(name: str, dtype: type) -> GrowingArray:
            state = None if resume is None else (int(resume[f"{name}.written"]), resume[f"{name}.pending"])
            return GrowingArray(self._root / f"{split}/{name}/", dtype, zarr_format, state)

        self._arrays = {
            "encoded_tokens": array("encoded_tokens", np.uint32),
            "seq_starts": array("seq_starts", np.uint64),
        }
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
    array = GrowingArray(kvstore, np.uint32)
    for start in range(0, reader.num_tokens, TOKENS_SHARD):
        array.append(np.asarray(values[start : start + TOKENS_SHARD], np.uint32))
    array.close()
