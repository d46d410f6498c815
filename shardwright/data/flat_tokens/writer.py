"""Writes splits of a flat-tokens dataset, resumably, and further arrays with a value per token.

While a dataset is being written, `unfinished.json` in its directory holds the settings, and
`unfinished_<split>.npz` the state of the current split. At the end `finished.json` with the
settings replaces them, so that repeating the command does nothing.
"""

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Integer, UInt32

from shardwright.data.flat_tokens.format import (
    IDENTITY,
    clear_split,
    open_kvstore,
    opening_context,
    read_file,
)
from shardwright.data.flat_tokens.reader import Reader
from shardwright.data.untrusted import parse_object, refused

# Dims of the same name agree within a call.
Ids = Integer[np.ndarray, "tokens"]
Encoded = UInt32[np.ndarray, "tokens"]
Lengths = Integer[np.ndarray, "documents"]

MAX_TOKEN_ID = 2**31 - 1
"""The largest id that leaves room for the start bit in a uint32."""
INNER_CHUNK = 2**13
"""Elements compressed together: the least that a read has to decompress."""
TOKENS_SHARD = 2**24
"""Tokens per file, 64 MiB uncompressed, which the writer holds in memory."""
STARTS_SHARD = 2**22
"""Entries of seq_starts per file, 32 MiB uncompressed."""
STATE_BYTES = 2**32
"""Most bytes of a file that `Writer.save` wrote."""

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
BITSHUFFLE = {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle", "typesize": 8, "blocksize": 0}
COMPRESSION = {
    np.uint32: {"name": "zstd", "configuration": {"level": 3}},
    np.uint64: {"name": "blosc", "configuration": BITSHUFFLE},
}


def mark_starts(ids: Ids, lengths: Lengths, where: str = "flat-tokens") -> Encoded:
    """Encodes whole documents for storage: 2·id, plus 1 where a document starts.

    Args:
        ids: of all documents, concatenated.
        lengths: number of tokens in each document.
        where: path of the documents, for messages.

    Raises:
        ValueError: a document is empty, or the lengths do not add up to the tokens.
    """
    if (ids.size and not lengths.size) or (lengths < 1).any():
        raise ValueError(
            f"{where}: a document is empty, so no token can mark its start. Remove it."
        )
    if lengths.sum() != ids.size:
        raise ValueError(
            f"{where}: the lengths of documents add up to {lengths.sum()}, but there are "
            f"{ids.size} ids."
        )
    encoded = ids.astype(np.uint32) << np.uint32(1)
    encoded[np.cumsum(lengths) - lengths] |= np.uint32(1)
    return encoded


class GrowingArray:
    """Appends to an array of rank 1 by whole files, each written once. Can resume after a kill.

    Holds up to two files in memory: the next one, and the one being written.

    Args:
        kvstore: the array's directory.
        dtype: np.uint32 for tokens, np.uint64 for seq_starts.
        written: number of elements in whole files to resume after; 0 for a new array.
    """

    def __init__(self, kvstore: ts.KvStore, dtype: type, written: int = 0):
        self._kvstore, self._dtype = kvstore, dtype
        self._shard = TOKENS_SHARD if dtype == np.uint32 else STARTS_SHARD
        self._buffer = np.empty(self._shard, dtype)
        self._num_pending = 0
        self.written = written
        """Number of elements in whole files."""
        self._array: ts.TensorStore | None = None
        self._write: ts.WriteFutures | None = None
        if written:
            # Later shards, if any, will be rewritten with the same bytes.
            self._array = (
                self._open(self._shard, open=True).resize(exclusive_max=[written]).result()
            )
        else:
            # Remove what an interrupted writer left.
            kvstore.delete_range(ts.KvStore.KeyRange()).result()

    @property
    def pending(self) -> np.ndarray:
        """Elements that are not in a file yet."""
        return self._buffer[: self._num_pending]

    @property
    def length(self) -> int:
        """Number of elements appended."""
        return self.written + self._num_pending

    def append(self, values: np.ndarray) -> None:
        """Adds elements. Raises ValueError if an earlier write failed."""
        while values.size:
            part, values = np.split(values, [self._shard - self._num_pending])
            self._buffer[self._num_pending : self._num_pending + part.size] = part
            self._num_pending += part.size
            if self._num_pending == self._shard:
                self._write_file()

    def wait(self) -> None:
        """Waits for the current write. Raises ValueError if it failed."""
        if self._write is not None:
            self._write.result()
            self._write = None

    def close(self) -> None:
        """Writes the pending elements. Raises ValueError if a write failed."""
        if self._num_pending or self._array is None:
            self._write_file()
        self.wait()

    def _write_file(self) -> None:
        self.wait()
        values, end = self.pending, self.length
        if self._array is None:
            # The index of a shard has a fixed size, so an array smaller than a shard gets a smaller
            # shard.
            chunks = min(self._shard, max(end, 1) + INNER_CHUNK - 1) // INNER_CHUNK
            self._array = self._open(chunks * INNER_CHUNK, create=True, shape=[0])
        self._array = self._array.resize(exclusive_max=[end], expand_only=True).result()
        self._write = self._array[self.written :].write(values)
        self._buffer = np.empty(self._shard, self._dtype)
        self.written = end
        self._num_pending = 0

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
        spec = {
            "driver": "zarr3",
            "kvstore": self._kvstore.spec().to_json(),
            # Readers treat a missing chunk as damage, so store chunks of zeros too.
            "store_data_equal_to_fill_value": True,
            "metadata": metadata,
        }
        with refused("cannot write the dataset", "Check the path and its permissions."):
            return ts.open(spec, **how).result()


class Writer(contextlib.AbstractContextManager):
    """Writes one split of a dataset, in zarr v3.

    Readers see the split only after `close`, which writes the group's metadata last, after all
    other writes succeeded. As a context manager it closes on a clean exit, and leaves the split
    incomplete on an exception.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        resume: True to resume from the last `save`, if any; the files become the same. Otherwise
            replaces an incomplete split.

    Raises:
        ValueError: the split exists already.
    """

    def __init__(self, filespec: str, split: str, *, resume: bool = False):
        self.path = f"{filespec.rstrip('/')}/{split}"
        self._root = open_kvstore(filespec)
        self._split = split
        self._state = state_of(split)
        clear_split(filespec, split, overwrite=False)
        content = read_file(self._root, self._state, STATE_BYTES) if resume else None
        saved = {} if content is None else np.load(io.BytesIO(content))
        self._arrays: dict[str, GrowingArray] = {}
        for name, dtype in (("encoded_tokens", np.uint32), ("seq_starts", np.uint64)):
            array = GrowingArray(
                self._root / f"{split}/{name}/", dtype, int(saved.get(f"{name}.written", 0))
            )
            array.append(saved.get(f"{name}.pending", np.zeros(0, dtype)))
            self._arrays[name] = array
        self.num_documents = self._arrays["seq_starts"].length
        """Documents appended so far."""
        self.place: Any = json.loads(str(saved.get("done", "null")))
        """The `place` of the `save` from which it resumes; else None."""
        self._max_token_id = int(saved.get("max_token_id", 0))
        self.attributes: dict[str, Any] = {}
        """Additional attributes to write, JSON values by name."""

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return self._arrays["encoded_tokens"].length

    def append(self, ids: Ids, lengths: Lengths) -> None:
        """Adds whole documents, given by their concatenated token ids and the number of tokens of
        each.

        Raises:
            ValueError: an id is outside [0, MAX_TOKEN_ID], a document is empty, the lengths do not
                add up to the tokens, or a write failed.
        """
        if ids.size and ((low := int(ids.min())) < 0 or (high := int(ids.max())) > MAX_TOKEN_ID):
            raise ValueError(
                f"{self.path}: token id {low if low < 0 else high} is outside [0, {MAX_TOKEN_ID}]."
            )
        self.append_encoded(mark_starts(ids, lengths, self.path))

    def append_encoded(self, encoded: Encoded) -> None:
        """Adds tokens encoded by `mark_starts`.

        Those before the first start continue the last document.

        Raises ValueError if a write failed.
        """
        if not encoded.size:
            return
        starts = np.flatnonzero(encoded & np.uint32(1)).astype(np.uint64)
        self._arrays["seq_starts"].append(starts + np.uint64(self.num_tokens))
        self._arrays["encoded_tokens"].append(encoded)
        self.num_documents += starts.size
        self._max_token_id = max(self._max_token_id, int(encoded.max()) >> 1)

    def append_split(self, reader: Reader) -> None:
        """Adds all documents of a split.

        Raises ValueError if it is damaged, or if its tokens contradict its sizes.
        """
        before, size = self.num_documents, reader.num_tokens
        for start in range(0, size, TOKENS_SHARD):
            encoded = reader.read(np.array([start]), np.array([min(TOKENS_SHARD, size - start)]))
            if int(encoded.max()) >> 1 > reader.max_token_id or not (start or encoded[0] & 1):
                raise ValueError(
                    f"{reader.path} is damaged: tokens from {start} on contradict its attributes."
                )
            self.append_encoded(encoded)
        if (found := self.num_documents - before) != reader.num_documents:
            raise ValueError(
                f"{reader.path} is damaged: it has {found} documents, not {reader.num_documents}."
            )

    def save(self, place: object = None) -> None:
        """Writes `unfinished_<split>.npz` next to the split, from which another writer can resume
        after a kill.

        It holds the pending elements and `place`, a JSON value. `close` deletes it. Raises
        ValueError if a write failed.
        """
        state: dict[str, Any] = {
            "max_token_id": np.array(self._max_token_id),
            "done": np.array(json.dumps(place)),
        }
        for name, array in self._arrays.items():
            array.wait()
            state |= {f"{name}.written": np.array(array.written), f"{name}.pending": array.pending}
        content = io.BytesIO()
        np.savez(content, **state)
        self._root.write(self._state, content.getvalue()).result()

    def close(self) -> None:
        """Writes the pending elements, then makes the split visible.

        Raises ValueError if a write failed; the split stays incomplete.
        """
        self._arrays["seq_starts"].append(np.array([self.num_tokens], np.uint64))
        for array in self._arrays.values():
            array.close()
        sizes = {"num_tokens": self.num_tokens, "num_documents": self.num_documents}
        own = IDENTITY | {"max_token_id": self._max_token_id} | sizes
        self._root.write(".zgroup", None).result()  # of an earlier dataset in zarr v2
        for prefix, attributes in (("", {}), (f"{self._split}/", self.attributes | own)):
            group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            self._root.write(
                f"{prefix}zarr.json", json.dumps(group, indent=1).encode() + b"\n"
            ).result()
        self._root.write(self._state, None).result()

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if exc_type is None:
            self.close()
            return
        for array in self._arrays.values():
            # Otherwise the current write could land in what another writer puts here. It may fail.
            with contextlib.suppress(ValueError):
                array.wait()


def state_of(split: str) -> str:
    """Returns the name of the file from which a split resumes."""
    return f"unfinished_{split}.npz"


def unfinished_settings(out: str) -> dict[str, Any] | None:
    """Reads the settings with which an unfinished dataset was started; None if there is none."""
    content = read_file(open_kvstore(out, opening_context()), "unfinished.json")
    return (
        None
        if content is None
        else parse_object(f"{out}/unfinished.json", content, remedy="Delete it.")
    )


@contextlib.contextmanager
def work_on(
    out: str, settings: Mapping[str, Any], splits: list[str], overwrite: bool
) -> Iterator[bool]:
    """Context for writing a dataset. Gives True if it resumes earlier work.

    Locks a local dataset if its file system has locks. A clean exit finishes the dataset and
    deletes the settings and what `Writer.save` wrote. Finished work also resumes, with nothing left
    to do.

    Args:
        out: directory of the dataset; a local path or a URL that tensorstore knows.
        settings: JSON values by name, all that the result depends on.
        splits: names of the splits that will be written.
        overwrite: True to replace existing splits, and to restart work that was started with other
            settings.

    Raises:
        ValueError: another process writes it, a split exists already, or the work was started with
            other settings.
    """
    settings = json.loads(json.dumps(settings))
    root = open_kvstore(out)

    def clear() -> None:
        root.delete_range(ts.KvStore.KeyRange("unfinished", "unfinishee")).result()

    finished = json.dumps(settings, indent=1).encode()
    with _locked(out):
        before = unfinished_settings(out)
        if before is None and not overwrite and read_file(root, "finished.json") == finished:
            before = settings  # killed after the end, or the command is repeated
        if before not in (None, settings) and not overwrite:
            name = next(
                name for name in [*settings, *before] if before.get(name) != settings.get(name)
            )
            raise ValueError(
                f"{out} is unfinished and was started with other settings: {name} was "
                f"{before.get(name)}, is {settings.get(name)}. Give the same to resume, "
                f"overwrite=true to restart, or another path."
            )
        if before != settings:
            for split in splits:
                clear_split(out, split, overwrite)
            clear()
            root.write("unfinished.json", json.dumps(settings, indent=1).encode()).result()
        yield before == settings
        root.write("finished.json", finished).result()
        clear()


@contextlib.contextmanager
def _locked(out: str) -> Iterator[None]:
    if "://" in out:
        yield
        return
    os.makedirs(out, exist_ok=True)
    file = os.open(f"{out}/.lock", os.O_RDWR | os.O_CREAT, 0o666)  # NFS cannot lock directories
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(f"Another process is writing {out}. Wait for it or end it.") from e
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(file)


def add_input(filespec: str, split: str, name: str, values: np.ndarray) -> None:
    """Adds the array `input_<name>` to a complete split, in zarr v3.

    If the call is interrupted, the array is shorter than the tokens or lacks its last file, and
    readers reject it.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        name: of the input; letters, digits, _ and -.
        values: [num_tokens] or, with k of each token, [num_tokens, k]; uint32, a smaller unsigned
            type, or float32, whose bits are stored. Read in parts, so it may be a np.memmap.

    Raises:
        ValueError: the split is missing or in zarr v2, has such an array already, `values` have the
            wrong length or type, or a write failed.
    """
    reader = Reader(filespec, split)
    where = f"{reader.path}/input_{name}"
    kvstore = open_kvstore(filespec) / f"{reader.input_key(name)}/"
    is_float = values.dtype == np.float32
    fits = values.shape[:1] == (reader.num_tokens,) and values.ndim <= 2 and values.size
    if not fits or not (is_float or np.can_cast(values.dtype, np.uint32)):
        raise ValueError(
            f"{where}: the values are {values.dtype}{list(values.shape)}, not "
            f"uint32[{reader.num_tokens}] or float32, one or several per token. Give "
            f"values.astype(np.uint32) or np.float32."
        )
    if read_file(kvstore, "zarr.json") is not None:
        raise ValueError(
            f"{where} exists already, maybe incomplete. Delete it, or choose another name."
        )
    array = GrowingArray(kvstore, np.uint32)
    step = max(1, TOKENS_SHARD * reader.num_tokens // values.size)
    for start in range(0, reader.num_tokens, step):
        part = np.ascontiguousarray(values[start : start + step]).reshape(-1)
        array.append(part.view(np.uint32) if is_float else part.astype(np.uint32))
    array.close()
