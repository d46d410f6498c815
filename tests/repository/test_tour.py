"""docs/tour.ipynb: it runs in a fresh kernel, and what it prints is what is stored in it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs/tour.ipynb"
NUMBER = re.compile(r"\d+\.\d+")


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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Kernel is running over TCP:UserWarning")
def test_what_is_stored_is_what_it_prints(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # it simulates its devices itself
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    stored, ours = outputs(nbformat.read(TOUR, as_version=4))
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
    place = {"metadata": {"path": str(TOUR.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    printed, found = outputs(notebook)
    assert printed == stored, "`make pictures` stores what it prints now"
    # losses: f32, summed in another order elsewhere
    np.testing.assert_allclose(found, ours, rtol=0.02)
    assert "remedy: reduce it over t first, with psum_scatter or psum" in "\n".join(stored)
    assert ours[-1] < ours[-2] - 3, "the loss falls"
