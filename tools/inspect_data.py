"""Shows what is in a flat-tokens dataset, and which documents stand in a batch of a run.

    python -m tools.inspect_data filespec=data/austen_bpe.zarr
    python -m tools.inspect_data filespec=data/austen_bpe.zarr document=3
    python -m tools.inspect_data filespec=data/austen_bpe.zarr check=true
    python -m tools.inspect_data run=runs/<name> step=123

The third reads the whole dataset and compares all it says about itself. The last answers what stood in the batch of a
step at which the loss jumped. Text is decoded with the dataset's own tokenizer; without one, token ids are shown.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import fsspec
import numpy as np
from jaxtyping import Int64
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

import flat_tokens
from configuration.program import run_program
from flat_tokens.stores import open_reader
from input_loader import DataConfig, FlatTokensLoader, Loader, MixtureLoader, make_loader
from text.tokenizers import ByteTokenizer, load_definition

Places = Int64[np.ndarray, "places"]


@dataclass
class Config:
    filespec: str | None = None
    """The dataset: a local path or a URL. Null: that of `run`; with `run`, where its dataset lies now."""
    split: str = "train"
    """`train` or `validation`."""
    run: str | None = None
    """Directory of a run, whose config.yaml says what it read."""
    source: str | None = None
    """Which source of the run's mixture to show, where no step is asked for."""
    step: int | None = None
    """Show the batch of this step of `run`, at least 0."""
    rows: int = 4
    """Most rows of the batch to show, at least 1."""
    first_row: int = 0
    """The first of them, in [0, batch_size)."""
    document: int | None = None
    """Show this document, whole, in [0, num_documents)."""
    documents: int = 5
    """How many documents to show otherwise, evenly spaced over the split, at least 0."""
    characters: int = 200
    """Most characters of a document to show, at least 1; `document` is not cut."""
    sample: int = 2**22
    """Tokens and documents that the statistics look at, at least 1; the first ones of the split."""
    top: int = 15
    """How many of the most frequent tokens to list, at least 0."""
    check: bool = False
    """Read everything, and compare it with what the dataset says of itself."""


# ---- text ---------------------------------------------------------------------------------------------------------


class Decoder:
    """Turns token ids into text with the tokenizer of a dataset; into numbers if it names none."""

    def __init__(self, filespec: str, attributes: Any):
        self.description = "none known: token ids are shown"
        self._tokenizer = None
        stated = attributes.get("tokenizer") or {}
        self._is_bytes = stated.get("kind") == "bytes"
        if self._is_bytes:
            self.description = "UTF-8 bytes"
        elif stated:
            self._tokenizer = _load_tokenizer(filespec)
            self.description = f"{stated.get('kind')} {stated.get('name') or ''}".strip()

    def __call__(self, ids: np.ndarray) -> str:
        if self._is_bytes:
            text = ids[ids >= ByteTokenizer.OFFSET] - ByteTokenizer.OFFSET
            return bytes(text.astype(np.uint8)).decode(errors="replace")
        if self._tokenizer is not None:
            return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return " ".join(map(str, ids.tolist()))


def _load_tokenizer(filespec: str) -> Any:
    """The tokenizer.json of the dataset, None if it has none."""
    if "://" in filespec:
        with fsspec.open(f"{filespec.rstrip('/')}/tokenizer.json", "rt") as file:
            definition = file.read()
    else:
        path = os.path.join(filespec, "tokenizer.json")
        if not os.path.exists(path):
            return None
        with open(path, encoding="utf-8") as file:
            definition = file.read()
    return load_definition(definition)


def one_line(text: str, characters: int | None = None) -> str:
    """The text with its line ends and unprintable characters shown as such, cut to so many characters."""
    cut = text if characters is None or len(text) <= characters else text[:characters] + "…"
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "�") for c in cut)


# ---- a batch ------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The part of a document that stands in a row."""

    document: int
    """Its index in the split."""
    position: int
    """Where in the row it begins, in tokens."""
    start: int
    """Its first token's place in the document."""
    length: int
    """Tokens."""
    document_length: int
    """Tokens in the whole document."""


def find_documents(reader: flat_tokens.Reader, places: Places) -> Places:
    """The index of the document that each token, given by its place in the split, belongs to."""
    low, high = np.zeros_like(places), np.full_like(places, reader.num_documents)
    # All places at once, so that a remote dataset is asked some thirty times at most.
    while (high - low > 1).any():
        middle = (low + high) // 2
        starts, _ = reader.document_spans(middle)
        low, high = np.where(starts <= places, middle, low), np.where(starts <= places, high, middle)
    return low


