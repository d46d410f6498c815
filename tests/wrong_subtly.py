"""Wrong programs that differ from right ones in one detail: they show that a rule asks for no less than it must."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from right_programs import offset
from running import program, programs_of

from shardlib.shardtypes import bool_, dtype_name, f32, i32

key = dtype_name("key")
KEYS = [jax.random.key(i) for i in range(5)]

# ---- masks, lookups and scatters ----------------------------------------------------------------------------------

masks = functools.partial(program, "masks that do not fit their index")


def own_and_found(table, ids):
    """Ids from the start of this device's block of the table, and which of them are in it."""
    own = ids - lax.axis_index("t") * table.shape[0]
    return own, (own >= 0) & (own < table.shape[0])


@masks(whole=lambda table, ids, others: table[ids])
def masked_by_other_ids(table: f32["V/t M"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d M"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    return lax.psum(jnp.where(found[:, None], jnp.take(table, own, axis=0, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def masked_by_transposed_ids(table: f32["V/t"], ids: i32["L S"]) -> f32["L S"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found.T, jnp.take(table, own, axis=0, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def looked_up_one_entry_further(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, jnp.take(table, own + 1, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def looked_up_one_entry_after_a_clip(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    clipped = jnp.clip(own, 0, table.shape[0] - 1) + 1
    return lax.psum(jnp.where(found, jnp.take(table, clipped, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def clipped_to_half_of_the_block(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    clipped = jnp.clip(own, 0, table.shape[0] // 2 - 1)
    return lax.psum(jnp.where(found, jnp.take(table, clipped, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def clipped_below_two(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, jnp.take(table, jnp.maximum(own, 2), mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def wrapped_where_it_is_in_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    wrapped = jnp.where(own >= 0, own + 1, own)
    return lax.psum(jnp.where(found, jnp.take(table, wrapped, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def index_replaced_where_it_is_in_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, jnp.take(table, jnp.where(found, 0, own), mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def masked_where_it_is_out_of_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, 0.0, jnp.take(table, own, mode="clip")), "t")


@masks(whole=lambda table, ids: table[ids])
def masked_at_one_end_alone(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    return lax.psum(jnp.where(own >= 0, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def masked_by_either_end(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    found = (own >= 0) | (own < table.shape[0])
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids, others: table[ids])
def masked_by_ends_of_two_indices(table: f32["V/t"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    other, _ = own_and_found(table, others)
    found = (own >= 0) & (other < table.shape[0])
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def masked_with_one_entry_too_many(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    found = (own >= 0) & (own <= table.shape[0])
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: table[ids])
def masked_by_ones(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 1.0), "t")


@masks(whole=lambda table, ids: table[ids])
def mask_averaged_instead_of_summed(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.pmean(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda x, w, ids: jnp.where((ids >= 0) & (ids < 16), x @ w, 0.0))
def partial_sum_masked_over_its_own_axis(x: f32["B/d F/t"], w: f32["F/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, x @ w, 0.0), "t")


@masks(whole=lambda table, ids, x, w: jnp.zeros(16).at[ids].add(x @ w))
def partial_sum_scattered_by_clipped_ids(
    table: f32["V/t"], ids: i32["B/d"], x: f32["B/d F/t"], w: f32["F/t"]
) -> f32["V/t"]:
    own, _ = own_and_found(table, ids)
    own = jnp.clip(own, 0, table.shape[0] - 1)
    return lax.psum(jnp.zeros_like(table).at[own].add(x @ w), "d")


@masks(whole=lambda table, ids, others, g: jnp.zeros(16).at[ids].add(g))
def updates_masked_by_other_ids(table: f32["V/t"], ids: i32["B/d"], others: i32["B/d"], g: f32["B/d"]) -> f32["V/t"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    own = jnp.clip(own, 0, table.shape[0] - 1)
    return lax.psum(jnp.zeros_like(table).at[own].add(jnp.where(found, g, 0.0)), "d")


@masks(whole=lambda table, ids, g: jnp.zeros(16).at[ids].add(g))
def updates_not_masked_at_all(table: f32["V/t"], ids: i32["B/d"], g: f32["B/d"]) -> f32["V/t"]:
    own, _ = own_and_found(table, ids)
    own = jnp.clip(own, 0, table.shape[0] - 1)
    return lax.psum(jnp.zeros_like(table).at[own].add(g), "d")


@masks(whole=lambda table, ids, g: jnp.zeros(16).at[ids].add(g))
def updates_out_of_range_sent_to_the_last_entry(table: f32["V/t"], ids: i32["B/d"], g: f32["B/d"]) -> f32["V/t"]:
    own, found = own_and_found(table, ids)
    own = jnp.where(found, own, table.shape[0] - 1)
    return lax.psum(jnp.zeros_like(table).at[own].add(g, mode="drop"), "d")


@masks(whole=lambda table, ids, g: table.at[ids].set(g))
def entries_set_by_shifted_ids(table: f32["V/t"], ids: i32["4"], g: f32["4"]) -> f32["V/t"]:
    own, found = own_and_found(table, ids)
    return table.at[jnp.clip(own, 0, table.shape[0] - 1)].set(jnp.where(found, g, 0.0))


@masks(whole=lambda table, ids, g: table.at[ids].add(g))
def scattered_into_the_block_of_another_axis(table: f32["V/d"], ids: i32["4"], g: f32["4"]) -> f32["V/d"]:
    own = ids - lax.axis_index("t") * table.shape[0]
    own = jnp.where((own >= 0) & (own < table.shape[0]), own, table.shape[0])
    return lax.psum(jnp.zeros_like(table).at[own].add(g, mode="drop"), "t") + table


@masks(whole=lambda counts, ids: counts.at[ids].add(1))
def mask_added_at_plain_ids(counts: i32["V"], ids: i32["B/d"]) -> i32["V"]:
    own = ids - lax.axis_index("d") * 8
    found = (own >= 0) & (own < 8)
    return counts + lax.psum(jnp.zeros_like(counts).at[ids].add(found.astype(jnp.int32)), "d")


@masks(whole=lambda flags, ids, x: jnp.where(flags[ids[0]], x, -x), vma=False)
def branch_on_an_entry_not_masked(flags: bool_["V/t"], ids: i32["B"], x: f32["B/d"]) -> f32["B/d"]:
    own = ids[0] - lax.axis_index("t") * flags.shape[0]
    flag = lax.dynamic_index_in_dim(flags, jnp.clip(own, 0, flags.shape[0] - 1), keepdims=False)
    return lax.cond(flag, lambda x: x, lambda x: -x, x)


@masks(whole=lambda x: jnp.argmax(x[0]).astype(jnp.float32) * x[0], vma=False)
def branch_on_who_has_the_maximum(x: f32["B V/t"]) -> f32["V/t"]:
    best = jnp.max(x[0])
    return lax.cond(best == lax.pmax(best, "t"), lambda x: x, lambda x: 0 * x, x[0])


@masks(whole=lambda table, start: lax.dynamic_slice_in_dim(table, 0, 16) * 1.0)
def start_of_a_block_clipped(table: f32["L M"], start: f32["L/t"]) -> f32["L/t M"]:
    n = start.shape[0]
    return lax.dynamic_slice_in_dim(table, jnp.minimum(lax.axis_index("t") * n, n // 2), n)


@masks(whole=lambda table, ids, g: jnp.zeros(16).at[ids].add(g))
def masked_updates_summed_before_the_scatter(table: f32["V/t"], ids: i32["B/d"], g: f32["B/d"]) -> f32["V/t"]:
    own, found = own_and_found(table, ids)
    own = jnp.clip(own, 0, table.shape[0] - 1)
    g = lax.psum(jnp.where(found, g, 0.0), "t")
    return lax.psum(jnp.zeros_like(table).at[own].add(g), "d")


@masks(whole=lambda table, ids, others: jnp.where(ids < 16, table[ids, 0] + table[others, 0], 0))
def vectors_carried_from_another_index(table: f32["V/t 4"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    other, _ = own_and_found(table, others)
    vector = lambda i: jnp.stack([i, jnp.zeros_like(ids)], -1)
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def step(_, c):
        total, v = c
        entries = lax.gather(table, v, numbers, (1, 1), mode="clip")
        return total + jnp.where(found, entries, 0.0), vector(other)

    first = lax.pcast(jnp.zeros(ids.shape), ("d", "t"), to="varying")
    return lax.psum(lax.fori_loop(0, 2, step, (first, vector(own)))[0], "t")


@masks(whole=lambda x, ids: x.at[0, ids].add(1.0))
def entries_added_to_the_first_row_of_each_block(x: f32["B/d M"], ids: i32["4"]) -> f32["B/d M"]:
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1,))
    return lax.scatter_add(x, ids[:, None], jnp.ones(4), numbers)


@masks(whole=lambda x, ids: x[0, ids], axes=("d",), vma=False)
def first_of_one_row_each(x: f32["2/d M"], ids: i32["4"]) -> f32["4"]:
    numbers = lax.GatherDimensionNumbers((), (0, 1), (1,))
    return lax.gather(x, ids[:, None], numbers, (1, 1))


@masks(whole=lambda x: x.at[jnp.array([1, 3])].set(x[jnp.array([1, 3])] * 2))
def entries_changed_by_a_function_of_the_mesh(x: f32["M"]) -> f32["M"]:
    n = float(lax.axis_size("t"))
    return x.at[jnp.array([1, 3])].apply(lambda v: v * n)


@masks(whole=lambda x, v: x.at[::2].multiply(v[:8]))
def scaled_entries_multiplied_by_scaled_ones(x: f32["M"], v: f32["M"]) -> f32["M"]:
    x, v = lax.psum(x, "t"), lax.psum(v, "t")
    return x.at[jnp.arange(0, 16, 2)].multiply(v[:8]) / lax.axis_size("t")


# ---- positions ----------------------------------------------------------------------------------------------------

positions = functools.partial(program, "positions that do not add up")


@positions
def positions_counted_from_a_local_size(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * (jnp.arange(16) + x.shape[0])


@positions(whole=lambda x: x)
def global_positions_compared_with_a_local_size(x: f32["L/t"]) -> f32["L/t"]:
    return x * (offset("t", x.shape[0]) + jnp.arange(x.shape[0]) < x.shape[0])


@positions(whole=lambda x: x / 16)
def length_of_a_block_as_a_difference(x: f32["L/t"]) -> f32["L/t"]:
    start = offset("t", x.shape[0])
    end = start + x.shape[0]
    return x / (end - start)


@positions(whole=lambda x: x + jnp.arange(64.0))
def repeated_positions_with_an_offset(x: f32["64/t"]) -> f32["64/t"]:
    n = x.shape[0] // 4
    local = jnp.broadcast_to(jnp.arange(n), (4, n)).reshape(-1)
    return x + (local + offset("t", x.shape[0]))


@positions
def index_vectors_returned(x: f32["L/t"], ids: i32["L"]) -> i32["L 2"]:
    n = x.shape[0]
    return jnp.stack([jnp.arange(16) % 16, ids], -1).at[:n].set(jnp.stack([jnp.arange(n), ids[:n]], -1)) * n


@positions(whole=lambda x: jnp.stack([jnp.arange(16), jnp.arange(16)], -1))
def local_positions_as_vectors(x: f32["L/t"]) -> i32["L/t 2"]:
    n = jnp.arange(x.shape[0])
    return jnp.stack([n, n], -1)


@positions(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))
def argmax_with_axes_in_the_wrong_order(x: f32["B V/t/d"]) -> i32["B"]:
    best, n = jnp.max(x, axis=1), x.shape[1]
    block = lax.axis_index("d") * lax.axis_size("t") + lax.axis_index("t")
    own = block * n + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmax(best, ("t", "d")), own, 2**30), ("t", "d"))


@positions(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))
def argmax_where_another_extreme_is(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.min(x, axis=1)
    own = offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmin(best, "t"), own, 2**30), "t")


@positions(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))
def argmax_of_devices_in_reverse(x: f32["B V/t"]) -> i32["B"]:
    best = jnp.flip(jnp.max(x, axis=1))
    own = offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmax(best, "t"), own, 2**30), "t")


@positions(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))
def argmax_with_a_small_index_elsewhere(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    own = offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmax(best, "t"), own, 2), "t")


@positions(whole=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))
def argmax_where_the_transposed_maximum_is(x: f32["L S V/t"]) -> i32["L S"]:
    best = jnp.max(x, axis=2)
    own = offset("t", x.shape[2]) + jnp.argmax(x, axis=2).astype(jnp.int32)
    return lax.pmin(jnp.where(lax.pmax(best, "t") == best.T, own, 2**30), "t")


@positions(whole=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))
def argmax_where_its_index_is_the_maximum(x: i32["B/d V/t"]) -> i32["B/d"]:
    index = jnp.argmax(x, axis=-1)
    return lax.pmin(
        jnp.where(index == lax.pmax(jnp.max(x, axis=-1), "t"), offset("t", x.shape[-1]) + index, 2**30), "t"
    )


@positions(whole=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))
def argmax_where_the_maximum_is_its_index(x: i32["B/d V/t"]) -> i32["B/d"]:
    own = offset("t", x.shape[-1]) + jnp.argmax(x, axis=-1)
    return lax.pmin(jnp.where(jnp.max(x, axis=-1) == own, own, 2**30), "t")


@positions(whole=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))
def argmax_where_twice_the_maximum_is(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=-1)
    own = offset("t", x.shape[-1]) + jnp.argmax(x, axis=-1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.psum(lax.pmax(best, "t"), "t"), own, 2**30), "t")


@positions(whole=lambda x, i: x * jnp.where(i[0] > 7, jnp.arange(16), 0).sum())
def zeros_or_positions_summed(x: f32["M"], i: i32["4"]) -> f32["M"]:
    chosen = lax.cond(i[0] > 7, lambda: jnp.arange(16), lambda: jnp.zeros(16, jnp.int32))
    return x * lax.psum(chosen.sum(), "t")


@positions(whole=lambda x: x + jnp.arange(16))
def positions_carried_from_zeros(x: f32["M"]) -> f32["M"]:
    where = lax.fori_loop(0, 3, lambda _, c: jnp.arange(16), jnp.zeros(16, jnp.int32))
    return x + lax.psum(where, "t")


@positions(whole=lambda x: jnp.diag(x), vma=False)
def diagonal_taken_for_uniform(x: f32["L S"]) -> f32["L/t"]:
    rows = jnp.arange(16, dtype=jnp.uint32)
    return lax.slice_in_dim(x[rows, rows], 0, 16 // lax.axis_size("t"))


@positions(whole=lambda x: x[:, 0])
def column_taken_for_uniform(x: f32["L S"]) -> f32["L/t"]:
    rows = jnp.arange(16, dtype=jnp.uint32)
    return lax.slice_in_dim(x[rows, jnp.zeros(16, jnp.uint32)], 0, 16 // lax.axis_size("t"))


# ---- numbers ------------------------------------------------------------------------------------------------------

numbers = functools.partial(program, "numbers and types that depend on the mesh")


@numbers
def power_of_a_local_size(x: f32["B/d"]) -> f32["B/d"]:
    return lax.integer_pow(1 + 0.1 * x, x.shape[0])


@numbers(whole=lambda x: jnp.max(x * 3.0))
def maximum_of_a_number_of_another_sign(x: f32["B/d"]) -> f32[""]:
    sign = 3.0 if x.shape[0] == 8 else -3.0
    return lax.pmax(jnp.max(x * sign), "d") / sign * 3.0


@numbers
def other_operand_for_small_blocks(x: f32["B/d"]) -> f32["B/d"]:
    a, b = jnp.sin(x), jnp.cos(x)
    return 2 * (a if x.shape[0] > 4 else b)


@numbers
def sum_along_another_dim_for_small_blocks(x: f32["B/d M L"]) -> f32["B/d 16"]:
    return jnp.sum(x, axis=1 if x.shape[0] > 4 else 2)


@numbers(whole=lambda x: jnp.sum((jnp.sum(x, axis=1) != 0).astype(jnp.float32)))
def truth_of_a_partial_sum(x: f32["B/d F/t"]) -> f32[""]:
    truth = lax.convert_element_type(lax.convert_element_type(jnp.sum(x, axis=1), jnp.bool_), jnp.float32)
    return lax.psum(jnp.sum(truth), ("d", "t"))


@numbers(whole=lambda ids: jnp.sum(ids, axis=1) // 3)
def partial_sum_of_integers_divided(ids: i32["B/d L/t"]) -> i32["B/d"]:
    return lax.psum(lax.div(jnp.sum(ids, axis=1), jnp.int32(3)), "t")


@numbers(whole=lambda x: jnp.max(x, axis=1).astype(jnp.uint32) % 16)
def maximum_taken_of_wrapped_integers(x: f32["B/d V/t"]) -> i32["B/d"]:
    small = lax.convert_element_type(jnp.round(100 * x).astype(jnp.int32), jnp.int32)
    best = lax.convert_element_type(jnp.max(small, axis=1), jnp.int8)
    return lax.pmax(best.astype(jnp.int32), "t")


@numbers(whole=lambda x: jnp.round(100 * jnp.sum(x, axis=1)).astype(jnp.int32))
def partial_sum_rounded_to_integers(x: f32["B/d V/t"]) -> i32["B/d"]:
    return lax.psum((4 * jnp.sum(x, axis=1)).astype(jnp.int32), "t") * 25


@numbers
def shape_of_a_result_of_local_size(x: f32["B/d"]) -> f32["L/d"]:
    return jnp.ones(16 // 4)


@numbers(whole=lambda x, k: x * jax.random.gamma(k, jnp.ones(8)))
def gamma_noise_with_one_key(x: f32["B/d"], k: key[""]) -> f32["B/d"]:
    return x * jax.random.gamma(lax.pcast(k, "d", to="varying"), jnp.ones_like(x))


@numbers(whole=lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b + a * b, (0,)))
def custom_reduction_of_sharded_rows(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(lax.reduce(x, jnp.float32(0), lambda a, b: a + b + a * b, (0,)), "d")


@numbers
def approximate_best_of_sharded_rows(x: f32["B/d M"]) -> f32["8/d M"]:
    return lax.approx_max_k(x, x.shape[0], reduction_dimension=0)[0]


@numbers(whole=lambda x: x * 3.0, vma=False)
def rounding_amplified(x: f32["M"]) -> f32["M"]:
    return (x * (1 + 4e-6 * lax.axis_size("t")) - x) * 2.5e5


@numbers(whole=lambda x: x + jax.random.normal(KEYS[1], x.shape))
def key_made_outside_for_this_mesh(x: f32["M"]) -> f32["M"]:
    return x + jax.random.normal(KEYS[lax.axis_size("t")], x.shape)


@numbers(whole=lambda x: jnp.sum(16 * x, axis=1, dtype=jnp.int8).astype(jnp.int32))
def small_integers_widened_before_the_psum(x: i32["B/d L/t"]) -> i32["B/d"]:
    return lax.psum(jnp.sum(16 * x, axis=1, dtype=jnp.int8).astype(jnp.int32), "t")


@numbers(whole=lambda x: jnp.sum(16 * x, axis=1, dtype=jnp.int8).astype(jnp.float32))
def small_integers_as_floats_before_the_psum(x: i32["B/d L/t"]) -> f32["B/d"]:
    return lax.psum(jnp.sum(16 * x, axis=1, dtype=jnp.int8).astype(jnp.float32), "t")


@numbers(whole=lambda x: 255 * x)
def number_too_large_for_its_type(x: f32["M"]) -> f32["M"]:
    scale = lax.convert_element_type(lax.full((), 256.0) * 1.0, jnp.uint8)
    return lax.psum(x * scale, "t")


@numbers(whole=lambda x: 2 * x)
def branch_on_rounding(x: f32["M"]) -> f32["M"]:
    is_seven = jnp.floor(jnp.float32(0.7) * 10) == 7
    return jnp.where(is_seven, lax.psum(x, "t"), x) * 1.0


# ---- functions within functions -----------------------------------------------------------------------------------

inner = functools.partial(program, "what an equation without a rule does within", vma=False)


@inner(whole=lambda x: x)
def sum_in_a_map_within_a_map(x: f32["M"]) -> f32["M"]:
    return jax.shard_map(
        lambda x: lax.psum(x, "t"),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        axis_names={"t"},
        check_vma=False,
    )(x)


@jax.custom_batching.custom_vmap
def shifted(x):
    return x + lax.axis_index("t")


shifted.def_vmap(lambda size, batched, x: (shifted(x), batched[0]))


@inner(whole=lambda x: x)
def index_of_a_device_in_a_custom_vmap(x: f32["M"]) -> f32["M"]:
    return shifted(x)


@inner(whole=lambda x: x)
def index_of_a_device_in_a_composite(x: f32["M"]) -> f32["M"]:
    return lax.composite(lambda x: x + lax.axis_index("t"), "tests.shifted")(x)


@inner(whole=lambda x: x)
def linear_solve_with_a_sum(x: f32["M"]) -> f32["M"]:
    return lax.custom_linear_solve(
        lambda v: lax.psum(v, "t"), x, lambda mv, b: b / 1.0, symmetric=True
    ) + lax.custom_linear_solve(lambda v: v, x, lambda mv, b: lax.psum(b, "t"), symmetric=True)


@inner(whole=lambda x: jnp.ones(16))
def array_changed_below_a_local_condition(x: f32["B/d M"]) -> f32["M"]:
    r = jax.new_ref(jnp.zeros(16))

    def write():
        r[...] = jnp.ones(16)

    lax.cond(jnp.sum(x) > 0, write, lambda: None)
    return r[...]


@inner(whole=lambda x: x)
def array_added_to_on_each_device(x: f32["M"]) -> f32["M"]:
    r = jax.new_ref(x)

    def write(i, c):
        r[...] = r[...] + 1
        return c

    lax.fori_loop(0, lax.axis_size("t"), write, 0)
    return r[...]


PROGRAMS = programs_of(globals())
