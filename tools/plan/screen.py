"""A plan on the terminal, and its tables, which the page shows too."""

import collections
import linecache
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from shardwright.compiled.lines import WITHOUT_LINE
from shardwright.compiled.table import in_bytes, in_numbers
from shardwright.plan.plan import Plan, Row
from shardwright.run.files import duration

GIB = 2**30
WHOLE = ("weights", "optimizer", "batch")
"""Kinds of memory that belong to no line: one row each."""
SHOWN, WIDTH = 10, 80
"""Rows of a table on the terminal, and its columns."""


class Table(NamedTuple):
    """Part of a plan, by source line, the largest first.

    Attributes:
        title: with the total.
        head: names of the columns; the last two are the line and what is beside it.
        adding: number of the first columns that add up.
        rows: numbers, texts and None.
        note: what the columns mean.
    """

    title: str
    head: tuple[str, ...]
    adding: int
    rows: list[tuple[Any, ...]]
    note: str

    def is_number(self, column: int) -> bool:
        """Whether a column has numbers."""
        return any(isinstance(row[column], float) for row in self.rows)

    def shown(self, value: float | str) -> str:
        """A cell as text."""
        return digits(value) if isinstance(value, float) else value

    def cut(self, most: int) -> list[tuple[Any, ...]]:
        """At most so many rows, and a row of the sums of the others."""
        if len(self.rows) <= most + 1:
            return self.rows
        left = self.rows[most:]
        sums = [sum(row[i] for row in left) for i in range(self.adding)]
        others = (*sums, *[None] * (len(self.head) - self.adding - 2), f"{len(left)} others", "")
        return [*self.rows[:most], others]


