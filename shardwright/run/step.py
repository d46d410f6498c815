"""Represents a program of a run, traced once: the input of verification, plans, statistics and hashes."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from shardlib.axes import AXES, axes_of_mesh
from shardlib.findings import AS_RUN
from shardlib.parsing import ShapeSpec
from shardlib.shardtypes import Of, typed_shard_map, u32
from shardlib.tracing import tracing
from shardlib.values import Choices, planned_for
from shardwright.cluster.devices import explicit_mesh
from shardwright.data.loader import TokenBatch, batch_shapes
from shardwright.modeling.attention import expect_einsum
from shardwright.modeling.attention_calls import Call, calls_of
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import LanguageModel, act, compute_scope, inputs_of, load_model
from shardwright.modeling.weights import shapes_of, sharded
from shardwright.optimizers.rates import Clock, inputs_of_loss
from shardwright.run.changes import config_at, firsts
from shardwright.run.config import Config, PipelineConfig, check_divides
from shardwright.run.reference import weights_of
from shardwright.run.spec import StepSpec, load_spec

NAMES = "training", "evaluation", "start"
"""Programs of a run: make_training_step, make_evaluation_step and init_state of train.py."""
LOSSES = "training loss", "evaluation loss"
"""Names of the parts of these programs that compute the loss of a microbatch."""
_PLAIN = {"microbatches": 2, "gather_weights": "layer", "attention": "einsum", "save": "marked", "unroll": 1}
_PLAIN |= {"loss_chunk": None, "minutes": None}
_PLAIN = {f"training.{name}": value for name, value in _PLAIN.items()} | {"pipeline": PipelineConfig()}
FORMS: dict[str, Mapping[str, Any]] = {
    # Attention by train.softmax_attention over all keys, which applies an AttentionMask to all pairs of positions.
    "einsum attention": {"training.attention": "einsum", "training.context": "gather"},
    # Kernels of attention cannot be looked into: they are run as what they stand for.
    "kernels by reference": {"training.attention": "blockwise"},
    # Sums of rows by id as a scatter-add: on GPUs they are computed in a number of turns that depends on sizes.
    "plain sums": {},
    # Each device chooses the scales of its own blocks, so the rounding depends on the mesh.
    "without FP8": {"training.fp8": False},
    # The loss of all positions at once.
    "one chunk": {"training.loss_chunk": None},
    # Always masks documents, because each text is a document.
    "document mask": {"training.document_mask": True},
    # The attention for these devices, without FP8, whose scales make a text depend on the others in its batch.
    "for texts": {"training.attention": "auto", "training.fp8": False},
    # Attention kernels as opaque calls, which are not run. JAX traces cuDNN's only where cuDNN is installed, and plans
    # need the share of pairs that a kernel computes, which the code of blockwise and of ring attention does not state.
    "kernels as calls": {},
    # Without settings that may change when a run resumes: two microbatches, of one sequence or of two.
    "plain": {**_PLAIN, "training.batch_size": 2},
    "plain, of pairs": {**_PLAIN, "training.batch_size": 4},
}
"""Variants of a step, by name, as edits of its settings. Besides these, `Step.other` takes other sizes of a microbatch,
and LOSSES are traced with one microbatch."""


def with_forms(c: Config, *forms: str) -> Config:
    """Applies the edits of these forms to the settings of a step."""
    for name, value in (edit for form in forms for edit in FORMS[form].items()):
        section, _, field = name.partition(".")
        value = value(c) if callable(value) else value
        value = dataclasses.replace(getattr(c, section), **{field: value}) if field else value
        c = dataclasses.replace(c, **{section: value})
    return c


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A program of a run on a mesh, traced once, on first use.

    Attributes:
        config: the settings, with the edits of `forms`.
        model: the model of config.model.
        mesh: the mesh to trace on, of devices or abstract.
        spec: the parts of the training program.
        name: one of NAMES or LOSSES, or "logits", the forward pass over texts.
        forms: keys of FORMS that are applied, and `<rows> × <length> tokens` if the size of a
            microbatch is not the run's; empty: as the run executes it.
        planned: axis sizes of the mesh for which it chooses fast implementations; empty: those of `mesh`.
        like: a step at other sizes, whose choices by size it repeats; None: its programs choose for their own sizes.
    """

    config: Config
    model: LanguageModel
    mesh: Mesh | Any
    spec: StepSpec
    name: str = "training"
    forms: tuple[str, ...] = ()
    planned: Mapping[str, int] = dataclasses.field(default_factory=dict)
    like: "Step | None" = None
    _known: dict = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._known.setdefault(self._key, self)

    @property
    def form(self) -> str:
        """Name of this variant, for messages."""
        return ", ".join(self.forms) or AS_RUN

    def other(
        self,
        *forms: str,
        name: str | None = None,
        mesh: Mesh | Any = None,
        planned: Mapping[str, int] | None = None,
        size: tuple[int, int] | None = None,
    ) -> "Step":
        """Returns the step in further forms, with another name, or on another mesh. Each variant is traced once.

        `size` is the number of sequences per microbatch and their length; the number of loss chunks stays the same.
        """
        mesh = mesh or self.mesh
        forms = tuple(x for x in forms if not FORMS[x] or with_forms(self.config, x) != self.config)
        planned = self.planned if planned is None else planned
        c = with_forms(self.config, *forms)
        planned = {} if planned == dict(mesh.shape) else planned
        if size and size != self.size:
            rows, length = size
            t = c.training
            chunk = t.loss_chunk and t.loss_chunk * length // t.seq_len
            t = dataclasses.replace(t, batch_size=rows * t.microbatches, seq_len=length, loss_chunk=chunk)
            c = dataclasses.replace(c, training=t)
            forms = (*forms, f"{rows} × {length} tokens")
        is_of_size = mesh == self.mesh and not forms and planned == self.planned
        like = self.like if is_of_size else None
        name = name or self.name
        other = Step(c, self.model, mesh, self.spec, name, (*self.forms, *forms), planned, like, self._known)
        return self._known[other._key]

    @property
    def _key(self) -> tuple:
        return self.name, self.forms, self.mesh, *self.planned.items()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs other than tokens."""
        return inputs_of(self.model)

    @property
    def size(self) -> tuple[int, int]:
        """Sequences per microbatch, and positions per sequence."""
        return self.config.training.batch_size // self.config.training.microbatches, self.config.training.seq_len

    @property
    def forward(self) -> Forward:
        """The forward pass of its model."""
        in_training = self.name in ("training", "training loss")
        return Forward(self.model, self.config.training, self.spec.attention, in_training)

    @functools.cached_property
    def calls(self) -> list[Call]:
        """The attention calls in one period of its layers, after which their pattern repeats."""
        with tracing(self.mesh):
            return calls_of(self.forward, self.size[1], self.size[0])

    def batch(self, c: Config | None = None) -> Any:
        """Returns the shapes of its batch, with the settings `c` if given. Its mesh must be the current one."""
        t = (c or self.config).training
        of_loss = inputs_of_loss(self.config.optimizer) if self.forward.in_training else ()
        return batch_shapes(t.batch_size, t.seq_len, t.microbatches, len(self.inputs), len(of_loss))

    @property
    def state(self) -> Any:
        """Shapes of the state that the program `start` makes."""
        return self.other(name="start").traced.out_info

    @functools.cached_property
    def choices(self) -> Choices:
        """Choices by size that the traced program makes."""
        return Choices(self.like.other(name=self.name).made if self.like else None)

    @property
    def made(self) -> Choices:
        """Choices by size that the traced program made."""
        assert self.traced
        return self.choices

    @functools.cached_property
    def _trace(self) -> tuple[jax.stages.Traced, list[list[ShapeSpec]]]:
        sizes = dict.fromkeys(AXES, 1) | dict(self.mesh.shape)
        mesh = dataclasses.replace(self.config.mesh, **{axis: sizes[axis] for axis in AXES})
        c = dataclasses.replace(self.config, mesh=mesh)
        model = self.model
        spec = self.spec
        name = self.name.removesuffix(" loss")
        c = _of_microbatch(c) if self.name in LOSSES else c
        as_calls, plain_sums = (form in self.forms for form in ("kernels as calls", "plain sums"))
        state: Any = self.state if name in ("training", "evaluation") else None
        traced = tracing(self.mesh, self.planned or self.mesh.shape)
        with (
            traced as types,
            planned_for(kernels_as_calls=as_calls, plain_sums=plain_sums, choices=self.choices),
            expect_einsum(spec.attention),
        ):
            if name == "logits":
                return _trace_logits(self), types
            if name == "start":
                start = jax.jit(functools.partial(spec.init_state, config=c, model=model))
                return start.trace(jax.eval_shape(jax.random.key, 0)), types
            if name == "evaluation":
                return spec.make_evaluation_step(c, model).trace(state.weights, self.batch(c)), types
            reference = [sharded(type(shapes), shapes) for shapes in weights_of(c, spec)]
            step = spec.make_training_step(c, model)
            return step.trace(state, self.batch(c), np.int32(0), *reference, *clock_of(c, spec)), types

    @property
    def traced(self) -> jax.stages.Traced:
        """The traced program, to be lowered."""
        return self._trace[0]

    @property
    def jaxpr(self) -> Any:
        """The program as a ClosedJaxpr, with source lines."""
        return self._loss if self.name in LOSSES else self.traced.jaxpr

    @functools.cached_property
    def _loss(self) -> ClosedJaxpr:
        """The equations of the traced program on which its loss depends."""
        info = self.traced.out_info
        loss = info[1].loss if self.name == "training loss" else info[0]
        program = self.traced.jaxpr
        used = [x is loss for x in jax.tree.leaves(info)]
        with tracing(self.mesh, self.planned or self.mesh.shape):
            return ClosedJaxpr(dce_jaxpr(program.jaxpr, used, instantiate=True)[0], program.consts)

    @property
    def types(self) -> list[list[ShapeSpec]]:
        """Types of the arguments of each of its shard_maps."""
        return self._trace[1]

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program. On a mesh of devices, it can be compiled while that mesh is the current one."""
        with tracing(self.mesh, self.planned or self.mesh.shape):
            return self.traced.lower()

    @functools.cached_property
    def hash(self) -> str:
        """Hash of the lowered text, which does not depend on comments and names of values."""
        return hashlib.sha256(self.lower().as_text().encode()).hexdigest()[:20]


