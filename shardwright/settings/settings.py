"""Reads the names, types, defaults and docstrings of settings from their dataclasses."""

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hydra.conf import HydraConf
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from shardwright.data.checks import expand_paths
from shardwright.data.untrusted import first_line
from shardwright.settings.words import listed

NAMES_OF_OTHERS = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.schedule_steps": "lr_decay_iters lr_decay_steps decay_steps",
    "optimizer.final_fraction": "min_lr",
    "optimizer.schedule": "lr_scheduler_type lr_decay_style",
    "optimizer.clip_norm": "grad_clip max_grad_norm gradient_clip_val",
    "optimizer.adam_b1 and optimizer.adam_b2": "betas beta1 beta2 adam_beta1 adam_beta2",
    "training.batch_size": "batch",
    "training.batch_size and training.microbatches": "micro_batch_size per_device_train_batch_size device_batch_size "
    "local_batch_size gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
    "training.seq_len": "block_size context_length sequence_length n_ctx",
    "training.steps": "max_steps max_iters train_iters train_steps num_iterations total_steps",
    "training.tokens": "total_tokens train_tokens",
    "training.epochs": "max_epochs num_train_epochs",
    "training.eval_interval": "eval_every eval_steps",
    "training.checkpoint_interval": "save_interval save_every save_steps",
    "training.log_interval": "log_every logging_steps log_every_n_steps",
    "training.compute_dtype": "dtype precision mixed_precision",
    "training.save": "remat gradient_checkpointing activation_checkpointing recompute",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers",
    "model.d_model": "n_embd hidden_size dim embed_dim",
    "model.d_ff": "intermediate_size ffn_dim ffn_hidden_size",
    "model.n_kv × model.n_q_per_kv": "n_head n_heads num_heads num_attention_heads",
    "model.n_kv": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads num_query_groups",
    "model.d_head": "head_dim",
    "model.vocab": "vocab_size n_vocab",
    "mesh.d": "fsdp dp_shard data_parallel_shard_degree",
    "mesh.r": "dp ddp dp_replicate data_parallel_size data_parallel_replicate_degree",
    "mesh.t": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "mesh.c": "cp context_parallel context_parallel_size context_parallel_degree",
    "mesh.p": "pp pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree",
    "paths.model_name": "run_name name",
    "paths.root_working_dir": "output_dir out_dir save_dir",
    "data.filespec": "data_dir data_path dataset_path dataset",
    "trackers.names": "report_to wandb wandb_log tracker logger",
}
"""Settings, and what other trainers call them, where that is not like our name."""


class Setting(NamedTuple):
    """A setting, or a section of settings."""

    name: str
    """Dotted, as on the command line."""
    kind: Any
    default: Any
    """MISSING if there is none."""
    doc: str


class UnknownSetting(ValueError):
    """A name that is no setting. `meant` is the one that probably is; None if none is like it."""

    def __init__(self, name: str, meant: str | None, known: str):
        self.meant = meant
        super().__init__(f"there is no setting {name}. {f'Did you mean {meant}?' if meant else known}")


def settings_of(schema: type, prefix: str = "", sections: dict[str, type] | None = None) -> Iterator[Setting]:
    """Yields the settings of a dataclass in order. A section, also one of `sections`, comes before its settings."""
    kinds, docs = typing.get_type_hints(schema) | (sections or {}), _docstrings(schema)
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = MISSING if default is dataclasses.MISSING else default
        setting = Setting(f"{prefix}{field.name}", kinds[field.name], default, docs.get(field.name, ""))
        yield setting
        if is_section(setting.kind):
            yield from settings_of(without_null(setting.kind), f"{setting.name}.")


def kind_of(schema: type, name: str, prefix: str = "") -> Any:
    """Returns the type of a setting. Raises UnknownSetting. `prefix` is the section of `schema`, with a dot."""
    parts = name.split(".")
    if parts[0] == "hydra":
        return kind_of(HydraConf, ".".join(parts[1:]), "hydra.") if parts[1:] else HydraConf
    kind: Any = schema
    for i, part in enumerate(parts):
        kind = without_null(kind)
        if kind is Any:
            return Any
        if typing.get_origin(kind) in (list, dict):
            kind = typing.get_args(kind)[-1]
            continue
        known = _fields(kind) if is_section(kind) else {}
        if part not in known:
            path = (prefix + ".".join(parts[:i])).rstrip(".")
            has = f"{f'The section {path} has' if path else 'There are'} {listed([*known], 12)}."
            meant = _meant(schema, parts, i, known, prefix) if known else path
            raise UnknownSetting(prefix + name, meant, has)
        kind = known[part]
    return kind