def text_of(line: str) -> str:
    """Text of a source line; empty if it is not known."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""


def digits(x: float) -> str:
    """A number with three digits."""
    return f"{x:,.{places(x)}f}"


def places(x: float) -> int:
    """Decimals with which a number has three digits."""
    return max(0, 2 - math.floor(math.log10(x))) if x > 0 else 0


def tables_of(plan: Plan, by_tensor: bool) -> list[Table]:
    """Memory, communication, and work. `by_tensor`: a row for each tensor that a line sends."""
    return [memory(plan), communication(plan, by_tensor), work(plan)]


def _grouped(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Any, list[Any]]:
    found = collections.defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def _sorted(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: row[:2], reverse=True)


def memory(plan: Plan) -> Table:
    """What is in memory at the peak, by line and kind."""
    products = [row for row in plan.rows if row.op.kind == "matmul"]
    rate = sum(row.op.flops * row.op.count for row in products) / (sum(row.seconds for row in products) or 1)
    rows = []
    groups = _grouped(plan.step.held, lambda x: (x.kind, "" if x.kind in WHOLE else x.line or WITHOUT_LINE))
    for (kind, line), arrays in groups.items():
        size, again = (sum(getattr(array, name) for array in arrays) for name in ("bytes", "again"))
        text = text_of(line) if line else f"{len(arrays)} arrays"
        ms = 1e3 * again / rate if again and rate else None
        rows.append((size / GIB, 100 * size / plan.step.peak, kind, ms, line, text))
    note = "again: what it would take in a step not to keep it, and to compute it again in the backward pass."
    title = f"Memory of a device at the peak: {digits(plan.step.peak / GIB)} GiB"
    return Table(title, ("GiB", "%", "kind", "again ms", "line", ""), 2, _sorted(rows), note)


def communication(plan: Plan, by_tensor: bool) -> Table:
    """Messages, by line."""
    sent, rows = [row for row in plan.rows if row.op.kind == "collective"], []
    of = lambda row: (row.op.line, row.op.what, row.op.axes, row.op.timing, row.op.tensor if by_tensor else "")
    for (line, what, axes, timing, _), same in _grouped(sent, of).items():
        ms, waits = (1e3 * sum(getattr(row, name) for row in same) for name in ("seconds", "exposed"))
        size = sum(row.op.bytes * row.op.count for row in same) / GIB
        link = "far" if plan.chip.reach(plan.step.mesh, axes)[1] > 1 else "near"
        tensors = list(dict.fromkeys(row.op.tensor for row in sorted(same, key=lambda row: -row.op.bytes)))
        tensor = tensors[0] + (f" +{len(tensors) - 1}" if tensors[1:] else "")
        rows.append((ms, waits, size, what, f"{' '.join(axes)} {link}", timing, line or WITHOUT_LINE, tensor))
    ms, waits = (1e3 * sum(getattr(row, name) for row in sent) for name in ("seconds", "exposed"))
    title = f"Communication: {digits(ms)} ms in a step, {digits(waits)} of them waited for"
    head = ("ms", "waits", "GiB", "what", "link", "timing", "line", "tensor")
    note = (
        "waits: milliseconds in which nothing is computed. ahead, after: hides behind what the layer or the microbatch "
        "computes. waited: something needs it at once. GiB: of the whole arrays, of all messages in a step."
    )
    return Table(title, head, 3, _sorted(rows), note)


def bound_of(plan: Plan, rows: Iterable[Row]) -> str:
    """What most of the time goes into: to compute, to move memory, or to launch kernels."""
    spent, chip = {"compute": 0.0, "memory": 0.0, "launch": 0.0}, plan.chip
    for row in rows:
        launch = row.op.count * chip.launch_s
        computes = row.op.flops / chip.peak_of(row.op.dtype) > row.op.traffic / chip.memory_bandwidth
        spent["launch"] += launch
        spent["compute" if computes else "memory"] += row.seconds - launch
    return max(spent, key=spent.__getitem__)


def work(plan: Plan) -> Table:
    """What is computed, by line and phase."""
    done, rows = [row for row in plan.rows if row.op.kind != "collective"], []
    peak = plan.chip.peak_of(plan.step.facts.dtype)
    for (line, phase), same in _grouped(done, lambda row: (row.op.line, row.op.phase)).items():
        seconds, flops = sum(row.exposed for row in same), sum(row.op.flops * row.op.count for row in same)
        of_peak = 100 * flops / seconds / peak if flops and seconds else None
        share, where = 100 * seconds / plan.seconds, line or WITHOUT_LINE
        rows.append((1e3 * seconds, share, flops / 1e12, of_peak, bound_of(plan, same), phase, where, text_of(line)))
    note = (
        "%: of the step. peak %: of the chip's FLOPs. bound: what takes most of the time: computing, moving memory, or "
        "launching kernels. again: the backward pass computes what the forward pass did not keep."
    )
    title = f"Work: {digits(1e3 * sum(row.exposed for row in done))} ms in a step"
    head = ("ms", "%", "TFLOP", "peak %", "bound", "phase", "line", "")
    return Table(title, head, 3, _sorted(rows), note)


def parts_of(plan: Plan) -> dict[str, float]:
    """Seconds of a step by what a device does in them."""
    sums = [sum(row.exposed for row in plan.rows if (row.op.kind == "collective") == sent) for sent in (False, True)]
    parts = {"computing": sums[0], "waiting for messages": sums[1], "waiting for stages": plan.bubble}
    return parts | {"starting layers": plan.seconds - sum(parts.values())}


def answer(plan: Plan) -> list[tuple[str, str, str]]:
    """Names of the figures that matter most, the figures, and words beside them."""
    unit, size = ("s", 1.0) if plan.seconds >= 1 else ("ms", 1e-3)
    step, low, high = (digits(x / size) for x in (plan.seconds, *plan.range))
    facts, limit, price = plan.step.facts, plan.chip.memory_bytes, plan.chip.price_per_hour
    fits = "fits" if plan.fits else f"{in_bytes(plan.step.peak - limit)} too much"
    most, _, kind, _, line, _ = memory(plan).rows[0]
    parts = [(100 * s / plan.seconds, name) for name, s in parts_of(plan).items() if s > plan.seconds / 200]
    (first, name), *others = parts
    run, of = (digits(plan.days), "days for") if plan.days >= 1 else (duration(86400 * plan.days), "hours for")
    found = [
        ("step", f"{step} {unit}", f"between {low} and {high}"),
        ("time", f"{first:.0f} %", ", ".join([name, *(f"{share:.0f} % {x}" for share, x in others)])),
        ("speed", in_numbers(plan.tokens_per_second), "tokens/s, of all devices"),
        ("MFU", f"{100 * plan.mfu:.1f} %", f"of {plan.chip.peak_of(facts.dtype) / 1e12:.0f} TFLOP/s in {facts.dtype}"),
        ("memory", in_bytes(plan.step.peak), f"of {in_bytes(limit)}: {fits}"),
        ("most", in_bytes(most * GIB), f"{kind}{line and f', {line}'}"),
        ("run", run, f"{of} {plan.steps:,} steps of {in_numbers(facts.tokens)} tokens"),
    ]
    return found if price is None else [*found, ("cost", f"${digits(plan.dollars)}", f"${price:g} an hour and device")]


def title_of(plan: Plan, name: str) -> str:
    """What is planned, where."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.step.mesh.items() if axis != "p" or size > 1)
    return f"{name} on {plan.step.devices} × {plan.chip.title}: {mesh}"


def as_text(plan: Plan, name: str, more: Sequence[str] = ()) -> str:
    """The plan of the configuration of this name, in lines of at most WIDTH columns. `more` are lines under it."""
    lines = [title_of(plan, name), *(f"{part:<8}{figure:<9} {words}" for part, figure, words in answer(plan))]
    for table in tables_of(plan, by_tensor=False):
        lines += ["", table.title, *(_aligned(table) if table.rows else ["none"])]
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in [*lines, *more])


def _aligned(table: Table) -> list[str]:
    """The head and the rows. Numbers of a column have as many decimals as give its largest three digits."""
    rows = table.cut(SHOWN)
    columns = []
    for i, head in enumerate(table.head):
        cells = [row[i] for row in rows]
        numbers = [x for x in cells if isinstance(x, float)]
        decimals = min(places(max(numbers, default=0.0)), 3)
        is_line = i == len(table.head) - 2
        if numbers:
            texts = ["" if x is None else f"{x:,.{decimals}f}" for x in cells]
        else:
            texts = [PurePath(x or "").name if is_line else x or "" for x in cells]
        width = max(map(len, [head, *texts]))
        columns.append([f"{text:{'>' if numbers else '<'}{width}}" for text in [head, *texts]])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
