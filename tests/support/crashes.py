"""A disk on which a run crashes between any two operations, and which then has no more than a real
one would.
"""

import os
import stat
import threading
from pathlib import Path

from shardwright.program.checkpoint import MANIFEST, Store

OPERATIONS = (
    "open",
    "write",
    "fsync",
    "ftruncate",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
)
"""Functions of `os` that files are written by, also from pathlib and shutil.

tensorstore's are behind Store.write and write_chunk.
"""


class Crashed(BaseException):
    """In the place of SIGKILL or a power failure: nothing handles it."""


class Disk:
    """Counts the operations on the files below a directory, and has one fail.

    After a crash every later one, from any thread, fails as well: the process is dead.

    Attributes:
        committed: directories whose manifest was written.
        failed: what failed.
    """

    def __init__(self, root: Path, patch):
        self.root, self.committed, self.failed = root, [], None
        self._left, self._error, self._on, self._lock = None, None, "", threading.Lock()
        self._durable: set[Path] = set()
        self._synced: dict[Path, int] = {}
        for name in OPERATIONS:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        write = Store.write

        def written(store, key, content):
            path = store.path / key
            self._count(f"write {key}")
            write(store, key, content)
            self._durable.add(path)  # tensorstore syncs a file and the directory that it is in
            if path.name == MANIFEST and path.parent.parent == store.path and content is not None:
                self.committed.append(path.parent)
            self._count(f"written {key}")

        patch.setattr(Store, "write", written)
        write_chunk = Store.write_chunk

        def chunk_written(store, directory, array, index, values):
            key = f"{directory}/{array.key(index)}"
            self._count(f"write {key}")
            checksum = write_chunk(store, directory, array, index, values)
            self._durable.add(store.path / key)
            self._count(f"written {key}")
            return checksum

        patch.setattr(Store, "write_chunk", chunk_written)

    def fail(self, error: BaseException | None, left: int | None = None, on: str = "") -> None:
        """From now on the operation after `left - 1` others raises `error`; None: none does.

        Those count that have `on` in their description, such as the name of a file.
        """
        self._error, self._left, self._on = error, left, on
        if error is not None:
            self.failed = None
            self.committed.clear()

    def _watched(self, name, function):
        def called(at, *arguments, **options):
            path = self._path(at, name, arguments)
            if path is None:
                return function(at, *arguments, **options)
            if name == "write":
                half = len(arguments[0]) // 2
                self._count(f"write {path}", lambda: function(at, arguments[0][:half]))
            else:
                self._count(f"{name} {path}")
            result = function(at, *arguments, **options)
            if name == "fsync":
                self._sync(path)
            elif name in ("rename", "replace"):
                self._move(path, Path(os.path.abspath(arguments[0])))
            elif name == "rmdir":
                self._durable = {x for x in self._durable if not x.is_relative_to(path)}
            return result

        return called

    def _path(self, at, name, arguments) -> Path | None:
        """What an operation is on, if it writes below the root."""
        if name == "open" and not arguments[0] & (os.O_WRONLY | os.O_RDWR):
            return None
        try:
            path = Path(
                os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else os.path.abspath(at)
            )
        except (TypeError, OSError):
            return None
        return path if path.is_relative_to(self.root) else None

    def _count(self, what, partly=lambda: None) -> None:
        with self._lock:
            if self._left is None:
                return
            if self._left > 0 and self._on in what:
                self._left -= 1
                if self._left == 0:
                    self.failed = what
                    partly()
                    raise self._error
            elif self._left == 0 and isinstance(self._error, Crashed):
                raise self._error

    def _sync(self, path: Path) -> None:
        if path.is_dir():
            self._durable |= {*path.iterdir()}
        else:
            self._synced[path] = path.stat().st_size

    def _move(self, path: Path, target: Path) -> None:
        """Both names are of the same file: it is at one of the two after a power failure, here at
        the new one.
        """
        self._durable |= {
            target / x.relative_to(path) for x in self._durable if x.is_relative_to(path)
        }
        self._durable |= {target, *target.parents}
        self._synced[target] = self._synced.pop(path, 0)

    def lose_power(self) -> None:
        """Takes away what was never synced: entries of directories, and ends and contents of
        files.
        """
        checkpoints = self.root / "checkpoints"
        for directory, names, files in os.walk(checkpoints):
            for name in [*names, *files]:
                path = Path(directory, name)
                if path not in self._durable:
                    names[:] = [x for x in names if x != name]
                    _remove(path)
        for path in self.root.glob("*"):
            if path.is_file():
                os.truncate(path, min(self._synced.get(path, 0), path.stat().st_size))


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        for below in path.iterdir():
            _remove(below)
        path.rmdir()
    else:
        path.unlink()
