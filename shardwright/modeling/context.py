"""Context parallelism: attention if each device of c has some of the positions.

`training.context` names a strategy:

    gather      each device gathers all keys and values for its own queries
        ulysses     an all_to_all gives each device all positions of some heads (arXiv 2309.14509)
        ring        keys and values pass around the devices of c; positions are in zigzag order, so
        that under a causal
                    mask all devices have the same work (arXiv 2310.01889, 2311.09431)

All are per-device code. A strategy takes `local_attention`, the attention of one device, and calls
it on each device of c with the queries and keys that the device then has. The ring computes by
itself, like blockwise. docs/parallelism.md compares them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.mesh import mesh_axes, vary_over
from shardlib.opaque import is_opaque, unwrap, varying
from shardlib.planned import planned, planned_devices
from shardlib.shardtypes import typed
from shardwright.modeling.blockwise import in_blocks, in_one_state
from shardwright.modeling.masks import AttentionMask, Mask, Positions
from shardwright.modeling.model import act
from shardwright.modeling.planned_attention import planned_kernel


def vary_over_c(weights: object) -> Any:
    """Sinks or learned weights, used on each device of c independently: their gradient is a partial
    sum over c.
    """
    arrays = jax.tree.map(lambda x: unwrap(x) if is_opaque(x) else x, weights, is_leaf=is_opaque)
    return varying(arrays, {"c"} & {*mesh_axes()})


def gather(
    local_attention: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask
) -> jax.Array:
    """Gathers the keys and values of all positions for each device's own queries."""
    k, v, keys = gathered(k, v, mask.keys)
    with vary_over("c"):
        mask = dataclasses.replace(
            mask, keys=keys, learned=vary_over_c(mask.learned), sinks=vary_over_c(mask.sinks)
        )
        return local_attention(q, k, v, mask)


@typed
def gathered(k: act["B/b S/c K/t D"], v: act["B/b S/c K/t D_v"], positions: Positions) -> tuple:
    """Gathers keys, values and positions of all positions."""
    of_all = functools.partial(shardops.all_gather, "B/b S/c -> B/b S", replicated=True)
    k = shardops.all_gather("B/b S/c K/t D -> B/b S K/t D", k)
    v = shardops.all_gather("B/b S/c K/t D_v -> B/b S K/t D_v", v)
    index = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    return k, v, Positions(index, of_all(positions.position), of_all(positions.document))


@typed
def ulysses(
    local_attention: Callable[..., Any],
    q: act["B/b L/c N/t P D"],
    k: act["B/b L/c N/t D"],
    v: act["B/b L/c N/t D_v"],
    mask: Any,  # whose sinks have dims of their own names
) -> act["B/b L/c N/t P D_v"]:
    """Gives each device of c all positions for its share of the heads: kv heads, or parts of each
    head's queries.
    """
    g, r = shares(q.shape[2] * shardops.axis_size("t"))
    q = shardops.rearrange("B/b L/c (K/t G) (R Q) D -> B/b L/c K/t (G R) Q D", q, G=g, R=r)
    q = shardops.all_to_all("B/b L/c K/t H Q D -> B/b L K/t H/c Q D", q)

    def of_heads(x, width):
        # If there are fewer kv heads than devices, several devices hold copies of one, whose
        # gradients are summed.
        x = shardops.rearrange(f"B/b L/c (K/t G) {width} -> B/b L/c K/t G {width}", x, G=g)
        return shardops.all_to_all(
            f"B/b L/c K/t H {width} -> B/b L K/t H/c {width}", jnp.repeat(x, r, axis=3)
        )

    def attend(q, k, v, positions, sinks):
        b, l, kv, h, n = q.shape[:5]
        of_c = shardops.axis_index("c") * h + jnp.arange(h)
        kv_heads = (shardops.axis_index("t") * kv + jnp.arange(kv))[:, None] * g + of_c // r
        heads = (kv_heads * r + of_c % r)[..., None] * n + jnp.arange(n)
        if sinks is not None:
            sinks = lax.dynamic_slice_in_dim(sinks.reshape(b, kv, g * r, n), of_c[0], h, axis=2)
            sinks = sinks.reshape(b, kv * h, n)
        merged = (x.reshape(b, l, kv * h, *x.shape[4:]) for x in (q, k, v))
        here = Mask(
            mask.pattern, positions, positions, mask.learned, sinks, heads=heads.astype(jnp.int32)
        )
        with vary_over("c"):
            return local_attention(*merged, here).reshape(*q.shape[:-1], v.shape[-1])

    of_all = functools.partial(shardops.all_gather, "B/b L/c -> B/b L", replicated=True)
    index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    positions = Positions(index, of_all(mask.keys.position), of_all(mask.keys.document))
    out = attend(q, of_heads(k, "D"), of_heads(v, "D_v"), positions, vary_over_c(mask.sinks))
    out = shardops.all_to_all("B/b L K/t H/c Q D_v -> B/b L/c K/t H Q D_v", out)
    return shardops.rearrange("B/b L/c K/t (G R) Q D_v -> B/b L/c (K/t G) (R Q) D_v", out, G=g)


