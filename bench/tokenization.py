"""How fast text becomes tokens, shards are merged and batches are read; from that, a dataset of 10¹² tokens.

    python -m bench.tokenization

The text is the shipped novels, as bytes and in a BPE trained on them. Rates are those of one core: they count processor
time, of all threads, so that other programs change them little. Disks and networks that are slower are not in them.
"""

import json
import lzma
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwright_data.flat_tokens import Reader, Writer
from shardwright_data.loader import DataConfig, make_loader
from shardwright_data.text import definitions, sources
from shardwright_data.text.tokenizers import Tokenizer

TEXT = Path(__file__).parents[1] / "tests/data/austen_train.jsonl.xz"
SHARDS = 5
"""Copies of the text, each a shard."""
SEQ_LEN, BATCH, BATCHES = 4096, 64, 20
TOKENS, CORES = 10**12, (64, 256, 1024)


def seconds(action: Callable[[], object]) -> float:
    """Processor time of an action."""
    began = time.process_time()
    action()
    return time.process_time() - began


def tokenize(path: str, out: str, tokenizer: Tokenizer) -> None:
    """What tools.huggingface_to_flat_tokens does for a shard."""
    with Writer(out, "train") as writer:
        for texts, _ in sources.blocks(*sources.open_text("train", None, None, None, [path]), "text"):
            writer.append(*tokenizer.encode(texts))


def merge(shards: list[str], out: str) -> None:
    """What it does for a split of which all shards are there."""
    with Writer(out, "train") as writer:
        for shard in shards:
            writer.append_split(Reader(shard, "train"))


def measured(path: str, place: str, tokenizer: Tokenizer) -> dict[str, float]:
    """Tokens/s of a core in each part of the work, and bytes of a token as text and on disk."""
    shards = [f"{place}/{i}" for i in range(SHARDS)]
    spent = [seconds(lambda out=out: tokenize(path, out, tokenizer)) for out in shards]
    merging = seconds(lambda: merge(shards, f"{place}/whole"))
    loader = make_loader(DataConfig(filespec=f"{place}/whole"), "train", BATCH, SEQ_LEN)
    reading = seconds(lambda: [loader.sequences(step, np.arange(BATCH)) for step in range(BATCHES)])
    files = [file for file in Path(place, "whole").rglob("*") if file.is_file()]
    return {
        "tokenizing": loader.num_tokens / SHARDS / np.median(spent[1:]),  # the first one imports
        "merging": loader.num_tokens / merging,
        "reading": BATCHES * BATCH * SEQ_LEN / reading,
        "text": Path(path).stat().st_size * SHARDS / loader.num_tokens,
        "disk": sum(file.stat().st_size for file in files) / loader.num_tokens,
    }


def main() -> None:
    """Prints the rates, and what they mean for TOKENS."""
    with tempfile.TemporaryDirectory() as place:
        path, content = f"{place}/text.jsonl", lzma.decompress(TEXT.read_bytes())
        Path(path).write_bytes(content)
        trained = definitions.train_bpe((json.loads(line)["text"] for line in content.splitlines()), 2**15)
        tokenizers = {"bytes": Tokenizer(definitions.byte_definition()), "BPE": Tokenizer(trained)}
        rates = {name: measured(path, f"{place}/{name}", tokenizer) for name, tokenizer in tokenizers.items()}
    print("| million tokens/s of a core | tokenizing | merging | reading | bytes of text a token | bytes on disk |")
    print("|---|---|---|---|---|---|")
    for name, x in rates.items():
        speeds = " | ".join(f"{x[part] / 1e6:.3g}" for part in ("tokenizing", "merging", "reading"))
        print(f"| {name} | {speeds} | {x['text']:.2f} | {x['disk']:.2f} |")
    titles = [
        "10¹² tokens",
        "text, TB",
        "on disk, TB",
        "core-hours",
        *(f"hours on {n} cores" for n in CORES),
        "hours to merge",
    ]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name, x in rates.items():
        hours, sizes = TOKENS / x["tokenizing"] / 3600, [f"{TOKENS * x[part] / 1e12:.2f}" for part in ("text", "disk")]
        on = [f"{hours / n:.1f}" for n in CORES]
        cells = [name, *sizes, f"{hours:.0f}", *on, f"{TOKENS / x['merging'] / 3600:.1f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
