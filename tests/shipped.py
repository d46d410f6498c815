"""The shipped configurations, composed."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from shardwright.run.config import Config, register_schema, to_config

CONFIGS = Path(__file__).parent.parent / "configs"


RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "base")


def load(name: str, *overrides: str) -> Config:
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(name, overrides=["paths.model_name=test", *overrides])
    return to_config(config)
