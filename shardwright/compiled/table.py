"""The compiled step as rows: its collectives, its matmuls, and what it keeps for the backward pass."""

import collections
import dataclasses
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.compiled.hlo import parse
from shardwright.compiled.lines import Place
from shardwright.compiled.step import Line, Section, Step, describe, times_of
from shardwright_data.foreign import open_no_pipe

_LARGEST = 2**20
"""Characters of a file of source."""


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Equal collectives of a line.

    Attributes:
        line: such as "train.py:158". With a "~" before it, the compiler dropped the line, and it is a neighbour's.
        where: loops around it, outermost first, and "again" for what the backward pass repeats of the forward pass.
        op, axes, dtype, overlapped: as those of Collective.
        bytes: number of bytes that a device sends for one of them.
        count: number of them in one turn of the loops.
        turns: number of turns of the loops in a step.
        step_bytes: number of bytes that a device sends in a step, for all of them.
        sometimes: whether it is on condition, so that a device may do fewer than are counted.
    """

    line: str
    where: str
    op: str
    axes: str
    dtype: str
    overlapped: bool | None
    bytes: int
    count: int
    turns: int
    step_bytes: int
    sometimes: bool


@dataclasses.dataclass(frozen=True)
class MatmulRow:
    """Equal matmuls of a line.

    Attributes:
        line, where, count, turns, sometimes: as those of CollectiveRow.
        shape, dtype: as those of Matmul.
        flops: floating-point operations of one of them, on one device.
        step_flops: of all of them, in a step.
    """

    line: str
    where: str
    shape: str
    dtype: str
    flops: int
    count: int
    turns: int
    step_flops: int
    sometimes: bool


@dataclasses.dataclass(frozen=True)
class KeptRow:
    """Equal arrays that the forward pass of a line makes or saves, and that the backward pass reads.

    Attributes:
        line, where: as those of CollectiveRow.
        shape: of one of them.
        count: number of them.
        bytes: number of bytes of all of them on one device.
    """

    line: str
    where: str
    shape: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Table:
    """A compiled step as rows, each kind with the most expensive first.

    Attributes:
        name: of the program.
        devices: number of devices.
        mesh: number of devices along each axis.
        collectives, matmuls, kept: the rows.
        source: text of each line, by its name without "~". A line whose text is not known is missing.
    """

    name: str
    devices: int
    mesh: dict[str, int]
    collectives: list[CollectiveRow]
    matmuls: list[MatmulRow]
    kept: list[KeptRow]
    source: dict[str, str]

    @property
    def at_most(self) -> str:
        """What to say before sums of bytes or FLOPs: "at most " if some is on condition."""
        return "at most " if any(row.sometimes for row in (*self.collectives, *self.matmuls)) else ""

    def as_data(self) -> dict[str, Any]:
        """The table as JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: Any) -> "Table":
        """The table of what as_data gave, or a stranger. Raises ValueError for data that is no table."""
        mesh, source = ({str(k): v for k, v in _checked(dict, data, name).items()} for name in ("mesh", "source"))
        sizes = {axis: _checked(int, mesh, axis) for axis in mesh}
        texts = {line: _checked(str, source, line) for line in source}
        kinds = {"collectives": CollectiveRow, "matmuls": MatmulRow, "kept": KeptRow}
        found = {name: [_row(kind, row) for row in _checked(list, data, name)] for name, kind in kinds.items()}
        return cls(_checked(str, data, "name"), _checked(int, data, "devices"), sizes, **found, source=texts)


def _checked(kind: Any, data: Any, name: str) -> Any:
    """The value of this name, if it is of this kind; of numbers, those that a program can have."""
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value < 2**63):
        raise ValueError(f"its {name} is not what a run writes")
    return value


def _row(kind: type, data: Any) -> Any:
    return kind(**{name: _checked(hint, data, name) for name, hint in typing.get_type_hints(kind).items()})


def table_of(text: str, mesh: Mapping[str, int] | None = None, source: Mapping[str, str] | None = None) -> Table:
    """The table of an optimized HLO text.

    Args:
        text: as `jax.stages.Compiled.as_text` gives it, or as a run writes it.
        mesh: number of devices along each axis, slowest first. None: what a run wrote before the text.
        source: text of lines, such as {"train.py:158": "…"}.

    Raises:
        ValueError: this is no HLO text.
    """
    program = parse(text)
    if mesh is not None:
        program = dataclasses.replace(program, mesh=dict(mesh))
    return rows(describe(program), source or {})


