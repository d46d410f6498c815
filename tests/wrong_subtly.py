"""Wrong programs that differ from right ones in one detail: they show that a rule asks for no less than it must."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from right_programs import offset
from running import program, programs_of

from shardlib.shardtypes import bool_, dtype_name, f32, i32

key = dtype_name("key")

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


# ---- loops over a device's own rows, matrices by themselves, windows as large as their dim ------------------------

rows = functools.partial(program, "own rows and whole windows")


@rows(whole=lambda x: lax.map(lambda row: row - row.mean(), x), vma=False)
def sum_over_devices_of_mapped_rows(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.map(lambda row: row - lax.pmean(row, "d").mean(), x)


@rows(whole=lambda x, y: jnp.max(y @ x.T, axis=0))
def largest_product_of_each_row_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32["B/d"]:
    return lax.map(lambda row: jnp.max(y @ row), x)


@rows(whole=lambda x, y: jnp.sum(jnp.exp(y @ x.T), axis=0))
def sum_of_each_row_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32["B/d"]:
    return lax.map(lambda row: jnp.sum(jnp.exp(y @ row)), x)


@rows
def positions_of_own_rows_mapped(x: f32["B/d"]) -> f32["B/d"]:
    return lax.map(lambda row: row[0] * row[1], (x, jnp.arange(x.shape[0])))


@rows
def sum_of_the_rows_so_far(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.scan(lambda total, row: (total + row,) * 2, 0 * x[0], x)[1]


def over_rows(add, start, x):
    """The carry of a loop over rows."""
    return lax.scan(lambda total, row: (add(total, row), None), lax.pcast(start, "d", to="varying"), x)[0]


@rows(whole=lambda x: x.sum(axis=0), vma=False)
def sum_of_own_rows_taken_for_that_of_all(x: f32["B/d M"]) -> f32["M"]:
    return over_rows(jnp.add, jnp.zeros(x.shape[1]), x)


@rows(whole=lambda x, w: w + x.sum(axis=0))
def start_of_a_sum_counted_by_each_device(x: f32["B/d M"], w: f32["M"]) -> f32["M"]:
    return lax.psum(over_rows(jnp.add, w, x), "d")


@rows(whole=lambda x: functools.reduce(lambda total, row: 0.5 * total + row, x))
def average_that_moves_along_own_rows(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(over_rows(lambda total, row: 0.5 * total + row, jnp.zeros(x.shape[1]), x), "d")


@rows(whole=lambda x: 255 * x[0])
def sum_doubled_at_each_row(x: f32["B/d"]) -> f32[""]:
    return lax.psum(over_rows(lambda total, row: total + total, jnp.ones(()), x) + 0 * x.sum(), "d")


@rows(whole=lambda x, y: jnp.sum(jnp.max(y @ x.T, axis=0)))
def sum_of_largest_products_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32[""]:
    return lax.psum(over_rows(lambda total, row: total + jnp.max(y @ row), jnp.zeros(()), x), "d")


@rows(whole=lambda x, y: jnp.sum(jnp.exp(y @ x.T)))
def sum_of_products_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32[""]:
    return lax.psum(over_rows(lambda total, row: total + jnp.sum(jnp.exp(y @ row)), jnp.zeros(()), x), "d")


@rows(whole=lambda x: x[::2].sum() - 2 * x[1::2].sum())
def sums_that_change_places_at_each_row(x: f32["B/d"]) -> f32[""]:
    def step(carry, row):
        return (carry[1] + row, carry[0] - 2 * row), None

    zero = lax.pcast(jnp.zeros(()), "d", to="varying")
    a, b = lax.scan(step, (zero, zero), x)[0]
    return lax.psum(a + 3 * b, "d")


@rows(whole=lambda x: jnp.concatenate([0 * x[:1], jnp.cumsum(x[:-1], axis=0)]))
def sums_before_each_of_own_rows(x: f32["B/d M"]) -> f32["B/d M"]:
    zero = lax.pcast(jnp.zeros(x.shape[1]), "d", to="varying")
    return lax.scan(lambda total, row: (total + row, total), zero, x)[1]


@rows(whole=lambda x: jnp.tanh(x.sum(axis=0)))
def sum_of_blocks_before_the_sum_along_them(x: f32["B/d M"]) -> f32["M"]:
    return jnp.tanh(lax.psum(x, "d")).sum(axis=0)


@rows(whole=lambda x, y: (x * y[:, None]).sum(axis=0))
def sum_of_blocks_times_a_block(x: f32["B/d M"], y: f32["B/d"]) -> f32["M"]:
    return lax.psum((lax.psum(x, "d") * y[:, None]).sum(axis=0), "d") / lax.axis_size("d")


@rows(whole=lambda x: x.sum(axis=0))
def sum_of_blocks_and_sum_along_them_and_again(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(lax.psum(x, "d").sum(axis=0), "d")


@rows(whole=lambda x: x.max(axis=0))
def largest_of_a_sum_of_blocks(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(x, "d").max(axis=0)


@rows(whole=lambda x, y: jnp.sum(x) + jnp.sum(y))
def sum_of_blocks_with_a_block_added(x: f32["B/d"], y: f32["B/d"]) -> f32[""]:
    return lax.psum((lax.psum(x, "d") + y).sum(), "d")


@rows(whole=lambda x: jnp.sum(x.astype(jnp.int32)))
def sum_of_blocks_rounded_before_the_sum(x: f32["B/d"]) -> i32[""]:
    return lax.psum(3 * x, "d").astype(jnp.int32).sum()


@rows(whole=lambda x: x.sum(axis=0))
def sum_of_blocks_carried_by_a_loop(x: f32["B/d M"]) -> f32["M"]:
    return lax.fori_loop(0, 2, lambda _, y: jnp.abs(y), lax.psum(x, "d")).sum(axis=0)


@rows(whole=lambda table, ids: table[ids])
def dropped_lookups_filled_with_ones(table: f32["V/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    own, found = own_and_found(table, ids)
    own = jnp.where(found, own, table.shape[0])
    return lax.psum(table.at[own].get(mode="fill", fill_value=1.0), "t")


@rows(whole=lambda w: jnp.tanh(w), axes=("d", "t"))
def part_of_a_part_in_another_order(w: f32["M"]) -> f32["M/t/d"]:
    part = lax.dynamic_slice_in_dim(jnp.tanh(w), offset("d", 16 // lax.axis_size("d")), 16 // lax.axis_size("d"))
    n = part.shape[0] // lax.axis_size("t")
    return lax.dynamic_slice_in_dim(part, offset("t", n), n)


@rows(whole=lambda x, ids, y: x.at[ids].max(y[:, None]))
def largest_of_own_rows_in_own_columns(x: f32["V M/d"], ids: i32["T/d"], y: f32["T/d"]) -> f32["V M/d"]:
    return x.at[ids].max(3 * y[:, None])


@rows(whole=lambda x, ids: jnp.full((16, 16), -9.0).at[ids].max(x), vma=False)
def largest_of_own_rows_taken_for_the_largest_of_all(x: f32["T/d M"], ids: i32["T/d"]) -> f32["V M"]:
    return jnp.full((16, x.shape[1]), -9.0).at[ids].max(x)


@rows(whole=lambda x, ids: jnp.full((16, 16), -9.0).at[ids].max(x))
def smallest_of_the_largest_of_own_rows(x: f32["T/d M"], ids: i32["T/d"]) -> f32["V M"]:
    return lax.pmin(jnp.full((16, x.shape[1]), -9.0).at[ids].max(x), "d")


@rows
def window_as_large_as_a_block_written(x: f32["B/d L/t"], at: i32["B/d"]) -> f32["B/d L/t"]:
    ones = 3 * jnp.ones(min(8, x.shape[1]))
    return jax.vmap(lambda x, at: lax.dynamic_update_slice(x, ones, (at,)))(x, at.astype(jnp.uint32))


@rows(whole=lambda x, at: jax.vmap(lambda x, at: jnp.max(lax.dynamic_slice(x, (at,), (8,))))(x, at))
def window_as_large_as_a_block_read(x: f32["B/d L/t"], at: i32["B/d"]) -> f32["B/d"]:
    size = min(8, x.shape[1])
    return lax.pmax(
        jax.vmap(lambda x, at: jnp.max(lax.dynamic_slice(x, (at,), (size,))))(x, at.astype(jnp.uint32)), "t"
    )


@rows
def matrices_cut_by_their_rows_factored(x: f32["R/t 8/d 8"]) -> f32["R/t 8/d 8"]:
    return jnp.linalg.qr(x)[0]


@rows(whole=lambda a, x: jax.scipy.linalg.solve_triangular(a + 3 * jnp.eye(8), x, lower=True))
def triangular_system_of_each_block(a: f32["8 8/d"], x: f32["8/d L"]) -> f32["8/d L"]:
    n = x.shape[0]
    own = lax.dynamic_slice_in_dim(a, offset("d", n), n) + 3 * jnp.eye(n)
    return jax.scipy.linalg.solve_triangular(own, x, lower=True)


PROGRAMS = programs_of(globals())
