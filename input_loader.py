"""Training batches from flat-tokens datasets: which tokens stand in the batch of a step, and their way to the devices.

`FlatTokensLoader.rows` says what a batch holds; it is a pure function of dataset, seed and step, and knows neither mesh
nor hosts. `FlatTokensLoader.load` places the rows that this host's devices need. `Prefetcher` does so ahead of time.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jaxtyping import Int64, UInt64

from shardlib.shardtypes import bool_, make_shardings, pytree_dataclass, u32
from tools import flat_tokens

T = TypeVar("T")
# Dims of the same name agree within a call.
Indices = Int64[np.ndarray, "rows"]
Words = UInt64[np.ndarray, "*shape"]


@pytree_dataclass
class TokenBatch:
    """One batch on the devices."""

    targets: u32["B/r/d L"]
    """Token ids, each to be predicted from those before it in its document; 0 in padding."""
    is_seq_start: bool_["B/r/d L"]
    """Where a document starts. Nothing before such a place in its row may be seen from it or after it."""
    loss_mask: bool_["B/r/d L"]
    """False in padding, where there is nothing to predict."""


class Rows(NamedTuple):
    """Rows of a batch on the host: the fields of TokenBatch, each of shape (rows, seq_len)."""

    targets: np.ndarray
    is_seq_start: np.ndarray
    loss_mask: np.ndarray


@dataclass
class FlatTokensConfig:
    """A flat-tokens dataset (docs/flat-tokens.md) and the order in which it is read."""

    filespec: str
    """Directory of the dataset: a local path, or a URL that tensorstore knows (`gs://`, `s3://`, `http://` …)."""
    seed: int = 0
    """Selects the order of the rows, in [0, 2**63). Another seed and another epoch give unrelated orders."""
    shuffle: bool = True
    """Whether rows come in random order, drawn anew for each epoch, or as they lie in the dataset."""
    sequence_packing: bool = True
    """True: rows are consecutive windows of seq_len tokens, whatever documents they hold; the last num_tokens % seq_len
    tokens are left out. False: each row is one document, cut or padded to seq_len."""
    cache_bytes: int = 2**28
    """Host memory for decoded chunks, in bytes, at least 0."""


_U64 = np.uint64


def _mix(x: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters near values."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def permute(index: Indices, size: int, seed: int, epoch: Indices) -> Indices:
    """Places of `index` under the random permutation of range(size) that (seed, epoch) select, epoch by epoch.

    An eight-round Feistel network on pairs (high, low) of a grid just larger than `size`, walked again where it leads
    outside: any one place costs the same, whatever the size, and nothing is stored. The values are a promise: a change
    would alter the batches of every run that resumes.

    Args:
        index: in [0, size).
        size: in [1, 2**62).
        seed: in [0, 2**63).
        epoch: at least 0.
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    # (seed, epoch, round) are mixed one after the other, so that no two seeds share an epoch's order.
    golden = _U64(0x9E3779B97F4A7C15)
    key = _mix(_mix(np.full_like(epoch, seed).astype(_U64) + golden) + epoch.astype(_U64))
    keys = [_mix(key + offset) for offset in np.arange(8, dtype=_U64) * golden]

    def walk(x: np.ndarray, where: np.ndarray) -> np.ndarray:
        high, low = x // _U64(width), x % _U64(width)
        for i, k in enumerate(keys):
            if i % 2 == 0:
                high = (high + _mix(low ^ k[where]) % _U64(height)) % _U64(height)
            else:
                low = (low + _mix(high ^ k[where]) % _U64(width)) % _U64(width)
        return high * _U64(width) + low

    x = walk(index.astype(_U64), np.arange(index.size))
    while (outside := np.flatnonzero(x >= _U64(size))).size:
        x[outside] = walk(x[outside], outside)
    return x.astype(np.int64)


