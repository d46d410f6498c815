"""Where checkpoints are kept: directories of a file system, and URLs that tensorstore or fsspec knows.

A key is a path in a store, such as `0000000500/weights/embed/zarr.json`.
"""

import concurrent.futures
import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec
import numpy as np
import tensorstore as ts

import flat_tokens
from configuration.foreign import open_no_link, open_no_pipe
from flat_tokens.stores import TENSORSTORE_SCHEMES

T = TypeVar("T")

MANIFEST = "zarr.json"
"""Last part of the key of a checkpoint's manifest. zarr readers need this file, and complain about any other."""
ALIGNMENT = 64
"""Alignment of what is read from disk, in bytes. A CPU device takes over memory that is aligned so, without a copy."""
ATTEMPTS, FIRST_DELAY_S = 5, 0.5
"""Attempts of a request through fsspec, and the pause after the first; each pause is twice the one before. tensorstore
repeats a request by itself."""
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError)
"""Errors of a request that another attempt does not cure."""
WORKERS = 16
"""Files that a process reads or writes at a time."""
STORE_ERRORS = (OSError, ValueError, RuntimeError, IndexError, NotImplementedError)
"""Exceptions of tensorstore, by the kind of the failure."""


class Damaged(OSError, ValueError):
    """A checkpoint is damaged: something in it is missing, or is not what was written. The message says what."""


class Store(Protocol):
    """A directory, or what looks like one.

    Methods may be called from several threads. They raise OSError, with the place, if the store fails.

    Attributes:
        url: the directory, for messages: a path or a URL.
        renames: whether a directory can be renamed, at once or not at all.
    """

    url: str
    renames: bool

    def read(self, key: str, most: int | None = None) -> np.ndarray | None:
        """The content as u8[bytes], None if it is missing. Raises Damaged if it has more than `most` bytes."""

    def write(self, key: str, *parts: Any) -> None:
        """Writes a file of the bytes of `parts`, which are bytes or NumPy arrays. It is there as a whole or not."""

    def directories(self) -> dict[str, bool]:
        """Name of each directory at the top, and whether there is a manifest in it."""

    def keys(self, directory: str) -> list[str]:
        """Keys of all files below a directory."""

    def remove(self, directory: str) -> None:
        """Removes a directory, if it is there."""

    def remove_file(self, key: str) -> None:
        """Removes a file, if it is there."""

    def rename(self, directory: str, name: str) -> None:
        """Gives a directory another key, durably. Only where `renames`."""

    def sync(self, directory: str) -> None:
        """Makes the names of all files below a directory durable."""


def open_store(place: str | os.PathLike) -> Store:
    """The store at a path, which need not exist, or at a URL.

    Raises:
        ValueError: a URL that nothing installed reads, or that does not answer, or that is mistyped.
    """
    text = os.fspath(place)
    scheme, one_slash, rest = text.partition(":/")
    if one_slash and not rest.startswith("/") and scheme in {*TENSORSTORE_SCHEMES, *fsspec.available_protocols()}:
        raise ValueError(f"{text} has one slash after {scheme}: where a URL has two; write {scheme}://{rest}.")
    if "://" not in text or text.startswith("file://"):
        try:
            return Directory(Path(text.removeprefix("file://")).expanduser())
        except RuntimeError as error:  # no such user
            raise ValueError(f"{text} is no directory: {error}. Write the path without ~.") from error
    return (TensorstoreUrl if text.split("://")[0] in TENSORSTORE_SCHEMES else FsspecUrl)(text.rstrip("/"))


# ---- many requests at a time ---------------------------------------------------------------------------------------


def in_parallel(jobs: Sequence[Callable[[], Any]]) -> list:
    """The results of all, which ran WORKERS at a time. After an error no other begins, and it is raised at the end."""
    futures: list[concurrent.futures.Future] = []
    with concurrent.futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="chunk") as pool:
        # In a program that is ending no thread begins; then the rest is done here.
        with contextlib.suppress(RuntimeError):
            for job in jobs:
                futures.append(pool.submit(job))
        return results(futures) + [job() for job in jobs[len(futures) :]]


def results(futures: Sequence[concurrent.futures.Future]) -> list:
    """The results of all. Raises the first error once all have ended; those that did not begin never do.

    A write that continued would bring back files that the next save removes.
    """
    concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future in futures:
        future.cancel()
    concurrent.futures.wait(futures)
    for future in futures:
        if not future.cancelled() and future.exception() is not None:
            raise future.exception()
    return [future.result() for future in futures]


