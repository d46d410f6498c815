"""Manifests of checkpoints, which bind every file of a checkpoint to its place and step by a checksum.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardwright.run.stores import MANIFEST, Damaged, Store, in_parallel
from shardwright_data.foreign import check_types, parse_object

FORMAT = "pytree-zarr-checkpoint"
FORMAT_VERSION = 3
VERSIONS = (2, FORMAT_VERSION)
"""Versions that are read. Version 2 also has checksums of the zarr.json of the arrays, which are not needed."""
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
CHECKSUM_BYTES = 4
DTYPES = frozenset(
    """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16
    """.split()  # noqa: SIM905
)
"""Types that tensorstore reads and writes, and zarr-python too, but for bfloat16."""
Index = tuple[int, ...]
"""Index of a chunk in the grid of the chunks of an array."""
Box = tuple[slice, ...]
"""A region of an array, with bounds."""
Checksums = dict[str, int]
"""The crc32c of each chunk, by the key of its file in the checkpoint."""
_ARRAY = {"shape": [int], "dtype": str, "chunk_shape": [int], "crc32c": str}
_ATTRIBUTES = {"step": int, "saved_at": str, "arrays": {str: _ARRAY}, "metadata": dict}
"""Types of the attributes, for check_types."""


class SavedArray(NamedTuple):
    """An array of a checkpoint.

    Attributes:
        name: its path.
        shape: its global shape.
        dtype: name of its NumPy dtype.
        chunk: shape of its chunks.
        checksums: crc32c of each chunk, by its index in the grid of chunks; empty while it is written.
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
    def file_bytes(self) -> int:
        """Size of the files of all chunks."""
        return math.prod(self.grid) * self.chunk_bytes

    @property
    def chunk_bytes(self) -> int:
        """Size of the file of a chunk."""
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize + CHECKSUM_BYTES

    def box(self, index: Index) -> Box:
        """The region of a chunk."""
        sizes = zip(index, self.chunk, self.shape, strict=True)
        return tuple(slice(i * part, min(size, (i + 1) * part)) for i, part, size in sizes)

    def overlapping(self, box: Box) -> Iterable[Index]:
        """Index of each chunk that has a part of a region."""
        spans = [range(at.start // part, -(-at.stop // part)) for at, part in zip(box, self.chunk, strict=True)]
        return itertools.product(*spans) if all(at.start < at.stop for at in box) else ()

    def key(self, index: Index) -> str:
        """Key of the file of a chunk, in the checkpoint."""
        return "/".join([self.name, "c", *map(str, index)])

    @property
    def metadata(self) -> dict[str, Any]:
        """What the array's zarr.json says, which is all that tensorstore has to know of it."""
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
    """Name of the directory of a checkpoint."""
    return f"{step:010}"


def _group(attributes: Mapping[str, Any]) -> str:
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group, indent=1, allow_nan=False) + "\n"


def _digest(attributes: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in attributes.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def commit(store: Store, step: int, arrays: list[SavedArray], written: Checksums, metadata: Any) -> None:
    """Turns the chunks in the directory of a step into a checkpoint: writes all metadata, and the manifest last.

    Args:
        store: where the checkpoints are.
        step: the step.
        arrays: all arrays.
        written: what write_arrays returned, of all processes.
        metadata: what the program adds to the manifest.

    Raises:
        OSError: the store failed, or no process wrote a chunk.
    """
    directory, files, entries = directory_of(step), {}, {}
    for array in arrays:
        keys = [array.key(index) for index in np.ndindex(array.grid)]
        if lost := [key for key in keys if key not in written]:
            raise OSError(f"no process wrote {lost[0]}.")
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
    """The arrays of a manifest, by name. Raises ValueError for one that no run writes."""
    arrays = {}
    for name, entry in manifest["arrays"].items():
        array = SavedArray(name, tuple(entry["shape"]), entry["dtype"], tuple(entry["chunk_shape"]))
        text = entry["crc32c"]
        if array.dtype not in DTYPES or len(text) != 8 * math.prod(array.grid):
            raise ValueError(f"{name!r} has no dtype, or not a checksum for each chunk")
        checksums = {index: int(text[8 * i : 8 * i + 8], 16) for i, index in enumerate(np.ndindex(array.grid))}
        arrays[name] = array._replace(checksums=checksums)
    return arrays


def read_manifest(store: Store, step: int) -> dict | None:
    """The attributes of the manifest of a checkpoint; None if there is none.

    Raises:
        Damaged: it is not what was written.
        ValueError: it is of a version that this program does not read.
    """
    key = f"{directory_of(step)}/{MANIFEST}"
    content, where = store.read(key), f"{store.url}/{key}"
    if content is None:
        return None
    try:
        manifest = parse_object(where, content, {"attributes": {"format_version": int, "sha256": str}})["attributes"]
        if manifest["sha256"] != _digest(manifest):
            raise ValueError("its own checksum differs")
        version = manifest["format_version"]
        if version in VERSIONS:
            check_types("its attributes", manifest, _ATTRIBUTES, "")
            saved_arrays(manifest)
            if manifest["step"] != step:
                raise ValueError(f"it is of step {manifest['step']}: another checkpoint was copied over it")
            return manifest
    except (ValueError, ZeroDivisionError) as error:
        raise Damaged(f"{where} is not the manifest that was written ({error!r}).") from error
    raise ValueError(
        f"{where} is of version {version}; this program reads the versions {VERSIONS}. Restore it with the version of "
        "the program that wrote it."
    )
