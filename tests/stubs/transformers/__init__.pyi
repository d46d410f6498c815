"""The type checker does not read transformers, which takes it as long as all else."""

from typing import Any

def __getattr__(name: str) -> Any: ...
