"""Checkpoints: a directory for each step, with a zarr v3 array for each leaf and a manifest that is written last.

The format is specified in docs/pytree-zarr-checkpoint.md.
"""

import concurrent.futures
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cluster.watch import pause
from configuration.foreign import parse_json
from training_io.checkpoint_arrays import (
    DTYPES,
    NO_ORDERS,
    HostArray,
    Orders,
    as_stored,
    copy_to_host,
    is_name,
    named_leaves,
    read_array,
    start_copies,
    write_arrays,
)

FORMAT = "pytree-zarr-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "zarr.json"
"""The metadata of the root group: zarr readers need this file, and complain about any other beside the arrays."""
COMMIT_TIMEOUT_S = 1800.0
"""Seconds that a process waits for the others to finish writing, before the save fails."""
REMEDY = "Run with the model and optimizer that wrote it, or start a new run in another directory."


class Checkpointer:
    """Saves and restores pytrees of jax.Arrays under `<directory>/<step, 10 digits>/<leaf path>`.

    With several processes, `directory` is on a file system that all of them share, all make the same calls in the same
    order, and each writes its own shards only (those with replica_id 0).

    Args:
        directory: path in a file system; created by the first save.
        keep: number of the latest complete checkpoints that are kept, at least 1; None keeps all. Older ones are
            removed when a new one is complete.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int | None = None):
        if "://" in str(directory):
            raise ValueError(
                f"checkpoint directory {str(directory)!r} is a URL: checkpoints are committed by renaming a directory, "
                "which object stores cannot do. Give a path in a file system that all hosts share."
            )
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint, or None for all.")
        self.directory = Path(directory)
        self._keep = keep
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: concurrent.futures.Future | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending. A directory without a manifest is not a checkpoint."""
        if not self.directory.is_dir():
            return []
        names = (entry.name for entry in self.directory.iterdir() if re.fullmatch(r"\d{10}", entry.name))
        return sorted(int(name) for name in names if (self.directory / name / MANIFEST).is_file())

    def latest_step(self) -> int | None:
        """Step of the last complete checkpoint, or None. With several processes all get the answer of process 0."""
        steps = self.steps()
        latest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            # Two 5-digit halves: without x64, JAX would cut a larger integer to 32 bits.
            halves = multihost_utils.broadcast_one_to_all(np.array(divmod(latest, 10**5), np.int32))
            latest = int(halves[0]) * 10**5 + int(halves[1])
        return None if latest < 0 else latest

    def metadata(self, step: int) -> dict:
        """The metadata that `save` was given for this step."""
        return self.manifest(step)["metadata"]

    @pause("saving a checkpoint")
    def save(
        self,
        step: int,
        state: Any,
        metadata: dict,
        orders: Orders = NO_ORDERS,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies `state` to host memory, then writes it in the background.

        Afterwards the buffers of `state` may be donated or deleted. Waits for the previous save first, and raises its
        error.

        Args:
            step: 0 to 9,999,999,999; not saved before.
            state: a pytree of jax.Arrays of booleans, integers, f16, f32, or f64, in containers with named or numbered
                children (dataclasses, dicts, tuples, lists). Names become directory names.
            metadata: what json can write, without NaN or infinity. Kept in the manifest.
            orders: by name, the orders of the stacks of layers, which are written in the order of the layers.
            check: called in every process before it waits for the devices. Nothing is written if it raises. A check
                that waits for the step that computes `state` belongs here, as all work before it overlaps that step.

        Raises:
            ValueError: a step, leaf or name that cannot be saved, by name.
            OSError: the previous save failed.
        """
        self.wait()
        final = self._path(step)
        if final.exists():
            found = "a complete checkpoint" if (final / MANIFEST).is_file() else "a directory without a manifest"
            raise ValueError(
                f"cannot save step {step}: {final} already holds {found}. Save each step once, or move it away."
            )
        leaves = named_leaves(state)
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):
                raise ValueError(f"cannot save {name!r}: it is a {type(leaf).__name__}; make it a jax.Array.")
            if str(leaf.dtype) not in DTYPES:
                raise ValueError(
                    f"cannot save {name!r}: zarr readers do not share a {leaf.dtype} type. "
                    f"Keep it as one of {', '.join(sorted(DTYPES))} (jax.random.key_data turns keys into integers)."
                )
        shards = start_copies(leaves)
        manifest = manifest_text(step, as_stored(leaves, orders), metadata)
        temporary = final.with_name(final.name + ".tmp")
        if jax.process_index() == 0:
            self._remove_leftovers()
        if jax.process_count() > 1:
            # On the main thread, where every process issues its collectives in the same order. It costs nothing: the
            # copies below have to wait for the running step anyway.
            multihost_utils.sync_global_devices(f"checkpoint {step}")
        check()
        arrays = copy_to_host(leaves, shards, orders)
        self._saving = self._executor.submit(self._write, temporary, final, arrays, manifest)

    @pause("waiting for a checkpoint to be written")
    def wait(self) -> None:
        """Waits until the save that is being written is complete. Raises OSError if it failed."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def close(self) -> None:
        """Waits as `wait` does, then ends the background thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    @pause("restoring a checkpoint")
    def restore(
        self,
        step: int,
        like: Any,
        *,
        part: str = "",
        leave: tuple[str, ...] = (),
        orders: Orders = NO_ORDERS,
        remedy: str = REMEDY,
    ) -> Any:
        """The state that was saved at `step`, with the shardings of `like`.

        The process of each device reads the device's own region from disk, leaf after leaf. Meanwhile the whole of each
        chunk that overlaps the region is in host memory.

        Args:
            step: step of a complete checkpoint.
            like: a pytree of jax.ShapeDtypeStruct with shardings, or of arrays, on any mesh.
            part: beginning of the names of the arrays that are read, such as `weights/`. `like` holds these alone.
            leave: beginnings of the names of arrays that are not read.
            orders: as for `save`; padding is 0.
            remedy: end of the message where the checkpoint has other arrays: what to do.

        Raises:
            ValueError: the checkpoint has other arrays than `like`. The message names them.
            OSError: an array is missing, truncated, corrupt, or contradicts the manifest.
        """
        path = self._path(step)
        arrays = self.manifest(step)["arrays"].items()
        saved = {name: array for name, array in arrays if name.startswith(part) and not name.startswith(leave)}
        expected = named_leaves(like)
        unplaced = [name for name, leaf in expected.items() if leaf.sharding is None]
        if unplaced:
            raise ValueError(f"restore needs a sharding for {unplaced[0]!r}: pass ShapeDtypeStruct(..., sharding=...).")
        _check_same_arrays(path, saved, as_stored(expected, orders), remedy)
        restored = [read_array(path, name, leaf, orders.get(name)) for name, leaf in expected.items()]
        return jax.tree.unflatten(jax.tree.structure(like), restored)

    def _path(self, step: int) -> Path:
        if not 0 <= step < 10**10:
            raise ValueError(f"step {step} is outside 0 … 9,999,999,999.")
        return self.directory / f"{step:010}"

    def manifest(self, step: int) -> dict:
        """The checkpoint's manifest. Raises ValueError if there is no such checkpoint, OSError if it is damaged."""
        path = self._path(step) / MANIFEST
        if not path.is_file():
            raise ValueError(f"no complete checkpoint of step {step} in {self.directory}; there are {self.steps()}.")
        try:
            manifest = parse_json(path.read_text())["attributes"]
            found = (manifest["format"], manifest["format_version"])
            manifest["metadata"]
            for name, array in manifest["arrays"].items():
                if not is_name(name):
                    raise ValueError(f"{name!r} is no name of an array")
                if not isinstance(array["shape"], list) or not isinstance(array["dtype"], str):
                    raise ValueError(f"{name!r} has no shape or no dtype")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"{path} is not a checkpoint manifest ({error!r}); use another step.") from error
        if found != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"{path} is of format {found[0]!r} version {found[1]!r}; this program reads {FORMAT!r} version "
                f"{FORMAT_VERSION}. Restore it with the version of the program that wrote it."
            )
        return manifest

    def _remove_leftovers(self) -> None:
        if self.directory.is_dir():
            for entry in self.directory.iterdir():
                if re.fullmatch(r"\d{10}\.tmp", entry.name):
                    shutil.rmtree(entry)

    def _remove_oldest(self) -> None:
        for step in self.steps()[: -self._keep] if self._keep else []:
            # Renamed first, so that a checkpoint that is half removed does not pass for a complete one.
            path = self._path(step)
            shutil.rmtree(path.rename(path.with_name(path.name + ".tmp")))

    def _write(self, temporary: Path, final: Path, arrays: list[HostArray], manifest: str) -> None:
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            write_arrays(temporary, arrays)
            (temporary / f".written-{jax.process_index()}").touch()
            if jax.process_index() == 0:
                self._await(temporary, lambda: _count(temporary, "written") == jax.process_count())
                commit(temporary, final, [array.name for array in arrays], manifest)
                self._remove_oldest()
            else:
                self._await(temporary, (final / MANIFEST).is_file)
        except OSError as error:
            if temporary.is_dir():
                (temporary / f".failed-{jax.process_index()}").touch()
            raise OSError(
                f"checkpoint {final} was not saved: {error} It stays invisible; the checkpoints before it are complete."
            ) from error

    def _await(self, temporary: Path, done: Callable[[], bool]) -> None:
        # A barrier made of files. A collective on this background thread could come between the collectives of the
        # training step in another order on each host, and hang them all.
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        while not done():
            if _count(temporary, "failed"):
                raise OSError("another process failed to write its part; see its own message.")
            if time.monotonic() > deadline:
                raise OSError(
                    f"the other processes did not finish within {COMMIT_TIMEOUT_S:g} s. "
                    "Is the directory on a file system that all hosts share?"
                )
            time.sleep(0.2)


