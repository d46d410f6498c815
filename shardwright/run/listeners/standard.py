"""Listeners of each run: statistics, skipped steps, summary, picture of the step, and page."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.inspect import examine
from shardwright.program.background import Task, in_background, wait_for
from shardwright.program.files import duration, end_of, read_records
from shardwright.program.printing import log
from shardwright.program.skipping import SkippedSteps, described_documents
from shardwright.run.listeners.listener import Ending, Listener, Training
from shardwright.run.listeners.validation import Validation
from shardwright.run.memory import peak_memory
from shardwright.run.page import Page
from shardwright.settings.output import override

DRAWN_AFTER = 6
"""Steps of this process before the compiled step is drawn: after the profiled steps."""


class Statistics(Listener):
    """Logs activation and gradient statistics, the event `microscope`, every
    training.microscope_interval steps.
    """

    def begin(self, run: Training) -> None:
        self._run = run
        self._collector: Any = None

    def before(self, step: int, state: Any, batch: Any) -> None:
        run = self._run
        interval = run.config.training.microscope_interval
        if interval is None or step % interval:
            return
        self._collector = self._collector or examine.RunStatistics(
            run.step, run.placement, run.options
        )

        def collect() -> Any:
            return self._collector.collect(state, batch, np.int32(step), *run.arguments)

        run.log.log_event(step, "microscope", collect, before=True)


class Skips(Listener):
    """Counts skipped steps and reports loss spikes, with the documents of their batch."""

    def begin(self, run: Training) -> None:
        t = run.config.training
        self._run = run
        self.steps = SkippedSteps(t.max_skipped, run.skips, self._tell, t.spike_factor)

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        if "loss" in values:  # else the batch has no targets
            loss = values["loss"]
            self.steps.see(step, loss, values.get("grad_norm", loss), "skipped" in values)

    def end(self, how: Ending) -> None:
        if how.state == "finished":
            self.steps.check_any_taken(self._run.done - self._run.start)
            if self.steps.count:
                log(f"skipped    {self.steps.count} steps: the events `skipped` of metrics.jsonl")

    def _tell(self, step: int, why: str, event: str) -> None:
        run = self._run
        batch = run.batch_of(step)
        words, documents = described_documents(run.loader, batch)
        text = (
            f"{event} {'at ' * (event == 'spike')}step {step + 1}: {why}; batch {batch}, {words}; "
        )
        more = ", and names what is not finite" * (event == "skipped")
        log(f"{text}{replay_of(run.directory, step + 1)} shows them{more}")
        run.log.add_event(step, event, {"why": why, "batch": batch, "documents": documents})


def replay_of(directory: Path, step: int) -> str:
    """Returns the command that replays a step. Step numbers begin at 1."""
    return f"python -m tools.replay {override('run', str(directory))} step={step}"


class Summary(Listener):
    """Logs the memory of the step, and prints time, loss and checkpoint at the end."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._began = time.monotonic()
        self._loss: Any = None

    def after(self, step: int, state: Any, metrics: Any) -> None:
        run = self._run
        if step == run.start:
            run.log.log_event(step, "memory", peak_memory(run.program, metrics))
        self._metrics = metrics

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        self._loss = values.get("loss")

    def end(self, how: Ending) -> None:
        run = self._run
        if how.state == "finished" and run.done > run.start:
            seconds = time.monotonic() - self._began
            log(f"time       {duration(seconds)}, of it {run.compiled_s:.0f} s to compile the step")
            if self._loss is not None:
                log(f"loss       {float(self._loss):.3f} nats a token at the last step")
            validation = run.listeners.of(Validation)
            if validation and validation.last is not None:
                log(f"validation {validation.last.loss:.3f} nats a token")
            if memory := peak_memory(run.program, self._metrics):
                of = (
                    "of the fullest device"
                    if memory["source"] == "device"
                    else "of a device, by the compiler"
                )
                log(
                    f"memory     {float(memory['peak_memory_bytes']) / 2**20:,.1f} MiB, the peak "
                    f"{of}"
                )
            log(f"checkpoint {run.checkpoints.store.url}/{run.total:010}")


class Picture(Listener):
    """Draws the compiled step once, in the background, after a few steps or the last one."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._drawing: Task[str] | None = None

    def after(self, step: int, state: Any, metrics: Any) -> None:
        run = self._run
        late = run.is_over or step - run.start == DRAWN_AFTER
        if run.hlo and self._drawing is None and late:
            self._drawing = in_background(examine.draw_step, run.hlo)

    def wait(self) -> bool:
        drawing = [self._drawing] if self._drawing else []
        wait_for(drawing, "the picture of the compiled step", self._run.signal)
        return True

    def end(self, how: Ending) -> None:
        if self._drawing:
            log(self._drawing.result())


class Report(Listener):
    """Keeps report.html up to date, and at the end prints its path, or that of metrics.jsonl if
    there is no page.
    """

    def begin(self, run: Training) -> None:
        self._run = run
        self._page = Page(run.directory, run.config.training.report)

    def after(self, step: int, state: Any, metrics: Any) -> None:
        self._page.refresh()

    def end(self, how: Ending) -> None:
        run = self._run
        if how.state == "paused" or (run.done == run.start and self._is_finished()):
            return
        run.log.add_event(
            run.done - 1, "end", {"state": how.state} | ({"why": how.why} if how.why else {})
        )
        if (page := self._page.finish()) or (run.directory / "metrics.jsonl").exists():
            metrics = f"metrics    {run.directory}/metrics.jsonl"
            log(f"report     {page}  (open it in a browser)" if page else metrics)

    def close(self) -> None:
        self._page.close()

    def _is_finished(self) -> bool:
        """Returns True if an earlier start logged the end of the run, and on processes other
        than 0.
        """
        if jax.process_index() != 0:
            return True
        found = end_of(read_records(self._run.directory / "metrics.jsonl"))
        return found is not None and found.get("state") != "stopped"
