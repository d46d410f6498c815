"""The model of train.py as transformers' Llama or, with QK-norm, its Qwen3. Those two and Mistral as that model.

docs/huggingface.md describes `to_huggingface` and `from_huggingface`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.huggingface import Names, check_fixed
from shardwright.modeling.settings import ModelConfig, RopeScaling
from shardwright_data.checks import check_ranges
from train import weight_table

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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
_FIXED = {  # our math, under transformers' names
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
_ROPE = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_length",
    },
}
"""Values of each kind of RoPE scaling: transformers' names, and those of RopeScaling."""
_LAYER = {
    "attention_norm": "input_layernorm",
    "w_q": "self_attn.q_proj",
    "w_k": "self_attn.k_proj",
    "w_v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "w_o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}
_WHOLE = {"embed": "model.embed_tokens.weight", "unembed": "lm_head.weight", "final_norm": "model.norm.weight"}


def names_of(c: ModelConfig) -> Names:
    """The table of names for a model with these settings. In both layouts, heads are in the order K, Q."""
    absent = [] if c.qk_norm else ["q_norm", "k_norm"]
    absent += ["unembed"] if c.tied_embeddings else []
    return Names(
        family="Llama and Qwen3",
        whole={name: theirs for name, theirs in _WHOLE.items() if name not in absent},
        layer={f"model.layers.{{}}.{theirs}.weight": (name,) for name, theirs in _LAYER.items() if name not in absent},
        transposed=True,
        base="model.",
        # Old files hold RoPE's frequencies.
        unused=r"self_attn\.rotary_emb\.inv_freq" + (r"|lm_head\.weight" if c.tied_embeddings else ""),
    )


def to_huggingface(weights: Any, c: ModelConfig) -> tuple[dict, dict[str, np.ndarray]]:
    """Content of config.json and tensors of a Llama, or of a Qwen3 if `c` has qk_norm.

    Raises:
        ValueError: a weight or a setting that neither has.
    """
    kind = "qwen3" if c.qk_norm else "llama"
    config = {"architectures": [ARCHITECTURES[kind]], "model_type": kind} | config_of(c)
    return config, names_of(c).to_tensors(weights, weight_table(c))


def config_of(c: ModelConfig) -> dict[str, Any]:
    """What config.json says of attention, sizes and RoPE. Raises ValueError for a setting that transformers lacks."""
    if c.logit_softcap is not None:
        raise ValueError(f"model.logit_softcap is {c.logit_softcap}; no Llama in transformers has it.")
    scaling = c.rope_scaling
    config = {theirs: getattr(c, ours) for ours, theirs in _SETTINGS.items()} | _FIXED
    # The names of transformers before 5.0 for RoPE, which later versions and other programs read too.
    config |= {"num_attention_heads": c.heads, "max_position_embeddings": None}
    config |= {"rope_theta": c.rope_base, "rope_scaling": None}
    if scaling is not None:
        values = {theirs: getattr(scaling, ours) for theirs, ours in _ROPE[scaling.kind].items()}
        config["rope_scaling"] = {"rope_type": scaling.kind} | values
        if scaling.kind == "llama3":
            config["max_position_embeddings"] = round(scaling.original_length * scaling.factor)
    return config


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Any]:
    """The model section and the weights of a Llama, Mistral or Qwen3.

    Raises:
        ValueError: config.json has other math or a value out of range, a tensor is missing or has no place in this
            model, or train.py has other weights.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type is {kind!r}; train.py can be {', '.join(ARCHITECTURES)}.")
    c = ModelConfig(**settings_of(config), qk_norm=kind == "qwen3")
    check_ranges("config.json, as a run has it: model", c)
    c.check(seq_len=1)
    return c, names_of(c).from_tensors(tensors, weight_table(c))


def settings_of(config: dict) -> dict[str, Any]:
    """Settings of a model, but for those of its MLP and its norms of heads. Raises ValueError for other math."""
    check_fixed(config, _FIXED)
    settings = {ours: config.get(theirs) for ours, theirs in _SETTINGS.items()}
    heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"] or config["num_attention_heads"]
    d_head = config.get("head_dim") or config["hidden_size"] // heads
    base, scaling = _rope(config["rope_parameters"])
    settings |= {"n_kv": n_kv, "n_q_per_kv": heads // n_kv, "d_head": d_head, "bos_id": config["bos_token_id"]}
    return settings | {"rope_base": base, "rope_scaling": scaling}


def _rope(parameters: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters`."""
    base, kind = float(parameters["rope_theta"]), parameters["rope_type"]
    if kind == "default":
        return base, None
    if kind not in _ROPE:
        raise ValueError(f"config.json: rope_type is {kind!r}; train.py has default, {', '.join(_ROPE)}.")
    return base, RopeScaling(kind=kind, **{ours: parameters[theirs] for theirs, ours in _ROPE[kind].items()})
