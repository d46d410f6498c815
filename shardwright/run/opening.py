"""Prepares what a run or a tool starts from: a mesh for the available devices, and fresh or saved weights on it."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from omegaconf import MISSING

from shardlib.placement import LayerPlacement
from shardwright.cluster.devices import make_mesh, simulate_devices
from shardwright.data.checks import TUNABLE, a_path, marked, within
from shardwright.data.untrusted import shown
from shardwright.modeling.attention_paths import KERNELS
from shardwright.modeling.model import LanguageModel, module_of
from shardwright.modeling.weights import shapes_of, sharded
from shardwright.run import config as run_config
from shardwright.run.changes import config_at
from shardwright.run.checkpoint import Checkpointer, check_same_arrays, find_checkpoint
from shardwright.run.checkpoint_arrays import NO_ORDERS, Orders, directory_of, named_leaves, saved_arrays
from shardwright.run.differences import config_differences
from shardwright.run.files import read_config
from shardwright.run.printing import log
from shardwright.run.provenance import compare_source, provenance_of
from shardwright.run.resuming import config_of, saved_config, with_defaults
from shardwright.run.skipping import are_finite
from shardwright.run.stages import placement_of, stack_orders
from shardwright.run.step import Step, trace_step
from shardwright.run.stores import check_processes
from shardwright.settings.output import override

Write = Callable[[str], None]
DECIDE_WEIGHTS = ("module", "vocab", "tied_embeddings", "qk_norm")
"""Model settings in which a run may differ from training.init_from, if it also allows missing or unused weights."""
CARRIED = "huggingface"
"""Key, in a checkpoint's metadata, of what an import kept besides weights. Runs that start from it copy the entry."""
NAMED = 4
"""Maximum number of weights taken from a checkpoint to print by name. Fresh and unused weights are all printed."""
REMEDY = (
    "Start from a checkpoint of this model. Or give training.init_from_missing=fresh to initialize weights, and last "
    "rows of longer tables, that the checkpoint lacks; training.init_from_unused=leave to ignore weights that this "
    "run lacks. Tables cannot be shortened."
)


@dataclass
class MeshChoice:
    """Number of devices along each axis; -1: the remaining devices; None: not chosen."""

    r: int | None = within(-1, 2**20, None)
    d: int | None = within(-1, 2**20, None)
    t: int | None = within(-1, 2**20, None)


@dataclass
class StepChoice(MeshChoice):
    """Number of devices along each axis except p, as in MeshChoice."""

    e: int | None = within(-1, 2**20, None)
    c: int | None = within(-1, 2**20, None)


@dataclass
class StagesChoice(StepChoice):
    """Number of devices along each axis, as in MeshChoice."""

    p: int | None = within(1, 2**20, None)


def mesh_for(choice: MeshChoice, c: run_config.Config) -> jax.sharding.Mesh:
    """Makes the mesh of `choice`, with the remaining devices along d; if nothing is chosen, that of c.mesh.

    Of c.mesh, axes that `choice` does not have are dropped. If the rest does not fit the devices, all devices are along
    d, except for a StagesChoice. If this platform lacks the attention implementation of `c`, sets it to `auto` in `c`.

    Raises ValueError if the mesh does not fit the devices or does not divide the weights. A StepChoice must also divide
    the sequence length, and a StagesChoice, which is for training, also the batch size.
    """
    simulate_devices(c.hardware)
    chosen = {axis: size for axis, size in dataclasses.asdict(choice).items() if size is not None}
    in_training = isinstance(choice, StagesChoice)
    sizes = {"d": -1} | chosen if chosen else dataclasses.asdict(c.mesh)
    try:
        mesh = make_mesh(jax.devices(), **{axis: n for axis, n in sizes.items() if hasattr(choice, axis)})
    except ValueError:
        if chosen or in_training:
            raise
        mesh = make_mesh(jax.devices(), d=-1)
    run_config.check_divides(c, mesh.shape, of_batch=in_training, of_sequences=isinstance(choice, StepChoice))
    platform = mesh.devices.flat[0].platform
    if KERNELS.get(c.training.attention, platform) != platform:
        c.training.attention = "auto"
    return mesh


@dataclass
class CheckpointChoice:
    """Settings of a program that reads the weights of a checkpoint."""

    run: str = a_path(MISSING)
    """Directory or URL of a run, or of one of its checkpoints."""
    step: int | None = within(0, 2**31, None)
    """Step of the checkpoint; null: the last one."""
    average: bool = False
    """Takes the average of the weights that training.eval_average kept instead of the weights."""
    other_source: bool = False
    """Allows source that computes something else than the source that made the checkpoint."""
    trust: bool = False
    """Allows importing modules that the run names and that are not shipped here, fetching its data and tokenizer from
    other hosts, and using its XLA options that are texts. For a run that is not yours, read them first."""
    tokenizer: str | None = a_path(None)
    """The tokenizer, if the run's data has moved or names none: `bytes`, `tiktoken:<encoding>`, a flat-tokens dataset,
    a name on the Hugging Face hub, a tokenizer.json, or a directory with one."""


