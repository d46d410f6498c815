"""Text from a model: batched, with a cache of keys and values, sharded as in training.

    sampler = Sampler(c, Settings(max_tokens=100, temperature=0.8), context=c.training.seq_len)
    continuations = sampler.generate(weights, [[5, 8, 13], []])

It runs the `forward` of any model module (docs/models.md): what one token learns from others goes through `attend`,
so a cache can stand there, and the positions of a forward pass need not be those of one text. The residual stream is
cut along L over t, and a text's next token, a single position, cannot be cut. So in decoding L counts texts: N of them,
in blocks over r and d, are B = r·d rows of L = N/(r·d) positions, `ids['B/r/d L']`. docs/sampling.md tells more.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from configuration import COMPUTE_DTYPES, Config, check_ranges, model_of
from input_loader import TokenBatch
from jax_extra import run_as
from shardlib import shardops
from shardlib.shardtypes import Array, Scope, bool_, dtype_name, f32, i32, pytree_dataclass, typed, typed_shard_map, u32

act = dtype_name("act")
W = TypeVar("W")
CHUNK = 32
"""Tokens of each text that are sampled before the host looks at them."""
SHORTEST = 16
"""Positions of a forward pass over windows, at least; more in powers of two, so that few programs are compiled."""
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


def window_start(length: int, context: int) -> int:
    """Which token of a text is the first that its next token can see, of a text of `length` tokens.

    A window holds bos and up to context - 1 tokens. A text that outgrows it goes on with the last context // 2 of them
    in a new window, and so again: where windows start depends on the text's length only.
    """
    kept = context // 2
    return max(0, length - kept) // (context - kept) * (context - kept)


# ---- one token: on the devices ----------------------------------------------------------------------------------


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


@pytree_dataclass
class KeyValues:
    """What the tokens of N texts have said to those after them, in one layer; S places a text."""

    k: act["N/r/d S K/t D"]
    v: act["N/r/d S K/t D"]


@pytree_dataclass
class Texts:
    """Where each of N texts stands."""

    number: i32["N/r/d"]  # which text it is: selects its noise
    length: i32["N/r/d"]  # its tokens so far, the prompt's included
    token: u32["N/r/d"]  # the last of them (bos in an empty text), which the model has not seen yet
    place: i32["N/r/d"]  # of that token in its window; as many as the context has: there is no room for it
    left: i32["N/r/d"]  # tokens still to be drawn


@typed
def cached_attention(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d L K/t D"],
    v: act["B/r/d L K/t D"],
    past_k: act["B/r/d L S K/t D"],
    past_v: act["B/r/d L S K/t D"],
    place: i32["B/r/d L"],
) -> act["B/r/d L K/t Q D"]:
    """train.attention for one token of each of L texts: it sees itself and the `place` tokens before it."""
    einsum = functools.partial(shardops.einsum_unreduced, preferred_element_type=jnp.float32)
    past = einsum("B/r/d L K/t Q D, B/r/d L S K/t D -> B/r/d L K/t Q S", q, past_k)
    own = einsum("B/r/d L K/t Q D, B/r/d L K/t D -> B/r/d L K/t Q", q, k)
    visible = jnp.arange(past.shape[-1]) < place[..., None]
    past = jnp.where(visible[:, :, None, None], past, -jnp.inf)
    scores = jnp.concatenate([past, own[..., None]], axis=-1) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = einsum("B/r/d L K/t Q S, B/r/d L S K/t D -> B/r/d L K/t Q D", weights[..., :-1], past_v)
    out = out + einsum("B/r/d L K/t Q, B/r/d L K/t D -> B/r/d L K/t Q D", weights[..., -1], v)
    return out.astype(q.dtype)


@typed
def next_logits(
    w: W, cache: Array["layers", KeyValues], texts: Texts, c: Any
) -> tuple[f32["B/r/d L V/t"], Array["layers", KeyValues]]:
    """Logits for the token after `texts.token`, of the N texts as B = r·d rows of L; and the cache with that token."""
    from train import forward

    # On each device the same array: N/r/d texts are the L of its one row.
    ids: u32["B/r/d L"] = texts.token[None]
    place: i32["B/r/d L"] = texts.place[None]

    def attend(q, k, v, cache, drop=None):
        return cached_attention(q, k, v, cache.k[None], cache.v[None], place), KeyValues(k[0], v[0])

    logits, new = forward(w, ids, place, c, attend, cache)
    # Written once all layers have read, or each layer would copy its whole cache to hand it on.
    write = lambda old, x: old.at[:, jnp.arange(x.shape[1]), texts.place].set(x, mode="drop")
    return logits, jax.tree.map(write, cache, new)


@typed
def window_cache(w: W, ids: u32["N/r/d L"], c: Any, size: int) -> Array["layers", KeyValues]:
    """The cache after windows of tokens, with `size` places; padding stands at their end, where none sees it."""
    from train import attention, forward

    positions: i32["N/r/d L"] = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    one_document: i32["N/r/d L"] = jnp.zeros(ids.shape, jnp.int32)
    attend = lambda q, k, v, cache, drop=None: (attention(q, k, v, one_document), KeyValues(k, v))
    _, cache = forward(w, ids, positions, c, attend)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, size - ids.shape[1]), (0, 0), (0, 0)]), cache)


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


# ---- programs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Speed:
    """What `Sampler.generate` has done."""

    tokens: int = 0
    """Drawn, of all texts together."""
    seconds: float = 0.0
    """Without compilation."""
    compile_seconds: float = 0.0


class Sampler:
    """Continues texts with the weights of a model, on the mesh in force.

    Args:
        c: configuration of the run: its model, compute dtype, and whether weights are gathered in each layer for each
            token, or once for CHUNK tokens (training.gather_weights).
        settings: how to draw.
        context: tokens that the next one can see, bos included; at least 2, and no more than the model has positions.
        batch: texts at once, at most; rounded up to a multiple of the devices.

    Raises:
        ValueError: a setting out of its range.
    """

    def __init__(self, c: Config, settings: Settings, context: int, batch: int = 64):
        settings.check(c.model.vocab)
        if context < 2:
            raise ValueError(f"context is {context}; it must hold at least 2 tokens, the first of which is bos.")
        c.model.check(context)
        self.c, self.settings, self.context, self.speed = c, settings, context, Speed()
        mesh = jax.sharding.get_mesh()
        self._devices, self._t, self._batch = mesh.size, mesh.shape["t"], batch
        self._compiled: dict[Any, Any] = {}
        self._chunk = min(CHUNK, settings.max_tokens)
        self._prefill, self._decode, self._compare = self._programs()

    def _programs(self):
        from train import batch_logits, copies_for_step

        m, s, chunk, cache_size = self.c.model, self.settings, self._chunk, self._padded(self.context)
        Weights = type(model_of(m.module).weight_table(m))
        Cache = Array["layers", KeyValues]
        gather, dtype = self.c.training.gather_weights == "step", self.c.training.compute_dtype
        # What training asked for may be for other devices than these; and in FP8 a text depends on those beside it.
        any_device = dataclasses.replace(self.c.training, attention="auto", fp8=False)

        @typed_shard_map
        def prefill(w: Weights, ids: u32["N/r/d L"], fresh: bool_["N/r/d"], cache: Cache | None) -> Cache:
            new = window_cache(copies_for_step(w, m, gather), ids, m, cache_size)
            choose = lambda old, x: jnp.where(fresh[None, :, None, None, None], x, old)
            return new if cache is None else jax.tree.map(choose, cache, new)

        @typed_shard_map
        def decode(w: Weights, cache: Cache, texts: Texts) -> tuple[Cache, Texts, u32["T N/r/d"]]:
            w = copies_for_step(w, m, gather)

            def step(carry, _):
                cache, texts = carry
                logits, cache = next_logits(w, cache, texts, m)
                drawn = choose(logits, texts.number[None], texts.length[None], s)[0]
                goes_on = (texts.left > 0) & (texts.place < self.context)
                ended = jnp.isin(drawn, jnp.array(s.stop, jnp.uint32))
                texts = Texts(
                    number=texts.number,
                    length=texts.length + goes_on,
                    token=jnp.where(goes_on, drawn, texts.token),
                    place=texts.place + goes_on,
                    left=jnp.where(goes_on, jnp.where(ended, 0, texts.left - 1), texts.left),
                )
                return (cache, texts), drawn

            (cache, texts), drawn = lax.scan(step, (cache, texts), length=chunk)
            return cache, texts, drawn

        @typed_shard_map
        def uncached(
            w: Weights, batch: TokenBatch, number: i32["B/r/d L"], place: i32["B/r/d L"]
        ) -> tuple[u32["B/r/d L/t"], f32["B/r/d L/t"], f32["B/r/d L/t"]]:
            logits = batch_logits(copies_for_step(w, m), batch, m)
            return compare(logits, batch.targets, number, place, s, ROUNDING[dtype])

        def jitted(per_device, replicated: slice, **options):
            """`per_device` jitted, the parts of its result that the host reads on every device."""

            @functools.partial(jax.jit, **options)
            def program(*args):
                with Scope(act=COMPUTE_DTYPES[dtype]), run_as(any_device):
                    out = per_device(*args)
                if not isinstance(out, tuple):
                    return out
                read = jax.tree.map(lambda x: jax.reshard(x, PartitionSpec()), out[replicated])
                return (*out[: replicated.start], *read)

            return program

        return (
            jitted(prefill, slice(1, None), donate_argnums=3),
            jitted(decode, slice(1, None), donate_argnums=1),
            jitted(uncached, slice(0, None)),
        )

    def _call(self, program, *args):
        """program(*args), timed without its compilation."""
        key = (program, tuple(np.shape(x) for x in jax.tree.leaves(args)))
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = program.lower(*args).compile()
            self.speed.compile_seconds += time.perf_counter() - start
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[key](*args))
        self.speed.seconds += time.perf_counter() - start
        return result

    def _padded(self, length: int) -> int:
        """Positions of a forward pass over windows of up to `length` tokens: few different numbers, which t divides."""
        short = max(SHORTEST, 1 << (length - 1).bit_length())
        return -(-min(short, self.context) // self._t) * self._t

    def generate(self, weights: Any, prompts: Sequence[Sequence[int]], first_number: int = 0) -> list[list[int]]:
        """The tokens drawn after each prompt, the one that ended the text included.

        Each process gives the same prompts and gets all texts.

        Args:
            weights: of the model, sharded as in training.
            prompts: token ids; none: the text begins after bos.
            first_number: number of the first text. Texts of different numbers have different noise.

        Raises:
            ValueError: token ids outside the model's vocabulary.
        """
        for i, prompt in enumerate(prompts):
            check_ids(f"prompt {i}", prompt, self.c.model.vocab)
        rows, result = self._rows(len(prompts)), []
        for i in range(0, len(prompts), rows):
            result += self._generate(weights, prompts[i : i + rows], first_number + i, rows)
        return result

    def _rows(self, texts: int) -> int:
        """Rows of each pass for so many texts."""
        return -(-min(texts, self._batch) // self._devices) * self._devices

    def _generate(self, weights, prompts: Sequence[Sequence[int]], first_number: int, rows: int) -> list[list[int]]:
        known = [list(prompt) for prompt in prompts]
        known += [[] for _ in range(rows - len(known))]
        left = np.where(np.arange(rows) < len(prompts), self.settings.max_tokens, 0).astype(np.int32)
        number = (first_number + np.arange(rows)).astype(np.int32)
        starts = [-1] * rows
        cache = None
        while left.any():
            now = [
                window_start(len(text), self.context) if more else start
                for text, more, start in zip(known, left, starts, strict=True)
            ]
            fresh = np.array([a != b for a, b in zip(now, starts, strict=True)])
            starts = now
            windows = [[self.c.model.bos_id, *text[max(start, 0) :]] for text, start in zip(known, starts, strict=True)]
            if fresh.any():
                longest = max(len(window) for window, is_fresh in zip(windows, fresh, strict=True) if is_fresh)
                ids = np.zeros((rows, self._padded(longest)), np.uint32)
                for i in np.flatnonzero(fresh):
                    ids[i, : len(windows[i])] = windows[i]
                cache = self._call(self._prefill, weights, ids, fresh, cache)
            texts = Texts(
                number=number,
                length=np.array([len(text) for text in known], np.int32),
                token=np.array([window[-1] for window in windows], np.uint32),
                place=np.array([len(window) - 1 for window in windows], np.int32),
                left=left,
            )
            cache, texts, drawn = self._call(self._decode, weights, cache, texts)
            left, counts, drawn = np.asarray(texts.left), np.asarray(texts.length), np.asarray(drawn)
            for i, text in enumerate(known):
                text += drawn[: counts[i] - len(text), i].tolist()
        result = [text[len(prompt) :] for text, prompt in zip(known, prompts, strict=False)]
        self.speed.tokens += sum(map(len, result))
        return result

    def check(
        self, weights: Any, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]], first_number: int = 0
    ) -> "Checked":
        """Draws each token again from training's forward pass over its window, without a cache, with the same noise.

        Args:
            weights, prompts, first_number: as `generate` had them.
            drawn: what it gave.

        Raises:
            ValueError: another token is drawn, and that is not for rounding.
        """
        checked = Checked()
        rows = list(self._windows(prompts, drawn))
        per_batch = self._rows(len(prompts))
        for first in range(0, len(rows), per_batch):
            part = rows[first : first + per_batch]
            shape = per_batch, self._padded(max(len(tokens) for _, _, _, tokens in part))
            targets, number, place = np.zeros(shape, np.uint32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            for i, (text, start, _, tokens) in enumerate(part):
                targets[i, : len(tokens)], number[i], place[i] = (
                    tokens,
                    first_number + text,
                    start + np.arange(shape[1]),
                )
            is_start = np.broadcast_to(np.arange(shape[1]) == 0, shape)
            batch = TokenBatch(targets=targets, is_seq_start=is_start, loss_mask=np.ones(shape, bool))
            found = map(np.asarray, self._compare(weights, batch, number, place))
            expected, excess, allowed = found
            for i, (text, start, new, tokens) in enumerate(part):
                for j in range(new - start, len(tokens)):
                    checked.tokens += 1
                    if expected[i, j] == tokens[j]:
                        continue
                    if not excess[i, j] <= allowed[i, j]:
                        raise ValueError(
                            f"text {first_number + text}, token {start + j}: {tokens[j]} was drawn with the cache, "
                            f"{expected[i, j]} is without it. Their logits with noise differ by {excess[i, j]:.3g}, "
                            f"where rounding in {self.c.training.compute_dtype} explains {allowed[i, j]:.3g}. It is an "
                            "error of the program: the model reads from its cache what is not in the text."
                        )
                    checked.ties += 1
                    checked.largest = max(checked.largest, float(excess[i, j] / allowed[i, j]))
        return checked

    def _windows(
        self, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, int, list[int]]]:
        """Each window: which text, where in it it starts, its first drawn token, and the tokens from the start on."""
        for i, (prompt, new) in enumerate(zip(prompts, drawn, strict=True)):
            text, first = [*prompt, *new], len(prompt)
            while first < len(text):
                start = window_start(first, self.context)
                end = min(len(text), start + self.context)
                yield i, start, first, text[start:end]
                first = end


@dataclasses.dataclass
class Checked:
    """What `Sampler.check` found."""

    tokens: int = 0
    """Compared."""
    ties: int = 0
    """Of these, differed for rounding."""
    largest: float = 0.0
    """The largest of their differences, as a part of what rounding explains."""
