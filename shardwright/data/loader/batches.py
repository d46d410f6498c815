"""Implements the common parts of loaders: batches, placing them on the devices, and prefetching."""

import contextlib
import dataclasses
import functools
import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Int64

from shardlib.shardtypes import Array, ArrayType, bool_, f32, make_shardings, pytree_dataclass, u32
from shardwright.data.checks import check_range
from shardwright.data.loader.order import Indices
from shardwright.data.text.tokenizers import ByteLengths, Tokenizer

TargetCounts = Int64[np.ndarray, "sequences"]
T = TypeVar("T")
NO_EPOCHS = (
    "Only a single flat-tokens dataset has epochs (training.eval_epochs); give a number of "
    "steps instead."
)


@pytree_dataclass
class TokenBatch:
    """Sequences, on the devices or as host arrays.

    The batch of a step is an `Array["m", TokenBatch]`.

    Microbatch k of m has the sequences k·n to (k + 1)·n of the m·n in the batch, in order, on every
    mesh.
    """

    targets: u32["B/b L"]
    """Token ids to predict, each from those before it in its document; 0 in padding."""
    is_seq_start: bool_["B/b L"]
    """True where a document starts. Attention may not look from or beyond such a position to
    earlier ones."""
    loss_mask: bool_["B/b L"]
    """False in padding, where there is nothing to predict."""
    inputs: u32["B/b L inputs"] | None = None
    """Further values of the dataset for each target; 0 in padding. None if the model reads none."""
    loss_inputs: u32["B/b L loss_inputs"] | None = None
    """Those that only the training loss reads. None if it reads none, and in validation."""


@dataclasses.dataclass
class Piece:
    """A part of a document in a sequence of a batch."""

    sequence: int
    """Index of the sequence in the batch."""
    position: int
    """First position of the part in the sequence."""
    document: int | Any
    """Index of the document in the split; None for a stream."""
    start: int
    """Position of the first token of the part in the document."""
    length: int
    """Number of tokens."""
    source: str | None = None
    """The name of its source in the mixture."""


class Text(NamedTuple):
    """The text in a process's share of a batch. The sum over processes is that of the batch."""

    utf8_bytes: int | None
    """UTF-8 bytes of the text of the targets; None if unknown."""
    checksum: int
    """Sum of the CRC-32 of all sequences, which does not depend on how they are divided into
    batches."""


def is_input(kind: object) -> bool:
    """True for the type of an input of each token: f32, u32, or k of them, such as f32["6"]."""
    if not isinstance(kind, ArrayType):
        return kind in (f32, u32)
    return kind.dtype in ("f32", "u32") and str(kind.spec).isdigit()


def widths_of(inputs: Sequence[str] | Mapping[str, Any]) -> dict[str, int]:
    """Counts the values per token of each input: 6 of f32["6"], and 1 of f32 or of a mere name."""
    kinds = inputs if isinstance(inputs, Mapping) else dict.fromkeys(inputs, u32)
    return {
        name: int(str(kind.spec)) if isinstance(kind, ArrayType) else 1
        for name, kind in kinds.items()
    }


