"""The file beside a dataset while it is being written, so that the same command resumes after a kill.

`unfinished.json` holds the settings, from before the first token until all splits are written. What `Writer.save` wrote
of the split under way is beside it.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts

from shardwright_data.flat_tokens.format import clear_split, is_there, open_kvstore, opening_context, read_file
from shardwright_data.flat_tokens.writer import STATE_BYTES, state_of
from shardwright_data.foreign import parse_object

SETTINGS = "unfinished.json"


class Unfinished:
    """The work on one dataset.

    Args:
        out: directory of the dataset; a local path or a URL that tensorstore knows.
    """

    def __init__(self, out: str):
        self.out = out
        self._root = open_kvstore(out, opening_context())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which no other process works on a local dataset, if its file system has locks.

        Raises ValueError if another process works on it.
        """
        if "://" in self.out:
            yield
            return
        import fcntl

        os.makedirs(self.out, exist_ok=True)
        directory = os.open(self.out, os.O_RDONLY)
        try:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise ValueError(f"Another process is writing {self.out}. Wait for it, or end it.") from e
            except OSError:
                pass  # it has no locks
            yield
        finally:
            os.close(directory)

    def read_settings(self) -> dict[str, Any] | None:
        """The settings of the run that was interrupted here, None if there was none."""
        content = read_file(self._root, SETTINGS)
        return None if content is None else parse_object(f"{self.out}/{SETTINGS}", content, remedy="Delete it.")

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
        if before == settings:
            return True
        if before is not None and not overwrite:
            raise ValueError(
                f"{self.out} is unfinished, and was begun with other settings: {difference(before, settings)}. Give "
                "the same to resume, overwrite=true to begin again, or another path."
            )
        for split in splits:
            clear_split(self.out, split, overwrite)
        self.finish()
        self._root.write(SETTINGS, json.dumps(settings, indent=1).encode()).result()
        return False

    def has_begun(self, split: str) -> bool:
        """Whether a part of the split is there that need not be done again."""
        return is_there(self._root, split) or read_file(self._root, state_of(split), STATE_BYTES) is not None

    def finish(self) -> None:
        """Deletes the settings, and what `Writer.save` wrote: the dataset is finished."""
        self._root.delete_range(ts.KvStore.KeyRange("unfinished", "unfinishee")).result()


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Names the first setting that differs, with both values."""
    name = next(name for name in [*now, *before] if before.get(name) != now.get(name))
    return f"{name} was {before.get(name)}, is {now.get(name)}"
