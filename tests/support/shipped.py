"""The shipped configurations, composed."""

from pathlib import Path

from shardwright.program.config import Config
from shardwright.run.launch import composed

CONFIGS = Path(__file__).parents[2] / "configs"


RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "base")


def load(name: str, *overrides: str) -> Config:
    return composed(name, "paths.model_name=test", *overrides)
