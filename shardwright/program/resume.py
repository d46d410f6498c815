"""Chooses the checkpoint that a run resumes from, checks that it may, and restores or initializes
the state.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from omegaconf import MISSING

from shardlib.placement import LayerPlacement
from shardwright.data.checks import TUNABLE, a_path, marked, within
from shardwright.data.loader import check_skips
from shardwright.data.untrusted import Damaged, shown
from shardwright.modeling.model import module_of
from shardwright.modeling.weights import shapes_of, sharded
from shardwright.program.changes import config_at
from shardwright.program.checkpoint import (
    NO_ORDERS,
    Checkpointer,
    Orders,
    check_same_arrays,
    directory_of,
    find_checkpoint,
    named_leaves,
    saved_arrays,
)
from shardwright.program.config import Config, PathsConfig
from shardwright.program.differences import config_differences
from shardwright.program.files import read_config
from shardwright.program.printing import log
from shardwright.program.processes import check_processes
from shardwright.program.provenance import compare_source, provenance_of
from shardwright.program.saved_config import check_resumes, config_of, saved_config, with_defaults
from shardwright.program.skipping import are_finite
from shardwright.program.stages import placement_of, stack_orders
from shardwright.program.step import Step
from shardwright.settings.output import override

Write = Callable[[str], None]
DECIDE_WEIGHTS = ("module", "vocab", "tied_embeddings", "qk_norm")
"""Model settings in which a run may differ from training.init_from, if it also allows missing or
unused weights."""
CARRIED = "huggingface"
"""Key, in a checkpoint's metadata, of what an import kept besides weights. Runs that start from it
copy the entry."""
INIT_REMEDY = (
    "Start from a checkpoint of this model. Or give training.init_from_missing=fresh to initialize "
    "weights, and last rows of longer tables, that the checkpoint lacks; "
    "training.init_from_unused=leave to ignore weights that this run lacks. Tables cannot be "
    "shortened."
)


# ---- the start of a run --------------------------------------------------------------------------


class Validated(NamedTuple):
    """The validation of a checkpoint. Losses of the same text can be compared."""

    step: int
    loss: float
    text: int
    """The `checksum` of the text, as `evaluate` returns it."""

    def drop(self, why: str) -> None:
        """Prints why the checkpoint is not the best any more, whatever its loss."""
        log(
            f"best       no longer {directory_of(self.step)}, validation loss {self.loss:.4g}: "
            f"{why}"
        )


class Start(NamedTuple):
    """Where a run starts.

    Attributes:
        step: steps that are done; 0 for a new run.
        metadata: of the checkpoint; for a new run with init_from, what it carries of that one's.
        source_differs: how the source differs from that of the checkpoint; None if it does not.
        best: the checkpoint with the best validation loss so far, for training.keep_best; or None.
    """

    step: int
    metadata: dict[str, Any]
    source_differs: str | None = None
    best: Validated | None = None


def find_start(
    checkpoints: Checkpointer,
    c: Config,
    directory: Path,
    damaged: dict[int, str],
    provenance_at: Callable[[int], dict[str, Any]],
) -> Start:
    """Finds where the run in `directory` starts: at its latest intact checkpoint, or at that of
    training.resume_step.

    Args:
        checkpoints: the run's Checkpointer.
        c: the configuration with all changes.
        directory: the run's directory.
        damaged: as for choose_checkpoint.
        provenance_at: maps a step to this program's provenance with the settings of that step.

    Raises:
        ValueError: no checkpoint is intact, or this run may not continue it.
    """
    found = choose_checkpoint(checkpoints, c.training.resume_step, damaged, c.data.skip_steps)
    if found is None:
        if c.training.init_from is None:
            return Start(0, {})
        source, step = find_checkpoint(c.training.init_from)
        with source:
            return Start(0, carried_in(source.metadata(step)))
    done, metadata = found
    config = saved_config(metadata)
    check_resumes(config, c, directory, done)
    check_skips(config["data"].get("skip_steps", []), c.data.skip_steps, done)
    allow = None if c.training.other_source else "training.other_source=true"
    now = provenance_at(done - 1)  # with the settings of the step that saved it
    differs = compare_source(metadata.get("provenance"), now, ("training", "evaluation"), allow)
    if "loader" not in metadata:
        raise ValueError(
            f"checkpoint {done} is not of a run. Start a run from its weights (training.init_from)."
        )
    best = best_of(checkpoints, metadata, now) if c.training.keep_best else None
    return Start(done, metadata, differs, best)


def best_of(
    checkpoints: Checkpointer, metadata: dict[str, Any], now: dict[str, Any]
) -> Validated | None:
    """Returns the best checkpoint according to a checkpoint's metadata; None if its loss no longer
    counts.

    `now` is this program's provenance with the settings of that checkpoint.
    """
    if not (known := metadata.get("best")):
        return None
    best = Validated(known["step"], known["loss"], known["text"])
    if best.step not in checkpoints.steps():
        return best.drop("it is gone")
    try:
        compare_source(metadata.get("provenance"), now, ("evaluation",), allow="")
    except ValueError:
        return best.drop("the evaluation step computes something else now")
    return best


def carried_in(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a checkpoint's metadata that later checkpoints keep, also of runs that
    start from it.
    """
    return {key: value for key, value in metadata.items() if key == CARRIED}


