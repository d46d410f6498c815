"""Batches of flat-tokens datasets, one or several mixed: a pure function of datasets, weights, seed and step."""

import bisect
import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.loader.batches import Loader, TokenBatch
from shardwright_data.loader.config import DataConfig, SourceConfig
from shardwright_data.loader.order import BLOCK, PERIOD, Indices, Quotas, permute
from shardwright_data.text.tokenizers import ByteLengths, byte_lengths_of_dataset

CHECKED_DOCUMENTS = 2**16
"""First documents of a split whose lengths are read when it is opened to be read unpacked."""


class Source:
    """The sequences of one dataset, numbered over all epochs.

    Args:
        source: the dataset.
        data: how it is read; cache_bytes for this dataset alone.
        split: of the dataset.
        seq_len: tokens in a sequence.
        inputs: names of the inputs to read.

    Raises:
        ValueError: the dataset or an input is missing, damaged or too short.
    """

    def __init__(self, source: SourceConfig, data: DataConfig, split: str, seq_len: int, inputs: tuple[str, ...]):
        self.config, self._data, self._seq_len = source, data, seq_len
        self.dataset = flat_tokens.Reader(source.filespec, split, cache_bytes=data.cache_bytes, inputs=inputs)
        tokens, documents = self.dataset.num_tokens, self.dataset.num_documents
        self.sequences_per_epoch = tokens // seq_len if data.sequence_packing else documents
        if self.sequences_per_epoch == 0:
            raise ValueError(
                f"{self.dataset.path} is too short: {tokens} tokens do not fill one sequence of seq_len {seq_len}. "
                "Use a shorter seq_len or a larger dataset."
            )
        self.unseen = 0.0
        """Share of the tokens beyond seq_len in their document, among the first documents of the split."""
        if not data.sequence_packing:
            _, lengths = self._document_spans(np.arange(min(documents, CHECKED_DOCUMENTS)))
            self.unseen = float(np.maximum(lengths - seq_len, 0).sum() / lengths.sum())

    def spans(self, numbers: Indices) -> tuple[Indices, Indices]:
        """`(starts, lengths)`, in tokens of the dataset, of sequences given by their numbers."""
        epoch, index = np.divmod(numbers, self.sequences_per_epoch)
        if self._data.shuffle:
            index = permute(index, self.sequences_per_epoch, self._data.seed, epoch)
        if self._data.sequence_packing:
            return index * self._seq_len, np.full_like(index, self._seq_len)
        starts, lengths = self._document_spans(index)
        return starts, np.minimum(lengths, self._seq_len)

    def _document_spans(self, documents: Indices) -> tuple[Indices, Indices]:
        starts, lengths = self.dataset.document_spans(documents)
        if lengths.min() < 1:
            raise ValueError(
                f"{self.dataset.path}: document {documents[lengths.argmin()]} is empty. Write the dataset again "
                "without it, or set sequence_packing=true, which does not read seq_starts."
            )
        return starts, lengths

    def sequences(self, numbers: Indices) -> TokenBatch:
        """Sequences, given by their numbers."""
        starts, lengths = self.spans(numbers)
        loss_mask = np.arange(self._seq_len) < lengths[:, None]
        encoded = np.zeros(loss_mask.shape, np.uint32)
        encoded[loss_mask] = self.dataset.read(starts, lengths)
        targets, is_seq_start = flat_tokens.decode(encoded)
        if targets.max() > self.dataset.max_token_id:
            raise ValueError(
                f"{self.dataset.path} holds the token id {targets.max()}, but its attribute max_token_id is "
                f"{self.dataset.max_token_id}. Write or copy the dataset again."
            )
        inputs = np.zeros((*loss_mask.shape, len(self.dataset.inputs)), np.uint32)
        for i, name in enumerate(self.dataset.inputs):
            inputs[loss_mask, i] = self.dataset.read(starts, lengths, name)
        return TokenBatch(targets, is_seq_start, loss_mask, inputs if self.dataset.inputs else None)

    @functools.cached_property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens, from the dataset's tokenizer; None if unknown."""
        return byte_lengths_of_dataset(self.dataset)


