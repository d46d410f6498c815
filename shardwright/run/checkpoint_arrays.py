"""Reads and writes the files of a checkpoint: zarr v3 arrays, and the manifest with the checksum of each chunk.

docs/formats.md shows the layout. The manifest is the attributes of the root group: `format`, `format_version`,
`step`, `saved_at` in UTC, `arrays` (with `crc32c` as eight hex digits per chunk, in C order), `metadata`, and `sha256`,
the hash of `json.dumps(…, sort_keys=True, separators=(",", ":"))` of the other attributes.
"""

import collections
import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.placement import consecutive
from shardwright.data.untrusted import check_types, parse_object
from shardwright.run.stores import MANIFEST, Damaged, Store, in_parallel

FORMAT = "pytree-zarr-checkpoint"
FORMAT_VERSION = 3
"""The only version that can be read."""
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
CHECKSUM_BYTES = 4
DTYPES = frozenset(
    """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16
    """.split()  # noqa: SIM905
)
"""Dtypes that tensorstore reads and writes; zarr-python too, except bfloat16."""
Index = tuple[int, ...]
"""Index of a chunk in the chunk grid of an array."""
Box = tuple[slice, ...]
"""A region of an array: in each dim a slice with start and stop, such as (slice(0, 2), slice(64, 128))."""
Bounds = tuple[tuple[int, int], ...]
"""The region of a shard, as a hashable value: start and stop in each dim, such as ((0, 2), (64, 128))."""
Checksums = dict[str, int]
"""The crc32c of each chunk, by the key of its file in the checkpoint."""
_ARRAY = {"shape": [int], "dtype": str, "chunk_shape": [int], "crc32c": str}
_ATTRIBUTES = {"step": int, "saved_at": str, "arrays": {str: _ARRAY}, "metadata": dict}
"""Types of the attributes, for check_types."""
SMALL_BYTES = 2**14
"""Arrays with shards smaller than this are gathered into one file instead of one file per shard."""
MOST_GATHERED = 2**22
"""Largest array to gather, in bytes. Otherwise a small model on many devices would be replicated on each."""
CHUNK_BYTES = 2**28
"""Largest size of a chunk, where possible: a reader of any part of a chunk reads all of it."""
MOST_PIECES = 64
Orders = Mapping[str, np.ndarray]
"""The layer of each row in memory, such as [0, 2, 1, 3], by the path of each stack that is not in layer order."""
NO_ORDERS: Orders = MappingProxyType({})


