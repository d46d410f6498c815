"""Represents a program of a run, traced once: the input of verification, plans, statistics and
hashes.
"""

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from shardlib.planned import Choices, planned_for
from shardlib.shardtypes import Of, f32, pytree_dataclass, typed_shard_map, u32
from shardlib.tracing import tracing
from shardwright.axes import AXES, axes_of_mesh
from shardwright.cluster.devices import explicit_mesh
from shardwright.data.loader import TokenBatch, batch_shapes, widths_of
from shardwright.modeling.attention import expect_einsum
from shardwright.modeling.attention_calls import Call, calls_of
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import LanguageModel, act, compute_scope, inputs_of, load_model
from shardwright.modeling.weights import shapes_of
from shardwright.optimizers.rates import inputs_of_loss
from shardwright.program.changes import config_at, firsts
from shardwright.program.config import Config, check_divides
from shardwright.program.spec import StepSpec, load_spec

NAMES = "training", "evaluation", "start"
"""Programs of a run: make_training_step, make_evaluation_step and init_state of train.py."""
EINSUM_ATTENTION = {"training.attention": "einsum", "training.context": "gather"}
"""Edits for attention by train.softmax_attention over all keys, which applies an AttentionMask to
all pairs."""


def with_settings(c: Config, edits: Mapping[str, Any]) -> Config:
    """Returns the configuration with other values of settings, by name, such as
    `training.attention`.
    """
    for name, value in edits.items():
        section, _, field = name.partition(".")
        c = dataclasses.replace(
            c, **{section: dataclasses.replace(getattr(c, section), **{field: value})}
        )
    return c


@pytree_dataclass
class Numbers:
    """Settings that the training step takes as arguments, so that it is the same for any values.

    JAX reads the lowest 32 bits of training.seed.
    """

    learning_rate: f32[""]
    weight_decay: f32[""]
    seed: u32[""]


def numbers_of(c: Config) -> Numbers:
    """Returns the numbers of a run, as arguments of its training step."""
    o = c.optimizer
    rate: Any = np.float32(o.learning_rate)
    decay: Any = np.float32(o.weight_decay)
    seed: Any = np.uint32(c.training.seed % 2**32)
    return Numbers(rate, decay, seed)


def with_numbers(c: Config, numbers: Numbers | None) -> Config:
    """Returns the configuration with other numbers; None: with its own."""
    names = {
        "optimizer.learning_rate": "learning_rate",
        "optimizer.weight_decay": "weight_decay",
        "training.seed": "seed",
    }
    return with_settings(c, {k: getattr(numbers, v) for k, v in names.items() if numbers})


class _Hidden:
    """In place of settings in which runs that share a program differ: none computes with it."""

    def __truediv__(self, factor: float) -> "_Hidden":
        return self  # a weight decay by the factor on a rate

    def _refuse(self, *_: object) -> Any:
        raise TypeError("the step takes this setting as an argument, or does not depend on it")

    __bool__ = __eq__ = __hash__ = __str__ = _refuse


_HIDDEN: Any = _Hidden()


