"""Interface of a model: its settings, its weights, and the math of one layer. docs/models.md builds
a model.

A model's module has two parts: `ModelConfig`, the dataclass of its settings, and `Model`, the class
of the model. The trainer handles the loop over layers, checkpointing, stages and caches.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib import shardops
from shardlib.array_types import arrays_in
from shardlib.mesh import devices_along, mesh_axes
from shardlib.parsing import did_you_mean
from shardlib.shardtypes import ArrayType, Scope, bool_, f32, i32, pytree_dataclass, typed, u32
from shardwright.data.loader import is_input, widths_of
from shardwright.modeling.masks import Positions
from shardwright.modeling.state import types_of
from shardwright.modeling.training import training_module
from shardwright.modeling.weights import WeightType, act, stacks_before_layers
from shardwright.settings.program import has_package

COMPUTE_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
"""The dtype for each value of `training.compute_dtype`."""
LOGITS = "logits of the model"
"""Name of the logits in a step's loss (jax.ad_checkpoint.checkpoint_name)."""
HIDDEN = "hidden targets"
"""Name of what the model's method `hidden` returns in a step's loss."""


@contextlib.contextmanager
def compute_scope(name: str) -> Iterator[None]:
    """Context, or decorator of a function, in which `act`, the compute dtype, is
    COMPUTE_DTYPES[name].
    """
    with Scope(act=COMPUTE_DTYPES[name]):
        yield


@pytree_dataclass
class Tokens:
    """The tokens that a model reads, on each device."""

    ids: u32["B/b L/c"]
    """Token ids: `bos_id` before the first target of a document, elsewhere the target before."""
    positions: i32["B/b L/c"]
    """Positions in the document, counted from 0."""
    document: i32["B/b L/c"] | None = None
    """Index of the document in its sequence, not decreasing along L. None in decoding, where each
    position belongs to a different text."""
    keys: Any = None
    """Random keys for dropout, one per sequence, which differ at each step and in each layer. None
    if nothing is random, as in evaluation and sampling."""
    shared: Any = None
    """Result of the model's `prepare`, computed once for all layers."""
    layer: Any = None
    """Index of the layer in the model, from 0: a traced scalar. None outside the layers."""
    index_in_period: int = dataclasses.field(default=0, metadata={"static": True})
    """Index of the layer in its period, in [0, Model.period)."""
    inputs: u32["B/b L/c inputs"] | None = None
    """Further values of each token in the dataset, in the order of Model.inputs, by `input`; 0
    where the id is the `bos_id` before a document. None if the model reads none."""
    declared: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    """Names and types of `inputs`: the attribute `inputs` of the model."""
    whole: bool = dataclasses.field(default=False, metadata={"static": True})
    """True if each sequence is one document, without a document mask."""
    training: bool = dataclasses.field(default=False, metadata={"static": True})
    """True in a training step, where experts may drop tokens."""
    counted: bool_["B/b L/c"] | None = None
    """True where the target after a token counts in the loss; padding does not. None: all count."""
    target_count: f32[""] | None = None
    """Number of targets that count in a microbatch, averaged over the step. A loss or metric of a
    layer divides its sum by it. None: all targets of this microbatch."""

    def input(self, name: str) -> jax.Array:
        """The input `name` of each token, [B/b L/c], or [B/b L/c k] if it has k values, of the
        dtype that the model declares.
        """
        remedy = f'Declare it: Model.inputs = {{"{name}": f32["6"]}}.'
        return _input(self, name, "the model", remedy)

    @property
    def row_positions(self) -> jax.Array:
        """`positions`, or int32[1, L] without a document mask, where they are the same in all
        sequences.
        """
        return self.mask_positions.index if self.whole else self.positions

    @property
    def mask_positions(self) -> Positions:
        """The positions that an AttentionMask takes."""
        length = self.positions.shape[1]
        first = shardops.axis_index("c") * length if "c" in mesh_axes() else 0
        index = first + jnp.arange(length, dtype=jnp.int32)
        return Positions(index[None], self.positions, self.document)

    @classmethod
    @typed
    def before(
        cls,
        targets: u32["B/b L"],
        starts: bool_["B/b L"],
        bos_id: int,
        seeds: u32["B/b"] | None = None,
        document_mask: bool = True,
        inputs: u32["B/b L inputs"] | None = None,
    ) -> Self:
        """Tokens that precede each target, with `bos_id` before the first one of a document.

        Per-device code.

        Whole sequences are computed, of which each device of c keeps its own positions.

        Args:
            targets: tokens to predict.
            starts: True where a document begins with this target.
            bos_id: the token before each document.
            seeds: a random number for each sequence; None: nothing is random.
            document_mask: True if documents begin where `starts` says; otherwise each sequence is
                one document.
            inputs: further values of each target in the dataset.
        """
        place = jnp.arange(targets.shape[1], dtype=jnp.int32)
        if not document_mask:
            starts = jnp.zeros_like(starts).at[:, 0].set(True)
        before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=bos_id)
        ids = jnp.where(starts, jnp.uint32(bos_id), before)
        document = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
        positions = place - lax.cummax(jnp.where(starts, place, 0), axis=1)
        if inputs is not None:
            inputs = jnp.pad(inputs[:, :-1], ((0, 0), (1, 0), (0, 0)))
            inputs = jnp.where(starts[..., None], jnp.uint32(0), inputs)
            inputs = shardops.shard("B/b L inputs -> B/b L/c inputs", inputs)
        keys = None if seeds is None else jax.vmap(jax.random.key)(seeds)
        own = functools.partial(shardops.shard, "B/b L -> B/b L/c")
        return cls(
            own(ids), own(positions), own(document), keys, inputs=inputs, whole=not document_mask
        )

    def prepared(self, model: "LanguageModel") -> Self:
        """Applies the model's `prepare` to the tokens, if it has one."""
        return getattr(model, "prepare", lambda tokens: tokens)(self)

    def in_layer(self, index: jax.Array, index_in_period: int) -> Self:
        """The tokens in layer `index`, at `index_in_period` in its period, with the layer's own
        random keys.
        """

        def of_layer(key):
            return jax.random.fold_in(key, index)

        keys = None if self.keys is None else jax.vmap(of_layer)(self.keys)
        return dataclasses.replace(self, keys=keys, layer=index, index_in_period=index_in_period)


