"""Latent attention, as in DeepSeek-V3 (MLA, arXiv 2405.04434 and 2412.19437), in the model of
moe.py.

    python -m tools.huggingface_to_checkpoint model=<one of that kind> output=runs/<name>

The keys and values of all heads are computed from one latent vector of each position. A second
vector, which RoPE turns, is the rest of each head's key. While text is sampled, a layer keeps these
two. Dims and axes are those of moe.py, and

  A  latent vector of queries                 W  entries of a value
  R  latent vector of keys and values         T  entries of a query or key that RoPE turns, its last
  ones Z  R + T                                    Y  entries of a head made of R: those of a key
  that are not turned, and W                  N  2 M
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import Array, pytree_dataclass, typed
from shardwright.data.checks import within
from shardwright.data.loader import TokenBatch
from shardwright.jax_extra import save_for_backward
from shardwright.modeling import masks, rope
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Targets, Tokens, act
from shardwright.modeling.weights import count_layers, gain, matrix
from shardwright.models import family, moe

EPSILON = 1e-6
"""Added to the mean square in the norms of latent vectors, whatever model.norm_epsilon is."""
OTHERS = (
    "qkv_bias",
    "out_bias",
    "gated",
    "sinks",
    "qk_norm",
    "qk_norm_all",
    "norm_offset",
    "no_rope_every",
)
"""Settings of family.py that are for its own attention."""


@dataclasses.dataclass
class ModelConfig(moe.ModelConfig):
    """Settings of moe.py, and of latent attention.

    `d_head` counts the entries of a query or key, turned or not.
    """

    module: str = "mla"
    kv_rank: int = within(1, 2**16, kw_only=True)
    """Entries of the latent vector of keys and values. A multiple of c·d·e devices."""
    q_rank: int | None = within(1, 2**16, None)
    """Entries of a latent vector of queries. A multiple of c·d·e devices. Null: queries come from
    the residual stream."""
    d_turned: int = within(2, 2**16, kw_only=True)
    """Entries of a query or key that RoPE turns, its last ones; even."""
    d_value: int = within(1, 2**16, kw_only=True)
    """Entries of a value."""
    further: int = within(0, 2, 0)
    """Modules that predict the token after the next in training (MTP, arXiv 2412.19437, section
    2.2): 0 or 1. Their loss is added with the weight 1. Not with pipeline stages."""

    dims: ClassVar[dict[str, str]] = moe.ModelConfig.dims | {
        "A": "query_latent",
        "N": "joined",
        "R": "kv_rank",
        "T": "d_turned",
        "W": "d_value",
        "Y": "from_latent",
        "Z": "latent_and_turned",
    }

    @property
    def joined(self) -> int:
        """Entries of an embedding and of a residual stream."""
        return 2 * self.d_model

    @property
    def query_latent(self) -> int:
        """Entries of the latent vector of queries; 0 without one."""
        return self.q_rank or 0

    @property
    def d_plain(self) -> int:
        """Entries of a query or key that RoPE does not turn."""
        return self.d_head - self.d_turned

    @property
    def from_latent(self) -> int:
        """Entries of a head's key and value that come from the latent vector."""
        return self.d_plain + self.d_value

    @property
    def latent_and_turned(self) -> int:
        """Entries that a layer keeps of each position."""
        return self.kv_rank + self.d_turned

    @property
    def turned(self) -> tuple[str, int]:
        return "d_turned", self.d_turned

    def check(self, seq_len: int) -> None:
        """Raises ValueError for settings that contradict each other."""
        super().check(seq_len)
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | {
            "rotary_share": 1.0
        }
        for name in (*OTHERS, "window_rope_base", "rotary_share"):
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"model.{name} is {getattr(self, name)}, which latent attention does not have; "
                    f"set it to {defaults[name]}."
                )
        if self.n_q_per_kv != 1:
            raise ValueError(
                f"model.n_q_per_kv is {self.n_q_per_kv}; each head has a key of its own: set it to "
                "1."
            )
        if self.d_turned >= self.d_head:
            raise ValueError(
                f"model.d_turned is {self.d_turned}; it must be less than model.d_head = "
                f"{self.d_head}."
            )


# ---- weights -------------------------------------------------------------------------------------


