"""Collects the parts of a training program that the package uses, so that no module imports
train.py itself.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardwright.modeling.training import training_module


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The parts of a training program. train.py makes one, SPEC, and passes it to its Run.

    Attributes:
        State: class of the state, generic in the class of the weights.
        Batch: type of the batch of a step.
        attention: softmax_attention, over all pairs of positions, with which other implementations
            are compared.
        cross_entropy: (logits, targets) -> the loss of each target, in validation.
        optimizers: functions that update weights, by their name in optimizer.algorithm.
        init_state: (key, config, model) -> state.
        make_training_step: (config, model) -> the jitted training step. Runs of a sweep share one
            that takes `numbers`, as the released one does.
        make_evaluation_step: (config, model, compiler options) -> the jitted evaluation step.
    """

    State: Any
    Batch: Any
    attention: Callable[..., jax.Array]
    cross_entropy: Callable[..., jax.Array]
    optimizers: Mapping[str, Callable]
    init_state: Callable[..., Any]
    make_training_step: Callable[..., Any]
    make_evaluation_step: Callable[..., Any]

    @property
    def module(self) -> str:
        """Name of the module of the training program."""
        return self.make_training_step.__module__


def load_spec(name: str | None = None) -> StepSpec:
    """Loads the SPEC of a training program by the name of its module; None: the name that
    training_module returns.

    Raises ValueError if the module has none, or defines a field's name as something other than SPEC
    has.
    """
    module = importlib.import_module(name or training_module())
    spec = getattr(module, "SPEC", None)
    if not isinstance(spec, StepSpec):
        raise ValueError(
            f"{module.__file__} has no SPEC, which tools and runs take its step from: define one "
            f"as the released train.py does (`shardwright fork` shows it)."
        )
    for field in dataclasses.fields(spec):
        own = vars(module).get(field.name)
        if own is not None and own is not getattr(spec, field.name):
            raise ValueError(
                f"{module.__file__} has {field.name}, and its SPEC another one: name its own in "
                "SPEC."
            )
    return spec
