"""Draw of the next token from its logits, on the devices."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import i32, typed, u32
from shardwright.modeling.model import act
from shardwright_data.checks import at_least_0, check_ranges, within


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of drawing the next token: from logits / temperature, after top_k and then top_p."""

    max_tokens: int = within(1, 2**31, 64)
    """Largest number of tokens to add to a prompt; at least 1."""
    temperature: float = at_least_0(1.0)
    """At least 0; 0 takes the likeliest token."""
    top_k: int | None = within(1, 2**31, None)
    """Number of likeliest tokens to draw from, at least 1, and with them those as likely as the last. None: all."""
    top_p: float = 1.0
    """Draws only from the likeliest tokens that together have this probability, and from those as likely as the last
    of them. In (0, 1] (arXiv 1904.09751)."""
    seed: int = within(0, 2**63, 0)
    """In [0, 2**63). The noise of a token depends only on the seed, the number of its text, and its place in it."""
    stop: tuple[int, ...] = ()
    """Token ids that end a text."""

    def check(self, vocab: int) -> None:
        """Raises ValueError for a setting out of its range, or a stop id outside of `vocab`."""
        check_ranges("sampling", self)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; it must be above 0 and at most 1, which turns it off.")
        check_ids("stop", self.stop, vocab)


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raises ValueError for a token id outside of [0, vocab); `name` says where it comes from."""
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{name} has the token id {token}; those of the model are 0 to {vocab - 1}.")


def lowest_kept(scaled: jax.Array, s: Sampling) -> jax.Array:
    """Lowest of the scaled logits[…, V] that top_k and top_p leave, […, 1]."""
    if s.top_k is None and s.top_p == 1:
        return jnp.full_like(scaled[..., :1], -jnp.inf)
    ordered = lax.top_k(scaled, min(s.top_k or scaled.shape[-1], scaled.shape[-1]))[0]
    if s.top_p == 1:
        return ordered[..., -1:]
    likelihood = jax.nn.softmax(ordered, axis=-1)
    likelier = jnp.cumsum(likelihood, axis=-1) - likelihood
    kept = (likelier < s.top_p).at[..., 0].set(True)
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)


def scaled_logits(logits: jax.Array, s: Sampling) -> jax.Array:
    """Logits divided by the temperature, if it is not 0, in f32."""
    return jnp.float32(logits) / (s.temperature or 1.0)


def gumbel_noise(number: jax.Array, place: jax.Array, vocab: int, s: Sampling) -> jax.Array:
    """Noise […, vocab] for the token at `place[…]` of the text `number[…]`.

    The argmax of the logits plus this noise is a sample from their softmax (Gumbel-max).
    """
    if s.temperature == 0:
        return jnp.zeros(())
    seed = jax.random.key(s.seed)
    draw = lambda number, place: jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(seed, number), place), vocab)
    return jax.vmap(draw)(number.reshape(-1), place.reshape(-1)).reshape(*number.shape, vocab)


@typed
def choose(logits: act["B/r/d L V/t"], number: i32["B/r/d L"], place: i32["B/r/d L"], s: Sampling) -> u32["B/r/d L"]:
    """Draws the token at `place` of the text `number`. All devices of t draw the same."""
    scaled = scaled_logits(shardops.all_gather("B/r/d L V/t -> B/r/d L V", logits, replicated=True), s)
    noise = gumbel_noise(number, place, scaled.shape[-1], s)
    kept = scaled >= lowest_kept(scaled, s)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.uint32)
