"""Compares training steps of shardwright with those of other trainers: same shapes, tokens and
precision, in one run.

    python -m bench.throughput [--sizes 2m,10m] [--only ours,torch]

The contestants, each a file in peers/ and a process of its own:

    floor     not a trainer: only the matmuls of the step
    ours      the step of train.py, on the mesh of a configuration, without a document mask
    plain-jax a trainer in plain JAX, written as in JAX's training cookbook, jitted and donated
    torch     transformers' Llama in PyTorch: torch.compile, fused attention, fused AdamW
    seqax     the step of a checkout of seqax, with --seqax; matmuls in bf16, on the same mesh as
    ours

The model is Llama-like, with AdamW and gradient clipping, on sequences of one document each. The
batches are on the device before the start. Matmuls are in f32 on a CPU and in bf16 on a GPU; the
demo's are in bf16 if the CPU has instructions for it, as in `make demo`. The residual stream and
the logits have the dtype of the matmuls, and so has SwiGLU except in ours; everything else is in
f32. On a CPU all contestants stay alive and take turns. On a GPU, whose memory they cannot share,
they run one after the other. docs/performance.md (Compare with other trainers) explains the
columns.
"""

import dataclasses
import statistics
from pathlib import Path

from bench.common import parser_of
from bench.throughput.peers.job import Job, Shapes
from bench.throughput.processes import Contestant, run_rounds

MODULES = {"floor": "floor", "ours": "ours", "plain-jax": "plain_jax"}
MODULES |= {"torch": "torch_trainer", "seqax": "seqax_trainer"}


def _c4(name: str, d_model: int, d_ff: int, sequences: int) -> Job:
    shapes = Shapes(
        vocab=32768, d_model=d_model, layers=8, n_kv=16, n_q_per_kv=1, d_head=128, d_ff=d_ff
    )
    return Job("", shapes, sequences, 1024, config=f"flat_tokens_c4_a100x1_{name}")


CPU_SIZES = {
    "tiny": Job(
        "",
        Shapes(vocab=256, d_model=64, layers=2, n_kv=2, n_q_per_kv=2, d_head=16, d_ff=128),
        2,
        256,
    ),
    "2m": Job(
        "",
        Shapes(1280, 256, layers=2, n_kv=2, n_q_per_kv=2, d_head=32, d_ff=1024, rope_base=256),
        64,
        64,
    ),
    "10m": Job("", Shapes(4096, 384, layers=4, n_kv=3, n_q_per_kv=2, d_head=64, d_ff=1024), 4, 512),
}
"""Jobs by size, without a contestant. 2m is configs/model/demo.yaml."""
GPU_SIZES = {
    "270m": _c4("270m", 1024, 8192, 32),
    "1b": _c4("1b", 2048, 16384, 16),
    "2b": _c4("2b", 4096, 16384, 16),
}
"""As in configs/model."""
SIZES = CPU_SIZES | GPU_SIZES | {"demo": dataclasses.replace(CPU_SIZES["2m"], d=4, t=2)}


def jobs_of(
    size: str, names: list[str], dtype: str, platform: str, seqax: Path | None = None
) -> dict[str, Job]:
    """Returns the jobs by name, with the floor first, because the others' lines need it.

    `seqax` is its checkout.
    """
    job = dataclasses.replace(SIZES[size], dtype=dtype, platform=platform)
    found = {
        name: dataclasses.replace(job, contestant=MODULES[name])
        for name in MODULES
        if name in ("floor", *names)
    }
    if size == "demo":
        found.pop("torch", None)  # it has one device
    if "seqax" in found:
        found["seqax"] = dataclasses.replace(found["seqax"], checkout=str(seqax))
    return found


COLUMNS = {"tokens/s": 10, "median": 10, "floor": 7, "peak MiB": 10, "compile s": 10, "ratio": 7}
HEADER = " " * 12 + "".join(f"{name:>{width}}" for name, width in COLUMNS.items())


def dtype_of(size: str, platform: str) -> str:
    """Returns the dtype of the matmuls of a size."""
    if size == "demo":
        return "bf16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "f32"
    return "f32" if platform == "cpu" else "bf16"


def line_of(measured: Contestant, floor: Contestant, ours: Contestant | None) -> str:
    """Formats a line of the table.

    `ours` must have run before the contestants compared with it, or is None.
    """
    name = f"{measured.name:<12}"
    if measured.error:
        return f"{name}  failed: {measured.error}"
    best = min(measured.step_s)
    median = statistics.median(measured.step_s)
    job = measured.job
    ratio = ""
    if ours is not None and ours.error is None and measured not in (ours, floor):
        ratio = f"{best / min(ours.step_s):>7.2f}"
    of_floor = ""
    if floor.error is None and measured is not floor:
        of_floor = f"{min(floor.step_s) * (1 + job.attention_share) / best:.1%}"
    rates = f"{job.tokens / best:>10,.0f}{job.tokens / median:>10,.0f}{of_floor:>7}"
    return (
        f"{name}{rates}{measured.peak / 2**20:>10,.0f}{measured.ready['compile_s']:>10.1f}{ratio}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sizes", help=f"of {', '.join(SIZES)}; demo is the demo's run on 8 simulated devices"
    )
    parser.add_argument("--only", help=f"of {', '.join(MODULES)}; the floor always runs")
    parser.add_argument(
        "--seqax", type=Path, metavar="PATH", help="a checkout of seqax, to compare with its step"
    )
    parser.add_argument("--platform", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        metavar="S",
        help="seconds to compile, and for each round",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give at least 1")
    platform = options.platform
    seqax = options.seqax and options.seqax.resolve()
    sizes = (options.sizes or ("2m,10m,demo" if platform == "cpu" else ",".join(GPU_SIZES))).split(
        ","
    )
    names = str(options.only or "ours,plain-jax,torch" + ",seqax" * bool(seqax)).split(",")
    if wrong := [*({*sizes} - {*SIZES}), *({*names} - {*MODULES})]:
        parser.error(
            f"there is no {', '.join(wrong)}; sizes are {', '.join(SIZES)}, contestants "
            f"{', '.join(MODULES)}"
        )
    if platform == "gpu" and (wrong := {"demo", "seqax"} & {*sizes, *names}):
        parser.error(f"{' and '.join(sorted(wrong))} is for a CPU: drop it, or --platform gpu")
    if "seqax" in names and not (seqax and (seqax / ".venv/bin/python").exists()):
        parser.error(
            f"--seqax is {seqax}, not a checkout with an environment: make one as in "
            "docs/performance.md"
        )
    timing = options.rounds, options.seconds, platform == "cpu", options.limit
    for size in sizes:
        s = SIZES[size]
        dtype = dtype_of(size, platform)
        devices = ", 8 simulated devices" if size == "demo" else ""
        batch = f"{s.sequences} sequences of {s.length} tokens"
        title = f"{size}: {s.shapes.parameters:,} parameters, {batch}, {dtype}, {platform}{devices}"
        print(f"\n{title}\n{HEADER}", flush=True)
        if size == "demo" and "torch" in names:
            print("torch         is left out: it has one device")
        measured = {}
        for contestant in run_rounds(jobs_of(size, names, dtype, platform, seqax), *timing):
            measured[contestant.name] = contestant
            print(line_of(contestant, measured["floor"], measured.get("ours")), flush=True)


if __name__ == "__main__":
    main()
