"""The loader beside its alternatives, on one dataset and in one run: ratios and targets.

    python -m benchmarks.loader [--keep DIR]

Four comparisons, each with its target:

    start    the first batch at a random step, against filling a shuffle buffer, as seqax does before its first batch
    random   sequences from random places, against the best of several ways to read them with zarr-python
    paced    waiting for batches when each step takes 20 ms, against a loop that only sleeps
    remote   the same with a store that answers each request after 30 ms

The dataset has 100M tokens of made-up text: phrases of up to ten words, drawn by Zipf's law, as are the words. English
in a 32k vocabulary is about as hard to compress. The dataset takes 0.3 GB in a temporary directory, or in DIR, where a
later run finds it again. The memory for decoded chunks is only 16 MiB: a real dataset would not fit into memory either.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zarr

from flat_tokens import Writer
from input_loader import FlatTokensConfig, FlatTokensLoader, Prefetcher, permute

NUM_TOKENS = 100_000_000
SEQ_LEN = 1024
BLOCK = 1_000_000
"""Tokens that seqax's shuffle buffer draws from the dataset at once."""
BUFFER_BLOCKS = 32
STEP = 0.020
LATENCY = 0.030
"""Seconds of a step, and of a request to the remote store."""
CACHE_BYTES = 2**24


# ---- datasets -----------------------------------------------------------------------------------------------------


