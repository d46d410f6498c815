"""Right per-device functions as the documentation of jax.shard_map and public code bases write them, without typed ops.

Each is to compute what it computes on one device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from right_methods import method
from right_programs import ring
from running import programs_of

from shardlib.shardtypes import f32, i32

# ---- arrays of one entry for each device --------------------------------------------------------------------------

untiled = method("one entry for each device")


@untiled(vma=False)
def rows_gathered_untiled_and_merged(x: f32["B/t M"], w: f32["B M"]) -> f32["M"]:
    return (lax.all_gather(x, "t").reshape(-1, x.shape[1]) * w).sum(0)


@untiled(vma=False)
def columns_gathered_untiled_and_merged(x: f32["B/d M/t"], w: f32["M F"]) -> f32["B/d F"]:
    return lax.all_gather(x, "t", axis=1).reshape(x.shape[0], -1) @ w


@untiled(vma=False)
def columns_gathered_before_the_rows_and_moved(x: f32["B/d M/t"], w: f32["M F"]) -> f32["B/d F"]:
    return lax.all_gather(x, "t").transpose(1, 0, 2).reshape(x.shape[0], -1) @ w


@untiled(vma=False)
def partial_sums_gathered_and_added(x: f32["B/d M/t"], w: f32["M/t F"]) -> f32["B/d F"]:
    return lax.all_gather(x @ w, "t").sum(axis=0)


@untiled(vma=False)
def means_gathered_and_averaged(x: f32["B/d L"]) -> f32["L"]:
    return lax.all_gather(x.mean(axis=0), "d").mean(axis=0)


@untiled(vma=False)
def maxima_gathered_and_compared(x: f32["B/d V/t"]) -> f32["B/d"]:
    return lax.all_gather(x.max(axis=-1), "t").max(axis=0)


@untiled(vma=False)
def softmax_from_gathered_maxima(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    e = jnp.exp(x - lax.all_gather(x.max(axis=-1), "t").max(axis=0)[:, None])
    return e / lax.all_gather(e.sum(axis=-1), "t").sum(axis=0)[:, None]


@untiled(vma=False)
def contrast_with_all_texts(x: f32["B/d M"], y: f32["B/d M"]) -> f32["B/d"]:
    others = lax.all_gather(y, "d")
    scores = jnp.einsum("bm,ncm->bnc", x, others).reshape(x.shape[0], -1)
    return jax.nn.logsumexp(scores, axis=-1) - jnp.sum(x * y, axis=-1)


@untiled(vma=False)
def blocks_of_weights_gathered_and_contracted(x: f32["B/d M"], w: f32["M/t F"]) -> f32["B/d F"]:
    blocks = lax.all_gather(w, "t")
    return jnp.einsum("bnm,nmf->bf", x.reshape(x.shape[0], lax.axis_size("t"), -1), blocks)


@untiled
def experts_exchanged_by_an_untiled_all_to_all(x: f32["E T/t M"], w: f32["E/t M F"]) -> f32["E T/t F"]:
    n = lax.axis_size("t")
    sent = x.reshape(n, -1, *x.shape[1:])
    received = lax.all_to_all(sent, "t", split_axis=0, concat_axis=0)
    y = jnp.einsum("netm,emf->netf", received, w)
    return lax.all_to_all(y, "t", split_axis=0, concat_axis=0).reshape(x.shape[0], x.shape[1], -1)


@untiled
def heads_exchanged_for_positions_untiled(x: f32["B/d L/t K D"]) -> f32["B/d L K/t D"]:
    b, l, k, d = x.shape
    n = lax.axis_size("t")
    y = lax.all_to_all(x.reshape(b, l, n, k // n, d), "t", split_axis=2, concat_axis=1)
    return y.reshape(b, n * l, k // n, d)


@untiled
def gradients_scattered_untiled(x: f32["B/t M"], y: f32["B/t F"]) -> f32["M/t F"]:
    grads = x.T @ y
    return lax.psum_scatter(grads.reshape(lax.axis_size("t"), -1, grads.shape[1]), "t", scatter_dimension=0)


@untiled(vma=False)
def norm_of_gathered_norms(x: f32["M/t F"]) -> f32[""]:
    return jnp.sqrt(jnp.sum(lax.all_gather(jnp.sum(x * x), "t")))


# ---- orders and their inverses ------------------------------------------------------------------------------------

ordered = method("orders and their inverses")


@ordered
def ranks_of_each_row(x: f32["B/d V"]) -> i32["B/d V"]:
    return jnp.argsort(jnp.argsort(x, axis=-1), axis=-1)


@ordered
def rows_sorted_by_expert_and_back(x: f32["T/d M"], ids: i32["T/d"], w: f32["M F"]) -> f32["T/d F"]:
    order = jnp.argsort(ids)
    y = jnp.tanh(x[order] @ w)
    return y[jnp.argsort(order)]


@ordered
def tokens_sorted_by_expert_and_scattered_back(x: f32["T/d M"], ids: i32["T/d"], w: f32["M F"]) -> f32["T/d F"]:
    order = jnp.argsort(ids)
    y = jnp.tanh(x[order] @ w)
    return jnp.zeros_like(y).at[order].set(y)


@ordered
def inverse_permutation_by_a_scatter(x: f32["T/d M"], ids: i32["T/d"], w: f32["M F"]) -> f32["T/d F"]:
    order = jnp.argsort(ids)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    return ((x[order] @ w) ** 2)[back]


@ordered(escape=True, reason="each row goes back to its token, whichever order the device has")
def copies_for_two_experts_sorted_and_added_back(x: f32["T/d M"], router: f32["M E"], w: f32["M F"]) -> f32["T/d F"]:
    gates, ids = lax.top_k(jax.nn.softmax(x @ router), 2)
    order = jnp.argsort(ids.reshape(-1))
    y = jnp.tanh(x[order // 2] @ w)[jnp.argsort(order)]
    return jnp.sum(y.reshape(*ids.shape, -1) * gates[..., None], axis=1)


@ordered
def buckets_of_distances(x: f32["B/d"], edges: f32["V"]) -> i32["B/d"]:
    return jnp.searchsorted(jnp.sort(edges), x)


@ordered
def nucleus_of_each_row(x: f32["B/d V"]) -> f32["B/d V"]:
    order = jnp.argsort(-x, axis=-1)
    p = jnp.take_along_axis(jax.nn.softmax(x), order, axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < 0.9
    return jnp.where(jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1), x, -1e9)


@ordered
def inverse_of_a_cumulative_distribution(p: f32["V"], u: f32["B/d"]) -> i32["B/d"]:
    return jnp.searchsorted(jnp.cumsum(jax.nn.softmax(p)), jax.nn.sigmoid(u), side="right")


@ordered
def searchsorted_by_comparing_all(edges: f32["V"], u: f32["B/d"]) -> i32["B/d"]:
    return jnp.searchsorted(edges, u, method="compare_all")


@ordered
def searchsorted_by_sorting(edges: f32["V"], u: f32["B/d"]) -> i32["B/d"]:
    return jnp.searchsorted(jnp.sort(edges), u, method="scan_unrolled")


# ---- rows looked up in a sharded table ----------------------------------------------------------------------------

looked_up = method("rows looked up in a sharded table")


@looked_up
def embedding_masked_after_a_projection(ids: i32["B/d L"], table: f32["V/t M"], w: f32["M F"]) -> f32["B/d L F"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    y = table[jnp.clip(local, 0, table.shape[0] - 1)] @ w
    return lax.psum(jnp.where(ok[..., None], y, 0.0), "t")


@looked_up
def embedding_masked_after_a_scale(ids: i32["B/d L"], table: f32["V/t M"]) -> f32["B/d L M"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    rows = table.at[local].get(mode="clip") * jnp.sqrt(1.0 * table.shape[1])
    return lax.psum(rows * ok[..., None], "t")


@looked_up
def embedding_masked_after_a_cast(ids: i32["B/d L"], table: f32["V/t M"]) -> f32["B/d L M"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(ok, local, 0)].astype(jnp.bfloat16).astype(jnp.float32)
    return lax.psum(jnp.where(ok[..., None], rows, 0), "t")


@looked_up
def logit_of_the_label_masked_after_a_shift(logits: f32["B/d V/t"], labels: i32["B/d"]) -> f32["B/d"]:
    local = labels - lax.axis_index("t") * logits.shape[1]
    ok = (local >= 0) & (local < logits.shape[1])
    top = lax.pmax(lax.stop_gradient(logits.max(axis=-1)), "t")
    shifted = logits - top[:, None]
    picked = jnp.take_along_axis(shifted, jnp.where(ok, local, 0)[:, None], axis=1)[:, 0]
    label = lax.psum(jnp.where(ok, picked, 0.0), "t")
    return jnp.log(lax.psum(jnp.exp(shifted).sum(axis=-1), "t")) - label


@looked_up
def logit_less_the_maximum_before_the_mask(logits: f32["B/d V/t"], labels: i32["B/d"]) -> f32["B/d"]:
    local = labels - lax.axis_index("t") * logits.shape[1]
    ok = (local >= 0) & (local < logits.shape[1])
    top = lax.pmax(logits.max(axis=-1), "t")
    picked = jnp.take_along_axis(logits, jnp.where(ok, local, 0)[:, None], axis=1)[:, 0] - top
    return lax.psum(jnp.where(ok, picked, 0.0), "t")


# ---- one entry in an intermediate ---------------------------------------------------------------------------------

single = method("one entry on the way")


@single
def rows_of_one_head_each(q: f32["B/d L K/t D"], k: f32["B/d L D"]) -> f32["B/d L K/t L"]:
    return jnp.einsum("blkd,bsud->blks", q, k[:, :, None])


@single
def heads_split_into_as_many_as_there_are(x: f32["B/d L M/t"], w: f32["M/t F"]) -> f32["B/d L F"]:
    heads = x.reshape(*x.shape[:2], x.shape[2] // 4, 4)
    return lax.psum(jnp.einsum("blkd,kdf->blf", heads, w.reshape(-1, 4, w.shape[1])), "t")


@single(vma=False)
def last_position_of_all_texts(x: f32["B/d L/t M"], w: f32["M V"]) -> f32["B/d V"]:
    everything = lax.all_gather(x, "t", axis=1, tiled=True)
    return everything[:, -1:].squeeze(1) @ w


@single
def one_query_for_each_group(q: f32["B/d K/t D"], k: f32["B/d S K/t D"], v: f32["B/d S K/t D"]) -> f32["B/d K/t D"]:
    p = jax.nn.softmax(jnp.einsum("bukd,bskd->bkus", q[:, None], k))
    return jnp.einsum("bkus,bskd->bukd", p, v)[:, 0]


# ---- choices by the size of an axis -------------------------------------------------------------------------------

chosen = method("choices by the size of an axis")


@chosen(vma=False)
def sum_where_there_are_several_devices(x: f32["B/d M/t"], w: f32["M/t F"]) -> f32["B/d F"]:
    y = x @ w
    return lax.psum(y, "t") if lax.axis_size("t") > 1 else y


@chosen(vma=False)
def early_return_on_one_device(x: f32["B/d L/t M"], w: f32["M F"]) -> f32["B/d L F"]:
    if lax.axis_size("t") == 1:
        return x @ w
    return lax.all_gather(x, "t", axis=1, tiled=True) @ w


@chosen(vma=False)
def mean_over_devices_if_there_are_several(x: f32["B/d M"]) -> f32["M"]:
    loss = x.mean(axis=0)
    if lax.axis_size("d") > 1:
        loss = lax.pmean(loss, "d")
    return loss


@chosen
def weights_gathered_where_they_are_sharded(x: f32["B/d M"], w: f32["M/d F"]) -> f32["B/d F"]:
    if lax.axis_size("d") != 1:
        w = lax.all_gather(w, "d", axis=0, tiled=True)
    return jnp.tanh(x @ w)


@chosen
def heads_exchanged_where_there_are_several(x: f32["B/d L/t K D"]) -> f32["B/d L K/t D"]:
    if lax.axis_size("t") == 1:
        return x
    return lax.all_to_all(x, "t", split_axis=2, concat_axis=1, tiled=True)


@chosen
def gradients_scattered_where_there_are_several(x: f32["B/t M"], y: f32["B/t F"]) -> f32["M/t F"]:
    grads = x.T @ y
    if lax.axis_size("t") > 1:
        grads = lax.psum_scatter(grads, "t", scatter_dimension=0, tiled=True)
    return grads


# ---- rings --------------------------------------------------------------------------------------------------------

turned = method("rings")


@turned(vma=False)
def ring_of_sums_unrolled(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    for _ in range(lax.axis_size("t") - 1):
        part = lax.ppermute(part, "t", ring("t"))
        total += part
    return total


@turned(vma=False)
def ring_of_sums_in_a_loop(x: f32["B/t M"]) -> f32["M"]:
    def turn(_, carry):
        total, part = carry
        return total + part, lax.ppermute(part, "t", ring("t"))

    part = x.sum(axis=0)
    return lax.fori_loop(0, lax.axis_size("t"), turn, (jnp.zeros_like(part), part))[0]


@turned(vma=False)
def ring_of_sums_in_a_scan_of_one_turn_less(x: f32["B/t M"]) -> f32["M"]:
    def turn(carry, _):
        total, part = carry
        part = lax.ppermute(part, "t", ring("t"))
        return (total + part, part), None

    part = x.sum(axis=0)
    return lax.scan(turn, (part, part), None, length=lax.axis_size("t") - 1)[0][0]


@turned
def attention_over_keys_in_a_ring_unrolled(q: f32["L/t D"], k: f32["S/t D"], v: f32["S/t D"]) -> f32["L/t D"]:
    n, above, below = lax.axis_size("t"), 0.0, 0.0
    for i in range(n):
        e = jnp.exp(jax.nn.sigmoid(q @ k.T))
        above, below = above + e @ v, below + e.sum(axis=1)
        if i < n - 1:
            k, v = (lax.ppermute(x, "t", ring("t")) for x in (k, v))
    return above / below[:, None]


@turned
def attention_over_keys_in_a_ring_in_a_loop(q: f32["L/t D"], k: f32["S/t D"], v: f32["S/t D"]) -> f32["L/t D"]:
    def turn(_, carry):
        above, below, k, v = carry
        e = jnp.exp(jax.nn.sigmoid(q @ k.T))
        above, below = above + e @ v, below + e.sum(axis=1)
        return above, below, lax.ppermute(k, "t", ring("t")), lax.ppermute(v, "t", ring("t"))

    carry = jnp.zeros_like(q), jnp.zeros_like(q[:, 0]), k, v
    above, below, _, _ = lax.fori_loop(0, lax.axis_size("t"), turn, carry)
    return above / below[:, None]


@turned
def matmul_whose_rows_pass_around(x: f32["B M/t"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me = lax.axis_size("t"), lax.axis_index("t")
    total = jnp.zeros((x.shape[0], w.shape[1]))
    for i in range(n):
        rows = lax.dynamic_slice_in_dim(w, (me - i) % n * x.shape[1], x.shape[1])
        total += x @ rows
        x = lax.ppermute(x, "t", ring("t"))
    return total


@turned
def matmul_whose_rows_pass_around_in_a_loop(x: f32["B M/t"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me, size = lax.axis_size("t"), lax.axis_index("t"), x.shape[1]

    def turn(i, carry):
        total, x = carry
        rows = lax.dynamic_slice_in_dim(w, (me - i) % n * size, size)
        return total + x @ rows, lax.ppermute(x, "t", ring("t"))

    return lax.fori_loop(0, n, turn, (jnp.zeros_like(x[:, :1] * w[0]), x))[0]


@turned
def gathered_matmul_of_passing_blocks(x: f32["B/t M"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me, size = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    y = jnp.zeros((n * size, w.shape[1]))
    for i in range(n):
        y = lax.dynamic_update_slice_in_dim(y, x @ w, (me - i) % n * size, axis=0)
        if i < n - 1:
            x = lax.ppermute(x, "t", ring("t"))
    return y


@turned
def nearest_key_of_all_in_a_ring(q: f32["L/t D"], k: f32["S/t D"]) -> f32["L/t"]:
    n, best = lax.axis_size("t"), jnp.max(q @ k.T, axis=1)
    for _ in range(n - 1):
        k = lax.ppermute(k, "t", ring("t"))
        best = jnp.maximum(best, jnp.max(q @ k.T, axis=1))
    return best


PROGRAMS = programs_of(globals())