def clear_later(
    checkpoints: Checkpointer, start: int, damaged: Mapping[int, str], goes_on: bool
) -> None:
    """Sets aside damaged checkpoints and those after `start`.

    If the run `goes_on`, removes unfinished ones.
    """
    if later := [step for step in checkpoints.steps() if step > start or step in damaged]:
        place = checkpoints.set_aside(later)
        log(f"WARNING    resuming from step {start}; the checkpoints {later} are moved to {place}")
    if goes_on:
        checkpoints.remove_leftovers()


def choose_checkpoint(
    checkpoints: Checkpointer,
    wanted: int | None,
    damaged: dict[int, str],
    skip_steps: Sequence[int] = (),
) -> tuple[int, dict] | None:
    """Chooses the checkpoint to resume from: its step and metadata, the same in all processes.

    None if the run has no checkpoint, nor a damaged one, and `wanted` is None.

    If `wanted` is None, it is the latest with an intact manifest; otherwise the one of step
    `wanted`. But if a start with the same resume_step saved the latest, after the same batches, it
    is the latest, so that repeating a command continues the run.

    Args:
        checkpoints: the run's Checkpointer.
        wanted: training.resume_step.
        damaged: step of each damaged checkpoint → what is wrong. Newly found ones are added.
        skip_steps: data.skip_steps.

    Raises:
        ValueError: there is no such intact checkpoint.
    """
    while (step := checkpoints.latest_step(without=damaged)) is not None:
        try:
            metadata = checkpoints.metadata(step)
        except Damaged as error:
            damaged[step] = str(error)
            continue
        if wanted in (None, step) or (
            step > wanted and _went_back(metadata, wanted, skip_steps, step)
        ):
            return step, metadata
        if wanted in damaged:
            break
        return wanted, checkpoints.metadata(wanted)
    if wanted is None and not damaged:
        return None
    # A run that went back may since have deleted the checkpoint it went back to, as its oldest.
    which = "; ".join(f"step {step}: {why}" for step, why in sorted(damaged.items(), reverse=True))
    raise ValueError(
        f"no intact checkpoint in {checkpoints.store.url} to resume from: training.resume_step is "
        f"{wanted}. {which} Choose another step, copy a checkpoint there, or start a run with "
        "another name."
    )


def _went_back(metadata: dict, wanted: int, skip_steps: Sequence[int], step: int) -> bool:
    """Returns True if a start with resume_step `wanted` saved the checkpoint of `step`, after the
    same batches.
    """
    config = saved_config(metadata)
    with contextlib.suppress(ValueError):
        check_skips(config.get("data", {}).get("skip_steps", []), skip_steps, step)
        return config["training"].get("resume_step") == wanted
    return False


def read_state(
    checkpoints: Checkpointer,
    step: int,
    State: Any,
    shapes: Any,
    model: Any,
    placement: LayerPlacement,
) -> Any:
    """Reads the state of a checkpoint onto the current mesh.

    `State` is the class of the state, generic in the class of the weights; `shapes` are the shapes
    of its arrays; `placement` is the placement of the layers on stages. Raises as
    Checkpointer.restore.
    """
    like = sharded(State[model.Weights], shapes)
    return checkpoints.restore(step, like, stack_orders(placement, State, shapes))