def manifest_text(step: int, leaves: dict[str, jax.Array], metadata: dict) -> str:
    """Text of the manifest of a checkpoint with `leaves`. Raises ValueError for metadata that is not JSON."""
    arrays = {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in leaves.items()}
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "arrays": arrays}
    try:
        return _group(manifest | {"metadata": metadata})
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's metadata cannot be written as JSON: {error}.") from error


def _group(attributes: dict) -> str:
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group, indent=1, allow_nan=False) + "\n"


def _count(directory: Path, marker: str) -> int:
    return len(list(directory.glob(f".{marker}-*")))


def commit(temporary: Path, final: Path, names: list[str], manifest: str) -> None:
    """Turns the arrays written to `temporary` into a checkpoint: writes the manifest, then renames the directory."""
    for group in {temporary / parent for name in names for parent in Path(name).parents} - {temporary}:
        _write_durably(group / "zarr.json", _group({}))
    for marker in temporary.glob(".written-*"):
        marker.unlink()
    _write_durably(temporary / MANIFEST, manifest)
    _sync_directory(temporary)
    temporary.rename(final)
    _sync_directory(final.parent)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_same_arrays(
    path: Path, saved: dict[str, dict], expected: dict[str, jax.ShapeDtypeStruct], remedy: str
) -> None:
    wanted = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in expected.items()}
    found = {name: f"{array['dtype']}{array['shape']}" for name, array in saved.items()}
    problems = [
        f"{name}: {found.get(name, 'not')} in the checkpoint, "
        + (f"expected {wanted[name]}" if name in wanted else "not expected")
        for name in wanted | found
        if found.get(name) != wanted.get(name)
    ]
    if problems:
        more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(
            f"the checkpoint {path} does not fit this run:\n  " + "\n  ".join(problems[:10]) + more + "\n" + remedy
        )
