"""Per-device programs that compute something else than is meant, though most pass every check of JAX.

Each class begins with a line that names it. Where `whole` is not given, the same function on whole arrays is meant.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from running import program, programs_of

from shardlib import shardops
from shardlib.shardtypes import bool_, dtype_name, f32, i32

key = dtype_name("key")

# ---- normalizations along a sharded dim ---------------------------------------------------------------------------

normalized = functools.partial(program, "normalization along a sharded dim")


@normalized
def softmax_over_vocabulary(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    return jax.nn.softmax(x, axis=-1)


@normalized
def log_softmax_over_vocabulary(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    return jax.nn.log_softmax(x, axis=-1)


@normalized
def layer_norm_over_a_sharded_model_dim(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


@normalized
def rms_norm_over_a_sharded_model_dim(x: f32["B/d L M/t"]) -> f32["B/d L M/t"]:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


@normalized
def batch_norm_with_local_statistics(x: f32["B/d M"]) -> f32["B/d M"]:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


@normalized
def rewards_scaled_to_unit_range(rewards: f32["B/d"]) -> f32["B/d"]:
    return (rewards - rewards.min()) / (rewards.max() - rewards.min())


@normalized
def median_of_the_batch_subtracted(x: f32["B/d M"]) -> f32["B/d M"]:
    return x - jnp.median(x, axis=0)


@normalized
def unit_vectors_of_a_sharded_dim(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@normalized
def weight_norm_over_sharded_rows(w: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return w / jnp.linalg.norm(w, axis=0)


@normalized(whole=lambda x, ids: -jnp.take_along_axis(jax.nn.log_softmax(x), ids[:, None], axis=1)[:, 0])
def cross_entropy_with_local_logsumexp(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    hit = jax.nn.one_hot(ids - lax.axis_index("t") * x.shape[1], x.shape[1])
    return lax.pmean(jax.nn.logsumexp(x, axis=-1), "t") - lax.psum(jnp.sum(hit * x, axis=-1), "t")


@normalized(whole=lambda x: jnp.mean(jax.nn.logsumexp(x, axis=-1) ** 2))
def z_loss_of_local_logits(x: f32["B/d V/t"]) -> f32[""]:
    return lax.pmean(jnp.mean(jax.nn.logsumexp(x, axis=-1) ** 2), ("d", "t"))


# ---- order and neighbours along a sharded dim ---------------------------------------------------------------------

ordered = functools.partial(program, "sort, scan, shift or window along a sharded dim")


@ordered
def cumulative_sum_over_positions(x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    return jnp.cumsum(x, axis=1)


@ordered
def cumulative_maximum_over_positions(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.cummax(x, axis=1)


@ordered
def reversed_cumulative_logsumexp(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.cumlogsumexp(x, axis=1, reverse=True)


@ordered
def segment_ids_by_counting_starts(is_start: bool_["B/d L/t"]) -> i32["B/d L/t"]:
    return jnp.cumsum(is_start.astype(jnp.int32), axis=1)


@ordered
def sort_over_vocabulary(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    return jnp.sort(x, axis=-1)


@ordered
def ranks_by_double_argsort(x: f32["B/d V/t"]) -> i32["B/d V/t"]:
    return jnp.argsort(jnp.argsort(x, axis=-1), axis=-1)


@ordered
def top_k_mask_over_vocabulary(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    return jnp.where(x >= lax.top_k(x, 2)[0][:, -1:], x, 0.0)


@ordered
def gradients_sparsified_by_a_local_quantile(g: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return jnp.where(jnp.abs(g) >= jnp.quantile(jnp.abs(g), 0.8), g, 0.0)


@ordered
def channel_shuffle_by_flip(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return jnp.flip(x, axis=-1)


@ordered
def selective_state_space_scan_over_positions(a: f32["B/d L/t M"], x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    return lax.associative_scan(combine, (jax.nn.sigmoid(a), x), axis=1)[1]


@ordered
def image_convolution_over_a_sharded_width(x: f32["B/d 1 H W/t"], kernel: f32["1 1 3 3"]) -> f32["B/d 1 H W/t"]:
    return lax.conv(x, kernel, (1, 1), "SAME")


@ordered
def maximum_pooling_over_positions(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")


@ordered
def bilinear_upsampling_of_a_sharded_width(x: f32["B/d H W/t"]) -> f32["B/d H W/t"]:
    return jax.image.resize(x, (*x.shape[:2], 2 * x.shape[2]), "bilinear")


@ordered
def sliding_window_attention_without_halo(q: f32["B/d L/t D"], v: f32["B/d L/t D"]) -> f32["B/d L/t D"]:
    shifted = lambda x, i: jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, : x.shape[1]]
    scores = jnp.stack([jnp.sum(q * shifted(q, i), axis=-1) for i in range(3)], axis=-1)
    return jnp.einsum("bls,bsld->bld", jax.nn.softmax(scores), jnp.stack([shifted(v, i) for i in range(3)], axis=1))


@ordered
def pairwise_kernel_over_one_device_alone(x: f32["B/d M"]) -> f32["B/d"]:
    return jnp.mean(jnp.exp(-jnp.mean((x[:, None] - x[None]) ** 2, axis=-1)), axis=1)


# ---- optimizers, clipping, quantization of blocks -----------------------------------------------------------------

updates = functools.partial(program, "optimizer, clipping or quantization of a block")


@updates
def adafactor_clipped_by_local_rms(update: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(update))) / 0.5)


@updates
def lamb_trust_ratio_of_a_block(w: f32["M/d F/t"], update: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return w - 0.1 * jnp.linalg.norm(w) / jnp.linalg.norm(update) * update


@updates
def sign_descent_scaled_by_the_local_mean(g: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return jnp.sign(g) * jnp.abs(g).mean()


@updates(whole=lambda g: g * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(g)))
def clipping_by_a_norm_over_one_axis_of_two(g: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return g * jnp.minimum(1.0, lax.rsqrt(lax.psum(jnp.sum(g * g), "d")))


@updates
def int8_quantization_by_local_amax(w: f32["M/d F/t"]) -> i32["M/d F/t"]:
    return jnp.round(w * 127 / jnp.max(jnp.abs(w))).astype(jnp.int32)


@updates
def ternary_weights_by_local_absmean(w: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return jnp.clip(jnp.round(w / jnp.abs(w).mean()), -1, 1)


@updates(whole=lambda x, w: (lambda s: (jnp.round(x * s) / s) @ w)(4 / jnp.max(jnp.abs(x), axis=1, keepdims=True)))
def activation_scales_of_a_block(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    scale = 4 / jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return lax.psum((jnp.round(x * scale) / scale) @ w, "t")


@updates
def spike_guard_on_local_gradients(g: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return jnp.where(jnp.max(jnp.abs(g)) > 2.5, 0.0, g)


# ---- reductions whose parts do not add up -------------------------------------------------------------------------

reductions = functools.partial(program, "mean over devices of what is not linear")


@reductions(whole=lambda losses: jnp.exp(jnp.mean(losses)))
def perplexity_averaged_over_devices(losses: f32["B/d"]) -> f32[""]:
    return lax.pmean(jnp.exp(jnp.mean(losses)), "d")


@reductions(whole=lambda p: 8 * jnp.sum(jax.nn.softmax(p).mean(0) * (p == p.max(1, keepdims=True)).mean(0)))
def load_balance_loss_averaged_over_devices(p: f32["T/d E"]) -> f32[""]:
    chosen = (p == p.max(axis=1, keepdims=True)).mean(axis=0)
    return lax.pmean(8 * jnp.sum(jax.nn.softmax(p).mean(axis=0) * chosen), "d")


@reductions(whole=lambda losses, mask: jnp.sum(losses * mask) / jnp.sum(mask))
def masked_mean_averaged_over_devices(losses: f32["B/d"], mask: bool_["B/d"]) -> f32[""]:
    return lax.pmean(jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1), "d")


@reductions(whole=lambda a, b: -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T))))
def contrastive_loss_with_local_negatives(a: f32["B/d M"], b: f32["B/d M"]) -> f32[""]:
    return lax.pmean(-jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T))), "d")


@reductions(whole=jnp.max)
def maximum_averaged_over_devices(x: f32["B/d M"]) -> f32[""]:
    return lax.pmean(jnp.max(x), "d")


@reductions(whole=lambda x: jnp.linalg.slogdet(x.T @ x / 8 + jnp.eye(16))[1])
def log_determinant_of_local_covariances(x: f32["B/d M"]) -> f32[""]:
    return lax.pmean(jnp.linalg.slogdet(x.T @ x / x.shape[0] + jnp.eye(x.shape[1]))[1], "d")


# ---- reshape, transpose, split, concatenation of a sharded dim ----------------------------------------------------

reshaped = functools.partial(program, "reshape, split or concatenation of a sharded dim")


@reshaped
def square_block_transposed(w: f32["M/d N/t"]) -> f32["M/d N/t"]:
    return w.T


@reshaped
def swapped_batch_and_heads(x: f32["B/d K/t"]) -> f32["B/d K/t"]:
    return jnp.einsum("bk->kb", x)


@reshaped
def fused_gate_and_up_split(x: f32["B/d F/t"]) -> f32["B/d M/t"]:
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


@reshaped
def heads_merged_as_the_minor_dim(x: f32["B/d L D K/t"]) -> f32["B/d L F/t"]:
    return x.reshape(*x.shape[:2], -1)


@reshaped
def residual_and_skip_concatenated(a: f32["B/d M/t"], b: f32["B/d M/t"]) -> f32["B/d F/t"]:
    return jnp.concatenate([a, b], axis=-1)


@reshaped
def prompt_concatenated_with_sharded_keys(prompt: f32["B/d L/t D"], k: f32["B/d S/t D"]) -> f32["B/d F/t D"]:
    return jnp.concatenate([prompt, k], axis=1)


@reshaped
def microbatches_cut_from_local_rows(x: f32["B/d M"]) -> f32["2 R/d M"]:
    return x.reshape(2, -1, x.shape[1])


@reshaped
def tokens_flattened_over_two_sharded_dims(x: f32["B/d L/t M"]) -> f32["T/t/d M"]:
    return x.reshape(-1, x.shape[-1])


@reshaped
def tokens_flattened_over_sharded_positions(x: f32["B L/t M"]) -> f32["T/t M"]:
    return x.reshape(-1, x.shape[-1])


@reshaped
def parameter_flattened_over_both_dims(w: f32["M/t F/d"]) -> f32["N/t/d"]:
    return w.ravel()


@reshaped
def image_patches_across_a_sharded_width(x: f32["B/d H W/t"]) -> f32["B/d T/t 4"]:
    patches = x.reshape(x.shape[0], 4, 2, -1, 2).transpose(0, 1, 3, 2, 4)
    return patches.reshape(x.shape[0], -1, 4)


@reshaped
def rotated_halves_of_a_sharded_dim(x: f32["B/d F/t"]) -> f32["B/d F/t"]:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1)


@reshaped
def grouped_keys_tiled_over_sharded_heads(k: f32["B/d K/t D"]) -> f32["B/d T/t D"]:
    return jnp.tile(k, (1, 2, 1))


@reshaped
def lower_triangle_of_a_weight_block(w: f32["M/d N/t"]) -> f32["M/d N/t"]:
    return jnp.tril(w)


@reshaped(whole=jnp.trace)
def trace_of_blocks_off_the_diagonal(w: f32["M/d N/t"]) -> f32[""]:
    return lax.psum(jnp.trace(w), ("d", "t"))


@reshaped
def pixels_shuffled_into_a_sharded_width(x: f32["B/d H W/t C"]) -> f32["B/d T F/t"]:
    x = x.reshape(*x.shape[:3], 2, 2).transpose(0, 1, 3, 4, 2)
    return x.reshape(x.shape[0], 16, -1)


# ---- a device's size taken for the whole --------------------------------------------------------------------------

local_sizes = functools.partial(program, "a device's size for the whole")


@local_sizes(whole=lambda x: jnp.mean(x, axis=0))
def mean_divided_by_local_rows(x: f32["B/d M"]) -> f32["M"]:
    return lax.psum(jnp.sum(x, axis=0), "d") / x.shape[0]


@local_sizes
def initial_weights_scaled_by_local_fan_in(noise: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return noise / jnp.sqrt(noise.shape[0])


@local_sizes(whole=lambda x, ids: 0.9 * jnp.take_along_axis(x, ids[:, None], 1)[:, 0] + 0.1 * x.mean(1))
def label_smoothing_by_local_vocabulary_size(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32["B/d"]:
    hit = jax.nn.one_hot(ids - lax.axis_index("t") * x.shape[1], x.shape[1])
    return lax.psum(jnp.sum((0.9 * hit + 0.1 / x.shape[1]) * x, axis=1), "t")


@local_sizes(whole=lambda p: p.shape[1] * jnp.sum(p.mean(0) ** 2))
def balance_loss_scaled_by_local_experts(p: f32["T/d E/t"]) -> f32[""]:
    return p.shape[1] * lax.psum(jnp.sum(lax.pmean(p.mean(axis=0), "d") ** 2), "t")


@local_sizes(whole=lambda q, k: jnp.einsum("bld,bsd->bls", q, k) * jnp.log(16.0))
def attention_temperature_of_local_length(q: f32["B/d L D"], k: f32["B/d S/t D"]) -> f32["B/d L S/t"]:
    return jnp.einsum("bld,bsd->bls", q, k) * jnp.log(float(k.shape[1]))


@local_sizes
def retention_decay_of_local_heads(x: f32["B/d L K/t"]) -> f32["B/d L K/t"]:
    return x * (1 - 2.0 ** (-1 - jnp.arange(x.shape[2])))


@local_sizes
def drop_path_rate_by_local_layer(x: f32["R/t M"]) -> f32["R/t M"]:
    return x * (1 - jnp.linspace(0.0, 0.5, x.shape[0]))[:, None]


@local_sizes(whole=lambda x, e: jax.ops.segment_sum(x, e % 8, num_segments=8))
def segment_sum_with_local_number_of_segments(x: f32["T/d M"], e: i32["T/d"]) -> f32["E M"]:
    sums = jax.ops.segment_sum(x, e % 8, num_segments=x.shape[0])
    return lax.psum(jnp.pad(sums, ((0, 8 - x.shape[0]), (0, 0))), "d")


# ---- local positions ----------------------------------------------------------------------------------------------

positions = functools.partial(program, "local positions")


@positions
def sinusoidal_positions(x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    return x + jnp.sin(jnp.arange(x.shape[1])[:, None] / 10.0 ** jnp.linspace(0, 1, x.shape[2]))


@positions
def learned_positions(x: f32["B/d L/t M"], table: f32["L M"]) -> f32["B/d L/t M"]:
    return x + table[: x.shape[1]]


@positions
def rotary_embedding(x: f32["B/d L/t D"]) -> f32["B/d L/t D"]:
    angle = jnp.arange(x.shape[1])[:, None] * jnp.array([1.0, 0.1])
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


@positions
def padding_mask_from_lengths(x: f32["B/d L/t"], lengths: i32["B/d"]) -> f32["B/d L/t"]:
    return jnp.where(jnp.arange(x.shape[1]) < lengths[:, None], x, 0.0)


@positions
def prefix_mask(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return jnp.where(jnp.arange(x.shape[1]) < 3, x, 0.0)


@positions
def dilated_mask(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return jnp.where(jnp.arange(x.shape[1]) % 3 == 0, x, 0.0)


@positions
def row_number_in_a_sharded_batch(x: f32["B/d M"]) -> f32["B/d M"]:
    return x + jnp.arange(x.shape[0])[:, None]


@positions(whole=lambda x: x + jnp.arange(16.0))
def offset_by_the_index_on_another_axis(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x + lax.axis_index("d") * x.shape[1] + jnp.arange(x.shape[1])


@positions(whole=lambda x: x + jnp.arange(16.0))
def offset_by_the_index_without_the_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x + lax.axis_index("t") + jnp.arange(x.shape[1])


@positions(whole=lambda x: x + jnp.arange(16.0))
def offset_by_the_block_of_another_dim(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x + lax.axis_index("t") * x.shape[0] + jnp.arange(x.shape[1])


# ---- random numbers -----------------------------------------------------------------------------------------------

random = functools.partial(program, "one random block on all devices")


@random
def dropout_with_one_key(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    return jnp.where(jax.random.bernoulli(k, 0.5, x.shape), 2 * x, 0.0)


@random
def attention_dropout_over_sharded_heads(p: f32["B/d K/t L"], k: key[""]) -> f32["B/d K/t L"]:
    return p * jax.random.bernoulli(k, 0.9, p.shape)


@random(
    whole=lambda x, k: x * jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(k, i)))(jnp.arange(8))[:, None]
)
def stochastic_depth_by_local_row(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    kept = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(k, row)))(jnp.arange(x.shape[0]))
    return x * kept[:, None]


@random
def diffusion_times_by_split_keys(x: f32["B/d M"], k: key[""]) -> f32["B/d M"]:
    return x * jax.vmap(jax.random.uniform)(jax.random.split(k, x.shape[0]))[:, None]


@random(whole=lambda x, k: x * jax.random.bernoulli(k, 0.5, x.shape))
def dropout_by_rows_but_not_by_positions(x: f32["B/d L/t"], k: key[""]) -> f32["B/d L/t"]:
    return x * jax.random.bernoulli(jax.random.fold_in(k, lax.axis_index("d")), 0.5, x.shape)


@random(vma=False, whole=lambda x, k: x * jax.random.bernoulli(jax.random.fold_in(k, 0), 0.5, x.shape))
def dropout_that_differs_between_replicas(x: f32["B M"], k: key[""]) -> f32["B M"]:
    return x * jax.random.bernoulli(jax.random.fold_in(k, lax.axis_index("t")), 0.5, x.shape)


# ---- raw collectives ----------------------------------------------------------------------------------------------

collectives = functools.partial(program, "raw collectives")


@collectives(whole=lambda x, w: x @ w)
def psum_over_the_batch_axis_too(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(x @ w, ("d", "t"))


@collectives(whole=lambda x, w: x @ w, vma=False)
def psum_forgotten(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return x @ w


@collectives(whole=lambda x, w: x @ w, vma=False)
def gather_of_a_weight_forgotten(x: f32["B/d M"], w: f32["M/t F"]) -> f32["B/d F"]:
    return x[:, : w.shape[0]] @ w


@collectives(whole=lambda x, w: x @ w)
def pmax_of_a_partial_product(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.pmax(x @ w, "t")


@collectives(whole=lambda x: jnp.max(x, axis=1))
def psum_of_local_maxima(x: f32["B/d V/t"]) -> f32["B/d"]:
    return lax.psum(jnp.max(x, axis=1), "t")


@collectives(whole=lambda x, w: jax.nn.relu(x @ w))
def activation_before_the_psum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(jax.nn.relu(x @ w), "t")


@collectives(whole=lambda x, w, b: x @ w + b)
def bias_added_before_the_psum(x: f32["B/d F/t"], w: f32["F/t M"], b: f32["M"]) -> f32["B/d M"]:
    return lax.psum(x @ w + b, "t")


@collectives(whole=lambda x, w: jnp.square(x @ w))
def square_of_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum(jnp.square(x @ w), "t")


@collectives(whole=lambda x, w, v: (x @ w) * (x @ v))
def product_of_two_partial_sums(x: f32["B/d F/t"], w: f32["F/t M"], v: f32["F/t M"]) -> f32["B/d M"]:
    return lax.psum((x @ w) * (x @ v), "t")


@collectives(whole=jnp.sin)
def gather_on_the_wrong_dim(x: f32["B M/t"]) -> f32["B M"]:
    return lax.all_gather(jnp.sin(x), "t", axis=0, tiled=True, to="invarying")


@collectives(whole=jnp.sin)
def gather_merged_on_the_wrong_side(x: f32["B/d M/t"]) -> f32["B/d M"]:
    return lax.all_gather(jnp.sin(x), "t", axis=2, to="invarying").reshape(x.shape[0], -1)


@collectives(whole=lambda x: jnp.sum(x, axis=0))
def gather_of_a_replicated_value(x: f32["B M"]) -> f32["M"]:
    return jnp.sum(lax.all_gather(x, "t", tiled=True, to="invarying"), axis=0)


@collectives(whole=lambda w: 2 * w)
def gather_over_two_axes_in_the_wrong_order(w: f32["M/t/d"]) -> f32["M"]:
    return lax.all_gather(2 * w, ("d", "t"), tiled=True, to="invarying")


@collectives(whole=lambda w: 2 * w)
def gathers_one_after_the_other_in_the_wrong_order(w: f32["M/t/d"]) -> f32["M"]:
    w = lax.all_gather(2 * w, "t", tiled=True, to="invarying")
    return lax.all_gather(w, "d", tiled=True, to="invarying")


@collectives(whole=lambda x: jnp.sum(x, axis=0))
def scatter_over_two_axes_in_the_wrong_order(x: f32["B/t/d M"]) -> f32["M/t/d"]:
    return lax.psum_scatter(jnp.sum(x, axis=0), ("d", "t"), tiled=True)


@collectives(whole=lambda x, w: x @ w)
def scatter_without_a_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d M/t"]:
    y, n = x @ w, w.shape[1] // lax.axis_size("t")
    return lax.dynamic_slice_in_dim(y, lax.axis_index("t") * n, n, axis=1)


@collectives(whole=jnp.cos)
def blocks_exchanged_by_all_to_all(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return lax.all_to_all(jnp.cos(x), "t", split_axis=1, concat_axis=1, tiled=True)


@collectives(whole=jnp.cos)
def all_to_all_with_swapped_dims(x: f32["B/d L/t K D"]) -> f32["B/d L K/t D"]:
    return lax.all_to_all(jnp.cos(x), "t", split_axis=1, concat_axis=2, tiled=True)


@collectives(whole=jnp.cos)
def all_to_all_merged_in_the_wrong_order(x: f32["B/d L/t K"]) -> f32["B/d L K/t"]:
    n = lax.axis_size("t")
    x = lax.all_to_all(jnp.cos(x).reshape(*x.shape[:2], n, -1), "t", split_axis=2, concat_axis=2)
    return x.reshape(x.shape[0], -1, 8 // n)


@collectives(whole=lambda x: jnp.roll(x, 1, axis=1))
def halo_that_does_not_wrap(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    last = lax.ppermute(x[:, -1:], "t", [(i, i + 1) for i in range(lax.axis_size("t") - 1)])
    return jnp.concatenate([last, x[:, :-1]], axis=1)


@collectives(whole=lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0))))
def halo_from_the_wrong_neighbour(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    last = lax.ppermute(x[:, -1:], "t", [(i + 1, i) for i in range(lax.axis_size("t") - 1)])
    return jnp.concatenate([last, x[:, :-1]], axis=1)


@collectives(whole=lambda x: jnp.exp(x))
def blocks_shifted_by_ppermute(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return shardops.ppermute("B/d L/t", jnp.exp(x), axis="t", shift=1)


@collectives(whole=lambda x: jnp.sum(x, axis=1), vma=False)
def ring_sum_one_step_short(x: f32["B/d L/t"]) -> f32["B/d"]:
    n, part = lax.axis_size("t"), jnp.sum(x, axis=1)
    total = part
    for _ in range(n // 2):
        part = lax.ppermute(part, "t", [(i, (i + 1) % n) for i in range(n)])
        total += part
    return total


@collectives(whole=lambda x: jnp.sum(x, axis=1), vma=False, axes=("t",))
def sum_over_groups_of_devices(x: f32["B L/t"]) -> f32["B"]:
    n = lax.axis_size("t")
    return lax.psum(jnp.sum(x, axis=1), "t", axis_index_groups=[[i] for i in range(n)])


@collectives(whole=lambda x: x - x.mean(0))
def mean_over_the_wrong_axis_subtracted(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x - lax.pmean(x.mean(axis=0), "t")


@collectives(whole=lambda x: x)
def block_of_the_first_device_everywhere(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.all_gather(x, "d")[0]


@collectives(whole=lambda g: g)
def compressed_gradients_of_one_replica(g: f32["M/d"]) -> f32["M/d"]:
    return lax.psum(jnp.where(lax.axis_index("d") == 0, g, 0.0), "d")


# ---- gradients ----------------------------------------------------------------------------------------------------

gradients = functools.partial(program, "gradients")


def mean_square(w, x):
    return jnp.mean(jnp.square(x @ w))


def sum_square(w, x):
    return jnp.sum(jnp.square(x @ w))


@gradients(whole=jax.grad(mean_square))
def gradient_of_a_local_mean_with_gathered_weights(w: f32["M/d N"], x: f32["B/d M"]) -> f32["M/d N"]:
    return jax.grad(lambda w: mean_square(lax.all_gather(w, "d", tiled=True), x))(w)


@gradients(whole=jax.grad(sum_square), vma=False)
def gradient_through_an_unchecked_psum(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return lax.psum(jax.grad(lambda w: lax.psum(sum_square(w, x), "d"))(w), "d")


@gradients(whole=jax.grad(lambda x, up, down: jnp.sum(jnp.square(jax.nn.relu(x @ up) @ down))), vma=False)
def gradient_of_a_column_parallel_input_not_summed(x: f32["B M"], up: f32["M F/t"], down: f32["F/t M"]) -> f32["B M"]:
    return jax.grad(lambda x: jnp.sum(jnp.square(lax.psum(jax.nn.relu(x @ up) @ down, "t"))))(x)


@jax.custom_vjp
def gathered_with_a_mean(w):
    return lax.all_gather(w, "d", tiled=True)


gathered_with_a_mean.defvjp(
    lambda w: (gathered_with_a_mean(w), None),
    lambda _, g: (lax.psum_scatter(g, "d", tiled=True) / lax.axis_size("d"),),
)


@jax.custom_vjp
def gathered_without_a_sum(w):
    return lax.all_gather(w, "d", tiled=True)


def own_block(_, g):
    n = g.shape[0] // lax.axis_size("d")
    return (lax.dynamic_slice_in_dim(g, lax.axis_index("d") * n, n),)


gathered_without_a_sum.defvjp(lambda w: (gathered_without_a_sum(w), None), own_block)


@gradients(whole=jax.grad(sum_square))
def custom_gradient_of_a_gather_is_a_slice(w: f32["M/d N"], x: f32["B/d M"]) -> f32["M/d N"]:
    return jax.grad(lambda w: sum_square(gathered_without_a_sum(w), x))(w)


@jax.custom_vjp
def clipped_backward(x):
    return x


clipped_backward.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


@gradients(whole=lambda w, x: jnp.square(jax.grad(mean_square)(w, x)))
def second_moment_of_local_gradients(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return lax.pmean(jnp.square(jax.grad(mean_square)(lax.pcast(w, "d", to="varying"), x)), "d")


@gradients(whole=lambda w, x: jnp.sign(jax.grad(mean_square)(w, x)))
def signs_of_local_gradients_averaged(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return lax.pmean(jnp.sign(jax.grad(mean_square)(lax.pcast(w, "d", to="varying"), x)), "d")


@gradients(whole=sum_square)
def loss_of_the_first_device_alone(w: f32["M N"], x: f32["B/d M"]) -> f32[""]:
    return lax.psum(jnp.where(lax.axis_index("d") == 0, sum_square(w, x), 0.0), "d")


@gradients(whole=jax.grad(lambda w, x: sum_square(w, x) + 3 * jnp.sum(w * w)))
def gradient_of_a_penalty_on_each_device(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return jax.grad(lambda w: lax.psum(sum_square(w, x) + 3 * jnp.sum(w * w), "d"))(w)


def contrastive(a, b):
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(a @ b.T)))


@gradients(whole=jax.grad(contrastive, argnums=1))
def negatives_gathered_without_gradient(a: f32["B/d M"], b: f32["B/d M"]) -> f32["B/d M"]:
    start = lax.axis_index("d") * a.shape[0]

    def loss(b):
        others = lax.stop_gradient(lax.all_gather(b, "d", tiled=True))
        logits = a @ lax.dynamic_update_slice_in_dim(others, b, start, axis=0).T
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), start + jnp.arange(len(b))[:, None], 1))

    return jax.grad(loss)(b)


@gradients(whole=lambda w, x: jax.grad(lambda w: jnp.log(sum_square(w, x)))(w))
def gradient_of_the_log_of_a_local_sum(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    return jax.grad(lambda w: lax.psum(jnp.log(sum_square(w, x)), "d"))(w)


@gradients(whole=lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w))
def cotangent_of_each_device_scaled_by_its_index(w: f32["M N"], x: f32["B/d M"]) -> f32["M N"]:
    y, back = jax.vjp(lambda w: jnp.tanh(x @ w), w)
    return back(jnp.ones_like(y) * (1.0 + lax.axis_index("d")))[0]


# ---- a whole value declared as a block ----------------------------------------------------------------------------

blocks = functools.partial(program, "a whole value declared as a block")


@blocks(whole=lambda x: jnp.arange(16, dtype=jnp.int32))
def position_ids_of_one_block(x: f32["B/d L/t"]) -> i32["L/t"]:
    return jnp.arange(x.shape[1], dtype=jnp.int32)


@blocks(whole=lambda x: x + 1)
def replicated_value_returned_as_sharded(x: f32["B M"]) -> f32["B M/t"]:
    return x + 1


@blocks(whole=lambda x, y: x * y[:, None])
def replicated_labels_cut_to_the_first_rows(x: f32["B/d M"], y: f32["B"]) -> f32["B/d M"]:
    return x * y[: x.shape[0], None]


@blocks(whole=lambda w: w[:8])
def slice_of_a_gathered_weight(w: f32["M/d N"]) -> f32["R/d N"]:
    whole = lax.all_gather(w, "d", tiled=True)
    return whole[: w.shape[0] // 2]


@blocks(whole=lambda w, x: x @ w)
def columns_of_a_replicated_weight(w: f32["M F"], x: f32["B/d M"]) -> f32["B/d F/t"]:
    return x @ w[:, : w.shape[1] // lax.axis_size("t")]


# ---- control flow -------------------------------------------------------------------------------------------------

control = functools.partial(program, "control flow with a local predicate")


@control
def branch_on_the_local_mean(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.cos, x)


@control
def switch_by_local_argmax(x: f32["B/d M"]) -> f32["B/d M"]:
    branches = [jnp.sin, jnp.cos, jnp.tanh, jnp.exp]
    return lax.switch(jnp.argmax(jnp.sum(x, axis=0)) % 4, branches, x)


@control
def halving_until_the_local_norm_is_small(g: f32["M/d F/t"]) -> f32["M/d F/t"]:
    return lax.while_loop(lambda g: jnp.sum(g * g) > 1.0, lambda g: 0.9 * g, g)


@control
def as_many_steps_as_local_tokens(x: f32["B/d M"], mask: bool_["B/d"]) -> f32["B/d M"]:
    return lax.fori_loop(0, jnp.sum(mask), lambda _, x: 0.8 * x, x)


@control
def early_exit_when_local_rows_are_sure(x: f32["B/d M"]) -> f32["B/d M"]:
    unsure = lambda state: (state[0] < 9) & (jnp.max(state[1]) < 4.0)
    step = lambda state: (state[0] + 1, 1.2 * state[1])
    return lax.while_loop(unsure, step, (0, x))[1]


@control(whole=jnp.sin)
def another_function_on_each_device(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.switch(lax.axis_index("d") % 2, [jnp.sin, jnp.cos], x)


@control(vma=False)
def weights_halved_where_the_local_sum_is_positive(w: f32["M"], x: f32["B/d M"]) -> f32["M"]:
    return lax.cond(jnp.sum(x) > 0, lambda w: 0.5 * w, lambda w: w, w)


@control(whole=lambda x: x * 0.5 ** (jnp.max(x) > 0.8))
def loss_scale_halved_on_some_devices(x: f32["B/d"]) -> f32["B/d"]:
    return lax.fori_loop(0, (jnp.max(x) > 0.8).astype(int), lambda _, x: 0.5 * x, x)


@control(hangs=True, whole=lambda x: jnp.where(jnp.sum(x) > 0, jnp.sum(x, axis=0), jnp.zeros(16)))
def collective_beneath_a_local_branch(x: f32["B/d M"]) -> f32["M"]:
    total = lambda x: lax.psum(jnp.sum(x, axis=0), "d")
    return lax.cond(jnp.sum(x) > 0, total, lambda x: jnp.zeros(x.shape[1]), x)


@control(hangs=True, whole=lambda x: x)
def collective_beneath_a_local_loop(x: f32["B/d M"]) -> f32["B/d M"]:
    return lax.while_loop(lambda x: jnp.sum(x * x) > 1.0, lambda x: x - 0.1 * lax.pmean(x, "d"), x)


@control(hangs=True, whole=lambda x, mask: x)
def collective_in_as_many_steps_as_local_tokens(x: f32["B/d M"], mask: bool_["B/d"]) -> f32["B/d M"]:
    step = lambda _, x: x / lax.pmax(jnp.max(x), "d")
    return lax.fori_loop(0, jnp.sum(mask), step, x)


@control(hangs=True, whole=lambda x: x)
def exchange_on_the_first_device_alone(x: f32["B/d M"]) -> f32["B/d M"]:
    exchange = lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)])
    return lax.cond(lax.axis_index("d") == 0, exchange, lambda x: x, x)


@control(hangs=True, whole=lambda x: x)
def gather_in_one_branch_of_a_switch(x: f32["B/d M"]) -> f32["B/d M"]:
    gathered = lambda x: x + lax.all_gather(x, "d", tiled=True).mean(axis=0)
    return lax.switch(jnp.argmax(x[0]) % 2, [lambda x: x, gathered], x)


@control(hangs=True, whole=lambda x: x)
def predicate_with_a_collective_of_a_local_loop(x: f32["B/d M"]) -> f32["B/d M"]:
    running = lambda x: (lax.pmax(jnp.max(x), "t") > 1.0) & (jnp.max(x) > 1.0)
    return lax.while_loop(running, lambda x: 0.5 * x, x)


# ---- indices, lookups, scatters -----------------------------------------------------------------------------------

indices = functools.partial(program, "local indices")


@indices(whole=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))
def argmax_without_offset(x: f32["B/d V/t"]) -> i32["B/d"]:
    best = jnp.max(x, axis=1)
    return lax.pmax(jnp.where(best == lax.pmax(best, "t"), jnp.argmax(x, axis=1).astype(jnp.int32), 0), "t")


@indices(vma=False, whole=lambda x: jnp.argsort(jnp.sum(x, axis=0)))
def argsort_of_a_partial_sum(x: f32["B/d M"]) -> i32["M"]:
    return jnp.argsort(jnp.sum(x, axis=0))


@indices(vma=False, whole=lambda x: jnp.argmax(x, axis=0).astype(jnp.int32))
def argmax_over_sharded_rows(x: f32["B/d M"]) -> i32["M"]:
    return jnp.argmax(x, axis=0).astype(jnp.int32)


@indices(vma=False, whole=lambda x: jnp.median(x, axis=0))
def callback_on_local_rows(x: f32["B/d M"]) -> f32["M"]:
    median = lambda x: np.median(x, axis=0).astype(np.float32)
    return jax.pure_callback(median, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), x)


@indices(whole=lambda x: x[jnp.argsort(x[:, 0])])
def callback_that_sorts_local_rows(x: f32["B/d M"]) -> f32["B/d M"]:
    return jax.pure_callback(lambda x: np.asarray(x)[np.argsort(x[:, 0])], jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@indices
def slice_at_a_global_position(x: f32["B/d L/t M"]) -> f32["B/d L/t M"]:
    return x - lax.dynamic_slice_in_dim(x, 5, 1, axis=1)


@indices
def cache_written_at_a_global_position(cache: f32["B/d L/t D"], k: f32["B/d D"]) -> f32["B/d L/t D"]:
    return lax.dynamic_update_slice_in_dim(cache, k[:, None], 5, axis=1)


@indices
def position_overwritten_on_each_device(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, 1].set(0.0)


@indices
def last_token_zeroed_on_each_device(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return x.at[:, -1].set(0.0)


@indices(whole=lambda ids: jnp.zeros(16).at[ids].add(1.0))
def histogram_with_unshifted_ids(ids: i32["B/d"]) -> f32["V/t"]:
    return lax.psum(jnp.zeros(16 // lax.axis_size("t")).at[ids].add(1.0), "d")


@indices(whole=lambda table, ids: table[ids])
def embedding_with_unshifted_ids(table: f32["V/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    return lax.psum(jnp.take(table, ids, axis=0, mode="fill", fill_value=0.0), "t")


@indices(whole=lambda table, ids: table[ids])
def embedding_shifted_in_the_wrong_order_of_axes(table: f32["V/t/d M"], ids: i32["B"]) -> f32["B M"]:
    block = lax.axis_index("d") * lax.axis_size("t") + lax.axis_index("t")
    hit = jax.nn.one_hot(ids - block * table.shape[0], table.shape[0])
    return lax.psum(hit @ table, ("d", "t"))


@indices(whole=lambda x, ids: jnp.take_along_axis(x, ids[:, None, None] % 16, axis=1)[:, 0])
def last_token_by_length_of_sharded_positions(x: f32["B/d L/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    return lax.pmean(jnp.take_along_axis(x, ids[:, None, None] % x.shape[1], axis=1)[:, 0], "t")


@indices
def first_true_positions(mask: bool_["L/t"], x: f32["L/t"]) -> f32["L/t"]:
    return x[jnp.nonzero(mask, size=mask.shape[0], fill_value=0)[0]]


@indices(whole=lambda edges, x: jnp.sum(edges[None] < x[:, None], axis=1).astype(jnp.int32))
def bucket_by_the_maximum_of_local_counts(edges: f32["V/t"], x: f32["B/d"]) -> i32["B/d"]:
    return lax.pmax(jnp.sum(edges[None] < x[:, None], axis=1).astype(jnp.int32), "t")


@indices(whole=lambda x, i: x[jnp.argsort(i)])
def tokens_sorted_by_expert_on_one_device(x: f32["T/d M"], i: i32["T/d"]) -> f32["T/d M"]:
    return x[jnp.argsort(i, stable=True)]


@indices(whole=lambda x: jnp.argmin(jnp.abs(x - x.mean(0)).sum(1)) + jnp.zeros(8, jnp.int32))
def index_of_the_nearest_row(x: f32["B/d M"]) -> i32["B/d"]:
    nearest = jnp.argmin(jnp.abs(x - lax.pmean(x.mean(axis=0), "d")).sum(axis=1)).astype(jnp.int32)
    return nearest + jnp.zeros(x.shape[0], jnp.int32)


PROGRAMS = programs_of(globals())
