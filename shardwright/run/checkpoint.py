"""Saves and restores checkpoints: a directory for each step, with a zarr v3 array for each leaf, and a manifest.

docs/formats.md shows the layout. A directory is a checkpoint if and only if its name is ten digits and it holds the
manifest, zarr.json. Process 0 writes this file last, once all processes have written their shards and each other
process a file `.written-<process index>` with its checksums or its error. The next start or save removes what a killed
or failed save left.
"""

import concurrent.futures
import contextlib
import datetime
import functools
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from shardwright.cluster.watch import pause
from shardwright.run.checkpoint_arrays import (
    DTYPES,
    NO_ORDERS,
    Checksums,
    Index,
    Orders,
    Part,
    SavedArray,
    commit,
    copy_to_host,
    directory_of,
    gather_small,
    named_leaves,
    read_arrays,
    read_chunk,
    read_manifest,
    saved_arrays,
    write_arrays,
)
from shardwright.run.differences import config_differences
from shardwright.run.stores import MANIFEST, Damaged, Store, check_processes, gathered, in_all_processes, in_parallel
from shardwright.settings.exits import LOST, exit_of
from shardwright.settings.output import say

COMMIT_TIMEOUT_S = 1800.0
"""Seconds that process 0 waits for the others to finish writing before the save fails."""
SET_ASIDE = "set_aside"
"""Directory, next to the checkpoints, of those that a resumed run does not use: damaged, or of later steps."""
_STEP = re.compile("[0-9]{10}")


