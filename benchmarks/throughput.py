"""Training steps of shardwright and of other trainers: the same shapes, tokens and precision, in one run, as ratios.

    python -m benchmarks.throughput [--quick] [--sizes 2m,10m] [--only ours,torch] [--json FILE] [--check]

The contestants, each of which is a file of benchmarks/peers and a process of its own:

    ours      the step of train.py, on the mesh of a configuration; here without its mask of documents
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
    "nnx": (("flax", "optax"), "pip install -e '.[bench]'"),
    "cookbook": ((), ""),
    "torch": (("torch", "transformers"), "pip install torch transformers"),
    "ours": (("jax", "hydra", "omegaconf", "tensorstore", "rich"), "pip install -e ."),
    "floor": (("jax",), "pip install -e ."),
}


@dataclasses.dataclass(frozen=True)
class Size:
    shapes: Shapes
    rows: int
    length: int
    config: str = "local_test_synthetic"


def _c4(d_model: int, n_kv: int, d_ff: int) -> Shapes:
    return Shapes(vocab=32768, d_model=d_model, layers=8, n_kv=n_kv, n_q_per_kv=1, d_head=128, d_ff=d_ff)


def _config(name: str) -> str:
    return f"flat_tokens_c4_a100x1_{name}"


CPU_SIZES = {
    "tiny": Size(Shapes(vocab=256, d_model=64, layers=2, n_kv=2, n_q_per_kv=2, d_head=16, d_ff=128), 2, 256),
    "2m": Size(Shapes(1280, 256, layers=2, n_kv=2, n_q_per_kv=2, d_head=32, d_ff=1024, rope_base=256), 64, 64),
    "4m": Size(Shapes(2048, 256, layers=4, n_kv=4, n_q_per_kv=2, d_head=32, d_ff=704), 8, 256),
    "10m": Size(Shapes(4096, 384, layers=4, n_kv=3, n_q_per_kv=2, d_head=64, d_ff=1024), 4, 512),
}
"""2m is configs/model/demo.yaml."""
GPU_SIZES = {
    "124m": Size(Shapes(50304, 768, layers=12, n_kv=12, n_q_per_kv=1, d_head=64, d_ff=2048), 64, 1024, _config("84m")),
    "270m": Size(_c4(1024, 16, 8192), 32, 1024, _config("270m")),
    "540m": Size(_c4(2048, 16, 8192), 32, 1024, _config("540m")),
    "1b": Size(_c4(2048, 16, 16384), 16, 1024, _config("1b")),
    "2b": Size(_c4(4096, 16, 16384), 16, 1024, _config("2b")),
}
"""270m to 2b are those of configs/model. 124m has the products of GPT-2: 124M parameters without the input table."""
SIZES = CPU_SIZES | GPU_SIZES | {"demo": CPU_SIZES["2m"]}
DEMO_GOAL, DEMO_PLAIN = 20_000, 13_000
"""Tokens/s of the demo on 8 simulated devices, and of a plain f32 step where that was set as the goal."""

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
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

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
        self.reader.join(timeout=10)  # until the pipe's end: what the process started is gone too
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


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
        # Without a platform by name, JAX would go on with the CPU where it cannot use the GPU.
        env |= {"JAX_PLATFORMS": "cuda", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if job.contestant != "ours":  # whose configuration says it
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
    """Whether all stay alive; otherwise one after the other."""
    limit: float
    """Seconds that a contestant has to build and compile, and again for each turn."""
    until: float = float("inf")
    """On time.monotonic: nothing goes on beyond this."""

    def left(self, limit: float | None = None) -> float:
        return min(self.limit if limit is None else limit, self.until - time.monotonic())


class Run:
    """One contestant's way through its events; what goes wrong is kept, and the others go on."""

    def __init__(self, measured: Measured, timing: Timing, scratch: Path):
        self.measured, self.timing, self.scratch = measured, timing, scratch
        self.process: Process | None = None
        self.n = 1

    def _guarded(self, work) -> None:
        if self.measured.error is None:
            try:
                work()
            except ContestantError as error:
                self.measured.error = str(error)
                self.end()

    def launch(self) -> None:
        """Starts it; it goes as far as its imports."""
        if self.process is None:
            self.process = Process(self.measured.label, self.measured.job, self.scratch)

    def build(self) -> None:
        def work():
            self.launch()
            imported = self.process.wait("imported", self.timing.left())
            self.measured.imports_memory = imported["memory"]["peak"]
            self.process.tell("build\n")
            ready = self.process.wait("ready", self.timing.left())
            self.measured.compile_s, self.measured.losses = ready["compile_s"], ready["losses"]
            self.measured.about, self.measured.host_peak = ready["about"], ready["highest"]
            self.n = max(1, round(self.timing.seconds / ready["step_s"]))

        self._guarded(work)

    def turn(self) -> None:
        def work():
            steps = self.process.steps(self.n, self.timing.left())
            self.measured.rounds.append(steps["seconds"] / self.n)
            self.measured.losses += steps["losses"]
            self.n = max(1, round(self.timing.seconds / self.measured.rounds[-1]))

        self._guarded(work)

    def finish(self) -> None:
        def work():
            end = self.process.finish(self.timing.left(60))
            self.measured.steps_peak, self.measured.device_peak = end["memory"]["peak"], end["device_peak"]
            self.measured.host_peak = max(self.measured.host_peak, self.measured.steps_peak)

        self._guarded(work)
        self.end()

    def pause(self) -> None:
        if self.process:
            self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process:
            self.process.signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process:
            self.process.end()
        self.process = None


