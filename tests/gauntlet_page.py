"""The Gauntlet: silent parallelism bugs that other frameworks have published, and where each would be caught.

    python tests/gauntlet_page.py       prints docs/gauntlet.md

gauntlet/bugs.toml has the bugs as edits of this repository, and what catches each.
gauntlet/test_gauntlet.py applies them and holds the file to the truth.
"""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parent / "gauntlet" / "bugs.toml"
CLASSES = {
    "a": "a partial sum, a copy or a varying value taken for another",
    "b": "a local operation, count or random mask along a sharded dim",
    "c": "found by comparing meshes, or numbers of microbatches",
    "d": "data, checkpoints and state",
    "e": "outside of the program",
}
GATES = {"tracing": "tracing", "verify": "`tools.verify`", "test": "a test", None: "nothing"}
"""What catches a bug, as the page says it."""
HEAD = """# The Gauntlet

*Reference.* Silent parallelism bugs that other frameworks have published, and where each would be caught here.

Each bug ran without an error and computed something else than it should. [bugs.toml](../tests/gauntlet/bugs.toml) has
each as an edit of this repository, which may stand in for a part that it lacks.
[test_gauntlet.py](../tests/gauntlet/test_gauntlet.py) makes the edits, and checks this page, which
`python tests/gauntlet_page.py` prints.

- **tracing**: the step is refused before it is compiled.
- **verify**: `tools.verify` names this tensor as the first that differs from one device.
- a test: it fails. The bug computes the same on every mesh, or is not in the step.
- **—**: there is no edit, for the reason beside it.

[spmd_types](https://github.com/meta-pytorch/spmd_types) (version {version}) is a type system for PyTorch with explicit
collectives. The bugs were tried as short programs in its strict global mode (commit 54cf099). It accepts each program
without the bug. **—**: the bug has no counterpart there.
"""


def bugs() -> list[dict]:
    """The bugs in bugs.toml, in order."""
    return tomllib.loads(FILE.read_text())["bug"]


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [" | ".join(str(cell).replace("|", "\\|") for cell in line) for line in lines]


def linked(upstream: str) -> str:
    """The threads that tell of a bug, `owner/repository#number`, as links."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", upstream)


def caught_here(bug: dict) -> str:
    """The cell of a bug: what catches it here."""
    if "edit" not in bug:
        return f"— ({bug['why']})"
    gate, by = bug.get("caught"), bug.get("by", "")
    if gate == "test":
        return f"`{by.partition('::')[2]}`"
    return f"verify: {by.removeprefix('the ')}" if gate == "verify" else gate or "**nothing**"


def page() -> str:
    """The text of docs/gauntlet.md."""
    found, version = bugs(), tomllib.loads(FILE.read_text())["spmd_types"]
    lines = [HEAD.format(version=version), "## Counts", ""]
    count = lambda ours, **having: sum(all(b.get(k) == v for k, v in having.items()) for b in ours)
    rows = []
    for letter, meaning in CLASSES.items():
        ours = [bug for bug in found if bug["class"] == letter]
        edits = [bug for bug in ours if "edit" in bug]
        theirs = [bug for bug in ours if "spmd" in bug]
        gates = [count(edits, caught=gate) for gate in GATES]
        rows.append([meaning, len(ours), len(edits), *gates, len(theirs), count(theirs, spmd="refused")])
    rows.append(["all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))])
    gates = [f"by {gate}" for gate in GATES.values()]
    lines += table(["class", "bugs", "edits here", *gates, "programs of spmd_types", "refused"], rows)
    for letter, meaning in CLASSES.items():
        lines += ["", f"## {meaning[0].upper()}{meaning[1:]}", ""]
        ours = (bug for bug in found if bug["class"] == letter)
        told = lambda b: f"{b['number']}: {linked(b['upstream'])}"
        rows = ([told(b), b["bug"], caught_here(b), b.get("spmd", "—")] for b in ours)
        lines += table(["number: upstream", "bug", "caught", "spmd_types"], rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