# ---- file systems -------------------------------------------------------------------------------------------------


class Directory:
    """A directory of a local or shared file system. What is written is on the disk when `write` returns."""

    renames = True

    def __init__(self, path: Path):
        self.path, self.url = path, str(path)

    def read(self, key: str, most: int | None = None) -> np.ndarray | None:
        """See Store. A file that is too large takes no memory. A pipe or a device is no file."""
        path = self._inside(key)
        try:
            with open(path, "rb", buffering=0, opener=open_no_pipe) as file:
                size = os.fstat(file.fileno()).st_size
                _check_size(str(path), size, most)
                content = aligned(size)
                done = 0
                while done < content.size and (count := file.readinto(content[done:])):
                    done += count
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except Damaged:
            raise
        except OSError as error:
            raise OSError(f"cannot read {path}: {error.strerror}") from error
        return content[:done]

    def _inside(self, key: str) -> Path:
        """Path of a key. Raises OSError if it is a link out of its checkpoint, which a stranger may have made."""
        path, root = self.path / key, self.path / key.partition("/")[0]
        if not (to := _resolved(path)).is_relative_to(_resolved(root)):
            raise OSError(f"{path} is a link to {to}, outside of the checkpoint. Copy that there instead.")
        return path

    def _own(self, key: str) -> Path:
        """Path of a key that is changed. Raises OSError if that is not in this directory. A link is not followed."""
        path = self.path / key
        to = _resolved(path.parent)
        if ".." in Path(key).parts or not to.is_relative_to(_resolved(self.path)):
            raise OSError(f"{path} leads to {to}, outside of {self.path}. Nothing is changed there.")
        return path

    def write(self, key: str, *parts: Any) -> None:
        """See Store."""
        path = self._own(key)
        temporary = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb", buffering=0, opener=open_no_link) as file:
                for part in parts:
                    view = memoryview(part).cast("B")
                    while view:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise OSError(f"cannot write {path}: {error.strerror}") from error

    def directories(self) -> dict[str, bool]:
        """See Store."""
        if not self.path.is_dir():
            return {}
        return {entry.name: (entry / MANIFEST).is_file() for entry in self.path.iterdir() if entry.is_dir()}

    def keys(self, directory: str) -> list[str]:
        """See Store."""
        found = os.walk(self.path / directory)
        return [Path(at, name).relative_to(self.path).as_posix() for at, _, names in found for name in names]

    def remove(self, directory: str) -> None:
        """See Store. A link is removed, and not what it leads to."""
        path = self._own(directory)
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)

    def remove_file(self, key: str) -> None:
        """See Store."""
        self._own(key).unlink(missing_ok=True)

    def rename(self, directory: str, name: str) -> None:
        """See Store."""
        source, target = self._own(directory), self._own(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        _sync_directory(target.parent)

    def sync(self, directory: str) -> None:
        """See Store."""
        paths = [path for path, _, _ in os.walk(self.path / directory)]
        in_parallel([functools.partial(_sync_directory, path) for path in paths])


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links that go around


def _check_size(place: str, size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise Damaged(f"{place} has {size:,} bytes, more than the {most:,} that it may have.")


def aligned(size: int) -> np.ndarray:
    """Memory for u8[size], which a CPU device can take over without a copy."""
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]


def _sync_directory(path: str | os.PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- URLs ---------------------------------------------------------------------------------------------------------


def _join(parts: tuple[Any, ...]) -> bytes:
    return b"".join(memoryview(part).cast("B") for part in parts)


class Url:
    """What the stores behind URLs share: they have no directories, only keys with slashes."""

    renames = False
    url: str

    def directories(self) -> dict[str, bool]:
        """See Store. Lists all keys."""
        found: dict[str, bool] = {}
        for key in self.keys(""):
            name, _, rest = key.partition("/")
            if rest:
                found[name] = found.get(name, False) or rest == MANIFEST
        return found

    def rename(self, directory: str, name: str) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(f"{self.url} has no directories that can be renamed.")

    def sync(self, directory: str) -> None:
        """Does nothing: a request that ended is durable."""

    def keys(self, directory: str) -> list[str]:
        """See Store."""
        raise NotImplementedError


class TensorstoreUrl(Url):
    """A URL that tensorstore opens: `s3://`, `gs://`, and for reading `http://` and `https://`."""

    def __init__(self, url: str):
        self.url = url
        try:
            # In the context in which a wrong address shows in seconds.
            flat_tokens.open_kvstore(url, flat_tokens.opening_context()).read(MANIFEST).result()
            self._kvstore = flat_tokens.open_kvstore(url)
        except STORE_ERRORS as error:
            raise ValueError(f"{url} cannot be reached: {error}. Check the address and the credentials.") from error

    def _result(self, future: ts.Future, action: str, key: str) -> Any:
        try:
            return future.result()
        except STORE_ERRORS as error:
            raise OSError(f"cannot {action} {self.url}/{key}: {error}") from error

    def read(self, key: str, most: int | None = None) -> np.ndarray | None:
        """See Store."""
        found = self._result(self._kvstore.read(key), "read", key)
        if found.state != "value":
            return None
        _check_size(f"{self.url}/{key}", len(found.value), most)
        return np.frombuffer(found.value, np.uint8)

    def write(self, key: str, *parts: Any) -> None:
        """See Store."""
        self._result(self._kvstore.write(key, _join(parts)), "write", key)

    def keys(self, directory: str) -> list[str]:
        """See Store."""
        kept = ts.KvStore.KeyRange(f"{directory}/", f"{directory}0") if directory else ts.KvStore.KeyRange()
        return [key.decode() for key in self._result(self._kvstore.list(kept), "list", directory)]

    def remove(self, directory: str) -> None:
        """See Store. The manifest goes first: what is half removed must not look whole."""
        self.remove_file(f"{directory}/{MANIFEST}")
        kept = ts.KvStore.KeyRange(f"{directory}/", f"{directory}0")
        self._result(self._kvstore.delete_range(kept), "remove", directory)

    def remove_file(self, key: str) -> None:
        """See Store."""
        self._result(self._kvstore.write(key, None), "remove", key)


class FsspecUrl(Url):
    """A URL that fsspec opens, through the package of its scheme: such as `memory://`, `abfs://`, `sftp://`."""

    def __init__(self, url: str):
        self.url = url
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"nothing installed reads {url}: {error}. Correct the scheme before ://, or install the package for it."
            ) from error
        self._root = self._root.rstrip("/")

    def _try(self, action: str, key: str, request: Callable[[], T]) -> T:
        delay = FIRST_DELAY_S
        for attempt in range(ATTEMPTS):
            try:
                return request()
            # Each store has errors of its own.
            except Exception as error:
                if isinstance(error, FileNotFoundError):
                    raise
                if isinstance(error, FINAL) or attempt == ATTEMPTS - 1:
                    raise OSError(f"cannot {action} {self.url}/{key}: {error}") from error
            time.sleep(delay)
            delay *= 2
        raise AssertionError

    def read(self, key: str, most: int | None = None) -> np.ndarray | None:
        """See Store."""
        try:
            content = self._try("read", key, lambda: self._files.cat_file(f"{self._root}/{key}"))
        except FileNotFoundError:
            return None
        _check_size(f"{self.url}/{key}", len(content), most)
        return np.frombuffer(content, np.uint8)

    def write(self, key: str, *parts: Any) -> None:
        """See Store."""
        path, content = f"{self._root}/{key}", _join(parts)

        def request() -> None:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content)

        self._try("write", key, request)

    def keys(self, directory: str) -> list[str]:
        """See Store."""
        self._files.invalidate_cache()
        root = self._root + "/"
        found = self._try("list", directory, lambda: self._files.find(f"{root}{directory}"))
        return [path.removeprefix(root) for path in found]

    def remove(self, directory: str) -> None:
        """See Store. The manifest goes first: what is half removed must not look whole."""
        self.remove_file(f"{directory}/{MANIFEST}")
        for key in self.keys(directory):
            self.remove_file(key)
        # A store with directories has empty ones left.
        path = f"{self._root}/{directory}"
        if self._try("remove", directory, lambda: self._files.isdir(path)):
            self._try("remove", directory, lambda: self._files.rm(path, recursive=True))

    def remove_file(self, key: str) -> None:
        """See Store."""
        with contextlib.suppress(FileNotFoundError):
            self._try("remove", key, lambda: self._files.rm_file(f"{self._root}/{key}"))
