"""Tokenizes batches on the fly from a Hugging Face dataset or text files, for quick trials.

Unlike a flat-tokens dataset, a stream is read sequentially: only steps that follow a known state
can be read. Such a state is small, because it is only a position in the stream.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shardwright.data.loader.batches import Loader, TokenBatch
from shardwright.data.loader.config import DataConfig, StreamConfig
from shardwright.data.loader.order import Indices, permute
from shardwright.data.text import sources
from shardwright.data.text.files import Found, find_files
from shardwright.data.text.tokenizers import ByteLengths, Tokenizer, byte_lengths, open_tokenizer


class _Place(NamedTuple):
    """A position in the stream: after `documents` documents of a block, and `tokens` tokens of the
    next document.
    """

    epoch: int = 0
    block: int = 0
    """Blocks of the epoch before this one."""
    source: dict[str, Any] | None = None
    """State of the `datasets` library at the start of the block; None for the start of the
    epoch."""
    documents: int = 0
    tokens: int = 0


def _check_overlap(stream: StreamConfig, validation: Found) -> None:
    """Raises ValueError if a stream trains on its validation, as far as its files for training are
    on this machine.
    """
    shared = [stream.train] if stream.dataset and stream.train == stream.validation else []
    with contextlib.suppress(ValueError):  # evaluation does without them
        shared += find_files(stream.train_files, "train").shared_with(validation)
    if shared:
        raise ValueError(
            f"data.stream trains and validates on {', '.join(shared[:3])}. Choose other data, or "
            f"set training.eval_batches=0."
        )


class StreamLoader(Loader):
    """Loads batches of one split of a stream.

    Every host reads the whole stream and loads its own sequences.

    `load` and `sequences` return steps in order, from the step of `state` or from 0. Skipping steps
    still reads them. Going back to step 0, or to a step that was read, rereads the stream from
    there.

    Args:
        config: the stream, and how to read it.
        state: what `state(step)` returned in another run of the same config; None for the
            beginning.
        batches: arguments of Loader.

    Raises:
        ValueError: a setting is out of range or missing, a dataset or tokenizer is missing, token
            ids exceed the vocabulary, a package is not installed, or the files differ from those of
            the state.
    """

    tokenizer: Tokenizer
    parallel_loads = 1
    num_tokens = None

    def __init__(
        self, config: DataConfig, state: Mapping[str, Any] | None, *batches: Any, **options: Any
    ):
        super().__init__(*batches, **options)
        for reader, names in {"model": self.inputs, "loss": self.loss_inputs}.items():
            if not names:
                continue
            raise ValueError(
                f"data.stream is set, but the {reader} also reads {', '.join(names)}, which "
                "streams do not have. Write a flat-tokens dataset with it (docs/formats.md) and "
                "set data.filespec."
            )
        stream: Any = config.stream
        self._config, self._stream = config, stream
        files = {"train": stream.train_files, "validation": stream.validation_files}[self.split]
        hub = stream.dataset, stream.dataset_config, getattr(stream, self.split)
        separator = {"separator": stream.text_separator}
        self._name, self._data, found = sources.open_text(
            "data.stream", *hub, files, stream.text_field, **separator
        )
        self.files = found.described(self.split)
        if self.split == "validation":
            _check_overlap(stream, found)
        self.tokenizer = open_tokenizer(stream.tokenizer_kind, stream.tokenizer, stream.end_token)
        size = self.tokenizer.vocab_size
        if self.vocab_size is not None and size > self.vocab_size:
            raise ValueError(
                f"The tokenizer of the stream {self._name} has {size} ids, more than the model's "
                f"vocabulary of {self.vocab_size}. Set the vocabulary to {size}, or choose another "
                "tokenizer."
            )
        self._beginning = self._data.state_dict()
        place = dict(state or {})
        local = [path for path in found.paths if files and "://" not in path]
        sizes = [(os.path.basename(path), os.path.getsize(path)) for path in local]
        self._files = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:20]
        if place.pop("files", self._files) != self._files:
            raise ValueError(
                f"The files of the stream {self._name} differ from the checkpoint's, by name or "
                "size, so it cannot resume at its position. Resume with the same files, or start "
                "another run."
            )
        first = place.pop("step", 0)
        self._places = {0: _Place(), first: _Place(**place)}
        """Position where the batch of each step begins, as far as known."""
        self._last: tuple[int, TokenBatch | None] = first, None
        """The last step read and its batch; or the next step, with None."""
        self._steps = self._read_from(first)

    def sequences(self, step: int, indices: Indices) -> TokenBatch:
        """Reads sequences of the batch of `step`, as Loader.sequences describes."""
        return jax.tree.map(lambda x: x[indices], self._batch(step))

    def rows(self, step: int) -> int:
        """Counts the sequences in the batch of `step`, as Loader.rows describes.

        Raises as `sequences`.
        """
        return int(self._batch(step).loss_mask.any(axis=1).sum()) if self.once else self.batch_size

    def _batch(self, step: int) -> TokenBatch:
        at, batch = self._last
        if step < at:
            self._steps = self._read_from(self.state(step)["step"])
            at = step
            batch = None
        while batch is None or at < step:  # also reads skipped batches
            try:
                at, batch = next(self._steps)
            except Exception:  # such as a bad row or a network failure; the caller may retry
                self._steps = self._read_from(at + (batch is not None))
                raise
        self._last = at, batch
        return batch

    def state(self, step: int) -> dict[str, Any]:
        """Returns the state before the batch of `step`, which is known once the previous batch has
        been read.
        """
        if step not in self._places:
            raise ValueError(
                f"The stream {self._name} has no state for step {step}, only for 0, "
                f"{max([*self._places])} and some in between, because streams are read in order. "
                f"Resume from a checkpoint that has its state."
            )
        return {"step": step, "files": self._files} | self._places[step]._asdict()

    @functools.cached_property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of each token; None if unknown."""
        return byte_lengths(self.tokenizer)

    def _read_from(self, first: int) -> Iterator[tuple[int, TokenBatch]]:
        """Yields each step and its batch, from a step whose position is known.

        Records the position after it.

        Batches after the end of a split that is read once are empty.
        """
        documents = self._tokenize(self._places[first])
        ids = np.zeros(0, np.uint32)
        ended = _Place(1), _Place(1), ids
        offset = 0
        shape = (self.batch_size, self.seq_len)
        # Packed: a batch is one run of consecutive documents. Otherwise each sequence is the start
        # of a document.
        packed = self._config.sequence_packing
        stretch = self.batch_size * self.seq_len if packed else self.seq_len
        for step in itertools.count(first):
            batch = TokenBatch(
                *(np.zeros(shape, dtype) for dtype in (np.uint32, np.bool_, np.bool_))
            )
            for targets, is_start, mask in zip(
                *(x.reshape(-1, stretch) for x in jax.tree.leaves(batch)), strict=True
            ):
                done = 0
                while done < stretch:
                    if offset == ids.size:
                        here, after, ids = next(documents, ended)
                        offset = here.tokens
                        if not ids.size:
                            place = here
                            break
                    count = min(ids.size - offset, stretch - done)
                    targets[done : done + count] = ids[offset : offset + count]
                    is_start[done] = offset == 0
                    mask[done : done + count] = True
                    done, offset = done + count, offset + count
                    place = here._replace(tokens=offset)
                    if not packed:
                        offset = ids.size
                        place = after
                        break
            self._places[step + 1] = place
            yield step, batch

    def _tokenize(self, place: _Place) -> Iterator[tuple[_Place, _Place, np.ndarray]]:
        """Yields each document with tokens from `place` on: its position, the position after it,
        and its ids.
        """
        # Only the first document may start in the middle.
        tokens = place.tokens
        for block, texts, after_block in self._blocks(place):
            if self._config.shuffle:
                order = np.arange(len(texts))
                key = np.full_like(order, block.epoch << 32 | block.block)
                texts = [texts[i] for i in permute(order, len(texts), self._config.seed, key)]
            encoded = self.tokenizer.encode(texts[block.documents :])
            for i, ids in enumerate(
                np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1]), block.documents
            ):
                here = block._replace(documents=i, tokens=tokens)
                after = (
                    block._replace(documents=i + 1, tokens=0) if i + 1 < len(texts) else after_block
                )
                tokens = 0
                if ids.size:
                    yield here, after, ids

    def _blocks(self, place: _Place) -> Iterator[tuple[_Place, list[str], _Place]]:
        """Yields the blocks of all epochs from `place` on: position, documents, and the position
        after it.
        """
        while not (self.once and place.epoch):
            self._data.load_state_dict(self._beginning if place.source is None else place.source)
            texts: list[str] = []
            field = self._stream.text_field
            for text in sources.documents(f"The stream {self._name}", self._data, field):
                if isinstance(text, ValueError):
                    raise ValueError(f"{text}. {sources.CORRECT}")
                # Skip documents without text.
                if text:
                    texts.append(text)
                if len(texts) == self._stream.shuffle_block:
                    after = _Place(place.epoch, place.block + 1, self._data.state_dict())
                    yield place, texts, after
                    place = after
                    texts = []
            after = _Place(place.epoch + 1)
            if texts:
                yield place, texts, after
            elif place == _Place(place.epoch):
                raise ValueError(
                    f"The stream {self._name} has no text. Check data.stream.text_field and the "
                    "source."
                )
            place = after
