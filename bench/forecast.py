"""Counts how often a run ends inside the interval that tools.forecast wrote before it, on the shipped text.

    python -m bench.forecast        # seeds 0 to 9
    python -m bench.forecast 3 4
    python -m bench.forecast tests/data/losses_of_*.csv

For each seed, another split of the novels' chapters into training and validation, other weights and another order: nine
small runs, of three sizes and three lengths, a forecast of a run with four times the parameters of the largest of them
and as long as the longest, and that run. Four minutes of CPU time a seed.

Given tables of published losses, it forecasts large models from small ones, and prints for each
dataset the share that ended inside its interval and how wide that was: 160 seconds of CPU time.
"""

import csv
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shardwright.inspect import scaling
from shardwright.run.files import read_records
from shardwright.run.forecast import read_forecast
from shardwright.settings.command_line import SHIPPED

SIZES = ["{d_model:16,n_kv:1,d_ff:40}", "{d_model:32,n_kv:2,d_ff:80}", "{d_model:48,n_kv:3,d_ff:128}"]
LENGTHS = ["{schedule_steps:480,warmup_steps:48}", "{schedule_steps:680,warmup_steps:68}"]
LENGTHS += ["{schedule_steps:960,warmup_steps:96}"]
SMALL = [f"model={','.join(SIZES)}", f"optimizer={','.join(LENGTHS)}"]
LARGE = ["model={d_model:96,n_kv:6,d_ff:256}", f"optimizer={LENGTHS[-1]}"]
BOTH = ["--config-name=track", "model.layers=2", "model.d_head=16", "training.batch_size=8"]
BOTH += ["training.steps=${optimizer.schedule_steps}", "training.eval_interval=null", "training.eval_batches=128"]
BOTH += ["optimizer.parametrization=mup", f"optimizer.base={SIZES[-1]}"]


def split(seed: int, directory: Path) -> list[str]:
    """Writes the chapters to `directory`, a random tenth for validation. Returns the settings that read them."""
    files = [SHIPPED / f"austen_{name}.jsonl.xz" for name in ("train", "validation")]
    chapters = [line for file in files for line in lzma.decompress(file.read_bytes()).splitlines(keepends=True)]
    random.Random(seed).shuffle(chapters)
    parts = {"validation": chapters[: len(chapters) // 10], "train": chapters[len(chapters) // 10 :]}
    for name, lines in parts.items():
        (directory / f"{name}.jsonl").write_bytes(b"".join(lines))
    return [f"data.stream.{name}_files=[{directory / name}.jsonl]" for name in parts]


def run(program: str, *words: str) -> None:
    command = [sys.executable, "-m", "shardwright", program, *BOTH, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_table(path: Path) -> dict[str, scaling.Runs]:
    """The runs of each dataset, by their compute."""
    rows = [*csv.DictReader(line for line in path.read_text().splitlines() if line[0] != "#")]
    found = {}
    for name in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == name]
        columns = ("params_no_embed", "tokens", "loss")
        runs = scaling.Runs(*(np.array([float(row[key]) for row in own]) for key in columns))
        found[name] = runs[runs.by_compute]
    return found


Ladder = tuple[str, np.ndarray, np.ndarray]
"""Its kind, and indices of the runs to forecast from and of those to forecast."""


def ladders(runs: scaling.Runs, rng: np.random.Generator) -> Iterator[Ladder]:
    """Small runs, and up to 12 later ones of up to 100 times the compute.

    The small ones are at most 30 of the first half and of two thirds, and ten times nine of the half.
    """
    count = len(runs.loss)
    compute = runs.params * runs.tokens
    many = [("many", count // 2, 30), ("many", count * 2 // 3, 30)]
    for kind, among, most in many + [("nine", count // 2, 9)] * 10:
        small = np.sort(rng.choice(among, min(most, among), replace=False))
        later = np.arange(small.max() + 1, count)
        later = later[compute[later] <= 100 * compute[small.max()]]
        yield kind, small, np.sort(rng.choice(later, min(12, len(later)), replace=False))


def published(paths: Sequence[Path]) -> None:
    """Prints how many published models end inside their interval, and how wide it is."""
    print("models  inside  width  doesn't exclude the best small loss  error  (medians)")
    for path in paths:
        for name, runs in read_table(path).items():
            found: dict[str, list[tuple[float, ...]]] = {"nine": [], "many": []}
            for kind, small, large in ladders(runs, np.random.default_rng(0)):
                sizes = [(float(runs.params[i]), float(runs.tokens[i])) for i in large]
                try:
                    said = scaling.forecasts(runs[small], sizes)
                except ValueError:  # nine of too few sizes
                    continue
                for f, loss in zip(said, runs.loss[large], strict=True):
                    width = (f.high - f.low) / f.loss
                    error = abs(f.loss / loss - 1)
                    is_open = f.high >= runs.loss[small].min()
                    found[kind].append((f.low <= loss <= f.high, width, is_open, error))
            for kind, cases in found.items():
                inside, width, open_, error = np.transpose(cases)
                text = f"{len(cases):6}  {inside.mean():6.0%}  {np.median(width):5.1%}"
                text += f"  {open_.mean():35.0%}  {np.median(error):5.1%}"
                print(f"{text}  {path.stem}, {name}, {kind}", flush=True)


def main(seeds: Sequence[int]) -> None:
    inside = 0
    print("seed   forecast, nats            val", flush=True)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            place = [f"paths.root_working_dir={directory}", f"training.seed={seed}", *split(seed, Path(directory))]
            run("train", "--multirun", *SMALL, *place, "paths.model_name=ladder")
            file = os.path.join(directory, "forecast.json")
            run("forecast", *LARGE, f"forecast.runs={directory}/ladder", f"forecast.output={file}")
            run("train", *LARGE, *place, "paths.model_name=large", f"training.forecast={file}")
            lines = read_records(Path(directory, "large", "metrics.jsonl"))
            (val,) = [line["loss"] for line in lines if line and line.get("event") == "validation"]
            said = read_forecast(Path(file)).end
        inside += said.low <= val <= said.high
        print(f"{seed:4}   {said.loss:.3f}, {said.low:.3f} to {said.high:.3f}   {val:.3f}", flush=True)
    print(json.dumps({"inside": inside, "of": len(seeds)}))


if __name__ == "__main__":
    given = sys.argv[1:]
    if given and given[0].endswith(".csv"):
        published([*map(Path, given)])
    else:
        main([*map(int, given)] or range(10))
