"""Llama of `transformers` in PyTorch: torch.compile, fused attention, fused AdamW; bf16 is autocast
of f32 weights.
"""

import contextlib
import os

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from bench.throughput.peers.job import Job, Shapes, Trainer, batches, inputs_of


def causal(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
    """The sdpa path of transformers without its mask, which would rule out fused kernels under
    torch.compile.
    """
    shared = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal_sdpa", causal)


def model_of(c: Shapes, device: str) -> LlamaForCausalLM:
    settings = {
        "vocab_size": c.vocab,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "rms_norm_eps": c.norm_epsilon,
    }
    settings |= {
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.n_kv,
    }
    settings |= {
        "head_dim": c.d_head,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
    }
    settings |= {
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "causal_sdpa",
    }
    config = LlamaConfig(**settings)
    with torch.device(device):
        return LlamaForCausalLM(config).train()


NAMES = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
NAMES |= {f"self_attn.{x}_proj": f"w_{x}" for x in "qkvo"} | {
    f"mlp.{x}_proj": f"w_{x}" for x in ("gate", "up", "down")
}
WHOLE = {"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "unembed"}
"""Our weights by their modules: in a layer, and beside the layers."""


def load(model: LlamaForCausalLM, weights: dict[str, np.ndarray]) -> None:
    """Puts weights in train.py's layout into `model`: torch has outputs first, and one dim for all
    heads.
    """
    d_model = model.config.hidden_size
    found = {f"{module}.weight": weights[name] for module, name in WHOLE.items()}
    for module, name in NAMES.items():
        shape = (-1, d_model) if name in ("w_o", "w_down") else (d_model, -1)
        for i, x in enumerate(weights[name]):
            found[f"model.layers.{i}.{module}.weight"] = x if x.ndim == 1 else x.reshape(shape).T
    model.load_state_dict(
        {name: torch.tensor(np.ascontiguousarray(x)) for name, x in found.items()}
    )


class Contestant(Trainer):
    """The trainer in PyTorch."""

    def __init__(self, job: Job, weights: dict[str, np.ndarray], compiled: bool = True):
        self.job = job
        self.device = "cuda" if job.platform == "gpu" else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.set_float32_matmul_precision("high" if job.dtype == "bf16" else "highest")
        self.model = model_of(job.shapes, self.device)
        load(self.model, weights)
        betas = (job.b1, job.b2)
        decay = job.weight_decay
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), job.learning_rate, betas, job.epsilon, decay, fused=True
        )
        self.batches = [
            tuple(
                torch.tensor(ids.astype(np.int64), device=self.device) for ids in (inputs_of(x), x)
            )
            for x in batches(job)
        ]
        self.loss_of = torch.compile(self.plain_loss) if compiled else self.plain_loss
        if self.device == "cuda":
            # Torch prefers FlashAttention. On Hopper cuDNN's kernels are faster.
            torch.backends.cuda.enable_flash_sdp(torch.cuda.get_device_capability()[0] < 9)

    def plain_loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def run(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        half = self.job.dtype == "bf16"
        with torch.autocast(self.device, torch.bfloat16) if half else contextlib.nullcontext():
            loss = self.loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    def peak(self) -> int:
        """Of what torch allocated on the GPU."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else super().peak()
