"""The model of family.py as a model of transformers, one of KINDS, and these as that model.

docs/huggingface.md describes `to_huggingface` and `from_huggingface`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from family import ModelConfig, weight_table
from shardwright.huggingface import Names, check_fixed
from shardwright_data.checks import check_ranges
from tools.huggingface import llama


class Kind(NamedTuple):
    """How a family in transformers differs from the Llama."""

    architecture: str
    ours: Mapping[str, Any] = {}
    """Switches of ours that all models of the family have."""
    settings: Mapping[str, str] = {}
    """Switches of ours that differ within the family, and their names for them."""
    every: Mapping[str, tuple[str, Any, Any]] = {}
    """Switches of ours that change every so-manieth layer; their list of layers, its entry for that one, for others."""
    fixed: Mapping[str, Any] = {}
    """Settings of theirs that are our math."""
    names: Mapping[str, str] = {}
    """Weights of a layer, ours and theirs. Those of ours that are one of theirs stand in it side by side."""


_WINDOW = {"window": "sliding_window"}
_OUT_NORMS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_FUSED = dict.fromkeys(("w_q", "w_k", "w_v"), "self_attn.qkv_proj.weight")
_FUSED |= dict.fromkeys(("w_gate", "w_up"), "mlp.gate_up_proj.weight")
KINDS = {
    "mistral": Kind("MistralForCausalLM", settings=_WINDOW),
    "qwen2": Kind(
        "Qwen2ForCausalLM",
        ours={"qkv_bias": True},
        names={f"b_{x}": f"self_attn.{x}_proj.bias" for x in "qkv"},
    ),
    "olmo2": Kind("Olmo2ForCausalLM", ours={"norms": "after", "qk_norm_all": True}, names=_OUT_NORMS),
    "smollm3": Kind("SmolLM3ForCausalLM", every={"no_rope_every": ("no_rope_layers", 0, 1)}),
    "gemma2": Kind(
        "Gemma2ForCausalLM",
        ours={"norms": "both", "norm_offset": True, "embedding_scaled": True, "activation": "gelu"},
        settings=_WINDOW
        | {
            "attention_softcap": "attn_logit_softcapping",
            "logit_softcap": "final_logit_softcapping",
            "attention_scalar": "query_pre_attn_scalar",
        },
        every={"full_every": ("layer_types", "full_attention", "sliding_attention")},
        fixed=dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
        | {"use_bidirectional_attention": None},
        names=_OUT_NORMS,
    ),
    "phi3": Kind("Phi3ForCausalLM", settings=_WINDOW, names=_FUSED),
}
_SWITCHES = ("qk_norm", "logit_softcap", *(set(ModelConfig.__annotations__) - {"module", "family"}))
_SWITCHES = {name: getattr(ModelConfig, name) for name in sorted(_SWITCHES)}
"""Settings of ours that the Llama in transformers lacks, and their values there."""


def kind_of(c: ModelConfig) -> str:
    """The family that has this math. Raises ValueError if none has, or c.family has other math."""
    others = {}
    for kind, of_kind in KINDS.items():
        known = _SWITCHES | of_kind.ours | {name: getattr(c, name) for name in (*of_kind.settings, *of_kind.every)}
        others[kind] = [name for name, value in known.items() if getattr(c, name) != value]
    kind = c.family or min(others, key=lambda kind: len(others[kind]))
    if kind not in KINDS:
        raise ValueError(f"model.family is {kind!r}; it can be {', '.join(KINDS)}, or null.")
    if others[kind]:
        name = others[kind][0]
        raise ValueError(f"model.{name} is {getattr(c, name)!r}; {kind} in transformers does not have it.")
    return kind


def names_of(c: ModelConfig, kind: str) -> Names:
    """The table of names for a model with these settings."""
    of_llama, layers, at = (
        llama.names_of(dataclasses.replace(c, qk_norm=False)),
        weight_table(c).layers,
        "model.layers.{}.",
    )
    names = {ours: theirs for theirs, (ours,) in of_llama.layer.items()}
    names |= {f"{x}_norm_all": f"{at}self_attn.{x}_norm.weight" for x in "qk"}
    names |= {ours: at + theirs for ours, theirs in KINDS[kind].names.items()}
    layer: dict[str, tuple[str, ...]] = {}
    for ours, theirs in names.items():
        if getattr(layers, ours) is not None:
            layer[theirs] = (*layer.get(theirs, ()), ours)
    return dataclasses.replace(of_llama, family=kind, layer=layer)


def to_huggingface(weights: Any, c: ModelConfig) -> tuple[dict, dict[str, np.ndarray]]:
    """Content of config.json and tensors of one of KINDS.

    Raises:
        ValueError: a weight or a setting that none of them has.
    """
    kind = kind_of(c)
    of_kind = KINDS[kind]
    config = {"architectures": [of_kind.architecture], "model_type": kind, "pad_token_id": None}
    config |= llama.config_of(dataclasses.replace(c, logit_softcap=None)) | of_kind.fixed
    config |= {theirs: getattr(c, ours) for ours, theirs in of_kind.settings.items()}
    config |= {every[0]: _layers(c.layers, getattr(c, ours), every) for ours, every in of_kind.every.items()}
    return config, names_of(c, kind).to_tensors(weights, weight_table(c))


def _layers(layers: int, n: int | None, every: tuple[str, Any, Any]) -> list:
    """Their list of layers, of which every n-th is another."""
    return [every[1] if n and (i + 1) % n == 0 else every[2] for i in range(layers)]


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Any]:
    """The model section and the weights of one of KINDS.

    Raises:
        ValueError: config.json has other math or a value out of range, or a tensor is missing or has no place.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"config.json: model_type is {kind!r}; family.py can be {', '.join(KINDS)}.")
    of_kind = KINDS[kind]
    check_fixed(config, of_kind.fixed)
    check_fixed(config["rope_parameters"], {"partial_rotary_factor": 1.0})
    rest = {name: value for name, value in config.items() if name not in {*of_kind.settings.values(), *of_kind.fixed}}
    found = of_kind.ours | llama.settings_of(rest) | {ours: config[name] for ours, name in of_kind.settings.items()}
    for ours, every in of_kind.every.items():
        theirs = config[every[0]]
        found[ours] = theirs.index(every[1]) + 1 if every[1] in theirs else None
        check_fixed(config, {every[0]: _layers(found["layers"], found[ours], every)})
    c = ModelConfig(**found, family=kind)
    check_ranges("config.json, as a run has it: model", c)
    c.check(seq_len=1)
    return c, names_of(c, kind).from_tensors(tensors, weight_table(c))
