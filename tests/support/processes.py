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
    *(
        "model.layers=2",
        "model.d_model=32",
        "model.d_ff=32",
        "model.n_kv=4",
        "model.n_q_per_kv=1",
        "model.d_head=8",
    ),
    *(
        "training.batch_size=8",
        "training.seq_len=16",
        "training.compute_dtype=f32",
        "training.eval_batches=0",
    ),
    "training.report=false",
    *("optimizer.warmup_steps=2", "optimizer.schedule_steps=1000", "optimizer.learning_rate=1e-2"),
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
        hooks: Python source by process, run before the program; `root` is defined there.
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
        self.root, self.directory, self.started = root, root / "run", time.monotonic()
        root.mkdir(exist_ok=True, parents=True)
        address = f"distributed.coordinator=127.0.0.1:{free_port()}"
        self.processes = []
        for i in range(count):
            who = (
                [address, f"distributed.count={count}", f"distributed.id={i}"] if count > 1 else []
            )
            if environment:
                who = ["distributed.auto=true"]
            settings = [
                f"paths.root_working_dir={root}",
                "paths.model_name=run",
                *SMALL,
                *who,
                *overrides,
            ]
            env = os.environ | {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu", "PATH": ""}
            env |= environment[i] if environment else {}
            path = root / f"hook{i}"
            path.mkdir(exist_ok=True)
            hook = (hooks or {}).get(i, "")
            (path / "sitecustomize.py").write_text(
                f"from pathlib import Path\nroot = Path({str(root)!r})\n{hook}\n"
            )
            env["PYTHONPATH"] = f"{path}:{ROOT}"
            with open(root / f"stdout{i}", "w") as out, open(root / f"stderr{i}", "w") as err:
                program = [
                    sys.executable,
                    "-m",
                    "train",
                    "--config-name=local_test_synthetic",
                    *settings,
                ]
                self.processes.append(
                    subprocess.Popen(program, cwd=ROOT, env=env, stdout=out, stderr=err)
                )

    def stdout(self, i: int) -> str:
        return (self.root / f"stdout{i}").read_text()

    def stderr(self, i: int) -> str:
        return (self.root / f"stderr{i}").read_text()

    def wait(self, timeout_s: float = 240, but: Sequence[int] = ()) -> list[int | None]:
        """Exit codes of all processes but those; each ends in time, or all are killed and the test
        fails.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for i, process in enumerate(self.processes):
                if i not in but:
                    process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            said = "\n".join(
                f"--- {i}\n{self.stdout(i)[-1500:]}\n{self.stderr(i)[-3000:]}" for i in self._all()
            )
            raise AssertionError(f"process {i} did not end within {timeout_s} s:\n{said}") from None
        finally:
            if sys.exc_info()[0]:
                self.kill()
        return [process.poll() for process in self.processes]

    def succeed(self) -> "Run":
        codes = self.wait()
        assert codes == [0] * len(codes), "\n".join(
            f"--- {i}\n{self.stderr(i)[-3000:]}" for i in self._all()
        )
        return self

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_step(self, step: int, timeout_s: float = 180) -> None:
        """Returns when the metrics of `step` are written."""
        deadline = time.monotonic() + timeout_s
        while len(self.losses()) <= step:
            ended = [i for i in self._all() if self.processes[i].poll() is not None]
            if ended or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"processes {ended} ended before step {step}:\n{self.stderr((ended or [0])[0])}"
                )
            time.sleep(0.02)

    def losses(self) -> list[float]:
        """By step, each once and in order."""
        path = self.directory / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        steps = [line for line in lines if "event" not in line]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        return [line["loss"] for line in steps]

    def _all(self) -> range:
        return range(len(self.processes))
