"""The training step by source line: what a run wrote of its compiled step, and of the time of its profiled steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardwright.compiled.picture import colours_of
from shardwright.compiled.table import KINDS, Row, Table, read_table
from shardwright.run.optional import why
from shardwright_data.foreign import read_object
from tools.report.reading import Run

_STEP, _PROFILE = "training_step_optimized_hlo_*", "plugins/profile/*/"
_TIME = {"seconds": float, "share": float, "collective": float, "exposed": float}
_TIMES = {"devices": int, "steps": int, "lines": [{"line": str, "text": str} | _TIME]}
_LINKS = {
    f"{_STEP}.svg": "the picture of the step",
    f"{_STEP}.txt": "the compiled step, as XLA writes it (HLO)",
    f"{_PROFILE}perfetto_trace.json.gz": "the trace of a few steps, for ui.perfetto.dev",
}
_FIRST, _MOST_LINES, _MOST_PARTS, _LONGEST = 15, 500, 12, 300
"""Number of lines that are shown at once, of all lines, and of what a line does; characters of a text."""


def step_by_line(run: Run) -> dict[str, Any] | None:
    """What the section shows; None if the run wrote nothing of its step. `problems` says what cannot be read."""
    problems: list[str] = []
    table_path, times_path = (_newest(run.directory, name) for name in (f"{_STEP}.json", f"{_PROFILE}profile*.json"))
    links = [(path, words) for name, words in _LINKS.items() if (path := _newest(run.directory, name))]
    if not (table_path or times_path or links):
        return None
    table = table_path and _read(table_path, read_table, problems)
    times = (times_path and _read(times_path, _read_times, problems)) or []
    if table and times and times_path.parent.name < table_path.stem[-len(times_path.parent.name) :]:
        problems.append("The times are of an earlier start of the run: its lines may have changed since.")
    lines = _lines(table, times)
    longest = max((line["share"] for line in lines), default=0) or 1
    for line in lines:
        line["bar"] = [f"{100 * max(0.0, part) / longest:.2f}" for part in line["bar"]]
    return {
        "problems": problems,
        "facts": [(title, table.total(kind)) for kind, title in KINDS.items()] if table else [],
        "timed": bool(times),
        "simulated": "cpu" in str(run.fact("devices")),
        "first": lines[:_FIRST],
        "rest": lines[_FIRST:_MOST_LINES],
        "left_out": max(0, len(lines) - _MOST_LINES),
        "links": [(quote(str(path.relative_to(run.directory))), path.name, words) for path, words in links],
    }


def _newest(directory: Path, pattern: str) -> Path | None:
    """The last file of this pattern. No link: it may lead out of the run, and its contents into the page."""
    return next((p for p in sorted(directory.glob(pattern), reverse=True) if p.is_file() and not p.is_symlink()), None)


def _read(path: Path, read: Callable[[Path], Any], problems: list[str]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        reason = why(error).removeprefix(f"{path} cannot be read: ").removeprefix(f"{path}: ")
        problems.append(f"{path.name} cannot be read: {reason[:_LONGEST]}")
        return None


def _read_times(path: Path) -> list[dict[str, Any]]:
    """Text and times of each line, in seconds a step and device. Raises ValueError for no profile."""
    data = read_object(path, _TIMES)
    steps = data["devices"] * data["steps"]
    if steps <= 0 or not all(0 <= row[name] < 1e9 for row in data["lines"] for name in _TIME):
        raise ValueError("a number of the profile is out of range.")
    return [row | {"seconds": row["seconds"] / steps} for row in data["lines"]]


def _lines(table: Table | None, times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All lines as the template shows them. What has an inferred line is with the rest of that line."""
    rows = [row for kind in KINDS for row in table.of(kind)] if table else []
    places = [row.line for row in rows] + [own["line"] for own in times]
    found: dict[str, tuple[list[Row], list[dict]]] = {place.removeprefix("~"): ([], []) for place in places}
    for row in rows:
        found[row.line.removeprefix("~")][0].append(row)
    for own in times:
        found[own["line"].removeprefix("~")][1].append(own)
    lines = [_line(table, place, *of_line, f"~{place}" in places) for place, of_line in found.items()]
    return sorted(lines, key=lambda line: line["order"], reverse=True)


def _line(table: Table | None, place: str, rows: list[Row], times: list[dict], inferred: bool) -> dict[str, Any]:
    seconds, share, collective, exposed = (sum(own[name] for own in times) for name in _TIME)
    parts = [
        {
            "size": f"{'≤ ' * row.sometimes}{row.amount(row.total)}",
            "what": row.words,
            "where": row.where + (f" × {row.times}" if row.times != "1" else ""),
            "colours": ["currentColor"] if row.kind == "matmul" else colours_of(row),
        }
        for row in rows[:_MOST_PARTS]
    ]
    texts = [table.text_of(place) if table else "", *(own["text"] for own in times)]
    return {
        "order": (seconds, *(sum(row.total for row in rows if row.kind == kind) for kind in KINDS)),
        "place": f"{'~' * inferred}{place}",
        "text": next(filter(None, texts), "")[:_LONGEST],
        "share": share,
        "bar": (share - collective, collective - exposed, exposed),
        "time": _ms(seconds) if times else "",
        "exposed": _ms(seconds * exposed / share) if exposed and share else "",
        "parts": parts,
        "more": len(rows) - len(parts),
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f}"
