"""Where checkpoints are kept: a directory, or a URL that tensorstore opens. tensorstore does all reading and writing.

A key is a path in a store, such as `0000000500/weights/embed/zarr.json`.
"""

import concurrent.futures
import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from shardwright_data import flat_tokens

MANIFEST = "zarr.json"
"""Last part of the key of a checkpoint's manifest. zarr readers need this file, and complain about any other."""
STORE_ERRORS = (OSError, ValueError, RuntimeError, IndexError, NotImplementedError)
"""Exceptions of tensorstore, by the kind of the failure."""
WORKERS = 16
"""Files, or arrays that are restored, that a process reads or writes at a time."""


class Damaged(OSError, ValueError):
    """A checkpoint is damaged: something in it is missing, or is not what was written. The message says what."""


class Store:
    """A directory of a local or shared file system, or the keys at a URL: `s3://`, `gs://`, for reading `https://`.

    Methods may be called from several threads. They raise OSError, with the place, if the store fails. What is written
    is on the disk, as a whole, when `write` returns.

    Args:
        place: path of a directory, which need not exist, or a URL.

    Attributes:
        url: the place, for messages.
        path: the directory; None at a URL. Only a directory can be renamed at once.

    Raises:
        ValueError: a URL that tensorstore cannot read, or that does not answer, or that is mistyped.
    """

    def __init__(self, place: str | os.PathLike):
        self.url = os.fspath(place).removeprefix("file://")
        self.path: Path | None = None
        if mistyped := re.match(r"(s3|gs|https?|file):/(?!/)", self.url):
            raise ValueError(
                f"{self.url} has one slash after {mistyped[1]}: where a URL has two; write {mistyped[1]}://."
            )
        if "://" not in self.url:
            self.path = Path(self.url).expanduser()
            self.url = str(self.path)
        else:
            self.url = self.url.rstrip("/")
            # In the context in which a wrong address shows in seconds.
            waiting = flat_tokens.open_kvstore(self.url, flat_tokens.opening_context()).read(MANIFEST)
            try:
                waiting.result()
            except STORE_ERRORS as error:
                raise ValueError(
                    f"{self.url} cannot be reached: {error}. Check the address and the credentials."
                ) from error
        self.kvstore = flat_tokens.open_kvstore(self.url)

    def _result(self, future: ts.Future, action: str, key: str) -> Any:
        try:
            return future.result()
        except STORE_ERRORS as error:
            raise OSError(f"cannot {action} {self.url}/{key}: {error}") from error

    def read(self, key: str, part: slice | None = None) -> bytes | None:
        """The content, or a part of its bytes; None if it is missing."""
        found = self._result(self.kvstore.read(key, byte_range=part), "read", key)
        return found.value if found.state == "value" else None

    def write(self, key: str, content: bytes) -> None:
        """Writes a file."""
        self._result(self.kvstore.write(key, content), "write", key)

    def keys(self, directory: str) -> list[str]:
        """Keys of all files below a directory; "" is the store."""
        kept = ts.KvStore.KeyRange(f"{directory}/", f"{directory}0") if directory else ts.KvStore.KeyRange()
        return [key.decode() for key in self._result(self.kvstore.list(kept), "list", directory)]

    def directories(self) -> dict[str, bool]:
        """Name of each directory at the top, and whether there is a manifest in it. At a URL, lists all keys."""
        if self.path is not None:
            found = self.path.iterdir() if self.path.is_dir() else ()
            return {entry.name: (entry / MANIFEST).is_file() for entry in found if entry.is_dir()}
        parts = [key.partition("/") for key in self.keys("")]
        manifests = {name for name, _, rest in parts if rest == MANIFEST}
        return {name: name in manifests for name, slash, _ in parts if slash}

    def remove(self, directory: str) -> None:
        """Removes a directory, if it is there. It never looks whole when it is half removed."""
        if self.path is None:
            self.remove_file(f"{directory}/{MANIFEST}")
            kept = ts.KvStore.KeyRange(f"{directory}/", f"{directory}0")
            self._result(self.kvstore.delete_range(kept), "remove", directory)
            return
        temporary = f"{directory.removesuffix('.tmp')}.tmp"
        if (self.path / temporary).exists():
            shutil.rmtree(self.path / temporary)
        if (self.path / directory).exists():
            self.rename(directory, temporary)
            shutil.rmtree(self.path / temporary)

    def remove_file(self, key: str) -> None:
        """Removes a file, if it is there."""
        self._result(self.kvstore.write(key, None), "remove", key)

    def rename(self, directory: str, name: str) -> None:
        """Gives a directory another key, durably. At a URL its files are copied, and then removed."""
        if self.path is None:
            # The manifest is the last to arrive, and the first to go.
            for key in sorted(self.keys(directory), key=lambda key: key == f"{directory}/{MANIFEST}"):
                self.write(name + key.removeprefix(directory), self.read(key))
            self.remove(directory)
            return
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.path / directory).rename(target)
        _sync_directory(target.parent)

    def sync(self, directory: str) -> None:
        """Makes the names of all files below a directory durable. At a URL, they are."""
        if self.path is not None:
            for path, _, _ in os.walk(self.path / directory):
                _sync_directory(path)


def _sync_directory(path: str | os.PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_parallel(jobs: Sequence[Callable[[], Any]]) -> list:
    """The results of all, which ran WORKERS at a time. After an error no other begins.

    The error is raised once all have ended: a write that continued would bring back files that the next save removes.
    """
    with concurrent.futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="chunk") as pool:
        futures: list[concurrent.futures.Future] = []
        # In a program that is ending no thread begins; then the rest is done here.
        with contextlib.suppress(RuntimeError):
            for job in jobs:
                futures.append(pool.submit(job))
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    failed = [future.exception() for future in futures if not future.cancelled() and future.exception()]
    if failed:
        raise failed[0]
    return [future.result() for future in futures] + [job() for job in jobs[len(futures) :]]
