"""A contestant's process: how it is started, told and ended."""

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

from benchmarks.throughput.peers.job import Job
from benchmarks.throughput.peers.worker import MARK

ROOT = Path(__file__).parents[2]


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
                [sys.executable, "-m", "benchmarks.throughput.peers.worker", job.to_json()],
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
