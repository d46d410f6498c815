"""Arrays of a checkpoint: their names, their copies on the host, and their files, each a zarr v3 array.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import collections
import concurrent.futures
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import google_crc32c
import jax
import numpy as np

from shardlib.placement import StackOrder
from training_io.manifest import CHECKSUM_BYTES, Damaged, SavedArray, is_name
from training_io.stores import WORKERS, Store, aligned, in_parallel, results

READ_AHEAD = 2**30
"""Bytes of arrays that are read while the one before them goes to the devices."""
CHECKSUM_PART = 2**22
"""Bytes of one call for a checksum, during which the other threads of the program wait: about 1 ms."""

Orders = Mapping[str, StackOrder]
NO_ORDERS: Orders = MappingProxyType({})


class HostArray(NamedTuple):
    """An array to be written, with the part of it that this process has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    pieces: list[tuple[tuple[slice, ...], np.ndarray]]  # this process's regions of the global array

    @property
    def saved(self) -> SavedArray:
        """The array without its values."""
        return SavedArray(self.name, self.shape, self.dtype, self.chunk)


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


def _stored_shape(leaf: Any, order: StackOrder | None) -> tuple[int, ...]:
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


def copy_to_host(leaves: dict[str, jax.Array], shards: dict[str, list[jax.Shard]], orders: Orders) -> list[HostArray]:
    """The arrays, each with the shards that `start_copies` began to copy."""
    arrays = []
    for name, leaf in leaves.items():
        # On a CPU device this is a reference to the buffer, not a copy. While it lives, JAX does not let a step take
        # over the buffer that it was donated: the step gets a copy.
        pieces = [(shard.index, np.asarray(shard.data)) for shard in shards[name]]
        chunk = tuple(max(1, size) for size in leaf.sharding.shard_shape(leaf.shape))
        order = orders.get(name)
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
        arrays.append(HostArray(name, _stored_shape(leaf, order), str(leaf.dtype), chunk, pieces))
    return arrays


# ---- chunks -------------------------------------------------------------------------------------------------------

Box = tuple[slice, ...]


