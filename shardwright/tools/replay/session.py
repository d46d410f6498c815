"""Reopens a run at one of its steps: state from a checkpoint, batches, and the compiled step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.cluster.devices import known_options
from shardwright.data.loader import TokenBatch, batch_of, check_skips
from shardwright.data.untrusted import number, read_object, shown
from shardwright.inspect.soundness import check_steps
from shardwright.inspect.statistics.collect import StepWithoutStages
from shardwright.modeling.model import inputs_of, load_model
from shardwright.program.changes import config_at, firsts, loader_at
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.config import Config as RunConfig
from shardwright.program.differences import flat
from shardwright.program.files import read_config, read_records
from shardwright.program.mesh_choice import StagesChoice, mesh_for
from shardwright.program.provenance import compare_source, provenance_of
from shardwright.program.resume import fresh_state, read_state, trusted_options
from shardwright.program.saved_config import config_of, saved_config
from shardwright.program.spec import load_spec
from shardwright.program.stages import placement_of
from shardwright.program.step import trace_step

Write = Callable[[str], None]


class Done(NamedTuple):
    """Result of a step."""

    loss: np.float32
    grad_norm: np.float32
    skipped: bool


class Session:
    """A run between two steps, on the current mesh.

    Attributes:
        step: index of the next step.
        state: the state before it.
        c, loader, traced: the configuration, the data and the program of that step.
    """

    def __init__(
        self,
        c: RunConfig,
        metadata: dict[str, Any],
        step: int,
        options: dict[str, Any],
        logs: Mapping[int, Mapping[str, Any]],
    ):
        self.step = step
        self._logs = logs
        self.model = load_model(c.model)
        self.options = options
        self._whole = c
        self.placement = placement_of(c, self.model)
        self.state: Any = None
        self._settle(metadata.get("loader"))

    def _settle(self, state: Any = None) -> None:
        self.config = config_at(self._whole, self.step)
        self._program = None
        self.traced = trace_step(self.config, self.model)
        self.model = self.traced.model
        self.loader = loader_at(self._whole, self.step, inputs_of(self.model), state)

    def without_stages(self) -> StepWithoutStages:
        """Returns the step, traced without pipeline stages."""
        return StepWithoutStages(self.traced, self.placement)

    @property
    def arguments(self) -> tuple:
        """Arguments of the step after its number.

        Raises ValueError if its time is unknown, with training.minutes.
        """
        if self.config.training.minutes is None:
            return self.traced.arguments()
        step = self.step + 1
        elapsed = logged(self._logs.get(step, {}), "elapsed")
        if elapsed is None:
            raise ValueError(
                f"metrics.jsonl has no `elapsed` of step {step}, which its learning rate follows."
            )
        return self.traced.arguments(elapsed)

    @property
    def number(self) -> int:
        """Index of the batch of the step."""
        return batch_of(self.step, self.config.data.skip_steps)

    def batch(self) -> TokenBatch:
        return self.loader.load(self.number)

    def try_step(self, batch: TokenBatch) -> tuple[Any, Done]:
        """Returns the state after the step with this batch, and the result.

        The session doesn't advance.
        """
        state = jax.tree.map(jnp.copy, self.state)  # the step donates its memory
        if self._program is None:
            if self.traced.mesh.size > 1:  # the mesh may be one that the run was not checked on
                check_steps(self.traced)
            self._program = self.traced.lowered.compile(compiler_options=self.options)
        state, metrics = self._program(state, batch, np.int32(self.step), *self.arguments)
        loss, norm, skipped = jax.device_get((metrics.loss, metrics.grad_norm, metrics.skipped))
        return state, Done(np.float32(loss), np.float32(norm), bool(skipped))

    def advance(self) -> Done:
        self.state, done = self.try_step(self.batch())
        self.step += 1
        if self.step in firsts(self._whole):
            self._settle()
        return done


def checkpoints_of(run: str) -> Checkpointer:
    """Opens the checkpoints of a run, none if it ended before its first. Close it after use."""
    return Checkpointer(f"{run.rstrip('/')}/checkpoints")


def before(run: str, checkpoints: Checkpointer, step: int) -> tuple[int, dict[str, Any]]:
    """Returns the step of the last checkpoint at or before `step` (0: the beginning), and its
    metadata.
    """
    steps = checkpoints.steps()
    if done := max((done for done in steps if done <= step), default=0):
        return done, checkpoints.metadata(done)
    first = (
        checkpoints.metadata(min(steps))
        if steps
        else {"config": read_config(Path(run) / "config.yaml")}
    )
    place = (
        None
        if steps or Path(run, "checkpoints").exists()
        else flat(first["config"]).get("paths.checkpoints")
    )
    if place:
        raise ValueError(
            f"the run's checkpoints are below {place!r}: copy them to {run}/checkpoints, or make "
            f"that directory, empty, to replay from the first step."
        )
    kept = Path(run) / f"source/{0:010}/provenance.json"  # of its first start
    return 0, first | ({"provenance": read_object(kept, {"source": dict})} if kept.exists() else {})


@contextlib.contextmanager
def opened(
    run: str, step: int, mesh: StagesChoice, trust: bool, other_source: bool, write: Write
) -> Iterator[Session]:
    """Opens a session at the last checkpoint at or before `step`, or at the beginning of the run.

    Sets the mesh.

    Raises:
        ValueError: there is no such run or checkpoint, the source differs, data is missing, or
            something is untrusted.
        Damaged: the checkpoint is damaged.
    """
    with checkpoints_of(run) as checkpoints:
        done, metadata = before(run, checkpoints, step)
        config = saved_config(metadata)
        last = Path(run) / "config.yaml"
        if last.exists():  # it has changes and skipped batches that a later start added
            later = read_config(last)
            config["training"]["changes"] = later.get("training", {}).get("changes", [])
            skips = (
                config["data"].get("skip_steps", []),
                later.get("data", {}).get("skip_steps", []),
            )
            with contextlib.suppress(ValueError, TypeError):  # from a start that went back further
                check_skips(*skips, done)
                config["data"]["skip_steps"] = skips[1]
            config = saved_config({"config": config})  # config.yaml is untrusted too
        c = config_of(config, trust)
        source = None if done else c.training.init_from  # read only before the first step
        if source is not None and not trust:
            raise ValueError(
                f"training.init_from of the run is {source!r}: give trust=true to read its "
                "weights, if you trust it."
            )
        on = mesh_for(mesh, c)
        with jax.set_mesh(on):
            options = known_options(trusted_options(c, trust, write), write)
            session = Session(c, metadata if done else {}, done, options, metrics_of(run))
            now = provenance_of(trace_step(config_at(c, done - 1), session.model), ("training",))
            allow = None if other_source else "other_source=true"
            if differs := compare_source(metadata.get("provenance"), now, ("training",), allow):
                write(shown(f"source      {differs}"))
            if done:
                shapes = session.traced.state
                session.state = read_state(
                    checkpoints, done, load_spec().State, shapes, session.model, session.placement
                )
            else:
                session.state = fresh_state(session.traced)
            yield session


def metrics_of(run: str) -> dict[int, dict[str, Any]]:
    """Reads the metrics of each step, numbered from 1, from a run's metrics.jsonl; empty if there
    is none.
    """
    path = Path(run) / "metrics.jsonl"
    records = read_records(path) if path.exists() else ()
    return {
        record["step"]: record for record in records if record is not None and "event" not in record
    }


def logged(record: Mapping[str, Any], name: str) -> np.float32 | None:
    """Returns a metric of a step as the run logged it; None if it didn't."""
    return np.float32(number(record[name])) if name in record else None
