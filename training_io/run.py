"""A run around the training step: its data, checkpoints, log, profile, and printed lines."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cluster.devices import kept_programs, known_options
from cluster.stopping import StopRequest
from cluster.watch import watched_batches
from input_loader import Prefetcher, TokenBatch, batch_shapes, make_loader, steps_for
from modeling.attention_calls import check_paths, describe_attention
from modeling.model import COMPUTE_DTYPES, inputs_of
from shardlib.placement import Placement
from shardlib.shardtypes import make_shardings
from training_io.checkpoint import Checkpointer
from training_io.config import Config
from training_io.evaluation import check_finite, evaluate
from training_io.flops import Speed, flops_of_model, peak_flops
from training_io.hlo import compile_with_hlo_dump, start_rendering
from training_io.initial_weights import read_weights
from training_io.memory import peak_memory
from training_io.metrics import RunLog, check_metrics, has_event
from training_io.profile import StepProfiler
from training_io.provenance import compare_source, keep_source, provenance_of
from training_io.report import print_end, print_start, save_config
from training_io.resuming import check_resumes
from training_io.saved import saved_config
from training_io.soundness import check_steps
from training_io.stages import describe_stages, placement_of, stack_orders

RENDERED_AFTER = 6
"""Steps of this process before the picture of the compiled step is drawn. The profiled steps are among them."""


class Run:
    """A run in its directory, resumed from its last checkpoint if it has one. A context manager, which closes it.

        with Run(c, forward, directory, programs) as run:
            state = run.begin(init, State)
            step_program = run.compile(training_step, state)
            for step, batch in run.steps():
                state, metrics = step_program(state, batch, step)
                run.log(step, metrics)
                if run.due(interval):
                    run.save(state)
            return run.end()

    `forward`: train.Forward of the model. `programs`: train.programs, for the provenance. With several processes all
    make the same calls, and process 0 writes and prints.

    Attributes:
        start: number of steps done before this start.
        total: number of steps of the whole run.
        done: number of steps done until now.
        options: compiler options that the installed XLA knows.
        stopped_by: name of the signal that asked the run to stop; None without one.

    Raises:
        ValueError: the data is too short for the run, or a checkpoint is of another configuration.
    """

    def __init__(self, c: Config, forward: Any, directory: Path, programs: Callable):
        self.c, self.forward, self.model, self.directory = c, forward, forward.model, directory
        self.programs = programs
        self.print = print if jax.process_index() == 0 else lambda *_: None
        self.stopped_by: str | None = None
        self._source_differs: str | None = None
        self._graph = self._rendering = self._loss = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        with self._cleanup:
            self._open()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._cleanup.__exit__(*exc_info)

    def _open(self) -> None:
        c, t, mesh = self.c, self.c.training, jax.sharding.get_mesh()
        self._inputs = inputs_of(self.model)
        if self._inputs and t.sample_interval is not None:
            raise ValueError(
                f"training.sample_interval is {t.sample_interval}, but the model reads {', '.join(self._inputs)} "
                "beside the tokens, which a drawn token does not have. Set training.sample_interval=null."
            )
        self.placement = placement_of(c, self.model)
        self.checkpoints = Checkpointer(self.directory / "checkpoints", keep=t.keep_checkpoints)
        self._cleanup.enter_context(self.checkpoints)
        self.provenance = provenance_of(self.programs, c, self.model)
        self.start, loader_state = self._last_checkpoint()
        self.done = self.start
        sizes = {"batch_size": t.batch_size, "seq_len": t.seq_len, "vocab_size": c.model.vocab}
        sizes["microbatches"] = t.microbatches
        loader = functools.partial(make_loader, c.data, **sizes, inputs=self._inputs)
        self.loader = loader("train", state=loader_state)
        self.validation = loader("validation") if t.eval_batches else None
        self.total = steps_for(self.loader, steps=t.steps, tokens=t.tokens, epochs=t.epochs)
        self._peak = peak_flops(mesh.devices.flatten(), COMPUTE_DTYPES[t.compute_dtype])

    def _last_checkpoint(self) -> tuple[int, dict]:
        """Step of the last checkpoint, and the state of the loader then; 0 and {} without one."""
        done = self.checkpoints.latest_step()
        if done is None:
            return 0, {}
        metadata = self.checkpoints.metadata(done)
        check_resumes(saved_config(metadata), self.c, self.directory)
        allow = None if self.c.training.other_source else "training.other_source=true"
        saved, which = metadata.get("provenance"), ("training", "evaluation")
        self._source_differs = compare_source(saved, self.provenance, which, allow)
        return done, metadata["loader"]

    # ---- before the first step ----------------------------------------------------------------------------------

    def begin(self, init: Callable[[jax.Array], Any], State: Any) -> Any:
        """The state to begin with, of the last checkpoint or of `fresh_state`.

        Prints the lines that describe the run, and opens its log.

        Args:
            init: returns a fresh state for a random key. It is jitted here.
            State: class of the state, generic in the class of the weights. Its fields are `weights`, those of the
                optimizer, and `ema`, the average of each weight, or None.
        """
        state = self._restored(init, State) if self.start else fresh_state(self.c, self.placement, init, State)
        self._introduce()
        return state

    def _restored(self, init: Callable[[jax.Array], Any], State: Any) -> Any:
        shapes = jax.eval_shape(init, jax.random.key(self.c.training.seed))
        saved = self.checkpoints.manifest(self.start)["arrays"]
        has_average, wants_average = any(x.startswith("ema/") for x in saved), bool(jax.tree.leaves(shapes.ema))
        begins_average = wants_average and not has_average
        if begins_average:
            shapes = dataclasses.replace(shapes, ema=jax.tree.map(lambda _: None, shapes.ema))
            self.print(f"average    of the weights: begins with those of step {self.start}")
        if has_average and not wants_average:
            self.print(f"average    of the weights: that of step {self.start} is left, as training.ema_decay is null")
        shardings = make_shardings(State[self.model.Weights], like=shapes)
        like = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
        orders, leave = stack_orders(self.placement, State, shapes), () if wants_average else ("ema/",)
        state = self.checkpoints.restore(self.start, like, orders=orders, leave=leave)
        return dataclasses.replace(state, ema=jax.tree.map(jnp.copy, state.weights)) if begins_average else state

    def _introduce(self) -> None:
        c, t, table, mesh = self.c, self.c.training, self.model.table, jax.sharding.get_mesh()
        self.options = known_options(c.hardware.compiler_options, self.print)
        parameters = sum(math.prod(weight.shape) for weight in jax.tree.leaves(table))
        fp8 = ", products with weights in fp8" * t.fp8
        model = f"{parameters:,} parameters, {t.compute_dtype} compute{fp8}"
        print_start(self.directory, self.start, mesh, model, c.data, self.loader, self.total)
        if self._source_differs:
            self.print(f"source     {self._source_differs}")
        for line in describe_attention(self.forward, t.seq_len):
            self.print(f"attention  {line}")
        for line in describe_stages(c, self.model):
            self.print(f"pipeline   {line}")
        speed = Speed(self.loader.tokens_per_batch, flops_of_model(table, c.model, t.seq_len), self._peak)
        log = RunLog(
            self.directory, total_steps=self.total, start_step=self.start, speed=speed, print_every=t.log_interval
        )
        self._log = self._cleanup.enter_context(log)
        if not self.is_over:
            save_config(self.directory, c)
            keep_source(self.directory, self.start, self.model, self.provenance)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.done >= self.total

    def compile(self, training_step: Any, state: Any) -> jax.stages.Compiled:
        """The compiled training step for `state` and the batches of the run. Keeps the program's graph for a picture.

        Tracing checks all types of the step, and refuses a step that communicates wrongly.
        """
        t = self.c.training
        source = self.provenance["source"]
        if jax.sharding.get_mesh().size > 1:
            check_steps(self.programs, self.c, self.model, source, kept_programs("soundness"))
            self.print("proof      training and evaluation compute on this mesh what they compute on one device")
        check_paths(self.forward, t.seq_len, kept_programs("attention"))
        shapes = batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(self._inputs))
        lowered = training_step.lower(state, shapes, np.int32(self.start))
        check_metrics(lowered.out_info[1])
        if why := self.provenance.get("untraced"):
            self.print(
                f"source     a resumed run is not compared with this one: on one device its steps do not trace: {why}"
            )
        self._program, self._graph = compile_with_hlo_dump(lowered, self.directory, self.options)
        if self._graph is None:
            self.print(
                "HLO graph: none, the step is from the compile cache; with hardware.compilation_cache=null there is one"
            )
        return self._program

    # ---- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, TokenBatch]]:
        """Index of each step that is still to be done, and its batch. Ends early on a signal. Reads batches ahead."""
        ahead = self.c.data.prefetch
        self._profiler = StepProfiler(self._log)
        self._cleanup.callback(self._profiler.close)
        batches = Prefetcher(self.loader.load, self.start, self.total, ahead, self.loader.parallel_loads)
        batches = watched_batches(self._cleanup.enter_context(batches), self.start)
        self._stop = self._cleanup.enter_context(StopRequest())
        for step in range(self.start, self.total):
            self._profiler.before_step(step - self.start)
            yield step, next(batches)
            if self._graph and self._rendering is None and (self.is_over or step - self.start == RENDERED_AFTER):
                self._rendering = start_rendering(self._graph)
            if self.stopped_by:
                return

    def log(self, step: int, metrics: Any) -> None:
        """Takes the metrics of the step just dispatched, and writes those of the step before: no device waits.

        `metrics` is a dataclass. Its fields are those that RunLog.log takes, and one is `loss`.
        """
        self.done, self._loss = step + 1, metrics.loss
        self._log.log(step, vars(metrics), self.loader.source_tokens(step))
        self.stopped_by = self._stop.after(step)
        self._profiler.after_step(step - self.start, metrics)
        if step == self.start:
            self._log.log_event(step, "memory", peak_memory(self._program, metrics))

    def due(self, interval: int | None) -> bool:
        """Whether `interval` divides the number of steps done, or all are done. None: only when all are done."""
        return self.is_over or (interval is not None and self.done % interval == 0)

    def save(self, state: Any) -> None:
        """Saves a checkpoint, written in the background. Raises FloatingPointError if the loss is not finite."""
        check = functools.partial(check_finite, self._loss, self.done, self.checkpoints.latest_step)
        metadata = {"config": dataclasses.asdict(self.c), "loader": self.loader.state(self.done)}
        metadata["provenance"] = self.provenance
        orders = stack_orders(self.placement, type(state), state)
        self.checkpoints.save(self.done, state, metadata, orders, check=check)

    def validate(self, evaluation_step: Callable, weights: Any) -> None:
        """Logs the loss on the validation split; nothing where training.eval_batches is 0."""
        if self.validation:
            batches = self.c.training.eval_batches
            of = {"weights": "ema"} if self.c.training.eval_weights == "ema" else {}
            found = lambda: evaluate(evaluation_step, weights, self.validation, batches) | of
            self._log.log_event(self.done - 1, "validation", found)

    def log_event(self, event: str, values: Any) -> None:
        """Logs an event after the steps done so far, as RunLog.log_event does."""
        self._log.log_event(self.done - 1, event, values)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def has_validation(self) -> bool:
        """Whether the log has the loss on the validation split after the steps done so far."""
        return has_event(self.directory, self.done - 1, "validation")

    def end(self) -> str | None:
        """Waits until all is written, and prints where. Returns the signal that stopped the run, if one did."""
        if self._loss is None:
            self.print(
                f"{self.start} steps are done already, of {self.total}; to continue, train for longer (training.steps)."
            )
            return None
        if self.stopped_by and not self.is_over:
            self.checkpoints.wait()
            self.print(f"{self.stopped_by}: stopped and saved after {self.done} steps of {self.total}.")
            self.print(f"To resume: the same command, with paths.model_name={self.c.paths.model_name}")
            return self.stopped_by
        self._log.close()
        self.checkpoints.wait()
        trace = self._profiler.close()
        print_end(self.directory, self.total, float(self._loss), self.loader, trace, self._rendering)
        return None


def fresh_state(c: Config, placement: Placement, init: Callable[[jax.Array], Any], State: Any) -> Any:
    """State of a run before its first step, on the current mesh, with the weights of training.init_from if given.

    Args:
        c: the configuration.
        placement: of the layers.
        init: as for `Run.begin`.
        State: as for `Run.begin`.
    """
    state = jax.jit(init)(jax.random.key(c.training.seed))
    if c.training.init_from is not None:
        orders = stack_orders(placement, State, state)
        state.weights = read_weights(c.training.init_from, state.weights, dataclasses.asdict(c), orders)
        state.ema = jax.tree.map(jnp.copy, state.weights) if jax.tree.leaves(state.ema) else state.ema
    return state
