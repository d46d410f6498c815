"""Samples text from a model: batched, with the states that layers keep (such as a KV cache),
sharded as in training.

    sampler = Sampler(trace_step(c, model), Sampling(max_tokens=100, temperature=0.8),
    context=c.training.seq_len) continuations = sampler.generate(weights, [[5, 8, 13], []])

It runs the forward pass of training, with any model. Tokens get information from others only
through `attention`, which can read what it kept of them, so the positions of a forward pass need
not belong to one text. See docs/evaluation.md.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib import shardops
from shardlib.exact.endings import Undecided
from shardlib.exact.verdicts import find
from shardlib.findings import Finding
from shardlib.parsing import ShardError
from shardlib.shardtypes import Array, Of, Separate, i32, typed, typed_shard_map, u32
from shardlib.tracing import on_one_device, tracing
from shardwright.data.checks import at_least_0, check_ranges, within
from shardwright.inspect.causality import check_causal
from shardwright.inspect.smaller import make_small
from shardwright.inspect.soundness import refuse
from shardwright.modeling.model import act, compute_scope
from shardwright.modeling.state import state_of
from shardwright.program.step import Step
from shardwright.sampling.cache import Texts, check_cache, filled_cache, next_logits

CHUNK = 32
"""Most tokens per text that are drawn before the host reads them."""
SHORTEST = 16
"""Fewest positions of a forward pass over texts. Longer ones are powers of two, so that few
programs are compiled."""


# ---- the draw ------------------------------------------------------------------------------------


@dataclasses.dataclass(unsafe_hash=True)
class Sampling:
    """Settings of sampling the next token: from logits / temperature, after top_k, then top_p, then
    min_p.
    """

    max_tokens: int = within(1, 2**31, 200)
    """Most tokens to add to a prompt; at least 1."""
    temperature: float = at_least_0(1.0)
    """At least 0; 0 takes the most likely token."""
    top_k: int | None = within(1, 2**31, None)
    """Number of most likely tokens to sample from, at least 1, plus ties with the last of them.
    None: all."""
    top_p: float = within(math.ulp(0), math.nextafter(1, 2), 1.0)
    """Samples only from the most likely tokens that together have this probability, plus ties with
    the last of them. In (0, 1] (arXiv 1904.09751)."""
    seed: int = within(0, 2**63, 0)
    """In [0, 2**63). The noise of a token depends only on the lowest 32 bits of the seed, the index
    of its text, and its position in it."""
    min_p: float = within(0, math.nextafter(1, 2), 0.0)
    """Samples only from tokens with at least this share of the probability of the most likely one.
    In [0, 1]; 0 keeps all (arXiv 2407.01082)."""
    stop: tuple[int, ...] = ()
    """Token ids that end a text."""


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raises ValueError for a token id outside [0, vocab); `name` says where it comes from."""
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(
                f"{name} has the token id {token}; those of the model are 0 to {vocab - 1}."
            )


def lowest_kept(scaled: jax.Array, s: Sampling) -> jax.Array:
    """Computes the lowest scaled logit […, 1], of […, V], that top_k, top_p and min_p keep."""
    least = jnp.max(scaled, axis=-1, keepdims=True) + (math.log(s.min_p) if s.min_p else -math.inf)
    if s.top_k is None and s.top_p == 1:
        return least
    ordered = lax.top_k(scaled, min(s.top_k or scaled.shape[-1], scaled.shape[-1]))[0]
    if s.top_p == 1:
        return jnp.maximum(least, ordered[..., -1:])
    likelihood = jax.nn.softmax(ordered, axis=-1)
    likelier = jnp.cumsum(likelihood, axis=-1) - likelihood
    kept = (likelier < s.top_p).at[..., 0].set(True)
    return jnp.maximum(least, jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True))


def gumbel_noise(number: jax.Array, place: jax.Array, vocab: int, s: Sampling) -> jax.Array:
    """Draws noise […, vocab] for the token at `place[…]` of the text `number[…]`.

    The argmax of the logits plus this noise is a sample from their softmax (Gumbel-max).
    """
    if s.temperature == 0:
        return jnp.zeros(())
    seed = jax.random.key(s.seed)

    def draw(number, place):
        key = jax.random.fold_in(jax.random.fold_in(seed, number), place)
        return jax.random.gumbel(key, (vocab,))

    return jax.vmap(draw)(number.reshape(-1), place.reshape(-1)).reshape(*number.shape, vocab)


