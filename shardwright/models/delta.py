"""Gated delta nets with attention in every n-th layer, as in Qwen3-Next (arXiv 2412.06464), with
the experts of moe.py.

    python -m tools.huggingface_to_checkpoint model=<one of that kind> output=runs/<name>

A gated delta net has a matrix for each head instead of keys and values of all positions: each
position first reads what the matrix has for its key, and writes the difference to its value.
`model.layers` counts blocks of such layers and one with attention. Training computes the matrices
of whole chunks of positions by matmuls, sampling one position after the other. Dims and axes are
those of moe.py, and

  R  key heads of a delta net       U  value heads of each         A  positions that its convolution
  reads X  entries of a key               W  entries of a value          T  A - 1 O  entries that it
  convolves for a key head, 2 X + U W           Z  O + U W         Y  2 U
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardlib.zigzag import permuted
from shardwright.data.checks import TUNABLE, within
from shardwright.jax_extra import save_for_backward, solve_unit_lower
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.state import KeyValues
from shardwright.modeling.weights import bias, gain, matrix
from shardwright.models import family, moe

EPSILON = 1e-6
"""Added to the squared length of queries and keys, which then have length 1."""


@dataclasses.dataclass
class ModelConfig(moe.ModelConfig):
    """Settings of moe.py, and of delta nets.

    `layers` counts blocks; `n_kv` to `d_head` are those of attention.
    """

    module: str = "delta"
    deltas: int = within(1, 2**8, 3)
    """Delta nets in a block, before its layer with attention."""
    key_heads: int = within(1, 2**16, kw_only=True)
    """Heads of queries and keys in a delta net. Sharded over t."""
    values_per_key: int = within(1, 2**16, 1)
    """Heads of values for each of them."""
    d_key: int = within(1, 2**16, kw_only=True)
    """Entries of a query or key in a delta net."""
    d_value: int = within(1, 2**16, kw_only=True)
    """Entries of a value in a delta net."""
    taps: int = within(2, 2**8, 4)
    """Positions that the convolution before a delta net reads, including its own."""
    chunk: int = within(1, 2**16, 64, TUNABLE)
    """Most positions that training computes together; their number divides the sequence. Changes no
    result."""

    dims: ClassVar[dict[str, str]] = moe.ModelConfig.dims | {
        "deltas": "deltas",
        "R": "key_heads",
        "U": "values_per_key",
        "X": "d_key",
        "W": "d_value",
        "A": "taps",
        "T": "taps_before",
        "O": "convolved",
        "Y": "rates",
        "Z": "projected",
    }

    @property
    def taps_before(self) -> int:
        """Positions before its own that the convolution reads."""
        return self.taps - 1

    @property
    def convolved(self) -> int:
        """Entries of the query, the key and the values of a key head."""
        return 2 * self.d_key + self.values_per_key * self.d_value

    @property
    def projected(self) -> int:
        """Entries of a key head, with the gates of its values."""
        return self.convolved + self.values_per_key * self.d_value

    @property
    def rates(self) -> int:
        """Rates of writing and of forgetting of a key head."""
        return 2 * self.values_per_key

    @property
    def state_flops(self) -> float:
        """FLOPs per token of the matmuls of in_chunks, in chunks of `chunk` positions: a triangle
        counts like a square, as it is computed.
        """
        n, keys, values = self.chunk, self.d_key, self.d_value
        with_state = 6 * keys * values
        of_values = 2 * n * values + 2 * n * (keys + values)
        inverse = 4 * n**2 * (n - 1).bit_length()  # rounds of solve_unit_lower
        of_keys = 4 * n * keys
        heads = self.layers * self.deltas * self.key_heads
        return heads * (self.values_per_key * (with_state + of_values + inverse) + of_keys)

    def check(self, seq_len: int) -> None:
        """Raises ValueError for settings that contradict each other."""
        super().check(seq_len)
        if self.period > 1 or self.dense_layers:
            raise ValueError(
                "model.full_every, no_rope_every or dense_layers is set, but blocks of delta nets "
                "and attention are all alike; leave them out."
            )


# ---- weights -------------------------------------------------------------------------------------


@pytree_dataclass
class DeltaNet:
    """Weights of a gated delta net, and the norms of its layer."""

    attention_norm: gain["M if norms_before"]
    w_in: matrix["M/fsdp -> R/t Z"]
    w_rates: matrix["M/fsdp -> R/t Y"]
    conv_q: bias["R/t X A"]
    conv_k: bias["R/t X A"]
    conv_v: bias["R/t U W A"]
    log_decay: bias["R/t U", f32]
    b_decay: bias["R/t U", f32]
    value_norm: gain["W"]
    w_o: matrix["R/t U W -> M/fsdp"]
    mlp_norm: gain["M if norms_before"]
    attention_out_norm: gain["M if norms_after"]
    mlp_out_norm: gain["M if norms_after"]


@pytree_dataclass
class DeltaLayer(moe.Experts, DeltaNet):
    """Weights of a layer with a delta net."""


@pytree_dataclass
class Block:
    """Weights of several layers with delta nets, and of one with attention after them."""

    delta: Array["deltas", DeltaLayer]
    full: moe.Layer


@pytree_dataclass
class Weights(family.Weights):
    """Weights of the model."""

    layers: Array["layers/p", Block]


@pytree_dataclass
class DeltaState:
    """What a delta net keeps while text is sampled: the last inputs of its convolution, and its
    matrices.
    """

    last: act["B/b T R/t O"]
    matrix: f32["B/b R/t U X W"]


@functools.cache
def state_of(deltas: int) -> Any:
    """The class of what a block keeps: `kv` of its attention, and `delta_0`, `delta_1` … of its
    delta nets.
    """
    fields = {"kv": KeyValues} | {f"delta_{i}": DeltaState for i in range(deltas)}
    return pytree_dataclass(type("State", (), {"__annotations__": fields}))


# ---- the delta rule ------------------------------------------------------------------------------


def convolved(
    c: ModelConfig, weights: tuple, before: Callable[[int], jax.Array], positions: str
) -> list[jax.Array]:
    """Queries and keys, and values, in f32: what a short convolution makes of each channel.

    Args:
        c: settings of the model.
        weights: those of the taps of queries, keys and values, gathered.
        before: n -> what stands n positions before each, with the dims `positions` and `R/t O`.
        positions: dims of positions, such as B/b L/c.
    """

    def part(dims: str, weight: jax.Array, first: int, *shape: int) -> jax.Array:
        y: Any = 0.0
        for n in range(c.taps):
            x = before(n)[..., first : first + math.prod(shape)]
            x = x.reshape(*x.shape[:-1], *shape)
            tap = weight[..., c.taps - 1 - n]
            y = y + shardops.einsum_unreduced(
                f"{positions} {dims}, {dims} -> {positions} {dims}", x, tap
            )
        return jax.nn.silu(jnp.float32(y))

    def unit(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)

    q = unit(part("R/t X", weights[0], 0, c.d_key)) * c.d_key**-0.5
    k = unit(part("R/t X", weights[1], c.d_key, c.d_key))
    return [q, k, part("R/t U W", weights[2], 2 * c.d_key, c.values_per_key, c.d_value)]


def from_slice_before(x: jax.Array) -> jax.Array:
    """What the device with the positions before has; the first one gets zeros. Per-device code."""
    if (n := shardops.axis_size("c")) == 1:
        return jnp.zeros_like(x)
    sent = permuted(x, "c", [(i, (i + 1) % n) for i in range(n)])
    return jnp.where(shardops.axis_index("c") > 0, sent, 0)


def in_chunks(q, k, v, beta, g, document, most: int, in_slices: bool = False) -> jax.Array:
    """The gated delta rule of all positions of documents, f32[B, L, R, U, W], in chunks of at most
    so many positions.

    A chunk's writes depend on each other through the products of its keys, a triangle of equations
    (arXiv 2406.06484). What they read of earlier chunks is in a matrix, which passes from chunk to
    chunk, and from device to device of c: a slice's last matrix is linear in its first one, so all
    devices compute these functions at once, and only the matrices pass from one to the next.

    Args:
        q: queries [B, L, R, X].
        k: keys, like them.
        v: values [B, L, R, U, W].
        beta: share of the difference that is written [B, L, R, U].
        g: logarithm of what is kept before, like it.
        document: index of the document of each position [B, L].
        most: largest number of positions in a chunk.
        in_slices: True if L is sharded over c.
    """
    size = math.gcd(q.shape[1], most)

    def cut(x: jax.Array) -> jax.Array:  # [chunks, B, size, …]
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    q, k, v, beta, g, document = map(cut, (q, k, v, beta, g, document))
    kept = jnp.cumsum(g, axis=2)
    place = jnp.arange(size)
    sees = (place[:, None] >= place) & (document[..., :, None] == document[..., None, :])
    # a sum of what is between two positions is more exact than a difference of sums
    between = place[:, None] > place
    gap = jnp.cumsum(jnp.where(between, jnp.moveaxis(g, 2, -1)[..., None], 0), axis=-2)
    decay = jnp.exp(jnp.where(sees[:, :, None, None], gap, -jnp.inf))
    products = jnp.einsum("nbijx,nbljx->nbjil", k, k)[:, :, :, None]
    rows = jnp.moveaxis(beta, 2, -1)[..., None] * products * decay
    rows = jnp.tril(rows, -1) + jnp.eye(size)
    # The matrix is that of the last document before: those that begin later do not read it.
    first = from_slice_before(document[-1:, :, -1]) if in_slices else document[:1, :, 0]
    before = jnp.concatenate([first, document[:-1, :, -1]])
    goes_on = (document == before[..., None])[..., None, None]
    from_before = jnp.where(goes_on, jnp.exp(kept), 0)
    given = (
        jnp.concatenate([v, k[:, :, :, :, None] * from_before[..., None]], axis=-1)
        * beta[..., None]
    )
    made = solve_unit_lower(rows, jnp.moveaxis(given, 2, 4))
    written, read = jnp.split(made, [v.shape[-1]], axis=-1)
    attended = jnp.einsum("nbijx,nbljx->nbjil", q, k)[:, :, :, None] * decay
    to_end = decay[..., -1, :]  # what is left at the end of the chunk
    left = jnp.where(goes_on[:, :, -1], jnp.exp(kept[:, :, -1]), 0)

    def chunk(state: jax.Array, of: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, from_before, attended, written, read, to_end, left = of
        new = written - jnp.einsum("bjulx,bjuxw->bjulw", read, state)
        out = jnp.einsum("bljx,blju,bjuxw->bljuw", q, from_before, state)
        out = out + jnp.einsum("bjuil,bjulw->bijuw", attended, new)
        state = state * left[..., None, None] + jnp.einsum("bljx,bjul,bjulw->bjuxw", k, to_end, new)
        return state, out

    start = jnp.zeros_like(k[0, :, 0, :, None, :, None] * v[0, :, 0, :, :, None, :])
    turns = [q, k, from_before, attended, written, read, to_end, left]
    if in_slices:
        same = jnp.zeros_like(start[..., :1]) + jnp.eye(k.shape[-1])
        wide = jnp.pad(written, [(0, 0)] * (written.ndim - 1) + [(0, k.shape[-1])])
        begun = jnp.concatenate([start, same], axis=-1)
        end, _ = lax.scan(chunk, begun, (*turns[:4], wide, *turns[5:]))
        own, matrix = jnp.split(end, [v.shape[-1]], axis=-1)
        for _ in range(shardops.axis_size("c") - 1):
            start = from_slice_before(own + jnp.einsum("bjuxy,bjuyw->bjuxw", matrix, start))
    _, out = lax.scan(chunk, start, tuple(turns))
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])


def one_step(state, q, k, v, beta, g) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule of one position of each text: what it reads f32[B, R, U, W], and the new
    matrices.
    """
    state = state * jnp.exp(g)[..., None, None]
    new = (v - jnp.einsum("bjx,bjuxw->bjuw", k, state)) * beta[..., None]
    state = state + k[:, :, None, :, None] * new[..., None, :]
    return jnp.einsum("bjx,bjuxw->bjuw", q, state), state