def fresh_state(step: Step, record: dict[str, Any] | None = None) -> Any:
    """Makes the state before the first step, on the mesh of `step`, with the weights of
    training.init_from if given.

    Adds to `record`, as "init_from", what was done with each weight.
    """
    c = step.config
    start = step.other(name="start")
    check_processes({"source of the initial weights": start.lowered.as_text()})
    state = start.compile()(jax.random.key(c.training.seed))
    if c.training.init_from is not None:
        orders = stack_orders(placement_of(c, step.model), type(state), state)
        state.weights, did = read_weights(
            c.training.init_from, state.weights, dataclasses.asdict(c), orders
        )
        if c.training.eval_average:
            state.average = jax.tree.map(jnp.copy, state.weights)
        if record is not None:
            record["init_from"] = did
    return state


def checkpoints_of(directory: Path, paths: PathsConfig) -> str:
    """Returns the path or URL of the checkpoints of the run in `directory`.

    Raises ValueError if the run saved them elsewhere, because it would restart from step 0.
    """
    try:
        was = read_config(directory / "config.yaml")["paths"]
    except (KeyError, ValueError):  # a new run has none, and a killed one may have a partial file
        was = dataclasses.asdict(paths)
    had = was.get("checkpoints")
    name = str(was.get("model_name") or paths.model_name)

    def place_of(root: str | None, name: object) -> str:
        return f"{root.rstrip('/')}/{name}/checkpoints" if root else f"{directory}/checkpoints"

    place = place_of(had, name)
    now = place_of(paths.checkpoints, paths.model_name)
    if os.path.normpath(place) != os.path.normpath(now):
        raise ValueError(
            f"the checkpoints of the run in {directory} are in {place}, not in {now}. Give "
            f"paths.checkpoints={had or 'null'} {override('paths.model_name', name)}, or start "
            f"another run with a new name."
        )
    return place


# ---- weights of another run ----------------------------------------------------------------------


def read_weights(
    path: str | os.PathLike, like: object, config: dict, orders: Orders = NO_ORDERS
) -> tuple[Any, dict[str, list[str]]]:
    """Reads the weights of another run to warm-start one with weights `like`.

    Also returns what was done with each.

    This is a dict such as {"taken": ["embed"], "left": ["unembed"], …}. Arrays or rows that the
    checkpoint lacks are taken from `like`, and arrays that `like` lacks are not read ("left"), as
    far as training.init_from_missing and init_from_unused allow. Prints how the models differ.

    `path` is as for `find_checkpoint`, `orders` as for `Checkpointer.restore`. Raises ValueError if
    there is no such checkpoint or its model or arrays differ, and Damaged if it is damaged.
    """
    t = config.get("training", {})
    fresh, leave = t.get("init_from_missing") == "fresh", t.get("init_from_unused") == "leave"
    checkpoints, step = find_checkpoint(path)
    with checkpoints:
        manifest = checkpoints.manifest(step)
        saved = with_defaults(saved_config(manifest["metadata"]), config["model"].get("module"))
        _check_same_model(path, saved, config, may_decide_weights=fresh or leave)
        has = {name: x for name, x in saved_arrays(manifest).items() if name.startswith("weights/")}
        wants = named_leaves({"weights": like})
        taken = [name for name in wants if name in has]
        new = [name for name in wants if name not in has]
        grown = [name for name in taken if _is_longer(wants[name], has[name])]
        left = [name for name in has if name not in wants]
        allowed = {*(new + grown if fresh else []), *(left if leave else [])}
        compared = (
            {name: x for name, x in of.items() if name not in allowed} for of in (has, wants)
        )
        check_same_arrays(
            f"{checkpoints.store.url}/{directory_of(step)}", *compared, remedy=INIT_REMEDY
        )
        read = checkpoints.restore(step, {name: wants[name] for name in taken}, orders, partly=True)
    read |= {
        name: _replace_first_rows(wants[name], read[name], has[name].shape[0]) for name in grown
    }
    weights = jax.tree.unflatten(
        jax.tree.structure(like), [read.get(name, x) for name, x in wants.items()]
    )
    log(f"weights    from {path}, after {step} steps; the optimizer's state is fresh")
    did = {"taken": taken, "made fresh": new, "made longer, with fresh rows": grown, "left": left}
    did = {
        how: [shown(x.removeprefix("weights/").replace("/", ".")) for x in names]
        for how, names in did.items()
    }
    for how, names in did.items() if allowed else ():
        if names:
            log(
                f"           {len(names)} {how}"
                + (f": {', '.join(names)}" if how != "taken" else "")
            )
    for line in config_differences(saved, config, ("model",)):
        log(f"           {line}")
    return weights, did


