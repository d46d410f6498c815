"""A writer of one split of a flat-tokens dataset, of a dataset that resumes after a kill, and of further values.

While a dataset is being written, `unfinished.json` beside it holds the settings, from before the first token until all
splits are written. `unfinished_<split>.npz` holds the state of the split under way. `finished.json` takes their
place: the settings, by which the same command finds nothing left to do.
"""

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Integer, UInt32

from shardwright_data.flat_tokens.format import IDENTITY, clear_split, open_kvstore, opening_context, read_file
from shardwright_data.flat_tokens.reader import Reader
from shardwright_data.untrusted import parse_object, refused

# Dims of the same name agree within a call.
Ids = Integer[np.ndarray, "tokens"]
Encoded = UInt32[np.ndarray, "tokens"]
Lengths = Integer[np.ndarray, "documents"]

MAX_TOKEN_ID = 2**31 - 1
"""The largest id that leaves room for the start bit in a uint32."""
INNER_CHUNK = 2**13
"""Elements compressed together: what reading one sequence costs."""
TOKENS_SHARD = 2**24
"""Tokens in one file, 64 MiB uncompressed: what the writer holds in memory."""
STARTS_SHARD = 2**22
"""Entries of seq_starts in one file, 32 MiB uncompressed."""
STATE_BYTES = 2**32
"""Largest size of a file that `Writer.save` wrote."""

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
BITSHUFFLE = {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle", "typesize": 8, "blocksize": 0}
COMPRESSION = {
    np.uint32: {"name": "zstd", "configuration": {"level": 3}},
    np.uint64: {"name": "blosc", "configuration": BITSHUFFLE},
}


def mark_starts(ids: Ids, lengths: Lengths, where: str = "flat-tokens") -> Encoded:
    """Whole documents as they are stored: 2·id, plus 1 where a document starts.

    Args:
        ids: of one document after the other.
        lengths: number of tokens in each document.
        where: place of the documents, for messages.

    Raises:
        ValueError: a document is empty, or the lengths do not add up to the tokens.
    """
    if (ids.size and not lengths.size) or (lengths < 1).any():
        raise ValueError(f"{where}: a document is empty, and has no token to carry its start. Leave it out.")
    if lengths.sum() != ids.size:
        raise ValueError(f"{where}: documents of {lengths.sum()} tokens in all, but {ids.size} tokens given.")
    encoded = ids.astype(np.uint32) << np.uint32(1)
    encoded[np.cumsum(lengths) - lengths] |= np.uint32(1)
    return encoded


class GrowingArray:
    """An array of rank 1 that grows by whole files, each written once, and that resumes after a kill.

    It holds up to a file in memory, and the file that is being written.

    Args:
        kvstore: the array's directory.
        dtype: np.uint32 for tokens, np.uint64 for seq_starts.
        written: number of elements in the whole files from which it resumes; 0 to begin it.
    """

    def __init__(self, kvstore: ts.KvStore, dtype: type, written: int = 0):
        self._kvstore, self._dtype = kvstore, dtype
        self._shard = TOKENS_SHARD if dtype == np.uint32 else STARTS_SHARD
        self._buffer, self._num_pending = np.empty(self._shard, dtype), 0
        self.written = written
        """Number of elements in whole files."""
        self._array: ts.TensorStore | None = None
        self._write: ts.WriteFutures | None = None
        if written:
            # Shards after these, if any, will be written again, with the same bytes.
            self._array = self._open(self._shard, open=True).resize(exclusive_max=[written]).result()
        else:
            # What an interrupted writer left must not mix with what comes.
            kvstore.delete_range(ts.KvStore.KeyRange()).result()

    @property
    def pending(self) -> np.ndarray:
        """The elements that are in no file yet."""
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
        """Waits for the write under way. Raises ValueError if it failed."""
        if self._write is not None:
            self._write.result()
            self._write = None

    def close(self) -> None:
        """Writes what is left. Raises ValueError if a write failed."""
        if self._num_pending or self._array is None:
            self._write_file()
        self.wait()

    def _write_file(self) -> None:
        self.wait()
        values, end = self.pending, self.length
        if self._array is None:
            # The index of a shard has a fixed size, so an array smaller than a shard takes a smaller one.
            chunks = min(self._shard, max(end, 1) + INNER_CHUNK - 1) // INNER_CHUNK
            self._array = self._open(chunks * INNER_CHUNK, create=True, shape=[0])
        self._array = self._array.resize(exclusive_max=[end], expand_only=True).result()
        self._write = self._array[self.written :].write(values)
        self._buffer = np.empty(self._shard, self._dtype)
        self.written, self._num_pending = end, 0

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
            # Readers take a missing chunk for damage, so chunks of zeros are stored too.
            "store_data_equal_to_fill_value": True,
            "metadata": metadata,
        }
        with refused("cannot write the dataset", "Check the path and its permissions."):
            return ts.open(spec, **how).result()


