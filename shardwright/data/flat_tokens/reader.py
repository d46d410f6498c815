"""Reads one split of a flat-tokens dataset."""

import contextlib
import functools
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Int64, UInt32

from shardwright.data.flat_tokens.format import (
    IDENTITY,
    check_files,
    how_to_convert,
    open_kvstore,
    opening_context,
    read_file,
    stamps,
)
from shardwright.data.untrusted import MEMORY, check_types, parse_object, refused

Places = Int64[np.ndarray, "spans"]
SomeTokens = UInt32[np.ndarray, "_"]

STORE_REQUESTS = 256
"""Most concurrent requests of a reader to a remote store."""
CACHE_BYTES = 2**28
"""Most bytes of decoded chunks in memory, for a reader or for all sources of a mixture."""
MOST_PROBES_LOCAL, MOST_PROBES_REMOTE = 4096, 64
"""Most files of an array that are checked when it is opened, which limits the time to open it."""
_RECIPES = Path(__file__).parents[2] / "tools" / "configs"
"""Directory of the configurations that make the datasets of configs/data/."""
_AGAIN = "Write or copy the dataset again."
_ATTRIBUTES = {
    "max_token_id": int,
    "format?": str,
    "version?": int,
    "num_tokens?": int,
    "num_documents?": int,
}
_ATTRIBUTES |= {"bos_id?": int}
_MOST_BYTES = 64
"""Most bytes per element in a file, plus 1024: each element may be a chunk with an entry in a
shard's index."""


def bos_id_of(filespec: str) -> int | None:
    """Returns the id that a dataset records for the beginning of each document; None if none, or if
    it is unreadable.

    A Reader of the dataset reports what is wrong with it.
    """
    with contextlib.suppress(ValueError, OSError):
        group = read_file(open_kvstore(filespec, opening_context()), "train/zarr.json")
        attributes = parse_object(filespec, group or b"{}", {"attributes?": {"bos_id?": int}}).get(
            "attributes", {}
        )
        return attributes.get("bos_id")
    return None