def pieces_of_row(reader: flat_tokens.Reader, first: int, start: int, length: int) -> list[Piece]:
    """The documents in the tokens [start, start + length) of the split, where `first` is the document of the first."""
    pieces, place, document = [], start, first
    while place < start + length:
        (begin,), (size,) = reader.document_spans(np.array([document]))
        stop = min(int(begin + size), start + length)
        pieces.append(Piece(document, place - start, int(place - begin), int(stop - place), int(size)))
        place, document = stop, document + 1
    return pieces


class Row(NamedTuple):
    number: int
    """In the batch."""
    source: str | None
    """Its name in the mixture."""
    epoch: int
    reader: flat_tokens.Reader
    start: int
    """Its first token's place in the split."""
    length: int


def rows_of_batch(loader: Loader, step: int, rows: np.ndarray) -> list[Row]:
    """Where the rows of a batch come from.

    Raises:
        ValueError: a stream, of which nothing is known without reading it.
    """
    if isinstance(loader, FlatTokensLoader):
        found = [(None, loader, rows, step * loader.batch_size + rows)]
    elif isinstance(loader, MixtureLoader):
        which, numbers = loader.quotas.locate(step * loader.batch_size + rows)
        found = [
            (name, source, rows[which == i], numbers[which == i])
            for i, (name, source) in enumerate(loader.sources.items())
            if (which == i).any()
        ]
    else:
        raise ValueError(
            "The run reads a stream, whose batches are not known without reading it from the start. Write a dataset "
            "with tools/huggingface_to_flat_tokens to be able to look at any step."
        )
    result = []
    for name, source, places, numbers in found:
        starts, lengths = source.spans(numbers)
        epochs = numbers // source.rows_per_epoch
        for row, epoch, start, length in zip(places, epochs, starts, lengths, strict=True):
            result.append(Row(int(row), name, int(epoch), source.dataset, int(start), int(length)))
    return sorted(result, key=lambda row: row.number)


