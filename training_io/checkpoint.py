"""Checkpoints: one directory a step, one zarr v3 array a leaf, a manifest written last.

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

from cluster.watch import now_at, pause
from training_io.checkpoint_arrays import (
    DTYPES,
    NO_ORDERS,
    HostArray,
    Orders,
    as_stored,
    copy_to_host,
    named_leaves,
    read_array,
    start_copies,
    write_arrays,
)

FORMAT = "pytree-zarr-checkpoint"
FORMAT_VERSION = 1
# The root group's metadata: zarr readers need the file in any case, and complain of any other beside the arrays.
MANIFEST = "zarr.json"
REMEDY = "Run with the model and optimizer that wrote it, or start a new run in another directory."


class Checkpointer:
    """Saves and restores pytrees of jax.Arrays under `<directory>/<step, 10 digits>/<leaf path>`.

    With several processes, `directory` is on a file system that all of them share, every process makes the same calls
    in the same order, and each writes only its own shards (those with replica_id 0).

    Args:
        directory: a file-system path; created by the first save.
        keep: how many of the latest complete checkpoints are kept, at least 1; None keeps all. Older ones are removed
            when a new one is complete.
        commit_timeout_s: seconds that a process waits for the others to finish writing, before it gives the save up.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int | None = None, commit_timeout_s: float = 1800.0):
        if "://" in str(directory):
            raise ValueError(
                f"checkpoint directory {str(directory)!r} is a URL: checkpoints are committed by renaming a directory, "
                "which object stores cannot do. Give a path on a file system that all hosts share."
            )
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint, or None for all.")
        self.directory = Path(directory)
        self._keep = keep
        self._commit_timeout_s = commit_timeout_s
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: concurrent.futures.Future | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending. A directory without a manifest is not a checkpoint."""
        if not self.directory.is_dir():
            return []
        names = (entry.name for entry in self.directory.iterdir() if re.fullmatch(r"\d{10}", entry.name))
        return sorted(int(name) for name in names if (self.directory / name / MANIFEST).is_file())

    def latest_step(self) -> int | None:
        """The last complete checkpoint's step, or None. With several processes all get process 0's answer."""
        steps = self.steps()
        latest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            # Two 5-digit halves: without x64, JAX would cut a larger integer to 32 bits.
            halves = multihost_utils.broadcast_one_to_all(np.array(divmod(latest, 10**5), np.int32))
            latest = int(halves[0]) * 10**5 + int(halves[1])
        return None if latest < 0 else latest

    def metadata(self, step: int) -> dict:
        """The metadata given to `save` for this step."""
        return self.manifest(step)["metadata"]

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

        When this returns, the buffers of `state` may be donated or deleted. Waits for the save before it first, and
        raises that save's error.

        Args:
            step: 0 to 9,999,999,999; not saved before.
            state: a pytree of jax.Arrays of booleans, integers, f16, f32, or f64, in containers with named or numbered
                children (dataclasses, dicts, tuples, lists). Names become directory names.
            metadata: what json can write, without NaN or infinity. Kept in the manifest.
            orders: by name, of stacks of layers that are written in the order of the layers.
            check: called before the devices are waited for, in every process; nothing is written if it raises. What
                waits for the step that makes `state` belongs here: all else that saving takes is done while that runs.

        Raises:
            ValueError: a step, leaf or name that cannot be saved, by name.
            OSError: the previous save failed.
        """
        with pause(f"saving the checkpoint of step {step}"):
            self._save(step, state, metadata, orders, check)

    def _save(self, step: int, state: Any, metadata: dict, orders: Orders, check: Callable[[], None]) -> None:
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

    def wait(self) -> None:
        """Returns when the save under way is complete on disk; raises OSError if it failed."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with pause("waiting for a checkpoint to be written"):
                saving.result()

    def close(self) -> None:
        """Waits like `wait`, then ends the background thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

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
        """The saved state of `step`, placed as `like` says.

        Each device receives its own region, read from disk by the process it belongs to, leaf after leaf. While it is
        read, each chunk that overlaps the region is in host memory whole.

        Args:
            step: a complete checkpoint's step.
            like: a pytree of jax.ShapeDtypeStruct with shardings (or of arrays like those wanted), on any mesh.
            part: read only the arrays whose names begin so, such as `weights/`, which `like` then holds.
            leave: beginnings of the names of arrays that are not read.
            orders: as for `save`; padding is 0.
            remedy: what to do where the arrays are others; for the message.

        Raises:
            ValueError: the checkpoint's arrays are not those of `like`; with their names.
            OSError: an array is missing, truncated, corrupt, or not as the manifest says.
        """
        now_at(f"restoring the checkpoint of step {step}", paused=True)
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
        """What the checkpoint of this step says of itself. Raises ValueError if there is none, OSError for damage."""
        path = self._path(step) / MANIFEST
        if not path.is_file():
            raise ValueError(f"no complete checkpoint of step {step} in {self.directory}; there are {self.steps()}.")
        try:
            manifest = json.loads(path.read_text())["attributes"]
            found = (manifest["format"], manifest["format_version"])
            manifest["arrays"], manifest["metadata"]
        except (ValueError, KeyError, TypeError) as error:
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
            # Renamed first, so that a checkpoint half removed is not taken for a whole one.
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
                f"checkpoint {final} was not saved: {error} It stays invisible; the checkpoints before it are whole."
            ) from error

    def _await(self, temporary: Path, done) -> None:
        """The barrier between writing and committing, made of files: a collective here, on a background thread, could
        be queued between the training step's collectives in another order on each host, and hang them all."""
        deadline = time.monotonic() + self._commit_timeout_s
        while not done():
            if _count(temporary, "failed"):
                raise OSError("another process failed to write its part; its own message says why.")
            if time.monotonic() > deadline:
                raise OSError(
                    f"the other processes did not finish within {self._commit_timeout_s:g} s. "
                    "Is the directory on a file system that all hosts share?"
                )
            time.sleep(0.2)


def manifest_text(step: int, leaves: dict[str, jax.Array], metadata: dict) -> str:
    """The manifest of a checkpoint of `leaves`. Raises ValueError for metadata that is no JSON."""
    arrays = {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in leaves.items()}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "arrays": arrays,
        "metadata": metadata,
    }
    try:
        return _group(manifest)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's metadata cannot be written as JSON: {error}.") from error


def _group(attributes: dict) -> str:
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group, indent=1, allow_nan=False) + "\n"


def _count(directory: Path, marker: str) -> int:
    return len(list(directory.glob(f".{marker}-*")))


def commit(temporary: Path, final: Path, names: list[str], manifest: str) -> None:
    """Makes the arrays written to `temporary` a checkpoint: the manifest last, then the name of the directory."""
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
    problems = []
    for name, leaf in expected.items():
        wanted = f"{leaf.dtype}{list(leaf.shape)}"
        if name not in saved:
            problems.append(f"{name}: not in the checkpoint, expected {wanted}")
        else:
            found = f"{saved[name]['dtype']}{saved[name]['shape']}"
            if found != wanted:
                problems.append(f"{name}: {found} in the checkpoint, expected {wanted}")
    for name, array in saved.items():
        if name not in expected:
            problems.append(f"{name}: {array['dtype']}{array['shape']} in the checkpoint, not expected")
    if problems:
        more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(
            f"the checkpoint {path} does not fit this run:\n  " + "\n  ".join(problems[:10]) + more + "\n" + remedy
        )
