"""Arrays of a checkpoint: their names, their copies on the host, and their files, each a zarr v3 array.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from shardlib.placement import LayerOrder
from shardwright.run.manifest import ANOTHER, CHECKSUM_BYTES, Damaged, SavedArray, is_name
from shardwright.run.stores import STORE_ERRORS, Store, in_parallel

CACHE_BYTES = 2**30
"""Most bytes of chunks that are kept in memory for those who read the next part of them."""
Box = tuple[slice, ...]
"""A region of an array, with bounds."""
Part = tuple[SavedArray, list[tuple[Box, np.ndarray]]]
"""An array to be written, and the regions of it that this process has."""
Orders = Mapping[str, LayerOrder]
NO_ORDERS: Orders = MappingProxyType({})


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, such as `weights/layers/w_q`: field names, dict keys, and indices, joined by slashes.

    Raises ValueError for a path that cannot be the name of a directory, or that two leaves share.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        name = "/".join(parts)
        if not is_name(name) or any("/" in part for part in parts):
            raise ValueError(
                f"a leaf at {jax.tree_util.keystr(path)!r} has no usable name: each part of its path must be letters, "
                "digits, or any of '_-+=. ', must not start with a dot, and must not be zarr.json."
            )
        if name in leaves:
            raise ValueError(f"two leaves are named {name!r}; rename one of them.")
        leaves[name] = leaf
    return leaves


def _stored_shape(leaf: Any, order: LayerOrder | None) -> tuple[int, ...]:
    return leaf.shape if order is None else (order.layers, *leaf.shape[1:])


def as_stored(leaves: dict[str, Any], orders: Orders) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arrays on disk."""
    return {name: jax.ShapeDtypeStruct(_stored_shape(x, orders.get(name)), x.dtype) for name, x in leaves.items()}


def start_copies(leaves: dict[str, jax.Array]) -> dict[str, list[jax.Shard]]:
    """Shards of each leaf that this process saves, with their copies to the host started."""
    own = lambda leaf: [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    shards = {name: own(leaf) for name, leaf in leaves.items()}
    for shard in itertools.chain(*shards.values()):
        shard.data.copy_to_host_async()
    return shards


def copy_to_host(leaves: dict[str, jax.Array], shards: dict[str, list[jax.Shard]], orders: Orders) -> list[Part]:
    """The arrays, each with the shards that `start_copies` began to copy."""
    arrays = []
    for name, leaf in leaves.items():
        # On a CPU device this is a reference to the buffer, not a copy. While it lives, JAX does not let a step take
        # over the buffer that it was donated: the step gets a copy.
        pieces = [(shard.index, np.asarray(shard.data)) for shard in shards[name]]
        chunk = tuple(max(1, size) for size in leaf.sharding.shard_shape(leaf.shape))
        shape, order = _stored_shape(leaf, orders.get(name)), orders.get(name)
        if order is not None:
            pieces = [
                ((stored, *index[1:]), values[own])
                for index, values in pieces
                for stored, own in order.consecutive(index[0])
            ]
            # No chunk may be shared by two processes: both would write it.
            indices = leaf.sharding.devices_indices_map(leaf.shape).values()
            every = [stored for index in indices for stored, _ in order.consecutive(index[0])]
            chunk = (math.gcd(*(edge for layers in every for edge in (layers.start, layers.stop))), *chunk[1:])
        pieces = [(bounded(index, shape), values) for index, values in pieces]
        arrays.append((SavedArray(name, shape, str(leaf.dtype), chunk), pieces))
    return arrays


# ---- files --------------------------------------------------------------------------------------------------------


def bounded(box: Sequence[slice], shape: Sequence[int]) -> Box:
    """The same region, with bounds."""
    return tuple(slice(*at.indices(size)[:2]) for at, size in zip(box, shape, strict=True))


def box_of(index: Any, shape: Sequence[int]) -> Box:
    """The region that an index names, of integers from 0, slices of step 1 and `...`, with bounds."""
    given = index if isinstance(index, tuple) else (index,)
    at = given.index(...) if ... in given else len(given)
    missing = [slice(None)] * (len(shape) - len(given) + (... in given))
    every = [*given[:at], *missing, *given[at + 1 :]]
    return bounded([i if isinstance(i, slice) else slice(i, i + 1) for i in every], shape)


def chunk_cache() -> ts.Context:
    """Memory for chunks of which several parts are read, for as long as it is referenced."""
    return ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})