def clock_of(c: Config, spec: StepSpec, elapsed: float = 0.0) -> tuple[Clock, ...]:
    """Returns a tuple of the Clock, last argument of a training step with training.minutes; () without this setting.

    `elapsed` is the share of these minutes that has passed. Raises ValueError if the step of `spec` takes no clock.
    """
    if c.training.minutes is None:
        return ()
    if not spec.takes_clock:
        raise ValueError(
            f"training.minutes is {c.training.minutes}, and the training step of {spec.module} takes no clock: give it "
            "one as the released train.py does (its last argument, which learning_rate gets, and takes_clock=True in "
            "SPEC), or give the length in steps."
        )
    return (Clock(np.float32(elapsed)),)


def _trace_logits(step: Step) -> jax.stages.Traced:
    """Traces the forward pass: a function of weights and a microbatch."""
    forward, model = step.forward, step.model
    Microbatch = tuple[TokenBatch, u32["B/b"] | None]

    @typed_shard_map
    def logits(w: Of[model.Weights], microbatch: Of[Microbatch]) -> act["B/b L V/t/p"]:
        return forward.logits(forward.gatherable(w), forward.tokens(*microbatch))

    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step.batch())
    with compute_scope(step.config.training.compute_dtype):
        return jax.jit(logits).trace(shapes_of(model.table), (batch, None))


