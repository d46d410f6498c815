"""Directories of runs, written by hand with everything that a page shows."""

import json
import math
from pathlib import Path
from typing import Any

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


def write_run(directory: Path, rate: float = 0.01, text: str = "It is a truth") -> Path:
    """A run that was stopped after 200 of 250 steps, with one skipped step, and resumed after
    100.
    """
    directory.mkdir(parents=True)
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
    samples = [
        {"step": step, "prompt": prompt, "text": f"{text} {step}\nand more", "ended": step == 200}
        for step in range(0, 201, 10)
        for prompt in ("", "Emma ")
    ]
    write_lines(directory / "samples.jsonl", samples)
    settings = {
        "model": {"module": "train", "vocab": 64, "layers": LAYERS},
        "optimizer": {"learning_rate": rate, "warmup_steps": 1},
        "training": {"batch_size": 8, "seq_len": 80, "steps": TOTAL, "seed": 0},
        "paths": {"root_working_dir": "runs", "model_name": None, "checkpoints": None},
    }
    (directory / "config.yaml").write_text(json.dumps(settings))
    defaults = {"training.seed": 0, "optimizer.warmup_steps": 100, "model.module": "train"}
    facts = {"total_steps": TOTAL, "tokens_per_step": 640, "parameters": 1_000_000}
    facts |= {"devices": "8 x cpu", "mesh": {"d": 8}, "peak_source": "measured here"}
    for start in (0, RESUMED):
        override = f"optimizer.learning_rate={rate}"
        about = {
            "commit": "0123456789abcdef",
            "command": ["python", "-m", "train", "--config-name=tiny", override],
            "python": "3.13.0",
            "packages": {"jax": "0.12.0", "numpy": "2.4.6"},
            "environment": {"JAX_PLATFORMS": "cpu"},
            "source": {"train.py": "ab" * 10},
            "programs": {"training": "cd" * 10},
            "started": f"2026-01-01T0{start // 100}:00:00Z",
            "recipe": "tiny",
            "overrides": [override],
            "defaults": defaults,
            "run": facts,
        }
        kept = directory / "source" / f"{start:010}"
        kept.mkdir(parents=True)
        (kept / "provenance.json").write_text(json.dumps(about))
    for step in (100, 200):
        place = directory / "checkpoints" / f"{step:010}"
        (place / "weights").mkdir(parents=True)
        (place / "weights" / "0").write_bytes(bytes(2**20))
        if step == 100:
            (place / "zarr.json").write_text("{}")
    return directory


HLO = "training_step_optimized_hlo_2026_01_01_00_00_00"
PROFILE = "plugins/profile/2026_01_01_00_00_09"


def write_step(run: Path) -> Path:
    """Files of the compiled step of a run on d=4 t=2, its plan, and its profile: 1.6 s of 8 devices
    in 2 steps.
    """
    no = {"dtype": "", "axes": "", "overlapped": None, "count": 1, "turns": 1, "sometimes": False}
    forward = no | {"where": "layers, forward", "section": 1, "phase": "forward", "turns": 12}
    backward = no | {"where": "outside of loops", "section": 0, "phase": "backward"}
    gather = {"line": "train.py:10", "kind": "collective", "what": "all-gather", "axes": "t d"}
    gather |= {"dtype": "f32", "overlapped": False, "size": 1024, "count": 3}
    scatter = {"line": "train.py:10", "kind": "collective", "what": "reduce-scatter", "axes": "t"}
    scatter |= {"dtype": "f32", "overlapped": True, "size": 2048}
    product = {"line": "~train.py:20", "kind": "matmul", "what": "100×100×100", "dtype": "bf16"}
    table = {
        "name": "training_step",
        "devices": 8,
        "mesh": {"d": 4, "t": 2},
        "sections": [
            {"kind": "program", "title": "training_step", "turns": 1, "parent": -1},
            {"kind": "loop", "title": "layers, forward", "turns": 12, "parent": 0},
        ],
        "rows": [forward | gather, forward | product | {"size": 2_000_000}, backward | scatter],
        "source": {"train.py:10": 'w = gather("M/d -> M", w)', "train.py:20": "y = x @ w"},
    }
    times = [
        {"line": line, "text": text, "seconds": seconds, "share": share}
        | {"collective": collective, "exposed": collective / 4}
        for line, text, seconds, share, collective in (
            ("train.py:20", "y = x @ w", 1.2, 0.75, 0.0),
            ("train.py:10", "old", 0.32, 0.2, 0.2),
            ("~train.py:20", "", 0.08, 0.05, 0.0),
        )
    ]
    profile = {"steps": 2, "devices": 8, "seconds": 1.6, "collective": 0.2, "exposed": 0.05}
    (run / PROFILE).mkdir(parents=True)
    (run / f"{HLO}.json").write_text(json.dumps(table))
    (run / f"{HLO}.svg").write_text("<svg/>")
    (run / f"{HLO}.txt").write_text("HloModule jit_training_step")
    (run / PROFILE / "perfetto_trace.json.gz").write_bytes(b"")
    text = json.dumps(profile | {"lines": times})
    (run / PROFILE / "profile_by_line.json").write_text(text)
    return write_plan(run)


def write_plan(run: Path) -> Path:
    """The plan of steps of 0.4 s, with an operation of line 20, two of line 10, and one that no
    profile shows.
    """
    gather = {"line": "train.py:10", "kind": "collective", "seconds": 0.008, "exposed": 0.002}
    gather |= {"what": "all_gather", "axes": ["d", "t"]}
    gather |= {"bytes": 1024.0, "size": 896.0, "count": 16.0}
    product = {"line": "~train.py:20", "kind": "matmul", "seconds": 0.1, "exposed": 0.1}
    product |= {"what": "100×100×100", "axes": [], "bytes": 0.0, "size": 2e6, "count": 12.0}
    moved = {"line": "train.py:30", "kind": "memory", "seconds": 0.003, "exposed": 0.003}
    plan = {"chip": "v5e", "seconds": 0.4, "seconds_low": 0.32, "seconds_high": 0.5}
    plan |= {"tokens_per_second": 1600.0, "mfu": 0.5}
    plan |= {"peak_bytes": 2 * 2**20, "memory_bytes": 2**34, "mesh": {"d": 4, "t": 2}}
    plan |= {"memory": [{"line": "train.py:20", "kind": "saved", "bytes": 64.0}]}
    plan |= {"work": [product, gather, gather, moved]}
    (run / "plan.json").write_text(json.dumps(plan))
    return run
