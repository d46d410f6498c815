"""What a model is: its settings, its weights, and the math of one layer. docs/models.md builds one.

A module of a model has two parts: `ModelConfig`, the dataclass of its settings, and `Model`, the class of the model.
The loop over layers, checkpointing, stages and caches are the trainer's.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

from modeling.rules import Places
from shardlib.shardtypes import Scope, bool_, dtype_name, i32, pytree_dataclass, typed, u32
from shardlib.values import devices_along

act = dtype_name("act")
"""The compute dtype: what `compute_scope` binds where a step is traced."""

COMPUTE_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
"""What `training.compute_dtype` may be, and the dtype."""


def compute_scope(name: str) -> Scope:
    """Context in which `act`, the compute dtype, is that of COMPUTE_DTYPES by this name."""
    return Scope(act=COMPUTE_DTYPES[name])


@pytree_dataclass
class Tokens:
    """What a model is given of each position, on each device."""

    ids: u32["B/r/d L"]
    """Tokens that are read: `bos_id` before each document, then the tokens before each target."""
    positions: i32["B/r/d L"]
    """Places in the document, counted from 0."""
    document: i32["B/r/d L"] | None = None
    """Number of the document in its sequence, not decreasing along L. None where each position has a text of its own:
    in decoding."""
    keys: Any = None
    """Random keys for dropout, one for each sequence, others at each step; None where nothing is random, as in
    evaluation and sampling. `layer` gets those of its layer."""
    shared: Any = None
    """What the model's `prepare` computed, once for all layers."""
    turn: int = dataclasses.field(default=0, metadata={"static": True})
    """Place of the layer in its period, in [0, Model.period)."""
    inputs: u32["B/r/d L inputs"] | None = None
    """What the dataset has of each token that is read, in the order of Model.inputs; 0 where that is `bos_id`. None for
    a model without such."""

    @property
    def places(self) -> Places:
        """What a Rule is told of each position."""
        index = jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None]
        return Places(index, self.positions, self.document)

    @classmethod
    @typed
    def before(
        cls,
        targets: u32["B/r/d L"],
        starts: bool_["B/r/d L"],
        bos_id: int,
        seeds: u32["B/r/d"] | None = None,
        document_mask: bool = True,
        inputs: u32["B/r/d L inputs"] | None = None,
    ) -> Self:
        """The token before each target, `bos_id` before the first of a document. Per-device code.

        Args:
            targets: tokens to predict.
            starts: whether a document begins with this target.
            bos_id: the token that stands before each document.
            seeds: a random number for each sequence; None: nothing is random.
            document_mask: whether documents begin where `starts` says; otherwise each sequence is one document.
            inputs: what the dataset has of each target.
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
        keys = None if seeds is None else jax.vmap(jax.random.key)(seeds)
        return cls(ids, positions, document, keys, inputs=inputs)

    def prepared(self, model: "LanguageModel") -> Self:
        """The same with what the model computes of it once for all layers, if anything."""
        prepared = model.prepare(self) if hasattr(model, "prepare") else self
        if not isinstance(prepared, Tokens):
            raise ValueError(f"prepare of {model.c.module} gives a {type(prepared).__name__}; it must give the Tokens.")
        return prepared

    def in_layer(self, index: jax.Array, turn: int) -> Self:
        """The same for the layer `index`, the one `turn` of its period, with random keys of its own."""
        of_layer = lambda key: jax.random.fold_in(key, index)
        keys = None if self.keys is None else jax.vmap(of_layer)(self.keys)
        return dataclasses.replace(self, keys=keys, turn=turn)


class LanguageModel(Protocol):
    """The parts of a model, per-device code but for the first two. `Model(c)` makes one from its ModelConfig.

    A model may have more. `prepare(tokens) -> Tokens` is called once ahead of the layers: what it adds as `shared`
    is computed once for all of them. `period`, an int, is the number of layers after which the pattern of layers
    repeats, if they are not all alike: `tokens.turn` then says which of them a layer is. `inputs`, names, are what it
    reads of a dataset beside the tokens (docs/flat-tokens.md): `tokens.inputs` has them.
    """

    c: Any
    """The ModelConfig."""
    Weights: type
    """The pytree_dataclass of the weights, with the stack of layers in its field `layers`."""
    table: Any
    """A Weights with a modeling.weights.Weight in the place of each array."""

    def embed(self, w: Any, tokens: Tokens) -> Any:
        """What enters the first layer: act['B/r/d L/t M']."""

    def layer(self, x: Any, w: Any, tokens: Tokens, attend: Callable, einsum: Callable) -> Any:
        """What leaves a layer, of the type of `x`.

        Args:
            x: act['B/r/d L/t M'], what enters it.
            w: weights of the layer.
            attend: (queries, keys, values, rule, *learned, sinks=None, drop=None) -> what each query reads. `rule` says
                who attends to whom (modeling/rules.py), with the weights `learned` if it uses some; sinks:
                f32['B/r/d K/t Q'], scores of keys without values; drop: dropout of the attention weights. What a
                position learns from others goes through it, or decoding has no cache.
            einsum: `shardops.einsum_unreduced`, or the same in FP8: for products with weights.
        """

    def logits(self, w: Any, x: Any) -> Any:
        """f32['B/r/d L V/t'] from what the last layer gives."""


def period_of(model: LanguageModel) -> int:
    """Layers after which the pattern of the model's layers repeats; 1 where all are alike."""
    return getattr(model, "period", 1)


def inputs_of(model: LanguageModel) -> tuple[str, ...]:
    """Names of what the model reads of a dataset beside the tokens; mostly none."""
    return tuple(getattr(model, "inputs", ()))


