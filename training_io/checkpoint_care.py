"""What is done with whole checkpoints: verifying, copying, moving aside."""

import collections
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from training_io.checkpoint import directory_of
from training_io.checkpoint_arrays import read_file
from training_io.manifest import Damaged, SavedArray, read_manifest, read_metadata, saved_array
from training_io.stores import MANIFEST, Store, in_parallel

SET_ASIDE = "set_aside"
"""Directory, beside the checkpoints, of those that a run went back before."""
PROBLEMS = 100
"""Most parts of a checkpoint that are told to be damaged, of the millions that may be missing."""
_JOBS = 2**14
"""Files that are waited for at a time: each waiting one takes about 1 kB."""


def _found(job: Callable[[], Any]) -> str | None:
    """What is damaged, if the job says that something is."""
    try:
        job()
    except Damaged as error:
        return str(error)
    return None


def _in_turn(jobs: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """The results of jobs, of which there may be more than fit into memory."""
    jobs = iter(jobs)
    while some := list(itertools.islice(jobs, _JOBS)):
        yield from in_parallel(some)


def _arrays(store: Store, directory: str, manifest: dict) -> tuple[list[SavedArray], list[str]]:
    """Arrays of a checkpoint, and what is wrong with the metadata of the others."""
    arrays: list[SavedArray] = []
    add = lambda name: arrays.append(saved_array(store, directory, name, manifest))
    problems = in_parallel([functools.partial(_found, functools.partial(add, name)) for name in manifest["arrays"]])
    return arrays, [problem for problem in problems if problem]


def _groups(manifest: dict) -> list[str]:
    return sorted({*manifest.get("files", ())} - {f"{name}/zarr.json" for name in manifest["arrays"]})


def verify(store: Store, directory: str) -> list[str]:
    """Reads all of a checkpoint. Returns a sentence for each part that is damaged: none if it is whole.

    After PROBLEMS of them, the last says how many more there are.

    Raises OSError if the store fails, ValueError if the checkpoint is of a version that this program does not read.

    Args:
        store: where it is.
        directory: its directory there.
    """
    try:
        manifest = read_manifest(store, directory, _step_of(directory))
    except Damaged as error:
        return [str(error)]
    arrays, problems = _arrays(store, directory, manifest)
    groups = (functools.partial(read_metadata, store, directory, key, manifest) for key in _groups(manifest))
    files = (functools.partial(read_file, store, directory, array, at) for array in arrays for at in array.chunks())
    checks = (functools.partial(_found, job) for job in itertools.chain(groups, files))
    found = itertools.chain(problems, filter(None, _in_turn(checks)))
    told, more = list(itertools.islice(found, PROBLEMS)), sum(1 for _ in found)
    return told + [f"and {more:,} more."] * bool(more)


def _step_of(directory: str) -> int:
    return int(directory.rpartition("/")[2])


def size(store: Store, directory: str) -> tuple[int, str]:
    """Bytes of the chunks of a checkpoint, and the time at which it was saved, of UTC; "" in version 1.

    Raises Damaged if its manifest or its metadata is, or a file is missing; its chunks are not read.
    """
    manifest = read_manifest(store, directory, _step_of(directory))
    arrays, problems = _arrays(store, directory, manifest)
    if problems:
        raise Damaged(problems[0])
    there = {*store.keys(directory)}
    keys = itertools.chain((array.key(index) for array in arrays for index in array.chunks()), _groups(manifest))
    missing = (key for key in keys if f"{directory}/{key}" not in there)
    if first := next(missing, None):
        raise Damaged(f"{first} is missing, of {1 + sum(1 for _ in missing)} files.")
    return sum(array.file_bytes for array in arrays), manifest.get("saved_at", "")


def copy(source: Store, directory: str, target: Store, name: str) -> None:
    """Copies a checkpoint, file by file with its checksums compared; the manifest last. Then verifies the copy.

    Args:
        source: where it is.
        directory: its directory there.
        target: where it goes.
        name: its directory there, which must not have a checkpoint.

    Raises:
        ValueError: there is a checkpoint already.
        Damaged: the checkpoint is damaged, or its copy is.
        OSError: a store fails.
    """
    if target.read(f"{name}/{MANIFEST}") is not None:
        raise ValueError(f"{target.url}/{name} is there already. Delete it, or choose another place.")
    manifest = read_manifest(source, directory, _step_of(directory))
    arrays, problems = _arrays(source, directory, manifest)
    if problems:
        raise Damaged(problems[0])
    temporary = f"{name}.tmp" if target.renames else name
    target.remove(temporary)

    def transfer(key: str, read: Callable[[], Any]) -> None:
        target.write(f"{temporary}/{key}", read())

    metadata = [*_groups(manifest), *(f"{array.name}/zarr.json" for array in arrays)]
    texts = ((key, functools.partial(read_metadata, source, directory, key, manifest)) for key in metadata)
    files = (
        (array.key(at), functools.partial(read_file, source, directory, array, at))
        for array in arrays
        for at in array.chunks()
    )
    jobs = (functools.partial(transfer, *job) for job in itertools.chain(texts, files))
    try:
        collections.deque(_in_turn(jobs), maxlen=0)
        transfer(MANIFEST, functools.partial(source.read, f"{directory}/{MANIFEST}"))
        target.sync(temporary)
    except BaseException:
        with contextlib.suppress(OSError):  # the place may be what failed: its error is the one to tell
            target.remove(temporary)
        raise
    if temporary != name:
        target.rename(temporary, name)
    if problems := verify(target, name):
        target.remove(name)
        raise Damaged(f"the copy {target.url}/{name} is not what was read, and was removed: {problems[0]}")


def set_aside(store: Store, steps: Iterable[int]) -> str:
    """Moves checkpoints, damaged or not, into a directory of their own beside the others. Returns its place.

    It is a place of checkpoints like the one that they were in. Where directories cannot be renamed, they are copied.
    """
    place = time.strftime(f"{SET_ASIDE}/%Y%m%dT%H%M%SZ", time.gmtime())
    for name in map(directory_of, steps):
        if store.renames:
            store.rename(name, f"{place}/{name}")
            continue
        # The manifest is the last to arrive, and the first to go.
        for key in sorted(store.keys(name), key=lambda key: key == f"{name}/{MANIFEST}"):
            store.write(f"{place}/{key}", store.read(key))
        store.remove(name)
    return f"{store.url}/{place}"
