"""Checkpoints read and written a part at a time with NumPy, by programs that use no devices.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import collections
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from training_io.checkpoint import ANOTHER, commit, directory_of
from training_io.checkpoint_arrays import bounded, overlapping, read_chunk
from training_io.initial_weights import find_checkpoint
from training_io.manifest import CHECKSUM_BYTES, Damaged, SavedArray, array_text, check_json, saved_array
from training_io.stores import STORE_ERRORS, Store, open_store

CHUNK_BYTES = 2**26
"""Largest size of a chunk that is written here. A chunk is the least that can be read: with small ones a process reads
little more than its own part of the weights."""

CACHE_BYTES = 2**33
"""Largest size of the chunks in a cache, which drops the least recently used ones. A chunk can only be read whole, and
those of a run have several layers."""


class _Chunks:
    """Chunks of a checkpoint, with those that were read last in memory."""

    def __init__(self, store: Store, directory: str):
        self.store, self.directory = store, directory
        self._held: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def read(self, array: SavedArray, index: tuple[int, ...]) -> np.ndarray:
        key = array.key(index)
        with self._lock:
            if key not in self._held:
                self._held[key] = read_chunk(self.store, self.directory, array, index)
                self._bytes += self._held[key].nbytes
            self._held.move_to_end(key)
            found = self._held[key]
            while self._bytes > CACHE_BYTES and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return found


class StoredArray:
    """An array of a checkpoint. Indexed by integers from 0, slices of step 1 and `...`, it reads the chunks it needs.

    Raises:
        Damaged: a chunk that is read is missing, or not what was written.
    """

    def __init__(self, array: SavedArray, chunks: _Chunks):
        self._array, self._chunks = array, chunks
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in given:
            at = given.index(Ellipsis)
            given = (*given[:at], *[slice(None)] * (len(self.shape) - len(given) + 1), *given[at + 1 :])
        given = (*given, *[slice(None)] * (len(self.shape) - len(given)))
        for i, size in zip(given, self.shape, strict=True):
            if not isinstance(i, slice) and not 0 <= i < size:
                raise IndexError(f"{self._array.name}: index {i} is outside 0 … {size - 1}.")
        box = bounded([i if isinstance(i, slice) else slice(i, i + 1) for i in given], self.shape)
        try:
            found = np.empty([at.stop - at.start for at in box], self.dtype)
        except (MemoryError, ValueError) as error:
            raise Damaged(f"the array {self._array.name!r} of shape {self.shape} is larger than the memory.") from error
        for chunk, at, source in overlapping(self._array, box):
            try:
                found[at] = self._chunks.read(self._array, chunk)[source]
            except Damaged as error:
                where = f"{self._chunks.store.url}/{self._chunks.directory}"
                raise Damaged(f"{error} The checkpoint {where} is damaged.{ANOTHER}") from error
        return found[tuple(slice(None) if isinstance(i, slice) else 0 for i in given)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)


def _stored(store: Store, directory: str, arrays: Iterable[SavedArray]) -> dict[str, StoredArray]:
    chunks = _Chunks(store, directory)
    return {array.name: StoredArray(array, chunks) for array in arrays}


def open_checkpoint(path: str | os.PathLike, step: int | None = None) -> tuple[int, dict[str, StoredArray], dict]:
    """Step of a checkpoint, its arrays by name, and its metadata.

    Args:
        path: directory or URL of a run, or of a checkpoint in it.
        step: step of the checkpoint; None for the last.

    Raises:
        ValueError: there is no such checkpoint.
        Damaged: it is damaged.
    """
    # Not Checkpointer.latest_step, which would start the devices to find out whether there are other processes.
    checkpoints, found = find_checkpoint(path, step, lambda checkpoints: max(checkpoints.steps(), default=None))
    with checkpoints:
        manifest = checkpoints.manifest(found)
        store, directory = checkpoints.store, directory_of(found)
    arrays = [saved_array(store, directory, name, manifest) for name in manifest["arrays"]]
    return found, _stored(store, directory, arrays), manifest["metadata"]


def write_checkpoint(
    directory: str | os.PathLike,
    step: int,
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    parts: Iterable[tuple[str, Any, np.ndarray]],
    metadata: dict,
    check: Callable[[dict[str, StoredArray]], None] = lambda arrays: None,
) -> Path:
    """Writes a checkpoint with no more than one part of it in memory. Returns its directory.

    Args:
        directory: directory of the checkpoints, as for Checkpointer.
        step: 0 to 9,999,999,999; not saved before.
        arrays: all arrays by name.
        parts: name of an array, index, and values there; together they cover each array once.
        metadata: what json can write, without NaN or infinity.
        check: called with the arrays that were written, by name, before the commit. Nothing is left if it raises.

    Raises:
        ValueError: the step is there already.
        OSError: the checkpoint could not be written. Nothing is left that looks like one.
    """
    store, name = open_store(directory), directory_of(step)
    final = Path(directory) / name
    if final.exists():
        raise ValueError(
            f"cannot save step {step}: {final} is there already. Move it away, or choose another directory."
        )
    check_json(metadata)
    temporary = final.with_name(final.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    saved = [SavedArray(key, x.shape, str(x.dtype), _chunk(x)) for key, x in arrays.items()]
    try:
        stores = {array.name: _create(temporary, array) for array in saved}
        for key, index, values in parts:
            _wait(stores[key][index].write(values), key)
        stores.clear()
        checksums = {array.name: _checksums(temporary, array) for array in saved}
        check(_stored(store, temporary.name, saved))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    commit(store, temporary.name, step, saved, [checksums], metadata)
    return final


def _create(directory: Path, array: SavedArray) -> ts.TensorStore:
    path = directory / array.name
    path.mkdir(parents=True)
    (path / "zarr.json").write_text(array_text(array))
    # Without store_data_equal_to_fill_value a chunk of zeros would not be written, and look like a lost one.
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return _wait(ts.open(spec | {"store_data_equal_to_fill_value": True}, open=True), array.name)


def _wait(future: ts.Future, name: str) -> Any:
    try:
        return future.result()
    except STORE_ERRORS as error:
        raise OSError(f"writing the array {name!r} failed: {error}.") from error


def _checksums(directory: Path, array: SavedArray) -> dict[int, int]:
    """The checksums with which the files of the chunks end."""

    def end(index: tuple[int, ...]) -> int:
        with open(directory / array.key(index), "rb") as file:
            file.seek(-CHECKSUM_BYTES, os.SEEK_END)
            return int.from_bytes(file.read(), "little")

    return {array.number(index): end(index) for index in array.chunks()}


def _chunk(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Shape of the chunks: whole in the last dims, 1 in as many first dims as keep it within CHUNK_BYTES.

    The first of more than two dims is the dim of the layers, which are written one at a time.
    """
    chunk, left = [], CHUNK_BYTES // array.dtype.itemsize
    for size in reversed(array.shape):
        chunk.append(max(1, min(size, left)))
        left //= chunk[-1]
    if len(chunk) > 2:
        chunk[-1] = 1
    return tuple(reversed(chunk))