@pytree_dataclass
class Heads:
    """Weights of attention in a layer, and its norms."""

    attention_norm: gain["M if norms_before"]
    w_q: matrix["M/fsdp -> K/t D if not q_rank"]
    w_q_latent: matrix["M/t/fsdp -> A if q_rank"]
    q_latent_norm: gain["A if q_rank"]
    w_q_heads: matrix["A/fsdp -> K/t D if q_rank"]
    w_kv_latent: matrix["M/t/fsdp -> Z"]
    kv_latent_norm: gain["R"]
    w_kv_heads: matrix["R/fsdp -> K/t Y"]
    w_o: matrix["K/t W -> M/fsdp"]
    mlp_norm: gain["M if norms_before"]
    attention_out_norm: gain["M if norms_after"]
    mlp_out_norm: gain["M if norms_after"]


@pytree_dataclass
class Layer(moe.Experts, Heads):
    """Weights of one layer with experts."""


@pytree_dataclass
class Dense(moe.DenseMlp, Heads):
    """Weights of one layer without experts."""


@pytree_dataclass
class Weights(family.Weights):
    """Weights of the model."""

    layers: Array["layers/p", Layer]
    dense: Array["dense *p", Dense] | None


@pytree_dataclass
class Further(Layer):
    """Weights of a module that predicts the token after the next."""

    embed_norm: gain["M"]
    hidden_norm: gain["M"]
    w_join: matrix["N/t/fsdp -> M"]


@pytree_dataclass
class WithFurther(Weights):
    """Weights of a model with such a module."""

    further: Array["1", Further]
    further_norm: gain["M"]


WEIGHTS = Weights, WithFurther
"""The class of the weights, by ModelConfig.further."""


@pytree_dataclass
class Ahead:
    """What such a module gives `logits`."""

    x: act["B/b L/c/t M"]


@pytree_dataclass
class Latents:
    """What a layer keeps of each position while text is sampled."""

    latent: act["B/b S R"]
    turned: act["B/b S T"]


@pytree_dataclass
class State:
    """What a layer keeps while text is sampled."""

    kv: Latents


# ---- the model -----------------------------------------------------------------------------------


