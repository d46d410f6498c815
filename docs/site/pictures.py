"""Makes the pictures of README, and the outputs of the notebook, anew: `make pictures`.

The refusal is drawn from README, whose text a test compares with what the program says. The page is that of a run of
the demo, in Chromium.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from PIL import Image
from rich.console import Console
from rich.text import Text

from shardwright.settings.words import picture_of

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
TOUR = ROOT / "docs/tour.ipynb"
COLUMNS = 104


def refusal(readme: str) -> str:
    """An SVG of README's forgotten reduction and its message, as a terminal shows them."""
    *_, diff = re.findall(r"^```diff\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (message,) = re.findall(r"^```\n(train\.py:.*?)^```", readme, re.DOTALL | re.MULTILINE)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ git diff --unified=0 train.py", "bold"))
    for line in diff.splitlines():
        console.print(Text(line, "red" if line.startswith("-") else "green"))
    console.print(Text("$ make demo", "bold"))
    place, rest = message.split(" ", 1)
    console.print(Text.assemble("Error: ", (place, "cyan"), " ", rest.rstrip()))
    console.print()  # the last line of an SVG loses its underscores
    return picture_of(console, "a forgotten reduction")


def executed(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of its cells, run in its folder, without times."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    return nbclient.execute(notebook, timeout=300, kernel_name="python3", resources=place, record_timing=False)


def report(width: int = 1280, height: int = 852) -> Image.Image:
    """The head of the page of a run of the demo, in so many pixels."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise ValueError("there is no chromium on PATH, which draws the page of a run: install it.")
    with tempfile.TemporaryDirectory() as scratch:
        settings = ["paths.model_name=demo", f"data.filespec={ROOT}/synthetic_dataset.zarr"]
        command = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", *settings]
        subprocess.run(command, cwd=scratch, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        page = Path(scratch) / "page.html"
        page.write_text((Path(scratch) / "runs/demo/report.html").read_text().replace(f"{scratch}/", ""))
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000"]
        flags += [f"--window-size={width},{height}", f"--screenshot={scratch}/page.png"]
        subprocess.run([chromium, *flags, page.as_uri()], check=True, capture_output=True)
        with Image.open(f"{scratch}/page.png") as picture:
            return picture.convert("RGB").quantize(128)  # a third of the bytes, without a difference that is seen


def main() -> None:
    """Writes all of them, the quick ones first."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "refusal.svg").write_text(refusal((ROOT / "README.md").read_text()))
    nbformat.write(executed(TOUR), TOUR)
    report().save(PICTURES / "report.png", optimize=True)


if __name__ == "__main__":
    main()