def rows(step: Step, source: Mapping[str, str]) -> Table:
    """The step as rows."""
    communicated, products, kept = [], [], []
    for line, around in step.body.lines():
        where, turns = where_of(line, around), times_of(around)
        sometimes = any(section.kind == "branch" for section in around)
        for found, count in collections.Counter(line.collectives).items():
            communicated.append(
                CollectiveRow(
                    *(name_of(line.place), where, found.op, found.axes, found.dtype, found.overlapped),
                    *(found.bytes, count, turns, found.bytes * count * turns, sometimes),
                )
            )
        for product, count in collections.Counter(line.matmuls).items():
            counts = product.flops, count, turns, product.flops * count * turns, sometimes
            products.append(MatmulRow(name_of(line.place), where, product.shape, product.dtype, *counts))
        for (shape, size), count in collections.Counter((array.shape, array.bytes) for array in line.kept).items():
            kept.append(KeptRow(name_of(line.place), where, shape, count, size * count))
    return Table(
        step.name,
        step.devices,
        step.mesh,
        sorted(communicated, key=lambda row: -row.step_bytes),
        sorted(products, key=lambda row: -row.step_flops),
        sorted(kept, key=lambda row: -row.bytes),
        dict(source),
    )


def where_of(line: Line, around: tuple[Section, ...]) -> str:
    """Where a line runs, in words."""
    titles = [section.title for section in around if section.kind != "branch"]
    inside = " > ".join(titles) or "outside of loops"
    return f"{inside}, again" if line.phase == "again" else inside


def name_of(place: Place | None) -> str:
    """A place as a row has it."""
    return "without a line" if place is None else str(place)


def read_source(step: Step, newest: float) -> dict[str, str]:
    """Text of the lines of a step, of the files of its checkout that were not changed after the time `newest`."""
    found, files = {}, {}
    for place in {line.place for line, _ in step.body.lines() if line.place}:
        if place.file not in files:
            lines = _lines_of(Path(step.root, place.file), newest)
            files[place.file] = lines
        if place.line <= len(files[place.file]):
            found[f"{place.file}:{place.line}"] = files[place.file][place.line - 1].strip()
    return found


def _lines_of(path: Path, newest: float) -> list[str]:
    """The lines of a file of Python. None of another file, which a stranger's HLO text may name."""
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_no_pipe) as file:
            about = os.fstat(file.fileno())
            is_source = path.suffix == ".py" and about.st_mtime <= newest and about.st_size <= _LARGEST
            return file.read(_LARGEST).splitlines() if is_source else []
    except (OSError, ValueError):
        return []


def in_bytes(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def in_flops(count: float) -> str:
    """A number of floating-point operations with a unit."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 1000 or unit == "T":
            return f"{count:.0f} FLOP" if unit == "" else f"{count:.1f} {unit}FLOP"
        count /= 1000
    raise AssertionError


def as_text(table: Table, width: int = 120) -> str:
    """The table for a terminal of `width` columns."""
    mesh = " ".join(f"{axis}={size}" for axis, size in table.mesh.items())
    sent, flops = sum(row.step_bytes for row in table.collectives), sum(row.step_flops for row in table.matmuls)
    kept = sum(row.bytes for row in table.kept)
    last = lambda row: (row.where, row.line, table.source.get(row.line.removeprefix("~"), ""))
    times = lambda row: f"{row.count} × {row.turns}" if row.turns > 1 else str(row.count)
    overlap = {None: "", True: "yes", False: "no"}
    collectives = [
        (*(in_bytes(row.step_bytes), times(row), row.op, row.axes or "?"), overlap[row.overlapped], *last(row))
        for row in table.collectives
    ]
    matmuls = [
        (in_flops(row.step_flops).removesuffix("FLOP"), times(row), row.shape, row.dtype, *last(row))
        for row in table.matmuls
    ]
    arrays = [(in_bytes(row.bytes), str(row.count), row.shape, *last(row)) for row in table.kept]
    blocks = [
        f"{table.name} on {table.devices} devices{f', {mesh}' if mesh else ''}; what one device does in a step",
        f"\nCollectives: a device sends {table.at_most}{in_bytes(sent)}, if the devices of a group form a ring",
        *_columns(("sent", "number", "op", "axes", "overlapped", "where", "line", ""), collectives, width),
        f"\nMatmuls: {table.at_most}{in_flops(flops)}",
        *_columns(("FLOPs", "number", "m×k×n", "of", "where", "line", ""), matmuls, width),
        f"\nKept for the backward pass: {in_bytes(kept)}",
        *_columns(("bytes", "number", "shape", "where", "line", ""), arrays, width),
    ]
    if any(row.line.startswith("~") for row in (*table.collectives, *table.matmuls, *table.kept)):
        blocks.append("\n~ the compiler dropped the line; it is that of an operation beside it")
    return "\n".join(blocks)


def _columns(head: Sequence[str], cells: Iterable[Sequence[str]], width: int) -> list[str]:
    """Aligned lines, the first two columns to the right. A column without entries is left out."""
    lines = [head, *cells]
    shown = [i for i in range(len(head)) if any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in shown}
    align = lambda line, i: line[i].rjust(widths[i]) if i < 2 else line[i].ljust(widths[i])
    return [("  ".join(align(line, i) for i in shown)).rstrip()[:width] for line in lines] if lines[1:] else ["none"]
