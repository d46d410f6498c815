"""Text from a model: batched, with a cache of keys and values, sharded as in training.

    sampler = Sampler(forward, Sampling(max_tokens=100, temperature=0.8), context=c.training.seq_len)
    continuations = sampler.generate(weights, [[5, 8, 13], []])

It runs the forward pass of training, with any model. All that a token learns from others passes through `attend`, which
can read a cache, so that the positions of a forward pass need not be those of one text. See docs/sampling.md.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib import shardops
from shardlib.shardtypes import Array, typed_shard_map, u32
from shardwright.modeling.model import compute_scope, inputs_of
from shardwright.run.causality import check_causal
from shardwright.run.soundness import check_program
from shardwright.sampling.cache import KeyValues, Texts, check_cache, filled_cache, next_logits
from shardwright.sampling.drawing import Sampling, check_ids, choose

CHUNK = 32
"""Number of tokens of each text that are drawn before the host reads them."""
TEXTS_ARE_POSITIONS = "the positions of a device are its texts here, and how many these are depends on the mesh"
SHORTEST = 16
"""Smallest number of positions of a forward pass over texts. Others are powers of two, so that few programs are
compiled."""


def refuse_inputs(model: Any) -> None:
    """Raises ValueError for a model that reads more than tokens."""
    if inputs := inputs_of(model):
        raise ValueError(
            f"model.module {model.c.module!r} reads {', '.join(inputs)} beside the tokens, which a text does not have. "
            "Evaluate it on its run's own validation data."
        )


def padded(length: int, most: int, t: int) -> int:
    """Number of positions of a forward pass over up to `length` of `most` tokens: one of few multiples of t."""
    short = max(SHORTEST, 1 << (length - 1).bit_length())
    return -(-min(short, most) // t) * t


class Programs:
    """Compiled programs, each compiled once for its shapes, and on several devices checked by the room soundness.

    Args:
        source: hashes of the source, from provenance.source_of; None: programs are checked each time.
        settings: all that the programs read.
    """

    def __init__(self, source: Any, *settings: Any):
        self._source, self._settings = source, settings
        self._compiled: dict[Any, Any] = {}

    def run(self, program: Any, *args: Any) -> Any:
        """The result of program(*args), where `program` is jitted."""
        key = (program, tuple(np.shape(x) for x in jax.tree.leaves(args)))
        if key not in self._compiled:
            if jax.sharding.get_mesh().size > 1:
                check_program(program, args, self._source, *self._settings)
            self._compiled[key] = program.lower(*args).compile()
        return self._compiled[key](*args)


class Sampler:
    """Continues texts with the weights of a model, on the current mesh.

    Args:
        forward: train.Forward of the model. Its `training` sets the compute dtype, and gather_weights: whether weights
            are gathered in each layer for each token, or once for CHUNK tokens.
        settings: how to draw.
        context: number of tokens that the next one can see, with bos; at least 2, and no more than the model has
            positions. A text that fills it ends.
        batch: largest number of texts at once; rounded up to a multiple of the devices.
        source: hashes of the source, from provenance.source_of; None: programs are checked each time.

    Attributes:
        prefill: the jitted program that fills the cache with the prompts.
        decode: the jitted program that draws up to CHUNK tokens of each text.

    Raises:
        ValueError: a setting out of its range, or a model that reads more than tokens.
    """

    def __init__(self, forward: Any, settings: Sampling, context: int, batch: int = 64, source: Any = None):
        c = forward.model.c
        settings.check(c.vocab)
        refuse_inputs(forward.model)
        if context < 2:
            raise ValueError(f"context is {context}; it must hold at least 2 tokens, the first of which is bos.")
        c.check(context)
        # The path that training names may be for other devices. In FP8 a text depends on those beside it.
        any_device = dataclasses.replace(forward.training, attention="auto", fp8=False)
        self.forward, self.c = dataclasses.replace(forward, training=any_device), c
        self.settings, self.context = settings, context
        mesh = jax.sharding.get_mesh()
        self._devices, self._t, self._batch = mesh.size, mesh.shape["t"], batch
        self._source = source
        self._chunk = min(CHUNK, settings.max_tokens)
        self._checked = False
        self._run = Programs(source, c, any_device, settings, context, self._chunk).run
        self.prefill, self.decode = self._programs()

    def _programs(self):
        forward, s, chunk = self.forward, self.settings, self._chunk
        Weights, training = forward.model.Weights, forward.training
        cache_size = padded(self.context, self.context, self._t)
        Cache = Array["layers", KeyValues]

        @typed_shard_map
        def prefill(w: Weights, ids: u32["_N/r/d _L"]) -> Cache:
            return filled_cache(forward.copies(w), ids, forward, cache_size)

        @typed_shard_map
        def decode(w: Weights, cache: Cache, texts: Texts) -> tuple[Cache, Texts, u32["_T _N/r/d"]]:
            w = forward.copies(w)

            def step(carry, _):
                cache, texts = carry
                logits, cache = next_logits(w, cache, texts, forward)
                drawn = choose(logits, texts.number[None], texts.place[None], s)
                drawn = shardops.per_device("_N/r/d", lambda ids: ids[0], drawn, reason=TEXTS_ARE_POSITIONS)
                continues = texts.left > 0
                ended = jnp.isin(drawn, jnp.array(s.stop, jnp.uint32))
                texts = dataclasses.replace(
                    texts,
                    token=jnp.where(continues, drawn, texts.token),
                    place=texts.place + continues,
                    left=jnp.where(continues, jnp.where(ended, 0, texts.left - 1), texts.left),
                )
                return (cache, texts), drawn

            (cache, texts), drawn = lax.scan(step, (cache, texts), length=chunk)
            return cache, texts, drawn

        def jitted(per_device, donated: tuple = ()):
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

        return jitted(prefill), jitted(decode, (1,))

    def generate(self, weights: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens drawn after each prompt, with the one that ended the text.

        Each process passes the same prompts and receives all texts.

        Args:
            weights: of the model, sharded as in training.
            prompts: token ids. After an empty prompt, the text begins after bos.

        Raises:
            ValueError: token ids outside the model's vocabulary, a prompt that fills the context, or a model that
                cannot be decoded with a cache.
        """
        for i, prompt in enumerate(prompts):
            check_ids(f"prompt {i}", prompt, self.c.vocab)
            if len(prompt) >= self.context:
                raise ValueError(f"prompt {i} has {len(prompt)} tokens; a context of {self.context} takes fewer.")
        self._check_model()
        batch, result = -(-min(len(prompts), self._batch) // self._devices) * self._devices, []
        for i in range(0, len(prompts), batch):
            result += self._generate(weights, prompts[i : i + batch], i, batch)
        return result

    def _check_model(self) -> None:
        """Checks once that texts can be drawn with a cache."""
        if self._checked:
            return
        if unproved := check_causal(self.forward, self.context, self._source, sampled=True):
            raise ValueError(
                f"it is not proved that a position sees no later token, so texts cannot be continued: {unproved}"
            )
        check_cache(self.forward, self.context)
        self._checked = True

    def _generate(self, weights, prompts: Sequence[Sequence[int]], first_number: int, batch: int) -> list[list[int]]:
        texts = [list(prompt) for prompt in prompts] + [[] for _ in range(batch - len(prompts))]
        read = [[self.c.bos_id, *text] for text in texts]
        ids = np.zeros((batch, padded(max(map(len, read)), self.context, self._t)), np.uint32)
        for row, tokens in zip(ids, read, strict=True):
            row[: len(tokens)] = tokens
        left = [min(self.settings.max_tokens, self.context - len(prompt)) for prompt in prompts]
        state = Texts(
            number=(first_number + np.arange(batch)).astype(np.int32),
            token=np.array([tokens[-1] for tokens in read], np.uint32),
            place=np.array([len(text) for text in texts], np.int32),
            left=np.array(left + [0] * (batch - len(prompts)), np.int32),
        )
        cache = self._run(self.prefill, weights, ids)
        while state.left.any():
            cache, *found = self._run(self.decode, weights, cache, state)
            state, drawn = jax.tree.map(np.asarray, found)
            for i, text in enumerate(texts):
                text += drawn[: state.place[i] - len(text), i].tolist()
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=False)]
