"""Weights under the names of transformers, its reading of config.json, and the tensors in a model's files."""

import dataclasses
import itertools
import json
import math
import re
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.data.untrusted import COPY_AGAIN, check_file, refused
from shardwright.run.checkpoint_arrays import named_leaves


@dataclasses.dataclass(frozen=True)
class Layers:
    """The names of the weights in layers of one kind."""

    layer: Mapping[str, tuple[str, ...]]
    """Their name, with {} for the number of the layer; and ours, which stand side by side along its outputs."""
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Weights of experts: their name, with {} for the numbers of the layer and of the expert; and ours."""
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Weights of all experts of a layer, in our layout: their name, and ours, whose entries alternate in it."""
    field: str = "layers"
    """Our stack of these layers, such as `dense`, or the part of its blocks, such as `layers.delta`."""
    first: int = 0
    """Number of the first of these layers in theirs."""
    every: int = 1
    """Number of their layers for one element of our stack."""
    in_block: bool = False
    """Whether such an element has several of these layers, one after the other."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The names and layouts that a family of models in transformers has for the weights of a model, as a table.

    A matrix of ours is [*inputs, *outputs]. Theirs has two dims, and a vector of theirs has one.
    """

    family: str
    """Name of the family, for messages."""
    whole: Mapping[str, str]
    """Weights outside of the layers: our name, and theirs."""
    layer: Mapping[str, tuple[str, ...]]
    """Of `Layers`, for a model whose layers are all of one kind. So are `experts` and `stacks`."""
    transposed: bool
    """Whether their matrices are [outputs, inputs], as in torch.nn.Linear."""
    base: str
    """Prefix that the files of a model without an output projection leave out."""
    unused: str
    """Regular expression of the end of tensors that files may have and that are not read: those without effect, and
    lm_head.weight where it is `embed` again."""
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    kinds: Sequence[Layers] = ()
    """Of a model whose layers are of several kinds."""
    shaped: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Vectors of ours that have several dims in theirs: the end of their name, and the shape."""

    @property
    def _kinds(self) -> Sequence[Layers]:
        return self.kinds or (Layers(self.layer, self.experts, self.stacks),)

    def check(self, weights: object) -> None:
        """Raises ValueError for weights that are not in the table, and for those of the table that are missing."""
        found = set(named_leaves(weights))
        known = {*self.whole}
        for kind in self._kinds:
            names = [*itertools.chain(*kind.layer.values(), *kind.stacks.values()), *kind.experts.values()]
            known |= {_path(kind, name) for name in names}
        if other := sorted(found ^ known):
            raise ValueError(
                f"{self.family} in transformers and this model do not have the same weights. Only one of them has "
                f"{', '.join(f'weights/{name}' for name in other)}. A module with functions of its own can exchange "
                "such a model (docs/huggingface.md)."
            )

    def _walk(self, table: Any) -> Iterator[tuple[str, Any, dict[str, tuple[int, ...]], bool]]:
        """Each of their tensors: name, index in our weights or `...`, their shapes in it, and whether it is a stack."""
        shapes = {name: weight.shape for name, weight in named_leaves(table).items()}
        for ours, theirs in self.whole.items():
            yield theirs, ..., {ours: shapes[ours]}, False
        for kind in self._kinds:
            yield from self._walk_layers(kind, attrgetter(kind.field)(table))

    def _walk_layers(self, kind: Layers, table: Any) -> Iterator[tuple[str, Any, dict[str, tuple[int, ...]], bool]]:
        """What `_walk` yields for layers of one kind; the table is that of their weights."""
        dims = 1 + kind.in_block

        def number(of_layer: tuple[int, ...]) -> int:
            return kind.first + kind.every * of_layer[0] + sum(of_layer[1:])

        for theirs, names in {**kind.layer, **kind.stacks}.items():
            stack = theirs in kind.stacks
            weights = {name: getattr(table, name) for name in names}
            parts = {_path(kind, name): x.shape[dims:] if stack else _flat(x, dims) for name, x in weights.items()}
            for i in np.ndindex(next(iter(weights.values())).shape[:dims]):
                yield theirs.format(number(i)), i, parts, stack
        for theirs, name in kind.experts.items():
            weight = getattr(table, name)
            parts = {_path(kind, name): _flat(weight, dims + 1)}
            for i in np.ndindex(weight.shape[: dims + 1]):
                yield theirs.format(number(i[:-1]), i[-1]), i, parts, False

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
            tensor = np.stack(values, -1).reshape(*values[0].shape[:-1], -1) if stack else np.concatenate(values, -1)
            tensor = _transpose(tensor) if self.transposed and i is not ... and not stack else tensor
            shape = next((shape for name, shape in self.shaped.items() if theirs.endswith(name)), None)
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
            layers, needed = _count_layers({*tensors} & {*expected, *others}), _count_layers(expected)
            if layers != needed:
                raise ValueError(f"the files have {layers} layers; config.json asks for {needed}. {COPY_AGAIN}")
            first = f"{', '.join(others[:4])}{' …' if len(others) > 4 else ''}"
            raise ValueError(f"{len(others)} tensors are only in the files, or only in the model: {first}")
        read = {name: parts for name, _, parts, _ in walk}
        if "lm_head.weight" in {*tensors} - {*read}:
            table_of = next(name for name, parts in read.items() if "embed" in parts)
            if not np.array_equal(tensors["lm_head.weight"], tensors[table_of]):
                raise ValueError(
                    f"lm_head.weight differs from {table_of}, although the model ties them: in config.json, set "
                    "tie_word_embeddings to false if the output projection is one of its own; or delete lm_head.weight."
                )
        found = {name: np.empty(weight.shape, np.float32) for name, weight in named_leaves(table).items()}
        for theirs, i, parts, stack in walk:
            tensor = tensors[theirs]
            tensor = tensor.reshape(-1) if theirs.endswith((*self.shaped,)) else tensor
            tensor = _transpose(tensor) if self.transposed and i is not ... and not stack else tensor
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
    """Counts the layers of tensors by the largest number of one, which is the first number in a name."""
    found = (re.search(r"(?:^|\.)(\d+)\.", name) for name in names)
    return 1 + max((int(layer[1]) for layer in found if layer), default=-1)


def _transpose(tensor: np.ndarray) -> np.ndarray:
    """Swaps inputs and outputs of a matrix, or of the matrix of each expert; a vector stays."""
    return np.swapaxes(tensor, -1, -2) if tensor.ndim > 1 else tensor


def _path(kind: Layers, name: str) -> str:
    """The name of a weight among those of the model."""
    return f"{kind.field}.{name}".replace(".", "/")


def _flat(weight: Any, dims: int) -> tuple[int, ...]:
    """The shape of a weight after `dims` dims, in their layout: ([experts,] inputs, outputs) of a matrix, or (n,)."""
    shape = weight.shape[dims:]
    if not weight.inputs:
        return (math.prod(shape),)
    first = len(shape) - weight.inputs - weight.outputs
    sides = shape[first : first + weight.inputs], shape[first + weight.inputs :]
    return (*shape[:first], *map(math.prod, sides))


# ---- config.json ----------------------------------------------------------------------------------------------------


def as_transformers_reads(content: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the default values of its model_type, and RoPE in `rope_parameters`, as transformers reads it.

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
        raise ValueError(f"config.json: {' '.join(str(error).split())[:300]}. {COPY_AGAIN}") from error


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of config.json that states other math than `fixed`."""
    for key, ours in fixed.items():
        if config.get(key, ours) != ours:
            raise ValueError(
                f"config.json: {key} is {config[key]!r:.80}, and this model has {ours!r}: it would give other logits."
            )


