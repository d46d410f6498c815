"""The learning rate of each step, and the algorithm, rate and decay by which each weight is
updated.
"""

import dataclasses
import fnmatch
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from shardlib.describe import describe
from shardlib.parsing import ShardError, did_you_mean, named
from shardlib.places import place_of
from shardlib.planned import target_device
from shardlib.shardtypes import f32, i32
from shardwright.data.checks import check_choice
from shardwright.data.loader import is_input
from shardwright.modeling.model import LanguageModel, Targets
from shardwright.modeling.weights import Weight
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.scales import Scale, scales_of

TAKES = {
    "optimizer": "state, g, step, rate, config, updates",
    "loss": "logits, targets, config",
    "schedule": "step, config",
}
"""Arguments of the functions that settings may name in the user's own files."""


def learning_rate(
    step: i32[""], c: OptimizerConfig, schedule_step: f32[""] | None = None
) -> f32[""]:
    """Learning rate of a step: linear warmup to the peak at warmup_steps, then c.schedule to the
    floor.

    With training.minutes, the schedule is at `schedule_step`, and only the warmup goes by steps. A
    function of the user's own gives the fraction of the peak.
    """
    step = jnp.float32(step)
    at = step if schedule_step is None else schedule_step
    if ":" in c.schedule:
        return c.learning_rate * _own_schedule(at, c, "schedule")
    height = 1.0  # above the floor, as a fraction
    if c.schedule != "constant" and (end := c.schedule_steps) is not None:
        begin = end - (c.cooldown_steps or 0) if c.schedule == "wsd" else c.warmup_steps
        progress = jnp.clip((at - begin) / (end - begin), 0, 1)
        height = 0.5 * (1 + jnp.cos(jnp.pi * progress)) if c.schedule == "cosine" else 1 - progress
    decay = c.final_fraction + (1 - c.final_fraction) * height
    return c.learning_rate * jnp.where(step < c.warmup_steps, step / max(c.warmup_steps, 1), decay)


def decayed(updates: Any, at: i32[""] | f32[""], c: OptimizerConfig) -> Any:
    """The tree of Update at a place in the schedule, with weight decays times
    c.decay_schedule.
    """
    if c.decay_schedule is None:
        return updates
    share = _own_schedule(jnp.float32(at), c, "decay_schedule")
    return jax.tree.map(lambda x: dataclasses.replace(x, decay=x.decay * share), updates)


def _own_schedule(at: jax.Array, c: OptimizerConfig, setting: str) -> jax.Array:
    """The factor by the user's own schedule, which a setting names.

    Raises ShardError if it gives no number.
    """
    name = getattr(c, setting)
    schedule = named("schedule", name, {}, TAKES["schedule"])
    try:
        share = jnp.asarray(schedule(at, c), jnp.float32)
        if share.shape:
            raise TypeError(f"it returns an array of shape {share.shape}")
    except (TypeError, ValueError) as error:
        raise ShardError(
            f"optimizer.{setting}={name} gives no number for a step: "
            f"{str(error).partition(chr(10))[0]}",
            "write a function of (step, c), of which step is a traced f32 scalar, that returns "
            "one: jnp.where in place of `if`",
        ) from error
    return share


MOST_CHECKED = 10_000
"""Most steps at which a schedule of the user's own is checked, evenly spaced."""


def check_schedule(c: OptimizerConfig, steps: int) -> None:
    """Raises ValueError if a schedule of the user's own is not finite at one of so many steps."""
    at = np.unique(np.linspace(0, steps - 1, min(steps, MOST_CHECKED)).astype(np.int32))
    for setting in ("schedule", "decay_schedule"):
        name = getattr(c, setting) or ""
        if ":" not in name:
            continue
        of_step = jax.vmap(functools.partial(_own_schedule, c=c, setting=setting))
        shares = np.asarray(jax.jit(of_step)(np.float32(at)))
        if not np.isfinite(shares).all():
            first = int(at[~np.isfinite(shares)][0])
            raise ValueError(
                f"optimizer.{setting}={name} gives {shares[at == first][0]} at step {first} of "
                f"{steps}; return a finite number for each."
            )


