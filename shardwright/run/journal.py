"""Writes everything a run reports: printed lines, metrics.jsonl, profile, picture of the step, report page."""

import concurrent.futures
import contextlib
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from shardwright.inspect import examine
from shardwright.modeling.model import COMPUTE_DTYPES
from shardwright.run.background import FAILURES, in_background, run_at_low_priority
from shardwright.run.best_effort import in_a_line
from shardwright.run.changes import tokens_before
from shardwright.run.compiling import compile_step, seconds_shown
from shardwright.run.directory import override, quoted
from shardwright.run.files import duration
from shardwright.run.flops import peak_flops, speed_of
from shardwright.run.forecast import PARTS, Bound, Watch
from shardwright.run.memory import peak_memory
from shardwright.run.metrics import RunLog, check_metrics
from shardwright.run.page import Page
from shardwright.run.printing import log
from shardwright.run.profile import StepProfiler
from shardwright.run.report import facts_of, parameters_without_embeddings
from shardwright.run.schedule import Schedule
from shardwright.run.skipping import SkippedSteps, described_documents
from shardwright.run.stores import in_all_processes
from shardwright.run.trackers import tracked

EXPORT_S = 4 * 3600.0
"""Seconds until an export is stopped."""
DRAWN_AFTER = 6
"""Steps of this process before the compiled step is drawn: after the profiled steps."""


