"""Attention masks and score changes: a model's `AttentionMask`, which every implementation of
attention follows.

    sliding = AttentionMask(mask_mod=(causal, same_document, Window(1024)))
    capped = AttentionMask(score_mod=SoftCap(50))
    alibi = AttentionMask(score_mod=lambda scores, q, k, heads: scores - 2.0 ** -(heads + 1) *
    (q.index - k.index))

A layer passes its mask to `attention(q, k, v, mask)`. The functions of a mask take the Positions of
queries and of keys, arrays that broadcast to the scores [B, K, Q, L, S]: batch, kv heads, query
heads of each, queries, keys.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib import shardops
from shardlib.places import place_of_caller
from shardlib.shardtypes import f32, pytree_dataclass

_COUNTED = 2**22
"""Number of pairs of positions to sample when counting what an unknown condition allows."""


class Positions(NamedTuple):
    """Positions of queries or of keys, as integers."""

    index: jax.Array
    """Index in the sequence, counted from 0."""
    position: jax.Array
    """Position in its document, counted from 0."""
    document: jax.Array | Any
    """Index of its document in the sequence; None in decoding."""

    @classmethod
    def in_one_document(cls, index: Any) -> "Positions":
        """Positions `index` in a sequence of one document."""
        return cls(index, index, jnp.zeros_like(index))

    def as_queries(self) -> "Positions":
        """Reshapes each from [B, L] to [B, 1, 1, L, 1]."""
        return Positions(*(x[:, None, None, :, None] for x in self))

    def as_keys(self) -> "Positions":
        """Reshapes each from [B, S] to [B, 1, 1, 1, S]."""
        return Positions(*(x[:, None, None, None, :] for x in self))


def causal(q: Positions, k: Positions) -> jax.Array:
    """True where the key is at the query's position or before it."""
    return q.index >= k.index


def same_document(q: Positions, k: Positions) -> jax.Array:
    """True where query and key are in the same document."""
    return q.document == k.document


