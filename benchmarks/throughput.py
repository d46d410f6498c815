"""Training steps of shardwright and of other trainers: the same shapes, tokens and precision, in one run, as ratios.

    python -m benchmarks.throughput [--quick] [--sizes 2m,10m] [--only ours,torch] [--json FILE] [--check]

The contestants, each of which is a file of benchmarks/peers and a process of its own:

    ours      the step of train.py, on the mesh of a configuration; it alone handles several documents in a row
    nnx       a trainer in Flax NNX and optax, written as in their tutorials, jitted and donated
    cookbook  a trainer in plain JAX, written as in JAX's training cookbook, jitted and donated
    torch     transformers' Llama in PyTorch: torch.compile, fused attention, fused AdamW
    floor     no trainer: the products of the step alone

All train the same Llama-like model with AdamW and clipping, on rows of one document each, from batches that are on
the device already; bf16 is bf16 products over f32 weights and optimizer state. On a CPU all stay alive and take turns,
those that wait stopped; on a GPU, whose memory they could not share, each has all its rounds at a stretch.

tokens/s is of the best round. MFU counts half of attention, the causal one, or all of it (full). floor: what part of
the step's time the floor took. Memory: of the process at its highest, and of its steps alone, above its imports; on a
GPU the allocator's own peak. Compile time: of the first step.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Shapes
from benchmarks.peers.worker import MARK

ROOT = Path(__file__).parent.parent

MODULES = {
    "ours": "ours",
    "nnx": "nnx_trainer",
    "cookbook": "cookbook_trainer",
    "torch": "torch_trainer",
    "floor": "floor",
}
NEEDS = {
    "nnx": (("flax", "optax"), "pip install -e '.[bench]' -c constraints/py3.11.txt"),
    "cookbook": ((), ""),
    "torch": (("torch", "transformers"), "pip install torch transformers"),
    "ours": (("jax", "hydra", "omegaconf", "tensorstore", "zarr"), "pip install -e ."),
    "floor": (("jax",), "pip install -e ."),
}


@dataclasses.dataclass(frozen=True)
class Size:
    shapes: Shapes
    rows: int
    length: int


def _c4(d_model: int, n_kv: int, d_ff: int) -> Shapes:
    return Shapes(vocab=32768, d_model=d_model, layers=8, n_kv=n_kv, n_q_per_kv=1, d_head=128, d_ff=d_ff)


CPU_SIZES = {
    "tiny": Size(Shapes(vocab=256, d_model=64, layers=2, n_kv=2, n_q_per_kv=2, d_head=16, d_ff=128), 4, 64),
    "2m": Size(Shapes(1280, 256, layers=2, n_kv=2, n_q_per_kv=2, d_head=32, d_ff=1024, rope_base=256), 64, 64),
    "4m": Size(Shapes(2048, 256, layers=4, n_kv=4, n_q_per_kv=2, d_head=32, d_ff=704), 8, 256),
    "10m": Size(Shapes(4096, 384, layers=4, n_kv=3, n_q_per_kv=2, d_head=64, d_ff=1024), 4, 512),
}
"""2m is configs/model/demo.yaml."""
GPU_SIZES = {
    "124m": Size(Shapes(50304, 768, layers=12, n_kv=12, n_q_per_kv=1, d_head=64, d_ff=2048), 32, 1024),
    "270m": Size(_c4(1024, 16, 8192), 32, 1024),
    "540m": Size(_c4(2048, 16, 8192), 32, 1024),
    "1b": Size(_c4(2048, 16, 16384), 16, 1024),
    "2b": Size(_c4(4096, 16, 16384), 16, 1024),
}
"""270m to 2b are those of configs/model. 124m has the products of GPT-2: 124M parameters without the input table."""
SIZES = CPU_SIZES | GPU_SIZES

MFU_MARKS = {"124m": 0.45, "540m": 0.55, "1b": 0.55, "2b": 0.60}
"""Full-attention MFU in bf16 on an H200."""


# ---- processes ----------------------------------------------------------------------------------------------------


class ContestantError(Exception):
    """A contestant ended, or took too long; the text is the end of what it said."""


class Process:
    """A contestant's process, and the events that it has sent."""

    def __init__(self, label: str, job: Job, scratch: Path):
        self.label, self.job = label, job
        self.errors = scratch / f"{label.replace('/', '_')[:80]}.stderr"
        self.events: queue.Queue[dict | None] = queue.Queue()
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.worker", job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(job, scratch),
                start_new_session=True,  # so that what it starts can be stopped and ended with it
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.events.put(json.loads(line.removeprefix(MARK)))
        self.events.put(None)

    def wait(self, event: str, timeout: float) -> dict[str, Any]:
        """The next event, which must be `event`."""
        try:
            found = self.events.get(timeout=max(timeout, 0.1))
        except queue.Empty:
            raise ContestantError(f"no {event} within {timeout:.0f} s") from None
        if found is None:
            lines = [line for line in self.errors.read_text().splitlines() if line.strip()]
            raise ContestantError(f"ended with {self.process.wait()}: {lines[-1][:300] if lines else 'no word'}")
        assert found["event"] == event, (found, event)
        return found

    def steps(self, n: int, timeout: float) -> dict[str, Any]:
        self.tell(f"{n}\n")
        return self.wait("steps", timeout)

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `wait` then says how it ended
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def finish(self, timeout: float) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.wait("end", timeout)

    def signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


