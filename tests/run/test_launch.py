"""The launch files: they are well-formed, and what they tell the program composes with its configurations."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from shardwright.run.config import Config, register_schema, to_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm.sbatch"

pytestmark = pytest.mark.quick


def composed(arguments: list[str]) -> Config:
    """The configuration that these arguments of the program give."""
    register_schema()
    (name,) = (text.removeprefix("--config-name=") for text in arguments if text.startswith("--config-name="))
    overrides = [argument for argument in arguments if not argument.startswith("--")]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return to_config(compose(name, overrides=overrides))


def commands(text: str) -> list[list[str]]:
    """The words of the commands in comments that start with `#   `, lines that end in a backslash joined."""
    joined = re.sub(r"\\\n# *", "", text)
    return [shlex.split(line[1:]) for line in joined.splitlines() if line.startswith("#   ")]


def test_slurm_script():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    (command,) = commands(text)
    c = composed(command[command.index("launch/slurm.sbatch") + 1 :])
    assert c.distributed.auto
    # One process a host: as many as the configuration expects.
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert (int(directives["nodes"]), directives["ntasks-per-node"]) == (c.distributed.count, "1")
    assert f"--nodes={c.distributed.count}" in command
    assert directives["signal"].startswith("TERM@")  # the signal that saves; without B:, to the processes
    assert '-m train "$@"' in text


@pytest.mark.parametrize(
    ("code", "restarts", "queued"), [(0, 0, False), (1, 0, False), (75, 0, True), (137, 2, True), (75, 3, False)]
)
def test_slurm_script_queues_what_another_process_ended(code, restarts, queued, tmp_path):
    """With programs in place of srun and scontrol."""
    for name, body in {"srun": f"exit {code}", "scontrol": 'echo "scontrol $*"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(["bash", str(SLURM)], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in done.stdout) == queued


def test_jobset():
    documents = {document["kind"]: document for document in yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())}
    assert list(documents) == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    jobset = documents["JobSet"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["-m", "train"]
    c = composed(container["args"])
    assert c.distributed.auto
    assert c.distributed.count == job["parallelism"] == job["completions"]
    assert (replicated["replicas"], job["completionMode"], job["backoffLimit"]) == (1, "Indexed", 0)
    assert pod["restartPolicy"] == "Never"
    # Exit codes, as docs/multi-host.md has them: an error ends the JobSet, a stop by a signal makes new pods.
    actions = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if rule["onExitCodes"]["containerName"] == container["name"] and rule["onExitCodes"]["operator"] == "In"
    }
    assert actions == {1: "FailJob", 143: "Ignore"}
    assert c.distributed.stopped_exit_code == 143
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert c.paths.root_working_dir.startswith("/shared/")


def test_submitit_launcher():
    path = ROOT / "configs" / "hydra" / "launcher" / "slurm_hosts.yaml"
    (command,) = commands(path.read_text())
    arguments = command[command.index("train") + 1 :]
    swept = [argument for argument in arguments if not argument.startswith("hydra") and "," not in argument]
    c = composed(swept)
    launcher = yaml.safe_load(path.read_text())
    assert (launcher["nodes"], launcher["tasks_per_node"]) == (c.distributed.count, 1)
    assert c.distributed.auto
