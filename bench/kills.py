"""SIGKILL at random moments: a run that is killed and started again ends as one that was never killed.

    python -m bench.kills [--count 10] [--seed 0]

Runs a tiny model on four simulated devices, kills it at a drawn moment, or while it saves, starts it again, and so on.
After each kill every checkpoint that is listed, and at the end the losses, must equal those of the run that was not
killed, to the bit. Prints a line for each kill. Exits with 1 if anything differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zarr

ROOT = Path(__file__).parents[1]
STEPS = 24
SETTINGS = [
    *("--config-name=local_test_synthetic", "mesh.d=2", "mesh.t=2", f"data.filespec={ROOT}/synthetic_dataset.zarr"),
    *("model.d_model=32", "model.d_ff=32", "model.n_kv=4", "model.n_q_per_kv=1", "model.d_head=8"),
    *("optimizer.warmup_steps=2", f"optimizer.schedule_steps={STEPS}", f"training.steps={STEPS}"),
    *("training.batch_size=8", "training.seq_len=16", "training.compute_dtype=f32", "training.report=false"),
    *("training.checkpoint_interval=3", "training.keep_checkpoints=null", "training.log_interval=1"),
]
LIMIT_S = 300.0
"""Seconds after which a run hangs."""


def start(directory: Path, cache: Path) -> subprocess.Popen:
    """A process that trains in a directory. What it says is beside the directory."""
    paths = [f"paths.root_working_dir={directory.parent}", f"paths.model_name={directory.name}"]
    flags = "--xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "train", *SETTINGS, *paths, f"hardware.compilation_cache={cache}"]
    with directory.with_suffix(".said").open("wb") as said:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT)


def checkpoints(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each checkpoint, read with zarr alone. One that is being written has another name."""
    of = lambda path: {
        name: array[...]
        for name, array in zarr.open_group(path, mode="r").members(max_depth=None)
        if isinstance(array, zarr.Array)
    }
    paths = sorted((directory / "checkpoints").glob("*/zarr.json"))
    return {path.parent.name: of(path.parent) for path in paths if path.parent.name.isdigit()}


def losses(directory: Path) -> list[float]:
    """Losses of the steps."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "event" not in line]


def differing(directory: Path, whole: dict[str, dict[str, np.ndarray]]) -> list[str]:
    """Checkpoints of a run that are not those of the run that was not killed."""
    same = lambda a, b: a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    return [step for step, arrays in checkpoints(directory).items() if not same(arrays, whole[step])]


def kill(directory: Path, cache: Path, seconds: float, draw: random.Random) -> str | None:
    """Starts the run and kills it at a drawn moment, or while it saves. Returns when; None if the run ended before."""
    saves = lambda: {path.name for path in (directory / "checkpoints").glob("*")}
    before, begin, saving = saves(), time.monotonic(), draw.random() < 0.4
    process, moment = start(directory, cache), draw.uniform(0.03 if saving else 0, 0.1 if saving else seconds)
    while process.poll() is None:
        if saving and saves() - before:
            time.sleep(moment)
        elif saving or time.monotonic() - begin < moment:
            if time.monotonic() - begin > LIMIT_S:
                process.kill()
                raise TimeoutError(f"the run has not ended within {LIMIT_S:g} s")
            time.sleep(0.002)
            continue
        process.kill()
        process.wait()
        return "while it saved" if saving else f"after {moment:.1f} s"
    return None


def main() -> None:
    """Kills runs as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    draw, wrong, kills, runs = random.Random(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        unkilled, cache, begin = Path(scratch, "unkilled"), Path(scratch, "cache"), time.monotonic()
        if start(unkilled, cache).wait() != 0:
            raise SystemExit(unkilled.with_suffix(".said").read_text())
        whole, expected, seconds = checkpoints(unkilled), losses(unkilled), time.monotonic() - begin
        while kills < options.count:
            directory = Path(scratch, f"run{runs}")
            when = kill(directory, cache, seconds, draw)
            found = differing(directory, whole)
            if when is None:  # it came to its end
                found += ["losses"] if losses(directory) != expected else []
                runs += 1
            kills += when is not None
            wrong += bool(found)
            print(f"run {runs}, {f'killed {when}' if when else 'ended'}: {found or 'all equal'}", flush=True)
    print(f"{kills} kills of {runs + 1} runs; {wrong} times something differed")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