def environment(job: Job, scratch: Path) -> dict[str, str]:
    """Without caches of compiled programs that outlive the run, unless they were asked for."""
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"] = str(scratch / "inductor"), str(scratch / "triton")
    if existing := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + existing
    if job.platform == "cpu":
        env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        if job.devices > 1:
            flag = f"--xla_force_host_platform_device_count={job.devices}"
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
    else:
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return env


# ---- one comparison -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Measured:
    """What one contestant gave. Times in seconds, memory in bytes."""

    label: str
    job: Job
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    imports_memory: int = 0
    compile_s: float = 0.0
    rounds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    host_peak: int = 0
    steps_peak: int = 0
    device_peak: int | None = None
    error: str | None = None

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.best

    @property
    def peak(self) -> int:
        return self.device_peak or self.host_peak


@dataclasses.dataclass(frozen=True)
class Timing:
    rounds: int
    seconds: float
    """Of a turn, about."""
    take_turns: bool
    limit: float
    """Seconds that a contestant has to build and compile, and again for its rounds."""


def compare(jobs: dict[str, Job], timing: Timing, show=lambda measured: None) -> dict[str, Measured]:
    """Runs each job, and calls `show` with each result as it comes."""
    found = {label: Measured(label, job) for label, job in jobs.items()}
    processes: dict[str, Process] = {}
    turns: dict[str, int] = {}

    def guarded(label, work) -> None:
        if found[label].error is None:
            try:
                work(label)
            except ContestantError as error:
                found[label].error = str(error)
                if label in processes:
                    processes[label].end()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, contextlib.ExitStack() as cleanup:

        def start(label) -> None:
            processes[label] = process = Process(label, jobs[label], Path(scratch))
            cleanup.callback(process.end)
            until = time.monotonic() + timing.limit
            found[label].imports_memory = process.wait("imported", timing.limit)["memory"]["peak"]
            ready = process.wait("ready", until - time.monotonic())
            found[label].compile_s, found[label].losses = ready["compile_s"], ready["losses"]
            found[label].about, found[label].host_peak = ready["about"], ready["highest"]
            turns[label] = max(1, round(timing.seconds / ready["step_s"]))

        def turn(label) -> None:
            steps = processes[label].steps(turns[label], timing.limit)
            found[label].rounds.append(steps["seconds"] / turns[label])
            found[label].losses += steps["losses"]
            turns[label] = max(1, round(timing.seconds / found[label].rounds[-1]))

        def finish(label) -> None:
            end = processes[label].finish(60)
            found[label].steps_peak, found[label].device_peak = end["memory"]["peak"], end["device_peak"]
            found[label].host_peak = max(found[label].host_peak, found[label].steps_peak)
            processes[label].end()

        if timing.take_turns:
            for label in jobs:
                guarded(label, start)
                if label in processes:
                    processes[label].signal(signal.SIGSTOP)
            for i in range(timing.rounds):
                order = list(jobs)
                for label in order[i % len(order) :] + order[: i % len(order)]:
                    if label in processes:
                        processes[label].signal(signal.SIGCONT)
                        guarded(label, turn)
                        processes[label].signal(signal.SIGSTOP)
            for label in jobs:
                if label in processes:
                    processes[label].signal(signal.SIGCONT)
                guarded(label, finish)
                show(found[label])
        else:
            for label in jobs:
                guarded(label, start)
                for _ in range(timing.rounds):
                    guarded(label, turn)
                guarded(label, finish)
                show(found[label])
    return found


