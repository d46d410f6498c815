"""Logits, losses and gradients of transformers' Llama with weights of ours."""

import jax
import numpy as np
import pytest
import tiny

import train
from shardlib.shardtypes import f32
from shardwright.modeling.settings import ModelConfig
from shardwright_data.loader import TokenBatch

torch = pytest.importorskip("torch", reason="the Llama oracle needs torch, installed on Python 3.11 only")


transformers = pytest.importorskip("transformers", reason="the Llama oracle needs transformers")


def to_llama(w: train.Transformer) -> dict:
    """Our weights under the names, and in the layouts, of transformers' Llama."""
    tensor = lambda x: torch.tensor(np.asarray(x))
    state = {
        "model.embed_tokens.weight": tensor(w.embed),
        "model.norm.weight": tensor(w.final_norm),
        "lm_head.weight": tensor(w.embed if w.unembed is None else w.unembed),
    }
    for i in range(w.layers.w_q.shape[0]):
        layer = jax.tree.map(lambda x, i=i: tensor(x[i]), w.layers)
        model_dim = layer.w_q.shape[0]
        named = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": layer.w_q.reshape(model_dim, -1).T,
            "self_attn.k_proj": layer.w_k.reshape(model_dim, -1).T,
            "self_attn.v_proj": layer.w_v.reshape(model_dim, -1).T,
            "self_attn.o_proj": layer.w_o.reshape(-1, model_dim).T,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": layer.w_gate.T,
            "mlp.up_proj": layer.w_up.T,
            "mlp.down_proj": layer.w_down.T,
        }
        if layer.q_norm is not None:
            named |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        state |= {f"model.layers.{i}.{name}.weight": value.contiguous() for name, value in named.items()}
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


def llama_logits(model, batch: TokenBatch):
    """Llama's logits where documents in a row do not see one another; id 0 stands before each document."""
    before = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
    inputs = np.where(batch.is_seq_start, 0, before).astype(np.int64)
    document = np.cumsum(batch.is_seq_start, axis=1)
    visible = (document[:, :, None] == document[:, None, :]) & np.tri(inputs.shape[1], dtype=bool)
    mask = torch.where(torch.tensor(visible)[:, None], 0.0, torch.finfo(torch.float32).min)
    return model(input_ids=torch.tensor(inputs), attention_mask=mask, use_cache=False).logits


def losses_and_grads(w, batch, c, z_loss=0.0, **training):
    """Ours on the mesh in force: logits, mean loss and gradients, as host arrays."""
    settings = tiny.config(c, **training)
    settings.optimizer.z_loss = z_loss

    def everything(
        w: train.Transformer, batch: TokenBatch, of_step: train.Batch
    ) -> tuple[f32["B/r/d L V/t"], f32[""], train.Transformer]:
        return tiny.logits(w, batch, settings), *tiny.loss_and_gradients(w, of_step, settings)

    batches = tiny.place(batch, TokenBatch), tiny.place_batch(settings, batch)
    return jax.tree.map(np.asarray, tiny.per_device(everything)(w, *batches))


def compare(mesh, changes, z_loss=0.0, **training):
    """Logits, loss and gradients of tiny's model with `changes` against those of Llama."""
    c, batch = tiny.model(**changes), tiny.host_batch()
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.weights(c)
        logits, loss, grads = losses_and_grads(w, batch, c, z_loss, **training)
    model = llama(w, c)
    expected = llama_logits(model, batch)
    if c.logit_softcap is not None:
        assert expected.abs().max() > c.logit_softcap, "the cap is felt"
        expected = c.logit_softcap * torch.tanh(expected / c.logit_softcap)
    flat = expected.flatten(0, 1)
    targets = torch.tensor(batch.targets.astype(np.int64)).flatten()
    losses = torch.nn.functional.cross_entropy(flat, targets, reduction="none")
    losses = losses + z_loss * torch.logsumexp(flat, dim=-1) ** 2
    mask = torch.tensor(batch.loss_mask).flatten()
    expected_loss = losses[mask].mean()
    expected_loss.backward()

    np.testing.assert_allclose(logits, expected.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected_loss.detach(), rtol=1e-4)
    ours = to_llama(grads)
    for name, parameter in model.named_parameters():
        # Entries far below a tensor's largest are sums of cancelling terms: they carry its absolute rounding error.
        scale = float(parameter.grad.abs().max())
        np.testing.assert_allclose(ours[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
