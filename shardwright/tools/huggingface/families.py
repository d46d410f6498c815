"""Converts models of train.py, family.py and moe.py to and from transformers' model types in KINDS.

docs/huggingface.md describes `to_huggingface` and `from_huggingface`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shardwright.data.checks import check_ranges
from shardwright.huggingface import Layers, Names, check_fixed
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig, RopeScaling
from shardwright.models import delta, family, mla, moe


class Kind(NamedTuple):
    """Differences of a family in transformers from Llama."""

    module: str
    """Value of model.module."""
    architecture: str
    ours: Mapping[str, Any] = {}
    """Our settings that all models of the family have."""
    settings: Mapping[str, str] = {}
    """Our settings that differ within the family, with the names in transformers."""
    every: Mapping[str, tuple[str, Any, Any]] = {}
    """Our settings that change every n-th layer, with the list of layers in transformers' config.json, and its entries
    for such a layer and for the others."""
    needs: tuple[str, ...] = ()
    """Our settings that must not be null."""
    fixed: Mapping[str, Any] = {}
    """Settings in transformers that must have these values for the same math."""
    names: Mapping[str, str | None] = {}
    """Weights of a layer, ours and theirs. Several of ours that map to one of theirs are concatenated in it. None: the
    family does not have the Llama's weight."""
    experts: Mapping[str, str] = {}
    """Weights of each expert: ours, and theirs with {} for the expert's index."""
    stacks: Mapping[str, str] = {}
    """Stacked weights of a layer's experts. Several of ours that map to one of theirs are interleaved in it."""
    neighbors: Mapping[str, str] = {}
    """Our weights of queries and keys whose last entries, as many as this setting says, RoPE turns as neighbors, where
    ours turns one of each half."""


