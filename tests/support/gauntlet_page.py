"""The Gauntlet: silent parallelism bugs that other frameworks have published, and where each would
be caught.

    python -m tests.support.gauntlet_page       prints docs/gauntlet.md

edits/edits.toml has the bugs as edits of this repository, and what catches each.
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
NAMES = {"type": "types", "exact": "the check of a run", "test": "a test"}
"""What catches a bug, as the page says it."""
BUGS = [edit for edit in EDITS.values() if edit.bug]
HEAD = """# The Gauntlet: published parallelism bugs

Of {bugs} bugs that ran silently in other frameworks, {planted} could be planted in this repository. A run rejects
{early} of these before its first step; a test finds the other {test}. [edits.toml](../tests/edits/edits.toml) has
the report of each bug, its edit, and the message or test that catches it, as `python -m tests.support.edits`
checks. The other {rest} concern a compiler, or a part that shardwright doesn't have.

caught by | when
--- | ---
types | at each start of a run, while the step is traced
the check of a run | at each start of a run, in exact arithmetic, before the first step
a test | if you run it, because the bug computes the same on every mesh, or isn't in the step

The last two columns below are about [spmd_types](https://github.com/meta-pytorch/spmd_types) {version}, a type system
for PyTorch (strict global mode, commit 54cf099). We wrote {tried} of the bugs as short programs. spmd_types accepts
each program without the bug.
"""


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [" | ".join(str(cell).replace("|", "\\|") for cell in line) for line in lines]


def linked(upstream: str) -> str:
    """The threads that report a bug, `owner/repository#number`, as links."""
    return re.sub(
        r"([\w.-]+)/([\w.-]+)#(\d+)", r"[\2#\3](https://github.com/\1/\2/issues/\3)", upstream
    )


def catcher(edit: Edit) -> str:
    """What catches a bug, as a cell."""
    return next(NAMES[gate] for gate in GATES if getattr(edit, gate)) if edit.changes else "no edit"


def page() -> str:
    """The text of docs/gauntlet.md."""
    rows = []
    for kind, meaning in KINDS.items():
        ours = [edit for edit in BUGS if edit.kind == kind]
        names = [catcher(edit) for edit in ours]
        caught = [names.count(name) for name in NAMES.values()]
        theirs = [edit.spmd for edit in ours if edit.spmd]
        rows.append(
            [meaning, len(ours), sum(caught), *caught, len(theirs), theirs.count("refused")]
        )
    total = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    bugs, planted, types, exact, test, tried, _ = total
    counts = {
        "bugs": bugs,
        "planted": planted,
        "early": types + exact,
        "test": test,
        "tried": tried,
    }
    head = HEAD.format(version=DATA["spmd_types"], rest=bugs - planted, **counts)
    names = ["class", "bugs", "planted", *NAMES.values(), "tried in spmd_types", "rejected by it"]
    lines = [head, "## Counts", "", *table(names, [*rows, ["all", *total]]), "", "## Examples", ""]
    shown = [
        (f"{edit.bug.rstrip('.')} ({linked(edit.id)})", catcher(edit))
        for edit in BUGS
        if edit.shown
    ]
    return "\n".join([*lines, *table(["bug", "caught by"], shown)]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
