"""Checkpoints read and written with NumPy, a part at a time, by a program that has no devices.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from training_io.checkpoint import commit, manifest_text
from training_io.checkpoint_arrays import STORE_ERRORS, HostArray, array_spec, create_spec
from training_io.initial_weights import find_checkpoint

CHUNK_BYTES = 2**26
"""Of a chunk at most, where one is written here: the least that can be read, so that a process reads little more than
its own part of the weights."""

CACHE_BYTES = 2**33
"""Of layers kept at most, where chunks hold several; more only if a single array has more."""


class Blocks:
    """Layers that were read together, since a chunk can only be read whole; the least recently used go first."""

    def __init__(self):
        self._blocks: dict[tuple[str, int], np.ndarray] = {}

    def get(self, key: tuple[str, int], read: Callable[[], np.ndarray]) -> np.ndarray:
        block = self._blocks.pop(key, None)
        block = read() if block is None else block
        while self._blocks and block.nbytes + sum(other.nbytes for other in self._blocks.values()) > CACHE_BYTES:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[key] = block
        return block


class StoredArray:
    """An array of a checkpoint: indexed like a NumPy array, of which it then reads the chunks it needs.

    Raises:
        OSError: when indexed, if a chunk is missing or damaged.
    """

    def __init__(self, path: Path, name: str, blocks: Blocks):
        self._name, self._path, self._blocks = name, path, blocks
        try:
            self._store = ts.open(
                array_spec(path / name) | {"fill_missing_data_reads": False}, open=True, read=True
            ).result()
        except STORE_ERRORS as error:
            raise self._damage(error) from error
        self.shape, self.dtype = tuple(self._store.shape), self._store.dtype.numpy_dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        together = self._store.chunk_layout.read_chunk.shape[0] if self.shape else 1
        if not isinstance(index, int) or together == 1:
            return self._read(index)
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"{self._name}: index {index} is outside 0 … {self.shape[0] - 1}.")
        block, start = index // together, index // together * together
        stop = min(start + together, self.shape[0])
        return self._blocks.get((self._name, block), lambda: self._read(slice(start, stop)))[index - start]

    def _read(self, index: Any) -> np.ndarray:
        try:
            return self._store[index].read().result()
        except STORE_ERRORS as error:
            raise self._damage(error) from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _damage(self, error: Exception) -> OSError:
        return OSError(
            f"cannot read the array {self._name!r}: {error}. The checkpoint {self._path} is damaged; take another "
            "step, or copy it again."
        )


def open_checkpoint(path: str | os.PathLike, step: int | None = None) -> tuple[int, dict[str, StoredArray], dict]:
    """The step of a checkpoint, its arrays by name, and its metadata.

    Args:
        path: a run's directory, or a checkpoint in it.
        step: which checkpoint of the run; None for the last.

    Raises:
        ValueError: there is no such checkpoint.
        OSError: it is damaged.
    """
    # Checkpointer.latest_step would start the devices, to ask whether there are other processes.
    checkpoints, found = find_checkpoint(path, step, lambda checkpoints: max(checkpoints.steps(), default=None))
    with checkpoints:
        manifest = checkpoints.manifest(found)
        directory = checkpoints.directory / f"{found:010}"
    blocks = Blocks()
    return found, {name: StoredArray(directory, name, blocks) for name in manifest["arrays"]}, manifest["metadata"]


def write_checkpoint(
    directory: str | os.PathLike,
    step: int,
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    parts: Iterable[tuple[str, Any, np.ndarray]],
    metadata: dict,
    check: Callable[[dict[str, StoredArray]], None] = lambda arrays: None,
) -> Path:
    """Writes a checkpoint part by part, with no more than one of them in memory. Returns its directory.

    Args:
        directory: that of the checkpoints, as for Checkpointer.
        step: 0 to 9,999,999,999; not saved before.
        arrays: all arrays by name.
        parts: name, index, and the values there; together they cover each array once.
        metadata: what json can write, without NaN or infinity.
        check: is called with what was written, by name, before it is a checkpoint. What it raises leaves nothing.

    Raises:
        ValueError: the step is there already.
        OSError: it could not be written; nothing is left that looks like a checkpoint.
    """
    final = Path(directory) / f"{step:010}"
    if final.exists():
        raise ValueError(
            f"cannot save step {step}: {final} is there already. Move it away, or choose another directory."
        )
    manifest = manifest_text(step, arrays, metadata)
    temporary = final.with_name(final.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    stores = {}
    for name, array in arrays.items():
        host = HostArray(name, array.shape, str(array.dtype), _chunk(array), [])
        try:
            stores[name] = ts.open(create_spec(temporary / name, host), open=True, create=True).result()
        except STORE_ERRORS as error:
            raise OSError(f"creating the array {name!r} in {temporary} failed: {error}.") from error
    for name, index, values in parts:
        try:
            stores[name][index].write(values).result()
        except STORE_ERRORS as error:
            raise OSError(f"writing the array {name!r} in {temporary} failed: {error}.") from error
    stores.clear()
    blocks = Blocks()
    try:
        check({name: StoredArray(temporary, name, blocks) for name in arrays})
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    commit(temporary, final, list(arrays), manifest)
    return final


def _chunk(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Whole in the last dims and 1 in the first ones, as many as it takes for a chunk of CHUNK_BYTES at most.

    In an array of more than two dims the first is that of layers, which are written one at a time.
    """
    chunk, left = [], CHUNK_BYTES // array.dtype.itemsize
    for size in reversed(array.shape):
        chunk.append(max(1, min(size, left)))
        left //= chunk[-1]
    if len(chunk) > 2:
        chunk[-1] = 1
    return tuple(reversed(chunk))
