"""Saves and restores checkpoints: a directory for each step, with a zarr v3 array for each leaf,
and a manifest.

docs/formats.md shows the layout. tensorstore's zarr3 driver writes and reads the arrays, with a
crc32c in each chunk. A directory is a checkpoint if and only if its name is ten digits and it holds
the manifest, zarr.json. Process 0 writes this file last, once all processes have written their
shards and each other process a file `.written-<process index>` with its checksums or its error. The
next start or save removes what a killed or failed save left.

The manifest is the attributes of the root group: `format`, `format_version`, `step`, `saved_at` in
UTC, `arrays`, `metadata`, and `sha256`, the hash of `json.dumps(…, sort_keys=True, separators=(",",
":"))` of the other attributes.
"""

import collections
import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.cluster.watch import pause
from shardwright.data import flat_tokens
from shardwright.data.untrusted import LARGE, MEMORY, Damaged, check_types, parse_object
from shardwright.program.differences import config_differences
from shardwright.program.processes import check_processes, gathered, in_all_processes
from shardwright.settings.exits import LOST, exit_of
from shardwright.settings.output import say

T = TypeVar("T")

FORMAT = "pytree-zarr-checkpoint"
FORMAT_VERSION = 3
"""The only version that can be read."""
MANIFEST = "zarr.json"
"""Last part of the key of a checkpoint's manifest. zarr readers require this file, and warn of
other files."""
OWNER = ".owner"
"""File that names the process that saves here, if paths.checkpoints is set."""
SET_ASIDE = "set_aside"
"""Directory, next to the checkpoints, of those that a resumed run does not use: damaged, or of
later steps."""
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
CHECKSUM_BYTES = 4
"""A chunk's file ends with the crc32c of the bytes before."""
DTYPES = frozenset(
    """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16
    """.split()  # noqa: SIM905
)
"""Dtypes that tensorstore reads and writes; zarr-python too, except bfloat16."""
COMMIT_TIMEOUT_S = 1800.0
"""Seconds that process 0 waits for the others to finish writing before the save fails."""
WORKERS = 16
"""Files that a process reads or writes at a time."""
SMALL_BYTES = 2**14
"""Arrays with shards smaller than this are gathered into one file instead of one file per shard."""
MOST_GATHERED = 2**22
"""Largest array to gather, in bytes. Otherwise a small model on many devices would be replicated on
each."""
CHUNK_BYTES = 2**28
"""Largest size of a chunk, where possible: a reader of any part of a chunk reads all of it."""
MOST_PIECES = 64
"""Most chunks of a shard."""
REMEDY = (
    "Run with the model and optimizer that wrote it, or start a new run from another checkpoint."
)

Index = tuple[int, ...]
"""Index of a chunk in the chunk grid of an array."""
Bounds = tuple[tuple[int, int], ...]
"""The region of a shard, as a hashable value: start and stop in each dim, such as ((0, 2), (64,
128))."""
Orders = Mapping[str, np.ndarray]
"""The layer of each row in memory, such as [0, 2, 1, 3], by the path of each stack that is not in
layer order."""
NO_ORDERS: Orders = MappingProxyType({})
_STEP = re.compile("[0-9]{10}")
_TS_ERRORS = (OSError, ValueError, RuntimeError, IndexError, NotImplementedError)
"""Exceptions that tensorstore raises."""
_OF_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE")
"""What its messages about a chunk begin with if the file was changed, cut or removed."""
_ARRAY = {"shape": [int], "dtype": str, "chunk_shape": [int], "crc32c": str}
_ATTRIBUTES = {"step": int, "saved_at": str, "arrays": {str: _ARRAY}, "metadata": dict}
"""Types of the attributes, for check_types."""


def directory_of(step: int) -> str:
    """Returns the name of a checkpoint's directory, such as `0000000500`."""
    return f"{step:010}"


