"""What happens around the steps of a run: a list of listeners, each of which is told of every step, in this order."""

import concurrent.futures
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardwright.inspect import examine
from shardwright.run.background import in_background
from shardwright.run.changes import tokens_before
from shardwright.run.config import Config
from shardwright.run.directory import override
from shardwright.run.files import duration
from shardwright.run.forecast import PARTS, Bound, Watch
from shardwright.run.memory import peak_memory
from shardwright.run.metrics import RunLog
from shardwright.run.page import Page
from shardwright.run.printing import log
from shardwright.run.profile import StepProfiler
from shardwright.run.report import parameters_without_embeddings
from shardwright.run.skipping import SkippedSteps, described_documents
from shardwright.run.step import Step

DRAWN_AFTER = 6
"""Steps of this process before the compiled step is drawn: after the profiled steps."""


class Training(Protocol):
    """What listeners read of a run.Run, which documents it."""

    whole: Config
    config: Config
    directory: Path
    step: Step
    model: Any
    placement: Any
    loader: Any
    reference: tuple
    options: dict[str, Any]
    start: int
    done: int
    end_step: int
    total: int
    log: RunLog
    skips: dict[str, Any]
    hlo: Path | None
    program: Any
    compiled_s: float

    @property
    def checkpoints(self) -> str: ...

    @property
    def is_over(self) -> bool: ...

    def batch_of(self, step: int) -> int: ...

    def settle(self) -> None: ...


class Ending(NamedTuple):
    """How this start of a run ends.

    Attributes:
        state: finished, stopped by a signal, failed, or paused: it continues with other settings.
        why: the signal, or the error; empty for others.
    """

    state: str
    why: str = ""


class Listener:
    """Is told what happens. All processes tell theirs the same. Methods that a listener does not need do nothing."""

    def begin(self, run: Training) -> None:
        """After the state was restored, before the log is opened. May raise ValueError for a wrong setting."""

    def before(self, step: int, state: Any, batch: Any) -> None:
        """Before a step is dispatched, from this state and batch."""

    def after(self, step: int, metrics: Any) -> None:
        """After a step was dispatched. Its metrics are arrays, which no later step donates."""

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the metrics of a step as numbers, or as words if they are not finite, after they were written."""

    def wait(self) -> None:
        """Waits for what it does in the background, after the last step."""

    def end(self, how: Ending) -> None:
        """Ends, and prints its results."""

    def close(self) -> None:
        """Lets go of what it holds, however the run ended."""


class Statistics(Listener):
    """Logs activation and gradient statistics, the event `microscope`, every training.microscope_interval steps."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._collector: Any = None

    def before(self, step: int, state: Any, batch: Any) -> None:
        run = self._run
        interval = run.config.training.microscope_interval
        if interval is None or step % interval:
            return
        self._collector = self._collector or examine.RunStatistics(run.step, run.placement, run.options)

        def collect() -> Any:
            return self._collector.collect(state, batch, np.int32(step), *run.reference)

        run.log.log_event(step, "microscope", collect, before=True)


class Skips(Listener):
    """Counts skipped steps and tells spikes, with the documents of their batch."""

    def begin(self, run: Training) -> None:
        t = run.config.training
        self._run = run
        self.steps = SkippedSteps(t.max_skipped, run.skips, self._tell, t.spike_factor)

    def see(self, step: int, values: Mapping[str, Any]) -> None:
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
        text = f"{event} {'at ' * (event == 'spike')}step {step + 1}: {why}; batch {batch}, {words}; "
        more = ", and names what is not finite" * (event == "skipped")
        log(f"{text}{replay_of(run.directory, step + 1)} shows them{more}")
        run.log.add_event(step, event, {"why": why, "batch": batch, "documents": documents})


def replay_of(directory: Path, step: int) -> str:
    """Returns the command that replays a step, by its number, from 1."""
    return f"python -m tools.replay {override('run', str(directory))} step={step}"