@pytree_dataclass
class Targets:
    """What the losses of a microbatch are computed from, besides logits, on each device."""

    ids: u32["B/b L/c"]
    """Token ids to predict."""
    counted: f32["B/b L/c"]
    """Weight of each loss in the sum, at least 0: 1 where it counts, 0 in padding. Targets that a
    model adds may have a mask here, or other weights."""
    inputs: u32["B/b L/c inputs"] | None = None
    """Values of each target in the dataset that only the training loss reads, by `input`. None in
    validation."""
    target_count: f32[""] | None = None
    """Number of targets that count in a microbatch, averaged over the step: a loss that is no mean
    over targets multiplies by it. None in validation, and with training.loss_chunk, by which a loss
    sees a part of each sequence."""
    declared: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})
    """Names and types of `inputs`: the attribute `inputs` of the loss."""

    def input(self, name: str) -> jax.Array:
        """The input `name` of each target, as Tokens.input, of the dtype that the loss declares."""
        remedy = "Declare it after the loss of optimizer.loss=my_file:my_loss, my_loss.inputs = "
        return _input(self, name, "the loss", f'{remedy}{{"{name}": f32}}. Validation has none.')

    @classmethod
    def of(cls, batch: Any) -> Self:
        """The targets of a TokenBatch. Per-device code."""
        own = functools.partial(shardops.shard, "B/b L -> B/b L/c")
        inputs = batch.loss_inputs
        if inputs is not None:
            inputs = shardops.shard("B/b L inputs -> B/b L/c inputs", inputs)
        return cls(own(batch.targets), own(batch.loss_mask), inputs)


