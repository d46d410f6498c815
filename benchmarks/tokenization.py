"""Text to flat-tokens by several tokenizers, beside the approach of seqax, on one text and in one run.

    python -m benchmarks.tokenization [--megabytes 400] [--tokenizers bpe,mistral] [--keep DIR]

The lines of the table, each a program from its start to its end, on all cores:

    seqax        its approach, written anew: `transformers`' call per batch, Python lists, appended to a zarr array
    tokenizers   tools.huggingface_to_flat_tokens with tokenizer.backend=reference
    tiktoken     the same with an encoding of tiktoken that has the same ids
    gigatoken    the same with tokenizer.backend=gigatoken
    … a quarter  the last one on a quarter of the text, to show that memory does not grow with it

The text is made from Jane Austen's novels in tests/data: documents of sentences drawn at random, 2.8 kB on average. It
has fewer different words than the web, which helps tokenizers that cache words, gigatoken above all. The tokenizers are
a byte-level BPE trained on the novels (22,886 tokens of 32,768 requested), and that of Mistral Nemo (131,072). All
lines of a tokenizer must give the same ids. Memory is the largest sum of the resident sizes of all processes of a line.

Needs transformers and mistral-common: pip install -e '.[tools,oracle]'.
"""

import argparse
import contextlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from pathlib import Path

import numpy as np

from flat_tokens import Reader
from text import definitions, tokenizers

ROOT = Path(__file__).parent.parent
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PLUGIN = """
import base64, json
from pathlib import Path

def bench():
    read = json.loads((Path(__file__).parent / "bench.json").read_text())
    ranks = {{base64.b64decode(token): rank for token, rank in read.items()}}
    special = {{"<|begin|>": 0, "<|end|>": 1}}
    return {{"name": "bench", "pat_str": {pattern!r}, "mergeable_ranks": ranks, "special_tokens": special}}

ENCODING_CONSTRUCTORS = {{"bench": bench}}
"""


def novels() -> list[str]:
    """The novels of the tests."""
    with lzma.open(ROOT / "tests/data/austen_train.jsonl.xz") as lines:
        return [json.loads(line)["text"] for line in lines]