def blank_inputs(model: LanguageModel, zeros: jax.Array) -> jax.Array | None:
    """For a trace: inputs that are 0, of as many tokens as `zeros`[B, L] has; None for a model without such."""
    count = len(inputs_of(model))
    return jnp.repeat(jnp.uint32(zeros)[..., None], count, axis=-1) if count else None


SETTINGS = ("module", "vocab", "layers", "heads", "d_head", "bos_id", "sharded", "check")
"""What train.py and the tools ask of any ModelConfig."""

PARTS = {
    "embed": ("w", "tokens"),
    "layer": ("x", "w", "tokens", "attend", "einsum"),
    "logits": ("w", "x"),
}
"""The methods of a Model, and their arguments."""
OPTIONAL = {"prepare": ("tokens",)}
"""Those that a Model may have."""


def module_name(name: str) -> str:
    """The Python module that `model.module: name` means: one of models/, or else a module of that name."""
    return f"models.{name}" if "." not in name and importlib.util.find_spec(f"models.{name}") else name


def module_of(name: str) -> ModuleType:
    """The module of this name, with a model. Raises ValueError if there is none, or a part is missing."""
    python_name = module_name(name)
    try:
        module = importlib.import_module(python_name)
    except ModuleNotFoundError as error:
        if error.name != python_name:
            raise
        raise ValueError(
            f"model.module is {name!r}, and Python finds no module of that name; put {name}.py where you start, or its "
            "directory into PYTHONPATH."
        ) from None
    what = f"model.module is {name!r}, which"
    if missing := [part for part in ("ModelConfig", "Model") if not hasattr(module, part)]:
        raise ValueError(f"{what} has no {', '.join(missing)}; see docs/models.md.")
    if not dataclasses.is_dataclass(module.ModelConfig):
        raise ValueError(f"model.module is {name!r}, whose ModelConfig is no dataclass; see docs/models.md.")
    known = {*dir(module.ModelConfig), *(field.name for field in dataclasses.fields(module.ModelConfig))}
    if missing := [part for part in SETTINGS if part not in known]:
        raise ValueError(
            f"model.module is {name!r}, whose ModelConfig has no {', '.join(missing)}: a field or property each; see "
            "docs/models.md."
        )
    if missing := [part for part in ("Weights", *PARTS) if not hasattr(module.Model, part)]:
        raise ValueError(f"model.module is {name!r}, whose Model has no {', '.join(missing)}; see docs/models.md.")
    for part, arguments in (PARTS | OPTIONAL).items():
        if part in OPTIONAL and not hasattr(module.Model, part):
            continue
        try:
            signature = inspect.signature(getattr(module.Model, part))
            signature.bind("self", *arguments)
            names = [name for name in signature.parameters if name in arguments]
            if names != [name for name in arguments if name in names]:
                raise TypeError(f"its arguments are ({', '.join(names)})")
        except TypeError as error:
            raise ValueError(
                f"model.module is {name!r}, whose Model.{part} does not take ({', '.join(arguments)}): {error}; see "
                "docs/models.md."
            ) from None
    return module


def load_model(c: Any) -> LanguageModel:
    """The model of this ModelConfig. Raises ValueError if its module lacks a part, or its table is of another class."""
    what, kind = f"model.module is {c.module!r}, whose", module_of(c.module).Model
    try:
        model = kind(c)
    except TypeError as error:
        raise ValueError(f"{what} Model is not made from a ModelConfig alone: {error}; see docs/models.md.") from error
    if missing := [part for part in ("c", "table") if not hasattr(model, part)]:
        raise ValueError(f"{what} Model has no {', '.join(missing)}; see docs/models.md.")
    if model.c is not c:
        raise ValueError(f"{what} Model has another c than the ModelConfig it is made from; see docs/models.md.")
    inputs = getattr(model, "inputs", ())
    if not isinstance(inputs, tuple | list) or len({name for name in inputs if isinstance(name, str)}) != len(inputs):
        raise ValueError(
            f"{what} Model has inputs {inputs!r}; it must be a tuple of names, each once: ('language',); see "
            "docs/models.md."
        )
    if not (isinstance(kind.Weights, type) and dataclasses.is_dataclass(kind.Weights)):
        raise ValueError(f"{what} Weights is not a pytree_dataclass; see docs/models.md.")
    if not isinstance(model.table, model.Weights):
        raise ValueError(
            f"model.module is {c.module!r}, whose table is a {type(model.table).__name__}; it must be a "
            f"{model.Weights.__name__}, with a Weight in the place of each array; see docs/models.md."
        )
    if "layers" not in {field.name for field in dataclasses.fields(kind.Weights)}:
        raise ValueError(f"{what} Weights has no field `layers`, for the stack of layers; see docs/models.md.")
    for weight in jax.tree.leaves(model.table.layers):
        if hasattr(weight, "shape") and weight.shape[:1] != (c.layers,):
            raise ValueError(
                f"{what} table has a stack of shape {weight.shape} in `layers`; its first dim must be model.layers = "
                f"{c.layers}; see docs/models.md."
            )
    return model


def check_logits(model: LanguageModel, logits: Any) -> None:
    """Raises ValueError for logits of another number of token ids than model.vocab. Per-device code."""
    vocab = logits.shape[-1] * devices_along(("t",))
    if vocab != model.c.vocab:
        raise ValueError(
            f"model.module is {model.c.module!r}, whose logits are of {vocab} token ids; they must be of model.vocab = "
            f"{model.c.vocab}."
        )
