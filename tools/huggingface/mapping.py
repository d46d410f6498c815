"""The modules that translate models to and from transformers."""

from typing import Any

from shardwright.modeling.model import module_of
from tools.huggingface import llama as llama_huggingface


def mapping_of(module: str) -> Any:
    """The Python module with `to_huggingface` and `from_huggingface` for the model `model.module: module`.

    Raises:
        ValueError: there is no such module, or it lacks them.
    """
    found = llama_huggingface if module == "train" else module_of(module)
    for name in ("to_huggingface", "from_huggingface"):
        if not hasattr(found, name):
            raise ValueError(f"model.module is {module!r}, which has no {name}; see docs/huggingface.md.")
    return found
