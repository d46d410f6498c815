"""Checkpoints read and written a part at a time with NumPy, by programs that use no devices."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.run.checkpoint import find_checkpoint
from shardwright.run.checkpoint_arrays import StoredArray, box_of, chunk_cache, write_arrays
from shardwright.run.manifest import SavedArray, check_json, commit, directory_of, saved_arrays, with_checksums
from shardwright.run.stores import MANIFEST, Store

CHUNK_BYTES = 2**26
"""Largest size of a chunk that is written here. A chunk is the least that can be read: with small ones a process reads
little more than its own part of the weights."""


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
        manifest, store = checkpoints.manifest(found), checkpoints.store
    directory, cache = directory_of(found), chunk_cache()
    arrays = {name: StoredArray(store, directory, x, cache) for name, x in saved_arrays(manifest).items()}
    return found, arrays, manifest["metadata"]


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
    store, name = Store(directory), directory_of(step)
    final = Path(directory) / name
    if (final / MANIFEST).exists():
        raise ValueError(
            f"cannot save step {step}: {final} is there already. Move it away, or choose another directory."
        )
    check_json(metadata)
    store.remove(name)
    saved = {key: SavedArray(key, x.shape, str(x.dtype), _chunk(x)) for key, x in arrays.items()}
    written: dict[str, dict[int, int]] = {key: {} for key in arrays}
    try:
        for key, index, values in parts:
            box = box_of(index, saved[key].shape)
            piece = (box, values.reshape([at.stop - at.start for at in box]))
            # Of a chunk of several parts, the last checksum counts.
            written[key] |= write_arrays(store, name, [(saved[key], [piece])])[key]
        whole = with_checksums(saved.values(), [written])
        check({array.name: StoredArray(store, name, array) for array in whole})
        commit(store, step, whole, metadata)
    except BaseException:
        store.remove(name)
        raise
    return final


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
