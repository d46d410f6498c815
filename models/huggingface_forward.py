"""Forward passes of Llama, Mistral, Qwen3 and GPT-2 in NumPy, from the files that transformers reads.

They share no code with the forward pass of a run, so that the two can be compared (models/huggingface_check.py). Names
and layouts are those of transformers: config.json, and tensors [outputs, inputs]. They compute in f64, with one tensor
in memory at a time, for a text of L tokens. M is the width of the residual stream, V the number of token ids.
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
"""By their names in config.json."""
SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
"""Other names of these activations."""
BLOCK = 8192
"""Number of outputs of a product at a time, whose weights are in memory as f64."""


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Product [L, outputs] of x[L, inputs] with weight[outputs, inputs]."""
    return np.concatenate([x @ np.float64(weight[i : i + BLOCK]).T for i in range(0, len(weight), BLOCK)], -1)


def normed(x: np.ndarray, epsilon: float) -> np.ndarray:
    """Divides x[…, N] by its root mean square along N."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal softmax attention [L, heads·D] of q[L, heads, D] over k and v[L, kv heads, D]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


class Forward:
    """A model from its config.json and tensors. Subclasses have its parts: `embed`, `layer` and `logits`.

    Raises:
        ValueError: an activation or RoPE scaling that is not here.
    """

    activation: ClassVar[tuple[str, str]]
    """Name of the activation's setting in config.json, and its default."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of other settings."""
    layers: int
    """Number of layers."""
    epsilon: float
    """Added to the mean square, or to the variance, in its norms."""

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
        """Models with other math that a wrong model may have instead, by the name of what is different."""
        key = self.activation[0]
        return {f"{key} {name}": type(self)(self.config | {key: name}, self.tensors) for name in ACTIVATIONS}

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Logits f64[L, V] of the token after each of ids[L]."""
        x = self.embed(ids)
        for i in range(self.layers):
            x = self.layer(i, x)
        return self.logits(x)


class Llama(Forward):
    """Llama, and Qwen3 with its norms of queries and keys."""

    activation = ("hidden_act", "silu")

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        super().__init__(config, tensors)
        c = self.config
        self.layers, self.epsilon, heads = c["num_hidden_layers"], c.get("rms_norm_eps", 1e-6), c["num_attention_heads"]
        kv_heads = c.get("num_key_value_heads", heads)
        self.heads = {"q": heads, "k": kv_heads, "v": kv_heads}
        self.d_head = c.get("head_dim", c["hidden_size"] // heads)
        self.frequencies = rope_frequencies(c, self.d_head)

    def variants(self) -> dict[str, Forward]:
        """Variants of any model, and one without positions."""
        without = type(self)(self.config, self.tensors)
        without.frequencies = np.zeros_like(self.frequencies)
        return super().variants() | {"no positions (NoPE)": without}

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Residual stream [L, M] before the first layer."""
        return np.float64(self.tensors["model.embed_tokens.weight"][ids])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return normed(x, self.epsilon) * self.tensors[f"{name}.weight"]

    def layer(self, i: int, x: np.ndarray) -> np.ndarray:
        """Residual stream [L, M] after layer i."""
        of = f"model.layers.{i}"
        times = lambda x, name: product(x, self.tensors[f"{of}.{name}.weight"])
        nx = self._norm(x, f"{of}.input_layernorm")
        q, k, v = (times(nx, f"self_attn.{x}_proj").reshape(-1, n, self.d_head) for x, n in self.heads.items())
        if self.config["model_type"] == "qwen3":
            q, k = self._norm(q, f"{of}.self_attn.q_norm"), self._norm(k, f"{of}.self_attn.k_norm")
        x = x + times(attended(self._rotated(q), self._rotated(k), v), "self_attn.o_proj")
        nx = self._norm(x, f"{of}.post_attention_layernorm")
        return x + times(self.act(times(nx, "mlp.gate_proj")) * times(nx, "mlp.up_proj"), "mlp.down_proj")

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        """RoPE on x[L, heads, D]: entry i turns with entry i + D/2."""
        angles = np.arange(len(x))[:, None, None] * self.frequencies
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits [L, V] from the residual stream after the last layer."""
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return product(self._norm(x, "model.norm"), self.tensors[f"{head}.weight"])


def rope_frequencies(config: Mapping[str, Any], d_head: int) -> np.ndarray:
    """Angles [d_head / 2] of the pairs, in radians a position, as in modeling_rope_utils of transformers."""
    stated = {"rope_theta": config.get("rope_theta", 10_000.0)} | config.get("rope_scaling", {})
    stated |= config.get("rope_parameters", {})
    kind = stated.get("rope_type", stated.get("type", "default"))
    frequencies = stated["rope_theta"] ** -(np.arange(0, d_head, 2) / d_head)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / stated["factor"]
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_type is {kind!r}; models/huggingface_forward.py has default, linear, llama3."
        )
    length, low, high = (
        stated[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength, stretched = 2 * math.pi / frequencies, frequencies / stated["factor"]
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched + smooth * frequencies
    return np.select([wavelength > length / low, wavelength < length / high], [stretched, frequencies], between)


class Mistral(Llama):
    """Llama with other defaults."""

    defaults: ClassVar = {"num_key_value_heads": 8}


class Qwen3(Llama):
    """Llama with other defaults, and norms of queries and keys."""

    defaults: ClassVar = {"num_key_value_heads": 32, "head_dim": 128}


class GPT2(Forward):
    """GPT-2, whose weights are [inputs, outputs]."""

    activation = ("activation_function", "gelu_new")

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        super().__init__(config, tensors)
        self.layers, self.prefix = self.config["n_layer"], "transformer." if "transformer.wte.weight" in tensors else ""
        self.epsilon = self.config.get("layer_norm_epsilon", 1e-5)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Residual stream [L, M] before the first layer."""
        return np.float64(self._tensor("wte.weight")[ids]) + self._tensor("wpe.weight")[: len(ids)]

    def _tensor(self, name: str) -> np.ndarray:
        return self.tensors[self.prefix + name]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centered = normed(x - x.mean(-1, keepdims=True), self.epsilon)
        return centered * self._tensor(f"{name}.weight") + self._tensor(f"{name}.bias")

    def layer(self, i: int, x: np.ndarray) -> np.ndarray:
        """Residual stream [L, M] after layer i."""
        of = f"h.{i}"
        affine = lambda x, name: product(x, self._tensor(f"{of}.{name}.weight").T) + self._tensor(f"{of}.{name}.bias")
        qkv = affine(self._norm(x, f"{of}.ln_1"), "attn.c_attn").reshape(len(x), 3, self.config["n_head"], -1)
        x = x + affine(attended(*np.moveaxis(qkv, 1, 0)), "attn.c_proj")
        return x + affine(self.act(affine(self._norm(x, f"{of}.ln_2"), "mlp.c_fc")), "mlp.c_proj")

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits [L, V] from the residual stream after the last layer."""
        return product(self._norm(x, "ln_f"), self._tensor("wte.weight"))


FORWARDS: dict[str, type[Forward]] = {"llama": Llama, "mistral": Mistral, "qwen3": Qwen3, "gpt2": GPT2}
"""By config.json's model_type."""
