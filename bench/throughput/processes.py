"""Starts contestants in separate processes, runs their rounds and ends them."""

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
        self.step_s: list[float] = []  # seconds per step, of each round
        self.peak = 0  # bytes of the GPU's allocator, or of the process
        self.error: str | None = None
        self._messages = scratch / f"{name}.stderr"
        command = [python_of(job), "-m", "bench.throughput.peers.worker", job.to_json()]
        with self._messages.open("w") as messages:
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": messages,
                "text": True,
            }
            # In a new session, so that a signal to its group also reaches its children.
            session = {"cwd": ROOT, "env": environment(job, scratch), "start_new_session": True}
            self._process = subprocess.Popen(command, **pipes, **session)

    def measure(self, seconds: float) -> None:
        """Runs the next part: building and compiling, or a round of about this many seconds.

        No-op after an error.
        """
        if not self.ready:
            self.ready = self._ask()
            return
        steps = max(1, round(seconds / (self.step_s or [self.ready["step_s"]])[-1]))
        if done := self._ask(steps):
            self.step_s.append(done["seconds"] / steps)
            self.peak = max(self.peak, done["peak"])

    def _ask(self, request: object = "") -> dict[str, Any]:
        """Returns the next answer; None if the process ends or is killed at its limit, with the
        message in `error`.
        """
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
        ended = (
            f"ended with {self._process.wait()}"
            if timer.is_alive()
            else f"killed after {self.limit:g} s"
        )
        timer.cancel()
        said = [line for line in self._messages.read_text().splitlines() if line.strip()] or [
            "no message"
        ]
        self.error = f"{ended}: {said[-1][:300]}"
        return {}

    def end(self) -> None:
        """Kills the process and its children, and waits until it ends."""
        self._kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_rounds(
    jobs: dict[str, Job], rounds: int, seconds: float, take_turns: bool, limit: float = 600
) -> Iterator[Contestant]:
    """Runs each job, and yields each contestant after the rounds of its group.

    If one fails, the others continue.

    A contestant's part of a round takes about `seconds`. If contestants take turns, all stay alive;
    otherwise they run one after the other. One that has not compiled, or not finished a round,
    after `limit` seconds is killed.
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
    """Returns a contestant's environment, with compilation caches only for this run unless others
    are set.
    """
    env = dict(os.environ) | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if existing := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + existing
    env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"] = (
        str(scratch / "inductor"),
        str(scratch / "triton"),
    )
    if job.platform == "cpu":
        env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        # huge pages, for all contestants
        env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # An old XLA does not know today's flags. The disabled pass computes a wrong softmax.
        flags = (
            ["--xla_disable_hlo_passes=onednn-ops-rewriter"]
            if job.checkout
            else [env.get("XLA_FLAGS", "")]
        )
        flags += [f"--xla_force_host_platform_device_count={job.devices}"] * (job.devices > 1)
        env["XLA_FLAGS"] = " ".join(flags).strip()
    else:
        # If no platform is named, JAX silently falls back to the CPU.
        env |= {"JAX_PLATFORMS": "cuda", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if job.contestant != "ours":  # ours sets this in its configuration
            env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return env
