"""Opens flat-tokens datasets wherever they are stored, and checks that none of their files is missing.

tensorstore reads local paths and the URLs that it knows. zarr-python reads any other URL through fsspec, which is
several times slower but reaches every store that has an fsspec package: `hf://`, `abfs://`, `sftp://`, `memory://` …
"""

import os
import struct
from collections.abc import Sequence

import numpy as np

from shardwright_data.flat_tokens import Reader
from shardwright_data.flat_tokens.fsspec_reader import FsspecReader
from shardwright_data.foreign import open_no_pipe

TENSORSTORE_SCHEMES = ("file", "gs", "http", "https", "s3")
MOST_PROBES_LOCAL = 4096
MOST_PROBES_REMOTE = 64
"""Bound on the files that `check_files` reads from, and so on the time to open a dataset."""


def open_reader(filespec: str, split: str, *, cache_bytes: int = 2**28, inputs: Sequence[str] = ()) -> Reader:
    """A reader of one split and of inputs, whose files `check_files` has checked.

    Raises:
        ValueError: the split is missing, incomplete, truncated, not in this format, or at a URL that nothing can read.
    """
    scheme = filespec.split("://")[0] if "://" in filespec else "file"
    kind = Reader if scheme in TENSORSTORE_SCHEMES else FsspecReader
    reader = kind(filespec, split, cache_bytes=cache_bytes, inputs=inputs)
    check_files(reader, "://" not in filespec)
    return reader


def check_files(reader: Reader, local: bool) -> None:
    """Checks that no file of a split is missing or truncated, without reading it all.

    In zarr v3 it reads the index and one token at the end of each file. Their checksums show a file that is missing,
    truncated, or of another array; of at most 4096 files of an array of a local dataset and 64 of a remote one. In
    zarr v2 it compares the size of each local file with what its Blosc header states; remote files are not looked at.
    Other damage is found when it is read, in zarr v3 by checksums.

    Raises:
        ValueError: a file is missing or damaged.
    """
    if reader.zarr_format == 2:
        if local:
            _check_blosc_files(reader)
        return
    most, end, waiting = MOST_PROBES_LOCAL if local else MOST_PROBES_REMOTE, reader.num_tokens, []
    for name, size in reader.file_sizes().items():
        num_files = -(-end // size)
        which = np.unique(np.linspace(0, num_files - 1, min(num_files, most)).astype(np.int64)) if num_files else []
        places = [min((int(i) + 1) * size, end) - 1 for i in which]
        waiting += [reader.begin_read(np.array([place]), np.array([1]), name) for place in places]
    for wait in waiting:
        wait()


def _check_blosc_files(reader: Reader) -> None:
    chunk = reader.file_tokens
    for i in range(-(-reader.num_tokens // chunk)):
        path = os.path.join(reader.path, "encoded_tokens", str(i))
        try:
            with open(path, "rb", opener=open_no_pipe) as file:
                header, size = file.read(16), os.fstat(file.fileno()).st_size
        except FileNotFoundError as e:
            raise ValueError(f"{path} is missing. Write or copy the dataset again.") from e
        # The header of another codec does not state the size. Blosc's begins with the version of its format.
        if len(header) == 16 and header[0] == 2:
            (stated,) = struct.unpack("<I", header[12:])
            if stated != size:
                raise ValueError(
                    f"{path} is truncated: it has {size} bytes of {stated}. Write or copy the dataset again."
                )
        elif len(header) < 16:
            raise ValueError(f"{path} is truncated: it has {size} bytes. Write or copy the dataset again.")
