"""Text from a model: batched, with a cache of keys and values, sharded as in training.

    sampler = Sampler(forward, Settings(max_tokens=100, temperature=0.8), context=c.training.seq_len)
    continuations = sampler.generate(weights, [[5, 8, 13], []])

It runs the forward pass of training, with any model. All that a token learns from others passes through `attend`, which
can read a cache, so that the positions of a forward pass need not be those of one text. See docs/sampling.md.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib import shardops
from shardlib.shardtypes import Array, bool_, f32, i32, typed_shard_map, u32
from shardwright.cluster.devices import kept_programs
from shardwright.modeling.model import compute_scope, inputs_of
from shardwright.run.causality import check_causal
from shardwright.run.soundness import check_program
from shardwright.sampling.cache import (
    KeyValues,
    Texts,
    next_logits,
    window_cache,
    window_start,
)
from shardwright.sampling.drawing import ROUNDING, Settings, check_ids, choose, compare, gathered
from shardwright.sampling.probes import check_cache
from shardwright_data.loader import TokenBatch

CHUNK = 32
"""Number of tokens of each text that are drawn before the host reads them."""
TEXTS_ARE_POSITIONS = "the positions of a device are its texts here, and how many these are depends on the mesh"
SHORTEST = 16
"""Smallest number of positions of a forward pass over windows. Others are powers of two, so that few programs are
compiled."""


@dataclasses.dataclass
class Speed:
    """Work and time of `Sampler.generate`."""

    tokens: int = 0
    """Number of tokens drawn, of all texts together."""
    seconds: float = 0.0
    """Without compilation."""
    compile_seconds: float = 0.0


class Sampler:
    """Continues texts with the weights of a model, on the current mesh.

    Args:
        forward: train.Forward of the model. Its `training` sets the compute dtype, and gather_weights: whether weights
            are gathered in each layer for each token, or once for CHUNK tokens.
        settings: how to draw.
        context: number of tokens that the next one can see, with bos; at least 2, and no more than the model has
            positions.
        batch: largest number of texts at once; rounded up to a multiple of the devices.
        source: hashes of the source, from provenance.source_of. Each program is checked by the room
            soundness before it is compiled, and once for all runs of a source; None: each time.

    Attributes:
        prefill: the jitted program that fills the cache with windows of tokens.
        decode: the jitted program that draws up to CHUNK tokens of each text.
        compare: the jitted program that draws tokens from training's forward pass, for `check`.

    Raises:
        ValueError: a setting out of its range, or a model that reads more than tokens.
    """

    def __init__(self, forward: Any, settings: Settings, context: int, batch: int = 64, source: Any = None):
        c = forward.model.c
        settings.check(c.vocab)
        if inputs := inputs_of(forward.model):
            raise ValueError(
                f"model.module {c.module!r} reads {', '.join(inputs)} beside the tokens, which a drawn token does not "
                "have: it cannot be sampled. Evaluate it instead, or sample one without Model.inputs."
            )
        if context < 2:
            raise ValueError(f"context is {context}; it must hold at least 2 tokens, the first of which is bos.")
        c.check(context)
        # The path that training names may be for other devices. In FP8 a text depends on those beside it.
        any_device = dataclasses.replace(forward.training, attention="auto", fp8=False)
        self.forward, self.c = dataclasses.replace(forward, training=any_device), c
        self.settings, self.context, self.speed = settings, context, Speed()
        mesh = jax.sharding.get_mesh()
        self._devices, self._t, self._batch = mesh.size, mesh.shape["t"], batch
        self._compiled: dict[Any, Any] = {}
        self._source = source
        self._chunk = min(CHUNK, settings.max_tokens)
        self._checked = False
        self.prefill, self.decode, self.compare = self._programs()

    def _programs(self):
        forward, s, chunk, cache_size = self.forward, self.settings, self._chunk, self.padded(self.context)
        Weights, training = forward.model.Weights, forward.training
        Cache = Array["layers", KeyValues]

        @typed_shard_map
        def prefill(w: Weights, ids: u32["_N/r/d _L"], fresh: bool_["_N/r/d"], cache: Cache | None) -> Cache:
            new = window_cache(forward.copies(w), ids, forward, cache_size)
            choose = lambda old, x: jnp.where(fresh[None, :, None, None, None], x, old)
            return new if cache is None else jax.tree.map(choose, cache, new)

        @typed_shard_map
        def decode(w: Weights, cache: Cache, texts: Texts) -> tuple[Cache, Texts, u32["_T _N/r/d"]]:
            w = forward.copies(w)

            def step(carry, _):
                cache, texts = carry
                logits, cache = next_logits(w, cache, texts, forward)
                own = choose(logits, texts.number[None], texts.length[None], s)
                drawn = shardops.per_device("_N/r/d", lambda own: gathered(own)[0], own, reason=TEXTS_ARE_POSITIONS)
                continues = (texts.left > 0) & (texts.place < self.context)
                ended = jnp.isin(drawn, jnp.array(s.stop, jnp.uint32))
                texts = dataclasses.replace(
                    texts,
                    length=texts.length + continues,
                    token=jnp.where(continues, drawn, texts.token),
                    place=texts.place + continues,
                    left=jnp.where(continues, jnp.where(ended, 0, texts.left - 1), texts.left),
                )
                return (cache, texts), drawn

            (cache, texts), drawn = lax.scan(step, (cache, texts), length=chunk)
            return cache, texts, drawn

        @typed_shard_map
        def uncached(
            w: Weights, batch: TokenBatch, number: i32["B/r/d L"], place: i32["B/r/d L"]
        ) -> tuple[u32["B/r/d L/t"], f32["B/r/d L/t"], f32["B/r/d L/t"]]:
            logits, *_ = forward(forward.copies(w), forward.tokens(batch), forward.model.logits)
            return compare(logits, batch.targets, number, place, s, ROUNDING[training.compute_dtype])

        def jitted(per_device, replicated: slice, **options):
            """Jits `per_device`, with the `replicated` part of its results on every device, for the host to read."""

            @functools.partial(jax.jit, **options)
            @functools.wraps(per_device)
            def program(*args):
                with compute_scope(training.compute_dtype):
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
        """Runs program(*args). Its time and that of its compilation are added to the speed."""
        key = (program, tuple(np.shape(x) for x in jax.tree.leaves(args)))
        if key not in self._compiled:
            start = time.perf_counter()
            if jax.sharding.get_mesh().size > 1:
                read = self.c, self.forward.training, self.settings, self.context, self._chunk
                check_program(program, args, self._source, kept_programs("soundness"), *read)
            self._compiled[key] = program.lower(*args).compile()
            self.speed.compile_seconds += time.perf_counter() - start
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[key](*args))
        self.speed.seconds += time.perf_counter() - start
        return result

    def padded(self, length: int) -> int:
        """Number of positions of a forward pass over windows of up to `length` tokens: one of few multiples of t."""
        short = max(SHORTEST, 1 << (length - 1).bit_length())
        return -(-min(short, self.context) // self._t) * self._t

    def generate(self, weights: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens drawn after each prompt, with the one that ended the text.

        Each process passes the same prompts and receives all texts.

        Args:
            weights: of the model, sharded as in training.
            prompts: token ids. After an empty prompt, the text begins after bos.

        Raises:
            ValueError: token ids outside the model's vocabulary, or a model that cannot be decoded with a cache.
        """
        for i, prompt in enumerate(prompts):
            check_ids(f"prompt {i}", prompt, self.c.vocab)
        self._check_model(weights)
        batch, result = self.batch_for(len(prompts)), []
        for i in range(0, len(prompts), batch):
            result += self._generate(weights, prompts[i : i + batch], i, batch)
        return result

    def _check_model(self, weights: Any) -> None:
        """Checks once that texts can be drawn with a cache."""
        if not self._checked:
            start = time.perf_counter()
            unproved = check_causal(self.forward, self.context, self._source, kept_programs("soundness"), sampled=True)
            if unproved:
                raise ValueError(
                    f"it is not proved that a position sees no later token, so texts cannot be continued: {unproved}"
                )
            check_cache(self.forward, weights, self.context)
            self._checked = True
            self.speed.compile_seconds += time.perf_counter() - start

    def batch_for(self, texts: int) -> int:
        """Number of sequences in each pass for `texts` texts."""
        return -(-min(texts, self._batch) // self._devices) * self._devices

    def _ids(self, windows: Sequence[Sequence[int]]) -> np.ndarray:
        """Windows of tokens as an array, padded at their ends."""
        ids = np.zeros((len(windows), self.padded(max(1, *map(len, windows)))), np.uint32)
        for sequence, window in zip(ids, windows, strict=True):
            sequence[: len(window)] = window
        return ids

    def _generate(self, weights, prompts: Sequence[Sequence[int]], first_number: int, batch: int) -> list[list[int]]:
        known = [list(prompt) for prompt in prompts]
        known += [[] for _ in range(batch - len(known))]
        left = np.where(np.arange(batch) < len(prompts), self.settings.max_tokens, 0).astype(np.int32)
        number = (first_number + np.arange(batch)).astype(np.int32)
        starts = [-1] * batch
        cache = None
        while left.any():
            now = [
                window_start(len(text), self.context) if more else start
                for text, more, start in zip(known, left, starts, strict=True)
            ]
            fresh = np.array([a != b for a, b in zip(now, starts, strict=True)])
            starts = now
            windows = [[self.c.bos_id, *text[max(start, 0) :]] for text, start in zip(known, starts, strict=True)]
            if fresh.any():
                changed = [window if is_fresh else [] for window, is_fresh in zip(windows, fresh, strict=True)]
                cache = self._call(self.prefill, weights, self._ids(changed), fresh, cache)
            texts = Texts(
                number=number,
                length=np.array([len(text) for text in known], np.int32),
                token=np.array([window[-1] for window in windows], np.uint32),
                place=np.array([len(window) - 1 for window in windows], np.int32),
                left=left,
            )
            cache, texts, drawn = self._call(self.decode, weights, cache, texts)
            left, counts, drawn = np.asarray(texts.left), np.asarray(texts.length), np.asarray(drawn)
            for i, text in enumerate(known):
                text += drawn[: counts[i] - len(text), i].tolist()
        result = [text[len(prompt) :] for text, prompt in zip(known, prompts, strict=False)]
        self.speed.tokens += sum(map(len, result))
        return result

    def check(self, weights: Any, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]) -> "Checked":
        """Draws each token again from training's forward pass over its window, without a cache, with the same noise.

        Args:
            weights: as in `generate`.
            prompts: as in `generate`.
            drawn: the texts from `generate`.

        Raises:
            ValueError: another token is drawn, by more than rounding explains.
        """
        checked, dtype = Checked(), self.forward.training.compute_dtype
        self._check_model(weights)
        windows, per_batch = list(self._windows(prompts, drawn)), self.batch_for(len(prompts))
        for first in range(0, len(windows), per_batch):
            part = windows[first : first + per_batch]
            shape = per_batch, self.padded(max(len(tokens) for _, _, _, tokens in part))
            targets, number, place = np.zeros(shape, np.uint32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            for i, (text, start, _, tokens) in enumerate(part):
                targets[i, : len(tokens)] = tokens
                number[i], place[i] = text, start + np.arange(shape[1])
            is_start = np.broadcast_to(np.arange(shape[1]) == 0, shape)
            batch = TokenBatch(targets=targets, is_seq_start=is_start, loss_mask=np.ones(shape, bool))
            expected, excess, allowed = map(np.asarray, self.compare(weights, batch, number, place))
            for i, (text, start, new, tokens) in enumerate(part):
                for j in range(new - start, len(tokens)):
                    checked.tokens += 1
                    if expected[i, j] == tokens[j]:
                        continue
                    if not excess[i, j] <= allowed[i, j]:
                        raise ValueError(
                            f"text {text}, token {start + j}: {tokens[j]} was drawn with the cache, {expected[i, j]} "
                            f"is by training's forward pass. Their logits with noise differ by {excess[i, j]:.3g}; "
                            f"rounding in {dtype} explains {allowed[i, j]:.3g}. It is an error of the program: the "
                            "model reads from its cache what is not in the text."
                        )
                    checked.ties += 1
                    checked.largest = max(checked.largest, float(excess[i, j] / allowed[i, j]))
        return checked

    def _windows(
        self, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, int, list[int]]]:
        """Each window: number of its text, place of its start, place of its first drawn token, and its tokens."""
        for i, (prompt, new) in enumerate(zip(prompts, drawn, strict=True)):
            text, first = [*prompt, *new], len(prompt)
            while first < len(text):
                start = window_start(first, self.context)
                end = min(len(text), start + self.context)
                yield i, start, first, text[start:end]
                first = end


@dataclasses.dataclass
class Checked:
    """Result of `Sampler.check`."""

    tokens: int = 0
    """Number of tokens that were compared."""
    ties: int = 0
    """Number of these that differ because of rounding."""
    largest: float = 0.0
    """The largest of their differences, divided by the difference that rounding explains."""
