"""Attention as a layer calls it: `attention(q, k, v, mask)`."""

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp

from shardlib.parsing import ShardError
from shardlib.places import place_of
from shardwright.modeling import attention_paths, context
from shardwright.modeling.masks import AttentionMask, Mask, same_document
from shardwright.modeling.model import Tokens

_REFERENCE: contextvars.ContextVar[Callable[..., jax.Array] | None] = contextvars.ContextVar(
    "reference", default=None
)


@contextlib.contextmanager
def expect_einsum(einsum: Callable[..., jax.Array]) -> Iterator[None]:
    """Context in which each Attention must have this `einsum`, with which its implementations are
    compared.
    """
    token = _REFERENCE.set(einsum)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


class Attention:
    """Attention of the layers of a model within one microbatch. Per-device code.

    A layer calls it with its queries, keys and values, and an AttentionMask, which says who attends
    to whom. It knows the rest: positions and documents, what the devices of c send each other
    (modeling/context.py), the implementation that training.attention names
    (modeling/attention_paths.py) and, while text is sampled, the states that layers keep
    (modeling/state.py).

    Attributes:
        einsum: softmax_attention of train.py, which computes the scores of all pairs of positions.
        settings: those of the section `training`.
        tokens: the tokens of the microbatch.
        cache: the state of this layer, or of all layers in a stack, for a class that keeps some.
    """

    def __init__(
        self, einsum: Callable[..., jax.Array], settings: Any, tokens: Tokens, cache: Any = None
    ):
        expected = _REFERENCE.get()
        if expected is not None and einsum is not expected:
            name, other = (
                getattr(function, "__name__", function) for function in (einsum, expected)
            )
            raise ValueError(
                f"the step computes attention by {name}, but SPEC.attention, with which masks and "
                f"kernels are compared, is {other}: name one function in both."
            )
        self.einsum = einsum
        self.settings = settings
        self.tokens = tokens
        self.cache = cache

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: AttentionMask,
        *learned: Any,
        sinks: Any = None,
        drop: Callable[[jax.Array], jax.Array] | None = None,
        keep: str = "kv",
    ) -> jax.Array:
        """Attends to the positions that `mask` selects.

        Args:
            q: queries act['B/b L/c K/t Q D'].
            k: keys act['B/b L/c K/t D'].
            v: values, like the keys, but they may have another number of entries: act['B/b L/c K/t
                D_v'].
            mask: the attention mask.
            *learned: the weights of mask.score_mod, if it has any.
            sinks: scores of keys without values, a gathered weight f32['K/t Q'].
            drop: dropout of attention weights.
            keep: the field of the model's State for the keys and values. Each call in a layer needs
                its own.

        Returns:
            act['B/b L/c K/t Q D_v'].

        Raises:
            ValueError: training.attention or training.context cannot compute this.
        """
        if not self.settings.document_mask:
            mask = mask.without(same_document)  # each sequence is one document
        strategy = context.strategy(self.settings, q, learned, bool(drop))
        positions = self.tokens.mask_positions
        of_pairs = Mask(mask, positions, positions, learned, of_sequences(sinks, q), drop)
        if strategy is None:
            return self.on_device(q, k, v, of_pairs)
        return strategy(self.on_device, q, k, v, of_pairs)

    def expand(
        self,
        name: str,
        expand: Callable[..., Any],
        q: jax.Array,
        kept: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Attends to keys and values that are computed of what each position keeps, such as a
        latent vector.

        Args:
            name: the field of the model's State, of arrays with a dim S.
            expand: kept -> (keys, values), each position alone. While text is sampled, B and L of
                what it gets are not those of the layer: it computes all positions of the texts.
            q: queries, as in a call.
            kept: arrays act['B/b L/c …'], one or a pytree, in the order of the field.
            *rest: the mask, and what else a call takes.
            **options: as in a call.
        """
        return self(q, *expand(kept), *rest, **options)

    def recur(
        self, name: str, whole: Callable[..., Any], step: Callable[..., Any], *inputs: Any
    ) -> Any:
        """Computes whole(*inputs), by which positions learn from earlier ones through a state.

        While text is sampled, steps compute it instead, each on one position of each text.

        Args:
            name: the field of the model's State, of arrays without a dim S.
            whole: *inputs -> outputs [B/b L/c …]: all positions of the sequences, documents apart.
                Training runs it.
            step: (state, *inputs of one position) -> (outputs, new state), with the dim B/b and no
                L. The state is 0 before the first position. Define it outside of `layer`, because B
                has another size: that of the texts.
            *inputs: arrays [B/b L/c …], or pytrees of them, with all positions that the device has.
        """
        self.check_inputs(name, step, inputs)
        return whole(*inputs)

    def check_inputs(self, name: str, step: Callable[..., Any], inputs: tuple) -> None:
        """Raises ShardError if an input of a state does not have all positions of the device."""
        for x in jax.tree.leaves(inputs):
            if x.shape[:2] != self.tokens.positions.shape:
                raise ShardError(
                    f"an input of the state `{name}` has the shape {list(x.shape)}, which does not "
                    f"begin with the device's sequences and positions "
                    f"{list(self.tokens.positions.shape)}",
                    "gather its positions over t first: all_gather('B/b L/c/t … -> B/b L/c …')",
                    place=place_of(step),
                )

    def on_device(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        """Attention of the queries and keys that a device has after its messages over c, by one
        implementation.
        """
        drop, sinks = mask.drop is not None, mask.sinks is not None
        path = attention_paths.choose(
            self.settings.attention, mask.pattern, q, drop, sinks, k.shape[1], v.shape[-1]
        )
        if path == "einsum":
            return self.einsum(q, k, v, mask)
        return attention_paths.run(path, q, k, v, mask, self.settings.attention_block)

    def in_layer(self, cache: Any) -> Self:
        """The attention of one layer, which reads and replaces its own cache."""
        of_layer = copy.copy(self)
        of_layer.cache = cache
        return of_layer

    def updated_cache(self) -> Any:
        """The cache of the layer after its call."""
        return self.cache


def of_sequences(sinks: Any, q: jax.Array) -> Any:
    """Sinks [K, Q] for each sequence of the queries, [B, K, Q]; None or such sinks as they are."""
    if sinks is None or sinks.ndim == 3:
        return sinks
    return jnp.broadcast_to(sinks, (q.shape[0], *sinks.shape))
