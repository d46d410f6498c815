"""Measures how fast text is tokenized, shards are merged and batches are read; extrapolates to 10¹² tokens.

    python -m bench.tokenization

The text is the shipped novels, as bytes and in a BPE trained on them. Rates are per core: they count the CPU time of
all threads, so other programs hardly change them. They leave out slow disks and networks.
"""

import json
import lzma
import tempfile
from pathlib import Path

import numpy as np

from shardwright.bench.common import cpu_seconds
from shardwright.data.flat_tokens import Reader, Writer
from shardwright.data.loader import DataConfig, make_loader
from shardwright.data.text import definitions, sources
from shardwright.data.text.tokenizers import Tokenizer

TEXT = Path(__file__).parents[1] / "shipped/austen_train.jsonl.xz"
SHARDS = 5
"""Number of copies of the text, each a shard."""
SEQ_LEN, BATCH, BATCHES = 4096, 64, 20
TOKENS, CORES = 10**12, (64, 256, 1024)


def tokenize(path: str, out: str, tokenizer: Tokenizer) -> None:
    """Tokenizes a shard, as tools.huggingface_to_flat_tokens does."""
    with Writer(out, "train") as writer:
        for texts, _ in sources.blocks(*sources.open_text("train", None, None, None, [path]), "text"):
            writer.append(*tokenizer.encode(texts))


def merge(shards: list[str], out: str) -> None:
    """Merges the shards of a split, as tools.huggingface_to_flat_tokens does."""
    with Writer(out, "train") as writer:
        for shard in shards:
            writer.append_split(Reader(shard, "train"))


def measured(path: str, place: str, tokenizer: Tokenizer) -> list[float]:
    """Returns tokens/s per core of tokenizing, merging and reading, and bytes per token of text and on disk."""
    shards = [f"{place}/{i}" for i in range(SHARDS)]
    spent = [cpu_seconds(lambda out=out: tokenize(path, out, tokenizer)) for out in shards]
    merging = cpu_seconds(lambda: merge(shards, f"{place}/whole"))
    loader = make_loader(DataConfig(filespec=f"{place}/whole"), "train", BATCH, SEQ_LEN)
    reading = cpu_seconds(lambda: [loader.sequences(step, np.arange(BATCH)) for step in range(BATCHES)])
    tokens, on_disk = (
        loader.num_tokens or 0,
        sum(x.stat().st_size for x in Path(place, "whole").rglob("*") if x.is_file()),
    )
    tokenizing = np.median(spent[1:]) * SHARDS  # the first one imports
    rates = [tokens / tokenizing, tokens / merging, BATCHES * BATCH * SEQ_LEN / reading]
    return [*rates, Path(path).stat().st_size * SHARDS / tokens, on_disk / tokens]


def table(titles: list[str], rows: dict[str, list[str]]) -> str:
    """Formats a Markdown table."""
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines])


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        path, content = f"{place}/text.jsonl", lzma.decompress(TEXT.read_bytes())
        Path(path).write_bytes(content)
        trained = definitions.train_bpe((json.loads(line)["text"] for line in content.splitlines()), 2**15)
        tokenizers = {"bytes": Tokenizer(definitions.byte_definition()), "BPE": Tokenizer(trained)}
        found = {name: measured(path, f"{place}/{name}", tokenizer) for name, tokenizer in tokenizers.items()}
    rates, plan = {}, {}
    for name, (tokenizing, merging, reading, text, disk) in found.items():
        rates[name] = [f"{x / 1e6:.3g}" for x in (tokenizing, merging, reading)] + [f"{x:.2f}" for x in (text, disk)]
        hours, to_merge = (TOKENS / rate / 3600 for rate in (tokenizing, merging))
        sizes = [f"{TOKENS * x / 1e12:.2f}" for x in (text, disk)]
        plan[name] = [*sizes, f"{hours:.0f}", *(f"{hours / n:.1f}" for n in CORES), f"{to_merge:.1f}"]
    titles = [
        "million tokens/s of a core",
        "tokenizing",
        "merging",
        "reading",
        "bytes of text a token",
        "bytes on disk",
    ]
    print(table(titles, rates) + "\n")
    on = [f"hours on {n} cores" for n in CORES]
    print(table(["10¹² tokens", "text, TB", "on disk, TB", "core-hours", *on, "hours to merge"], plan))


if __name__ == "__main__":
    main()
