"""Batches of one flat-tokens dataset: a pure function of dataset, seed and step."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.checks import check_ranges, within
from shardwright_data.flat_tokens import open_reader
from shardwright_data.loader import shuffle
from shardwright_data.loader.batches import Limit, Loader, Sequences
from shardwright_data.loader.shuffle import Indices
from shardwright_data.text.byte_lengths import ByteLengths
from shardwright_data.text.codec import byte_lengths_of_dataset

CHECKED_DOCUMENTS = 2**16
"""Documents at either end of a split whose lengths are read when it is opened to be read unpacked."""
SAMPLED_TOKENS = 2**22
"""Tokens at the beginning of a split that `unigram_entropy` counts."""


@dataclass(kw_only=True)
class ReadingConfig:
    """Settings of how data is read: order, packing, repetitions, memory."""

    seed: int = within(0, 2**63, 0)
    """Selects the order of the sequences, in [0, 2**63). Other seeds and other epochs have unrelated orders."""
    shuffle: bool = True
    """True: sequences come in random order, another one in each epoch. False: in the order of the dataset."""
    sequence_packing: bool = True
    """True: sequences are consecutive windows of seq_len tokens, whatever documents they hold; the last
    num_tokens % seq_len tokens are left out. False: each sequence is one document, cut or padded to seq_len; a run says
    at its start how many tokens it never sees because of that."""
    max_epochs: float | None = None
    """Bound on the epochs of a run, above 0: a longer run is an error at its start. Null for no bound."""
    cache_bytes: int = within(0, 2**50, 2**28)
    """Host memory for decoded chunks, in bytes, at least 0; divided evenly among the sources of a mixture."""


@dataclass
class FlatTokensConfig(ReadingConfig):
    """A flat-tokens dataset (docs/flat-tokens.md) and the order in which it is read."""

    filespec: str
    """Directory of the dataset: a local path, or a URL (`gs://`, `s3://`, `http://`)."""


class FlatTokensLoader(Loader):
    """Batches of one split of a flat-tokens dataset.

    Any step can be read at any time, from several threads, at the same cost.

    Args:
        config: the dataset and its order.
        batches: arguments of Loader.
        options: the same, by name.

    Raises:
        ValueError: a setting is out of range, the dataset or an input is missing, damaged or too short, token ids
            exceed the vocabulary, or the mesh or the microbatches do not divide a batch.
    """

    parallel_loads = 8

    def __init__(self, config: FlatTokensConfig, *batches: Any, **options: Any):
        super().__init__(*batches, **options)
        check_ranges("data", config)
        self.config = config
        self.dataset = open_reader(config.filespec, self.split, cache_bytes=config.cache_bytes, inputs=self.inputs)
        path, largest = self.dataset.path, self.dataset.max_token_id
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"{path} holds token ids up to {largest}, the model's vocabulary has {self.vocab_size}. "
                f"Set the vocabulary to {largest + 1} or more, or choose a dataset made with the model's tokenizer."
            )
        self.num_tokens = self.dataset.num_tokens
        windows, documents = self.num_tokens // self.seq_len, self.dataset.num_documents
        self.sequences_per_epoch = windows if config.sequence_packing else documents
        if self.sequences_per_epoch == 0:
            raise ValueError(
                f"{path} is too short: {self.num_tokens} tokens do not fill one sequence of seq_len {self.seq_len}. "
                "Use a shorter seq_len or a larger dataset."
            )
        self.unseen = {}
        if not config.sequence_packing:
            firsts = {0, max(0, self.sequences_per_epoch - CHECKED_DOCUMENTS)}
            numbers = [np.arange(first, min(first + CHECKED_DOCUMENTS, documents)) for first in sorted(firsts)]
            lengths = np.concatenate([self._document_spans(part)[1] for part in numbers])
            self.unseen = {config.filespec: float(np.maximum(lengths - self.seq_len, 0).sum() / lengths.sum())}
        if (most := self.most_sequences()) is not None:
            self.limit = Limit(most // self.batch_size, f"{path} has been read max_epochs={config.max_epochs:g} times")

    def state(self, step: int) -> dict[str, Any]:
        """Identity of the dataset, as Loader.state describes."""
        self._check_step(step)
        return {"dataset": self.dataset.fingerprint}

    @property
    def steps_per_epoch(self) -> float:
        """Batches in an epoch. The next epoch follows without a gap, within a batch too."""
        return self.sequences_per_epoch / self.batch_size

    def epoch_steps(self) -> dict[str, float]:
        """Batches in an epoch, by the dataset's path."""
        return {self.config.filespec: self.steps_per_epoch}

    def most_sequences(self) -> int | None:
        """Sequences in max_epochs epochs, None if there is no such bound."""
        epochs = self.config.max_epochs
        if epochs is not None and not 0 < epochs < 2**31:
            raise ValueError(f"max_epochs is {epochs} for {self.config.filespec}; it must be above 0, or null.")
        return None if epochs is None else math.floor(epochs * self.sequences_per_epoch)

    def sequences(self, step: int, indices: Indices) -> Sequences:
        """Sequences of the batch of `step`, as Loader.sequences describes."""
        self._check_step(step)
        return self.begin(step * self.batch_size + indices)()

    def spans(self, numbers: Indices) -> tuple[Indices, Indices]:
        """`(starts, lengths)`, in tokens of the dataset, of sequences given by their numbers over all epochs."""
        epoch, index = np.divmod(numbers, self.sequences_per_epoch)
        if self.config.shuffle:
            index = shuffle.permute(index, self.sequences_per_epoch, self.config.seed, epoch)
        if self.config.sequence_packing:
            return index * self.seq_len, np.full_like(index, self.seq_len)
        starts, lengths = self._document_spans(index)
        return starts, np.minimum(lengths, self.seq_len)

    def _document_spans(self, documents: Indices) -> tuple[Indices, Indices]:
        if (documents[1:] == documents[:-1] + 1).all():
            ends = self.dataset.read_starts(int(documents[0]), int(documents[-1]) + 2).astype(np.int64)
            starts, lengths = ends[:-1], np.diff(ends)
        else:
            starts, lengths = self.dataset.document_spans(documents)
        if lengths.min() < 1:
            raise ValueError(
                f"{self.dataset.path}: document {documents[lengths.argmin()]} is empty. Write the dataset again "
                "without it, or set sequence_packing=true, which does not read seq_starts."
            )
        return starts, lengths

    def begin(self, numbers: Indices) -> Callable[[], Sequences]:
        """Begins to read sequences, given by their numbers over all epochs; the function returned waits for them."""
        starts, lengths = self.spans(numbers)
        reading = self.dataset.begin_read(starts, lengths)
        reading_inputs = [self.dataset.begin_read(starts, lengths, name) for name in self.dataset.inputs]

        def finish() -> Sequences:
            if self.config.sequence_packing:
                encoded = reading().reshape(-1, self.seq_len)
                loss_mask = np.ones(encoded.shape, np.bool_)
            else:
                loss_mask = np.arange(self.seq_len) < lengths[:, None]
                encoded = np.zeros(loss_mask.shape, np.uint32)
                encoded[loss_mask] = reading()
            targets, is_seq_start = flat_tokens.decode(encoded)
            if targets.max() > self.dataset.max_token_id:
                raise ValueError(
                    f"{self.dataset.path} holds the token id {targets.max()}, but its attribute max_token_id is "
                    f"{self.dataset.max_token_id}. Write or copy the dataset again."
                )
            inputs = np.zeros((*loss_mask.shape, len(reading_inputs)), np.uint32)
            for i, wait in enumerate(reading_inputs):
                inputs[loss_mask, i] = wait()
            return Sequences(targets, is_seq_start, loss_mask, inputs)

        return finish

    @functools.cached_property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens, from the dataset's tokenizer; None if unknown."""
        found = byte_lengths_of_dataset(self.config.filespec, self.dataset.attributes)
        return found if found is not None and self.dataset.max_token_id < found.of_token.size else None

    def unigram_entropy(self) -> float:
        """Entropy of single tokens in nats, as Loader.unigram_entropy describes."""
        return flat_tokens.unigram_entropy(self.sample(SAMPLED_TOKENS))

    def sample(self, max_tokens: int) -> np.ndarray:
        """The first `max_tokens` token ids of the split."""
        return flat_tokens.decode(np.concatenate(list(self.dataset.blocks(max_tokens))))[0]
