"""Values that are no block of a whole value, as operands of each primitive: none becomes a block by
that.
"""

import re

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.shardtypes import f32, i32
from tests.programs.program import Program, one_device

INS = {
    "x": f32["L S"],
    "f": f32["L F/t"],
    "w": f32["F/t S"],
    "table": f32["V/t S"],
    "ids": i32["L"],
}


def own(table, ids):
    return ids - lax.axis_index("t") * table.shape[0]


BAD = {
    "partial sum": lambda x, f, w, table, ids: f @ w,
    "maximum of a block": lambda x, f, w, table, ids: jnp.max(f[:, :, None] * jnp.ones(16), axis=1),
    "entries not masked": lambda x, f, w, table, ids: jnp.take(
        table, own(table, ids), axis=0, mode="clip"
    ),
    "index of a device": lambda x, f, w, table, ids: x + lax.axis_index("t"),
    "local size": lambda x, f, w, table, ids: x * (f.shape[1] + 1),
    "local positions": lambda x, f, w, table, ids: lax.broadcasted_iota(
        jnp.float32, (f.shape[1], 16), 0
    ),
    "mask": lambda x, f, w, table, ids: jnp.broadcast_to(
        ((own(table, ids) >= 0) & (own(table, ids) < table.shape[0]))[:, None], (16, 16)
    ).astype(jnp.float32),
    "mask of a device": lambda x, f, w, table, ids: (
        jnp.broadcast_to(lax.axis_index("t") == 0, (16, 16)) * 1.0
    ),
    "argmax of a block": lambda x, f, w, table, ids: (
        jnp.argmax(f, axis=1)[:, None] * jnp.ones((1, 16), jnp.int32)
    ),
}
"""Each makes f32[16 16], but for local positions."""


def first(bad):
    return bad.astype(jnp.int32)[0]


