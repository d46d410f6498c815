"""The training step by source line: what a run wrote of its compiled step, and of the time of its profiled steps."""

import base64
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardwright.compiled.picture import colours_of, draw
from shardwright.compiled.table import KINDS, Row, Table
from shardwright.run.optional import why
from shardwright_data.foreign import check_types, read_object
from tools.report.reading import Run

_STEP, _PROFILE = "training_step_optimized_hlo_*", "plugins/profile/*/"
_TIME = {"seconds": float, "share": float, "collective": float, "exposed": float}
_TIMES = {"devices": int, "steps": int, "lines": [{"line": str, "text": str} | _TIME]}
_LINKS = {
    f"{_STEP}.svg": "the picture alone",
    f"{_STEP}.txt": "the compiled step, as XLA writes it (HLO)",
    f"{_PROFILE}perfetto_trace.json.gz": "the trace of a few steps, for ui.perfetto.dev",
}
_MOST_BYTES, _MOST_BYTES_OF_PICTURE = 2**23, 2**21
_FIRST, _MOST_LINES, _MOST_PARTS, _LONGEST = 15, 500, 12, 300
"""Number of lines that are shown at once, of all lines, and of what a line does; characters of a text."""


def step_by_line(run: Run) -> dict[str, Any] | None:
    """What the section shows; None if the run wrote nothing of its step. `problems` says what cannot be read."""
    problems: list[str] = []
    table_path, times_path = (_newest(run.directory, name) for name in (f"{_STEP}.json", f"{_PROFILE}profile*.json"))
    links = [(path, words) for name, words in _LINKS.items() if (path := _newest(run.directory, name))]
    if not (table_path or times_path or links):
        return None
    table = table_path and _read(table_path, Table.from_data, problems)
    times = (times_path and _read(times_path, _times, problems)) or {}
    if table and times and times_path.parent.name < table_path.stem[-len(times_path.parent.name) :]:
        problems.append("The times are of an earlier start of the run: its lines may have changed since.")
    lines = _lines(table, times)
    longest = max((line["share"] for line in lines), default=0) or 1
    for line in lines:
        line["bar"] = [f"{100 * max(0.0, part) / longest:.2f}" for part in line["bar"]]
    svg = draw(table).encode() if table else b""
    if len(svg) > _MOST_BYTES_OF_PICTURE:
        problems.append("The picture is not shown here: the step has too many lines.")
    return {
        "problems": problems,
        "facts": [(title, table.total(kind)) for kind, title in KINDS.items()] if table else [],
        "timed": bool(times),
        "simulated": "cpu" in str(run.fact("devices")),
        "first": lines[:_FIRST],
        "rest": lines[_FIRST:_MOST_LINES],
        "left_out": max(0, len(lines) - _MOST_LINES),
        # As an image, in which a browser runs no script and fetches nothing.
        "picture": base64.b64encode(svg).decode() if 0 < len(svg) <= _MOST_BYTES_OF_PICTURE else None,
        "links": [(quote(str(path.relative_to(run.directory))), path.name, words) for path, words in links],
    }


def _newest(directory: Path, pattern: str) -> Path | None:
    """The last file of this pattern. No link: it may lead out of the run, and its contents into the page."""
    return next((p for p in sorted(directory.glob(pattern), reverse=True) if stat.S_ISREG(p.lstat().st_mode)), None)


def _read(path: Path, parse: Callable[[Any], Any], problems: list[str]) -> Any:
    try:
        return parse(read_object(path, most=_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = why(error) if isinstance(error, OSError) else str(error).removeprefix(f"{path} cannot be read: ")
        problems.append(f"{path.name} cannot be read: {reason[:_LONGEST]}")
        return None


def _times(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Text and times of each line, by its name, in seconds a step and device. Raises ValueError for no profile."""
    check_types("the profile", data, _TIMES, "")
    steps = data["devices"] * data["steps"]
    if steps <= 0 or not all(0 <= row[name] < 1e9 for row in data["lines"] for name in _TIME):
        raise ValueError("a number of the profile is out of range.")
    return {row["line"]: row | {"seconds": row["seconds"] / steps} for row in data["lines"]}


def _lines(table: Table | None, times: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """All lines as the template shows them. What has an inferred line is with the rest of that line."""
    rows = [row for kind in KINDS for row in table.of(kind)] if table else []
    found: dict[str, list[list]] = {}
    for i, things in enumerate((rows, times.values())):
        for thing in things:
            name = thing.line if i == 0 else thing["line"]
            found.setdefault(name.removeprefix("~"), [[], []])[i].append(thing)
    lines = [_line(table, place, *things) for place, things in found.items()]
    return sorted(lines, key=lambda line: line["order"], reverse=True)


def _line(table: Table | None, place: str, rows: list[Row], times: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, share, collective, exposed = (sum(own[name] for own in times) for name in _TIME)
    inferred = any(name.startswith("~") for name in [*(row.line for row in rows), *(own["line"] for own in times)])
    parts = [
        {
            "size": f"{'≤ ' * row.sometimes}{row.amount(row.total)}",
            "what": row.words,
            "where": row.where + (f" × {row.times}" if row.times != "1" else ""),
            "colours": ["currentColor"] if row.kind == "matmul" else colours_of(row, table.mesh),
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
