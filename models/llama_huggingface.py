"""The model of train.py as transformers' Llama; with QK-norm, as its Qwen3; and both, and Mistral, as that model.

docs/huggingface.md says what the two functions take and give.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from modeling.settings import ModelConfig, RopeScaling
from models.huggingface_tensors import check_names
from train import Transformer, TransformerLayer, weight_table

KNOWN_FIELDS = {
    "module", "vocab", "d_model", "layers", "n_kv", "n_q_per_kv", "d_head", "d_ff", "rope_base", "rope_scaling",
    "norm_epsilon", "tied_embeddings", "embed_init_scale", "weight_init_scale", "qk_norm", "bos_id",
}  # fmt: skip
"""What a configuration of train.py may set to be a Llama or a Qwen3."""

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
_WHOLE = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "unembed": "lm_head.weight"}


def _layer_shape(name: str, c: ModelConfig) -> tuple[int, ...]:
    """The shape of one layer's weight, as train.py has it."""
    return {
        "w_q": (c.d_model, c.n_kv, c.n_q_per_kv, c.d_head),
        "w_k": (c.d_model, c.n_kv, c.d_head),
        "w_v": (c.d_model, c.n_kv, c.d_head),
        "w_o": (c.n_kv, c.n_q_per_kv, c.d_head, c.d_model),
        "w_gate": (c.d_model, c.d_ff),
        "w_up": (c.d_model, c.d_ff),
        "w_down": (c.d_ff, c.d_model),
        "q_norm": (c.d_head,),
        "k_norm": (c.d_head,),
    }.get(name, (c.d_model,))


