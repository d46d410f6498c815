"""Per-device programs that compute what is meant on every mesh, and so must be accepted.

Some hold values on the way that are no blocks of a whole value.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import dtype_name, f32, i32
from tests.programs.program import right

key = dtype_name("key")


def ring(axis: str) -> list[tuple[int, int]]:
    """Each device sends to the next one."""
    n = lax.axis_size(axis)
    return [(i, (i + 1) % n) for i in range(n)]


def offset(axis: str, block: int):
    """Position of the first entry of this device's block."""
    return lax.axis_index(axis) * block


@right
def pairs_of_rows_by_strides(lp: f32["B/d"]) -> f32[""]:
    """The loss of DPO, whose two answers are one after the other."""
    return lax.psum(jnp.sum(jax.nn.log_sigmoid(lp[0::2] - lp[1::2])), "d")


@right
def layer_norm(x: f32["B/d L/t M"], scale: f32["M"], bias: f32["M"]) -> f32["B/d L/t M"]:
    normed = (x - jnp.mean(x, axis=-1, keepdims=True)) * lax.rsqrt(
        jnp.var(x, axis=-1, keepdims=True) + 1e-5
    )
    return normed * scale + bias


@right
def image_convolution_with_sharded_filters(
    x: f32["B/d C H W"], kernel: f32["R/t C 3 3"]
) -> f32["B/d R/t H W"]:
    return lax.conv(x, kernel, (1, 1), "SAME")


@right
def mixture_of_depths_over_whole_positions(x: f32["B/d L M"], w: f32["M"]) -> f32["B/d L M"]:
    scores = x @ w
    rows = jnp.arange(x.shape[0])[:, None]
    best = lax.top_k(scores, 4)[1]
    return x.at[rows, best].add(jnp.tanh(x[rows, best]))


def cross_entropy(x, ids):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), ids[..., None], axis=-1)[..., 0]


