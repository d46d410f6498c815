"""Converts models of train.py, family.py and moe.py to and from transformers' model types in KINDS.

docs/huggingface.md describes `to_huggingface` and `from_huggingface`.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shardwright.data.checks import check_ranges
from shardwright.huggingface.names import Layers, Names, check_fixed
from shardwright.modeling.model import load_model, module_of
from shardwright.modeling.settings import ModelConfig, RopeScaling


class Kind(NamedTuple):
    """Differences of a family in transformers from Llama."""

    module: str
    """Value of model.module."""
    ours: Mapping[str, Any] = {}
    """Our settings that all models of the family have."""
    settings: Mapping[str, str] = {}
    """Our settings that differ within the family, with the names in transformers."""
    every: Mapping[str, tuple[str, Any, Any]] = {}
    """Our settings that change every n-th layer, with the list of layers in transformers'
    config.json, and its entries for such a layer and for the others."""
    fixed: Mapping[str, Any] = {}
    """Settings in transformers that must have these values for the same math."""
    names: Mapping[str, str] = {}
    """Weights of a layer, ours and theirs, with {} for the index of an expert. Several of ours that
    map to one of theirs are concatenated in it."""
    stacks: Mapping[str, str] = {}
    """Stacked weights of a layer's experts. Several of ours that map to one of theirs are
    interleaved in it."""
    neighbors: Mapping[str, str] = {}
    """Our weights of queries and keys whose last entries, as many as this setting says, RoPE turns
    as neighbors, where ours turns one of each half."""


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
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("beta_slow", "beta_fast", "original_max_position_embeddings"),
        *("attention_factor", "truncate", "mscale", "mscale_all_dim"),
    ),
}
"""Settings in transformers of each kind of RoPE scaling, beside `factor`."""
_ROPE_OURS = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_slow": "slow_turns",
    "beta_fast": "fast_turns",
    "original_max_position_embeddings": "original_length",
}
"""Those of them that RopeScaling names otherwise."""
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
_WHOLE = {
    "embed": "model.embed_tokens.weight",
    "unembed": "lm_head.weight",
    "final_norm": "model.norm.weight",
}

_FURTHER = {
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "w_join": "eh_proj.weight",
}
"""Weights of DeepSeek-V3's module that predicts the token after the next, beside a layer's."""

_WINDOW = {"window": "sliding_window"}
_FULL_EVERY = {"full_every": ("layer_types", "full_attention", "sliding_attention")}
_LINEAR = ("layer_types", "full_attention", "linear_attention")
_WINDOW_ROPE = {"window_rope_base": "rope_local_base_freq"}
_ROTARY_SHARE = {"rotary_share": "partial_rotary_factor"}
_QKV_BIAS = {f"b_{x}": f"self_attn.{x}_proj.bias" for x in "qkv"}
_QK_ALL = {f"{x}_norm_all": f"self_attn.{x}_norm.weight" for x in "qk"}
_OUT_NORMS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_FUSED: dict[str, str] = dict.fromkeys(("w_q", "w_k", "w_v"), "self_attn.qkv_proj.weight")
_FUSED |= dict.fromkeys(("w_gate", "w_up"), "mlp.gate_up_proj.weight")
_OLMO = {"norms": "after", "qk_norm_all": True}
_GEMMA = {"norms": "both", "norm_offset": True, "embedding_scaled": True, "activation": "gelu"}
_GEMMA_SETTINGS = _WINDOW | {
    "logit_softcap": "final_logit_softcapping",
    "attention_scalar": "query_pre_attn_scalar",
}
_CAPPED = {"attention_softcap": "attn_logit_softcapping"}
_GELU = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")

_EXPERTS = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_LOCAL_EXPERTS = _EXPERTS | {"experts": "num_local_experts"}
_SPARSE = _EXPERTS | {"d_ff": "moe_intermediate_size", "normalize": "norm_topk_prob"}
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_ROUTER = {"router": "mlp.gate.weight"}
_SWIGLU = _ROUTER | {f"w_{x}": f"mlp.experts.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")}
_MIXTRAL = (("w_gate", "w1"), ("w_up", "w3"), ("w_down", "w2"))
_SHARED_WIDTH = "shared_expert_intermediate_size"
_SCORED_BY_TOKEN = {
    f"shared_{x}": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")
}
_SCORED_BY_TOKEN |= _SWIGLU | {"shared_score": "mlp.shared_expert_gate.weight"}
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
_SCORED_NAMES = {
    f"shared_{x}": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")
}
_SCORED_NAMES |= _SWIGLU | {"router_bias": "mlp.gate.e_score_correction_bias"}
KINDS = {
    "llama": Kind("train"),
    "qwen3": Kind("train", ours={"qk_norm": True}),
    "mistral": Kind("family", settings=_WINDOW),
    "qwen2": Kind("family", ours={"qkv_bias": True}, names=_QKV_BIAS),
    "olmo2": Kind("family", ours=_OLMO, names=_OUT_NORMS | _QK_ALL),
    "olmo3": Kind(
        "family",
        ours=_OLMO,
        settings=_WINDOW | _WINDOW_ROPE,
        every=_FULL_EVERY,
        names=_OUT_NORMS | _QK_ALL,
    ),
    "smollm3": Kind("family", every={"no_rope_every": ("no_rope_layers", 0, 1)}),
    "gemma2": Kind(
        "family",
        ours=_GEMMA,
        settings=_GEMMA_SETTINGS | _CAPPED,
        every=_FULL_EVERY,
        fixed=_GELU | {"use_bidirectional_attention": None},
        names=_OUT_NORMS,
    ),
    "gemma3_text": Kind(
        "family",
        ours=_GEMMA | {"qk_norm": True},
        settings=_GEMMA_SETTINGS | _WINDOW_ROPE,
        every=_FULL_EVERY,
        fixed=_GELU | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        names=_OUT_NORMS,
    ),
    "phi3": Kind("family", settings=_WINDOW | _ROTARY_SHARE, names=_FUSED),
    "mixtral": Kind(
        "moe",
        settings=_LOCAL_EXPERTS,
        fixed={"router_jitter_noise": 0.0},
        names={"router": "block_sparse_moe.gate.weight"}
        | {ours: f"block_sparse_moe.experts.{{}}.{theirs}.weight" for ours, theirs in _MIXTRAL},
    ),
    "qwen3_moe": Kind(
        "moe", ours={"qk_norm": True}, settings=_SPARSE, fixed=_ALL_SPARSE, names=_SWIGLU
    ),
    "qwen2_moe": Kind(
        "moe",
        ours={"shared_scored": True},
        settings=_SPARSE | {"qkv_bias": "qkv_bias", "shared_experts": _SHARED_WIDTH},
        fixed=_ALL_SPARSE | {"sliding_window": 0},
        names=_QKV_BIAS | _SCORED_BY_TOKEN,
    ),
    "glm4_moe": Kind(
        "moe",
        ours=_SCORED,
        settings=_SCORED_SETTINGS
        | {"qk_norm": "use_qk_norm", "qkv_bias": "attention_bias"}
        | _ROTARY_SHARE,
        names=_QKV_BIAS | _SCORED_NAMES,
    ),
    "deepseek_v3": Kind(
        "mla",
        ours=_SCORED | {"n_q_per_kv": 1},
        settings=_SCORED_SETTINGS
        | {
            "kv_rank": "kv_lora_rank",
            "q_rank": "q_lora_rank",
            "d_turned": "qk_rope_head_dim",
            "d_value": "v_head_dim",
        },
        names=_SCORED_NAMES
        | {
            "w_q_latent": "self_attn.q_a_proj.weight",
            "q_latent_norm": "self_attn.q_a_layernorm.weight",
            "w_q_heads": "self_attn.q_b_proj.weight",
            "w_kv_latent": "self_attn.kv_a_proj_with_mqa.weight",
            "kv_latent_norm": "self_attn.kv_a_layernorm.weight",
            "w_kv_heads": "self_attn.kv_b_proj.weight",
        },
        neighbors=dict.fromkeys(("w_q", "w_q_heads", "w_kv_latent"), "d_turned"),
    ),
    "qwen3_next": Kind(
        "delta",
        ours={"qk_norm": True, "norm_offset": True, "gated": True, "shared_scored": True},
        settings=_SPARSE
        | {"shared_experts": _SHARED_WIDTH}
        | _ROTARY_SHARE
        | {"taps": "linear_conv_kernel_dim", "key_heads": "linear_num_key_heads"}
        | {"values_per_key": "linear_num_value_heads", "d_key": "linear_key_head_dim"}
        | {"d_value": "linear_value_head_dim", "deltas": "full_attention_interval"},
        fixed=_ALL_SPARSE,
        names=_SCORED_BY_TOKEN
        | dict.fromkeys(("conv_q", "conv_k", "conv_v"), "linear_attn.conv1d.weight")
        | {
            "w_q_and_gate": "self_attn.q_proj.weight",
            "w_in": "linear_attn.in_proj_qkvz.weight",
            "w_rates": "linear_attn.in_proj_ba.weight",
            "log_decay": "linear_attn.A_log",
            "b_decay": "linear_attn.dt_bias",
            "value_norm": "linear_attn.norm.weight",
        },
    ),
    "olmoe": Kind(
        "moe",
        ours={"qk_norm_all": True},
        settings=_SPARSE | {"d_ff": "intermediate_size"},
        fixed={"clip_qkv": None},
        names=_QK_ALL | _SWIGLU,
    ),
    "gpt_oss": Kind(
        "moe",
        ours={
            "sinks": True,
            "qkv_bias": True,
            "out_bias": True,
            "expert_bias": True,
            "activation": "clamped",
        },
        settings=_WINDOW | _LOCAL_EXPERTS,
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
MODULES = {kind.module for kind in KINDS.values()}
_TRAINING = {
    "module",
    "family",
    "groups_per_token",
    "bias_rate",
    "capacity_factor",
    "pools",
    "chunk",
    "further",
}
_TRAINING |= {"balance_loss", "router_z_loss"}
"""Settings that transformers lacks because they don't change logits."""


