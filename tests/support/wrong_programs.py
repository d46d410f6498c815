"""Wrong per-device programs, each of a reason of its own: it computes something else on several devices than on one.

Those that differ from a right program in one place alone are in mutated_programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.shardtypes import f32, i32
from tests.support.right_programs import key, offset, ring, scattered
from tests.support.running import program, programs_of, row


@program
def softmax_over_vocabulary(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    return jax.nn.softmax(x, axis=-1)


@program
def cross_entropy_with_local_logsumexp(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    hit = jax.nn.one_hot(ids - lax.axis_index("t") * x.shape[1], x.shape[1])
    return lax.pmean(jax.nn.logsumexp(x, axis=-1), "t") - lax.psum(jnp.sum(hit * x, axis=-1), "t")


@program
def softmax_with_own_maxima_squared(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    own = jnp.max(x, axis=-1, keepdims=True)
    e = jnp.exp(x - own) * jnp.exp(2 * (own - lax.pmax(own, "t")))
    return e / lax.psum(jnp.sum(e, axis=-1, keepdims=True), "t")


@program
def own_maxima_subtracted_from_pairs_of_rows(x: f32["B V/t"]) -> f32["1 2 A V/t"]:
    return (x - jnp.max(x, axis=-1, keepdims=True)).reshape(2, -1, x.shape[1])[None]


@program
def own_maxima_subtracted_in_each_turn(x: f32["B/d V/t"]) -> f32["1 3 B/d V/t"]:
    return lax.scan(lambda _, k: (None, k * 0 + x - jnp.max(x, axis=-1, keepdims=True)), None, jnp.ones(3))[1][None]


@program
def own_maxima_subtracted_and_summed(x: f32["B/d V/t"]) -> f32["B/d"]:
    own = jnp.max(x, axis=-1)
    return lax.psum(jnp.sum(x - own[:, None], axis=-1) + own, "t")


@program
def thirds_by_strides_that_blocks_do_not_have(lp: f32["B/d"]) -> f32[""]:
    return lax.psum(jnp.sum(jnp.tanh(lp[0::3])), "d")


@program
def pairs_from_the_third_row(lp: f32["B/d"]) -> f32[""]:
    return lax.psum(jnp.sum(jnp.tanh(lp[2::2])), "d")


@program
def pairs_of_positions_by_strides_and_of_all(x: f32["B L/t"]) -> f32["B L/t"]:
    return jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)


@program
def square_block_transposed(w: f32["M/d N/t"]) -> f32["M/d N/t"]:
    return w.T


@program
def fused_gate_and_up_split(x: f32["B/d F/t"]) -> f32["B/d M/t"]:
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


@program
def mean_divided_by_local_rows(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(jnp.sum(x, axis=0), "d") / x.shape[0]


@program
def sinusoidal_positions(x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    return x + jnp.sin(jnp.arange(x.shape[1])[:, None] / 10.0 ** jnp.linspace(0, 1, x.shape[2]))


@program
def dropout_with_one_key(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    return jnp.where(jax.random.bernoulli(k, 0.5, x.shape), 2 * x, 0.0)


@program
def stochastic_depth_by_local_row(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    kept = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(k, row)))(jnp.arange(x.shape[0]))
    return x * kept[:, None]


@program
def psum_over_the_batch_axis_too(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(x @ w, ("d", "t"))


@program
def activation_before_the_psum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(jax.nn.relu(x @ w), "t")


@program
def bias_added_before_the_psum(x: f32["B/d F/t"], w: f32["F/t M"], b: f32["M"]) -> f32["B/d M"]:
    return lax.psum(x @ w + b, "t")


@program
def gather_on_the_wrong_dim(x: f32["B M/t"]) -> f32["B M"]:
    return lax.all_gather(jnp.sin(x), "t", axis=0, tiled=True, to="invarying")


@program
def scatter_without_a_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M/t"]:
    y, n = x @ w, w.shape[1] // lax.axis_size("t")
    return lax.dynamic_slice_in_dim(y, lax.axis_index("t") * n, n, axis=1)


@program(vma=False, axes=("t",))
def sum_over_groups_of_devices(x: f32["B L/t"]) -> f32["B"]:
    n = lax.axis_size("t")
    return lax.psum(jnp.sum(x, axis=1), "t", axis_index_groups=[[i] for i in range(n)])


def mean_square(w, x):
    return jnp.mean(jnp.square(x @ w))


def sum_square(w, x):
    return jnp.sum(jnp.square(x @ w))


@jax.custom_vjp
def gathered_without_a_sum(w):
    return lax.all_gather(w, "d", tiled=True)


def own_block(_, g):
    n = g.shape[0] // lax.axis_size("d")
    return (lax.dynamic_slice_in_dim(g, lax.axis_index("d") * n, n),)


gathered_without_a_sum.defvjp(lambda w: (gathered_without_a_sum(w), None), own_block)


def contrastive(a, b):
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(a @ b.T)))


@program
def negatives_gathered_without_gradient(a: f32["B/d M"], b: f32["B/d M"]) -> f32["B/d M"]:
    start = lax.axis_index("d") * a.shape[0]

    def loss(b):
        others = lax.stop_gradient(lax.all_gather(b, "d", tiled=True))
        logits = a @ lax.dynamic_update_slice_in_dim(others, b, start, axis=0).T
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), start + jnp.arange(len(b))[:, None], 1))

    return jax.grad(loss)(b)


@program
def replicated_value_returned_as_sharded(x: f32["B M"]) -> f32["B M/t"]:
    return x + 1


@program
def slice_of_a_gathered_weight(w: f32["M/d N"]) -> f32["R/d N"]:
    whole = lax.all_gather(w, "d", tiled=True)
    return whole[: w.shape[0] // 2]


@program
def early_exit_when_local_rows_are_sure(x: f32["B/d M"]) -> f32["B/d M"]:
    def unsure(state):
        return (state[0] < 9) & (jnp.max(state[1]) < 4.0)

    def step(state):
        return (state[0] + 1, 1.2 * state[1])

    return lax.while_loop(unsure, step, (0, x))[1]


@program(hangs=True)
def collective_beneath_a_local_branch(x: f32["B/d M"]) -> f32["M"]:
    def total(x):
        return lax.psum(jnp.sum(x, axis=0), "d")

    return lax.cond(jnp.sum(x) > 0, total, lambda x: jnp.zeros(x.shape[1]), x)


@program(hangs=True)
def exchange_on_the_first_device_alone(x: f32["B/d M"]) -> f32["B/d M"]:
    def exchange(x):
        return lax.ppermute(x, "d", [(0, 1), (1, 0)])

    return lax.cond(lax.axis_index("d") == 0, exchange, lambda x: x, x)


@program(hangs=True)
def gather_in_one_branch_of_a_switch(x: f32["B/d M"]) -> f32["B/d M"]:
    def gathered(x):
        return x + lax.all_gather(x, "d", tiled=True).mean(axis=0)

    return lax.switch(jnp.argmax(x[0]) % 2, [lambda x: x, gathered], x)


@program(hangs=True)
def predicate_with_a_collective_of_a_local_loop(x: f32["B/d M"]) -> f32["B/d M"]:
    def running(x):
        return (lax.pmax(jnp.max(x), "t") > 1.0) & (jnp.max(x) > 1.0)

    return lax.while_loop(running, lambda x: 0.5 * x, x)


@program
def argmax_without_offset(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    return lax.pmax(jnp.where(best == lax.pmax(best, "t"), jnp.argmax(x, axis=1).astype(jnp.int32), 0), "t")


@program
def embedding_shifted_in_the_wrong_order_of_axes(table: f32["V/t/d M"], ids: i32["B"]) -> f32["B M"]:
    block = lax.axis_index("d") * lax.axis_size("t") + lax.axis_index("t")
    hit = jax.nn.one_hot(ids - block * table.shape[0], table.shape[0])
    return lax.psum(hit @ table, ("d", "t"))


def attend(q, k, v, mask=True):
    return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v


@program(axes=("d", "x"))
def ring_attention_without_rescaling(q: f32["B/d L/x D"], k: f32["B/d S/x D"], v: f32["B/d S/x D"]) -> f32["B/d L/x D"]:
    total = 0.0
    for _ in range(lax.axis_size("x")):
        total = total + attend(q, k, v)
        k, v = lax.ppermute((k, v), "x", ring("x"))
    return total / lax.axis_size("x")


@program
def query_heads_paired_with_keys_of_all_heads(q: f32["B/d L T/t D"], k: f32["B/d S K D"]) -> f32["B/d T/t L S"]:
    n = q.shape[2] // 2
    return jnp.einsum("blkd,bskd->bkls", q, jnp.repeat(k[:, :, :n], 2, axis=2))


@program(axes=("t",))
def outer_product_summed_over_one_axis(x: f32["L/t"], y: f32["S/t"]) -> f32[""]:
    shape = (x.shape[0], y.shape[0])
    return lax.psum(jnp.tensordot(jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(y, shape), 2), "t")


TABLES = {n: np.linspace(0.0, n, 16, dtype=np.float32) for n in (1, 2, 4)}


def by_rbg(row):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0, impl="rbg"), row))


KEYS = [jax.random.key(i) for i in range(5)]


def own_and_found(table, ids):
    """Ids from the start of this device's block of the table, and which of them are in it."""
    own = ids - lax.axis_index("t") * table.shape[0]
    return own, (own >= 0) & (own < table.shape[0])


