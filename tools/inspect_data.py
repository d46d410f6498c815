"""Shows what is in a flat-tokens dataset.

    python -m tools.inspect_data filespec=data/austen_bpe.zarr
    python -m tools.inspect_data filespec=data/austen_bpe.zarr document=3

Text is decoded with the dataset's own tokenizer. Without one, token ids are shown. The documents in a batch of a run
are shown by tools.replay.
"""

from dataclasses import dataclass

import numpy as np
from omegaconf import MISSING
from rich.console import Console
from rich.text import Text

from shardwright.settings.program import run_program
from shardwright.settings.screen import print_table
from shardwright_data import flat_tokens
from shardwright_data.checks import check_ranges, within
from shardwright_data.flat_tokens import Reader
from shardwright_data.foreign import check_types, one_line, shown
from shardwright_data.text.tokenizers import Tokenizer, tokenizer_of_dataset

SAMPLE = 2**22
"""Number of documents whose lengths are read."""
CHARACTERS = 200
"""Most characters of a document that are shown, where several are."""


@dataclass
class Settings:
    """The settings of the program."""

    filespec: str = MISSING
    """The dataset: a local path or a URL."""
    split: str = "train"
    """`train` or `validation`."""
    document: int | None = within(0, 2**50, None)
    """Show this document, whole, in [0, num_documents)."""
    documents: int = within(0, 2**20, 5)
    """Number of documents to show otherwise, evenly spaced over the split, at least 0."""


def _read_text(reader: flat_tokens.Reader, tokenizer: Tokenizer, start: int, length: int) -> str:
    ids, _ = flat_tokens.decode(reader.read(np.array([start]), np.array([length])))
    return tokenizer.decode(ids.tolist())


def show_overview(console: Console, reader: flat_tokens.Reader) -> None:
    """Prints the sizes of a split, and how it was made."""
    attributes, tokens, documents = reader.attributes, reader.num_tokens, reader.num_documents
    check_types(reader.path, attributes, {"utf8_bytes?": int | None, "source?": list | None}, "Copy the dataset again.")
    about = attributes.get("tokenizer")
    lines = [
        ("tokens", f"{tokens:,}"),
        ("documents", f"{documents:,}, {tokens / max(documents, 1):,.1f} tokens on average"),
        ("largest token id", f"{reader.max_token_id:,}"),
        ("tokenizer", f"{about['kind']} {about.get('name') or ''}" if about else "none known: token ids are shown"),
        ("stored as", f"zarr v{reader.zarr_format}"),
    ]
    if documents:
        _, lengths = reader.document_spans(np.arange(min(documents, SAMPLE)))
        of = f", of the first {SAMPLE:,}" * (documents > SAMPLE)
        words = "{:,} to {:,} tokens, 5% below {:,}, median {:,}, 95% below {:,}"
        lines.append(("lengths", words.format(*np.percentile(lengths, [0, 100, 5, 50, 95]).astype(int)) + of))
    if size := attributes.get("utf8_bytes"):
        lines.append(("text", f"{size:,} bytes, {size / max(tokens, 1):.2f} a token"))
    if source := attributes.get("source"):
        lines.append(("source", ", ".join(str(part) for part in source if part)))
    console.print(Text(shown(reader.path), style="bold"))
    for name, text in lines:
        console.print(Text(shown(f"{name:<18}{text}")))


def show_documents(console: Console, reader: flat_tokens.Reader, tokenizer: Tokenizer, count: int) -> None:
    """Prints the beginnings of `count` documents, evenly spaced over the split."""
    which = np.unique(np.linspace(0, reader.num_documents - 1, min(count, reader.num_documents)).astype(np.int64))
    rows = []
    for i, start, length in zip(which, *reader.document_spans(which), strict=True):
        # A token stands for one character or more, nearly always.
        text = _read_text(reader, tokenizer, int(start), min(int(length), CHARACTERS + 8))
        rows.append((f"{i:,}", f"{length:,}", one_line(text, CHARACTERS)))
    print_table(console, ["document", "tokens", "text"], rows, "Documents")


def show_document(console: Console, reader: flat_tokens.Reader, tokenizer: Tokenizer, document: int) -> None:
    """Prints a document, whole. Raises ValueError if there is none of that index."""
    if not 0 <= document < reader.num_documents:
        raise ValueError(
            f"document is {document}; {reader.path} has documents 0 to {reader.num_documents - 1}. Choose one."
        )
    (start,), (length,) = reader.document_spans(np.array([document]))
    console.print(f"[bold]Document {document:,}[/]: tokens {start:,} to {start + length - 1:,}")
    console.print(Text(shown(_read_text(reader, tokenizer, int(start), int(length)))))


def run(config: Settings, console: Console | None = None) -> None:
    """Shows a dataset, or a document of it, as the settings say.

    Raises:
        ValueError: a setting is out of range, or the dataset is missing or damaged.
    """
    console = console or Console()
    check_ranges("", config)
    reader = Reader(config.filespec, config.split)
    tokenizer = tokenizer_of_dataset(reader)
    if config.document is not None:
        show_document(console, reader, tokenizer, config.document)
    else:
        show_overview(console, reader)
        show_documents(console, reader, tokenizer, config.documents)


if __name__ == "__main__":
    run_program("inspect_data", Settings, run)
