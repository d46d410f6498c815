"""Stores checkpoints in a directory, or at a URL, through tensorstore.

A key is a path in a store, such as `0000000500/weights/embed/zarr.json`.
"""

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

from shardwright.data import flat_tokens
from shardwright.data.untrusted import LARGE, MEMORY, Damaged, first_line
from shardwright.run.best_effort import in_a_line
from shardwright.settings.exits import LostError
from shardwright.settings.output import listed

T = TypeVar("T")

MANIFEST = "zarr.json"
"""Last part of the key of a checkpoint's manifest. zarr readers require this file, and warn of other files."""
_ERRORS = (OSError, ValueError, RuntimeError, IndexError, NotImplementedError)
"""Exceptions that tensorstore raises."""
WORKERS = 16
"""Files that a process reads or writes at a time."""
_MESSAGE_BYTES = 6000


class Store:
    """A directory of a local or shared file system, or the keys below a URL: `s3://`, `gs://`, or read-only `https://`.

    Methods are thread-safe. They raise OSError, with the path or URL, if the store fails. When `write` returns, the
    whole file is on the disk.

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
            flat_tokens.read_file(flat_tokens.open_kvstore(self.url, flat_tokens.opening_context()), MANIFEST)
        self.kvstore = flat_tokens.open_kvstore(self.url)

    def _result(self, future: ts.Future, key: str) -> Any:
        try:
            return future.result()
        except _ERRORS as error:
            # The reason first: `No space left on device` is at the end of what tensorstore says.
            code = re.search("os_error_code='([0-9]+)'", str(error))
            reason = os.strerror(int(code[1])) if code else ""
            place = f"{self.url}/{key}"
            raise OSError(f"{reason}: {place}" if reason else f"{place}: {error}") from error

    def read(self, key: str, most: int = LARGE) -> bytes | None:
        """Reads a file; None if it is missing. Raises Damaged if it is not a file of at most `most` bytes."""
        try:
            return flat_tokens.read_file(self.kvstore, key, min(most, MEMORY))
        except Damaged:
            raise
        except ValueError as error:
            raise OSError(str(error)) from error

    def write(self, key: str, content: bytes | None) -> None:
        """Writes a file, or with None removes it if it exists."""
        self._result(self.kvstore.write(key, content), key)

    def directories(self) -> dict[str, bool]:
        """Maps the name of each top-level directory to whether it has a manifest. At a URL, lists all keys."""
        if self.path is not None:
            found = self.path.iterdir() if self.path.is_dir() else ()
            # A manifest that is not a file is damage, which is set aside; without any, the directory may be removed.
            return {entry.name: os.path.lexists(entry / MANIFEST) for entry in found if entry.is_dir()}
        parts = [key.decode().partition("/") for key in self._result(self.kvstore.list(), "")]
        manifests = {name for name, _, rest in parts if rest == MANIFEST}
        return {name: name in manifests for name, slash, _ in parts if slash}

    def remove(self, directory: str) -> None:
        """Removes a directory if it exists. The manifest goes first, so that the rest does not pass as complete."""
        if self.path is None or (self.path / directory).exists():
            self.write(f"{directory}/{MANIFEST}", None)
            self._result(self.kvstore.delete_range(_below(directory)), directory)
            if self.path is not None:
                (self.path / directory).rmdir()

    def move(self, directory: str, target: str) -> None:
        """Renames a directory. At a URL, copies its files, the manifest last, and then removes them."""
        if self.path is not None:
            (self.path / target).parent.mkdir(parents=True, exist_ok=True)
            (self.path / directory).rename(self.path / target)
            return
        keys = [key.decode() for key in self._result(self.kvstore.list(_below(directory)), directory)]
        for key in sorted(keys, key=lambda key: key == f"{directory}/{MANIFEST}"):
            self.write(target + key.removeprefix(directory), self.read(key, MEMORY))
        self.remove(directory)

    def sync(self, keys: Iterable[str]) -> None:
        """Fsyncs all directories above these files. tensorstore syncs only the directory that contains a file."""
        if self.path is None:
            return
        for parent in {parent for key in keys for parent in PurePosixPath(key).parents[1:]}:
            descriptor = os.open(self.path / parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _below(directory: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(f"{directory}/", f"{directory}0")


def in_parallel(jobs: Iterable[Callable[[], T]]) -> list[T]:
    """Runs jobs, WORKERS at a time, and returns their results. After an error no further job starts.

    The error is raised once all have ended, because a late write could recreate files that the next save removes.
    """
    with concurrent.futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="chunk") as pool:
        return list(pool.map(lambda job: job(), jobs))


def gathered(x: Any) -> np.ndarray:
    """Gathers an array of the same shape from all processes, which all call this. Raises LostError if one has failed.

    The first axis of the result is the process.
    """
    try:
        return multihost_utils.process_allgather(x)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise LostError(first_line(error)) from error


def in_any_process(is_so: bool) -> bool:
    """Returns True if `is_so` is True in any process; all processes call this."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:  # asked in this order: no devices start
        return is_so
    return bool(gathered(np.int32(is_so)).any())


def in_all_processes(action: Callable[[], T], *more: type[Exception]) -> T:
    """Runs `action`; all processes call this.

    Damaged, OSError, ValueError or `more` in one is raised in all. Another exception in one is LostError in the others.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return action()
    kinds = (*more, Damaged, OSError, ValueError)
    raised = None
    sent = b""
    result: T | Any = None
    try:
        result = action()
    except Exception as error:
        raised = error
        kind = next((i for i, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
        text = str(error) if kind < len(kinds) else in_a_line(error)
        sent = f"{kind} process {jax.process_index()}: {text}".encode(errors="replace")[:_MESSAGE_BYTES]
    sent = np.frombuffer(sent.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    texts = []
    if in_any_process(raised is not None):  # one number of each process, mostly
        texts = [bytes(x).rstrip(b"\0").decode(errors="replace") for x in gathered(sent)]
    if raised is not None:
        raise raised
    if failed := next(filter(None, texts), ""):
        kind, _, text = failed.partition(" ")
        raise (*kinds, LostError)[int(kind)](text)
    return result


def check_processes(parts: Mapping[str, Any]) -> None:
    """Raises ValueError in all processes if a part differs between processes. All call this with the same names.

    Each process updates its own shards, so a stale file on one host would silently change the result.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    digests = [np.frombuffer(hashlib.sha256(repr(part).encode()).digest(), np.uint8) for part in parts.values()]
    every = gathered(np.stack(digests))
    for name, differs in zip(parts, (every != every[0]).any(-1).T, strict=True):
        if differs.any():
            numbers = listed([str(process) for process in np.flatnonzero(differs)])
            which = f"process {numbers} has" if differs.sum() == 1 else f"processes {numbers} have"
            raise ValueError(f"{which} another {name} than process 0: give all the same and restart.")
