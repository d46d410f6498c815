"""Shows what is in a flat-tokens dataset, and which documents are in a batch of a run.

    python -m tools.inspect_data filespec=data/austen_bpe.zarr
    python -m tools.inspect_data filespec=data/austen_bpe.zarr document=3
    python -m tools.inspect_data filespec=data/austen_bpe.zarr check=true
    python -m tools.inspect_data run=runs/<name> step=123

The third reads the whole dataset and compares its parts. The last shows the batch of a step, for example one at which
the loss jumped. Text is decoded with the dataset's own tokenizer. Without one, token ids are shown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from shardwright.run.files import read_config
from shardwright.run.resuming import literal
from shardwright.settings.composing import wrong_setting
from shardwright.settings.program import run_program
from shardwright.settings.words import for_console
from shardwright_data import flat_tokens
from shardwright_data.checks import at_least_1, check_ranges, within
from shardwright_data.flat_tokens import Reader
from shardwright_data.foreign import check_types, one_line, shown
from shardwright_data.loader import DataConfig, batch_of, make_loader
from shardwright_data.loader.origins import pieces_of, sequences_of_batch
from shardwright_data.text.codec import TextCodec, codec_of_attributes, tokenizer_of_attributes

SAMPLE = 2**22
"""Number of documents whose lengths are read."""


@dataclass
class Settings:
    """The settings of the program."""

    filespec: str | None = None
    """The dataset: a local path or a URL. With `run`: where its dataset is now; null for where it was."""
    split: str = "train"
    """`train` or `validation`."""
    run: str | None = None
    """Directory of a run, whose config.yaml names its data: shows the batch of `step`."""
    step: int | None = within(0, 2**31, None)
    """A step of the run, at least 0."""
    sequences: int = at_least_1(4)
    """Largest number of sequences of the batch to show, at least 1."""
    document: int | None = within(0, 2**50, None)
    """Show this document, whole, in [0, num_documents)."""
    documents: int = within(0, 2**20, 5)
    """Number of documents to show otherwise, evenly spaced over the split, at least 0."""
    characters: int = at_least_1(200)
    """Most characters of a document to show, at least 1; `document` is not cut."""
    check: bool = False
    """Read everything, and compare the parts of the dataset."""


# ---- text ---------------------------------------------------------------------------------------------------------


def open_codec(filespec: str, attributes: Mapping[str, Any]) -> TextCodec:
    """The codec of a dataset; it shows token ids if the dataset names no tokenizer, or has lost it."""
    try:
        return codec_of_attributes(filespec, attributes)
    except FileNotFoundError:
        return TextCodec()


def _read_text(reader: flat_tokens.Reader, codec: TextCodec, start: int, length: int) -> str:
    (encoded,) = reader.read(np.array([start]), np.array([length]))
    return codec.decode(flat_tokens.decode(encoded)[0].tolist())


# ---- a batch ------------------------------------------------------------------------------------------------------


def show_batch(console: Console, config: Settings) -> None:
    """Prints a table for each sequence of a batch: the documents in it.

    Raises:
        ValueError: the configuration is not that of a run, or the run reads a stream.
    """
    data, training = read_run(config)
    loader = make_loader(data, config.split, training["batch_size"], training["seq_len"])
    batch = batch_of(config.step, data.skip_steps)
    instead = f", batch {batch:,} by data.skip_steps" if batch != config.step else ""
    size = f"{loader.batch_size} sequences of {loader.seq_len} tokens"
    console.print(f"[bold]Step {config.step:,}[/] of {config.run}{instead}: {size}")
    if counts := loader.source_tokens(batch):
        console.print(Text(shown("Tokens by source: " + ", ".join(f"{name} {n:,}" for name, n in counts.items()))))
    indices = np.arange(min(config.sequences, loader.batch_size))
    for sequence in sequences_of_batch(loader, batch, indices):
        reader, first = sequence.reader, sequence.start
        codec = open_codec(reader.filespec, reader.attributes)
        title = f"sequence {sequence.number}" + (f", {sequence.source}" if sequence.source else "")
        title += f", epoch {sequence.epoch}, tokens {first:,} to {first + sequence.length - 1:,}"
        table = Table(title=Text(shown(title)), title_justify="left")
        for name in ("at", "document", "its tokens", "of"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("text", ratio=1, overflow="fold")
        for piece in pieces_of(sequence):
            text = _read_text(reader, codec, first + piece.position, piece.length)
            tokens = f"{piece.start:,} – {piece.start + piece.length - 1:,}"
            cells = str(piece.position), f"{piece.document:,}", tokens, f"{piece.document_length:,}"
            table.add_row(*cells, Text(one_line(text, config.characters)))
        console.print(table)
    if left := loader.batch_size - indices.size:
        console.print(f"{left} more sequences: sequences={loader.batch_size} shows all.", style="dim")


# ---- a dataset ----------------------------------------------------------------------------------------------------


def show_overview(console: Console, reader: flat_tokens.Reader) -> None:
    """Prints the sizes of a split, and how it was made."""
    attributes, tokens, documents = reader.attributes, reader.num_tokens, reader.num_documents
    check_types(reader.path, attributes, {"utf8_bytes?": int | None, "source?": list | None}, "Copy the dataset again.")
    about = tokenizer_of_attributes(reader.path, attributes)
    tokenizer = f"{about['kind']} {about.get('name') or ''}".strip() if about else "none known: token ids are shown"
    table = Table(show_header=False, box=None, title_justify="left")
    table.title = Text(shown(reader.path), style="bold")
    table.add_row("tokens", f"{tokens:,}")
    table.add_row("documents", f"{documents:,}, {tokens / max(documents, 1):,.1f} tokens on average")
    if documents:
        lengths = np.diff(reader.read_starts(0, min(documents, SAMPLE) + 1))
        of = f", of the first {SAMPLE:,}" * (documents > SAMPLE)
        words = "{:,} to {:,} tokens, 5% below {:,}, median {:,}, 95% below {:,}"
        table.add_row("lengths", words.format(*np.percentile(lengths, [0, 100, 5, 50, 95]).astype(int)) + of)
    table.add_row("largest token id", f"{reader.max_token_id:,}")
    table.add_row("tokenizer", Text(shown(tokenizer)))
    if size := attributes.get("utf8_bytes"):
        table.add_row("text", f"{size:,} bytes, {size / max(tokens, 1):.2f} a token")
    if source := attributes.get("source"):
        table.add_row("source", Text(shown(", ".join(str(part) for part in source if part))))
    table.add_row("stored as", f"zarr v{reader.zarr_format}")
    console.print(table)


def show_documents(console: Console, reader: flat_tokens.Reader, codec: TextCodec, count: int, characters: int) -> None:
    """Prints the beginnings of `count` documents, evenly spaced over the split."""
    which = np.unique(np.linspace(0, reader.num_documents - 1, min(count, reader.num_documents)).astype(np.int64))
    if not which.size:
        return
    table = Table(title="Documents", title_justify="left")
    table.add_column("document", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("text", ratio=1, overflow="fold")
    for i, start, length in zip(which, *reader.document_spans(which), strict=True):
        # A token stands for one character or more, nearly always.
        text = _read_text(reader, codec, int(start), min(int(length), characters + 8))
        table.add_row(f"{i:,}", f"{length:,}", Text(one_line(text, characters)))
    console.print(table)


def show_document(console: Console, reader: flat_tokens.Reader, codec: TextCodec, document: int) -> None:
    """Prints a document, whole. Raises ValueError if there is none of that index."""
    if not 0 <= document < reader.num_documents:
        raise ValueError(
            f"document is {document}; {reader.path} has documents 0 to {reader.num_documents - 1}. Choose one."
        )
    (start,), (length,) = reader.document_spans(np.array([document]))
    console.print(f"[bold]Document {document:,}[/]: tokens {start:,} to {start + length - 1:,}")
    console.print(Text(shown(_read_text(reader, codec, int(start), int(length)))))


def check(console: Console, reader: flat_tokens.Reader, blocks: Iterable[np.ndarray]) -> None:
    """Compares all parts of a split.

    Args:
        console: shows the result.
        reader: of the split.
        blocks: all stored tokens, in order.

    Raises:
        ValueError: a file cannot be read, or parts contradict each other.
    """
    place = document = largest = 0
    for encoded in blocks:
        ids, is_start = flat_tokens.decode(encoded)
        largest = max(largest, int(ids.max()))
        marked = place + np.flatnonzero(is_start)
        place += encoded.size
        stated = reader.read_starts(document, min(document + marked.size, reader.num_documents) + 1).astype(np.int64)
        stated = stated[stated < place]
        if not np.array_equal(stated, marked):
            both = min(stated.size, marked.size)
            at = document + np.append(np.flatnonzero(stated[:both] != marked[:both]), both)[0]
            differ = f"the marks in encoded_tokens and seq_starts differ from document {at:,} on"
            raise ValueError(f"{reader.path} is damaged: {differ}. Write or copy the dataset again.")
        document += marked.size
    if document != reader.num_documents:
        differ = f"{document:,} documents are marked in encoded_tokens, seq_starts has {reader.num_documents:,}"
        raise ValueError(f"{reader.path} is damaged: {differ}. Write or copy the dataset again.")
    if largest != reader.max_token_id:
        differ = f"the largest token id is {largest:,}, the attribute max_token_id says {reader.max_token_id:,}"
        raise ValueError(f"{reader.path} is damaged: {differ}. Write or copy the dataset again.")
    text = f"{reader.path}: all {reader.num_tokens:,} tokens read; marks, starts and attributes agree."
    console.print(for_console(text, console), soft_wrap=True)


# ---- main ---------------------------------------------------------------------------------------------------------


def read_run(config: Settings) -> tuple[DataConfig, dict[str, Any]]:
    """The data section and the training section of the configuration of a run."""
    path = Path(config.run, "config.yaml")
    if not path.exists():
        raise ValueError(f"There is no {path}: `run` is a run's directory, for example runs/<name>.")
    found = literal(read_config(path))
    try:
        data: DataConfig = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), found.get("data", {})))
    except OmegaConfBaseException as error:
        raise ValueError(f"{config.run}: {wrong_setting(DataConfig, error, prefix='data.')}") from error
    if config.filespec is not None:
        if data.filespec is None:
            raise ValueError("Give either run or filespec: both go together only if the run reads a single dataset.")
        data.filespec = config.filespec
    check_types(str(path), found, {"training": {"batch_size": int, "seq_len": int}}, "Correct it.")
    return data, found["training"]


def run(config: Settings, console: Console | None = None) -> None:
    """Shows a batch, a document or a dataset, as the settings say.

    Raises:
        ValueError: a setting is out of range or contradicts another, or a dataset is missing or damaged.
    """
    console = console or Console()
    check_ranges("", config)
    if (config.run is None) != (config.step is None) or not (config.run or config.filespec):
        raise ValueError("Give filespec=<dataset>, or run=<directory of a run> step=<one of its steps>.")
    if config.run is not None:
        show_batch(console, config)
        return
    reader = Reader(config.filespec, config.split)
    codec = open_codec(config.filespec, reader.attributes)
    if config.check:
        total = -(-reader.num_tokens // 2**20)
        check(console, reader, track(reader.blocks(), "reading", total, console=console, transient=True))
    elif config.document is not None:
        show_document(console, reader, codec, config.document)
    else:
        show_overview(console, reader)
        console.print()
        show_documents(console, reader, codec, config.documents, config.characters)


if __name__ == "__main__":
    run_program("inspect_data", Settings, run)
