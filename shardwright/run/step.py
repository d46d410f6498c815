"""A program of a run as a value, traced once: what proof, plan, statistics and hashes are functions of."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardlib.axes import AXES
from shardlib.parsing import ShapeSpec
from shardlib.proof.check import tracing
from shardwright.modeling.model import LanguageModel, inputs_of
from shardwright.modeling.planned_attention import kernels_as_calls
from shardwright.modeling.rules import Rule
from shardwright.modeling.weights import sharded
from shardwright.run.config import Config, PipelineConfig
from shardwright.run.reference import weights_of
from shardwright.run.stages import IN_ORDER
from shardwright_data.loader import batch_shapes

NAMES = "training", "evaluation", "start"
"""Programs of a run: make_training_step, make_evaluation_step and init_state of train.py."""
AS_RUN = "as run"
_PLAIN = {"microbatches": 2, "gather_weights": "layer", "attention": "einsum", "save": "marked", "unroll": 1}
_PLAIN |= {"loss_chunk": None, "side_by_side": 1}
_PLAIN = {f"training.{name}": value for name, value in _PLAIN.items()} | {"pipeline": PipelineConfig()}
FORMS: dict[str, Mapping[str, Any]] = {
    # Attention by train.attention, of all keys: computes what a Rule says of all pairs of positions.
    "einsum attention": {"training.attention": "einsum", "training.context": "gather"},
    # The loss of all positions at once, not in chunks.
    "whole loss": {"training.loss_chunk": None},
    # Weights gathered once a step, as one device does by `auto`.
    "gathered ahead": {"training.gather_weights": "step"},
    # With stages, each device runs all layers in their order: the parts of the schedule one after the other.
    "layers in order": {"pipeline.schedule": IN_ORDER},
    # Microbatches one after the other, also those that run side by side.
    "one after the other": {"training.side_by_side": 1},
    # Any kernel of attention as one call, of which nothing is computed: for devices that are not there.
    "kernels as calls": {},
    # Without the settings that may change when a run is resumed: two microbatches, of one sequence or of two.
    "plain": {**_PLAIN, "training.batch_size": 2},
    "plain, of pairs": {**_PLAIN, "training.batch_size": 4},
}
"""Other forms of a step, by name, as edits of its settings. No program of other settings is traced but by these."""


def formed(c: Config, *forms: str) -> Config:
    """The settings of a step in these forms."""
    for name, value in (edit for form in forms for edit in FORMS[form].items()):
        section, _, field = name.partition(".")
        value = dataclasses.replace(getattr(c, section), **{field: value}) if field else value
        c = dataclasses.replace(c, **{section: value})
    return c


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A program of a run on a mesh. It is traced when it is first read, and once.

    Attributes:
        c: the settings, in this form.
        model: the model of c.model.
        mesh: the mesh on which it is traced, of devices or abstract.
        trainer: the module of the training program, train.py.
        name: one of NAMES.
        forms: those of FORMS in which it is traced; none: as it is run.
        planned: sizes of the mesh for which it chooses what is fast.
    """

    c: Config
    model: LanguageModel
    mesh: Mesh | AbstractMesh
    trainer: ModuleType
    name: str = "training"
    forms: tuple[str, ...] = ()
    planned: Mapping[str, int] = dataclasses.field(default_factory=dict)
    _known: dict = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._known.setdefault(self._key, self)

    @property
    def form(self) -> str:
        """What kind of program it is, for messages."""
        return ", ".join(self.forms) or AS_RUN

    def other(
        self,
        *forms: str,
        name: str | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        planned: Mapping[str, int] | None = None,
    ) -> "Step":
        """The same step in further forms, of another name, or on another mesh. Each is one value, and traced once."""
        mesh, forms = mesh or self.mesh, [form for form in forms if not FORMS[form] or formed(self.c, form) != self.c]
        planned = self.planned if planned is None else planned
        c, planned = formed(self.c, *forms), {} if planned == dict(mesh.shape) else planned
        other = Step(c, self.model, mesh, self.trainer, name or self.name, (*self.forms, *forms), planned, self._known)
        return self._known[other._key]

    @property
    def _key(self) -> tuple:
        return self.name, self.forms, self.mesh, *self.planned.items()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what the model reads beside the tokens."""
        return inputs_of(self.model)

    def batch(self) -> Any:
        """Shapes of its batch, sharded over its mesh, which is in force."""
        t = self.c.training
        return batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(self.inputs))

    @functools.cached_property
    def _trace(self) -> tuple[jax.stages.Traced, list[list[ShapeSpec]], list[Rule]]:
        sizes = dict.fromkeys(AXES, 1) | dict(self.mesh.shape)
        mesh = dataclasses.replace(self.c.mesh, **{axis: sizes[axis] for axis in AXES})
        c, model, trainer = dataclasses.replace(self.c, mesh=mesh), self.model, self.trainer
        of_kernels = kernels_as_calls() if "kernels as calls" in self.forms else contextlib.nullcontext([])
        with tracing(self.mesh, self.planned or self.mesh.shape) as types, of_kernels as rules:
            start = jax.jit(lambda: trainer.init_state(jax.random.key(0), c, model))
            if self.name == "start":
                return start.trace(), types, rules
            state = jax.eval_shape(start)
            if self.name == "evaluation":
                return trainer.make_evaluation_step(c, model).trace(state.weights, self.batch()), types, rules
            reference = (shapes := weights_of(c)) and sharded(type(shapes), shapes)
            step = trainer.make_training_step(c, model)
            return step.trace(state, self.batch(), np.int32(0), reference), types, rules

    @property
    def traced(self) -> jax.stages.Traced:
        """The traced program, to be lowered."""
        return self._trace[0]

    @property
    def jaxpr(self) -> Any:
        """The program, with its source lines, a ClosedJaxpr."""
        return self.traced.jaxpr

    @property
    def types(self) -> list[list[ShapeSpec]]:
        """The types of the arguments of each of its shard_maps."""
        return self._trace[1]

    @property
    def rules(self) -> list[Rule]:
        """With kernels as calls, the Rule of each call of attention."""
        return self._trace[2]

    def lower(self) -> jax.stages.Lowered:
        """What XLA is given. On a mesh of devices it can be compiled, while that is in force."""
        with tracing(self.mesh, self.planned or self.mesh.shape):
            return self.traced.lower()

    @functools.cached_property
    def hash(self) -> str:
        """Hash of the program, as the text that XLA is given. Comments and names of values do not count."""
        return hashlib.sha256(self.lower().as_text().encode()).hexdigest()[:20]


def trace_step(
    c: Config,
    model: LanguageModel,
    mesh: Mesh | AbstractMesh | None = None,
    name: str = "training",
    form: str = AS_RUN,
    trainer: ModuleType | str = "train",
) -> Step:
    """The step of settings and their model on a mesh, the one in force by default. Step.other gives other forms of it.

    `name` is one of NAMES, `form` one of FORMS. `trainer` is the training program: a module like train.py, or its name.
    """
    mesh = mesh or jax.sharding.get_mesh()
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    trainer = importlib.import_module(trainer) if isinstance(trainer, str) else trainer
    step = Step(c, model, mesh, trainer, name)
    return step if form == AS_RUN else step.other(form)