# ---- the model -----------------------------------------------------------------------------------


class Model(moe.Model):
    """The model of moe.py, with delta nets in place of attention in most layers."""

    Weights = Weights
    config: ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.State = state_of(config.deltas)

    def changes(self) -> dict[str, dict]:
        """Initial values: delta nets forget by rates between those of Mamba-2 (arXiv 2405.21060),
        0.001 to 1.6.
        """
        std = self.config.taps**-0.5
        own = {name: {"std": std} for name in ("conv_q", "conv_k", "conv_v")}
        own["log_decay"] = {"mean": math.log(4), "std": math.log(2)}
        own["b_decay"] = {"mean": math.log(0.01), "std": math.log(10) / 2}
        return super().changes() | own

    def layer(self, x: jax.Array, w: Any, tokens: Tokens, attention: Attention) -> Any:
        """One block of layers."""
        found: list[Any] = []
        for i in range(self.config.deltas):
            of_layer = jax.tree.map(lambda stack, i=i: stack[i], w.delta)
            attended = save_for_backward(
                x + self.delta(x, of_layer, tokens, attention, f"delta_{i}")
            )
            x, aux = self.with_experts(attended, of_layer, tokens)
            found.append(aux)
        x, aux = super().layer(x, w.full, tokens, attention)
        found.append(aux)
        loads = jnp.concatenate([aux.metrics["largest_load"] for aux in found])
        dropped = sum(aux.metrics["dropped"] for aux in found) / len(found)
        loss: Any = functools.reduce(jnp.add, [aux.loss for aux in found])
        return x, LayerAux(loss=loss, metrics={"largest_load": loads, "dropped": dropped})

    @typed
    def delta(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention, name: str
    ) -> act["B/b L/c/t M"]:
        """Output of the delta net of a layer, whose state has this name."""
        c = self.config
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", self.normed(x, w.attention_norm))
        w_in = shardops.all_gather("M/fsdp R/t Z -> M R/t Z", w.w_in)
        made = save_for_backward(shardops.matmul("B/b L/c M, M R/t Z -> B/b L/c R/t Z", nx, w_in))
        mixed, gate = jnp.split(made, [c.convolved], axis=-1)
        w_rates = shardops.all_gather("M/fsdp R/t Y -> M R/t Y", w.w_rates)
        rates = shardops.matmul("B/b L/c M, M R/t Y -> B/b L/c R/t Y", nx, w_rates)
        write, forget = jnp.split(jnp.float32(save_for_backward(rates)), 2, axis=-1)
        log_decay, b_decay = (
            shardops.broadcast(
                "R/t U -> B/b L/c R/t U", shardops.all_gather("R/t U/fsdp -> R/t U", weight)
            )
            for weight in (w.log_decay, w.b_decay)
        )
        g = -jnp.exp(log_decay) * jax.nn.softplus(forget + b_decay)
        conv_q, conv_k = (
            shardops.all_gather("R/t X A/fsdp -> R/t X A", x) for x in (w.conv_q, w.conv_k)
        )
        conv_v = shardops.all_gather("R/t U W A/fsdp -> R/t U W A", w.conv_v)
        inputs_of = functools.partial(convolved, c, (conv_q, conv_k, conv_v))

        def whole(mixed: jax.Array, beta: jax.Array, g: jax.Array) -> jax.Array:
            taps, length = c.taps_before, mixed.shape[1]
            padded = jnp.pad(mixed, ((0, 0), (taps, 0), (0, 0), (0, 0)))
            for _ in range(math.ceil(taps / length)):
                padded = jnp.concatenate([from_slice_before(padded[:, -taps:]), mixed], axis=1)

            def before(n: int) -> jax.Array:
                moved = padded[:, taps - n : taps - n + length]
                return jnp.where((tokens.positions >= n)[..., None, None], moved, 0)

            q, k, v = inputs_of(before, "B/b L/c")
            in_slices = shardops.axis_size("c") > 1
            return in_chunks(q, k, v, beta, g, tokens.document, c.chunk, in_slices)

        def step(
            state: DeltaState, mixed: jax.Array, beta: jax.Array, g: jax.Array
        ) -> tuple[jax.Array, DeltaState]:
            inputs = jnp.concatenate([state.last, mixed[:, None]], axis=1)
            q, k, v = inputs_of(lambda n: inputs[:, c.taps - 1 - n], "B/b")
            out, new = one_step(state.matrix, q, k, v, beta, g)
            return out, DeltaState(inputs[:, 1:], new)

        read = attention.recur(name, whole, step, mixed, jax.nn.sigmoid(write), g)
        value_norm = shardops.all_gather("W/t/fsdp -> W", w.value_norm)
        unit = read * lax.rsqrt(jnp.mean(jnp.square(read), axis=-1, keepdims=True) + c.norm_epsilon)
        normed = shardops.einsum_unreduced(
            "B/b L/c R/t U W, W -> B/b L/c R/t U W", unit, value_norm
        )
        gated = (normed * jax.nn.silu(jnp.float32(gate)).reshape(read.shape)).astype(x.dtype)
        w_o = shardops.all_gather("R/t U W M/fsdp -> R/t U W M", w.w_o)
        out = shardops.matmul(
            "B/b L/c R/t U W, R/t U W M -> B/b L/c M +t", save_for_backward(gated), w_o
        )
        out = shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
        return self.normed(out, w.attention_out_norm)
