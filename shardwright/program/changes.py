"""Applies training.changes: settings that change at given steps of a run.

A phase is the steps between two changes, which have the same settings. The settings of a step, and
the position of its batch in the data, depend only on the configuration and the step.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlib.parsing import did_you_mean
from shardwright.data.checks import CHANGING, marked
from shardwright.data.loader import DataConfig, Loader, batch_of, make_loader, steps_for
from shardwright.modeling.model import load_model
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.rates import inputs_of_loss
from shardwright.program.checkpoint import named_leaves
from shardwright.program.config import Config, TrainingConfig
from shardwright.program.differences import flat
from shardwright.settings.settings import made

_SECTIONS = {"training": TrainingConfig, "data": DataConfig, "optimizer": OptimizerConfig}
MAY_CHANGE = [
    f"{section}.{name}" for section, kind in _SECTIONS.items() for name in marked(kind, CHANGING)
]
"""Settings that may change during a run: of the loader, the learning-rate schedule, and the
update."""
MOST_CHANGES = 128
"""Largest number of entries of training.changes: each adds a tenth of a second to the start of a
run."""


def may_change(name: str) -> bool:
    """Returns True if a setting may change during a run.

    A setting of the model also has to leave its weights as they are: see check_changes.
    """
    of_model = name.startswith("model.") and name != "model.module"
    return of_model or name in MAY_CHANGE or name.startswith("data.mixture.")


def firsts(config: Any) -> list[int]:
    """Returns the first step of each phase: 0 and the steps of training.changes.

    `config` is a Config or a dict.
    """
    training = config["training"] if isinstance(config, dict) else vars(config.training)
    return [0, *(change["step"] for change in training.get("changes", ()))]


def settings_at(config: dict, step: int) -> dict:
    """Returns a copy of a configuration dict with the changes up to `step` applied, and
    training.changes removed.

    Raises ValueError for a setting without a section, such as data.mixture.web if data.mixture is
    null.
    """
    found = copy.deepcopy(config)
    for change in found["training"].pop("changes", ()):
        for setting in filter(may_change, change if change["step"] <= step else ()):
            *path, name = str(setting).split(".")
            try:
                functools.reduce(lambda at, key: at.setdefault(key, {}), path, found)[name] = (
                    change[setting]
                )
            except (AttributeError, TypeError):
                raise ValueError(
                    f"training.changes, after step {change['step']}: {setting} is in no section."
                ) from None
    return found


def config_at(c: Config, step: int) -> Any:
    """Returns the Config with the changes up to `step` applied.

    Raises ValueError for a value of the wrong type.
    """
    if not c.training.changes:
        return c
    found = settings_at(dataclasses.asdict(c), step)
    sections = {}
    for name in ("data", "model", "optimizer", "training"):
        sections[name] = made(type(getattr(c, name)), found[name], name)
    return dataclasses.replace(c, **sections)


def check_number(changes: Sequence[Any]) -> None:
    """Raises ValueError if training.changes has more than MOST_CHANGES entries."""
    if len(changes) > MOST_CHANGES:
        raise ValueError(
            f"training.changes has {len(changes):,} entries; leave at most {MOST_CHANGES}."
        )


def check_changes(c: Config, check: Callable[[Any], None]) -> None:
    """Raises ValueError if an entry of training.changes is invalid, or `check` rejects the Config
    from its step on.
    """
    check_number(c.training.changes)
    for i, (before, change) in enumerate(itertools.pairwise([{"step": 0}, *c.training.changes])):
        name = f"training.changes[{i}]"
        step = change.get("step")
        if type(step) is not int or step <= before["step"]:
            raise ValueError(
                f"{name}.step is {step!r}; it must be a whole number above {before['step']}: steps "
                "rise."
            )
        for setting in change.keys() - {"step"}:
            if not may_change(setting):
                near = did_you_mean(setting, MAY_CHANGE) or f" {', '.join(MAY_CHANGE)} may."
                raise ValueError(f"{name} has {setting}, which may not change during a run.{near}")
    if c.training.changes and c.training.epochs is not None:
        raise ValueError(
            f"training.epochs is {c.training.epochs} with training.changes; give the length in "
            "steps or tokens."
        )
    for first in firsts(c)[1:]:
        try:
            check(changed := config_at(c, first))
            check_weights(c.model, changed.model)
        except ValueError as error:
            raise ValueError(f"training.changes, after step {first}: {error}") from None


def check_weights(before: Any, now: Any) -> None:
    """Raises ValueError if models of these settings have weights of other names or shapes."""
    if before == now:
        return
    tables = [load_model(settings).table for settings in (before, now)]
    old, new = ({n: w.shape for n, w in named_leaves(table).items()} for table in tables)
    if differing := [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]:
        first = differing[0]
        raise ValueError(
            f"the shape of {first} would be {new.get(first)}, not {old.get(first)}. A setting that "
            "decides weights may not change during a run: start another run from this one's "
            "weights (training.init_from, training.init_from_missing=fresh)."
        )


def described_change(c: Config, first: int) -> str:
    """Describes the settings that change at step `first`, as `name old -> new`."""
    whole = dataclasses.asdict(c)
    before, now = (flat(settings_at(whole, step)) for step in (first - 1, first))
    differing = (name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in differing)


def _phases(c: Config) -> Iterator[tuple[int, Any, int]]:
    """Yields (first step, end, tokens per step) of each phase.

    The end is exclusive, and inf for the last phase.
    """
    ends: list[Any] = [*firsts(c), math.inf]
    for first, end in itertools.pairwise(ends):
        t = config_at(c, first).training
        yield first, end, t.batch_size * t.seq_len


def tokens_before(c: Config, step: int) -> int:
    """Counts the tokens, including padding, in the batches of all steps before `step`."""
    return sum(max(0, min(end, step) - first) * each for first, end, each in _phases(c))


def steps_of(c: Config, tokens: int) -> int:
    """Returns the number of steps, from step 0 on, for which `tokens` tokens suffice."""
    steps = 0
    for first, end, each in _phases(c):
        taken = min(end - first, tokens // each)
        steps = steps + taken
        tokens = tokens - taken * each
        if taken < end - first:
            break
    return steps


MOST_STEPS = 2**31 - 1
"""Stands for the number of steps of a run with training.minutes until its last step is known."""


def total_steps(c: Config, loader: Loader) -> int:
    """Computes the number of steps of a run with this loader; MOST_STEPS with training.minutes.

    Raises ValueError as steps_for does.
    """
    t = c.training
    if t.minutes is not None:
        return MOST_STEPS
    length = {"steps": t.steps, "tokens": t.tokens, "epochs": t.epochs}
    if t.changes and t.tokens is not None and t.steps is None:
        length |= {"tokens": None, "steps": steps_of(c, t.tokens)}
    return steps_for(loader, **length, skip_steps=c.data.skip_steps)


def loader_at(
    c: Config, step: int, inputs: Mapping[str, Any] = {}, state: Mapping[str, Any] | None = None
) -> Loader:
    """Makes the loader for the training batch of a step.

    It continues in the data where the phase before ended.

    `inputs` are the types of the model's inputs other than tokens. `state` is the loader state in
    the checkpoint of `step`, if the run resumes there. Raises ValueError as make_loader does.
    """
    settings = [(first, config_at(c, first)) for first in firsts(c) if first <= step]

    def of_batches(x):
        return (x[1].data, x[1].training.batch_size, x[1].training.seq_len)

    groups = [[*group] for _, group in itertools.groupby(settings, of_batches)]
    # microbatches are parts of the same batch
    phases = [(group[0][0], group[-1][1]) for group in groups]
    saved = max(first for first, _ in phases if first < step or first == 0)
    loader: Loader | Any = None
    for first, now in phases:
        t = now.training
        begin = batch_of(first, c.data.skip_steps)
        options = {"inputs": inputs, "loss_inputs": inputs_of_loss(now.optimizer)}
        options |= {"microbatches": t.microbatches, "state": state if first == saved else None}
        if loader:
            options |= {"after": loader, "first": begin}
        loader = make_loader(now.data, "train", t.batch_size, t.seq_len, c.model.vocab, **options)
        if t.eval_epochs is not None:
            loader.epochs_before(begin)  # raises if it has none
    return loader