class Writer(contextlib.AbstractContextManager):
    """Writes one split of a dataset, in zarr v3.

    Readers see the split only after `close`: the group's metadata is written last, when each write before it has been
    checked. As a context manager it closes on a clean exit, and leaves the split incomplete on an exception.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        resume: go on from what `save` wrote, if it did: the files become what they would have been. An incomplete split
            is replaced otherwise.

    Raises:
        ValueError: the split is already there.
    """

    def __init__(self, filespec: str, split: str, *, resume: bool = False):
        self.path = f"{filespec.rstrip('/')}/{split}"
        self._root = open_kvstore(filespec)
        self._split, self._state = split, state_of(split)
        clear_split(filespec, split, overwrite=False)
        content = read_file(self._root, self._state, STATE_BYTES) if resume else None
        saved = {} if content is None else np.load(io.BytesIO(content))
        self._arrays: dict[str, GrowingArray] = {}
        for name, dtype in (("encoded_tokens", np.uint32), ("seq_starts", np.uint64)):
            array = GrowingArray(self._root / f"{split}/{name}/", dtype, int(saved.get(f"{name}.written", 0)))
            array.append(saved.get(f"{name}.pending", np.zeros(0, dtype)))
            self._arrays[name] = array
        self.num_documents = self._arrays["seq_starts"].length
        """Documents appended so far."""
        self.place: Any = json.loads(str(saved.get("done", "null")))
        """What `save` was given, where it resumes; else None."""
        self._max_token_id = int(saved.get("max_token_id", 0))
        self.attributes: dict[str, Any] = {}
        """JSON values to be written with the format's own attributes, by name."""

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return self._arrays["encoded_tokens"].length

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
        """Adds tokens as `mark_starts` gives them. Those before the first mark continue the last document.

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
        """Adds all documents of a split. Raises ValueError if it is damaged, also where only its tokens show that."""
        before, size = self.num_documents, reader.num_tokens
        for start in range(0, size, TOKENS_SHARD):
            encoded = reader.read(np.array([start]), np.array([min(TOKENS_SHARD, size - start)]))
            if int(encoded.max()) >> 1 > reader.max_token_id or not (start or encoded[0] & 1):
                raise ValueError(f"{reader.path} is damaged: token {start} and those after it are not what it says.")
            self.append_encoded(encoded)
        if (found := self.num_documents - before) != reader.num_documents:
            raise ValueError(f"{reader.path} is damaged: it has {found} documents, not {reader.num_documents}.")

    def save(self, place: object = None) -> None:
        """Writes `unfinished_<split>.npz` beside the split, so that after a kill another writer can resume from here.

        It holds what is in no file of the arrays yet, and `place`, a JSON value. `close` deletes it. Raises ValueError
        if a write failed.
        """
        state: dict[str, Any] = {"max_token_id": np.array(self._max_token_id), "done": np.array(json.dumps(place))}
        for name, array in self._arrays.items():
            array.wait()
            state |= {f"{name}.written": np.array(array.written), f"{name}.pending": array.pending}
        content = io.BytesIO()
        np.savez(content, **state)
        self._root.write(self._state, content.getvalue()).result()

    def close(self) -> None:
        """Writes what is left, then makes the split visible.

        Raises ValueError if a write failed; the split stays incomplete.
        """
        self._arrays["seq_starts"].append(np.array([self.num_tokens], np.uint64))
        for array in self._arrays.values():
            array.close()
        sizes = {"num_tokens": self.num_tokens, "num_documents": self.num_documents}
        own = IDENTITY | {"max_token_id": self._max_token_id} | sizes
        self._root.write(".zgroup", None).result()  # of a dataset in zarr v2 that was here
        for prefix, attributes in (("", {}), (f"{self._split}/", self.attributes | own)):
            group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            self._root.write(f"{prefix}zarr.json", json.dumps(group, indent=1).encode() + b"\n").result()
        self._root.write(self._state, None).result()

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if exc_type is None:
            self.close()
            return
        for array in self._arrays.values():
            # The write under way would land in what another writer puts here. That it fails does not matter.
            with contextlib.suppress(ValueError):
                array.wait()


def state_of(split: str) -> str:
    """Name of the file from which a split resumes."""
    return f"unfinished_{split}.npz"


def unfinished_settings(out: str) -> dict[str, Any] | None:
    """The settings of the work on a dataset that was interrupted, None if there was none."""
    content = read_file(open_kvstore(out, opening_context()), "unfinished.json")
    return None if content is None else parse_object(f"{out}/unfinished.json", content, remedy="Delete it.")


@contextlib.contextmanager
def work_on(
    out: str, settings: Mapping[str, Any], splits: list[str], overwrite: bool, free: Sequence[str] = ()
) -> Iterator[bool]:
    """Context of the work on a dataset, which begins or resumes; gives whether it resumes.

    No other process may work on a local dataset then, if its file system has locks. At a clean end the dataset is
    finished: the settings, and what `Writer.save` wrote, are deleted. Work that is finished already resumes too, with
    nothing left to do.

    Args:
        out: directory of the dataset; a local path or a URL that tensorstore knows.
        settings: JSON values by name, all that the result depends on.
        splits: names of the splits that will be written.
        overwrite: replace splits that are there, and begin again what was begun with other settings.
        free: names of settings that say how to work, and not what the result is.

    Raises:
        ValueError: another process works on it, a split is already there, or the work was begun with other settings.
    """
    settings, root = json.loads(json.dumps(settings)), open_kvstore(out)
    clear = lambda: root.delete_range(ts.KvStore.KeyRange("unfinished", "unfinishee")).result()
    finished = json.dumps({name: value for name, value in settings.items() if name not in free}, indent=1).encode()
    with _locked(out):
        before = unfinished_settings(out)
        if before is None and not overwrite and read_file(root, "finished.json") == finished:
            before = settings  # a kill came after the end, or the command is given again
        if before not in (None, settings) and not overwrite:
            name = next(name for name in [*settings, *before] if before.get(name) != settings.get(name))
            raise ValueError(
                f"{out} is unfinished, and was begun with other settings: {name} was {before.get(name)}, is "
                f"{settings.get(name)}. Give the same to resume, overwrite=true to begin again, or another path."
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
    file = os.open(f"{out}/.lock", os.O_RDWR | os.O_CREAT, 0o666)  # NFS has no locks of directories
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(f"Another process is writing {out}. Wait for it, or end it.") from e
        except OSError:
            pass  # it has no locks
        yield
    finally:
        os.close(file)


def add_input(filespec: str, split: str, name: str, values: np.ndarray) -> None:
    """Adds the array `input_<name>` to a complete split, in zarr v3.

    If the call is interrupted, the array is shorter than the tokens or lacks its last file. Readers refuse it.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        name: of the input; letters, digits, _ and -.
        values: uint32[num_tokens], or of a smaller unsigned type: one for each token, in their order. It is read a
            part at a time, so it may be a np.memmap.

    Raises:
        ValueError: the split is missing or in zarr v2, it has such an array already, `values` have another length or
            type, or a write failed.
    """
    reader = Reader(filespec, split)
    where = f"{reader.path}/input_{name}"
    kvstore = open_kvstore(filespec) / f"{reader.input_key(name)}/"
    if values.shape != (reader.num_tokens,) or not np.can_cast(values.dtype, np.uint32):
        raise ValueError(
            f"{where}: the values are {values.dtype}{list(values.shape)}, not uint32[{reader.num_tokens}], one for "
            "each token. Give values.astype(np.uint32), or of numbers in float32 their bits, values.view(np.uint32)."
        )
    if read_file(kvstore, "zarr.json") is not None:
        raise ValueError(f"{where} is already there, or was begun. Delete it, or choose another name.")
    array = GrowingArray(kvstore, np.uint32)
    for start in range(0, reader.num_tokens, TOKENS_SHARD):
        array.append(np.asarray(values[start : start + TOKENS_SHARD], np.uint32))
    array.close()
