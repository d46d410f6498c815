"""The training step by source line: what a run wrote of its compiled step, and of the time of its profiled steps."""

import base64
import math
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from shardwright.compiled.picture import KEPT_COLOUR, axis_colours
from shardwright.compiled.table import CollectiveRow, KeptRow, MatmulRow, Table, in_bytes, in_flops
from shardwright.run.optional import why
from shardwright_data.foreign import parse_json, read_file
from tools.report.comparing import scaled
from tools.report.reading import Run, number

_STEP, _TIMES = "training_step_optimized_hlo_*", "plugins/profile/*/profile_by_line.json"
_MOST_BYTES, _MOST_BYTES_OF_PICTURE = 2**23, 2**21
_FIRST, _MOST_LINES, _MOST_PARTS, _LONGEST = 15, 500, 8, 300
"""Number of lines that are shown at once, of all lines, and of what a line does of each kind; characters of a text."""


class Times(NamedTuple):
    """Time of a line: seconds a step and device, and the shares of all time: its own, its communication, exposed."""

    seconds: float
    share: float
    collective: float
    exposed: float


class Part(NamedTuple):
    """One thing that a line does, in words: its size, what it is, where and how often; colours as in the picture."""

    size: str
    what: str
    where: str
    colours: tuple[str, ...] = ()


@dataclass
class Line:
    """A source line of the step, with all that is known of it; inferred: the compiler dropped some of its names."""

    place: str
    inferred: bool = False
    text: str = ""
    times: Times | None = None
    collectives: list[CollectiveRow] = field(default_factory=list)
    matmuls: list[MatmulRow] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)

    @property
    def order(self) -> tuple[float, ...]:
        """What the lines are sorted by: time first, without times by what they send and multiply."""
        sent, flops = sum(row.step_bytes for row in self.collectives), sum(row.step_flops for row in self.matmuls)
        return self.times.seconds if self.times else 0.0, sent, flops, sum(row.bytes for row in self.kept)


def step_by_line(run: Run) -> dict[str, Any] | None:
    """What the section shows; None if the run wrote nothing of its step. `problems` says what cannot be read."""
    problems: list[str] = []
    table_path, times_path = (_newest(run.directory, name) for name in (f"{_STEP}.json", _TIMES))
    table = _read(table_path, Table.from_data, problems) if table_path else None
    times = _read(times_path, _times, problems) if times_path else {}
    picture_path, hlo = _newest(run.directory, f"{_STEP}.svg"), _newest(run.directory, f"{_STEP}.txt")
    trace = _newest(run.directory, "plugins/profile/*/perfetto_trace.json.gz")
    links = [
        (picture_path, "the picture alone, where the mouse on a box shows its operations"),
        (hlo, "the compiled step, as XLA writes it (HLO)"),
        (trace, "the trace of a few steps, for ui.perfetto.dev"),
    ]
    if not (table_path or times_path or hlo):
        return None
    if table_path and times_path and times_path.parent.name < table_path.stem[-len(times_path.parent.name) :]:
        problems.append("The times are of an earlier start of the run: its lines may have changed since.")
    lines = sorted(_lines(table, times or {}).values(), key=lambda line: line.order, reverse=True)
    peak, devices = _peak(run)
    colours = axis_colours(table.mesh) if table else {}
    longest = max((line.times.share for line in lines if line.times), default=0) or 1
    rows = [_shown(line, colours, peak, longest) for line in lines[:_MOST_LINES]]
    return {
        "problems": problems,
        "facts": _facts(run, table, devices) if table else [],
        "axes": _sent(table, colours) if table else [],
        "timed": bool(times),
        "peak": f"{scaled(peak, (1e12, ' T'), (1e9, ' G'), (1, ' '))}FLOP/s"
        if peak and any(row["least"] for row in rows)
        else "",
        "simulated": devices and "cpu" in str(run.fact("devices")),
        "at_most": bool(table and table.at_most),
        "overlaps": any(row.overlapped is not None for row in (table.collectives if table else ())),
        "first": rows[:_FIRST],
        "rest": rows[_FIRST:],
        "left_out": len(lines) - len(rows),
        "picture": _picture(picture_path, problems) if picture_path else None,
        "links": [(quote(str(p.relative_to(run.directory))), p.name, words) for p, words in links if p],
    }


# ---- reading ------------------------------------------------------------------------------------------------------


def _newest(directory: Path, pattern: str) -> Path | None:
    """The last file of this pattern. No link: it may lead out of the run, and its contents into the page."""
    for path in sorted(directory.glob(pattern), reverse=True):
        if stat.S_ISREG(path.lstat().st_mode):
            return path
    return None


