"""Checkpoints read and written a part at a time with NumPy, by programs that use no devices."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.run.checkpoint import find_checkpoint
from shardwright.run.checkpoint_arrays import chunk_reads, chunks_of, write_arrays
from shardwright.run.manifest import SavedArray, check_json, commit, directory_of, saved_arrays, with_checksums
from shardwright.run.stores import MANIFEST, Store, in_parallel

CHUNK_BYTES = 2**26
"""Largest size of a chunk that is written here. A chunk is the least that can be read: with small ones a process reads
little more than its own part of the weights."""
KEPT = 4
"""Groups of layers that stay in memory for whoever reads the next one: of weights that are one tensor elsewhere."""


class StoredArray:
    """An array of a checkpoint, read when it is indexed: by a number that layer, otherwise all of it.

    Each chunk is compared with its checksum. It may hold several layers, which are read together.

    Args:
        saved: the array.
        read: reads a region of it, given by the starts and the stops of its dims.
    """

    def __init__(self, saved: SavedArray, read: Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]):
        self.shape, self.dtype = saved.shape, np.dtype(saved.dtype)
        self._saved, self._read = saved, read

    def __getitem__(self, index: Any) -> np.ndarray:
        if not isinstance(index, int):
            return np.asarray(self)[index]
        layers = self._saved.chunk[0]
        first = index // layers * layers
        stops = (min(first + layers, self.shape[0]), *self.shape[1:])
        return self._read(self._saved.name, (first, *[0] * len(self.shape[1:])), stops)[index - first]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self._read(self._saved.name, (0,) * len(self.shape), self.shape)
        return whole if dtype is None else whole.astype(dtype, copy=False)


def _stored(store: Store, directory: str, saved: Mapping[str, SavedArray]) -> dict[str, StoredArray]:
    @functools.lru_cache(maxsize=KEPT)
    def read(name: str, starts: tuple[int, ...], stops: tuple[int, ...]) -> np.ndarray:
        box = tuple(map(slice, starts, stops))
        values = np.empty(np.subtract(stops, starts).astype(int), saved[name].dtype)
        in_parallel(chunk_reads(store, directory, saved[name], [(box, values)]))
        return values

    return {name: StoredArray(array, read) for name, array in saved.items()}


def open_checkpoint(path: str | os.PathLike, step: int | None = None) -> tuple[int, dict[str, StoredArray], dict]:
    """Step of a checkpoint, its arrays by name, and its metadata.

    Args:
        path: directory or URL of a run, or of a checkpoint in it.
        step: step of the checkpoint; None for the last.

    Raises:
        ValueError: there is no such checkpoint.
        Damaged: it is damaged.
    """
    checkpoints, found = find_checkpoint(path, step)
    with checkpoints:
        manifest = checkpoints.manifest(found)
    return found, _stored(checkpoints.store, directory_of(found), saved_arrays(manifest)), manifest["metadata"]


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
        parts: name of an array, the number of a layer or `...` for all, and values there; together they cover each
            array once.
        metadata: what json can write, without NaN or infinity.
        check: called with the arrays that were written, by name, before the commit. Nothing is left if it raises.

    Raises:
        ValueError: the step is there already.
        OSError: the checkpoint could not be written. Nothing is left that looks like one.
    """
    store, name = Store(directory), directory_of(step)
    final = Path(directory) / name
    if (final / MANIFEST).exists():
        raise ValueError(
            f"cannot save step {step}: {final} is there already. Move it away, or choose another directory."
        )
    check_json(metadata)
    store.remove(name)
    saved: dict[str, SavedArray] = {}
    written = []
    try:
        for key, index, values in parts:
            shape = arrays[key].shape
            box = tuple(slice(0, size) for size in shape)
            if index is ...:
                chunk = _chunk(shape, values.itemsize)
            else:
                box, values = (slice(index, index + 1), *box[1:]), values[None]
                chunk = (1, *_chunk(shape[1:], values.itemsize))
            saved[key] = SavedArray(key, shape, str(arrays[key].dtype), chunk)
            written.append(write_arrays(store, name, [(saved[key], chunks_of(saved[key], box, values))]))
        whole = with_checksums(saved.values(), written)
        check(_stored(store, name, {array.name: array for array in whole}))
        commit(store, step, whole, metadata)
    except BaseException:
        store.remove(name)
        raise
    return final


def _chunk(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Shape of the chunks: whole in the last dims, 1 in as many first dims as keep it within CHUNK_BYTES."""
    chunk, left = [], CHUNK_BYTES // itemsize
    for size in reversed(shape):
        chunk.append(max(1, min(size, left)))
        left //= chunk[-1]
    return tuple(reversed(chunk))
