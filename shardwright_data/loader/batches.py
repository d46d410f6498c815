"""Common parts of all loaders: batches, their way to the devices, and loading them ahead of use."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any, TypeVar

import jax
import numpy as np

from shardlib.shardtypes import Array, bool_, make_shardings, pytree_dataclass, u32
from shardwright_data.checks import check_range
from shardwright_data.loader.order import Indices
from shardwright_data.text.tokenizers import ByteLengths

T = TypeVar("T")
NO_EPOCHS = "Only a single flat-tokens dataset has epochs (training.eval_epochs): give a number of steps instead."


@pytree_dataclass
class TokenBatch:
    """Sequences, on the devices or as host arrays. The batch of a step is an `Array["m", TokenBatch]`.

    There microbatch k of m holds the sequences k·n to (k + 1)·n of the m·n in the batch, in order, on every mesh.
    """

    targets: u32["B/b L"]
    """Token ids, each to be predicted from those before it in its document; 0 in padding."""
    is_seq_start: bool_["B/b L"]
    """True where a document starts. Nothing before such a position in its sequence may be seen from it or after it."""
    loss_mask: bool_["B/b L"]
    """False in padding, where there is nothing to predict."""
    inputs: u32["B/b L inputs"] | None = None
    """Further values of the dataset for each target; 0 in padding. None where the model reads none."""


@dataclasses.dataclass
class Piece:
    """The part of a document in a sequence of a batch."""

    sequence: int
    """Index of the sequence in the batch."""
    position: int
    """First position of the part in the sequence."""
    document: int | Any
    """Index of the document in the split; None for a stream, which has none."""
    start: int
    """Place of the first token of the part in the document."""
    length: int
    """Number of tokens."""
    source: str | None = None
    """The name of its source in the mixture."""


def in_microbatches(sequences: T, count: int) -> T:
    """Host arrays [sequences, …], each as [count, sequences / count, …]: the microbatches of a batch."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), sequences)


def batch_shapes(batch_size: int, seq_len: int, microbatches: int, inputs: int = 0) -> TokenBatch:
    """The `jax.ShapeDtypeStruct` of each array of a step's batch on the current mesh: enough to compile the step.

    Args:
        batch_size: sequences in the batch, over all hosts.
        seq_len: tokens in a sequence.
        microbatches: number of microbatches, which divides batch_size.
        inputs: number of inputs beside the tokens.
    """
    shape = microbatches, batch_size // microbatches, seq_len
    struct = jax.ShapeDtypeStruct
    tokens, flags = struct(shape, np.uint32), struct(shape, np.bool_)
    batch = TokenBatch(tokens, flags, flags, struct((*shape, inputs), np.uint32) if inputs else None)
    return jax.tree.map(lambda x, s: x.update(sharding=s), batch, make_shardings(Array["m", TokenBatch], like=batch))


