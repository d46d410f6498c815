"""Manifests of checkpoints, which bind every file of a checkpoint to its place and step by a checksum.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import functools
import hashlib
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from configuration.foreign import parse_json
from training_io.stores import MANIFEST, Damaged, Store, in_parallel

FORMAT = "pytree-zarr-checkpoint"
FORMAT_VERSION = 2
VERSIONS = (1, FORMAT_VERSION)
"""Versions that are read. Version 1 has no checksums in its manifest."""
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
CHECKSUM_BYTES = 4
DTYPES = frozenset(
    """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16
    """.split()  # noqa: SIM905
)
"""Types that tensorstore reads and writes, and zarr-python too, but for bfloat16."""
_LATER = ("sha256", "saved_at", "files", "chunk_shape", "crc32c")
"""Keys that version 1 does not have."""
MANIFEST_BYTES, METADATA_BYTES, MAX_CHUNKS = 2**30, 2**20, 2**20
"""Largest size of a manifest and of another zarr.json, and number of chunks of an array, that are read. Far more than a
run writes: without a bound a small file of a stranger takes all memory."""


class SavedArray(NamedTuple):
    """An array of a checkpoint.

    Attributes:
        name: its path.
        shape: its global shape.
        dtype: name of its NumPy dtype.
        chunk: shape of its chunks.
        checksums: crc32c of each chunk, in C order of the grid of chunks; None in version 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    checksums: tuple[int, ...] | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dim."""
        return tuple(-(-size // part) for size, part in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Size of the file of a chunk."""
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize + CHECKSUM_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of the files of all chunks."""
        return math.prod(self.grid) * self.chunk_bytes

    def chunks(self) -> Iterable[tuple[int, ...]]:
        """Index of each chunk, in C order."""
        return itertools.product(*map(range, self.grid))

    def number(self, index: tuple[int, ...]) -> int:
        """Place of a chunk in C order."""
        return int(np.ravel_multi_index(index, self.grid)) if index else 0

    def key(self, index: tuple[int, ...]) -> str:
        """Key of the file of a chunk, in the checkpoint."""
        return "/".join([self.name, "c", *map(str, index)])


def directory_of(step: int) -> str:
    """Name of the directory of a checkpoint. Raises ValueError for a step out of range."""
    if not 0 <= step < 10**10:
        raise ValueError(f"step {step} is outside 0 … 9,999,999,999.")
    return f"{step:010}"


def is_name(name: str) -> bool:
    """Whether an array may have this name: each part between slashes is one that a directory can have."""
    return all(
        re.fullmatch(r"[\w\-+=. ]+", part) and not part.startswith(".") and part != "zarr.json"
        for part in name.split("/")
    )


def array_text(array: SavedArray) -> str:
    """Content of the file zarr.json of an array."""
    content = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": CODECS,
        "fill_value": False if array.dtype == "bool" else 0,
        "attributes": {},
    }
    return json.dumps(content) + "\n"


def group_text(attributes: Mapping[str, Any]) -> str:
    """Content of the file zarr.json of a group."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group, indent=1, allow_nan=False) + "\n"


def metadata_files(arrays: Iterable[SavedArray]) -> dict[str, str]:
    """Content of each zarr.json of a checkpoint but the manifest, by its key in the checkpoint."""
    files = {f"{array.name}/zarr.json": array_text(array) for array in arrays}
    groups = {str(parent) for name in files for parent in PurePosixPath(name).parents[1:]} - {"."}
    return files | {f"{group}/zarr.json": group_text({}) for group in groups}


def check_json(metadata: Any) -> None:
    """Raises ValueError for metadata of a checkpoint that is not JSON."""
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's metadata cannot be written as JSON: {error}.") from error


def _digest(attributes: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in attributes.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_text(step: int, arrays: Iterable[SavedArray], files: Mapping[str, str], metadata: Any) -> str:
    """Text of a manifest: of `arrays` with their checksums, and `files`, all metadata files with their contents."""
    entries = {
        array.name: {
            "shape": array.shape,
            "dtype": array.dtype,
            "chunk_shape": array.chunk,
            "crc32c": "".join(f"{checksum:08x}" for checksum in array.checksums or ()),
        }
        for array in arrays
    }
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arrays": entries,
        "files": {key: hashlib.sha256(text.encode()).hexdigest() for key, text in sorted(files.items())},
        "metadata": metadata,
    }
    return group_text(attributes | {"sha256": _digest(attributes)})


