"""A run that a tool opens: a mesh for the devices at hand, and the weights of a checkpoint on it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from omegaconf import MISSING

from shardlib.shardtypes import make_shardings
from shardwright.cluster.devices import make_mesh, simulate_devices
from shardwright.modeling.model import LanguageModel
from shardwright.modeling.weights import shapes_of
from shardwright.run import config as run_config
from shardwright.run.checkpoint import Checkpointer, find_checkpoint
from shardwright.run.checkpoint_arrays import Orders
from shardwright.run.provenance import compare_source, provenance_of
from shardwright.run.resuming import config_of, saved_config
from shardwright_data.checks import within
from shardwright_data.foreign import shown


@dataclass
class MeshChoice:
    """Devices along each axis; None: not chosen."""

    r: int | None = within(-1, 2**20, None)
    d: int | None = within(-1, 2**20, None)
    t: int | None = within(-1, 2**20, None)


@dataclass
class StagesChoice(MeshChoice):
    """Devices along each axis, the pipeline's too; None: not chosen."""

    p: int | None = within(1, 2**20, None)


def mesh_for(choice: MeshChoice, c: run_config.Config) -> jax.sharding.Mesh:
    """Makes the mesh that is chosen, with 1 for other axes but d, or that of `c`.

    A StagesChoice is one for steps, which the batch has to fit too. Otherwise there are no stages, and all devices are
    along d where the mesh of `c` does not fit them. Raises ValueError if the devices or the model do not fit.
    """
    simulate_devices(c.hardware)
    chosen = {axis: size for axis, size in dataclasses.asdict(choice).items() if size is not None}
    of_steps = isinstance(choice, StagesChoice)
    sizes = {"p": 1, "r": 1, "d": -1, "t": 1} | chosen if chosen else dataclasses.asdict(c.mesh)
    try:
        mesh = make_mesh(sizes["r"], sizes["d"], sizes["t"], jax.devices(), sizes["p"] if of_steps else 1)
    except ValueError:
        if chosen or of_steps:
            raise
        mesh = make_mesh(1, -1, 1, jax.devices())
    run_config.check_divides(c, mesh.shape, of_batch=of_steps)
    return mesh


@dataclass
class CheckpointChoice:
    """Settings of a program that reads the weights of a checkpoint."""

    run: str = MISSING
    """Directory or URL of a run, or of one of its checkpoints."""
    step: int | None = within(0, 2**31, None)
    """Step of the checkpoint; null: the last one."""
    weights: str | None = None
    """weights: the trained ones; ema: their moving average (training.ema_decay). Null: those that the run validates
    (training.eval_weights)."""
    other_source: bool = False
    """Allows source that computes something else than the source that made the checkpoint."""
    trust: bool = False
    """Imports the modules that the run names beside those shipped here, and fetches the data and the tokenizer that it
    names on servers. For a run that is not yours, read them first."""

    def which(self, c: run_config.Config) -> str:
        """`weights` or `ema`, for a run with configuration `c`. Raises ValueError if the run does not have it."""
        which = self.weights or c.training.eval_weights
        run_config.check_weights("weights", which, c.training.ema_decay)
        return which


@dataclass
class SavedRun:
    """A checkpoint of a run, and the configuration with which it was saved."""

    checkpoints: Checkpointer
    step: int
    metadata: dict[str, Any]
    c: run_config.Config

    def read_weights(
        self,
        model: LanguageModel,
        which: str,
        programs: Callable[..., Any],
        other_source: bool,
        write_line: Callable[[str], None],
    ) -> tuple[Any, Any]:
        """Reads `weights` or `ema`, sharded as in training on the current mesh.

        Says by `write_line` how the source differs from that of the checkpoint, which it may if `other_source`.

        Returns:
            The weights, and the hashes of the source.

        Raises:
            ValueError: the source computes something else than that of the checkpoint.
        """
        now = provenance_of(programs, self.c, model)
        allow = None if other_source else "other_source=true"
        if differs := compare_source(self.metadata.get("provenance"), now, ("evaluation",), allow):
            write_line(shown(f"source      {differs}"))
        shapes = shapes_of(model.table)
        like = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, make_shardings(model.Weights, like=shapes))
        return self.checkpoints.restore(self.step, {which: like})[which], now["source"]


def read_state(checkpoints: Checkpointer, step: int, State: Any, shapes: Any, model: Any, orders: Orders) -> Any:
    """The state of a checkpoint on the current mesh.

    Args:
        checkpoints: of the run.
        step: that of the checkpoint.
        State: class of the state, generic in the class of the weights.
        shapes: of its arrays. Without those of `ema`, the average is left where the checkpoint has it.
        model: the model.
        orders: of the stacks of layers.
    """
    shardings = make_shardings(State[model.Weights], like=shapes)
    like = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
    return checkpoints.restore(step, like, orders)


def trusted_options(c: run_config.Config, trust: bool, write_line: Callable[[str], None]) -> dict[str, Any]:
    """The run's options of XLA. Without trust none that is a text, which could be the place of files or of code."""
    options = c.hardware.compiler_options
    left = [name for name, value in options.items() if isinstance(value, str) and not trust]
    for name in left:
        write_line(f"compiler    {shown(name)} of the run is left out: trust=true takes it")
    return {name: value for name, value in options.items() if name not in left}


@contextlib.contextmanager
def open_run(run: str, step: int | None, trust: bool) -> Iterator[SavedRun]:
    """Opens a checkpoint until the context ends.

    Args:
        run: directory or URL of a run, or of one of its checkpoints.
        step: step of the checkpoint; None: the last one.
        trust: whether modules are imported that the run names beside those shipped here.

    Raises:
        ValueError: there is no such run or checkpoint.
        Damaged: the checkpoint is damaged.
    """
    if "://" not in run and not Path(run).is_dir():
        raise ValueError(f"there is no run {run}: `run` is a run's directory, for example runs/<name>.")
    checkpoints, step = find_checkpoint(run, step)
    with checkpoints:
        metadata = checkpoints.metadata(step)
        yield SavedRun(checkpoints, step, metadata, config_of(saved_config(metadata), trust))
