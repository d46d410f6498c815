"""Implements the flat-tokens format (docs/formats.md): constants, token encoding, access to stores
and splits.
"""

import contextlib
import os
from collections.abc import Iterable

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, UInt32

from shardwright.data import untrusted
from shardwright.data.untrusted import Damaged, refused

AnyEncoded = UInt32[np.ndarray, "*shape"]
AnyIsStart = Bool[np.ndarray, "*shape"]

IDENTITY = {"format": "flat-tokens", "version": 1}
"""Attributes that identify the format of a split."""
MARKERS = ("zarr.json", ".zgroup")
"""Files that mark a split as complete: of zarr v3, of zarr v2."""
OPENING_RETRIES = 3
"""Retries of a request while a dataset is opened, so that a wrong address is reported within
seconds. Later, when a run depends on it, tensorstore retries for a quarter of an hour."""

TOKEN_FILES = (".bin", ".idx", ".npy")
"""Suffixes of other trainers' token ids."""


def how_to_convert(names: Iterable[str]) -> str:
    """Returns what to do with token files of other trainers; empty if none of `names` is one."""
    found = next((name for name in names if name.endswith(TOKEN_FILES)), None)
    about = (
        "holds token ids, as nanoGPT, llm.c and Megatron-LM write them. Convert it with "
        "docs/recipes/token_files.py"
    )
    return f"{found} {about} (docs/data.md)." if found else ""


def decode(encoded: AnyEncoded) -> tuple[AnyEncoded, AnyIsStart]:
    """Decodes stored tokens to `(ids, is_start)`."""
    return encoded >> np.uint32(1), (encoded & np.uint32(1)).astype(np.bool_)


def open_kvstore(filespec: str, context: ts.Context | None = None) -> ts.KvStore:
    """Opens the directory `filespec`, a local path or a URL that tensorstore knows (`gs://`,
    `s3://`, `http://` …).

    The environment variable AWS_ENDPOINT_URL selects an `s3://` server other than Amazon's.
    """
    scheme, _, rest = filespec.partition("://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        bucket, _, path = rest.partition("/")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec = {
            "driver": "s3",
            "bucket": bucket,
            "path": path,
            "endpoint": endpoint.rstrip("/"),
            "aws_region": region,
        }
    else:
        spec = filespec if rest else {"driver": "file", "path": os.path.abspath(filespec)}
    with refused(f"{filespec} cannot be opened", "Correct the address."):
        kvstore = ts.KvStore.open(spec, context=context).result()
    return kvstore if kvstore.path.endswith("/") else kvstore / "/"


def opening_context() -> ts.Context:
    """Makes a context for `open_kvstore` that reports a wrong address within seconds."""
    return ts.Context(
        {
            f"{name}_request_retries": {"max_retries": OPENING_RETRIES}
            for name in ("http", "gcs", "s3")
        }
    )


def local_path(kvstore: ts.KvStore) -> str | None:
    """Returns the path of a local directory; None for any other store."""
    return kvstore.path if kvstore.spec().to_json()["driver"] == "file" else None


def check_files(root: ts.KvStore, names: Iterable[str], most: int = untrusted.LARGE) -> None:
    """Raises ValueError if an existing file cannot be read, Damaged if it has more than `most`
    bytes.

    tensorstore itself would block on a pipe, and crash if memory runs out.
    """
    if (path := local_path(root)) is not None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                untrusted.check_file(path + name, most)
        return
    # Stores do not report the size of a file, but a larger one has a byte at this offset.
    beyond = {name: root.read(name, byte_range=slice(most, most + 1)) for name in names}
    for name, byte in beyond.items():
        with _reading(root, name):
            try:
                is_there = byte.result().state == "value"
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
                is_there = False
        if is_there:
            raise Damaged(
                f"{_shown(root)}{name} cannot be read: it has more than {most:,} bytes. "
                f"{untrusted.COPY_AGAIN}"
            )


def read_file(root: ts.KvStore, name: str, most: int = untrusted.LARGE) -> bytes | None:
    """Reads a file of at most `most` bytes; None if it is missing.

    Raises what `check_files` raises.
    """
    check_files(root, [name], most)
    with _reading(root, name):
        read = root.read(name).result()
    return read.value if read.state == "value" else None


def _reading(root: ts.KvStore, name: str) -> contextlib.AbstractContextManager:
    return refused(
        f"{_shown(root)}{name} cannot be read",
        "Check the address, the connection and your permissions.",
    )


def _shown(kvstore: ts.KvStore) -> str:
    """Returns the URL of a directory, for messages; also for other `s3://` servers, for which
    tensorstore has none.
    """
    spec = kvstore.spec().to_json()
    return f"s3://{spec['bucket']}/{spec['path']}" if spec["driver"] == "s3" else kvstore.url


def is_there(root: ts.KvStore, split: str) -> bool:
    """Returns whether the dataset has a complete split of that name."""
    return any(read_file(root, f"{split}/{marker}") is not None for marker in MARKERS)


def stamps(root: ts.KvStore, split: str) -> list[tuple[int, ...]]:
    """Identifies a local split by the inodes, sizes and times of its marker files, which change if
    it is replaced.
    """
    path = local_path(root)
    paths = [f"{path}{split}/{marker}" for marker in MARKERS if path is not None]
    found = [os.stat(path) for path in paths if os.path.exists(path)]
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def clear_split(filespec: str, split: str, overwrite: bool) -> None:
    """Deletes a complete split, if there is one. Without `overwrite`, raises ValueError instead."""
    root = open_kvstore(filespec)
    whole = is_there(root, split)
    if whole and not overwrite:
        raise ValueError(
            f"{filespec.rstrip('/')}/{split} exists already. Delete it, or choose another path."
        )
    with refused(
        f"{_shown(root)} cannot be written", "Check the address, its disk and your permissions."
    ):
        root.write("finished.json", None).result()
    if not whole:
        return
    # Delete the marker first, so that a partly deleted split does not look complete.
    for marker in MARKERS:
        root.write(f"{split}/{marker}", None).result()
    root.delete_range(ts.KvStore.KeyRange(f"{split}/", f"{split}0")).result()
