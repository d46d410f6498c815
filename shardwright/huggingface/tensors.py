"""The tensors in the safetensors of a model."""

import json
import math
from collections import UserDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.data.untrusted import check_file, refused

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
        ValueError: there are none. Indexing raises it if a tensor cannot be read, or is not in
            DTYPES, or has a value that is not finite.
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
                f"{directory} has no model.safetensors. Weights in other formats can be saved as "
                f"safetensors by transformers: from_pretrained(…).save_pretrained(…)."
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
        """The dtype of the largest tensor, in lower case: f32, f16 or bf16; bf16 if it is
        quantized.
        """
        largest = max(
            self.data, key=lambda name: math.prod(self.data[name].get_slice(name).get_shape())
        )
        dtype = self.dtype_of(largest)
        return dtype.lower() if dtype in DTYPES else "bf16"

    @property
    def quantized(self) -> str | None:
        """A quantized tensor that cannot be read, with its dtype; None if there is none.

        Masks and sizes are not.
        """
        known = {*DTYPES, "F64", "BOOL", "I64"}
        for name in self.data:
            if (
                self.dtype_of(name) not in known
                and name not in self.scales
                and not name.endswith(".bias")
            ):
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
            raise ValueError(
                f"{name} is {dtype}; only {', '.join(DTYPES)} can be read. Save it in one of them."
            )
        if not np.isfinite(tensor).all():
            raise ValueError(
                f"{name} has values that are not finite: these weights are useless. Take another "
                "copy."
            )
        return tensor


def _read_fp8(path: Path, name: str) -> np.ndarray:
    """Reads a tensor whose dtype safetensors cannot give to NumPy, from a file that it has
    opened.
    """
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(start - 8))[name]
        first, last = about["data_offsets"]
        file.seek(start + first)
        return np.frombuffer(file.read(last - first), jnp.float8_e4m3fn).reshape(about["shape"])


def dequantize(weight: np.ndarray, scale: np.ndarray, block: Sequence[int]) -> np.ndarray:
    """Multiplies each block [rows, columns] of the matrices `weight` by its element of `scale`, in
    f32.

    Raises ValueError if `scale` is not of that many blocks.
    """
    rows, columns = weight.shape[-2:]
    blocks = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != blocks:
        raise ValueError(
            f"its scale is {scale.shape}, and it has {blocks} blocks of {tuple(block)}"
        )
    of_element = scale.repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]
    return weight.astype(np.float32) * of_element
