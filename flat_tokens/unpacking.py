"""Bounds what zarr-python unpacks: a small file of a stranger may unpack to far more than the memory."""

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numcodecs
import numcodecs.abc
import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec

_BLOSC, _ZSTD = "blosc", "zstd"
_UNPACKS = {BloscCodec: _BLOSC, ZstdCodec: _ZSTD}
_OF_FIXED_SIZE = (BytesCodec, Crc32cCodec)
_INSTEAD = "Other codecs unpack to any size. Write the dataset again with the programs in tools/."


def bounded(array: zarr.AsyncArray, name: str) -> zarr.AsyncArray:
    """The array, whose chunks are refused, before they are unpacked, if they unpack to more than a chunk.

    Args:
        array: in zarr v2 or v3.
        name: for messages.

    Raises:
        ValueError: it has other codecs than a flat-tokens dataset.
    """
    metadata = array.metadata
    if metadata.zarr_format == 3:
        changed: dict[str, Any] = {"codecs": _bounded_codecs(metadata.codecs, name)}
    else:
        _check_v2(metadata.filters or (), metadata.compressor, array.dtype.itemsize, name)
        if metadata.compressor is None:
            return array
        changed = {"compressor": _BoundedBlosc(math.prod(array.chunks) * array.dtype.itemsize)}
    return zarr.AsyncArray(dataclasses.replace(metadata, **changed), array.store_path)


def _check_v2(filters: Sequence[Any], compressor: Any, itemsize: int, name: str) -> None:
    """Raises ValueError if codecs are not those of seqax."""
    if filters and [codec.codec_id for codec in filters] != ["delta"]:
        raise ValueError(f"{name} has the filters {_names(filters)}; at most one, delta, is read. {_INSTEAD}")
    for codec in filters:
        if {codec.dtype.itemsize, codec.astype.itemsize} != {itemsize}:
            raise ValueError(
                f"{name} has a delta filter of {codec.astype} and {codec.dtype}; {itemsize} bytes each"
                f" are wanted. {_INSTEAD}"
            )
    if compressor is not None and compressor.codec_id != _BLOSC:
        raise ValueError(f"{name} has the compressor {compressor.codec_id}; blosc and none are read. {_INSTEAD}")


def _bounded_codecs(codecs: Sequence[Any], name: str) -> list[Any]:
    """Codecs of zarr v3 where those that unpack are replaced. Raises ValueError for codecs that are not known here."""
    shards = codecs[0]
    if isinstance(shards, ShardingCodec) and len(codecs) == 1:
        if not all(isinstance(codec, _OF_FIXED_SIZE) for codec in shards.index_codecs):
            raise ValueError(f"{name} has shards whose index is in {_names(shards.index_codecs)}. {_INSTEAD}")
        inner = _bounded_codecs(shards.codecs, name)
        return [dataclasses.replace(shards, codecs=inner)]
    if not all(isinstance(codec, (*_UNPACKS, *_OF_FIXED_SIZE)) for codec in codecs):
        raise ValueError(f"{name} has the codecs {_names(codecs)}; bytes, blosc, zstd, crc32c are read. {_INSTEAD}")
    return [_Bounded(_UNPACKS[type(codec)]) if type(codec) in _UNPACKS else codec for codec in codecs]


def _names(codecs: Iterable[Any]) -> str:
    return ", ".join(getattr(codec, "codec_id", type(codec).__name__) for codec in codecs)


@dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """Codec `kind` of zarr v3."""

    kind: str
    is_fixed_size = False

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        raise NotImplementedError

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        most = math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        found = await asyncio.to_thread(_unpack, self.kind, chunk_data.to_bytes(), most)
        return chunk_spec.prototype.buffer.from_array_like(found)


class _BoundedBlosc(numcodecs.abc.Codec):
    """Compressor of zarr v2."""

    codec_id = _BLOSC

    def __init__(self, most: int):
        self.most = most

    def encode(self, buf: Any) -> Any:
        raise NotImplementedError

    def decode(self, buf: Any, out: Any = None) -> np.ndarray:
        return _unpack(_BLOSC, bytes(buf), self.most)


def _unpack(kind: str, content: bytes, most: int) -> np.ndarray:
    """The bytes that were compressed. Raises ValueError if they are not at most `most`, by their header."""
    size = _blosc_size(content) if kind == _BLOSC else _zstd_size(content)
    if size is None or size > most:
        raise ValueError(f"a chunk unpacks to {size} bytes, of at most {most}")
    return getattr(numcodecs, kind).decompress(content, np.empty(size, np.uint8))  # refuses what does not fit


def _blosc_size(content: bytes) -> int | None:
    return int.from_bytes(content[4:8], "little") if len(content) >= 16 else None


def _zstd_size(content: bytes) -> int | None:
    """Frame_Content_Size of RFC 8878, section 3.1.1.1; None if it is not stated."""
    if len(content) < 6 or content[:4] != b"\x28\xb5\x2f\xfd":
        return None
    flags = content[4]
    is_single = flags >> 5 & 1
    start = 6 - is_single + (0, 1, 2, 4)[flags & 3]
    length = (is_single, 2, 4, 8)[flags >> 6]
    if not length:
        return None
    return int.from_bytes(content[start : start + length], "little") + (256 if length == 2 else 0)
