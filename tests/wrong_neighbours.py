"""Wrong per-device programs next to right ones of right_functions: one thing is different in each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from right_methods import method
from right_programs import ring
from running import programs_of

from shardlib.shardtypes import f32, i32

# ---- arrays of one entry for each device --------------------------------------------------------------------------

untiled = method("one entry for each device")


@untiled(vma=False)
def blocks_of_rows_added_entry_by_entry(x: f32["B/t M"]) -> f32["M"]:
    return lax.all_gather(x, "t").sum(axis=0)[0]


@untiled(vma=False)
def whole_sums_gathered_and_added(x: f32["B/d M"]) -> f32["B/d"]:
    return lax.all_gather(x.sum(axis=1), "t").sum(axis=0)


@untiled(vma=False)
def partial_sums_gathered_and_averaged(x: f32["B/d M/t"], w: f32["M/t F"]) -> f32["B/d F"]:
    return lax.all_gather(x @ w, "t").mean(axis=0)


@untiled(vma=False)
def squares_of_partial_sums_gathered(x: f32["B/d M/t"]) -> f32["B/d"]:
    return jnp.sum(lax.all_gather(x.sum(axis=1), "t") ** 2, axis=0)


@untiled(vma=False)
def columns_gathered_and_merged_with_the_rows(x: f32["B/d M/t"]) -> f32["B/d M"]:
    return lax.all_gather(x, "t").reshape(x.shape[0], -1)


@untiled(vma=False)
def columns_gathered_behind_their_dim(x: f32["B/d M/t"]) -> f32["B/d M"]:
    return lax.all_gather(x, "t", axis=2).reshape(x.shape[0], -1)


@untiled(vma=False)
def softmax_over_devices(x: f32["B/t M"]) -> f32["M"]:
    return jax.nn.softmax(lax.all_gather(x.sum(axis=0), "t"), axis=0)[0]


@untiled(vma=False)
def maximum_of_different_blocks(x: f32["B/t M"]) -> f32["M"]:
    return lax.all_gather(x, "t").max(axis=0).sum(axis=0)


@untiled
def exchange_without_the_way_back(x: f32["E T/t M"], w: f32["E/t M F"]) -> f32["E T/t F"]:
    received = lax.all_to_all(x.reshape(lax.axis_size("t"), -1, *x.shape[1:]), "t", split_axis=0, concat_axis=0)
    return jnp.einsum("netm,emf->netf", received, w).reshape(x.shape[0], x.shape[1], -1)


@untiled
def heads_joined_behind_the_positions(x: f32["B/d L/t K D"]) -> f32["B/d L K/t D"]:
    b, l, k, d = x.shape
    n = lax.axis_size("t")
    y = lax.all_to_all(x.reshape(b, l, n, k // n, d), "t", split_axis=2, concat_axis=2)
    return y.reshape(b, n * l, k // n, d)


@untiled
def gradients_scattered_in_strides(x: f32["B/t M"], y: f32["B/t F"]) -> f32["M/t F"]:
    grads = (x.T @ y).reshape(-1, lax.axis_size("t"), y.shape[1]).swapaxes(0, 1)
    return lax.psum_scatter(grads, "t", scatter_dimension=0)


@untiled
def sums_scattered_that_were_whole(x: f32["B/d M"]) -> f32["B/d M/t"]:
    split = x.reshape(x.shape[0], lax.axis_size("t"), -1)
    return lax.psum_scatter(split, "t", scatter_dimension=1)


# ---- orders and their inverses ------------------------------------------------------------------------------------

ordered = method("orders and their inverses")


@ordered
def tokens_left_in_the_order_of_experts(x: f32["T/d M"], ids: i32["T/d"]) -> f32["T/d M"]:
    return x[jnp.argsort(ids)]


@ordered
def unsorted_by_the_order_itself(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return x[order][order]


@ordered
def unsorted_by_the_inverse_of_another_order(x: f32["T/d M"], a: f32["T/d"], b: f32["T/d"]) -> f32["T/d M"]:
    return x[jnp.argsort(a)][jnp.argsort(jnp.argsort(b))]


@ordered
def sorted_tokens_meet_unsorted_gates(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return (x[order] * scores[:, None])[jnp.argsort(order)]


@ordered
def difference_to_the_token_before_in_order(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    y = x[order]
    return (y - jnp.roll(y, 1, axis=0))[jnp.argsort(order)]


@ordered
def ranks_among_a_device_s_own(scores: f32["T/d"]) -> i32["T/d"]:
    return jnp.argsort(jnp.argsort(scores))


@ordered
def prefix_sums_in_the_order_of_experts(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return jnp.cumsum(x[order], axis=0)[jnp.argsort(order)]


@ordered
def best_of_the_sorted(x: f32["T/d"]) -> f32[""]:
    return lax.psum(jnp.sort(x)[-1], "d") / lax.axis_size("d")


# ---- rows looked up in a sharded table ----------------------------------------------------------------------------

looked_up = method("rows looked up in a sharded table")


@looked_up
def rows_mixed_before_the_mask(ids: i32["B/d L"], table: f32["V/t M"]) -> f32["B/d L M"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return lax.psum(jnp.where(ok[..., None], rows + jnp.roll(rows, 1, axis=1), 0.0), "t")


@looked_up
def rows_multiplied_along_positions_before_the_mask(
    ids: i32["B/d L"], table: f32["V/t M"], w: f32["L L"]
) -> f32["B/d L M"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return lax.psum(jnp.where(ok[..., None], jnp.einsum("blm,ls->bsm", rows, w), 0.0), "t")


@looked_up
def activation_after_the_mask(ids: i32["B/d L"], table: f32["V/t M"]) -> f32["B/d L M"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return lax.psum(jax.nn.sigmoid(jnp.where(ok[..., None], rows, 0.0)), "t")


@looked_up
def rows_projected_and_never_masked(ids: i32["B/d L"], table: f32["V/t M"], w: f32["M F"]) -> f32["B/d L F"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    return lax.psum(table[jnp.clip(local, 0, table.shape[0] - 1)] @ w, "t")


@looked_up
def rows_of_two_indices_added_under_one_mask(
    ids: i32["B/d L"], others: i32["B/d L"], table: f32["V/t M"]
) -> f32["B/d L M"]:
    size = table.shape[0]
    local, second = (i - lax.axis_index("t") * size for i in (ids, others))
    ok = (local >= 0) & (local < size)
    rows = table[jnp.clip(local, 0, size - 1)] * table[jnp.clip(second, 0, size - 1)]
    return lax.psum(jnp.where(ok[..., None], rows, 0.0), "t")


@looked_up(vma=False)
def edges_found_among_a_device_s_own(edges: f32["V/t"], u: f32["B/d"]) -> i32["B/d"]:
    return jnp.searchsorted(jnp.sort(edges), u)


# ---- choices by the size of an axis -------------------------------------------------------------------------------

chosen = method("choices by the size of an axis")


@chosen(vma=False)
def sum_over_the_other_axis_where_there_are_several(x: f32["B/d M/t"], w: f32["M/t F"]) -> f32["B/d F"]:
    y = x @ w
    return lax.psum(y, "d") if lax.axis_size("t") > 1 else y


@chosen
def doubled_where_there_are_several(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x * 2.0 if lax.axis_size("t") > 1 else x


@chosen(vma=False)
def mean_divided_by_another_number(x: f32["B/d M"]) -> f32["M"]:
    loss = x.mean(axis=0)
    return lax.psum(loss, "d") / 8.0 if lax.axis_size("d") > 1 else loss


@chosen
def activation_only_where_there_are_several(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return jnp.tanh(x) if lax.axis_size("t") > 1 else x


@chosen
def exchange_along_the_wrong_dims_where_there_are_several(x: f32["B/d L/t K D"]) -> f32["B/d L/t K D"]:
    if lax.axis_size("t") > 1:
        x = lax.all_to_all(x, "t", split_axis=2, concat_axis=1, tiled=True)
        x = lax.all_to_all(x, "t", split_axis=1, concat_axis=2, tiled=True)
        x = lax.ppermute(x, "t", ring("t"))
    return x


# ---- rings --------------------------------------------------------------------------------------------------------

turned = method("rings")


@turned(vma=False)
def ring_that_misses_a_turn(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    for _ in range(lax.axis_size("t") - 2):
        part = lax.ppermute(part, "t", ring("t"))
        total += part
    return total


@turned(vma=False)
def ring_with_a_turn_too_many(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    for _ in range(lax.axis_size("t")):
        part = lax.ppermute(part, "t", ring("t"))
        total += part
    return total


@turned(vma=False)
def ring_of_blocks_added_entry_by_entry(x: f32["B/t M"]) -> f32["M"]:
    total = x
    for _ in range(lax.axis_size("t") - 1):
        x = lax.ppermute(x, "t", ring("t"))
        total += x
    return total[0]


@turned(vma=False)
def ring_of_sums_that_are_whole(x: f32["B M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    for _ in range(lax.axis_size("t") - 1):
        part = lax.ppermute(part, "t", ring("t"))
        total += part
    return total


@turned(vma=False)
def ring_weighted_by_the_turn(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    for i in range(lax.axis_size("t") - 1):
        part = lax.ppermute(part, "t", ring("t"))
        total += part * (i + 2)
    return total


@turned(vma=False)
def ring_of_pairs(x: f32["B/t M"]) -> f32["M"]:
    n = lax.axis_size("t")
    part = total = x.sum(axis=0)
    for _ in range(n - 1):
        part = lax.ppermute(part, "t", [(i, i ^ 1) for i in range(n)])
        total += 2.0 * part
    return total


@turned(vma=False)
def ring_that_squares_each_part(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    total = part**2
    for _ in range(lax.axis_size("t") - 1):
        part = lax.ppermute(part, "t", ring("t"))
        total += part**2
    return total


@turned
def attention_normalized_in_each_turn(q: f32["L/t D"], k: f32["S/t D"], v: f32["S/t D"]) -> f32["L/t D"]:
    def turn(_, carry):
        y, k, v = carry
        y += jax.nn.softmax(q @ k.T) @ v
        return y, lax.ppermute(k, "t", ring("t")), lax.ppermute(v, "t", ring("t"))

    return lax.fori_loop(0, lax.axis_size("t"), turn, (jnp.zeros_like(q), k, v))[0]


@turned
def attention_whose_values_stay(q: f32["L/t D"], k: f32["S/t D"], v: f32["S/t D"]) -> f32["L/t D"]:
    def turn(_, carry):
        y, k = carry
        return y + jax.nn.sigmoid(q @ k.T) @ v, lax.ppermute(k, "t", ring("t"))

    return lax.fori_loop(0, lax.axis_size("t"), turn, (jnp.zeros_like(q), k))[0]


@turned
def matmul_with_rows_in_the_wrong_direction(x: f32["B M/t"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me = lax.axis_size("t"), lax.axis_index("t")
    total = jnp.zeros((x.shape[0], w.shape[1]))
    for i in range(n):
        rows = lax.dynamic_slice_in_dim(w, (me + i + 1) % n * x.shape[1], x.shape[1])
        total += x @ rows
        x = lax.ppermute(x, "t", ring("t"))
    return total


@turned
def matmul_with_rows_of_this_device(x: f32["B M/t"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me = lax.axis_size("t"), lax.axis_index("t")
    total = jnp.zeros((x.shape[0], w.shape[1]))
    for _ in range(n):
        total += x @ lax.dynamic_slice_in_dim(w, me * x.shape[1], x.shape[1])
        x = lax.ppermute(x, "t", ring("t"))
    return total


@turned
def blocks_placed_at_this_device_s_place(x: f32["B/t M"], w: f32["M F/t"]) -> f32["B F/t"]:
    n, me, size = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    y = jnp.zeros((n * size, w.shape[1]))
    for _ in range(n):
        y = lax.dynamic_update_slice_in_dim(y, x @ w, me * size, axis=0)
        x = lax.ppermute(x, "t", ring("t"))
    return y


@turned
def sums_placed_over_each_other(x: f32["B/t M"], w: f32["M F/t"]) -> f32["B F/t"]:
    n = lax.axis_size("t")
    y = jnp.zeros((n * x.shape[0], w.shape[1]))
    for _ in range(n):
        y = lax.dynamic_update_slice_in_dim(y, (x @ w).sum(axis=0)[None], 0, axis=0)
        x = lax.ppermute(x, "t", ring("t"))
    return y


@turned
def nearest_keys_added(q: f32["L/t D"], k: f32["S/t D"]) -> f32["L/t"]:
    n, best = lax.axis_size("t"), jnp.max(q @ k.T, axis=1)
    for _ in range(n - 1):
        k = lax.ppermute(k, "t", ring("t"))
        best = best + jnp.max(q @ k.T, axis=1)
    return best


@turned(vma=False)
def keys_and_values_a_turn_apart(q: f32["L/t D"], k: f32["S/t D"], v: f32["S/t D"]) -> f32["L/t D"]:
    y = jnp.zeros_like(q)
    k = lax.ppermute(k, "t", ring("t"))
    for _ in range(lax.axis_size("t")):
        y += jax.nn.sigmoid(q @ k.T) @ v
        k, v = (lax.ppermute(x, "t", ring("t")) for x in (k, v))
    return y


@turned(vma=False)
def ring_with_another_array_in_each_turn(x: f32["B/t M"]) -> f32["M"]:
    part, total = x.sum(axis=0), 0.0
    for i in range(lax.axis_size("t")):
        weights = jnp.asarray(np.random.default_rng(i).standard_normal(part.shape, np.float32))
        total += jax.jit(lambda part, weights=weights: part * weights)(part)
        part = lax.ppermute(part, "t", ring("t"))
    return total


PROGRAMS = programs_of(globals())