# ---- what it means --------------------------------------------------------------------------------------------------


def flops_per_token(job: Job) -> tuple[float, float]:
    """training_io.flops_of_model's figures, causal and full; tests/test_throughput.py holds this to them."""
    c = job.shapes
    n, attention = c.parameters - c.vocab * c.d_model, c.layers * c.heads * c.d_head * job.length
    return 6 * n + 6 * attention, 6 * n + 12 * attention


def figures(m: Measured, floor: Measured | None) -> dict[str, Any]:
    """All of one contestant's numbers, for the table and for --json."""
    row: dict[str, Any] = {"label": m.label, "contestant": m.job.contestant, "error": m.error}
    if m.error is not None:
        return row
    row |= {"tokens_per_s": m.tokens_per_s, "tokens_per_s_median": m.job.tokens / statistics.median(m.rounds)}
    row |= {"step_s": m.rounds, "compile_s": m.compile_s, "peak_bytes": m.peak, "host_peak_bytes": m.host_peak}
    row |= {"steps_peak_bytes": m.steps_peak, "device_peak_bytes": m.device_peak}
    row |= {"imports_bytes": m.imports_memory, "about": m.about, "losses": m.losses[:8]}
    if floor and floor.error is None and m.job.contestant != "floor":
        causal, full = (x * m.tokens_per_s / floor.about["peak"] for x in flops_per_token(m.job))
        floor_s = floor.best * (1 + floor.about["attention_share"])
        row |= {"mfu_causal": causal, "mfu_full": full, "floor_s": floor_s, "of_floor": floor_s / m.best}
    return row


COLUMNS = {"": 34, "tokens/s": 10, "median": 10, "MFU": 7, "full": 7, "floor": 7, "peak MiB": 10, "steps": 8}
HEADER = "".join(f"{name:>{width}}" for name, width in (COLUMNS | {"compile s": 10}).items())


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['label']:<34}"
    if row["error"]:
        return f"{name}  failed: {row['error']}"
    cells = f"{row['tokens_per_s']:>10,.0f}{row['tokens_per_s_median']:>10,.0f}"
    share = lambda key: f"{row[key]:>7.1%}" if key in row else f"{'':>7}"
    cells += share("mfu_causal") + share("mfu_full") + share("of_floor")
    peak = f"{row['peak_bytes'] / 2**20:>10,.0f}"
    above = row["steps_peak_bytes"] - row["imports_bytes"]
    return f"{name}{cells}{peak}{f'+{above / 2**20:,.0f}':>8}{row['compile_s']:>10.1f}"


@dataclasses.dataclass
class Target:
    name: str
    value: float
    goal: float
    """At least this."""

    @property
    def met(self) -> bool:
        return self.value >= self.goal

    def __str__(self) -> str:
        said = "met" if self.met else f"missed by {1 - self.value / self.goal:.0%}"
        return f"target  {self.name}: {self.value:.3g}, at least {self.goal:.3g}: {said}"


