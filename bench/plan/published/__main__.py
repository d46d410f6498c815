"""Prints a table of measured runs of other trainers with their plans as further columns, or fits
constants to it.

    python -m bench.plan.published tests/data/plan/published.csv
    python -m bench.plan.published tests/data/plan/published.csv --calibrate --together --most 100
    python -m bench.plan.published tests/data/plan/published.csv --write

A row becomes a configuration of ours (runs.py), planned as its trainer computes (trainers.yaml).
docs/plan.md (How accurate it is) has the results. --calibrate fits constants, beginning at those of
the chip, and holds other rows out. --write fits those of all chips, and writes them, figures.json
and the table of docs/plan.md (record.py), in about five minutes.
"""

import csv
import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.common import parser_of
from bench.plan.published.calibration import calibrated, scores
from bench.plan.published.record import TABLE, record
from bench.plan.published.runs import ADDED, Table, memory, plan, read, step_of
from shardwright.data.untrusted import one_line


def lines(table: Table) -> Iterator[str]:
    """The table as CSV, with the columns ADDED.

    Of a row without a plan they are empty, and stderr says why.

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
            new = [
                f"{seconds:.5g}",
                f"{rate:.5g}",
                f"{run.mfu(seconds):.4g}",
                f"{kept:.4g}" if kept else "",
            ]
        except ValueError as error:
            print(
                error if isinstance(run, str) else f"{run.name}: {one_line(str(error), 300)}",
                file=sys.stderr,
            )
            new = [""] * len(ADDED)
        yield _csv([*row, *new])
    for line in scores(pairs, {}) if pairs else ():
        print(line, file=sys.stderr)


def _csv(row: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(row)
    return text.getvalue()


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("table", help="CSV file of measured runs")
    parser.add_argument(
        "--calibrate", action="store_true", help="fit constants for each trainer and kind of chip"
    )
    parser.add_argument(
        "--together", action="store_true", help="fit all at once, and hold out each trainer in turn"
    )
    parser.add_argument(
        "--most", type=int, default=20, help="rows of a kind of chip to fit; of all if together"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="fit all, and write constants, figures.json and docs/plan.md",
    )
    args = parser.parse_args(arguments)
    try:
        if args.write:
            if Path(args.table).resolve() != TABLE:
                raise ValueError(
                    f"--write is for {TABLE.name}, the table to which the constants of all chips "
                    "are fitted."
                )
            for line in record():
                print(line, flush=True)
            return
        table = read(args.table)
        for line in calibrated(table, args.most, args.together) if args.calibrate else lines(table):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