def _input(values: Tokens | Targets, name: str, reader: str, remedy: str) -> jax.Array:
    """The values of an input among those of all of them. Raises ValueError if there is none."""
    kinds = dict(values.declared)
    if values.inputs is None or name not in kinds:
        has = f"which has {', '.join(kinds) or 'none'}"
        raise ValueError(f"{name!r} is not an input of {reader}, {has}. {remedy}")
    sizes = widths_of(kinds)
    end = list(itertools.accumulate(sizes.values()))[list(kinds).index(name)]
    found = values.inputs[..., end - sizes[name] : end]
    if isinstance(kind := kinds[name], ArrayType):
        return lax.bitcast_convert_type(found, kind.jax_dtype)
    return lax.bitcast_convert_type(found[..., 0], kind.dtype)


class LanguageModel(Protocol):
    """The parts of a model. `Model(config)` creates one from its ModelConfig.

    The methods are per-device code.

    A model may have further parts. `prepare(tokens) -> Tokens` runs once before the layers, and may
    set `shared` for all of them. `period` is the number of layers after which their pattern
    repeats, 1 if all are alike; `tokens.index_in_period` is the index of a layer in its period.
    `inputs` declares further values of each token in the dataset (docs/formats.md): names, or a
    dict with their types, such as f32["6"], which `tokens.input(name)` returns. `hidden(x)`
    declares, from the output of the last layer, the targets that the model predicts without reading
    them: the weight of each in the loss, f32['B/b L/c'], and 0 for the others.
    `more_predictions(x, batch)` returns what else the training loss predicts, as pairs of what
    `logits` reads and Targets. `State` is the pytree_dataclass of what a layer keeps of each text
    while text is sampled, beside or instead of keys and values (modeling/state.py).
    """

    config: Any
    """The ModelConfig."""
    Weights: type
    """The pytree_dataclass of the weights, with the stack of layers in its field `layers`, and
    stacks that run before it in the fields before it."""
    table: Any
    """A Weights with a modeling.weights.Weight instead of each array."""

    def embed(self, w: object, tokens: Tokens) -> Any:
        """Residual stream before the first layer: act['B/b L/c/t M'], or a dataclass of typed
        arrays of floats.
        """

    def layer(self, x: object, w: object, tokens: Tokens, attention: Callable[..., Any]) -> Any:
        """Residual stream after a layer, of the type of `x`; or a tuple of it and a LayerAux.

        Use `shardops.matmul` for matmuls with weights; training.fp8 computes these in FP8.

        Args:
            x: residual stream before the layer.
            w: weights of the layer at rest; shardops.all_gather gathers each. Their class tells the
                stack.
            tokens: the tokens, with their positions in documents.
            attention: a modeling.attention.Attention: call attention(q, k, v, mask). Everything
                that a position learns from others must pass through it or through a declared state
                (`attention.recur`, `attention.expand`), or the model cannot be sampled.
        """

    def logits(self, w: object, x: object) -> Any:
        """Logits act['B/b L/c V/t/p'] from the residual stream after the last layer."""


def period_of(model: LanguageModel) -> int:
    """Number of layers after which the model's layer pattern repeats; 1 if all are alike."""
    return getattr(model, "period", 1)


def inputs_of(model: LanguageModel) -> dict[str, Any]:
    """Names and types of the further values of each token that the model reads from a dataset;
    usually none.
    """
    inputs = getattr(model, "inputs", ())
    return dict(inputs) if isinstance(inputs, Mapping) else dict.fromkeys(inputs, u32)


SETTINGS = ("module", "vocab", "layers", "heads", "d_head", "bos_id", "check")
"""Settings that train.py and the tools read from any ModelConfig."""
PARTS = ("Weights", "embed", "layer", "logits")
"""Parts that each Model has besides `config` and `table`."""
SHIPPED = ("gpt2", "moe", "family", "mla", "delta")
"""The modules of the package `shardwright.models`."""


def is_shipped(name: str) -> bool:
    """True if `model.module: name` names train.py or a model of SHIPPED, and not a module of the
    user's own.
    """
    return name == "train" or _module_name(name) != name


def _module_name(name: str) -> str:
    """Name by which Python imports a model: the user's own module, or one of SHIPPED."""
    if name == "train":
        return training_module()
    return f"shardwright.models.{name}" if name in SHIPPED and not has_package(name) else name


