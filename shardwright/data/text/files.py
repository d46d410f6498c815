"""Finds the files that a list of files, folders, globs and URLs names, and what it leaves out."""

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwright.data.flat_tokens.format import how_to_convert
from shardwright.data.untrusted import COPY_AGAIN, check_file, one_line, read_object

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
KINDS |= {".feather": "arrow", ".csv": "csv", ".txt": "text"}
"""Kind of each file extension; one of PACKED may follow, except for .parquet, .arrow and
.feather."""
PACKED = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".zstd")
"""Suffixes of compressed files. Not .zip, of which only the first file would be read."""
BESIDE = ("cache-*.arrow", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files that the library `datasets` writes beside its data."""
_TEST = {"test", "testing", "eval", "evaluation"}
OTHER_SPLITS = {
    "train": {"validation", "valid", "val", "dev"} | _TEST,
    "validation": {"train", "training"} | _TEST,
}
"""Words by which the library `datasets` recognizes the files of the other splits."""


@dataclass(frozen=True)
class Found:
    """Files to read, in order, and what else there is beside them."""

    paths: list[str]
    left_out: list[str]
    """Names of files that are not read."""
    of_other_splits: list[str]
    """Names of files to read that have a word of another split."""

    def described(self, split: str) -> list[str]:
        """Describes the files in a line, and warns in another of those that are named like another
        split.
        """
        size = sum(os.path.getsize(path) for path in self.paths if "://" not in path)
        left_out = f"; left out: {_listed(self.left_out)}" if self.left_out else ""
        lines = [f"{split}: {len(self.paths):,} files, {size / 1e6:,.1f} MB here{left_out}"]
        if self.of_other_splits:
            names = _listed(self.of_other_splits)
            lines.append(
                f"warning: {split} reads files named like other splits: {names}. Give a glob such "
                f"as '*{split}*', or name the files."
            )
        return lines

    def shared_with(self, other: "Found") -> list[str]:
        """Returns the paths of the files that are also in `other`."""
        known = {*map(real_file, other.paths)}
        return [path for path in self.paths if real_file(path) in known]


def _listed(names: list[str]) -> str:
    shown = ", ".join(one_line(name, 200) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5:,} more"


def kind_of(path: str) -> str | None:
    """Returns the kind of a file, by the last suffix of its name but for one of PACKED; None if it
    is none of KINDS.
    """
    name = path.rsplit("/", 1)[-1].lower()
    if "://" in path:
        name = re.split("[?#]", name)[0]
    stem, suffix = os.path.splitext(name)
    return KINDS.get(os.path.splitext(stem)[1] if suffix in PACKED else suffix)


def find_files(patterns: list[str], split: str) -> Found:
    """Finds the files of a split, each once, even if links or several patterns lead to it.

    Of folders and globs, leaves out files of other kinds, empty and hidden files, and what the
    library `datasets` writes beside its data. Does not enter hidden folders.

    Args:
        patterns: files, folders, which stand for all files below them, globs, or URLs, which stay
            as they are. The files of a folder or glob are sorted.
        split: a key of OTHER_SPLITS to look for the words of, or another name.

    Raises:
        ValueError: a pattern matches no file of KINDS, or a file or folder cannot be read.
    """
    paths: dict[object, str] = {}
    left_out = []
    of_other_splits = []
    data_files = functools.cache(_data_files)
    for pattern in (pattern.removeprefix("file://") for pattern in patterns):
        names = _matches(pattern)
        is_found = False
        for path in sorted(names):
            is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
            is_beside = path != pattern and (is_empty or _is_beside(path, pattern, data_files))
            if is_beside or not kind_of(path):
                left_out.append(names[path])
                continue
            is_found = True
            known = paths.setdefault(real_file(path), path)
            if known == path and OTHER_SPLITS.get(split, set()) & _words(names[path]) - _words(
                pattern
            ):
                of_other_splits.append(names[path])
        if not is_found:
            there = (
                f", which has {_listed([*names.values()])}"
                if names and pattern not in names
                else ""
            )
            kinds = f"{', '.join(KINDS)}, also compressed: {', '.join(PACKED)}"
            remedy = f"Correct the path or pattern, or choose files of these kinds: {kinds}."
            raise ValueError(
                f"No text file matches {pattern!r} in {os.getcwd()}{there}. "
                f"{how_to_convert(names) or remedy}"
            )
    return Found([*paths.values()], left_out, of_other_splits)


def find_in_dataset(files: list[str]) -> Found:
    """Finds, among the files that the library `datasets` reads for a split, those that are not its
    own caches.

    Raises ValueError if a file or folder cannot be read.
    """
    data_files = functools.cache(_data_files)
    beside = [path for path in files if "://" not in path and _is_beside(path, "", data_files)]
    paths = {real_file(path): path for path in files if path not in beside}
    return Found([*paths.values()], [os.path.basename(path) for path in beside], [])


def _is_beside(path: str, pattern: str, data_files: Callable[[str], list[str] | None]) -> bool:
    """Returns whether a match of a folder or glob is hidden, or written beside its data by the
    library `datasets`.
    """
    folder, name = os.path.split(path)
    if name.startswith(".") and (
        os.path.isdir(pattern) or not os.path.basename(pattern).startswith(".")
    ):
        return True
    names = data_files(folder)
    return name not in names if names else any(fnmatch.fnmatch(name, beside) for beside in BESIDE)


def real_file(path: str) -> object:
    """Returns a value that is equal for names of the same file.

    Raises ValueError for a file that cannot be read.
    """
    if "://" in path:
        return path
    check_file(path)
    about = os.stat(path)
    return about.st_dev, about.st_ino


def _words(text: str) -> set[str]:
    return set(re.split("[^a-z]+", text.lower()))


def _matches(pattern: str) -> dict[str, str]:
    """Returns the paths that a pattern matches, and their names relative to its first folder, for
    messages.
    """
    if "://" in pattern or os.path.isfile(pattern):
        return {pattern: pattern}
    if os.path.isdir(pattern):
        base, matched = pattern, [pattern]
    else:
        base, matched = os.path.dirname(re.split(r"[*?[]", pattern)[0]), _expand(pattern)
    found = [
        path
        for match in matched
        for path in (_files_below(match) if os.path.isdir(match) else [match])
    ]
    return {path: os.path.relpath(path, base or ".") for path in found}


def _expand(pattern: str) -> list[str]:
    """Returns the matches of a glob.

    Unlike glob.glob, follows a link to a folder that contains it only once.
    """
    head, *tail = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", pattern, maxsplit=1)
    if not tail:
        return glob.glob(head)
    folders = [folder for top in glob.glob(head or "./") for folder, _ in _walk(top)]
    return [
        path for folder in folders for path in _expand(os.path.join(glob.escape(folder), tail[0]))
    ]


def _files_below(folder: str) -> list[str]:
    return [os.path.join(root, name) for root, names in _walk(folder) for name in names]


def _walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder below one that is not hidden, once, with the names of its files."""
    entered = set()
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        about = os.stat(root)
        if (about.st_dev, about.st_ino) in entered:
            folders.clear()
            continue
        entered.add((about.st_dev, about.st_ino))
        shown = [name for name in folders if not name.startswith(".")]
        # Links last, so that files have their own paths.
        folders[:] = sorted(
            shown, key=lambda name: (os.path.islink(os.path.join(root, name)), name)
        )
        yield root, names


def _raise(error: OSError) -> None:
    raise ValueError(
        f"{error.filename} cannot be read: {error.strerror}. Correct its permissions."
    ) from error


def _data_files(folder: str) -> list[str] | None:
    """Returns the names of the data files in a folder that `save_to_disk` wrote; None for other
    folders.

    Raises ValueError if one is missing.
    """
    try:
        state = read_object(
            os.path.join(folder, "state.json"), {"_data_files": [{"filename": str}]}
        )
    except (OSError, ValueError):
        return None
    names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        if not os.path.lexists(os.path.join(folder, name)):
            raise ValueError(f"{folder}/state.json lists {name}, which is missing. {COPY_AGAIN}")
    return names
