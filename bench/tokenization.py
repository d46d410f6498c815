"""Measures how fast text is tokenized, shards are merged and batches are read; extrapolates to 10¹²
tokens.

    python -m bench.tokenization [--seqax seqax]

The text is the shipped novels, as bytes and in a BPE trained on them. Rates are per core: they
count the CPU time of all threads, so other programs hardly change them. They leave out slow disks
and networks.

With --seqax, the tokenization tool and that of a checkout of https://github.com/MatX-inc/seqax
tokenize the same file in turns, each from its start to its end. Its .venv needs datasets hydra-core
numcodecs==0.15.2 transformers zarr==2.18.7.
"""

import json
import lzma
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.common import cpu_seconds, parser_of
from shardwright.data.flat_tokens import Reader, Writer
from shardwright.data.loader import DataConfig, make_loader
from shardwright.data.text import definitions, sources
from shardwright.data.text.tokenizers import Tokenizer
from shardwright.settings.command_line import SHIPPED

TEXT = SHIPPED / "austen_train.jsonl.xz"
SHARDS = 5
"""Number of copies of the text, each a shard."""
SEQ_LEN, BATCH, BATCHES = 4096, 64, 20
TOKENS, CORES = 10**12, (64, 256, 1024)
COPIES, ROUNDS = 40, 2
"""Copies of the text that both tools tokenize, and how often."""


def tokenize(path: str, out: str, tokenizer: Tokenizer) -> None:
    """Tokenizes a shard, as tools.huggingface_to_flat_tokens does."""
    with Writer(out, "train") as writer:
        name, data, _ = sources.open_text("train", None, None, None, [path])
        for texts, _ in sources.blocks(name, data, "text"):
            writer.append(*tokenizer.encode(texts))


def merge(shards: list[str], out: str) -> None:
    """Merges the shards of a split, as tools.huggingface_to_flat_tokens does."""
    with Writer(out, "train") as writer:
        for shard in shards:
            writer.append_split(Reader(shard, "train"))


def measured(path: str, place: str, tokenizer: Tokenizer) -> list[float]:
    """Returns tokens/s per core of tokenizing, merging and reading, and bytes per token of text and
    on disk.
    """
    shards = [f"{place}/{i}" for i in range(SHARDS)]
    spent = [cpu_seconds(lambda out=out: tokenize(path, out, tokenizer)) for out in shards]
    merging = cpu_seconds(lambda: merge(shards, f"{place}/whole"))
    loader = make_loader(DataConfig(filespec=f"{place}/whole"), "train", BATCH, SEQ_LEN)
    reading = cpu_seconds(
        lambda: [loader.sequences(step, np.arange(BATCH)) for step in range(BATCHES)]
    )
    tokens = loader.num_tokens or 0
    on_disk = sum(x.stat().st_size for x in Path(place, "whole").rglob("*") if x.is_file())
    tokenizing = np.median(spent[1:]) * SHARDS  # the first one imports
    rates = [tokens / tokenizing, tokens / merging, BATCHES * BATCH * SEQ_LEN / reading]
    return [*rates, Path(path).stat().st_size * SHARDS / tokens, on_disk / tokens]


def _seconds_of_children() -> float:
    """CPU time of the processes that this one started, user and system."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def beside_seqax(seqax: Path, place: str, content: bytes, tokenizer: Tokenizer) -> list[float]:
    """Returns tokens/s of CPU time of our tool and of seqax's.

    Raises ValueError if their tokens differ.
    """
    text = Path(place, "text")
    outs = [f"{place}/ours", f"{place}/theirs"]
    spent = [[], []]
    text.mkdir(exist_ok=True)
    for split, copies in (("train", COPIES), ("validation", 1)):
        (text / f"{split}.jsonl").write_bytes(content * copies)
    of_transformers = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"}
    (text / "tokenizer_config.json").write_text(json.dumps(of_transformers))
    (text / "tokenizer.json").write_text(tokenizer.definition or "")
    is_bytes = tokenizer.is_bytes
    kind = (
        ["tokenizer.kind=bytes"]
        if is_bytes
        else ["tokenizer.kind=huggingface", f"tokenizer.name={text}"]
    )
    ours = [
        sys.executable,
        "-m",
        "shardwright.tools.huggingface_to_flat_tokens",
        f"out={outs[0]}",
        *kind,
    ]
    ours += [f"{split}.files=[{text}/{split}.jsonl]" for split in ("train", "validation")]
    theirs = [
        f"{seqax.absolute()}/.venv/bin/python",
        "huggingface_to_flat_tokens.py",
        "--config-name=c4_en",
    ]
    theirs += [f"dataset={text}", "variant=null", f"tokenizer={'bytes_utf8' if is_bytes else text}"]
    theirs += ["+max_tokens=1_000_000_000_000", f"+output={outs[1]}"]
    for _ in range(ROUNDS):
        for i, (command, at) in enumerate([(ours, None), (theirs, seqax / "tools")]):
            shutil.rmtree(outs[i], ignore_errors=True)
            before = _seconds_of_children()
            env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{place}/hub"}
            subprocess.run(command, cwd=at, env=env, check=True, stdout=subprocess.DEVNULL)
            spent[i].append(_seconds_of_children() - before)
    written = [Reader(out, "train") for out in outs]
    one, other = (x.read(np.array([0]), np.array([x.num_tokens])).astype(np.int64) for x in written)
    if one.shape != other.shape or np.unique(one - other).tolist() != [4 if is_bytes else 0]:
        # 2 × (id + 2) + starts
        raise ValueError("the tools wrote different tokens")
    return [one.size / statistics.mean(seconds) for seconds in spent]


def table(titles: list[str], rows: dict[str, list[str]]) -> str:
    """Formats a Markdown table."""
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seqax", type=Path, help="a checkout of seqax, to compare with its tool")
    seqax = parser.parse_args().seqax
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/text.jsonl"
        content = lzma.decompress(TEXT.read_bytes())
        Path(path).write_bytes(content)
        trained = definitions.train_bpe(
            (json.loads(line)["text"] for line in content.splitlines()), 2**15
        )
        tokenizers = {"bytes": Tokenizer(definitions.byte_definition()), "BPE": Tokenizer(trained)}
        found = {
            name: measured(path, f"{place}/{name}", tokenizer)
            for name, tokenizer in tokenizers.items()
        }
        beside = (
            {name: beside_seqax(seqax, place, content, x) for name, x in tokenizers.items()}
            if seqax
            else {}
        )
    rates, plan = {}, {}
    for name, (tokenizing, merging, reading, text, disk) in found.items():
        rates[name] = [f"{x / 1e6:.3g}" for x in (tokenizing, merging, reading)] + [
            f"{x:.2f}" for x in (text, disk)
        ]
        hours, to_merge = (TOKENS / rate / 3600 for rate in (tokenizing, merging))
        sizes = [f"{TOKENS * x / 1e12:.2f}" for x in (text, disk)]
        plan[name] = [
            *sizes,
            f"{hours:.0f}",
            *(f"{hours / n:.1f}" for n in CORES),
            f"{to_merge:.1f}",
        ]
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
    print(
        table(["10¹² tokens", "text, TB", "on disk, TB", "core-hours", *on, "hours to merge"], plan)
    )
    if beside:
        rows = {
            name: [*(f"{x / 1e6:.3g}" for x in rate), f"{rate[0] / rate[1]:.1f}"]
            for name, rate in beside.items()
        }
        print(
            "\n"
            + table(["million tokens/s of a core, whole program", "ours", "seqax", "ratio"], rows)
        )


if __name__ == "__main__":
    main()
