"""The Slurm script and the JobSet with runs of two processes that fail: each resumes where it should, or ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import launchers
from tests.support.processes import ROOT, SMALL, free_port
from tests.support.simulated import xla_flags

STEPS = 16
RUN = [*SMALL, f"training.steps={STEPS}", "training.checkpoint_interval=4", "distributed.auto=true"]
RUN += ["distributed.heartbeat_timeout=6", "distributed.stall_timeout=10", "paths.model_name=run"]

HOOK = """
import os
import pathlib
import time
import shardwright.data.loader.flat
root = pathlib.Path({root!r})
Loader = shardwright.data.loader.flat.FlatTokensLoader
sequences = Loader.sequences
def disturbed(self, step, which):
    if self.split == "train" and step == 10 and process == "1" and not (root / "disturbed").exists():
        (root / "disturbed").touch()
        {problem}
    return sequences(self, step, which)
Loader.sequences = disturbed
process = os.environ.get("SLURM_PROCID") or os.environ.get("JOB_COMPLETION_INDEX")
"""

CASES = {
    # What happens in process 1 at step 10, once; the settings; codes of its processes; whether the run is done at last.
    "killed": ("os.kill(os.getpid(), 9)", [], {137}, True),
    "stalled": ("time.sleep(3600)", [], {75}, True),
    "stopped": ("os.kill(os.getpid(), 15); time.sleep(1)", [], {143}, True),
    "out of memory": ("raise MemoryError", [], {74}, False),
    "an error": ("raise KeyError('a fault of the program')", [], {1}, False),
    "a wrong setting": ("pass", ["model.layers=0"], {1}, False),
}
SAID = {
    "stalled": "stalled: it was waiting for a batch",
    "stopped": "SIGTERM: stopped and saved after",
    "out of memory": "is out of memory. Use more training.microbatches or devices",
    "a wrong setting": "Error: model.layers is 0",
}


@pytest.fixture
def environment(request, tmp_path):
    """Of the processes of a case: their hook, and one device each."""
    hook = HOOK.replace("{root!r}", repr(str(tmp_path))).replace(
        "{problem}", CASES[request.node.callspec.params["case"]][0]
    )
    (tmp_path / "sitecustomize.py").write_text(hook)
    env = {"XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    return os.environ | env


def done(root: Path) -> bool:
    """Whether all steps are logged, each once."""
    path = root / "run" / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [line["step"] for line in lines if "event" not in line] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_slurm_script(case, environment, tmp_path):
    _, settings, codes, ends_well = CASES[case]
    for name, body in {
        "srun": f'exec {sys.executable} -m tests.support.launchers "$@"',
        "scontrol": f"echo $* >> {tmp_path / 'queued'}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(free_port())}
    job |= {"TEST_TASKS": "2", "PYTHON": sys.executable, "SLURM_CPUS_PER_TASK": "1"}
    arguments = ["--config-name=local_test_synthetic", f"data.filespec={ROOT / 'synthetic_dataset.zarr'}"]
    arguments += [*RUN, f"paths.root_working_dir={tmp_path}", *settings]
    ended, said = [], ""
    for attempt in range(4):
        script = ["bash", str(ROOT / "launch" / "slurm.sbatch"), *arguments]
        job_ends = subprocess.run(script, env=environment | job, capture_output=True, text=True, timeout=240)
        said += job_ends.stdout + job_ends.stderr
        ended.append(job_ends.returncode)
        queued = (tmp_path / "queued").read_text().splitlines() if (tmp_path / "queued").exists() else []
        if len(queued) == attempt:
            break
    assert len(ended) == 1 + ends_well, said
    assert done(tmp_path) == ends_well, said
    assert SAID.get(case, "") in said
    assert (ended[-1] == 0) == ends_well
    if ends_well:
        assert "queued again" in said
        assert ("queued again, 1 of at most 3 times" in said) == (case != "stopped")
    else:
        assert ended == list(codes)
        assert f"exit code {ended[0]} of a process: it would come again, so the job ends" in said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_jobset(case, environment, tmp_path):
    *_, manifest = yaml.safe_load_all((ROOT / "launch" / "jobset.yaml").read_text())
    _, settings, codes, ends_well = CASES[case]
    log, port = [], free_port()

    def start(i: int) -> subprocess.Popen:
        arguments = ["--config-name=local_test_synthetic", *RUN, "distributed.auto=false"]
        arguments += [f"distributed.coordinator=127.0.0.1:{port}", "distributed.count=2", f"distributed.id={i}"]
        arguments += [f"paths.root_working_dir={tmp_path}", *settings]
        with open(tmp_path / f"log{i}", "a") as out:
            command = [sys.executable, "-u", "-m", "train", *arguments]
            env = environment | {"JOB_COMPLETION_INDEX": str(i)}
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, process_group=0)

    spec = manifest["spec"]
    spec["replicatedJobs"][0]["template"]["spec"]["completions"] = 2
    complete = launchers.jobset(spec, start, log.append)
    said = "\n".join([*log, *(path.read_text() for path in tmp_path.glob("log?"))])
    assert complete == done(tmp_path) == ends_well, said
    assert SAID.get(case, "") in said
    ended = {int(line.split(": ")[1].partition(",")[0]) for line in log if line.startswith("pod")}
    assert codes <= ended <= codes | {76, 134}, said
    assert "restarts 2" not in said
