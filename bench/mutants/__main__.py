"""Plants single faults in the source, one at a time, and records which quick tests fail.

    python -m bench.mutants                            # plants those on the list that tests caught; 1 if one is missed
    python -m bench.mutants --all                      # plants also those that no test caught, and records the results
    python -m bench.mutants --new 40 --seed 2          # draws others by the syntax tree, adds them to the list
    python -m bench.mutants --only shardlib/exact      # only those in files that begin so

The list is tests/data/mutants.toml. Run this before you remove or shorten tests, and afterwards. Each fault is planted
in a temporary copy of the checkout, where the tests that failed for it before run first. If none of them fails now, or
if the fault is new, the candidates are all quick tests that execute the line: cheap ones first, for at most LIMIT
CPU seconds. Coverage tells which these are (`pip install coverage`). To record it takes a little longer than all quick
tests, and is repeated for each test file that changed or executes source that did.

To add a fault by hand, write file, function, kind, source and after in the list, without `tests`, and run the program.
It writes the list after each fault, so you can stop it and start it again.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.mutants.faults import Fault, draw, planted, read_list, write_list
from bench.mutants.recorder import FAILURES
from bench.mutants.trees import HANGS, ROOT, Executed, changed, copy_tree, failures, session

LIST = ROOT / "tests/data/mutants.toml"
HEAD = """\
# Single faults of the source, and quick tests that fail for each: `make mutants` plants them again.
# The program bench.mutants writes this file; `note` is by hand. tests = [] : none fails.
"""
LIMIT = 120.0
"""CPU seconds of tests for each fault."""


class Planter:
    """Plants faults in a copy of the checkout and runs tests."""

    def __init__(self, scratch: Path, limit: float, within: Sequence[str]):
        self._copy, self._scratch, self._limit, self._within = scratch / "copy", scratch, limit, within
        copy_tree(self._copy)
        self._executed: Executed | None = None

    def find(self, fault: Fault) -> list[str] | None:
        """Returns tests that fail for a fault; None if its place is no longer in the source."""
        path = self._copy / fault.file
        result = planted(path.read_text(), fault) if path.exists() else None
        if result is None:
            return None
        text, lines = result
        with changed(self._copy, fault.file, text):
            return self._run(fault.tests or []) or self._run(self._candidates(fault.file, lines))

    def _run(self, tests: Sequence[str]) -> list[str]:
        tests = [test.removesuffix(HANGS) for test in tests]
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        there = [file for file in files if (self._copy / file).exists()]
        if not there:
            return []
        lines, _ = session(self._copy, there, self._scratch, order=tests, seconds=self._limit)
        return failures(lines)

    def _candidates(self, file: str, lines: range) -> list[str]:
        if self._executed is None:
            self._executed = Executed(self._copy, self._scratch, self._within)
        return self._executed.order(file, self._executed.of(file, lines), self._limit)


def plant(faults: Sequence[Fault], planter: Planter, save: Callable[[], None]) -> tuple[list[Fault], list[Fault]]:
    """Plants faults and records the tests that fail.

    Returns those that tests caught before and now do not, and those that are no longer in the source.
    """
    lost, gone = [], []
    for i, fault in enumerate(faults, 1):
        found = planter.find(fault)
        if found is None:
            gone.append(fault)
            state = "not in the source any more: correct it in the list, or remove it"
        elif found:
            fault.tests = found[:FAILURES]
            state = f"caught by {found[0]}"
        elif fault.tests:
            lost.append(fault)
            state = f"no longer caught by {fault.tests[0]}"
        else:
            fault.tests = []
            state = "missed"
        print(f"{i}/{len(faults)}  {fault}\n    {state}", flush=True)
        save()
    return lost, gone


def main() -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(
        prog="bench.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="also the faults that no test caught")
    parser.add_argument("--new", type=int, default=0, metavar="N", help="draw about so many others, and plant these")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", metavar="PATH", help="only faults in files that begin so")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="CPU seconds of tests for each fault")
    parser.add_argument("--within", nargs="*", default=(), metavar="PATH", help="only candidates in these tests")
    options = parser.parse_args()
    faults = read_list(LIST)
    if options.new:
        new = draw(ROOT, options.new, options.seed, faults)
        faults += new
    else:
        new = [fault for fault in faults if options.all or fault.tests or fault.tests is None]
    chosen = [fault for fault in new if fault.file.startswith(options.only)]

    def save() -> None:
        write_list(LIST, faults, HEAD)

    save()
    with tempfile.TemporaryDirectory() as scratch:
        lost, gone = plant(chosen, Planter(Path(scratch), options.limit, options.within), save)
    here = [fault for fault in chosen if fault not in gone]
    caught = sum(bool(fault.tests) for fault in here) - len(lost)
    print(f"{len(here)} faults planted, {caught} caught; {len(lost)} were caught before and are not now")
    for fault in lost:
        print(f"    {fault}\n        was caught by {', '.join(fault.tests or [])}")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