def _read(path: Path, parse: Any, problems: list[str]) -> Any:
    try:
        return parse(parse_json(read_file(path, _MOST_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        reason = why(error) if isinstance(error, OSError) else str(error).removeprefix(f"{path} cannot be read: ")
        problems.append(f"{path.name} cannot be read: {reason[:_LONGEST]}")
        return None


def _times(data: Any) -> dict[str, tuple[str, Times]]:
    """Text and times of each line, by its name. Raises ValueError for what is no profile."""
    try:
        device_steps = number(data["devices"]) * number(data["steps"])
        found = {}
        for row in data["lines"]:
            own = Times(number(row["seconds"]) / device_steps, *(number(row[name]) for name in Times._fields[1:]))
            if not (0 <= own.seconds < 1e9 and all(0 <= share <= 1 for share in own[1:])):
                raise ValueError("a time is out of range")
            found[str(row["line"])] = str(row["text"]), own
    except (KeyError, TypeError, ZeroDivisionError):
        raise ValueError("it is no profile by line") from None
    return found


def _picture(path: Path, problems: list[str]) -> str | None:
    """The picture as an image, in which a browser runs no script and fetches nothing, whoever drew it."""
    try:
        content = read_file(path, _MOST_BYTES_OF_PICTURE)
    except (OSError, ValueError) as error:
        problems.append(f"The picture is not shown here: {why(error) if isinstance(error, OSError) else error}.")
        return None
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"


def _peak(run: Run) -> tuple[float | None, int]:
    """Most FLOP/s that one device can have, None where it is not known, and number of devices.

    Simulated devices share the processor, so one of them may have all of it while the others wait.
    """
    count, _, kind = str(run.fact("devices") or "").partition(" x ")
    devices = int(count) if count.isdecimal() and len(count) < 10 else 0
    peak = number(run.fact("peak_flops"))
    if not devices or not 0 < peak < math.inf:
        return None, devices
    return (peak if kind == "cpu" else peak / devices), devices


# ---- putting it together ------------------------------------------------------------------------------------------


def _lines(table: Table | None, times: dict[str, tuple[str, Times]]) -> dict[str, Line]:
    """All lines, by their places. What has a line that was inferred is with the rest of that line."""
    found: dict[str, Line] = {}

    def line(name: str) -> Line:
        place = name.removeprefix("~")
        own = found.setdefault(place, Line(place))
        own.inferred |= name != place
        return own

    for name, (text, spent) in times.items():
        own = line(name)
        own.text = own.text or text
        own.times = Times(*map(sum, zip(own.times, spent, strict=True))) if own.times else spent
    if table:
        for row in table.collectives:
            line(row.line).collectives.append(row)
        for row in table.matmuls:
            line(row.line).matmuls.append(row)
        for row in table.kept:
            line(row.line).kept.append(row)
        for own in found.values():
            own.text = table.source.get(own.place, own.text)
    return found


def _shown(line: Line, colours: dict[str, str], peak: float | None, longest: float) -> dict[str, Any]:
    """A row of the table."""
    collectives = [
        Part(
            f"{'≤ ' * row.sometimes}{in_bytes(row.step_bytes)}",
            f"{row.op} {row.axes or '?'}",
            _where(row) + {True: "; overlapped", False: "; not overlapped", None: ""}[row.overlapped],
            tuple(colours.get(axis, "#999999") for axis in row.axes.split()[:8]),
        )
        for row in line.collectives
    ]
    matmuls = [
        Part(
            f"{'≤ ' * row.sometimes}{in_flops(row.step_flops)}",
            *(f"matmul {row.shape} {row.dtype}", _where(row), ("currentColor",)),
        )
        for row in line.matmuls
    ]
    times = lambda row: f" × {row.count}" if row.count > 1 else ""
    kept = [Part(in_bytes(row.bytes), f"kept {row.shape}{times(row)}", row.where, (KEPT_COLOUR,)) for row in line.kept]
    parts = [part for kind in (collectives, matmuls, kept) for part in kind[:_MOST_PARTS]]
    flops, t = sum(row.step_flops for row in line.matmuls if not row.sometimes), line.times
    bar = (t.share - t.collective, t.collective - t.exposed, t.exposed) if t else ()
    return {
        "place": f"{'~' * line.inferred}{line.place}",
        "text": line.text[:_LONGEST],
        "bar": [f"{100 * max(0.0, part) / longest:.2f}" for part in bar],
        "share": f"{100 * t.share:.1f}%" if t else "",
        "time": _ms(t.seconds) if t else "",
        "exposed": _ms(t.seconds * t.exposed / t.share) if t and t.exposed and t.share else "",
        "least": _ms(flops / peak) if flops and peak else "",
        "doubtful": bool(t and peak and flops / peak > t.seconds),
        "parts": parts,
        "more": len(collectives) + len(matmuls) + len(kept) - len(parts),
    }


def _where(row: CollectiveRow | MatmulRow) -> str:
    """Loops around it, how often it is in one turn of them, and number of their turns in a step."""
    return row.where + "".join(f" × {count}" for count in (row.count, row.turns) if count > 1)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f}"


def _facts(run: Run, table: Table, devices: int) -> list[tuple[str, str, str, bool]]:
    """Totals of a step and device: label, value, note, and whether the value is doubtful."""
    flops, kept = (sum(x) for x in ([r.step_flops for r in table.matmuls], [r.bytes for r in table.kept]))
    sent = sum(row.step_bytes for row in table.collectives)
    by_one = f"{table.at_most}by one device in a step"
    found = [
        ("sent to other devices", in_bytes(sent), by_one, False),
        ("multiplied", in_flops(flops), by_one, False),
        ("kept for the backward pass", in_bytes(kept), "on one device", False),
    ]
    took, peak = run.values.get("ms/step", math.nan) / 1000, number(run.fact("peak_flops"))
    if devices and 0 < peak < math.inf and not table.at_most:
        least = flops * devices / peak
        note = f"of {_ms(took)} ms that a step took" if math.isfinite(took) else "at the peak of the devices"
        if doubtful := least > took:
            note = f"a step took {_ms(took)} ms: the peak was measured too low"
        found.append(("the matmuls take at least", f"{_ms(least)} ms", note, doubtful))
    return found


def _sent(table: Table, colours: dict[str, str]) -> list[tuple[str, str, list[str]]]:
    """Bytes that a device sends along each axis, or along several together, with their colours; the most first."""
    sent: Counter[str] = Counter()
    for row in table.collectives:
        sent[row.axes] += row.step_bytes
    squares = lambda axes: [colours.get(axis, "#999999") for axis in axes.split()[:8]]
    return [(axes or "?", in_bytes(count), squares(axes)) for axes, count in sent.most_common(20)]
