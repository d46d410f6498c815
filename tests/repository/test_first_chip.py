"""docs/first_chip.ipynb: its cells run, with a small model, on this machine's CPU. Nothing is cloned or installed."""

import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/first_chip.ipynb"
SMALL = "model.layers=1 model.d_model=64 model.d_ff=64 model.n_kv=1 training.seq_len=64 training.steps=8"
SMALL += " optimizer.warmup_steps=0 training.sample_interval=null hardware.compilation_cache=null"


def checkout(place: Path) -> None:
    """What `git clone` makes, of this source, and in a folder `bin` a git and a pip that do nothing but say so."""
    (place / "shardwright").mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (place / "shardwright" / path.name).symlink_to(path)
    (place / "bin").mkdir()
    for name, does in {"git": 'echo git "$@"', "pip": 'echo pip "$@"', "python": f'exec {sys.executable} "$@"'}.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (place / "bin" / name).chmod(0o755)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Kernel is running over TCP:UserWarning")
def test_its_cells_plan_train_and_compare(tmp_path, monkeypatch):
    checkout(tmp_path)
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
    assert "git clone --depth 1 https://github.com/" in printed
    assert "pip install --quiet --editable .[tools" in printed
    assert "Error" not in printed
    shown = outputs[-1].data["text/markdown"]
    assert shown == (tmp_path / "shardwright/first_chip.md").read_text()
    assert re.search(r"^step +[\d.]+ m?s +between", printed, re.MULTILINE)  # the plan
    # A run on a CPU keeps no plan beside it, since the numbers of this chip are assumed.
    assert re.search(r"^\| MFU \|  \| [\d.]+%, not meaningful", shown, re.MULTILINE)
    (measured,) = re.search(r"^\| memory \|  \| (.*?) \|", shown, re.MULTILINE).groups()
    assert measured.startswith("~")  # of a CPU, the compiler's
    assert "- device: `1 x cpu`" in shown


def test_its_addresses_are_one_repository_and_its_files_exist():
    text = NOTEBOOK.read_text()
    assert len(set(re.findall(r"github(?:\.com)?/([\w-]+/[\w-]+)", text))) == 1
    (path,) = re.findall(r"/blob/main/([\w./]+)", text)
    assert ROOT / path == NOTEBOOK
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r"\]\(([\w-]+\.md)", text))