class FlatTokensLoader:
    """Batches of one split.

    Args:
        config: the dataset and its order.
        split: `train` or `validation`.
        batch_size: rows in a batch, over all hosts.
        seq_len: tokens in a row.
        vocab_size: bound on the token ids, or None for no check.
        shardings: where `load` places a batch; by default as TokenBatch says, on the mesh that is set now. Without
            either, only `rows` works.

    Raises:
        ValueError: a setting out of range, a dataset that is missing, damaged or too short, token ids that exceed the
            vocabulary, or a batch that the mesh does not divide.
    """

    def __init__(
        self,
        config: FlatTokensConfig,
        split: str,
        batch_size: int,
        seq_len: int,
        vocab_size: int | None = None,
        shardings: TokenBatch | None = None,
    ):
        for name, value, low in (
            ("batch_size", batch_size, 1),
            ("seq_len", seq_len, 1),
            ("seed", config.seed, 0),
            ("cache_bytes", config.cache_bytes, 0),
        ):
            if not low <= value < 2**63:
                raise ValueError(f"{name} is {value}; it must lie in [{low}, 2**63).")
        self.config, self.batch_size, self.seq_len = config, batch_size, seq_len
        self.dataset = flat_tokens.Reader(config.filespec, split, cache_bytes=config.cache_bytes)
        path, largest = self.dataset.path, self.dataset.max_token_id
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(
                f"{path} holds token ids up to {largest}, the model's vocabulary has {vocab_size}. "
                f"Set the vocabulary to {largest + 1} or more, or choose a dataset made with the model's tokenizer."
            )
        self.rows_per_epoch = (
            self.dataset.num_tokens // seq_len if config.sequence_packing else self.dataset.num_documents
        )
        if self.rows_per_epoch == 0:
            raise ValueError(
                f"{path} is too short: {self.dataset.num_tokens} tokens do not fill one row of seq_len {seq_len}. "
                "Use a shorter seq_len or a larger dataset."
            )
        if shardings is None and not jax.sharding.get_abstract_mesh().empty:
            shardings = make_shardings(TokenBatch)
        self._shardings = shardings
        if shardings is not None:
            self._check_divides(shardings)

    @property
    def num_tokens(self) -> int:
        """Tokens in the split."""
        return self.dataset.num_tokens

    @property
    def max_token_id(self) -> int:
        """The largest token id in the split."""
        return self.dataset.max_token_id

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a batch, over all hosts, padding included."""
        return self.batch_size * self.seq_len

    @property
    def steps_per_epoch(self) -> float:
        """Batches until each row has come once. Epochs follow one another without a gap, within a batch too."""
        return self.rows_per_epoch / self.batch_size

    def rows(self, step: int, rows: Indices) -> Rows:
        """The given rows, each in [0, batch_size), of the batch of `step`, at least 0.

        A pure function of dataset, seed and step: the same on every mesh, every host, and after every restart.

        Raises:
            ValueError: a file of the dataset is missing or damaged.
        """
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0.")
        epoch, row = np.divmod(step * self.batch_size + rows, self.rows_per_epoch)
        if self.config.shuffle:
            row = permute(row, self.rows_per_epoch, self.config.seed, epoch)
        if self.config.sequence_packing:
            starts, lengths = row * self.seq_len, np.full_like(row, self.seq_len)
        else:
            starts, lengths = self.dataset.document_spans(row)
            lengths = np.minimum(lengths, self.seq_len)
        encoded = np.zeros((rows.size, self.seq_len), np.uint32)
        for out, tokens in zip(encoded, self.dataset.read(starts, lengths), strict=True):
            out[: tokens.size] = tokens
        targets, is_seq_start = flat_tokens.decode(encoded)
        return Rows(targets, is_seq_start, np.arange(self.seq_len) < lengths[:, None])

    def load(self, step: int) -> TokenBatch:
        """The batch of `step` on the devices, read from the dataset as far as this host's devices need it.

        Raises:
            ValueError: a file of the dataset is missing or damaged.
        """
        if self._shardings is None:
            raise ValueError("The loader has no mesh to place batches on. Make it under jax.set_mesh(mesh).")
        shape = (self.batch_size, self.seq_len)
        indices = self._shardings.targets.addressable_devices_indices_map(shape).values()
        spans = sorted({rows.indices(self.batch_size)[:2] for rows, _ in indices})
        host = self.rows(step, np.concatenate([np.arange(start, stop) for start, stop in spans]))
        ends = np.cumsum([stop - start for start, stop in spans]).tolist()
        place = {span: slice(end - (span[1] - span[0]), end) for span, end in zip(spans, ends, strict=True)}

        def put(values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
            def shard(index: tuple[slice, ...]) -> np.ndarray:
                return values[place[index[0].indices(self.batch_size)[:2]], index[1]]

            return jax.make_array_from_callback(shape, sharding, shard)

        return jax.tree.map(put, TokenBatch(*host), self._shardings)

    def unigram_entropy(self, max_tokens: int = 2**22) -> float:
        """Entropy of single tokens in the first `max_tokens` of the split, in nats: see flat_tokens.unigram_entropy."""
        encoded = np.concatenate(list(self.dataset.blocks(max_tokens)))
        return flat_tokens.unigram_entropy(flat_tokens.decode(encoded)[0])

    def _check_divides(self, shardings: TokenBatch) -> None:
        try:
            shardings.targets.shard_shape((self.batch_size, self.seq_len))
        except ValueError as e:
            raise ValueError(
                f"A batch of {self.batch_size} rows and {self.seq_len} tokens does not divide evenly over the mesh "
                f"{dict(shardings.targets.mesh.shape)}, sharded as {shardings.targets.spec}. "
                "Choose a multiple of the axes' product for the batch size."
            ) from e


class Prefetcher(Generic[T]):
    """Yields `load(step)` for each step in [start, stop), in order, computed in a background thread ahead of use.

    An error in `load` is raised by the `next` that asks for its step. To be closed, best as a context manager: that
    drops what nobody asked for, and waits for the one `load` that may be running.

    Args:
        load: called from one thread only, so it need not be thread-safe. It sees no mesh: `jax.set_mesh` is per thread.
        start: the first step.
        stop: one past the last step.
        depth: batches in flight ahead of the one in use, at least 1; each takes its place on the devices.
    """

    def __init__(self, load: Callable[[int], T], start: int, stop: int, depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1.")
        self._load = load
        self._steps = iter(range(start, stop))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        for step in itertools.islice(self._steps, 1):
            self._ahead.append(self._thread.submit(self._load, step))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        batch = self._ahead.popleft()
        self._submit()
        return batch.result()

    def close(self) -> None:
        """Ends the thread. A later `next` raises."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
