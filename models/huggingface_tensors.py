"""The tensors in a model's files, and checks of their names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configuration.foreign import parse_json
from training_io.checkpoint_arrays import named_leaves


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


def whole_number(config: Mapping[str, Any], key: str) -> int:
    """The value of `key` in config.json. Raises ValueError if it is not a whole number."""
    if not isinstance(config.get(key), int):
        raise ValueError(f"config.json: {key} is {config.get(key)!r}; it must be a whole number.")
    return config[key]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model. Raises ValueError if it cannot be read, or is none."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}. Copy or download it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object. Copy or download it again.")
    return found


class Tensors(Mapping):
    """The tensors in a model's safetensors, as f32 arrays, each read when it is indexed.

    Args:
        directory: contains model.safetensors, or several files and model.safetensors.index.json.

    Raises:
        ValueError: there are none. Indexing raises it if a file or a tensor cannot be read.
    """

    def __init__(self, directory: Path):
        index, single = directory / "model.safetensors.index.json", "model.safetensors"
        self._directory, self._open = directory, {}
        if index.exists():
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
        try:
            files = dict(read_object(index)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} has no map of weights to files: {error}. Download it again.") from error
        for tensor, file in files.items():
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
                raise ValueError(
                    f"{index} says that {tensor} is in {file!r}; a file beside the index is wanted. Download it again."
                )
        return files

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            self._check_inside(name)
            try:
                self._open[name] = safe_open(self._directory / name, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"cannot read {self._directory / name}: {error}. Copy or download it again."
                ) from error
        return self._open[name]

    def _check_inside(self, name: str) -> None:
        """Raises ValueError if the file is a link out of the directory; one of the hub's cache links to its blobs."""
        here, there = self._directory.resolve(), (self._directory / name).resolve()
        blobs = [here.parents[1] / "blobs"] if here.parent.name == "snapshots" else []
        if not any(there.is_relative_to(place) for place in (here, *blobs)):
            raise ValueError(
                f"{self._directory / name} is a link to {there}, outside of the model. Copy it there instead."
            )

    def __getitem__(self, name: str) -> np.ndarray:
        from safetensors import SafetensorError

        file = self._file(self._files[name])
        try:
            tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"cannot read {name} in {self._directory / self._files[name]}: {error}.") from error
        if str(tensor.dtype) not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"{name} is {tensor.dtype}; only f32, f16 and bf16 become f32 without a change.")
        return tensor.astype(np.float32, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
