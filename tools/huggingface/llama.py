"""The model of train.py as transformers' Llama or, with QK-norm, its Qwen3. Those two and Mistral as that model.

docs/huggingface.md describes `to_huggingface` and `from_huggingface`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from shardwright.huggingface import check_names, check_tensors, tied, whole_number
from shardwright.modeling.settings import ModelConfig, RopeScaling
from shardwright_data.checks import check_ranges
from train import Transformer, TransformerLayer, weight_table

KNOWN_FIELDS = {
    "module", "vocab", "d_model", "layers", "n_kv", "n_q_per_kv", "d_head", "d_ff", "rope_base", "rope_scaling",
    "norm_epsilon", "tied_embeddings", "embed_init_scale", "weight_init_scale", "qk_norm", "bos_id",
}  # fmt: skip
"""Settings of train.py that a Llama or a Qwen3 can have."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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


def _tensor_names(c: ModelConfig) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Names in transformers of the weights outside of the layers, and of each layer of the other weights."""
    absent = [] if c.qk_norm else ["q_norm", "k_norm"]
    absent += ["unembed"] if c.tied_embeddings else []
    whole = {name: theirs for name, theirs in _WHOLE.items() if name not in absent}
    of_layers = lambda theirs: [f"model.layers.{i}.{theirs}.weight" for i in range(c.layers)]
    return whole, {name: of_layers(theirs) for name, theirs in _LAYER.items() if name not in absent}


def _check_weights(weights: Any, c: ModelConfig) -> None:
    whole, layers = _tensor_names(c)
    check_names(weights, {*whole, *(f"layers/{name}" for name in layers)}, "Llama and Qwen3")


def _theirs(name: str, x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """Weight of one layer, from our layout to torch's [outputs, inputs]. In both, heads are in the order K, Q."""
    if x.ndim == 1:
        return x
    return (x.reshape(-1, c.d_model) if name == "w_o" else x.reshape(x.shape[0], -1)).T


def _ours(name: str, x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """Inverse of `_theirs`. Raises ValueError for a tensor whose shape is not that of the configuration."""
    shape = getattr(weight_table(c).layers, name).shape[1:]
    theirs = _theirs(name, np.broadcast_to(np.float32(0), shape), c).shape
    if x.shape != theirs:
        raise ValueError(f"{_LAYER[name]} is {list(x.shape)}; config.json asks for {list(theirs)}.")
    return x.T.reshape(shape)


# ---- to transformers ----------------------------------------------------------------------------------------------


def to_huggingface(weights: Any, c: ModelConfig) -> tuple[dict, dict[str, Callable[[], np.ndarray]]]:
    """Content of config.json and tensors of a Llama, or of a Qwen3 if `c` has qk_norm.

    Raises:
        ValueError: a setting or a weight that neither can have.
    """
    _check_weights(weights, c)
    for field in fields(c):
        if field.name not in KNOWN_FIELDS and getattr(c, field.name) != field.default:
            raise ValueError(
                f"model.{field.name} is {getattr(c, field.name)!r}, which neither Llama nor Qwen3 in transformers has: "
                "the exported model would give other logits. A run with the default can be exported."
            )
    kind = "qwen3" if c.qk_norm else "llama"
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": c.vocab,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.n_kv,
        "head_dim": c.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": None,
        "rms_norm_eps": c.norm_epsilon,
        # The names of transformers before 5.0, which later versions and other programs read too.
        "rope_theta": c.rope_base,
        "rope_scaling": None,
        "tie_word_embeddings": c.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
    config |= {"mlp_bias": False} if kind == "llama" else {"use_sliding_window": False, "sliding_window": None}
    scaling = c.rope_scaling
    if scaling is not None:
        values = {theirs: getattr(scaling, ours) for theirs, ours in _ROPE[scaling.kind].items()}
        config["rope_scaling"] = {"rope_type": scaling.kind} | values
        if scaling.kind == "llama3":
            config["max_position_embeddings"] = round(scaling.original_length * scaling.factor)

    def in_layer(name: str, i: int) -> np.ndarray:
        return _theirs(name, getattr(weights.layers, name)[i], c)

    whole, layers = _tensor_names(c)
    tensors = {theirs: partial(np.asarray, getattr(weights, name)) for name, theirs in whole.items()}
    # The layers of a weight follow one another: a chunk of a checkpoint may hold several of them.
    for name, theirs in layers.items():
        tensors |= {tensor: partial(in_layer, name, i) for i, tensor in enumerate(theirs)}
    return config, tensors


# ---- from transformers --------------------------------------------------------------------------------------------

_DEFAULTS = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
}
"""Values that a config.json of each type means where it has none, as in transformers."""

_READ = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "attention_dropout", "partial_rotary_factor",
    "bos_token_id",
}  # fmt: skip
_WITHOUT_EFFECT = {
    # Token ids, lengths, names, and how to run or train: none of these changes a logit.
    "eos_token_id", "pad_token_id", "unk_token_id", "max_position_embeddings", "initializer_range", "use_cache",
    "pretraining_tp", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label",
    "label2id", "problem_type", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "is_llama_config", "tokenizer_class", "transformers.js_config", "_commit_hash",
}  # fmt: skip

