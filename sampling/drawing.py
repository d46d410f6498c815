"""How the next token is drawn from its logits, on the devices."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from configuration.checks import check_ranges
from shardlib import shardops
from shardlib.shardtypes import f32, i32, typed, u32

ROUNDING = {"bf16": 2**-5, "f32": 1e-4}
"""How far apart two sums of the same logit may be, taken in different orders, as a part of the largest logit of their
position: bf16 four times, f32 a hundred times what was measured (docs/sampling.md)."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the next token is drawn: logits / temperature, of those the top_k, of those the top_p."""

    max_tokens: int = 64
    """Tokens to add to each prompt, at most; at least 1."""
    temperature: float = 1.0
    """At least 0; 0 takes the likeliest token."""
    top_k: int | None = None
    """Only the likeliest this many tokens are drawn, and those as likely as the last of them; at least 1. None: all."""
    top_p: float = 1.0
    """Only the likeliest tokens are drawn that together have this probability, and those as likely as the last of them;
    in (0, 1] (arXiv 1904.09751)."""
    seed: int = 0
    """In [0, 2**63). The noise for a token depends on this, the number of its text and its place there, alone."""
    stop: tuple[int, ...] = ()
    """Token ids that end a text."""

    def check(self, vocab: int) -> None:
        """Raises ValueError for a setting out of its range, or stop ids that a model with `vocab` ids does not have."""
        count = (1, 2**31)
        check_ranges("sampling", self, {"max_tokens": count, "top_k": count, "seed": (0, 2**63)})
        check_ranges("sampling", self, {"temperature": (0, math.inf)})
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; it must be above 0 and at most 1, which turns it off.")
        check_ids("stop", self.stop, vocab)


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raises ValueError for token ids that a model with `vocab` ids does not have."""
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{name} has the token id {token}; those of the model are 0 to {vocab - 1}.")


def lowest_kept(scaled: jax.Array, s: Settings, mass: Any = 1.0) -> jax.Array:
    """[…, 1]: the lowest of the logits[…, V] / temperature that top_k and top_p leave. `mass`: a factor on top_p."""
    if s.top_k is None and s.top_p == 1:
        return jnp.full_like(scaled[..., :1], -jnp.inf)
    ordered = lax.top_k(scaled, min(s.top_k or scaled.shape[-1], scaled.shape[-1]))[0]
    if s.top_p == 1:
        return ordered[..., -1:]
    likelihood = jax.nn.softmax(ordered, axis=-1)
    likelier = jnp.cumsum(likelihood, axis=-1) - likelihood
    kept = (likelier < s.top_p * mass).at[..., 0].set(True)
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)


def scaled_logits(logits: jax.Array, s: Settings) -> jax.Array:
    return logits / (s.temperature or 1.0)


def gumbel_noise(number: jax.Array, place: jax.Array, vocab: int, s: Settings) -> jax.Array:
    """[…, vocab]: noise for the token at `place[…]` of the text `number[…]`.

    The largest of logits with this noise is a sample of their softmax (Gumbel-max).
    """
    if s.temperature == 0:
        return jnp.zeros(())
    seed = jax.random.key(s.seed)
    draw = lambda number, place: jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(seed, number), place), vocab)
    return jax.vmap(draw)(number.reshape(-1), place.reshape(-1)).reshape(*number.shape, vocab)


@typed
def own_block(x: i32["B/r/d L"]) -> i32["B/r/d L/t"]:
    """The part of L that is this device's, of what all devices of t have."""
    size = x.shape[1] // shardops.axis_size("t")
    return lax.dynamic_slice_in_dim(x, shardops.axis_index("t") * size, size, axis=1)


@typed
def choose(logits: f32["B/r/d L V/t"], number: i32["B/r/d L"], place: i32["B/r/d L"], s: Settings) -> u32["B/r/d L"]:
    """The token at `place` of the text `number`. Each device of t draws for its own part of L, from the whole of V."""
    scaled = scaled_logits(shardops.all_to_all("B/r/d L V/t -> B/r/d L/t V", logits), s)
    noise = gumbel_noise(own_block(number), own_block(place), scaled.shape[-1], s)
    kept = scaled >= lowest_kept(scaled, s)
    own: u32["B/r/d L/t"] = jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.uint32)
    everywhere = shardops.index_unreduced("[L/t] B/r/d, N -> N B/r/d +t", own.T, jnp.arange(number.shape[1]))
    return shardops.psum("N B/r/d +t -> N B/r/d", everywhere).T


@typed
def compare(
    logits: f32["B/r/d L V/t"],
    drawn: u32["B/r/d L"],
    number: i32["B/r/d L"],
    place: i32["B/r/d L"],
    s: Settings,
    rounding: float,
) -> tuple[u32["B/r/d L/t"], f32["B/r/d L/t"], f32["B/r/d L/t"]]:
    """What `choose` draws from these logits; by how much its logit with noise exceeds that of `drawn`; and by how much
    it may, if each logit / temperature can be wrong by half of that.

    Such errors can also change which tokens top_k and top_p leave. The excess is that of the tokens they leave in any
    case, and infinite where they leave `drawn` in none.
    """
    scaled = scaled_logits(shardops.all_to_all("B/r/d L V/t -> B/r/d L/t V", logits), s)
    noisy = scaled + gumbel_noise(own_block(number), own_block(place), scaled.shape[-1], s)
    pick = lambda x, ids: jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]
    mine = own_block(drawn.astype(jnp.int32))
    expected = jnp.argmax(jnp.where(scaled >= lowest_kept(scaled, s), noisy, -jnp.inf), axis=-1)
    error = rounding * jnp.max(jnp.abs(scaled), axis=-1)
    lowest = lambda sign: lowest_kept(scaled, s, jnp.exp(2 * sign * error)[..., None])[..., 0] - 2 * sign * error
    surely = scaled >= lowest(-1)[..., None]
    excess = jnp.max(jnp.where(surely, noisy, -jnp.inf), axis=-1) - pick(noisy, mine)
    excess = jnp.where(pick(scaled, mine) >= lowest(1), jnp.maximum(excess, 0), jnp.inf)
    return expected.astype(jnp.uint32), jnp.where(expected == mine, 0, excess), 2 * error
