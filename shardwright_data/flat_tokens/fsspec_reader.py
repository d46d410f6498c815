"""Reads flat-tokens datasets from any store that fsspec reaches, through zarr-python."""

import asyncio
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import zarr.api.asynchronous
from zarr.abc.store import Store, SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, WrapperStore

from shardwright_data.flat_tokens.format import STORE_REQUESTS
from shardwright_data.flat_tokens.reader import Reader

T = TypeVar("T")


class FsspecReader(Reader):
    """A split at a URL that fsspec opens, e.g. `hf://datasets/me/tokens`, `memory://tokens`, `sftp://host/tokens`.

    Arguments and errors are those of Reader. `cache_bytes` bounds the shard indexes that are kept; tokens are not kept.
    """

    def _connect(self, filespec: str, cache_bytes: int) -> None:
        try:
            store = FsspecStore.from_url(filespec, read_only=True)
        # An unknown scheme, or one whose package is not installed.
        except (ValueError, ImportError) as e:
            raise ValueError(
                f"Nothing installed reads {filespec}: {e}. Correct the scheme before ://, install the package "
                "for it, or copy the dataset."
            ) from e
        # Some connect at once; each has errors of its own.
        except Exception as e:
            raise self._unreachable(e) from e
        self._store = _DatasetStore(store, cache_bytes)

    def _read_key(self, key: str) -> bytes | None:
        try:
            content = _run(self._store.get(key, default_buffer_prototype())).result()
        # Each store has errors of its own.
        except Exception as e:
            raise self._unreachable(e) from e
        return None if content is None else content.to_bytes()

    def _open_array(self, key: str, dtype: type) -> Any:
        try:
            array = _run(zarr.api.asynchronous.open_array(store=self._store, path=key, mode="r")).result()
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise self._no_array(key, e) from e
        self._check_array(key, array.shape, array.dtype, dtype, array.chunks)
        return array

    def _begin(self, array: Any, spans: list[tuple[int, int]], what: str) -> Callable[[], np.ndarray]:
        if not isinstance(array, zarr.AsyncArray):
            return super()._begin(array, spans, what)

        async def read() -> np.ndarray:
            return np.concatenate(await asyncio.gather(*(array.getitem(slice(*span)) for span in spans)))

        future = _run(read())

        def wait() -> np.ndarray:
            try:
                return future.result()
            # Codecs raise RuntimeError or ValueError for damaged data.
            except (OSError, RuntimeError, ValueError) as e:
                raise self._damage(what, array, spans, e) from e

        return wait


class _DatasetStore(WrapperStore[Store]):
    """Keeps the indexes of shards, which zarr-python would read at each access. A missing chunk is an error, not 0."""

    def __init__(self, store: Store, cache_bytes: int):
        super().__init__(store)
        self._cache_bytes = cache_bytes
        self._indexes: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._held = 0

    def _with_store(self, store: Store) -> "_DatasetStore":
        return type(self)(store, self._cache_bytes)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        place = (key, byte_range.suffix) if isinstance(byte_range, SuffixByteRequest) else None
        if place in self._indexes:
            self._indexes.move_to_end(place)
            return self._indexes[place]
        content = await self._store.get(key, prototype, byte_range)
        if content is None and key.rsplit("/", 1)[-1].isdigit():
            raise FileNotFoundError(f"{key} is missing.")
        if place is not None and content is not None and place not in self._indexes:
            self._indexes[place] = content
            self._held += len(content)
            while self._held > self._cache_bytes:
                self._held -= len(self._indexes.popitem(last=False)[1])
        return content


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """An event loop in its own thread. File systems that are not asynchronous run in the threads of its executor."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(STORE_REQUESTS // 4, thread_name_prefix="fsspec"))
    threading.Thread(target=loop.run_forever, daemon=True, name="fsspec").start()
    return loop


def _run(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _event_loop())
