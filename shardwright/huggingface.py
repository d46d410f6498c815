"""Weights under the names of transformers, its reading of config.json, and the tensors in a model's files."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.run.checkpoint_arrays import named_leaves
from shardwright_data.foreign import COPY_AGAIN, LARGE, check_file, read_object, refused


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
    """Their name, with {} for the number of the layer; and ours, which stand side by side along its outputs."""
    transposed: bool
    """Whether their matrices are [outputs, inputs], as in torch.nn.Linear."""
    base: str
    """Prefix that the files of a model without an output projection leave out."""
    tied: str | None = None
    """Their name of the output projection, where it is `embed` again and files may have it or not."""
    unused: str = "(?!)"
    """Regular expression of the end of further tensors, which have no effect."""

    def check(self, weights: Any) -> None:
        """Raises ValueError for weights that are not in the table, and for those of the table that are missing."""
        found = set(named_leaves(weights))
        known = {*self.whole, *(f"layers/{name}" for names in self.layer.values() for name in names)}
        if other := sorted(found ^ known):
            raise ValueError(
                f"{self.family} in transformers and this model do not have the same weights. Only one of them has "
                f"{', '.join(f'weights/{name}' for name in other)}. A module with functions of its own can exchange "
                "such a model (docs/huggingface.md)."
            )

    def to_tensors(self, weights: Any, table: Any) -> dict[str, Callable[[], np.ndarray]]:
        """Their tensors by name, each a function that reads it. Raises ValueError as `check`.

        Args:
            weights: weights of the model, whose leaves are read when they are indexed.
            table: the model's table of Weights.
        """
        self.check(weights)
        arrays, shapes = named_leaves(weights), named_leaves(table)

        def in_layer(names: tuple[str, ...], i: int) -> np.ndarray:
            parts = [arrays[f"layers/{name}"][i] for name in names]
            flat = [x.reshape(_flat(shapes[f"layers/{name}"])) for name, x in zip(names, parts, strict=True)]
            joined = np.concatenate(flat, axis=-1)
            return joined.T if self.transposed else joined

        found = {theirs: partial(np.asarray, arrays[ours]) for ours, theirs in self.whole.items()}
        # The layers of a weight follow one another: a chunk of a checkpoint may hold several of them.
        for theirs, names in self.layer.items():
            layers = shapes[f"layers/{names[0]}"].shape[0]
            found |= {theirs.format(i): partial(in_layer, names, i) for i in range(layers)}
        return found

    def from_tensors(self, tensors: Mapping[str, np.ndarray], table: Any) -> Any:
        """The weights in the tree of `table`: a function that reads each array, or a list of one for each layer.

        Raises:
            ValueError: as `check`, or a tensor is missing or has no place. The functions raise it for another shape.
        """
        self.check(table)
        shapes = named_leaves(table)
        has_base = any(name.startswith(self.base) for name in tensors)
        place = lambda name: name if has_base else name.removeprefix(self.base)
        count = next(w.shape[0] for name, w in shapes.items() if name.startswith("layers/"))
        needed = {place(name) for name in self.whole.values()}
        needed |= {place(name).format(i) for name in self.layer for i in range(count)}
        others = [name for name in set(tensors) ^ needed if not re.search(f"(?:{self.unused})$", name)]
        if others := sorted(name for name in others if name != self.tied):
            first = f"{', '.join(others[:4])}{' …' if len(others) > 4 else ''}"
            raise ValueError(f"{len(others)} tensors are only in the files, or only in the model: {first}")

        def read(theirs: str, names: tuple[str, ...], part: int) -> np.ndarray:
            weights = [shapes[f"layers/{name}"] for name in names]
            found = tensors[theirs].T if self.transposed else tensors[theirs]
            ends = np.cumsum([_flat(w)[-1] for w in weights])
            expected = (*_flat(weights[0])[:-1], int(ends[-1]))
            if found.shape != expected:
                raise ValueError(f"{theirs} is {found.shape} as (inputs, outputs); config.json asks for {expected}.")
            return np.split(found, ends[:-1], axis=-1)[part].reshape(weights[part].shape[1:])

        found = {ours: partial(tensors.__getitem__, place(theirs)) for ours, theirs in self.whole.items()}
        for theirs, names in self.layer.items():
            for part, name in enumerate(names):
                found[f"layers/{name}"] = [partial(read, place(theirs).format(i), names, part) for i in range(count)]
        return jax.tree.unflatten(jax.tree.structure(table), [found[name] for name in shapes])


def _flat(weight: Any) -> tuple[int, ...]:
    """The shape of one layer of a weight in their layout: (inputs, outputs) of a matrix, else (entries,)."""
    shape = weight.shape[1:]
    sides = (shape[: weight.inputs], shape[weight.inputs :]) if weight.inputs else (shape,)
    return tuple(math.prod(side) for side in sides)


# ---- config.json ----------------------------------------------------------------------------------------------------

WITHOUT_EFFECT = {
    # Token ids, lengths, names, and how to run or train: none of these changes a logit.
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "use_cache",
    "max_position_embeddings", "n_ctx", "initializer_range", "max_window_layers", "pretraining_tp", "dtype",
    "torch_dtype", "transformers_version", "_name_or_path", "auto_map", "return_dict", "output_hidden_states",
    "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "is_llama_config", "_commit_hash",
    "tokenizer_class", "transformers.js_config", "task_specific_params", "gradient_checkpointing", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "reorder_and_upcast_attn",
}  # fmt: skip
"""Fields of config.json that no logit depends on."""


def as_transformers_reads(content: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the default values of its model_type, and RoPE in `rope_parameters`, as transformers reads it.

    The content of a model_type that transformers does not have stays as it is.

    Raises:
        ValueError: transformers refuses it, such as a value of another type.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = content.get("model_type")
    if kind not in CONFIG_MAPPING:
        return dict(content)
    try:
        found = AutoConfig.for_model(kind, **{key: value for key, value in content.items() if key != "model_type"})
    except Exception as error:  # of many kinds
        raise ValueError(f"config.json: {' '.join(str(error).split())[:300]}. {COPY_AGAIN}") from error
    found = found.to_dict()
    if isinstance(rope := found.get("rope_parameters"), dict):
        found["rope_parameters"] = {key: value for key, value in rope.items() if key != "type"}  # older rope_type
    return found


def check_config(config: Mapping[str, Any], expected: Mapping[str, Any], module: str) -> None:
    """Raises ValueError for a field of config.json that states other math than the model that was made from it.

    Args:
        config: from as_transformers_reads.
        expected: what `to_huggingface` states of the model.
        module: name of its module.
    """
    same = {key: config[key] for key in (*WITHOUT_EFFECT, "model_type") if key in config}
    expected = as_transformers_reads({**expected, **same})
    for key in dict.fromkeys((*config, *expected)):
        value, ours = config.get(key), expected.get(key)
        if key in WITHOUT_EFFECT or value is None or value == ours or (key not in expected and not value):
            continue
        raise ValueError(
            f"config.json: {key} is {value!r:.80}, and model.module={module} computes with {ours!r:.80}: the imported "
            f"model would give other logits. If that field changes none, give ignore=[{key}]."
        )


# ---- files ----------------------------------------------------------------------------------------------------------

DTYPES = ("F32", "F16", "BF16")
"""Names in safetensors of the dtypes whose values are all in f32."""


class Tensors(Mapping):
    """The tensors in a model's safetensors, as finite f32 arrays, each read when it is indexed.

    Args:
        directory: contains model.safetensors, or several files and model.safetensors.index.json.

    Raises:
        ValueError: there are none. Indexing raises it if a file or a tensor cannot be read, or is not in DTYPES, or has
            a value that is not finite.
    """

    def __init__(self, directory: Path):
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        self._directory = directory
        if index.exists():
            self._files = read_object(index, {"weight_map": {str: str}}, LARGE)["weight_map"]
        elif single.exists():
            self._files = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise ValueError(
                f"{directory} has no model.safetensors, and no model.safetensors.index.json. Weights in other formats "
                "can be saved as safetensors by transformers: from_pretrained(…).save_pretrained(…)."
            )

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        check_file(self._directory / name)
        with refused(f"cannot read {self._directory / name}"):
            return safe_open(self._directory / name, framework="numpy")

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._open(self._files[name])
        with refused(f"cannot read {name} in {self._directory / self._files[name]}"):
            dtype = file.get_slice(name).get_dtype()
            tensor = file.get_tensor(name).astype(np.float32, copy=False) if dtype in DTYPES else None
        if tensor is None:
            raise ValueError(f"{name} is {dtype}; only {', '.join(DTYPES)} can be read. Dequantize the model first.")
        if not np.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite: these weights are useless. Take another copy.")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