def kind_in(config: dict) -> str:
    """Returns the key of KINDS for a config.json as transformers reads it, or its model_type if
    there is none.
    """
    kind = str(config.get("model_type"))
    return "llama" if kind == "mistral" and config.get("sliding_window") is None else kind


def kind_of(c: ModelConfig) -> str:
    """Returns the family with this math.

    Raises ValueError if there is none, or c.family has other math.
    """
    of_module = next(base for base in type(c).__mro__ if vars(base).get("module") in MODULES)
    kinds = {name: kind for name, kind in KINDS.items() if kind.module == of_module.module}
    fields = {field.name: field.default for field in dataclasses.fields(of_module)}
    own = set(fields) - {field.name for field in dataclasses.fields(ModelConfig)} - _TRAINING
    usual = {name: fields[name] for name in sorted(own | {"qk_norm", "logit_softcap"})}
    others = {}
    for name, kind in kinds.items():
        known = {
            **usual,
            **kind.ours,
            **{ours: getattr(c, ours) for ours in (*kind.settings, *kind.every)},
        }
        others[name] = [ours for ours, value in known.items() if getattr(c, ours) != value]
    found = getattr(c, "family", None) or min(others, key=lambda name: len(others[name]))
    if found not in kinds:
        raise ValueError(f"model.family is {found!r}; it can be {', '.join(kinds)}, or null.")
    if others[found]:
        name = others[found][0]
        raise ValueError(
            f"model.{name} is {getattr(c, name)!r}; {found} in transformers does not support it."
        )
    return found


