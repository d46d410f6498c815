"""Checkpoints read and written a part at a time with NumPy, by programs that use no devices.

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
from training_io.checkpoint_arrays import STORE_ERRORS, HostArray, create_arrays, open_array, wait_for
from training_io.initial_weights import find_checkpoint

CHUNK_BYTES = 2**26
"""Largest size of a chunk that is written here. A chunk is the least that can be read: with small ones a process reads
little more than its own part of the weights."""

CACHE_BYTES = 2**33
"""Largest size of the chunks in a cache, which drops the least recently used ones. A chunk can only be read whole, and
those of a run have several layers."""


class StoredArray:
    """An array of a checkpoint. Indexed like a NumPy array, it reads the chunks that it needs.

    Raises:
        OSError: the array, or a chunk that is read, is missing or damaged.
    """

    def __init__(self, path: Path, name: str, cache: ts.Context):
        self._name, self._path = name, path
        self._store = open_array(path, name, cache)
        self.shape, self.dtype = tuple(self._store.shape), self._store.dtype.numpy_dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, int) and not 0 <= index < self.shape[0]:
            raise IndexError(f"{self._name}: index {index} is outside 0 … {self.shape[0] - 1}.")
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


def _stored(directory: Path, names: Iterable[str]) -> dict[str, StoredArray]:
    cache = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    return {name: StoredArray(directory, name, cache) for name in names}


def open_checkpoint(path: str | os.PathLike, step: int | None = None) -> tuple[int, dict[str, StoredArray], dict]:
    """Step of a checkpoint, its arrays by name, and its metadata.

    Args:
        path: directory of a run, or of a checkpoint in it.
        step: step of the checkpoint; None for the last.

    Raises:
        ValueError: there is no such checkpoint.
        OSError: it is damaged.
    """
    # Not Checkpointer.latest_step, which would start the devices to find out whether there are other processes.
    checkpoints, found = find_checkpoint(path, step, lambda checkpoints: max(checkpoints.steps(), default=None))
    with checkpoints:
        manifest = checkpoints.manifest(found)
        directory = checkpoints.directory / f"{found:010}"
    return found, _stored(directory, manifest["arrays"]), manifest["metadata"]


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
    final = Path(directory) / f"{step:010}"
    if final.exists():
        raise ValueError(
            f"cannot save step {step}: {final} is there already. Move it away, or choose another directory."
        )
    manifest = manifest_text(step, arrays, metadata)
    temporary = final.with_name(final.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    hosts = [HostArray(name, x.shape, str(x.dtype), _chunk(x), []) for name, x in arrays.items()]
    stores = dict(zip(arrays, create_arrays(temporary, hosts), strict=True))
    for name, index, values in parts:
        wait_for([(name, stores[name][index].write(values))], "writing")
    stores.clear()
    try:
        check(_stored(temporary, arrays))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    commit(temporary, final, list(arrays), manifest)
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