USES = {
    "sin": lambda bad, x: jnp.sin(bad),
    "sum": lambda bad, x: jnp.sum(bad, axis=0),
    "maximum": lambda bad, x: jnp.max(bad, axis=0),
    "minimum": lambda bad, x: jnp.min(bad, axis=0),
    "product": lambda bad, x: jnp.prod(bad, axis=0),
    "argmax": lambda bad, x: jnp.argmax(bad, axis=0),
    "cumsum": lambda bad, x: jnp.cumsum(bad, axis=0),
    "cumprod": lambda bad, x: jnp.cumprod(bad, axis=0),
    "sort": lambda bad, x: jnp.sort(bad, axis=0),
    "sort with": lambda bad, x: lax.sort((x[:4], bad[:4]), dimension=1, num_keys=1)[1],
    "top k": lambda bad, x: lax.top_k(bad, 2)[0],
    "dot": lambda bad, x: bad.T @ bad,
    "dot with": lambda bad, x: bad @ x,
    "matrix root": lambda bad, x: jnp.linalg.cholesky(bad[:4, :4]),
    "fft": lambda bad, x: jnp.fft.fft(bad, axis=1).real,
    "convolution": lambda bad, x: lax.conv(
        bad[None, None] * 1.0, x[None, None, :3, :3], (1, 1), "SAME"
    ),
    "convolved by": lambda bad, x: lax.conv(
        x[None, None], bad[None, None, :3, :3] * 1.0, (1, 1), "SAME"
    ),
    "pooling": lambda bad, x: lax.reduce_window(bad, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "reversal": lambda bad, x: jnp.flip(bad, axis=1),
    "padding": lambda bad, x: jnp.pad(bad, ((0, 0), (1, 0))),
    "padding by": lambda bad, x: lax.pad(x, bad[0, 0].astype(x.dtype), ((0, 0, 0), (1, 0, 0))),
    "concatenation": lambda bad, x: jnp.concatenate([bad, x.astype(bad.dtype)]),
    "stack": lambda bad, x: jnp.stack([bad, x.astype(bad.dtype)]),
    "slice": lambda bad, x: bad[:, 3:7],
    "split": lambda bad, x: jnp.split(bad, 2, axis=1)[1],
    "transposition": lambda bad, x: bad.T,
    "reshape": lambda bad, x: bad.reshape(-1),
    "looked up": lambda bad, x: bad[:, jnp.array([1, 3, 2])],
    "looked up by": lambda bad, x: jnp.take(x, first(bad), axis=0, mode="clip"),
    "scattered into": lambda bad, x: bad.at[:, 3].add(x[: bad.shape[0], 0].astype(bad.dtype)),
    "scattered": lambda bad, x: x.at[jnp.array([1, 3])].add(bad[:2].astype(x.dtype)),
    "set": lambda bad, x: x.at[jnp.array([1, 3])].set(bad[:2].astype(x.dtype)),
    "scattered by": lambda bad, x: jnp.zeros(64).at[first(bad)].add(x[0], mode="drop"),
    "cut": lambda bad, x: lax.dynamic_slice_in_dim(bad, jnp.int32(2), 3, axis=1),
    "cut at": lambda bad, x: lax.dynamic_slice_in_dim(x, first(bad)[0], 3),
    "updated": lambda bad, x: lax.dynamic_update_slice_in_dim(
        bad, x[: len(bad), :2].astype(bad.dtype), 3, axis=1
    ),
    "updated by": lambda bad, x: lax.dynamic_update_slice_in_dim(
        x, bad[:2].astype(x.dtype), 3, axis=0
    ),
    "updated at": lambda bad, x: lax.dynamic_update_slice_in_dim(x, x[:2], first(bad)[0], axis=0),
    "psum": lambda bad, x: lax.psum(bad, "d"),
    "pmax": lambda bad, x: (
        lax.pmax(bad, ("d", "t")) if bad.dtype == jnp.int32 else lax.pmax(bad, "d")
    ),
    "pmin": lambda bad, x: lax.pmin(bad, ("d", "t")),
    "gather": lambda bad, x: lax.all_gather(bad, "t", axis=1, tiled=True),
    "scatter": lambda bad, x: lax.psum_scatter(bad, "d", scatter_dimension=1, tiled=True),
    "exchange": lambda bad, x: lax.all_to_all(bad, "t", split_axis=1, concat_axis=0, tiled=True),
    "permutation": lambda bad, x: lax.ppermute(
        bad, "t", [(i, i) for i in range(lax.axis_size("t"))]
    ),
    "branch": lambda bad, x: lax.cond(bad[0, 0] > 0, lambda x: x, lambda x: -x, x),
    "loop": lambda bad, x: lax.while_loop(
        lambda s: s[0] > 0, lambda s: (s[0] - 1, 2 * s[1]), (bad[0, 0] * 1.0, x)
    ),
    "scan over": lambda bad, x: lax.scan(lambda c, b: (c, c + b.sum()), jnp.float32(0), bad.T)[1],
    "carried": lambda bad, x: lax.fori_loop(0, 3, lambda _, c: c * 1, bad),
    "one of": lambda bad, x: lax.cond(x[0, 0] > 0, lambda: bad * 1.0, lambda: x[: len(bad)] * 1.0),
    "random": lambda bad, x: jax.random.normal(
        jax.random.fold_in(jax.random.key(0), first(bad)[0]), (16,)
    ),
    "added": lambda bad, x: x[: len(bad)] + bad,
    "chosen by": lambda bad, x: jnp.where(bad > 1, x[: len(bad)], 0.0),
    "compared": lambda bad, x: (x[: len(bad)] > bad) * 1.0,
    "conversion": lambda bad, x: lax.convert_element_type(bad, jnp.int8),
}


def _program(use: str, bad: str) -> Program:
    def body(*args):
        return USES[use](BAD[bad](*args), args[0])

    return Program(f"{use}: {bad}", body, one_device, INS, f32[""], vma=False)


POSITIONS = """minimum; product; sort with; matrix root; convolved by; padding by; looked up by; scattered; set;
    scattered by; cut at; updated by; updated at; branch; loop; random"""
EQUAL = {(use, "local positions") for use in re.split(r";\s+", POSITIONS)}
EQUAL |= {("argmax", "local size"), ("argmax", "index of a device"), ("argmax", "mask of a device")}
EQUAL |= {("pmin", "index of a device"), ("branch", "local size"), ("branch", "argmax of a block")}
EQUAL |= {("chosen by", "mask"), ("chosen by", "mask of a device")}
EQUAL |= {("compared", "index of a device"), ("compared", "local size"), ("cut at", "local size")}
"""These compute the same on all meshes: they use the first rows alone, or nothing but a sign."""
PROGRAMS = [_program(use, bad) for use in USES for bad in BAD if (use, bad) not in EQUAL]
