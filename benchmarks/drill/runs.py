"""Runs of the drill: `python -m train` with a tiny model, as processes that can be killed, and what they leave."""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zarr

from benchmarks.drill.cases import Field
from training_io.files import OF_A_STEP

ROOT = Path(__file__).parents[2]
STEPS = 24
TINY = [
    *("model.layers=2", "model.d_model=32", "model.d_ff=32", "model.n_kv=4", "model.n_q_per_kv=1", "model.d_head=8"),
    *("optimizer.learning_rate=1e-2", "optimizer.warmup_steps=2", f"optimizer.schedule_steps={STEPS}"),
    *("training.batch_size=8", "training.seq_len=16", "training.compute_dtype=f32", f"training.steps={STEPS}"),
    *("training.checkpoint_interval=3", "training.keep_checkpoints=null", "training.eval_batches=2"),
    "training.report=false",
    *("training.eval_interval=8", "training.sample_interval=8", "training.sample_tokens=4", "training.log_interval=1"),
    *("distributed.heartbeat_timeout=6", "distributed.stall_timeout=60", "distributed.join_timeout=60"),
]
"""Settings of a run of seconds that has checkpoints, validation, samples and a profile."""
LIMIT_S = 300.0
"""Seconds after which a process hangs."""


class Mesh(NamedTuple):
    """Devices along each axis, and the processes that share them."""

    r: int = 1
    d: int = 2
    t: int = 2
    processes: int = 1

    @property
    def settings(self) -> list[str]:
        """The mesh as settings of a run."""
        return [f"mesh.{axis}={getattr(self, axis)}" for axis in "rdt"]

    @property
    def devices(self) -> int:
        """Devices of each process."""
        return self.r * self.d * self.t // self.processes


ONE, TWO = Mesh(), Mesh(processes=2)
"""The same mesh in one process and in two."""


def xla_flags(devices: int) -> str:
    """XLA_FLAGS for simulated devices, without what makes compiling slow."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return flags + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")


def environment(devices: int) -> dict[str, str]:
    """Environment of a program of this repository, with simulated devices, and without `dot` for pictures."""
    changes = {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""}
    return os.environ | changes | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Start:
    """The processes of one start of a run, which a context ends.

    Args:
        directory: of the run.
        mesh: its devices and processes.
        overrides: settings, behind TINY.
        cache: directory of compiled programs.
        env: more of the environment.
        before: called in each process before the program.
    """

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        *overrides: str,
        cache: Path,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ):
        self.directory, self.mesh, self.port = directory, mesh, free_port()
        self.files = cache.with_name("said") / f"{directory.name}_{time.time_ns()}"
        self.files.mkdir(parents=True)
        self.processes: list[subprocess.Popen] = []
        settings = [f"paths.root_working_dir={directory.parent}", f"paths.model_name={directory.name}", *mesh.settings]
        settings += [f"hardware.compilation_cache={cache}", f"data.filespec={ROOT / 'synthetic_dataset.zarr'}"]
        for i in range(mesh.processes):
            who = [f"distributed.coordinator=127.0.0.1:{self.port}", "distributed.count=2", f"distributed.id={i}"]
            who = who if mesh.processes > 1 else []
            program = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", *TINY, *settings, *who]
            with (self.files / f"out{i}").open("wb") as out, (self.files / f"err{i}").open("wb") as err:
                options = {"cwd": ROOT, "env": environment(mesh.devices) | (env or {}), "stdout": out, "stderr": err}
                options |= {"start_new_session": True, "preexec_fn": before}
                self.processes.append(subprocess.Popen([*program, *overrides], **options))

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *exc_info) -> None:
        self.kill()

    def kill(self, which: Sequence[int] = (0, 1)) -> None:
        """SIGKILL to these processes."""
        for i, process in enumerate(self.processes):
            if i in which:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def wait(self, limit_s: float = LIMIT_S) -> list[int | None]:
        """Exit codes once all have ended; None for one that has not after so many seconds."""
        end = time.monotonic() + limit_s
        while self.alive() and time.monotonic() < end:
            time.sleep(0.02)
        return [process.poll() for process in self.processes]

    def alive(self) -> bool:
        """Whether a process has not ended."""
        return any(process.poll() is None for process in self.processes)

    def wait_until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Whether the condition comes true while all processes live."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and all(process.poll() is None for process in self.processes):
            if condition():
                return True
            time.sleep(0.002)
        return False

    def said(self, i: int = 0, errors: bool = True) -> str:
        """What process `i` wrote to stderr, or to stdout."""
        return (self.files / f"{'err' if errors else 'out'}{i}").read_text(errors="replace")

    def ending(self, i: int = 0) -> str:
        """The end of what process `i` said, in one line."""
        return shortened((self.said(i, errors=False) + self.said(i))[-2000:])


def shortened(text: str, length: int = 300) -> str:
    """The end of a text, in one line."""
    line = " / ".join(line.strip() for line in text.splitlines() if line.strip())
    return line if len(line) <= length else "…" + line[-length:]


# ---- what a run leaves ---------------------------------------------------------------------------------------------


def records(directory: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    path = directory / "metrics.jsonl"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(directory: Path) -> list[float]:
    """Losses of the steps, in order."""
    return [line["loss"] for line in records(directory) if "event" not in line]


def checkpoints(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (directory / "checkpoints").glob("*/zarr.json")
    return sorted(int(path.parent.name) for path in found if re.fullmatch(r"\d{10}", path.parent.name))


def arrays(directory: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by name, read with zarr alone."""
    group = zarr.open_group(directory / "checkpoints" / f"{step:010}", mode="r")
    return {name: array[...] for name, array in group.members(max_depth=None) if isinstance(array, zarr.Array)}


