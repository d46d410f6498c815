"""Makes batches from flat-tokens datasets, one or a mixture: a pure function of datasets, weights,
seed and step.
"""

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens.reader import CACHE_BYTES
from shardwright.data.loader.batches import NO_EPOCHS, Loader, Piece, TargetCounts, TokenBatch
from shardwright.data.loader.config import DataConfig, SourceConfig
from shardwright.data.loader.order import BLOCK, PERIOD, Indices, Quotas, permute
from shardwright.data.text.tokenizers import ByteLengths, byte_lengths_of_datasets

MOST_COUNTED = 2**22
"""Most positions that count_targets reads."""


class Source:
    """Reads the sequences of one dataset, numbered over all epochs.

    Args:
        source: the dataset.
        data: how to read it.
        split: of the dataset.
        once: True to also read the tokens after the last whole sequence.
        seq_len: tokens in a sequence.
        inputs: the inputs of the batches, and those of the loss: values per token, by name.
        options: of its flat_tokens.Reader.

    Raises:
        ValueError: the dataset or an input is missing, damaged or too short.
    """

    def __init__(
        self,
        source: SourceConfig,
        data: DataConfig,
        split: str,
        once: bool,
        seq_len: int,
        inputs: Sequence[Mapping[str, int]],
        **options: Any,
    ):
        self.config, self._data, self._seq_len, self._inputs = source, data, seq_len, inputs
        read = {name: size for names in inputs for name, size in names.items()}
        if data.loss_mask is not None:
            read.setdefault(data.loss_mask, 1)
        self.dataset = flat_tokens.Reader(source.filespec, split, inputs=read, **options)
        tokens = self.dataset.num_tokens
        windows = -(-tokens // seq_len) if once else tokens // seq_len
        self.sequences_per_epoch = windows if data.sequence_packing else self.dataset.num_documents
        if self.sequences_per_epoch == 0:
            raise ValueError(
                f"{self.dataset.path} is too short: {tokens} tokens do not fill one sequence of "
                f"seq_len {seq_len}. Use a shorter seq_len or a larger dataset."
            )

    def spans(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Returns `(starts, lengths)`, in tokens of the dataset, of sequences given by their
        numbers.
        """
        epoch, index = np.divmod(numbers, self.sequences_per_epoch)
        if self._data.shuffle:
            index = permute(index, self.sequences_per_epoch, self._data.seed, epoch)
        if self._data.sequence_packing:
            starts = index * self._seq_len
            return starts, np.minimum(self.dataset.num_tokens - starts, self._seq_len)
        starts, lengths = self.dataset.document_spans(index)
        return starts, np.minimum(lengths, self._seq_len)

    def number_after(self, before: "Source", number: int) -> int:
        """Returns the number of the next sequence after the first `number` sequences of `before`,
        of the same dataset.

        If seq_len differs, it is the first that begins after as many tokens of the epoch, or the
        next epoch's first.
        """
        epoch, index = divmod(number, before.sequences_per_epoch)
        if self._data.sequence_packing:
            index = min(-(-index * before._seq_len // self._seq_len), self.sequences_per_epoch)
        return epoch * self.sequences_per_epoch + index

    def sequences(self, numbers: Indices) -> TokenBatch:
        """Reads sequences, given by their numbers."""
        starts, lengths = self.spans(numbers)
        is_token = np.arange(self._seq_len) < lengths[:, None]
        encoded = np.zeros(is_token.shape, np.uint32)
        encoded[is_token] = self.dataset.read(starts, lengths)
        targets, is_seq_start = flat_tokens.decode(encoded)
        if targets.max() > self.dataset.max_token_id:
            raise ValueError(
                f"{self.dataset.path} holds the token id {targets.max()}, but its attribute "
                f"max_token_id is {self.dataset.max_token_id}. Write or copy the dataset again."
            )
        inputs = [
            np.zeros((*is_token.shape, sum(sizes.values())), np.uint32) for sizes in self._inputs
        ]
        loss_mask = is_token.copy()
        for sizes, values in zip(self._inputs, inputs, strict=True):
            ends = itertools.accumulate(sizes.values())
            for (name, size), end in zip(sizes.items(), ends, strict=True):
                read = self.dataset.read(starts, lengths, name)
                values[is_token, end - size : end] = read.reshape(-1, size)
        if self._data.loss_mask is not None:
            loss_mask[is_token] = self.dataset.read(starts, lengths, self._data.loss_mask) != 0
        return TokenBatch(
            targets, is_seq_start, loss_mask, *(x if x.size else None for x in inputs)
        )


class FlatTokensLoader(Loader):
    """Loads batches of one split of a flat-tokens dataset, or of several mixed by weight.

    Any step can be read at any time, from several threads, at the same cost.

    Args:
        config: the dataset, or the mixture, and its order.
        after: loader of the batches before `first`, if settings change there. Its datasets continue
            where they were.
        first: index of the first batch.
        batches: arguments of Loader.
        options: the same, by name.

    Raises:
        ValueError: a dataset or an input is missing, damaged or too short, token ids exceed the
            vocabulary, a weight is too small, or the mesh or the microbatches do not divide a
            batch.
    """

    parallel_loads = 8

    def __init__(
        self,
        config: DataConfig,
        *batches: Any,
        after: "FlatTokensLoader | None" = None,
        first: int = 0,
        **options: Any,
    ):
        super().__init__(*batches, **options)
        self._config, self._after, self._first = config, after, first
        named = config.mixture or {None: SourceConfig(config.filespec or "")}
        self.quotas = Quotas([source.weight for source in named.values()], config.seed)
        options = {
            "cache_bytes": CACHE_BYTES // len(named),
            "inputs": (self.inputs, self.loss_inputs),
        }
        self.sources: dict[str | None, Source] = {}
        """Sources by their names in the mixture; None for a single dataset."""
        for (name, source), share in zip(named.items(), self.quotas.shares.tolist(), strict=True):
            if share < 1:
                raise ValueError(
                    f"data.mixture.{name}.weight is {source.weight}, less than one sequence in "
                    f"{BLOCK * PERIOD}. Give it a larger weight or remove the source."
                )
            self.sources[name] = Source(
                source, config, self.split, self.once, self.seq_len, **options
            )
            path, largest = self.sources[name].dataset.path, self.sources[name].dataset.max_token_id
            if self.vocab_size is not None and largest >= self.vocab_size:
                raise ValueError(
                    f"{path} has token ids up to {largest}, but the model's vocabulary is "
                    f"{self.vocab_size}. Set the vocabulary to {largest + 1} or more, or choose a "
                    f"dataset made with the model's tokenizer."
                )
        self.num_tokens = sum(source.dataset.num_tokens for source in self.sources.values())
        fingerprints = [source.dataset.fingerprint for source in self.sources.values()]
        self._datasets = [(x, fingerprints[:i].count(x)) for i, x in enumerate(fingerprints)]
        """Identity of each source's dataset: its fingerprint, and the number of earlier sources
        with the same."""
        self._begins = np.zeros(len(self.sources), np.int64)
        """Number of the first sequence of each source."""
        read = after._read_before(first) if after else {}
        for i, (dataset, source) in enumerate(
            zip(self._datasets, self.sources.values(), strict=True)
        ):
            if dataset in read:
                _, before, number = read[dataset]
                self._begins[i] = source.number_after(before, number)

    def _read_before(self, step: int) -> dict[tuple[str, int], tuple[str, Source, int]]:
        """Maps each dataset read by batches before `step` to its name, its source, and the number
        of its next sequence.

        Also those that only the batches before `first` read.
        """
        read = self._after._read_before(self._first) if self._after else {}
        numbers = self._begins + self.quotas.before((step - self._first) * self.batch_size)
        for dataset, (name, source), number in zip(
            self._datasets, self.sources.items(), numbers.tolist(), strict=True
        ):
            read[dataset] = name or source.config.filespec, source, number
        return read

    def locate(
        self, step: int, indices: Indices
    ) -> list[tuple[str | None, np.ndarray, np.ndarray]]:
        """Lists each source in the batch of `step`: name, positions of its sequences in `indices`,
        their numbers.
        """
        first = (step - self._first) * self.batch_size
        mixed = self._unrepeated(first, self.rows(step))[indices] if self.once else first + indices
        which, numbers = self.quotas.locate(mixed)
        numbers = numbers + self._begins[which]
        found = []
        for i, name in enumerate(self.sources):
            places = np.flatnonzero(which == i)
            if places.size:
                found.append((name, places, numbers[places]))
        return found

    def _unrepeated(self, first: int, count: int) -> Indices:
        """Returns the numbers in the mixture of the sequences `first` to `first + count`, if none
        is repeated.

        A source that has ended is left out.
        """
        sizes = np.array([source.sequences_per_epoch for source in self.sources.values()])
        if (self.quotas.before(first + count) <= sizes).all():
            return np.arange(first, first + count)

        def count_before(number: int) -> int:
            return int(np.minimum(self.quotas.before(number), sizes).sum())

        every = range(int((-(-sizes // self.quotas.shares)).max()) * BLOCK * PERIOD + 1)
        begin, end = (
            bisect.bisect_left(every, n, key=count_before) for n in (first + 1, first + count)
        )
        numbers = np.arange(begin - 1, end)
        which, of_source = self.quotas.locate(numbers)
        return numbers[of_source < sizes[which]]

    def rows(self, step: int) -> int:
        """Counts the sequences in the batch of `step`, as Loader.rows describes."""
        total = sum(source.sequences_per_epoch for source in self.sources.values())
        return (
            min(max(total - step * self.batch_size, 0), self.batch_size)
            if self.once
            else self.batch_size
        )

    def sequences(self, step: int, indices: Indices) -> TokenBatch:
        """Reads sequences of the batch of `step`, as Loader.sequences describes."""
        found = self.locate(step, indices)
        parts = [self.sources[name].sequences(numbers) for name, _, numbers in found]
        back = np.argsort(np.concatenate([places for _, places, _ in found]))
        return jax.tree.map(lambda *of_sources: np.concatenate(of_sources)[back], *parts)

    def pieces(self, step: int) -> list[Piece]:
        """Lists the parts of documents in the batch of `step`, as Loader.pieces describes."""
        pieces = []
        for name, indices, numbers in self.locate(step, np.arange(self.rows(step))):
            source = self.sources[name]
            starts, lengths = source.spans(numbers)
            firsts, lasts = np.split(
                source.dataset.documents_at(np.concatenate([starts, starts + lengths - 1])), 2
            )
            documents = np.concatenate(
                [np.arange(a, b + 1) for a, b in zip(firsts, lasts, strict=True)]
            )
            indices, starts, ends = (
                np.repeat(x, lasts - firsts + 1) for x in (indices, starts, starts + lengths)
            )
            begins, sizes = source.dataset.document_spans(documents)
            low = np.maximum(starts, begins)
            high = np.minimum(ends, begins + sizes)
            columns = indices, low - starts, documents, low - begins, high - low
            pieces += [
                Piece(*row, source=name)
                for row in zip(*(column.tolist() for column in columns), strict=True)
            ]
        return sorted(pieces, key=lambda piece: (piece.sequence, piece.position))

    def state(self, step: int) -> dict[str, Any]:
        """Returns the identity of each dataset, as Loader.state describes, and of those `before`
        the `first` batch.
        """
        return (
            {"before": self._after.state(step), "first": self._first} if self._after else {}
        ) | {
            "dataset" if name is None else f"mixture.{name}": source.dataset.fingerprint
            for name, source in self.sources.items()
        }

    def epochs_before(self, step: int) -> Fraction:
        """Counts passes over the dataset before the batch of `step`, as Loader.epochs_before
        describes.
        """
        if len(self.sources) != 1:
            raise ValueError(NO_EPOCHS)
        return self.passes(step)[self._config.filespec or next(iter(self._config.mixture))]

    def passes(self, step: int) -> dict[str, Fraction]:
        """Counts the passes over each source, also those of the batches before `first`."""
        read = self._read_before(step).values()
        return {name: Fraction(number, source.sequences_per_epoch) for name, source, number in read}

    def count_targets(self) -> TargetCounts | None:
        """Counts the targets of the first sequences, as Loader.count_targets describes."""
        if self._config.sequence_packing and self._config.loss_mask is None:
            return None
        total = sum(source.sequences_per_epoch for source in self.sources.values())
        count = min(total, max(1, MOST_COUNTED // self.seq_len))
        return self.sequences(self._first, np.arange(count)).loss_mask.sum(axis=1)

    @functools.cached_property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of each token; None if the tokenizers of the sources differ, or one is unknown."""
        return byte_lengths_of_datasets(*(source.dataset for source in self.sources.values()))