class SavedArray(NamedTuple):
    """An array of a checkpoint.

    Attributes:
        name: its path in the checkpoint, such as `weights/embed`.
        shape: its global shape.
        dtype: name of its NumPy dtype.
        chunk: shape of its chunks.
        checksums: crc32c of each chunk, by the index of the chunk; empty while the array is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    checksums: Mapping[Index, int] = MappingProxyType({})

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dim."""
        return tuple(-(-size // part) for size, part in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk's file, in bytes."""
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize + CHECKSUM_BYTES

    def box(self, index: Index) -> Box:
        """Returns the region of the array that a chunk covers."""
        sizes = zip(index, self.chunk, self.shape, strict=True)
        return tuple(slice(i * part, min(size, (i + 1) * part)) for i, part, size in sizes)

    def overlapping(self, box: Box) -> Iterable[Index]:
        """Lists the indices of the chunks that overlap a region. The region may extend beyond the array."""
        dims = zip(box, self.chunk, self.grid, strict=True)
        spans = [range(at.start // part, min(count, -(-at.stop // part))) for at, part, count in dims]
        return itertools.product(*spans) if all(at.start < at.stop for at in box) else ()

    def key(self, index: Index) -> str:
        """Returns the key of a chunk's file in the checkpoint."""
        return "/".join([self.name, "c", *map(str, index)])

    @property
    def metadata(self) -> dict[str, Any]:
        """Content of the array's zarr.json, with which tensorstore can read the array."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": CODECS,
            "fill_value": False if self.dtype == "bool" else 0,
            "attributes": {},
        }


def directory_of(step: int) -> str:
    """Returns the name of a checkpoint's directory, such as `0000000500`."""
    return f"{step:010}"


Part = tuple[SavedArray, Mapping[Index, np.ndarray]]
"""An array to write, and the chunks of it that this process has."""


def named_leaves(tree: object) -> dict[str, Any]:
    """Maps the path of each leaf, such as `weights/layers/w_q`, to the leaf. Indices are part of the path too."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


# ---- regions --------------------------------------------------------------------------------------------------------


def _within(box: Box, outer: Box) -> Box:
    """Returns the region `box` as indices relative to the start of `outer`."""
    return tuple(slice(at.start - o.start, at.stop - o.start) for at, o in zip(box, outer, strict=True))


def _stored_regions(bounds: Bounds, order: np.ndarray | None) -> list[tuple[Box, Any]]:
    """Lists the regions on disk that make up a shard, each with its rows in the shard.

    With the order [0, 2, 1, 3], a shard with the first two rows has two regions on disk: the layers 0 and 2.
    """
    box = tuple(itertools.starmap(slice, bounds))
    if order is None:
        return [(box, ...)]
    return [((layers, *box[1:]), rows) for layers, rows in consecutive(order, box[0])]


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(at.indices(size)[:2] for at, size in zip(index, shape, strict=True))


def holders_of(leaf: Any) -> dict[Bounds, list[int]]:
    """Maps the bounds of each shard of a leaf to the processes that hold it, ascending."""
    found = collections.defaultdict(set)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        found[_bounds(index, leaf.shape)].add(device.process_index)
    return {bounds: sorted(processes) for bounds, processes in found.items()}


def shares(
    saved: SavedArray, holders: Mapping[Bounds, list[Any]], order: np.ndarray | None, first: int
) -> Iterator[tuple[int, Bounds, Index, Box, Any]]:
    """Divides the chunks of an array, to read or to write, among the processes that hold the same shards.

    They take turns, so that a store does not send more if there are more replicas, and each process writes less.
    `first` is the number of the process, among those with the shard, that has the first chunk. It differs between
    arrays, so that arrays of one chunk are divided too.

    Yields:
        The process that reads or writes, the bounds of a shard that it holds, the index of a chunk, a region of the
        shard on disk that overlaps the chunk, and the rows of this region in the shard.
    """
    turn_of: dict[Index, int] = {}
    for bounds, processes in holders.items():
        for box, rows in _stored_regions(bounds, order):
            for index in saved.overlapping(box):
                turn = turn_of.setdefault(index, first + len(turn_of))
                yield processes[turn % len(processes)], bounds, index, box, rows


def chunk_shape(leaf: Any, order: np.ndarray | None) -> tuple[int, ...]:
    """Chooses the chunk shape: that of a shard, or of one of up to MOST_PIECES equal parts of a large shard.

    With `order`, a chunk has fewer rows if needed, so that it has no layers of two shards.
    """
    chunk = [max(1, size) for size in leaf.sharding.shard_shape(leaf.shape)]
    if order is not None and not leaf.is_fully_replicated:
        # Two processes must not share a chunk: both would write it.
        indices = leaf.sharding.devices_indices_map(leaf.shape).values()
        layers = [layers for index in indices for layers, _ in consecutive(order, index[0])]
        chunk[0] = math.gcd(*(edge for at in layers for edge in (at.start, at.stop)))
    if chunk:
        least = -(-math.prod(chunk) * leaf.dtype.itemsize // CHUNK_BYTES)
        chunk[0] //= next((n for n in range(least, MOST_PIECES + 1) if chunk[0] % n == 0), 1)
    return tuple(chunk)


# ---- writing --------------------------------------------------------------------------------------------------------


def gather_small(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Replicates the leaves with shards below SMALL_BYTES, so that one process writes each as one file.

    Otherwise even the norms of a model would take one file per device. All processes call this.
    """
    return leaves | {k: jax.device_put(x, replicated(x)) for k, x in leaves.items() if is_small(x)}


def is_small(leaf: Any) -> bool:
    """Returns True for a leaf that is not fully replicated but small enough to be written as one file."""
    if leaf.sharding.is_fully_replicated:
        return False
    of_shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return of_shard < SMALL_BYTES and math.prod(leaf.shape) * leaf.dtype.itemsize <= MOST_GATHERED


def replicated(leaf: Any) -> jax.sharding.Sharding:
    """Returns the fully replicated sharding on the mesh of a leaf."""
    return NamedSharding(leaf.sharding.mesh, PartitionSpec())


def copy_to_host(leaves: dict[str, jax.Array], orders: Orders) -> list[Part]:
    """Returns each array with the chunks of it that this process writes, in host memory. Waits for the copies."""
    arrays = []
    for first, (name, leaf) in enumerate(leaves.items()):
        order = orders.get(name)
        saved = SavedArray(name, leaf.shape, str(leaf.dtype), chunk_shape(leaf, order))
        reordered: Any = ...
        if order is not None and leaf.is_fully_replicated:
            reordered, order = np.argsort(order), None
        own = {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        chunks: dict[Index, np.ndarray] = {}
        for process, bounds, index, box, rows in shares(saved, holders_of(leaf), order, first):
            if process == jax.process_index():
                # On CPU this references the buffer instead of copying. While it lives, JAX copies the buffer when a
                # step donates it.
                values = np.asarray(own[bounds])[reordered]
                chunks[index] = values[rows][_within(saved.box(index), box)]
        arrays.append((saved, chunks))
    return arrays


def write_arrays(store: Store, directory: str, arrays: list[Part]) -> Checksums:
    """Writes this process's chunks, each synced to the disk. Returns their checksums.

    Raises OSError, with the array's name, after all writing has ended.
    """
    write = functools.partial(_write_chunk, store, directory)
    chunks = [(saved, *chunk) for saved, chunks in arrays for chunk in chunks.items()]
    written = dict(in_parallel(functools.partial(write, *chunk) for chunk in chunks))
    store.sync(f"{directory}/{key}" for key in written)
    return written


# ---- files ----------------------------------------------------------------------------------------------------------


def _write_chunk(store: Store, directory: str, saved: SavedArray, index: Index, values: np.ndarray) -> tuple[str, int]:
    """Writes the values of a chunk followed by their checksum. Returns the key of the file and the checksum."""
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    key = saved.key(index)
    checksum = google_crc32c.value(content)
    try:
        store.write(f"{directory}/{key}", b"".join([content.data, checksum.to_bytes(CHECKSUM_BYTES, "little")]))
    except OSError as error:
        raise OSError(f"{error} (the array {saved.name!r})") from error
    return key, checksum


def read_chunk(store: Store, directory: str, saved: SavedArray, index: Index) -> np.ndarray:
    """Reads the values of a chunk. Raises Damaged if they differ from what was written, OSError if the store fails."""
    key = saved.key(index)
    checksum = saved.checksums[index]
    content = None
    problem = f"is not a file of {saved.chunk_bytes} bytes"
    try:
        content = store.read(f"{directory}/{key}", saved.chunk_bytes)
    except Damaged as error:
        problem += f" ({error})"
    if content is not None and len(content) == saved.chunk_bytes:
        values = np.frombuffer(content, np.uint8)[:-CHECKSUM_BYTES]
        is_written = {google_crc32c.value(values), int.from_bytes(content[-CHECKSUM_BYTES:], "little")} == {checksum}
        problem = "" if is_written else "is not what was written: its checksum differs from the manifest's"
    if problem:
        raise Damaged(
            f"cannot read the array {saved.name!r}: {key} {problem}. The checkpoint {store.url}/{directory} is "
            "damaged. Restore another step, or copy the checkpoint again."
        )
    region = saved.box(index)  # the last chunk of a dim is padded
    return values.view(saved.dtype).reshape(saved.chunk)[_within(region, region)]


# ---- reading --------------------------------------------------------------------------------------------------------


def read_arrays(
    store: Store, directory: str, saved: Mapping[str, SavedArray], like: Mapping[str, Any], orders: Orders
) -> list[Callable[[], jax.Array]]:
    """Reads this process's part of arrays, sharded as `like`.

    Processes that have the same shards divide the reading, if the dtype has 32 bits; else each reads all that it needs.

    Returns:
        Functions that make the arrays. Once all processes have read without error, all call them in this order, because
        processes send each other what they read. Rows of `like` beyond those saved are 0.
    """
    jobs, arrays = [], []
    process = jax.process_index()
    for first, (name, leaf) in enumerate(like.items()):
        holders = holders_of(leaf)
        is_shared = _is_shared(leaf, holders)
        if not is_shared:
            holders = {bounds: [process] for bounds, processes in holders.items() if process in processes}
        values: dict[Bounds, np.ndarray] = {}
        targets = collections.defaultdict(list)
        for reader, bounds, index, box, rows in shares(saved[name], holders, orders.get(name), first):
            if reader == process:
                if bounds not in values:
                    values[bounds] = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
                targets[index].append((box, values[bounds][rows]))
        jobs += [functools.partial(_read_into, store, directory, saved[name], *item) for item in targets.items()]
        arrays.append(functools.partial(_placed, leaf, values, is_shared))
    in_parallel(jobs)
    return arrays


def _is_shared(leaf: Any, holders: Mapping[Bounds, list[int]]) -> bool:
    """Returns True if processes with the same shards divide the reading: for 32-bit dtypes, which _placed can add."""
    return leaf.dtype.itemsize == 4 and any(len(processes) > 1 for processes in holders.values())


def _placed(leaf: Any, values: Mapping[Bounds, np.ndarray], is_shared: bool) -> jax.Array:
    """Makes an array from the shards that this process read. If `is_shared`, other processes read other parts of them.

    Args:
        leaf: shape, dtype and sharding of the array.
        values: each shard, with 0 where this process read nothing; a missing shard counts as all 0.
        is_shared: True to add what the processes have read of the same shard. This adds bits as u32, on any backend,
            because a sum of the values would lose -0.0 and the bits of NaN.
    """
    shard_shape = leaf.sharding.shard_shape(leaf.shape)
    if not is_shared:

        def shard(index):
            return values.get(_bounds(index, leaf.shape), np.zeros(shard_shape, leaf.dtype))

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
    left = dict(values)
    parts = []
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        part = left.pop(_bounds(index, leaf.shape), None)  # by one device of this process
        bits = np.zeros(shard_shape, np.uint32) if part is None else part.view(np.uint32)
        parts.append(jax.device_put(bits[None], device))
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    used = set(jax.tree.leaves(tuple(spec)))
    over = tuple(axis for axis in mesh.axis_names if axis not in used)
    stacked = NamedSharding(mesh, PartitionSpec(over, *spec))
    copies = math.prod(mesh.shape[axis] for axis in over)
    of_each = jax.make_array_from_single_device_arrays((copies, *leaf.shape), stacked, parts)
    return jax.jit(_add_bits, static_argnums=1, out_shardings=leaf.sharding)(of_each, leaf.dtype)


def _add_bits(of_each: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.sum(of_each, axis=0, dtype=jnp.uint32), dtype)


def _read_into(
    store: Store, directory: str, saved: SavedArray, index: Index, targets: list[tuple[Box, np.ndarray]]
) -> None:
    """Reads a chunk and copies it into `targets`: regions on disk, each with the array to fill."""
    chunk = read_chunk(store, directory, saved, index)
    region = saved.box(index)
    for box, values in targets:
        both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, region, strict=True))
        values[_within(both, box)] = chunk[_within(both, region)]


# ---- the manifest ---------------------------------------------------------------------------------------------------


def _group(attributes: Mapping[str, Any]) -> str:
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group, indent=1, allow_nan=False) + "\n"


def _digest(attributes: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in attributes.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def commit(store: Store, step: int, arrays: list[SavedArray], written: Checksums, metadata: object) -> None:
    """Completes a checkpoint whose chunks are written: writes all metadata, and the manifest last.

    `written` joins what write_arrays returned in all processes; `metadata` goes into the manifest.
    Raises OSError if the store fails, or if a chunk was not written.
    """
    directory = directory_of(step)
    files = {}
    entries = {}
    for array in arrays:
        keys = [array.key(index) for index in np.ndindex(array.grid)]
        if lost := [key for key in keys if key not in written]:
            raise OSError(f"no process wrote the chunk {lost[0]}.")
        checksums = "".join(f"{written[key]:08x}" for key in keys)
        entries[array.name] = {"shape": array.shape, "dtype": array.dtype, "chunk_shape": array.chunk}
        entries[array.name]["crc32c"] = checksums
        files[f"{directory}/{array.name}/zarr.json"] = json.dumps(array.metadata) + "\n"
        for group in PurePosixPath(array.name).parents[:-1]:
            files[f"{directory}/{group}/zarr.json"] = _group({})
    in_parallel([functools.partial(store.write, key, text.encode()) for key, text in files.items()])
    store.sync(files)
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arrays": entries,
        "metadata": metadata,
    }
    store.write(f"{directory}/{MANIFEST}", _group(attributes | {"sha256": _digest(attributes)}).encode())


def saved_arrays(manifest: Mapping[str, Any]) -> dict[str, SavedArray]:
    """Parses the arrays of a manifest, by name. Raises ValueError for an entry that is not valid."""
    arrays = {}
    for name, entry in manifest["arrays"].items():
        array = SavedArray(name, tuple(entry["shape"]), entry["dtype"], tuple(entry["chunk_shape"]))
        text = entry["crc32c"]
        if array.dtype not in DTYPES or len(text) != 8 * math.prod(array.grid):
            raise ValueError(f"{name!r} has an unknown dtype, or not one checksum per chunk")
        checksums = {index: int(text[8 * i : 8 * i + 8], 16) for i, index in enumerate(np.ndindex(array.grid))}
        arrays[name] = array._replace(checksums=checksums)
    return arrays


def read_manifest(store: Store, step: int) -> dict | None:
    """Returns the attributes of a checkpoint's manifest; None if there is no manifest.

    Raises:
        Damaged: it differs from what was written.
        ValueError: this program cannot read its version.
    """
    key = f"{directory_of(step)}/{MANIFEST}"
    content = store.read(key)
    where = f"{store.url}/{key}"
    if content is None:
        return None
    try:
        manifest = parse_object(where, content, {"attributes": {"format_version": int, "sha256": str}})["attributes"]
        if manifest["sha256"] != _digest(manifest):
            raise ValueError("its own checksum differs")
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            check_types("its attributes", manifest, _ATTRIBUTES, "")
            saved_arrays(manifest)
            if manifest["step"] != step:
                raise ValueError(f"it is of step {manifest['step']}: another checkpoint was copied over it")
            return manifest
    except (ValueError, ZeroDivisionError) as error:
        raise Damaged(f"{where} is not the manifest that was written ({error!r}).") from error
    raise ValueError(
        f"{where} is of version {version}; this program reads only version {FORMAT_VERSION}. Restore it with the "
        "release that wrote it."
    )