def averaged(state: Any, step: i32[""], c: Any) -> Any:
    """Adds the weights after a step, counted from 0, to their average in a train.State, by
    training.eval_average.

    ema begins as the mean of all weights, so that the initial ones have no share in it.
    """
    if state.average is None:
        return state
    if c.eval_average == "uniform":
        share = 1 / jnp.float32(step % c.average_steps + 1)
    else:
        share = jnp.maximum(1 - 0.5 ** (1 / c.average_steps), 1 / jnp.float32(step + 1))
    average = jax.tree.map(
        lambda old, w: (1 - share) * old + share * w, state.average, state.weights
    )
    return dataclasses.replace(state, average=average)


T = TypeVar("T")


def row_major(g: T) -> T:
    """Gradients, each array of which a GPU stores in the order of its dims, as it does the weights.

    XLA reduce-scatters `F M/d` as `M/d F`. Left in this order, the update of the weight would
    transpose it, and could then not overwrite the weight and its moments.
    """
    if target_device().platform != "gpu":
        return g
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), g)


FROZEN = "frozen"
"""Algorithm of a weight that is not updated."""


@dataclasses.dataclass(frozen=True)
class Update:
    """Algorithm, rate and decay of one weight."""

    weight: Weight
    """Entry of the weight in the model's table."""
    algorithm: str
    """A name of train.OPTIMIZERS, or FROZEN."""
    rate: float
    """Factor on the learning rate."""
    decay: float
    """Decoupled weight decay, multiplied by the learning rate of the weight."""
    epsilon: float = 1.0
    """Factor on Adam's epsilon."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, from which its sharding follows."""
        return self.weight.shape


def has_nu(update: Update) -> bool:
    """Whether a weight has a second moment: with AdamW, and with optimizers of the user's own."""
    return update.algorithm == "adamw" or ":" in update.algorithm


def algorithms(c: OptimizerConfig, known: Mapping[str, T], layers: Any = None) -> dict[str, T]:
    """The optimizers of `known`, and those that the settings name as module:function.

    Of the latter, one with an argument `layers=None` is given the metrics of the layers, `layers`.
    """
    own: dict[str, Any] = {}
    for name in _names_of_algorithms(c):
        optimizer: Any = named("optimizer", name, known, TAKES["optimizer"])

        @functools.wraps(optimizer)
        def updated(state: Any, *others: Any, optimizer: Any = optimizer, name: str = name) -> Any:
            takes = "layers" in inspect.signature(optimizer).parameters
            new = optimizer(state, *others, **({"layers": layers} if takes else {}))
            if type(new) is not type(state):
                raise ShardError(
                    f"{name} returns {describe(new)}, not a State",
                    "return the new state, as adamw in train.py does",
                    place=place_of(optimizer),
                )
            return new

        own[name] = updated
    return {**known, **own}


def _names_of_algorithms(c: OptimizerConfig) -> list[str]:
    """The optimizers that the settings name as module:function."""
    return [
        name
        for name in (c.algorithm, *(group.algorithm or "" for group in c.groups))
        if ":" in name
    ]


def is_updated_by(update: Update, optimizer: Callable) -> bool:
    """True for a weight whose algorithm is this optimizer of the user's own, module:function."""
    return update.algorithm == f"{optimizer.__module__}:{optimizer.__name__}"


def begun(state: Any, c: OptimizerConfig, updates: object) -> Any:
    """The first state of a run: what optimizers of the user's own make of train.State.

    Such an optimizer may have an attribute `begin`, a function of (state, updates). It returns the
    state without the moments that it does not need, or one of a subclass with more fields.
    """
    for name in dict.fromkeys(_names_of_algorithms(c)):
        begin = getattr(named("optimizer", name, {}, TAKES["optimizer"]), "begin", None)
        state = begin(state, updates) if begin else state
    return state


def loss_of(c: OptimizerConfig, known: Mapping[str, Callable]) -> Callable:
    """The loss that training minimizes, as a function of logits and Targets."""
    chosen = named("loss", c.loss, known, TAKES["loss"])
    declared = tuple(inputs_of_loss(c).items())
    weights = getattr(chosen, "weights", None)

    def loss(logits: Any, targets: Any) -> Any:
        targets = dataclasses.replace(targets, declared=declared)
        found = chosen(logits, targets, c)
        if getattr(found, "shape", ()) != targets.ids.shape:
            raise ShardError(
                f"{c.loss} returns {describe(found)} for targets {describe(targets.ids)}",
                "return the loss of each target, as training_loss in train.py does",
                place=place_of(chosen),
            )
        return found if weights is None else found * targets.input(weights)

    return loss


