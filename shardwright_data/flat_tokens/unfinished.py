"""Files beside a dataset while it is being written, so that the same command resumes after a kill.

`unfinished.json` holds the settings, from before the first token until all splits are written. `unfinished_<split>.npz`
holds the state of the split under way. Both are deleted when the dataset is finished.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.flat_tokens.format import FILE_BYTES
from shardwright_data.foreign import parse_object

State = dict[str, np.ndarray]


class Unfinished:
    """The work on one dataset.

    Args:
        out: directory of the dataset; a local path or a URL that tensorstore knows.
    """

    def __init__(self, out: str):
        self.out = out
        self._root = flat_tokens.open_kvstore(out, flat_tokens.opening_context())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which no other process works on a local dataset, if its file system has locks.

        Raises:
            ValueError: another process works on it, or the directory cannot be made.
        """
        if "://" in self.out:
            yield
            return
        import fcntl

        try:
            os.makedirs(self.out, exist_ok=True)
            directory = os.open(self.out, os.O_RDONLY)
        except OSError as e:
            raise ValueError(f"Cannot write to {self.out}: {e.strerror}.") from e
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(f"Another process is writing {self.out}. Wait for it, or end it.") from e
        except OSError:
            pass  # it has no locks
        try:
            yield
        finally:
            os.close(directory)

    def read_settings(self) -> dict[str, Any] | None:
        """The settings of the run that was interrupted here, None if there was none."""
        content = flat_tokens.read_file(self._root, "unfinished.json")
        return None if content is None else parse_object(f"{self.out}/unfinished.json", content, remedy="Delete it.")

    def begin(self, settings: Mapping[str, Any], splits: list[str], overwrite: bool) -> bool:
        """Begins or resumes the work; returns whether it resumes.

        Args:
            settings: JSON values by name, all that the result depends on.
            splits: names of the splits that will be written.
            overwrite: replace splits that are there, and begin again what was begun with other settings.

        Raises:
            ValueError: a split is already there, or the work was begun with other settings.
        """
        settings = json.loads(json.dumps(settings))
        before = self.read_settings()
        if before is not None and (difference := find_difference(before, settings)) is None:
            return True
        if before is not None and not overwrite:
            raise ValueError(
                f"{self.out} is unfinished, and was begun with other settings: {difference}. Give the same to resume, "
                "overwrite=true to begin again, or another path."
            )
        for split in splits:
            if not overwrite:
                flat_tokens.check_absent(self.out, split)
            flat_tokens.delete_split(self.out, split)
            self.delete_state(split)
        self._root.write("unfinished.json", json.dumps(settings, indent=1).encode()).result()
        return False

    def is_complete(self, split: str) -> bool:
        """Whether the split is finished."""
        return flat_tokens.is_there(self._root, split)

    def read_state(self, split: str) -> State | None:
        """The arrays that `write_state` wrote last, None if there are none."""
        content = flat_tokens.read_file(self._root, f"unfinished_{split}.npz", FILE_BYTES)
        return None if content is None else dict(np.load(io.BytesIO(content)))

    def write_state(self, split: str, state: State) -> None:
        """Replaces the state of a split."""
        content = io.BytesIO()
        np.savez(content, **state)
        self._root.write(f"unfinished_{split}.npz", content.getvalue()).result()

    def delete_state(self, split: str) -> None:
        """Deletes the state of a split, if there is one."""
        self._root.write(f"unfinished_{split}.npz", None).result()

    def finish(self) -> None:
        """Deletes the settings: the dataset is finished."""
        self._root.write("unfinished.json", None).result()


def find_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Names the first setting that differs, with both values; None if all agree."""
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if old != new:
            return f"{name} was {old}, is {new}"
    return None
