"""Small models of transformers' own classes, what they compute of a batch, and the same as weights
of ours.
"""

import copy
import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from shardwright.data.loader import TokenBatch
from shardwright.huggingface import as_transformers_reads
from shardwright.huggingface.check import mapping_of, module_for

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 96, "bos_token_id": 3, "eos_token_id": 1, "pad_token_id": None,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-2, "attn_implementation": "eager",
}  # fmt: skip
SIZES_OF_GPT2 = {
    "vocab_size": 64, "n_positions": 96, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 3, "eos_token_id": 1,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-2,
    "attn_implementation": "eager",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "rope_theta": 100.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
KINDS = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Qwen3 small": {"head_dim": 4},
    "GPT2": {},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 48, "norm_topk_prob": True} | EXPERTS,
    "Qwen2Moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48} | EXPERTS,
    "Olmoe": EXPERTS,
    "Qwen3Next": {
        "num_hidden_layers": 8, "head_dim": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 4,
        "num_key_value_heads": 2, "linear_conv_kernel_dim": 3,
    } | EXPERTS,
    "DeepseekV3": {
        "moe_intermediate_size": 24, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "n_shared_experts": 2, "num_key_value_heads": 8,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "DeepseekV3 lite": {
        "moe_intermediate_size": 24, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_shared_experts": 1, "num_key_value_heads": 8, "q_lora_rank": None,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 12,
    },
    "Glm4Moe": {
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "head_dim": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "attention_bias": True,
        "use_qk_norm": True, "n_shared_experts": 2, "num_hidden_layers": 5,
    },
    "Qwen2": {},
    "Mistral": {"sliding_window": 5},
    "Olmo2": {},
    "Olmo3": {
        "sliding_window": 5, "head_dim": 8, "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Gemma2": {
        "sliding_window": 5, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 11, "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0, "tie_word_embeddings": True,
    },
    "Phi3": {"sliding_window": 5},
    "Llama yarn": {"rope_parameters": YARN, "head_dim": 16},
    "Llama 3": {"rope_parameters": LLAMA3, "head_dim": 8},
    "Gemma3": {
        "sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 11, "num_hidden_layers": 8,
        "sliding_window_pattern": 3, "final_logit_softcapping": 2.0, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "GptOss default": {
        "sliding_window": 5, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "GptOss": {
        "sliding_window": 5, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 3, "rope_parameters": YARN | {"truncate": False},
    },
}  # fmt: skip
"""Of each: settings of a small one. The first word is the class."""


def config_of(name: str, **changes):
    """The configuration of a small model of transformers.

    It completes the dicts that it is given.
    """
    kind = name.split()[0].replace("Gemma3", "Gemma3Text")
    sizes = SIZES_OF_GPT2 if kind == "GPT2" else SIZES
    given = copy.deepcopy(sizes | KINDS[name] | changes)
    return getattr(pytest.importorskip("transformers"), f"{kind}Config")(**given)


def theirs(name: str, **changes):
    """A small model of transformers whose weights are all random: norms and biases too."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind = name.split()[0]
    of_kind = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    torch.manual_seed(0)  # of vectors that torch draws, such as the sinks of GptOss
    model = getattr(transformers, of_kind)(config_of(name, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise)
            if key.endswith("A_log"):  # so that matrices keep something of several positions
                parameter.copy_(0.5 * noise - 1)
            if key.endswith("gate_up_proj_bias"):  # so that 7 is a limit that is met
                parameter.mul_(30)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def imported(model, **saving) -> tuple[Any, Any]:
    """Its ModelConfig and weights, as the import makes them of its files.

    `saving` are options of save_pretrained.
    """
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, **saving)
        config = as_transformers_reads(json.loads((Path(directory) / "config.json").read_text()))
        tensors = load_file(Path(directory) / "model.safetensors")
    module = module_for(config)
    c, weights = mapping_of(module).from_huggingface(config, tensors)
    return dataclasses.replace(c, module=module), jax.tree.map(np.float32, weights)


def exported(c, weights):
    """The model of transformers that the export makes of weights of ours."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    content, tensors = mapping_of(c.module).to_huggingface(jax.tree.map(np.asarray, weights), c)
    config = transformers.AutoConfig.for_model(
        **{key: x for key, x in content.items() if x is not None}
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    state = {name: torch.tensor(x) for name, x in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # of a tied model
    assert not unexpected
    model.tie_weights()
    return model


def logits_of_documents(model, batch: TokenBatch, bos_id: int):
    """Logits of the rows of a batch: each document is a sequence of its own, by masks and positions
    of the model.
    """
    import torch

    starts = batch.is_seq_start | (np.arange(batch.targets.shape[1]) == 0)
    before = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
    ids = np.where(starts, bos_id, before).astype(np.int64)
    document = np.cumsum(starts.flatten()).reshape(starts.shape) - 1
    position = np.arange(starts.shape[1]) - np.maximum.accumulate(
        np.where(starts, np.arange(starts.shape[1]), 0), 1
    )
    # no token sees what is behind it
    padded = np.zeros((document.max() + 1, position.max() + 1), np.int64)
    padded[document, position] = ids
    return model(input_ids=torch.tensor(padded), use_cache=False).logits[document, position]


class Truth(NamedTuple):
    """A model, and the loss of a batch with its gradients, as host arrays in the layout of ours."""

    config: Any
    weights: Any
    loss: float
    gradients: Any


@functools.cache
def truth_of(name: str, documents: bool, z_loss: float, batch: Any) -> Truth:
    """What transformers computes of `batch()`. Without `documents` each row is one."""
    import torch

    model, given = theirs(name), batch()
    c, weights = imported(model)
    if not documents:
        given = dataclasses.replace(given, is_seq_start=np.zeros_like(given.is_seq_start))
    logits = logits_of_documents(model, given, c.bos_id).flatten(0, 1)
    targets = torch.tensor(given.targets.astype(np.int64)).flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    losses = losses + z_loss * torch.logsumexp(logits, dim=-1) ** 2
    loss = losses[torch.tensor(given.loss_mask).flatten()].mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # which no loss moves
                buffer.zero_()
    return Truth(c, weights, loss.item(), imported(model)[1])
