"""Shows the training step by source line: costs of the compiled step, and times of the profiled steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardwright.data.untrusted import read_object
from shardwright.inspect.compiled.table import KINDS, Table, read_table
from shardwright.tools.report.reading import Run

_STEP, _PROFILE = "training_step_optimized_hlo_*", "plugins/profile/*/"
_TIME = {"seconds": float, "share": float, "collective": float, "exposed": float}
_TIMES = {"devices": int, "steps": int, "lines": [{"line": str, "text": str} | _TIME]}
_LINKS = {
    f"{_STEP}.svg": "the picture of the step",
    f"{_STEP}.txt": "the compiled step, as XLA writes it (HLO)",
    f"{_PROFILE}perfetto_trace.json.gz": "the trace of a few steps, for ui.perfetto.dev",
}
FIRST = 15
"""Number of lines that are shown without unfolding."""


def step_by_line(run: Run) -> dict[str, Any] | None:
    """Makes the data of the section; None if the run wrote nothing. `problems` lists what cannot be read."""
    problems: list[str] = []
    table_path = newest(run.directory, f"{_STEP}.json")
    times = _times(run, problems)
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
    """Reads the lines of the newest profile: place, text, and times in seconds and shares. Empty without one."""
    return _lines(None, _times(run, []))


def _times(run: Run, problems: list[str]) -> list[dict[str, Any]]:
    path = newest(run.directory, f"{_PROFILE}profile*.json")
    return (path and read(path, _read_times, problems)) or []


def newest(directory: Path, pattern: str) -> Path | None:
    """Finds the newest file that matches. Ignores links, which could bring files from outside the run into the page."""
    return next((p for p in sorted(directory.glob(pattern), reverse=True) if p.is_file() and not p.is_symlink()), None)


def read(path: Path, reader: Callable[[Path], Any], problems: list[str]) -> Any:
    """Calls `reader`; if it fails, adds the reason to `problems` and returns None."""
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return None


def _read_times(path: Path) -> list[dict[str, Any]]:
    """Reads text and times of each line, in seconds per step and device. Raises ValueError if it is not a profile."""
    data = read_object(path, _TIMES)
    steps = data["devices"] * data["steps"]
    if steps <= 0 or not all(0 <= row[name] < 1e9 for row in data["lines"] for name in _TIME):
        raise ValueError(f"{path}: a number of the profile is out of range.")
    return [row | {"seconds": row["seconds"] / steps} for row in data["lines"]]


def _lines(table: Table | None, times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges costs and times by line, for the template. Costs with an inferred line (~) count for that line."""
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