def named_leaves(tree: object) -> dict[str, Any]:
    """Maps the path of each leaf, such as `weights/layers/w_q`, to the leaf.

    Indices are part of the path too.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


class SavedArray(NamedTuple):
    """How an array is saved. The manifest has all but the name.

    Attributes:
        name: its path in the checkpoint, such as `weights/embed`.
        shape: its global shape.
        dtype: name of its NumPy dtype.
        chunk_shape: shape of its chunks.
        crc32c: the checksums of the chunks, eight hex digits each, in C order; empty while the
            array is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    crc32c: str = ""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dim."""
        return tuple(
            -(-size // part) for size, part in zip(self.shape, self.chunk_shape, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk's file, in bytes."""
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize + CHECKSUM_BYTES

    def key(self, index: Index) -> str:
        """Returns the key of a chunk's file in the checkpoint."""
        return "/".join([self.name, "c", *map(str, index)])

    def region(self, index: Index) -> tuple[slice, ...]:
        """Returns the region of the array that a chunk covers."""
        sizes = zip(index, self.chunk_shape, self.shape, strict=True)
        return tuple(slice(i * part, min(size, (i + 1) * part)) for i, part, size in sizes)

    @property
    def metadata(self) -> dict[str, Any]:
        """Content of the array's zarr.json, which tensorstore's zarr3 driver takes too."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "attributes": {},
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": CODECS,
            "fill_value": False if self.dtype == "bool" else 0,
        }


Part = tuple[SavedArray, dict[Index, np.ndarray]]
"""An array to write, and the chunks of it that this process has."""


# ---- files ---------------------------------------------------------------------------------------


class Store:
    """A directory of a local or shared file system, or the keys below a URL: `s3://`, `gs://`, or
    read-only `https://`.

    A key is a path below it, such as `0000000500/weights/embed/zarr.json`. Methods are thread-safe.
    They raise OSError, with the path or URL, if the store fails. When a file is written, the whole
    file is on the disk.

    Args:
        place: path of a directory, which need not exist, or a URL.

    Attributes:
        url: path or URL, for messages.
        path: the directory; None at a URL.

    Raises:
        ValueError: tensorstore cannot read the URL, or it does not respond.
    """

    def __init__(self, place: str | os.PathLike):
        place = os.fspath(place).removeprefix("file://")
        self.path = None if "://" in place else Path(place).expanduser()
        self.url = str(self.path or place.rstrip("/"))
        if self.path is None:
            # With a context that reports a wrong address within seconds.
            flat_tokens.read_file(
                flat_tokens.open_kvstore(self.url, flat_tokens.opening_context()), MANIFEST
            )
        self.kvstore = flat_tokens.open_kvstore(self.url)

    def _result(self, future: ts.Future, key: str) -> Any:
        try:
            return future.result()
        except _TS_ERRORS as error:
            # The reason first: `No space left on device` is at the end of what tensorstore says.
            code = re.search("os_error_code='([0-9]+)'", str(error))
            reason = os.strerror(int(code[1])) if code else ""
            place = f"{self.url}/{key}"
            raise OSError(f"{reason}: {place}" if reason else f"{place}: {error}") from error

    def read(self, key: str, most: int = LARGE) -> bytes | None:
        """Reads a file; None if it is missing.

        Raises Damaged if it is not a file of at most `most` bytes.
        """
        try:
            return flat_tokens.read_file(self.kvstore, key, min(most, MEMORY))
        except Damaged:
            raise
        except ValueError as error:
            raise OSError(str(error)) from error

    def write(self, key: str, content: bytes | None) -> None:
        """Writes a file, or with None removes it if it exists."""
        self._result(self.kvstore.write(key, content), key)

    def open_array(self, directory: str, array: SavedArray) -> ts.TensorStore:
        """Opens an array as the manifest describes it, without reading its zarr.json."""
        spec = {
            "driver": "zarr3",
            "kvstore": (self.kvstore / f"{directory}/{array.name}/").spec().to_json(),
            "metadata": array.metadata,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        try:
            return self._result(
                ts.open(spec, open=True, assume_metadata=True), f"{directory}/{array.name}"
            )
        except ValueError as error:  # a name or shape that no run writes
            raise OSError(f"{self.url}/{directory}: {error}") from error

    def write_chunk(
        self, directory: str, array: SavedArray, index: Index, values: np.ndarray
    ) -> str:
        """Writes a chunk. Returns its checksum, as in SavedArray.crc32c."""
        key = f"{directory}/{array.key(index)}"
        target = self.open_array(directory, array)[array.region(index)]
        self._result(target.write(values).commit, key)
        return self._checksum(key)

    def read_chunk(self, directory: str, array: SavedArray, index: Index) -> np.ndarray:
        """Reads a chunk.

        Raises Damaged if it differs from what was written, OSError if the store fails.
        """
        key = f"{directory}/{array.key(index)}"
        number = int(np.ravel_multi_index(index, array.grid)) if index else 0
        source = self.open_array(directory, array)[array.region(index)]
        why = "is not what was written: its checksum differs from the manifest's"
        try:
            # tensorstore would wait for a pipe, and end the process if memory ends.
            flat_tokens.check_files(self.kvstore, [key], min(array.chunk_bytes, MEMORY))
            if self._checksum(key) in ("", array.crc32c[8 * number : 8 * number + 8]):
                return self._result(source.read(), key)
        except (OSError, ValueError) as error:
            cause = str(error.__cause__ or error)
            if not isinstance(error, Damaged) and not cause.startswith(_OF_DAMAGE):
                raise OSError(str(error)) from error
            if not cause.startswith("DATA_LOSS"):
                why = f"is not a file of {array.chunk_bytes} bytes ({cause})"
        raise Damaged(
            f"cannot read the array {array.name!r}: {array.key(index)} {why}. The checkpoint "
            f"{self.url}/{directory} is damaged. Restore another step, or copy the checkpoint "
            "again."
        )

    def _checksum(self, key: str) -> str:
        """Returns the last four bytes of a chunk's file, a little-endian number, in hex; "" if
        there is no file.
        """
        return (
            self._result(self.kvstore.read(key, byte_range=slice(-CHECKSUM_BYTES, None)), key)
            .value[::-1]
            .hex()
        )

    def directories(self) -> dict[str, bool]:
        """Maps the name of each top-level directory to whether it has a manifest.

        At a URL, lists all keys.
        """
        if self.path is not None:
            found = self.path.iterdir() if self.path.is_dir() else ()
            # A manifest that is not a file is damage, which is set aside; without any, the
            # directory may be removed.
            return {
                entry.name: os.path.lexists(entry / MANIFEST) for entry in found if entry.is_dir()
            }
        parts = [key.decode().partition("/") for key in self._result(self.kvstore.list(), "")]
        manifests = {name for name, _, rest in parts if rest == MANIFEST}
        return {name: name in manifests for name, slash, _ in parts if slash}

    def remove(self, directory: str) -> None:
        """Removes a directory if it exists.

        The manifest goes first, so that the rest does not pass as complete.
        """
        if self.path is None or (self.path / directory).exists():
            self.write(f"{directory}/{MANIFEST}", None)
            self._result(self.kvstore.delete_range(_below(directory)), directory)
            if self.path is not None:
                (self.path / directory).rmdir()

    def move(self, directory: str, target: str) -> None:
        """Renames a directory.

        At a URL, copies its files, the manifest last, and then removes them.
        """
        if self.path is not None:
            (self.path / target).parent.mkdir(parents=True, exist_ok=True)
            (self.path / directory).rename(self.path / target)
            return
        keys = [
            key.decode() for key in self._result(self.kvstore.list(_below(directory)), directory)
        ]
        for key in sorted(keys, key=lambda key: key == f"{directory}/{MANIFEST}"):
            self.write(target + key.removeprefix(directory), self.read(key, MEMORY))
        self.remove(directory)

    def sync(self, keys: Iterable[str]) -> None:
        """Fsyncs all directories above these files. tensorstore syncs only the directory that
        contains a file.
        """
        if self.path is None:
            return
        for parent in {parent for key in keys for parent in PurePosixPath(key).parents}:
            descriptor = os.open(self.path / parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _below(directory: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(f"{directory}/", f"{directory}0")


def in_parallel(jobs: Iterable[Callable[[], T]]) -> list[T]:
    """Runs jobs, WORKERS at a time, and returns their results.

    After an error no further job starts.

    The error is raised once all have ended, because a late write could recreate files that the next
    save removes.
    """
    with concurrent.futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="chunk") as pool:
        return list(pool.map(lambda job: job(), jobs))


# ---- chunks of a shard ---------------------------------------------------------------------------


def chunk_shape(leaf: Any, order: np.ndarray | None) -> tuple[int, ...]:
    """Chooses the chunk shape: that of a shard, or of one of up to MOST_PIECES equal parts of a
    large one.

    With `order`, a chunk of a sharded stack has one layer, because two shards may have consecutive
    layers.
    """
    chunk = [max(1, size) for size in leaf.sharding.shard_shape(leaf.shape)]
    if order is not None and not leaf.is_fully_replicated:
        chunk[0] = 1
    if chunk:
        least = -(-math.prod(chunk) * leaf.dtype.itemsize // CHUNK_BYTES)
        chunk[0] //= next((n for n in range(least, MOST_PIECES + 1) if chunk[0] % n == 0), 1)
    return tuple(chunk)


def bounds_of(index: Iterable[slice], shape: Iterable[int]) -> Bounds:
    """Returns the start and stop in each dim of a region."""
    return tuple(at.indices(size)[:2] for at, size in zip(index, shape, strict=True))


def holders_of(leaf: Any) -> dict[Bounds, list[int]]:
    """Maps the bounds of each shard of a leaf to the processes that hold it, ascending."""
    found = collections.defaultdict(set)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        found[bounds_of(index, leaf.shape)].add(device.process_index)
    return {bounds: sorted(processes) for bounds, processes in found.items()}


def chunks_of(
    array: SavedArray, bounds: Bounds, order: np.ndarray | None
) -> Iterator[tuple[Index, tuple[slice, ...], tuple[slice, ...]]]:
    """Cuts a shard where chunks end.

    Yields the index of a chunk, and a part as slices of the shard and of the chunk.

    Rows of a shard beyond those of the array are in no part.
    """
    cuts = []
    for dim, (start, stop) in enumerate(bounds):
        ranges = [(start, stop, start)]
        if order is not None and dim == 0:
            ranges = [(row, row + 1, int(order[row])) for row in range(start, stop)]
        part = array.chunk_shape[dim]
        found = []
        for at, end, saved in ranges:
            last = min(end, at + array.shape[dim] - saved)
            while at < last:
                chunk, offset = divmod(saved, part)
                count = min(last - at, part - offset)
                found.append(
                    (chunk, slice(at - start, at - start + count), slice(offset, offset + count))
                )
                at += count
                saved += count
        cuts.append(found)
    for parts in itertools.product(*cuts):
        yield (
            tuple(x for x, _, _ in parts),
            tuple(x for _, x, _ in parts),
            tuple(x for _, _, x in parts),
        )


# ---- writing -------------------------------------------------------------------------------------


def is_small(leaf: Any) -> bool:
    """Returns True for a leaf that is not fully replicated but small enough to be written as one
    file.
    """
    if leaf.sharding.is_fully_replicated:
        return False
    of_shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return of_shard < SMALL_BYTES and math.prod(leaf.shape) * leaf.dtype.itemsize <= MOST_GATHERED


def writers_of(
    array: SavedArray, leaf: Any, order: np.ndarray | None, turn: Iterator[int]
) -> Iterator[tuple[int, Index, Bounds, tuple[slice, ...]]]:
    """Yields each chunk to write: a process, the index of the chunk, bounds of a shard, and the
    part of it to write.

    Processes that have the same shard take turns, by the numbers of `turn`, so that each writes
    less.
    """
    for bounds, processes in holders_of(leaf).items():
        for index, part, _ in chunks_of(array, bounds, order):
            yield processes[next(turn) % len(processes)], index, bounds, part


def copy_to_host(leaves: dict[str, jax.Array], orders: Orders) -> list[Part]:
    """Returns each array with the chunks of it that this process writes, in host memory.

    Waits for the copies.
    """
    arrays = []
    turn = itertools.count()
    for name, leaf in leaves.items():
        order = orders.get(name)
        array = SavedArray(name, leaf.shape, str(leaf.dtype), chunk_shape(leaf, order))
        rows: Any = ...
        if order is not None and leaf.is_fully_replicated:
            rows = np.argsort(order)
            order = None
        own = {bounds_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        chunks: dict[Index, np.ndarray] = {}
        for process, index, bounds, part in writers_of(array, leaf, order, turn):
            if process == jax.process_index():
                # On CPU this references the buffer instead of copying. While it lives, JAX copies
                # the buffer when a step donates it.
                chunks[index] = np.asarray(own[bounds])[rows][part]
        arrays.append((array, chunks))
    return arrays


def write_arrays(store: Store, directory: str, arrays: list[Part]) -> dict[str, str]:
    """Writes this process's chunks, each synced to the disk.

    Returns the checksum of each by its key.
    """
    write = functools.partial(store.write_chunk, directory)
    chunks = [(array, *chunk) for array, chunks in arrays for chunk in chunks.items()]
    checksums = in_parallel([functools.partial(write, *chunk) for chunk in chunks])
    keys = [array.key(index) for array, index, _ in chunks]
    store.sync(f"{directory}/{key}" for key in keys)
    return dict(zip(keys, checksums, strict=True))


def commit(
    store: Store, step: int, arrays: list[SavedArray], written: Mapping[str, str], metadata: object
) -> None:
    """Completes a checkpoint whose chunks are written: writes all metadata, and the manifest last.

    `written` joins what write_arrays returned in all processes; `metadata` goes into the manifest.
    Raises OSError if the store fails, or if a chunk was not written.
    """
    directory = directory_of(step)
    entries = {}
    files = {}
    for array in arrays:
        keys = [array.key(index) for index in np.ndindex(array.grid)]
        if lost := [key for key in keys if key not in written]:
            raise OSError(f"no process wrote the chunk {lost[0]}.")
        crc32c = "".join(written[key] for key in keys)
        entries[array.name] = {
            "shape": array.shape,
            "dtype": array.dtype,
            "chunk_shape": array.chunk_shape,
        }
        entries[array.name]["crc32c"] = crc32c
        files[f"{directory}/{array.name}/zarr.json"] = json.dumps(array.metadata).encode()
        for group in PurePosixPath(array.name).parents[:-1]:
            files[f"{directory}/{group}/zarr.json"] = _group({})
    in_parallel(functools.partial(store.write, *file) for file in files.items())
    store.sync(files)
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arrays": entries,
        "metadata": metadata,
    }
    store.write(f"{directory}/{MANIFEST}", _group(attributes | {"sha256": _digest(attributes)}))


def _group(attributes: Mapping[str, Any]) -> bytes:
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return (json.dumps(group, indent=1, allow_nan=False) + "\n").encode()


def _digest(attributes: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in attributes.items() if key != "sha256"}
    return hashlib.sha256(
        json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


# ---- reading -------------------------------------------------------------------------------------


def saved_arrays(manifest: Mapping[str, Any]) -> dict[str, SavedArray]:
    """Returns the arrays of a manifest, by name.

    Raises ValueError for an entry that no run writes.
    """
    arrays = {}
    for name, entry in manifest["arrays"].items():
        array = SavedArray(
            name,
            tuple(entry["shape"]),
            entry["dtype"],
            tuple(entry["chunk_shape"]),
            entry["crc32c"],
        )
        is_hex = re.fullmatch("([0-9a-f]{8})*", array.crc32c)
        if (
            array.dtype not in DTYPES
            or not is_hex
            or len(array.crc32c) != 8 * math.prod(array.grid)
        ):
            raise ValueError(f"{name!r} has an unknown dtype, or not one checksum per chunk")
        arrays[name] = array
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
        manifest = parse_object(
            where, content, {"attributes": {"format_version": int, "sha256": str}}
        )["attributes"]
        if manifest["sha256"] != _digest(manifest):
            raise ValueError("its own checksum differs")
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            check_types("its attributes", manifest, _ATTRIBUTES, "")
            saved_arrays(manifest)
            if manifest["step"] != step:
                raise ValueError(
                    f"it is of step {manifest['step']}: another checkpoint was copied over it"
                )
            return manifest
    except (ValueError, ZeroDivisionError) as error:
        raise Damaged(f"{where} is not the manifest that was written ({error!r}).") from error
    raise ValueError(
        f"{where} is of version {version}; this program reads only version {FORMAT_VERSION}. "
        f"Restore it with the release that wrote it."
    )


def read_arrays(
    store: Store,
    directory: str,
    saved: Mapping[str, SavedArray],
    like: Mapping[str, Any],
    orders: Orders,
) -> list[jax.Array]:
    """Reads arrays with the shardings of `like`, each chunk once.

    Rows of `like` beyond those saved are 0.
    """
    shards: dict[str, dict[Bounds, np.ndarray]] = {}
    jobs = []
    for name, leaf in like.items():
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        all_bounds = {bounds_of(index, leaf.shape) for index in indices}
        shards[name] = {
            x: np.zeros([stop - start for start, stop in x], leaf.dtype) for x in all_bounds
        }
        wanted = collections.defaultdict(list)
        for bounds, values in shards[name].items():
            for index, *part in chunks_of(saved[name], bounds, orders.get(name)):
                wanted[index].append((values, *part))
        read = functools.partial(_read_into, store, directory, saved[name])
        jobs += [functools.partial(read, index, parts) for index, parts in wanted.items()]
    in_parallel(jobs)

    def place(name: str, leaf: Any) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            return shards[name][bounds_of(index, leaf.shape)]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return [place(name, leaf) for name, leaf in like.items()]


def _read_into(
    store: Store, directory: str, array: SavedArray, index: Index, parts: list[tuple[Any, ...]]
) -> None:
    chunk = store.read_chunk(directory, array, index)
    for values, in_shard, in_chunk in parts:
        values[in_shard] = chunk[in_chunk]


# ---- checkpoints ---------------------------------------------------------------------------------


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores pytrees of jax.Arrays under `<place>/<step, 10 digits>/<leaf path>`.

    With several processes, all make the same calls in the same order on the same `place`. Those
    that have the same shards divide the writing.

    Args:
        place: path in a file system that all processes share, created by the first save; or a URL,
            as for Store.
        keep: number of complete checkpoints to keep, at least 1; None keeps all. Older ones are
            removed when a new one is complete.
    """

    def __init__(self, place: str | os.PathLike, *, keep: int | None = None):
        self.store = Store(place)
        self._keep = keep
        self._executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="checkpoint"
        )
        self.saving: concurrent.futures.Future | None = None
        """The save in progress; None if there is none, or it was waited for."""
        self.held: Callable[[], Iterable[int]] = tuple
        """Returns the steps whose checkpoints must not be removed yet, such as while an export
        reads them."""
        self._owner: bytes | None = None
        self._failed: int | None = None  # step of a save that may have left a complete checkpoint
        self._others_are_lost = False

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._others_are_lost = error is not None and exit_of(error) is LOST
        with contextlib.suppress(*[OSError] if self._others_are_lost else []):
            self.close()

    def steps(self) -> list[int]:
        """Lists the steps of all complete checkpoints, ascending.

        A directory without a manifest is not one.
        """
        return sorted(
            int(name)
            for name, done in self.store.directories().items()
            if done and _STEP.fullmatch(name)
        )

    def latest_step(self, without: Iterable[int] = ()) -> int | None:
        """Returns the last step that has a complete checkpoint and is not in `without`, or None.

        Process 0 decides.
        """
        several = jax.distributed.is_initialized()
        # listing a URL yields the files of all processes
        is_first = not several or jax.process_index() == 0
        latest = in_all_processes(
            lambda: max({*self.steps()} - {*without}, default=-1) if is_first else -1
        )
        if several:
            latest = int(gathered(np.int32(latest))[0])
        return None if latest < 0 else latest

    def metadata(self, step: int) -> dict:
        """Returns the metadata that `save` was given for this step. Raises as `manifest`."""
        return self.manifest(step)["metadata"]

    @pause("saving a checkpoint")
    def save(
        self,
        step: int,
        state: Any,
        metadata: dict,
        orders: Orders = NO_ORDERS,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies `state` to host memory, then writes it in the background.

        Once it returns, the buffers of `state` may be donated or deleted. Waits for the previous
        save first. If writing fails, the next `save` or `wait` raises the error.

        Args:
            step: 0 to 2**31 - 1; not saved before. A save that failed may be repeated.
            state: a pytree of jax.Arrays of booleans, integers, bf16, f16, f32, or f64, in
                containers with named or numbered children (dataclasses, dicts, tuples, lists).
                Names become directory names.
            metadata: JSON values without NaN or infinity, kept in the manifest. `check` may add to
                it.
            orders: for the path of each stack of layers, the layer that each of its rows in memory
                holds, such as [0, 2, 1, 3]. Stacks are written in layer order.
            check: called in every process before anything is written. It may wait for the step that
                computes `state`. If it raises OSError, it must do so in all processes; the save
                then fails as if writing had failed. Another exception is raised at once.

        Raises:
            ValueError: a step, leaf or name cannot be saved. The message names it.
            OSError: the previous save failed.
        """
        self.wait()
        leaves = named_leaves(state)
        if odd := [name for name, leaf in leaves.items() if str(leaf.dtype) not in DTYPES]:
            raise ValueError(
                f"cannot save {odd[0]!r}: its dtype is not one of {', '.join(sorted(DTYPES))}."
            )
        # Shards below SMALL_BYTES: otherwise even the norms of a model would take one file per
        # device.
        for name, leaf in leaves.items():
            if is_small(leaf):
                leaves[name] = jax.device_put(
                    leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec())
                )
        for leaf in leaves.values():
            leaf.copy_to_host_async()
        try:
            # On the main thread, so that every process issues its collectives in the same order.
            # The copies below wait for the running step anyway.
            in_all_processes(lambda: self._make_room(step) if jax.process_index() == 0 else None)
            check()
        except OSError as error:
            self.saving = self._executor.submit(self._fail, step, error)
            return
        arrays = copy_to_host(leaves, orders)
        self.saving = self._executor.submit(self._write, step, arrays, metadata)

    @pause("waiting for a checkpoint to be written")
    def wait(self) -> None:
        """Waits for the save in progress. Raises OSError if it failed."""
        if self.saving is not None:
            saving = self.saving
            self.saving = None
            saving.result()

    def close(self) -> None:
        """Waits for the save in progress, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    @pause("restoring a checkpoint")
    def restore(
        self, step: int, like: object, orders: Orders = NO_ORDERS, partly: bool = False
    ) -> Any:
        """Restores the state saved at `step`, with the shardings of `like`.

        An error in one process is raised in all.

        Each process reads only chunks that its devices need, each once.

        Args:
            step: step of a complete checkpoint.
            like: a pytree of jax.ShapeDtypeStruct with shardings, or of arrays, on any mesh. It may
                lack whole top-level children of the saved pytree, such as the optimizer's state,
                which are not read.
            orders: as for `save`, on the mesh of `like`.
            partly: True: `like` may lack any array, and its arrays may have more rows than were
                saved; these become 0.

        Raises:
            ValueError: the arrays of the checkpoint and of `like` differ. The message names them.
            Damaged: an array is missing, or differs from what was saved at this step.
            OSError: the store fails.
        """
        name = directory_of(step)
        manifest = self.manifest(step)
        expected = named_leaves(like)
        children = {key.partition("/")[0] for key in expected}
        every = saved_arrays(manifest).items()
        saved = {key: array for key, array in every if key.partition("/")[0] in children}
        if not partly:
            check_same_arrays(f"{self.store.url}/{name}", saved, expected)
        arrays = in_all_processes(lambda: read_arrays(self.store, name, saved, expected, orders))
        return jax.tree.unflatten(jax.tree.structure(like), arrays)

    def manifest(self, step: int) -> dict:
        """Reads the manifest of a checkpoint. All processes call this, and must read the same.

        Raises ValueError if there is none, or if another process reads another one; Damaged if it
        is damaged.
        """

        def read() -> dict:
            manifest = read_manifest(self.store, step)
            if manifest is None:
                raise ValueError(
                    f"no complete checkpoint of step {step} in {self.store.url}; it has "
                    f"{self.steps()}."
                )
            return manifest

        manifest = in_all_processes(read)
        # Each process reads its own shards and checks them by its own manifest.
        check_processes({f"checkpoint {self.store.url}/{directory_of(step)}": manifest})
        return manifest

    def take_ownership(self) -> None:
        """Takes ownership of the directory: an earlier run can no longer save to it.

        One process calls this.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        name = (
            f"process {os.getpid()} on {socket.gethostname()}, since {since} "
            f"({secrets.token_hex(8)})"
        )
        self._owner = name.encode()
        self.store.write(OWNER, self._owner)

    def _check_owner(self) -> None:
        owner = self.store.read(OWNER) if self._owner else None
        if owner not in (None, self._owner):
            raise OSError(
                f"another run saves to {self.store.url}: {owner.decode(errors='replace')}. End one "
                f"of the two, or rename it (paths.model_name). To continue with this one, delete "
                f"{self.store.url}/{OWNER}."
            )

    def remove_leftovers(self) -> None:
        """Removes the directories that killed and failed saves left. Prints a failure.

        One process calls this.
        """
        with self._if_possible():
            for name, done in self.store.directories().items():
                if not done and _STEP.fullmatch(name):
                    self.store.remove(name)

    @contextlib.contextmanager
    def _if_possible(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            say(f"WARNING: cannot remove old checkpoints in {self.store.url}: {error}")

    def _make_room(self, step: int) -> None:
        """Empties the directory for a new checkpoint.

        Raises ValueError if an earlier save completed it.
        """
        name = directory_of(step)
        self._check_owner()
        if step != self._failed and self.store.read(f"{name}/{MANIFEST}") is not None:
            raise ValueError(
                f"cannot save step {step}: {self.store.url}/{name} exists already. Save each step "
                f"once, or move it away."
            )
        self.remove_leftovers()
        # if it cannot be removed, the save must fail: leftovers would become part of it
        self.store.remove(name)

    def verify(self, step: int) -> list[str]:
        """Reads all chunks of a checkpoint.

        Returns a message for each damaged one; [] if all are intact.
        """
        directory = directory_of(step)
        try:
            arrays = saved_arrays(self.manifest(step)).values()
        except Damaged as error:
            return [str(error)]

        def problem_of(array: SavedArray, index: Index) -> str:
            try:
                self.store.read_chunk(directory, array, index)
            except Damaged as error:
                return str(error)
            return ""

        chunks = [(array, index) for array in arrays for index in np.ndindex(array.grid)]
        return sorted(
            filter(None, in_parallel([functools.partial(problem_of, *chunk) for chunk in chunks]))
        )

    def set_aside(self, steps: Iterable[int]) -> str:
        """Moves checkpoints, damaged or not, into a new directory under SET_ASIDE.

        Returns its path or URL.
        """
        # to the microsecond: two starts within a second have two directories
        now = datetime.datetime.now(datetime.UTC)
        place = now.strftime(f"{SET_ASIDE}/%Y%m%dT%H%M%S.%fZ")
        for name in map(directory_of, steps):
            self.store.move(name, f"{place}/{name}")
        return f"{self.store.url}/{place}"

    def _write(self, step: int, arrays: list[Part], metadata: dict) -> None:
        directory = directory_of(step)
        is_first = jax.process_index() == 0
        marker = f"{directory}/.written-{jax.process_index()}"
        try:
            written = write_arrays(self.store, directory, arrays)
            if is_first:
                written |= self._await_others(directory)
                self._check_owner()
                commit(self.store, step, [array for array, _ in arrays], written, metadata)
            else:
                self.store.write(marker, json.dumps({"written": written}).encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                if is_first:
                    self._check_owner()  # the directory may be another run's
                    # it may have filled the disk, and the metrics need room
                    self.store.remove(directory)
                else:
                    self.store.write(marker, json.dumps({"failed": str(error)}).encode())
            self._fail(step, error)
        if is_first:
            self.rotate()

    def rotate(self) -> None:
        """Removes all checkpoints except the latest `keep` and those of `held`.

        One process calls this.
        """
        if self._keep:
            with self._if_possible():
                for old in {*self.steps()[: -self._keep]} - {*self.held()}:
                    self.store.remove(directory_of(old))

    def _fail(self, step: int, error: OSError) -> None:
        self._failed = step
        raise OSError(
            f"{str(error).rstrip('.')}. The checkpoint {self.store.url}/{directory_of(step)} was "
            f"not saved. Earlier ones, if any, are unchanged."
        ) from error

    def _await_others(self, directory: str) -> dict[str, str]:
        """Waits for the other processes and returns their checksums.

        The barrier is made of files, because a collective on this background thread could
        interleave differently with those of the training step on each host, and hang them all.
        """
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        written = {}
        others = range(1, jax.process_count())
        for found in in_parallel(
            functools.partial(self._await, directory, process, deadline) for process in others
        ):
            written |= found
        return written

    def _await(self, directory: str, process: int, deadline: float) -> dict[str, str]:
        key = f"{directory}/.written-{process}"
        while (content := self.store.read(key)) is None:
            if self._others_are_lost or time.monotonic() > deadline:
                raise OSError(
                    f"process {process} did not finish within {COMMIT_TIMEOUT_S:g} s. Is the "
                    f"directory on a file system that all hosts share?"
                )
            time.sleep(0.2 if self.store.path else 1.0)
        found = json.loads(content)
        if "failed" in found:
            raise OSError(f"{found['failed'].rstrip('.')} (of process {process})")
        self.store.write(key, None)
        return found["written"]


def find_checkpoint(path: str | os.PathLike, step: int | None = None) -> tuple[Checkpointer, int]:
    """Returns a Checkpointer for a run, which the caller closes, and a step, the same in all
    processes.

    `path` is the directory or URL of a run, or of one of its checkpoints. If `step` is None,
    returns the step of that checkpoint, or the last complete step of the run; raises ValueError if
    the run has none. Does not check that a step given by `path` or `step` exists.
    """
    place = os.fspath(path).rstrip("/")
    above, _, name = place.rpartition("/")
    within = os.path.expanduser(f"{place.removeprefix('file://')}/checkpoints")
    if _STEP.fullmatch(name) and not os.path.exists(within):  # a run may have such a name
        return Checkpointer(above or "."), int(name) if step is None else step
    checkpoints = Checkpointer(f"{place}/checkpoints")
    found = checkpoints.latest_step() if step is None else step
    if found is None:
        checkpoints.close()
        raise ValueError(
            f"no complete checkpoint in {checkpoints.store.url}. Give the directory of a run, such "
            f"as runs/<name>, or of one checkpoint, such as runs/<name>/checkpoints/0000000500. If "
            f"the run set paths.checkpoints, look there."
        )
    return checkpoints, found


def check_same_arrays(
    path: str, saved: dict[str, SavedArray], expected: dict[str, Any], remedy: str = REMEDY
) -> None:
    """Raises ValueError, with differences and `remedy`, unless the saved arrays have the expected
    shapes and dtypes.
    """
    found = {name: f"{array.dtype}{list(array.shape)}" for name, array in saved.items()}
    wanted = {name: f"{x.dtype}{list(x.shape)}" for name, x in expected.items()}
    if problems := config_differences(found, wanted, (*found, *wanted)):
        raise ValueError(
            f"the checkpoint {path} does not fit this run:\n  "
            + "\n  ".join(problems[:10])
            + f"\n{remedy}"
        )
