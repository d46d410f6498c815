"""The Gauntlet: silent parallelism bugs that other frameworks have published, and where each would be caught.

    python -m tests.support.gauntlet_page       prints docs/gauntlet.md

gauntlet/bugs.toml has the bugs as edits of this repository, and what catches each.
gauntlet/test_gauntlet.py applies them and holds the file to the truth.
"""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parents[1] / "gauntlet" / "bugs.toml"
CLASSES = {
    "a": "partial sums, copies and varying values mixed up",
    "b": "local operations, counts or dropout masks along a sharded dim",
    "c": "different results on different meshes or numbers of microbatches",
    "d": "data, checkpoints and state",
    "e": "compilers and kernels",
}
GATES = {"tracing": "tracing", "verify": "`tools.verify`", "test": "a test", None: "nothing"}
"""What catches a bug, as the page says it."""
EXAMPLES = (19, 23, 39, 77, 4, 9, 67, 95, 102)
"""Numbers of the bugs that the page describes; bugs.toml describes all."""
HEAD = """# The Gauntlet: published parallelism bugs

Would shardwright have caught them? Each of these bugs ran silently in another framework and computed the wrong thing.
[test_gauntlet.py](../tests/gauntlet/test_gauntlet.py) plants each in this repository and checks what catches it:

- **tracing**: types or proof reject the step before it is compiled.
- **`tools.verify`** names the first tensor that differs from one device.
- **a test** fails, because the bug computes the same on every mesh, or isn't in the step.

A bug with no edit can't be planted, because shardwright has no such part or the bug is in a compiler.
[bugs.toml](../tests/gauntlet/bugs.toml) describes every bug, its edit, and the message, tensor or test that catches it.
`python -m tests.support.gauntlet_page` prints this page.

The last two columns below show what [spmd_types](https://github.com/meta-pytorch/spmd_types) {version}, a type system
for PyTorch (strict global mode, commit 54cf099), rejects of these bugs, written as short programs. It accepts each
program without the bug.
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
    """The threads that report a bug, `owner/repository#number`, as links."""
    return re.sub(r"([\w.-]+)/([\w.-]+)#(\d+)", r"[\2#\3](https://github.com/\1/\2/issues/\3)", upstream)


def gate_of(bug: dict) -> str:
    """What catches a bug, as a cell."""
    return GATES[bug.get("caught")] if "edit" in bug else "no edit"


def page() -> str:
    """The text of docs/gauntlet.md."""
    found, version = bugs(), tomllib.loads(FILE.read_text())["spmd_types"]
    lines = [HEAD.format(version=version), "## Counts", ""]

    def count(ours, **having):
        return sum(all(b.get(k) == v for k, v in having.items()) for b in ours)

    rows = []
    for letter, meaning in CLASSES.items():
        ours = [bug for bug in found if bug["class"] == letter]
        edits = [bug for bug in ours if "edit" in bug]
        theirs = [bug for bug in ours if "spmd" in bug]
        gates = [count(edits, caught=gate) for gate in GATES]
        rows.append([meaning, len(ours), len(edits), *gates, len(theirs), count(theirs, spmd="refused")])
    rows.append(["all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))])
    gates = [f"by {gate}" for gate in GATES.values()]
    lines += table(["class", "bugs", "planted here", *gates, "tried in spmd_types", "rejected by it"], rows)
    for letter, meaning in CLASSES.items():
        lines += ["", f"## {meaning[0].upper()}{meaning[1:]}", ""]
        ours = [bug for bug in found if bug["class"] == letter]
        shown = [bug for bug in ours if bug["number"] in EXAMPLES]
        lines += [f"- **{gate_of(b)}**: {b['bug'].rstrip('.')} ({linked(b['upstream'])})." for b in shown] + [""]
        rest = [bug for bug in ours if bug not in shown]
        threads = {gate: [b["upstream"] for b in rest if gate_of(b) == gate] for gate in (*GATES.values(), "no edit")}

        def once(of):
            return dict.fromkeys(linked(re.match(r"[^,;\s]+", upstream)[0]) for upstream in of)

        rows = ([gate, "; ".join(once(of))] for gate, of in threads.items() if of)
        lines += table(["caught by", "other bugs"], rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
