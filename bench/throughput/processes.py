"""Contestants in processes of their own: starting them, their rounds, ending them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.throughput.peers.job import Job
from bench.throughput.peers.worker import MARK

ROOT = Path(__file__).parents[2]


class Contestant:
    """A contestant's process, and its measurements."""

    def __init__(self, name: str, job: Job, scratch: Path, limit: float):
        self.name, self.job, self.limit = name, job, limit
        self.ready: dict[str, Any] = {}  # compile_s and step_s, in seconds
        self.step_s: list[float] = []  # seconds of a step in each round
        self.peak = 0  # bytes of the GPU's allocator, or of the process
        self.error: str | None = None
        self._messages = scratch / f"{name}.stderr"
        command = [python_of(job), "-m", "bench.throughput.peers.worker", job.to_json()]
        with self._messages.open("w") as messages:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": messages, "text": True}
            # In a session: a signal to its group reaches the processes that it starts too.
            session = {"cwd": ROOT, "env": environment(job, scratch), "start_new_session": True}
            self._process = subprocess.Popen(command, **pipes, **session)

    def measure(self, seconds: float) -> None:
        """The next part: building and compiling, or a round of about so many seconds. After an error: nothing."""
        if not self.ready:
            self.ready = self._ask()
            return
        steps = max(1, round(seconds / (self.step_s or [self.ready["step_s"]])[-1]))
        if done := self._ask(steps):
            self.step_s.append(done["seconds"] / steps)
            self.peak = max(self.peak, done["peak"])

    def lines(self) -> list[tuple[float, str]]:
        """Seconds of a step by source line or kernel, the longest first. After an error: none."""
        return self._ask("lines").get("lines", [])

    def _ask(self, request: object = "") -> dict[str, Any]:
        """The next answer. If the process ends or is killed at its limit: none, and `error` is its last message."""
        if self.error is not None:
            return {}
        timer = threading.Timer(self.limit, self._kill)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            if request:
                print(request, file=self._process.stdin, flush=True)
            for line in self._process.stdout or ():
                if line.startswith(MARK):
                    timer.cancel()
                    return json.loads(line.removeprefix(MARK))
        ended = f"ended with {self._process.wait()}" if timer.is_alive() else f"killed after {self.limit:g} s"
        timer.cancel()
        said = [line for line in self._messages.read_text().splitlines() if line.strip()] or ["no message"]
        self.error = f"{ended}: {said[-1][:300]}"
        return {}

    def end(self) -> None:
        """Kills the process and those that it started, and waits for its end."""
        self._kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_rounds(
    jobs: dict[str, Job], rounds: int, seconds: float, take_turns: bool, limit: float = 600
) -> Iterator[Contestant]:
    """Runs each job, and gives each contestant after the rounds of its group. If one fails, others continue.

    A contestant's part of a round takes about so many seconds. If they take turns, all stay alive; otherwise they run
    one after the other. One that has not compiled, or not ended a round, after `limit` seconds is killed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for names in [[*jobs]] if take_turns else [[name] for name in jobs]:
            group: list[Contestant] = []
            with contextlib.ExitStack() as cleanup:
                for name in names:
                    group.append(Contestant(name, jobs[name], Path(scratch), limit))
                    cleanup.callback(group[-1].end)
                    group[-1].measure(seconds)
                for i in range(rounds):
                    first = i % len(group)
                    for contestant in group[first:] + group[:first]:
                        contestant.measure(seconds)
                yield from group


def python_of(job: Job) -> str:
    return f"{job.checkout}/.venv/bin/python" if job.checkout else sys.executable


def environment(job: Job, scratch: Path) -> dict[str, str]:
    """The environment of a contestant, with caches of compiled programs only for this run, unless it has others."""
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if existing := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + existing
    env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"] = str(scratch / "inductor"), str(scratch / "triton")
    if job.platform == "cpu":
        env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # large pages, for all contestants
        # Another XLA does not know the flags of this one. Its pass that is left out here makes softmax wrong.
        flags = ["--xla_disable_hlo_passes=onednn-ops-rewriter"] if job.checkout else [env.get("XLA_FLAGS", "")]
        flags += [f"--xla_force_host_platform_device_count={job.devices}"] * (job.devices > 1)
        env["XLA_FLAGS"] = " ".join(flags).strip()
    else:
        # Without the name of a platform, JAX would use the CPU if it cannot use the GPU.
        env |= {"JAX_PLATFORMS": "cuda", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if job.contestant != "ours":  # ours sets it by its configuration
            env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return env