def weights_of_targets(c: OptimizerConfig, batch: Any) -> Any:
    """Weights of the targets of a TokenBatch in the training loss, f32[… L].

    They are the input that the attribute `weights` of a loss names. None: each counts as one.
    """
    loss = named("loss", c.loss, {}, TAKES["loss"]) if ":" in c.loss else None
    if (name := getattr(loss, "weights", None)) is None:
        return None
    declared = tuple(inputs_of_loss(c).items())
    return Targets(batch.targets, batch.loss_mask, batch.loss_inputs, declared=declared).input(name)


def inputs_of_loss(c: OptimizerConfig) -> Mapping[str, Any]:
    """Inputs of the dataset that a loss in the user's own file reads, with their types: its
    attribute `inputs`.
    """
    inputs = (
        getattr(named("loss", c.loss, {}, TAKES["loss"]), "inputs", {}) if ":" in c.loss else {}
    )
    if not isinstance(inputs, Mapping) or not all(map(is_input, inputs.values())):
        raise ValueError(
            f"optimizer.loss is {c.loss}, whose inputs are {inputs!r}; they must be a dict of "
            "names and dtypes, f32 or "
            'u32 of shardlib.shardtypes, or k of them: {"advantage": f32, "pose": f32["6"]}'
        )
    return inputs


def own_functions(c: OptimizerConfig) -> list[Callable]:
    """The optimizers, the loss and the schedules that the settings name in the user's own files."""
    chosen = [
        *(("optimizer", name) for name in _names_of_algorithms(c)),
        ("loss", c.loss),
        ("schedule", c.schedule),
        ("schedule", c.decay_schedule or ""),
    ]
    return [named(what, name, {}, TAKES[what]) for what, name in chosen if ":" in name]


def updates_of(c: OptimizerConfig, model: LanguageModel, known: Mapping[str, Any]) -> Any:
    """The Update of each weight, in a tree like the model's `table`.

    With muon as the algorithm, weights that are not matrices are updated by adamw. Then each of
    c.groups, in order, changes the weights whose names it matches, and c.parametrization scales
    all.

    Args:
        c: settings of the optimizer.
        model: the model, whose `table` has a Weight for each array.
        known: the optimizers by name.

    Raises:
        ValueError: an algorithm unknown or unable to update a weight, a group without weights, a
            base as in scales_of.
    """
    names = []

    def update(path, weight: Weight, scale: Scale) -> Update:
        names.append(jax.tree_util.keystr(path, simple=True, separator="."))  # such as layers.w_q
        algorithm = "adamw" if c.algorithm == "muon" and weight.kind != "matrix" else c.algorithm
        found = Update(weight, algorithm, 1.0, c.weight_decay if weight.kind in c.decay_on else 0.0)
        for group in c.groups:
            if fnmatch.fnmatchcase(names[-1], group.match):
                changed = {
                    "algorithm": group.algorithm,
                    "rate": group.rate,
                    "decay": group.weight_decay,
                }
                found = dataclasses.replace(
                    found, **{k: v for k, v in changed.items() if v is not None}
                )
        if found.algorithm == "muon" and not (weight.inputs and weight.outputs):
            raise ValueError(
                f"{names[-1]} is to be updated by muon, which is for matrices, but its Weight "
                f"counts {weight.inputs} dims of inputs and {weight.outputs} of outputs; make it "
                f"with weights.matrix, another kind, or another algorithm by optimizer.groups."
            )
        rate = scale.rate(found.algorithm)
        return dataclasses.replace(
            found, rate=found.rate * rate, decay=found.decay / rate, epsilon=scale.epsilon
        )

    updates = jax.tree_util.tree_map_with_path(update, model.table, scales_of(c, model))
    names_of_algorithms = (*algorithms(c, known), FROZEN)
    check_choice("optimizer.algorithm", c.algorithm, names_of_algorithms)
    for i, group in enumerate(c.groups):
        check_choice(
            f"optimizer.groups[{i}].algorithm", group.algorithm or FROZEN, names_of_algorithms
        )
        if not fnmatch.filter(names, group.match):
            raise ValueError(
                f"optimizer.groups[{i}].match is {group.match!r}, which matches no weight; choose "
                f"among {', '.join(names)}.{did_you_mean(group.match, names)}"
            )
    if all(update.algorithm == FROZEN for update in jax.tree.leaves(updates)):
        raise ValueError(
            "optimizer.groups freezes every weight, so nothing is trained; let a group match fewer."
        )
    return updates