def show_batch(console: Console, config: Config, run: Any) -> None:
    data, training = _data_config(config, run), run.training
    loader = make_loader(data, config.split, training.batch_size, training.seq_len)
    if not 0 <= config.first_row < loader.batch_size:
        raise ValueError(f"first_row is {config.first_row}; the batch has rows 0 to {loader.batch_size - 1}.")
    if config.step < 0:
        raise ValueError(f"step is {config.step}; steps count from 0.")
    rows = np.arange(config.first_row, min(config.first_row + config.rows, loader.batch_size))
    console.print(f"[bold]Step {config.step:,}[/] of {config.run}: {loader.batch_size} rows of {loader.seq_len} tokens")
    if counts := loader.source_tokens(config.step):
        console.print("Tokens by source: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
    decoders: dict[str, Decoder] = {}
    filespecs = {name: source.filespec for name, source in data.mixture.items()} | {None: data.filespec}
    found = rows_of_batch(loader, config.step, rows)
    firsts: dict[int, int] = {}
    for reader in {id(row.reader): row.reader for row in found}.values():
        own = [row for row in found if row.reader is reader]
        documents = find_documents(reader, np.array([row.start for row in own]))
        firsts |= {row.number: int(document) for row, document in zip(own, documents, strict=True)}
    for row in found:
        filespec = filespecs[row.source]
        decode = decoders.setdefault(filespec, Decoder(filespec, row.reader.attributes))
        title = f"row {row.number}" + (f", {row.source}" if row.source else "")
        table = Table(title=f"{title}, epoch {row.epoch}, tokens {row.start:,} to {row.start + row.length - 1:,}")
        table.title_justify = "left"
        for name in ("at", "document", "its tokens", "of"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("text", ratio=1, overflow="fold")
        for piece in pieces_of_row(row.reader, firsts[row.number], row.start, row.length):
            ids = _read_ids(row.reader, row.start + piece.position, piece.length)
            table.add_row(
                str(piece.position),
                f"{piece.document:,}",
                f"{piece.start:,} – {piece.start + piece.length - 1:,}",
                f"{piece.document_length:,}",
                Text(one_line(decode(ids), config.characters)),
            )
        console.print(table)
    left = loader.batch_size - rows.size
    if left:
        console.print(f"{left} more rows: rows={loader.batch_size} first_row=0 shows all.", style="dim")


def _read_ids(reader: flat_tokens.Reader, start: int, length: int) -> np.ndarray:
    return flat_tokens.decode(reader.read(np.array([start]), np.array([length]))[0])[0]


# ---- a dataset ----------------------------------------------------------------------------------------------------


def show_overview(console: Console, reader: flat_tokens.Reader, decode: Decoder) -> None:
    attributes, tokens, documents = reader.attributes, reader.num_tokens, reader.num_documents
    table = Table(show_header=False, box=None, title=f"{reader.path}", title_justify="left", title_style="bold")
    table.add_row("tokens", f"{tokens:,}")
    table.add_row("documents", f"{documents:,}, {tokens / max(documents, 1):,.1f} tokens on average")
    table.add_row("largest token id", f"{reader.max_token_id:,}")
    table.add_row("tokenizer", decode.description)
    if size := attributes.get("utf8_bytes"):
        table.add_row("text", f"{size:,} bytes, {size / max(tokens, 1):.2f} a token")
    if source := attributes.get("source"):
        table.add_row("source", Text(", ".join(str(part) for part in source if part)))
    table.add_row("stored as", f"zarr v{reader.zarr_format}, {reader.file_tokens:,} tokens a file")
    console.print(table)


def show_lengths(console: Console, reader: flat_tokens.Reader, sample: int) -> None:
    count = min(sample, reader.num_documents)
    lengths = _lengths(reader, 0, count)
    of = "" if count == reader.num_documents else f" (the first {count:,})"
    quartiles = np.percentile(lengths, [0, 5, 50, 95, 100]).astype(int)
    table = Table(title=f"Document lengths{of}", title_justify="left", caption_justify="left")
    table.caption = "shortest {:,}, 5% {:,}, median {:,}, 95% {:,}, longest {:,}".format(*quartiles)
    for name, justify in (("tokens", "right"), ("documents", "right"), ("", "left"), ("of all tokens", "right")):
        table.add_column(name, justify=justify)
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bins)
    weights = np.bincount(bins, lengths) / max(lengths.sum(), 1)
    for i in range(bins.min(), counts.size):
        bar = "█" * round(30 * counts[i] / counts.max())
        table.add_row(f"{2**i:,} – {2 ** (i + 1) - 1:,}", f"{counts[i]:,}", bar, f"{weights[i]:.1%}")
    console.print(table)


def _lengths(reader: flat_tokens.Reader, start: int, stop: int) -> np.ndarray:
    return np.diff(reader.read_starts(start, stop + 1))


def show_tokens(console: Console, reader: flat_tokens.Reader, decode: Decoder, sample: int, top: int) -> None:
    encoded = np.concatenate(list(reader.blocks(sample)))
    ids, counts = np.unique_counts(flat_tokens.decode(encoded)[0])
    order = np.argsort(-counts, kind="stable")
    of = "" if encoded.size == reader.num_tokens else f" (the first {encoded.size:,})"
    p = counts / counts.sum()
    table = Table(title=f"Most frequent tokens{of}", title_justify="left", caption_justify="left")
    table.caption = (
        f"{ids.size:,} of {reader.max_token_id + 1:,} ids occur; entropy of single tokens "
        f"{-(p * np.log(p)).sum():.3f} nats"
    )
    for name, justify in (("id", "right"), ("text", "left"), ("count", "right"), ("share", "right"), ("", "left")):
        table.add_column(name, justify=justify)
    for i in order[:top]:
        bar = "█" * round(30 * counts[i] / counts[order[0]])
        text = Text(repr(decode(ids[i : i + 1])))
        table.add_row(f"{ids[i]:,}", text, f"{counts[i]:,}", f"{p[i]:.2%}", bar)
    console.print(table)


def show_documents(console: Console, reader: flat_tokens.Reader, decode: Decoder, count: int, characters: int) -> None:
    which = np.unique(np.linspace(0, reader.num_documents - 1, min(count, reader.num_documents)).astype(np.int64))
    if not which.size:
        return
    table = Table(title="Documents", title_justify="left")
    table.add_column("document", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("text", ratio=1, overflow="fold")
    for i, start, length in zip(which, *reader.document_spans(which), strict=True):
        # A token stands for one character or more, nearly always.
        ids = _read_ids(reader, int(start), min(int(length), characters + 8))
        table.add_row(f"{i:,}", f"{length:,}", Text(one_line(decode(ids), characters)))
    console.print(table)


def show_document(console: Console, reader: flat_tokens.Reader, decode: Decoder, document: int) -> None:
    if not 0 <= document < reader.num_documents:
        raise ValueError(f"document is {document}; {reader.path} has documents 0 to {reader.num_documents - 1}.")
    (start,), (length,) = reader.document_spans(np.array([document]))
    console.print(f"[bold]Document {document:,}[/]: tokens {start:,} to {start + length - 1:,}")
    console.print(Text(decode(_read_ids(reader, int(start), int(length)))))


def find_faults(reader: flat_tokens.Reader) -> Iterator[str | int]:
    """Reads a split whole: yields the tokens read so far, and a line for each kind of fault.

    Raises:
        ValueError: a file cannot be read.
    """
    place = document = largest = 0
    said: set[str] = set()
    for encoded in reader.blocks():
        ids, is_start = flat_tokens.decode(encoded)
        largest = max(largest, int(ids.max()))
        marked = place + np.flatnonzero(is_start)
        stated = reader.read_starts(document, min(document + marked.size + 1, reader.num_documents + 1))
        in_block = stated[stated < place + encoded.size].astype(np.int64)
        if "marks" not in said and not np.array_equal(in_block, marked):
            both = min(in_block.size, marked.size)
            differ = np.flatnonzero(in_block[:both] != marked[:both])
            at = document + (int(differ[0]) if differ.size else both)
            said.add("marks")
            yield f"the marks in encoded_tokens and seq_starts differ from document {at:,} on"
        if "empty" not in said and (np.diff(stated.astype(np.int64)) <= 0).any():
            said.add("empty")
            at = document + int(np.flatnonzero(np.diff(stated.astype(np.int64)) <= 0)[0])
            yield f"document {at:,} is empty, or seq_starts decreases there"
        document += marked.size
        place += encoded.size
        yield place
    if document != reader.num_documents:
        yield f"{document:,} documents are marked in encoded_tokens, seq_starts has {reader.num_documents:,}"
    if largest != reader.max_token_id:
        yield f"the largest token id is {largest:,}, the attribute max_token_id says {reader.max_token_id:,}"


def check(console: Console, reader: flat_tokens.Reader) -> None:
    """Raises ValueError if the split is not what it says of itself."""
    faults = []
    steps = (found for found in find_faults(reader) if isinstance(found, int) or faults.append(found))
    total = -(-reader.num_tokens // 2**20)
    for _ in track(steps, description="reading", total=total, console=console, transient=True):
        pass
    if faults:
        raise ValueError(f"{reader.path} is damaged: {'; '.join(faults)}. Write or copy the dataset again.")
    console.print(
        f"{reader.path}: all {reader.num_tokens:,} tokens read; marks, starts and attributes agree.", soft_wrap=True
    )


# ---- main ---------------------------------------------------------------------------------------------------------


def _data_config(config: Config, run: Any) -> DataConfig:
    data: DataConfig = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), run.data))
    if config.filespec is not None:
        if data.filespec is None:
            raise ValueError("Give either run or filespec: both go together only if the run reads a single dataset.")
        data.filespec = config.filespec
    return data