def _theirs(name: str, x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """One layer's weight, from our layout to torch's [outputs, inputs]. In both, heads are K-major."""
    if x.ndim == 1:
        return x
    return (x.reshape(-1, c.d_model) if name == "w_o" else x.reshape(x.shape[0], -1)).T


def _ours(name: str, x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """The inverse of `_theirs`. Raises ValueError for a tensor of another shape than the configuration asks for."""
    shape = _layer_shape(name, c)
    theirs = _theirs(name, np.broadcast_to(np.float32(0), shape), c).shape
    if x.shape != theirs:
        raise ValueError(f"{_LAYER[name]} is {list(x.shape)}; config.json asks for {list(theirs)}.")
    return x.T.reshape(shape)


def _layer_weights(c: ModelConfig) -> Iterator[tuple[str, str]]:
    for name, theirs in _LAYER.items():
        if c.qk_norm or name not in ("q_norm", "k_norm"):
            yield name, theirs


def _names(c: ModelConfig) -> set[str]:
    """Of our weights that become tensors."""
    whole = {name for name in _WHOLE if name != "unembed" or not c.tied_embeddings}
    return whole | {f"layers/{name}" for name, _ in _layer_weights(c)}


# ---- to transformers ----------------------------------------------------------------------------------------------


def to_huggingface(weights: Any, c: ModelConfig) -> tuple[dict, dict[str, Callable[[], np.ndarray]]]:
    """config.json and tensors of a Llama, or of a Qwen3 where `c` has qk_norm.

    Raises:
        ValueError: a setting or a weight that neither can express.
    """
    check_names(weights, _names(c), "Llama and Qwen3")
    if c.logit_softcap is not None:
        raise ValueError(
            f"model.logit_softcap is {c.logit_softcap}, which neither Llama nor Qwen3 in transformers has: the "
            "exported model would give other logits. A run without it (null) can be exported."
        )
    for field in fields(c):
        if field.name not in KNOWN_FIELDS and getattr(c, field.name) != field.default:
            raise ValueError(
                f"model.{field.name} is {getattr(c, field.name)!r}, which Llama and Qwen3 in transformers do not have: "
                "this model cannot be exported."
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
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            config["rope_scaling"] |= {
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_length,
            }
            config["max_position_embeddings"] = round(scaling.original_length * scaling.factor)

    tensors: dict[str, Callable[[], np.ndarray]] = {}
    for name in ("embed", *([] if c.tied_embeddings else ["unembed"]), "final_norm"):
        tensors[_WHOLE[name]] = partial(np.asarray, getattr(weights, name))
    # All layers of a weight in a row: a checkpoint's chunk may hold several of them.
    for name, theirs in _layer_weights(c):
        for i in range(c.layers):
            tensors[f"model.layers.{i}.{theirs}.weight"] = partial(_read_layer, weights.layers, name, i, c)
    return config, tensors


def _read_layer(layers: Any, name: str, i: int, c: ModelConfig) -> np.ndarray:
    return _theirs(name, getattr(layers, name)[i], c)


# ---- from transformers --------------------------------------------------------------------------------------------

_DEFAULTS = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
}
"""Where the types differ in what a config.json means that does not state a value; transformers' own."""

_READ = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "attention_dropout", "partial_rotary_factor",
    "bos_token_id",
}  # fmt: skip
_WITHOUT_EFFECT = {
    # Token ids, lengths, names, and how to run or train: none of it changes a logit.
    "eos_token_id", "pad_token_id", "unk_token_id", "max_position_embeddings", "initializer_range", "use_cache",
    "pretraining_tp", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label",
    "label2id", "problem_type", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "is_llama_config", "tokenizer_class", "transformers.js_config", "_commit_hash",
}  # fmt: skip


def from_huggingface(config: dict, tensors: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Any]:
    """The model section and the weights of a Llama, Mistral or Qwen3.

    Raises:
        ValueError: config.json asks for other math than that of train.py; a tensor is missing, of another shape, or
            one that this model has no place for; or train.py has other weights.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type is {kind!r}; train.py can be {', '.join(ARCHITECTURES)}.")
    given = _DEFAULTS[kind] | {
        key: value for key, value in config.items() if value is not None or key == "sliding_window"
    }
    _check_math(kind, given)
    heads = _number(given, "num_attention_heads")
    n_kv = given["num_key_value_heads"] or heads
    if heads % n_kv:
        raise ValueError(f"config.json: num_attention_heads is {heads}, no multiple of num_key_value_heads {n_kv}.")
    base, scaling = _rope(given)
    c = ModelConfig(
        vocab=_number(given, "vocab_size"),
        d_model=_number(given, "hidden_size"),
        layers=_number(given, "num_hidden_layers"),
        n_kv=n_kv,
        n_q_per_kv=heads // n_kv,
        d_head=given["head_dim"] or _number(given, "hidden_size") // heads,
        d_ff=_number(given, "intermediate_size"),
        rope_base=float(base),
        rope_scaling=scaling,
        norm_epsilon=float(given.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(given.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        bos_id=given["bos_token_id"],
    )
    check_names(weight_table(c), _names(c), "Llama and Qwen3")
    _check_names(c, tensors)
    return c, _weights(c, tensors)


def _number(given: Mapping[str, Any], key: str) -> int:
    if not isinstance(given.get(key), int):
        raise ValueError(f"config.json: {key} is {given.get(key)!r}; it must be a whole number.")
    return given[key]


def _check_math(kind: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for what changes the math and train.py does not have."""
    wanted = {
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
    for key, supported in wanted.items():
        if not supported:
            raise ValueError(
                f"config.json: {key} is {given[key]!r}, which train.py does not compute: the imported model would give "
                "other logits."
            )
    for key in given:
        if key not in _READ and key not in _WITHOUT_EFFECT and given[key]:
            raise ValueError(
                f"config.json: {key} is {given[key]!r}, of which it is not known here whether it changes the logits. "
                f"If it does not, give ignore=[{key}]."
            )


def _rope(given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it).

    Raises:
        ValueError: another kind of scaling than those of train.py, a value missing, or the two contradict each other.
    """
    stated: dict[str, Any] = {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
    for key in ("rope_scaling", "rope_parameters"):
        for name, value in (given.get(key) or {}).items():
            name = "rope_type" if name == "type" else name
            if stated.setdefault(name, value) != value:
                raise ValueError(f"config.json: {key} says {name} is {value!r}, and elsewhere it is {stated[name]!r}.")
    base, kind = stated.pop("rope_theta", 10_000.0), stated.pop("rope_type", "default")
    names = {
        "default": {},
        "linear": {"factor": "factor"},
        "llama3": {
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
        },
    }
    if kind not in names:
        raise ValueError(f"config.json: rope_type is {kind!r}; train.py has {', '.join(names)}.")
    if stated.pop("partial_rotary_factor", 1.0) != 1:
        raise ValueError("config.json: partial_rotary_factor is not 1, and train.py turns whole heads.")
    if kind == "default":
        stated.pop("factor", None)
    if unknown := stated.keys() - names[kind].keys():
        raise ValueError(
            f"config.json: rope_type {kind} with {', '.join(sorted(unknown))}, which train.py does not have."
        )
    if missing := names[kind].keys() - stated.keys():
        raise ValueError(f"config.json: rope_type {kind} lacks {', '.join(sorted(missing))}.")
    values = {ours: stated[theirs] for theirs, ours in names[kind].items()}
    return base, None if kind == "default" else RopeScaling(kind=kind, **values)


def _check_names(c: ModelConfig, tensors: Mapping[str, Any]) -> None:
    """Raises ValueError for tensors missing, and for those that this model has no place for."""
    wanted = {_WHOLE["embed"], _WHOLE["final_norm"]} | ({_WHOLE["unembed"]} if not c.tied_embeddings else set())
    wanted |= {f"model.layers.{i}.{theirs}.weight" for i in range(c.layers) for _, theirs in _layer_weights(c)}
    # Tied models may state the table a second time; old files of Llama hold RoPE's frequencies.
    repeated = {_WHOLE["unembed"]} | {name for name in tensors if name.endswith("self_attn.rotary_emb.inv_freq")}
    for what, names in (
        ("lacks", wanted - set(tensors)),
        ("has, beyond this model,", set(tensors) - wanted - repeated),
    ):
        if names:
            first = ", ".join(sorted(names)[:4])
            raise ValueError(f"the model {what} {len(names)} tensors: {first}{' …' if len(names) > 4 else ''}")


def _weights(c: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Any:
    def layer(name: str, theirs: str, i: int) -> np.ndarray:
        return _ours(name, tensors[f"model.layers.{i}.{theirs}.weight"], c)

    def whole(name: str) -> np.ndarray:
        return tensors[_WHOLE[name]]

    layers = {name: [partial(layer, name, theirs, i) for i in range(c.layers)] for name, theirs in _layer_weights(c)}
    return Transformer(
        embed=partial(whole, "embed"),
        layers=TransformerLayer(**{"q_norm": None, "k_norm": None} | layers),
        final_norm=partial(whole, "final_norm"),
        unembed=None if c.tied_embeddings else partial(whole, "unembed"),
    )
