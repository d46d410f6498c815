"""Exports checkpoints to Hugging Face format every training.export_interval steps, in separate
processes.
"""

import concurrent.futures
import datetime
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from shardwright.program.background import FAILURES, Task, in_background, run_beside, wait_for
from shardwright.program.printing import log
from shardwright.run.metrics import RunLog
from shardwright.settings.output import quoted

EXPORT_S = 4 * 3600.0
"""Seconds after which an unfinished export is stopped."""


class Exports:
    """Exports checkpoints one after another, to `<directory>/exports/<step>`, on process 0 only.

    An export is complete or missing. A failure is printed and logged, and training continues.

    Args:
        directory: the run's directory.
        run_log: gets the events `export` and `export_failed`.
    """

    def __init__(self, directory: Path, run_log: RunLog):
        self._directory, self._log = directory, run_log
        self._exports: dict[int, Task[None]] = {}
        self._is_stopped = False

    def set_aside(self, start: int) -> None:
        """Moves the exports of steps after `start` to `exports/set_aside`, because these steps are
        run again.
        """
        folder = self._directory / "exports"
        later = [
            path
            for path in sorted(folder.glob("[0-9]*"))
            if path.name.isdigit() and int(path.name) > start
        ]
        if not later:
            return
        place = folder / f"set_aside/{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S.%fZ}"
        place.mkdir(parents=True)
        for path in later:
            path.rename(place / path.name)
        log(
            f"WARNING    the exports of the steps {[int(path.name) for path in later]} are moved "
            f"to {place}"
        )

    def add(self, step: int, checkpoint: str, saving: concurrent.futures.Future | None) -> None:
        """Exports the checkpoint at a path or URL once earlier exports and `saving` are done.

        Does not wait.

        `saving` is the save of the checkpoint; None if it is complete.
        """
        if jax.process_index() != 0:
            return
        before = [*([saving] if saving else []), *self._exports.values()]
        self._exports[step] = in_background(self._make, step, checkpoint, before)

    def _make(self, step: int, checkpoint: str, before: list[concurrent.futures.Future]) -> None:
        concurrent.futures.wait(before)
        if self._is_stopped:
            return
        output = self._directory / f"exports/{step:010}"
        shutil.rmtree(output, ignore_errors=True)  # of an earlier start, which this one repeats
        given = f"run={quoted(checkpoint)}", f"output={quoted(str(output))}", "trust=true"
        try:
            run_beside(
                "shardwright.tools.checkpoint_to_huggingface",
                *given,
                own_modules=True,
                timeout=EXPORT_S,
            )
        except FAILURES as error:
            if self._is_stopped:
                return
            reason = str(error).removeprefix("Error: ")
            log(f"WARNING    no export of step {step}: {reason} Training continues.")
            self._log.add_event(step - 1, "export_failed", {"why": reason})
        else:
            log(f"exported   {output}")
            self._log.add_event(step - 1, "export", {"path": str(output)})

    def __bool__(self) -> bool:
        """Returns True if an export was added in this process."""
        return bool(self._exports)

    def left(self) -> list[int]:
        """Lists the steps whose exports are in progress or have not begun."""
        return [step for step, export in self._exports.items() if not export.done()]

    def wait(self, signal: Callable[[], str | None]) -> bool:
        """Waits until all exports are made. Returns False if a signal stopped them.

        All processes call this, and `signal` in it, which returns the name of the signal, or None
        without one. Resuming the run makes the exports that are missing.
        """

        def stop() -> None:
            if not self._is_stopped:
                log(f"{signal()}: no exports of the steps {self.left()} yet. Resuming makes them.")
            self.stop()

        wait_for(self._exports.values(), f"the exports of the steps {self.left()}", signal, stop)
        return not self._is_stopped

    def stop(self) -> None:
        """Ends the export in progress, and begins no more.

        Resuming the run makes the missing exports.
        """
        self._is_stopped = True
        for task in self._exports.values():
            task.kill_program()
