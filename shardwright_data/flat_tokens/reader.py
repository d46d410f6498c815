"""A reader of one split of a flat-tokens dataset."""

import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
import zarr

from shardwright_data.flat_tokens.format import (
    FORMAT,
    FORMAT_VERSION,
    STORE_REQUESTS,
    Places,
    SomeTokens,
    Starts,
    open_kvstore,
    opening_context,
    read_file,
)
from shardwright_data.foreign import check_types, parse_object, refused

MOST_PROBES_LOCAL, MOST_PROBES_REMOTE = 4096, 64
"""Bounds on the files of an array that are looked at when it is opened, and so on the time that takes."""
_AGAIN = "Write or copy the dataset again."
_ATTRIBUTES = {"max_token_id": int, "format?": str, "version?": int, "num_tokens?": int, "num_documents?": int}


class Reader:
    """Reads any part of one split of a dataset in zarr v3 (as `Writer` writes it) or zarr v2 (as seqax writes it).

    In zarr v3 it first reads the index and one token at the end of each file. Their checksums show a file that is
    missing, truncated, or of another array; of at most 4096 files of an array of a local dataset and 64 of a remote
    one. Other damage is found when it is read: in zarr v3 by checksums, in zarr v2 where a file does not unpack.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        cache_bytes: bound on the decoded chunks and shard indexes kept in memory.
        inputs: names of further arrays of the split, with a value for each token, to be read beside the tokens.

    Raises:
        ValueError: the split, or an input, is missing, incomplete, truncated, not in this format, or cannot be reached.
    """

    num_tokens: int
    num_documents: int
    max_token_id: int
    zarr_format: int
    """2 or 3."""
    inputs: Mapping[str, ts.TensorStore]
    """The inputs that are read beside the tokens, by name."""
    attributes: Mapping[str, Any]
    """All attributes of the split's group, among them what the tokenization tool records."""

    def __init__(self, filespec: str, split: str, *, cache_bytes: int = 2**28, inputs: Sequence[str] = ()):
        self.filespec, self.path = filespec, f"{filespec.rstrip('/')}/{split}"
        self._root = open_kvstore(filespec, opening_context())
        # A store that answers slowly should get all requests of a batch at once.
        limit = {"limit": STORE_REQUESTS}
        stores = dict.fromkeys(("http_request_concurrency", "gcs_request_concurrency", "s3_request_concurrency"), limit)
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}} | stores)
        self.attributes, self._driver = self._read_attributes(split)
        self.zarr_format = 3 if self._driver == "zarr3" else 2
        self.max_token_id = self.attributes["max_token_id"]
        self._tokens = self._open_array(f"{split}/encoded_tokens", np.uint32)
        self._starts = self._open_array(f"{split}/seq_starts", np.uint64)
        self.num_tokens, self.num_documents = self._tokens.shape[0], self._starts.shape[0] - 1
        self.inputs = {name: self._open_input(split, name) for name in inputs}
        self._check_extent()
        self._check_files(MOST_PROBES_REMOTE if "://" in filespec else MOST_PROBES_LOCAL)

    def _read_json(self, key: str) -> dict[str, Any]:
        """The JSON object at `key`, empty if there is none."""
        try:
            content = read_file(self._root, key)
        except ValueError as e:
            raise ValueError(
                f"{self.path} cannot be reached: {e}. Check the address, the connection and your rights."
            ) from e
        return {} if content is None else parse_object(f"{self.path}: {key}", content, remedy=_AGAIN)

    def _read_attributes(self, split: str) -> tuple[dict[str, Any], str]:
        """The attributes of the split, and the driver of tensorstore for its arrays."""
        if group := self._read_json(f"{split}/zarr.json"):
            attributes, driver = group.get("attributes"), "zarr3"
        elif self._read_json(f"{split}/.zgroup"):
            attributes, driver = self._read_json(f"{split}/.zattrs"), "zarr"
        elif any(self._read_json(f"{split}/encoded_tokens/{name}") for name in ("zarr.json", ".zarray")):
            raise ValueError(
                f"{self.path} is incomplete: its writer was interrupted before the end. Write the dataset again."
            )
        else:
            usual = [x for x in ("train", "validation") if self._read_json(f"{x}/zarr.json")]
            there = f" It has {' and '.join(usual)}." if usual else ""
            raise ValueError(
                f"No flat-tokens split at {self.path}.{there} Correct the address or the name of the split, or write "
                "the dataset as docs/data.md says."
            )
        check_types(self.path, {"attributes": attributes}, {"attributes": _ATTRIBUTES}, _AGAIN)
        found = attributes.get("format", FORMAT), attributes.get("version", FORMAT_VERSION)
        if found != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"{self.path} is in version {found[1]} of the format {found[0]}; this program reads version "
                f"{FORMAT_VERSION} of {FORMAT}. Update the program or write the dataset again."
            )
        return attributes, driver

    def _open_array(self, key: str, dtype: type) -> ts.TensorStore:
        spec = {
            "driver": self._driver,
            "kvstore": (self._root / f"{key}/").spec().to_json(),
            # Without this a missing file reads as zeros.
            "fill_missing_data_reads": False,
            "recheck_cached_metadata": "open",
            "recheck_cached_data": "open",
        }
        try:
            # tensorstore refuses the Delta filter of seqax's seq_starts.
            has_filter = self._driver == "zarr" and self._read_json(f"{key}/.zarray").get("filters")
            array = self._open_by_zarr(key) if has_filter else ts.open(spec, read=True, context=self._context).result()
        except ValueError as e:
            why = str(e).partition(" [")[0]
            raise ValueError(f"{self.path}: its array {key} is missing or not readable: {why}. {_AGAIN}") from e
        if len(array.shape) != 1 or array.dtype.numpy_dtype != dtype:
            raise ValueError(
                f"{self.path}: {key} has rank {array.rank} and dtype {array.dtype.name}; flat-tokens has rank 1 and "
                f"{np.dtype(dtype).name}."
            )
        return array

    def _open_by_zarr(self, key: str) -> ts.TensorStore:
        with refused("zarr", ""):
            array = zarr.open_array(self._root.url, path=key, mode="r")

        def read(domain: ts.IndexDomain, values: np.ndarray, _: Any) -> None:
            values[...] = array[domain.index_exp]

        layout = ts.ChunkLayout(chunk_shape=array.chunks)
        return ts.virtual_chunked(
            read, dtype=array.dtype, shape=array.shape, chunk_layout=layout, context=self._context
        )

    def input_key(self, split: str, name: str) -> str:
        """Key of the array of an input. Raises ValueError if it cannot have that name, or the split is in zarr v2."""
        if not re.fullmatch("[A-Za-z0-9_-]+", name):
            raise ValueError(f"{name!r} is not a name of an input; it may have letters, digits, _ and -.")
        if self._driver != "zarr3":
            raise ValueError(f"{self.path} is in zarr v2, which has no inputs; write it again with the tools.")
        return f"{split}/input_{name}"

    def _open_input(self, split: str, name: str) -> Any:
        key = self.input_key(split, name)
        if not self._read_json(f"{key}/zarr.json"):
            raise ValueError(
                f"{self.path} has no input {name}: its array input_{name} is missing. Add it with "
                "flat_tokens.add_input (docs/flat-tokens.md), or choose a dataset that has it."
            )
        array = self._open_array(key, np.uint32)
        if array.shape[0] != self.num_tokens:
            raise ValueError(
                f"{self.path}: input_{name} has {array.shape[0]} values for {self.num_tokens} tokens, and must "
                "have one for each. Add it again with flat_tokens.add_input(…, overwrite=True)."
            )
        return array

    def _check_extent(self) -> None:
        """Raises ValueError if the split is truncated, by its counts and the last element of seq_starts."""
        for name, found in (("num_tokens", self.num_tokens), ("num_documents", self.num_documents)):
            if (stated := self.attributes.get(name, found)) != found:
                raise ValueError(
                    f"{self.path} is truncated: its attributes state {name} = {stated}, its arrays hold {found}. "
                    f"{_AGAIN}"
                )
        if self.num_documents < 0:
            raise ValueError(f"{self.path}: seq_starts is empty; its last entry must be the number of tokens.")
        end = int(self.read_starts(self.num_documents, self.num_documents + 1)[0])
        if end != self.num_tokens:
            raise ValueError(
                f"{self.path} is truncated: seq_starts ends at token {end}, encoded_tokens at {self.num_tokens}. "
                f"{_AGAIN}"
            )

    def _check_files(self, most: int) -> None:
        """Reads the last token of each file, of at most `most` files of an array; in zarr v2 of the first and last."""
        end, waiting = self.num_tokens, []
        for name, array in (None, self._tokens), *self.inputs.items():
            size = array.chunk_layout.write_chunk.shape[0]
            num_files = -(-end // size)
            count = min(num_files, most if self.zarr_format == 3 else 2)
            for i in np.unique(np.linspace(0, num_files - 1, count).astype(np.int64)).tolist():
                waiting.append(self.begin_read(np.array([min((i + 1) * size, end) - 1]), np.array([1]), name))
        for wait in waiting:
            wait()

    def _begin(self, array: ts.TensorStore, spans: list[tuple[int, int]], what: str) -> Callable[[], np.ndarray]:
        """Begins to read `array` over each (start, end). Returns a function that waits for the parts and joins them."""
        # One read of joined views costs tensorstore less than a read each.
        views = [array[start:end] for start, end in spans]
        future = (ts.concat(views, axis=0) if len(views) > 1 else views[0]).read()

        def wait() -> np.ndarray:
            with refused(f"{self.path}: cannot read {what}; a file is missing, truncated or corrupt", _AGAIN):
                return future.result()

        return wait

    def begin_read(self, starts: Places, lengths: Places, name: str | None = None) -> Callable[[], SomeTokens]:
        """Begins to read the stored tokens `[starts[i], starts[i] + lengths[i])` of all spans i at once.

        Args:
            starts: of the spans, at least one.
            lengths: of the spans, each at least 1.
            name: of an input, to read its values for these tokens instead.

        Returns:
            A function that waits for the values, and joins those of all spans. It raises ValueError if a file of the
            dataset is missing, truncated or corrupt.
        """
        ends = starts + lengths
        # Spans that follow one another in the dataset are one read.
        first = np.flatnonzero(np.concatenate([[True], starts[1:] != ends[:-1]]))
        last = np.concatenate([first[1:], [starts.size]]) - 1
        spans = list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
        between = "between " if len(spans) > 1 else ""
        what = f"tokens {between}{starts.min()} {'and' if between else 'to'} {ends.max() - 1}"
        if name is not None:
            return self._begin(self.inputs[name], spans, f"input_{name} of {what}")
        return self._begin(self._tokens, spans, what)

    def read(self, starts: Places, lengths: Places, name: str | None = None) -> list[SomeTokens]:
        """The stored tokens `[starts[i], starts[i] + lengths[i])` of each span i, or the values of the input `name`.

        Raises:
            ValueError: a file of the dataset is missing, truncated or corrupt.
        """
        return np.split(self.begin_read(starts, lengths, name)(), np.cumsum(lengths)[:-1]) if starts.size else []

    def document_spans(self, documents: Places) -> tuple[Places, Places]:
        """`(starts, lengths)`, in tokens, of documents given by their index in [0, num_documents)."""
        if not documents.size:
            return documents, documents
        pairs = self._begin(self._starts, [(i, i + 2) for i in documents.tolist()], "seq_starts")()
        spans = pairs.astype(np.int64).reshape(-1, 2)
        return spans[:, 0], spans[:, 1] - spans[:, 0]

    def read_starts(self, start: int, stop: int) -> Starts:
        """The entries [start, stop) of seq_starts: at least one, and stop at most num_documents + 1."""
        return self._begin(self._starts, [(start, stop)], "seq_starts")()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the split, wherever it is stored: its sizes, and a checksum of tokens at 16 places in it.

        Also a checksum of each input that is read, at the same places.

        Raises:
            ValueError: a file of the dataset is missing, truncated or corrupt.
        """
        length = min(self.num_tokens, 64)
        starts = np.unique(np.linspace(0, self.num_tokens - length, 16).astype(np.int64))

        def checksum(name: str | None) -> str:
            sample = self.read(starts, np.full_like(starts, length), name) if length else [np.zeros(0, np.uint32)]
            return f"{zlib.crc32(np.concatenate(sample).astype('<u4').tobytes()):08x}"

        sizes = f"{self.num_tokens} tokens, {self.num_documents} documents, ids to {self.max_token_id}"
        return ", ".join([sizes, checksum(None), *(f"{name} {checksum(name)}" for name in self.inputs)])

    def blocks(self, max_tokens: int | None = None) -> Iterator[SomeTokens]:
        """Yields the stored tokens in order, in blocks of a few MiB: the first `max_tokens` of them, or all."""
        stop = self.num_tokens if max_tokens is None else min(max_tokens, self.num_tokens)
        block = 2**20
        for start in range(0, stop, block):
            yield self.read(np.array([start]), np.array([min(block, stop - start)]))[0]
