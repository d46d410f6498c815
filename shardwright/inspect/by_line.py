"""A training step by source line: what was planned of a line, what was compiled, and what a profile measured.

A run leaves plan.json, training_step_optimized_hlo_<date>.json and profile_by_line.json in its directory. All of them
are for one device and a whole step.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.data.untrusted import number, read_object
from shardwright.inspect.compiled.lines import WITHOUT_LINE
from shardwright.inspect.compiled.table import KINDS, CompiledStep, Row, read_table
from shardwright.inspect.tables import align, fit, in_bytes, in_flops, in_seconds

STEP, PROFILE, PLAN = "training_step_optimized_hlo_*", "plugins/profile/*/", "plan.json"
"""Files of a run: of its compiled step, in the directories of its profiles, and its plan."""
OPCODES = {
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Opcode of each collective of a plan."""
_TIME = {"seconds": float, "share": float, "collective": float, "exposed": float}
_TIMES = {"devices": int, "steps": int, "lines": [{"line": str, "text": str} | _TIME]}
_WORK = {"line": str, "kind": str, "what?": str, "count?": float, "flops?": float, "bytes?": float, "axes?": [str]}
_PLAN = {
    "mesh?": {str: int},
    "work?": [_WORK | {"seconds": float, "exposed": float}],
    "memory?": [{"line": str, "kind": str, "bytes": float}],
}


class Time(NamedTuple):
    """Seconds of all operations of a line, and those in which the device waits and computes nothing."""

    seconds: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Any) -> "Time":
        return Time(self.seconds + other[0], self.waits + other[1])


@dataclasses.dataclass
class Part:
    """One operation of a line.

    Attributes:
        kind: collective, matmul, attention, or kept for arrays that the backward pass reads.
        operation: opcode of a collective; else the kind.
        axes: axes of the mesh along which a collective communicates.
        planned: bytes that a device sends or keeps, or FLOPs; None if there is no plan of it.
        compiled: the same of the compiled step, by shape and place in it.
    """

    kind: str
    operation: str
    axes: frozenset[str]
    planned: float | None = None
    compiled: list[Row] = dataclasses.field(default_factory=list)

    def amount(self, count: float) -> str:
        """Formats a number of bytes or FLOPs, whichever the operation has."""
        return (in_flops if self.kind in ("matmul", "attention") else in_bytes)(count)


@dataclasses.dataclass
class Line:
    """A source line, as `train.py:158`; with ~ if the compiler dropped it from some operations.

    Attributes:
        parts: its operations, by what tells them apart.
        planned, measured: times; None if there is no plan, or no profile.
        share, collective, exposed: shares of all measured time: of the line, of its collectives, and of the waiting.
    """

    place: str
    text: str = ""
    parts: dict[tuple, Part] = dataclasses.field(default_factory=dict)
    planned: Time | None = None
    measured: Time | None = None
    share: float = 0.0
    collective: float = 0.0
    exposed: float = 0.0

    def part(self, kind: str, operation: str, axes: Iterable[str] = ()) -> Part:
        """The part for this operation, which is made on first use."""
        key = kind, operation, frozenset(axes)
        return self.parts.setdefault(key, Part(*key))

    @property
    def ratio(self) -> float | None:
        """Measured by planned time; None if one is unknown."""
        if self.planned and self.measured and self.planned.seconds > 0 and self.measured.seconds > 0:
            return self.measured.seconds / self.planned.seconds
        return None

    @property
    def rank(self) -> tuple[float, ...]:
        """What lines are sorted by, largest first: times, then what is compiled."""
        costs = (
            sum(row.total for part in self.parts.values() for row in part.compiled if row.kind == x) for x in KINDS
        )
        return (self.measured or Time()).seconds, (self.planned or Time()).seconds, *costs


@dataclasses.dataclass
class ByLine:
    """A step by source line. `problems` says which files cannot be read."""

    lines: list[Line]
    compiled: CompiledStep | None
    plan: dict[str, Any] | None
    is_measured: bool
    problems: list[str]