def shared(c: Config) -> Config:
    """Returns what runs that may share a program have in common. The rest is hidden."""
    c = with_numbers(c, Numbers(_HIDDEN, _HIDDEN, _HIDDEN))
    return dataclasses.replace(with_settings(c, {"data.seed": _HIDDEN}), paths=_HIDDEN)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A program of a run on a mesh, traced once, on first use.

    Attributes:
        config: the settings.
        model: the model of config.model.
        mesh: the mesh to trace on, of devices or abstract.
        spec: the parts of the training program.
        name: one of NAMES, or "logits", the forward pass over texts.
        kernels_as_calls: True to trace attention kernels as opaque calls, which are not run. JAX
            traces cuDNN's only where cuDNN is installed, and plans need the share of pairs that a
            kernel computes, which the code of blockwise and of ring attention does not state.
        plain_sums: True to trace sums of rows by id as a scatter-add: on GPUs they are computed in
            a number of turns that depends on sizes.
        planned: axis sizes of the mesh for which it chooses fast implementations; empty: those of
            `mesh`.
        like: a step at other sizes, whose choices by size it repeats; None: its programs choose for
            their own sizes.
    """

    config: Config
    model: LanguageModel
    mesh: Mesh | Any
    spec: StepSpec
    name: str = "training"
    kernels_as_calls: bool = False
    plain_sums: bool = False
    planned: Mapping[str, int] = dataclasses.field(default_factory=dict)
    like: "Step | None" = None
    _known: dict = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._known.setdefault(self._key, self)

    def other(
        self,
        edits: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        mesh: Mesh | Any = None,
        planned: Mapping[str, int] | None = None,
        plain_sums: bool = False,
    ) -> "Step":
        """Returns the step with another name, on another mesh, or with other settings.

        Each variant is traced once.

        `edits` are of the sections `training` and `pipeline`, as in `with_settings`. None: as it
        is.
        """
        c = with_settings(self.config, edits or {})
        mesh = mesh or self.mesh
        planned = self.planned if planned is None else planned
        planned = {} if planned == dict(mesh.shape) else planned
        plain_sums |= self.plain_sums
        is_of_size = (mesh, c, planned, plain_sums) == (
            self.mesh,
            self.config,
            self.planned,
            self.plain_sums,
        )
        changes = {
            "plain_sums": plain_sums,
            "planned": planned,
            "like": self.like if is_of_size else None,
        }
        other = dataclasses.replace(self, config=c, mesh=mesh, name=name or self.name, **changes)
        return self._known[other._key]

    def of_run(self, c: Config) -> "Step":
        """Returns the step of another run, with all programs of this one.

        Its configuration `c` must differ from that of this step only in what `shared` hides.
        """
        known: dict = {}
        for step in self._known.values():
            own = with_settings(step.config, {"training.seed": c.training.seed})
            sections = {"optimizer": c.optimizer, "data": c.data, "paths": c.paths}
            other = dataclasses.replace(
                step, config=dataclasses.replace(own, **sections), _known=known
            )
            vars(other).update({k: x for k, x in vars(step).items() if k not in vars(other)})
        return known[dataclasses.replace(self, config=c, _known=known)._key]

    @property
    def _key(self) -> tuple:
        settings = repr((self.config.training, self.config.pipeline))
        return (
            self.name,
            settings,
            self.mesh,
            self.kernels_as_calls,
            self.plain_sums,
            *self.planned.items(),
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """Names and types of the model's inputs other than tokens."""
        return inputs_of(self.model)

    @property
    def size(self) -> tuple[int, int]:
        """Sequences per microbatch, and positions per sequence."""
        return (
            self.config.training.batch_size // self.config.training.microbatches,
            self.config.training.seq_len,
        )

    @property
    def forward(self) -> Forward:
        """The forward pass of its model."""
        return Forward(
            self.model, self.config.training, self.spec.attention, self.name == "training"
        )

    @functools.cached_property
    def calls(self) -> list[Call]:
        """The attention calls in one period of its layers, after which their pattern repeats."""
        with tracing(self.mesh):
            return calls_of(self.forward, self.size[1], self.size[0])

    def batch(self) -> Any:
        """Returns the shapes of its batch. Its mesh must be the current one."""
        t = self.config.training
        of_loss = inputs_of_loss(self.config.optimizer) if self.forward.in_training else ()
        counts = (sum(widths_of(inputs).values()) for inputs in (self.inputs, of_loss))
        return batch_shapes(t.batch_size, t.seq_len, t.microbatches, *counts)

    @property
    def state(self) -> Any:
        """Shapes of the state that the program `start` makes."""
        return self.other(name="start").traced.out_info

    @functools.cached_property
    def choices(self) -> Choices:
        """Choices by size that the traced program makes: those of `like`, which is traced first."""
        like = self.like and self.like.other(name=self.name)
        return Choices(like.choices if like and like.traced else None)

    @property
    def traced(self) -> jax.stages.Traced:
        """The traced program, to be lowered."""
        return self._traced[0]

    @property
    def is_shared(self) -> bool:
        """True if all runs with the same `shared` settings have this program."""
        return self._traced[1]

    @functools.cached_property
    def _traced(self) -> tuple[jax.stages.Traced, bool]:
        sizes = dict.fromkeys(AXES, 1) | dict(self.mesh.shape)
        mesh = dataclasses.replace(self.config.mesh, **{axis: sizes[axis] for axis in AXES})
        c = dataclasses.replace(self.config, mesh=mesh)
        schedule = schedule_step(c)
        try:
            return self._trace(shared(c), *(schedule or (None,)), numbers_of(c)), True
        except Exception:  # a part computes with hidden settings, or is wrong, which is said here
            vars(self).pop("choices", None)
            return self._trace(c, *schedule), False

    def _trace(self, c: Config, *more: Any) -> jax.stages.Traced:
        model = self.model
        spec = self.spec
        state: Any = self.state if self.name in ("training", "evaluation") else None
        kinds = {"kernels_as_calls": self.kernels_as_calls, "plain_sums": self.plain_sums}
        with (
            tracing(self.mesh, self.planned or self.mesh.shape),
            planned_for(**kinds, choices=self.choices),
            expect_einsum(spec.attention),
        ):
            if self.name == "logits":
                return _trace_logits(self)
            if self.name == "start":
                start = jax.jit(functools.partial(spec.init_state, config=c, model=model))
                return start.trace(jax.eval_shape(jax.random.key, 0))
            if self.name == "evaluation":
                return spec.make_evaluation_step(c, model).trace(state.weights, self.batch())
            step = spec.make_training_step(c, model)
            if schedule_step(c) and "schedule_step" not in inspect.signature(step).parameters:
                raise ValueError(
                    f"training.minutes is {c.training.minutes}, and the training step of "
                    f"{spec.module} takes no schedule_step: add this last argument, and pass it to "
                    f"learning_rate as the released train.py does, or give the length in steps."
                )
            return step.trace(state, self.batch(), np.int32(0), *more)

    def arguments(self, elapsed: Any = 0.0) -> tuple:
        """Returns the arguments of the training step after its number.

        `elapsed` is the share of training.minutes that has passed.
        """
        schedule = schedule_step(self.config, elapsed)
        return (*(schedule or (None,)), numbers_of(self.config)) if self.is_shared else schedule

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The program as a ClosedJaxpr, with source lines."""
        return self.traced.jaxpr

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The lowered program.

        On a mesh of devices, it can be compiled while that mesh is the current one.
        """
        with tracing(self.mesh, self.planned or self.mesh.shape):
            return self.traced.lower()

    @functools.cached_property
    def hash(self) -> str:
        """Hash of the lowered text, which does not depend on comments and names of values, nor on
        Numbers.
        """
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()[:20]

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """What was made of its program, and found out about it, once for all runs that share it."""
        return {}

    def compile(self, compiler_options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        """Compiles the program for the current mesh, unless a run that shares it did."""
        key = f"compiled with {compiler_options}"
        if key not in self.kept:
            self.kept[key] = self.lowered.compile(compiler_options=compiler_options)
        return self.kept[key]


def schedule_step(c: Config, elapsed: Any = 0.0) -> tuple:
    """Returns a tuple of the position in optimizer.schedule, last argument of a training step with
    training.minutes.

    `elapsed` is the share of these minutes that has passed, of which optimizer.schedule_steps
    stands for the whole. () without these settings: then the schedule goes by steps.
    """
    steps = c.optimizer.schedule_steps
    return () if c.training.minutes is None or steps is None else (elapsed * np.float32(steps),)


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


def trace_step(
    c: Config,
    model: LanguageModel,
    mesh: Mesh | AbstractMesh | None = None,
    name: str = "training",
    spec: StepSpec | None = None,
    kernels_as_calls: bool = False,
) -> Step:
    """Makes the Step of these settings on a mesh, by default the current one.

    Step.other makes variants of it.

    `name` and `kernels_as_calls` are as in Step. `spec` has the parts of the training program;
    None: that of `load_spec`. A `model` of other settings, which training.changes changed, is made
    again.
    """
    model = model if model.config == c.model else load_model(c.model)
    mesh = mesh or jax.sharding.get_mesh()
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    return Step(c, model, mesh, spec or load_spec(), name, kernels_as_calls)


def open_steps(
    c: Config, sizes: Mapping[str, int], device: AbstractDevice | None = None
) -> list[Step]:
    """Makes a Step for each phase of training.changes, to be traced on an abstract mesh, without
    devices.

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
