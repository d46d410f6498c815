"""The model of moe.py as transformers' Mixtral, Qwen3-MoE or OLMoE, and these as that model.

docs/huggingface.md describes `to_huggingface` and `from_huggingface`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moe import ModelConfig, weight_table
from shardwright.huggingface import Names, check_fixed
from shardwright_data.checks import check_ranges
from tools.huggingface import llama


class Kind(NamedTuple):
    """How a family in transformers differs from the others."""

    architecture: str
    settings: Mapping[str, str]
    """Our settings, and theirs."""
    ours: Mapping[str, Any]
    """Settings of ours that are the same in all models of the family."""
    fixed: Mapping[str, Any]
    """Settings of theirs that are our math."""
    block: str
    """Name of the experts and their router in a layer."""
    experts: tuple[str, str, str]
    """Names of an expert's w_gate, w_up and w_down."""


_OURS = {"qk_norm": False, "qk_norm_all": False, "normalize": True}
_FIXED = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_SWIGLU = ("gate_proj", "up_proj", "down_proj")
_QWEN3 = {"experts": "num_experts", "d_ff": "moe_intermediate_size", "normalize": "norm_topk_prob"}
_OLMOE = _QWEN3 | {"d_ff": "intermediate_size"}
KINDS = {
    "mixtral": Kind(
        "MixtralForCausalLM",
        {"experts": "num_local_experts"},
        _OURS,
        {"router_jitter_noise": 0.0},
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": Kind("Qwen3MoeForCausalLM", _QWEN3, _OURS | {"qk_norm": True}, _FIXED, "mlp", _SWIGLU),
    "olmoe": Kind("OlmoeForCausalLM", _OLMOE, _OURS | {"qk_norm_all": True}, {"clip_qkv": None}, "mlp", _SWIGLU),
}
_ALL = {"scores": "softmax", "weight_scale": 1.0, "groups": 1, "correction_bias": False, "shared_experts": 0}
"""Settings of ours that all of them have."""


def kind_of(c: ModelConfig) -> str:
    """The family that has this math. Raises ValueError if none has."""
    if other := [name for name, value in _ALL.items() if getattr(c, name) != value]:
        raise ValueError(f"model.{other[0]} is {getattr(c, other[0])!r}; no family of {', '.join(KINDS)} has it.")
    kind = "qwen3_moe" if c.qk_norm else "olmoe" if c.qk_norm_all else "mixtral"
    if kind == "mixtral" and not c.normalize:
        raise ValueError("model.normalize is False; Mixtral divides the weights of experts by their sum.")
    if kind == "olmoe" and c.d_head * c.heads != c.d_model:
        raise ValueError(f"model.d_head is {c.d_head}; OLMoE's heads have d_model = {c.d_model} entries together.")
    return kind


def names_of(c: ModelConfig, kind: str) -> Names:
    """The table of names for a model with these settings."""
    of_llama, block = llama.names_of(c), f"model.layers.{{}}.{KINDS[kind].block}"
    layer = {theirs: ours for theirs, ours in of_llama.layer.items() if ".mlp." not in theirs}
    if c.qk_norm_all:
        layer |= {f"model.layers.{{}}.self_attn.{name}.weight": (f"{name}_all",) for name in ("q_norm", "k_norm")}
    names = zip(KINDS[kind].experts, ("w_gate", "w_up", "w_down"), strict=True)
    experts = {f"{block}.experts.{{}}.{theirs}.weight": ours for theirs, ours in names}
    layer |= {f"{block}.gate.weight": ("router",)}
    return dataclasses.replace(of_llama, family=kind, layer=layer, experts=experts)


def to_huggingface(weights: Any, c: ModelConfig) -> tuple[dict, dict[str, np.ndarray]]:
    """Content of config.json and tensors of a Mixtral, a Qwen3-MoE with qk_norm, or an OLMoE with qk_norm_all.

    Raises:
        ValueError: a weight or a setting that none of them has.
    """
    kind = kind_of(c)
    of_kind = KINDS[kind]
    config = {"architectures": [of_kind.architecture], "model_type": kind} | llama.config_of(c) | of_kind.fixed
    config |= {theirs: getattr(c, ours) for ours, theirs in of_kind.settings.items()}
    config["num_experts_per_tok"] = c.experts_per_token
    return config, names_of(c, kind).to_tensors(weights, weight_table(c))


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Any]:
    """The model section and the weights of one of KINDS.

    Raises:
        ValueError: config.json has other math or a value out of range, or a tensor is missing or has no place.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"config.json: model_type is {kind!r}; moe.py can be {', '.join(KINDS)}.")
    check_fixed(config, KINDS[kind].fixed)
    settings = KINDS[kind].ours | llama.settings_of(config) | {"experts_per_token": config["num_experts_per_tok"]}
    config.setdefault("num_experts", config.get("num_local_experts"))  # as newer versions call it
    settings |= {ours: config[theirs] for ours, theirs in KINDS[kind].settings.items()}
    c = ModelConfig(**settings)
    check_ranges("config.json, as a run has it: model", c)
    c.check(seq_len=1)
    return c, names_of(c, kind).from_tensors(tensors, weight_table(c))
