"""The launch files: they are well-formed, and what they tell the program composes with its
configurations.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from shardwright.program.checks import register_schema, to_config
from shardwright.program.config import Config
from shardwright.settings import exits

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm.sbatch"
PAGE = ROOT / "docs" / "multi-host.md"

pytestmark = pytest.mark.quick


def composed(arguments: list[str]) -> Config:
    """The configuration that these arguments of the program give."""
    register_schema()
    (name,) = [text for text in arguments if text.startswith("--config-name=")]
    overrides = [text for text in arguments if not text.startswith("--")]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return to_config(compose(name.partition("=")[2], overrides=overrides))


def test_slurm_script():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    joined = re.sub(r"\\\n# *", "", text)
    (command,) = re.findall(r"^#   .* launch/slurm\.sbatch (.*)$", joined, re.MULTILINE)
    c = composed(shlex.split(command))
    assert c.distributed.auto
    # One process a host: as many as the configuration expects.
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert (int(directives["nodes"]), directives["ntasks-per-node"]) == (c.distributed.count, "1")
    # the signal that saves; without B:, to the processes
    assert re.fullmatch(r"TERM@\d+", directives["signal"])
    assert '-m shardwright train "$@"' in text


TABLE = {
    int(code): what.startswith("start again")
    for code, what in re.findall(
        r"^\| (\d+) (?:\(\w+\) )?\|.*\| ([\w ,]+) \|$", PAGE.read_text(), re.MULTILINE
    )
}
"""Of docs/multi-host.md: by exit code, whether the run is started again."""


def test_the_table_has_the_codes_of_the_program():
    ours = [exits.ERROR, exits.OUT_OF_MEMORY, exits.STALLED, exits.LOST, exits.STOPPED]
    assert {ended.code: ended.next == exits.AGAIN for ended in ours}.items() <= TABLE.items()
    assert len(TABLE) == len(ours) + 3  # 0, and what no program can say: SIGABRT, SIGKILL


@pytest.mark.parametrize("code", TABLE)
def test_slurm_script_starts_again_as_the_table_says(code, tmp_path):
    """With programs in place of srun, which is one process here, of scontrol and of Python."""
    srun = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
    bodies = {"srun": srun, "scontrol": 'echo "scontrol $*"', "python": f"exit {code}"}
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python")}
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}

    def ends():
        return subprocess.run(["bash", str(SLURM)], env=env, capture_output=True, text=True)

    for _ in range(3):
        done = ends()
        assert ("scontrol requeue 7" in done.stdout) == TABLE[code], done.stdout + done.stderr
        assert done.returncode == (0 if TABLE[code] else code)
    # A fourth failure within an hour is the last. A stop by a signal is no failure.
    assert ("scontrol requeue 7" in ends().stdout) == (code == exits.STOPPED.code)


def test_jobset():
    *_, jobset = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][-3:] == ["-m", "shardwright", "train"]
    c = composed(container["args"])
    assert c.distributed.auto
    assert c.distributed.count == job["parallelism"] == job["completions"]
    actions = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule["onExitCodes"]["values"]
    }
    assert actions.pop(exits.STOPPED.code) == "Ignore"  # new pods, without counting
    assert actions == {code: "FailJob" for code, again in TABLE.items() if code and not again}


def test_skypilot(tmp_path):
    """Its command, as a shell on the second of four hosts runs it.

    The file was tried with SkyPilot's own reader.
    """
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    env |= {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "1", **task["envs"]}
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=env, capture_output=True, text=True, check=True
    )
    c = composed(done.stdout.split()[4:])
    assert c.distributed.coordinator == "10.0.0.1:8476"
    assert (c.distributed.count, c.distributed.id, task["num_nodes"]) == (4, 1, 4)
    assert c.paths.checkpoints.startswith("s3://")  # as hosts share no file system
    again = {code for code, again in TABLE.items() if again}
    assert set(task["resources"]["job_recovery"]["recover_on_exit_codes"]) == again - {137}
