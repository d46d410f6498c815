"""The tensors in the safetensors of a model."""

import math
from collections import UserDict
from pathlib import Path

import numpy as np

from shardwright.data.untrusted import check_file, refused

DTYPES = ("F32", "F16", "BF16")
"""Names in safetensors of the dtypes whose values are all in f32."""


class Tensors(UserDict):
    """The tensors in a model's safetensors, as finite f32 arrays, each read when it is indexed.

    Args:
        directory: contains model.safetensors, or several files model-….safetensors.

    Raises:
        ValueError: there are none. Indexing raises it if a tensor cannot be read, or is not in DTYPES, or has a value
            that is not finite.
    """

    def __init__(self, directory: Path):
        from safetensors import safe_open

        super().__init__()
        for path in sorted(directory.glob("model*.safetensors")):
            check_file(path)
            with refused(f"cannot read {path}"):
                file = safe_open(path, framework="numpy")
                self.data |= dict.fromkeys(file.keys(), file)
        if not self.data:
            raise ValueError(
                f"{directory} has no model.safetensors. Weights in other formats can be saved as safetensors by "
                "transformers: from_pretrained(…).save_pretrained(…)."
            )

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
            if self.dtype_of(name) not in known and not name.endswith(".bias"):
                return f"{name} is {self.dtype_of(name)}"
        return None

    def __getitem__(self, name: str) -> np.ndarray:
        file = self.data[name]
        tensor = None
        with refused(f"cannot read {name} in the model's files"):
            dtype = self.dtype_of(name)
            if dtype in DTYPES:
                tensor = file.get_tensor(name).astype(np.float32, copy=False)
        if tensor is None:
            raise ValueError(f"{name} is {dtype}; only {', '.join(DTYPES)} can be read. Save it in one of them.")
        if not np.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite: these weights are useless. Take another copy.")
        return tensor
