"""`pip install .` without -e: shardlib works alone, and shardwright trains, forks and makes
projects from anywhere.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.simulated import xla_flags

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "shardlib/README.md").read_text()
UNCHECKED, CHECKED, REFERENCE, FIXTURE, RIGHT, WRONG = re.findall(
    r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)
MESSAGES = re.findall(r"^```\nmine.py:…: (.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
NEEDED = {"jax", "numpy", "einops", "scipy"}
"""The packages that shardlib depends on."""
MODULES = {"hydra-core": "hydra"}
"""Names of modules, for packages of another name."""


def install(directory: Path, package: str) -> Path:
    """A directory with what pip installs of a package in a copy of the checkout, in which it would
    leave build/.
    """
    pytest.importorskip(
        "setuptools", minversion="77", reason="pip builds with setuptools, and no test downloads it"
    )
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    (directory / "checkout").mkdir()
    shutil.copy(ROOT / package / "pyproject.toml", directory / "checkout")
    shutil.copy(ROOT / package / "README.md", directory / "checkout")
    for part in ("shardlib", "shardwright") if package == "." else (".",):
        target = directory / "checkout" / part  # links in it become what they point to
        shutil.copytree(ROOT / package / part, target, ignore=ignored, dirs_exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", directory / "site", "."], cwd=directory / "checkout", capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return directory / "site"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("installed"), ".")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("alone"), "shardlib")


def run(installed: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python in another project, with only what pip installed."""
    environment = os.environ | {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": xla_flags(4)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=400
    )


def without_other_packages() -> str:
    """Lines that hide the other packages on which shardwright depends."""
    specs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", spec)[0] for spec in specs}
    assert names > NEEDED
    hidden = sorted(MODULES.get(name, name) for name in names - NEEDED)
    return f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n"


def test_shardlib_alone_runs_and_refuses(alone, tmp_path):
    shown = (
        "import shardlib\nprint(y.shape, y.addressable_shards[0].data.shape, float(y.sum()), "
        "shardlib.__file__)\n"
    )
    program = without_other_packages() + RIGHT + "import shardlib.exact\n" + shown + WRONG
    (tmp_path / "mine.py").write_text(program)
    done = run(alone, tmp_path, "mine.py")
    assert done.stdout == f"(8, 32) (2, 32) 4096.0 {alone / 'shardlib/__init__.py'}\n", done.stderr
    said = done.stderr.partition("ShardError: ")[2]
    assert re.sub(r"mine.py:\d+: ", "", said).startswith(MESSAGES[1])


def test_its_fixture_in_pytest(alone, tmp_path):
    """A failure shows the line of the test and the message, without the frames of shardlib and
    JAX.
    """
    program = UNCHECKED.rpartition("check(")[0]
    (tmp_path / "conftest.py").write_text(
        without_other_packages() + "assert 'jax' not in sys.modules\n"
    )
    (tmp_path / "test_wrong.py").write_text(program + FIXTURE)
    (tmp_path / "test_right.py").write_text(program + CHECKED + FIXTURE)
    done = run(alone, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    shown = done.stdout.partition("FAILURES")[2]
    line = program.partition("return")[0].count("\n") + 1
    assert (
        f"ShardError: on the mesh data=2 model=4: test_wrong.py:{line}: sub: operand 1 is" in shown
    )
    assert "_ _ _" not in shown, "frames"
    assert "shardlib/" not in shown


def shardwright(installed: Path, directory: Path, *arguments: str) -> str:
    """What the command prints in a directory."""
    done = run(installed, directory, str(installed / "bin" / "shardwright"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr + done.stdout


TRAIN = (
    "train",
    "--config-name=my_run",
    "training.steps=1",
    "training.eval_batches=0",
    "paths.model_name=a",
    "hardware.simulated_devices=4",
)


def test_a_project_trains_its_model_by_its_fork_beside_files_of_our_names(installed, tmp_path):
    shardwright(installed, tmp_path, "init", "mine")
    project = tmp_path / "mine"
    for name in ("tools", "models", "data"):
        (project / name).mkdir()
        (project / name / "__init__.py").write_text("WHOSE = 'mine'\n")
    model, fork = project / "my_model.py", project / "train.py"
    model.write_text(
        model.read_text()
        + "\n    def layer(self, x, w, tokens, attention):\n        return x + self.mlp(x, w)\n"
        + "\nimport tools, models\n\nassert tools.WHOSE == models.WHOSE == 'mine'\n"
    )
    shardwright(installed, project, "fork")
    fork.write_text(fork.read_text().replace("jax.nn.silu)", "jax.nn.gelu)"))
    said = shardwright(installed, project, *TRAIN)
    assert f"train.py: {fork}" in said
    assert "step 1/1  loss" in said
    (kept,) = (project / "runs/a/source").iterdir()
    assert (kept / "my_model.py").exists()
    assert any("jax.nn.gelu)" in path.read_text() for path in kept.glob("*train.py"))
    changes = shardwright(installed, project, "fork", "--diff")
    assert re.search(r"^\+.*jax\.nn\.gelu\)", changes, re.MULTILINE)
