"""Logits and gradients of transformers' mixtures of experts with weights of ours."""

import pytest

from shardwright.models import moe


def oracles():
    """torch and transformers, which take seconds to import."""
    torch = pytest.importorskip("torch", reason="the oracles of experts need torch, installed on Python 3.11 only")
    return torch, pytest.importorskip("transformers", reason="the oracles of experts need transformers")


KINDS = {  # of each: its classes, their names of settings, and settings of ours
    "mixtral": ("Mixtral", {"num_local_experts": "experts", "intermediate_size": "d_ff"}, {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": "experts", "moe_intermediate_size": "d_ff", "norm_topk_prob": "normalize"},
        {"qk_norm": True},
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": "experts", "intermediate_size": "d_ff", "norm_topk_prob": "normalize"},
        {"qk_norm_all": True, "normalize": False, "n_q_per_kv": 1, "d_model": 64},
    ),
}


def model(kind: str = "mixtral", **changes) -> moe.ModelConfig:
    sizes = {"vocab": 64, "d_model": 32, "layers": 2, "n_kv": 8, "n_q_per_kv": 2, "d_head": 8, "d_ff": 24}
    experts = {"experts": 8, "experts_per_token": 3}
    return moe.ModelConfig(**sizes | experts | KINDS[kind][2] | changes)


def theirs(kind: str, w: moe.Weights, c: moe.ModelConfig):
    """The model of transformers with these weights, which runs one expert after the other."""
    (_, transformers), (prefix, names, _) = oracles(), KINDS[kind]
    from tests.support.llama_truth import to_llama

    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=c.vocab,
        hidden_size=c.d_model,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.n_kv,
        num_experts_per_tok=c.experts_per_token,
        rms_norm_eps=c.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
        **({} if kind == "olmoe" else {"head_dim": c.d_head}),
        **{their: getattr(c, ours) for their, ours in names.items()},
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    model.load_state_dict(to_llama(w), strict=True)
    return model