@program
def masked_by_other_ids(table: f32["V/t M"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d M"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    return lax.psum(jnp.where(found[:, None], jnp.take(table, own, axis=0, mode="clip"), 0.0), "t")


@program(whole=lambda table, ids: table[ids])
def wrapped_where_it_is_in_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    wrapped = jnp.where(own >= 0, own + 1, own)
    return lax.psum(jnp.where(found, jnp.take(table, wrapped, mode="clip"), 0.0), "t")


@program
def index_replaced_where_it_is_in_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, jnp.take(table, jnp.where(found, 0, own), mode="clip"), 0.0), "t")


@program
def masked_at_one_end_alone(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    return lax.psum(jnp.where(own >= 0, jnp.take(table, own, mode="clip"), 0.0), "t")


@program
def masked_by_either_end(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    found = (own >= 0) | (own < table.shape[0])
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@program
def masked_by_ends_of_two_indices(table: f32["V/t"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d"]:
    own, _ = own_and_found(table, ids)
    other, _ = own_and_found(table, others)
    found = (own >= 0) & (other < table.shape[0])
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@program
def masked_by_ones(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 1.0), "t")


@program
def partial_sum_masked_over_its_own_axis(x: f32["B/d F/t"], w: f32["F/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, x @ w, 0.0), "t")


@program
def updates_masked_by_other_ids(table: f32["V/t"], ids: i32["B/d"], others: i32["B/d"], g: f32["B/d"]) -> f32["V/t"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    own = jnp.clip(own, 0, table.shape[0] - 1)
    return lax.psum(jnp.zeros_like(table).at[own].add(jnp.where(found, g, 0.0)), "d")


@program
def entries_set_by_shifted_ids(table: f32["V/t"], ids: i32["4"], g: f32["4"]) -> f32["V/t"]:
    own, found = own_and_found(table, ids)
    return table.at[jnp.clip(own, 0, table.shape[0] - 1)].set(jnp.where(found, g, 0.0))


@program(vma=False)
def branch_on_who_has_the_maximum(x: f32["B V/t"]) -> f32["V/t"]:
    best = jnp.max(x[0])
    return lax.cond(best == lax.pmax(best, "t"), lambda x: x, lambda x: 0 * x, x[0])


@program
def start_of_a_block_clipped(table: f32["L M"], start: f32["L/t"]) -> f32["L/t M"]:
    n = start.shape[0]
    return lax.dynamic_slice_in_dim(table, jnp.minimum(lax.axis_index("t") * n, n // 2), n)


@program
def entries_added_to_the_first_row_of_each_block(x: f32["B/d M"], ids: i32["4"]) -> f32["B/d M"]:
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1,))
    return lax.scatter_add(x, ids[:, None], jnp.ones(4), numbers)


@program(axes=("d",), vma=False)
def first_of_one_row_each(x: f32["2/d M"], ids: i32["4"]) -> f32["4"]:
    numbers = lax.GatherDimensionNumbers((), (0, 1), (1,))
    return lax.gather(x, ids[:, None], numbers, (1, 1))


@program
def entries_changed_by_a_function_of_the_mesh(x: f32["M"]) -> f32["M"]:
    n = float(lax.axis_size("t"))
    return x.at[jnp.array([1, 3])].apply(lambda v: v * n)


@program
def scaled_entries_multiplied_by_scaled_ones(x: f32["M"], v: f32["M"]) -> f32["M"]:
    x, v = lax.psum(x, "t"), lax.psum(v, "t")
    return x.at[jnp.arange(0, 16, 2)].multiply(v[:8]) / lax.axis_size("t")


@program
def length_of_a_block_as_a_difference(x: f32["L/t"]) -> f32["L/t"]:
    start = offset("t", x.shape[0])
    end = start + x.shape[0]
    return x / (end - start)


@program
def local_positions_as_vectors(x: f32["L/t"]) -> i32["L/t 2"]:
    n = jnp.arange(x.shape[0])
    return jnp.stack([n, n], -1)


@program
def argmax_with_a_small_index_elsewhere(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    own = offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmax(best, "t"), own, 2), "t")


@program(whole=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32))
def argmax_where_its_index_is_the_maximum(x: i32["B/d V/t"]) -> i32["B/d"]:
    index = jnp.argmax(x, axis=-1)
    return lax.pmin(
        jnp.where(index == lax.pmax(jnp.max(x, axis=-1), "t"), offset("t", x.shape[-1]) + index, 2**30), "t"
    )


@program(vma=False)
def diagonal_taken_for_uniform(x: f32["L S"]) -> f32["L/t"]:
    rows = jnp.arange(16, dtype=jnp.uint32)
    return lax.slice_in_dim(x[rows, rows], 0, 16 // lax.axis_size("t"))


@program
def maximum_of_a_number_of_another_sign(x: f32["B/d"]) -> f32[""]:
    sign = 3.0 if x.shape[0] == 8 else -3.0
    return lax.pmax(jnp.max(x * sign), "d") / sign * 3.0


def over_rows(add, start, x):
    """The carry of a loop over rows."""
    return lax.scan(lambda total, row: (add(total, row), None), lax.pcast(start, "d", to="varying"), x)[0]


@program
def dropped_lookups_filled_with_ones(table: f32["V/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    own, found = own_and_found(table, ids)
    own = jnp.where(found, own, table.shape[0])
    return lax.psum(table.at[own].get(mode="fill", fill_value=1.0), "t")


@program(vma=False)
def looked_up_in_two_dims_and_masked_in_one(table: f32["V/t M/d"], ids: i32["4"]) -> f32["4"]:
    own, found = own_and_found(table, ids)
    other = ids - lax.axis_index("d") * table.shape[1]
    return lax.psum(jnp.where(found, table.at[own, other].get(mode="clip"), 0.0), ("t", "d"))


@program(vma=False)
def entries_not_masked_scattered(table: f32["V/t"], ids: i32["4"]) -> f32["V"]:
    own, _ = own_and_found(table, ids)
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.take(table, own, mode="clip")), "t")


@program(axes=("t",), vma=False)
def repeated_partial_sum_contracted(x: f32["4 F/t"], w: f32["F/t"], v: f32["L/t M"]) -> f32["M"]:
    y = jnp.broadcast_to((x @ w)[:, None], (4, v.shape[0]))
    return lax.psum(jnp.tensordot(y, v, 1), "t").sum(axis=0)


@program(vma=False)
def as_many_features_convolved_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    n = u.shape[0]
    return lax.conv(jnp.broadcast_to(x, (1, n, 16)), jnp.ones((1, n, 3)), (1,), "SAME")[0, 0]


@program(axes=("t",), vma=False)
def partial_sums_convolved_with_sharded_features(x: f32["L F/t"], w: f32["F/t"], k: f32["8/t 3"]) -> f32["L"]:
    y = jnp.broadcast_to(x @ w, (1, k.shape[0], 16))
    return lax.psum(lax.conv(y, k[None], (1,), "SAME"), "t")[0, 0]


@program(vma=False)
def four_groups_of_the_features_of_a_block(x: f32["B/d 8/t L"]) -> f32["B/d 8/t L"]:
    kernel = jnp.ones((x.shape[1], x.shape[1] // 4, 3))
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=4)


@program(vma=False)
def two_groups_of_the_features_of_a_block(x: f32["B/d 8/t L"]) -> f32["B/d 8/t L"]:
    kernel = jnp.ones((x.shape[1], x.shape[1] // 2, 3))
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=2)


@program(vma=False)
def looked_up_by_a_partial_sum(table: f32["V/t"], ids: i32["B/d 4"]) -> f32["4"]:
    own, found = own_and_found(table, jnp.sum(ids, axis=0))
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@program(vma=False)
def looked_up_by_scaled_ids(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, lax.psum(ids, "t"))
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@program(vma=False)
def masked_by_a_partial_sum(x: f32["4"], ids: i32["B/d 4"]) -> f32["4"]:
    ids, n = jnp.sum(ids, axis=0), 16 // lax.axis_size("t")
    start = lax.axis_index("t") * n
    return lax.psum(jnp.where((ids >= start) & (ids < start + n), x, 0.0), "t")


@program(vma=False)
def masked_by_scaled_ids(x: f32["B/d"], ids: i32["B/d"]) -> f32["B/d"]:
    ids, n = lax.psum(ids, "t"), 16 // lax.axis_size("t")
    start = lax.axis_index("t") * n
    return lax.psum(jnp.where((ids >= start) & (ids < start + n), x, 0.0), "t")


@program(vma=False)
def local_positions_masked(ids: i32["B/d"]) -> i32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, jnp.arange(ids.shape[0]), 0), "t")


@program(vma=False)
def maximum_of_a_block_masked(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    _, found = own_and_found(x.T, ids)
    return lax.psum(jnp.where(found, jnp.max(x, axis=1), 0.0), "t")


@program(vma=False)
def index_of_a_device_in_either_branch(x: f32["M"], i: i32["4"]) -> f32["M"]:
    added = lax.cond(i[0] < 99, lambda: x + lax.axis_index("t"), lambda: x * 1.0)
    return lax.cond(i[1] < 99, lambda: added * 1.0, lambda: x + lax.axis_index("t"))


@program(vma=False)
def reversed_on_several_devices(x: f32["L M"]) -> f32["L M"]:
    def step(total, x):
        return (total + x, total + x)

    return lax.scan(step, 0 * x[0], x, reverse=lax.axis_size("t") > 1)[1]


@jax.custom_batching.custom_vmap
def shifted(x):
    return x + lax.axis_index("t")


shifted.def_vmap(lambda size, batched, x: (shifted(x), batched[0]))


@program(vma=False)
def array_changed_below_a_local_condition(x: f32["B/d M"]) -> f32["M"]:
    r = jax.new_ref(jnp.zeros(16))

    def write():
        r[...] = jnp.ones(16)

    lax.cond(jnp.sum(x) > 0, write, lambda: None)
    return r[...]


@program(vma=False)
def array_added_to_on_each_device(x: f32["M"]) -> f32["M"]:
    r = jax.new_ref(x)

    def write(i, c):
        r[...] = r[...] + 1
        return c

    lax.fori_loop(0, lax.axis_size("t"), write, 0)
    return r[...]


@program
def least_by_the_largest_negative_of_unsigned(x: i32["B/d L"]) -> i32["L"]:
    return jnp.int32(-lax.pmax(-jnp.min(jnp.uint32(x), 0), "d"))  # -0 is 0, and the least of all


@program
def product_summed_over_devices_in_eight_bits(x: f32["B L/t"], w: f32["L/t M"]) -> f32["B M"]:
    return jnp.float32(lax.psum((x @ w).astype(jnp.float8_e4m3fn), "t"))


@program
def sorted_tokens_meet_unsorted_gates(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return (x[order] * scores[:, None])[jnp.argsort(order)]


@program
def difference_to_the_token_before_in_order(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    y = x[order]
    return (y - jnp.roll(y, 1, axis=0))[jnp.argsort(order)]


@program
def prefix_sums_in_the_order_of_experts(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return jnp.cumsum(x[order], axis=0)[jnp.argsort(order)]


@program
def activation_after_the_mask(ids: i32["B/d L"], table: f32["V/t M"]) -> f32["B/d L M"]:
    local = ids - lax.axis_index("t") * table.shape[0]
    ok = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return lax.psum(jax.nn.sigmoid(jnp.where(ok[..., None], rows, 0.0)), "t")


@program(vma=False)
def ring_with_a_turn_too_many(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    for _ in range(lax.axis_size("t")):
        part = lax.ppermute(part, "t", ring("t"))
        total += part
    return total


@program
def matmul_scattered_to_the_next_device(x: f32["B M/t"], w: f32["M/t F"]) -> f32["B/t F"]:
    return scattered(x, w, first=0)


@program
def label_outside_of_either_end(logits: f32["B/d V/t"], labels: i32["B/d"]) -> f32["B/d"]:
    n = logits.shape[1]
    first = lax.axis_index("t") * n
    outside = (labels < first) | (labels > first + n)
    found = jnp.take_along_axis(logits, jnp.where(outside, 0, labels - first)[:, None], axis=1)[:, 0]
    return lax.psum(jnp.where(outside, 0.0, found), "t")


@program(vma=False)
def ring_that_squares_each_part(x: f32["B/t M"]) -> f32["M"]:
    part = total = x.sum(axis=0)
    total = part**2
    for _ in range(lax.axis_size("t") - 1):
        part = lax.ppermute(part, "t", ring("t"))
        total += part**2
    return total


@program
def sums_placed_over_each_other(x: f32["B/t M"], w: f32["M F/t"]) -> f32["B F/t"]:
    n = lax.axis_size("t")
    y = jnp.zeros((n * x.shape[0], w.shape[1]))
    for _ in range(n):
        y = lax.dynamic_update_slice_in_dim(y, (x @ w).sum(axis=0)[None], 0, axis=0)
        x = lax.ppermute(x, "t", ring("t"))
    return y


@program
def nearest_keys_added(q: f32["L/t D"], k: f32["S/t D"]) -> f32["L/t"]:
    n, best = lax.axis_size("t"), jnp.max(q @ k.T, axis=1)
    for _ in range(n - 1):
        k = lax.ppermute(k, "t", ring("t"))
        best = best + jnp.max(q @ k.T, axis=1)
    return best


def decoded(how):
    """Attention of one query to keys sharded over t; `how` combines what the blocks of keys give.

    It gets the scores, this device's largest, the exponentials of their differences, their sum, and a function that
    multiplies weights with the values.
    """

    def body(q, k, v):
        s = jnp.einsum("bkd,bskd->bks", q, k)
        own = jnp.max(s, axis=-1, keepdims=True)
        e = jnp.exp(s - own)
        return how(s, own, e, jnp.sum(e, axis=-1, keepdims=True), lambda e: jnp.einsum("bks,bskd->bkd", e, v))

    return "B/d K D, B/d S/t K D, B/d S/t K D -> B/d K D", body


def of_all(y):
    return lax.psum(y, "t")


def scale(own, power=1):
    return jnp.exp(power * (own - lax.pmax(own, "t")))


def written(x, own, outside, mode="drop"):
    """Zeros like x with 1 at the entries `own`, or at `outside` for those that x lacks."""
    own = jnp.where((own >= 0) & (own < x.shape[1]), own, outside)
    return jnp.zeros(x.shape).at[jnp.arange(len(x))[:, None], own].set(1.0, mode=mode)


def of_padded(x):
    """All positions of L, with three zeros before them."""
    return jnp.pad(lax.all_gather(x, "t", axis=1, tiled=True), ((0, 0), (3, 0)))


ROWS = {  # name: types of arguments and result, of f32 where nothing is said; the body
    "decoding by logarithms of sums times a local size": decoded(
        lambda s, own, e, total, of: (
            of_all(of(e / total) * jnp.exp(own + jnp.log(total * s.shape[-1]) - lax.pmax(own, "t")))
            / of_all(total * scale(own))
        )
    ),
    "decoding by logarithms of sums with factors in 8 bits": decoded(
        lambda s, own, e, total, of: (
            of_all(
                of(e / total)
                * jnp.exp(own + jnp.log(total) - lax.pmax(own, "t")).astype(jnp.float8_e5m2).astype(s.dtype)
            )
            / of_all(total * scale(own))
        )
    ),
    "broadcast of what is in a block": (
        "M/t, i32 M/t -> M/t",
        lambda x, ids: lax.psum(
            jnp.where((lax.axis_index("d") == 0) & (ids - lax.axis_index("t") * len(x) >= 0), x, 0), "d"
        ),
    ),
    # With each index at the end of four entries, so that windows of two end in the next block.
    "windows written that end after a block": (
        "V/t, i32 K, K 2 -> V/t",
        lambda x, ids, updates: (
            x
            + lax.scatter(
                jnp.zeros_like(x),
                jnp.where(
                    ((ids | 3) - lax.axis_index("t") * len(x) >= 0)
                    & ((ids | 3) - lax.axis_index("t") * len(x) < len(x)),
                    (ids | 3) - lax.axis_index("t") * len(x),
                    len(x),
                )[:, None],
                updates,
                lax.ScatterDimensionNumbers((1,), (), (0,)),
                mode="drop",
            )
        ),
    ),
    "matmul of bools": (
        "B/d F/t, F/t -> B/d",
        lambda x, y: lax.psum((x > 0).astype(bool) @ (y > 0), "t").astype(x.dtype),
    ),
    "broadcast of a block's maximum": (
        "B/d M/t -> B/d",
        lambda x: lax.psum(jnp.where(lax.axis_index("t") == 0, x.max(axis=1), 0), "t"),
    ),
    "broadcast of the number of a device of another axis": (
        "B/d M -> B/d M",
        lambda x: x * lax.psum(jnp.where(lax.axis_index("t") == 0, lax.axis_index("d"), 0), "t"),
    ),
    "candidates of other blocks written at the end": (
        "B/d V/t, i32 B/d K -> B/d V/t",
        lambda x, ids: written(x, ids - offset("t", x.shape[1]), x.shape[1] - 1),
    ),
    "candidates of other blocks clipped": (
        "B/d V/t, i32 B/d K -> B/d V/t",
        lambda x, ids: written(x, ids - offset("t", x.shape[1]), x.shape[1], "clip"),
    ),
    "candidates written one entry too early": (
        "B/d V/t, i32 B/d K -> B/d V/t",
        lambda x, ids: written(x, ids - offset("t", x.shape[1]) - lax.axis_index("t"), x.shape[1]),
    ),
    "candidates written by their ids": (
        "B/d V/t, i32 B/d K -> B/d V/t",
        lambda x, ids: written(x, ids, x.shape[1]),
    ),
    "candidates of the next block": (
        "B/d V/t, i32 B/d K -> B/d V/t",
        lambda x, ids: written(x, ids - offset("t", x.shape[1]) - x.shape[1], x.shape[1]),
    ),
    "candidates written into negative entries": (
        "B/d V/t, i32 B/d K -> B/d V/t",
        lambda x, ids: written(x, ids - offset("t", x.shape[1]), -1),
    ),
    "decoding without scaling": decoded(lambda s, own, e, total, of: of_all(of(e)) / of_all(total)),
    "decoding with the sum alone scaled": decoded(
        lambda s, own, e, total, of: of_all(of(e)) / of_all(total * scale(own))
    ),
    "decoding scaled twice": decoded(
        lambda s, own, e, total, of: of_all(of(e) * scale(own, 2)) / of_all(total * scale(own, 2))
    ),
    "decoding scaled by the mean of scores": decoded(
        lambda s, own, e, total, of: (lambda mean: of_all(of(e) * scale(mean)) / of_all(total * scale(mean)))(
            jnp.mean(s, axis=-1, keepdims=True)
        )
    ),
    "decoding scaled by the maximum of another query": decoded(
        lambda s, own, e, total, of: of_all(of(e) * scale(own[:, ::-1])) / of_all(total * scale(own[:, ::-1]))
    ),
    "decoding scaled by the largest of another tensor": decoded(
        lambda s, own, e, total, of: (lambda other: of_all(of(e) * scale(other)) / of_all(total * scale(other)))(
            jnp.max(2 * s, axis=-1, keepdims=True)
        )
    ),
    "decoding scaled by the smallest": decoded(
        lambda s, own, e, total, of: (
            lambda other: (
                of_all(of(e) * jnp.exp(other - lax.pmin(other, "t")))
                / of_all(total * jnp.exp(other - lax.pmin(other, "t")))
            )
        )(jnp.min(s, axis=-1, keepdims=True))
    ),
    "decoding of blocks averaged": decoded(lambda s, own, e, total, of: lax.pmean(of(e) / total, "t")),
    "decoding of blocks weighted by maxima": decoded(
        lambda s, own, e, total, of: of_all(of(e / total) * scale(own)) / of_all(scale(own))
    ),
    "decoding of blocks weighted by sums that are not scaled": decoded(
        lambda s, own, e, total, of: of_all(of(e / total) * total) / of_all(total)
    ),
    "decoding of blocks weighted by the sums of other exponentials": decoded(
        lambda s, own, e, total, of: (lambda share: of_all(of(e / total) * share) / of_all(share))(
            jnp.sum(jnp.exp(0.5 * s - jnp.max(0.5 * s, axis=-1, keepdims=True)), axis=-1, keepdims=True) * scale(own)
        )
    ),
    "decoding of blocks weighted by squares of sums": decoded(
        lambda s, own, e, total, of: (lambda log: of_all(of(e / total) * scale(log, 2)) / of_all(scale(log, 2)))(
            own + jnp.log(total)
        )
    ),
    "decoding of blocks not divided by their sums": decoded(
        lambda s, own, e, total, of: (lambda log: of_all(of(e) * scale(log)) / of_all(scale(log)))(own + jnp.log(total))
    ),
    "decoding less the largest logarithm of sums, not divided": decoded(
        lambda s, own, e, total, of: of_all(of(e / total) * scale(own + jnp.log(total)))
    ),
    "decoding by logarithms of sums without maxima": decoded(
        lambda s, own, e, total, of: (lambda log: of_all(of(e / total) * scale(log)) / of_all(scale(log)))(
            jnp.log(total)
        )
    ),
    "decoding divided by the square of the sums": decoded(
        lambda s, own, e, total, of: (lambda log: of_all(of(e / total) * scale(log)) / of_all(scale(log)) ** 2)(
            own + jnp.log(total)
        )
    ),
    "largest logarithm of sums": decoded(
        lambda s, own, e, total, of: of_all(of(e * scale(own))) * 0 + lax.pmax(own + jnp.log(total), "t")
    ),
    "sum of shares of different queries": decoded(
        lambda s, own, e, total, of: (
            of_all((of(e) * total).sum(axis=1, keepdims=True) * scale(own)[:, :1]) + 0 * of_all(of(e) * scale(own))
        )
    ),
    "convolution over positions past the end": (
        "B/d L/t -> B/d L/t",
        lambda x: lax.dynamic_slice_in_dim(of_padded(x), offset("t", x.shape[1]) + 4, x.shape[1], 1),
    ),
    "convolution from a place that depends on the mesh": (
        "B/d L/t -> B/d L/t",
        lambda x: lax.dynamic_slice_in_dim(of_padded(x), offset("t", x.shape[1]) + 16 // x.shape[1], x.shape[1], 1),
    ),
    "block at every other place": (
        "B/d L/t -> B/d L/t",
        lambda x: lax.dynamic_slice_in_dim(of_padded(x), lax.axis_index("t") * (x.shape[1] - 1) + 1, x.shape[1], 1),
    ),
    "blocks written behind the first entry, not from it on": (
        "B/d L/t -> B/d L",
        lambda x: lax.psum(
            lax.dynamic_update_slice_in_dim(jnp.zeros((x.shape[0], 16)), x, offset("t", x.shape[1]) + 1, 1), "t"
        ),
    ),
    "broadcast from a device that one device lacks": (
        "B/d M -> B/d M",
        lambda x: lax.psum(jnp.where(lax.axis_index("t") == 1, x, 0), "t"),
    ),
    "broadcast from all devices but the first": (
        "B/d M -> B/d M",
        lambda x: lax.psum(jnp.where(lax.axis_index("t") != 0, x, 0), "t"),
    ),
    "broadcast of the first block": (
        "B/d M/t -> B/d M/t",
        lambda x: x + lax.psum(jnp.where(lax.axis_index("t") == 0, x, 0), "t"),
    ),
    "broadcast of one term of a sum": (
        "B/d M/t -> B/d",
        lambda x: lax.psum(jnp.where(lax.axis_index("t") == 0, x.sum(axis=1), 0), "t"),
    ),
    "broadcast from the first devices of either axis": (
        "M -> M",
        lambda x: lax.psum(jnp.where((lax.axis_index("d") == 0) | (lax.axis_index("t") == 0), x, 0), ("d", "t")),
    ),
    "broadcast from the diagonal of devices": (
        "M -> M",
        lambda x: lax.psum(jnp.where(lax.axis_index("d") - lax.axis_index("t") == 0, x, 0), ("d", "t")),
    ),
    "other devices give ones": (
        "B/d M -> B/d M",
        lambda x: lax.psum(jnp.where(lax.axis_index("t") == 0, x, 1), "t"),
    ),
    "number added to what the first device alone has": (
        "B/d M -> B/d M",
        lambda x: lax.psum(jnp.where(lax.axis_index("t") == 0, x, 0) + 1, "t"),
    ),
    "rewards scaled to unit range": (
        "B/d -> B/d",
        lambda rewards: (rewards - rewards.min()) / (rewards.max() - rewards.min()),
    ),
    "channel shuffle by flip": ("B/d M/t -> B/d M/t", lambda x: jnp.flip(x, axis=-1)),
    "image convolution over a sharded width": (
        "B/d 1 H W/t, 1 1 3 3 -> B/d 1 H W/t",
        lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME"),
    ),
    "pairwise kernel over one device alone": (
        "B/d M -> B/d",
        lambda x: jnp.mean(jnp.exp(-jnp.mean((x[:, None] - x[None]) ** 2, axis=-1)), axis=1),
    ),
    "lamb trust ratio of a block": (
        "M/d F/t, M/d F/t -> M/d F/t",
        lambda w, update: w - 0.1 * jnp.linalg.norm(w) / jnp.linalg.norm(update) * update,
    ),
    "clipping by a norm over one axis of two": (
        "M/d F/t -> M/d F/t",
        lambda g: g * jnp.minimum(1.0, lax.rsqrt(lax.psum(jnp.sum(g * g), "d"))),
    ),
    "int8 quantization by local amax": (
        "M/d F/t -> i32 M/d F/t",
        lambda w: jnp.round(w * 127 / jnp.max(jnp.abs(w))).astype(jnp.int32),
    ),
    "perplexity averaged over devices": ("B/d -> f32", lambda losses: lax.pmean(jnp.exp(jnp.mean(losses)), "d")),
    "masked mean averaged over devices": (
        "B/d, bool_ B/d -> f32",
        lambda losses, mask: lax.pmean(jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1), "d"),
    ),
    "contrastive loss with local negatives": (
        "B/d M, B/d M -> f32",
        lambda a, b: lax.pmean(-jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T))), "d"),
    ),
    "maximum averaged over devices": ("B/d M -> f32", lambda x: lax.pmean(jnp.max(x), "d")),
    "residual and skip concatenated": ("B/d M/t, B/d M/t -> B/d F/t", lambda a, b: jnp.concatenate([a, b], axis=-1)),
    "microbatches cut from local rows": ("B/d M -> 2 R/d M", lambda x: x.reshape(2, -1, x.shape[1])),
    "initial weights scaled by local fan in": ("M/d F/t -> M/d F/t", lambda noise: noise / jnp.sqrt(noise.shape[0])),
    "retention decay of local heads": (
        "B/d L K/t -> B/d L K/t",
        lambda x: x * (1 - 2.0 ** (-1 - jnp.arange(x.shape[2]))),
    ),
    "dilated mask": ("B/d L/t -> B/d L/t", lambda x: jnp.where(jnp.arange(x.shape[1]) % 3 == 0, x, 0.0)),
    "diffusion times by split keys": (
        "B/d M, key -> B/d M",
        lambda x, k: x * jax.vmap(jax.random.uniform)(jax.random.split(k, x.shape[0]))[:, None],
    ),
    "pmax of a partial product": ("B/d F/t, F/t M -> B/d M", lambda x, w: lax.pmax(x @ w, "t")),
    "square of a partial sum": ("B/d F/t, F/t M -> B/d M", lambda x, w: lax.psum(jnp.square(x @ w), "t")),
    "blocks exchanged by all to all": (
        "B/d L/t -> B/d L/t",
        lambda x: lax.all_to_all(jnp.cos(x), "t", split_axis=1, concat_axis=1, tiled=True),
    ),
    "block of the first device everywhere": ("B/d M -> B/d M", lambda x: lax.all_gather(x, "d")[0]),
    "gradient of a local mean with gathered weights": (
        "M/d N, B/d M -> M/d N",
        lambda w, x: jax.grad(lambda w: mean_square(lax.all_gather(w, "d", tiled=True), x))(w),
    ),
    "custom gradient of a gather is a slice": (
        "M/d N, B/d M -> M/d N",
        lambda w, x: jax.grad(lambda w: sum_square(gathered_without_a_sum(w), x))(w),
    ),
    "second moment of local gradients": (
        "M N, B/d M -> M N",
        lambda w, x: lax.pmean(jnp.square(jax.grad(mean_square)(lax.pcast(w, "d", to="varying"), x)), "d"),
    ),
    "signs of local gradients averaged": (
        "M N, B/d M -> M N",
        lambda w, x: lax.pmean(jnp.sign(jax.grad(mean_square)(lax.pcast(w, "d", to="varying"), x)), "d"),
    ),
    "loss of the first device alone": (
        "M N, B/d M -> f32",
        lambda w, x: lax.psum(jnp.where(lax.axis_index("d") == 0, sum_square(w, x), 0.0), "d"),
    ),
    "gradient of a penalty on each device": (
        "M N, B/d M -> M N",
        lambda w, x: jax.grad(lambda w: lax.psum(sum_square(w, x) + 3 * jnp.sum(w * w), "d"))(w),
    ),
    "gradient of the log of a local sum": (
        "M N, B/d M -> M N",
        lambda w, x: jax.grad(lambda w: lax.psum(jnp.log(sum_square(w, x)), "d"))(w),
    ),
    "position ids of one block": ("B/d L/t -> i32 L/t", lambda x: jnp.arange(x.shape[1], dtype=jnp.int32)),
    "columns of a replicated weight": (
        "M F, B/d M -> B/d F/t",
        lambda w, x: x @ w[:, : w.shape[1] // lax.axis_size("t")],
    ),
    "branch on the local mean": ("B/d M -> B/d M", lambda x: lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.cos, x)),
    "halving until the local norm is small": (
        "M/d F/t -> M/d F/t",
        lambda g: lax.while_loop(lambda g: jnp.sum(g * g) > 1.0, lambda g: 0.9 * g, g),
    ),
    "as many steps as local tokens": (
        "B/d M, bool_ B/d -> B/d M",
        lambda x, mask: lax.fori_loop(0, jnp.sum(mask), lambda _, x: 0.8 * x, x),
    ),
    "callback that sorts local rows": (
        "B/d M -> B/d M",
        lambda x: jax.pure_callback(
            lambda x: np.asarray(x)[np.argsort(x[:, 0])], jax.ShapeDtypeStruct(x.shape, x.dtype), x
        ),
    ),
    "slice at a global position": ("B/d L/t M -> B/d L/t M", lambda x: x - lax.dynamic_slice_in_dim(x, 5, 1, axis=1)),
    "position overwritten on each device": ("B/d L/t -> B/d L/t", lambda x: x.at[:, 1].set(0.0)),
    "last token zeroed on each device": ("B/d L/t -> B/d L/t", lambda x: x.at[:, -1].set(0.0)),
    "two best experts of each block": (
        "T/d E/t -> T/d E/t",
        lambda p: jnp.where(p >= lax.top_k(p, 2)[0][:, 1:], p, 0.0),
    ),
    "learned positions from the first entry on": (
        "B/d L/t M, L M -> B/d L/t M",
        lambda x, table: x + lax.dynamic_slice_in_dim(table, lax.axis_index("t"), x.shape[1]),
    ),
    "deviation from mean squares of blocks": (
        "B/d M -> M",
        lambda x: jnp.sqrt(lax.pmean(jnp.mean(x * x, axis=0), "d") - lax.pmean(jnp.mean(x, axis=0) ** 2, "d")),
    ),
    "product of a block summed": ("B/d L/t -> B/d", lambda x: lax.psum(jnp.prod(x, axis=1), "t")),
    "hessian of local rows summed": (
        "M, B/d M -> M M",
        lambda w, x: lax.psum(jax.hessian(lambda w: jnp.mean((x @ w) ** 2))(lax.pcast(w, "d", to="varying")), "d"),
    ),
    "system solved block by block": (
        "L/t M, L/t -> L/t",
        lambda a, b: jnp.linalg.solve(a @ a.T + 9 * jnp.eye(a.shape[0]), b),
    ),
    "inverse of each block of rows": ("L/t S -> L/t S", lambda a: jnp.linalg.pinv(a).T),
    "bits shifted by the number of devices": (
        "i32 B/d M -> i32 M",
        lambda x: lax.psum(lax.shift_left(x, jnp.int32(lax.axis_size("d"))).sum(axis=0), "d"),
    ),
    "checksum of a block summed": (
        "i32 B/d M -> i32 M",
        lambda x: lax.psum(lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)), "d"),
    ),
    "bits of a block by their maximum": (
        "i32 B/d L/t -> i32 B/d",
        lambda x: lax.pmax(lax.reduce(x, np.int32(0), lax.bitwise_or, (1,)), "t"),
    ),
    "table made outside for this mesh": ("B/d M -> B/d M", lambda x: x * TABLES[lax.axis_size("t")]),
    "power of a local size": ("B/d -> B/d", lambda x: lax.integer_pow(1 + 0.1 * x, x.shape[0])),
    "sum along another dim for small blocks": (
        "B/d M L -> B/d 16",
        lambda x: jnp.sum(x, axis=1 if x.shape[0] > 4 else 2),
    ),
    "shape of a result of local size": ("B/d -> L/d", lambda x: jnp.ones(16 // 4)),
    "gamma noise with one key": (
        "B/d, key -> B/d",
        lambda x, k: x * jax.random.gamma(lax.pcast(k, "d", to="varying"), jnp.ones_like(x)),
    ),
    "custom reduction of sharded rows": (
        "B/d M -> M",
        lambda x: lax.psum(lax.reduce(x, jnp.float32(0), lambda a, b: a + b + a * b, (0,)), "d"),
    ),
    "approximate best of sharded rows": (
        "B/d M -> 8/d M",
        lambda x: lax.approx_max_k(x, x.shape[0], reduction_dimension=0)[0],
    ),
    "largest product of each row with own rows": (
        "B/d M, T/d M -> B/d",
        lambda x, y: lax.map(lambda row: jnp.max(y @ row), x),
    ),
    "sum of each row with own rows": (
        "B/d M, T/d M -> B/d",
        lambda x, y: lax.map(lambda row: jnp.sum(jnp.exp(y @ row)), x),
    ),
    "start of a sum counted by each device": ("B/d M, M -> M", lambda x, w: lax.psum(over_rows(jnp.add, w, x), "d")),
    "sum of products with own rows": (
        "B/d M, T/d M -> f32",
        lambda x, y: lax.psum(over_rows(lambda total, row: total + jnp.sum(jnp.exp(y @ row)), jnp.zeros(()), x), "d"),
    ),
    "largest of own rows in own columns": (
        "V M/d, i32 T/d, T/d -> V M/d",
        lambda x, ids, y: x.at[ids].max(3 * y[:, None]),
    ),
    "key made outside for this mesh": ("M -> M", lambda x: x + jax.random.normal(KEYS[lax.axis_size("t")], x.shape)),
    "replicated value taken for a partial sum": (
        "M -> M",
        lambda x: lax.psum(lax.pcast(lax.pcast(x, "t", to="varying"), "t", to="unreduced"), "t"),
    ),
    "ranks among a device s own": ("T/d -> i32 T/d", lambda scores: jnp.argsort(jnp.argsort(scores))),
    "largest of own rows in an order of their own": (
        "B/d M, T/d M, i32 B/d -> f32",
        lambda x, y, ids: lax.pmax(jnp.max(lax.map(lambda row: jnp.max(y @ row), x[jnp.argsort(ids)])), "d"),
    ),
    "numbers by the rbg key of each row": (
        "B/d M -> B/d M",
        lambda x: x * jax.vmap(by_rbg)(offset("d", x.shape[0]) + jnp.arange(x.shape[0]))[:, None],
    ),
    "doubled where there are several": ("B/d M/t -> B/d M/t", lambda x: x * 2.0 if lax.axis_size("t") > 1 else x),
}

UNCHECKED = {
    "broadcast from the first devices of one axis to both": (
        "M -> M",
        lambda x: lax.psum(jnp.where(lax.axis_index("d") == 0, x, 0), ("d", "t")),
    ),
    "gather of a weight forgotten": ("B/d M, M/t F -> B/d F", lambda x, w: x[:, : w.shape[0]] @ w),
    "gradient through an unchecked psum": (
        "M N, B/d M -> M N",
        lambda w, x: lax.psum(jax.grad(lambda w: lax.psum(sum_square(w, x), "d"))(w), "d"),
    ),
    "masked loss over the mean of counts": (
        "B/d L/t, bool_ B/d L/t -> f32",
        lambda x, m: lax.pmean(jnp.sum(x * m), ("d", "t")) / lax.pmean(jnp.sum(m), "d"),
    ),
    "first half of each block looked up": ("L/t -> 8/t", lambda x: x[jnp.arange(x.shape[0] // 2)]),
    "part of each block increased": ("B/d L/t -> B/d L/t", lambda x: x.at[:, 1:3].add(1.0)),
    "block added to the first entries": ("L, 8/t -> L", lambda x, u: x.at[: u.shape[0]].add(u)),
    "as many entries increased as a block has": ("L, 8/t -> L", lambda x, u: x.at[: u.shape[0]].add(1.0)),
    "block scattered to local positions": (
        "L/t -> L",
        lambda u: lax.psum(jnp.zeros(16).at[jnp.arange(u.shape[0])].add(u), "t"),
    ),
    "rows of a block counted at one place": (
        "L/t -> 4",
        lambda x: jnp.zeros(4).at[jnp.zeros(x.shape[0], jnp.int32)].add(1.0),
    ),
    "sum of local rows scattered": (
        "B/d, i32 B/d -> V",
        lambda x, ids: lax.psum(jnp.zeros(16).at[ids].add(jnp.sum(x)), "d"),
    ),
    "part written with the index of a device": (
        "L -> L",
        lambda x: lax.dynamic_update_slice_in_dim(x, jnp.ones(2) + lax.axis_index("t"), jnp.int32(3), axis=0),
    ),
    "part written at a local size": (
        "L, L/t -> L",
        lambda x, u: lax.dynamic_update_slice_in_dim(x, x[:2], u.shape[0] - jnp.int32(1), axis=0),
    ),
    "as many ones written as a block has": (
        "L, 8/t -> L",
        lambda x, u: lax.dynamic_update_slice_in_dim(x, jnp.ones(u.shape[0]), jnp.int32(3), axis=0),
    ),
    "bits of a partial sum": (
        "B/d F/t, F/t -> i32 B/d",
        lambda x, w: lax.psum(lax.bitcast_convert_type(x @ w, jnp.int32), "t"),
    ),
    "bits of a scaled value": ("M -> i32 M", lambda x: lax.bitcast_convert_type(lax.psum(x, "t"), jnp.int32) >> 20),
    "reshaped across the ends of blocks": ("8/d 12/t -> 24/d 4", lambda x: x.reshape(-1, 4)),
    "joined with as many ones as a block has": (
        "L, 8/t -> f32",
        lambda x, u: jnp.mean(jnp.concatenate([jnp.ones(u.shape[0]), x])),
    ),
    "padded by the size of a block": ("L, 8/t -> f32", lambda x, u: jnp.var(jnp.pad(x, (0, u.shape[0])))),
    "power by a product of repeated numbers": ("L/t -> L/t", lambda x: x * jnp.prod(jnp.full((x.shape[0],), 1.5))),
    "argmax of a flattened block": ("B/d L/t -> i32", lambda x: jnp.argmax(x.reshape(-1)).astype(jnp.int32)),
    "product of scaled numbers scaled back": ("L -> L", lambda x: jnp.cumprod(lax.psum(x, "t")) / lax.axis_size("t")),
    "convolved by maxima of a block": (
        "L, B/d 3 -> L",
        lambda x, k: lax.conv(x[None, None], jnp.max(k, axis=0)[None, None], (1,), "SAME")[0, 0],
    ),
    "convolved by as many ones as a block has": (
        "L, 8/t -> L",
        lambda x, u: lax.conv(x[None, None], jnp.ones((1, 1, u.shape[0])), (1,), "SAME")[0, 0],
    ),
    "maximum or minimum of a block": (
        "B/d V/t, i32 4 -> B/d",
        lambda x, i: lax.pmax(lax.cond(i[0] < 99, lambda: jnp.min(x, axis=1), lambda: jnp.max(x, axis=1)), "t"),
    ),
    "index of a device in each pass": (
        "4 M -> 4 M",
        lambda x: lax.scan(lambda c, x: (c, lax.axis_index("t") * 1.0), 0, x)[1][:, None] + x,
    ),
    "branch on any entry of a block": ("B/d M, M -> M", lambda x, y: lax.cond(jnp.any(x > 1.8), lambda: y, lambda: -y)),
    "as many branches as devices": (
        "M, i32 4 -> M",
        lambda x, i: lax.switch(i[0] + 9, [lambda x, k=k: x * k for k in range(lax.axis_size("t") + 1)], x),
    ),
    "key of a partial sum": (
        "M, i32 B/d -> M",
        lambda x, ids: x + jax.random.normal(jax.random.key(jnp.sum(ids)), x.shape),
    ),
    "key of a scaled number": (
        "M, i32 4 -> M",
        lambda x, ids: x + jax.random.normal(jax.random.key(lax.psum(ids[0], "t")), x.shape),
    ),
    "key of partial sums as its data": (
        "M, i32 B/d 2 -> M",
        lambda x, ids: (
            x + jax.random.normal(jax.random.wrap_key_data(jnp.sum(ids, axis=0).astype(jnp.uint32)), x.shape)
        ),
    ),
    "sum in a map within a map": (
        "M -> M",
        lambda x: jax.shard_map(
            lambda x: lax.psum(x, "t"),
            in_specs=jax.sharding.PartitionSpec(),
            out_specs=jax.sharding.PartitionSpec(),
            axis_names={"t"},
            check_vma=False,
        )(x),
    ),
    "index of a device in a custom vmap": ("M -> M", lambda x: shifted(x)),
    "index of a device in a composite": (
        "M -> M",
        lambda x: lax.composite(lambda x: x + lax.axis_index("t"), "tests.shifted")(x),
    ),
    "linear solve with a sum": (
        "M -> M",
        lambda x: (
            lax.custom_linear_solve(lambda v: lax.psum(v, "t"), x, lambda mv, b: b / 1.0, symmetric=True)
            + lax.custom_linear_solve(lambda v: v, x, lambda mv, b: lax.psum(b, "t"), symmetric=True)
        ),
    ),
    "squares of partial sums gathered": (
        "B/d M/t -> B/d",
        lambda x: jnp.sum(lax.all_gather(x.sum(axis=1), "t") ** 2, axis=0),
    ),
}
"""Those that JAX would refuse with check_vma."""

HANGING = {
    "collective beneath a local loop": (
        "B/d M -> B/d M",
        lambda x: lax.while_loop(lambda x: jnp.sum(x * x) > 1.0, lambda x: x - 0.1 * lax.pmean(x, "d"), x),
    )
}
"""Devices wait for each other for ever: they are traced, and not run."""

PROGRAMS = programs_of(globals())
PROGRAMS += [row(name, *given) for name, given in ROWS.items()]
PROGRAMS += [row(name, *given, vma=False) for name, given in UNCHECKED.items()]
PROGRAMS += [row(name, *given, hangs=True) for name, given in HANGING.items()]
