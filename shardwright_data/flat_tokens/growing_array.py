"""A one-dimensional zarr array that grows by whole shards, each written once, and that resumes after a kill."""

from typing import Any

import numpy as np
import tensorstore as ts

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
BLOSC = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 2, "blocksize": 0}


class GrowingArray:
    """Holds up to a shard in memory, and the shard that is being written.

    Args:
        kvstore: the array's directory.
        dtype: of its elements.
        shard: elements in one file, a multiple of `inner_chunk`. An array with fewer has one smaller file.
        inner_chunk: elements compressed together in zarr v3.
        codecs: zarr v3's, as JSON; None for zarr v2, whose files are compressed whole, by BLOSC.
        resume: what `state` gave, to resume the array; None to begin it.
    """

    def __init__(
        self,
        kvstore: ts.KvStore,
        dtype: np.dtype,
        shard: int,
        inner_chunk: int,
        codecs: list[dict[str, Any]] | None,
        resume: tuple[int, np.ndarray] | None = None,
    ):
        self._kvstore, self._dtype, self._shard = kvstore, dtype, shard
        self._inner_chunk, self._codecs = inner_chunk, codecs
        written, pending = resume or (0, np.zeros(0, dtype))
        self._pending, self._num_pending = [pending], pending.size
        self._array: ts.TensorStore | None = None
        self._write: ts.WriteFutures | None = None
        self.length = written + pending.size
        if written:
            # Shards after these, if any, will be written again, with the same bytes.
            self._array = self._open(shard, open=True).resize(exclusive_max=[written]).result()
        else:
            # What an interrupted writer left must not mix with what comes.
            kvstore.delete_range(ts.KvStore.KeyRange()).result()

    def append(self, values: np.ndarray) -> None:
        """Adds elements. Raises ValueError if an earlier write failed."""
        self._pending.append(values)
        self._num_pending += values.size
        self.length += values.size
        if self._num_pending >= self._shard:
            pending = np.concatenate(self._pending)
            whole = pending.size // self._shard * self._shard
            for start in range(0, whole, self._shard):
                self._write_shard(pending[start : start + self._shard])
            self._pending = [pending[whole:].copy()]
            self._num_pending = pending.size - whole

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
            chunks = min(self._shard, max(self.length, 1) + self._inner_chunk - 1) // self._inner_chunk
            self._array = self._open(chunks * self._inner_chunk, create=True, shape=[0])
        start = self._array.shape[0]
        self._array = self._array.resize(exclusive_max=[start + values.size], expand_only=True).result()
        self._write = self._array[start:].write(values)

    def _wait(self) -> None:
        if self._write is not None:
            self._write.result()
            self._write = None

    def _open(self, shard: int, **how: Any) -> ts.TensorStore:
        sharding = {
            "chunk_shape": [self._inner_chunk],
            "codecs": self._codecs,
            "index_codecs": [LITTLE_ENDIAN, CRC],
        }
        metadata = {
            "data_type": self._dtype.name,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        if self._codecs is None:
            dtype = self._dtype.newbyteorder("<").str
            metadata = {"dtype": dtype, "fill_value": 0, "chunks": [shard], "compressor": BLOSC, "filters": None}
        spec = {
            "driver": "zarr" if self._codecs is None else "zarr3",
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