class Model(moe.Model):
    """The model of moe.py with latent attention."""

    Weights: type[family.Weights] = WEIGHTS[0]
    State = State
    config: ModelConfig

    def __init__(self, config: ModelConfig):
        self.Weights = WEIGHTS[config.further]
        super().__init__(config)

    def more_predictions(self, x: jax.Array, batch: TokenBatch) -> list[tuple[Any, Targets]]:
        """The token after the next, in the same document, from the normed output of the last layer
        and the embedding of the next. The report does not say whether the output is normed; servers
        of the released weights norm it (vLLM's deepseek_mtp.py).
        """
        if not self.config.further:
            return []
        if shardops.axis_size("p") > 1:
            raise ValueError("model.further is 1, which pipeline stages don't have: set mesh.p=1.")

        def shift(x: jax.Array) -> jax.Array:
            return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

        def ahead(w: Any, forward: Any) -> Ahead:
            tokens = forward.tokens(batch)
            ids = shardops.shard("B/b L -> B/b L/c", batch.targets)
            tokens = self.prepare(dataclasses.replace(tokens, ids=ids))
            of_module = jax.tree.map(lambda stack: stack[0], w.further)
            embedded = self.normed(self.embed(w, tokens), of_module.embed_norm)
            hidden = self.normed(self.final_normed(w, x), of_module.hidden_norm)
            both = jnp.concatenate([embedded, hidden], axis=-1)
            w_join = shardops.all_gather("N/t/fsdp M -> N M", of_module.w_join)
            joined = shardops.matmul("B/b L/c/t N, N M -> B/b L/c/t M", both, w_join)
            last = tokens.in_layer(jnp.int32(count_layers(self.table)), 0)
            attention = forward.attention(tokens)
            # Without its LayerAux: the experts of the module are not balanced.
            return Ahead(self.layer(save_for_backward(joined), of_module, last, attention)[0])

        mask = shift(batch.loss_mask & ~batch.is_seq_start)
        later = dataclasses.replace(batch, targets=shift(batch.targets), loss_mask=mask)
        return [(ahead, Targets.of(later))]

    def final_normed(self, w: Any, x: Any) -> jax.Array:
        """The output of the last layer, or of the MTP module, each with its norm."""
        if not isinstance(x, Ahead):
            return super().final_normed(w, x)
        return self.normed(x.x, w.further_norm)

    def prepare(self, tokens: Tokens) -> Tokens:
        """Adds the cosines and sines of RoPE for the queries of a device, and for its share of the
        keys.
        """
        of_turned = dataclasses.replace(self.config, d_head=self.config.d_turned)
        own = shardops.shard("B/b L/c -> B/b L/c/t", tokens.positions)
        shared = [rope.tables(of_turned, positions) for positions in (tokens.row_positions, own)]
        return dataclasses.replace(tokens, shared=shared)

    def mask_at(self, place: int) -> masks.AttentionMask:
        """Who attends to whom, with the scale that YaRN's mscale_all_dim adds."""
        mask = super().mask_at(place)
        scaling = self.config.rope_scaling
        if scaling is None or not scaling.mscale_all_dim:
            return mask
        factor = rope.yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return dataclasses.replace(mask, scale=mask.scale_of(self.config.d_head) * factor**2)

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """Output of the attention of a layer, which is added to the residual stream."""
        c = self.config
        angles, own_angles = tokens.shared
        nx = self.normed(x, w.attention_norm)
        if w.w_q is None:
            latent = self.latent(nx, w.w_q_latent, w.q_latent_norm, "A")
            w_q = shardops.all_gather("A/fsdp K/t D -> A K/t D", w.w_q_heads)
            q = shardops.matmul("B/b L/c A, A K/t D -> B/b L/c K/t D", latent, w_q)
        else:
            w_q = shardops.all_gather("M/fsdp K/t D -> M K/t D", w.w_q)
            of_all = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
            q = shardops.matmul("B/b L/c M, M K/t D -> B/b L/c K/t D", of_all, w_q)
        plain, turned = jnp.split(q, [c.d_plain], axis=-1)
        q = save_for_backward(jnp.concatenate([plain, rope.rotate(turned, angles)], axis=-1))

        w_kv_latent = shardops.all_gather("M/t/fsdp Z -> M Z", w.w_kv_latent)
        made = shardops.matmul("B/b L/c/t M, M Z -> B/b L/c/t Z", nx, w_kv_latent)
        latent, turned = jnp.split(made, [c.kv_rank], axis=-1)
        latent = self.latent_norm(latent, w.kv_latent_norm, "R")
        turned = save_for_backward(rope.rotate(turned, own_angles))
        kept = Latents(latent, shardops.all_gather("B/b L/c/t T -> B/b L/c T", turned))
        w_kv = shardops.all_gather("R/fsdp K/t Y -> R K/t Y", w.w_kv_heads)

        def keys_and_values(kept: Latents) -> tuple[jax.Array, jax.Array]:
            made = shardops.matmul("B/b L/c R, R K/t Y -> B/b L/c K/t Y", kept.latent, w_kv)
            plain, v = jnp.split(made, [c.d_plain], axis=-1)
            turned = shardops.broadcast("B/b L/c T -> B/b L/c K/t T", kept.turned)
            return save_for_backward(jnp.concatenate([plain, turned], axis=-1)), save_for_backward(
                v
            )

        mask = self.mask_at(tokens.index_in_period)
        attended = attention.expand("kv", keys_and_values, q[..., None, :], kept, mask)[..., 0, :]
        w_o = shardops.all_gather("K/t W M/fsdp -> K/t W M", w.w_o)
        out = shardops.matmul(
            "B/b L/c K/t W, K/t W M -> B/b L/c M +t", save_for_backward(attended), w_o
        )
        out = shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
        return self.normed(out, w.attention_out_norm)

    def latent(self, nx: jax.Array, weight: Any, norm: Any, dim: str) -> jax.Array:
        """The normed latent vector of each position, of which each device of t computes its
        share.
        """
        weight = shardops.all_gather(f"M/t/fsdp {dim} -> M {dim}", weight)
        return self.latent_norm(
            shardops.matmul(f"B/b L/c/t M, M {dim} -> B/b L/c/t {dim}", nx, weight), norm, dim
        )

    def latent_norm(self, x: jax.Array, weight: Any, dim: str) -> jax.Array:
        """RMSNorm of latent vectors, which are then gathered over t."""
        normed = save_for_backward(
            self.normed(x, weight, f"B/b L/c/t {dim}", f"{dim}/t/fsdp", EPSILON)
        )
        return shardops.all_gather(f"B/b L/c/t {dim} -> B/b L/c {dim}", normed)
