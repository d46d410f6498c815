"""The flat-tokens dataset format (docs/flat-tokens.md): constants, encoding, and the splits of a dataset."""

import contextlib
import os
from collections.abc import Iterable

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, UInt32

from shardwright_data import untrusted
from shardwright_data.untrusted import Damaged, refused

AnyEncoded = UInt32[np.ndarray, "*shape"]
AnyIsStart = Bool[np.ndarray, "*shape"]

IDENTITY = {"format": "flat-tokens", "version": 1}
"""Attributes of a split that say how to read it."""
MARKERS = ("zarr.json", ".zgroup")
"""Files of which a complete split has one: of zarr v3, of zarr v2."""
OPENING_RETRIES = 3
"""Repetitions of a request while a dataset is opened: a wrong address should show in seconds. Later, when a run depends
on it, tensorstore repeats a request for a quarter of an hour."""


def decode(encoded: AnyEncoded) -> tuple[AnyEncoded, AnyIsStart]:
    """`(ids, is_start)` of stored tokens."""
    return encoded >> np.uint32(1), (encoded & np.uint32(1)).astype(np.bool_)


def open_kvstore(filespec: str, context: ts.Context | None = None) -> ts.KvStore:
    """The directory `filespec`, a local path or a URL that tensorstore knows (`gs://`, `s3://`, `http://` …).

    The environment variable AWS_ENDPOINT_URL gives the address of a server of `s3://` that is not Amazon's.
    """
    scheme, _, rest = filespec.partition("://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        bucket, _, path = rest.partition("/")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec = {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint.rstrip("/"), "aws_region": region}
    else:
        spec = filespec if rest else {"driver": "file", "path": os.path.abspath(filespec)}
    with refused(f"{filespec} cannot be opened", "Correct the address."):
        kvstore = ts.KvStore.open(spec, context=context).result()
    return kvstore if kvstore.path.endswith("/") else kvstore / "/"


def opening_context() -> ts.Context:
    """A context for `open_kvstore` in which a wrong address shows in seconds."""
    return ts.Context({f"{name}_request_retries": {"max_retries": OPENING_RETRIES} for name in ("http", "gcs", "s3")})


def local_path(kvstore: ts.KvStore) -> str | None:
    """The path of a directory in a local file system; None for any other store."""
    return kvstore.path if kvstore.spec().to_json()["driver"] == "file" else None


def check_files(root: ts.KvStore, names: Iterable[str], most: int = untrusted.LARGE) -> None:
    """Raises ValueError for a file that is there and cannot be read, Damaged for one of more than `most` bytes.

    tensorstore waits for a pipe, and ends the process where memory ends.
    """
    if (path := local_path(root)) is not None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                untrusted.check_file(path + name, most)
        return
    # A store does not say how large a file is; but one that is larger has a byte there.
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
                f"{_shown(root)}{name} cannot be read: it has more than {most:,} bytes. {untrusted.COPY_AGAIN}"
            )


def read_file(root: ts.KvStore, name: str, most: int = untrusted.LARGE) -> bytes | None:
    """The content of a file of at most `most` bytes, None if it is missing. Raises what `check_files` raises."""
    check_files(root, [name], most)
    with _reading(root, name):
        read = root.read(name).result()
    return read.value if read.state == "value" else None


def _reading(root: ts.KvStore, name: str) -> contextlib.AbstractContextManager:
    return refused(f"{_shown(root)}{name} cannot be read", "Check the address, the connection and your rights.")


def _shown(kvstore: ts.KvStore) -> str:
    """The URL of a directory, for messages; also of `s3://` at another server, which has none for tensorstore."""
    spec = kvstore.spec().to_json()
    return f"s3://{spec['bucket']}/{spec['path']}" if spec["driver"] == "s3" else kvstore.url


def is_there(root: ts.KvStore, split: str) -> bool:
    """Whether the dataset has a complete split of that name."""
    return any(read_file(root, f"{split}/{marker}") is not None for marker in MARKERS)


def stamps(root: ts.KvStore, split: str) -> list[tuple[int, ...]]:
    """What changes when a local split is replaced: identities of the files that mark it as complete."""
    path = local_path(root)
    paths = [f"{path}{split}/{marker}" for marker in MARKERS if path is not None]
    found = [os.stat(path) for path in paths if os.path.exists(path)]
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def clear_split(filespec: str, split: str, overwrite: bool) -> None:
    """Deletes a complete split, if there is one. Unless `overwrite`, raises ValueError instead."""
    root = open_kvstore(filespec)
    whole = is_there(root, split)
    if whole and not overwrite:
        raise ValueError(f"{filespec.rstrip('/')}/{split} is already there. Delete it, or choose another path.")
    root.write("finished.json", None).result()
    if not whole:
        return
    # The marker goes first: a split that is half deleted must not look whole.
    for marker in MARKERS:
        root.write(f"{split}/{marker}", None).result()
    root.delete_range(ts.KvStore.KeyRange(f"{split}/", f"{split}0")).result()