class Loader:
    """Batches of one split. The content of a batch does not depend on the mesh or on the number of hosts.

    On a current mesh, `load` places batches on its devices. Without one, only `sequences` works.

    Args:
        split: `train` or `validation`.
        batch_size: sequences in a batch, over all hosts.
        seq_len: tokens in a sequence.
        vocab_size: bound on the token ids, or None for no check.
        inputs: names of the inputs that batches hold beside the tokens (docs/flat-tokens.md).
        microbatches: number of microbatches in the batches that `load` gives, at least 1.
        pad: `load` adds sequences of padding at the end of a batch that the mesh does not divide.

    Raises:
        ValueError: a size is out of range, `microbatches` does not divide batch_size, or the mesh does not divide a
            microbatch.
    """

    parallel_loads: int
    """Number of calls of `load` that may run at once in different threads: the `threads` of `prefetch`."""
    num_tokens: int | None
    """Tokens in the split, all sources together; None if unknown."""

    def __init__(
        self,
        split: str,
        batch_size: int,
        seq_len: int,
        vocab_size: int | None = None,
        inputs: Sequence[str] = (),
        microbatches: int = 1,
        pad: bool = False,
    ):
        check_range("batch_size", batch_size)
        check_range("seq_len", seq_len)
        check_range("microbatches", microbatches)
        mesh = jax.sharding.get_abstract_mesh()
        multiple = microbatches * math.prod(mesh.shape.get(axis, 1) for axis in "rde")
        size = -(-batch_size // multiple) * multiple if pad else batch_size
        if size % multiple:
            raise ValueError(
                f"A batch of {size} sequences does not divide into {microbatches} microbatches on the mesh "
                f"{dict(mesh.shape)}. Choose a multiple of {multiple} for the batch size."
            )
        self.split, self.batch_size, self.seq_len, self.vocab_size = split, batch_size, seq_len, vocab_size
        self.inputs, self.microbatches = tuple(inputs), microbatches
        self._shape = microbatches, size // microbatches, seq_len
        """Microbatches, sequences in each, tokens in each of these."""
        self.shardings: TokenBatch | None = None
        if not mesh.empty:
            like = TokenBatch(0, 0, 0, 0 if inputs else None)
            self.shardings = make_shardings(Array["m", TokenBatch], like=like)

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a batch, over all hosts, padding included."""
        return self.batch_size * self.seq_len

    def sequences(self, step: int, indices: Indices) -> TokenBatch:
        """Sequences of the batch of `step`, at least 0, on the host, given by their indices in [0, batch_size).

        Raises:
            ValueError: the step cannot be read, or data is missing or damaged.
        """
        raise NotImplementedError

    def state(self, step: int) -> dict[str, Any]:
        """JSON values, for a checkpoint, with which `make_loader` resumes at the batch of `step`.

        They only name the datasets if any step can be read at any time.
        """
        return {}

    def epoch_steps(self) -> dict[str, Fraction]:
        """Batches until each sequence of a source has come once, by the source's name; empty if unknown."""
        return {}

    def epochs_before(self, step: int) -> Fraction:
        """Passes over the data before the batch of `step`. Raises ValueError if that is not known."""
        raise ValueError(NO_EPOCHS)

    def pieces(self, step: int) -> list[Piece]:
        """The parts of documents in the batch of `step`, in order.

        Raises ValueError for a stream, whose batches are known only once they are read.
        """
        raise ValueError(
            "The run reads a stream, whose batches are not known without reading it from the start. Write a dataset "
            "with tools/huggingface_to_flat_tokens to be able to look at any step."
        )

    def documents(self, step: int) -> dict[str | None, list[tuple[int, int]]]:
        """First and last index of each stretch of documents in the batch of `step`, by source; raises as `pieces`."""
        stretches: dict[str | None, list[tuple[int, int]]] = {}
        for piece in sorted(self.pieces(step), key=lambda piece: piece.document):
            known = stretches.setdefault(piece.source, [])
            if known and piece.document <= known[-1][1] + 1:
                known[-1] = known[-1][0], piece.document
            else:
                known.append((piece.document, piece.document))
        return stretches

    @property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens; None if unknown."""
        return None

    def utf8_bytes(self, step: int) -> int | None:
        """UTF-8 bytes of the text that the targets of the batch of `step` stand for; None if unknown.

        Each host reads the whole batch, so the number does not depend on the mesh or on the number of hosts.
        """
        if self.byte_lengths is None:
            return None
        found = self.sequences(step, np.arange(self.batch_size))
        return self.byte_lengths.count(found.targets[found.loss_mask], found.is_seq_start[found.loss_mask])

    def load(self, step: int) -> TokenBatch:
        """The batch of `step` on the devices, an Array["m", TokenBatch].

        Each host reads the sequences of its own devices: a part of each microbatch. Raises ValueError as `sequences`.
        """
        if self.shardings is None:
            raise ValueError("The loader has no mesh to place batches on. Make it under jax.set_mesh(mesh).")
        shape = self._shape
        count, size, _ = shape
        parts = self.shardings.targets.addressable_devices_indices_map(shape).values()
        rows = np.unique(np.concatenate([np.arange(size)[part] for _, part, _ in parts]))
        indices = (np.arange(count)[:, None] * size + rows).reshape(-1)
        is_real = indices < self.batch_size
        host = self.sequences(step, np.where(is_real, indices, 0))
        host = dataclasses.replace(host, loss_mask=host.loss_mask & is_real[:, None])

        def put(values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
            def shard(index: Any) -> np.ndarray:
                return values[index[0], np.searchsorted(rows, np.arange(size)[index[1]]), *index[2:]]

            return jax.make_array_from_callback((*shape, *values.shape[3:]), sharding, shard)

        return jax.tree.map(put, in_microbatches(host, count), self.shardings)


class prefetch(contextlib.AbstractContextManager, Iterator[T]):
    """Context and iterator of `load(step)` for the steps in [start, stop), computed in threads ahead of use.

    An error in `load` is raised where its step is due. At the end of the context the batches that are left are dropped.
    It waits for the calls of `load` that are running.

    Args:
        load: with more than one thread, it has to be thread-safe. It sees no mesh: `jax.set_mesh` is per thread.
        start: the first step.
        stop: one past the last step.
        depth: batches loaded ahead of the one in use, at least 1; each takes memory on the devices.
        threads: calls of `load` that run at once, at least 1. Several of them hide the latency of a store.
    """

    def __init__(self, load: Callable[[int], T], start: int, stop: int, depth: int = 2, threads: int = 1):
        self._pool = ThreadPoolExecutor(min(threads, depth), thread_name_prefix="prefetch")
        self._begun = map(functools.partial(self._pool.submit, load), range(start, stop))
        self._ahead = deque(itertools.islice(self._begun, depth))

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        first = self._ahead.popleft()
        self._ahead.extend(itertools.islice(self._begun, 1))
        return first.result()

    def settle(self) -> None:
        """Waits until no call runs, nor will before the next result is taken."""
        wait(self._ahead)

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
