"""Logits, losses and gradients of transformers' Llama with weights of ours."""

import jax
import numpy as np
import pytest

import train
from shardwright.modeling.settings import ModelConfig
from tests.support import tiny
from tests.support.huggingface_models import assert_same, losses_and_gradients, their_logits

torch = pytest.importorskip("torch", reason="the Llama oracle needs torch, installed on Python 3.11 only")


transformers = pytest.importorskip("transformers", reason="the Llama oracle needs transformers")


def to_llama(w: train.Transformer) -> dict:
    """Our weights under the names, and in the layouts, of transformers' Llama, or of its mixtures of experts."""

    def tensor(x):
        return torch.tensor(np.asarray(x))

    state = {
        "model.embed_tokens.weight": tensor(w.embed),
        "model.norm.weight": tensor(w.final_norm),
        "lm_head.weight": tensor(w.embed if w.unembed is None else w.unembed),
    }
    for i in range(w.layers.w_q.shape[0]):
        layer = jax.tree.map(lambda x, i=i: tensor(x[i]), w.layers)
        model_dim = layer.w_q.shape[0]
        named = {
            "input_layernorm.weight": layer.attention_norm,
            "self_attn.q_proj.weight": layer.w_q.reshape(model_dim, -1).T,
            "self_attn.k_proj.weight": layer.w_k.reshape(model_dim, -1).T,
            "self_attn.v_proj.weight": layer.w_v.reshape(model_dim, -1).T,
            "self_attn.o_proj.weight": layer.w_o.reshape(-1, model_dim).T,
            "post_attention_layernorm.weight": layer.mlp_norm,
        }
        if hasattr(layer, "router"):
            named["mlp.gate.weight"] = layer.router.T
            named["mlp.experts.gate_up_proj"] = torch.cat([layer.w_gate, layer.w_up], dim=2).transpose(1, 2)
            named["mlp.experts.down_proj"] = layer.w_down.transpose(1, 2)
        else:
            named |= {f"mlp.{name}_proj.weight": getattr(layer, f"w_{name}").T for name in ("gate", "up", "down")}
        for name in ("q_norm", "k_norm"):
            found = [getattr(layer, each, None) for each in (name, f"{name}_all")]
            named |= {f"self_attn.{name}.weight": weight.reshape(-1) for weight in found if weight is not None}
        state |= {f"model.layers.{i}.{name}": value.contiguous() for name, value in named.items()}
    return state


def llama(w: train.Transformer, c: ModelConfig):
    kind = transformers.Qwen3Config if c.qk_norm else transformers.LlamaConfig
    config = kind(
        vocab_size=c.vocab,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.layers,
        num_attention_heads=c.n_kv * c.n_q_per_kv,
        num_key_value_heads=c.n_kv,
        head_dim=c.d_head,
        rms_norm_eps=c.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        tie_word_embeddings=c.tied_embeddings,
        attn_implementation="eager",
    )
    model = (transformers.Qwen3ForCausalLM if c.qk_norm else transformers.LlamaForCausalLM)(config)
    model.load_state_dict(to_llama(w), strict=True)
    return model


def compare(mesh, changes, z_loss=0.0, **training):
    """Logits, loss and gradients of tiny's model with `changes` against those of Llama."""
    c, batch = tiny.model(**changes), tiny.host_batch()
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.weights(c)
        logits, loss, gradients = losses_and_gradients(w, batch, c, z_loss, **training)
    model = llama(w, c)
    expected = their_logits(model, batch, bos_id=0)
    if c.logit_softcap is not None:
        assert expected.abs().max() > c.logit_softcap, "the cap is felt"
        expected = c.logit_softcap * torch.tanh(expected / c.logit_softcap)
    assert_same((logits, loss, to_llama(gradients)), expected, model, batch, z_loss)
