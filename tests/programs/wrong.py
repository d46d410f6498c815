"""Wrong per-device programs, each of a reason of its own: it computes something else on several
devices than on one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.shardtypes import f32, i32
from tests.programs.program import wrong
from tests.programs.right import key, offset, ring, scattered


@wrong
def own_maxima_subtracted_from_pairs_of_rows(x: f32["B V/t"]) -> f32["1 2 A V/t"]:
    return (x - jnp.max(x, axis=-1, keepdims=True)).reshape(2, -1, x.shape[1])[None]


@wrong
def pairs_of_positions_by_strides_and_of_all(x: f32["B L/t"]) -> f32["B L/t"]:
    return jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)


@wrong
def square_block_transposed(w: f32["M/d N/t"]) -> f32["M/d N/t"]:
    return w.T


@wrong
def fused_gate_and_up_split(x: f32["B/d F/t"]) -> f32["B/d M/t"]:
    gate, up = jnp.split(x, 2, axis=-1)  # here
    return jax.nn.silu(gate) * up


@wrong
def mean_divided_by_local_rows(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(jnp.sum(x, axis=0), "d") / x.shape[0]


@wrong
def dropout_with_one_key(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    return jnp.where(jax.random.bernoulli(k, 0.5, x.shape), 2 * x, 0.0)


@wrong
def psum_over_the_batch_axis_too(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(x @ w, ("d", "t"))


@wrong
def activation_before_the_psum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(jax.nn.relu(x @ w), "t")


@wrong
def gather_on_the_wrong_dim(x: f32["B M/t"]) -> f32["B M"]:
    return lax.all_gather(jnp.sin(x), "t", axis=0, tiled=True, to="invarying")


@wrong(vma=False, axes=("t",))
def sum_over_groups_of_devices(x: f32["B L/t"]) -> f32["B"]:
    n = lax.axis_size("t")
    return lax.psum(jnp.sum(x, axis=1), "t", axis_index_groups=[[i] for i in range(n)])  # here


def sum_square(w, x):
    return jnp.sum(jnp.square(x @ w))


@wrong
def negatives_gathered_without_gradient(a: f32["B/d M"], b: f32["B/d M"]) -> f32["B/d M"]:
    start = lax.axis_index("d") * a.shape[0]

    def loss(b):
        others = lax.stop_gradient(lax.all_gather(b, "d", tiled=True))
        logits = a @ lax.dynamic_update_slice_in_dim(others, b, start, axis=0).T  # here
        return -jnp.sum(
            jnp.take_along_axis(jax.nn.log_softmax(logits), start + jnp.arange(len(b))[:, None], 1)
        )

    return jax.grad(loss)(b)


@wrong
def replicated_value_returned_as_sharded(x: f32["B M"]) -> f32["B M/t"]:
    return x + 1


@wrong
def slice_of_a_gathered_weight(w: f32["M/d N"]) -> f32["R/d N"]:
    whole = lax.all_gather(w, "d", tiled=True)
    return whole[: w.shape[0] // 2]  # here


@wrong(hangs=True)
def exchange_on_the_first_device_alone(x: f32["B/d M"]) -> f32["B/d M"]:
    def exchange(x):
        return lax.ppermute(x, "d", [(0, 1), (1, 0)])

    return lax.cond(lax.axis_index("d") == 0, exchange, lambda x: x, x)  # here


@wrong
def argmax_without_offset(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    own = jnp.argmax(x, axis=1).astype(jnp.int32)  # here
    return lax.pmax(jnp.where(best == lax.pmax(best, "t"), own, 0), "t")


@wrong
def embedding_shifted_in_the_wrong_order_of_axes(
    table: f32["V/t/d M"], ids: i32["B"]
) -> f32["B M"]:
    block = lax.axis_index("d") * lax.axis_size("t") + lax.axis_index("t")
    hit = jax.nn.one_hot(ids - block * table.shape[0], table.shape[0])
    return lax.psum(hit @ table, ("d", "t"))  # here


def attend(q, k, v, mask=True):
    return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v  # here


@wrong(axes=("d", "x"))
def ring_attention_without_rescaling(
    q: f32["B/d L/x D"], k: f32["B/d S/x D"], v: f32["B/d S/x D"]
) -> f32["B/d L/x D"]:
    total = 0.0
    for _ in range(lax.axis_size("x")):
        total = total + attend(q, k, v)
        k, v = lax.ppermute((k, v), "x", ring("x"))
    return total / lax.axis_size("x")


@wrong
def query_heads_paired_with_keys_of_all_heads(
    q: f32["B/d L T/t D"], k: f32["B/d S K D"]
) -> f32["B/d T/t L S"]:
    n = q.shape[2] // 2
    return jnp.einsum("blkd,bskd->bkls", q, jnp.repeat(k[:, :, :n], 2, axis=2))  # here


@wrong(axes=("t",))
def outer_product_summed_over_one_axis(x: f32["L/t"], y: f32["S/t"]) -> f32[""]:
    shape = (x.shape[0], y.shape[0])
    rows, columns = jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(y, shape)  # here
    return lax.psum(jnp.tensordot(rows, columns, 2), "t")


TABLES = {n: np.linspace(0.0, n, 16, dtype=np.float32) for n in (1, 2, 4)}


def by_rbg(row):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0, impl="rbg"), row))  # here


KEYS = [jax.random.key(i) for i in range(5)]


def own_and_found(table, ids):
    """Ids from the start of this device's block of the table, and which of them are in it."""
    own = ids - lax.axis_index("t") * table.shape[0]  # here
    return own, (own >= 0) & (own < table.shape[0])


