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


@masks(whole=lambda x, w, ids: jnp.where((ids >= 0) & (ids < 16), x @ w, 0.0))
def partial_sum_masked_over_its_own_axis(x: f32["B/d F/t"], w: f32["F/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, x @ w, 0.0), "t")


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


@rows(whole=lambda x: 255 * x[0])
def sum_doubled_at_each_row(x: f32["B/d"]) -> f32[""]:
    return lax.psum(over_rows(lambda total, row: total + total, jnp.ones(()), x) + 0 * x.sum(), "d")


@rows(whole=lambda x, y: jnp.sum(jnp.max(y @ x.T, axis=0)))
def sum_of_largest_products_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32[""]:
    return lax.psum(over_rows(lambda total, row: total + jnp.max(y @ row), jnp.zeros(()), x), "d")


@rows(whole=lambda x, y: jnp.sum(jnp.exp(y @ x.T)))
def sum_of_products_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32[""]:
    return lax.psum(over_rows(lambda total, row: total + jnp.sum(jnp.exp(y @ row)), jnp.zeros(()), x), "d")


@rows(whole=lambda x, y: jnp.sum(x) + jnp.sum(y))
def sum_of_blocks_with_a_block_added(x: f32["B/d"], y: f32["B/d"]) -> f32[""]:
    return lax.psum((lax.psum(x, "d") + y).sum(), "d")


@rows(whole=lambda x: jnp.sum(x.astype(jnp.int32)))
def sum_of_blocks_rounded_before_the_sum(x: f32["B/d"]) -> i32[""]:
    return lax.psum(3 * x, "d").astype(jnp.int32).sum()


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


@numbers(whole=lambda x: 1.0 * x)
def replicated_value_taken_for_a_partial_sum(x: f32["M"]) -> f32["M"]:
    return lax.psum(lax.pcast(lax.pcast(x, "t", to="varying"), "t", to="unreduced"), "t")


# ---- parts, repetitions and places --------------------------------------------------------------------------------

parts = functools.partial(program, "parts, repetitions and places", vma=False)


@parts(whole=lambda x: x[:8])
def first_half_of_each_block_looked_up(x: f32["L/t"]) -> f32["8/t"]:
    return x[jnp.arange(x.shape[0] // 2)]


@parts(whole=lambda table, ids: table[ids, ids])
def looked_up_in_two_dims_and_masked_in_one(table: f32["V/t M/d"], ids: i32["4"]) -> f32["4"]:
    own, found = own_and_found(table, ids)
    other = ids - lax.axis_index("d") * table.shape[1]
    return lax.psum(jnp.where(found, table.at[own, other].get(mode="clip"), 0.0), ("t", "d"))


@parts(whole=lambda table, ids: jnp.zeros(16).at[ids].add(table[ids]))
def entries_not_masked_scattered(table: f32["V/t"], ids: i32["4"]) -> f32["V"]:
    own, _ = own_and_found(table, ids)
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.take(table, own, mode="clip")), "t")


@parts
def part_of_each_block_increased(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, 1:3].add(1.0)


@parts
def block_added_to_the_first_entries(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return x.at[: u.shape[0]].add(u)


@parts
def as_many_entries_increased_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return x.at[: u.shape[0]].add(1.0)


@parts(whole=lambda u: u)
def block_scattered_to_local_positions(u: f32["L/t"]) -> f32["L"]:
    return lax.psum(jnp.zeros(16).at[jnp.arange(u.shape[0])].add(u), "t")


@parts
def rows_of_a_block_counted_at_one_place(x: f32["L/t"]) -> f32["4"]:
    return jnp.zeros(4).at[jnp.zeros(x.shape[0], jnp.int32)].add(1.0)


@parts
def entries_set_by_sharded_ids(ids: i32["B/d"]) -> f32["V"]:
    return jnp.zeros(16).at[ids].set(1.0)


@parts(whole=lambda x, ids: jnp.zeros(16).at[ids].add(jnp.sum(x)))
def sum_of_local_rows_scattered(x: f32["B/d"], ids: i32["B/d"]) -> f32["V"]:
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.sum(x)), "d")


@parts(whole=lambda x: x[:8])
def part_of_each_block_by_its_index(x: f32["L/t"]) -> f32["8/t"]:
    n = x.shape[0] // 2
    return lax.dynamic_slice_in_dim(x, lax.axis_index("t") * n, n)


@parts(whole=lambda x, ids: lax.dynamic_slice_in_dim(x, jnp.sum(ids), 3))
def part_from_a_partial_sum_on(x: f32["L"], ids: i32["B/d"]) -> f32["3"]:
    return lax.dynamic_slice_in_dim(x, jnp.sum(ids), 3)


@parts(whole=lambda x: lax.dynamic_update_slice_in_dim(x, jnp.ones(2), 3, axis=0))
def part_written_with_the_index_of_a_device(x: f32["L"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(x, jnp.ones(2) + lax.axis_index("t"), jnp.int32(3), axis=0)


@parts(whole=lambda x, u: lax.dynamic_update_slice_in_dim(x, u[:2], 8, axis=0))
def part_written_at_a_local_size(x: f32["L"], u: f32["L/t"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(x, x[:2], u.shape[0] - jnp.int32(1), axis=0)


@parts
def block_written_at_one_place(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(x, u, jnp.int32(3), axis=0)


@parts
def as_many_ones_written_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(x, jnp.ones(u.shape[0]), jnp.int32(3), axis=0)


@parts(whole=lambda x, w: lax.bitcast_convert_type(x @ w, jnp.int32))
def bits_of_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t"]) -> i32["B/d"]:
    return lax.psum(lax.bitcast_convert_type(x @ w, jnp.int32), "t")


@parts(whole=lambda x: lax.bitcast_convert_type(x, jnp.int32) >> 20)
def bits_of_a_scaled_value(x: f32["M"]) -> i32["M"]:
    return lax.bitcast_convert_type(lax.psum(x, "t"), jnp.int32) >> 20


@parts(whole=lambda x: jnp.sort(jnp.tile(x, 2))[4:8])
def repeated_as_often_as_there_are_devices(x: f32["L"]) -> f32["4"]:
    return lax.slice_in_dim(jnp.sort(jnp.broadcast_to(x, (2 * lax.axis_size("t"), 16)).reshape(-1)), 4, 8)


@parts
def reshaped_across_the_ends_of_blocks(x: f32["8/d 12/t"]) -> f32["24/d 4"]:
    return x.reshape(-1, 4)


@parts
def joined_with_as_many_ones_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32[""]:
    return jnp.mean(jnp.concatenate([jnp.ones(u.shape[0]), x]))


@parts
def padded_by_the_size_of_a_block(x: f32["L"], u: f32["8/t"]) -> f32[""]:
    return jnp.var(jnp.pad(x, (0, u.shape[0])))


@parts
def spectrum_of_as_many_ones_as_a_block_has(x: f32["L/t"]) -> f32[""]:
    return jnp.fft.fft(jnp.ones(x.shape[0])).real[0]


@parts
def power_by_a_product_of_repeated_numbers(x: f32["L/t"]) -> f32["L/t"]:
    return x * jnp.prod(jnp.full((x.shape[0],), 1.5))


@parts
def argmax_of_a_flattened_block(x: f32["B/d L/t"]) -> i32[""]:
    return jnp.argmax(x.reshape(-1)).astype(jnp.int32)


@parts(whole=lambda x: jnp.cumprod(x))
def product_of_scaled_numbers_scaled_back(x: f32["L"]) -> f32["L"]:
    return jnp.cumprod(lax.psum(x, "t")) / lax.axis_size("t")


@parts(whole=lambda x, w, v: jnp.sum(x @ w) * v.sum(axis=0), axes=("t",))
def repeated_partial_sum_contracted(x: f32["4 F/t"], w: f32["F/t"], v: f32["L/t M"]) -> f32["M"]:
    y = jnp.broadcast_to((x @ w)[:, None], (4, v.shape[0]))
    return lax.psum(jnp.tensordot(y, v, 1), "t").sum(axis=0)


@parts(whole=lambda x, k: lax.conv(x[None, None], jnp.max(k, axis=0)[None, None], (1,), "SAME")[0, 0])
def convolved_by_maxima_of_a_block(x: f32["L"], k: f32["B/d 3"]) -> f32["L"]:
    return lax.conv(x[None, None], jnp.max(k, axis=0)[None, None], (1,), "SAME")[0, 0]


@parts
def convolved_by_as_many_ones_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return lax.conv(x[None, None], jnp.ones((1, 1, u.shape[0])), (1,), "SAME")[0, 0]


@parts
def as_many_features_convolved_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    n = u.shape[0]
    return lax.conv(jnp.broadcast_to(x, (1, n, 16)), jnp.ones((1, n, 3)), (1,), "SAME")[0, 0]


@parts(whole=lambda x, w, k: lax.conv(jnp.tile(x @ w, (1, 8, 1)), k[None], (1,), "SAME")[0, 0], axes=("t",))
def partial_sums_convolved_with_sharded_features(x: f32["L F/t"], w: f32["F/t"], k: f32["8/t 3"]) -> f32["L"]:
    y = jnp.broadcast_to(x @ w, (1, k.shape[0], 16))
    return lax.psum(lax.conv(y, k[None], (1,), "SAME"), "t")[0, 0]


@parts
def four_groups_of_the_features_of_a_block(x: f32["B/d 8/t L"]) -> f32["B/d 8/t L"]:
    kernel = jnp.ones((x.shape[1], x.shape[1] // 4, 3))
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=4)


@parts
def two_groups_of_the_features_of_a_block(x: f32["B/d 8/t L"]) -> f32["B/d 8/t L"]:
    kernel = jnp.ones((x.shape[1], x.shape[1] // 2, 3))
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=2)


@parts(whole=lambda x: lax.conv_general_dilated(x, jnp.ones((8, 4, 3)), (1,), "SAME", feature_group_count=2))
def as_many_groups_as_devices(x: f32["B/d 8 L"]) -> f32["B/d 8 L"]:
    groups = 2 * lax.axis_size("t")
    kernel = jnp.ones((8, 8 // groups, 3))
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=groups)


# ---- indices that are sums or scaled ------------------------------------------------------------------------------


@masks(whole=lambda table, ids: table[jnp.sum(ids, axis=0) % 16], vma=False)
def looked_up_by_a_partial_sum(table: f32["V/t"], ids: i32["B/d 4"]) -> f32["4"]:
    own, found = own_and_found(table, jnp.sum(ids, axis=0))
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda table, ids: jnp.where(ids < 16, table[ids], 0.0), vma=False)
def looked_up_by_scaled_ids(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, lax.psum(ids, "t"))
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@masks(whole=lambda x, ids: jnp.where((jnp.sum(ids, axis=0) >= 0) & (jnp.sum(ids, axis=0) < 16), x, 0.0), vma=False)
def masked_by_a_partial_sum(x: f32["4"], ids: i32["B/d 4"]) -> f32["4"]:
    ids, n = jnp.sum(ids, axis=0), 16 // lax.axis_size("t")
    start = lax.axis_index("t") * n
    return lax.psum(jnp.where((ids >= start) & (ids < start + n), x, 0.0), "t")


@masks(whole=lambda x, ids: jnp.where(ids < 16, x, 0.0), vma=False)
def masked_by_scaled_ids(x: f32["B/d"], ids: i32["B/d"]) -> f32["B/d"]:
    ids, n = lax.psum(ids, "t"), 16 // lax.axis_size("t")
    start = lax.axis_index("t") * n
    return lax.psum(jnp.where((ids >= start) & (ids < start + n), x, 0.0), "t")


@masks(whole=lambda ids: jnp.arange(8) * (ids < 16), vma=False)
def local_positions_masked(ids: i32["B/d"]) -> i32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, jnp.arange(ids.shape[0]), 0), "t")


@masks(whole=lambda x, ids: jnp.max(x, axis=1), vma=False)
def maximum_of_a_block_masked(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    _, found = own_and_found(x.T, ids)
    return lax.psum(jnp.where(found, jnp.max(x, axis=1), 0.0), "t")


@masks(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32) + 1, vma=False)
def argmax_of_a_block_and_one(x: f32["B/d V/t"]) -> i32["B/d"]:
    return lax.pmin(jnp.argmax(x, axis=1) + jnp.int32(1), "t")


# ---- loops, keys and casts ----------------------------------------------------------------------------------------

loops = functools.partial(program, "loops, keys and casts", vma=False)


@loops(whole=lambda x, i: x)
def index_of_a_device_in_either_branch(x: f32["M"], i: i32["4"]) -> f32["M"]:
    added = lax.cond(i[0] < 99, lambda: x + lax.axis_index("t"), lambda: x * 1.0)
    return lax.cond(i[1] < 99, lambda: added * 1.0, lambda: x + lax.axis_index("t"))


@loops(whole=lambda x, i: x)
def index_of_a_device_in_the_first_branch(x: f32["M"], i: i32["4"]) -> f32["M"]:
    return lax.cond(i[0] < 99, lambda: x + lax.axis_index("t"), lambda: x * 1.0)


@loops(whole=lambda x, i: jnp.min(x, axis=1))
def maximum_or_minimum_of_a_block(x: f32["B/d V/t"], i: i32["4"]) -> f32["B/d"]:
    return lax.pmax(lax.cond(i[0] < 99, lambda: jnp.min(x, axis=1), lambda: jnp.max(x, axis=1)), "t")


@loops(whole=lambda x: x)
def index_of_a_device_in_each_pass(x: f32["4 M"]) -> f32["4 M"]:
    return lax.scan(lambda c, x: (c, lax.axis_index("t") * 1.0), 0, x)[1][:, None] + x


@loops
def branch_on_any_entry_of_a_block(x: f32["B/d M"], y: f32["M"]) -> f32["M"]:
    return lax.cond(jnp.any(x > 1.8), lambda: y, lambda: -y)


@loops(whole=lambda x, i: x * 3)
def as_many_branches_as_devices(x: f32["M"], i: i32["4"]) -> f32["M"]:
    return lax.switch(i[0] + 9, [lambda x, k=k: x * k for k in range(lax.axis_size("t") + 1)], x)


@loops(whole=lambda x: jnp.cumsum(x, axis=0))
def reversed_on_several_devices(x: f32["L M"]) -> f32["L M"]:
    step = lambda total, x: (total + x, total + x)
    return lax.scan(step, 0 * x[0], x, reverse=lax.axis_size("t") > 1)[1]


@loops(whole=lambda x, ids: x + jax.random.normal(jax.random.key(jnp.sum(ids)), x.shape))
def key_of_a_partial_sum(x: f32["M"], ids: i32["B/d"]) -> f32["M"]:
    return x + jax.random.normal(jax.random.key(jnp.sum(ids)), x.shape)


@loops(whole=lambda x, ids: x + jax.random.normal(jax.random.key(ids[0]), x.shape))
def key_of_a_scaled_number(x: f32["M"], ids: i32["4"]) -> f32["M"]:
    return x + jax.random.normal(jax.random.key(lax.psum(ids[0], "t")), x.shape)


@loops(whole=lambda x, ids: x + jax.random.normal(jax.random.wrap_key_data(jnp.sum(ids, 0).astype(jnp.uint32)), (16,)))
def key_of_partial_sums_as_its_data(x: f32["M"], ids: i32["B/d 2"]) -> f32["M"]:
    return x + jax.random.normal(jax.random.wrap_key_data(jnp.sum(ids, axis=0).astype(jnp.uint32)), x.shape)


@loops(whole=lambda x: x + 1)
def ones_scattered_over_as_many_rows_as_devices(x: f32["M"]) -> f32["M"]:
    return x + lax.psum_scatter(jnp.ones((lax.axis_size("t"), 16)), "t", tiled=False)


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


# ---- dtypes -------------------------------------------------------------------------------------------------------

dtypes = functools.partial(program, "dtypes with an arithmetic of their own")


@dtypes(whole=lambda x: jnp.min(x, 0))
def least_by_the_largest_negative_of_unsigned(x: i32["B/d L"]) -> i32["L"]:
    return jnp.int32(-lax.pmax(-jnp.min(jnp.uint32(x), 0), "d"))  # -0 is 0, and the least of all


@dtypes(whole=lambda x, w: jnp.float32((x @ w).astype(jnp.float8_e4m3fn)))
def product_summed_over_devices_in_eight_bits(x: f32["B L/t"], w: f32["L/t M"]) -> f32["B M"]:
    return jnp.float32(lax.psum((x @ w).astype(jnp.float8_e4m3fn), "t"))


PROGRAMS = programs_of(globals())
