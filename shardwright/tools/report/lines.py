"""Shows the training step by source line: what is planned, compiled and measured of each line."""

from typing import Any
from urllib.parse import quote

from shardwright.inspect.by_line import PROFILE, STEP, Line, newest, read_by_line
from shardwright.inspect.compiled.table import KINDS
from shardwright.tools.report.reading import Run

_LINKS = {
    f"{STEP}.svg": "the picture of the step",
    f"{STEP}.txt": "the compiled step, as XLA writes it (HLO)",
    f"{PROFILE}perfetto_trace.json.gz": "the trace of a few steps, for ui.perfetto.dev",
}
FIRST = 15
"""Number of lines that are shown without unfolding."""


def step_by_line(run: Run) -> dict[str, Any] | None:
    """Makes the data of the section; None if the run wrote nothing.

    `problems` lists what cannot be read.
    """
    found = read_by_line(run.directory)
    links = [
        (path, words) for name, words in _LINKS.items() if (path := newest(run.directory, name))
    ]
    if not (found.lines or links or found.problems):
        return None
    return {
        "problems": found.problems,
        "facts": [(title, found.compiled.total(kind)) for kind, title in KINDS.items()]
        if found.compiled
        else [],
        "planned": any(line.planned_seconds for line in found.lines),
        "measured": any(line.measured is not None for line in found.lines),
        "first": list(map(_row, found.lines[:FIRST])),
        "rest": list(map(_row, found.lines[FIRST:])),
        "links": [
            (quote(str(path.relative_to(run.directory))), path.name, words) for path, words in links
        ],
    }


def _row(line: Line) -> dict[str, Any]:
    """A line for the template: times in ms, and rows for its operations."""
    ratio = ""
    if line.measured and line.planned_seconds:
        found = line.measured / line.planned_seconds
        ratio = f"{found:,.0f}" if found >= 100 else f"{found:.3g}"
    planned = (
        (1000 * line.planned_seconds, 1000 * line.planned_waits) if line.planned_seconds else None
    )
    measured = None if line.measured is None else (1000 * line.measured, 1000 * line.waits)
    shares = {name: getattr(line, name) for name in ("share", "collective", "exposed")}
    own = {"place": line.place, "text": line.text, "planned": planned, "measured": measured}
    return own | shares | {"ratio": ratio, "operations": line.operations()}
