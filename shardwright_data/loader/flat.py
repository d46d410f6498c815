"""Batches of flat-tokens datasets, one or several mixed: a pure function of datasets, weights, seed and step."""

import functools
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.flat_tokens.reader import CACHE_BYTES
from shardwright_data.loader.batches import Loader, TokenBatch
from shardwright_data.loader.config import DataConfig, SourceConfig
from shardwright_data.loader.order import BLOCK, PERIOD, Indices, Quotas, permute
from shardwright_data.text.tokenizers import ByteLengths, byte_lengths_of_datasets


class Source:
    """The sequences of one dataset, numbered over all epochs.

    Args:
        source: the dataset.
        data: how it is read.
        split: of the dataset.
        seq_len: tokens in a sequence.
        options: those of its flat_tokens.Reader.

    Raises:
        ValueError: the dataset or an input is missing, damaged or too short.
    """

    def __init__(self, source: SourceConfig, data: DataConfig, split: str, seq_len: int, **options: Any):
        self.config, self._data, self._seq_len = source, data, seq_len
        self.dataset = flat_tokens.Reader(source.filespec, split, **options)
        tokens = self.dataset.num_tokens
        self.sequences_per_epoch = tokens // seq_len if data.sequence_packing else self.dataset.num_documents
        if self.sequences_per_epoch == 0:
            raise ValueError(
                f"{self.dataset.path} is too short: {tokens} tokens do not fill one sequence of seq_len {seq_len}. "
                "Use a shorter seq_len or a larger dataset."
            )

    def spans(self, numbers: Indices) -> tuple[Indices, Indices]:
        """`(starts, lengths)`, in tokens of the dataset, of sequences given by their numbers."""
        epoch, index = np.divmod(numbers, self.sequences_per_epoch)
        if self._data.shuffle:
            index = permute(index, self.sequences_per_epoch, self._data.seed, epoch)
        if self._data.sequence_packing:
            return index * self._seq_len, np.full_like(index, self._seq_len)
        starts, lengths = self.dataset.document_spans(index)
        return starts, np.minimum(lengths, self._seq_len)

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
        named = config.mixture or {None: SourceConfig(config.filespec)}
        self.quotas = Quotas([source.weight for source in named.values()], config.seed)
        options = {"cache_bytes": CACHE_BYTES // len(named), "inputs": self.inputs}
        self.sources: dict[str | None, Source] = {}
        """By their names in the mixture; None for a single dataset."""
        for (name, source), share in zip(named.items(), self.quotas.shares.tolist(), strict=True):
            if share < 1:
                raise ValueError(
                    f"mixture.{name}.weight is {source.weight}: less than one sequence in {BLOCK * PERIOD} would "
                    "come from it. Give it a larger weight, or leave it out."
                )
            self.sources[name] = Source(source, config, self.split, self.seq_len, **options)
            path, largest = self.sources[name].dataset.path, self.sources[name].dataset.max_token_id
            if self.vocab_size is not None and largest >= self.vocab_size:
                raise ValueError(
                    f"{path} holds token ids up to {largest}, the model's vocabulary has {self.vocab_size}. Set the "
                    f"vocabulary to {largest + 1} or more, or choose a dataset made with the model's tokenizer."
                )
        self.num_tokens = sum(source.dataset.num_tokens for source in self.sources.values())

    def locate(self, step: int, indices: Indices) -> list[tuple[str | None, np.ndarray, np.ndarray]]:
        """For each source in the batch of `step`: its name, the places of its sequences in `indices`, their numbers."""
        which, numbers = self.quotas.locate(step * self.batch_size + indices)
        found = []
        for i, name in enumerate(self.sources):
            places = np.flatnonzero(which == i)
            if places.size:
                found.append((name, places, numbers[places]))
        return found

    def sequences(self, step: int, indices: Indices) -> TokenBatch:
        """Sequences of the batch of `step`, as Loader.sequences describes."""
        found = self.locate(step, indices)
        parts = [self.sources[name].sequences(numbers) for name, _, numbers in found]
        back = np.argsort(np.concatenate([places for _, places, _ in found]))
        return jax.tree.map(lambda *of_sources: np.concatenate(of_sources)[back], *parts)

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

    @functools.cached_property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens; None if the tokenizers of the sources differ, or one is unknown."""
        return byte_lengths_of_datasets(*(source.dataset for source in self.sources.values()))
