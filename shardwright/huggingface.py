"""The tensors in a model's files, and checks of their names."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.run.checkpoint_arrays import named_leaves
from shardwright_data.foreign import COPY_AGAIN, LARGE, WORDS, check_file, check_types, read_object, refused


def check_names(weights: Any, known: set[str], formats: str) -> None:
    """Raises ValueError for weights that transformers' models do not have, and for those that they need.

    Args:
        weights: weights of a run, or their table.
        known: names of the weights that the models have, such as `layers/w_q`.
        formats: names of the models, for the message.
    """
    found = set(named_leaves(weights))
    for what, names in (("has", found - known), ("lacks", known - found)):
        if names:
            raise ValueError(
                f"the model {what} {', '.join(f'weights/{name}' for name in sorted(names))}, and {formats} in "
                f"transformers {'have no place for it' if what == 'has' else 'need it'}: they give other logits. A "
                "module with functions of its own can exchange such a model (docs/huggingface.md)."
            )


def check_tensors(tensors: Mapping, needed: set[str], unused: set[str]) -> None:
    """Raises ValueError for needed tensors that are missing, and for others that are not known to be unused."""
    found = set(tensors)
    for what, names in (("lacks", needed - found), ("has, beyond this model,", found - needed - unused)):
        if names:
            first = ", ".join(sorted(names)[:4])
            raise ValueError(f"the model {what} {len(names)} tensors: {first}{' …' if len(names) > 4 else ''}")


def tied(tensors: Mapping, table: str, copy: str) -> Callable[[], np.ndarray]:
    """Reads the embedding table of a tied model, whose files may have it a second time as the output projection.

    Args:
        tensors: of the model.
        table: name of the embedding table.
        copy: name that the output projection has where it is there.

    Returns:
        A function that reads the table, and raises ValueError if the output projection differs from it.
    """

    def read() -> np.ndarray:
        values = tensors[table]
        if copy in tensors and not np.array_equal(values, tensors[copy]):
            raise ValueError(
                f"the model ties its output projection to its embedding (tie_word_embeddings), but {copy} differs from "
                f"{table}. If {copy} was trained, set tie_word_embeddings to false in config.json, else remove it."
            )
        return values

    return read


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_embd", "n_head", "n_inner"),
)
_RATES = ("initializer_range", "rms_norm_eps", "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop")
_FACTORS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor")
FIELDS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(_SIZES, (int, 1, 2**31)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (int, 1, 2**16)),
    "bos_token_id": (int, 0, 2**31),
    **dict.fromkeys(_RATES, (float, 0, 1)),
    **dict.fromkeys(_FACTORS, (float, 1, 2**53)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, 0, 0)),
    **dict.fromkeys(("model_type", "rope_type", "type", "hidden_act", "activation_function"), (str, 0, 0)),
    **dict.fromkeys(("architectures", "layer_types"), (list, 0, 0)),
}
"""Type of fields of config.json; of numbers the smallest, and what they are below."""
_WORDS = WORDS | {list: "a list of texts"}


def check_fields(config: Mapping[str, Any], within: str = "") -> None:
    """Raises ValueError for a value in config.json that is not as in FIELDS. Null and other fields may be anything.

    `within` is the name of the object that `config` is, and a dot, for messages.
    """
    for key, (kind, low, end) in FIELDS.items():
        value = config.get(key)
        if value is None:
            continue
        is_number = kind in (int, float)
        matches = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
        matches = matches and (kind is not list or all(isinstance(part, str) for part in value))
        if not matches or (is_number and not low <= value < end):
            wanted = f"{_WORDS[kind]}, at least {low} and below {end}" if is_number else _WORDS[kind]
            raise ValueError(f"config.json: {within}{key} is {value!r:.80}; it must be {wanted}.")
        if kind is dict:
            check_fields(value, f"{key}.")


def whole_number(config: Mapping[str, Any], key: str) -> int:
    """The value of `key` in config.json. Raises ValueError if it is not a whole number."""
    check_types("config.json", config, {key: int})
    return config[key]


DTYPES = ("F32", "F16", "BF16")
"""Names in safetensors of the dtypes whose values are all in f32."""


def check_inside(directory: Path, name: str) -> None:
    """Raises ValueError if the file is a link out of the directory; one of the hub's cache links to its blobs."""
    here, there = directory.resolve(), (directory / name).resolve()
    blobs = [here.parents[1] / "blobs"] if here.parent.name == "snapshots" else []
    if not any(there.is_relative_to(place) for place in (here, *blobs)):
        raise ValueError(f"{directory / name} is a link to {there}, outside of the model. Copy it there instead.")


class Tensors(Mapping):
    """The tensors in a model's safetensors, as finite f32 arrays, each read when it is indexed.

    Args:
        directory: contains model.safetensors, or several files and model.safetensors.index.json.

    Raises:
        ValueError: there are none. Indexing raises it if a file or a tensor cannot be read, or is not in DTYPES, or has
            a value that is not finite.
    """

    def __init__(self, directory: Path):
        index, single = directory / "model.safetensors.index.json", "model.safetensors"
        self._directory, self._open = directory, {}
        if index.exists():
            check_inside(directory, index.name)
            self._files = self._listed(index)
        elif (directory / single).exists():
            self._files = dict.fromkeys(self._file(single).keys(), single)
        else:
            raise ValueError(
                f"{directory} has no model.safetensors, and no model.safetensors.index.json. Weights in other formats "
                "can be saved as safetensors by transformers: from_pretrained(…).save_pretrained(…)."
            )

    def _listed(self, index: Path) -> dict[str, str]:
        """The file of each tensor, by an index that may be a stranger's."""
        files = read_object(index, {"weight_map": {str: str}}, LARGE)["weight_map"]
        for tensor, file in files.items():
            if file in ("", ".", "..") or Path(file).name != file:
                raise ValueError(
                    f"{index} says that {tensor} is in {file!r}; a file beside the index is wanted. Download it again."
                )
        return files

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            check_inside(self._directory, name)
            check_file(self._directory / name)
            with refused(f"cannot read {self._directory / name}"):
                self._open[name] = safe_open(self._directory / name, framework="numpy")
        return self._open[name]

    def __getitem__(self, name: str) -> np.ndarray:
        file, where = self._file(self._files[name]), f"{name} in {self._directory / self._files[name]}"
        with refused(f"cannot read {where}"):
            about = file.get_slice(name)
            dtype, size = about.get_dtype(), 4 * math.prod(about.get_shape())
        if dtype not in DTYPES:
            raise ValueError(
                f"{name} is {dtype}; only {', '.join(DTYPES)} become f32 without a change. Dequantize the model "
                "first, and save it in one of these dtypes."
            )
        if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
            raise ValueError(f"{where} takes {size:,} bytes in f32; this machine has {memory:,}. {COPY_AGAIN}")
        with refused(f"cannot read {where}"):
            tensor = file.get_tensor(name).astype(np.float32, copy=False)
        if bad := tensor.size - np.count_nonzero(np.isfinite(tensor)):
            nans = np.count_nonzero(np.isnan(tensor))
            raise ValueError(
                f"{name} has {bad:,} values that are not finite, of {tensor.size:,}: {nans:,} NaN, {bad - nans:,} "
                "infinite. These weights are useless: take another copy or checkpoint of the model."
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
