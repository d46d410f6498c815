"""Shows what is in a flat-tokens dataset.

    python -m tools.inspect_data filespec=data/austen_bpe.zarr
    python -m tools.inspect_data filespec=data/austen_bpe.zarr document=3

Text is decoded with the dataset's own tokenizer. Without one, token ids are shown. The documents in
a batch of a run are shown by tools.replay.
"""

from dataclasses import dataclass

import numpy as np
from omegaconf import MISSING
from rich.console import Console

from shardwright.data import flat_tokens
from shardwright.data.checks import a_path, check_ranges, within
from shardwright.data.flat_tokens import Reader
from shardwright.data.text.tokenizers import Tokenizer, tokenizer_of_dataset
from shardwright.data.untrusted import check_types, one_line
from shardwright.settings.program import run_program
from shardwright.tools.report.screen import print_line

SAMPLE = 2**22
"""Number of documents whose lengths are read."""
SHOWN, CHARACTERS = 5, 200
"""Number of documents, evenly spaced over the split, of which the beginning is shown; most
characters of each."""


@dataclass
class Settings:
    """The settings of the program."""

    filespec: str = a_path(MISSING)
    """The dataset: a local path or a URL."""
    split: str = "train"
    """`train` or `validation`."""
    document: int | None = within(0, 2**50, None)
    """Show this document, whole, in [0, num_documents); null: the sizes, and some documents'
    beginnings."""


def show_overview(console: Console, reader: Reader) -> None:
    """Prints the sizes of a split, and how it was made."""
    attributes, tokens, documents = reader.attributes, reader.num_tokens, reader.num_documents
    check_types(reader.path, attributes, {"source?": list | None}, "Copy the dataset again.")
    about = attributes.get("tokenizer")
    lines = [
        ("tokens", f"{tokens:,}"),
        ("documents", f"{documents:,}, {tokens / max(documents, 1):,.1f} tokens on average"),
        ("largest token id", f"{reader.max_token_id:,}"),
        (
            "tokenizer",
            f"{about['kind']} {about.get('name') or ''}"
            if about
            else "none known: token ids are shown",
        ),
        ("stored as", f"zarr v{reader.zarr_format}"),
    ]
    if documents:
        _, lengths = reader.document_spans(np.arange(min(documents, SAMPLE)))
        of = f", of the first {SAMPLE:,}" * (documents > SAMPLE)
        words = "{:,} to {:,} tokens, 5% below {:,}, median {:,}, 95% below {:,}"
        lines.append(
            ("lengths", words.format(*np.percentile(lengths, [0, 100, 5, 50, 95]).astype(int)) + of)
        )
    if source := attributes.get("source"):
        lines.append(("source", ", ".join(str(part) for part in source if part)))
    print_line(console, reader.path, "bold")
    for name, text in lines:
        print_line(console, f"{name:<18}{text}")


def show_documents(
    console: Console, reader: Reader, tokenizer: Tokenizer, which: np.ndarray, whole: bool
) -> None:
    """Prints these documents, whole or the beginning of each."""
    for i, start, length in zip(which, *reader.document_spans(which), strict=True):
        # A token stands for one character or more, nearly always.
        count = length if whole else min(length, CHARACTERS + 8)
        ids, _ = flat_tokens.decode(reader.read(np.array([start]), np.array([count])))
        text = tokenizer.decode(ids.tolist())
        print_line(console, f"\nDocument {i:,}: {length:,} tokens", "bold")
        print_line(console, text if whole else one_line(text, CHARACTERS))


def run(config: Settings, console: Console | None = None) -> None:
    """Shows a dataset, or a document of it, as the settings say.

    Raises:
        ValueError: a setting is out of range, or the dataset is missing or damaged.
    """
    console = console or Console()
    check_ranges("", config)
    reader = Reader(config.filespec, config.split)
    tokenizer = tokenizer_of_dataset(reader)
    last = reader.num_documents - 1
    if config.document is None:
        show_overview(console, reader)
        which = np.unique(np.linspace(0, last, min(SHOWN, last + 1)).astype(np.int64))
    elif config.document <= last:
        which = np.array([config.document])
    else:
        raise ValueError(
            f"document is {config.document}; {reader.path} has documents 0 to {last}. Choose one."
        )
    show_documents(console, reader, tokenizer, which, whole=config.document is not None)


if __name__ == "__main__":
    run_program("inspect_data", Settings, run)