@wrong
def masked_by_other_ids(table: f32["V/t M"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d M"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    rows = jnp.take(table, own, axis=0, mode="clip")  # here
    return lax.psum(jnp.where(found[:, None], rows, 0.0), "t")


@wrong
def entries_added_to_the_first_row_of_each_block(x: f32["B/d M"], ids: i32["4"]) -> f32["B/d M"]:
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1,))
    return lax.scatter_add(x, ids[:, None], jnp.ones(4), numbers)  # here


@wrong(axes=("d",), vma=False)
def first_of_one_row_each(x: f32["2/d M"], ids: i32["4"]) -> f32["4"]:
    numbers = lax.GatherDimensionNumbers((), (0, 1), (1,))
    return lax.gather(x, ids[:, None], numbers, (1, 1))  # here


@wrong
def dropped_lookups_filled_with_ones(table: f32["V/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    own, found = own_and_found(table, ids)
    own = jnp.where(found, own, table.shape[0])
    return lax.psum(table.at[own].get(mode="fill", fill_value=1.0), "t")  # here


@wrong(axes=("t",), vma=False)
def repeated_partial_sum_contracted(x: f32["4 F/t"], w: f32["F/t"], v: f32["L/t M"]) -> f32["M"]:
    y = jnp.broadcast_to((x @ w)[:, None], (4, v.shape[0]))
    return lax.psum(jnp.tensordot(y, v, 1), "t").sum(axis=0)  # here


@wrong(axes=("t",), vma=False)
def partial_sums_convolved_with_sharded_features(
    x: f32["L F/t"], w: f32["F/t"], k: f32["8/t 3"]
) -> f32["L"]:
    y = jnp.broadcast_to(x @ w, (1, k.shape[0], 16))
    return lax.psum(lax.conv(y, k[None], (1,), "SAME"), "t")[0, 0]  # here


@wrong(vma=False)
def looked_up_by_a_partial_sum(table: f32["V/t"], ids: i32["B/d 4"]) -> f32["4"]:
    own, found = own_and_found(table, jnp.sum(ids, axis=0))
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@wrong(vma=False)
def local_positions_masked(ids: i32["B/d"]) -> i32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, jnp.arange(ids.shape[0]), 0), "t")  # here