def in_microbatches(sequences: T, count: int) -> T:
    """Reshapes host arrays [sequences, …] to microbatches [count, sequences / count, …]."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), sequences)


def batch_shapes(
    batch_size: int, seq_len: int, microbatches: int, inputs: int = 0, loss_inputs: int = 0
) -> TokenBatch:
    """Makes the `jax.ShapeDtypeStruct` of each array of a step's batch on the current mesh, to
    compile the step.

    Args:
        batch_size: sequences in the batch, over all hosts.
        seq_len: tokens in a sequence.
        microbatches: number of microbatches, which divides batch_size.
        inputs: number of values per token other than its id.
        loss_inputs: number of those of the loss.
    """
    shape = microbatches, batch_size // microbatches, seq_len
    struct = jax.ShapeDtypeStruct
    tokens, flags = struct(shape, np.uint32), struct(shape, np.bool_)
    further = (
        struct((*shape, count), np.uint32) if count else None for count in (inputs, loss_inputs)
    )
    batch = TokenBatch(tokens, flags, flags, *further)
    return jax.tree.map(
        lambda x, s: x.update(sharding=s), batch, make_shardings(Array["m", TokenBatch], like=batch)
    )


class Loader:
    """Loads batches of one split. Their content does not depend on the mesh or the number of hosts.

    On a current mesh, `load` places batches on its devices. Without one, only `sequences` works.

    Args:
        split: `train` or `validation`.
        batch_size: sequences in a batch, over all hosts.
        seq_len: tokens in a sequence.
        vocab_size: bound on the token ids, or None for no check.
        inputs: further inputs of batches (docs/formats.md), names or a dict with their types.
        loss_inputs: those of the loss.
        microbatches: number of microbatches in the batches that `load` returns, at least 1.

    Raises:
        ValueError: a size is out of range, or the mesh and `microbatches` do not divide a batch of
            `train`.
    """

    parallel_loads: int
    """Number of concurrent calls of `load` that are allowed: the `threads` of `prefetch`."""
    num_tokens: int | None
    """Tokens in the split, all sources together; None if unknown."""
    once: bool
    """True for splits other than `train`: each sequence is in one batch, and `load` adds padding
    where the batch or the mesh is larger."""
    files: Sequence[str] = ()
    """Lines about the text files that are read, if any."""
    tokenizer: Tokenizer | None = None
    """What makes its tokens from text; None if it reads tokens."""

    def __init__(
        self,
        split: str,
        batch_size: int,
        seq_len: int,
        vocab_size: int | None = None,
        inputs: Sequence[str] | Mapping[str, Any] = (),
        loss_inputs: Sequence[str] | Mapping[str, Any] = (),
        microbatches: int = 1,
    ):
        check_range("batch_size", batch_size)
        check_range("seq_len", seq_len)
        check_range("microbatches", microbatches)
        mesh = jax.sharding.get_abstract_mesh()
        multiple = microbatches * math.prod(mesh.shape.get(axis, 1) for axis in "rde")
        self.once = split != "train"
        size = -(-batch_size // multiple) * multiple if self.once else batch_size
        if size % multiple:
            raise ValueError(
                f"A batch of {size} sequences does not divide into {microbatches} microbatches on "
                f"the mesh {dict(mesh.shape)}. Choose a multiple of {multiple} for the batch size."
            )
        self.split, self.batch_size, self.seq_len, self.vocab_size = (
            split,
            batch_size,
            seq_len,
            vocab_size,
        )
        self.inputs, self.loss_inputs = widths_of(inputs), widths_of(loss_inputs)
        self.microbatches = microbatches
        self._shape = microbatches, size // microbatches, seq_len
        """(microbatches, sequences per microbatch, tokens per sequence)."""
        self.shardings: TokenBatch | None = None
        if not mesh.empty:
            like = TokenBatch(0, 0, 0, *(0 if names else None for names in (inputs, loss_inputs)))
            self.shardings = make_shardings(Array["m", TokenBatch], like=like)

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a batch, over all hosts, padding included."""
        return self.batch_size * self.seq_len

    def rows(self, step: int) -> int:
        """Counts the sequences in the batch of `step`: batch_size, or what is left of a split that
        is read `once`.
        """
        return self.batch_size

    def sequences(self, step: int, indices: Indices) -> TokenBatch:
        """Reads sequences of the batch of `step`, at least 0, to the host, by their indices in [0,
        rows(step)).

        Raises:
            ValueError: the step cannot be read, or data is missing or damaged.
        """
        raise NotImplementedError

    def state(self, step: int) -> dict[str, Any]:
        """Returns JSON values for a checkpoint, with which `make_loader` resumes at the batch of
        `step`.

        They only identify the datasets if any step can be read at any time.
        """
        return {}

    def epochs_before(self, step: int) -> Fraction:
        """Counts the passes over the data before the batch of `step`.

        Raises ValueError if that is unknown.
        """
        raise ValueError(NO_EPOCHS)

    def passes(self, step: int) -> dict[str, Fraction]:
        """Counts the passes over each source before the batch of `step`, by name; empty if
        unknown.
        """
        return {}

    def count_targets(self) -> TargetCounts | None:
        """Counts the targets of each of the first sequences; None if all positions are targets, or
        it is unknown.
        """
        return None

    def pieces(self, step: int) -> list[Piece]:
        """Lists the parts of documents in the batch of `step`, in order.

        Raises ValueError for a stream, whose batches are known only once they are read.
        """
        raise ValueError(
            "The run reads a stream, whose batches are unknown until it is read from the start. "
            "Write a dataset with shardwright/tools/huggingface_to_flat_tokens to inspect any step."
        )

    def documents(self, step: int) -> dict[str | None, list[tuple[int, int]]]:
        """Lists ranges (first, last index) of documents in the batch of `step`, by source.

        Raises as `pieces` does.
        """
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
        """Bytes of each token; None if unknown."""
        return None

    def text(self, step: int) -> Text:
        """Measures the text in this process's share of the batch of `step`.

        Raises as `sequences`.
        """
        rows = np.array_split(np.arange(self.rows(step)), jax.process_count())[jax.process_index()]
        known = self.byte_lengths
        if not rows.size:  # fewer sequences than processes
            return Text(None if known is None else 0, 0)
        found = self.sequences(step, rows)
        checksum = sum(
            zlib.crc32(b"".join(map(bytes, row)))
            for row in zip(*jax.tree.leaves(found), strict=True)
        )
        of_targets = found.targets[found.loss_mask], found.is_seq_start[found.loss_mask]
        return Text(None if known is None else known.count(*of_targets), checksum)

    def load(self, step: int) -> TokenBatch:
        """Loads the batch of `step` onto the devices, as an Array["m", TokenBatch].

        Each host reads only the sequences of its own devices. Raises ValueError as `sequences`
        does.
        """
        if self.shardings is None:
            raise ValueError(
                "The loader has no mesh to place batches on. Create it under jax.set_mesh(mesh)."
            )
        shape = self._shape
        count, size, _ = shape
        parts = self.shardings.targets.addressable_devices_indices_map(shape).values()
        rows = np.unique(np.concatenate([np.arange(size)[part] for _, part, _ in parts]))
        indices = (np.arange(count)[:, None] * size + rows).reshape(-1)
        is_real = indices < self.rows(step)
        host = self.sequences(step, np.where(is_real, indices, 0))
        host = dataclasses.replace(host, loss_mask=host.loss_mask & is_real[:, None])

        def put(values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
            def shard(index: Any) -> np.ndarray:
                return values[
                    index[0], np.searchsorted(rows, np.arange(size)[index[1]]), *index[2:]
                ]

            return jax.make_array_from_callback((*shape, *values.shape[3:]), sharding, shard)

        return jax.tree.map(put, in_microbatches(host, count), self.shardings)


class prefetch(contextlib.AbstractContextManager, Iterator[T]):
    """Iterates over `load(step)` for the steps in [start, stop), computed ahead of use in threads.

    A context manager.

    An error in `load` is raised when its step is due. The end of the context drops remaining
    batches and waits for running calls of `load`.

    Args:
        load: must be thread-safe if threads > 1. It sees no mesh, because `jax.set_mesh` is per
            thread.
        start: the first step.
        stop: one past the last step.
        depth: batches loaded ahead of the one in use, at least 1; each takes memory on the devices.
        threads: concurrent calls of `load`, at least 1. Several hide the latency of a store.
    """

    def __init__(
        self, load: Callable[[int], T], start: int, stop: int, depth: int = 2, threads: int = 1
    ):
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
        """Waits until no call runs and none will start before the next result is taken."""
        # a cancelled one is never called done
        wait([result for result in self._ahead if not result.cancelled()])

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