def _architecture(found: str) -> str:
    """Returns the class in transformers of a family's models."""
    name = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3"}.get(found) or found.title().replace(
        "_", ""
    )
    return f"{name}ForCausalLM"


def names_of(c: Any) -> Names:
    """Returns the table of names for a model with these settings.

    In both layouts, heads are in the order K, Q.
    """
    found = kind_of(c)
    table = load_model(c).table
    layers_of = functools.partial(_layers_of, KINDS[found])
    shaped: dict[str, tuple[int, ...]] = {}
    if KINDS[found].module == "delta":
        shaped["conv1d.weight"] = (-1, 1, c.taps)
        out = {"w_o": "linear_attn.out_proj.weight"}
        every = c.deltas + 1
        layers = [
            layers_of(table.layers.delta, out, field="layers.delta", in_block=True, every=every),
            layers_of(table.layers.full, field="layers.full", first=c.deltas, every=every),
        ]
    else:
        dense = getattr(c, "dense_layers", 0)
        layers = [layers_of(table.dense, field="dense")] if dense else []
        layers.append(layers_of(table.layers, first=dense))
    whole = dict(_WHOLE)
    if c.tied_embeddings:
        del whole["unembed"]
    if getattr(c, "further", 0):
        last = c.dense_layers + c.layers
        layers.append(layers_of(table.further, _FURTHER, field="further", first=last))
        whole["further_norm"] = f"model.layers.{last}.shared_head.norm.weight"
    return Names(
        family=found,
        whole=whole,
        layers=layers,
        transposed=True,
        shaped=shaped,
        base="model.",
        # Old files contain RoPE's frequencies.
        unused=r"self_attn\.rotary_emb\.inv_freq"
        + "".join(rf"|{re.escape(name)}" for name in _copies(c))
        + (r"|lm_head\.weight" if c.tied_embeddings else ""),
    )


