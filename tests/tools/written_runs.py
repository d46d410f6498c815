"""A run written by hand, with everything that a page shows: tests/data/written_run, and metrics."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data/written_run"
STEPS, LAYERS, TOTAL = 200, 12, 250
SKIPPED, RESUMED = 90, 100


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def look(step: int) -> dict[str, Any]:
    """The event of the microscope: activations with four layers, and a weight outside of the
    layers.
    """
    none = {"zeros": 0.0, "bf16": 0.0}
    layers = {"rms": [1.5, 2.5, 3.5, 4.5], "max": [8.0] * 4, "fp8": [0.0, 0.0, 0.0, 0.5]}
    layers |= {"zeros": [0.0] * 4, "bf16": [0.0] * 4}
    gate = {"name": "Llama.layer gate", "place": "train.py:159"} | layers
    gradient = none | {"rms": 0.25 / (step + 1), "max": "Infinity", "fp8": 0.003}
    embed = none | {"name": "embed", "rms": 0.125, "max": 2.0, "fp8": 0.0, "update": 0.0625}
    weights = [embed | {"gradient": gradient}]
    return {"step": step + 1, "event": "microscope", "points": [gate], "weights": weights}


def write_run(directory: Path, rate: float = 0.01) -> Path:
    """A run that was stopped after 200 of 250 steps, with one skipped step, and resumed after
    100.
    """
    shutil.copytree(DATA / "run", directory)
    lines: list[dict[str, Any]] = []
    for step in range(STEPS):
        loss = 2 + 4 * math.exp(-step * rate) + 0.1 * math.sin(7 * step)
        norm = 5 * math.exp(-step / 75) * (1 + 0.2 * math.cos(step))
        line = {"step": step + 1, "loss": loss, "grad_norm": norm}
        line |= {"learning_rate": rate * (1 - step / TOTAL), "noise": 1 / (step + 1)}
        line |= {"stream": [loss + layer / 10 for layer in range(LAYERS)], "pair": [loss, 2 * loss]}
        if step == SKIPPED:
            line |= {"loss": "NaN", "skipped": True}
        line |= {"tokens": 640 * (step + 1)}
        if step % RESUMED:
            line |= {"seconds": 0.5, "tokens_per_second": 1280 + step, "mfu": 1.2}
        lines.append(line)
        if step % 50 == 49:
            validation = {"loss": loss + 0.2, "bits_per_byte": loss / 2 + 0.1}
            lines.append({"step": step + 1, "event": "validation"} | validation)
    memory = {"peak_memory_bytes": 3 * 2**20, "source": "compiler"}
    lines.append({"step": 1, "event": "memory"} | memory)
    lines.append({"step": 8, "event": "step_bubble", "step_bubble": 0.0123})
    why = {"why": "the loss is NaN", "batch": 90, "documents": []}
    lines.append({"step": SKIPPED + 1, "event": "skipped"} | why)
    lines += [look(step) for step in (0, 100)]
    lines.append({"step": STEPS, "event": "end", "state": "stopped", "why": "SIGTERM"})
    write_lines(directory / "metrics.jsonl", lines)
    text = "It is a truth {}\nand more"
    samples = [
        {"step": step, "prompt": prompt, "text": text.format(step), "ended": step == 200}
        for step in range(0, 201, 10)
        for prompt in ("", "Emma ")
    ]
    write_lines(directory / "samples.jsonl", samples)
    return directory


HLO = "training_step_optimized_hlo_2026_01_01_00_00_00"
PROFILE = "plugins/profile/2026_01_01_00_00_09"


def write_step(run: Path) -> Path:
    """Files of the compiled step of a run on d=4 t=2; its plan of steps of 0.4 s, with an operation
    of line 20, two of line 10, and one that no profile shows; and its profile: 1.6 s of 8 devices
    in 2 steps.
    """
    return Path(shutil.copytree(DATA / "step", run, dirs_exist_ok=True))
