"""Wrong per-device programs, each of a reason of its own: it computes something else on several
devices than on one.

Those that differ from a right program in one place alone are in mutated.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.shardtypes import f32, i32
from tests.programs.program import wrong
from tests.programs.right import first_largest, key, offset, ring, scattered


@wrong("sub: a maximum over this device's block is used before it is taken over t")
def own_maxima_subtracted_from_pairs_of_rows(x: f32["B V/t"]) -> f32["1 2 A V/t"]:
    return (x - jnp.max(x, axis=-1, keepdims=True)).reshape(2, -1, x.shape[1])[None]


@wrong("sub: a maximum over this device's block is used before it is taken over t")
def own_maxima_subtracted_in_each_turn(x: f32["B/d V/t"]) -> f32["1 3 B/d V/t"]:
    return lax.scan(
        lambda _, k: (None, k * 0 + x - jnp.max(x, axis=-1, keepdims=True)), None, jnp.ones(3)
    )[1][None]


@wrong("sub: a maximum over this device's block is used before it is taken over t")
def own_maxima_subtracted_and_summed(x: f32["B/d V/t"]) -> f32["B/d"]:
    own = jnp.max(x, axis=-1)
    return lax.psum(jnp.sum(x - own[:, None], axis=-1) + own, "t")  # here


@wrong(
    "slice: one of every 3 entries is taken along dim 0, which is sharded over d: a device has 4 "
    "entries of it"
)
def thirds_by_strides_that_blocks_do_not_have(lp: f32["B/d"]) -> f32[""]:
    return lax.psum(jnp.sum(jnp.tanh(lp[0::3])), "d")


@wrong(
    "concatenate: arrays are joined along dim 1, which is sharded over t: each device sees only "
    "its own block"
)
def pairs_of_positions_by_strides_and_of_all(x: f32["B L/t"]) -> f32["B L/t"]:
    return jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)


@wrong("result 0 is f32[16/t 16/d], and is declared f32[16/d 16/t]")
def square_block_transposed(w: f32["M/d N/t"]) -> f32["M/d N/t"]:
    return w.T


@wrong(
    "split: an array is split along dim 1, which is sharded over t: each device sees only its own "
    "block"
)
def fused_gate_and_up_split(x: f32["B/d F/t"]) -> f32["B/d M/t"]:
    gate, up = jnp.split(x, 2, axis=-1)  # here
    return jax.nn.silu(gate) * up


@wrong(
    "div: a number that depends on the mesh was multiplied into a value: it is 2 times what it is "
    "on one device"
)
def mean_divided_by_local_rows(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(jnp.sum(x, axis=0), "d") / x.shape[0]


@wrong("random_bits: dim 0 of the result has 4 entries here and 8 on one device")
def dropout_with_one_key(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    return jnp.where(jax.random.bernoulli(k, 0.5, x.shape), 2 * x, 0.0)


@wrong("psum: a sum over d adds different blocks of a sharded dim, entry by entry")
def psum_over_the_batch_axis_too(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(x @ w, ("d", "t"))


@wrong("max: max of a partial sum over t: the sum of the results is not the result of the sum")
def activation_before_the_psum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(jax.nn.relu(x @ w), "t")


@wrong("all_gather: it gathers dim 0 over t, but it is not sharded")
def gather_on_the_wrong_dim(x: f32["B M/t"]) -> f32["B M"]:
    return lax.all_gather(jnp.sin(x), "t", axis=0, tiled=True, to="invarying")


@wrong(
    "psum: its axis_index_groups depends on the mesh: ((0,), (1,)) here, ((0,),) on one",
    vma=False,
    axes=("t",),
)
def sum_over_groups_of_devices(x: f32["B L/t"]) -> f32["B"]:
    n = lax.axis_size("t")
    return lax.psum(jnp.sum(x, axis=1), "t", axis_index_groups=[[i] for i in range(n)])  # here


def sum_square(w, x):
    return jnp.sum(jnp.square(x @ w))


@wrong(
    "dynamic_update_slice: a value differs between devices of d by their index, and is not a "
    "position in a dim"
)
def negatives_gathered_without_gradient(a: f32["B/d M"], b: f32["B/d M"]) -> f32["B/d M"]:
    start = lax.axis_index("d") * a.shape[0]

    def loss(b):
        others = lax.stop_gradient(lax.all_gather(b, "d", tiled=True))
        logits = a @ lax.dynamic_update_slice_in_dim(others, b, start, axis=0).T  # here
        return -jnp.sum(
            jnp.take_along_axis(jax.nn.log_softmax(logits), start + jnp.arange(len(b))[:, None], 1)
        )

    return jax.grad(loss)(b)


@wrong("result 0 is f32[8 16], and is declared f32[8 32/t]")
def replicated_value_returned_as_sharded(x: f32["B M"]) -> f32["B M/t"]:
    return x + 1


@wrong("slice: the part taken of dim 0 depends on the mesh: (0, 4) here, (0, 8) on one device")
def slice_of_a_gathered_weight(w: f32["M/d N"]) -> f32["R/d N"]:
    whole = lax.all_gather(w, "d", tiled=True)
    return whole[: w.shape[0] // 2]  # here


@wrong(
    "cond: devices of d decide for themselves, and ppermute within waits for all of them",
    hangs=True,
)
def exchange_on_the_first_device_alone(x: f32["B/d M"]) -> f32["B/d M"]:
    def exchange(x):
        return lax.ppermute(x, "d", [(0, 1), (1, 0)])

    return lax.cond(lax.axis_index("d") == 0, exchange, lambda x: x, x)  # here


@wrong("where: a mask says which devices have the extreme")
def argmax_without_offset(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    own = jnp.argmax(x, axis=1).astype(jnp.int32)  # here
    return lax.pmax(jnp.where(best == lax.pmax(best, "t"), own, 0), "t")


@wrong(
    "matmul: dim 1 is 16/d/t in one operand and 16/t/d in another: they hold different entries of "
    "it"
)
def embedding_shifted_in_the_wrong_order_of_axes(
    table: f32["V/t/d M"], ids: i32["B"]
) -> f32["B M"]:
    block = lax.axis_index("d") * lax.axis_size("t") + lax.axis_index("t")
    hit = jax.nn.one_hot(ids - block * table.shape[0], table.shape[0])
    return lax.psum(hit @ table, ("d", "t"))  # here


def attend(q, k, v, mask=True):
    return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v  # here


@wrong(
    "sub: a maximum over this device's block is used before it is taken over blocks of 2",
    axes=("d", "x"),
)
def ring_attention_without_rescaling(
    q: f32["B/d L/x D"], k: f32["B/d S/x D"], v: f32["B/d S/x D"]
) -> f32["B/d L/x D"]:
    total = 0.0
    for _ in range(lax.axis_size("x")):
        total = total + attend(q, k, v)
        k, v = lax.ppermute((k, v), "x", ring("x"))
    return total / lax.axis_size("x")


@wrong("the program is another one on this mesh than on one device: slice here, reshape there")
def query_heads_paired_with_keys_of_all_heads(
    q: f32["B/d L T/t D"], k: f32["B/d S K D"]
) -> f32["B/d T/t L S"]:
    n = q.shape[2] // 2
    return jnp.einsum("blkd,bskd->bkls", q, jnp.repeat(k[:, :, :n], 2, axis=2))  # here


@wrong(
    "matmul: two dims that are sharded over t are summed: only matching blocks meet", axes=("t",)
)
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


@wrong("where: entries are masked by another index than the one they were looked up by")
def masked_by_other_ids(table: f32["V/t M"], ids: i32["B/d"], others: i32["B/d"]) -> f32["B/d M"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    rows = jnp.take(table, own, axis=0, mode="clip")  # here
    return lax.psum(jnp.where(found[:, None], rows, 0.0), "t")


@wrong(
    "where: a value differs between devices of t by their index, and is not",
    whole=lambda table, ids: table[ids],
)
def wrapped_where_it_is_in_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    wrapped = jnp.where(own >= 0, own + 1, own)  # here
    return lax.psum(jnp.where(found, jnp.take(table, wrapped, mode="clip"), 0.0), "t")


@wrong("where: a mask says which indices are in this device's block")
def index_replaced_where_it_is_in_range(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, ids)
    own = jnp.where(found, 0, own)
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")  # here


@wrong("where: where of a partial sum over t: the sum of the results is not the result of the sum")
def partial_sum_masked_over_its_own_axis(
    x: f32["B/d F/t"], w: f32["F/t"], ids: i32["B/d"]
) -> f32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, x @ w, 0.0), "t")  # here


@wrong(
    "scatter-add: a value differs between devices of t by their index, and is not a position in a "
    "dim"
)
def updates_masked_by_other_ids(
    table: f32["V/t"], ids: i32["B/d"], others: i32["B/d"], g: f32["B/d"]
) -> f32["V/t"]:
    own, _ = own_and_found(table, ids)
    _, found = own_and_found(table, others)
    own = jnp.clip(own, 0, table.shape[0] - 1)
    return lax.psum(jnp.zeros_like(table).at[own].add(jnp.where(found, g, 0.0)), "d")  # here


@wrong(
    "scatter-add: the first entry is written along dim 0, which is sharded over d: each device "
    "sees only its own"
)
def entries_added_to_the_first_row_of_each_block(x: f32["B/d M"], ids: i32["4"]) -> f32["B/d M"]:
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1,))
    return lax.scatter_add(x, ids[:, None], jnp.ones(4), numbers)  # here


@wrong(
    "gather: a part is taken along dim 0, which is sharded over d: each device sees only",
    axes=("d",),
    vma=False,
)
def first_of_one_row_each(x: f32["2/d M"], ids: i32["4"]) -> f32["4"]:
    numbers = lax.GatherDimensionNumbers((), (0, 1), (1,))
    return lax.gather(x, ids[:, None], numbers, (1, 1))  # here


@wrong(
    "scatter: its update_jaxpr depends on the mesh: { lambda ; a:f32[] b:f32[]. let c:f32[] = mul "
    "a 2.0:f32[] in"
)
def entries_changed_by_a_function_of_the_mesh(x: f32["M"]) -> f32["M"]:
    n = float(lax.axis_size("t"))
    return x.at[jnp.array([1, 3])].apply(lambda v: v * n)  # here


@wrong(
    "psum: each device adds a value that is whole already: the result is 2 times what it is on one "
    "device"
)
def scaled_entries_multiplied_by_scaled_ones(x: f32["M"], v: f32["M"]) -> f32["M"]:
    x, v = lax.psum(x, "t"), lax.psum(v, "t")  # here
    return x.at[jnp.arange(0, 16, 2)].multiply(v[:8]) / lax.axis_size("t")


@wrong(
    "sub: a number that depends on the mesh was multiplied into a value: it is 2 times what it is "
    "on one device"
)
def length_of_a_block_as_a_difference(x: f32["L/t"]) -> f32["L/t"]:
    start = offset("t", x.shape[0])
    end = start + x.shape[0]
    return x / (end - start)  # here


@wrong("where: devices without the extreme give an index that may be the smallest")
def argmax_with_a_small_index_elsewhere(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    own = offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmax(best, "t"), own, 2), "t")  # here


@wrong(
    "the program is another one on this mesh than on one device: slice here, nothing more there",
    vma=False,
)
def diagonal_taken_for_uniform(x: f32["L S"]) -> f32["L/t"]:
    rows = jnp.arange(16, dtype=jnp.uint32)
    return lax.slice_in_dim(x[rows, rows], 0, 16 // lax.axis_size("t"))  # here


@wrong("mul: a number is zero, or of another sign, on some meshes alone")
def maximum_of_a_number_of_another_sign(x: f32["B/d"]) -> f32[""]:
    sign = 3.0 if x.shape[0] == 8 else -3.0
    return lax.pmax(jnp.max(x * sign), "d") / sign * 3.0  # here


def over_rows(add, start, x):
    """The carry of a loop over rows."""
    start = lax.pcast(start, "d", to="varying")
    return lax.scan(lambda total, row: (add(total, row), None), start, x)[0]  # here


@wrong(
    "psum: entries were looked up by an index that is out of range on other devices, and were not "
    "masked"
)
def dropped_lookups_filled_with_ones(table: f32["V/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    own, found = own_and_found(table, ids)
    own = jnp.where(found, own, table.shape[0])
    return lax.psum(table.at[own].get(mode="fill", fill_value=1.0), "t")  # here


@wrong(
    "gather: dim 1, sharded over d, is looked up by an index that is not relative to this device's",
    vma=False,
)
def looked_up_in_two_dims_and_masked_in_one(table: f32["V/t M/d"], ids: i32["4"]) -> f32["4"]:
    own, found = own_and_found(table, ids)
    other = ids - lax.axis_index("d") * table.shape[1]
    entries = table.at[own, other].get(mode="clip")  # here
    return lax.psum(jnp.where(found, entries, 0.0), ("t", "d"))


@wrong(
    "matmul: matmul of a partial sum over t: the sum of the results is not the result of",
    axes=("t",),
    vma=False,
)
def repeated_partial_sum_contracted(x: f32["4 F/t"], w: f32["F/t"], v: f32["L/t M"]) -> f32["M"]:
    y = jnp.broadcast_to((x @ w)[:, None], (4, v.shape[0]))
    return lax.psum(jnp.tensordot(y, v, 1), "t").sum(axis=0)  # here


@wrong(
    "conv_general_dilated: a number that depends on the mesh was multiplied into a value: it is "
    "0.5",
    vma=False,
)
def as_many_features_convolved_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    n = u.shape[0]
    rows = jnp.broadcast_to(x, (1, n, 16))
    return lax.conv(rows, jnp.ones((1, n, 3)), (1,), "SAME")[0, 0]  # here


@wrong(
    "conv_general_dilated: conv_general_dilated of a partial sum over t: the sum of the",
    axes=("t",),
    vma=False,
)
def partial_sums_convolved_with_sharded_features(
    x: f32["L F/t"], w: f32["F/t"], k: f32["8/t 3"]
) -> f32["L"]:
    y = jnp.broadcast_to(x @ w, (1, k.shape[0], 16))
    return lax.psum(lax.conv(y, k[None], (1,), "SAME"), "t")[0, 0]  # here


@wrong(
    "conv_general_dilated: entries are taken together along dim 1, which is sharded over t: each",
    vma=False,
)
def four_groups_of_the_features_of_a_block(x: f32["B/d 8/t L"]) -> f32["B/d 8/t L"]:
    kernel = jnp.ones((x.shape[1], x.shape[1] // 4, 3))
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=4)  # here


@wrong(
    "sub: sub of a partial sum over d: the sum of the results is not the result of the sum",
    vma=False,
)
def looked_up_by_a_partial_sum(table: f32["V/t"], ids: i32["B/d 4"]) -> f32["4"]:
    own, found = own_and_found(table, jnp.sum(ids, axis=0))
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@wrong(
    "psum: each device adds a value that is whole already: the result is 2 times what it is on one",
    vma=False,
)
def looked_up_by_scaled_ids(table: f32["V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    own, found = own_and_found(table, lax.psum(ids, "t"))  # here
    return lax.psum(jnp.where(found, jnp.take(table, own, mode="clip"), 0.0), "t")


@wrong(
    "psum: each device adds a value that is whole already: the result is 2 times what it is on one",
    vma=False,
)
def masked_by_scaled_ids(x: f32["B/d"], ids: i32["B/d"]) -> f32["B/d"]:
    ids, n = lax.psum(ids, "t"), 16 // lax.axis_size("t")  # here
    start = lax.axis_index("t") * n
    return lax.psum(jnp.where((ids >= start) & (ids < start + n), x, 0.0), "t")


@wrong("arange: positions count from the start of this device's block, and are used at", vma=False)
def local_positions_masked(ids: i32["B/d"]) -> i32["B/d"]:
    own = ids - lax.axis_index("t") * (16 // lax.axis_size("t"))
    found = (own >= 0) & (own < 16 // lax.axis_size("t"))
    return lax.psum(jnp.where(found, jnp.arange(ids.shape[0]), 0), "t")  # here


@wrong("where: a maximum over this device's block is used before it is taken over t", vma=False)
def maximum_of_a_block_masked(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    _, found = own_and_found(x.T, ids)
    return lax.psum(jnp.where(found, jnp.max(x, axis=1), 0.0), "t")  # here


@wrong("scan: its reverse depends on the mesh: True here, False on one device", vma=False)
def reversed_on_several_devices(x: f32["L M"]) -> f32["L M"]:
    def step(total, x):
        return (total + x, total + x)

    return lax.scan(step, 0 * x[0], x, reverse=lax.axis_size("t") > 1)[1]  # here


@jax.custom_batching.custom_vmap
def shifted(x):
    return x + lax.axis_index("t")


shifted.def_vmap(lambda size, batched, x: (shifted(x), batched[0]))


@wrong("new_ref: an array is changed in place", vma=False)
def array_added_to_on_each_device(x: f32["M"]) -> f32["M"]:
    r = jax.new_ref(x)  # here

    def write(i, c):
        r[...] = r[...] + 1
        return c

    lax.fori_loop(0, lax.axis_size("t"), write, 0)
    return r[...]


@wrong("neg: a minimum over this device's block is used before it is taken over d")
def least_by_the_largest_negative_of_unsigned(x: i32["B/d L"]) -> i32["L"]:
    return jnp.int32(-lax.pmax(-jnp.min(jnp.uint32(x), 0), "d"))  # -0 is 0, and the least of all


@wrong(
    "astype: each device rounds its term of a sum to float8_e4m3fn, so that the sum depends on the "
    "mesh"
)
def product_summed_over_devices_in_eight_bits(x: f32["B L/t"], w: f32["L/t M"]) -> f32["B M"]:
    return jnp.float32(lax.psum((x @ w).astype(jnp.float8_e4m3fn), "t"))


@wrong("mul: dim 0 is 16/d~ in one operand and 16/d in another: they hold different entries of it")
def sorted_tokens_meet_unsorted_gates(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    return (x[order] * scores[:, None])[jnp.argsort(order)]  # here


@wrong(
    "slice: a part is taken along dim 0, which is sharded over d~: each device sees only its own "
    "block"
)
def difference_to_the_token_before_in_order(x: f32["T/d M"], scores: f32["T/d"]) -> f32["T/d M"]:
    order = jnp.argsort(scores)
    y = x[order]
    return (y - jnp.roll(y, 1, axis=0))[jnp.argsort(order)]  # here


@wrong("rem: a value differs between devices of t by their index, and is not a position in a dim")
def matmul_scattered_to_the_next_device(x: f32["B M/t"], w: f32["M/t F"]) -> f32["B/t F"]:
    return scattered(x, w, first=0)


@wrong("where: an index is compared with what is not the end of a device's block")
def label_outside_of_either_end(logits: f32["B/d V/t"], labels: i32["B/d"]) -> f32["B/d"]:
    n = logits.shape[1]
    first = lax.axis_index("t") * n
    outside = (labels < first) | (labels > first + n)
    found = jnp.take_along_axis(logits, jnp.where(outside, 0, labels - first)[:, None], axis=1)[
        :, 0
    ]
    return lax.psum(jnp.where(outside, 0.0, found), "t")  # here


@wrong(
    "the program is another one on this mesh than on one device: matmul here, nothing more there"
)
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


def written(x, own, outside, mode="drop"):
    """Zeros like x with 1 at the entries `own`, or at `outside` for those that x lacks."""
    own = jnp.where((own >= 0) & (own < x.shape[1]), own, outside)  # here
    return jnp.zeros(x.shape).at[jnp.arange(len(x))[:, None], own].set(1.0, mode=mode)  # here


def of_padded(x):
    """All positions of L, with three zeros before them."""
    return jnp.pad(lax.all_gather(x, "t", axis=1, tiled=True), ((0, 0), (3, 0)))


@wrong(
    "mul: a number that depends on the mesh was multiplied into a value: it is 0.5 times what it "
    "is on one device"
)
@decoding
def decoding_by_logarithms_of_sums_times_a_local_size(s, own, e, total, of):
    factor = jnp.exp(own + jnp.log(total * s.shape[-1]) - lax.pmax(own, "t"))  # here
    return of_all(of(e / total) * factor) / of_all(total * scale(own))


@wrong(
    "astype: each device rounds its term of a sum to float8_e5m2, so that the sum depends on the "
    "mesh"
)
@decoding
def decoding_by_logarithms_of_sums_with_factors_in_8_bits(s, own, e, total, of):
    factor = (
        jnp.exp(own + jnp.log(total) - lax.pmax(own, "t")).astype(jnp.float8_e5m2).astype(s.dtype)
    )
    return of_all(of(e / total) * factor) / of_all(total * scale(own))


@wrong("and: two masks are not the two ends of one block")
def broadcast_of_what_is_in_a_block(x: f32["M/t"], ids: i32["M/t"]) -> f32["M/t"]:
    return lax.psum(
        jnp.where((lax.axis_index("d") == 0) & (ids - lax.axis_index("t") * len(x) >= 0), x, 0), "d"
    )


@wrong("matmul: a matmul of bools over a sharded dim is an `or`, not a sum")
def matmul_of_bools(x: f32["B/d F/t"], y: f32["F/t"]) -> f32["B/d"]:
    return lax.psum((x > 0).astype(bool) @ (y > 0), "t").astype(x.dtype)


@wrong("where: a maximum over this device's block is used before it is taken over t")
def broadcast_of_a_block_s_maximum(x: f32["B/d M/t"]) -> f32["B/d"]:
    return lax.psum(jnp.where(lax.axis_index("t") == 0, x.max(axis=1), 0), "t")


@wrong("where: a value differs between devices of d by their index, and is not a position in a dim")
def broadcast_of_the_number_of_a_device_of_another_axis(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * lax.psum(jnp.where(lax.axis_index("t") == 0, lax.axis_index("d"), 0), "t")


@wrong(
    "scatter: a value differs between devices of t by their index, and is not a position in a dim"
)
def candidates_of_other_blocks_clipped(x: f32["B/d V/t"], ids: i32["B/d K"]) -> f32["B/d V/t"]:
    return written(x, ids - offset("t", x.shape[1]), x.shape[1], "clip")


@wrong("and: two masks are not the two ends of one block")
def candidates_written_one_entry_too_early(x: f32["B/d V/t"], ids: i32["B/d K"]) -> f32["B/d V/t"]:
    return written(x, ids - offset("t", x.shape[1]) - lax.axis_index("t"), x.shape[1])


@wrong("sub: a number that depends on the mesh, 8 here and 16 on one device")
def candidates_of_the_next_block(x: f32["B/d V/t"], ids: i32["B/d K"]) -> f32["B/d V/t"]:
    return written(x, ids - offset("t", x.shape[1]) - x.shape[1], x.shape[1])


@wrong("sub: a maximum over this device's block is used before it is taken over t")
@decoding
def decoding_scaled_by_the_largest_of_another_tensor(s, own, e, total, of):
    other = jnp.max(2 * s, axis=-1, keepdims=True)
    return of_all(of(e) * scale(other)) / of_all(total * scale(other))


@wrong("mul: mul of a partial sum over t: the sum of the results is not the result of the sum")
@decoding
def sum_of_shares_of_different_queries(s, own, e, total, of):
    return of_all((of(e) * total).sum(axis=1, keepdims=True) * scale(own)[:, :1]) + 0 * of_all(
        of(e) * scale(own)
    )


@wrong(
    "dynamic_slice: a value differs between devices of t by their index, and is not a position in "
    "a dim"
)
def convolution_over_positions_past_the_end(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.dynamic_slice_in_dim(of_padded(x), offset("t", x.shape[1]) + 4, x.shape[1], 1)


@wrong(
    "dynamic_slice: a value differs between devices of t by their index, and is not a position in "
    "a dim"
)
def convolution_from_a_place_that_depends_on_the_mesh(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.dynamic_slice_in_dim(
        of_padded(x), offset("t", x.shape[1]) + 16 // x.shape[1], x.shape[1], 1
    )


@wrong("eq: a value differs between devices of t by their index, and is not a position in a dim")
def broadcast_from_a_device_that_one_device_lacks(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.psum(jnp.where(lax.axis_index("t") == 1, x, 0), "t")


@wrong("where: a condition is true on one device alone")
def broadcast_from_all_devices_but_the_first(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.psum(jnp.where(lax.axis_index("t") != 0, x, 0), "t")


@wrong("where: where of a partial sum over t: the sum of the results is not the result of the sum")
def broadcast_of_one_term_of_a_sum(x: f32["B/d M/t"]) -> f32["B/d"]:
    return lax.psum(jnp.where(lax.axis_index("t") == 0, x.sum(axis=1), 0), "t")


@wrong("or: two masks are not the two ends of one block")
def broadcast_from_the_first_devices_of_either_axis(x: f32["M"]) -> f32["M"]:
    return lax.psum(
        jnp.where((lax.axis_index("d") == 0) | (lax.axis_index("t") == 0), x, 0), ("d", "t")
    )


@wrong(
    "rev: the order is reversed along dim 1, which is sharded over t: each device sees only its "
    "own block"
)
def channel_shuffle_by_flip(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return jnp.flip(x, axis=-1)


@wrong(
    "sub: axis d would shard two dims of the result: each device sees only the matching pairs of "
    "blocks"
)
def pairwise_kernel_over_one_device_alone(x: f32["B/d M"]) -> f32["B/d"]:
    return jnp.mean(jnp.exp(-jnp.mean((x[:, None] - x[None]) ** 2, axis=-1)), axis=1)


@wrong("exp: exp of a partial sum over d: the sum of the results is not the result of the sum")
def perplexity_averaged_over_devices(losses: f32["B/d"]) -> f32[""]:
    return lax.pmean(jnp.exp(jnp.mean(losses)), "d")


@wrong("reshape: dim 0 of the result has 4 entries here and 2 on one device")
def microbatches_cut_from_local_rows(x: f32["B/d M"]) -> f32["2 R/d M"]:
    return x.reshape(2, -1, x.shape[1])


@wrong("all_to_all: all_to_all splits and joins one dim")
def blocks_exchanged_by_all_to_all(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.all_to_all(jnp.cos(x), "t", split_axis=1, concat_axis=1, tiled=True)


@wrong("the program is another one on this mesh than on one device: slice here, squeeze there")
def block_of_the_first_device_everywhere(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.all_gather(x, "d")[0]


@wrong(
    "psum: each device adds a value that is whole already: the result is 2 times what it is on one "
    "device"
)
def gradient_of_a_penalty_on_each_device(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return jax.grad(lambda w: lax.psum(sum_square(w, x) + 3 * jnp.sum(w * w), "d"))(w)


@wrong("result 0 is i32[8], positions within this device's block, and is declared i32[16/t]")
def position_ids_of_one_block(x: f32["B/d L/t"]) -> i32["L/t"]:
    return jnp.arange(x.shape[1], dtype=jnp.int32)


@wrong(
    "pure_callback: entries are taken together along dim 0, which is sharded over d: each device "
    "sees only its"
)
def callback_that_sorts_local_rows(x: f32["B/d M"]) -> f32["B/d M"]:
    return jax.pure_callback(
        lambda x: np.asarray(x)[np.argsort(x[:, 0])], jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


@wrong(
    "dynamic_slice: a part is taken along dim 1, which is sharded over t: each device sees only "
    "its own block"
)
def slice_at_a_global_position(x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    return x - lax.dynamic_slice_in_dim(x, 5, 1, axis=1)


@wrong(
    "scatter: entries are written along dim 1, which is sharded over t: each device sees only its "
    "own block"
)
def position_overwritten_on_each_device(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, 1].set(0.0)


@wrong("scatter: a number that depends on the mesh, 7 here and 15 on one device")
def last_token_zeroed_on_each_device(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, -1].set(0.0)


@wrong(
    "svd: entries are taken together along dim 0, which is sharded over t: each device sees only "
    "its own block"
)
def inverse_of_each_block_of_rows(a: f32["L/t S"]) -> f32["L/t S"]:
    return jnp.linalg.pinv(a).T


@wrong(
    "reduce_or: entries are taken together along dim 1, which is sharded over t: each device sees "
    "only its own"
)
def bits_of_a_block_by_their_maximum(x: i32["B/d L/t"]) -> i32["B/d"]:
    return lax.pmax(lax.reduce(x, np.int32(0), lax.bitwise_or, (1,)), "t")


@wrong("an array that was made outside of the program depends on the mesh: float32[16]")
def table_made_outside_for_this_mesh(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * TABLES[lax.axis_size("t")]


@wrong("integer_pow: its y depends on the mesh: 4 here, 8 on one device")
def power_of_a_local_size(x: f32["B/d"]) -> f32["B/d"]:
    return lax.integer_pow(1 + 0.1 * x, x.shape[0])


@wrong("reduce_sum: its axes depends on the mesh: (2,) here, (1,) on one device")
def sum_along_another_dim_for_small_blocks(x: f32["B/d M L"]) -> f32["B/d 16"]:
    return jnp.sum(x, axis=1 if x.shape[0] > 4 else 2)


@wrong("result 0 has shape (8,) here and (4,) on one device")
def shape_of_a_result_of_local_size(x: f32["B/d"]) -> f32["L/d"]:
    return jnp.ones(16 // 4)


@wrong("approx_top_k: its k depends on the mesh: 4 here, 8 on one device")
def approximate_best_of_sharded_rows(x: f32["B/d M"]) -> f32["8/d M"]:
    return lax.approx_max_k(x, x.shape[0], reduction_dimension=0)[0]


@wrong(
    "psum over d, in a loop of each device of d over its own rows: what meets there are different "
    "rows"
)
def gradients_summed_over_replicas_that_train_by_themselves(
    w: f32["R/d M"], x: f32["R/d B M"]
) -> f32["R/d M"]:
    def step(own):
        w, x = own
        return w - 0.1 * lax.pcast(lax.psum(jnp.tanh(x @ w) @ x, "d"), "d", to="varying")  # here

    return lax.map(step, (w, x))


@wrong("scan: a maximum over this device's block is used before it is taken over d")
def largest_product_of_each_row_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32["B/d"]:
    return lax.map(lambda row: jnp.max(y @ row), x)


@wrong("scan: the result is sharded over d, over which it is also a partial sum")
def sum_of_each_row_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32["B/d"]:
    return lax.map(lambda row: jnp.sum(jnp.exp(y @ row)), x)


@wrong(
    "scan: a partial sum over d is combined with a value that is not one, which each device would "
    "count once"
)
def start_of_a_sum_counted_by_each_device(x: f32["B/d M"], w: f32["M"]) -> f32["M"]:
    return lax.psum(over_rows(jnp.add, w, x), "d")


@wrong("scan: scan of a partial sum over d: the sum of the results is not the result of the sum")
def sum_of_products_with_own_rows(x: f32["B/d M"], y: f32["T/d M"]) -> f32[""]:
    return lax.psum(
        over_rows(lambda total, row: total + jnp.sum(jnp.exp(y @ row)), jnp.zeros(()), x), "d"
    )


@wrong(
    "scatter-max: entries are written along dim 0, which is sharded over d: each device sees only "
    "its own block"
)
def largest_of_own_rows_in_own_columns(
    x: f32["V M/d"], ids: i32["T/d"], y: f32["T/d"]
) -> f32["V M/d"]:
    return x.at[ids].max(3 * y[:, None])


@wrong("an array that was made outside of the program depends on the mesh: key<fry>[]")
def key_made_outside_for_this_mesh(x: f32["M"]) -> f32["M"]:
    return x + jax.random.normal(KEYS[lax.axis_size("t")], x.shape)


@wrong(
    "vary_unreduced_cast: a number that depends on the mesh was multiplied into a value: it is 2 "
    "times what it"
)
def replicated_value_taken_for_a_partial_sum(x: f32["M"]) -> f32["M"]:
    return lax.psum(lax.pcast(lax.pcast(x, "t", to="varying"), "t", to="unreduced"), "t")


@wrong("result 0 is i32[16/d], positions within this device's block, and is declared i32[16/d]")
def ranks_among_a_device_s_own(scores: f32["T/d"]) -> i32["T/d"]:
    return jnp.argsort(jnp.argsort(scores))


@wrong("scan: a loop runs 4 times here and 5 times on one device")
def buckets_among_a_device_s_own_edges(x: f32["B/d"], edges: f32["V/d"]) -> i32["B/d"]:
    return jnp.searchsorted(edges, x)


@wrong("random_bits: what is drawn from several keys of rbg depends on which of them a device has")
def numbers_by_the_rbg_key_of_each_row(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * jax.vmap(by_rbg)(offset("d", x.shape[0]) + jnp.arange(x.shape[0]))[:, None]


@wrong("the program is another one on this mesh than on one device: pvary here, nothing more there")
def doubled_where_there_are_several(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x * 2.0 if lax.axis_size("t") > 1 else x


@wrong(
    "the program is another one on this mesh than on one device: slice here, matmul there",
    vma=False,
)
def gather_of_a_weight_forgotten(x: f32["B/d M"], w: f32["M/t F"]) -> f32["B/d F"]:
    return x[:, : w.shape[0]] @ w


@wrong("arange: positions count from the start of this device's block, and are used at", vma=False)
def first_half_of_each_block_looked_up(x: f32["L/t"]) -> f32["8/t"]:
    return x[jnp.arange(x.shape[0] // 2)]


@wrong(
    "scatter-add: a part is written along dim 1, which is sharded over t: each device sees only "
    "its",
    vma=False,
)
def part_of_each_block_increased(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, 1:3].add(1.0)


@wrong(
    "scatter-add: a part is written along dim 0, which is sharded over t: each device sees only "
    "its",
    vma=False,
)
def block_added_to_the_first_entries(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return x.at[: u.shape[0]].add(u)


@wrong("scatter-add: dim 0 of operand 3 has 4 entries here and 8 on one device", vma=False)
def as_many_entries_increased_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return x.at[: u.shape[0]].add(1.0)


@wrong(
    "scatter-add: dim 0 is 8 in one operand and 16/t in another: they hold different entries of it",
    vma=False,
)
def block_scattered_to_local_positions(u: f32["L/t"]) -> f32["L"]:
    return lax.psum(jnp.zeros(16).at[jnp.arange(u.shape[0])].add(u), "t")


@wrong("scatter-add: dim 0 of operand 3 has 8 entries here and 16 on one device", vma=False)
def rows_of_a_block_counted_at_one_place(x: f32["L/t"]) -> f32["4"]:
    return jnp.zeros(4).at[jnp.zeros(x.shape[0], jnp.int32)].add(1.0)


@wrong(
    "dynamic_update_slice: a number that depends on the mesh, 7 here and 15 on one device",
    vma=False,
)
def part_written_at_a_local_size(x: f32["L"], u: f32["L/t"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(x, x[:2], u.shape[0] - jnp.int32(1), axis=0)


@wrong("dynamic_update_slice: dim 0 of operand 2 has 4 entries here and 8 on one device", vma=False)
def as_many_ones_written_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(x, jnp.ones(u.shape[0]), jnp.int32(3), axis=0)


@wrong(
    "bitcast_convert_type: bitcast_convert_type of a partial sum over t: the sum of the results is "
    "not",
    vma=False,
)
def bits_of_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t"]) -> i32["B/d"]:
    return lax.psum(lax.bitcast_convert_type(x @ w, jnp.int32), "t")


@wrong(
    "reshape: a reshape joins entries of different blocks of a sharded dim, or cuts across them",
    vma=False,
)
def reshaped_across_the_ends_of_blocks(x: f32["8/d 12/t"]) -> f32["24/d 4"]:
    return x.reshape(-1, 4)


@wrong("pad: dim 0 is padded by a number that depends on the mesh", vma=False)
def padded_by_the_size_of_a_block(x: f32["L"], u: f32["8/t"]) -> f32[""]:
    return jnp.var(jnp.pad(x, (0, u.shape[0])))


@wrong("reduce_prod: dim 0 of operand 1 has 8 entries here and 16 on one device", vma=False)
def power_by_a_product_of_repeated_numbers(x: f32["L/t"]) -> f32["L/t"]:
    return x * jnp.prod(jnp.full((x.shape[0],), 1.5))


@wrong(
    "argmax: an argmax is taken along dim 0, which is sharded over d, t: each device sees only its "
    "own",
    vma=False,
)
def argmax_of_a_flattened_block(x: f32["B/d L/t"]) -> i32[""]:
    return jnp.argmax(x.reshape(-1)).astype(jnp.int32)


@wrong(
    "conv_general_dilated: its padding depends on the mesh: ((1, 2),) here, ((3, 4),) on one "
    "device",
    vma=False,
)
def convolved_by_as_many_ones_as_a_block_has(x: f32["L"], u: f32["8/t"]) -> f32["L"]:
    return lax.conv(x[None, None], jnp.ones((1, 1, u.shape[0])), (1,), "SAME")[0, 0]


@wrong("cond: a maximum over this device's block is used before it is taken over t", vma=False)
def maximum_or_minimum_of_a_block(x: f32["B/d V/t"], i: i32["4"]) -> f32["B/d"]:
    return lax.pmax(
        lax.cond(i[0] < 99, lambda: jnp.min(x, axis=1), lambda: jnp.max(x, axis=1)), "t"
    )


@wrong(
    "cond: the condition differs between devices of d, t: they take different branches", vma=False
)
def branch_on_any_entry_of_a_block(x: f32["B/d M"], y: f32["M"]) -> f32["M"]:
    return lax.cond(jnp.any(x > 1.8), lambda: y, lambda: -y)


@wrong("cond: the number of branches depends on the mesh", vma=False)
def as_many_branches_as_devices(x: f32["M"], i: i32["4"]) -> f32["M"]:
    return lax.switch(i[0] + 9, [lambda x, k=k: x * k for k in range(lax.axis_size("t") + 1)], x)


@wrong(
    "random_seed: random_seed of a partial sum over d: the sum of the results is not the result of "
    "the",
    vma=False,
)
def key_of_a_partial_sum(x: f32["M"], ids: i32["B/d"]) -> f32["M"]:
    return x + jax.random.normal(jax.random.key(jnp.sum(ids)), x.shape)


@wrong("shard_map: shard_map may give another result on each device", vma=False)
def sum_in_a_map_within_a_map(x: f32["M"]) -> f32["M"]:
    return jax.shard_map(
        lambda x: lax.psum(x, "t"),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        axis_names={"t"},
        check_vma=False,
    )(x)


@wrong("composite: axis_index may give another result on each device", vma=False)
def index_of_a_device_in_a_composite(x: f32["M"]) -> f32["M"]:
    return lax.composite(lambda x: x + lax.axis_index("t"), "tests.shifted")(x)


@wrong(
    "integer_pow: integer_pow of a partial sum over blocks of 2: the sum of the results is not the",
    vma=False,
)
def squares_of_partial_sums_gathered(x: f32["B/d M/t"]) -> f32["B/d"]:
    return jnp.sum(lax.all_gather(x.sum(axis=1), "t") ** 2, axis=0)


@wrong(
    "while: devices of d decide for themselves, and psum_invariant within waits for all of them",
    hangs=True,
)
def collective_beneath_a_local_loop(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.while_loop(lambda x: jnp.sum(x * x) > 1.0, lambda x: x - 0.1 * lax.pmean(x, "d"), x)


def with_own_maxima(x, axis, factor):
    """A softmax over rows, in which each device subtracts its own maximum, and `factor` is to make
    up for that.
    """
    own = jnp.max(x, axis=1, keepdims=True)
    e = jnp.exp(x - own)  # here
    return e * factor(own) / lax.psum(jnp.sum(e, axis=1, keepdims=True) * factor(own), axis)


@wrong("sub: a maximum over this device's block is used before it is taken over t")
def own_maxima_made_up_for_the_other_way(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    return with_own_maxima(x, "t", lambda own: jnp.exp(lax.pmax(own, "t") - own))


@wrong("sub: a maximum over this device's block is used before it is taken over t")
def own_maxima_made_up_for_among_some_devices(x: f32["B V/t/d"]) -> f32["B V/t/d"]:
    return with_own_maxima(
        x, ("t", "d"), lambda own: jnp.exp(lax.pmax(own, "d") - lax.pmax(own, ("t", "d")))
    )


@wrong("ge: a maximum over this device's block is used before it is taken over t")
def index_of_any_that_the_largest_is_at_least(x: f32["B/d V/t"]) -> i32["B/d"]:
    return first_largest(x, lambda best, top: top >= best)


@wrong(
    "mul: entries that are out of range on this device are NaN, which multiplying by a mask does "
    "not remove"
)
def nan_of_other_blocks_times_zero(table: f32["V/t M"], ids: i32["4"]) -> f32["4 M"]:
    own, found = own_and_found(table, ids)
    return lax.psum(jnp.take(table, own, axis=0) * found[:, None], "t")  # here


@wrong("the program is another one")
def ring_of_sums_with_a_turn_too_few(x: f32["B M/t"], w: f32["M/t F"]) -> f32["B/t F"]:
    return scattered(x, w, turns=2)


@wrong("random_seed: a number that depends on the mesh")
def large_seed_with_a_local_size(x: f32["L/t"]) -> f32["L/t"]:
    return x * jax.random.normal(jax.random.key(20240101 + x.shape[0]))


@wrong("astype: astype of a partial sum over d")
def counts_that_wrap_around_before_they_are_summed(x: i32["B/d L/t"]) -> f32["L/t"]:
    return lax.psum((x.astype(jnp.uint32) << 29).sum(axis=0).astype(jnp.float32), "d")


@wrong("slice: a part is taken along dim 1, which is sharded over t")
def first_entries_of_blocks_summed(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x + lax.psum(x[:, 0], "d")[:, None]


@wrong(
    "scatter-add: entries were looked up by an index that is out of range on other devices",
    vma=False,
)
def entries_not_masked_scattered(table: f32["V/t"], ids: i32["4"]) -> f32["V"]:
    own, _ = own_and_found(table, ids)
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.take(table, own, mode="clip")), "t")


@wrong("scatter-add: scatter-add of a partial sum over d: the sum of the results is not", vma=False)
def sum_of_local_rows_scattered(x: f32["B/d"], ids: i32["B/d"]) -> f32["V"]:
    return lax.psum(jnp.zeros(16).at[ids].add(jnp.sum(x)), "d")


@wrong("sub: a maximum over this device's block is used before it is taken over d, t")
def blocks_weighted_by_the_largest_logarithm_of_some_devices(x: f32["B V/t/d"]) -> f32["B"]:
    own = jnp.max(x, axis=1)
    e = jnp.exp(x - own[:, None])
    total = jnp.sum(e, axis=1)
    log = own + jnp.log(total)
    share = jnp.exp(log - lax.pmax(log, "d"))
    mean = jnp.sum(e * x, axis=1) / total
    return lax.psum(mean * share, ("t", "d")) / lax.psum(share, ("t", "d"))


@wrong("all_gather: it gathers dim 0 over d, t, but it is sharded over t, d", vma=False)
def gather_of_axes_in_another_order(x: f32["V/t/d"]) -> f32["V"]:
    return lax.all_gather(x, ("d", "t"), tiled=True)


@wrong(
    "dynamic_update_slice: a value differs between devices of t by their index, and is not a",
    vma=False,
)
def part_written_with_the_index_of_a_device(x: f32["L"]) -> f32["L"]:
    return lax.dynamic_update_slice_in_dim(
        x, jnp.ones(2) + lax.axis_index("t"), jnp.int32(3), axis=0
    )
