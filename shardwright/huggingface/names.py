"""Weights under the names of transformers, and its reading of config.json."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from shardwright.data.untrusted import COPY_AGAIN
from shardwright.program.checkpoint import named_leaves


@dataclasses.dataclass(frozen=True)
class Layers:
    """The names of the weights in layers of one kind."""

    names: Mapping[str, tuple[str, ...]]
    """Their name, with {} for the number of the layer, and once more for that of the expert; and
    ours, which stand side by side along its outputs."""
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Weights of all experts of a layer, in our layout: their name, and ours, whose entries
    alternate in it."""
    field: str = "layers"
    """Our stack of these layers, such as `dense`, or the part of its blocks, such as
    `layers.delta`."""
    first: int = 0
    """Number of the first of these layers in theirs."""
    every: int = 1
    """Number of their layers for one element of our stack."""
    in_block: bool = False
    """Whether such an element has several of these layers, one after the other."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The names and layouts that a family of models in transformers has for the weights of a model,
    as a table.

    A matrix of ours is [*inputs, *outputs]. Theirs has two dims, and a vector of theirs has one.
    """

    family: str
    """Name of the family, for messages."""
    whole: Mapping[str, str]
    """Weights outside of the layers: our name, and theirs."""
    layers: Sequence[Layers]
    """Weights of the layers of each kind."""
    transposed: bool
    """Whether their matrices are [outputs, inputs], as in torch.nn.Linear."""
    base: str
    """Prefix that the files of a model without an output projection leave out."""
    unused: str
    """Regular expression of the end of tensors that files may have and that are not read: those
    without effect, and lm_head.weight where it is `embed` again."""
    shaped: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Vectors of ours that have several dims in theirs: the end of their name, and the shape."""

    def check(self, weights: object) -> None:
        """Raises ValueError for weights that are not in the table, and for those of the table that
        are missing.
        """
        found = set(named_leaves(weights))
        known = {*self.whole}
        for kind in self.layers:
            names = itertools.chain(*kind.names.values(), *kind.stacks.values())
            known |= {_path(kind, name) for name in names}
        if other := sorted(found ^ known):
            raise ValueError(
                f"{self.family} in transformers and this model do not have the same weights. Only "
                f"one of them has {', '.join(f'weights/{name}' for name in other)}. A module with "
                f"functions of its own can exchange such a model (docs/huggingface.md)."
            )

    def _walk(self, table: Any) -> Iterator[tuple[str, Any, dict[str, tuple[int, ...]], bool]]:
        """Each of their tensors: name, index in our weights or `...`, their shapes in it, and
        whether it is a stack.
        """
        shapes = {name: weight.shape for name, weight in named_leaves(table).items()}
        for ours, theirs in self.whole.items():
            yield theirs, ..., {ours: shapes[ours]}, False
        for kind in self.layers:
            yield from self._walk_layers(kind, attrgetter(kind.field)(table))

    def _walk_layers(
        self, kind: Layers, table: Any
    ) -> Iterator[tuple[str, Any, dict[str, tuple[int, ...]], bool]]:
        """What `_walk` yields for layers of one kind; the table is that of their weights."""
        dims = 1 + kind.in_block

        def number(of_layer: tuple[int, ...]) -> int:
            return kind.first + kind.every * of_layer[0] + sum(of_layer[1:])

        for theirs, names in {**kind.names, **kind.stacks}.items():
            is_stack = theirs in kind.stacks
            weights = {_path(kind, name): getattr(table, name) for name in names}
            inner = dims + theirs.count("{}") - 1
            parts = {
                path: x.shape[inner:] if is_stack else _flat(x, inner)
                for path, x in weights.items()
            }
            for i in np.ndindex(next(iter(weights.values())).shape[:inner]):
                yield theirs.format(number(i[:dims]), *i[dims:]), i, parts, is_stack

    def to_tensors(self, weights: object, table: object) -> dict[str, np.ndarray]:
        """Their tensors by name. Raises ValueError as `check`.

        Args:
            weights: weights of the model, NumPy arrays.
            table: the model's table of Weights.
        """
        self.check(weights)
        arrays = named_leaves(weights)
        found = {}
        for theirs, i, parts, stack in self._walk(table):
            values = [arrays[name][i].reshape(shape) for name, shape in parts.items()]
            tensor = (
                np.stack(values, -1).reshape(*values[0].shape[:-1], -1)
                if stack
                else np.concatenate(values, -1)
            )
            tensor = (
                _transpose(tensor) if self.transposed and i is not ... and not stack else tensor
            )
            shape = next(
                (shape for name, shape in self.shaped.items() if theirs.endswith(name)), None
            )
            found[theirs] = tensor.reshape(shape) if shape else tensor
        return found

    def from_tensors(self, tensors: Mapping[str, np.ndarray], table: object) -> Any:
        """The weights in the tree of `table`.

        Raises:
            ValueError: as `check`, or a tensor is missing, has no place, or has another shape.
        """
        self.check(table)
        has_base = any(name.startswith(self.base) for name in tensors)

        def unprefixed(name):
            return name if has_base else name.removeprefix(self.base)

        walk = [(unprefixed(name), i, parts, stack) for name, i, parts, stack in self._walk(table)]
        expected = {name for name, *_ in walk}
        others = set(tensors) ^ expected
        if others := sorted(name for name in others if not re.search(f"(?:{self.unused})$", name)):
            layers, needed = (
                _count_layers({*tensors} & {*expected, *others}),
                _count_layers(expected),
            )
            if layers != needed:
                raise ValueError(
                    f"the files have {layers} layers; config.json asks for {needed}. {COPY_AGAIN}"
                )
            first = f"{', '.join(others[:4])}{' …' if len(others) > 4 else ''}"
            raise ValueError(
                f"{len(others)} tensors are only in the files, or only in the model: {first}"
            )
        read = {name: parts for name, _, parts, _ in walk}
        if "lm_head.weight" in {*tensors} - {*read}:
            table_of = next(name for name, parts in read.items() if "embed" in parts)
            if not np.array_equal(tensors["lm_head.weight"], tensors[table_of]):
                raise ValueError(
                    f"lm_head.weight differs from {table_of}, although the model ties them: in "
                    f"config.json, set tie_word_embeddings to false if the output projection is "
                    f"one of its own; or delete lm_head.weight."
                )
        found = {
            name: np.empty(weight.shape, np.float32) for name, weight in named_leaves(table).items()
        }
        for theirs, i, parts, stack in walk:
            tensor = tensors[theirs]
            tensor = tensor.reshape(-1) if theirs.endswith((*self.shaped,)) else tensor
            tensor = (
                _transpose(tensor) if self.transposed and i is not ... and not stack else tensor
            )
            ends = [shape[-1] for shape in parts.values()]
            expected = (*next(iter(parts.values()))[:-1], sum(ends))
            if tensor.shape != expected:
                is_theirs = f"{theirs} is {tensor.shape} as (inputs, outputs)"
                raise ValueError(f"{is_theirs}; config.json asks for {expected}.")
            one_by_one = [tensor[..., k :: len(ends)] for k in range(len(ends))]
            of_parts = one_by_one if stack else np.split(tensor, np.cumsum(ends)[:-1], axis=-1)
            for name, part in zip(parts, of_parts, strict=True):
                found[name][i] = part.reshape(found[name][i].shape)
        return jax.tree.unflatten(jax.tree.structure(table), list(found.values()))


def _count_layers(names: Iterable[str]) -> int:
    """Counts the layers of tensors by the largest number of one, which is the first number in a
    name.
    """
    found = (re.search(r"(?:^|\.)(\d+)\.", name) for name in names)
    return 1 + max((int(layer[1]) for layer in found if layer), default=-1)


def _transpose(tensor: np.ndarray) -> np.ndarray:
    """Swaps inputs and outputs of a matrix, or of the matrix of each expert; a vector stays."""
    return np.swapaxes(tensor, -1, -2) if tensor.ndim > 1 else tensor


def _path(kind: Layers, name: str) -> str:
    """The name of a weight among those of the model."""
    return f"{kind.field}.{name}".replace(".", "/")


def _flat(weight: Any, dims: int) -> tuple[int, ...]:
    """The shape of a weight after `dims` dims, in their layout: ([experts,] inputs, outputs) of a
    matrix, or (n,).
    """
    shape = weight.shape[dims:]
    if not weight.inputs:
        return (math.prod(shape),)
    first = len(shape) - weight.inputs - weight.outputs
    sides = shape[first : first + weight.inputs], shape[first + weight.inputs :]
    return (*shape[:first], *map(math.prod, sides))


# ---- config.json ---------------------------------------------------------------------------------


def as_transformers_reads(content: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the default values of its model_type, and RoPE in `rope_parameters`, as
    transformers reads it.

    The content of a model_type that transformers does not have stays as it is.

    Raises:
        ValueError: transformers refuses it, such as a value of another type.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = content.get("model_type")
    if kind is None or kind not in CONFIG_MAPPING:
        return dict(content)
    fields = {key: value for key, value in content.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(kind, **fields).to_dict()
    except Exception as error:  # of many kinds
        raise ValueError(
            f"config.json: {' '.join(str(error).split())[:300]}. {COPY_AGAIN}"
        ) from error


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of config.json that states other math than `fixed`."""
    for key, ours in fixed.items():
        if config.get(key, ours) != ours:
            raise ValueError(
                f"config.json: {key} is {config[key]!r:.80}, and this model has {ours!r}: it would "
                "give other logits."
            )
