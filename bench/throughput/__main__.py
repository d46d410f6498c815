"""Compares training steps of shardwright with those of other trainers: same shapes, tokens and precision, in one run.

    python -m bench.throughput [--quick] [--sizes 2m,10m] [--only ours,torch] [--json FILE]

The contestants. Each is a file in peers/ and runs in its own process:

    ours      the step of train.py, on the mesh of a configuration, without the mask of documents
    cookbook  a trainer in plain JAX, written as in JAX's training cookbook, jitted and donated
    torch     transformers' Llama in PyTorch: torch.compile, fused attention, fused AdamW
    torch-max-autotune   the same, compiled with mode="max-autotune"; only if --only names it
    seqax     the step of a checkout of seqax, with --seqax; products in bf16, the mesh of ours
    floor     not a trainer: the products of the step alone

All train the same Llama-like model with AdamW and clipping, on sequences of one document each. The batches are on the
device before the start. bf16 means bf16 products with f32 weights and optimizer state. On a CPU all contestants stay
alive and take turns; a contestant that waits is stopped. On a GPU, whose memory they cannot share, one runs after the
other.

tokens/s is of the best round. MFU counts half of attention, the causal one, or all of it (full). floor: time of the
floor as a part of the time of the step. Memory: the peak of the process, and of its steps alone, above its imports; on
a GPU the allocator's peak. Compile time: of the first step.
"""

import argparse
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.throughput.figures import HEADER, PARTS_HEADER, figures, line_of, parts_of, ratios
from bench.throughput.jobs import GPU_SIZES, MODULES, SIZES, check_seqax, jobs_of, missing
from bench.throughput.rounds import Measured, Timing, compare


def has_gpu() -> bool:
    """Looks for an NVIDIA GPU, without starting it."""
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True).returncode == 0


def head_of(size: str, dtype: str, platform: str) -> str:
    """The lines above the table of a size."""
    s = SIZES[size]
    devices = ", 8 simulated devices" if size == "demo" else ""
    batch = f"{s.sequences} sequences of {s.length} tokens"
    return f"\n{size}: {s.shapes.parameters:,} parameters, {batch}, {dtype}, {platform}{devices}\n{HEADER}"


def main() -> None:
    """Runs the comparisons that the command line names."""
    parser = argparse.ArgumentParser(
        "python -m bench.throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}; demo is the demo's run on 8 simulated devices")
    parser.add_argument("--only", help=f"of {', '.join(MODULES)}; the floor always runs")
    parser.add_argument("--seqax", type=Path, metavar="PATH", help="a checkout of seqax; its step is compared too")
    parser.add_argument("--platform", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="f32 on a CPU, bf16 on a GPU and for the demo")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--seconds", type=float, help="of a turn, about")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--one-at-a-time", action="store_true", help="as on a GPU")
    parser.add_argument(
        "--extra-settings",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="ours once more with these settings of train.py, or sequences=, microbatches=; may be given several times",
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds that a contestant has to compile")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for all of it")
    parser.add_argument("--parts", action="store_true", help="the time of ours by kind of kernel, beside the least")
    parser.add_argument("--json", type=Path, help="file for all figures; those that it has already are kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the contestants
    platform = options.platform if options.platform != "auto" else "gpu" if has_gpu() else "cpu"
    sizes = (
        options.sizes.split(",") if options.sizes else ["2m", "10m", "demo"] if platform == "cpu" else list(GPU_SIZES)
    )
    if wrong := [size for size in sizes if size not in SIZES]:
        parser.error(f"--sizes has {', '.join(wrong)}; choose of {', '.join(SIZES)}")
    names = options.only.split(",") if options.only else [name for name in MODULES if name != "torch-max-autotune"]
    if options.seqax:
        options.seqax = options.seqax.resolve()
        try:
            check_seqax(options.seqax)
        except ValueError as error:
            parser.error(str(error))
        names += ["seqax"] if "seqax" not in names else []
    elif options.only and "seqax" in names:
        parser.error("seqax is compared with --seqax=PATH, the directory of its checkout")
    else:
        names = [name for name in names if name != "seqax"]
    names += ["floor"] if "floor" not in names else []
    timing = Timing(
        rounds=options.rounds or (3 if options.quick or platform == "gpu" else 5),
        seconds=options.seconds or (1.0 if options.quick else 2.0),
        take_turns=platform == "cpu" and not options.one_at_a_time,
        limit=options.limit,
        until=time.monotonic() + options.deadline,
    )
    for name in list(names):
        if why := missing(name):
            print(why, flush=True)
            names.remove(name)
    new: list[str] = []  # lines of the table of kernels
    record = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for size in sizes:
        dtype = options.dtype or ("f32" if platform == "cpu" and size != "demo" else "bf16")
        kind = {"dtype": dtype, "platform": platform, **dataclasses.asdict(SIZES[size])}
        of_size = record.setdefault(size, {**kind, "contestants": {}})
        if any(of_size[key] != value for key, value in kind.items()):
            raise SystemExit(f"{options.json} has other figures of {size}: of {of_size} instead of {kind}")
        found = of_size["contestants"]
        print(head_of(size, dtype, platform), flush=True)

        def show(measured: Measured, size=size, found=found) -> None:
            found[measured.label] = figures(measured, found.get("floor"))
            new.extend(parts_of(size, {measured.label: found[measured.label]}))
            print(line_of(found[measured.label]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(record, indent=1))

        jobs = jobs_of(size, names, dtype, platform, options.extra_settings, options.seqax, options.parts)
        done = {label for label, its in found.items() if its["error"] is None}
        compare({label: job for label, job in jobs.items() if label not in done}, timing, show)
    print()
    for size, of_size in record.items():
        if lines := ratios(size, of_size["contestants"]):
            print(lines)
    if new:
        print(PARTS_HEADER, *new, sep="\n")


if __name__ == "__main__":
    main()