def commit(
    store: Store,
    temporary: str,
    step: int,
    arrays: list[SavedArray],
    written: Iterable[Mapping[str, Mapping[Any, int]]],
    metadata: dict,
    check_owner: Callable[[], None] = lambda: None,
) -> None:
    """Turns the chunks in the directory `temporary` into a checkpoint: writes all metadata, and the manifest last.

    Args:
        store: where the checkpoints are.
        temporary: where the chunks are. It gets the name of the step if it has another.
        step: the step.
        arrays: all arrays.
        written: for each process, what write_arrays returned.
        metadata: what the program adds to the manifest.
        check_owner: called before the manifest is written; nothing is complete if it raises OSError.

    Raises:
        OSError: the store failed, or a chunk was not written or is gone.
    """
    checksums: dict[str, dict[int, int]] = {array.name: {} for array in arrays}
    parts = list(written)
    for part in parts:
        for name, values in part.items():
            checksums[name] |= {int(number): value for number, value in values.items()}
    whole = []
    for array in arrays:
        numbers = range(len(list(array.chunks())))
        if {*checksums[array.name]} != {*numbers}:
            raise OSError(f"the array {array.name!r} has chunks that no process wrote.")
        whole.append(array._replace(checksums=tuple(checksums[array.name][i] for i in numbers)))
    files = metadata_files(whole)
    in_parallel([functools.partial(store.write, f"{temporary}/{key}", text.encode()) for key, text in files.items()])
    for process in range(len(parts)):
        store.remove_file(f"{temporary}/.written-{process}")
    check_owner()
    written_keys = {*files, *(array.key(index) for array in whole for index in array.chunks())}
    if not store.renames:
        _check_there(store, temporary, written_keys)
    store.write(f"{temporary}/{MANIFEST}", manifest_text(step, whole, files, metadata).encode())
    store.sync(temporary)
    if store.renames:
        # A directory that somebody moves away after this cannot be renamed.
        _check_there(store, temporary, written_keys)
    if temporary != directory_of(step):
        store.rename(temporary, directory_of(step))


def _check_there(store: Store, directory: str, keys: set[str]) -> None:
    if gone := sorted({f"{directory}/{key}" for key in keys} - {*store.keys(directory)}):
        raise OSError(
            f"{len(gone)} files that were written are gone, such as {gone[0]}. Does another program or run use "
            f"{store.url}?"
        )


def _check_entry(name: str, array: Mapping[str, Any]) -> None:
    """Raises ValueError for an array that no run saves."""
    if not is_name(name):
        raise ValueError(f"{name!r} is no name of an array")
    shape, chunk = array["shape"], array.get("chunk_shape", array["shape"])
    are_sizes = lambda sizes: isinstance(sizes, list) and all(type(n) is int and 0 <= n < 2**63 for n in sizes)
    if not are_sizes(shape) or not are_sizes(chunk) or len(shape) != len(chunk):
        raise ValueError(f"{name!r} has the shape {shape!r} and chunks of {chunk!r}")
    if array["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {array['dtype']!r}")
    if any(part > max(1, size) or part < 1 for part, size in zip(chunk, shape, strict=True)):
        raise ValueError(f"{name!r} of shape {shape} has chunks that are larger than it, or empty: {chunk}")
    saved = SavedArray(name, tuple(shape), array["dtype"], tuple(chunk))
    if math.prod(saved.grid) > MAX_CHUNKS:
        raise ValueError(f"{name!r} of shape {shape} has {math.prod(saved.grid)} chunks, more than {MAX_CHUNKS}")
    sums = array.get("crc32c", "0" * 8 * math.prod(saved.grid))
    if not re.fullmatch("([0-9a-f]{8})*", sums) or len(sums) != 8 * math.prod(saved.grid):
        raise ValueError(f"{name!r} has not one checksum for each of its {math.prod(saved.grid)} chunks")