def digests(directory: Path, step: int) -> dict[str, str]:
    """Shape, dtype and hash of each array of a checkpoint."""
    of = lambda x: f"{x.dtype}{list(x.shape)} {hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]}"
    return {name: of(array) for name, array in arrays(directory, step).items()}


def differing_checkpoints(directory: Path, unkilled: Path) -> list[str]:
    """What differs, in words, between the checkpoints of a run and those that the unkilled run has of these steps."""
    wrong = []
    for step in checkpoints(directory):
        try:
            found, expected = digests(directory, step), digests(unkilled, step)
        except Exception as error:  # whatever zarr raises: the checkpoint is listed, but it is not whole
            wrong.append(f"checkpoint {step} cannot be read: {shortened(repr(error))}")
            continue
        names = sorted(name for name in found | expected if found.get(name) != expected.get(name))
        if names:
            wrong.append(f"checkpoint {step} differs in {len(names)} of {len(expected)} arrays: {', '.join(names[:3])}")
    return wrong


def _told(directory: Path) -> dict[str, list]:
    """What the log and the samples say that does not depend on the clock."""
    lines = records(directory)
    steps = [{k: v for k, v in x.items() if k in ("step", "tokens") or k not in OF_A_STEP} for x in lines]
    samples = directory / "samples.jsonl"
    return {
        "steps": [step for step, line in zip(steps, lines, strict=True) if "event" not in line],
        "validations": [line for line in lines if line.get("event") == "validation"],
        "samples": samples.read_text().splitlines() if samples.is_file() else [],
    }


def differences(directory: Path, unkilled: Path, deleted: bool = False) -> list[str]:
    """What differs, in words, between a finished run and one that was never killed. Of times nothing is compared.

    With `deleted`, the first lines of the log and of the samples may be missing: somebody removed the files.
    """
    wrong = differing_checkpoints(directory, unkilled)
    if checkpoints(directory)[-1:] != [STEPS]:
        wrong.append(f"the checkpoint of step {STEPS} is missing; there are {checkpoints(directory)}")
    found, expected = _told(directory), _told(unkilled)
    for name, lines in expected.items():
        lines = lines[len(lines) - min(len(lines), len(found[name])) :] if deleted else lines
        if found[name] != lines:
            pairs = enumerate(zip([*found[name], None], [*lines, None], strict=False))
            where, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            wrong.append(f"{name}: entry {where} is {shortened(str(one))}, not {shortened(str(other))}")
    return wrong


def farthest_loss(directory: Path, unkilled: Path) -> float:
    """Largest relative difference of the losses of two runs; infinite unless both have each step once."""
    found, expected = np.array(losses(directory)), np.array(losses(unkilled))
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.inf
    return float(np.max(np.abs(found - expected) / np.abs(expected), initial=0.0))


# ---- runs that others are held against -----------------------------------------------------------------------------


def cache_of(field: Field) -> Path:
    """Directory of compiled programs, which all runs of a drill share."""
    return field.scratch.parent / "compiled"


def unkilled(field: Field, mesh: Mesh) -> Path:
    """Directory of a finished run that nothing disturbed. Made once for each mesh, for all kinds of fault."""
    return _unkilled(field.scratch.parent / "unkilled", cache_of(field), mesh)


@functools.cache
def _unkilled(root: Path, cache: Path, mesh: Mesh) -> Path:
    directory = root / f"r{mesh.r}d{mesh.d}t{mesh.t}_in_{mesh.processes}"
    with Start(directory, mesh, cache=cache) as start:
        codes = start.wait()
        if any(code != 0 for code in codes):
            raise RuntimeError(f"the undisturbed run on {mesh} ended with {codes}: {start.ending()}")
    return directory
