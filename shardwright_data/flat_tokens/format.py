"""The flat-tokens dataset format (docs/flat-tokens.md): constants, encoding, and the splits of a dataset."""

import os

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Int64, Integer, UInt32

from shardwright_data import foreign
from shardwright_data.foreign import refused

# Dims of the same name agree within a call.
Ids = Integer[np.ndarray, "tokens"]
Encoded = UInt32[np.ndarray, "tokens"]
Lengths = Integer[np.ndarray, "documents"]
Places = Int64[np.ndarray, "spans"]
SomeTokens = UInt32[np.ndarray, "_"]
AnyIsStart = Bool[np.ndarray, "*shape"]
AnyEncoded = UInt32[np.ndarray, "*shape"]

FORMAT = "flat-tokens"
FORMAT_VERSION = 1
MARKERS = ("zarr.json", ".zgroup")
"""Files of which a complete split has one: of zarr v3, of zarr v2."""
MAX_TOKEN_ID = 2**31 - 1
"""The largest id that leaves room for the start bit in a uint32."""

STORE_REQUESTS = 256
"""Bound on the requests that a reader has under way at a remote store."""
OPENING_RETRIES = 3
"""Repetitions of a request while a dataset is opened: a wrong address should show in seconds. Later, when a run depends
on it, tensorstore repeats a request for a quarter of an hour."""


def mark_starts(ids: Ids, lengths: Lengths, where: str = "flat-tokens") -> Encoded:
    """Whole documents as they are stored: 2·id, plus 1 where a document starts.

    Args:
        ids: of one document after the other.
        lengths: number of tokens in each document.
        where: place of the documents, for messages.

    Raises:
        ValueError: a document is empty, or the lengths do not add up to the tokens.
    """
    if (ids.size and not lengths.size) or (lengths < 1).any():
        raise ValueError(f"{where}: a document is empty, and has no token to carry its start. Leave it out.")
    if lengths.sum() != ids.size:
        raise ValueError(f"{where}: documents of {lengths.sum()} tokens in all, but {ids.size} tokens given.")
    encoded = ids.astype(np.uint32) << np.uint32(1)
    encoded[np.cumsum(lengths) - lengths] |= np.uint32(1)
    return encoded


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


def read_file(root: ts.KvStore, name: str, most: int = foreign.LARGE) -> bytes | None:
    """The content of a file, None if it is missing. Raises ValueError if it cannot be read.

    A local file is one of at most `most` bytes.
    """
    if root.url.startswith("file:"):
        try:
            return foreign.read_file(root.path + name, most)
        except FileNotFoundError:
            return None
    with refused(f"{root.url}{name} cannot be read", "Check the address, the connection and your rights."):
        read = root.read(name).result()
    return read.value if read.state == "value" else None


def is_there(root: ts.KvStore, split: str) -> bool:
    """Whether the dataset has a complete split of that name."""
    return any(read_file(root, f"{split}/{marker}") is not None for marker in MARKERS)


def clear_split(filespec: str, split: str, overwrite: bool) -> None:
    """Deletes a complete split, if there is one. Unless `overwrite`, raises ValueError instead."""
    root = open_kvstore(filespec)
    if not is_there(root, split):
        return
    if not overwrite:
        raise ValueError(f"{filespec.rstrip('/')}/{split} is already there. Delete it, or choose another path.")
    # The marker goes first: a split that is half deleted must not look whole.
    for marker in MARKERS:
        root.write(f"{split}/{marker}", None).result()
    root.delete_range(ts.KvStore.KeyRange(f"{split}/", f"{split}0")).result()
