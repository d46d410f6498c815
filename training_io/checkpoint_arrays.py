"""Arrays of a checkpoint: their names, their copies on the host, and their files, each a zarr v3 array.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import itertools
import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts

from configuration.foreign import parse_json
from shardlib.placement import StackOrder

DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)  # fmt: skip
"""Types that both tensorstore and zarr-python read and write. zarr-python rejects bfloat16."""
STORE_ERRORS = (OSError, ValueError, RuntimeError, IndexError, NotImplementedError)
"""Exceptions of tensorstore, by the kind of the failure."""

UNCHECKED_BYTES = 2**28
"""Size of an array up to which it is not compared with that of its files."""

Orders = Mapping[str, StackOrder]
NO_ORDERS: Orders = MappingProxyType({})


class HostArray(NamedTuple):
    """An array to be written, with the part of it that this process has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    pieces: list[tuple[tuple[slice, ...], np.ndarray]]  # this process's regions of the global array


def is_name(name: str) -> bool:
    """Whether an array may have this name: each part between slashes is one that a directory can have."""
    return all(
        re.fullmatch(r"[\w\-+=. ]+", part) and not part.startswith(".") and part != "zarr.json"
        for part in name.split("/")
    )


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, such as `weights/layers/w_q`: field names, dict keys, and indices, joined by slashes.

    Raises ValueError for a path that cannot be the name of a directory, or that two leaves share.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        name = "/".join(parts)
        if not is_name(name):
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
            every = [stored for stored, _ in order.consecutive(slice(None))]
            chunk = (math.gcd(*(edge for layers in every for edge in (layers.start, layers.stop))), *chunk[1:])
        arrays.append(HostArray(name, _stored_shape(leaf, order), str(leaf.dtype), chunk, pieces))
    return arrays


def array_spec(path: Path) -> dict:
    """Spec with which tensorstore opens the array in the directory `path`."""
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}


def open_array(path: Path, name: str, cache: ts.Context | None = None) -> ts.TensorStore:
    """The array `name` of the checkpoint in `path`, to be read.

    Raises:
        OSError: it is missing or damaged, or it is none that a run writes: one of these could be a file elsewhere, or
            take more memory than there is.
    """
    remedy = f"The checkpoint {path} is damaged; restore another step, or copy it again."
    directory, root = (path / name).resolve(), path.resolve()
    if not directory.is_relative_to(root):
        raise OSError(f"the array {name!r} is a link to {directory}, outside of the checkpoint. Copy it there instead.")
    try:
        metadata = parse_json((directory / "zarr.json").read_bytes())
        codecs = [codec["name"] for codec in metadata["codecs"]]
        shape, chunk = metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        size = math.prod(map(operator.index, shape)) * np.dtype(metadata["data_type"]).itemsize
        large_chunk = any(of_chunk > max(1, whole) for of_chunk, whole in zip(chunk, shape, strict=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OSError(f"cannot open the array {name!r}: {error}. {remedy}") from error
    if codecs != ["bytes", "crc32c"]:
        raise OSError(
            f"the array {name!r} has the codecs {', '.join(map(str, codecs))}, and a checkpoint bytes, crc32c. {remedy}"
        )
    if large_chunk:
        raise OSError(f"the array {name!r} of shape {shape} has chunks that are larger than it: {chunk}. {remedy}")
    # tensorstore would end the process where memory does not hold what it is to read.
    if size > UNCHECKED_BYTES and size > sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()):
        raise OSError(f"the array {name!r} of shape {shape} is larger than its files. {remedy}")
    try:
        spec = array_spec(directory) | {"fill_missing_data_reads": False}
        return ts.open(spec, context=cache, open=True, read=True).result()
    except STORE_ERRORS as error:
        raise OSError(f"cannot open the array {name!r}: {error}. {remedy}") from error


def _create_spec(path: Path, array: HostArray) -> dict:
    # Without store_data_equal_to_fill_value a chunk of zeros would not be written, and look like a lost one.
    return array_spec(path) | {
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "fill_value": False if array.dtype == "bool" else 0,
        },
        "store_data_equal_to_fill_value": True,
    }


def create_arrays(directory: Path, arrays: list[HostArray]) -> list[ts.TensorStore]:
    """Creates the arrays, without contents. Raises OSError, with the array's name."""
    opening = [(x.name, ts.open(_create_spec(directory / x.name, x), open=True, create=True)) for x in arrays]
    return wait_for(opening, "creating")


def write_arrays(directory: Path, arrays: list[HostArray]) -> None:
    """Writes this process's part of the arrays. Raises OSError, with the array's name, once all writing has ended."""
    stores = create_arrays(directory, arrays)
    writing = [
        (array.name, store[index].write(values, can_reference_source_data_indefinitely=True))
        for array, store in zip(arrays, stores, strict=True)
        for index, values in array.pieces
    ]
    wait_for(writing, "writing")


def wait_for(futures: list[tuple[str, ts.Future]], action: str) -> list:
    """The results of all, by the array's name, once all have ended. Raises OSError, with the name, if one failed.

    A write that continued would bring back files that the next save removes.
    """
    results, failures = [], []
    for name, future in futures:
        try:
            results.append(future.result())
        except STORE_ERRORS as error:
            failures.append(OSError(f"{action} the array {name!r} failed: {error}."))
    if failures:
        raise failures[0]
    return results


def read_array(path: Path, name: str, leaf: jax.ShapeDtypeStruct, order: StackOrder | None) -> jax.Array:
    """The array `name` of the checkpoint in `path`, sharded as `leaf`. Raises OSError if it is damaged."""
    shape = _stored_shape(leaf, order)
    remedy = f"The checkpoint {path} is damaged; restore another step, or copy it again."
    store = open_array(path, name)
    if store.shape != shape or store.dtype.numpy_dtype != leaf.dtype:
        raise OSError(
            f"the array {name!r} is {store.dtype.name}{list(store.shape)} on disk, but {leaf.dtype}{list(shape)} "
            f"in the manifest. {remedy}"
        )
    futures = {}
    devices = []
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        region = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        if region not in futures:
            parts = [(index, ...)]
            if order is not None:
                parts = [((there, *index[1:]), own) for there, own in order.consecutive(index[0])]
            futures[region] = [(own, store[there].read(order="C")) for there, own in parts]
        devices.append((device, region))
    regions = {}
    for region, parts in futures.items():
        try:
            if order is None:
                regions[region] = parts[0][1].result()
                continue
            regions[region] = np.zeros([stop - start for start, stop in region], leaf.dtype)
            for own, future in parts:
                regions[region][own] = future.result()
        except STORE_ERRORS as error:
            raise OSError(f"cannot read the array {name!r}: {error}. {remedy}") from error
    shards = [jax.device_put(regions[region], device) for device, region in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