REMEDY = "Run with the model and optimizer that wrote it, or start a new run from another checkpoint."
OWNER = ".owner"
"""File that names the process that saves here, if paths.checkpoints is set."""


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores pytrees of jax.Arrays under `<place>/<step, 10 digits>/<leaf path>`.

    With several processes, all make the same calls in the same order on the same `place`. Those that have the same
    shards share the work: one of them writes each chunk, and reads it if its dtype has 32 bits.

    Args:
        place: path in a file system that all processes share, created by the first save; or a URL, as for Store.
        keep: number of complete checkpoints to keep, at least 1; None keeps all. Older ones are removed when a new one
            is complete.
    """

    def __init__(self, place: str | os.PathLike, *, keep: int | None = None):
        self.store = Store(place)
        self._keep = keep
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.saving: concurrent.futures.Future | None = None
        """The save in progress; None if there is none, or it was waited for."""
        self.rotates = True
        """True if completing a checkpoint removes all but the latest `keep`."""
        self.held: Callable[[], Iterable[int]] = tuple
        """Returns the steps whose checkpoints must not be removed yet, such as while an export reads them."""
        self._owner: bytes | None = None
        self._others_are_lost = False

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._others_are_lost = error is not None and exit_of(error) is LOST
        with contextlib.suppress(*[OSError] if self._others_are_lost else []):
            self.close()

    def steps(self) -> list[int]:
        """Lists the steps of all complete checkpoints, ascending. A directory without a manifest is not one."""
        return sorted(int(name) for name, done in self.store.directories().items() if done and _STEP.fullmatch(name))

    def latest_step(self, without: Iterable[int] = ()) -> int | None:
        """Returns the last step that has a complete checkpoint and is not in `without`, or None. Process 0 decides."""
        several = jax.distributed.is_initialized()
        is_first = not several or jax.process_index() == 0  # listing a URL yields the files of all processes
        latest = in_all_processes(lambda: max({*self.steps()} - {*without}, default=-1) if is_first else -1)
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
        again: bool = False,
    ) -> None:
        """Copies `state` to host memory, then writes it in the background.

        Once it returns, the buffers of `state` may be donated or deleted. Waits for the previous save first. If writing
        fails, the next `save` or `wait` raises the error.

        Args:
            step: 0 to 2**31 - 1; not saved before, unless `again`.
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
            again: True to retry a failed save of this step, replacing what it left.

        Raises:
            ValueError: a step, leaf or name cannot be saved. The message names it.
            OSError: the previous save failed.
        """
        self.wait()
        leaves = named_leaves(state)
        if odd := [name for name, leaf in leaves.items() if str(leaf.dtype) not in DTYPES]:
            raise ValueError(f"cannot save {odd[0]!r}: its dtype is not one of {', '.join(sorted(DTYPES))}.")
        leaves = gather_small(leaves)
        for leaf in leaves.values():
            leaf.copy_to_host_async()
        try:
            # On the main thread, so that every process issues its collectives in the same order. The copies below wait
            # for the running step anyway.
            in_all_processes(lambda: self._make_room(step, again) if jax.process_index() == 0 else None)
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
        """Waits for the save in progress, ends the background thread, and gives up ownership of the directory."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            with contextlib.suppress(OSError):  # then the next run takes it
                if self._owner and self.store.read(OWNER) == self._owner:
                    self.store.write(OWNER, b"")  # emptied, not removed: without it an older, hung run would save again

    @pause("restoring a checkpoint")
    def restore(self, step: int, like: object, orders: Orders = NO_ORDERS, partly: bool = False) -> Any:
        """Restores the state saved at `step`, with the shardings of `like`. An error in one process is raised in all.

        Each process reads only chunks that its devices need. Processes that need the same chunks of an array with a
        32-bit dtype divide the reading among them.

        Args:
            step: step of a complete checkpoint.
            like: a pytree of jax.ShapeDtypeStruct with shardings, or of arrays, on any mesh. It may lack whole
                top-level children of the saved pytree, such as the optimizer's state, which are not read.
            orders: as for `save`, on the mesh of `like`.
            partly: True: `like` may lack any array, and its arrays may have more rows than were saved; these become 0.

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
        return jax.tree.unflatten(jax.tree.structure(like), [place() for place in arrays])

    def manifest(self, step: int) -> dict:
        """Reads the manifest of a checkpoint. All processes call this, and must read the same.

        Raises ValueError if there is none, or if another process reads another one; Damaged if it is damaged.
        """

        def read() -> dict:
            manifest = read_manifest(self.store, step)
            if manifest is None:
                raise ValueError(f"no complete checkpoint of step {step} in {self.store.url}; it has {self.steps()}.")
            return manifest

        manifest = in_all_processes(read)
        # Each process reads its own shards and checks them by its own manifest.
        check_processes({f"checkpoint {self.store.url}/{directory_of(step)}": manifest})
        return manifest

    def take_ownership(self) -> None:
        """Takes ownership of the directory, so that an earlier run can no longer save to it.

        One process calls this.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        name = f"process {os.getpid()} on {socket.gethostname()}, since {since} ({secrets.token_hex(8)})"
        self._owner = name.encode()
        self.store.write(OWNER, self._owner)

    def _check_owner(self) -> None:
        owner = self.store.read(OWNER) if self._owner else None
        if owner not in (None, self._owner):
            whose = owner.decode(errors="replace") or "one that started later, and has ended"
            raise OSError(
                f"another run saves to {self.store.url}: {whose}. End one of the two, or "
                f"rename it (paths.model_name). To continue with this one, delete {self.store.url}/{OWNER}."
            )

    def remove_leftovers(self) -> None:
        """Removes the directories that killed and failed saves left. Prints a failure. One process calls this."""
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

    def _make_room(self, step: int, again: bool) -> None:
        """Empties the directory for a new checkpoint.

        Raises ValueError if it has a complete one, unless `again`.
        """
        name = directory_of(step)
        self._check_owner()
        if not again and self.store.read(f"{name}/{MANIFEST}") is not None:
            raise ValueError(
                f"cannot save step {step}: {self.store.url}/{name} exists already. Save each step once, or move it "
                "away."
            )
        self.remove_leftovers()
        self.store.remove(name)  # if it cannot be removed, the save must fail: leftovers would become part of it

    def verify(self, step: int) -> list[str]:
        """Reads all chunks of a checkpoint. Returns a message for each damaged one; [] if all are intact."""
        directory = directory_of(step)
        try:
            arrays = saved_arrays(self.manifest(step)).values()
        except Damaged as error:
            return [str(error)]

        problems, jobs = [], []

        def read(array: SavedArray, index: Index) -> None:
            try:
                read_chunk(self.store, directory, array, index)
            except Damaged as error:
                problems.append(str(error))

        for array in arrays:
            jobs += [functools.partial(read, array, index) for index in np.ndindex(array.grid)]
        in_parallel(jobs)
        return sorted(problems)

    def set_aside(self, steps: Iterable[int]) -> str:
        """Moves checkpoints, damaged or not, into a new directory under SET_ASIDE. Returns its path or URL."""
        now = datetime.datetime.now(datetime.UTC)  # to the microsecond: two starts within a second have two directories
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
                commit(self.store, step, [saved for saved, _ in arrays], written, metadata)
            else:
                self.store.write(marker, json.dumps({"written": written}).encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                if is_first:
                    self._check_owner()  # the directory may be another run's
                    self.store.remove(directory)  # it may have filled the disk, and the metrics need room
                else:
                    self.store.write(marker, json.dumps({"failed": str(error)}).encode())
            self._fail(step, error)
        if is_first:
            self.rotate()

    def rotate(self) -> None:
        """Removes all checkpoints except the latest `keep` and those of `held`. One process calls this."""
        if self._keep and self.rotates:
            with self._if_possible():
                for old in {*self.steps()[: -self._keep]} - {*self.held()}:
                    self.store.remove(directory_of(old))

    def _fail(self, step: int, error: OSError) -> None:
        raise OSError(
            f"{str(error).rstrip('.')}. The checkpoint {self.store.url}/{directory_of(step)} was not saved. Earlier "
            "ones, if any, are unchanged."
        ) from error

    def _await_others(self, directory: str) -> Checksums:
        """Waits for the other processes and returns their checksums.

        The barrier is made of files, because a collective on this background thread could interleave differently with
        those of the training step on each host, and hang them all.
        """
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        written = {}
        others = range(1, jax.process_count())
        for found in in_parallel(functools.partial(self._await, directory, process, deadline) for process in others):
            written |= found
        return written

    def _await(self, directory: str, process: int, deadline: float) -> Checksums:
        key = f"{directory}/.written-{process}"
        while (content := self.store.read(key)) is None:
            if self._others_are_lost or time.monotonic() > deadline:
                raise OSError(
                    f"process {process} did not finish within {COMMIT_TIMEOUT_S:g} s. Is the directory on a file "
                    "system that all hosts share?"
                )
            time.sleep(0.2 if self.store.path else 1.0)
        found = json.loads(content)
        if "failed" in found:
            raise OSError(f"{found['failed'].rstrip('.')} (of process {process})")
        self.store.write(key, None)
        return found["written"]


def find_checkpoint(path: str | os.PathLike, step: int | None = None) -> tuple[Checkpointer, int]:
    """Returns a Checkpointer for a run, which the caller closes, and a step, the same in all processes.

    `path` is the directory or URL of a run, or of one of its checkpoints. If `step` is None, returns the step of that
    checkpoint, or the last complete step of the run; raises ValueError if the run has none. Does not check that a step
    given by `path` or `step` exists.
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
            f"no complete checkpoint in {checkpoints.store.url}. Give the directory of a run, such as runs/<name>, or "
            "of one checkpoint, such as runs/<name>/checkpoints/0000000500. If the run set paths.checkpoints, look "
            "there."
        )
    return checkpoints, found


def check_same_arrays(path: str, saved: dict[str, SavedArray], expected: dict[str, Any], remedy: str = REMEDY) -> None:
    """Raises ValueError, with differences and `remedy`, unless the saved arrays have the expected shapes and dtypes."""
    found = {name: f"{array.dtype}{list(array.shape)}" for name, array in saved.items()}
    wanted = {name: f"{x.dtype}{list(x.shape)}" for name, x in expected.items()}
    if problems := config_differences(found, wanted, (*found, *wanted)):
        raise ValueError(
            f"the checkpoint {path} does not fit this run:\n  " + "\n  ".join(problems[:10]) + f"\n{remedy}"
        )