def compare(jobs: dict[str, Job], timing: Timing, show=lambda measured: None) -> dict[str, Measured]:
    """Runs each job, and calls `show` with each result as it comes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, contextlib.ExitStack() as cleanup:
        runs = [Run(Measured(label, job), timing, Path(scratch)) for label, job in jobs.items()]
        for run in runs:
            cleanup.callback(run.end)
        (_in_turns if timing.take_turns else _one_by_one)(runs, timing, show)
        return {run.measured.label: run.measured for run in runs}


def _in_turns(runs: list[Run], timing: Timing, show) -> None:
    for run in runs:
        run.build()
        run.pause()
    for i in range(timing.rounds):
        first = i % len(runs)
        for run in runs[first:] + runs[:first]:
            run.go_on()
            run.turn()
            run.pause()
    for run in runs:
        run.go_on()
        run.finish()
        show(run.measured)


NEEDED_S = 30
"""With less time left than this, nothing is started any more."""


def _one_by_one(runs: list[Run], timing: Timing, show) -> None:
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        if timing.left(float("inf")) < NEEDED_S:
            run.measured.error = "not measured: no time was left"
        else:
            run.launch()
            if following and timing.left(float("inf")) > 3 * NEEDED_S:
                following.launch()  # its imports pass meanwhile
            run.build()
            for _ in range(timing.rounds):
                run.turn()
        run.finish()
        show(run.measured)


# ---- what it means --------------------------------------------------------------------------------------------------


def flops_per_token(job: Job) -> tuple[float, float]:
    """training_io.flops_of_model's figures, causal and full; tests/test_throughput.py holds this to them."""
    c = job.shapes
    n, attention = c.parameters - c.vocab * c.d_model, c.layers * c.heads * c.d_head * job.length
    return 6 * n + 6 * attention, 6 * n + 12 * attention


def figures(m: Measured, floor: dict[str, Any] | None) -> dict[str, Any]:
    """All of one contestant's numbers, for the table and for --json. `floor`: these figures of the floor."""
    row: dict[str, Any] = {"label": m.label, "contestant": m.job.contestant, "error": m.error, "tokens": m.job.tokens}
    if m.error is not None:
        return row
    row |= {"tokens_per_s": m.tokens_per_s, "tokens_per_s_median": m.job.tokens / statistics.median(m.rounds)}
    row |= {"step_s": m.rounds, "compile_s": m.compile_s, "peak_bytes": m.peak, "host_peak_bytes": m.host_peak}
    row |= {"steps_peak_bytes": m.steps_peak, "device_peak_bytes": m.device_peak, "imports_bytes": m.imports_memory}
    row |= {"about": m.about, "settings": m.job.settings, "losses": m.losses[:8]}
    if floor and floor["error"] is None and m.job.contestant != "floor":
        floor_per_token = min(floor["step_s"]) * (1 + floor["about"]["attention_share"]) / floor["tokens"]
        # Where the peak is measured, on a machine with other work, the floor may have had the better moment.
        peak = max(floor["about"]["peak"], flops_per_token(m.job)[0] / floor_per_token)
        causal, full = (x * m.tokens_per_s / peak for x in flops_per_token(m.job))
        row |= {"mfu_causal": causal, "mfu_full": full, "of_floor": floor_per_token * m.tokens_per_s}
    return row


COLUMNS = {"": 44, "tokens/s": 10, "median": 10, "MFU": 7, "full": 7, "floor": 7, "peak MiB": 10, "steps": 8}
HEADER = "".join(f"{name:>{width}}" for name, width in (COLUMNS | {"compile s": 10}).items())


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['label']:<44}"
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
    found: list[Target] = []
    if size == "tiny":
        return found

    def at_least(goal: float, peer: str, ours: str = "ours", what: str = "tokens_per_s") -> None:
        if ours in ran and peer in ran:
            ratio = ran[ours][what] / ran[peer][what]
            name, ratio = ("tokens/s", ratio) if what == "tokens_per_s" else ("memory, the inverse", 1 / ratio)
            found.append(Target(f"{size}, {ours} over {peer}, {name}", ratio, goal))

    if size == "demo":
        at_least(DEMO_GOAL / DEMO_PLAIN, "cookbook")
        if "ours" in ran:
            found.append(Target(f"{size}, ours, tokens/s", ran["ours"]["tokens_per_s"], DEMO_GOAL))
    elif platform == "cpu":
        at_least(1.1, "nnx")
        at_least(1.0, "torch")
        at_least(1.0, "nnx", what="peak_bytes")
        at_least(1.0, "torch", what="peak_bytes")
    else:
        at_least(1.1, "torch")
        if size in MFU_MARKS and "mfu_full" in ran.get("ours", {}):
            found.append(Target(f"{size}, MFU with full attention", ran["ours"]["mfu_full"], MFU_MARKS[size]))
    return found


