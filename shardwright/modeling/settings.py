"""Settings of the Llama in train.py."""

import dataclasses
from typing import ClassVar

from shardwright.data.checks import (
    TUNABLE,
    above_0,
    at_least_0,
    at_least_1,
    one_of,
    setting,
    within,
)


@dataclasses.dataclass
class RopeScaling:
    """Scaling of the rotary wavelengths of a model that was trained on shorter sequences."""

    kind: str = one_of(("linear", "llama3", "yarn"))
    """linear: divides positions by `factor` (arXiv 2306.15595). llama3: stretches only long
    wavelengths (Llama 3.1). yarn: the same, between two entries of a head (arXiv 2309.00071)."""
    factor: float = at_least_1()
    """Length of the new sequences divided by that of the original training; at least 1."""
    original_length: int = at_least_1(8192)
    """Tokens in a sequence of the original training; not used by linear."""
    low_frequency_factor: float = at_least_1(1.0)
    """llama3: wavelengths above original_length divided by this are stretched by `factor`."""
    high_frequency_factor: float = at_least_1(4.0)
    """llama3: wavelengths below original_length divided by this stay; those between are
    interpolated."""
    slow_turns: float = above_0(1.0)
    """yarn: wavelengths that turn less often than this in original_length are stretched by
    `factor`."""
    fast_turns: float = above_0(32.0)
    """yarn: wavelengths that turn more often than this in original_length stay; those between are
    interpolated."""
    truncate: bool = True
    """yarn: True rounds the ends of the interpolation to whole entries."""
    attention_factor: float | None = above_0(None)
    """yarn: factor on the rotated queries and keys. Null: 0.1·ln(factor) + 1."""
    mscale: float | None = above_0(None)
    """yarn: with mscale_all_dim, attention_factor is the ratio of 0.1·mscale·ln(factor) + 1 and the
    same of mscale_all_dim, if it is null (DeepSeek-V3)."""
    mscale_all_dim: float | None = above_0(None)
    """yarn: as mscale. Latent attention also multiplies scores by the square of
    0.1·mscale_all_dim·ln(factor) + 1."""


@dataclasses.dataclass
class ModelConfig:
    """Settings of the transformer in train.py. docs/models.md lists those that another model must
    have.
    """

    module: str = "train"
    """Python module of the model. The other fields of this section are those of its ModelConfig:
    with model.module=moe, --help lists those of moe."""
    vocab: int = dataclasses.field(kw_only=True)
    """Number of token ids, above the largest id in the data. A multiple of t·p devices, over which
    its tables are sharded. Round it up: an unused id only costs a row of the tables."""
    d_model: int = within(1, 2**24, kw_only=True)
    """Width of the residual stream. A multiple of c·d·e devices, and of p."""
    layers: int = within(1, 2**16, kw_only=True)
    """Number of layers in the stack `layers`; with mesh.p, a multiple of
    p·pipeline.virtual_stages."""
    n_kv: int = within(1, 2**24, kw_only=True)
    """Key/value heads. Sharded over t."""
    n_q_per_kv: int = within(1, 2**24, kw_only=True)
    """Query heads for each key/value head: 1 is multi-head attention, more is grouped-query
    attention."""
    d_head: int = within(1, 2**24, kw_only=True)
    """Entries of one head; even, since RoPE rotates pairs."""
    d_ff: int = within(1, 2**24, kw_only=True)
    """Hidden width of the MLP (SwiGLU). Sharded over t."""
    rope_base: float = above_0(10_000.0)
    """Base of the rotary wavelengths (arXiv 2104.09864)."""
    rope_scaling: RopeScaling | None = setting(TUNABLE, default=None)
    """Null: no scaling."""
    norm_epsilon: float = at_least_0(1e-5)
    """Added to the mean square under the root of RMSNorm (arXiv 1910.07467)."""
    tied_embeddings: bool = False
    """True if the embedding table is also the output projection."""
    embed_init_scale: float | None = above_0(None, TUNABLE)
    """Standard deviation of the embedding table at init; null: 1, or 1/sqrt(d_model) if tied."""
    weight_init_scale: float = at_least_0(1.0, TUNABLE)
    """Factor on the 1/sqrt(fan-in) standard deviation of all other matrices at init."""
    qk_norm: bool = False
    """RMSNorm over each head of the queries and keys, before RoPE, as in Qwen3 (arXiv
    2505.09388)."""
    logit_softcap: float | None = above_0(None)
    """Logits x become softcap·tanh(x/softcap) (arXiv 2408.00118, section 2). Null: no cap."""
    bos_id: int = 0
    """Token id before the first token of each document, in [0, vocab). Not given: that which the
    dataset records (docs/formats.md), or the default."""

    dims: ClassVar[dict[str, str]] = {
        "V": "vocab",
        "M": "d_model",
        "K": "n_kv",
        "Q": "n_q_per_kv",
        "D": "d_head",
        "F": "d_ff",
    }
    """The setting that holds the size of each dim."""

    @property
    def heads(self) -> int:
        return self.n_kv * self.n_q_per_kv

    @property
    def turned(self) -> tuple[str, int]:
        """The setting that decides how many entries of a head RoPE rotates, and their number."""
        return "d_head", self.d_head

    def check(self, seq_len: int) -> None:
        """Raises ValueError for settings that contradict each other, or do not suit sequences of
        `seq_len` tokens.
        """
        name, turned = self.turned
        if turned % 2:
            raise ValueError(
                f"model.{name} is {getattr(self, name)}, so RoPE would rotate {turned} entries of "
                f"a head; it rotates pairs: make them even."
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.attention_factor is not None and scaling.kind != "yarn":
            raise ValueError(
                f"model.rope_scaling.attention_factor is {scaling.attention_factor}, which kind "
                f"{scaling.kind} does not have; set it to null."
            )