class StoredArray:
    """An array of a checkpoint. Indexed by integers from 0, slices of step 1 and `...`, it reads what it needs.

    tensorstore compares each chunk with the checksum in its file, and this class that one with the manifest's.

    Args:
        store: the store.
        directory: that of the checkpoint.
        saved: the array, with its checksums unless it is about to be written.
        cache: that of `chunk_cache`, where several parts of a chunk are read; None keeps nothing.

    Raises:
        Damaged: on indexing, a chunk that is read is missing, or not what was written.
    """

    def __init__(self, store: Store, directory: str, saved: SavedArray, cache: ts.Context | None = None):
        self.saved, self.shape, self.dtype = saved, saved.shape, np.dtype(saved.dtype)
        self._store, self._directory = store, directory
        spec = {
            "driver": "zarr3",
            "kvstore": (store.kvstore / f"{directory}/{saved.name}/").spec().to_json(),
            "metadata": saved.metadata,
            "recheck_cached_data": "open",
            # Otherwise a chunk of zeros is not written, and looks like a lost one.
            "store_data_equal_to_fill_value": True,
        }
        self.array = ts.open(spec, open=True, assume_metadata=True, context=cache).result()

    def checksum(self, index: tuple[int, ...]) -> int:
        """The checksum at the end of the file of a chunk. Raises Damaged if it has none."""
        key, values = self.saved.key(index), self.saved.chunk_bytes - CHECKSUM_BYTES
        end = self._store.read(f"{self._directory}/{key}", values)
        if end is None:
            raise self._damaged(f"{key} is missing.")
        if len(end) != CHECKSUM_BYTES:
            raise self._damaged(f"{key} has {values + len(end)} bytes or less instead of {self.saved.chunk_bytes}.")
        return int.from_bytes(end, "little")

    def read(self, box: Box) -> np.ndarray:
        """The values in a region with bounds."""
        for index in self.saved.overlapping(box):
            if self.checksum(index) != self.saved.checksums[self.saved.number(index)]:
                raise self._damaged(
                    f"{self.saved.key(index)} is not what was written: the manifest has another checksum."
                )
        try:
            return self.array[box].read().result()
        except STORE_ERRORS as error:
            if "DATA_LOSS" in str(error):
                raise self._damaged(f"a chunk is not what was written: {error}") from error
            raise OSError(f"cannot read the array {self.saved.name!r}: {error}") from error

    def _damaged(self, problem: str) -> Damaged:
        where = f"{self._store.url}/{self._directory}"
        return Damaged(
            f"cannot read the array {self.saved.name!r}: {problem} The checkpoint {where} is damaged.{ANOTHER}"
        )

    def __getitem__(self, index: Any) -> np.ndarray:
        given = index if isinstance(index, tuple) else (index,)
        # A dim of an integer has one element in the region.
        within = tuple(i if i is ... else slice(None) if isinstance(i, slice) else 0 for i in given)
        return self.read(box_of(index, self.shape))[within]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)


def write_arrays(store: Store, directory: str, arrays: list[Part]) -> dict[str, dict[int, int]]:
    """Writes this process's part of the arrays. Raises OSError, with the array's name, once all writing has ended.

    Returns:
        by array: the crc32c of each chunk that was written, by the place of the chunk in C order.
    """
    written: dict[str, dict[int, int]] = {saved.name: {} for saved, _ in arrays}

    def write(target: StoredArray, box: Box, values: np.ndarray) -> None:
        saved = target.saved
        try:
            target.array[box].write(values, can_reference_source_data_indefinitely=True).result()
            found = {saved.number(index): target.checksum(index) for index in saved.overlapping(box)}
        except STORE_ERRORS as error:
            raise OSError(f"writing the array {saved.name!r} failed: {error}.") from error
        written[saved.name].update(found)

    jobs = []
    for saved, pieces in arrays:
        target = StoredArray(store, directory, saved)
        jobs += [functools.partial(write, target, box, values) for box, values in pieces]
    in_parallel(jobs)
    return written


def read_array(stored: StoredArray, leaf: jax.ShapeDtypeStruct, order: LayerOrder | None) -> jax.Array:
    """The array, sharded as `leaf`. Each process reads the regions of its devices, each once.

    Args:
        stored: the array in the checkpoint.
        leaf: shape and sharding.
        order: of its rows, if it is a stack of layers in another order; padding is 0.
    """
    shards, regions = [], {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        box = bounded(index, leaf.shape)
        region = tuple((at.start, at.stop) for at in box)
        if region not in regions and order is None:
            regions[region] = stored.read(box)
        elif region not in regions:
            regions[region] = np.zeros([at.stop - at.start for at in box], leaf.dtype)
            for layers, rows in order.consecutive(index[0]):
                regions[region][rows] = stored.read((layers, *box[1:]))
        shards.append(jax.device_put(regions[region], device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