def _layers_of(kind: Kind, table: Any, own: Mapping[str, str] = {}, **place: Any) -> Layers:
    """Returns the names of the weights in layers with this table, of which `own` are those of these
    layers alone.

    `place` is their place in the model.
    """
    has_experts = hasattr(table, "router")
    of_kind = {
        ours: theirs for ours, theirs in kind.names.items() if has_experts or "{}" not in theirs
    }
    names = {**_LAYER, **of_kind, **own}
    names = {
        ours: theirs
        for ours, theirs in names.items()
        if getattr(table, ours, None) and ours not in kind.stacks
    }
    return Layers(_by_theirs(names), _by_theirs(kind.stacks), **place)


def _copies(c: Any) -> dict[str, str]:
    """Returns the copies of tensors in the layer that predicts further tokens, and their names."""
    prefix = f"model.layers.{getattr(c, 'dense_layers', 0) + c.layers}."
    names = {"embed_tokens.weight": _WHOLE["embed"], "shared_head.head.weight": _WHOLE["unembed"]}
    has = getattr(c, "further", 0)
    return {prefix + copy: name for copy, name in names.items()} if has else {}


def _by_theirs(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Returns our weights of a layer for each of theirs."""
    return {
        f"model.layers.{{}}.{theirs}": tuple(x for x in names if names[x] == theirs)
        for theirs in names.values()
    }


def to_huggingface(weights: object, c: ModelConfig) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the content of config.json and the tensors, for one of KINDS.

    Raises:
        ValueError: none of them supports a weight or setting.
    """
    found = kind_of(c)
    kind = KINDS[found]
    config: dict[str, Any] = {
        "architectures": [_architecture(found)],
        "model_type": found,
        "pad_token_id": None,
    }
    config |= {**_FIXED, **kind.fixed}
    config |= {theirs: getattr(c, ours) for ours, theirs in {**_SETTINGS, **kind.settings}.items()}
    config |= {
        every[0]: _layers(c.layers, getattr(c, ours), every) for ours, every in kind.every.items()
    }
    # RoPE's names before transformers 5.0, which later versions and other programs also read.
    config |= {"num_attention_heads": c.heads, "max_position_embeddings": None}
    # For gpt-oss, null means YaRN.
    config |= {
        "rope_theta": c.rope_base,
        "rope_scaling": {"rope_type": "default"} if found == "gpt_oss" else None,
    }
    config |= _converted(config, c, kind)
    _scale_rope(config, c, found)
    tensors = names_of(c).to_tensors(_as_neighbors(weights, c, kind), load_model(c).table)
    copies = {copy: tensors[name] for copy, name in _copies(c).items() if name in tensors}
    return config, tensors | copies


def _converted(config: Mapping[str, Any], c: Any, kind: Kind) -> dict[str, Any]:
    """Returns what config.json counts otherwise than our settings, or states beside them."""
    found: dict[str, Any] = {}
    if config.get("query_pre_attn_scalar", c.d_head) is None:
        found["query_pre_attn_scalar"] = c.d_head
    if "dense_d_ff" in kind.settings:
        found |= {
            "num_hidden_layers": c.dense_layers + c.layers,
            "intermediate_size": c.dense_width,
        }
    if _SHARED_WIDTH in config:
        found[_SHARED_WIDTH] = c.shared_width
    if kind.module == "mla":
        found |= {"qk_nope_head_dim": c.d_plain, "head_dim": c.d_turned, "rope_interleave": True}
        found["num_nextn_predict_layers"] = c.further
    if kind.module == "delta":
        every = c.deltas + 1
        found |= {
            "linear_num_value_heads": c.key_heads * c.values_per_key,
            "intermediate_size": c.d_ff,
        }
        found |= {
            "num_hidden_layers": c.layers * every,
            "layer_types": _layers(c.layers * every, every, _LINEAR),
        }
        found["full_attention_interval"] = every
    return found


def _scale_rope(config: dict[str, Any], c: ModelConfig, found: str) -> None:
    """Completes a config.json by the scaling of RoPE, and by RoPE in windows.

    Raises:
        ValueError: the family does not support it.
    """
    scaling = c.rope_scaling
    if config.get("rope_local_base_freq", c.rope_base) is None:
        if scaling is not None:
            raise ValueError(
                f"model.window_rope_base is null, but {found} does not scale RoPE in windows; set "
                "it."
            )
        config["rope_local_base_freq"] = c.rope_base
    if scaling is not None:
        if found == "phi3":
            raise ValueError(
                "model.rope_scaling is set, but phi3 in transformers has none of its kinds."
            )
        values = {
            theirs: getattr(scaling, ours) for theirs, ours in _rope_names(scaling.kind).items()
        }
        values = {theirs: value for theirs, value in values.items() if value is not None}
        config["rope_scaling"] = {"rope_type": scaling.kind} | values
        if scaling.kind == "llama3":
            config["max_position_embeddings"] = round(scaling.original_length * scaling.factor)
    if found == "olmo3":  # reads the base of windows only here
        full = {"rope_type": "default", "rope_theta": c.rope_base} | (config["rope_scaling"] or {})
        of_windows = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": of_windows}


def _rope_names(kind: str) -> dict[str, str]:
    """Returns the settings of a kind of RoPE scaling: names in transformers and in RopeScaling."""
    return {theirs: _ROPE_OURS.get(theirs, theirs) for theirs in ("factor", *_ROPE[kind])}


def _as_neighbors(weights: Any, c: ModelConfig, kind: Kind, back: bool = False) -> Any:
    """Makes neighbors of the two entries of a query or key that RoPE turns together, or undoes
    that.

    Queries and keys have the same order, so attention stays the same.
    """

    def reorder(path: Any, w: np.ndarray) -> np.ndarray:
        if path[-1].name not in kind.neighbors:
            return w
        count = getattr(c, kind.neighbors[path[-1].name])
        parts = (-1, 2) if back else (2, count // 2)
        turned = (
            w[..., -count:]
            .reshape(*w.shape[:-1], *parts)
            .swapaxes(-1, -2)
            .reshape(*w.shape[:-1], count)
        )
        return np.concatenate([w[..., :-count], turned], axis=-1)

    return jax.tree_util.tree_map_with_path(reorder, weights) if kind.neighbors else weights


def _layers(layers: int, n: int | None, every: tuple[str, Any, Any]) -> list:
    """Returns transformers' list of layers, of which every n-th differs."""
    return [every[1] if n and (i + 1) % n == 0 else every[2] for i in range(layers)]


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """Returns the model section and the weights, for one of KINDS.

    Raises:
        ValueError: config.json has other math or a value out of range, or a tensor is missing or
            unknown.
    """
    if (found := kind_in(config)) not in KINDS:
        raise ValueError(f"config.json: model_type is {found!r}; it can be {', '.join(KINDS)}.")
    kind = KINDS[found]
    names = {**_SETTINGS, **kind.settings}
    check_fixed(
        config,
        {
            name: value
            for name, value in {**_FIXED, **kind.fixed}.items()
            if name not in names.values()
        },
    )
    rope = config["rope_parameters"]
    if local := rope.get("sliding_attention"):
        check_fixed(local, {"rope_type": "default"})
        rope = rope["full_attention"]
        config = config | {"rope_local_base_freq": local["rope_theta"]}
    experts = config.get("num_local_experts")
    config = {
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "num_experts": experts,
    } | config
    check_fixed(config, {} if "rotary_share" in names else {"partial_rotary_factor": 1.0})
    settings = {**kind.ours, **{ours: config.get(theirs) for ours, theirs in names.items()}}
    heads = config["num_attention_heads"]
    n_kv = config["num_key_value_heads"] or heads
    d_head = config.get("head_dim") or config["hidden_size"] // heads
    d_head += config.get("qk_nope_head_dim", 0)  # where head_dim counts what RoPE turns
    settings |= {
        "n_kv": n_kv,
        "n_q_per_kv": heads // n_kv,
        "d_head": d_head,
        "bos_id": config["bos_token_id"],
    }
    settings |= {"rope_base": float(rope["rope_theta"]), "rope_scaling": _scaling(rope, config)}
    _convert_back(settings, config, kind)
    c = module_of(kind.module).ModelConfig(
        **settings, **({} if kind.module == "train" else {"family": found})
    )
    check_ranges("config.json, as a run has it: model", c)
    c.check(seq_len=1)
    table = names_of(c)
    left = "".join(f"|{re.escape(name)}" for name in left_out(config, tensors))
    weights = dataclasses.replace(table, unused=table.unused + left).from_tensors(
        tensors, load_model(c).table
    )
    return c, _as_neighbors(weights, c, kind, back=True) if config.get(
        "rope_interleave", True
    ) else weights


def _convert_back(settings: dict[str, Any], config: Mapping[str, Any], kind: Kind) -> None:
    """Replaces the settings that config.json counts otherwise, as `_converted` does, and adds those
    of `kind.every`.

    Raises:
        ValueError: no settings of ours become these.
    """
    theirs = kind.settings
    if "dense_layers" in theirs:
        if settings["dense_layers"] >= settings["layers"]:
            raise ValueError(
                f"config.json: first_k_dense_replace is {settings['dense_layers']} of "
                f"num_hidden_layers = {settings['layers']}, so that no layer has experts; such a "
                f"model cannot be imported."
            )
        settings["layers"] -= settings["dense_layers"]
    if config.get("further"):
        if kind.module != "mla" or config.get("num_nextn_predict_layers") != 1:
            raise ValueError(
                "further is true, but config.json is not of a DeepSeek-V3 with "
                "num_nextn_predict_layers = 1, the only module for further tokens that can be "
                "imported; leave further out."
            )
        settings["further"] = 1
    if kind.module == "delta":
        types = config["layer_types"]
        every = _first(types, "full_attention") or 1
        blocks = len(types) // every
        values, rest = divmod(config["linear_num_value_heads"], config["linear_num_key_heads"])
        if every == 1 or rest or types != _layers(blocks * every, every, _LINEAR):
            raise ValueError(
                f"config.json: layer_types is {types!r:.80}; it can only have full_attention in "
                f"every n-th layer, n > 1, and linear_attention in the others, with heads of "
                f"values that are a multiple of those of keys."
            )
        settings |= {"layers": blocks, "deltas": every - 1, "values_per_key": values}
    if theirs.get("shared_experts") == _SHARED_WIDTH:
        settings["shared_experts"], rest = divmod(config[_SHARED_WIDTH], settings["d_ff"])
        if rest:
            raise ValueError(
                f"config.json: {_SHARED_WIDTH} is {config[_SHARED_WIDTH]}, which is no multiple of "
                f"{theirs['d_ff']} = {settings['d_ff']}, so this model cannot be imported."
            )
    for ours, every in kind.every.items():
        stated = config[every[0]]
        settings[ours] = _first(stated, every[1])
        if stated != _layers(settings["layers"], settings[ours], every):
            raise ValueError(
                f"config.json: {every[0]} is {stated!r:.80}; it can only have {every[1]!r} in "
                f"every n-th layer, or {every[2]!r} in all {settings['layers']}, so this model "
                "cannot be imported."
            )


def _first(layers: list, what: Any) -> int | None:
    """Returns the number of the first layer of a kind, from 1; None if there is none."""
    return layers.index(what) + 1 if what in layers else None


def left_out(config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Returns the names of tensors that predict further tokens (MTP), which the classes of
    transformers drop too.
    """
    layers = config["num_hidden_layers"]
    last = layers + (config.get("num_nextn_predict_layers") or 0)

    def further(name: str) -> bool:
        layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        return name.startswith("mtp.") or (layer is not None and layers <= int(layer[1]) < last)

    return [name for name in tensors if further(name)]


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    """Returns the RoPE scaling, at the length that the model was made for,
    max_position_embeddings.
    """
    if (kind := rope["rope_type"]) == "default":
        return None
    if kind not in _ROPE:
        raise ValueError(
            f"config.json: rope_type is {kind!r}; it can be default, {', '.join(_ROPE)}."
        )
    check_fixed(rope, {} if kind == "yarn" else {"mscale": None, "mscale_all_dim": None})
    # 0: as without
    rope = {name: x for name, x in rope.items() if x or not name.startswith("mscale")}
    values: dict[str, Any] = {
        ours: rope[theirs]
        for theirs, ours in _rope_names(kind).items()
        if rope.get(theirs) is not None
    }
    length = config.get("max_position_embeddings")
    if kind == "yarn" and "factor" not in values:
        values["factor"] = length / values["original_length"]
    return RopeScaling(kind=kind, **values)
