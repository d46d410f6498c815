"""Copies the tree, runs tests in the copy, and finds out which tests execute a line."""

import collections
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.mutants.recorder import ORDER, RECORD, SECONDS

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".pytest_cache" / "mutants"
QUICK = "not slow and not long"
"""Candidates are only these tests; a long one runs if the list names it."""
TEXTUAL = ("tests/repository/", "tests/gauntlet/")
"""Tests of these folders read the source as text, so they may fail for any edit."""
PATIENCE = 8
"""A test hangs if a session takes so many times its CPU time."""
HANGS = " (hangs)"
"""Follows the id of such a test."""
TRACED = """
[run]
branch = false
parallel = true
relative_files = true
include =
    shardlib/*
    shardwright/*
    train.py
context = ${MUTANTS_TEST-}
disable_warnings = no-data-collected, module-not-measured
"""


def copy_tree(target: Path) -> None:
    """Copies the files of the checkout that git does not ignore. The copy shares the cache of compiled programs."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    CACHE.parent.mkdir(exist_ok=True)
    (target / ".pytest_cache").symlink_to(CACHE.parent)


def session(
    copy: Path, files: Sequence[str], scratch: Path, *, order: Sequence[str] = (), seconds: float = 0, traced: str = ""
) -> tuple[list[dict], float]:
    """Runs the quick tests of `files` in a copy of the tree; returns the lines of the record, and the seconds taken.

    If CPU `seconds` are given, only the tests in `order` run, until these are over. `traced` is a configuration of
    coverage.
    """
    record = scratch / "record"
    record.write_text("")
    paths = [str(copy), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, RECORD: str(record), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest"]
    if seconds:
        environment[SECONDS] = str(seconds)
        (scratch / "order").write_text("\n".join(order))
        environment[ORDER] = str(scratch / "order")
    if traced:
        environment["COVERAGE_PROCESS_START"] = traced
        paths.insert(1, str(Path(traced).parent))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    marked = "not slow" if order else QUICK
    command += ["-q", "-n", "0", "-m", marked, "-p", "bench.mutants.recorder", "-p", "no:cacheprovider", *files]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE * seconds if seconds else None)
        if process.returncode not in (0, 1, 2, 5):
            raise SystemExit(f"pytest ended with {process.returncode}:\n{output.decode()}")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return [json.loads(line) for line in record.read_text().splitlines()], time.monotonic() - began


def failures(lines: Sequence[dict]) -> list[str]:
    """Lists the tests of a record that failed, and one that began and did not end."""
    ended = {line["test"] for line in lines if "failed" in line}
    failed = [line["test"] for line in lines if line.get("failed")]
    return failed + [f"{line['test']}{HANGS}" for line in lines if line["test"] not in ended]


# ---- which tests execute a line -----------------------------------------------------------------------------------


def hashes(files: Iterable[str]) -> dict[str, str]:
    """Hashes files of the checkout that are there."""
    there = (file for file in files if (ROOT / file).exists())
    return {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in there}


def traced(copy: Path, file: str, scratch: Path) -> dict:
    """Runs a test file under coverage: its tests that pass, with their durations, and the lines that each executes."""
    try:
        from coverage import CoverageData
    except ImportError:
        raise SystemExit("Tests are chosen by coverage, which is not installed: pip install coverage") from None
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        data, rc = Path(directory) / "coverage", Path(directory) / "coveragerc"
        rc.write_text(f"{TRACED}data_file = {data}\n")
        (rc.parent / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
        lines, wall = session(copy, [file], scratch, traced=str(rc))
        of: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        for path in data.parent.glob("coverage.*"):
            found = CoverageData(str(path))
            found.read()
            for source in found.measured_files():
                for line, tests in found.contexts_by_lineno(source).items():
                    of[source][line].update(tests)
    ended = [line for line in lines if "failed" in line]
    for test in failures(lines):
        print(f"fails without a fault: {test}", flush=True)
    passed = {line["test"]: line["seconds"] for line in ended if not (line["failed"] or line["skipped"])}
    print(f"{file}: {len(passed)} tests in {wall:.0f} s", flush=True)
    start = wall - sum(line["seconds"] for line in ended)
    executed = {source: {line: sorted(tests) for line, tests in by_line.items()} for source, by_line in of.items()}
    return {"tests": passed, "start": round(start, 2), "lines": executed, "hashes": hashes([file, *executed])}


class Executed:
    """The quick tests that execute each line of the source, and how long they take.

    They are found with coverage, in a process for each test file, and kept in .pytest_cache/mutants until this file or
    the source that it executes changes. `within` are the test files and folders to consider.
    """

    def __init__(self, copy: Path, scratch: Path, within: Sequence[str] = ()):
        self.seconds: dict[str, float] = {}
        """Duration of each test that passes."""
        self.start: dict[str, float] = {}
        """Seconds that a test file takes in addition to its tests: imports and collection."""
        self._lines: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        CACHE.mkdir(parents=True, exist_ok=True)
        for file in sorted(str(path.relative_to(copy)) for path in (copy / "tests").rglob("test_*.py")):
            if not file.startswith(TEXTUAL) and file.startswith(tuple(within) or ""):
                path = CACHE / f"{file.replace('/', '.')}.json"
                known = json.loads(path.read_text()) if path.exists() else {"hashes": None}
                if known["hashes"] != hashes(known["hashes"] or []):
                    known = traced(copy, file, scratch)
                    path.write_text(json.dumps(known))
                self._add(file, known)

    def _add(self, file: str, found: dict) -> None:
        self.start[file] = found["start"]
        self.seconds |= found["tests"]
        for source, lines in found["lines"].items():
            for line, tests in lines.items():
                self._lines[source][int(line)].update(tests)

    def of(self, file: str, lines: range) -> set[str]:
        """Returns the tests that execute any of the lines of a file; for code that runs on import, of the file."""
        by_line = self._lines[file]
        found = {test for line in lines for test in by_line.get(line, ())}
        if found == {""}:
            found = {test for tests in by_line.values() for test in tests}
        return found & self.seconds.keys()

    def order(self, file: str, tests: set[str], limit: float) -> list[str]:
        """Orders tests that execute a line of `file`; then come the others of their files, which share what they made.

        Those of the same folder come first, cheap files before others, and of each file at first the three cheapest.
        """
        by_file = collections.defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds[test]):
            by_file[test.split("::")[0]].append(test)
        folder = (ROOT / file).parent.name if "/" in file else "train"

        def cost(test_file: str) -> float:
            return self.start[test_file] + sum(self.seconds[test] for test in by_file[test_file][:3])

        files, taken = [], 0.0
        for test_file in sorted(by_file, key=lambda test_file: (folder not in Path(test_file).parts, cost(test_file))):
            taken += cost(test_file)
            if files and taken > limit:
                break
            files.append(test_file)
        first = [test for test_file in files for test in by_file[test_file][:3]]
        rest = [test for test_file in files for test in by_file[test_file][3:]]
        beside = [test for test in self.seconds if test.split("::")[0] in files and test not in tests]
        return first + rest + beside


@contextlib.contextmanager
def changed(copy: Path, file: str, text: str) -> Iterator[None]:
    """Puts another text in a file of the copy, for a while."""
    path = copy / file
    before = path.read_text()
    try:
        path.write_text(text)
        yield
    finally:
        path.write_text(before)