def targets(size: str, rows: dict[str, dict], platform: str) -> list[Target]:
    """What `ours` should reach, of those that were measured."""
    ran = {label: row for label, row in rows.items() if row["error"] is None}
    if "ours" not in ran:
        return []
    ours, found = ran["ours"], []
    ratio = lambda peer: ours["tokens_per_s"] / ran[peer]["tokens_per_s"]
    if platform == "cpu":
        found += [Target(f"{size}, times nnx's tokens/s", ratio("nnx"), 1.1)] if "nnx" in ran else []
        found += [Target(f"{size}, times torch's tokens/s", ratio("torch"), 1.0)] if "torch" in ran else []
        for peer in ("nnx", "torch"):
            if peer in ran:
                less = ran[peer]["peak_bytes"] / ours["peak_bytes"]
                found.append(Target(f"{size}, {peer}'s memory over ours", less, 1.0))
        return found
    found += [Target(f"{size}, times torch's tokens/s", ratio("torch"), 1.1)] if "torch" in ran else []
    if size in MFU_MARKS and "mfu_full" in ours:
        found.append(Target(f"{size}, MFU with full attention", ours["mfu_full"], MFU_MARKS[size]))
    return found


def ratios(rows: dict[str, dict]) -> str:
    """Ours over each of the others."""
    ran = {label: row for label, row in rows.items() if row["error"] is None and row["contestant"] != "floor"}
    if "ours" not in ran:
        return ""
    cells = []
    for label, row in ran.items():
        if label != "ours":
            best, median = (ran["ours"][key] / row[key] for key in ("tokens_per_s", "tokens_per_s_median"))
            cells.append(f"{best:.2f} × {label} ({median:.2f} by medians)")
    return "ours is " + ", ".join(cells) if cells else ""


# ---- program --------------------------------------------------------------------------------------------------------


def missing(name: str) -> str | None:
    """Why a contestant cannot run here, or None."""
    modules, remedy = NEEDS[name]
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"{name} is skipped: no {' and no '.join(lacking)} here; {remedy}" if lacking else None


def has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--only", help=f"of {', '.join(MODULES)}; the floor always runs")
    parser.add_argument("--platform", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="f32 on a CPU, bf16 on a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--seconds", type=float, help="of a turn, about")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--one-at-a-time", action="store_true", help="as on a GPU")
    parser.add_argument("--limit", type=float, default=300, help="seconds a contestant has to compile")
    parser.add_argument("--json", type=Path, help="write all figures there, after each size")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    options = parser.parse_args()
    platform = options.platform if options.platform != "auto" else "gpu" if has_gpu() else "cpu"
    sizes = options.sizes.split(",") if options.sizes else ["2m", "10m"] if platform == "cpu" else list(GPU_SIZES)
    names = options.only.split(",") if options.only else list(MODULES)
    names += ["floor"] if "floor" not in names else []
    dtype = options.dtype or ("f32" if platform == "cpu" else "bf16")
    timing = Timing(
        rounds=options.rounds or (3 if options.quick or platform == "gpu" else 5),
        seconds=options.seconds or (1.0 if options.quick else 2.0),
        take_turns=platform == "cpu" and not options.one_at_a_time,
        limit=options.limit,
    )
    for name in list(names):
        if why := missing(name):
            print(why, flush=True)
            names.remove(name)
    record, reached = {}, []
    for size in sizes:
        s = SIZES[size]
        job = Job("", s.shapes, s.rows, s.length, dtype, platform)
        order = sorted(names, key=lambda name: name != "floor")  # the others' shares need it
        jobs = {name: dataclasses.replace(job, contestant=MODULES[name]) for name in order}
        print(
            f"\n{size}: {s.shapes.parameters:,} parameters, {s.rows} rows of {s.length} tokens, {dtype}, {platform}\n"
            f"{HEADER}",
            flush=True,
        )
        floors: list[Measured] = []

        def show(measured: Measured, floors=floors) -> None:
            if measured.job.contestant == "floor":
                floors.append(measured)
            print(line_of(figures(measured, *floors or [None])), flush=True)

        found = compare(jobs, timing, show)
        rows = {label: figures(measured, found.get("floor")) for label, measured in found.items()}
        print(ratios(rows))
        for target in targets(size, rows, platform):
            reached.append(target)
            print(target, flush=True)
        record[size] = {"shapes": dataclasses.asdict(s.shapes), "rows": s.rows, "length": s.length, "dtype": dtype}
        record[size] |= {"platform": platform, "contestants": rows}
        if options.json:
            options.json.write_text(json.dumps(record, indent=1))
    if options.check:
        raise SystemExit(any(not target.met for target in reached))


if __name__ == "__main__":
    main()