def overlapping(array: SavedArray, box: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], Box, Box]]:
    """Index of each chunk that has a part of `box`, a region with bounds; its place in `box`, and in the chunk."""
    spans = [range(at.start // size, -(-at.stop // size)) for at, size in zip(box, array.chunk, strict=True)]
    if any(at.stop <= at.start for at in box):
        return
    for index in itertools.product(*spans):
        low = [max(at.start, i * size) for at, i, size in zip(box, index, array.chunk, strict=True)]
        high = [min(at.stop, (i + 1) * size) for at, i, size in zip(box, index, array.chunk, strict=True)]
        in_box = tuple(slice(a - at.start, b - at.start) for a, b, at in zip(low, high, box, strict=True))
        first = [i * size for i, size in zip(index, array.chunk, strict=True)]
        yield index, in_box, tuple(slice(a - f, b - f) for a, b, f in zip(low, high, first, strict=True))


def bounded(box: Sequence[slice], shape: Sequence[int]) -> Box:
    """The same region, with bounds."""
    return tuple(slice(*at.indices(size)[:2]) for at, size in zip(box, shape, strict=True))


def checksum(content: np.ndarray) -> int:
    """The crc32c of u8[bytes]."""
    value = 0
    for start in range(0, content.size, CHECKSUM_PART):
        value = google_crc32c.extend(value, content[start : start + CHECKSUM_PART])
    return value


def read_file(store: Store, directory: str, array: SavedArray, index: tuple[int, ...]) -> np.ndarray:
    """The file of a chunk, u8[array.chunk_bytes]. Raises Damaged if it is not the one that was saved there."""
    key = array.key(index)
    try:
        content = store.read(f"{directory}/{key}", array.chunk_bytes)
    except Damaged as error:
        raise Damaged(f"cannot read the array {array.name!r}: {error}") from error
    problem = None
    if content is None:
        problem = "is missing"
    elif content.size != array.chunk_bytes:
        problem = f"has {content.size} bytes instead of {array.chunk_bytes}"
    else:
        end = int.from_bytes(content[-CHECKSUM_BYTES:].tobytes(), "little")
        if checksum(content[:-CHECKSUM_BYTES]) != end:
            problem = "is not what was written: its checksum differs"
        elif array.checksums is not None and end != array.checksums[array.number(index)]:
            problem = "is one of another place or step: the manifest has another checksum"
    if problem:
        raise Damaged(f"cannot read the array {array.name!r}: {key} {problem}.")
    return content


def read_chunk(store: Store, directory: str, array: SavedArray, index: tuple[int, ...]) -> np.ndarray:
    """The values of a chunk, of the shape of a chunk. Raises Damaged if they are not those that were saved there."""
    content = read_file(store, directory, array, index)
    return content[:-CHECKSUM_BYTES].view(array.dtype).reshape(array.chunk)


# ---- writing ------------------------------------------------------------------------------------------------------


def write_arrays(store: Store, directory: str, arrays: list[HostArray]) -> dict[str, dict[int, int]]:
    """Writes this process's part of the arrays. Raises OSError, with the array's name, once all writing has ended.

    Returns:
        by array: the crc32c of each chunk that was written, by the place of the chunk in C order.
    """
    written: dict[str, dict[int, int]] = {array.name: {} for array in arrays}

    def write(array: HostArray, index: tuple[int, ...], values: np.ndarray) -> None:
        saved = array.saved
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        value = checksum(content)
        try:
            store.write(f"{directory}/{saved.key(index)}", content, value.to_bytes(CHECKSUM_BYTES, "little"))
        except OSError as error:
            raise OSError(f"writing the array {array.name!r} failed: {error}.") from error
        written[array.name][saved.number(index)] = value

    in_parallel(
        [
            lambda array=array, index=index, values=values[at]: write(array, index, values)
            for array in arrays
            for box, values in array.pieces
            for index, at, _ in overlapping(array.saved, bounded(box, array.shape))
        ]
    )
    return written


# ---- reading ------------------------------------------------------------------------------------------------------


class _Reading(NamedTuple):
    """An array on its way from the store to the devices.

    Attributes:
        leaf: its shape and sharding.
        regions: values by region, complete when `futures` are.
        devices: region of each device.
        futures: of the chunks.
    """

    leaf: jax.ShapeDtypeStruct
    regions: dict[Any, np.ndarray]
    devices: list[tuple[jax.Device, Any]]
    futures: list[concurrent.futures.Future]

    def finish(self) -> jax.Array:
        results(self.futures)
        shards = [jax.device_put(self.regions[region], device) for device, region in self.devices]
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, shards)


def read_arrays(
    store: Store,
    directory: str,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    orders: Orders,
    open_array: Callable[[str], SavedArray],
) -> list[jax.Array]:
    """Arrays of a checkpoint, sharded as `leaves`. Each process reads each chunk that has a part of its own once.

    Raises Damaged, or OSError if the store fails, with the array's name.

    Args:
        store: the store.
        directory: the checkpoint's.
        leaves: arrays by name.
        orders: as for `Checkpointer.save`.
        open_array: by name, gives what the manifest says of an array.
    """
    pool = concurrent.futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="chunk")
    waiting: collections.deque[_Reading] = collections.deque()
    restored, ahead = [], 0
    try:
        opened = results([pool.submit(open_array, name) for name in leaves])
        for array, (name, leaf) in zip(opened, leaves.items(), strict=True):
            waiting.append(_begin(pool, store, directory, array, leaf, orders.get(name)))
            ahead += _bytes(waiting[-1])
            while ahead > READ_AHEAD and len(waiting) > 1:
                ahead -= _bytes(waiting[0])
                restored.append(waiting.popleft().finish())
        return restored + [reading.finish() for reading in waiting]
    finally:
        pool.shutdown(cancel_futures=True)


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    return aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _bytes(reading: _Reading) -> int:
    regions = {region for _, region in reading.devices}
    return sum(math.prod(b - a for a, b in region) for region in regions) * reading.leaf.dtype.itemsize


def _begin(
    pool: concurrent.futures.Executor,
    store: Store,
    directory: str,
    array: SavedArray,
    leaf: jax.ShapeDtypeStruct,
    order: StackOrder | None,
) -> _Reading:
    devices, regions = [], {}
    wanted: dict[tuple[int, ...], list] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        box = bounded(index, leaf.shape)
        region = tuple((at.start, at.stop) for at in box)
        devices.append((device, region))
        if region in regions:
            continue
        regions[region] = None
        # What a device needs often is one chunk, which then needs no copy.
        whole = order is None and all(
            b - a == size and a % size == 0 for (a, b), size in zip(region, array.chunk, strict=True)
        )
        regions[region] = None if whole else _empty([b - a for a, b in region], leaf.dtype)
        if order is not None:
            regions[region][...] = 0  # the padding
        parts = [(box, ())] if order is None else [((at, *box[1:]), (own,)) for at, own in order.consecutive(index[0])]
        for part, own in parts:
            for chunk, at, source in overlapping(array, part):
                wanted.setdefault(chunk, []).append((region, None if whole else (own, at), source))

    def read(chunk: tuple[int, ...]) -> None:
        values = read_chunk(store, directory, array, chunk)
        for region, at, source in wanted[chunk]:
            if at is None:
                regions[region] = values
            else:
                own, box = at
                regions[region][own][box] = values[source]

    futures = [pool.submit(read, chunk) for chunk in wanted]
    return _Reading(leaf, regions, devices, futures)