def _read_run(directory: str) -> Any:
    path = os.path.join(directory, "config.yaml")
    if not os.path.exists(path):
        raise ValueError(f"There is no {path}: `run` is a run's directory, for example runs/<name>.")
    return OmegaConf.load(path)


def _filespec(config: Config, run: Any) -> str:
    if run is None:
        if config.filespec is None:
            raise ValueError("Give filespec=<dataset>, or run=<directory of a run>.")
        return config.filespec
    data = _data_config(config, run)
    if data.stream is not None:
        raise ValueError("The run reads a stream, not a dataset: there is nothing to open.")
    if not data.mixture:
        return data.filespec
    if config.source not in data.mixture:
        raise ValueError(f"source is {config.source!r}; choose one of the run's mixture: {', '.join(data.mixture)}.")
    return data.mixture[config.source].filespec


def run(config: Config, console: Console | None = None) -> None:
    """Prints what `config` asks for.

    Raises:
        ValueError: a setting out of range or contradicting another, or a dataset that is missing or damaged.
    """
    console = console or Console()
    bounds = {"rows": 1, "documents": 0, "characters": 1, "sample": 1, "top": 0}
    for name, low in bounds.items():
        if getattr(config, name) < low:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {low}.")
    settings = None if config.run is None else _read_run(config.run)
    if config.step is not None:
        if settings is None:
            raise ValueError(f"step is {config.step}, but batches belong to a run: give run=<directory of a run>.")
        show_batch(console, config, settings)
        return
    filespec = _filespec(config, settings)
    reader = open_reader(filespec, config.split)
    decode = Decoder(filespec, reader.attributes)
    if config.check:
        check(console, reader)
    elif config.document is not None:
        show_document(console, reader, decode, config.document)
    else:
        show_overview(console, reader, decode)
        console.print()
        show_lengths(console, reader, config.sample)
        console.print()
        show_tokens(console, reader, decode, config.sample, config.top)
        console.print()
        show_documents(console, reader, decode, config.documents, config.characters)


def main() -> None:
    run_program("inspect_data", Config, run)


if __name__ == "__main__":
    main()