class Journal(contextlib.ExitStack):
    """Keeps the log, profile, picture and page of a run. A context manager, which closes them.

    Args:
        run: the Schedule of the run.
        directory: of the run.

    Attributes, since `begin`:
        log: the RunLog.
        skips: the SkippedSteps.
    """

    def __init__(self, run: Schedule, directory: Path):
        super().__init__()
        self._run, self._directory = run, directory
        t = run.config.training
        if run.step.inputs and t.sample_interval is not None:
            raise ValueError(
                f"training.sample_interval is {t.sample_interval}, but the model also reads "
                f"{', '.join(run.step.inputs)}, which generated tokens lack. Set training.sample_interval=null."
            )
        self._page = Page(directory, t.report)
        self._hlo = None
        self._drawing: concurrent.futures.Future[str] | None = None
        self._exports: dict[int, concurrent.futures.Future[None]] = {}
        self._exporter: subprocess.Popen[bytes] | None = None
        self._stops_exports = False
        self._loss: jax.Array | Any = None
        self._peak = peak_flops([*jax.sharding.get_mesh().devices.flat], COMPUTE_DTYPES[t.compute_dtype])

    def begin(self, skips: dict[str, Any], damaged: dict[int, str]) -> dict[str, Any]:
        """Opens the log. Returns the facts that provenance.json keeps for the page.

        `skips` is the state of SkippedSteps; `damaged` maps the step of each unusable checkpoint to the reason.
        """
        run = self._run
        c = self._run.whole
        t = run.config.training
        self.skips = SkippedSteps(t.max_skipped, skips, self._tell_step, t.spike_factor)
        trackers = tracked(c.trackers, self._directory, c.paths.model_name or "", run.start, dataclasses.asdict(c))
        self.push(self._end_by_error)
        speed = speed_of(run.step, run.loader.tokens_per_batch, self._peak, run.tokens_before())
        self._watch = None
        if t.forecast is not None and not run.is_over:
            size = parameters_without_embeddings(run.model)
            self._watch = Watch(Path(t.forecast), self._directory, size, tokens_before(c, run.total), self._tell_part)
        lengths = {"total_steps": run.total, "start_step": run.start, "print_every": t.log_interval}
        send = self.enter_context(trackers)
        self.log = self.enter_context(RunLog(self._directory, **lengths, speed=speed, see=self._see, send=send))
        self._began = time.monotonic()
        if not run.is_over:
            self.log.add_event(run.start - 1, "start", {})
        for step, why in damaged.items():
            self.log.add_event(run.start - 1, "damaged_checkpoint", {"damaged_step": step, "why": why})
        if not run.is_over and (changed := run.changes().get(run.start)):
            self.log.add_event(run.start, "changed", {"settings": changed})
        return facts_of(run, speed)

    def compile(self, options: dict[str, Any]) -> jax.stages.Compiled:
        """Compiles the training step with compiler `options` and keeps its HLO text for the picture and profile."""
        begin = time.monotonic()
        with seconds_shown("compiling  the training step"):
            lowered = self._run.step.lower()
            check_metrics(lowered.out_info[1])
            self._program, self._hlo = compile_step(lowered, self._directory, options)
        self._compiled = time.monotonic() - begin
        log(f"compiled   the training step in {self._compiled:.1f} s")
        examine.check_as_written(self._run.step, self._hlo, self._run.provenance["source"])
        self.log.add_event(self._run.start - 1, "compiled", {"seconds": round(self._compiled, 3)})
        return self._program

    def profile(self, settle: Callable[[], Any]) -> contextlib.AbstractContextManager[StepProfiler]:
        """Makes the profiler of these steps. `settle` waits until no other thread uses the devices."""
        count = self._run.end_step - self._run.start
        self._profiler = StepProfiler(self.log, examine.read_trace, self._hlo, count, settle)
        return contextlib.closing(self._profiler)

    def dispatched(self, step: int, metrics: Any) -> None:
        """Queues the metrics of the step just dispatched and writes those of the step before."""
        self._loss = metrics.loss
        self.log.log(step, vars(metrics))

    def see(self, step: int, metrics: object) -> None:
        """Advances the profile and the page after a step was dispatched."""
        self._profiler.after_step(step - self._run.start, metrics)
        if step == self._run.start:
            self.log.log_event(step, "memory", peak_memory(self._program, metrics))
        self._page.refresh()

    def draw(self, step: int) -> None:
        """Draws the compiled step once, in the background, after a few steps or the last one."""
        late = self._run.is_over or step - self._run.start == DRAWN_AFTER
        if self._hlo and self._drawing is None and late:
            self._drawing = in_background(examine.draw_step, self._hlo)

    def export(self, step: int, checkpoint: str, saving: concurrent.futures.Future | None) -> None:
        """Exports a checkpoint, a path or URL, to `<directory>/exports/<step>`, once it and earlier exports are done.

        Does not wait. An export is complete or missing; a failure is printed and logged, and training continues.
        """
        output = self._directory / f"exports/{step:010}"
        before = [*([saving] if saving else []), *self._exports.values()]
        given = f"run={quoted(checkpoint)}", f"output={quoted(str(output))}", "trust=true"

        def make_export() -> None:
            concurrent.futures.wait(before)
            if self._stops_exports:
                return
            shutil.rmtree(output, ignore_errors=True)  # of an earlier start, which this one repeats
            module = "shardwright.tools.checkpoint_to_huggingface"
            try:
                started = self._export_started
                options = {"own_modules": True, "timeout": EXPORT_S, "started": started}
                run_at_low_priority(module, *given, **options)
            except FAILURES as error:
                if self._stops_exports:
                    return
                reason = str(error).removeprefix("Error: ")
                log(f"WARNING    no export of step {step}: {reason} Training continues.")
                self.log.add_event(step - 1, "export_failed", {"why": reason})
            else:
                log(f"exported   {output}")
                self.log.add_event(step - 1, "export", {"path": str(output)})

        if jax.process_index() == 0:
            self._exports[step] = in_background(make_export)

    def _export_started(self, process: subprocess.Popen[bytes]) -> None:
        self._exporter = process
        if self._stops_exports:
            process.terminate()

    @property
    def has_exported(self) -> bool:
        """True if this process began an export, which only process 0 does."""
        return bool(self._exports)

    def exporting(self) -> list[int]:
        """Lists the steps whose checkpoints are exported now or later."""
        return [step for step, export in self._exports.items() if not export.done()]

    def wait_for_exports(self, stopped_by: Callable[[], str | None]) -> bool:
        """Waits until all exports are made. Returns False if a signal stopped them.

        `stopped_by` names the signal, if there was one; it is called repeatedly. Resuming makes the
        exports that are missing.
        """
        if waits := self.exporting():
            log(f"exporting  the steps {waits}; a signal stops that, and resuming makes them")
        while self.exporting() and not self._stops_exports:
            if stopped_by():
                missing = f"no exports of the steps {self.exporting()} yet"
                log(f"{stopped_by()}: {missing}. Resuming makes them.")
                self._stops_exports = True
                if self._exporter:
                    self._exporter.terminate()
            concurrent.futures.wait(self._exports.values(), timeout=0.2)
        for export in self._exports.values():
            export.result()
        return not self._stops_exports

    def settle(self) -> tuple[dict[str, Any], bool]:
        """Syncs the log before a checkpoint completes. Returns the state of SkippedSteps and whether to rotate.

        After a skipped step older checkpoints are kept, because the cause may be in the newest already.
        """
        in_all_processes(self.log.sync)
        return self.skips.state(), not self.skips.in_a_row

    def replay_of(self, step: int) -> str:
        """Returns the command that replays a step, by its number, from 1."""
        return f"python -m tools.replay {override('run', str(self._directory))} step={step}"

    def _tell_step(self, step: int, why: str, event: str) -> None:
        batch = self._run.batch_of(step)
        words, documents = described_documents(self._run.loader, batch)
        text = f"{event} {'at ' * (event == 'spike')}step {step + 1}: {why}; batch {batch}, {words}; "
        log(f"{text}{self.replay_of(step + 1)} shows them" + ", and names what is not finite" * (event == "skipped"))
        self.log.add_event(step, event, {"why": why, "batch": batch, "documents": documents})

    def _see(self, step: int, x: Mapping[str, Any]) -> None:
        self.skips.see(step, x["loss"], x.get("grad_norm", x["loss"]), "skipped" in x)
        if self._watch:
            self._watch.see(step, self.log.speed.tokens_after(step), x["loss"])

    def _tell_part(self, step: int, part: int, loss: float, bound: Bound) -> None:
        inside = bound.low <= loss <= bound.high
        of = f"forecast   mean loss {loss:.3f} of part {part + 1} of {PARTS}"
        if not inside:
            log(f"{of} is {'below' if loss < bound.low else 'ABOVE'} its forecast, {bound.low:.3f} to {bound.high:.3f}")
        event = {"part": part + 1, "loss": loss, "inside": inside, "low": bound.low, "high": bound.high}
        self.log.add_event(step, "forecast", event)

    # ---- the end ----------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True if no step was done."""
        return self._loss is None

    def wait(self) -> None:
        """Waits for the profile and the picture."""
        self._profiler.close()
        if self._drawing:
            self._drawing.exception()  # waits: a signal until then still stops the run

    def stop(self, signal: str) -> str:
        """Prints that a signal stopped the run, and how to resume it. Returns the signal."""
        at = self._run
        name = self._run.config.paths.model_name or self._directory.name
        log(f"{signal}: stopped and saved after {at.done} steps of {at.total}.")
        log(f"To resume: the same command, with {override('paths.model_name', name)}")
        self._finish_page("stopped", signal)
        return signal

    def pause(self) -> None:
        """Prints the path of the picture before the run continues with other settings."""
        if self._drawing:
            log(self._drawing.result())

    def finish(self, checkpoints: str) -> None:
        """Prints the results of a finished run. `checkpoints` is their path or URL."""
        at = self._run
        self.skips.check_any_taken(at.done - at.start)
        if self.skips.count:
            log(f"skipped    {self.skips.count} steps: the events `skipped` of metrics.jsonl")
        if self._profiler.by_line:
            log(self._profiler.by_line)
        log(f"time       {duration(time.monotonic() - self._began)}, of it {self._compiled:.0f} s to compile the step")
        log(f"loss       {float(self._loss):.3f} nats a token at the last step")
        log(f"checkpoint {checkpoints}/{at.total:010}")
        if self._watch:
            self._watch.end_part()
        self._finish_page("finished")

    def _finish_page(self, state: str, why: str | None = None) -> None:
        """Makes the page a last time and prints its path, or that of the metrics if there is no page."""
        self.pause()
        self.log.add_event(self._run.done - 1, "end", {"state": state} | ({"why": why} if why else {}))
        if (page := self._page.finish()) or (self._directory / "metrics.jsonl").exists():
            metrics = f"metrics    {self._directory}/metrics.jsonl"
            log(f"report     {page}  (open it in a browser)" if page else metrics)

    def _end_by_error(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None and self._loss is not None:
            self._finish_page("failed", in_a_line(error))
        self._page.close()
