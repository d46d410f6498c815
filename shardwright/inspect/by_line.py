"""A training step by source line: what was planned of a line, what was compiled, and what a profile
measured.

A run leaves plan.json, training_step_optimized_hlo_<date>.json and profile_by_line.json in its
directory. All of them are for one device and a whole step.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.data.untrusted import number, read_object
from shardwright.inspect.compiled.table import KINDS, CompiledStep, read_table
from shardwright.inspect.operation import OPCODES, WITHOUT_LINE, Operation, amount

STEP, PROFILE, PLAN = "training_step_optimized_hlo_*", "plugins/profile/*/", "plan.json"
"""Files of a run: of its compiled step, in the directories of its profiles, and its plan."""
_TIME = {"seconds": float, "share": float, "collective": float, "exposed": float}
_TIMES = {"devices": int, "steps": int, "lines": [{"line": str, "text": str} | _TIME]}
_WORK = {"line": str, "kind": str, "seconds": float, "exposed": float}
_WORK |= {"what?": str, "count?": float, "size?": float, "flops?": float, "axes?": [str]}
_PLAN = {"work?": [_WORK], "memory?": [{"line": str, "kind": str, "bytes": float}]}


@dataclasses.dataclass
class Line:
    """A source line, as `train.py:158`; with ~ if the compiler dropped it from some operations.

    Attributes:
        planned, compiled: its operations. A planned one of kind kept is an array that is saved.
        measured: seconds of a device in a step; None if there is no profile.
        waits: of these, the seconds in which the device waits and computes nothing.
        share, collective, exposed: shares of all measured time: of the line, of its collectives,
            and of the waiting.
    """

    place: str
    text: str = ""
    planned: list[Operation] = dataclasses.field(default_factory=list)
    compiled: list[Operation] = dataclasses.field(default_factory=list)
    measured: float | None = None
    waits: float = 0.0
    share: float = 0.0
    collective: float = 0.0
    exposed: float = 0.0

    @property
    def planned_seconds(self) -> float:
        """Planned time."""
        return sum(op.seconds for op in self.planned)

    @property
    def planned_waits(self) -> float:
        """Planned time in which the device waits for messages and computes nothing."""
        return sum(op.exposed for op in self.planned if op.kind == "collective")

    @property
    def rank(self) -> tuple[float, ...]:
        """What lines are sorted by, largest first: times, then what is compiled."""
        costs = (sum(op.total for op in self.compiled if op.kind == kind) for kind in KINDS)
        return self.measured or 0.0, self.planned_seconds, *costs

    def operations(self) -> list["Row"]:
        """Rows for its operations.

        A planned amount is that of all rows that follow for the same one.
        """
        groups: dict[tuple, tuple[list[Operation], list[Operation]]] = {}
        for ops, i in ((self.compiled, 1), (self.planned, 0)):
            for op in ops:
                if op.size and op.kind != "other":
                    what = OPCODES.get(op.what, op.what) if op.kind == "collective" else op.kind
                    groups.setdefault((op.kind, what, frozenset(op.axes)), ([], []))[i].append(op)
        rows = []
        for (kind, what, axes), (planned, compiled) in groups.items():
            predicted = amount(kind, sum(op.total for op in planned)) if planned else ""
            if not compiled:
                rows.append(Row(predicted, what=" ".join([what, *sorted(axes)])))
            for op in compiled:
                size = f"≤ {amount(kind, op.total)}" if op.sometimes else amount(kind, op.total)
                rows.append(Row(predicted, size, op.times, op.words, op.where))
                predicted = ""
        return rows


class Row(NamedTuple):
    """An operation of a line as text: what is planned and compiled of it, how often, what, and in
    which loop.
    """

    planned: str = ""
    compiled: str = ""
    number: str = ""
    what: str = ""
    where: str = ""


@dataclasses.dataclass
class ByLine:
    """A step by source line. `problems` says which files cannot be read."""

    lines: list[Line]
    compiled: CompiledStep | None
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
    planned = read(PLAN, _read_planned) or []
    return ByLine(lines_of(compiled, planned, times), compiled, problems)


def newest(directory: Path, pattern: str) -> Path | None:
    """Finds the newest file that matches.

    Ignores links, which could bring files from outside of the run.
    """
    return next(
        (
            p
            for p in sorted(directory.glob(pattern), reverse=True)
            if p.is_file() and not p.is_symlink()
        ),
        None,
    )


def _read_times(path: Path) -> list[dict[str, Any]]:
    """Reads text and times of each line, in seconds per step and device.

    Raises ValueError if it is not a profile.
    """
    data = read_object(path, _TIMES)
    steps = data["devices"] * data["steps"]
    if steps <= 0 or not all(0 <= row[name] < 1e9 for row in data["lines"] for name in _TIME):
        raise ValueError(f"{path}: a number of the profile is out of range.")
    return [row | {"seconds": row["seconds"] / steps} for row in data["lines"]]


def _read_planned(path: Path) -> list[Operation]:
    """Reads the operations of a plan, and as kind kept the arrays that it saves for the backward
    pass.
    """
    data = read_object(path, _PLAN)
    found = [
        Operation(
            op["kind"],
            op.get("what", ""),
            op["line"],
            count=number(op.get("count", 0.0)),
            size=number(op.get("size", op.get("flops", 0.0))),
            axes=tuple(op.get("axes", ())),
            seconds=number(op["seconds"]),
            exposed=number(op["exposed"]),
        )
        for op in data.get("work", ())
    ]
    held = (x for x in data.get("memory", ()) if x["kind"] == "saved")
    return found + [Operation("kept", "", x["line"], size=number(x["bytes"])) for x in held]


def lines_of(
    compiled: CompiledStep | None,
    planned: Iterable[Operation] = (),
    times: Iterable[Mapping[str, Any]] = (),
) -> list[Line]:
    """Merges what is known of a step by line, the lines that take longest first.

    Args:
        compiled: the compiled step.
        planned: the operations of a plan.
        times: the lines of a profile, as line_times returns them, with seconds of one device and
            step.
    """
    found: dict[str, Line] = {}

    def at(place: str, text: str = "") -> Line:
        line = found.setdefault(place.removeprefix("~"), Line(place))
        if place.startswith("~"):
            line.place = place
        line.text = line.text or text
        return line

    for op in [op for kind in KINDS for op in compiled.of(kind)] if compiled else []:
        at(op.line, compiled.text_of(op.line) if compiled else "").compiled.append(op)
    for op in planned:
        at(op.line or WITHOUT_LINE).planned.append(op)
    for own in times:
        line = at(own["line"], own["text"])
        line.measured = (line.measured or 0.0) + own["seconds"]
        line.waits += own["seconds"] * own["exposed"] / (own["share"] or 1)
        line.share += own["share"]
        line.collective += own["collective"]
        line.exposed += own["exposed"]
    return sorted(found.values(), key=lambda line: line.rank, reverse=True)