_ROPE = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_length",
    },
}
"""Values of each kind of RoPE scaling: transformers' names, and those of RopeScaling."""


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Any]:
    """The model section and the weights of a Llama, Mistral or Qwen3.

    Raises:
        ValueError: config.json has math that train.py does not compute; a tensor is missing, has another shape, or has
            no place in this model; or train.py has other weights.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type is {kind!r}; train.py can be {', '.join(ARCHITECTURES)}.")
    given = _DEFAULTS[kind] | {
        key: value for key, value in config.items() if value is not None or key == "sliding_window"
    }
    _check_math(kind, given)
    heads, d_model = whole_number(given, "num_attention_heads"), whole_number(given, "hidden_size")
    n_kv = given["num_key_value_heads"] or heads
    if heads % n_kv:
        raise ValueError(
            f"config.json: num_attention_heads is {heads}, which is not a multiple of num_key_value_heads {n_kv}."
        )
    base, scaling = _rope(given)
    c = ModelConfig(
        vocab=whole_number(given, "vocab_size"),
        d_model=d_model,
        layers=whole_number(given, "num_hidden_layers"),
        n_kv=n_kv,
        n_q_per_kv=heads // n_kv,
        d_head=given["head_dim"] or d_model // heads,
        d_ff=whole_number(given, "intermediate_size"),
        rope_base=float(base),
        rope_scaling=scaling,
        norm_epsilon=float(given.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(given.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        bos_id=given["bos_token_id"],
    )
    check_ranges("model", c)
    c.check(seq_len=1)
    _check_weights(weight_table(c), c)
    whole, layers = _tensor_names(c)
    # Tied models may have the table a second time. Old files of Llama hold RoPE's frequencies.
    unused = {_WHOLE["unembed"], *(name for name in tensors if name.endswith("self_attn.rotary_emb.inv_freq"))}
    check_tensors(tensors, {*whole.values(), *(name for names in layers.values() for name in names)}, unused)

    def in_layer(name: str, tensor: str) -> np.ndarray:
        return _ours(name, tensors[tensor], c)

    of_layers = {name: [partial(in_layer, name, tensor) for tensor in theirs] for name, theirs in layers.items()}
    of_whole = {name: partial(tensors.__getitem__, theirs) for name, theirs in whole.items()}
    if c.tied_embeddings:
        of_whole["embed"] = tied(tensors, _WHOLE["embed"], _WHOLE["unembed"])
    layer_weights = TransformerLayer(**{"q_norm": None, "k_norm": None} | of_layers)
    return c, Transformer(**{"unembed": None} | of_whole, layers=layer_weights)


def _check_math(kind: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for values of config.json that change the math to one that train.py does not compute."""
    supported = {
        "architectures": given.get("architectures", [ARCHITECTURES[kind]]) == [ARCHITECTURES[kind]],
        "hidden_act": given.get("hidden_act", "silu") in ("silu", "swish"),
        "attention_bias": not given.get("attention_bias"),
        "mlp_bias": not given.get("mlp_bias"),
        "attention_dropout": not given.get("attention_dropout"),
        "partial_rotary_factor": given.get("partial_rotary_factor", 1.0) == 1,
        "use_sliding_window": not given.get("use_sliding_window"),
        "sliding_window": kind != "mistral" or given["sliding_window"] is None,
        "layer_types": set(given.get("layer_types", [])) <= {"full_attention"},
    }
    for key, is_supported in supported.items():
        if not is_supported:
            raise ValueError(
                f"config.json: {key} is {given[key]!r}, which train.py does not compute: the imported model would give "
                "other logits."
            )
    for key in given:
        if key not in _READ and key not in _WITHOUT_EFFECT and given[key]:
            raise ValueError(
                f"config.json: {key} is {given[key]!r}, and it is not known here whether that changes the logits. If "
                f"it does not, give ignore=[{key}]."
            )


def _rope(given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it).

    Raises:
        ValueError: a kind of scaling that train.py does not have, a missing value, or two that contradict each other.
    """
    stated: dict[str, Any] = {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
    for key in ("rope_scaling", "rope_parameters"):
        for name, value in (given.get(key) or {}).items():
            name = "rope_type" if name == "type" else name
            if stated.setdefault(name, value) != value:
                raise ValueError(f"config.json: {key} says {name} is {value!r}, and elsewhere it is {stated[name]!r}.")
    base, kind = stated.pop("rope_theta", 10_000.0), stated.pop("rope_type", "default")
    if kind not in _ROPE:
        raise ValueError(f"config.json: rope_type is {kind!r}; train.py has {', '.join(_ROPE)}.")
    if stated.pop("partial_rotary_factor", 1.0) != 1:
        raise ValueError("config.json: partial_rotary_factor is not 1, but train.py turns whole heads.")
    if kind == "default":
        stated.pop("factor", None)
    if unknown := stated.keys() - _ROPE[kind].keys():
        raise ValueError(
            f"config.json: rope_type {kind} with {', '.join(sorted(unknown))}, which train.py does not have."
        )
    if missing := _ROPE[kind].keys() - stated.keys():
        raise ValueError(f"config.json: rope_type {kind} lacks {', '.join(sorted(missing))}.")
    for name, value in stated.items():
        if not isinstance(value, int | float):
            raise ValueError(f"config.json: {name} of rope_type {kind} is {value!r}; it must be a number.")
    values = {ours: stated[theirs] for theirs, ours in _ROPE[kind].items()}
    return base, None if kind == "default" else RopeScaling(kind=kind, **values)
