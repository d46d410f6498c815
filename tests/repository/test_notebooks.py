"""The notebooks run: docs/first_chip.ipynb with a small model on this machine's CPU, where nothing is
uploaded or installed; docs/tour.ipynb as it is, and prints what is stored in it.
"""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Kernel is running over TCP:UserWarning"),
]

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.layers=1 model.d_model=64 model.d_ff=64 model.n_kv=1 training.seq_len=64 "
    "training.steps=8"
)
SMALL += " optimizer.warmup_steps=0 training.sample_interval=null hardware.compilation_cache=null"
SHARDWRIGHT = f'exec {sys.executable} -m shardwright "$@"'
"""The program that the wheel installs, from this source."""
NUMBER = re.compile(r"\d+\.\d+")


def execute(notebook: Any, directory: Path) -> None:
    """Runs all cells of a notebook in a fresh kernel."""
    nbclient, place = pytest.importorskip("nbclient"), {"metadata": {"path": str(directory)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()


def notebook_of(name: str) -> Any:
    return pytest.importorskip("nbformat").read(ROOT / "docs" / name, as_version=4)


def installed(place: Path) -> None:
    """A folder with a wheel and this source, and in its folder `bin` a pip that does nothing but
    say so.
    """
    (place / "shardwright-0-py3-none-any.whl").touch()
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (place / path.name).symlink_to(path)
    (place / "bin").mkdir()
    for name, does in {"pip": 'echo pip "$@"', "shardwright": SHARDWRIGHT}.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (place / "bin" / name).chmod(0o755)


def test_the_first_chip_plans_trains_and_compares(tmp_path, monkeypatch):
    installed(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "200")
    notebook = notebook_of("first_chip.ipynb")
    (settings,) = (cell for cell in notebook.cells if "MORE =" in cell.source)
    settings.source += f"\nMORE = {SMALL!r}"
    execute(notebook, tmp_path)
    every = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in every)
    assert f"pip install --quiet {tmp_path}/shardwright-0-py3-none-any.whl[tools" in printed
    assert "Error" not in printed
    page = (tmp_path / "first_chip.html").read_text()
    assert re.search(r"^step +[\d.]+ m?s +between", printed, re.MULTILINE)  # the plan
    assert "tokens/s" in page
    assert "1 x cpu" in page


def outputs(notebook: Any) -> tuple[list[str], list[float]]:
    """What each cell printed or drew, and the numbers with a fraction in it, such as losses."""
    found = []
    for cell in notebook.cells:
        of_cell = cell.get("outputs", [])
        # A kernel sends what a cell prints in any number of parts.
        found.append(
            "".join(output["text"] for output in of_cell if output.output_type == "stream")
        )
        found += [", ".join(sorted(output.data)) for output in of_cell if "data" in output]
    text = "\n".join(found)
    return NUMBER.sub("#", text).splitlines(), [float(number) for number in NUMBER.findall(text)]


def test_what_the_tour_stores_is_what_it_prints(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # it simulates its devices itself
    stored, ours = outputs(notebook_of("tour.ipynb"))
    notebook = notebook_of("tour.ipynb")
    for cell in notebook.cells:
        cell.pop("outputs", None)
    execute(notebook, ROOT / "docs")
    printed, found = outputs(notebook)
    assert printed == stored, "`make pictures` stores what it prints now"
    # losses: f32, summed in another order elsewhere
    np.testing.assert_allclose(found, ours, rtol=0.02)
    assert "remedy: reduce it over t first, with psum_scatter or psum" in "\n".join(stored)
    assert ours[-1] < ours[-2] - 3, "the loss falls"
