"""The table of lines by room in docs/architecture.md.

python tests/repository/test_lines.py    # writes the table of today
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
FILES = ("family.py", "gpt2.py", "moe.py", "train.py", "jax_extra.py")
INSIDE = {
    "shardwright": (
        "sampling",
        "run",
        "plan",
        "microscope",
        "optimizers",
        "modeling",
        "cluster",
        "compiled",
        "settings",
    ),
    "shardwright_data": ("loader", "text", "flat_tokens"),
    "shardlib": ("proof",),
}
"""Rooms inside of a package."""
TABLE = re.compile(r"\| room \| lines \|\n(\|.*\n)+")


def lines_of(*patterns: str) -> int:
    """Lines of the files that match."""
    paths = (path for pattern in patterns for path in ROOT.glob(pattern) if "html" not in path.parts)  # `make docs`
    return sum(len(path.read_text().splitlines()) for path in paths)


def table() -> str:
    """Lines of Python and shell, of each room and of all but the tests."""
    count = lambda room: lines_of(f"{room}/**/*.py", f"{room}/**/*.sh")
    rows = {file: lines_of(file) for file in FILES}
    for room in ("tools", "bench", *INSIDE, "docs", "tests"):
        rows[f"{room}/"] = count(room)
        rows |= {f"{room}/{inside}/": count(f"{room}/{inside}") for inside in INSIDE.get(room, ())}
    source = sum(lines for room, lines in rows.items() if room.count("/") < 2) - rows["tests/"]
    cells = [f"| {room} | {lines:,} |" for room, lines in rows.items()]
    return "\n".join(["| room | lines |", "|---|---:|", *cells, f"| all but tests/ | {source:,} |", ""])


@pytest.mark.long
def test_the_page_has_the_lines_of_each_room():
    assert TABLE.search(PAGE.read_text())[0] == table(), f"python {Path(__file__).relative_to(ROOT)} writes it"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
    sys.stdout.write(table())
