"""The tensors in a model's files, and which weights of a run become some."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from training_io.checkpoint_arrays import named_leaves


def check_names(weights: Any, known: set[str], formats: str) -> None:
    """Raises ValueError, with their names, for weights that the formats do not have, and for those that they lack.

    Args:
        weights: of a run, or their table.
        known: names of all weights that have a place in the formats, such as `layers/w_q`.
        formats: transformers' models, in words.
    """
    found = set(named_leaves(weights))
    for what, names in (("has", found - known), ("lacks", known - found)):
        if names:
            raise ValueError(
                f"the model {what} {', '.join(f'weights/{name}' for name in sorted(names))}, and {formats} in "
                f"transformers {'have no place for it' if what == 'has' else 'need it'}: they give other logits. A "
                "module with functions of its own can exchange such a model (docs/huggingface.md)."
            )


class Tensors(Mapping):
    """The tensors of a model's safetensors, read one at a time, as f32 arrays.

    Args:
        directory: has model.safetensors, or several files and model.safetensors.index.json.

    Raises:
        ValueError: there are none; later, if a file or a tensor in it cannot be read.
    """

    def __init__(self, directory: Path):
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self._files = dict(json.loads(index.read_text())["weight_map"])
        elif (directory / "model.safetensors").exists():
            self._files = None
        else:
            raise ValueError(
                f"{directory} has no model.safetensors, and no model.safetensors.index.json. Weights in other formats "
                "can be saved as safetensors by transformers: from_pretrained(…).save_pretrained(…)."
            )
        self._directory = directory
        self._open: dict[str, Any] = {}
        if self._files is None:
            self._files = dict.fromkeys(self._file("model.safetensors").keys(), "model.safetensors")

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"cannot read {self._directory / name}: {error}. Copy or download it again."
                ) from error
        return self._open[name]

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
