"""Text from a model: batched, with a cache of keys and values, sharded as in training.

    sampler = Sampler(forward, Sampling(max_tokens=100, temperature=0.8), context=c.training.seq_len)
    continuations = sampler.generate(weights, [[5, 8, 13], []])

It runs the forward pass of training, with any model. All that a token learns from others passes through `attend`, which
can read a cache, so that the positions of a forward pass need not be those of one text. See docs/sampling.md.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib import shardops
from shardlib.shardtypes import Array, bool_, typed_shard_map, u32
from shardwright.modeling.model import compute_scope, inputs_of
from shardwright.run.causality import check_causal
from shardwright.run.soundness import check_program
from shardwright.sampling.cache import KeyValues, Texts, check_cache, next_logits, window_cache, window_start
from shardwright.sampling.drawing import Sampling, check_ids, choose, gathered

CHUNK = 32
"""Number of tokens of each text that are drawn before the host reads them."""
TEXTS_ARE_POSITIONS = "the positions of a device are its texts here, and how many these are depends on the mesh"
SHORTEST = 16
"""Smallest number of positions of a forward pass over windows. Others are powers of two, so that few programs are
compiled."""


def refuse_inputs(model: Any, instead: str) -> None:
    """Raises ValueError for a model that reads more than tokens; `instead` says what can be done with it."""
    if inputs := inputs_of(model):
        raise ValueError(
            f"model.module {model.c.module!r} reads {', '.join(inputs)} beside the tokens, which a text does not have. "
            f"{instead}"
        )


def padded(length: int, most: int, t: int) -> int:
    """Number of positions of a forward pass over up to `length` of `most` tokens: one of few multiples of t."""
    short = max(SHORTEST, 1 << (length - 1).bit_length())
    return -(-min(short, most) // t) * t


def compiled(program: Any, args: tuple, source: Any, *settings: Any) -> Any:
    """The compiled program. On several devices it is checked by the room soundness, once for all runs of a source."""
    if jax.sharding.get_mesh().size > 1:
        check_program(program, args, source, *settings)
    return program.lower(*args).compile()


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
        source: hashes of the source, from provenance.source_of; None: programs are checked each time.

    Attributes:
        prefill: the jitted program that fills the cache with windows of tokens.
        decode: the jitted program that draws up to CHUNK tokens of each text.

    Raises:
        ValueError: a setting out of its range, or a model that reads more than tokens.
    """

    def __init__(self, forward: Any, settings: Sampling, context: int, batch: int = 64, source: Any = None):
        c = forward.model.c
        settings.check(c.vocab)
        refuse_inputs(forward.model, "Evaluate it, or sample a model without Model.inputs.")
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
        self.prefill, self.decode = self._programs()

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

        def jitted(per_device, donated: int):
            """Jits `per_device`, with its results but the cache on every device, for the host to read."""

            @functools.partial(jax.jit, donate_argnums=donated)
            @functools.wraps(per_device)
            def program(*args):
                with compute_scope(training.compute_dtype):
                    out = per_device(*args)
                if not isinstance(out, tuple):
                    return out
                return out[0], *jax.tree.map(lambda x: jax.reshard(x, PartitionSpec()), out[1:])

            return program

        return jitted(prefill, 3), jitted(decode, 1)

    def _call(self, program, *args):
        """Runs program(*args). Its time and that of its compilation are added to the speed."""
        key = (program, tuple(np.shape(x) for x in jax.tree.leaves(args)))
        if key not in self._compiled:
            start = time.perf_counter()
            read = self.c, self.forward.training, self.settings, self.context, self._chunk
            self._compiled[key] = compiled(program, args, self._source, *read)
            self.speed.compile_seconds += time.perf_counter() - start
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[key](*args))
        self.speed.seconds += time.perf_counter() - start
        return result

    def padded(self, length: int) -> int:
        """Number of positions of a forward pass over windows of up to `length` tokens."""
        return padded(length, self.context, self._t)

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
        self._check_model()
        batch, result = self.batch_for(len(prompts)), []
        for i in range(0, len(prompts), batch):
            result += self._generate(weights, prompts[i : i + batch], i, batch)
        return result

    def _check_model(self) -> None:
        """Checks once that texts can be drawn with a cache."""
        if not self._checked:
            start = time.perf_counter()
            unproved = check_causal(self.forward, self.context, self._source, sampled=True)
            if unproved:
                raise ValueError(
                    f"it is not proved that a position sees no later token, so texts cannot be continued: {unproved}"
                )
            check_cache(self.forward, self.context)
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
