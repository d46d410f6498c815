"""The page of a run, report.html, made anew while the run trains."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import jax

from shardwright.run.files import REPORT
from shardwright.run.optional import why
from shardwright.settings.words import say

ROOT = Path(__file__).parents[2]
FIRST_S = 10.0
"""Seconds from the first step to the first page: after the steps that are profiled, which it would slow."""
INTERVAL_S = 60.0
"""Shortest time in seconds from one start of `tools.report` to the next."""
LARGEST_SHARE = 1 / 30
"""Largest share of the run's time in which `tools.report` runs."""
TIMEOUT_S = 60.0
"""Seconds after which a process that makes the page is ended."""


class Page:
    """Keeps `<directory>/report.html` up to date, by `python -m tools.report` in processes of the lowest priority.

    A process of its own does not hold the lock of the interpreter that trains. There is never more than one. A page
    that cannot be made is told once, and ends no run. With several processes of a run, process 0 makes the page.

    Args:
        directory: of the run.
        wanted: whether there is to be a page.
    """

    def __init__(self, directory: Path, wanted: bool):
        self._directory, self._wanted = directory, wanted and jax.process_index() == 0
        self._process: subprocess.Popen | None = None
        self._started = 0.0
        self._next: float | None = None  # not before this time
        self._told = False

    def refresh(self) -> None:
        """Starts to make the page if it is time. Waits for nothing."""
        if not self._wanted:
            return
        if self._next is None:
            self._next = time.monotonic() + FIRST_S
        if self._process is not None and (self._process.poll() is not None or self._is_late()):
            self._take()
        if self._process is None and time.monotonic() >= self._next:
            self._start()

    def finish(self) -> Path | None:
        """Makes the page a last time, and waits for it. Returns its path; None if there is none, after telling why."""
        if not self._wanted:
            return None
        self.close()
        self._start()
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TIMEOUT_S)
        return self._directory / REPORT if self._take() else None

    def close(self) -> None:
        """Ends the process that makes the page, if one does."""
        if self._process is not None:
            self._end()

    def _is_late(self) -> bool:
        return time.monotonic() - self._started > TIMEOUT_S

    def _start(self) -> None:
        # -P: without the modules of the current directory, which is the run's, so that Hydra need not read its name.
        command = [sys.executable, "-P", "-m", "tools.report", "run=."]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        options |= {"cwd": self._directory, "env": os.environ | {"PYTHONPATH": path}}
        options["start_new_session"] = True  # so that Ctrl-C, which stops the run in order, does not end it
        self._started = time.monotonic()
        self._next = self._started + INTERVAL_S
        try:
            self._process = subprocess.Popen(command, **options)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        except ProcessLookupError:  # it has ended already
            pass
        except OSError as error:
            self._tell(why(error))

    def _take(self) -> bool:
        """Whether the process made the page. Ends it if it has not ended."""
        seconds, code = time.monotonic() - self._started, self._process.poll()
        self._next = self._started + max(INTERVAL_S, seconds / LARGEST_SHARE)
        errors = self._end()
        if code is None:
            self._tell(f"it took longer than {TIMEOUT_S:g} s")
        elif code:
            self._tell(errors[-1] if errors else f"exit code {code}")
        return code == 0

    def _end(self) -> list[str]:
        """Ends the process and removes a page that it has not finished. Returns the lines of its errors."""
        process, self._process = self._process, None
        process.kill()
        errors = process.communicate()[1].decode(errors="replace").strip().splitlines()
        with contextlib.suppress(OSError):
            (self._directory / f"{REPORT}.{process.pid}.tmp").unlink()
        return errors

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            say(f"report     none: {reason.removeprefix('Error: ')}")
