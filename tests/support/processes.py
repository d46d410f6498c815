"""`python -m train` as several processes, each with simulated devices of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.simulated import xla_flags

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.layers=1",
    "model.d_model=32",
    "model.d_ff=32",
    "model.n_kv=4",
    "model.n_q_per_kv=1",
    "model.d_head=8",
    "training.batch_size=8",
    "training.seq_len=16",
    "training.compute_dtype=f32",
    "training.eval_batches=0",
    "training.report=false",
    "optimizer.warmup_steps=2",
    "optimizer.schedule_steps=1000",
    "optimizer.learning_rate=1e-2",
]
"""A model that compiles in seconds."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Run:
    """The processes of a run, started; what they write is in `root`.

    Args:
        root: of the runs; the run is called "run".
        count: processes.
        devices: of each.
        overrides: of the configuration, behind SMALL.
        hooks: Python source by process, run before the program.
        environment: by process, in place of distributed.coordinator, count and id.
    """

    def __init__(
        self,
        root: Path,
        count: int,
        devices: int,
        *overrides: str,
        hooks: Mapping[int, str] | None = None,
        environment: Sequence[Mapping[str, str]] | None = None,
    ):
        self.root, self.directory = root, root / "run"
        root.mkdir(exist_ok=True, parents=True)
        address = f"distributed.coordinator=127.0.0.1:{free_port()}"
        self.processes = []
        for i in range(count):
            who = [address, f"distributed.count={count}", f"distributed.id={i}"] * (count > 1)
            if environment:
                who = ["distributed.auto=true"]
            path = root / f"hook{i}"
            path.mkdir(exist_ok=True)
            (path / "sitecustomize.py").write_text((hooks or {}).get(i, ""))
            env = os.environ | {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu", "PATH": ""}
            env |= {"PYTHONPATH": f"{path}:{ROOT}"} | (environment[i] if environment else {})
            program = [sys.executable, "-m", "train", "--config-name=local_test_synthetic"]
            program += [f"paths.root_working_dir={root}", "paths.model_name=run"]
            program += [*SMALL, *who, *overrides]
            with open(root / f"stdout{i}", "w") as out, open(root / f"stderr{i}", "w") as err:
                self.processes.append(
                    subprocess.Popen(program, cwd=ROOT, env=env, stdout=out, stderr=err)
                )

    def stdout(self, i: int) -> str:
        return (self.root / f"stdout{i}").read_text()

    def stderr(self, i: int) -> str:
        return (self.root / f"stderr{i}").read_text()

    def wait(self, timeout_s: float = 240) -> list[int | None]:
        """Exit codes of all processes; each ends in time, or all are killed and the test fails."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended in {timeout_s} s:\n{self._said()}") from None
        finally:
            for process in self.processes:
                process.kill()
        return [process.wait() for process in self.processes]

    def succeed(self) -> "Run":
        assert not any(self.wait()), self._said()
        return self

    def _said(self) -> str:
        outputs = [(self.stdout(i), self.stderr(i)) for i in range(len(self.processes))]
        return "\n---\n".join(f"{out[-1500:]}\n{error[-3000:]}" for out, error in outputs)

    def losses(self) -> list[float]:
        """By step, each once and in order."""
        path = self.directory / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        steps = [line for line in lines if "event" not in line]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        return [line["loss"] for line in steps]