# ---- files ----------------------------------------------------------------------------------------------------------

DTYPES = ("F32", "F16", "BF16")
"""Names in safetensors of the dtypes whose values are all in f32."""
_FP8, _SCALE = "F8_E4M3", "_scale_inv"
"""A dtype of quantized weights, and what follows a weight's name in that of its scales."""


class Tensors(UserDict):
    """The tensors in a model's safetensors, as finite f32 arrays, each read when it is indexed.

    Weights in FP8 with a scale per block, as DeepSeek publishes them, are dequantized.

    Args:
        directory: contains model.safetensors, or several files model-….safetensors.
        block: rows and columns of a block.

    Raises:
        ValueError: there are none. Indexing raises it if a tensor cannot be read, or is not in DTYPES, or has a value
            that is not finite.
    """

    def __init__(self, directory: Path, block: Sequence[int] = (128, 128)):
        from safetensors import safe_open

        super().__init__()
        self.block = block
        self.paths: dict[str, Path] = {}
        for path in sorted(directory.glob("model*.safetensors")):
            check_file(path)
            with refused(f"cannot read {path}"):
                file = safe_open(path, framework="numpy")
                self.data |= dict.fromkeys(file.keys(), file)
                self.paths |= dict.fromkeys(file.keys(), path)
        if not self.data:
            raise ValueError(
                f"{directory} has no model.safetensors. Weights in other formats can be saved as safetensors by "
                "transformers: from_pretrained(…).save_pretrained(…)."
            )
        self.scales: dict[str, Any] = {}
        """Files that contain the scales of a weight in FP8, which `self` leaves out."""
        for name in [name.removesuffix(_SCALE) for name in self.data if name.endswith(_SCALE)]:
            of_blocks = len(self.data[name + _SCALE].get_slice(name + _SCALE).get_shape()) > 1
            if of_blocks and name in self.data and self.dtype_of(name) == _FP8:
                self.scales[name] = self.data.pop(name + _SCALE)

    def dtype_of(self, name: str) -> str:
        """The dtype of a tensor in its file."""
        return self.data[name].get_slice(name).get_dtype()

    @property
    def dtype(self) -> str:
        """The dtype of the largest tensor, in lower case: f32, f16 or bf16; bf16 if it is quantized."""
        largest = max(self.data, key=lambda name: math.prod(self.data[name].get_slice(name).get_shape()))
        dtype = self.dtype_of(largest)
        return dtype.lower() if dtype in DTYPES else "bf16"

    @property
    def quantized(self) -> str | None:
        """A quantized tensor that cannot be read, with its dtype; None if there is none. Masks and sizes are not."""
        known = {*DTYPES, "F64", "BOOL", "I64"}
        for name in self.data:
            if self.dtype_of(name) not in known and name not in self.scales and not name.endswith(".bias"):
                return f"{name} is {self.dtype_of(name)}"
        return None

    def __getitem__(self, name: str) -> np.ndarray:
        file = self.data[name]
        tensor = None
        with refused(f"cannot read {name} in the model's files"):
            dtype = self.dtype_of(name)
            if dtype in DTYPES:
                tensor = file.get_tensor(name).astype(np.float32, copy=False)
            elif name in self.scales:
                scale = self.scales[name].get_tensor(name + _SCALE).astype(np.float32)
                tensor = dequantize(_read_fp8(self.paths[name], name), scale, self.block)
        if tensor is None:
            raise ValueError(f"{name} is {dtype}; only {', '.join(DTYPES)} can be read. Save it in one of them.")
        if not np.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite: these weights are useless. Take another copy.")
        return tensor


def _read_fp8(path: Path, name: str) -> np.ndarray:
    """Reads a tensor whose dtype safetensors cannot give to NumPy, from a file that it has opened."""
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(start - 8))[name]
        first, last = about["data_offsets"]
        file.seek(start + first)
        return np.frombuffer(file.read(last - first), jnp.float8_e4m3fn).reshape(about["shape"])


def dequantize(weight: np.ndarray, scale: np.ndarray, block: Sequence[int]) -> np.ndarray:
    """Multiplies each block [rows, columns] of the matrices `weight` by its element of `scale`, in f32.

    Raises ValueError if `scale` is not of that many blocks.
    """
    rows, columns = weight.shape[-2:]
    blocks = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != blocks:
        raise ValueError(f"its scale is {scale.shape}, and it has {blocks} blocks of {tuple(block)}")
    of_element = scale.repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]
    return weight.astype(np.float32) * of_element