@right(whole=cross_entropy)
def cross_entropy_over_sharded_vocabulary(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    peak = lax.pmax(jnp.max(x, axis=1), "t")
    total = lax.psum(jnp.sum(jnp.exp(x - peak[:, None]), axis=1), "t")
    own = ids - lax.axis_index("t") * x.shape[1]
    found = (own >= 0) & (own < x.shape[1])
    logit = jnp.take_along_axis(x, jnp.clip(own, 0, x.shape[1] - 1)[:, None], axis=1)[:, 0]
    return peak + jnp.log(total) - lax.psum(jnp.where(found, logit, 0.0), "t")


@right(whole=jax.grad(lambda b, a: -jnp.sum(jnp.diag(jax.nn.log_softmax(a @ b.T)))))
def contrastive_gradient_through_the_gather(b: f32["B/d M"], a: f32["B/d M"]) -> f32["B/d M"]:
    def loss(b):
        logits = a @ lax.all_gather(b, "d", tiled=True).T
        own = offset("d", a.shape[0]) + jnp.arange(a.shape[0])
        return lax.psum(jnp.sum(cross_entropy(logits, own)), "d")

    return jax.grad(loss)(b)


@right(whole=lambda table, ids, g: jnp.zeros_like(table).at[ids].add(g))
def embedding_gradient_scattered_by_shifted_ids(
    table: f32["V/t M"], ids: i32["B/d"], g: f32["B/d M"]
) -> f32["V/t M"]:
    own = ids - lax.axis_index("t") * table.shape[0]
    own = jnp.where((own >= 0) & (own < table.shape[0]), own, table.shape[0])
    return lax.psum(jnp.zeros_like(table).at[own].add(g, mode="drop"), "d")


@right(whole=lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down)
def gated_feed_forward_by_typed_ops(
    x: f32["B/d M"], gate: f32["M/d F/t"], up: f32["M/d F/t"], down: f32["F/t M/d"]
) -> f32["B/d M"]:
    gate, up = (shardops.all_gather("M/d F/t -> M F/t", w) for w in (gate, up))

    def into(w):
        return shardops.einsum_unreduced(
            "B/d M, M F/t -> B/d F/t", shardops.replicate("B/d M -> B/d M *t", x), w
        )

    hidden = jax.nn.silu(into(gate)) * into(up)
    down = shardops.all_gather("F/t M/d -> F/t M", down)
    return shardops.psum(
        "B/d M +t -> B/d M", shardops.einsum_unreduced("B/d F/t, F/t M -> B/d M +t", hidden, down)
    )


@right
def grouped_keys_repeated_over_sharded_heads(k: f32["B/d K/t D"]) -> f32["B/d T/t D"]:
    return jnp.repeat(k, 2, axis=1)


def attention(q, k, v):
    return jnp.einsum("bkls,bskd->blkd", jax.nn.softmax(jnp.einsum("blkd,bskd->bkls", q, k)), v)


@right(whole=attention)
def ulysses_attention(
    q: f32["B/d L/t K D"], k: f32["B/d L/t K D"], v: f32["B/d L/t K D"]
) -> f32["B/d L/t K D"]:
    q, k, v = (lax.all_to_all(x, "t", split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v))
    return lax.all_to_all(attention(q, k, v), "t", split_axis=1, concat_axis=2, tiled=True)


@right(
    whole=lambda q, k, v: (
        jax.nn.softmax(jnp.where(jnp.tri(16, dtype=bool), q @ k.swapaxes(1, 2), -1e9)) @ v
    ),
    axes=("d", "x"),
    # Each step masks by the global positions of the block that it holds.
)
def causal_ring_attention_in_a_scan(
    q: f32["B/d L/x D"], k: f32["B/d S/x D"], v: f32["B/d S/x D"]
) -> f32["B/d L/x D"]:
    n, here, local = lax.axis_size("x"), lax.axis_index("x"), jnp.arange(q.shape[1])

    def step(carry, i):
        k, v, peak, total, weight = carry
        causal = (here * q.shape[1] + local)[:, None] >= ((here - i) % n * k.shape[1] + local)
        scores = jnp.where(causal, q @ k.swapaxes(1, 2), -1e9)
        new = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
        p, old = jnp.exp(scores - new), jnp.exp(peak - new)
        total, weight = old * total + p @ v, old * weight + p.sum(axis=-1, keepdims=True)
        return (*lax.ppermute((k, v), "x", ring("x")), new, total, weight), None

    start = (k, v, 0 * q[..., :1] - 1e9, 0 * q, 0 * q[..., :1])
    _, _, _, total, weight = lax.scan(step, start, jnp.arange(n))[0]
    return total / weight


@right(
    whole=lambda x: jnp.cumsum(x, axis=1),
    # To the sums within a block come the totals of all blocks before it.
)
def prefix_sum_over_devices(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    totals = lax.all_gather(x.sum(axis=1), "t")
    before = jnp.arange(lax.axis_size("t")) < lax.axis_index("t")
    return jnp.cumsum(x, axis=1) + jnp.einsum("t,tb->b", before.astype(x.dtype), totals)[:, None]


@right(
    whole=lambda w, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), w, x),
    axes=("stage",),
    # The last stage has each row after it went through all stages in order.
)
def pipeline_of_stages(w: f32["stages/stage M M"], x: f32["B M"]) -> f32["B M"]:
    n, here = lax.axis_size("stage"), lax.axis_index("stage")
    passed = x
    for _ in range(n):
        passed = functools.reduce(lambda x, w: jnp.tanh(x @ w), w, passed)
        out, passed = passed, lax.ppermute(passed, "stage", ring("stage"))
    return lax.psum(jnp.where(here == n - 1, out, 0.0), "stage")


@right(
    whole=lambda x, k: jnp.sum(x, axis=0),
    # The noise of each device is subtracted by the next one, so that the sum is without noise.
)
def sum_with_noise_that_cancels(x: f32["B/d M"], k: key[""]) -> f32["M"]:
    noise = jax.random.normal(jax.random.fold_in(k, lax.axis_index("d")), x.shape[1:])
    return lax.psum(jnp.sum(x, axis=0) + noise - lax.ppermute(noise, "d", ring("d")), "d")


@right(vma=False)
def rows_gathered_untiled_and_merged(x: f32["B/t M"], w: f32["B M"]) -> f32["M"]:
    return (lax.all_gather(x, "t").reshape(-1, x.shape[1]) * w).sum(0)


