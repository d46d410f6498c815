"""docs/first_chip.ipynb: its cells run, with a small model, on this machine's CPU.

Nothing is uploaded or installed.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/first_chip.ipynb"
SMALL = (
    "model.layers=1 model.d_model=64 model.d_ff=64 model.n_kv=1 training.seq_len=64 "
    "training.steps=8"
)
SMALL += " optimizer.warmup_steps=0 training.sample_interval=null hardware.compilation_cache=null"


SHARDWRIGHT = f'exec {sys.executable} -m shardwright "$@"'
"""The program that the wheel installs, from this source."""


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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Kernel is running over TCP:UserWarning")
def test_its_cells_plan_train_and_compare(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    installed(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "200")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = (cell for cell in notebook.cells if "MORE =" in cell.source)
    settings.source += f"\nMORE = {SMALL!r}"
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert f"pip install --quiet {tmp_path}/shardwright-0-py3-none-any.whl[tools" in printed
    assert "Error" not in printed
    page = (tmp_path / "first_chip.html").read_text()
    assert re.search(r"^step +[\d.]+ m?s +between", printed, re.MULTILINE)  # the plan
    assert "tokens/s" in page
    assert "1 x cpu" in page