def ratios(size: str, rows: dict[str, dict]) -> str:
    """Ours over each of the others, and each of ours by other settings over ours."""
    ran = {label: row for label, row in rows.items() if row["error"] is None and row["contestant"] != "floor"}
    if "ours" not in ran:
        return ""
    cells = []
    for label, row in ran.items():
        if label != "ours":
            over, under = (row, ran["ours"]) if row["contestant"] == "ours" else (ran["ours"], row)
            best, median = (over[key] / under[key] for key in ("tokens_per_s", "tokens_per_s_median"))
            names = f"{label} / ours" if over is row else f"ours / {label}"
            cells.append(f"ratio   {size}, {names}: {best:.2f}, by medians {median:.2f}")
    return "\n".join(cells)


# ---- program --------------------------------------------------------------------------------------------------------


def missing(name: str) -> str | None:
    """Why a contestant cannot run here, or None."""
    modules, remedy = NEEDS[name]
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"{name} is skipped: no {' and no '.join(lacking)} here; {remedy}" if lacking else None


def has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True).returncode == 0


def variant_of(job: Job, text: str) -> Job:
    """`job` with settings of its own: "training.save=dots,rows=16"; rows and microbatches are the job's."""
    changes, settings = {}, []
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if name in ("rows", "microbatches"):
            changes[name] = int(value)
        else:
            settings.append(setting)
    return dataclasses.replace(job, settings=(*job.settings, *settings), **changes)


def jobs_of(size: str, names: list[str], dtype: str, platform: str, extra: list[str]) -> dict[str, Job]:
    """Label: job, in the order in which they run where they cannot take turns: the others' shares need the floor."""
    s = SIZES[size]
    job = Job("", s.shapes, s.rows, s.length, dtype, platform, config=s.config)
    of = lambda name, **changes: dataclasses.replace(job, contestant=MODULES[name], **changes)
    if size == "demo":
        found = {"floor": of("floor", d=4, t=2), "ours": of("ours", d=4, t=2)}
        found |= {"cookbook": of("cookbook", d=8), "nnx": of("nnx", d=8)}
        found = {label: job for label, job in found.items() if label in names}
    else:
        found = {name: of(name) for name in sorted(names, key=lambda name: name != "floor")}
    for text in extra if "ours" in names else []:
        found[f"ours {text}"] = variant_of(found["ours"], text)
    return found


def printed_head(size: str, dtype: str, platform: str) -> str:
    s = SIZES[size]
    devices = ", 8 simulated devices" if size == "demo" else ""
    shape = f"{s.shapes.parameters:,} parameters, {s.rows} rows of {s.length} tokens, {dtype}, {platform}{devices}"
    return f"\n{size}: {shape}\n{HEADER}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}; demo is the demo's run on 8 simulated devices")
    parser.add_argument("--only", help=f"of {', '.join(MODULES)}; the floor always runs")
    parser.add_argument("--platform", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="f32 on a CPU, bf16 on a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--seconds", type=float, help="of a turn, about")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--one-at-a-time", action="store_true", help="as on a GPU")
    parser.add_argument(
        "--extra-settings",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="ours once more with these settings of train.py, or rows=, microbatches=; may be given several times",
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds a contestant has to compile")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for all of it")
    parser.add_argument("--json", type=Path, help="write all figures there as they come; what it has already stands")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the contestants are ended
    platform = options.platform if options.platform != "auto" else "gpu" if has_gpu() else "cpu"
    sizes = (
        options.sizes.split(",") if options.sizes else ["2m", "10m", "demo"] if platform == "cpu" else list(GPU_SIZES)
    )
    names = options.only.split(",") if options.only else list(MODULES)
    names += ["floor"] if "floor" not in names else []
    dtype = options.dtype or ("f32" if platform == "cpu" else "bf16")
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
    record = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for size in sizes:
        kind = {"dtype": dtype, "platform": platform, **dataclasses.asdict(SIZES[size])}
        of_size = record.setdefault(size, {**kind, "contestants": {}})
        if any(of_size[key] != value for key, value in kind.items()):
            raise SystemExit(f"{options.json} has other figures of {size}: of {of_size} instead of {kind}")
        rows = of_size["contestants"]
        print(printed_head(size, dtype, platform), flush=True)

        def show(measured: Measured, rows=rows) -> None:
            rows[measured.label] = figures(measured, rows.get("floor"))
            print(line_of(rows[measured.label]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(record, indent=1))

        jobs = jobs_of(size, names, dtype, platform, options.extra_settings)
        done = {label for label, row in rows.items() if row["error"] is None}
        compare({label: job for label, job in jobs.items() if label not in done}, timing, show)
    print()
    reached = []
    for size, of_size in record.items():
        if said := ratios(size, of_size["contestants"]):
            print(said)
        reached += targets(size, of_size["contestants"], of_size["platform"])
    for target in reached:
        print(target)
    if options.check:
        raise SystemExit(any(not target.met for target in reached))


if __name__ == "__main__":
    main()