def shares(kv_heads: int) -> tuple[int, int]:
    """How c divides heads: each device of t splits its kv heads into G parts, each head's queries
    into R; G·R = c.
    """
    devices = planned_devices("c")
    parts = math.gcd(kv_heads // planned_devices("t"), devices)
    return parts, devices // parts


@typed
def ring(
    local_attention: Callable[..., Any],
    q: act["B/b L/c K/t Q D"],
    k: act["B/b L/c K/t D"],
    v: act["B/b L/c K/t D_v"],
    mask: Any,
    block: int | None = None,
) -> act["B/b L/c K/t Q D_v"]:
    """Passes keys and values around the devices of c."""
    q = shardops.zigzag("B/b L/c K/t Q D -> B/b Z/c K/t Q D", q)
    k = shardops.zigzag("B/b L/c K/t D -> B/b Z/c K/t D", k)
    v = shardops.zigzag("B/b L/c K/t D_v -> B/b Z/c K/t D_v", v)
    positions = Positions(*(jnp.broadcast_to(x, q.shape[:2]) for x in mask.keys))
    mask = Mask(
        mask.pattern, positions, positions, vary_over_c(mask.learned), vary_over_c(mask.sinks)
    )
    if planned().kernels_as_calls:
        out = _planned_ring(mask.pattern, q, k, v)
    else:
        out = in_blocks(mask.pattern, True, block, *in_one_state(q, k, v, mask))
    return shardops.zigzag("B/b Z/c K/t Q D_v -> B/b L/c K/t Q D_v", out)


def _planned_ring(pattern: AttentionMask, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Stands for the ring in a program that is only planned: one kernel per turn."""
    out: Any = 0
    keys = k.shape[1] * shardops.axis_size("c")
    for _ in range(shardops.axis_size("c")):
        out = out + planned_kernel(pattern, keys, "blockwise", q, k, v, None)
        k = shardops.ppermute("B/b Z/c K/t D", k, axis="c", shift=1)
        v = shardops.ppermute("B/b Z/c K/t D_v", v, axis="c", shift=1)
    return out


STRATEGIES: dict[str, Callable] = {"gather": gather, "ring": ring, "ulysses": ulysses}
"""Strategies by name, as in training.context."""


def way_of(training: Any) -> str:
    """Name of the strategy of a run on the current mesh: `whole` if each device has whole
    sequences.
    """
    return training.context if "c" in mesh_axes() else "whole"


def strategy(training: Any, q: Any, learned: tuple, dropout: bool) -> Callable | None:
    """The strategy of a run on the current mesh; None if each device has whole sequences.

    Raises ValueError if it cannot compute this.
    """
    how = way_of(training)
    if how == "whole":
        return None
    _, parts = shares(q.shape[2] * shardops.axis_size("t"))
    path = training.attention
    reasons = {
        "gather": [],
        "ulysses": [
            (
                learned,
                "the score_mod of an AttentionMask has learned weights, whose heads it does not "
                "know",
            ),
            (
                q.shape[3] % parts,
                f"{q.shape[3]} query heads of a kv head do not divide among {parts} devices",
            ),
        ],
        "ring": [
            (
                path not in ("auto", "blockwise"),
                f"it computes in blocks, and training.attention is {path}",
            ),
            (q.shape[1] % 2, f"a device of c has {q.shape[1]} positions, not two equal chunks"),
        ],
    }
    of_all = [
        (dropout, "attention weights have dropout, whose random numbers would depend on the mesh")
    ]
    if why := next((why for refuses, why in [*of_all, *reasons[how]] if refuses), None):
        remedy = (
            "set mesh.c=1, or the model's dropout to 0"
            if dropout
            else "choose gather, or set mesh.c=1"
        )
        raise ValueError(
            f"training.context is {how}, which cannot do this: {why}. To continue, {remedy}."
        )
    if how == "ring":
        return functools.partial(ring, block=training.attention_block)
    return STRATEGIES[how]


def on_device(how: str, q: Any) -> tuple[Any, int]:
    """Shape and dtype of the queries for which a device computes attention, and its number of
    keys.
    """
    b, length, kv, queries, d = q.shape
    keys = length * (1 if how == "whole" else shardops.axis_size("c"))
    if how == "ulysses":
        g, r = shares(kv * shardops.axis_size("t"))
        length = keys
        kv = kv // g
        queries = max(queries // r, 1)
    return jax.ShapeDtypeStruct((b, length, kv, queries, d), q.dtype), keys
