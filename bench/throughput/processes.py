"""A contestant's process: starting it, its events, ending it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from bench.throughput.peers.job import Job
from bench.throughput.peers.worker import MARK

ROOT = Path(__file__).parents[2]


class ContestantError(Exception):
    """A contestant ended, or took too long. The message is the end of its output."""


class Process:
    """A contestant's process, and the events that it has sent."""

    def __init__(self, label: str, job: Job, scratch: Path):
        self.errors = scratch / f"{label.replace('/', '_')[:80]}.stderr"
        self.events: queue.Queue[dict | None] = queue.Queue()
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [python_of(job), "-m", "bench.throughput.peers.worker", job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(job, scratch),
                start_new_session=True,  # a signal to the group reaches the processes that it starts too
            )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.events.put(json.loads(line.removeprefix(MARK)))
        self.events.put(None)

    def wait(self, event: str, timeout: float) -> dict[str, Any]:
        """Returns the next event, which must be `event`. Raises ContestantError if there is none in time."""
        try:
            found = self.events.get(timeout=max(timeout, 0.1))
        except queue.Empty:
            raise ContestantError(f"no {event} within {timeout:.0f} s") from None
        if found is None:
            lines = [line for line in self.errors.read_text().splitlines() if line.strip()]
            raise ContestantError(f"ended with {self.process.wait()}: {lines[-1][:300] if lines else 'no message'}")
        assert found["event"] == event, (found, event)
        return found

    def send(self, line: str | None) -> None:
        """Writes a line to the process; None: closes its input."""
        with contextlib.suppress(BrokenPipeError):  # `wait` then reports how it ended
            if line is None:
                self.process.stdin.close()
            else:
                self.process.stdin.write(f"{line}\n")
                self.process.stdin.flush()

    def signal(self, which: signal.Signals) -> None:
        """Sends a signal to the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)

    def end(self) -> None:
        """Kills the process and those that it started."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.reader.join(timeout=10)  # the output ends when the last of the processes has ended
        self.process.stdout.close()
        self.send(None)


def python_of(job: Job) -> str:
    """The interpreter of a contestant."""
    return f"{job.checkout}/.venv/bin/python" if job.checkout else sys.executable


def environment(job: Job, scratch: Path) -> dict[str, str]:
    """The environment of a contestant, with caches of compiled programs only for this run, unless it has others."""
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"] = str(scratch / "inductor"), str(scratch / "triton")
    if existing := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + existing
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