def _of_microbatch(c: Config) -> Config:
    """Returns the settings with one microbatch."""
    t = c.training
    t = dataclasses.replace(t, batch_size=t.batch_size // t.microbatches, microbatches=1)
    return dataclasses.replace(c, training=t)


def trace_step(
    c: Config,
    model: LanguageModel,
    mesh: Mesh | AbstractMesh | None = None,
    name: str = "training",
    form: str = AS_RUN,
    spec: StepSpec | None = None,
) -> Step:
    """Makes the Step of these settings on a mesh, by default the current one. Step.other makes variants of it.

    `name` is one of NAMES, `form` is AS_RUN or one of FORMS. `spec` has the parts of the training
    program; None: that of `load_spec`.
    """
    mesh = mesh or jax.sharding.get_mesh()
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    step = Step(c, model, mesh, spec or load_spec(), name)
    return step if form == AS_RUN else step.other(form)


def open_steps(c: Config, sizes: Mapping[str, int], device: AbstractDevice | None = None) -> list[Step]:
    """Makes a Step for each phase of training.changes, to be traced on an abstract mesh, without devices.

    Args:
        c: the configuration. Its section `mesh` is ignored.
        sizes: number of devices along each axis of the mesh.
        device: their kind; None: any.

    Raises:
        ValueError: the mesh does not divide the sizes of the model or batch.
    """
    check_divides(c, sizes)
    mesh = explicit_mesh(axes_of_mesh(sizes), device=device)
    with tracing(mesh):
        model = load_model(c.model)
    return [trace_step(config_at(c, first), model, mesh) for first in firsts(c)]