@dataclass
class SavedRun:
    """A checkpoint of a run, with the configuration of the last step before it."""

    checkpoints: Checkpointer
    step: int
    metadata: dict[str, Any]
    config: run_config.Config

    @property
    def tokenizer_file(self) -> str | None:
        """The tokenizer.json that an import wrote into the run's directory; None if there is none."""
        place = self.checkpoints.store.path
        path = place and place.parent / "tokenizer.json"
        return str(path) if path and path.is_file() else None

    def read_weights(self, model: LanguageModel, other_source: bool, write_line: Write, average: bool = False) -> Any:
        """Reads the weights, or their average, sharded as in training on the current mesh.

        Reports with `write_line` how the source code differs from the checkpoint's, and weights that are not finite.
        Raises ValueError if no average was kept, or, unless `other_source`, if the code computes something else.
        """
        if average and not self.config.training.eval_average:
            raise ValueError("average is true, but the run kept none (training.eval_average). Leave out average=true.")
        now = provenance_of(trace_step(self.config, model), ("evaluation",))
        allow = None if other_source else "other_source=true"
        if differs := compare_source(self.metadata.get("provenance"), now, ("evaluation",), allow):
            write_line(shown(f"source      {differs}"))
        like = sharded(model.Weights, shapes_of(model.table))
        part = "average" if average else "weights"
        weights = self.checkpoints.restore(self.step, {part: like})[part]
        if odd := [name for name, is_finite in named_leaves(are_finite(weights)).items() if not is_finite]:
            write_line(shown(f"WARNING     {odd[0]} is not finite: texts and losses of these weights are meaningless"))
        return weights


def read_state(
    checkpoints: Checkpointer, step: int, State: Any, shapes: Any, model: Any, placement: LayerPlacement
) -> Any:
    """Reads the state of a checkpoint onto the current mesh.

    `State` is the class of the state, generic in the class of the weights; `shapes` are the shapes of its arrays;
    `placement` is the placement of the layers on stages. Raises as Checkpointer.restore.
    """
    like = sharded(State[model.Weights], shapes)
    return checkpoints.restore(step, like, stack_orders(placement, State, shapes))


def trusted_options(c: run_config.Config, trust: bool, write_line: Write) -> dict[str, Any]:
    """Returns the run's XLA options. Without trust, leaves out texts, which could be paths of files or code."""
    options = c.hardware.options
    left = [name for name, value in options.items() if isinstance(value, str) and not trust]
    for name in left:
        write_line(f"compiler    the run's option {shown(name)} is ignored; give trust=true to use it")
    return {name: value for name, value in options.items() if name not in left}


@contextlib.contextmanager
def open_run(run: str, step: int | None, trust: bool) -> Iterator[SavedRun]:
    """Opens a checkpoint for the context. The arguments are as in CheckpointChoice.

    Raises ValueError if there is no such run or checkpoint, Damaged if it is damaged.
    """
    checkpoints, step = find_checkpoint(run, step)
    with checkpoints:
        metadata = checkpoints.metadata(step)
        config = saved_config(metadata)
        config["training"].setdefault("compute_dtype", "f32")  # imports do not set it
        c = config_at(config_of(config, trust), step - 1)
        yield SavedRun(checkpoints, step, metadata, c)


def checkpoints_of(directory: Path, paths: run_config.PathsConfig) -> str:
    """Returns the path or URL of the checkpoints of the run in `directory`.

    Raises ValueError if the run saved them elsewhere, because it would restart from step 0.
    """
    try:
        was = read_config(directory / "config.yaml")["paths"]
    except (KeyError, ValueError):  # a new run has none, and a killed one may have a partial file
        was = dataclasses.asdict(paths)
    had = was.get("checkpoints")
    name = was.get("model_name") or paths.model_name
    if had != paths.checkpoints:
        raise ValueError(
            f"the run in {directory} was made with paths.checkpoints={had}, not {paths.checkpoints}. Restore that "
            "value, or start another run with a new paths.model_name."
        )
    if had and os.path.normpath(str(name)) != os.path.normpath(str(paths.model_name)):
        given = override("paths.model_name", str(name))
        raise ValueError(
            f"the checkpoints of the run in {directory} are in {had}/{name}. Give {given}, or start another run in "
            "another directory."
        )
    place = f"{had.rstrip('/')}/{name}" if had else directory
    return f"{place}/checkpoints"


