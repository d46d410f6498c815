"""The Gauntlet: silent parallelism bugs that other frameworks have published, and where each would be caught.

    python -m bench.gauntlet            prints docs/gauntlet.md

tests/gauntlet/bugs.toml has the bugs as edits of this repository, and what catches each.
tests/gauntlet/test_gauntlet.py applies them and holds the file to the truth.
"""

import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parents[1] / "tests/gauntlet/bugs.toml"
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
each one as an edit of this repository. [test_gauntlet.py](../tests/gauntlet/test_gauntlet.py) makes the edit in a copy
and checks what the table says. `python -m bench.gauntlet` prints this page.

Words of the column *caught*:

- **tracing**: the step is refused before it is compiled.
- **verify**: `tools.verify` finds a difference from one device, and names the first tensor that differs, and the line.
- **test**: the named test of the suite fails. These bugs compute the same on every mesh, or are not in the step.
- **nothing**: the edit was made, and no check finds it.
- **—**: there is no such edit. The last table has the reasons.

[spmd_types](https://github.com/meta-pytorch/spmd_types) (version {version}) is a type system for PyTorch with explicit
collectives. The bugs were tried as programs of a few lines for it, in its strict global mode, at commit 54cf099. It
accepts each program without the bug. **—** means that the bug has no counterpart there.
"""


def bugs() -> list[dict]:
    """The bugs in bugs.toml, in order."""
    return tomllib.loads(FILE.read_text())["bug"]


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def linked(upstream: str) -> str:
    """The threads that tell of a bug, `owner/repository#number`, as links."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", upstream)


def caught_here(bug: dict) -> str:
    """The cell of a bug: what catches it here."""
    if "edit" not in bug:
        return "—"
    gate, by = bug.get("caught"), bug.get("by", "")
    if gate is None:
        return "**nothing**"
    if gate == "test":
        return f"test: `{by.partition('::')[2]}`"
    return f"verify: {by.removeprefix('the ')}" if gate == "verify" else "tracing"


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
        rows.append([letter, meaning, len(ours), len(edits), *gates, len(theirs), count(theirs, spmd="refused")])
    rows.append(["", "all", *(sum(column) for column in zip(*(row[2:] for row in rows), strict=True))])
    gates = [f"by {gate}" for gate in GATES.values()]
    lines += table(["class", "", "bugs", "edits here", *gates, "programs of spmd_types", "refused"], rows)
    lines += ["", "## The bugs", ""]
    here = lambda bug: f" Here: {bug['here']}." if "here" in bug else ""
    rows = (
        [b["number"], linked(b["upstream"]), b["class"], b["bug"] + here(b), caught_here(b), b.get("spmd", "—")]
        for b in found
    )
    lines += table(["#", "upstream", "class", "bug", "caught", "spmd_types"], rows)
    lines += ["", "## Without an edit, or not caught", ""]
    reasons = [(bug["why"], str(bug["number"])) for bug in found if "why" in bug]
    grouped = itertools.groupby(sorted(reasons, key=lambda pair: pair[0]), lambda pair: pair[0])
    by_reason = {why: [number for _, number in group] for why, group in grouped}
    order = sorted(by_reason.items(), key=lambda entry: int(entry[1][0]))
    lines += table(["#", "reason"], ([", ".join(numbers), why] for why, numbers in order))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