def module_of(name: str) -> ModuleType:
    """The module of a model. Raises ValueError if it does not exist or lacks a part."""
    try:
        module = importlib.import_module(_module_name(name))
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a module that it imports is missing
            raise
        name_only = name.removesuffix(".py")
        near = (
            did_you_mean(name, ("train", *SHIPPED))
            if name_only == name
            else f" Did you mean {name_only}?"
        )
        raise ValueError(
            f"model.module is {name!r}, and Python finds no module of that name; put "
            f"{name_only}.py where you start, or add its directory to PYTHONPATH.{near}"
        ) from None

    for kind, parts in {"ModelConfig": SETTINGS, "Model": PARTS}.items():
        found = getattr(module, kind, None)
        known = [*dir(found), *getattr(found, "__dataclass_fields__", ())]
        if lacks := [f"{kind}.{part}" for part in parts if part not in known]:
            raise _refusal(name, f"which has no {', '.join(lacks)}")
    return module


def _refusal(name: str, problem: str) -> ValueError:
    return ValueError(
        f"model.module is {name!r}, {problem}; see docs/models.md for what a module must have."
    )


def load_model(c: Any) -> LanguageModel:
    """Creates the model of a ModelConfig.

    Raises ValueError if its module lacks a part or its table is not Weights.
    """
    kind = module_of(c.module).Model
    model = kind(c)
    inputs = getattr(model, "inputs", ())
    are_types = all(map(is_input, inputs.values() if isinstance(inputs, dict) else ()))
    if not isinstance(inputs, tuple | list | dict) or not are_types:
        wanted = """a tuple of names: ('kind',), or a dict of types: {"pose": f32["6"]}"""
        raise _refusal(c.module, f"whose Model has inputs {inputs!r}; it must be {wanted}")
    if not isinstance(table := getattr(model, "table", None), kind.Weights):
        raise _refusal(
            c.module,
            f"whose table is a {type(table).__name__}; it must be a {kind.Weights.__name__}",
        )
    if getattr(model, "config", None) is not c:
        raise _refusal(
            c.module,
            "whose Model does not keep its ModelConfig: set self.config = config in __init__",
        )
    arrays: Any = arrays_in(type(table), table)
    for path, t, _ in arrays:
        if not isinstance(t, WeightType):
            problem = f"whose weight {path} has the type {t!r}"
            raise _refusal(
                c.module, f"{problem}; declare it by matrix, gain, bias, embedding or unembedding"
            )
    types_of(model)  # raises for a State that cannot be kept
    for path, t, _ in itertools.takewhile(lambda found: not found[0].startswith("layers."), arrays):
        if len(t.spec.dims) > len(t.ahead.dims) and not t.on_all_stages:
            name = path.partition(".")[0]
            raise _refusal(
                c.module,
                f"whose weights `{name}` are a stack that is not run; write Array['{name} *p', …] "
                f"for layers before `layers`, or declare it after `layers`",
            )
    for name, stack in {**stacks_before_layers(model.table), "layers": model.table.layers}.items():
        shapes = [weight.shape for weight in jax.tree.leaves(stack) if hasattr(weight, "shape")]
        count = (c.layers,) if name == "layers" else shapes[0][:1]
        if wrong := [shape for shape in shapes if shape[:1] != count]:
            stack = f"whose table has a stack of shape {wrong[0]} in `{name}`"
            wanted = (
                f"model.layers = {c.layers}"
                if name == "layers"
                else f"{count[0]}, as in its first weight"
            )
            raise _refusal(c.module, f"{stack}; its first dim must be {wanted}")
    return model


def checked_logits(model: LanguageModel, w: object, x: object) -> act["B/b L/c V/t/p"]:
    """Runs model.logits(w, x). Raises ValueError unless there are model.vocab token ids.

    Per-device code.
    """
    logits = checkpoint_name(model.logits(w, x), LOGITS)
    vocab = logits.shape[-1] * devices_along(("t", "p"))
    if vocab != model.config.vocab:
        raise ValueError(
            f"model.module is {model.config.module!r}, whose logits have {vocab} token ids; they "
            f"must have model.vocab = {model.config.vocab}, and be act['B/b L/c V/t/p'], sharded "
            f"over t and p."
        )
    return logits
