"""Compares a run's logits with those of transformers for the same model files, in f32 on one CPU
device.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardlib.shardtypes import Of, f32, make_shardings, typed_shard_map
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import TokenBatch
from shardwright.data.untrusted import refused
from shardwright.huggingface import families
from shardwright.huggingface.tensors import Tensors
from shardwright.modeling.attention_calls import calls_of
from shardwright.modeling.forward import Forward
from shardwright.modeling.masks import AttentionMask, Window, causal, same_document
from shardwright.modeling.model import compute_scope, load_model, module_of
from shardwright.modeling.settings import ModelConfig
from shardwright.program.config import TrainingConfig
from shardwright.program.spec import load_spec

LENGTH = 32
"""Largest number of tokens in the compared text: bos and random ones."""
TOLERANCE = 2**-15
"""Largest difference relative to the largest logit. transformers rounds angles and norms to f32."""
CAUSAL = ("gpt2", *families.KINDS)
"""Model types with causal attention, and windows if config.json has them."""


def module_for(config: dict) -> str:
    """Returns the value of model.module for a model with this config.json, as transformers reads
    it.
    """
    kind = families.kind_in(config)
    return families.KINDS[kind].module if kind in families.KINDS else kind


def mapping_of(module: str) -> Any:
    """Returns the Python module with `to_huggingface` and `from_huggingface` for `model.module:
    module`.

    Raises:
        ValueError: there is no such module, or it lacks them.
    """
    found = families if module in families.MODULES else module_of(module)
    for name in ("to_huggingface", "from_huggingface"):
        if not hasattr(found, name):
            raise ValueError(
                f"model.module is {module!r}, which has no {name}; see docs/huggingface.md."
            )
    return found


def forward_of(c: object) -> Forward:
    """Returns the run's forward pass in f32, without approximations."""
    training = TrainingConfig(
        batch_size=1, seq_len=LENGTH, steps=1, compute_dtype="f32", attention="einsum"
    )
    return Forward(load_model(c), training, load_spec().attention)


def one_device() -> Any:
    """Enters a mesh of one CPU device."""
    return jax.set_mesh(make_mesh(jax.devices("cpu")[:1]))


def check_rules(c: ModelConfig, config: dict) -> None:
    """Raises ValueError if attention masks differ from config.json, which a short text may not
    show.
    """
    model_type, window = config.get("model_type"), config.get("sliding_window")
    if model_type not in CAUSAL:
        return
    with one_device():
        calls = calls_of(forward_of(c), LENGTH)
    for call in calls:
        layers = config.get("layer_types") or ["sliding_attention"] * (call.place + 1)
        windows = (Window(window),) if window and layers[call.place] == "sliding_attention" else ()
        if set(call.pattern.mask_mod) - {same_document} != {causal, *windows}:
            raise ValueError(
                f"layer {call.place} has the attention mask `{call.pattern}`; {model_type} in "
                f"transformers has `{AttentionMask((causal, same_document, *windows))}`: its "
                "logits differ. Give the module its own functions to convert it as another "
                "model_type."
            )


def compare_logits(c: Any, weights: object, directory: Path, tensors: Tensors | None = None) -> str:
    """Compares the logits of a text. Returns a description of the comparison and of the difference.

    Args:
        c: the run's ModelConfig.
        weights: weights of the run, as NumPy arrays.
        directory: directory of config.json and the safetensors.
        tensors: what transformers computes with, if not the files, of which it would quantize or
            dequantize some.

    Raises:
        ValueError: the logits differ by more than TOLERANCE, or are not finite; torch is missing,
            or transformers has no model of this type.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the comparison with transformers needs {error.name}: pip install torch transformers, "
            "or set check=false."
        ) from error
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "use_safetensors": True,
        "trust_remote_code": False,
    }
    kind, source = transformers.AutoModelForCausalLM, directory
    with refused("transformers does not open this model", "check=false skips the comparison."):
        if tensors is not None:
            config = options["config"] = transformers.AutoConfig.from_pretrained(
                directory, trust_remote_code=False
            )
            vars(config).pop("quantization_config", None)
            options["state_dict"] = {name: torch.tensor(x) for name, x in tensors.items()}
            with torch.device("meta"):
                kind, source = type(kind.from_config(config)), None
        model = kind.from_pretrained(source, dtype=torch.float32, **options).eval()
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", None) or LENGTH)
    targets = np.random.default_rng(0).integers(0, c.vocab, (1, length)).astype(np.uint32)
    ids = np.concatenate([[c.bos_id], targets[0, :-1]])
    own = own_logits(c, weights, targets)
    with torch.no_grad():
        found = model(torch.tensor(ids)[None], use_cache=False).logits[0].numpy()
    far = np.max(np.abs(found - own)) / np.max(np.abs(own))
    if not far <= TOLERANCE:
        raise ValueError(
            f"the logits of this {model.config.model_type} are not the run's own: of {length} "
            f"tokens, they differ by {far:.2g} of the largest."
        )
    return (
        f"logits of {length} tokens with those of transformers: they differ by at most "
        f"{far:.1g} of the largest"
    )


def own_logits(c: object, weights: object, targets: np.ndarray) -> np.ndarray:
    """Returns the run's logits [L, V] for a text."""
    forward = forward_of(c)
    starts = np.zeros(targets.shape, bool)
    starts[:, 0] = True
    batch = TokenBatch(targets=targets, is_seq_start=starts, loss_mask=~starts)

    @typed_shard_map
    def per_device(w: Of[forward.model.Weights], batch: TokenBatch) -> f32["B/r/d L V/t"]:
        return forward.logits(forward.gatherable(w), forward.tokens(batch))

    with one_device(), compute_scope("f32"):
        placed = [
            jax.device_put(tree, make_shardings(kind, like=tree))
            for kind, tree in ((forward.model.Weights, weights), (TokenBatch, batch))
        ]
        return np.asarray(jax.jit(per_device)(*placed))[0]