def read_by_line(directory: Path) -> ByLine:
    """Reads what a run has left of its newest step. Its files are untrusted."""
    problems: list[str] = []

    def read(pattern: str, reader: Callable[[Path], Any]) -> Any:
        path = newest(directory, pattern)
        try:
            return path and reader(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            return None

    compiled = read(f"{STEP}.json", read_table)
    times = read(f"{PROFILE}profile*.json", _read_times) or []
    plan = read(PLAN, lambda path: read_object(path, _PLAN))
    return ByLine(lines_of(compiled, plan or {}, times), compiled, plan, bool(times), problems)


def newest(directory: Path, pattern: str) -> Path | None:
    """Finds the newest file that matches. Ignores links, which could bring files from outside of the run."""
    return next((p for p in sorted(directory.glob(pattern), reverse=True) if p.is_file() and not p.is_symlink()), None)


def _read_times(path: Path) -> list[dict[str, Any]]:
    """Reads text and times of each line, in seconds per step and device. Raises ValueError if it is not a profile."""
    data = read_object(path, _TIMES)
    steps = data["devices"] * data["steps"]
    if steps <= 0 or not all(0 <= row[name] < 1e9 for row in data["lines"] for name in _TIME):
        raise ValueError(f"{path}: a number of the profile is out of range.")
    return [row | {"seconds": row["seconds"] / steps} for row in data["lines"]]


def lines_of(
    compiled: CompiledStep | None, plan: Mapping[str, Any], times: Iterable[Mapping[str, Any]] = ()
) -> list[Line]:
    """Merges what is known of a step by line, the lines that take longest first.

    Args:
        compiled: the compiled step.
        plan: the data of a Plan; empty: none.
        times: the lines of a profile, as line_times returns them, with seconds of one device and step.
    """
    found: dict[str, Line] = {}

    def at(place: str, text: str = "") -> Line:
        line = found.setdefault(place.removeprefix("~"), Line(place))
        if place.startswith("~"):
            line.place = place
        line.text = line.text or text
        return line

    for row in [row for kind in KINDS for row in compiled.of(kind)] if compiled else []:
        operation, axes = (row.what, row.axes.split()) if row.kind == "collective" else (row.kind, [])
        text = compiled.text_of(row.line) if compiled else ""
        at(row.line, text).part(row.kind, operation, axes).compiled.append(row)
    for op in plan.get("work", ()):
        line = at(op["line"] or WITHOUT_LINE)
        is_sent = op["kind"] == "collective"
        waits = number(op["exposed"]) if is_sent else 0.0
        line.planned = (line.planned or Time()) + (number(op["seconds"]), waits)
        if op["kind"] in ("collective", "matmul", "attention") and "count" in op:
            what = str(op.get("what", ""))
            operation = OPCODES.get(what, what) if is_sent else str(op["kind"])
            part = line.part(op["kind"], operation, op.get("axes", ()))
            amount = sent_in_ring(op, plan.get("mesh", {})) if is_sent else number(op.get("flops"))
            part.planned = (part.planned or 0.0) + amount * number(op["count"])
    for held in plan.get("memory", ()):
        if held["kind"] == "saved":
            part = at(held["line"] or WITHOUT_LINE).part("kept", "kept")
            part.planned = (part.planned or 0.0) + number(held["bytes"])
    for own in times:
        line = at(own["line"], own["text"])
        waits = own["seconds"] * own["exposed"] / (own["share"] or 1)
        line.measured = (line.measured or Time()) + (own["seconds"], waits)
        line.share += own["share"]
        line.collective += own["collective"]
        line.exposed += own["exposed"]
    return sorted(found.values(), key=lambda line: line.rank, reverse=True)


def sent_in_ring(op: Mapping[str, Any], mesh: Mapping[str, int]) -> float:
    """Bytes that a device sends in a planned collective, if the devices of a group form a ring."""
    members = 1
    for axis in op.get("axes", ()):
        members *= max(1, mesh.get(axis, 1))
    share = 1.0 if op.get("what") == "ppermute" else (members - 1) / members
    return number(op.get("bytes")) * share * (2 if op.get("what") == "psum" else 1)


HEAD = ("planned", "compiled", "measured", "number", "what", "where")


def as_text(found: ByLine, width: int) -> str:
    """Formats the lines for a terminal of `width` columns."""
    rows: list[tuple[str, ...]] = [HEAD]
    starts: dict[int, Line] = {}
    for line in found.lines:
        if of_line := [*_times_of(line), *_parts_of(line)]:
            starts[len(rows)] = line
            rows += of_line
    shown = [i for i, column in enumerate(zip(*rows, strict=True)) if i > 3 or any(column[1:])]
    cells = align([[row[i] for i in shown] for row in rows], {shown.index(i) for i in shown if i < 4})
    blocks = []
    if step := found.compiled:
        mesh = " ".join(f"{axis}={size}" for axis, size in step.mesh.items())
        blocks.append(f"{step.name} on {step.devices} devices{mesh and f', {mesh}'}; what one device does in a step")
        blocks += [f"{title} {step.total(kind)}" for kind, title in KINDS.items()]
    blocks += ["", f"  {cells[0]}"]
    for i, cell in enumerate(cells[1:], 1):
        if i in starts:
            blocks.append(fit(f"{starts[i].place}  {starts[i].text}".rstrip(), width))
        blocks.append(fit(f"  {cell}", width))
    if any(line.place.startswith("~") for line in starts.values()):
        blocks.append("\n~ the compiler dropped the line; it is that of a neighboring operation")
    return "\n".join(blocks)


def _times_of(line: Line) -> list[tuple[str, ...]]:
    """Rows of HEAD for the times of a line."""
    of = line.planned or Time(), line.measured or Time()
    rows = [("time", [time.seconds for time in of]), ("waiting", [time.waits for time in of])]
    shown = ((what, [in_seconds(x) if x else "" for x in both]) for what, both in rows if any(both))
    return [(planned, "", measured, "", what, "") for what, (planned, measured) in shown]


def _parts_of(line: Line) -> list[tuple[str, ...]]:
    """Rows of HEAD for the operations of a line. The planned amount is that of all that follow for the same one."""
    found = []
    for part in line.parts.values():
        planned = "" if part.planned is None else part.amount(part.planned)
        for row in part.compiled:
            size = f"{'≤ ' * row.sometimes}{row.amount(row.total)}"
            found.append((planned, size, "", row.times, row.words, row.where))
            planned = ""
        if planned:
            found.append((planned, "", "", "", f"{part.operation} {' '.join(sorted(part.axes))}".strip(), ""))
    return found
