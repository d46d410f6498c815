"""Right per-device programs of methods that papers describe.

Each is to compute what it computes on one device.

Some hold values on the way that are no blocks of a whole value.
"""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import bool_, f32, i32, typed
from tests.programs.program import right
from tests.programs.right import key, offset


def own(x, axis: str, size: int, dim: int = 0):
    """This device's block of `size` entries."""
    return lax.dynamic_slice_in_dim(x, offset(axis, size), size, dim)


def places(axis: str, size: int):
    """Positions of the entries of this device's block of `size` entries."""
    return offset(axis, size) + jnp.arange(size)


def whole(x, axis: str, dim: int = 0):
    """The blocks of all devices along `axis`."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def same(x, axis: str, dim: int = 0):
    """The blocks of all devices along `axis`, which JAX knows to be the same on each."""
    return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")


@right(axes=("d", "expert"))
def top_2_experts_with_a_capacity_per_sequence(
    x: f32["B/d/expert L M"], router: f32["M E"], w: f32["E/expert M F"]
) -> f32["B/d/expert L F"]:
    gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
    hot = jax.nn.one_hot(chosen, router.shape[1])  # b l 2 e
    first, second = jnp.moveaxis(hot, 2, 0)
    slots = (
        jnp.stack(
            [jnp.cumsum(first, 1), jnp.cumsum(second, 1) + first.sum(1, keepdims=True)], axis=2
        )
        - 1
    )
    placed = hot[..., None] * jax.nn.one_hot(jnp.where(slots < 6, slots, -1).astype(int), 6)
    sent = jnp.einsum("blkec,blm->becm", placed, x)
    received = lax.all_to_all(sent, "expert", split_axis=1, concat_axis=0, tiled=True)
    y = jnp.einsum("becm,emf->becf", received, w)
    back = lax.all_to_all(y, "expert", split_axis=0, concat_axis=1, tiled=True)
    return jnp.einsum("blkec,blk,becf->blf", placed, gates, back)


@right
def tokens_sorted_by_expert_and_back(
    x: f32["T/d M"], router: f32["M E"], scale: f32["E"]
) -> f32["T/d M"]:
    chosen = jnp.argmax(x @ router, axis=-1)
    order = jnp.argsort(chosen)
    y = jnp.tanh(x[order]) * scale[chosen[order]][:, None]
    return jnp.zeros_like(x).at[order].set(y)


def attend(q, k, v, mask=True):
    """Attention of b k l d to b k s d."""
    scores = jnp.where(mask, jnp.einsum("bkld,bksd->bkls", q, k) / q.shape[-1] ** 0.5, -1e9)
    return jnp.einsum("bkls,bksd->bkld", jax.nn.softmax(scores), v)


def causal(n: int):
    return jnp.tri(n, dtype=bool)


@right
def caches_written_at_the_length_of_each_row(
    cache: f32["B/d L K/t D"], new: f32["B/d K/t D"], length: i32["B/d"]
) -> f32["B/d L K/t D"]:
    def write(cache, new, at):
        before = lax.dynamic_slice_in_dim(cache, at, 1, axis=0)
        return lax.dynamic_update_slice_in_dim(cache, new[None] + 0.5 * before, at, axis=0)

    return jax.vmap(write)(cache, new, length)


@right
def delta_rule(
    q: f32["L B/d K/t D"], k: f32["L B/d K/t D"], v: f32["L B/d K/t D"], beta: f32["L B/d K/t"]
) -> f32["L B/d K/t D"]:
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)

    def step(state, now):
        q, k, v, beta = now
        error = v - jnp.einsum("bkde,bkd->bke", state, k)
        state = state + jax.nn.sigmoid(beta)[..., None, None] * k[..., None] * error[..., None, :]
        return state, jnp.einsum("bkd,bkde->bke", q, state)

    return lax.scan(step, jnp.einsum("bkd,bke->bkde", k[0], 0 * v[0]), (q, k, v, beta))[1]


@right
def long_convolution_by_fourier_transforms(
    x: f32["B/d L F/t"], taps: f32["L F/t"]
) -> f32["B/d L F/t"]:
    n = 2 * x.shape[1]
    spectrum = jnp.fft.rfft(x, n=n, axis=1) * jnp.fft.rfft(taps, n=n, axis=0)
    return jnp.fft.irfft(spectrum, n=n, axis=1)[:, : x.shape[1]]


# The rows next to the block come from the neighbours, and zeros beyond the image.
@right
def convolution_of_an_image_with_halos(
    x: f32["B/d C H/t W"], kernel: f32["R C 3 3"]
) -> f32["B/d R H/t W"]:
    n = lax.axis_size("t")
    above = lax.ppermute(x[:, :, -1:], "t", [(i, i + 1) for i in range(n - 1)])
    below = lax.ppermute(x[:, :, :1], "t", [(i + 1, i) for i in range(n - 1)])
    return lax.conv(jnp.concatenate([above, x, below], axis=2), kernel, (1, 1), [(0, 0), (1, 1)])


@right
def nearest_code_of_a_sharded_codebook(
    x: f32["B/d D"], codes: f32["V/t D"]
) -> (i32["B/d"], f32["B/d D"]):
    distance = jnp.sum((x[:, None] - codes) ** 2, axis=-1)
    best = jnp.min(distance, axis=1)
    at = offset("t", codes.shape[0]) + jnp.argmin(distance, axis=1).astype(jnp.int32)
    at = lax.pmin(jnp.where(best == lax.pmin(best, "t"), at, 2**30), "t")
    hot = (at[:, None] == places("t", codes.shape[0])).astype(x.dtype)
    return at, lax.psum(hot @ codes, "t")


@right
def largest_values_of_each_segment(x: f32["T/d M"], segment: i32["T/d"]) -> f32["8 M"]:
    return lax.pmax(jnp.full((8, x.shape[1]), -9.0).at[segment % 8].max(x), "d")


@right
def low_rank_compression_of_a_gradient(
    g: f32["M/d F/t"], q: f32["F/t 2"]
) -> (f32["M/d F/t"], f32["F/t 2"]):
    p = lax.psum(g @ q, "t")
    p = own(jnp.linalg.qr(whole(p, "d"))[0], "d", g.shape[0])
    q = lax.psum(g.T @ p, "d")
    return p @ q.T, q


@right
def gradient_through_rows_mapped_one_by_one(
    w: f32["M F/t"], x: f32["B/d L M"]
) -> (f32["M F/t"], f32["B/d L M"]):
    def loss(w, x):
        # once, not for each row
        w, x = lax.pcast(w, "d", to="varying"), lax.pcast(x, "t", to="varying")
        return lax.psum(
            jnp.sum(lax.map(jax.checkpoint(lambda x: jnp.max(jnp.tanh(x @ w), axis=0)), x)),
            ("d", "t"),
        )

    return jax.grad(loss, (0, 1))(w, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def equilibrium(f, w, x):
    def far(s):
        return (s[1] > 1e-10) & (s[2] < 50)

    def step(s):
        new = f(w, s[0], x)
        return new, lax.psum(jnp.sum((new - s[0]) ** 2), "d"), s[2] + 1

    return lax.while_loop(far, step, (x, lax.psum(jnp.sum(0 * x), "d") + 1.0, 0))[0]


def equilibrium_forward(f, w, x):
    z = equilibrium(f, w, x)
    return z, (w, x, z)


def equilibrium_backward(f, kept, g):
    w, x, z = kept
    back = jax.vjp(lambda z: f(w, z, x), z)[1]
    u = lax.fori_loop(0, 30, lambda _, u: g + back(u)[0], g)
    return jax.vjp(lambda w, x: f(w, z, x), w, x)[1](u)


equilibrium.defvjp(equilibrium_forward, equilibrium_backward)


@right
def implicit_gradient_of_an_equilibrium(w: f32["M M"], x: f32["B/d M"]) -> (f32[""], f32["M M"]):
    def layer(w, z, x):
        return jnp.tanh(0.05 * z @ w + x)

    return jax.value_and_grad(lambda w: lax.pmean(jnp.mean(equilibrium(layer, w, x) ** 2), "d"))(w)


@right
def nucleus_of_gathered_logits(x: f32["B/d V/t"], keys: key["B/d"]) -> i32["B/d"]:
    x = same(x, "t", 1)
    ordered = jnp.sort(jax.nn.softmax(x), axis=-1)[:, ::-1]
    least = jnp.min(
        jnp.where(jnp.cumsum(ordered, axis=-1) - ordered < 0.8, ordered, jnp.inf),
        axis=-1,
        keepdims=True,
    )
    return jax.vmap(jax.random.categorical)(
        keys, jnp.where(jax.nn.softmax(x) >= least, x, -jnp.inf)
    )


@right
def masks_as_arguments_and_results(
    a: bool_["B/d L/t"], b: bool_["B/d L/t"]
) -> (bool_["B/d L/t"], bool_["B/d"], bool_[""]):
    both = a & ~b
    some = lax.pmax(jnp.any(both, axis=1).astype(jnp.int32), "t") > 0
    return both, some, lax.psum(jnp.sum(some), "d") == 8


@right
@typed
def causal_attention_by_typed_ops(
    x: f32["B/d L/t M"], w: f32["3 M/d K/t D"], o: f32["K/t D M/d"]
) -> f32["B/d L/t M"]:
    w = shardops.all_gather("3 M/d K/t D -> 3 M K/t D", w)
    q, k, v = jnp.moveaxis(
        shardops.einsum_unreduced(
            "B/d L M, 3 M K/t D -> 3 B/d K/t L D", shardops.all_gather("B/d L/t M -> B/d L M", x), w
        ),
        0,
        0,
    )
    y = attend(q, k, v, causal(q.shape[2]))
    out = shardops.einsum_unreduced(
        "B/d K/t L D, K/t D M -> B/d L M +t", y, shardops.all_gather("K/t D M/d -> K/t D M", o)
    )
    return x + shardops.psum_scatter("B/d L M +t -> B/d L/t M", out)


@right
def switch_by_a_schedule(w: f32["M/d F/t"], g: f32["M/d F/t"], step: i32[""]) -> f32["M/d F/t"]:
    rate = lax.switch(
        step % 3, [lambda: 0.1, lambda: 0.01 * lax.psum(jnp.sum(g * g), ("d", "t")), lambda: 0.0]
    )
    return w - rate * g