@functools.cache
def _fields(schema: type) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def _meant(schema: type, parts: list[str], i: int, known: Iterable[str], prefix: str) -> str | None:
    """Returns what another trainer's name stands for, or the closest name for part `i`, in its section or elsewhere."""
    names = [s.name for s in settings_of(schema, prefix) if not is_section(s.kind)]
    others: dict[str, list[str]] = {}
    for name in names:
        others.setdefault(name.rpartition(".")[2], []).append(name)
    sections = {name.partition(".")[0] for name in names}
    for ours, theirs in NAMES_OF_OTHERS.items():
        if parts[-1].lower() in theirs.split() and ours.partition(".")[0] in sections:
            return ours
    for near in difflib.get_close_matches(parts[i], known, n=1):
        closest = ".".join([*parts[:i], near, *parts[i + 1 :]])
        try:
            kind_of(schema, closest, prefix)
        except UnknownSetting as error:
            return error.meant
        return prefix + closest
    return next((" or ".join(others[near]) for near in difflib.get_close_matches(parts[-1], others, 1, 0.65)), None)


def typed(schema: type, values: Any, prefix: str = "") -> Any:
    """Merges values, nested by name, into the defaults of a dataclass. Returns a DictConfig of its types.

    1e9 may be a whole number, and one value a list. Raises ValueError for a name that is no setting, and a wrong value.
    `prefix` is the section of `schema`, with a dot.
    """
    values = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    try:
        return OmegaConf.merge(OmegaConf.structured(schema), _converted(schema, "", values, prefix))
    except OmegaConfBaseException as error:
        name = f"{prefix}{error.full_key}"
        if not isinstance(error, ValidationError):
            raise ValueError(f"{name}: {first_line(error)}. Correct its value.") from None
        kind = kind_of(schema, re.sub(r"\[(\d+)\]", r".\1", str(error.full_key)), prefix)
        raise ValueError(f"{name} is {shown_value(error.value)}; it must be {words_for(kind)}.") from None


def _converted(schema: type, name: str, value: Any, prefix: str) -> Any:
    """Corrects what YAML made of a value, by the declared type of its setting."""
    declared = kind_of(schema, name, prefix) if name else schema
    kind = without_null(declared)
    if value is None or kind is Any or (isinstance(value, str) and ("${" in value or value == MISSING)):
        return value
    shape = dict if is_section(kind) else typing.get_origin(kind)
    if shape is list and not isinstance(value, dict | list):
        value = [value]
    if not isinstance(value, shape or str | int | float):
        raise ValueError(f"{prefix}{name} is {value}; it must be {words_for(declared)}.")
    if isinstance(value, list):
        return [_converted(schema, f"{name}.0", each, prefix) for each in value]
    if isinstance(value, dict):
        for section, dot, rest in (str(key).partition(".") for key in value if is_section(kind)):
            if dot:
                raise ValueError(f"{section}.{rest} is not a setting here; write {section}: {{{rest}: <value>}}.")
        return {key: _converted(schema, f"{name}.{key}".lstrip("."), each, prefix) for key, each in value.items()}
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{prefix}{name} is {shown_value(value)}, which is not a text. Put it in quotes.")
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def made(config: DictConfig, prefix: str = "") -> Any:
    """Makes the dataclasses of a typed configuration, and expands ~ in their paths.

    Raises ValueError for settings without a value, and for a wrong interpolation. `prefix` is the section of `config`.
    """
    try:
        missing = sorted(f"{prefix}{name}" for name in OmegaConf.missing_keys(config))
        settings = None if missing else OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        name = f"{prefix}{error.full_key}"
        raise ValueError(f"{name}: {first_line(error)}. Correct the value of {name}.") from None
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}; give {missing[0]}=<value>.")
    expand_paths(prefix.rstrip("."), settings)
    return settings


def untyped(schema: type) -> DictConfig:
    """Returns the defaults of a dataclass, for Hydra's composition. `typed` checks what it composes."""
    values: Any = OmegaConf.to_container(OmegaConf.structured(schema))
    for name, kind in _fields(schema).items():
        if is_section(kind) and values[name] == MISSING:
            values[name] = untyped(kind)
        if isinstance(values[name], dict | DictConfig):  # open: a mapping, or section that is null, takes new names
            values[name] = DictConfig(values[name], flags={"struct": False})
    return DictConfig(values)


def without_null(kind: object) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = [part for part in typing.get_args(kind) if part is not type(None)][:1]
    return kind


def is_section(kind: object) -> bool:
    """Returns whether this type is a section, a dataclass of settings."""
    return dataclasses.is_dataclass(without_null(kind))


def words_for(kind: object) -> str:
    """Describes the values of a type, to follow "it must be"."""
    inner = without_null(kind)
    origin = typing.get_origin(inner)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if is_section(inner):
        said = f"a section, with {listed([field.name for field in dataclasses.fields(inner)], 12)}"
    elif origin is list:
        said = f"a list, each entry {words_for(typing.get_args(inner)[0])}, such as [a,b]"
    elif origin is dict:
        said = "a mapping, such as {name:value}"
    else:
        said = words.get(inner, "a value")
    return said if inner is kind else f"{said}, or null"


def shown_value(value: object) -> str:
    """Formats a default as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value) or "''"


@functools.cache
def _docstrings(schema: type) -> dict[str, str]:
    """Maps each field of a dataclass to the docstring below it, in one line."""
    found: dict[str, str] = {}
    for owner in (cls for cls in reversed(schema.__mro__) if dataclasses.is_dataclass(cls)):
        node: Any = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found
