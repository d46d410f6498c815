"""Records each test as it begins and ends, orders the tests, and stops the session: a plugin of pytest.

The driver in __main__.py sets the environment variables.
"""

import json
import os
import sys
from pathlib import Path

import pytest

RECORD, ORDER, SECONDS, TEST = "MUTANTS_RECORD", "MUTANTS_ORDER", "MUTANTS_SECONDS", "MUTANTS_TEST"
"""Path of the record; path of the ids to run, if not all; CPU seconds that the session may take; the test that runs."""
FAILURES, AFTER_FIRST = 3, 5.0
"""A session ends after so many failed tests, or so many CPU seconds after the first."""


def cpu_seconds() -> float:
    """Returns the CPU time of this process, and of those that it started and that ended."""
    return sum(os.times()[:4])


def pytest_configure(config: pytest.Config) -> None:
    """Registers the recorder."""
    config.pluginmanager.register(Recorder())


class Recorder:
    """Appends a line of JSON to the record for each test that begins or ends, and each file that cannot be imported."""

    def __init__(self):
        self._path = Path(os.environ[RECORD])
        self._limit = float(os.environ.get(SECONDS, "inf"))
        self._failed = 0
        self._seconds = 0.0

    def _record(self, test: str, **found: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, **found}) + "\n")

    def _fail(self) -> None:
        self._failed += 1
        self._limit = min(self._limit, cpu_seconds() + AFTER_FIRST)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keeps the session, to stop it."""
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records a test file that cannot be imported as a failed test."""
        if report.failed:
            self._record(report.nodeid, failed=True, seconds=0)
            self._fail()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Runs the tests in the order given; leaves out all others."""
        if ORDER in os.environ:
            order = {test: i for i, test in enumerate(Path(os.environ[ORDER]).read_text().splitlines())}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes which test runs, also for coverage: of this process, and of those that the test starts."""
        os.environ[TEST] = nodeid
        self._record(nodeid)
        self._seconds, self._outcome = 0.0, "passed"
        coverage = sys.modules.get("coverage")
        if coverage and (current := coverage.Coverage.current()):
            current.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the phases of a test."""
        self._seconds += report.duration
        if report.outcome != "passed":
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Records how a test ended. Stops if that is enough."""
        failed = self._outcome == "failed"
        self._record(nodeid, failed=failed, seconds=round(self._seconds, 3), skipped=self._outcome == "skipped")
        if failed:
            self._fail()
        if SECONDS in os.environ and (self._failed >= FAILURES or cpu_seconds() > self._limit):
            self._session.shouldstop = "enough"
