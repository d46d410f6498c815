"""Reads the names, types, defaults and docstrings of settings from dataclasses, and makes these
from values.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwright.data.checks import expand_paths
from shardwright.data.untrusted import first_line
from shardwright.settings.output import listed

NAMES_OF_OTHERS = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.schedule_steps": "lr_decay_iters lr_decay_steps",
    "optimizer.final_fraction": "min_lr",
    "optimizer.clip_norm": "grad_clip max_grad_norm gradient_clip_val",
    "training.batch_size and training.microbatches": "micro_batch_size device_batch_size "
    "per_device_train_batch_size gradient_accumulation_steps grad_accum_steps",
    "training.seq_len": "block_size context_length sequence_length n_ctx",
    "training.steps": "max_steps max_iters num_iterations",
    "training.compute_dtype": "dtype precision mixed_precision",
    "training.save": "remat gradient_checkpointing activation_checkpointing",
    "model.layers": "n_layer num_hidden_layers",
    "model.d_model": "n_embd hidden_size",
    "model.d_ff": "intermediate_size",
    "model.n_kv × model.n_q_per_kv": "n_head n_heads num_heads num_attention_heads",
    "model.n_kv": "n_kv_heads num_key_value_heads",
    "model.d_head": "head_dim",
    "mesh.d": "fsdp dp_shard",
    "mesh.r": "dp ddp dp_replicate",
    "mesh.t": "tp tensor_parallel tensor_parallel_size",
    "mesh.c": "cp context_parallel",
    "mesh.p": "pp pipeline_parallel",
    "paths.model_name": "run_name",
    "data.filespec": "data_dir data_path dataset_path",
    "trackers.names": "report_to wandb",
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
    """A name that is no setting: `part` is none of the settings `known` of a section, "" for the
    whole schema.
    """

    def __init__(self, section: str, part: str, known: Iterable[str]):
        self.section = section
        self.part = part
        self.known = [*known]


def settings_of(
    schema: type, prefix: str = "", sections: Mapping[str, type] | None = None
) -> Iterator[Setting]:
    """Yields the settings of a dataclass in order.

    A section, also one of `sections`, comes before its settings.
    """
    kinds = {**_kinds(schema), **(sections or {})}
    docs = _docstrings(schema)
    for field in dataclasses.fields(schema):
        setting = Setting(
            f"{prefix}{field.name}", kinds[field.name], _default(field), docs.get(field.name, "")
        )
        yield setting
        if is_section(setting.kind):
            yield from settings_of(without_null(setting.kind), f"{setting.name}.")


def _default(field: dataclasses.Field) -> Any:
    default = (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
    return MISSING if default is dataclasses.MISSING else default


@functools.cache
def _kinds(schema: type) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def kind_of(schema: type, name: str) -> Any:
    """Returns the type of a setting; Any where it is not known.

    Raises ValueError if its first part does not exist.
    """
    part, _, rest = name.partition(".")
    if part not in _kinds(schema):
        raise ValueError(_explained(schema, "", UnknownSetting("", part, _kinds(schema)), rest))
    kind: Any = schema
    for part in name.split("."):
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        else:
            kind = _kinds(kind).get(part, Any) if is_section(kind) else Any
        kind = without_null(kind)
    return kind


def _explained(schema: type, prefix: str, unknown: UnknownSetting, rest: str = "") -> str:
    """Writes the message for an unknown setting, with the one that is probably meant, or those of
    its section.
    """
    section, part, known = unknown.section, unknown.part, unknown.known
    name = ".".join(filter(None, (section, part, rest)))
    names = [
        setting.name for setting in settings_of(schema, prefix) if not is_section(setting.kind)
    ]
    sections = {each.partition(".")[0] for each in names}
    last = name.rpartition(".")[2]
    meant = [ours for ours, theirs in NAMES_OF_OTHERS.items() if last.lower() in theirs.split()]
    meant = [ours for ours in meant if ours.partition(".")[0] in sections]
    if not meant:
        near = difflib.get_close_matches(part, known, n=1)
        meant = [".".join(filter(None, (section, each, rest))) for each in near]
    if not meant:
        others = {each.rpartition(".")[2] for each in names}
        near = difflib.get_close_matches(last, others, 1, 0.65)
        meant = [each for each in names if each.rpartition(".")[2] in near]
    if meant:
        return f"there is no setting {name}. Did you mean {' or '.join(meant)}?"
    has = f"The section {section} has" if section else "There are"
    return f"there is no setting {name}. {has} {listed(known, 12)}."


def made(schema: type, values: Any, section: str = "") -> Any:
    """Makes a dataclass of settings, and its sections, from values by name.

    Others have their defaults.

    1e9 may be a whole number, and one value a list. A leading ~ in a path is expanded. A DictConfig
    is interpolated, other values are not.

    Raises ValueError for a setting that is unknown or missing, for a value of the wrong type, and
    for a wrong interpolation. `section` is the name of the dataclass.
    """
    try:
        plain = (
            OmegaConf.to_container(values, resolve=True)
            if isinstance(values, DictConfig)
            else values
        )
        missing: list[str] = []
        settings = _made(schema, section, plain, missing)
    except UnknownSetting as unknown:
        raise ValueError(_explained(schema, f"{section}.".lstrip("."), unknown)) from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {first_line(error)}. Correct its value.") from None
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}; give {missing[0]}=<value>.")
    expand_paths(section, settings)
    return settings


def _made(declared: Any, name: str, value: Any, missing: list[str]) -> Any:
    """Converts a value to the declared type of its setting.

    Adds the names of settings without a value to `missing`.
    """
    kind = without_null(declared)
    if kind is Any or (value is None and kind is not declared):
        return value
    if value == MISSING:
        if is_section(kind):
            raise ValueError(
                f"no value for {name}. Begin the configuration with `defaults: [base, _self_]`."
            )
        missing.append(name)
        return value
    if is_section(kind) and isinstance(value, dict):
        return _section(kind, name, value, missing)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is list and not isinstance(value, dict):
        several = value if isinstance(value, list) else [value]
        return [_made(parts[0], f"{name}[{i}]", each, missing) for i, each in enumerate(several)]
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        return {key: _made(parts[1], f"{name}.{key}", each, missing) for key, each in value.items()}
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        return _plain(kind, value)
    remedy = " Put it in quotes." if kind is str and isinstance(value, int | float) else ""
    raise ValueError(f"{name} is {shown_value(value)}; it must be {words_for(declared)}.{remedy}")


def _section(schema: type, name: str, values: Mapping[str, Any], missing: list[str]) -> Any:
    kinds = _kinds(schema)
    for key in values:
        section, dot, rest = str(key).partition(".")
        if dot and section in kinds:
            raise ValueError(f"{key} is not a setting here; write {section}: {{{rest}: <value>}}.")
        if key not in kinds:
            raise UnknownSetting(name, str(key), kinds)
    needed = [field.name for field in dataclasses.fields(schema) if _default(field) == MISSING]
    given = {}
    for key, value in {**dict.fromkeys(needed, MISSING), **values}.items():
        given[key] = _made(kinds[key], f"{name}.{key}".lstrip("."), value, missing)
    return schema(**given)


def _plain(kind: type, value: Any) -> Any:
    """Converts a plain value.

    Raises ValueError, KeyError, TypeError or OverflowError for one of another type.
    """
    if typing.get_origin(kind) is not None or is_section(kind):
        raise ValueError  # a list, mapping or section would be made of a part of the value
    if kind is bool:
        return yaml.SafeLoader.bool_values[str(value).lower()]
    if isinstance(value, bool) or (kind is str and not isinstance(value, str)):
        raise ValueError
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    return kind(value)


def untyped(schema: type) -> DictConfig:
    """Returns the defaults of a dataclass, for Hydra's composition.

    It takes new names: `made` checks them.
    """
    values: Any = OmegaConf.to_container(OmegaConf.structured(schema))
    for name, kind in _kinds(schema).items():
        if is_section(kind) and values[name] == MISSING:
            values[name] = untyped(kind)
        if isinstance(values[name], dict):
            values[name] = DictConfig(values[name], flags={"struct": False})
    return DictConfig(values, flags={"struct": False})


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
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
            ):
                found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found