def make_text(rng: np.random.Generator, num_tokens: int) -> Iterator[np.ndarray]:
    """Yields token ids in blocks of 4M: phrases from a stock of 200,000."""
    words, stock = 32_000, 200_000

    def zipf(n: int, exponent: float, shift: float, size: int) -> np.ndarray:
        weights = np.cumsum((np.arange(n) + shift) ** -exponent)
        return np.minimum(np.searchsorted(weights, rng.random(size) * weights[-1]), n - 1)

    lengths = rng.integers(1, 11, stock)
    starts = np.cumsum(lengths) - lengths
    phrases = rng.permutation(words)[zipf(words, 1.05, 2.7, int(lengths.sum()))].astype(np.uint32)
    size = 4_000_000
    for begin in range(0, num_tokens, size):
        chosen = zipf(stock, 1.1, 3, size // 4)
        count = lengths[chosen]
        places = np.repeat(starts[chosen] - np.cumsum(count) + count, count) + np.arange(count.sum())
        yield phrases[places][: min(size, num_tokens - begin)]


def make_datasets(directory: Path) -> None:
    """Writes ours/, as the tools do, and seqax/encoded_tokens, as seqax does: zarr v2, 4M tokens a chunk, LZ4."""
    import numcodecs

    marker = directory / f"made_{NUM_TOKENS}"
    if marker.exists():
        return
    rng = np.random.default_rng(0)
    theirs = zarr.create_array(
        str(directory / "seqax"),
        name="encoded_tokens",
        shape=(NUM_TOKENS,),
        chunks=(2**22,),
        dtype="uint32",
        zarr_format=2,
        compressors=numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE),
        overwrite=True,
    )
    rest = np.zeros(0, np.uint32)
    with Writer(str(directory / "ours"), "train", overwrite=True) as writer:
        for ids in make_text(rng, NUM_TOKENS):
            lengths = rng.integers(100, 1500, ids.size // 800)
            lengths = np.append(lengths, ids.size - lengths.sum()) if lengths.sum() < ids.size else np.array([ids.size])
            start = writer.num_tokens
            writer.append(ids, lengths)
            # Whole chunks, as seqax's writer does. The bit that marks starts of documents makes no difference here.
            rest = np.append(rest, ids << 1)
            whole = rest.size // 2**22 * 2**22
            theirs[start + ids.size - rest.size : start + ids.size - rest.size + whole] = rest[:whole]
            rest = rest[whole:]
    theirs[NUM_TOKENS - rest.size :] = rest
    marker.touch()


# ---- measuring ----------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    """The time that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Report:
    """Prints figures and remembers the targets that are missed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def line(self, name: str, figure: str) -> None:
        """Prints a figure."""
        print(f"  {name:<58}{figure:>18}", flush=True)

    def target(self, name: str, figure: str, holds: bool) -> None:
        """Prints a figure that should reach a target."""
        self.line(f"-> {name}", f"{figure}  {'pass' if holds else 'FAIL'}")
        if not holds:
            self.failed.append(name)


def loader_for(filespec: str, batch_size: int, seed: int = 0) -> FlatTokensLoader:
    """The loader of a dataset, with a small cache."""
    config = FlatTokensConfig(filespec, seed=seed, cache_bytes=CACHE_BYTES)
    return FlatTokensLoader(config, "train", batch_size, SEQ_LEN)


# ---- start --------------------------------------------------------------------------------------------------------


def start_with_buffer(path: str, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """Loads the first batch as seqax does: reads 32 random blocks of 1M tokens and shuffles their sequences."""
    tokens = zarr.open_array(path, path="encoded_tokens", mode="r")
    blocks = rng.permutation(tokens.shape[0] // BLOCK)[:BUFFER_BLOCKS].tolist()
    count = BLOCK // SEQ_LEN
    buffer = np.empty((len(blocks) * count, SEQ_LEN), np.uint32)

    def fill(i: int) -> None:
        start = blocks[i] * BLOCK
        buffer[i * count : (i + 1) * count] = tokens[start : start + count * SEQ_LEN].reshape(count, SEQ_LEN)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(len(blocks))))
    return buffer[rng.permutation(buffer.shape[0])[:batch_size]]


def measure_start(directory: Path, report: Report) -> None:
    """Measures the first batch at a random step."""
    batch_size, rounds, rng = 64, 9, np.random.default_rng(1)
    print(
        f"start: first batch of {batch_size} sequences at a random step, opening included; median of {rounds}, in turns"
    )
    ours_path, ours, theirs = str(directory / "ours"), [], []
    for i in range(rounds):
        step = int(rng.integers(10**6))
        ours.append(
            seconds(lambda i=i, step=step: loader_for(ours_path, batch_size, i).sequences(step, np.arange(batch_size)))
        )
        theirs.append(seconds(lambda: start_with_buffer(str(directory / "seqax"), batch_size, rng)))
    mine, other = float(np.median(ours)), float(np.median(theirs))
    report.line("filling a shuffle buffer of 32 blocks of 1M tokens", f"{1e3 * other:.0f} ms")
    report.line("this loader", f"{1e3 * mine:.0f} ms")
    report.target("at least 20 times faster", f"{other / mine:.1f}x", other >= 20 * mine)


# ---- random -------------------------------------------------------------------------------------------------------


def zarr_ways(directory: Path) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Ways to read sequences, given the places where they start, with zarr-python."""
    import zarr.api.asynchronous

    path = str(directory / "ours/train")
    array = zarr.open_array(path, path="encoded_tokens", mode="r")
    offsets = np.arange(SEQ_LEN)
    pool = ThreadPoolExecutor(8)

    def orthogonal(starts: np.ndarray) -> np.ndarray:
        order = np.argsort(starts)
        places = (starts[order, None] + offsets).reshape(-1)
        found = np.empty((starts.size, SEQ_LEN), np.uint32)
        found[order] = array.get_orthogonal_selection((places,)).reshape(-1, SEQ_LEN)
        return found

    def two_threads(starts: np.ndarray) -> np.ndarray:
        return np.concatenate(list(pool.map(orthogonal, np.array_split(np.sort(starts), 2))))

    def slices(starts: np.ndarray) -> np.ndarray:
        return np.stack(list(pool.map(lambda start: array[start : start + SEQ_LEN], starts.tolist())))

    async def gather(starts: np.ndarray) -> np.ndarray:
        opened = await zarr.api.asynchronous.open_array(store=path, path="encoded_tokens", mode="r")
        return np.stack(await asyncio.gather(*(opened.getitem(slice(s, s + SEQ_LEN)) for s in starts.tolist())))

    return {
        "one sorted orthogonal selection": orthogonal,
        "two of them in threads": two_threads,
        "slices in 8 threads": slices,
        "slices gathered asynchronously": lambda starts: asyncio.run(gather(starts)),
    }


def measure_random(directory: Path, report: Report) -> None:
    """Measures tokens a second from random places."""
    batch_size, rounds, many = 256, 9, 12
    print(
        f"random: sequences of {SEQ_LEN} tokens from random places, {batch_size} a batch; median of {rounds}, in turns"
    )
    loader = loader_for(str(directory / "ours"), batch_size)

    def read_ahead(start: int) -> None:
        indices = np.arange(batch_size)
        with Prefetcher(
            lambda step: loader.sequences(step, indices), start, start + many, depth=2, threads=2
        ) as batches:
            for _ in batches:
                pass

    ways = zarr_ways(directory)
    speeds: dict[str, list[float]] = {name: [] for name in ("this loader", *ways)}
    for i in range(rounds):
        taken = seconds(lambda i=i: read_ahead(i * many))
        speeds["this loader"].append(many * batch_size * SEQ_LEN / taken)
        order = permute(np.arange(batch_size), loader.sequences_per_epoch, i + 1, np.zeros(batch_size, np.int64))
        for name, read in ways.items():
            taken = seconds(lambda read=read, order=order: read(order * SEQ_LEN))
            speeds[name].append(batch_size * SEQ_LEN / taken)
    typical = {name: float(np.median(found)) for name, found in speeds.items()}
    for name, speed in typical.items():
        report.line(name if name == "this loader" else f"zarr-python: {name}", f"{speed / 1e6:.2f}M tokens/s")
    best = max(ways, key=lambda name: typical[name])
    ratio = typical["this loader"] / typical[best]
    report.target("at least 4 times the best of zarr-python", f"{ratio:.1f}x", ratio >= 4)


# ---- paced --------------------------------------------------------------------------------------------------------


def pace(next_batch: Callable[[], object] | None, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that each step waits for its batch, and seconds that it takes longer than STEP."""
    waits, excess = np.zeros(steps), np.zeros(steps)
    for i in range(steps):
        start = time.perf_counter()
        if next_batch is not None:
            next_batch()
        ready = time.perf_counter()
        time.sleep(STEP)
        waits[i], excess[i] = ready - start, time.perf_counter() - start - STEP
    return waits, excess


def measure_paced(filespec: str, batch_size: int, threads: int, report: Report) -> None:
    """Measures the waits for batches when each step takes 20 ms."""
    turns, steps = 5, 100
    loader = loader_for(filespec, batch_size)
    bare, waits, excess = [], [], []
    with Prefetcher(lambda step: loader.sequences(step, np.arange(batch_size)), 0, 10**9, 8, threads) as batches:
        first = seconds(lambda: next(batches))
        # In turns, so that other work of the machine slows down both.
        for _ in range(turns):
            bare.append(pace(None, steps)[1])
            wait, beyond = pace(lambda: next(batches), steps)
            waits.append(wait)
            excess.append(beyond)
    longest_bare, longest = (1e3 * float(np.max(found)) for found in (bare, waits))
    p99, median = (1e3 * float(np.percentile(waits, percent)) for percent in (99, 50))
    report.line("first batch", f"{1e3 * first:.0f} ms")
    report.line("a loop that only sleeps: longest step beyond 20 ms", f"{longest_bare:.1f} ms")
    report.line("longest step beyond 20 ms, wait included", f"{1e3 * float(np.max(excess)):.1f} ms")
    report.line("wait for a batch: median", f"{median:.2f} ms")
    report.target("99 of 100 waits at most 5 ms", f"{p99:.2f} ms", p99 <= 5)
    holds = longest <= longest_bare + 5
    report.target("longest wait at most 5 ms over that of the bare loop", f"{longest:.1f} ms", holds)


@contextlib.contextmanager
def slow_store(directory: Path) -> Iterator[str]:
    """Serves the directory from another process, which answers each request after 30 ms. Yields the URL."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "slow_http_store.py"), str(directory), str(LATENCY)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield f"http://localhost:{int(server.stdout.readline())}/"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Runs the comparisons that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="directory that keeps the datasets for a later run")
    parser.add_argument("--only", nargs="*", choices=["start", "random", "paced", "remote"], help="some comparisons")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loader_benchmark_")))
        directory.mkdir(parents=True, exist_ok=True)
        print(f"Making {NUM_TOKENS:,} tokens in {directory}: {seconds(lambda: make_datasets(directory)):.0f} s")
        load = os.getloadavg()[0]
        print(f"{os.cpu_count()} cores, load {load:.1f} before the first measurement: other programs slow this one.")
        wanted, report = arguments.only or ["start", "random", "paced", "remote"], Report()
        if "start" in wanted:
            measure_start(directory, report)
        if "random" in wanted:
            measure_random(directory, report)
        if "paced" in wanted:
            print("paced: batches of 64 sequences, steps of 20 ms, 8 batches ahead")
            measure_paced(str(directory / "ours"), 64, 8, report)
        if "remote" in wanted:
            print("remote: batches of 32 sequences, steps of 20 ms, 8 batches ahead, each request answered after 30 ms")
            with slow_store(directory) as url:
                measure_paced(f"{url}ours", 32, 8, report)
    if report.failed:
        sys.exit("Missed: " + "; ".join(report.failed))


if __name__ == "__main__":
    main()