class Reader:
    """Reads any part of one split of a dataset in zarr v3 (as `Writer` writes it) or zarr v2 (as
    seqax writes it).

    For zarr v3, opening reads the index and one token at the end of up to 4096 files of each array,
    64 of a remote dataset; their checksums detect files that are missing, truncated, or of another
    array. Other damage is found on reading: in zarr v3 by checksums, in zarr v2 if a file does not
    unpack.

    Args:
        filespec: directory of the dataset; a local path or a URL that tensorstore knows.
        split: name of the split, `train` or `validation`.
        cache_bytes: bound on the decoded chunks and shard indexes kept in memory.
        inputs: names of further arrays of the split to read, with a value per token.

    Raises:
        ValueError: the split, or an input, is missing, incomplete, truncated, not in this format,
            or cannot be reached. Also later, if a local split was replaced in the meantime.
    """

    num_tokens: int
    num_documents: int
    max_token_id: int
    zarr_format: int
    """2 or 3."""
    inputs: Mapping[str, ts.TensorStore]
    """Further arrays that are read, by name."""
    attributes: Mapping[str, Any]
    """All attributes of the split's group, including what the tokenization tool records."""

    def __init__(
        self,
        filespec: str,
        split: str,
        *,
        cache_bytes: int = CACHE_BYTES,
        inputs: Sequence[str] | Mapping[str, int] = (),
    ):
        self.filespec = filespec
        self.path = f"{filespec.rstrip('/')}/{split}"
        self._root = open_kvstore(filespec, opening_context())
        self._split = split
        self._opened = stamps(self._root, split)
        # Send all requests of a batch at once, because a store may respond slowly.
        stores = {
            f"{name}_request_concurrency": {"limit": STORE_REQUESTS}
            for name in ("http", "gcs", "s3")
        }
        self._files: dict[str, tuple[str, int, set[int]]] = {}
        """For each array: prefix of its file names, elements per file, and files checked so far."""
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}} | stores)
        self.zarr_format, self.attributes = self._read_attributes()
        self.max_token_id = self.attributes["max_token_id"]
        self._tokens = self._open_array(f"{split}/encoded_tokens", np.uint32)
        self._starts = self._open_array(f"{split}/seq_starts", np.uint64)
        self.num_tokens = self._tokens.shape[0]
        self.num_documents = self._starts.shape[0] - 1
        add = (
            "Add it with flat_tokens.add_input (docs/formats.md), or choose a dataset that has it."
        )
        self.inputs = {
            name: self._open_array(self.input_key(name), np.uint32, add) for name in inputs
        }
        self._sizes = dict(inputs) if isinstance(inputs, Mapping) else dict.fromkeys(inputs, 1)
        self._check_extent()
        self._check_files(MOST_PROBES_REMOTE if "://" in filespec else MOST_PROBES_LOCAL)

    def _read_json(self, key: str) -> dict[str, Any]:
        """Reads the JSON object at `key`; empty if there is none."""
        content = read_file(self._root, key)
        return (
            {} if content is None else parse_object(f"{self.path}: {key}", content, remedy=_AGAIN)
        )

    def _read_attributes(self) -> tuple[int, dict[str, Any]]:
        """Reads the zarr version and the attributes of the split."""
        split = self._split
        attributes: Any
        if group := self._read_json(f"{split}/zarr.json"):
            zarr_format = 3
            attributes = group.get("attributes")
        elif self._read_json(f"{split}/.zgroup"):
            zarr_format = 2
            attributes = self._read_json(f"{split}/.zattrs")
        elif any(
            self._read_json(f"{split}/encoded_tokens/{name}") for name in ("zarr.json", ".zarray")
        ):
            raise ValueError(
                f"{self.path} is incomplete: its writer was interrupted before the end. Write the "
                "dataset again."
            )
        else:
            usual = [x for x in ("train", "validation") if self._read_json(f"{x}/zarr.json")]
            there = f" It has {' and '.join(usual)}." if usual else ""
            make = "write the dataset (docs/data.md)"
            for path in _RECIPES.glob("*.yaml"):
                if f"\nout: {self.filespec}\n" in path.read_text(encoding="utf-8"):
                    make = (
                        f"make the dataset with python -m tools.huggingface_to_flat_tokens "
                        f"--config-name={path.stem}"
                    )
            local = os.listdir(self.filespec) if os.path.isdir(self.filespec) else [self.filespec]
            remedy = (
                how_to_convert(local) or f"Correct the path or the name of the split, or {make}."
            )
            raise ValueError(f"No flat-tokens split at {self.path}.{there} {remedy}")
        check_types(self.path, {"attributes": attributes}, {"attributes": _ATTRIBUTES}, _AGAIN)
        found = {name: attributes.get(name, value) for name, value in IDENTITY.items()}
        if found != IDENTITY:
            raise ValueError(
                f"{self.path} is {found}; this program reads {IDENTITY}. Update the program or "
                "rewrite the dataset."
            )
        return zarr_format, attributes

    def _check_files_of(self, key: str, starts: Places, ends: Places) -> None:
        """Checks each file with elements of these spans once. Missing files pass."""
        prefix, size, checked = self._files[key]
        spans = zip((starts // size).tolist(), ((ends - 1) // size + 1).tolist(), strict=True)
        new = {i for span in {*spans} for i in range(*span)} - checked
        check_files(
            self._root, [f"{prefix}{i}" for i in new], min(1024 + _MOST_BYTES * size, MEMORY // 2)
        )
        checked |= new

    def _open_array(self, key: str, dtype: type, remedy: str = _AGAIN) -> ts.TensorStore:
        spec = {
            "driver": "zarr3" if self.zarr_format == 3 else "zarr",
            "kvstore": (self._root / f"{key}/").spec().to_json(),
            # Without this a missing file reads as zeros.
            "fill_missing_data_reads": False,
            "recheck_cached_metadata": "open",
            "recheck_cached_data": "open",
        }
        name = "zarr.json" if self.zarr_format == 3 else ".zarray"
        about = self._read_json(f"{key}/{name}")
        with refused(f"{self.path}: the array {key} is missing or cannot be read", remedy):
            if about.get("filters"):
                array = self._differences_added(spec, about)
            else:
                array = ts.open(spec, read=True, context=self._context).result()
        if len(array.shape) != 1 or array.dtype.numpy_dtype != dtype:
            raise ValueError(
                f"{self.path}: {key} has rank {array.rank} and dtype {array.dtype.name}; "
                f"flat-tokens has rank 1 and {np.dtype(dtype).name}."
            )
        layout: Any = array.chunk_layout
        (size,), (held,) = layout.write_chunk.shape, layout.read_chunk.shape
        if held >= MEMORY // 8:  # chunks of one file are read separately
            raise ValueError(
                f"{self.path}: {key} has chunks of {held} elements, more than memory holds. "
                f"{_AGAIN}"
            )
        v3 = array.spec().to_json()["metadata"] if self.zarr_format == 3 else {}
        names = v3.get("chunk_key_encoding", {"name": "v2"})
        prefix = (
            ""
            if names["name"] == "v2"
            else f"c{names.get('configuration', {}).get('separator', '/')}"
        )
        self._files[key] = f"{key}/{prefix}", size, set()
        return array

    def _differences_added(self, spec: dict[str, Any], about: dict[str, Any]) -> ts.TensorStore:
        """Opens a zarr v2 array with the filter delta (seqax's seq_starts), which tensorstore does
        not support.
        """
        (delta,) = about["filters"]
        if delta["id"] != "delta":
            raise ValueError(f"its filter is {delta['id']!r}, not delta")
        spec = spec | {"metadata": about | {"filters": None}, "assume_metadata": True}
        # With its own threads, because those of the other context wait for it.
        stored = ts.open(
            spec, read=True, context=ts.Context({"data_copy_concurrency": {"limit": 1}})
        ).result()
        layout: Any = stored.chunk_layout
        (size,) = layout.read_chunk.shape

        def read(domain: ts.IndexDomain, values: np.ndarray, _: object) -> None:
            start, end = domain.inclusive_min[0], domain.exclusive_max[0]
            chunk = stored[start // size * size : end].read().result()
            values[...] = np.cumsum(chunk, dtype=chunk.dtype)[start % size :]

        like = {"dtype": stored.dtype, "shape": stored.shape, "chunk_layout": layout}
        return ts.virtual_chunked(read, **like, context=self._context)

    def input_key(self, name: str) -> str:
        """Returns the key of an input's array.

        Raises ValueError for an invalid name, or if the split is in zarr v2.
        """
        if not re.fullmatch("[A-Za-z0-9_-]+", name):
            raise ValueError(
                f"{name!r} is not a valid name of an input; use letters, digits, _ and -."
            )
        if self.zarr_format == 2:
            raise ValueError(
                f"{self.path} is in zarr v2, which has no inputs; rewrite it with the tools."
            )
        return f"{self._split}/input_{name}"

    def _check_extent(self) -> None:
        """Raises ValueError if the sizes of the arrays contradict the attributes or the end of
        seq_starts.
        """
        tokens, documents = self.num_tokens, self.num_documents
        sizes = [("num_tokens", tokens), ("num_documents", documents)]
        stated = [
            (f"its attribute {name}", self.attributes.get(name, size), size) for name, size in sizes
        ]
        end = self._read(
            self._starts, "seq_starts", np.array([documents]), np.array([1]), "seq_starts"
        )
        stated.append(("the end of seq_starts", int(end[0]), tokens))
        stated += [
            (f"the size of input_{name}", array.shape[0], tokens * self._sizes[name])
            for name, array in self.inputs.items()
        ]
        for name, array in self.inputs.items():
            count, rest = divmod(array.shape[0], max(tokens, 1))
            if count != self._sizes[name] and count and not rest:
                raise ValueError(
                    f"{self.path}: input_{name} has {count} values per token, but "
                    f'{self._sizes[name]} are read. Declare it as f32["{count}"] or u32["{count}"].'
                )
        for what, size, found in stated:
            if size != found:
                raise ValueError(f"{self.path} is damaged: {what} is {size}, not {found}. {_AGAIN}")

    def _check_files(self, most: int) -> None:
        """Reads the last token of up to `most` files per array; in zarr v2 only of the first and
        last file.
        """
        for name, array in (None, self._tokens), *self.inputs.items():
            layout: Any = array.chunk_layout
            size = layout.write_chunk.shape[0]
            num_files = -(-array.shape[0] // size)
            count = min(num_files, most if self.zarr_format == 3 else 2)
            files = np.unique(np.linspace(0, num_files - 1, count).astype(np.int64))
            last = np.minimum((files + 1) * size, array.shape[0]) - 1
            self.read(last // self._sizes.get(name or "", 1), np.ones_like(files), name)

    def _read(
        self, array: ts.TensorStore, key: str, starts: Places, lengths: Places, what: str
    ) -> np.ndarray:
        """Reads elements [starts[i], starts[i] + lengths[i]) of all spans i, joined.

        Adjacent spans are one read.
        """
        ends = starts + lengths
        self._check_files_of(f"{self._split}/{key}", starts, ends)
        first = np.flatnonzero(np.concatenate([[True], starts[1:] != ends[:-1]]))
        last = np.concatenate([first[1:], [starts.size]]) - 1
        try:
            with refused(
                f"{self.path}: cannot read {what}; a file is missing, truncated or corrupt", _AGAIN
            ):
                spans = zip(starts[first].tolist(), ends[last].tolist(), strict=True)
                views = [array[start:end] for start, end in spans]
                # Reading joined views at once is faster than reading each.
                return (ts.concat(views, axis=0) if len(views) > 1 else views[0]).read().result()
        finally:
            if stamps(self._root, self._split) != self._opened:
                raise ValueError(
                    f"{self.path} was replaced or deleted while it was read. Restart the program, "
                    f"and write other datasets to another path."
                )

    def read(self, starts: Places, lengths: Places, name: str | None = None) -> SomeTokens:
        """Reads the stored tokens `[starts[i], starts[i] + lengths[i])` of all spans i, joined.

        Args:
            starts: of the spans.
            lengths: of the spans, each at least 1.
            name: of an input whose values for these tokens to read instead, k of each token.

        Raises:
            ValueError: a file of the dataset is missing, truncated or corrupt.
        """
        if not starts.size:
            return np.zeros(0, np.uint32)
        array, key = (
            (self._tokens, "encoded_tokens")
            if name is None
            else (self.inputs[name], f"input_{name}")
        )
        of = "" if name is None else f"{key} of "
        what = f"{of}tokens {starts.min()} to {(starts + lengths).max() - 1}"
        size = self._sizes.get(name or "", 1)
        return self._read(array, key, starts * size, lengths * size, what)

    def document_spans(self, documents: Places) -> tuple[Places, Places]:
        """Returns `(starts, lengths)`, in tokens, of documents given by their index in [0,
        num_documents).
        """
        if not documents.size:
            return documents, documents
        ones = np.ones_like(documents)
        starts = self._read(self._starts, "seq_starts", documents, ones, "seq_starts")
        ends = self._read(self._starts, "seq_starts", documents + 1, ones, "seq_starts")
        return starts.astype(np.int64), (ends - starts).astype(np.int64)

    def documents_at(self, places: Places) -> Places:
        """Finds the index of the document of each token, given by its position in the split."""
        low = np.zeros_like(places)
        high = np.full_like(places, self.num_documents)
        # All positions at once: at most about sixty requests to a remote dataset.
        while (high - low > 1).any():
            middle = (low + high) // 2
            starts, _ = self.document_spans(middle)
            low, high = (
                np.where(starts <= places, middle, low),
                np.where(starts <= places, high, middle),
            )
        return low

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the split, wherever it is stored: its sizes, and a checksum of tokens at 16
        positions.

        Also a checksum of each input that is read, at the same positions. Raises ValueError as
        `read` does.
        """
        length = min(self.num_tokens, 64)
        starts = np.unique(np.linspace(0, self.num_tokens - length, 16).astype(np.int64))

        def checksum(name: str | None) -> str:
            sample = self.read(starts, np.full_like(starts, length), name)
            return f"{zlib.crc32(sample.astype('<u4').tobytes()):08x}"

        sizes = (
            f"{self.num_tokens} tokens, {self.num_documents} documents, ids to {self.max_token_id}"
        )
        return ", ".join(
            [sizes, checksum(None), *(f"{name} {checksum(name)}" for name in self.inputs)]
        )
