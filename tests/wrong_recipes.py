"""Wrong per-device programs as they are written for experts, attention, losses, optimizers, samplers and solvers.

Each is plausible in its line: the right program differs from it by an axis, an offset or the place of a collective.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from right_programs import cross_entropy, ring
from running import program, programs_of

from shardlib.shardtypes import bool_, dtype_name, f32, i32

key = dtype_name("key")

# ---- experts ------------------------------------------------------------------------------------------------------

experts = functools.partial(program, "experts")


@experts(whole=lambda x, w: jnp.einsum("ecm,emf->ecf", x, w))
def experts_not_sent_back(x: f32["E T/t M"], w: f32["E/t M F"]) -> f32["E T/t F"]:
    y = jnp.einsum("ecm,emf->ecf", lax.all_to_all(x, "t", split_axis=0, concat_axis=1, tiled=True), w)
    return y.reshape(8, -1, y.shape[2])


@experts(whole=lambda p: jnp.where(p >= lax.top_k(p, 2)[0][:, 1:], p, 0.0))
def two_best_experts_of_each_block(p: f32["T/d E/t"]) -> f32["T/d E/t"]:
    return jnp.where(p >= lax.top_k(p, 2)[0][:, 1:], p, 0.0)


@experts(whole=lambda bias, load: bias + 0.1 * jnp.sign(jnp.mean(jnp.sum(load, axis=0)) - jnp.sum(load, axis=0)))
def expert_bias_by_local_loads(bias: f32["E"], load: f32["T/d E"]) -> f32["E"]:
    load = jnp.sum(load, axis=0)
    return bias + 0.1 * lax.pmean(jnp.sign(jnp.mean(load) - load), "d")


@experts(whole=lambda e: jnp.zeros(8).at[e % 8].add(1.0) / 16, vma=False)
def expert_loads_over_all_devices_twice(e: i32["T/d"]) -> f32["E"]:
    return lax.psum(jnp.zeros(8).at[e % 8].add(1.0) / 16, ("d", "t"))


# ---- attention and positions --------------------------------------------------------------------------------------

attention = functools.partial(program, "attention and positions")


def attend(q, k, v, mask=True):
    return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v


@attention(whole=lambda q, k, v, ids: attend(q, k, v, ids[:, :, None] == ids[:, None]), axes=("d", "c"))
def documents_of_queries_compared_with_local_ones(
    q: f32["B/d L/c D"], k: f32["B/d L/c D"], v: f32["B/d L/c D"], ids: i32["B/d L/c"]
) -> f32["B/d L/c D"]:
    return attend(q, k, v, ids[:, :, None] == ids[:, None])


@attention(whole=lambda q, k, v: attend(q, k, v), axes=("d", "c"))
def ring_attention_without_rescaling(q: f32["B/d L/c D"], k: f32["B/d S/c D"], v: f32["B/d S/c D"]) -> f32["B/d L/c D"]:
    total = 0.0
    for _ in range(lax.axis_size("c")):
        total = total + attend(q, k, v)
        k, v = lax.ppermute((k, v), "c", ring("c"))
    return total / lax.axis_size("c")


@attention(whole=lambda q, k: jnp.einsum("blkd,bsgd->bkls", q, jnp.repeat(k, 2, axis=2)))
def query_heads_paired_with_keys_of_all_heads(q: f32["B/d L T/t D"], k: f32["B/d S K D"]) -> f32["B/d T/t L S"]:
    n = q.shape[2] // 2
    return jnp.einsum("blkd,bskd->bkls", q, jnp.repeat(k[:, :, :n], 2, axis=2))


@attention(whole=lambda x: x * jnp.cos(jnp.arange(16)))
def positions_offset_by_the_number_of_devices(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x * jnp.cos(jnp.arange(x.shape[1]) + lax.axis_size("t"))


@attention(whole=lambda x: x * jnp.cos(jnp.arange(16)))
def positions_counted_back_from_the_last_device(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    n = x.shape[1]
    return x * jnp.cos(jnp.arange(n) + (lax.axis_size("t") - 1 - lax.axis_index("t")) * n)


@attention(whole=lambda x: x * jnp.cos(jnp.arange(16)))
def positions_of_the_axes_in_the_other_order(x: f32["L/t/d"]) -> f32["L/t/d"]:
    block = lax.axis_index("d") * lax.axis_size("t") + lax.axis_index("t")
    return x * jnp.cos(block * x.shape[0] + jnp.arange(x.shape[0]))


@attention(whole=lambda x, table: x + table)
def learned_positions_from_the_first_entry_on(x: f32["B/d L/t M"], table: f32["L M"]) -> f32["B/d L/t M"]:
    return x + lax.dynamic_slice_in_dim(table, lax.axis_index("t"), x.shape[1])


@attention(whole=lambda x, bias: x + bias[jnp.arange(16)[:, None] - jnp.arange(16) + 15])
def relative_bias_from_the_block_of_queries(x: f32["B/d L/t S"], bias: f32["F"]) -> f32["B/d L/t S"]:
    return x + bias[jnp.arange(x.shape[1])[:, None] - jnp.arange(16) + 15]


@attention(whole=lambda x, lengths: x[jnp.arange(8), lengths])
def last_position_looked_up_in_each_block(x: f32["B/d L/t"], lengths: i32["B/d"]) -> f32["B/d"]:
    n = x.shape[1]
    found = lengths // n == lax.axis_index("t")
    return lax.psum(jnp.where(found, x[jnp.arange(x.shape[0]), jnp.minimum(lengths, n - 1)], 0.0), "t")


# ---- losses and gradients -----------------------------------------------------------------------------------------

losses = functools.partial(program, "losses and gradients")


@losses(whole=lambda x, ids: cross_entropy(x, ids).mean())
def loss_divided_by_tokens_of_one_axis(x: f32["B/d L/t V"], ids: i32["B/d L/t"]) -> f32[""]:
    return lax.psum(jnp.sum(cross_entropy(x, ids)), ("d", "t")) / (8 * ids.shape[1])


@losses(whole=lambda x, m: jnp.sum(x * m) / jnp.sum(m), vma=False)
def masked_loss_over_the_mean_of_counts(x: f32["B/d L/t"], m: bool_["B/d L/t"]) -> f32[""]:
    return lax.pmean(jnp.sum(x * m), ("d", "t")) / lax.pmean(jnp.sum(m), "d")


@losses(whole=lambda x: jnp.std(x, axis=0))
def deviation_from_mean_squares_of_blocks(x: f32["B/d M"]) -> f32["M"]:
    return jnp.sqrt(lax.pmean(jnp.mean(x * x, axis=0), "d") - lax.pmean(jnp.mean(x, axis=0) ** 2, "d"))


@losses(whole=lambda x: jnp.prod(x, axis=1))
def product_of_a_block_summed(x: f32["B/d L/t"]) -> f32["B/d"]:
    return lax.psum(jnp.prod(x, axis=1), "t")


@losses(whole=lambda a, b: jnp.diag(a @ b.T))
def own_pairs_at_local_rows_of_gathered_ones(a: f32["B/d M"], b: f32["B/d M"]) -> f32["B/d"]:
    scores = a @ lax.all_gather(b, "d", tiled=True).T
    return scores[jnp.arange(a.shape[0]), jnp.arange(a.shape[0])]


def square(w, x):
    return jnp.sum(jnp.square(x @ w))


@jax.custom_vjp
def summed(x):
    return lax.psum(x, "t")


summed.defvjp(lambda x: (summed(x), None), lambda _, g: (lax.psum(g, "t"),))


@jax.custom_vjp
def copied(x):
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "d"),))


@losses(whole=jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w))), vma=False)
def custom_gradient_summed_over_the_batch_axis(x: f32["B/d M"], w: f32["M F/t"]) -> f32["B/d M"]:
    return jax.grad(lambda x: jnp.sum(jnp.sin(copied(x) @ w)))(x)


@jax.custom_jvp
def scaled(x):
    return x / lax.psum(jnp.sum(x * x), "d")


@scaled.defjvp
def _(primals, tangents):
    (x,), (v,) = primals, tangents
    return scaled(x), v / jnp.sum(x * x)


@losses(whole=lambda w, x: jax.hessian(lambda w: jnp.mean((x @ w) ** 2))(w))
def hessian_of_local_rows_summed(w: f32["M"], x: f32["B/d M"]) -> f32["M M"]:
    return lax.psum(jax.hessian(lambda w: jnp.mean((x @ w) ** 2))(lax.pcast(w, "d", to="varying")), "d")


@losses(whole=lambda x, w: jnp.mean(jax.checkpoint(jnp.tanh)(x @ w)))
def rematerialized_layer_of_a_partial_product(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32[""]:
    return lax.pmean(lax.psum(jnp.mean(jax.checkpoint(jnp.tanh)(x @ w)), "t"), "d")


# ---- optimizers, statistics, quantization -------------------------------------------------------------------------

states = functools.partial(program, "optimizer states and statistics")


@states(whole=lambda v, g: 0.9 * v + 0.1 * g.sum(0) ** 2)
def second_moment_of_unsummed_gradients(v: f32["M"], g: f32["B/d M"]) -> f32["M"]:
    return 0.9 * v + 0.1 * lax.psum(g.sum(axis=0) ** 2, "d")


@states(whole=lambda w: w / jnp.max(jnp.abs(w), axis=0))
def columns_scaled_by_the_maximum_of_another_axis(w: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return w / lax.pmax(jnp.max(jnp.abs(w), axis=0), "t")


@states(whole=lambda g: jnp.linalg.qr(g)[0])
def orthogonal_rows_of_a_block(g: f32["F/d M"]) -> f32["F/d M"]:
    return jnp.linalg.qr(g)[0]


@states(whole=lambda a, b: jnp.linalg.solve(a @ a.T + 9 * jnp.eye(16), b))
def system_solved_block_by_block(a: f32["L/t M"], b: f32["L/t"]) -> f32["L/t"]:
    return jnp.linalg.solve(a @ a.T + 9 * jnp.eye(a.shape[0]), b)


@states(whole=lambda a: jnp.linalg.inv(jnp.eye(16) + 0.1 * a))
def inverse_of_each_block_of_rows(a: f32["L/t S"]) -> f32["L/t S"]:
    return jnp.linalg.pinv(a).T


@states(whole=lambda g: jnp.sqrt(jnp.sum(g**2, axis=0)) + jnp.sum(jnp.abs(g), axis=0))
def norms_added_before_they_are_summed(g: f32["M/d F"]) -> f32["F"]:
    return jnp.sqrt(lax.psum(jnp.sum(g**2, axis=0), "d")) + jnp.sum(jnp.abs(lax.pmean(g.sum(axis=0), "d")))


@states(whole=lambda x: lax.shift_left(x, jnp.int32(1)).sum(0))
def bits_shifted_by_the_number_of_devices(x: i32["B/d M"]) -> i32["M"]:
    return lax.psum(lax.shift_left(x, jnp.int32(lax.axis_size("d"))).sum(axis=0), "d")


@states(whole=lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)))
def checksum_of_a_block_summed(x: i32["B/d M"]) -> i32["M"]:
    return lax.psum(lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)), "d")


@states(whole=lambda x: lax.reduce(x, np.int32(0), lax.bitwise_or, (1,)))
def bits_of_a_block_by_their_maximum(x: i32["B/d L/t"]) -> i32["B/d"]:
    return lax.pmax(lax.reduce(x, np.int32(0), lax.bitwise_or, (1,)), "t")


@states(whole=lambda x: lax.reduce(x, np.int32(-1), lax.bitwise_and, (1,)))
def bits_of_a_block_by_their_minimum(x: i32["B/d F/t"]) -> i32["B/d"]:
    return lax.pmin(lax.reduce(x | 1, np.int32(-1), lax.bitwise_and, (1,)), "t")


# ---- axes, shapes and layouts -------------------------------------------------------------------------------------

layouts = functools.partial(program, "axes, shapes and layouts")


@layouts(whole=lambda x: x.transpose(0, 2, 1).reshape(8, -1))
def heads_transposed_and_merged_as_the_minor_dim(x: f32["B/d K/t L"]) -> f32["B/d 128/t"]:
    return x.transpose(0, 2, 1).reshape(x.shape[0], -1)


@layouts(whole=lambda x: x.reshape(4, 2, 16).swapaxes(0, 1).reshape(8, 16))
def rows_permuted_within_blocks(x: f32["B/d M"]) -> f32["B/d M"]:
    return x.reshape(-1, 2, 16).swapaxes(0, 1).reshape(x.shape)


@layouts(whole=lambda x: jnp.cos(x), vma=False)
def gathered_over_the_major_axis_alone(x: f32["T/t/d M"]) -> f32["T/d M"]:
    return lax.all_gather(jnp.cos(x), "t", tiled=True)


@layouts(whole=lambda x: jnp.cos(x).sum(0), vma=False)
def gathered_untiled_and_summed_once_more(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(lax.all_gather(jnp.cos(x), "d").sum(axis=(0, 1)), "d")


@layouts(whole=lambda x: jnp.cos(x).mean(0), vma=False)
def mean_over_gathered_copies_of_another_axis(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(lax.all_gather(jnp.cos(x), "t").mean(axis=(0, 1)), "d") / lax.axis_size("t")


@layouts(whole=lambda x: jnp.cos(x))
def scattered_along_the_rows_for_the_columns(x: f32["T/d M"]) -> f32["T/d M/t"]:
    part = lax.psum_scatter(lax.pcast(jnp.cos(x), "t", to="varying"), "t", tiled=True) / lax.axis_size("t")
    return part.reshape(x.shape[0], -1)


@layouts(whole=lambda x: jnp.pad(x, ((0, 0), (0, 16)))[:, 4:20])
def padded_at_the_end_of_each_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return jnp.pad(x, ((0, 0), (0, x.shape[1])))[:, 2 : 2 + x.shape[1]]


@layouts(whole=lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * 0.5, axis=1)[:, ::-1])
def spectrum_filtered_in_each_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    spectrum = jnp.fft.rfft(x, axis=1)
    return jnp.fft.irfft(spectrum * (jnp.arange(spectrum.shape[1]) < 2), n=x.shape[1], axis=1)


@layouts(whole=lambda x, k: lax.conv(x, k, (1, 1), "SAME"))
def convolution_features_not_summed_over_devices(x: f32["B/d K/t H W"], k: f32["C K/t 3 3"]) -> f32["B/d C H W"]:
    return lax.pmean(lax.conv(x, k, (1, 1), "SAME"), "t")


@layouts(whole=lambda x, k: lax.conv(x, k, (2, 2), "SAME"))
def strided_convolution_over_sharded_rows(x: f32["B 1 T/t W"], k: f32["1 1 3 3"]) -> f32["B 1 H/t 4"]:
    return lax.conv(x, k, (2, 2), "SAME")


@layouts(whole=lambda w: w + w.T, axes=("t",))
def symmetrized_with_its_own_block(w: f32["M/t N"]) -> f32["M/t N"]:
    n = w.shape[0]
    return w + jnp.pad(w[:, :n].T, ((0, 0), (0, 16 - n)))


@layouts(whole=lambda x: jnp.tensordot(x, x, axes=((0, 1), (0, 1))), vma=False)
def norm_of_one_block(x: f32["M/d F/t"]) -> f32[""]:
    return lax.psum(jnp.tensordot(x, x, axes=((0, 1), (0, 1))), "t")


@layouts(whole=lambda x, y: jnp.sum(x) * jnp.sum(y), axes=("t",))
def outer_product_summed_over_one_axis(x: f32["L/t"], y: f32["S/t"]) -> f32[""]:
    shape = (x.shape[0], y.shape[0])
    return lax.psum(jnp.tensordot(jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(y, shape), 2), "t")


@layouts(whole=lambda x: lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)[:1], vma=False)
def bytes_of_the_first_entry_of_a_block(x: f32["L/t"]) -> i32["1 4"]:
    return lax.slice_in_dim(lax.bitcast_convert_type(x, jnp.uint8), 0, 1).astype(jnp.int32)


TABLES = {n: np.linspace(0.0, n, 16, dtype=np.float32) for n in (1, 2, 4)}


@layouts(whole=lambda x: x * TABLES[1])
def table_made_outside_for_this_mesh(x: f32["B/d M"]) -> f32["B/d M"]:
    return x * TABLES[lax.axis_size("t")]


PROGRAMS = programs_of(globals())