class FlatTokensLoader(Loader):
    """Batches of one split of a flat-tokens dataset, or mixed from several by weight.

    Any step can be read at any time, from several threads, at the same cost.

    Args:
        config: the dataset, or the mixture, and its order.
        batches: arguments of Loader.
        options: the same, by name.

    Raises:
        ValueError: a dataset or an input is missing, damaged or too short, token ids exceed the vocabulary, a weight
            is too small, or the mesh or the microbatches do not divide a batch.
    """

    parallel_loads = 8

    def __init__(self, config: DataConfig, *batches: Any, **options: Any):
        super().__init__(*batches, **options)
        named = config.mixture or {None: SourceConfig(config.filespec, max_epochs=config.max_epochs)}
        self.quotas = Quotas([source.weight for source in named.values()], config.seed)
        each = dataclasses.replace(config, cache_bytes=config.cache_bytes // len(named))
        self.sources: dict[str | None, Source] = {}
        """By their names in the mixture; None for a single dataset."""
        for (name, source), share in zip(named.items(), self.quotas.shares.tolist(), strict=True):
            if share < 1:
                raise ValueError(
                    f"mixture.{name}.weight is {source.weight}: less than one sequence in {BLOCK * PERIOD} would "
                    "come from it. Give it a larger weight, or leave it out."
                )
            self.sources[name] = Source(source, each, self.split, self.seq_len, self.inputs)
            path, largest = self.sources[name].dataset.path, self.sources[name].dataset.max_token_id
            if self.vocab_size is not None and largest >= self.vocab_size:
                raise ValueError(
                    f"{path} holds token ids up to {largest}, the model's vocabulary has {self.vocab_size}. Set the "
                    f"vocabulary to {largest + 1} or more, or choose a dataset made with the model's tokenizer."
                )
        self.num_tokens = sum(source.dataset.num_tokens for source in self.sources.values())
        self.unseen = {source.config.filespec: source.unseen for source in self.sources.values() if source.unseen}
        self.limit = self._find_limit()

    def locate(self, step: int, indices: Indices) -> list[tuple[str | None, np.ndarray, np.ndarray]]:
        """For each source in the batch of `step`: its name, the places of its sequences in `indices`, their numbers."""
        which, numbers = self.quotas.locate(step * self.batch_size + indices)
        places = ((name, np.flatnonzero(which == i)) for i, name in enumerate(self.sources))
        return [(name, of_source, numbers[of_source]) for name, of_source in places if of_source.size]

    def sequences(self, step: int, indices: Indices) -> TokenBatch:
        """Sequences of the batch of `step`, as Loader.sequences describes."""
        found = self.locate(step, indices)
        parts = [self.sources[name].sequences(numbers) for name, _, numbers in found]
        back = np.argsort(np.concatenate([places for _, places, _ in found]))
        return jax.tree.map(lambda *of_sources: np.concatenate(of_sources)[back], *parts)

    def source_tokens(self, step: int) -> dict[str, int]:
        """Tokens of each source in the batch of `step`, padding included; empty if there is only one source."""
        if None in self.sources:
            return {}
        counts = self.quotas.counts((step + 1) * self.batch_size) - self.quotas.counts(step * self.batch_size)
        return dict(zip(self.sources, (counts * self.seq_len).tolist(), strict=True))

    def state(self, step: int) -> dict[str, Any]:
        """Identity of each dataset, as Loader.state describes."""
        return {
            "dataset" if name is None else f"mixture.{name}": source.dataset.fingerprint
            for name, source in self.sources.items()
        }

    def epoch_steps(self) -> dict[str, Fraction]:
        """Batches until each sequence of a source has come once. The next epoch follows without a gap."""
        total = int(self.quotas.shares.sum())
        return {
            name or source.config.filespec: Fraction(source.sequences_per_epoch * total, share * self.batch_size)
            for (name, source), share in zip(self.sources.items(), self.quotas.shares.tolist(), strict=True)
        }

    @property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens; None if the tokenizers of the sources differ, or one is unknown."""
        first, *others = (source.byte_lengths for source in self.sources.values())
        same = lambda x: x is not None and x.before_document == first.before_document
        is_one = first and all(same(x) and np.array_equal(x.of_token, first.of_token) for x in others)
        return first if is_one else None

    def _find_limit(self) -> tuple[int, str] | None:
        """The last step at which every source is within its max_epochs, by bisection: counts only grow."""
        bounds = [
            (source.config.max_epochs or math.inf) * source.sequences_per_epoch for source in self.sources.values()
        ]
        exceeded = lambda steps: self.quotas.counts(steps * self.batch_size) > bounds
        first = bisect.bisect_left(range(2**31), True, key=lambda steps: bool(exceeded(steps).any()))
        if first == 2**31:
            return None
        ended = [*self.sources.values()][exceeded(first).argmax()]
        return first - 1, f"{ended.dataset.path} has been read max_epochs={ended.config.max_epochs:g} times"
