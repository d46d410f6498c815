"""Converts what Hydra composed to the Config of a run, and checks its values."""

import dataclasses
import json
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from shardlib.schedules import schedule_of
from shardwright.cluster.config import check_distributed
from shardwright.data.checks import check_range, check_ranges
from shardwright.modeling.model import module_of
from shardwright.optimizers.config import check_optimizer
from shardwright.program.changes import check_changes
from shardwright.program.config import Config
from shardwright.program.differences import flat
from shardwright.program.trackers import check_trackers
from shardwright.settings.command_line import register_shipped
from shardwright.settings.settings import made, untyped


def register_schema() -> None:
    """Registers the defaults of all settings with Hydra.

    A required setting has no value until a configuration sets it.

    Those of the model are known only after Hydra's composition has chosen its module: see
    to_config.
    """
    register_shipped()
    schema = untyped(Config)
    schema.model = OmegaConf.create({"module": "train"}, flags={"struct": False})
    ConfigStore.instance().store(name="config_schema", node=schema)


def to_config(composed: DictConfig | dict) -> Config:
    """Converts what Hydra composed to a typed and checked Config, with the model's own ModelConfig.

    Raises ValueError for a setting that is missing, unknown, or out of range.
    """
    c = made(Config, composed)
    if not isinstance(c.model, dict):
        raise ValueError(
            f"model is {c.model!r}; it must be a section, with the settings of a model."
        )
    name = c.model.get("module", "train")
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"model.module is {name!r}; give the name of a Python module, such as train or gpt2."
        )
    c.model = made(module_of(name).ModelConfig, c.model, "model")
    if c.optimizer.base is not None:
        c.optimizer.base = _checked_base(c)
    check_config(c)
    return c


def _checked_base(c: Config) -> dict[str, Any]:
    """Converts optimizer.base to the types of the model's settings.

    Raises ValueError if one is wrong or unknown.
    """
    base = c.optimizer.base
    if not isinstance(base, dict):
        raise ValueError(
            f"optimizer.base is {base!r}; give settings of the model: 'optimizer.base={{d_model: "
            f"64}}'."
        )
    model = made(type(c.model), dataclasses.asdict(c.model) | base, "optimizer.base")
    for name in ("module", "vocab", "bos_id", "experts"):
        if name in base and base[name] != getattr(c.model, name):
            raise ValueError(
                f"optimizer.base has {name}, with which nothing is scaled; leave it out."
            )
    if c.optimizer.parametrization == "completep" and "layers" not in base:
        raise ValueError(
            "optimizer.base has no layers, which completep scales with; add them, or use mup."
        )
    check_ranges("optimizer.base", model)
    return {name: getattr(model, name) for name in base}


def check_length(c: Config) -> None:
    """Raises ValueError for several of training.steps, tokens, epochs and minutes.

    Also for keep_best without validations before the end of the run.
    """
    lengths = {name: getattr(c.training, name) for name in ("steps", "tokens", "epochs", "minutes")}
    given = [f"training.{name}={value}" for name, value in lengths.items() if value is not None]
    if len(given) > 1:
        other = given[0].partition("=")[0]
        raise ValueError(
            f"the run has several lengths: {', '.join(given)}. Keep one: set {other}=null, for "
            "example."
        )
    if c.training.keep_best and (
        not c.training.eval_batches or (c.training.eval_interval or c.training.eval_epochs) is None
    ):
        raise ValueError(
            "training.keep_best is true, but the run does not validate before its end. Give "
            "training.eval_interval, and training.eval_batches above 0."
        )


def check_config(c: Config) -> None:
    """Raises ValueError for a setting that is out of range, or that other settings rule out."""
    for section in dataclasses.fields(c):
        check_ranges(section.name, getattr(c, section.name))
    check_range("model.vocab", c.model.vocab)
    check_range("model.layers", c.model.layers, 1, 2**16)
    check_range("model.bos_id", c.model.bos_id, 0, c.model.vocab)
    c.model.check(c.training.seq_len)
    check_optimizer(c.optimizer)
    for name, value in flat(dataclasses.asdict(c)).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} is {value!r}, which is not JSON; give a finite number, a text or null."
            ) from None
    try:
        schedule_of(c.pipeline.schedule)
    except ValueError as error:
        raise ValueError(f"pipeline.schedule: {error}") from error
    check_distributed(c.distributed)
    check_trackers(c.trackers)
    check_length(c)
    in_loop = c.training.unroll is not None and (
        c.training.unroll < c.model.layers or c.model.layers == 1
    )
    if c.training.save == "offload" and not (in_loop and c.mesh.p == 1):
        raise ValueError(
            "training.save is offload, which saves no memory without a loop over layers, or with "
            "stages. Set training.unroll=1 and mesh.p=1, or choose marked."
        )
    if c.training.loss_chunk is not None and c.training.seq_len % c.training.loss_chunk:
        raise ValueError(
            f"training.loss_chunk is {c.training.loss_chunk}; it must divide training.seq_len = "
            f"{c.training.seq_len}."
        )
    if not c.distributed.is_single and c.paths.model_name is None:
        raise ValueError(
            "give paths.model_name, the same in all processes: distributed sets up several."
        )
    check_changes(c, check_config)
