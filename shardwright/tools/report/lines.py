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
    """Makes the data of the section; None if the run wrote nothing. `problems` lists what cannot be read."""
    found = read_by_line(run.directory)
    links = [(path, words) for name, words in _LINKS.items() if (path := newest(run.directory, name))]
    if not (found.lines or links or found.problems):
        return None
    return {
        "problems": found.problems,
        "facts": [(title, found.compiled.total(kind)) for kind, title in KINDS.items()] if found.compiled else [],
        "planned": any(line.planned for line in found.lines),
        "measured": found.is_measured,
        "first": list(map(_row, found.lines[:FIRST])),
        "rest": list(map(_row, found.lines[FIRST:])),
        "links": [(quote(str(path.relative_to(run.directory))), path.name, words) for path, words in links],
    }


def _row(line: Line) -> dict[str, Any]:
    """A line for the template: times in ms, and its operations with their planned and compiled amounts."""
    parts = []
    for part in line.parts.values():
        planned = "" if part.planned is None else part.amount(part.planned)
        words = f"{part.operation} {' '.join(sorted(part.axes))}".strip()
        rows = [
            {
                "size": f"{'≤ ' * row.sometimes}{row.amount(row.total)}",
                "what": row.words,
                "where": row.where + (f" × {row.times}" if row.times != "1" else ""),
            }
            for row in part.compiled
        ]
        rows = rows or [{"size": "", "what": words, "where": ""}]
        parts += [rows[0] | {"planned": planned}, *rows[1:]]
    times = {
        name: time and tuple(1000 * x for x in time)
        for name, time in (("planned", line.planned), ("measured", line.measured))
    }
    ratio = "" if line.ratio is None else f"{line.ratio:,.0f}" if line.ratio >= 100 else f"{line.ratio:.3g}"
    shares = {name: getattr(line, name) for name in ("share", "collective", "exposed")}
    return {"place": line.place, "text": line.text, "parts": parts, "ratio": ratio, **times, **shares}
