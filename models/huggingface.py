"""What translates the model of a module to and from transformers."""

from typing import Any

from modeling.model import module_of
from models import llama_huggingface


def mapping_of(module: str) -> Any:
    """What has `to_huggingface` and `from_huggingface` for the model in this module.

    Raises:
        ValueError: there is no such module, or it lacks them.
    """
    found = llama_huggingface if module == "train" else module_of(module)
    for name in ("to_huggingface", "from_huggingface"):
        if not hasattr(found, name):
            raise ValueError(f"model.module is {module!r}, which has no {name}; docs/huggingface.md says what it does.")
    return found
