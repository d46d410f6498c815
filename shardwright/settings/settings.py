"""Reads the names, types, defaults and docstrings of settings from their dataclasses."""

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING

NAMES_OF_OTHERS = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.warmup_steps": "warmup warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "optimizer.schedule_steps": "lr_decay_iters lr_decay_steps decay_steps",
    "optimizer.final_fraction": "min_lr min_lr_ratio",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "optimizer.clip_norm": "grad_clip clip_grad max_grad_norm gradient_clip_val clip_grad_norm",
    "optimizer.adam_b1 and optimizer.adam_b2": "betas beta1 beta2 adam_beta1 adam_beta2",
    "training.batch_size": "batch global_batch_size total_batch_size train_batch_size",
    "training.batch_size and training.microbatches": "micro_batch_size per_device_train_batch_size device_batch_size "
    "local_batch_size gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
    "training.seq_len": "block_size context_length max_seq_len max_seq_length seq_length sequence_length n_ctx",
    "training.steps": "max_steps max_iters num_steps train_iters train_steps num_iterations total_steps",
    "training.tokens": "max_tokens num_tokens total_tokens train_tokens",
    "training.epochs": "num_epochs max_epochs num_train_epochs",
    "training.eval_interval": "eval_every eval_steps val_interval val_check_interval",
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
    "paths.model_name": "run_name name exp_name",
    "paths.root_working_dir": "output_dir out_dir save_dir",
    "data.filespec": "data_dir data_path dataset_path dataset",
    "trackers.names": "report_to wandb wandb_log tracker logger",
}
"""Settings, and what nanoGPT, transformers, Megatron, torchtitan, Lightning and others call them."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting, or a section of settings.

    Attributes:
        name: its dotted name, as on the command line.
        kind: its type.
        default: its default; MISSING if it has none.
        doc: its docstring.
    """

    name: str
    kind: Any
    default: Any
    doc: str


def settings_of(schema: type, prefix: str = "") -> Iterator[Setting]:
    """Yields the settings of a dataclass in order. A section comes before its settings."""
    kinds = typing.get_type_hints(schema)
    docs = _docstrings(schema)
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = MISSING if default is dataclasses.MISSING else default
        name = f"{prefix}{field.name}"
        kind = kinds[field.name]
        yield Setting(name, kind, default, docs.get(field.name, ""))
        if is_section(kind):
            yield from settings_of(without_null(kind), f"{name}.")


def kind_of(schema: type, name: str, prefix: str = "") -> Any:
    """Returns the type of the setting `name`. For an unknown name raises ValueError, with the closest one.

    `prefix` is the section of `schema`, with a dot.
    """
    kind: Any = schema
    parts = name.split(".")
    for i, part in enumerate(parts):
        kind = without_null(kind)
        path = prefix + ".".join(parts[:i])
        if is_section(kind):
            kinds = typing.get_type_hints(kind)
            if part not in kinds:
                raise ValueError(f"there is no setting {prefix}{name}.{_known(schema, parts, i, [*kinds], prefix)}")
            kind = kinds[part]
        elif typing.get_origin(kind) in (list, dict):
            kind = typing.get_args(kind)[-1]
        elif kind is not Any:
            raise ValueError(f"there is no setting {prefix}{name}: {path} is {words_for(kind)}. Set {path}=<value>.")
        else:
            return Any
    return kind


def _known(schema: type, parts: list[str], i: int, known: list[str], prefix: str) -> str:
    """Suggests the closest name if part `i` is unknown, in its section or elsewhere, or lists those of the section."""
    path = (prefix + ".".join(parts[:i])).rstrip(".")
    names = [s.name for s in settings_of(schema, prefix) if not is_section(s.kind)]
    ours = next((ours for ours, theirs in NAMES_OF_OTHERS.items() if parts[-1].lower() in theirs.split()), "")
    if ours and all(name in names or name.partition(".")[0] in names for name in re.split(" and | × ", ours)):
        return f" Did you mean {ours}?"
    if near := difflib.get_close_matches(parts[i], known, n=1):
        return f" Did you mean {prefix}{'.'.join([*parts[:i], near[0], *parts[i + 1 :]])}?"
    if elsewhere := [name for name in names if name.rpartition(".")[2] == parts[-1]]:
        return f" Did you mean {elsewhere[0]}?"
    return f" {f'The section {path} has' if path else 'There are'} {', '.join(known)}."


def like_setting(schema: type, name: str) -> str | None:
    """Returns `name` if it is a setting, or the setting that is probably meant; None if none is like it."""
    try:
        kind_of(schema, name)
    except ValueError as error:
        return next(iter(re.findall(r"Did you mean (.*)\?", str(error))), None)
    return name


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
        said = f"a section, with {', '.join(field.name for field in dataclasses.fields(inner))}"
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


def _docstrings(schema: type) -> dict[str, str]:
    """Maps each field of a dataclass to the docstring below it, in one line."""
    found: dict[str, str] = {}
    for owner in (cls for cls in reversed(schema.__mro__) if dataclasses.is_dataclass(cls)):
        node: Any = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found
