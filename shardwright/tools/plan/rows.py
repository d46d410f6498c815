"""A table of runs of others, with their plans as further columns."""

import csv
import io
import sys
from collections.abc import Iterator

from shardwright.data.untrusted import one_line
from shardwright.tools.plan.calibration import scores
from shardwright.tools.plan.runs import ADDED, Table, memory, plan, step_of


def lines(table: Table) -> Iterator[str]:
    """The table as CSV, with the columns ADDED. Of a row without a plan they are empty, and stderr says why.

    At the end stderr has how near the plans are to what was measured.
    """
    yield _csv([*table.header, *ADDED])
    pairs = []
    for row, run in zip(table.rows, table.runs, strict=True):
        try:
            if isinstance(run, str):
                raise ValueError(run)
            step = step_of(run)
            seconds = plan(run, step).seconds
            pairs += [(run, step)] if run.step_s else []
            kept = memory(run, step)
            rate = run.tokens / seconds / run.devices
            new = [f"{seconds:.5g}", f"{rate:.5g}", f"{run.mfu(seconds):.4g}", f"{kept:.4g}" if kept else ""]
        except ValueError as error:
            print(error if isinstance(run, str) else f"{run.name}: {one_line(str(error), 300)}", file=sys.stderr)
            new = [""] * len(ADDED)
        yield _csv([*row, *new])
    for line in scores(pairs, {}) if pairs else ():
        print(line, file=sys.stderr)


def _csv(row: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(row)
    return text.getvalue()