def write_text(path: Path, megabytes: float) -> None:
    """Writes documents of random sentences, as JSON lines. The same size gives the same bytes."""
    sentences = [s for novel in novels() for s in re.split(r"(?<=[.!?;])\s+", novel)]
    rng = np.random.default_rng(0)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            which = rng.integers(0, len(sentences), int(rng.lognormal(3.0, 0.8)) + 1)
            text = " ".join(sentences[i] for i in which)
            written += len(text.encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def write_tiktoken_plugin(directory: Path, definition: str) -> None:
    """Writes a plugin of tiktoken with the encoding `bench`: the byte-level BPE of a tokenizer.json."""
    letters = {letter: byte for byte, letter in definitions._LETTERS.items()}
    vocabulary = json.loads(definition)["model"]["vocab"].items()
    ranks = {bytes(letters[c] for c in token): i for token, i in vocabulary if i > 1}
    (directory / "tiktoken_ext").mkdir(exist_ok=True)
    (directory / "tiktoken_ext/bench.py").write_text(PLUGIN.format(pattern=GPT2_PATTERN))
    (directory / "tiktoken_ext/bench.json").write_text(json.dumps({b64encode(t).decode(): i for t, i in ranks.items()}))


def run_as_seqax(text: str, tokenizer: str, end: int, out: str) -> None:
    """Tokenizes as seqax does: a batch of documents, one call of the tokenizer, a list of ids for each, one append."""
    import zarr
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from zarr.codecs import BloscCodec

    tokenize = AutoTokenizer.from_pretrained(tokenizer)
    dataset = load_dataset("json", data_files=text, split="train", streaming=True)
    group = zarr.open_group(out, mode="w")

    def create(name: str, dtype: str) -> zarr.Array:
        codec = BloscCodec(cname="lz4", shuffle="bitshuffle")
        return group.create_array(name, shape=(0,), dtype=dtype, chunks=(2**22,), compressors=codec)

    tokens, starts = create("encoded_tokens", "uint32"), create("seq_starts", "uint64")
    for batch in dataset.iter(batch_size=2**13):
        ids = [[*document, end] for document in tokenize(batch["text"], add_special_tokens=False)["input_ids"]]
        lengths = np.array([len(document) for document in ids])
        encoded = np.concatenate([np.array(document, np.uint32) for document in ids]) << np.uint32(1)
        offsets = np.cumsum(lengths) - lengths
        encoded[offsets] |= np.uint32(1)
        starts.append((offsets + tokens.shape[0]).astype(np.uint64))
        tokens.append(encoded)


def run(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Seconds that `command` takes, and the largest sum of resident MB of its processes."""
    peak, done = 0, threading.Event()
    begin = time.perf_counter()
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.1):
                peak = max(peak, resident(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            code = process.wait()
        finally:
            done.set()
            watcher.join()
    seconds = time.perf_counter() - begin
    if code:
        raise SystemExit(f"{' '.join(command)} failed.")
    return seconds, peak / 1e6


def resident(session: int) -> int:
    """Resident bytes of all processes of a session."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # A process may end in the meantime.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if int(fields[3]) == session else 0
    return total


def tool(text: Path, out: Path, kind: str, name: str, backend: str, end_token: str) -> list[str]:
    """The command that tokenizes `text` with the tool."""
    settings = [f"out={out}", f"train.files=[{text}]", "validation=null", "overwrite=true"]
    settings += [f"tokenizer.kind={kind}", f"tokenizer.name={name}", f"tokenizer.backend={backend}"]
    return [sys.executable, "-m", "tools.huggingface_to_flat_tokens", *settings, f"tokenizer.end_token='{end_token}'"]


def compare(directory: Path, which: str, text: Path, quarter: Path) -> None:
    """Prints the lines of a tokenizer, `bpe` or `mistral`."""
    home = directory / which
    home.mkdir(exist_ok=True)
    if which == "bpe":
        definition, end_token = definitions.train_bpe(novels(), 32768), "<|end|>"
        write_tiktoken_plugin(directory, definition)
        tiktoken_name = ("tiktoken", "bench")
    else:
        definition, end_token = tokenizers.open_mistral("tekken_240911.json")[0], "</s>"
        tiktoken_name = ("mistral", "tekken_240911.json")
    (home / "tokenizer.json").write_text(definition)
    (home / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    end = tokenizers.load_definition(definition).token_to_id(end_token)
    huggingface = ("huggingface", str(home / "tokenizer.json"))
    env = os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    seqax = [sys.executable, "-m", "benchmarks.tokenization", "--as-seqax", str(text), str(home), str(end)]
    commands = {
        "seqax": [*seqax, str(home / "seqax")],
        "tokenizers": tool(text, home / "tokenizers", *huggingface, "reference", end_token),
        "tiktoken": tool(text, home / "tiktoken", *tiktoken_name, "reference", end_token),
        "gigatoken": tool(text, home / "gigatoken", *huggingface, "gigatoken", end_token),
        "… a quarter": tool(quarter, home / "quarter", *huggingface, "gigatoken", end_token),
    }
    reader = expected = slowest = None
    print(f"\n{which}: {text.stat().st_size / 1e6:.0f} MB of JSON lines, {os.cpu_count()} cores")
    print(f"{'':<12}{'seconds':>9}{'Mtokens/s':>11}{'MB':>7}  ratio to seqax", flush=True)
    for name, command in commands.items():
        seconds, memory = run(command, env)
        if name == "seqax":
            import zarr

            expected, slowest = zarr.open_group(home / "seqax", mode="r")["encoded_tokens"][:], seconds
        else:
            reader = Reader(command[3].removeprefix("out="), "train")
            place = 0
            for block in reader.blocks():
                if not np.array_equal(block, expected[place : place + block.size]):
                    raise SystemExit(f"{name} gives other tokens than seqax, between {place} and {place + block.size}.")
                place += block.size
        num_tokens = expected.size if reader is None else reader.num_tokens
        ratio = f"{slowest / seconds:13.1f}x" if num_tokens == expected.size else ""
        print(f"{name:<12}{seconds:>9.1f}{num_tokens / seconds / 1e6:>11.2f}{memory:>7.0f}{ratio}", flush=True)


def main() -> None:
    """Runs the tokenizers that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--tokenizers", default="bpe,mistral")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--as-seqax", nargs=4, metavar=("TEXT", "TOKENIZER", "END", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_seqax:
        text, tokenizer, end, out = arguments.as_seqax
        run_as_seqax(text, tokenizer, int(end), out)
        return
    with contextlib.ExitStack() as stack:
        directory = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        text, quarter = directory / "text.jsonl", directory / "quarter.jsonl"
        write_text(text, arguments.megabytes)
        write_text(quarter, arguments.megabytes / 4)
        for which in arguments.tokenizers.split(","):
            compare(directory, which, text, quarter)


if __name__ == "__main__":
    main()
