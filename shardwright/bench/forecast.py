"""Counts how often a run ends inside the interval that tools.forecast wrote before it, on the shipped text.

    python -m bench.forecast

Ten times, each with seeds of its own for weights and data: nine small runs, of three widths and three lengths, a
forecast of a run with four times the parameters of the largest of them, and that run. Minutes on two CPU cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shardwright.run.files import read_metrics
from shardwright.run.forecast import read_forecast

REPETITIONS = 10
SMALL = ["model.d_model=32,64,96", "training.steps=60,120,240"]
LARGE = ["model.d_model=384", "training.steps=240"]
BOTH = ["--config-name=track", "model.layers=2", "optimizer.schedule_steps=${training.steps}"]
BOTH += ["optimizer.parametrization=mup", "optimizer.base={d_model: 96}"]
BOTH += ["training.eval_interval=${training.steps}", "training.checkpoint_interval=${training.steps}"]


def run(program: str, *words: str) -> None:
    command = [sys.executable, "-m", "shardwright", program, *BOTH, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    inside = 0
    print("seed   forecast, nats            val", flush=True)
    for seed in range(REPETITIONS):
        with tempfile.TemporaryDirectory() as directory:
            place = [f"paths.root_working_dir={directory}", f"training.seed={seed}"]
            run("train", "--multirun", *SMALL, *place, "paths.model_name=ladder")
            file = os.path.join(directory, "forecast.json")
            run("forecast", *LARGE, f"forecast.runs={directory}/ladder", f"forecast.output={file}")
            run("train", *LARGE, *place, "paths.model_name=large", f"training.forecast={file}")
            lines = read_metrics(Path(directory, "large", "metrics.jsonl"))
            (val,) = [line["loss"] for line in lines if line and line.get("event") == "validation"]
            said = read_forecast(Path(file)).end
        inside += said.low <= val <= said.high
        print(f"{seed:4}   {said.loss:.3f}, {said.low:.3f} to {said.high:.3f}   {val:.3f}", flush=True)
    print(json.dumps({"inside": inside, "of": REPETITIONS}))


if __name__ == "__main__":
    main()
