"""`pip install .` without -e: shardlib/README.md works with what it says alone, and programs ask for the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "shardlib/README.md").read_text()
RIGHT, WRONG = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(MESSAGE,) = re.findall(r"^```\nmine.py:…: (.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
NEEDED = {"jax", "numpy", "einops"}
"""The packages that shardlib depends on."""
MODULES = {"google-crc32c": "google_crc32c", "hydra-core": "hydra"}
"""Names of modules, for packages of another name."""


def install(directory: Path, package: str) -> Path:
    """A directory with what pip installs of a package in a copy of the checkout, in which it would leave build/."""
    pytest.importorskip("setuptools", minversion="77", reason="pip builds with setuptools, and no test downloads it")
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "docs", "data", "outputs", "multirun", "*.egg-info")
    shutil.copytree(ROOT / package, directory / "checkout", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", directory / "site", "."], cwd=directory / "checkout", capture_output=True)
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
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def without_other_packages() -> str:
    """Lines that hide the other packages on which shardwright depends."""
    specs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", spec)[0] for spec in specs}
    assert names > NEEDED
    hidden = sorted(MODULES.get(name, name) for name in names - NEEDED)
    return f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n"


def test_shardlib_alone(alone, tmp_path):
    shown = "import shardlib\nprint(y.shape, y.addressable_shards[0].data.shape, float(y.sum()), shardlib.__file__)\n"
    (tmp_path / "mine.py").write_text(without_other_packages() + RIGHT + "import shardlib.proof.check\n" + shown)
    done = run(alone, tmp_path, "mine.py")
    assert done.stdout == f"(8, 32) (2, 32) 4096.0 {alone / 'shardlib/__init__.py'}\n", done.stderr


def test_what_it_refuses(alone, tmp_path):
    (tmp_path / "mine.py").write_text(without_other_packages() + RIGHT + WRONG)
    done = run(alone, tmp_path, "mine.py")
    assert done.returncode == 1
    assert re.sub(r"mine.py:\d+: ", "", done.stderr.partition("ShardError: ")[2]).startswith(MESSAGE)


@pytest.mark.parametrize("program", ["train", "tools.generate", "tools.verify"])
def test_a_program_says_that_it_needs_the_checkout(installed, tmp_path, program):
    done = run(installed, tmp_path, "-m", program, "--help")
    assert done.returncode == 1
    assert re.fullmatch(
        r"Error: \S+ has no configs/, because shardwright must run from its checkout\. "
        r"Clone the repository and run `pip install -e \.` there\.\n",
        done.stderr,
    ), done.stderr
