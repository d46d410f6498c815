"""The Gauntlet: silent parallelism bugs that other frameworks have published, and where each would be caught.

    python -m tests.support.gauntlet_page       prints docs/gauntlet.md

edits/edits.toml has the bugs as edits of this repository, and what catches each; edits/test_edits.py makes them.
"""

import re
from collections.abc import Iterable

from tests.support.edits import DATA, EDITS, GATES, Edit

KINDS = {
    "a": "partial sums, copies and varying values mixed up",
    "b": "local operations, counts or dropout masks along a sharded dim",
    "c": "different results on different meshes or numbers of microbatches",
    "d": "data, checkpoints and state",
    "e": "compilers and kernels",
}
NAMES = {"type": "types", "proof": "proof", "verify": "`tools.verify`", "test": "a test", "": "nothing"}
"""What catches a bug, as the page says it."""
BUGS = [edit for edit in EDITS.values() if edit.bug]
HEAD = """# The Gauntlet: published parallelism bugs

Would shardwright have caught them? Each of these bugs ran silently in another framework and computed the wrong thing.
[test_edits.py](../tests/edits/test_edits.py) plants each in this repository and checks what catches it:

- **types** reject the step while it is traced.
- **proof**: it rejects the traced step before it is compiled.
- **`tools.verify`** names the first tensor that differs from one device.
- **a test** fails, because the bug computes the same on every mesh, or isn't in the step.

A bug with no edit can't be planted, because shardwright has no such part or the bug is in a compiler.
[edits.toml](../tests/edits/edits.toml) describes every bug, its edit, and the message, tensor or test that catches it.
`python -m tests.support.gauntlet_page` prints this page.

The last two columns below show what [spmd_types](https://github.com/meta-pytorch/spmd_types) {version}, a type system
for PyTorch (strict global mode, commit 54cf099), rejects of these bugs, written as short programs. It accepts each
program without the bug.
"""


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [" | ".join(str(cell).replace("|", "\\|") for cell in line) for line in lines]


def linked(upstream: str) -> str:
    """The threads that report a bug, `owner/repository#number`, as links."""
    return re.sub(r"([\w.-]+)/([\w.-]+)#(\d+)", r"[\2#\3](https://github.com/\1/\2/issues/\3)", upstream)


def catcher(edit: Edit) -> str:
    """What catches a bug, as a cell."""
    return NAMES[next((gate for gate in GATES if getattr(edit, gate)), "")] if edit.changes else "no edit"


def page() -> str:
    """The text of docs/gauntlet.md."""
    rows = []
    for kind, meaning in KINDS.items():
        ours = [edit for edit in BUGS if edit.kind == kind]
        names = [catcher(edit) for edit in ours]
        caught = [names.count(name) for name in NAMES.values()]
        theirs = [edit.spmd for edit in ours if edit.spmd]
        rows.append([meaning, len(ours), sum(caught), *caught, len(theirs), theirs.count("refused")])
    rows.append(["all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))])
    caught = [f"by {name}" for name in NAMES.values()]
    lines = [HEAD.format(version=DATA["spmd_types"]), "## Counts", ""]
    lines += table(["class", "bugs", "planted here", *caught, "tried in spmd_types", "rejected by it"], rows)
    for kind, meaning in KINDS.items():
        lines += ["", f"## {meaning[0].upper()}{meaning[1:]}", ""]
        shown, rest = ([edit for edit in BUGS if edit.kind == kind and edit.shown is x] for x in (True, False))
        lines += [f"- **{catcher(x)}**: {x.bug.rstrip('.')} ({linked(x.id)})." for x in shown] + [""]
        rows = []
        for name in (*NAMES.values(), "no edit"):
            threads = dict.fromkeys(linked(re.match(r"[^,;\s]+", x.id)[0]) for x in rest if catcher(x) == name)
            rows += [[name, "; ".join(threads)]] * bool(threads)
        lines += table(["caught by", "other bugs"], rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
