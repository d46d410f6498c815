"""A plan on the terminal."""

import collections
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any

from shardwright.axes import mesh_text
from shardwright.inspect.operation import WITHOUT_LINE, Operation
from shardwright.inspect.plan.plan import Plan
from shardwright.inspect.tables import Table, digits, fit, in_bytes, in_numbers, in_seconds, text_of
from shardwright.program.files import duration

GIB = 2**30
WHOLE = ("weights", "optimizer", "batch")
"""Kinds of memory that belong to no line: one row each."""
SHOWN = 10
"""Rows of a table on the terminal."""


def _rows(
    items: Iterable[Any], key: Callable[..., Any], row: Callable[..., Any]
) -> list[tuple[Any, ...]]:
    """A row for each group of the items with the same key, the largest first."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return sorted(
        (row(same, *of) for of, same in groups.items()), key=lambda row: row[:2], reverse=True
    )


def memory(plan: Plan) -> Table:
    """What is in memory at the peak, by line and kind."""
    products = [op for op in plan.rows if op.kind == "matmul"]
    peak = plan.step.peak
    ms_of_flop = (
        1e3
        * sum(op.seconds for op in products)
        / (sum(op.flops * op.count for op in products) or 1)
    )

    def row(arrays: list, kind: str, line: str) -> tuple[Any, ...]:
        size, again = (sum(getattr(array, name) for array in arrays) for name in ("bytes", "again"))
        text = text_of(line) if line else f"{len(arrays)} arrays"
        return size / GIB, 100 * size / peak, kind, again * ms_of_flop or None, line, text

    rows = _rows(
        plan.step.held, lambda x: (x.kind, "" if x.kind in WHOLE else x.line or WITHOUT_LINE), row
    )
    title = f"Memory of a device at the peak: {in_bytes(peak)}"
    return Table(title, ("GiB", "%", "kind", "again ms", "line", ""), 2, rows)


def communication(plan: Plan) -> Table:
    """Messages, by line."""

    def row(
        same: list[Operation], line: str, what: str, axes: tuple[str, ...], timing: str
    ) -> tuple[Any, ...]:
        ms, waits = (1e3 * sum(getattr(op, name) for op in same) for name in ("seconds", "exposed"))
        size = sum(op.bytes * op.count for op in same) / GIB
        link = "far" if plan.chip.reach(plan.step.mesh, axes)[1] > 1 else "near"
        tensors = list(dict.fromkeys(op.tensor for op in sorted(same, key=lambda op: -op.bytes)))
        tensor = tensors[0] + (f" +{len(tensors) - 1}" if tensors[1:] else "")
        return (
            ms,
            waits,
            size,
            what,
            f"{' '.join(axes)} {link}",
            timing,
            line or WITHOUT_LINE,
            tensor,
        )

    sent = [op for op in plan.rows if op.kind == "collective"]
    rows = _rows(sent, lambda op: (op.line, op.what, op.axes, op.timing), row)
    sent_s, waited_s = (in_seconds(sum(row[i] for row in rows) / 1e3) for i in (0, 1))
    title = f"Communication: {sent_s} in a step, {waited_s} of it waited for"
    head = ("ms", "waits ms", "GiB", "what", "link", "timing", "line", "tensor")
    return Table(title, head, 3, rows)


def work(plan: Plan) -> Table:
    """What is computed, by line and phase."""
    chip = plan.chip
    done = [op for op in plan.rows if op.kind != "collective"]

    def row(same: list[Operation], line: str, phase: str) -> tuple[Any, ...]:
        seconds = sum(op.exposed for op in same)
        flops = sum(op.flops * op.count for op in same)
        spent = {
            "compute": 0.0,
            "memory": 0.0,
            "launch": chip.launch_s * sum(op.count for op in same),
        }
        for op in same:
            computes = op.flops / chip.peak_of(op.dtype) > op.traffic / chip.memory_bandwidth
            spent["compute" if computes else "memory"] += op.seconds - op.count * chip.launch_s
        at_peak = sum(op.flops * op.count / chip.peak_of(op.dtype) for op in same)
        of_peak = 100 * at_peak / seconds if at_peak and seconds else None
        figures = 1e3 * seconds, 100 * seconds / plan.seconds, flops / 1e12, of_peak
        return (
            *figures,
            max(spent, key=spent.__getitem__),
            phase,
            line or WITHOUT_LINE,
            text_of(line),
        )

    rows = _rows(done, lambda op: (op.line, op.phase), row)
    head = ("ms", "%", "TFLOP", "peak %", "bound", "phase", "line", "")
    total, again = (
        in_seconds(sum(row[0] for row in x) / 1e3)
        for x in (rows, [r for r in rows if r[5] == "again"])
    )
    return Table(f"Work: {total} in a step, {again} of it computed again", head, 3, rows)


def answer(plan: Plan) -> list[tuple[str, str, str]]:
    """Names of the figures that matter most, the figures, and words beside them."""
    facts, limit, price = plan.step.facts, plan.chip.memory_bytes, plan.chip.price_per_hour
    fits = "fits" if plan.fits else f"{in_bytes(plan.step.peak - limit)} too much"
    most, _, kind, _, line, _ = memory(plan).rows[0]
    shares = [
        (f"{100 * share:.0f} %", name) for name, share in plan.limits.items() if share > 0.005
    ]
    run, of = (
        (digits(plan.days), "days for") if plan.days >= 1 else (duration(86400 * plan.days), "for")
    )
    low, high, least = map(in_seconds, (*plan.range, plan.at_peaks))
    peak = in_numbers(plan.chip.peak_of(facts.dtype))
    more = (
        ", and what moving to the host takes" if plan.offloads else f"; {least} at the chip's peaks"
    )
    found = [
        ("step", in_seconds(plan.seconds), f"between {low} and {high}{more}"),
        ("time", shares[0][0], ", ".join([shares[0][1], *map(" ".join, shares[1:3])])),
        ("speed", in_numbers(plan.tokens_per_second), "tokens/s, of all devices"),
        ("MFU", f"{100 * plan.mfu:.1f} %", f"of {peak[:-1]} {peak[-1]}FLOP/s in {facts.dtype}"),
        ("memory", in_bytes(plan.step.peak), f"of {in_bytes(limit)}: {fits}"),
        ("most", in_bytes(most * GIB), f"{kind}{line and f', {line}'}"),
        ("run", run, f"{of} {plan.steps:,} steps of {in_numbers(facts.tokens)} tokens"),
    ]
    if not plan.steps:  # the length is given in epochs, of data that no plan reads
        return found[:-1]
    return (
        found
        if price is None
        else [*found, ("cost", f"${plan.dollars:,.0f}", f"${price:g} an hour and device")]
    )


def title_of(plan: Plan, name: str) -> str:
    """What is planned, where."""
    mesh = mesh_text(plan.step.mesh)
    return f"{name} on {plan.step.devices} × {plan.chip.title}: {mesh}"


def as_text(plan: Plan, name: str, more: Sequence[str] = ()) -> str:
    """The plan of the configuration of this name, in lines of at most 80 columns.

    `more` are lines under it.
    """
    lines = [
        title_of(plan, name),
        *(f"{part:<8}{figure:<9} {words}" for part, figure, words in answer(plan)),
    ]
    for table in (memory(plan), communication(plan), work(plan)):
        rows = [(*row[:-2], PurePath(row[-2]).name, row[-1]) for row in table.rows]
        lines += ["", *table._replace(rows=rows).as_lines(SHOWN)]
    return "\n".join(map(fit, [*lines, *more]))