def read_manifest(store: Store, directory: str, step: int | None = None) -> dict:
    """The attributes of the manifest of the checkpoint in `directory`, of step `step`.

    Raises:
        Damaged: it is missing, or is not what was written.
        ValueError: it is of a version that this program does not read.
    """
    where = f"{store.url}/{directory}/{MANIFEST}"
    content = store.read(f"{directory}/{MANIFEST}", MANIFEST_BYTES)
    if content is None:
        raise Damaged(f"{where} is missing.")
    try:
        manifest = parse_json(content.tobytes())["attributes"]
        found, saved_step = (manifest["format"], manifest["format_version"]), manifest["step"]
        if found != (FORMAT, 1) and manifest["sha256"] != _digest(manifest):
            raise Damaged(f"{where} is not what was written: its own checksum differs.")
        manifest["metadata"]
        for name, array in manifest["arrays"].items():
            _check_entry(name, array)
        for key in manifest.get("files", {}).keys():  # noqa: SIM118 (a list has no keys)
            if not (key.endswith("/zarr.json") and is_name(key.removesuffix("/zarr.json"))):
                raise ValueError(f"{key!r} is no file of a checkpoint")
        if not re.fullmatch("[0-9TZ:-]*", manifest.get("saved_at", "")):
            raise ValueError(f"saved_at is {manifest['saved_at']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{where} is not a checkpoint manifest ({error!r}).") from error
    if found[0] != FORMAT or found[1] not in VERSIONS:
        raise ValueError(
            f"{where} is of format {found[0]!r} version {found[1]!r}; this program reads {FORMAT!r} versions "
            f"{', '.join(map(str, VERSIONS))}. Restore it with the version of the program that wrote it."
        )
    if found[1] == 1:
        later = [key for entry in (manifest, *manifest["arrays"].values()) for key in _LATER if key in entry]
        if later:
            raise Damaged(f"{where} is of version 1, but has {later[0]}, which a later version has.")
    if step is not None and saved_step != step:
        raise Damaged(f"{where} is of step {saved_step!r}: another checkpoint was copied over it.")
    return manifest


def saved_array(store: Store, directory: str, name: str, manifest: Mapping[str, Any]) -> SavedArray:
    """The array `name` of the checkpoint in `directory`, after its zarr.json was compared with the manifest.

    Raises:
        Damaged: its zarr.json is missing, or is not what was written.
    """
    entry, key = manifest["arrays"][name], f"{name}/zarr.json"
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    content = read_metadata(store, directory, key, manifest)
    if manifest["format_version"] > 1:
        text = entry["crc32c"]
        checksums = tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
        return SavedArray(name, shape, dtype, tuple(entry["chunk_shape"]), checksums)
    try:
        array = parse_json(content)
        found, chunk = tuple(array["shape"]), tuple(array["chunk_grid"]["configuration"]["chunk_shape"])
        # The codec's configuration may be written or left out where it has none.
        codecs = [codec["name"] for codec in array["codecs"]]
        if codecs != [codec["name"] for codec in CODECS]:
            raise ValueError(f"codecs {codecs}")
        if extra := array.keys() - json.loads(array_text(SavedArray(name, shape, dtype, chunk))).keys():
            raise ValueError(f"it has {', '.join(sorted(extra))}")
        _check_entry(name, {"shape": list(found), "dtype": array["data_type"], "chunk_shape": list(chunk)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"cannot open the array {name!r}: {key} is no metadata of an array ({error!r}).") from error
    if (found, array["data_type"]) != (shape, dtype):
        raise Damaged(
            f"the array {name!r} is {array['data_type']}{list(found)} on disk, but {dtype}{list(shape)} in the "
            "manifest."
        )
    return SavedArray(name, shape, dtype, chunk)


def read_metadata(store: Store, directory: str, key: str, manifest: Mapping[str, Any]) -> bytes:
    """Content of a metadata file of a checkpoint. Raises Damaged if it is missing or not what was written."""
    content = store.read(f"{directory}/{key}", METADATA_BYTES)
    if content is None:
        raise Damaged(f"cannot open the array {key.removesuffix('/zarr.json')!r}: {key} is missing.")
    whole = manifest.get("files", {}).get(key)
    if manifest["format_version"] > 1 and hashlib.sha256(content.tobytes()).hexdigest() != whole:
        raise Damaged(f"cannot open the array {key.removesuffix('/zarr.json')!r}: {key} is not what was written.")
    return content.tobytes()