@typed
def choose(
    logits: act["B/r/d L V/t"], number: i32["B/r/d L"], place: i32["B/r/d L"], s: Sampling
) -> u32["B/r/d L"]:
    """Samples the token at `place` of the text `number`, the same on all devices of t."""
    logits = jnp.float32(shardops.all_gather("B/r/d L V/t -> B/r/d L V", logits, replicated=True))
    scaled = logits / (s.temperature or 1.0)
    noise = gumbel_noise(number, place, scaled.shape[-1], s)
    kept = scaled >= lowest_kept(scaled, s)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.uint32)


# ---- programs over texts -------------------------------------------------------------------------


def padded(length: int, most: int, t: int) -> int:
    """Rounds `length`, at most `most`, up to one of few forward-pass lengths, multiples of t."""
    short = max(SHORTEST, 1 << (length - 1).bit_length())
    return -(-min(short, most) // t) * t


class Programs:
    """Runs programs with a model's forward pass over texts, on the current mesh.

    Compiles each once per shape.

    Args:
        step: a Step of the model. Of its settings, training.gather_weights decides if weights are
            gathered in each layer for each token, or once for CHUNK tokens.
        edits: settings of training in which the programs differ, besides attention for these
            devices and no FP8, whose scales make a text depend on the others in its batch.

    Raises:
        ValueError: the model has inputs other than tokens, or predicts hidden ones.
    """

    def __init__(self, step: Step, edits: Mapping[str, Any] | None = None):
        if inputs := step.inputs:
            raise ValueError(
                f"model.module {step.model.config.module!r} also reads {', '.join(inputs)}, which "
                f"texts do not have. Evaluate it on the validation data of its run."
            )
        if hasattr(step.model, "hidden"):
            raise ValueError(
                f"model.module {step.model.config.module!r} predicts hidden tokens, not the next "
                f"ones of a text. Evaluate it on the validation data of its run."
            )
        t = step.mesh.shape["t"]
        # Texts come in batches of their own, which the devices divide, also where the run's do not.
        sizes = {
            "training.batch_size": step.mesh.size,
            "training.microbatches": 1,
            "training.seq_len": max(step.config.training.seq_len // t, 1) * t,
        }
        own = {"training.attention": "auto", "training.fp8": False, **sizes, **(edits or {})}
        self.step = step.other(own, name="logits")
        self.forward, self.config = self.step.forward, step.model.config
        self.mesh = step.mesh
        self._is_sound = False
        self._compiled: dict[Any, Any] = {}

    def jit(self, per_device: Any, kept: int, donated: tuple = ()) -> Any:
        """Jits `per_device`.

        Its results after the first `kept` are replicated, for the host to read.
        """
        dtype = self.forward.training.compute_dtype

        @functools.partial(jax.jit, donate_argnums=donated)
        @functools.wraps(per_device)
        def program(*args):
            # By default, GPUs round operands of f32 matmuls to TF32.
            exact = (
                jax.default_matmul_precision("highest")
                if dtype == "f32"
                else contextlib.nullcontext()
            )
            with compute_scope(dtype), exact:
                out = per_device(*args)
            out = out if isinstance(out, tuple) else (out,)
            return *out[:kept], *jax.tree.map(lambda x: jax.reshard(x, PartitionSpec()), out[kept:])

        return program

    def _find_unsound(self) -> list[Finding]:
        """Finds what the forward pass computes on the mesh otherwise than on one device, at small
        sizes.
        """
        try:
            small = make_small(self.step).step
            alone = small.other(mesh=on_one_device(small.mesh), planned=small.mesh.shape)
            return find(small.jaxpr, alone.jaxpr, small.mesh.shape)
        except Undecided as error:
            return [Finding(str(error))]

    def run(self, program: Any, *args: Any) -> Any:
        """Runs program(*args), where `jit` made `program`.

        On several devices, checks the forward pass first.
        """
        key = (program, tuple(np.shape(x) for x in jax.tree.leaves(args)))
        if key not in self._compiled:
            if self.mesh.size > 1 and not self._is_sound:
                refuse(self._find_unsound)
                self._is_sound = True
            self._compiled[key] = program.lower(*args).compile()
        return self._compiled[key](*args)


class Sampler(Programs):
    """Continues texts with the weights of a model, on the current mesh.

    Args:
        step: as for Programs.
        settings: how to sample.
        context: number of tokens that the next one can attend to, with bos; at most the model's
            positions. A text that fills it ends.
        batch: most texts at once; rounded up to a multiple of the devices.

    Raises:
        ValueError: a setting is out of range, or the model has inputs other than tokens.
    """

    def __init__(self, step: Step, settings: Sampling, context: int, batch: int = 64):
        check_ranges("sampling", settings)
        check_ids("stop", settings.stop, step.model.config.vocab)
        step.model.config.check(context)
        self.settings, self.context, self._batch = settings, context, batch
        self._chunk = min(CHUNK, settings.max_tokens)
        super().__init__(step)
        self._t = self.mesh.shape["t"]
        self._checked = False
        self._prefill, self._decode = self._programs()

    def _programs(self):
        forward, s, chunk = self.forward, self.settings, self._chunk
        cache_size = padded(self.context, self.context, self._t)
        Weights = forward.model.Weights
        # Its dims are its own: a model's weights may have dims of the same names.
        Cache = Separate[Array["layers", state_of(forward.model)]]

        @typed_shard_map
        def prefill(w: Of[Weights], ids: u32["_N/r/d _L"], read: i32["_N/r/d"]) -> Of[Cache]:
            return filled_cache(forward.gatherable(w), ids, read, forward, cache_size)

        @typed_shard_map
        def decode(
            w: Of[Weights], cache: Of[Cache], texts: Texts
        ) -> tuple[Of[Cache], Texts, u32["_T _N/r/d"]]:
            w = forward.gatherable(w)

            def step(carry, _):
                cache, texts = carry
                logits, cache = next_logits(w, cache, texts, forward)
                # The positions of a device are its texts here.
                drawn = choose(logits, texts.number[None], texts.place[None], s)[0]
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

        return self.jit(prefill, 1), self.jit(decode, 1, donated=(1,))

    def generate(
        self,
        weights: object,
        prompts: Sequence[Sequence[int]],
        is_over: Callable[..., Any] = lambda prompt, ids: False,
    ) -> list[list[int]]:
        """Generates tokens after each prompt, including the one that ended the text.

        Each process passes the same prompts and receives all texts.

        Args:
            weights: of the model, sharded as in training.
            prompts: token ids. After an empty prompt, the text begins after bos.
            is_over: maps a prompt and the ids added to it to whether the text is complete. Called
                after every chunk, so texts may have more tokens.

        Raises:
            ValueError: token ids are outside the model's vocabulary, a prompt fills the context, or
                the model cannot be decoded with a cache or its states.
        """
        self.check(prompts)
        batch = -(-min(len(prompts), self._batch) // self.mesh.size) * self.mesh.size
        result = []
        for i in range(0, len(prompts), batch):
            result += self._generate(weights, prompts[i : i + batch], i, batch, is_over)
        return result

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if `generate` would."""
        for i, prompt in enumerate(prompts):
            check_ids(f"prompt {i}", prompt, self.config.vocab)
            if len(prompt) >= self.context:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; it must have fewer than {self.context}."
                )
        if not self._checked:
            positions = padded(self.context, self.context, self._t)
            if unproved := check_causal(self.step, positions):
                raise ValueError(
                    f"cannot sample texts, because it is not known whether the model is causal: "
                    f"{unproved}"
                )
            try:
                self._check_cache(make_small(self.step).step)
            except ShardError:  # a State may declare numbers, which are not the small sizes
                self._check_cache(self.step)
            self._checked = True

    def _check_cache(self, step: Step) -> None:
        with tracing(step.mesh):
            check_cache(
                step.forward,
                min(self.context, getattr(step.model.config, "positions", self.context)),
            )

    def _generate(
        self,
        weights: object,
        prompts: Sequence[Sequence[int]],
        first_number: int,
        batch: int,
        is_over: Callable[..., Any],
    ) -> list[list[int]]:
        texts = [list(prompt) for prompt in prompts] + [[] for _ in range(batch - len(prompts))]
        read = [[self.config.bos_id, *text] for text in texts]
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
        (cache,) = self.run(self._prefill, weights, ids, state.place)
        while state.left.any():
            cache, *found = self.run(self._decode, weights, cache, state)
            state, drawn = jax.tree.map(np.asarray, found)
            for i, text in enumerate(texts):
                text += drawn[: state.place[i] - len(text), i].tolist()
            over = [
                is_over(prompt, text[len(prompt) :])
                for text, prompt in zip(texts, prompts, strict=False)
            ]
            over += [True] * (batch - len(prompts))
            state = dataclasses.replace(state, left=np.where(over, 0, state.left).astype(np.int32))
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=False)]
