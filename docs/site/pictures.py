"""Makes the picture of README's refusal, and the outputs of the notebook, anew, for `make pictures`.

The refusal is drawn from README, whose text a test compares with what the program says.
"""

import io
import re
from pathlib import Path

import nbclient
import nbformat
from rich.console import Console
from rich.text import Text

from shardwright.settings.words import picture_of

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs/tour.ipynb"


def refusal(readme: str) -> str:
    """An SVG of README's forgotten reduction and its message, as a terminal shows them."""
    *_, diff = re.findall(r"^```diff\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (message,) = re.findall(r"^```\n(train\.py:.*?)^```", readme, re.DOTALL | re.MULTILINE)
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ git diff --unified=0 train.py", "bold"))
    for line in diff.splitlines():
        console.print(Text(line, "red" if line.startswith("-") else "green"))
    console.print(Text("$ make demo", "bold"))
    place, rest = message.split(" ", 1)
    console.print(Text.assemble("Error: ", (place, "cyan"), " ", rest.rstrip()))
    console.print()  # the last line of an SVG loses its underscores
    return picture_of(console, "a forgotten reduction")


def main() -> None:
    """Writes both."""
    (ROOT / "docs/pictures/refusal.svg").write_text(refusal((ROOT / "README.md").read_text()))
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.execute(notebook, cwd=str(TOUR.parent), timeout=300, kernel_name="python3", record_timing=False)
    nbformat.write(notebook, TOUR)


if __name__ == "__main__":
    main()