def read_weights(
    path: str | os.PathLike, like: object, config: dict, orders: Orders = NO_ORDERS
) -> tuple[Any, dict[str, list[str]]]:
    """Reads the weights of another run to warm-start one with weights `like`. Also returns what was done with each.

    This is a dict such as {"taken": ["embed"], "left": ["unembed"], …}. Arrays or rows that the checkpoint lacks are
    taken from `like`, and arrays that `like` lacks are not read ("left"), as far as training.init_from_missing and
    init_from_unused allow. Prints how the models differ.

    `path` is as for `find_checkpoint`, `orders` as for `Checkpointer.restore`. Raises ValueError if there is no such
    checkpoint or its model or arrays differ, and Damaged if it is damaged.
    """
    t = config.get("training", {})
    fresh, leave = t.get("init_from_missing") == "fresh", t.get("init_from_unused") == "leave"
    checkpoints, step = find_checkpoint(path)
    with checkpoints:
        saved = with_defaults(saved_config(checkpoints.metadata(step)), config["model"].get("module"))
        _check_same_model(path, saved, config, may_decide_weights=fresh or leave)
        has = {name: x for name, x in saved_arrays(checkpoints.manifest(step)).items() if name.startswith("weights/")}
        wants = named_leaves({"weights": like})
        did = _compare_weights(has, wants)
        taken, new, grown, left = did.values()
        allowed = {*(new + grown if fresh else []), *(left if leave else [])}
        compared = ({name: x for name, x in of.items() if name not in allowed} for of in (has, wants))
        check_same_arrays(f"{checkpoints.store.url}/{directory_of(step)}", *compared, remedy=REMEDY)
        read = checkpoints.restore(step, {name: wants[name] for name in taken}, orders, partly=True)
    read |= {name: _replace_first_rows(wants[name], read[name], has[name].shape[0]) for name in grown}
    weights = jax.tree.unflatten(jax.tree.structure(like), [read.get(name, x) for name, x in wants.items()])
    log(f"weights    from {path}, after {step} steps; the optimizer's state is fresh")
    did = {how: [shown(x.removeprefix("weights/").replace("/", ".")) for x in names] for how, names in did.items()}
    for how, names in did.items() if allowed else ():
        if names:
            shorter = how == "taken" and len(names) > NAMED
            log(f"           {len(names)} {how}: {', '.join(names[:NAMED] if shorter else names)}" + ", …" * shorter)
    for line in config_differences(saved, config, ("model",)):
        log(f"           {line}")
    return weights, did


def _check_same_model(path: str | os.PathLike, saved: dict, config: dict, may_decide_weights: bool) -> None:
    """Raises ValueError if the `saved` settings of a model differ from those of `config`, except where this is allowed.

    With `may_decide_weights`, DECIDE_WEIGHTS may differ too, and `config` may have settings that `saved` lacks.
    """
    free = marked(module_of(config["model"].get("module", "train")).ModelConfig, TUNABLE)
    if may_decide_weights:
        free += [*DECIDE_WEIGHTS, *(config["model"].keys() - saved["model"].keys())]
    # Also compare settings of the checkpoint's model that this one lacks, unless they have their default.
    of_saved = {"model": {"module": saved["model"].get("module", "train")}}
    plain = with_defaults(of_saved, config["model"].get("module"))["model"]
    extra = saved["model"].keys() - config["model"].keys()
    lost = [name for name in extra if name not in plain or saved["model"][name] != plain[name]]
    fixed = tuple(f"model.{name}" for name in (*config["model"], *lost) if name not in free)
    if differences := config_differences(saved, config, fixed):
        raise ValueError(
            f"training.init_from is {path}, which has the weights of another model:\n  "
            + "\n  ".join(differences)
            + "\nSet these to what the checkpoint has, or start from another one. With "
            f"training.init_from_missing=fresh or init_from_unused=leave {', '.join(DECIDE_WEIGHTS)} may differ."
        )


def _compare_weights(has: dict[str, Any], wants: dict[str, Any]) -> dict[str, list[str]]:
    """Lists the weights that a checkpoint `has` and a model `wants`, by what read_weights does with them."""

    def is_longer(name: str) -> bool:
        old, new = has[name], wants[name]
        return old.shape[1:] == new.shape[1:] and old.dtype == new.dtype and old.shape[:1] < new.shape[:1]

    return {
        "taken": [name for name in wants if name in has],
        "made fresh": [name for name in wants if name not in has],
        "made longer, with fresh rows": [name for name in wants if name in has and is_longer(name)],
        "left": [name for name in has if name not in wants],
    }


@jax.jit
def _replace_first_rows(x: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """Returns `x` with the first `count` rows replaced by those of `rows`, which has the same shape."""
    index = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(index < count, rows, x)


def carried_of(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the part of a checkpoint's metadata that a run started from its weights copies to its own checkpoints.

    `path` is as for `find_checkpoint`.
    """
    checkpoints, step = find_checkpoint(path)
    with checkpoints:
        return carried_in(checkpoints.metadata(step))


def carried_in(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a checkpoint's metadata that later checkpoints keep."""
    return {key: value for key, value in metadata.items() if key == CARRIED}


def fresh_state(step: Step, record: dict[str, Any] | None = None) -> Any:
    """Makes the state before the first step, on the mesh of `step`, with the weights of training.init_from if given.

    Adds to `record`, as "init_from", what was done with each weight.
    """
    c = step.config
    start = step.other(name="start").lower()
    check_processes({"source of the initial weights": start.as_text()})
    state = start.compile()(jax.random.key(c.training.seed))
    if c.training.init_from is not None:
        orders = stack_orders(placement_of(c, step.model), type(state), state)
        state.weights, did = read_weights(c.training.init_from, state.weights, dataclasses.asdict(c), orders)
        if c.training.eval_average:
            state.average = jax.tree.map(jnp.copy, state.weights)
        if record is not None:
            record["init_from"] = did
    return state
