"""Time and peak memory of the page of a long run, from metrics of as many steps as are asked for.

    python -m benchmarks.report 1_000_000 10_000_000

The metrics have what a run writes of a step, a validation after every 1,000 steps, and two layers' numbers.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write(directory: Path, steps: int) -> None:
    """Writes the metrics of a run of so many steps."""
    draw = random.Random(0)
    block = [draw.gauss(0, 0.05) for _ in range(997)]
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(steps):
            noise = block[step % 997]
            loss = 2 + 6 / (1 + step / 100) ** 0.5 + noise
            line = {"step": step, "loss": loss, "grad_norm": 0.5 + abs(noise), "learning_rate": 0.003 - 1e-12 * step}
            line |= {"spread": [0.1 + noise, 0.2 - noise], "tokens": 4096 * (step + 1), "seconds": 0.25 + noise / 10}
            line |= {"tokens_per_second": 16384 - noise, "mfu": 0.41 + noise / 10, "mfu_full_attention": 0.43 + noise}
            file.write(json.dumps(line) + "\n")
            if step % 1000 == 999:
                file.write(json.dumps({"step": step, "event": "validation", "loss": loss + 0.1}) + "\n")


def measure(steps: int) -> None:
    """Writes a run, makes its page, and prints what that took."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), steps)
        size = (Path(name) / "metrics.jsonl").stat().st_size
        start = time.perf_counter()
        command = [sys.executable, "-m", "tools.report", f"run={name}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"tools.report ended with status {status}")
        core, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10
        what = f"{seconds:.1f} s, {core:.1f} s of a core, {memory:,.0f} MiB at most"
        print(f"{steps:,} steps, {size / 2**30:.2f} GiB: {what}", flush=True)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        measure(int(given))
