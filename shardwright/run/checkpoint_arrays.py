"""Arrays of a checkpoint: their names, their copies on the host, and their files, each a zarr v3 array.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from shardlib.placement import consecutive
from shardwright.run.manifest import CHECKSUM_BYTES, Box, Checksums, Damaged, Index, SavedArray
from shardwright.run.stores import STORE_ERRORS, Store, in_parallel

CHUNK_BYTES = 2**28
"""Largest size of a chunk, where that is possible. Whoever reads a part of a chunk reads all of it."""
MOST_PIECES = 64
Part = tuple[SavedArray, Mapping[Index, np.ndarray]]
"""An array to be written, and the chunks of it that this process has."""
Orders = Mapping[str, np.ndarray]
NO_ORDERS: Orders = MappingProxyType({})


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, such as `weights/layers/w_q`: field names, dict keys, and indices, joined by slashes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


# ---- regions --------------------------------------------------------------------------------------------------------


def _bounded(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The same region, with bounds."""
    return tuple(slice(*at.indices(size)[:2]) for at, size in zip(index, shape, strict=True))


def _sizes(box: Box) -> list[int]:
    return [at.stop - at.start for at in box]


def _within(box: Box, outer: Box) -> Box:
    """The region `box`, counted from the start of `outer`."""
    return tuple(slice(at.start - o.start, at.stop - o.start) for at, o in zip(box, outer, strict=True))


def _stored_regions(index: Sequence[slice], shape: Sequence[int], order: np.ndarray | None) -> list[tuple[Box, Any]]:
    """Regions of the array on disk that a device's part of a leaf consists of, each with its rows in that part."""
    box = _bounded(index, shape)
    if order is None:
        return [(box, ...)]
    return [((layers, *box[1:]), rows) for layers, rows in consecutive(order, index[0])]


