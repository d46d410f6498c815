"""Forward passes of Llama, Mistral, Qwen3 and GPT-2 in NumPy, of the files that transformers reads.

They share no code with the forward pass of a run, so that the two can be compared (models/huggingface_check.py), and
know transformers' own names and layouts: config.json, and tensors [outputs, inputs]. In f64; one tensor is in memory at
a time. A text is one row of tokens: L positions, M entries of the residual stream, H heads of D entries, V token ids.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

ACTIVATIONS = {
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
"""By the names that config.json has for them."""
SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
BLOCK = 8192
"""Outputs of a product at a time: the weights of so many are in memory as f64."""


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x[L, inputs] times weight[outputs, inputs], as [L, outputs]."""
    return np.concatenate([x @ np.float64(weight[i : i + BLOCK]).T for i in range(0, len(weight), BLOCK)], -1)


def normed(x: np.ndarray, epsilon: float) -> np.ndarray:
    """x[…, N] over its root mean square along N."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal softmax attention: q[L, H, D], k and v[L, heads of keys, D] -> [L, H·D]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


class Forward:
    """What the formats have in common: `embed`, `layer` and `logits` of the model in config.json and its tensors.

    Raises:
        ValueError: an activation or RoPE scaling that is not here.
    """

    activation: ClassVar[tuple[str, str]]
    """The activation's name in config.json, and which one it is where there is none."""
    defaults: ClassVar[dict[str, Any]] = {}
    """What the absence of a value in config.json means."""

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        self.config = self.defaults | {key: value for key, value in config.items() if value is not None}
        self.tensors = tensors
        key, default = self.activation
        name = self.config.get(key, default)
        self.act = ACTIVATIONS.get(SAME.get(name, name))
        if self.act is None:
            raise ValueError(
                f"config.json: {key} is {name!r}; models/huggingface_forward.py has {', '.join(ACTIVATIONS)}."
            )

    def variants(self) -> dict[str, "Forward"]:
        """The same model with other math, by what is other: what a model that differs may have in its place."""
        key = self.activation[0]
        return {f"{key} {name}": type(self)(self.config | {key: name}, self.tensors) for name in ACTIVATIONS}

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Logits f64[L, V] for the token after each of ids[L]."""
        x = self.embed(ids)
        for i in range(self.layers):
            x = self.layer(i, x)
        return self.logits(x)


class Llama(Forward):
    activation = ("hidden_act", "silu")

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        super().__init__(config, tensors)
        c = self.config
        self.layers, self.epsilon, heads = c["num_hidden_layers"], c.get("rms_norm_eps", 1e-6), c["num_attention_heads"]
        self.heads = {"q": heads, "k": c.get("num_key_value_heads", heads), "v": c.get("num_key_value_heads", heads)}
        self.d_head = c.get("head_dim", c["hidden_size"] // heads)
        self.turns = rope_frequencies(c, self.d_head)

    def variants(self) -> dict[str, Forward]:
        without = type(self)(self.config, self.tensors)
        without.turns = np.zeros_like(self.turns)
        return super().variants() | {"no positions (NoPE)": without}

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """x[L, M] that enters the first layer."""
        return np.float64(self.tensors["model.embed_tokens.weight"][ids])

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return normed(x, self.epsilon) * self.tensors[f"{name}.weight"]

    def layer(self, i: int, x: np.ndarray) -> np.ndarray:
        """x[L, M] after layer i."""
        of = f"model.layers.{i}"
        times = lambda x, name: product(x, self.tensors[f"{of}.{name}.weight"])
        nx = self.norm(x, f"{of}.input_layernorm")
        q, k, v = (times(nx, f"self_attn.{x}_proj").reshape(-1, n, self.d_head) for x, n in self.heads.items())
        if self.config["model_type"] == "qwen3":
            q, k = self.norm(q, f"{of}.self_attn.q_norm"), self.norm(k, f"{of}.self_attn.k_norm")
        x = x + times(attended(self.rotated(q), self.rotated(k), v), "self_attn.o_proj")
        nx = self.norm(x, f"{of}.post_attention_layernorm")
        return x + times(self.act(times(nx, "mlp.gate_proj")) * times(nx, "mlp.up_proj"), "mlp.down_proj")

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """RoPE on x[L, heads, D]: entry i turns with entry i + D/2."""
        angles = np.arange(len(x))[:, None, None] * self.turns
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[L, V] from what the last layer gives."""
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return product(self.norm(x, "model.norm"), self.tensors[f"{head}.weight"])


def rope_frequencies(config: Mapping[str, Any], d_head: int) -> np.ndarray:
    """[d_head / 2]: radians a position of each pair, as transformers' modeling_rope_utils has them."""
    stated = {"rope_theta": config.get("rope_theta", 10_000.0)} | config.get("rope_scaling", {})
    stated |= config.get("rope_parameters", {})
    kind = stated.get("rope_type", stated.get("type", "default"))
    turns = stated["rope_theta"] ** -(np.arange(0, d_head, 2) / d_head)
    if kind == "default":
        return turns
    if kind == "linear":
        return turns / stated["factor"]
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_type is {kind!r}; models/huggingface_forward.py has default, linear, llama3."
        )
    length, low, high = (
        stated[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi / turns
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * turns / stated["factor"] + smooth * turns
    return np.where(
        wavelength > length / low, turns / stated["factor"], np.where(wavelength < length / high, turns, between)
    )


class Mistral(Llama):
    defaults: ClassVar = {"num_key_value_heads": 8}


class Qwen3(Llama):
    defaults: ClassVar = {"num_key_value_heads": 32, "head_dim": 128}


class GPT2(Forward):
    activation = ("activation_function", "gelu_new")

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        super().__init__(config, tensors)
        self.layers, self.prefix = self.config["n_layer"], "transformer." if "transformer.wte.weight" in tensors else ""

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """x[L, M] that enters the first layer: of tokens and of positions."""
        return np.float64(self.tensor("wte.weight")[ids]) + self.tensor("wpe.weight")[: len(ids)]

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[self.prefix + name]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centered = normed(x - x.mean(-1, keepdims=True), self.config.get("layer_norm_epsilon", 1e-5))
        return centered * self.tensor(f"{name}.weight") + self.tensor(f"{name}.bias")

    def layer(self, i: int, x: np.ndarray) -> np.ndarray:
        """x[L, M] after layer i. Weights are [inputs, outputs] here."""
        of = f"h.{i}"
        affine = lambda x, name: product(x, self.tensor(f"{of}.{name}.weight").T) + self.tensor(f"{of}.{name}.bias")
        qkv = affine(self.norm(x, f"{of}.ln_1"), "attn.c_attn").reshape(len(x), 3, self.config["n_head"], -1)
        x = x + affine(attended(*np.moveaxis(qkv, 1, 0)), "attn.c_proj")
        return x + affine(self.act(affine(self.norm(x, f"{of}.ln_2"), "mlp.c_fc")), "mlp.c_proj")

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[L, V] from what the last layer gives."""
        return product(self.norm(x, "ln_f"), self.tensor("wte.weight"))


FORWARDS: dict[str, type[Forward]] = {"llama": Llama, "mistral": Mistral, "qwen3": Qwen3, "gpt2": GPT2}
"""By config.json's model_type."""