@wrong(vma=False)
def maximum_of_a_block_masked(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    _, found = own_and_found(x.T, ids)
    return lax.psum(jnp.where(found, jnp.max(x, axis=1), 0.0), "t")  # here


@wrong(vma=False)
def reversed_on_several_devices(x: f32["L M"]) -> f32["L M"]:
    def step(total, x):
        return (total + x, total + x)

    return lax.scan(step, 0 * x[0], x, reverse=lax.axis_size("t") > 1)[1]  # here


@jax.custom_batching.custom_vmap
def shifted(x):
    return x + lax.axis_index("t")


shifted.def_vmap(lambda size, batched, x: (shifted(x), batched[0]))


@wrong(vma=False)
def array_added_to_on_each_device(x: f32["M"]) -> f32["M"]:
    r = jax.new_ref(x)  # here

    def write(i, c):
        r[...] = r[...] + 1
        return c

    lax.fori_loop(0, lax.axis_size("t"), write, 0)
    return r[...]


@wrong
def product_summed_over_devices_in_eight_bits(x: f32["B L/t"], w: f32["L/t M"]) -> f32["B M"]:
    return jnp.float32(lax.psum((x @ w).astype(jnp.float8_e4m3fn), "t"))


@wrong
def sorted_tokens_meet_unsorted_gates(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return (x[order] * scores[:, None])[jnp.argsort(order)]  # here


@wrong
def matmul_scattered_to_the_next_device(x: f32["B M/t"], w: f32["M/t F"]) -> f32["B/t F"]:
    return scattered(x, w, first=0)


@wrong
def sums_placed_over_each_other(x: f32["B/t M"], w: f32["M F/t"]) -> f32["B F/t"]:
    n = lax.axis_size("t")
    y = jnp.zeros((n * x.shape[0], w.shape[1]))
    for _ in range(n):
        y = lax.dynamic_update_slice_in_dim(y, (x @ w).sum(axis=0)[None], 0, axis=0)  # here
        x = lax.ppermute(x, "t", ring("t"))
    return y


def decoding(how):
    """Attention of one query to keys sharded over t; `how` combines what the blocks of keys give.

    It gets the scores, this device's largest, the exponentials of their differences, their sum, and
    a function that multiplies weights with the values.
    """

    def body(q, k, v):
        s = jnp.einsum("bkd,bskd->bks", q, k)
        own = jnp.max(s, axis=-1, keepdims=True)
        e = jnp.exp(s - own)  # here
        return how(
            s,
            own,
            e,
            jnp.sum(e, axis=-1, keepdims=True),
            lambda e: jnp.einsum("bks,bskd->bkd", e, v),
        )

    functools.update_wrapper(body, how)
    keys = f32["B/d S/t K D"]
    body.__annotations__ = {"q": f32["B/d K D"], "k": keys, "v": keys, "return": f32["B/d K D"]}
    return body


def of_all(y):
    return lax.psum(y, "t")


def scale(own, power=1):
    return jnp.exp(power * (own - lax.pmax(own, "t")))  # here


def of_padded(x):
    """All positions of L, with three zeros before them."""
    return jnp.pad(lax.all_gather(x, "t", axis=1, tiled=True), ((0, 0), (3, 0)))


@wrong
def broadcast_of_what_is_in_a_block(x: f32["M/t"], ids: i32["M/t"]) -> f32["M/t"]:
    return lax.psum(
        jnp.where((lax.axis_index("d") == 0) & (ids - lax.axis_index("t") * len(x) >= 0), x, 0), "d"
    )


@wrong
def matmul_of_bools(x: f32["B/d F/t"], y: f32["F/t"]) -> f32["B/d"]:
    return lax.psum((x > 0).astype(bool) @ (y > 0), "t").astype(x.dtype)


@wrong
@decoding
def decoding_scaled_by_the_largest_of_another_tensor(s, own, e, total, of):
    other = jnp.max(2 * s, axis=-1, keepdims=True)
    return of_all(of(e) * scale(other)) / of_all(total * scale(other))


@wrong
def convolution_over_positions_past_the_end(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.dynamic_slice_in_dim(of_padded(x), offset("t", x.shape[1]) + 4, x.shape[1], 1)


@wrong
def broadcast_from_a_device_that_one_device_lacks(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.psum(jnp.where(lax.axis_index("t") == 1, x, 0), "t")


@wrong
def channel_shuffle_by_flip(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return jnp.flip(x, axis=-1)


@wrong
def pairwise_kernel_over_one_device_alone(x: f32["B/d M"]) -> f32["B/d"]:
    return jnp.mean(jnp.exp(-jnp.mean((x[:, None] - x[None]) ** 2, axis=-1)), axis=1)


@wrong
def perplexity_averaged_over_devices(losses: f32["B/d"]) -> f32[""]:
    return lax.pmean(jnp.exp(jnp.mean(losses)), "d")


@wrong
def microbatches_cut_from_local_rows(x: f32["B/d M"]) -> f32["2 R/d M"]:
    return x.reshape(2, -1, x.shape[1])


@wrong
def blocks_exchanged_by_all_to_all(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.all_to_all(jnp.cos(x), "t", split_axis=1, concat_axis=1, tiled=True)


@wrong
def block_of_the_first_device_everywhere(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.all_gather(x, "d")[0]


@wrong
def gradient_of_a_penalty_on_each_device(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return jax.grad(lambda w: lax.psum(sum_square(w, x) + 3 * jnp.sum(w * w), "d"))(w)


@wrong
def position_ids_of_one_block(x: f32["B/d L/t"]) -> i32["L/t"]:
    return jnp.arange(x.shape[1], dtype=jnp.int32)


@wrong
def callback_that_sorts_local_rows(x: f32["B/d M"]) -> f32["B/d M"]:
    return jax.pure_callback(
        lambda x: np.asarray(x)[np.argsort(x[:, 0])], jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


@wrong
def slice_at_a_global_position(x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    return x - lax.dynamic_slice_in_dim(x, 5, 1, axis=1)


@wrong
def position_overwritten_on_each_device(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, 1].set(0.0)


@wrong
def inverse_of_each_block_of_rows(a: f32["L/t S"]) -> f32["L/t S"]:
    return jnp.linalg.pinv(a).T


@wrong
def table_made_outside_for_this_mesh(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * TABLES[lax.axis_size("t")]


@wrong
def shape_of_a_result_of_local_size(x: f32["B/d"]) -> f32["L/d"]:
    return jnp.ones(16 // 4)


@wrong
def approximate_best_of_sharded_rows(x: f32["B/d M"]) -> f32["8/d M"]:
    return lax.approx_max_k(x, x.shape[0], reduction_dimension=0)[0]


@wrong
def gradients_summed_over_replicas_that_train_by_themselves(
    w: f32["R/d M"], x: f32["R/d B M"]
) -> f32["R/d M"]:
    def step(own):
        w, x = own
        return w - 0.1 * lax.pcast(lax.psum(jnp.tanh(x @ w) @ x, "d"), "d", to="varying")  # here

    return lax.map(step, (w, x))


@wrong
def sum_of_each_row_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32["B/d"]:
    return lax.map(lambda row: jnp.sum(jnp.exp(y @ row)), x)


@wrong
def key_made_outside_for_this_mesh(x: f32["M"]) -> f32["M"]:
    return x + jax.random.normal(KEYS[lax.axis_size("t")], x.shape)


@wrong
def replicated_value_taken_for_a_partial_sum(x: f32["M"]) -> f32["M"]:
    return lax.psum(lax.pcast(lax.pcast(x, "t", to="varying"), "t", to="unreduced"), "t")


@wrong
def ranks_among_a_device_s_own(scores: f32["T/d"]) -> i32["T/d"]:
    return jnp.argsort(jnp.argsort(scores))


@wrong
def buckets_among_a_device_s_own_edges(x: f32["B/d"], edges: f32["V/d"]) -> i32["B/d"]:
    return jnp.searchsorted(edges, x)


@wrong
def numbers_by_the_rbg_key_of_each_row(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * jax.vmap(by_rbg)(offset("d", x.shape[0]) + jnp.arange(x.shape[0]))[:, None]


@wrong
def doubled_where_there_are_several(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x * 2.0 if lax.axis_size("t") > 1 else x


@wrong(vma=False)
def gather_of_a_weight_forgotten(x: f32["B/d M"], w: f32["M/t F"]) -> f32["B/d F"]:
    return x[:, : w.shape[0]] @ w


@wrong(vma=False)
def block_scattered_to_local_positions(u: f32["L/t"]) -> f32["L"]:
    return lax.psum(jnp.zeros(16).at[jnp.arange(u.shape[0])].add(u), "t")


@wrong(vma=False)
def bits_of_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t"]) -> i32["B/d"]:
    return lax.psum(lax.bitcast_convert_type(x @ w, jnp.int32), "t")


@wrong(vma=False)
def argmax_of_a_flattened_block(x: f32["B/d L/t"]) -> i32[""]:
    return jnp.argmax(x.reshape(-1)).astype(jnp.int32)


@wrong(vma=False)
def convolved_by_as_many_ones_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return lax.conv(x[None, None], jnp.ones((1, 1, u.shape[0])), (1,), "SAME")[0, 0]


@wrong(vma=False)
def maximum_or_minimum_of_a_block(x: f32["B/d V/t"], i: i32["4"]) -> f32["B/d"]:
    return lax.pmax(
        lax.cond(i[0] < 99, lambda: jnp.min(x, axis=1), lambda: jnp.max(x, axis=1)), "t"
    )


@wrong(vma=False)
def branch_on_any_entry_of_a_block(x: f32["B/d M"], y: f32["M"]) -> f32["M"]:
    return lax.cond(jnp.any(x > 1.8), lambda: y, lambda: -y)


@wrong(vma=False)
def as_many_branches_as_devices(x: f32["M"], i: i32["4"]) -> f32["M"]:
    return lax.switch(i[0] + 9, [lambda x, k=k: x * k for k in range(lax.axis_size("t") + 1)], x)


@wrong(vma=False)
def key_of_a_partial_sum(x: f32["M"], ids: i32["B/d"]) -> f32["M"]:
    return x + jax.random.normal(jax.random.key(jnp.sum(ids)), x.shape)


@wrong(vma=False)
def sum_in_a_map_within_a_map(x: f32["M"]) -> f32["M"]:
    return jax.shard_map(
        lambda x: lax.psum(x, "t"),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        axis_names={"t"},
        check_vma=False,
    )(x)


@wrong(vma=False)
def index_of_a_device_in_a_composite(x: f32["M"]) -> f32["M"]:
    return lax.composite(lambda x: x + lax.axis_index("t"), "tests.shifted")(x)


@wrong(vma=False)
def squares_of_partial_sums_gathered(x: f32["B/d M/t"]) -> f32["B/d"]:
    return jnp.sum(lax.all_gather(x.sum(axis=1), "t") ** 2, axis=0)


@wrong(hangs=True)
def collective_beneath_a_local_loop(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.while_loop(lambda x: jnp.sum(x * x) > 1.0, lambda x: x - 0.1 * lax.pmean(x, "d"), x)


@wrong
def nan_of_other_blocks_times_zero(table: f32["V/t M"], ids: i32["4"]) -> f32["4 M"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.take(table, own, axis=0) * found[:, None], "t")  # here


@wrong
def ring_of_sums_with_a_turn_too_few(x: f32["B M/t"], w: f32["M/t F"]) -> f32["B/t F"]:
    return scattered(x, w, turns=2)


@wrong
def counts_that_wrap_around_before_they_are_summed(x: i32["B/d L/t"]) -> f32["L/t"]:
    return lax.psum((x.astype(jnp.uint32) << 29).sum(axis=0).astype(jnp.float32), "d")


@wrong(vma=False)
def entries_not_masked_scattered(table: f32["V/t"], ids: i32["4"]) -> f32["V"]:
    own, _ = own_and_found(table, ids)
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.take(table, own, mode="clip")), "t")


@wrong(vma=False)
def sum_of_local_rows_scattered(x: f32["B/d"], ids: i32["B/d"]) -> f32["V"]:
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.sum(x)), "d")


@wrong(vma=False)
def gather_of_axes_in_another_order(x: f32["V/t/d"]) -> f32["V"]:
    return lax.all_gather(x, ("d", "t"), tiled=True)


@wrong(vma=False)
def part_written_with_the_index_of_a_device(x: f32["L"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(
        x, jnp.ones(2) + lax.axis_index("t"), jnp.int32(3), axis=0
    )