def _chunk_shape(leaf: jax.Array, order: np.ndarray | None) -> tuple[int, ...]:
    """Shape of the chunks: of a shard, or of one of up to MOST_PIECES equal parts of it where it is large."""
    chunk = [max(1, size) for size in leaf.sharding.shard_shape(leaf.shape)]
    if order is not None:
        # No chunk may be shared by two processes: both would write it.
        indices = leaf.sharding.devices_indices_map(leaf.shape).values()
        layers = [layers for index in indices for layers, _ in consecutive(order, index[0])]
        chunk[0] = math.gcd(*(edge for at in layers for edge in (at.start, at.stop)))
    if chunk:
        least = -(-math.prod(chunk) * leaf.dtype.itemsize // CHUNK_BYTES)
        chunk[0] //= next((n for n in range(least, MOST_PIECES + 1) if chunk[0] % n == 0), 1)
    return tuple(chunk)


# ---- writing --------------------------------------------------------------------------------------------------------


def copy_to_host(leaves: dict[str, jax.Array], orders: Orders) -> list[Part]:
    """The arrays, each with the chunks in the shards that this process saves. Waits for them."""
    arrays = []
    for name, leaf in leaves.items():
        order = orders.get(name)
        saved = SavedArray(name, leaf.shape, str(leaf.dtype), _chunk_shape(leaf, order))
        chunks: dict[Index, np.ndarray] = {}
        for shard in [shard for shard in leaf.addressable_shards if shard.replica_id == 0]:
            # On a CPU device this is a reference to the buffer, not a copy. While it lives, JAX does not let a step
            # take over the buffer that it was donated: the step gets a copy.
            values = np.asarray(shard.data)
            for box, rows in _stored_regions(shard.index, leaf.shape, order):
                chunks |= {i: values[rows][_within(saved.box(i), box)] for i in saved.overlapping(box)}
        arrays.append((saved, chunks))
    return arrays


def write_arrays(store: Store, directory: str, arrays: list[Part]) -> Checksums:
    """Writes this process's chunks of the arrays, each at once to the disk. Returns their checksums.

    Raises OSError, with the array's name, once all writing has ended.
    """
    jobs = []
    for saved, chunks in arrays:
        stored = StoredArray(store, directory, saved)
        jobs += [functools.partial(stored.write, index, values) for index, values in chunks.items()]
    written = dict(in_parallel(jobs))
    store.sync(f"{directory}/{key}" for key in written)
    return written


# ---- files ----------------------------------------------------------------------------------------------------------


class StoredArray:
    """The files of an array of a checkpoint. tensorstore computes the checksum at the end of each, and compares it.

    Args:
        store: the store.
        directory: that of the checkpoint.
        saved: the array, with its checksums unless it is about to be written.
    """

    def __init__(self, store: Store, directory: str, saved: SavedArray):
        self.saved, self._store, self._directory = saved, store, directory
        spec = {
            "driver": "zarr3",
            "kvstore": (store.kvstore / f"{directory}/{saved.name}/").spec().to_json(),
            "metadata": saved.metadata,
            # Otherwise a chunk of zeros is not written, and looks like a lost one.
            "store_data_equal_to_fill_value": True,
        }
        self._array = ts.open(spec, open=True, assume_metadata=True).result()

    def write(self, index: Index, values: np.ndarray) -> tuple[str, int]:
        """Writes a chunk. Returns the key of its file, and its checksum. Raises OSError, with the array's name."""
        try:
            self._array[self.saved.box(index)].write(values, can_reference_source_data_indefinitely=True).result()
            return self.saved.key(index), self._checksum(index)
        except STORE_ERRORS as error:
            raise OSError(f"writing the array {self.saved.name!r} failed: {error}.") from error

    def read(self, index: Index) -> np.ndarray:
        """The values of a chunk. Raises Damaged if they are not those that were written there, or OSError."""
        if self._checksum(index) != self.saved.checksums[index]:
            raise self._damaged(index, "is not what was written: the manifest has another checksum")
        try:
            return self._array[self.saved.box(index)].read().result()
        except STORE_ERRORS as error:
            if "DATA_LOSS" in str(error):
                raise self._damaged(index, f"is not what was written: {error}") from error
            raise OSError(f"cannot read the array {self.saved.name!r}: {error}") from error

    def _checksum(self, index: Index) -> int:
        """The checksum at the end of the file of a chunk."""
        size = self.saved.chunk_bytes
        end = self._store.read(f"{self._directory}/{self.saved.key(index)}", size - CHECKSUM_BYTES)
        if end is None:
            raise self._damaged(index, "is missing")
        if len(end) != CHECKSUM_BYTES:
            raise self._damaged(index, f"has not {size} bytes")
        return int.from_bytes(end, "little")

    def _damaged(self, index: Index, problem: str) -> Damaged:
        return Damaged(
            f"cannot read the array {self.saved.name!r}: {self.saved.key(index)} {problem}. The checkpoint "
            f"{self._store.url}/{self._directory} is damaged. Restore another step, or copy it again."
        )


# ---- reading --------------------------------------------------------------------------------------------------------


def read_arrays(
    store: Store, directory: str, saved: Mapping[str, SavedArray], like: Mapping[str, Any], orders: Orders
) -> list[jax.Array]:
    """The arrays, sharded as `like`. Each process reads the chunks that its devices need, each once. Padding is 0."""
    jobs, parts = [], []
    for name, leaf in like.items():
        regions, targets, part = {}, [], []
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            box = _bounded(index, leaf.shape)
            values = regions.get(str(box))
            if values is None:
                values = regions[str(box)] = np.zeros(_sizes(box), leaf.dtype)
                stored = _stored_regions(index, leaf.shape, orders.get(name))
                targets += [(there, values[rows]) for there, rows in stored]
            part.append((device, values))
        parts.append(part)
        jobs += _reads(StoredArray(store, directory, saved[name]), targets)
    in_parallel(jobs)
    arrays = []
    for leaf, part in zip(like.values(), parts, strict=True):
        shards = [jax.device_put(values, device) for device, values in part]
        arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards))
    return arrays


def _reads(stored: StoredArray, targets: list[tuple[Box, np.ndarray]]) -> list[Callable[[], None]]:
    """Jobs that read regions of an array, each into its NumPy array: one job for each chunk."""
    by_chunk = collections.defaultdict(list)
    for box, values in targets:
        for index in stored.saved.overlapping(box):
            by_chunk[index].append((box, values))

    def read(index: Index) -> None:
        chunk, region = stored.read(index), stored.saved.box(index)
        for box, values in by_chunk[index]:
            both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, region, strict=True)]
            values[_within(both, box)] = chunk[_within(both, region)]

    return [functools.partial(read, index) for index in by_chunk]