_SETTINGS = {
    "vocab": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "layers": "num_hidden_layers",
    "n_kv": "num_key_value_heads",
    "d_head": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_FIXED = {  # our math in transformers' settings
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
_ROPE = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor",
        "beta_slow": "slow_turns",
        "beta_fast": "fast_turns",
        "original_max_position_embeddings": "original_length",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
    "longrope": {
        "factor": "factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        "original_max_position_embeddings": "original_length",
        "attention_factor": "attention_factor",
    },
}
"""Settings of each kind of RoPE scaling: names in transformers and in RopeScaling."""
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "w_q": "self_attn.q_proj.weight",
    "w_k": "self_attn.k_proj.weight",
    "w_v": "self_attn.v_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "w_o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
_WHOLE = {"embed": "model.embed_tokens.weight", "unembed": "lm_head.weight", "final_norm": "model.norm.weight"}

_WINDOW = {"window": "sliding_window"}
_FULL_EVERY = {"full_every": ("layer_types", "full_attention", "sliding_attention")}
_WINDOW_ROPE = {"window_rope_base": "rope_local_base_freq"}
_QKV_BIAS = {f"b_{x}": f"self_attn.{x}_proj.bias" for x in "qkv"}
_QK_ALL = {f"{x}_norm_all": f"self_attn.{x}_norm.weight" for x in "qk"}
_OUT_NORMS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_FUSED: dict[str, str] = dict.fromkeys(("w_q", "w_k", "w_v"), "self_attn.qkv_proj.weight")
_FUSED |= dict.fromkeys(("w_gate", "w_up"), "mlp.gate_up_proj.weight")
_GEMMA = {"norms": "both", "norm_offset": True, "embedding_scaled": True, "activation": "gelu"}
_GEMMA_SETTINGS = _WINDOW | {"logit_softcap": "final_logit_softcapping", "attention_scalar": "query_pre_attn_scalar"}
_CAPPED = {"attention_softcap": "attn_logit_softcapping"}
_GELU = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
_MULTIPLIERS = {name: name for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier")}
_EXPERTS = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_SPARSE = _EXPERTS | {"d_ff": "moe_intermediate_size", "normalize": "norm_topk_prob"}
_SWIGLU = {f"w_{x}": f"mlp.experts.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")}
_SHARED_WIDTH = "shared_expert_intermediate_size"
_SCORED_BY_TOKEN = {f"shared_{x}": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
_SCORED_BY_TOKEN |= {"router": "mlp.gate.weight", "shared_score": "mlp.shared_expert_gate.weight"}
_SCORED = {"scores": "sigmoid", "correction_bias": True}
_SCORED_SETTINGS = _SPARSE | {
    "experts": "n_routed_experts",
    "shared_experts": "n_shared_experts",
    "groups": "n_group",
    "groups_per_token": "topk_group",
    "weight_scale": "routed_scaling_factor",
    "dense_layers": "first_k_dense_replace",
    "dense_d_ff": "intermediate_size",
}
_SCORED_NAMES = {f"shared_{x}": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")}
_SCORED_NAMES |= {"router": "mlp.gate.weight", "router_bias": "mlp.gate.e_score_correction_bias"}
_LATENT = {"kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "d_turned": "qk_rope_head_dim", "d_value": "v_head_dim"}
_GROUPED = dict.fromkeys(("w_gate", "w_up"), "mlp.experts.gate_up_proj") | {"w_down": "mlp.experts.down_proj"}
_GROUPED |= {"router": "mlp.gate.weight"}
"""Names of what `experts` and the router of a Kind are in memory of transformers 5, where one array has all experts of
a layer. `save_pretrained(save_original_format=False)` writes them."""
KINDS = {
    "llama": Kind("train", "LlamaForCausalLM"),
    "qwen3": Kind("train", "Qwen3ForCausalLM", ours={"qk_norm": True}),
    "mistral": Kind("family", "MistralForCausalLM", settings=_WINDOW),
    "qwen2": Kind("family", "Qwen2ForCausalLM", ours={"qkv_bias": True}, names=_QKV_BIAS),
    "olmo2": Kind(
        "family", "Olmo2ForCausalLM", ours={"norms": "after", "qk_norm_all": True}, names=_OUT_NORMS | _QK_ALL
    ),
    "olmo3": Kind(
        "family",
        "Olmo3ForCausalLM",
        ours={"norms": "after", "qk_norm_all": True},
        settings=_WINDOW | _WINDOW_ROPE,
        every=_FULL_EVERY,
        names=_OUT_NORMS | _QK_ALL,
    ),
    "smollm3": Kind("family", "SmolLM3ForCausalLM", every={"no_rope_every": ("no_rope_layers", 0, 1)}),
    "gemma2": Kind(
        "family",
        "Gemma2ForCausalLM",
        ours=_GEMMA,
        settings=_GEMMA_SETTINGS | _CAPPED,
        every=_FULL_EVERY,
        fixed=_GELU | {"use_bidirectional_attention": None},
        names=_OUT_NORMS,
    ),
    "gemma3_text": Kind(
        "family",
        "Gemma3ForCausalLM",
        ours=_GEMMA | {"qk_norm": True},
        settings=_GEMMA_SETTINGS | _WINDOW_ROPE,
        every=_FULL_EVERY,
        fixed=_GELU | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        names=_OUT_NORMS,
    ),
    "phi3": Kind(
        "family", "Phi3ForCausalLM", settings=_WINDOW | {"rotary_share": "partial_rotary_factor"}, names=_FUSED
    ),
    "cohere2": Kind(
        "family",
        "Cohere2ForCausalLM",
        ours={"parallel": True, "layer_norm": True},
        settings=_WINDOW | {"norm_epsilon": "layer_norm_eps", "logit_divisor": "logit_scale"},
        every=_FULL_EVERY | {"no_rope_every": _FULL_EVERY["full_every"]},
        needs=("window",),
        neighbors={"w_q": "d_head", "w_k": "d_head"},
    ),
    "granite": Kind("family", "GraniteForCausalLM", settings=_MULTIPLIERS | {"logit_divisor": "logits_scaling"}),
    "mixtral": Kind(
        "moe",
        "MixtralForCausalLM",
        settings=_EXPERTS | {"experts": "num_local_experts"},
        fixed={"router_jitter_noise": 0.0},
        names={"router": "block_sparse_moe.gate.weight"},
        experts={
            f"w_{x}": f"block_sparse_moe.experts.{{}}.{y}.weight"
            for x, y in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    ),
    "qwen3_moe": Kind(
        "moe",
        "Qwen3MoeForCausalLM",
        ours={"qk_norm": True},
        settings=_SPARSE,
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
        names={"router": "mlp.gate.weight"},
        experts=_SWIGLU,
    ),
    "qwen2_moe": Kind(
        "moe",
        "Qwen2MoeForCausalLM",
        ours={"shared_scored": True},
        settings=_SPARSE | {"qkv_bias": "qkv_bias", "shared_experts": _SHARED_WIDTH},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": 0},
        names=_QKV_BIAS | _SCORED_BY_TOKEN,
        experts=_SWIGLU,
    ),
    "glm4_moe": Kind(
        "moe",
        "Glm4MoeForCausalLM",
        ours=_SCORED,
        settings=_SCORED_SETTINGS
        | {"qk_norm": "use_qk_norm", "qkv_bias": "attention_bias", "rotary_share": "partial_rotary_factor"},
        names=_QKV_BIAS | _SCORED_NAMES,
        experts=_SWIGLU,
    ),
    "deepseek_v3": Kind(
        "mla",
        "DeepseekV3ForCausalLM",
        ours=_SCORED | {"n_q_per_kv": 1},
        settings=_SCORED_SETTINGS | _LATENT,
        names=_SCORED_NAMES
        | {
            "w_k": None,
            "w_v": None,
            "w_q_latent": "self_attn.q_a_proj.weight",
            "q_latent_norm": "self_attn.q_a_layernorm.weight",
            "w_q_heads": "self_attn.q_b_proj.weight",
            "w_kv_latent": "self_attn.kv_a_proj_with_mqa.weight",
            "kv_latent_norm": "self_attn.kv_a_layernorm.weight",
            "w_kv_heads": "self_attn.kv_b_proj.weight",
        },
        experts=_SWIGLU,
        neighbors=dict.fromkeys(("w_q", "w_q_heads", "w_kv_latent"), "d_turned"),
    ),
    "qwen3_next": Kind(
        "delta",
        "Qwen3NextForCausalLM",
        ours={"qk_norm": True, "norm_offset": True, "gated": True, "shared_scored": True},
        settings=_SPARSE
        | {"shared_experts": _SHARED_WIDTH, "rotary_share": "partial_rotary_factor", "taps": "linear_conv_kernel_dim"}
        | {"key_heads": "linear_num_key_heads", "values_per_key": "linear_num_value_heads"}
        | {"d_key": "linear_key_head_dim", "d_value": "linear_value_head_dim", "deltas": "full_attention_interval"},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
        names=_SCORED_BY_TOKEN
        | {"w_q_and_gate": "self_attn.q_proj.weight"}
        | dict.fromkeys(("conv_q", "conv_k", "conv_v"), "linear_attn.conv1d.weight")
        | {
            "w_in": "linear_attn.in_proj_qkvz.weight",
            "w_rates": "linear_attn.in_proj_ba.weight",
            "log_decay": "linear_attn.A_log",
            "b_decay": "linear_attn.dt_bias",
            "value_norm": "linear_attn.norm.weight",
        },
        experts=_SWIGLU,
    ),
    "olmoe": Kind(
        "moe",
        "OlmoeForCausalLM",
        ours={"qk_norm_all": True},
        settings=_SPARSE | {"d_ff": "intermediate_size"},
        fixed={"clip_qkv": None},
        names=_QK_ALL | {"router": "mlp.gate.weight"},
        experts=_SWIGLU,
    ),
    "gpt_oss": Kind(
        "moe",
        "GptOssForCausalLM",
        ours={"sinks": True, "qkv_bias": True, "out_bias": True, "expert_bias": True, "activation": "clamped"},
        settings=_WINDOW | _EXPERTS | {"experts": "num_local_experts"},
        every=_FULL_EVERY,
        fixed={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        names=_QKV_BIAS
        | {"b_o": "self_attn.o_proj.bias", "sinks": "self_attn.sinks"}
        | {"router": "mlp.router.weight", "b_router": "mlp.router.bias"},
        stacks=dict.fromkeys(("w_gate", "w_up"), "mlp.experts.gate_up_proj")
        | dict.fromkeys(("b_gate", "b_up"), "mlp.experts.gate_up_proj_bias")
        | {"w_down": "mlp.experts.down_proj", "b_down": "mlp.experts.down_proj_bias"},
    ),
}
CONFIGS = {
    "delta": delta.ModelConfig,
    "mla": mla.ModelConfig,
    "moe": moe.ModelConfig,
    "family": family.ModelConfig,
    "train": ModelConfig,
}
_TRAINING = {
    "module",
    "family",
    "bias_rate",
    "groups_per_token",
    "capacity_factor",
    "pools",
    "balance_loss",
    "router_z_loss",
    "chunk",
}
"""Settings that transformers lacks because they don't change logits."""


def kind_in(config: dict) -> str:
    """Returns the key of KINDS for a config.json as transformers reads it, or its model_type if there is none."""
    kind = str(config.get("model_type"))
    return "llama" if kind == "mistral" and config.get("sliding_window") is None else kind


def kind_of(c: ModelConfig) -> str:
    """Returns the family with this math. Raises ValueError if there is none, or c.family has other math."""
    module = next(module for module, of_module in CONFIGS.items() if isinstance(c, of_module))
    kinds = {name: kind for name, kind in KINDS.items() if kind.module == module}
    own = set(CONFIGS[module].__dataclass_fields__) - set(ModelConfig.__dataclass_fields__) - _TRAINING
    usual = {
        name: CONFIGS[module].__dataclass_fields__[name].default for name in sorted(own | {"qk_norm", "logit_softcap"})
    }
    others = {}
    for name, kind in kinds.items():
        known = {**usual, **kind.ours, **{ours: getattr(c, ours) for ours in (*kind.settings, *kind.every)}}
        others[name] = [ours for ours, value in known.items() if getattr(c, ours) != value]
        others[name] += [ours for ours in kind.needs if getattr(c, ours) is None]
    found = getattr(c, "family", None) or min(others, key=lambda name: len(others[name]))
    if found not in kinds:
        raise ValueError(f"model.family is {found!r}; it can be {', '.join(kinds)}, or null.")
    if others[found]:
        name = others[found][0]
        raise ValueError(f"model.{name} is {getattr(c, name)!r}; {found} in transformers does not support it.")
    return found


def names_of(c: ModelConfig, grouped: bool = False) -> Names:
    """Returns the table of names for a model with these settings. In both layouts, heads are in the order K, Q.

    Args:
        c: settings of the model.
        grouped: the names of experts are those of _GROUPED.
    """
    found = kind_of(c)
    table = load_model(c).table
    dense = getattr(c, "dense_layers", 0)
    layers_of = functools.partial(_layers_of, KINDS[found], c=c, grouped=grouped)
    if isinstance(c, delta.ModelConfig):
        block = table.layers
        out = {"w_o": "linear_attn.out_proj.weight"}
        kinds = [layers_of(block.delta, own=out, field="layers.delta", in_block=True, every=c.deltas + 1)]
        kinds += [layers_of(block.full, own={}, field="layers.full", first=c.deltas, every=c.deltas + 1)]
    else:
        kinds = [layers_of(table.dense, own={}, field="dense")] if dense else []
        kinds += [layers_of(table.layers, first=dense)]
    return Names(
        family=found,
        whole={name: theirs for name, theirs in _WHOLE.items() if not (c.tied_embeddings and name == "unembed")},
        layer={},
        kinds=kinds,
        transposed=True,
        shaped={"conv1d.weight": (-1, 1, c.taps)} if isinstance(c, delta.ModelConfig) else {},
        base="model.",
        # Old files contain RoPE's frequencies.
        unused=r"self_attn\.rotary_emb\.inv_freq" + (r"|lm_head\.weight" if c.tied_embeddings else ""),
    )


def _layers_of(
    kind: Kind, table: Any, c: ModelConfig, grouped: bool, own: Mapping[str, str] | None = None, **place: Any
) -> Layers:
    """Returns the names of the weights in layers with this table. `place` is their place in the model.

    `own` are names of these layers alone, if layers are of several kinds: each has some of the weights in the names.
    """
    at = "model.layers.{}."
    layer = {}
    stacks = {}
    has_experts = hasattr(table, "router")
    experts = kind.experts if has_experts and not grouped else {}
    absent = {*experts, *(kind.stacks if has_experts else ()), *(() if c.qk_norm else ("q_norm", "k_norm"))}
    names = {**_LAYER, **kind.names, **(_GROUPED if grouped and has_experts else {}), **(own or {})}
    absent |= {name for name in names if own is not None and not hasattr(table, name)}
    for ours, theirs in names.items():
        if theirs and ours not in absent and getattr(table, ours, True) is not None:
            layer[at + theirs] = (*layer.get(at + theirs, ()), ours)
    for ours, theirs in (kind.stacks if has_experts else {}).items():
        stacks[at + theirs] = (*stacks.get(at + theirs, ()), ours)
    return Layers(layer, {at + theirs: ours for ours, theirs in experts.items()}, stacks, **place)


def to_huggingface(weights: object, c: ModelConfig) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the content of config.json and the tensors, for one of KINDS.

    Raises:
        ValueError: none of them supports a weight or setting.
    """
    found = kind_of(c)
    kind = KINDS[found]
    config: dict[str, Any] = {"architectures": [kind.architecture], "model_type": found, "pad_token_id": None}
    config |= {**_FIXED, **kind.fixed}
    config |= {theirs: getattr(c, ours) for ours, theirs in {**_SETTINGS, **kind.settings}.items()}
    for ours, every in kind.every.items():
        layers = _layers(c.layers, getattr(c, ours), every)
        if config.setdefault(every[0], layers) != layers:
            alike = " and ".join(f"model.{name}" for name in kind.every)
            raise ValueError(f"{alike} differ; {found} in transformers has one {every[0]} for them: set them alike.")
    # RoPE's names before transformers 5.0, which later versions and other programs also read.
    config |= {"num_attention_heads": c.heads, "max_position_embeddings": None}
    # For gpt-oss, null means YaRN.
    config |= {"rope_theta": c.rope_base, "rope_scaling": {"rope_type": "default"} if found == "gpt_oss" else None}
    if config.get("query_pre_attn_scalar", c.d_head) is None:
        config["query_pre_attn_scalar"] = c.d_head
    if found == "cohere2":
        config["logit_scale"] = 1 / config["logit_scale"]
        if c.d_head * c.heads != c.d_model:
            raise ValueError(
                f"model.d_head is {c.d_head}; cohere2 in transformers has d_model / heads = {c.d_model / c.heads:g}."
            )
    config |= _other_layers(c, kind)
    if _SHARED_WIDTH in config:
        config[_SHARED_WIDTH] *= c.d_ff
    if config.get("attention_multiplier", 1.0) is None:
        config["attention_multiplier"] = c.d_head**-0.5
    _scale_rope(config, c, found)
    return config, names_of(c).to_tensors(_as_neighbors(weights, c, kind), load_model(c).table)


def _other_layers(c: ModelConfig, kind: Kind) -> dict[str, Any]:
    """Returns what config.json has of layers of several kinds, and of other attention, beside Kind.settings."""
    config: dict[str, Any] = {}
    if isinstance(c, moe.ModelConfig) and "dense_d_ff" in kind.settings:
        config |= {"num_hidden_layers": c.dense_layers + c.layers, "intermediate_size": c.dense_width}
    if isinstance(c, mla.ModelConfig):
        config |= {"qk_nope_head_dim": c.d_plain, "head_dim": c.d_turned, "rope_interleave": True}
    if isinstance(c, delta.ModelConfig):
        config |= {"linear_num_value_heads": c.key_heads * c.values_per_key, "intermediate_size": c.d_ff}
        config |= {"num_hidden_layers": c.layers * (c.deltas + 1), "layer_types": _layer_types(c.layers, c.deltas)}
        config["full_attention_interval"] = c.deltas + 1
    return config


def _scale_rope(config: dict[str, Any], c: ModelConfig, found: str) -> None:
    """Completes a config.json by the scaling of RoPE, and by RoPE in windows.

    Raises:
        ValueError: the family does not support it.
    """
    scaling = c.rope_scaling
    if config.get("rope_local_base_freq", c.rope_base) is None:
        if scaling is not None:
            raise ValueError(f"model.window_rope_base is null, but {found} does not scale RoPE in windows; set it.")
        config["rope_local_base_freq"] = c.rope_base
    if scaling is not None:
        if found == "phi3" and scaling.kind != "longrope":
            raise ValueError(
                f"model.rope_scaling.kind is {scaling.kind!r}; phi3 in transformers supports only longrope."
            )
        values = {theirs: getattr(scaling, ours) for theirs, ours in _ROPE[scaling.kind].items()}
        values = {theirs: value for theirs, value in values.items() if value is not None}
        config["rope_scaling"] = {"rope_type": scaling.kind} | values
        if scaling.kind == "llama3":
            config["max_position_embeddings"] = round(scaling.original_length * scaling.factor)
        if scaling.kind == "dynamic":
            config["max_position_embeddings"] = scaling.original_length
        if scaling.kind == "longrope":  # Phi-3 reads it here
            config["original_max_position_embeddings"] = scaling.original_length
    if found == "olmo3":  # reads the base of windows only here
        of_windows = {"rope_theta": config.pop("rope_local_base_freq")}
        bases = {"full_attention": {"rope_theta": c.rope_base}, "sliding_attention": of_windows}
        config["rope_parameters"] = {kind: {"rope_type": "default"} | base for kind, base in bases.items()}
        config["rope_parameters"]["full_attention"] |= config["rope_scaling"] or {}


def _as_neighbors(weights: Any, c: ModelConfig, kind: Kind, back: bool = False) -> Any:
    """Makes neighbors of the two entries of a query or key that RoPE turns together, or undoes that.

    Queries and keys have the same order, so attention stays the same.
    """

    def reorder(path: Any, w: np.ndarray) -> np.ndarray:
        if path[-1].name not in kind.neighbors:
            return w
        count = getattr(c, kind.neighbors[path[-1].name])
        parts = (-1, 2) if back else (2, count // 2)
        turned = w[..., -count:].reshape(*w.shape[:-1], *parts).swapaxes(-1, -2).reshape(*w.shape[:-1], count)
        return np.concatenate([w[..., :-count], turned], axis=-1)

    return jax.tree_util.tree_map_with_path(reorder, weights) if kind.neighbors else weights


def _layer_types(layers: int, deltas: int) -> list[str]:
    """Returns transformers' list of layers for blocks of delta nets and attention."""
    return [*["linear_attention"] * deltas, "full_attention"] * layers


def _blocks(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the settings of delta nets that are other numbers in transformers."""
    types = config["layer_types"]
    every = types.index("full_attention") + 1 if "full_attention" in types else 1
    found = {"layers": len(types) // every, "deltas": every - 1}
    found["values_per_key"], rest = divmod(config["linear_num_value_heads"], config["linear_num_key_heads"])
    if every == 1 or rest or types != _layer_types(found["layers"], found["deltas"]):
        raise ValueError(
            f"config.json: layer_types is {types!r:.80}; it can only have full_attention in every n-th layer, n > 1, "
            "and linear_attention in the others, with heads of values that are a multiple of those of keys."
        )
    return found


def _layers(layers: int, n: int | None, every: tuple[str, Any, Any]) -> list:
    """Returns transformers' list of layers, of which every n-th differs."""
    return [every[1] if n and (i + 1) % n == 0 else every[2] for i in range(layers)]


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """Returns the model section and the weights, for one of KINDS.

    Raises:
        ValueError: config.json has other math or a value out of range, or a tensor is missing or unknown.
    """
    if (found := kind_in(config)) not in KINDS:
        raise ValueError(f"config.json: model_type is {found!r}; it can be {', '.join(KINDS)}.")
    kind = KINDS[found]
    names = {**_SETTINGS, **KINDS[found].settings}
    check_fixed(config, {name: value for name, value in {**_FIXED, **kind.fixed}.items() if name not in names.values()})
    rope = config["rope_parameters"]
    experts = config.get("num_local_experts")
    if local := rope.get("sliding_attention"):
        check_fixed(local, {"rope_type": "default"})
        rope = rope["full_attention"]
        config = config | {"rope_local_base_freq": local["rope_theta"]}
    config = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), "num_experts": experts} | config
    check_fixed(config, {} if "rotary_share" in names else {"partial_rotary_factor": 1.0})
    settings = {**kind.ours, **{ours: config.get(theirs) for ours, theirs in names.items()}}
    heads = config["num_attention_heads"]
    n_kv = config["num_key_value_heads"] or config["num_attention_heads"]
    d_head = config.get("head_dim") or config["hidden_size"] // heads
    d_head += config.get("qk_nope_head_dim", 0)  # where head_dim counts what RoPE turns
    settings |= {"n_kv": n_kv, "n_q_per_kv": heads // n_kv, "d_head": d_head, "bos_id": config["bos_token_id"]}
    settings |= {"rope_base": float(rope["rope_theta"]), "rope_scaling": _scaling(rope, config)}
    if found == "cohere2":
        settings["logit_divisor"] = 1 / (config["logit_scale"] or math.inf)
    if "dense_layers" in names:
        if settings["dense_layers"] >= settings["layers"]:
            raise ValueError(
                f"config.json: first_k_dense_replace is {settings['dense_layers']} of num_hidden_layers = "
                f"{settings['layers']}, so that no layer has experts; such a model cannot be imported."
            )
        settings["layers"] -= settings["dense_layers"]
    if "key_heads" in names:
        settings |= _blocks(config)
    if _SHARED_WIDTH in names.values():
        settings["shared_experts"], rest = divmod(config[_SHARED_WIDTH], settings["d_ff"])
        if rest:
            raise ValueError(
                f"config.json: {_SHARED_WIDTH} is {config[_SHARED_WIDTH]}, which is no multiple of "
                f"{names['d_ff']} = {settings['d_ff']}, so this model cannot be imported."
            )
    for ours, every in kind.every.items():
        theirs = config[every[0]]
        settings[ours] = theirs.index(every[1]) + 1 if every[1] in theirs else None
        if theirs != _layers(settings["layers"], settings[ours], every):
            raise ValueError(
                f"config.json: {every[0]} is {theirs!r:.80}; it can only have {every[1]!r} in every n-th layer, or "
                f"{every[2]!r} in all {settings['layers']}, so this model cannot be imported."
            )
    c = CONFIGS[kind.module](**settings, **({} if kind.module == "train" else {"family": found}))
    check_ranges("config.json, as a run has it: model", c)
    c.check(seq_len=1)
    grouped = bool(kind.experts) and any(name.endswith(_GROUPED["w_down"]) for name in tensors)
    names = names_of(c, grouped)
    left = "".join(f"|{re.escape(name)}" for name in left_out(config, tensors))
    weights = dataclasses.replace(names, unused=names.unused + left).from_tensors(tensors, load_model(c).table)
    return c, _as_neighbors(weights, c, kind, back=True) if config.get("rope_interleave", True) else weights


def left_out(config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Returns the names of tensors that predict further tokens (MTP), which the classes of transformers drop too."""
    layers = config["num_hidden_layers"]
    last = layers + (config.get("num_nextn_predict_layers") or 0)

    def further(name: str) -> bool:
        layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        return name.startswith("mtp.") or (layer is not None and layers <= int(layer[1]) < last)

    return [name for name in tensors if further(name)]


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    """Returns the RoPE scaling, at the length that the model was made for, max_position_embeddings."""
    if (kind := rope["rope_type"]) == "default":
        return None
    if kind not in _ROPE:
        raise ValueError(f"config.json: rope_type is {kind!r}; it can be default, {', '.join(_ROPE)}.")
    check_fixed(rope, {} if kind == "yarn" else {"mscale": None, "mscale_all_dim": None})
    rope = {name: x for name, x in rope.items() if x or not name.startswith("mscale")}  # 0: as without
    values: dict[str, Any] = {
        ours: rope[theirs] for theirs, ours in _ROPE[kind].items() if rope.get(theirs) is not None
    }
    length = config.get("max_position_embeddings")
    if kind in ("dynamic", "longrope"):
        values = {"original_length": length, "length": length} | values
    if kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = length / values["original_length"]
    return RopeScaling(kind=kind, **values)
