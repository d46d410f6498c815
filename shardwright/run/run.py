"""A run around the training step: its data, checkpoints, log, profile, and printed lines."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from shardlib import products
from shardwright.cluster.devices import known_options
from shardwright.cluster.stopping import StopRequest
from shardwright.cluster.watch import now_at
from shardwright.modeling.attention_calls import calls_of, check_deterministic, describe_attention
from shardwright.modeling.model import COMPUTE_DTYPES, inputs_of
from shardwright.run import reference
from shardwright.run.beside import in_background
from shardwright.run.changes import config_at, described_change, firsts, loader_at, tokens_before, total_steps
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.compiling import compile_step
from shardwright.run.config import Config
from shardwright.run.directory import override
from shardwright.run.evaluation import evaluate
from shardwright.run.flops import Speed, attended_keys, flops_of_model, peak_flops
from shardwright.run.memory import peak_memory
from shardwright.run.metrics import RunLog, check_metrics
from shardwright.run.opening import checkpoints_of, fresh_state, read_state
from shardwright.run.optional import in_a_line
from shardwright.run.page import Page
from shardwright.run.profile import StepProfiler
from shardwright.run.provenance import compare_source, keep_source, provenance_of
from shardwright.run.report import facts_of, print_start, save_config, tell
from shardwright.run.resuming import check_processes, check_resumes, choose_checkpoint, deciding_settings, saved_config
from shardwright.run.saving import Saves
from shardwright.run.skipping import SkippedSteps, are_finite, check_finite, described_documents
from shardwright.run.stages import describe_stages, placement_of, stack_orders
from shardwright.run.step import Step, trace_step
from shardwright.run.stores import Damaged, agreed
from shardwright.run.trackers import tracked
from shardwright_data.loader import TokenBatch, batch_of, check_skips, make_loader, prefetch

DRAWN_AFTER = 6
"""Steps of this process before the compiled step is drawn. The profiled steps are among them."""
CHANGES = "changes"
"""What `end` returns where settings change, and the run goes on."""


class Run:
    """A run in its directory, resumed from its last checkpoint if it has one. A context manager, which closes it.

    It goes to the next of training.changes, from where another one resumes it. train.train shows the order of its
    methods. With several processes all make the same calls, and process 0 writes and prints.

    Args:
        c: the configuration with all changes.
        forward: makes the train.Forward of the model from a TrainingConfig.
        directory: of the run.
        trainer: name of the module of the training program.
        examine: the module shardwright.inspect.examine.

    Attributes:
        c, forward, step: as they are at these steps. They are known once it began.
        start: number of steps done before this start.
        end_step: number of steps done at the next change, or at the end.
        total: number of steps of the whole run.
        done: number of steps done until now.
        options: compiler options that the installed XLA knows.
        stopped_by: name of the signal that asked the run to stop; None without one.

    Raises:
        ValueError: the data is too short for the run, or a checkpoint is of another configuration.
    """

    def __init__(self, c: Config, forward: Callable[[Any], Any], directory: Path, trainer: str, examine: ModuleType):
        self.whole, self.c, self._forward_of, self._trainer = c, None, forward, trainer
        self.model = forward(c.training).model
        self._be_at(0)
        self.directory, self.stopped_by, self._examine = directory, None, examine
        self._record, self._damaged = {}, {}
        self._hlo = self._drawing = self._loss = self._source_differs = None
        self._page = Page(directory, c.training.report)
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        with self._cleanup:
            self._open()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._cleanup.__exit__(*exc_info)

    def _be_at(self, step: int) -> None:
        c = config_at(self.whole, step)
        if c != self.c:
            self.c, self.forward, self.step = c, self._forward_of(c.training), self._traced(c)
            self.__dict__.pop("provenance", None)

    def _traced(self, c: Config) -> Step:
        """The training step with the settings of one of the steps."""
        return self.step if c == self.c else trace_step(c, self.model, trainer=self._trainer)

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Of the steps with the settings `c`."""
        return provenance_of(self.step)

    def _open(self) -> None:
        c, t = self.c, self.c.training
        check_processes(deciding_settings(self.whole))
        self._inputs, self._record["reference"] = inputs_of(self.model), reference.reference_record(c)
        if self._inputs and t.sample_interval is not None:
            raise ValueError(
                f"training.sample_interval is {t.sample_interval}, but the model reads {', '.join(self._inputs)} "
                "beside the tokens, which a drawn token does not have. Set training.sample_interval=null."
            )
        self.placement = placement_of(c, self.model)
        self.checkpoints = Checkpointer(checkpoints_of(self.directory, c.paths), keep=t.keep_checkpoints)
        self._cleanup.enter_context(self.checkpoints)
        self._saves = Saves(self.checkpoints.wait)
        self._peak = peak_flops(jax.sharding.get_mesh().devices.flatten(), COMPUTE_DTYPES[t.compute_dtype])

    def _resume(self) -> None:
        """Chooses the checkpoint to go on from, and makes what depends on it: loaders and length of the run."""
        self.__dict__.pop("_planned", None)
        self.start, loader_state, skips = self._last_checkpoint()
        self._be_at(self.start)
        whole, self.done = self.whole, self.start
        self._skips = SkippedSteps(self.c.training.max_skipped, skips, self._tell_step, self.c.training.spike_factor)
        self.loader = loader_at(whole, self.start, self._inputs, loader_state)
        self.total = total_steps(whole, self.loader)
        later = [first for first in firsts(whole) if self.start < first < self.total]
        # Those of the last change too, so that data which is missing or differs is known now.
        loaders = [self.loader, *(loader_at(whole, first, self._inputs) for first in later[-1:])]
        self.end_step = min([self.total, *later])
        self._ahead = [self.c, *(config_at(whole, first) for first in later)]
        sizes = lambda t: {"batch_size": t.batch_size, "seq_len": t.seq_len, "microbatches": t.microbatches}
        options = {"vocab_size": self.c.model.vocab, "inputs": self._inputs}
        validation = lambda c: make_loader(c.data, "validation", **sizes(c.training), **options)
        self.validation, *_ = split = [validation(c) if c.training.eval_batches else None for c in self._ahead]
        states = [loader and loader.state(0) for loader in (*loaders, *split)]
        check_processes({"dataset": (self.total, states)})

    def _last_checkpoint(self) -> tuple[int, dict, dict]:
        """Step of the checkpoint to go on from, and the states of the loader and of SkippedSteps; 0, {}, {} without."""
        wanted, skips = self.whole.training.resume_step, self.whole.data.skip_steps
        found = choose_checkpoint(self.checkpoints, wanted, self._damaged, skips)
        if found is None:
            return 0, {}, {}
        done, metadata = found
        config = saved_config(metadata)
        check_resumes(config, self.whole, self.directory, done)
        check_skips(config["data"].get("skip_steps", []), skips, done)
        reference.check_reference(metadata.get("reference"), self._record["reference"])
        allow = None if self.whole.training.other_source else "training.other_source=true"
        saved, which = metadata.get("provenance"), ("training", "evaluation")
        self._be_at(done - 1)  # the step that made it, which the source is compared in
        self._source_differs = compare_source(saved, self.provenance, which, allow)
        if "loader" not in metadata:
            raise ValueError(f"checkpoint {done} is of no run: begin one with its weights (training.init_from).")
        return done, metadata["loader"], metadata.get("skips", {})

    # ---- before the first step ----------------------------------------------------------------------------------

    def begin(self, init: Callable[[jax.Array], Any], State: Any) -> Any:
        """The state to begin with, of the last checkpoint or of `fresh_state`.

        Prints the lines that describe the run, and opens its log.

        Args:
            init: returns a fresh state for a random key. It is jitted here.
            State: class of the state, generic in the class of the weights. Its fields are `weights`, those of the
                optimizer.
        """
        state = None
        while state is None:
            self._resume()
            check_processes({"source (train.py and what it imports)": self.provenance["programs"]})
            planned = self._planned  # before the state takes memory that a device may not have
            try:
                fresh = functools.partial(fresh_state, self.c, self.placement, record=self._record)
                state = (self._restored if self.start else fresh)(init, State)
            except Damaged as error:
                if not self.start:
                    raise
                self._damaged[self.start] = str(error)
        for step, why in self._damaged.items():
            tell(f"WARNING    the checkpoint of step {step} is not used: {why}")
        self.reference = reference.read_reference(self.c)
        agreed(lambda: self._prepare_place() if jax.process_index() == 0 else None)
        self._introduce(planned)
        return state

    @functools.cached_property
    def _planned(self) -> str | None:
        """What the run's plan says, on process 0."""
        plan = lambda c: self._examine.plan_run(self._traced(c), self.total, self.directory)
        plans = lambda: [plan(c) for c in reversed(self._ahead)][-1]  # plan.json is of the next steps
        return agreed(lambda: plans() if jax.process_index() == 0 and self.start < self.total else None)

    def _prepare_place(self) -> None:
        """Moves the checkpoints aside that are damaged or later than the start, and cleans."""
        if self.c.paths.checkpoints and not self.is_over:
            self.checkpoints.own()
        if later := [step for step in self.checkpoints.steps() if step > self.start or step in self._damaged]:
            place = self.checkpoints.set_aside(later)
            tell(f"WARNING    going on from step {self.start}; the checkpoints {later} are moved to {place}")
        if not self.is_over:
            self.checkpoints.remove_leftovers()

    def _restored(self, init: Callable[[jax.Array], Any], State: Any) -> Any:
        shapes = jax.eval_shape(init, jax.random.key(self.c.training.seed))
        return read_state(self.checkpoints, self.start, State, shapes, self.model, self.placement)

    def _introduce(self, planned: str | None) -> None:
        c, t, table = self.c, self.c.training, self.model.table
        # Before the first line: what the settings say may be refused.
        attention, described = describe_attention(self.forward, t.seq_len), describe_stages(c, self.model)
        check_deterministic(c, attention)
        self.options = known_options(c.hardware.options, tell)
        parameters = sum(math.prod(weight.shape) for weight in jax.tree.leaves(table))
        print_start(self, parameters)
        lines = [planned, self._source_differs and f"source     {self._source_differs}"]
        lines += [*(f"attention  {x}" for x in attention), *(f"pipeline   {x}" for x in described)]
        for line in filter(None, lines):
            tell(line)
        for first in firsts(self.whole)[1:]:
            tell(f"from step {first}: {described_change(self.whole, first)}")
        trackers = tracked(c.trackers, self.directory, c.paths.model_name, self.start, dataclasses.asdict(self.whole))
        self._cleanup.push(self._end_by_error)
        size = self.loader.tokens_per_batch
        before = tokens_before(self.whole, self.start) - self.start * size
        attended = attended_keys((call.rule for call in calls_of(self.forward, t.seq_len)), t.seq_len)
        flops, of_all_pairs = (flops_of_model(table, c.model, keys) for keys in (attended, t.seq_len))
        speed = Speed(size, flops, self._peak, before, of_all_pairs)
        log = RunLog(
            self.directory,
            total_steps=self.total,
            start_step=self.start,
            speed=speed,
            print_every=t.log_interval,
            see=lambda step, x: self._skips.see(step, x["loss"], x.get("grad_norm", x["loss"]), "skipped" in x),
            send=self._cleanup.enter_context(trackers),
        )
        self._log = self._cleanup.enter_context(log)
        for step, why in self._damaged.items():
            self._log.add_event(self.start - 1, "damaged_checkpoint", {"damaged_step": step, "why": why})
        if not self.is_over:
            if self.start and self.start in firsts(self.whole):
                self._log.add_event(self.start, "changed", {"settings": described_change(self.whole, self.start)})
            save_config(self.directory, self.whole)
            facts = facts_of(self, parameters, speed)
            keep_source(self.directory, self.start, self.model, {**self.provenance, **facts, **self._record})

    @property
    def is_over(self) -> bool:
        return self.done >= self.end_step

    def prove(self) -> None:
        """Refuses steps that do not compute on this mesh what they compute on one device, or that look ahead."""
        self._examine.prove(list(map(self._traced, self._ahead)), self.provenance["source"])

    def compare_forms(self) -> None:
        """Refuses a form of an op for this platform that does not compute what its plain form does. It runs both."""
        for c in {c.training.seq_len: c for c in self._ahead}.values():
            reference.check_paths_with_reference(self._forward_of(c.training), c, self.options)
        products.check_sums()

    def compile(self) -> jax.stages.Compiled:
        """The compiled training step. Keeps its HLO text, for a picture."""
        lowered = self.step.lower()
        check_metrics(lowered.out_info[1])
        self._program, self._hlo = compile_step(lowered, self.directory, self.options)
        return self._program

    # ---- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, TokenBatch]]:
        """Index of each step that is still to be done, and its batch. Ends early on a signal. Reads batches ahead."""
        load = lambda step: self.loader.load(self._batch_of(step))
        ahead = self.c.data.prefetch, self.loader.parallel_loads
        batches = self._cleanup.enter_context(prefetch(load, self.start, self.end_step, *ahead))
        self._profiler = StepProfiler(
            self._log, self._examine.read_trace, self._hlo, self.end_step - self.start, batches.settle
        )
        self._cleanup.callback(self._profiler.close)
        self._stop = self._cleanup.enter_context(StopRequest())
        for step in range(self.start, self.end_step):
            self._profiler.before_step(step - self.start)
            first = step == self.start  # it may take longer: devices and networks are set up in it
            now_at("waiting for a batch", step, paused=first)
            batch = next(batches)
            now_at("in the training step", paused=first)
            yield step, batch
            if self._hlo and self._drawing is None and (self.is_over or step - self.start == DRAWN_AFTER):
                self._drawing = in_background(self._examine.draw_step, self._hlo)
            if self.stopped_by:
                return

    def look(self, step: int, state: Any, batch: TokenBatch) -> None:
        """Logs the event `microscope` of a step, before it is dispatched, if it is due."""
        interval = self.c.training.microscope_interval
        if interval is not None and step % interval == 0:
            look = lambda: self._microscope.look(state, batch, np.int32(step), self.reference)
            self._log.log_event(step, "microscope", look, before=True)

    @functools.cached_property
    def _microscope(self) -> Any:
        return self._examine.Microscope(self.step, self.placement, self.options)

    def log(self, step: int, metrics: Any) -> None:
        """Takes the metrics of the step just dispatched, and writes those of the step before: no device waits.

        `metrics` is a dataclass. Its fields are those that RunLog.log takes, and one is `loss`.
        """
        self.done, self._loss = step + 1, metrics.loss
        self._log.log(step, vars(metrics))
        self.stopped_by = self._stop.after(step)
        self._profiler.after_step(step - self.start, metrics)
        if step == self.start:
            self._log.log_event(step, "memory", peak_memory(self._program, metrics))
        self._page.refresh()

    def _batch_of(self, step: int) -> int:
        return batch_of(step, self.c.data.skip_steps)

    def _tell_step(self, step: int, why: str, event: str) -> None:
        batch = self._batch_of(step)
        words, documents = described_documents(self.loader, batch)
        told = f"{event} {'at ' * (event == 'spike')}step {step}, counted from 0: {why}; batch {batch}, {words}; "
        tell(f"{told}{self._replay_of(step)} shows them" + ", and names what is not finite" * (event == "skipped"))
        self._log.add_event(step, event, {"why": why, "batch": batch, "documents": documents})

    def _replay_of(self, step: int) -> str:
        return f"python -m tools.replay {override('run', str(self.directory))} step={step}"

    def due(self, interval: int | None, epochs: float | None = None) -> bool:
        """Whether `interval` divides the number of steps done, or the last step passed a multiple of so many epochs.

        It is when all are done. None: only then.
        """
        if epochs is not None:
            begin, end = (self.loader.epochs_before(self._batch_of(step)) for step in (self.done - 1, self.done))
            passed = begin // Fraction(str(epochs)) < end // Fraction(str(epochs))
        return self.is_over or (interval is not None and self.done % interval == 0) or (epochs is not None and passed)

    def save(self, state: Any) -> None:
        """Saves a checkpoint: in the background, but for the last of this start, which is waited for.

        A save that fails is told, and the next one is tried. The last one is tried again.

        Raises:
            FloatingPointError: a value of the state is not finite.
            OSError: saving.MAX_FAILED saves failed, one after the other.
        """
        self._log.events.append((self.done - 1, "checkpoint"))
        finite = are_finite(state)
        loader = self.loader.state(self._batch_of(self.done - 1) + 1)
        metadata = {"config": dataclasses.asdict(self.whole), "loader": loader, "provenance": self.provenance}
        metadata |= {"reference": made} if (made := self._record["reference"]) else {}

        def check() -> None:
            agreed(self._log.sync)  # a complete checkpoint has the lines of all its steps
            metadata["skips"] = self._skips.state()
            self.checkpoints.rotates = not self._skips.in_a_row  # what made steps fail may be in the newest already
            check_finite(finite, self.done, self._replay_of(self.done - 1))

        orders = stack_orders(self.placement, type(state), state)
        save = functools.partial(self.checkpoints.save, self.done, state, metadata, orders, check=check)
        self._saves.save(save, is_last=self.is_over or self.stopped_by is not None)

    def validate(self, evaluation_step: Callable, weights: Any) -> None:
        """Logs the loss on the validation split, or why there is none; nothing if training.eval_batches is 0."""
        if self.validation:
            batches = self.c.training.eval_batches
            alone = () if jax.process_count() > 1 else (RuntimeError,)  # others are raised in all processes
            self._log.flush()  # the steps before end here
            try:
                event, found = "validation", evaluate(evaluation_step, weights, self.validation, batches)
            except (OSError, ValueError, *alone) as error:  # what was trained is to be saved
                event, found = "validation_failed", {"why": in_a_line(error)}
            self.log_event(event, found)

    def log_event(self, event: str, values: Any) -> None:
        """Logs an event after the steps done so far, as RunLog.log_event does."""
        self._log.log_event(self.done - 1, event, values)

    @staticmethod
    def to_the_end(train: Callable[[], str | None]) -> str | None:
        """Trains again, from the checkpoint that is there then, as long as it ends where settings change."""
        while (ended := train()) == CHANGES:
            tell("")
        return ended

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> str | None:
        """Waits until all is written, and prints where. Returns the signal that stopped the run, if any, or CHANGES.

        Raises OSError, with the path, if the last checkpoint or lines of the metrics cannot be written.
        """
        if self._loss is None:
            tell(
                f"{self.start} steps are done already, of {self.total}; to continue, train for longer (training.steps)."
            )
            return None
        self._log.close()
        self.checkpoints.wait()
        self._profiler.close()
        if self._drawing:
            self._drawing.exception()  # waits: a signal until then still stops the run
        self.stopped_by = self.stopped_by or self._stop.alone  # since the last step
        if self.stopped_by and self.done < self.total:
            tell(f"{self.stopped_by}: stopped and saved after {self.done} steps of {self.total}.")
            resume = override("paths.model_name", self.c.paths.model_name or self.directory.name)
            tell(f"To resume: the same command, with {resume}")
            self._finish_page("stopped", self.stopped_by)
            return self.stopped_by
        if self.done < self.total:
            if self._drawing:
                tell(self._drawing.result())
            return CHANGES
        self._skips.check_any_taken(self.done - self.start)
        if self._skips.count:
            tell(f"skipped    {self._skips.count} steps: the events `skipped` of metrics.jsonl")
        if self._profiler.by_line:
            tell(self._profiler.by_line)
        tell(f"loss       {float(self._loss):.3f} nats a token at the last step")
        tell(f"checkpoint {self.checkpoints.store.url}/{self.total:010}")
        self._finish_page("finished")
        return None

    def _finish_page(self, state: str, why: str | None = None) -> None:
        """Makes the page a last time, with what draw_step drew, and prints where it is, or where the metrics are."""
        if self._drawing:
            tell(self._drawing.result())
        self._log.add_event(self.done - 1, "end", {"state": state} | ({"why": why} if why else {}))
        if (page := self._page.finish()) or (self.directory / "metrics.jsonl").exists():
            tell(f"report     {page}  (open it in a browser)" if page else f"metrics    {self.directory}/metrics.jsonl")

    def _end_by_error(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if error is not None and self._loss is not None:
            self._finish_page("failed", in_a_line(error))
        self._page.close()
