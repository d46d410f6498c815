"""What is done with whole checkpoints: verifying, moving aside."""

import functools
import itertools
import time
from collections.abc import Iterable

from shardwright.run.checkpoint import directory_of
from shardwright.run.checkpoint_arrays import StoredArray
from shardwright.run.manifest import Damaged, SavedArray, metadata_files, read_manifest, saved_arrays
from shardwright.run.stores import Store, in_parallel

SET_ASIDE = "set_aside"
"""Directory, beside the checkpoints, of those that a run went back before."""


def verify(store: Store, directory: str) -> list[str]:
    """Reads all of a checkpoint. Returns a sentence for each part that is damaged: none if it is whole.

    Raises OSError if the store fails, ValueError if the checkpoint is of a version that this program does not read.

    Args:
        store: where it is.
        directory: its directory there.
    """
    try:
        manifest = read_manifest(store, directory, int(directory.rpartition("/")[2]))
    except Damaged as error:
        return [str(error)]
    arrays = saved_arrays(manifest).values()

    def problems_of(array: SavedArray) -> list[str]:
        stored, problems = StoredArray(store, directory, array), []
        for index in array.chunks():
            try:
                stored.read(array.box(index))
            except Damaged as error:
                problems.append(str(error))
        return problems

    # Other programs read these files. This one does not: all that they say is in the manifest.
    files = metadata_files(arrays).items()
    changed = [key for key, text in files if store.read(f"{directory}/{key}") != text.encode()]
    problems = [f"{key} is missing, or not what was written." for key in changed]
    return problems + list(itertools.chain(*in_parallel([functools.partial(problems_of, x) for x in arrays])))


def set_aside(store: Store, steps: Iterable[int]) -> str:
    """Moves checkpoints, damaged or not, into a directory of their own beside the others. Returns its place.

    It is a place of checkpoints like the one that they were in.
    """
    place = time.strftime(f"{SET_ASIDE}/%Y%m%dT%H%M%SZ", time.gmtime())
    for name in map(directory_of, steps):
        store.rename(name, f"{place}/{name}")
    return f"{store.url}/{place}"