@right(vma=False)
def softmax_from_gathered_maxima(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    e = jnp.exp(x - lax.all_gather(x.max(axis=-1), "t").max(axis=0)[:, None])
    return e / lax.all_gather(e.sum(axis=-1), "t").sum(axis=0)[:, None]


@right
def gradients_scattered_untiled(x: f32["B/t M"], y: f32["B/t F"]) -> f32["M/t F"]:
    grads = x.T @ y
    return lax.psum_scatter(
        grads.reshape(lax.axis_size("t"), -1, grads.shape[1]), "t", scatter_dimension=0
    )


@right
def inverse_permutation_by_a_scatter(
    x: f32["T/d M"], ids: i32["T/d"], w: f32["M F"]
) -> f32["T/d F"]:
    order = jnp.argsort(ids)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    return ((x[order] @ w) ** 2)[back]


@right
def buckets_of_distances(x: f32["B/d"], edges: f32["V"]) -> i32["B/d"]:
    return jnp.searchsorted(jnp.sort(edges), x)


@right
def embedding_masked_after_a_projection(
    ids: i32["B/d L"], table: f32["V/t M"], w: f32["M F"]
) -> f32["B/d L F"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    y = table[jnp.clip(local, 0, table.shape[0] - 1)] @ w
    return lax.psum(jnp.where(ok[..., None], y, 0.0), "t")


@right(vma=False)
def sum_where_there_are_several_devices(x: f32["B/d M/t"], w: f32["M/t F"]) -> f32["B/d F"]:
    y = x @ w
    return lax.psum(y, "t") if lax.axis_size("t") > 1 else y


def scattered(x: jax.Array, w: jax.Array, first: int = 1, turns: int = 99):
    """The blocks of x w, as a sum of all devices that passes around: the last to add is the one
    that keeps it.
    """
    n, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // lax.axis_size("t")

    def term(turn):
        return lax.dynamic_slice_in_dim(x, (me - turn) % n * rows, rows) @ w  # here

    total = term(first)
    for turn in range(2, min(n, turns) + 1):
        total = lax.ppermute(total, "t", ring("t")) + term(turn)  # here
    return total


@right(vma=False)
def matmul_scattered_in_a_loop_from_zero(x: f32["B M/t"], w: f32["M/t F"]) -> f32["B/t F"]:
    n, me = lax.axis_size("t"), lax.axis_index("t")
    blocks = x.reshape(n, -1, x.shape[1])

    def add(turn, total):
        return lax.ppermute(total, "t", ring("t")) + blocks[(me - 1 - turn) % n] @ w

    return lax.fori_loop(0, n, add, jnp.zeros((blocks.shape[1], w.shape[1])))


@right
def gathered_matmul_of_passing_blocks(x: f32["B/t M"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me, size = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    y = jnp.zeros((n * size, w.shape[1]))
    for i in range(n):
        y = lax.dynamic_update_slice_in_dim(y, x @ w, (me - i) % n * size, axis=0)
        if i < n - 1:
            x = lax.ppermute(x, "t", ring("t"))
    return y


@right(whole=lambda x: jnp.sin(x))
def broadcast_from_the_first_device_of_two_axes(x: f32["M"]) -> f32["M"]:
    is_first = (lax.axis_index("d") == 0) & (lax.axis_index("t") == 0)
    return jnp.sin(lax.psum(jnp.where(is_first, x, 0), ("d", "t")))


def scores(q, k):
    return jnp.einsum("bkd,bskd->bks", q, k)


def decoded(q, k, v):
    return jnp.einsum("bks,bskd->bkd", jax.nn.softmax(scores(q, k)), v)


@right(whole=decoded)
def decoding_combined_by_logarithms_of_sums(
    q: f32["B/d K D"], k: f32["B/d S/t K D"], v: f32["B/d S/t K D"]
) -> f32["B/d K D"]:
    s = scores(q, k)
    own = jnp.max(s, axis=-1, keepdims=True)
    e = jnp.exp(s - own)
    total = jnp.sum(e, axis=-1, keepdims=True)
    y, log_of_sum = jnp.einsum("bks,bskd->bkd", e / total, v), own + jnp.log(total)
    share = jnp.exp(log_of_sum - lax.pmax(log_of_sum, "t"))
    return lax.psum(y * share, "t") / lax.psum(share, "t")


@right(whole=lambda table: table[:12])
def rows_looked_up_by_positions(table: f32["V/t M"]) -> f32["12 M"]:
    own = jnp.arange(12) - offset("t", table.shape[0])
    found = (own >= 0) & (own < table.shape[0])
    return lax.psum(jnp.where(found[:, None], jnp.take(table, own, axis=0), 0), "t")


def first_largest(x, is_here):
    best, own = x.max(axis=1), offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(is_here(best, lax.pmax(best, "t")), own, 2**30), "t")  # here


@right(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))
def first_index_that_is_at_least_the_largest(x: f32["B/d V/t"]) -> i32["B/d"]:
    return first_largest(x, lambda best, top: best >= top)
