"""Plants the faults of tests/edits/faults.toml, one at a time, and names those that no test catches
any more.

    python -m bench.faults                         # all: half an hour to an hour
    python -m bench.faults shardlib/exact train.py # only those in files that begin so

Run this before you remove or shorten tests, and afterwards. Each fault is planted in a copy of the
checkout, where the test that faults.toml names must fail, or hang. Without faults all of these
tests must pass, which is checked first.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common import parser_of
from tests.support.edits import Edit, copied, faults, run_tests

PATIENCE = 600
"""Seconds after which a test hangs."""


def missed(copy: Path, chosen: Sequence[Edit]) -> Iterator[Edit]:
    """Yields the faults for which their test passes in a copy of the checkout."""
    for i, fault in enumerate(chosen, 1):
        print(f"{i}/{len(chosen)}  {fault}", flush=True)
        try:
            is_caught = run_tests(copy, [fault.test], fault.files, PATIENCE).returncode != 0
        except subprocess.TimeoutExpired:
            is_caught = True
        print(f"    {'caught by' if is_caught else 'MISSED by'} {fault.test}", flush=True)
        if not is_caught:
            yield fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 1 if a fault is missed, or a test fails without one."""
    parser = parser_of(__doc__)
    parser.add_argument("files", nargs="*", help="only faults in files that begin so")
    begin = tuple(parser.parse_args(arguments).files)
    chosen = [fault for fault in faults() if fault.id.startswith(begin or "")]
    with tempfile.TemporaryDirectory() as scratch:
        copy = copied(Path(scratch) / "copy")
        done = run_tests(copy, sorted({fault.test for fault in chosen}))
        if done.returncode:
            print(f"Tests fail without a fault:\n{done.stdout}{done.stderr}")
            return 1
        found = [*missed(copy, chosen)]
    print(
        f"{len(chosen)} faults planted, {len(chosen) - len(found)} caught; missed:"
        + "".join(f"\n    {x}" for x in found)
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