@dataclasses.dataclass(frozen=True)
class Window:
    """Condition: the key is among the last `size` (at least 1) positions, including the query's
    (arXiv 2004.05150).
    """

    size: int

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"Window({self.size}) has no positions; its size must be at least 1.")

    def __call__(self, q: Positions, k: Positions) -> jax.Array:
        """True where a query attends to a key."""
        return q.index - k.index < self.size


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """Keeps scores within ±`cap`, by cap·tanh(score / cap) (Gemma 2, arXiv 2408.00118); `cap` is
    above 0.
    """

    cap: float

    def __call__(
        self, scores: jax.Array, q: Positions, k: Positions, heads: jax.Array
    ) -> jax.Array:
        """Caps the scores."""
        return self.cap * jnp.tanh(scores / self.cap)


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Which keys each query attends to, and how the score of a pair changes."""

    mask_mod: tuple[Callable[[Positions, Positions], jax.Array], ...] = (causal, same_document)
    """Conditions (q, k) -> bool: a query attends to the keys that meet all of them. A single
    function f means (f,)."""
    score_mod: Callable[..., jax.Array] | None = None
    """Function (scores, q, k, heads, *learned) -> scores, applied elementwise to the scaled
    products. `heads` are the indices of the query heads in the model, i32[K, Q, 1, 1]. `learned`
    are weights that the layer passes to `attention`, each [B, …]. None: scores stay as they are."""
    scale: float | None = None
    """Factor on the products of queries and keys. None: 1/√(entries of a head)."""
    causal: bool = True
    """True: check that the model is causal, i.e. that its logits depend on no later token and no
    other document. False: it is not causal, on purpose."""
    made: str = dataclasses.field(
        default_factory=place_of_caller, kw_only=True, compare=False, repr=False
    )
    """`file.py:line` where the mask was made."""

    def __post_init__(self):
        if callable(self.mask_mod):
            object.__setattr__(self, "mask_mod", (self.mask_mod,))
        if not isinstance(self.mask_mod, tuple):
            raise ValueError(
                f"mask_mod={self.mask_mod!r} is not a tuple of functions: write (causal, "
                "same_document)."
            )

    def sees(self, q: Positions, k: Positions) -> jax.Array:
        """True where a query attends to a key; broadcasts to [B, 1, 1, L, S]."""
        seen = jnp.ones((1,) * 5, bool)
        for condition in self.mask_mod:
            seen = seen & condition(q, k)
        return seen

    def scores(
        self,
        products: jax.Array,
        d_head: int,
        q: Positions,
        k: Positions,
        heads: jax.Array,
        learned: tuple = (),
    ) -> jax.Array:
        """Input of the softmax, [B, K, Q, L, S]: changed scores, and -inf where a query does not
        attend to a key.

        `products` of queries and keys are in the dtype of the softmax; `q` and `k` are from
        as_queries and as_keys.
        """
        return jnp.where(
            self.sees(q, k), self.changed(products, d_head, q, k, heads, learned), -jnp.inf
        )

    def changed(
        self,
        products: jax.Array,
        d_head: int,
        q: Positions,
        k: Positions,
        heads: jax.Array,
        learned: tuple = (),
    ) -> jax.Array:
        """Changed scores of all pairs, whether attended to or not."""
        scores = products * self.scale_of(d_head)
        return scores if self.score_mod is None else self.score_mod(scores, q, k, heads, *learned)

    def scale_of(self, d_head: int) -> float:
        """Factor on the products of queries and keys with heads of `d_head` entries."""
        return d_head**-0.5 if self.scale is None else self.scale

    def attended(self, length: int) -> float:
        """Average number of keys that a position attends to, among `length` positions of one
        document.

        (length + 1) / 2 for causal. Exact for the conditions of this module; for others a sample of
        queries is counted.
        """
        windows = [condition.size for condition in self.mask_mod if isinstance(condition, Window)]
        known = all(x in (causal, same_document) or isinstance(x, Window) for x in self.mask_mod)
        index = np.arange(length, dtype=np.int32)
        n = np.arange(length if known else min(length, max(1, _COUNTED // length)))
        # One from each of n equal parts, at golden-ratio offsets: an even stride would always hit
        # one spot of a block.
        q = index[((n + (n + 0.5) * 0.6180339887498949 % 1) * length / len(n)).astype(np.int64)]
        if known:
            seen = (q + 1 if causal in self.mask_mod else length) - np.maximum(
                0, q + 1 - min(windows, default=length)
            )
        else:
            with jax.ensure_compile_time_eval():
                q_positions, k_positions = (
                    Positions.in_one_document(q[None]),
                    Positions.in_one_document(index[None]),
                )
                seen = np.asarray(self.sees(q_positions.as_queries(), k_positions.as_keys())).sum(
                    axis=-1
                )
        return float(np.mean(seen, dtype=np.float64))

    def without(self, condition: Callable[..., Any]) -> "AttentionMask":
        """Returns the mask without this condition."""
        return dataclasses.replace(
            self, mask_mod=tuple(x for x in self.mask_mod if x is not condition)
        )

    def __str__(self) -> str:
        def name(function):
            return getattr(function, "__name__", None) or str(function)

        parts = [name(condition) for condition in self.mask_mod] or ["all"]
        parts += [f"score {name(self.score_mod)}"] if self.score_mod else []
        parts += [f"scale {self.scale:g}"] if self.scale is not None else []
        return ", ".join(parts)


CAUSAL = AttentionMask()
"""Each position attends to itself and those before it in its document."""


@pytree_dataclass
class Mask:
    """An AttentionMask for given queries and keys, with everything else that a call of `attention`
    passes.
    """

    pattern: AttentionMask = dataclasses.field(metadata={"static": True})
    queries: Positions
    keys: Positions
    learned: tuple = ()
    """The weights of pattern.score_mod."""
    sinks: f32["B/b K/t Q"] | None = None
    """Scores of keys without values."""
    drop: Callable | None = dataclasses.field(default=None, metadata={"static": True})
    """Dropout of attention weights."""
    heads: jax.Array | None = None
    """Indices in the model of this device's query heads, i32[K, Q]. None: those of its block of
    t."""

    def global_head_ids(self, kv: int, queries: int) -> jax.Array:
        """Indices in the model of the query heads, `queries` for each of `kv` heads: i32[kv,
        queries, 1, 1].
        """
        if self.heads is not None:
            return self.heads.reshape(kv, queries, 1, 1)
        return global_head_ids(kv, queries)

    def weights(self, products: jax.Array, d_head: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Attention weights, in `dtype`, from products[B, K, Q, L, S] of queries and keys in the
        softmax's dtype.
        """
        heads = self.global_head_ids(*products.shape[1:3])
        positions = self.queries.as_queries(), self.keys.as_keys()
        scores = self.pattern.scores(products, d_head, *positions, heads, self.learned)
        weights = softmax(scores, self.sinks).astype(dtype)
        return self.drop(weights) if self.drop else weights


def global_head_ids(kv: int, queries: int) -> jax.Array:
    """Indices in the model of this device's query heads, `queries` for each of `kv` heads: i32[kv,
    queries, 1, 1].
    """
    first = shardops.axis_index("t") * kv * queries
    return first + jnp.arange(kv * queries, dtype=jnp.int32).reshape(kv, queries, 1, 1)


def softmax(scores: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Attention weights from scores[B, K, Q, L, S].

    `sinks`[B, K, Q], if any, are scores of keys without values.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = jnp.broadcast_to(sinks.astype(scores.dtype)[..., None, None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
