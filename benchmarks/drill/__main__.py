"""The drill: plants faults in runs, checkpoints, disks and ports, and checks the promises of docs/reliability.md.

    python -m benchmarks.drill [--full] [--only kills,disk] [--count 10] [--write docs/reliability.md]
    python -m benchmarks.drill --only kills --count 120 --seed 0 --case 7      plays one case again

Each kind of fault has a line in the table that is printed at the end. A broken promise is printed at once, with the
command that plays its case again. The exit status is then 1. A case is drawn from the seed and its number: the same
each time, but for the machine's timing.

--write replaces the lines in that page of the kinds that were played, and keeps those of the others.
"""

import argparse
import collections
import dataclasses
import functools
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from benchmarks.drill import corruptions, disk, fallback, kills, nonfinite, ports, settings, stranger_files
from benchmarks.drill.cases import Field, Finding, Kind

MODULES = (kills, fallback, corruptions, settings, disk, ports, stranger_files, nonfinite)
KINDS = {kind.name: kind for kind in (module.KIND for module in MODULES)}
BEGIN, END = "<!-- python -m benchmarks.drill --write: begin -->", "<!-- end -->"
HEADER = ("kind", "faults", "what was checked", "broken", "seed", "minutes")


@dataclasses.dataclass(frozen=True)
class Played:
    """Findings of a kind of fault, and the minutes that they took."""

    kind: Kind
    seed: int
    findings: list[Finding]
    minutes: float

    @property
    def broken(self) -> int:
        """Number of broken promises."""
        return sum(len(finding.wrong) for finding in self.findings)

    @property
    def line(self) -> str:
        """The line of the table."""
        faults, outcomes = sum(finding.faults for finding in self.findings), self.outcomes()
        cells = [self.kind.name, f"{faults:,}", self.kind.checked + (f" ({outcomes})" if outcomes else "")]
        return row([*cells, str(self.broken), str(self.seed), f"{self.minutes:.1f}"])

    def outcomes(self) -> str:
        """How the faults ended, counted."""
        counts = collections.Counter(outcome for finding in self.findings for outcome in finding.outcomes)
        return "; ".join(f"{name}: {count:,}" for name, count in counts.most_common())


def row(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def play(kind: Kind, field: Field, cases: Iterable[int]) -> Played:
    """Plays the cases, and prints each broken promise."""
    began, findings, cases = time.monotonic(), [], list(cases)
    for number, case in enumerate(cases):
        try:
            finding = kind.play(field, case)
        except Exception as error:  # the drill goes on: the other cases are worth knowing
            finding = Finding("a case that could not be played", (f"{type(error).__name__}: {error}",))
        findings.append(finding)
        for wrong in finding.wrong:
            print(
                f"BROKEN     {kind.name} {case}, {finding.what}: {wrong}\n           {field.repetition(case)}",
                flush=True,
            )
        if sys.stderr.isatty():
            print(f"\r{kind.name} {number + 1}/{len(cases)} ", end="", file=sys.stderr, flush=True)
    return Played(kind, field.seed, findings, (time.monotonic() - began) / 60)


def table(lines: Iterable[str]) -> str:
    """The table with these lines, and what it was measured on."""
    where = f"Python {platform.python_version()}, jax {version('jax')}, {os.cpu_count()} CPU cores"
    return "\n".join([row(HEADER), row(["---"] * len(HEADER)), *lines, "", f"The last of these on {where}."])


def with_table(page: str, lines: dict[str, str]) -> str:
    """The text of a page with these lines, by kind, in its table. Raises ValueError without the two marks."""
    before, begin, rest = page.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with {END} behind it; add both marks.")
    known = {name: line for line in old.splitlines() if (name := re.match(r"\| (\S+) ", line)) and name[1] in KINDS}
    merged = {name[1]: line for name, line in known.items()} | lines
    return f"{before}{begin}\n\n{table(merged[name] for name in KINDS if name in merged)}\n\n{end}{after}"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--full", action="store_true", help="as many faults as the promises were made for")
    parser.add_argument("--count", type=int, help="number of faults of each kind; of settings, below 400, one tool's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="plays this case alone; --only names its kind")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose table is renewed")
    parser.add_argument(
        "--scratch", type=Path, help="directory for all files, which are kept; by default a temporary one"
    )
    options = parser.parse_args(arguments)
    options.kinds = options.only.split(",") if options.only else list(KINDS)
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"--only names {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if options.count is not None and options.count < 1:
        parser.error(f"--count is {options.count}; give at least 1")
    if options.case is not None and len(options.kinds) != 1:
        parser.error("--case needs --only with one kind")
    return options


def drill(options: argparse.Namespace, scratch: Path) -> int:
    """Plays the kinds, prints the table, and returns the number of broken promises."""
    lines, broken = {}, 0
    for name in options.kinds:
        kind = KINDS[name]
        if why := kind.missing():
            print(f"{name}: left out: {why}", flush=True)
            continue
        count = options.count or (kind.full if options.full else kind.short)
        field = Field(name, options.seed, count, scratch / name)
        field.scratch.mkdir(parents=True)
        played = play(kind, field, range(kind.cases(count)) if options.case is None else [options.case])
        lines[name], broken = played.line, broken + played.broken
        print(f"{name}: {played.broken} broken, {played.minutes:.1f} minutes", flush=True)
        if options.write:
            options.write.write_text(with_table(options.write.read_text(), {name: played.line}))
    print(f"\n{table(lines.values())}", flush=True)
    return broken


def main(arguments: list[str] | None = None) -> None:
    """Plays what the command line names. The exit status is 1 if a promise is broken."""
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the runs
    remove = functools.partial(shutil.rmtree, ignore_errors=True)
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="drill_"))
    try:
        broken = drill(options, scratch)
    finally:
        if not options.scratch:
            remove(scratch)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