class Profile(Listener):
    """Profiles a few steps."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._profiler: StepProfiler | None = None

    def before(self, step: int, state: Any, batch: Any) -> None:
        run = self._run
        if self._profiler is None:
            count = run.end_step - run.start
            self._profiler = StepProfiler(run.log, examine.read_trace, run.hlo, count, run.settle)
        self._profiler.before_step(step - run.start)

    def after(self, step: int, metrics: Any) -> None:
        if self._profiler:
            self._profiler.after_step(step - self._run.start, metrics)

    def wait(self) -> None:
        self.close()

    def end(self, how: Ending) -> None:
        if how.state == "finished" and self._profiler and self._profiler.by_line:
            log(self._profiler.by_line)

    def close(self) -> None:
        if self._profiler:
            self._profiler.close()


class Summary(Listener):
    """Logs the memory of the step, and prints time, loss and checkpoint at the end."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._began = time.monotonic()
        self._loss: Any = None

    def after(self, step: int, metrics: Any) -> None:
        run = self._run
        self._loss = metrics.loss
        if step == run.start:
            run.log.log_event(step, "memory", peak_memory(run.program, metrics))

    def end(self, how: Ending) -> None:
        run = self._run
        if how.state == "finished":
            seconds = time.monotonic() - self._began
            log(f"time       {duration(seconds)}, of it {run.compiled_s:.0f} s to compile the step")
            log(f"loss       {float(self._loss):.3f} nats a token at the last step")
            log(f"checkpoint {run.checkpoints}/{run.total:010}")


class Forecast(Listener):
    """Compares the loss with training.forecast, part by part."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._watch: Watch | None = None
        source = run.config.training.forecast
        if source is not None and not run.is_over:
            size, tokens = parameters_without_embeddings(run.model), tokens_before(run.whole, run.total)
            self._watch = Watch(Path(source), run.directory, size, tokens, self._tell)

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        if self._watch:
            self._watch.see(step, self._run.log.speed.tokens_after(step), values["loss"])

    def end(self, how: Ending) -> None:
        if self._watch and how.state == "finished":
            self._watch.end_part()

    def _tell(self, step: int, part: int, loss: float, bound: Bound) -> None:
        inside = bound.low <= loss <= bound.high
        of = f"forecast   mean loss {loss:.3f} of part {part + 1} of {PARTS}"
        if not inside:
            log(f"{of} is {'below' if loss < bound.low else 'ABOVE'} its forecast, {bound.low:.3f} to {bound.high:.3f}")
        event = {"part": part + 1, "loss": loss, "inside": inside, "low": bound.low, "high": bound.high}
        self._run.log.add_event(step, "forecast", event)


class Picture(Listener):
    """Draws the compiled step once, in the background, after a few steps or the last one."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._drawing: concurrent.futures.Future[str] | None = None

    def after(self, step: int, metrics: Any) -> None:
        run = self._run
        late = run.is_over or step - run.start == DRAWN_AFTER
        if run.hlo and self._drawing is None and late:
            self._drawing = in_background(examine.draw_step, run.hlo)

    def wait(self) -> None:
        if self._drawing:
            self._drawing.exception()  # waits: a signal until then still stops the run

    def end(self, how: Ending) -> None:
        if self._drawing:
            log(self._drawing.result())


class Report(Listener):
    """Keeps the page up to date, and prints its path at the end, or that of the metrics if there is no page."""

    def begin(self, run: Training) -> None:
        self._run = run
        self._page = Page(run.directory, run.config.training.report)

    def after(self, step: int, metrics: Any) -> None:
        self._page.refresh()

    def end(self, how: Ending) -> None:
        run = self._run
        if how.state == "paused":
            return
        run.log.add_event(run.done - 1, "end", {"state": how.state} | ({"why": how.why} if how.why else {}))
        if (page := self._page.finish()) or (run.directory / "metrics.jsonl").exists():
            metrics = f"metrics    {run.directory}/metrics.jsonl"
            log(f"report     {page}  (open it in a browser)" if page else metrics)

    def close(self) -> None:
        self._page.close()


STANDARD = (Statistics, Skips, Profile, Summary, Forecast, Picture, Report)
"""The listeners of a run, in their order."""


class Listeners:
    """Tells all listeners of a list, in its order. A context manager, which closes them."""

    def __init__(self, listeners: list[Listener]):
        self._listeners = listeners
        self._begun = contextlib.ExitStack()

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._begun.close()

    def begin(self, run: Training) -> None:
        """Begins them; those that have begun are closed at the end."""
        for listener in self._listeners:
            listener.begin(run)
            self._begun.callback(listener.close)

    def before(self, step: int, state: Any, batch: Any) -> None:
        """Before a step is dispatched."""
        for listener in self._listeners:
            listener.before(step, state, batch)

    def after(self, step: int, metrics: Any) -> None:
        """After a step was dispatched."""
        for listener in self._listeners:
            listener.after(step, metrics)

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """The metrics of a step were written."""
        for listener in self._listeners:
            listener.see(step, values)

    def end(self, how: Ending) -> None:
        """Ends them."""
        for listener in self._listeners:
            listener.end(how)

    def wait(self) -> None:
        """Waits for what they do in the background."""
        for listener in self._listeners:
            listener.wait()