def _check_same_model(
    path: str | os.PathLike, saved: dict, config: dict, may_decide_weights: bool
) -> None:
    """Raises ValueError if the `saved` settings of a model differ from those of `config`, except
    where this is allowed.

    With `may_decide_weights`, DECIDE_WEIGHTS may differ too, and `config` may have settings that
    `saved` lacks.
    """
    free = marked(module_of(config["model"].get("module", "train")).ModelConfig, TUNABLE)
    if may_decide_weights:
        free += [*DECIDE_WEIGHTS, *(config["model"].keys() - saved["model"].keys())]
    # Also compare settings of the checkpoint's model that this one lacks, unless they have their
    # default.
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
            f"training.init_from_missing=fresh or init_from_unused=leave "
            f"{', '.join(DECIDE_WEIGHTS)} may differ."
        )


def _is_longer(new: Any, old: Any) -> bool:
    """Returns True if `new` has the rows of `old` and more of them."""
    return (
        old.shape[1:] == new.shape[1:] and old.dtype == new.dtype and old.shape[:1] < new.shape[:1]
    )


@jax.jit
def _replace_first_rows(x: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """Returns `x` with the first `count` rows replaced by those of `rows`, which has the same
    shape.
    """
    index = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(index < count, rows, x)


# ---- saved runs, for tools -----------------------------------------------------------------------


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
    """Allows importing modules that the run names and that are not shipped here, fetching its data
    and tokenizer from other hosts, and using its XLA options that are texts. For a run that is not
    yours, read them first."""
    tokenizer: str | None = a_path(None)
    """The tokenizer, if the run's data has moved or names none: `bytes`, `tiktoken:<encoding>`, a
    flat-tokens dataset, a name on the Hugging Face hub, a tokenizer.json, or a directory with
    one."""


@dataclass
class SavedRun:
    """A checkpoint of a run, with the configuration of the last step before it."""

    checkpoints: Checkpointer
    step: int
    metadata: dict[str, Any]
    config: Config

    @property
    def tokenizer_file(self) -> str | None:
        """The tokenizer.json that an import wrote into the run's directory; None if there is
        none.
        """
        place = self.checkpoints.store.path
        path = place and place.parent / "tokenizer.json"
        return str(path) if path and path.is_file() else None

    def read_weights(
        self, step: Step, other_source: bool, write_line: Write, average: bool = False
    ) -> Any:
        """Reads the weights of a Step's model, or their average, sharded as in training on the
        current mesh.

        Reports with `write_line` how the source code differs from the checkpoint's, and weights
        that are not finite. Raises ValueError if no average was kept, or, unless `other_source`, if
        the code computes something else.
        """
        if average and not self.config.training.eval_average:
            raise ValueError(
                "average is true, but the run kept none (training.eval_average). Leave out "
                "average=true."
            )
        now = provenance_of(step, ("evaluation",))
        allow = None if other_source else "other_source=true"
        if differs := compare_source(self.metadata.get("provenance"), now, ("evaluation",), allow):
            write_line(shown(f"source      {differs}"))
        like = sharded(step.model.Weights, shapes_of(step.model.table))
        part = "average" if average else "weights"
        weights = self.checkpoints.restore(self.step, {part: like})[part]
        if odd := [
            name for name, is_finite in named_leaves(are_finite(weights)).items() if not is_finite
        ]:
            write_line(
                shown(
                    f"WARNING     {odd[0]} is not finite: texts and losses of these weights are "
                    "meaningless"
                )
            )
        return weights


def trusted_options(c: Config, trust: bool, write_line: Write) -> dict[str, Any]:
    """Returns the run's XLA options.

    Without trust, leaves out texts, which could be paths of files or code.
    """
    options = c.hardware.options
    left = [name for name, value in options.items() if isinstance(value, str) and not trust]
    for name in left:
        write_line(
            f"compiler    the run's option {shown(name)} is ignored; give trust=true to use it"
        )
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
