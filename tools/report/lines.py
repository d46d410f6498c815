"""The training step by source line: what a run wrote of its compiled step, and of the time of its profiled steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardwright.inspect.compiled.table import KINDS, Table, read_table
from shardwright_data.untrusted import read_object
from tools.report.reading import Run

_STEP, _PROFILE = "training_step_optimized_hlo_*", "plugins/profile/*/"
_TIME = {"seconds": float, "share": float, "collective": float, "exposed": float}
_TIMES = {"devices": int, "steps": int, "lines": [{"line": str, "text": str} | _TIME]}
_LINKS = {
    f"{_STEP}.svg": "the picture of the step",
    f"{_STEP}.txt": "the compiled step, as XLA writes it (HLO)",
    f"{_PROFILE}perfetto_trace.json.gz": "the trace of a few steps, for ui.perfetto.dev",
}
FIRST = 15
"""Number of lines that are shown at once."""


def step_by_line(run: Run) -> dict[str, Any] | None:
    """What the section shows; None if the run wrote nothing of its step. `problems` says what cannot be read."""
    problems: list[str] = []
    table_path, times = newest(run.directory, f"{_STEP}.json"), _times(run, problems)
    links = [(path, words) for name, words in _LINKS.items() if (path := newest(run.directory, name))]
    if not (table_path or times or links or problems):
        return None
    table = table_path and read(table_path, read_table, problems)
    lines = _lines(table, times)
    return {
        "problems": problems,
        "facts": [(title, table.total(kind)) for kind, title in KINDS.items()] if table else [],
        "timed": bool(times),
        "first": lines[:FIRST],
        "rest": lines[FIRST:],
        "links": [(quote(str(path.relative_to(run.directory))), path.name, words) for path, words in links],
    }


def measured_lines(run: Run) -> list[dict[str, Any]]:
    """The lines of the newest profile: place, text, and times in seconds and shares. Empty without a profile."""
    return _lines(None, _times(run, []))


def _times(run: Run, problems: list[str]) -> list[dict[str, Any]]:
    path = newest(run.directory, f"{_PROFILE}profile*.json")
    return (path and read(path, _read_times, problems)) or []


def newest(directory: Path, pattern: str) -> Path | None:
    """The last file of this pattern. No link: it may lead out of the run, and its contents into the page."""
    return next((p for p in sorted(directory.glob(pattern), reverse=True) if p.is_file() and not p.is_symlink()), None)


def read(path: Path, reader: Callable[[Path], Any], problems: list[str]) -> Any:
    """What `reader` returns; None, with the reason in `problems`, for what it refuses."""
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return None


def _read_times(path: Path) -> list[dict[str, Any]]:
    """Text and times of each line, in seconds a step and device. Raises ValueError for no profile."""
    data = read_object(path, _TIMES)
    steps = data["devices"] * data["steps"]
    if steps <= 0 or not all(0 <= row[name] < 1e9 for row in data["lines"] for name in _TIME):
        raise ValueError(f"{path}: a number of the profile is out of range.")
    return [row | {"seconds": row["seconds"] / steps} for row in data["lines"]]


def _lines(table: Table | None, times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All lines as the template shows them. What has an inferred line is with the rest of that line."""
    found: dict[str, dict[str, Any]] = {}

    def at(place: str, text: str) -> dict[str, Any]:
        new = {"text": text, "parts": [], "cost": dict.fromkeys(KINDS, 0), "timed": False} | dict.fromkeys(_TIME, 0.0)
        line = found.setdefault(place.removeprefix("~"), {"place": place, **new})
        if place.startswith("~"):
            line["place"] = place
        line["text"] = line["text"] or text
        return line

    for row, text in ((row, table.text_of(row.line)) for kind in KINDS for row in table.of(kind)) if table else ():
        line = at(row.line, text)
        times_run = f" × {row.times}" if row.times != "1" else ""
        size = f"{'≤ ' * row.sometimes}{row.amount(row.total)}"
        line["parts"].append({"size": size, "what": row.words, "where": row.where + times_run})
        line["cost"][row.kind] += row.total
    for own in times:
        line = at(own["line"], own["text"])
        line |= {"timed": True} | {name: line[name] + own[name] for name in _TIME}
    return sorted(found.values(), key=lambda line: (line["seconds"], *line["cost"].values()), reverse=True)
