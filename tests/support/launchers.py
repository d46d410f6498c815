"""Stand-ins for srun, and for the controllers of Jobs and JobSets in Kubernetes, by their rules for exit codes."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

KILL_WAIT_S = 5.0
"""Slurm's KillWait, from SIGTERM to SIGKILL: 30 s by default."""


def end(tasks: Sequence[subprocess.Popen]) -> None:
    """SIGTERM to all processes of each task, and SIGKILL to those that are left."""
    for number, wait in ((signal.SIGTERM, KILL_WAIT_S), (signal.SIGKILL, 60.0)):
        deadline = time.monotonic() + wait
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)
        while any(task.poll() is None for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.05)


def status(code: int) -> int:
    """As a shell says it: 128 and the number of the signal for what a signal ended."""
    return 128 - code if code < 0 else code


def srun(command: Sequence[str], environments: Sequence[dict[str, str]]) -> int:
    """`srun --kill-on-bad-exit=1`: a task of this command with each environment. Returns the highest status.

    SIGTERM to this process is what sbatch --signal or a preemption sends: all processes of all tasks get it.
    """
    tasks = []
    for i, env in enumerate(environments):
        env = os.environ | env | {"SLURM_PROCID": str(i)}
        tasks.append(subprocess.Popen(command, env=env, process_group=0))
    signal.signal(signal.SIGTERM, lambda *_: [os.killpg(t.pid, signal.SIGTERM) for t in tasks if t.poll() is None])
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            end(tasks)
        time.sleep(0.05)
    return max(status(task.returncode) for task in tasks)


def jobset(spec: dict[str, Any], start: Callable[[int], subprocess.Popen], log: Callable[[str], None]) -> bool:
    """The JobSet with this spec, of one Job, whose pod i `start(i)` starts. Returns whether it completed.

    Of a Job: the first rule of podFailurePolicy that matches a failed pod's code decides; without one the pod counts
    for backoffLimit. Of a JobSet: the first rule of failurePolicy for the Job's reason, else all starts again, at most
    maxRestarts times.
    """
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    for restarts in range(spec["failurePolicy"]["maxRestarts"] + 1):
        reason = _job(job, start, log)
        log(f"Job: {reason or 'complete'}, restarts {restarts}")
        if reason is None:
            return True
        rules = spec["failurePolicy"]["rules"]
        if any(rule["action"] == "FailJobSet" and reason in rule["onJobFailureReasons"] for rule in rules):
            return False
    return False


def _job(job: dict[str, Any], start: Callable[[int], subprocess.Popen], log: Callable[[str], None]) -> str | None:
    pods, failed = {i: start(i) for i in range(job["completions"])}, 0
    while any(pod.poll() != 0 for pod in pods.values()):
        for i, pod in pods.items():
            if not (code := status(pod.poll() or 0)):
                continue
            matching = (rule for rule in job["podFailurePolicy"]["rules"] if code in rule["onExitCodes"]["values"])
            action = next((rule["action"] for rule in matching), "Count")
            log(f"pod {i}: {code}, {action}")
            failed += action == "Count"
            if action == "FailJob" or failed > job["backoffLimit"]:
                end(list(pods.values()))
                return "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
            pods[i] = start(i)
        time.sleep(0.05)
    return None


if __name__ == "__main__":  # as the program `srun`: its options, then the command
    options = [*itertools.takewhile(lambda argument: argument.startswith("--"), sys.argv[1:])]
    assert "--kill-on-bad-exit=1" in options
    count = int(os.environ["TEST_TASKS"])
    names = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": str(count)}
    sys.exit(srun(sys.argv[1 + len(options) :], [names | {"SLURM_LOCALID": str(i)} for i in range(count)]))
