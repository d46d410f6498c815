"""Right per-device programs of methods that papers describe. Each is to compute what it computes on one device.

A program with `escape` holds values on the way that are no blocks of a whole value; its reason says why it is right.
"""

import functools
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax
from right_programs import cross_entropy, key, logsumexp, offset, picked, ring
from running import one_device, program, programs_of

from shardlib import shardops
from shardlib.shardtypes import bool_, f32, i32, typed


def own(x, axis: str, size: int, dim: int = 0):
    """This device's block of `size` entries."""
    return lax.dynamic_slice_in_dim(x, offset(axis, size), size, dim)


def places(axis: str, size: int):
    """Positions of the entries of this device's block of `size` entries."""
    return offset(axis, size) + jnp.arange(size)


def whole(x, axis: str, dim: int = 0):
    """The blocks of all devices along `axis`."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def same(x, axis: str, dim: int = 0):
    """The blocks of all devices along `axis`, which JAX knows to be the same on each."""
    return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")


def method(kind: str):
    """Decorator: a program that is to compute what it computes on one device."""
    return functools.partial(program, kind, whole=one_device)


# ---- experts ------------------------------------------------------------------------------------------------------

experts = method("experts")


@experts(axes=("d", "expert"))
def top_2_experts_with_a_capacity_per_sequence(
    x: f32["B/d/expert L M"], router: f32["M E"], w: f32["E/expert M F"]
) -> f32["B/d/expert L F"]:
    gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
    hot = jax.nn.one_hot(chosen, router.shape[1])  # b l 2 e
    first, second = jnp.moveaxis(hot, 2, 0)
    slots = jnp.stack([jnp.cumsum(first, 1), jnp.cumsum(second, 1) + first.sum(1, keepdims=True)], axis=2) - 1
    placed = hot[..., None] * jax.nn.one_hot(jnp.where(slots < 6, slots, -1).astype(int), 6)
    sent = jnp.einsum("blkec,blm->becm", placed, x)
    received = lax.all_to_all(sent, "expert", split_axis=1, concat_axis=0, tiled=True)
    y = jnp.einsum("becm,emf->becf", received, w)
    back = lax.all_to_all(y, "expert", split_axis=0, concat_axis=1, tiled=True)
    return jnp.einsum("blkec,blk,becf->blf", placed, gates, back)


@experts
def expert_choice_of_gathered_tokens(x: f32["T/d M"], router: f32["M E"], w: f32["E/t M F"]) -> f32["T/d F"]:
    tokens, n = whole(x, "d"), w.shape[0]
    gates, ids = lax.top_k(jax.nn.softmax(tokens @ router).T, 4)
    gates, ids = own(gates, "t", n), own(ids, "t", n)
    y = jnp.einsum("ecm,emf->ecf", tokens[ids], w) * gates[..., None]
    out = lax.psum(jnp.zeros((tokens.shape[0], w.shape[2])).at[ids].add(y), "t")
    return own(out, "d", x.shape[0])


@experts
def expert_choice_with_the_router_sharded(x: f32["T M"], router: f32["M E/t"], w: f32["E/t M F"]) -> f32["T F"]:
    gates, ids = lax.top_k((x @ router).T, 4)
    y = jnp.einsum("ecm,emf->ecf", x[ids], w) * jax.nn.sigmoid(gates)[..., None]
    return lax.psum(jnp.zeros((x.shape[0], w.shape[2])).at[ids].add(y), "t")


@experts
def balance_by_a_bias_from_global_loads(x: f32["T/d M"], router: f32["M E"], bias: f32["E"]) -> f32["E"]:
    chosen = lax.top_k(jax.nn.sigmoid(x @ router) + bias, 2)[1]
    load = lax.psum(jnp.zeros(bias.shape).at[chosen.reshape(-1)].add(1.0), "d")
    return bias + 1e-3 * jnp.sign(load.mean() - load)


@experts
def experts_limited_to_groups(x: f32["T/d M"], router: f32["M E"]) -> (f32["T/d 2"], i32["T/d 2"]):
    scores = jax.nn.sigmoid(x @ router)
    groups = scores.reshape(scores.shape[0], 4, -1)
    best = lax.top_k(lax.top_k(groups, 2)[0].sum(axis=-1), 2)[1]
    kept = jnp.zeros(groups.shape[:2], bool).at[jnp.arange(scores.shape[0])[:, None], best].set(True)
    return tuple(lax.top_k(jnp.where(kept[..., None], groups, 0.0).reshape(scores.shape), 2))


@experts
def shared_and_routed_experts(
    x: f32["T/d M"], up: f32["M F/t"], down: f32["F/t M"], router: f32["M E"], w: f32["E/t M M"]
) -> f32["T/d M"]:
    gates = jax.nn.softmax(x @ router)
    routed = jnp.einsum("te,tm,emn->tn", own(gates * (gates > 0.1), "t", w.shape[0], 1), x, w)
    return x + lax.psum(jax.nn.silu(x @ up) @ down + routed, "t")


@experts
def tokens_sorted_by_expert_and_back(x: f32["T/d M"], router: f32["M E"], scale: f32["E"]) -> f32["T/d M"]:
    chosen = jnp.argmax(x @ router, axis=-1)
    order = jnp.argsort(chosen)
    y = jnp.tanh(x[order]) * scale[chosen[order]][:, None]
    return jnp.zeros_like(x).at[order].set(y)


# ---- attention ----------------------------------------------------------------------------------------------------

attentions = method("attention")


def attend(q, k, v, mask=True):
    """Attention of b k l d to b k s d."""
    scores = jnp.where(mask, jnp.einsum("bkld,bksd->bkls", q, k) / q.shape[-1] ** 0.5, -1e9)
    return jnp.einsum("bkls,bksd->bkld", jax.nn.softmax(scores), v)


def causal(n: int):
    return jnp.tri(n, dtype=bool)


def rotated(x, where, base=100.0):
    """Rotary embedding of the last dim at positions `where`, those of the dim before it."""
    angles = where[:, None] * base ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)


@attentions
def latent_attention(
    x: f32["B/d L M"], down: f32["M 8"], rope: f32["M D"], up: f32["8 2 K/t D"], q: f32["M K/t 8"], o: f32["K/t D M"]
) -> f32["B/d L M"]:
    latent = x @ down
    k, v = jnp.einsum("blc,cjkd->jbkld", latent * lax.rsqrt(jnp.mean(latent**2, -1, keepdims=True) + 1e-6), up)
    shared = rotated(x @ rope, jnp.arange(x.shape[1]))[:, None]
    k = jnp.concatenate([k, jnp.broadcast_to(shared, k.shape)], axis=-1)
    q = jnp.einsum("blm,mkd->bkld", x, q)
    q = jnp.concatenate([q[..., :4], rotated(q[..., 4:], jnp.arange(x.shape[1]))], axis=-1)
    return lax.psum(jnp.einsum("bkld,kdm->blm", attend(q, k, v, causal(x.shape[1])), o), "t")


@attentions
def sliding_window_with_biases_of_global_heads(
    q: f32["B/d K/t L D"], k: f32["B/d K/t L D"], v: f32["B/d K/t L D"]
) -> f32["B/d K/t L D"]:
    distance = jnp.arange(q.shape[2])[:, None] - jnp.arange(k.shape[2])
    bias = -(2.0 ** -(1.0 + places("t", q.shape[1])))[:, None, None] * distance
    scores = jnp.einsum("bkld,bksd->bkls", q, k) + bias
    return jax.nn.softmax(jnp.where((distance >= 0) & (distance < 5), scores, -1e9)) @ v


@attentions
def long_rotary_embedding_of_a_block_of_positions(
    q: f32["B/d K L/t D"], k: f32["B/d K L/t D"], v: f32["B/d K L/t D"]
) -> f32["B/d K L/t D"]:
    where = places("t", q.shape[2])
    unit = lambda x: x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    q, k = (0.1 * jnp.log(8.0) + 1) * rotated(unit(q), where / 8), rotated(unit(k), where / 8)
    k, v = whole(k, "t", 2), whole(v, "t", 2)
    return attend(q, k, v, where[:, None] >= jnp.arange(k.shape[2]))


@attentions
def grouped_queries(q: f32["B/d L F/t D"], k: f32["B/d L K/t D"], v: f32["B/d L K/t D"]) -> f32["B/d L F/t D"]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.where(causal(q.shape[1]), jnp.einsum("blkgd,bskd->bkgls", grouped, k), -1e9)
    return jnp.einsum("bkgls,bskd->blkgd", jax.nn.softmax(scores), v).reshape(q.shape)


@attentions
def positions_restarted_at_each_document(starts: bool_["B/d L"], x: f32["B/d L D"]) -> f32["B/d L D"]:
    where = jnp.arange(x.shape[1])
    begin = lax.cummax(jnp.where(starts, where, 0), axis=1)
    return jax.vmap(rotated)(x, where - begin)


@attentions
def caches_written_at_the_length_of_each_row(
    cache: f32["B/d L K/t D"], new: f32["B/d K/t D"], length: i32["B/d"]
) -> f32["B/d L K/t D"]:
    def write(cache, new, at):
        before = lax.dynamic_slice_in_dim(cache, at, 1, axis=0)
        return lax.dynamic_update_slice_in_dim(cache, new[None] + 0.5 * before, at, axis=0)

    return jax.vmap(write)(cache, new, length)


@attentions
def windows_of_an_image_shifted(x: f32["B/d H W K/t D"]) -> f32["B/d H W K/t D"]:
    x = jnp.roll(x, (-2, -2), axis=(1, 2))
    w = x.reshape(x.shape[0], 2, 4, 2, 4, *x.shape[3:]).transpose(0, 5, 1, 3, 2, 4, 6)
    flat = w.reshape(*w.shape[:4], 16, -1)
    y = jax.nn.softmax(flat @ flat.swapaxes(-1, -2)) @ flat
    y = y.reshape(w.shape).transpose(0, 2, 4, 3, 5, 1, 6).reshape(x.shape)
    return jnp.roll(y, (2, 2), axis=(1, 2))


# ---- recurrences over whole positions -----------------------------------------------------------------------------

recurrences = method("recurrences over whole positions")


@recurrences
def delta_rule(
    q: f32["L B/d K/t D"], k: f32["L B/d K/t D"], v: f32["L B/d K/t D"], beta: f32["L B/d K/t"]
) -> f32["L B/d K/t D"]:
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)

    def step(state, now):
        q, k, v, beta = now
        error = v - jnp.einsum("bkde,bkd->bke", state, k)
        state = state + jax.nn.sigmoid(beta)[..., None, None] * k[..., None] * error[..., None, :]
        return state, jnp.einsum("bkd,bkde->bke", q, state)

    return lax.scan(step, jnp.einsum("bkd,bke->bkde", k[0], 0 * v[0]), (q, k, v, beta))[1]


@recurrences
def time_mixing_of_receptances(
    x: f32["B/d L M"], mix: f32["3 M"], w: f32["3 M F/t"], decay: f32["F/t"], bonus: f32["F/t"]
) -> f32["B/d L F/t"]:
    shifted = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    mixed = mix[:, None, None] * x + (1 - mix[:, None, None]) * shifted
    r, k, v = jnp.einsum("jblm,jmf->jlbf", mixed, w)

    def step(carry, now):
        above, below, peak = carry
        k, v = now
        new = jnp.maximum(peak, bonus + k)
        a, b = jnp.exp(peak - new), jnp.exp(bonus + k - new)
        out = (a * above + b * v) / (a * below + b)
        new = jnp.maximum(peak - jnp.exp(decay), k)
        a, b = jnp.exp(peak - jnp.exp(decay) - new), jnp.exp(k - new)
        return (a * above + b * v, a * below + b, new), out

    out = lax.scan(step, (0 * k[0], 0 * k[0], 0 * k[0] - 1e9), (k, v))[1]
    return (jax.nn.sigmoid(r) * out).swapaxes(0, 1)


@recurrences
def long_convolution_by_fourier_transforms(x: f32["B/d L F/t"], taps: f32["L F/t"]) -> f32["B/d L F/t"]:
    n = 2 * x.shape[1]
    spectrum = jnp.fft.rfft(x, n=n, axis=1) * jnp.fft.rfft(taps, n=n, axis=0)
    return jnp.fft.irfft(spectrum, n=n, axis=1)[:, : x.shape[1]]


@recurrences
def diagonal_state_space_with_complex_numbers(
    x: f32["B/d L F/t"], log_a: f32["F/t D"], b: f32["F/t D"], c: f32["2 F/t D"]
) -> f32["B/d L F/t"]:
    a = lax.complex(-jnp.exp(log_a), b)
    powers = jnp.exp(a[..., None] * (0.1 * jnp.arange(x.shape[1])))
    kernel = 2 * jnp.einsum("fd,fdl->fl", lax.complex(c[0], c[1]), powers).real
    spectrum = jnp.fft.rfft(x.swapaxes(1, 2), n=32) * jnp.fft.rfft(kernel, n=32)
    return jnp.fft.irfft(spectrum, n=32)[..., : x.shape[1]].swapaxes(1, 2)


@recurrences
def real_gated_recurrence(x: f32["B/d L F/t"], gate: f32["B/d L F/t"], lam: f32["F/t"]) -> f32["B/d L F/t"]:
    log_a = -8 * jax.nn.softplus(lam) * jax.nn.sigmoid(gate)
    a, b = jnp.exp(log_a), jnp.sqrt(-jnp.expm1(2 * log_a)) * x
    return lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (a, b), axis=1)[1]


@recurrences
def partition_function_of_a_chain(
    scores: f32["B/d L V"], moves: f32["V V"], tags: i32["B/d L"], length: i32["B/d"]
) -> f32["B/d"]:
    def step(alpha, now):
        score, i = now
        new = jax.nn.logsumexp(alpha[:, :, None] + moves, axis=1) + score
        return jnp.where((i < length)[:, None], new, alpha), None

    alpha = lax.scan(step, scores[:, 0], (scores[:, 1:].swapaxes(0, 1), jnp.arange(1, scores.shape[1])))[0]
    path = jnp.take_along_axis(scores, tags[..., None], axis=2)[..., 0]
    steps = moves[tags[:, :-1], tags[:, 1:]]
    mask = jnp.arange(scores.shape[1]) < jnp.maximum(length, 1)[:, None]
    return jax.nn.logsumexp(alpha, axis=1) - jnp.sum(path * mask, 1) - jnp.sum(steps * mask[:, 1:], axis=1)


# ---- layers and residual streams ----------------------------------------------------------------------------------

layers = method("layers and residual streams")


@layers
def hyper_connections(
    x: f32["B/d L/t M"], static: f32["layers 4 5"], dynamic: f32["layers M 5"], w: f32["layers M M"]
) -> f32["B/d L/t M"]:
    def layer(streams, now):
        static, dynamic, w = now
        normed = streams * lax.rsqrt(jnp.mean(streams**2, axis=-1, keepdims=True) + 1e-6)
        mix = static + 0.1 * jnp.tanh(normed @ dynamic)
        width, depth = mix[..., :4], mix[..., 4]
        y = jnp.tanh(jnp.einsum("blnm,bln->blm", streams, depth) @ w)
        return jnp.einsum("blnm,blnk->blkm", streams, width) + y[:, :, None], None

    return lax.scan(layer, jnp.repeat(x[:, :, None], 4, axis=2), (static, dynamic, w))[0].sum(axis=2)


@layers
def group_norm_with_groups_sharded(x: f32["B/d H W F/t"], scale: f32["F/t"]) -> f32["B/d H W F/t"]:
    groups = x.reshape(*x.shape[:3], -1, 4)
    mean = groups.mean(axis=(1, 2, 4), keepdims=True)
    groups = (groups - mean) * lax.rsqrt(jnp.var(groups, axis=(1, 2, 4), keepdims=True) + 1e-5)
    return groups.reshape(x.shape) * scale


@layers
def patches_of_images_sharded_by_rows(x: f32["B/d H/t W C"], w: f32["16 M"], where: f32["16 M"]) -> f32["B/d 4/t 4 M"]:
    n = x.shape[1] // 2
    patches = x.reshape(x.shape[0], n, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape[0], n, 4, 16)
    return patches @ w + own(where.reshape(4, 4, -1), "t", n)


@layers(escape=True, reason="the rows next to the block come from the neighbours, and zeros beyond the image")
def convolution_of_an_image_with_halos(x: f32["B/d C H/t W"], kernel: f32["R C 3 3"]) -> f32["B/d R H/t W"]:
    n = lax.axis_size("t")
    above = lax.ppermute(x[:, :, -1:], "t", [(i, i + 1) for i in range(n - 1)])
    below = lax.ppermute(x[:, :, :1], "t", [(i + 1, i) for i in range(n - 1)])
    return lax.conv(jnp.concatenate([above, x, below], axis=2), kernel, (1, 1), [(0, 0), (1, 1)])


@layers
def convolution_with_sharded_input_channels(x: f32["B/d F/t H W"], kernel: f32["R F/t 3 3"]) -> f32["B/d R H W"]:
    return lax.psum(lax.conv(jax.nn.relu(x), kernel, (2, 2), "SAME"), "t")


@layers
def depthwise_convolution_of_sharded_channels(x: f32["B/d F/t H W"], kernel: f32["F/t 1 3 3"]) -> f32["B/d F/t H W"]:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=x.shape[1])


@layers
def max_pooling_of_sharded_channels(x: f32["B/d H W F/t"]) -> f32["B/d 4 4 F/t"]:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@layers
def graph_layer_with_sharded_nodes(x: f32["T/d M"], edges: i32["T/d 2"], w: f32["M F/t"]) -> f32["T/d F/t"]:
    nodes = whole(x, "d") @ w
    messages = jnp.zeros_like(nodes).at[edges[:, 1]].add(jnp.tanh(nodes[edges[:, 0]]))
    return lax.psum_scatter(messages, "d", tiled=True)


# ---- losses -------------------------------------------------------------------------------------------------------

losses = method("losses")


@losses
def multi_token_prediction(x: f32["B/d L M"], heads: f32["2 M M"], table: f32["V/t M"], ids: i32["B/d L"]) -> f32[""]:
    total = 0.0
    for i in range(2):
        logits = jnp.tanh(x @ heads[i])[:, : -1 - i] @ table.T
        total += lax.pmean(jnp.mean(logsumexp(logits, "t") - picked(logits, ids[:, 1 + i :], "t")), "d")
    return total / 2


@losses
def symmetric_contrastive_loss_with_its_temperature(
    a: f32["B/d M"], b: f32["B/d M"], log_scale: f32[""]
) -> (f32[""], f32[""]):
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(log_scale):
        at = places("d", a.shape[0])
        one = cross_entropy(jnp.exp(log_scale) * unit(a) @ whole(unit(b), "d").T, at)
        other = cross_entropy(jnp.exp(log_scale) * unit(b) @ whole(unit(a), "d").T, at)
        return lax.pmean(jnp.mean(one + other) / 2, "d")

    return jax.value_and_grad(loss)(log_scale)


@losses
def sigmoid_contrastive_loss(a: f32["B/d M"], b: f32["B/d M"], bias: f32[""]) -> f32[""]:
    others = whole(b, "d")
    sign = 2.0 * (places("d", a.shape[0])[:, None] == jnp.arange(others.shape[0])) - 1
    total = -jnp.sum(jax.nn.log_sigmoid(sign * (a @ others.T + bias)))
    return lax.psum(total, "d") / others.shape[0]


@losses(escape=True, reason="after all steps of the ring each device has met all negatives; only its own are positive")
def sigmoid_contrastive_loss_around_a_ring(a: f32["B/d M"], b: f32["B/d M"], bias: f32[""]) -> f32[""]:
    n, total = lax.axis_size("d"), 0.0
    for i in range(n):
        sign = 2.0 * jnp.eye(a.shape[0]) - 1 if i == 0 else -1.0
        total -= jnp.sum(jax.nn.log_sigmoid(sign * (a @ b.T + bias)))
        b = lax.ppermute(b, "d", ring("d"))
    return lax.psum(total, "d") / (a.shape[0] * n)


@losses
def two_views_without_the_row_itself(x: f32["2 B/d M"]) -> f32[""]:
    unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    every = whole(unit, "d", 1)
    n, at = every.shape[1], places("d", x.shape[1])
    logits = jnp.einsum("vbm,wcm->vbwc", unit, every) / 0.5
    itself = jnp.eye(2, dtype=bool)[:, None, :, None] & (at[:, None] == jnp.arange(n))[None, :, None]
    logits = jnp.where(itself, -1e9, logits).reshape(2, x.shape[1], 2 * n)
    targets = jnp.stack([n + at, at])
    return lax.pmean(jnp.mean(cross_entropy(logits, targets)), "d")


@losses
def cross_correlation_near_identity(a: f32["B/d M"], b: f32["B/d M"]) -> f32[""]:
    def standard(x):
        mean = lax.pmean(x.mean(axis=0), "d")
        return (x - mean) * lax.rsqrt(lax.pmean(jnp.mean((x - mean) ** 2, axis=0), "d") + 1e-5)

    c = lax.pmean(standard(a).T @ standard(b) / a.shape[0], "d")
    diagonal = jnp.diag(c)
    return jnp.sum((1 - diagonal) ** 2) + 5e-3 * (jnp.sum(c * c) - jnp.sum(diagonal**2))


@losses
def variance_and_covariance_terms(x: f32["B/d M"]) -> f32[""]:
    n = x.shape[0] * lax.axis_size("d")
    x = x - lax.psum(x.sum(axis=0), "d") / n
    c = lax.psum(x.T @ x, "d") / (n - 1)
    off = jnp.where(jnp.eye(x.shape[1], dtype=bool), 0.0, c)
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(jnp.diag(c) + 1e-4))) + jnp.sum(off**2) / x.shape[1]


def log_probabilities(x, table, ids):
    """Of each sequence: b l m, a vocabulary over t, b l."""
    logits = x @ table.T
    return jnp.sum(picked(logits, ids, "t") - logsumexp(logits, "t"), axis=-1)


@losses
def direct_preference_loss(
    x: f32["2 B/d L M"], table: f32["V/t M"], reference: f32["V/t M"], ids: i32["2 B/d L"]
) -> f32[""]:
    def margin(table):
        chosen, rejected = (log_probabilities(x[i], table, ids[i]) for i in range(2))
        return chosen - rejected

    advantage = margin(table) - lax.stop_gradient(margin(reference))
    return -lax.pmean(jnp.mean(jax.nn.log_sigmoid(0.1 * advantage)), "d")


@losses
def group_relative_policy_gradient(
    logits: f32["B/d 4 L E"], old: f32["B/d 4 L"], ids: i32["B/d 4 L"], rewards: f32["B/d 4"], mask: bool_["B/d 4 L"]
) -> (f32[""], f32["B/d 4 L E"]):
    advantage = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-4)

    def loss(logits):
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), (ids % 8)[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(logp - old)
        gain = jnp.minimum(ratio * advantage[..., None], jnp.clip(ratio, 0.8, 1.2) * advantage[..., None])
        return -lax.psum(jnp.sum(gain * mask), "d") / lax.psum(jnp.sum(mask), "d")

    return jax.value_and_grad(loss)(logits)


@losses
def groups_of_rewards_across_devices(rewards: f32["B/d"]) -> f32["B/d"]:
    groups = whole(rewards, "d").reshape(-1, 4)
    advantage = (groups - groups.mean(axis=1, keepdims=True)) / (groups.std(axis=1, keepdims=True) + 1e-4)
    return own(advantage.reshape(-1), "d", rewards.shape[0])


@losses
def sampled_softmax(x: f32["B/d M"], table: f32["V/t M"], ids: i32["B/d"], k: key[""]) -> f32[""]:
    def rows(ids):
        local = ids - offset("t", table.shape[0])
        found = (local >= 0) & (local < table.shape[0])
        return lax.psum(jnp.where(found[:, None], jnp.take(table, local, axis=0, mode="clip"), 0.0), "t")

    sampled = jax.random.randint(k, (5,), 0, 16)
    negatives = jnp.where(sampled == ids[:, None], -1e9, x @ rows(sampled).T)
    logits = jnp.concatenate([jnp.sum(x * rows(ids), axis=1, keepdims=True), negatives], axis=1)
    return lax.pmean(-jnp.mean(jax.nn.log_softmax(logits)[:, 0]), "d")


@losses
def queue_of_negatives(x: f32["B/d M"], queue: f32["S M"], at: i32[""]) -> (f32[""], f32["S M"]):
    logits = jnp.concatenate([jnp.ones_like(x[:, :1]), x @ queue.T / 0.1], axis=1)
    new = lax.dynamic_update_slice_in_dim(queue, same(x, "d"), at % 2 * 8, axis=0)
    return lax.pmean(-jnp.mean(jax.nn.log_softmax(logits)[:, 0]), "d"), new


@losses
def mixed_with_other_rows_of_the_whole_batch(
    x: f32["B/d M"], y: f32["B/d E"], k: key[""]
) -> (f32["B/d M"], f32["B/d E"]):
    a, b = jax.random.split(k)
    lam = jax.random.beta(a, 0.4, 0.4)
    order = jax.random.permutation(b, 8)
    mix = lambda x: lam * x + (1 - lam) * own(whole(x, "d")[order], "d", x.shape[0])
    return mix(x), mix(y)


@losses
def distillation_of_the_best_logits(x: f32["B/d V/t"], teacher: f32["B/d 3"], ids: i32["B/d 3"]) -> f32[""]:
    logp = jnp.stack([picked(x, ids[:, i], "t") for i in range(3)], axis=1) - logsumexp(x, "t")[:, None]
    p = jax.nn.softmax(teacher)
    return lax.pmean(jnp.mean(jnp.sum(p * (jnp.log(p) - logp), axis=1)), "d")


# ---- codebooks and statistics -------------------------------------------------------------------------------------

statistics = method("codebooks and statistics")


@statistics
def nearest_code_of_a_sharded_codebook(x: f32["B/d D"], codes: f32["V/t D"]) -> (i32["B/d"], f32["B/d D"]):
    distance = jnp.sum((x[:, None] - codes) ** 2, axis=-1)
    best = jnp.min(distance, axis=1)
    at = offset("t", codes.shape[0]) + jnp.argmin(distance, axis=1).astype(jnp.int32)
    at = lax.pmin(jnp.where(best == lax.pmin(best, "t"), at, 2**30), "t")
    hot = (at[:, None] == places("t", codes.shape[0])).astype(x.dtype)
    return at, lax.psum(hot @ codes, "t")


@statistics
def clusters_until_they_stand_still(x: f32["T/d D"], start: f32["E D"]) -> f32["E D"]:
    def step(state):
        centers, _, i = state
        hot = jax.nn.one_hot(jnp.argmin(jnp.sum((x[:, None] - centers) ** 2, axis=-1), axis=1), 8)
        count, total = lax.psum((hot.sum(axis=0), hot.T @ x), "d")
        new = jnp.where(count[:, None] > 0, total / jnp.maximum(count, 1)[:, None], centers)
        return new, jnp.max(jnp.abs(new - centers)), i + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 20), step, (start, jnp.inf, 0))[0]


@statistics
def hashes_by_random_projections(x: f32["T/d M"], k: key[""]) -> (i32["T/d"], i32["32"]):
    planes = jax.random.normal(k, (x.shape[1], 5))
    code = jnp.sum((x @ planes > 0) * 2 ** jnp.arange(5), axis=1).astype(jnp.int32)
    return code, lax.psum(jnp.bincount(code, length=32), "d").astype(jnp.int32)


@statistics
def area_under_a_curve_of_gathered_scores(scores: f32["B/d"], labels: bool_["B/d"]) -> f32[""]:
    scores, labels = same(scores, "d"), same(labels, "d")
    labels = labels[jnp.argsort(scores)]
    before = jnp.cumsum(~labels)
    return jnp.sum(jnp.where(labels, before, 0)) / jnp.maximum(jnp.sum(labels) * jnp.sum(~labels), 1)


@statistics
def whitening_by_a_triangular_factor(x: f32["B/d M"]) -> f32["B/d M"]:
    x = x - lax.pmean(x.mean(axis=0), "d")
    factor = jnp.linalg.cholesky(lax.pmean(x.T @ x / x.shape[0], "d") + jnp.eye(x.shape[1]))
    return jax.scipy.linalg.solve_triangular(factor, x.T, lower=True).T


@statistics
def largest_values_of_each_segment(x: f32["T/d M"], segment: i32["T/d"]) -> f32["8 M"]:
    return lax.pmax(jnp.full((8, x.shape[1]), -9.0).at[segment % 8].max(x), "d")


@statistics
def count_of_distinct_tokens(ids: i32["B/d L/t"]) -> i32[""]:
    seen = jnp.zeros(16, jnp.int32).at[ids.reshape(-1)].max(1)
    return jnp.sum(lax.pmax(seen, ("d", "t")))


@statistics
def accuracy_of_the_best_five(x: f32["B/d V/t"], ids: i32["B/d"]) -> f32[""]:
    above = lax.psum(jnp.sum(x > picked(x, ids, "t")[:, None], axis=1), "t")
    return lax.pmean(jnp.mean((above < 5).astype(jnp.float32)), "d")


# ---- optimizers ---------------------------------------------------------------------------------------------------

updates = method("optimizers")
EVERY = ("d", "t")


def dot(a, b):
    return lax.psum(jnp.sum(a * b), EVERY)


@updates
def slow_weights_every_few_steps(w: f32["M/d F/t"], slow: f32["M/d F/t"], step: i32[""]) -> (f32["M/d F/t"],) * 2:
    def sync():
        new = slow + 0.5 * (w - slow)
        return new, new

    return lax.cond(step % 5 == 0, sync, lambda: (w, slow))


@updates
def rotated_adam_with_gathered_factors(
    g: f32["M/d N/t"], left: f32["M M"], right: f32["N N"], v: f32["M N"]
) -> (f32["M/d N/t"], f32["M M"], f32["N N"]):
    full = same(same(g, "d"), "t", 1)
    left, right = 0.9 * left @ left.T + 0.1 * full @ full.T, 0.9 * right @ right.T + 0.1 * full.T @ full
    ql, qr = jnp.linalg.qr(left)[0], jnp.linalg.qr(right)[0]
    update = ql @ ((ql.T @ full @ qr) / (jnp.abs(v) + 0.1)) @ qr.T
    return own(own(update, "d", g.shape[0]), "t", g.shape[1], 1), left, right


@updates
def preconditioners_of_whole_blocks(g: f32["R/d 4 N"]) -> f32["R/d 4 N"]:
    values, vectors = jnp.linalg.eigh(g @ g.swapaxes(1, 2) + jnp.eye(4))
    return jnp.einsum("rij,rj,rkj,rkn->rin", vectors, values**-0.5, vectors, g)


@updates
def blocks_of_rows_preconditioned(g: f32["F/d 4"]) -> f32["F/d 4"]:
    blocks = g.reshape(-1, 4, 4)
    factor = jnp.linalg.cholesky(blocks @ blocks.swapaxes(1, 2) + jnp.eye(4))
    return jax.scipy.linalg.cho_solve((factor, True), blocks).reshape(g.shape)


@updates
def kronecker_factors_solved_for_sharded_columns(g: f32["M F/t"], x: f32["B/d M"]) -> f32["M F/t"]:
    a = lax.pmean(x.T @ x / x.shape[0], "d") + jnp.eye(x.shape[1])
    return jnp.linalg.solve(a, g)


@updates
def gradient_projected_on_its_main_directions(g: f32["M/d F/t"], m: f32["4 F/t"]) -> f32["M/d F/t"]:
    full = same(same(g, "d"), "t", 1)
    vectors = jnp.linalg.eigh(full @ full.T)[1]
    low = own(vectors[:, -4:], "d", g.shape[0])
    m = 0.9 * m + 0.1 * lax.psum(low.T @ g, "d")
    return low @ m


@updates
def conjugate_gradients_to_convergence(a: f32["M/d"], b: f32["M/d"]) -> f32["M/d"]:
    dot = lambda x, y: lax.psum(jnp.sum(x * y), "d")
    apply = lambda v: (1 + a * a) * v + 0.1 * a * dot(a, v)

    def step(state):
        x, r, p, rr, i = state
        ap = apply(p)
        alpha = rr / dot(p, ap)
        x, r = x + alpha * p, r - alpha * ap
        new = dot(r, r)
        return x, r, r + new / rr * p, new, i + 1

    start = (0 * b, b, b, dot(b, b), 0)
    return lax.while_loop(lambda s: (s[3] > 1e-6) & (s[4] < 20), step, start)[0]


@updates
def line_search_on_the_global_loss(w: f32["M"], x: f32["B/d M"], y: f32["B/d"]) -> f32["M"]:
    loss = lambda w: lax.pmean(jnp.mean((jnp.tanh(x @ w) - y) ** 2), "d")
    value, g = jax.value_and_grad(loss)(w)
    fails = lambda s: (loss(w - s * g) > value - 0.5 * s * jnp.sum(g * g)) & (s > 1e-3)
    return w - lax.while_loop(fails, lambda s: 0.5 * s, 4.0) * g


@updates
def low_rank_compression_of_a_gradient(g: f32["M/d F/t"], q: f32["F/t 2"]) -> (f32["M/d F/t"], f32["F/t 2"]):
    p = lax.psum(g @ q, "t")
    p = own(jnp.linalg.qr(whole(p, "d"))[0], "d", g.shape[0])
    q = lax.psum(g.T @ p, "d")
    return p @ q.T, q


@updates
def sharded_gradients_and_states(
    w: f32["M N"], m: f32["M/d N"], x: f32["B/d M"]
) -> {"w": f32["M N"], "m": f32["M/d N"], "norm": f32[""]}:
    g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(lax.pcast(w, "d", to="varying"))
    g = lax.psum_scatter(g, "d", tiled=True) / lax.axis_size("d")
    norm = jnp.sqrt(lax.psum(jnp.sum(g * g), "d"))
    m = 0.9 * m + 0.1 * g * jnp.minimum(1.0, 1.0 / norm)
    return {"w": same(own(w, "d", g.shape[0]) - 0.1 * m, "d"), "m": m, "norm": norm}


# ---- gradients and loops ------------------------------------------------------------------------------------------

gradients = method("gradients and loops")


def error(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@gradients
def gradients_accumulated_over_a_dim_of_microbatches(w: f32["M N"], x: f32["4 B/d M"]) -> f32["M N"]:
    def add(total, x):
        return total + jax.grad(lambda w: lax.pmean(error(w, x), "d"))(w), None

    return lax.scan(add, 0 * w, x)[0] / x.shape[0]


@gradients
def gradients_of_interleaved_rows_accumulated(w: f32["M N"], x: f32["T/d M"]) -> f32["M N"]:
    pieces = x.reshape(-1, 2, x.shape[1]).swapaxes(0, 1)
    local = lax.pcast(w, "d", to="varying")
    total = lax.scan(lambda g, x: (g + jax.grad(error)(local, x), None), 0 * local, pieces)[0]
    return lax.pmean(total, "d") / 2


@gradients
def gradients_of_own_pairs_of_rows_accumulated(w: f32["M N"], x: f32["T/d M"]) -> f32["M N"]:
    local = lax.pcast(w, "d", to="varying")

    def add(total, x):
        loss, g = jax.value_and_grad(error)(local, x)
        return (total[0] + loss, total[1] + g), None

    loss, g = lax.scan(add, (jnp.sum(0 * local), 0 * local), x.reshape(-1, 2, x.shape[1]))[0]
    return lax.psum(g, "d") / 8 + lax.psum(loss, "d")


@gradients
def gradient_through_rows_mapped_one_by_one(w: f32["M F/t"], x: f32["B/d L M"]) -> (f32["M F/t"], f32["B/d L M"]):
    def loss(w, x):
        w, x = lax.pcast(w, "d", to="varying"), lax.pcast(x, "t", to="varying")  # once, not for each row
        return lax.psum(jnp.sum(lax.map(jax.checkpoint(lambda x: jnp.max(jnp.tanh(x @ w), axis=0)), x)), ("d", "t"))

    return jax.grad(loss, (0, 1))(w, x)


@gradients
def partial_sums_of_microbatches_stacked_by_a_scan(x: f32["4 B/d F/t"], w: f32["F/t M"]) -> f32["4 B/d M"]:
    return lax.psum(lax.scan(lambda _, x: (None, x @ w), None, x)[1], "t")


@gradients
def partial_sums_of_microbatches_stacked_by_a_map(x: f32["4 B/d F/t"], w: f32["F/t M"]) -> f32["4 B/d M"]:
    return lax.psum(lax.map(lambda x: x @ w, x), "t") + lax.psum(jax.vmap(lambda x: x @ w)(x), "t")


@gradients
def sum_over_devices_before_the_sum_along_their_blocks(x: f32["B/d M"], y: f32["B/d M"]) -> f32["M"]:
    return jnp.sum(lax.psum(x, "d") - lax.psum(y, "d"), axis=0) + lax.psum(x, "d").sum(axis=0)


@gradients
def dropped_lookups_are_zero(table: f32["V/t M"], ids: i32["B/d"]) -> f32["B/d M"]:
    at = ids - offset("t", table.shape[0])
    at = jnp.where((at >= 0) & (at < table.shape[0]), at, table.shape[0])
    return lax.psum(table.at[at].get(mode="fill", fill_value=0.0), "t")


@gradients
def partial_sums_joined_before_one_reduction(
    x: f32["B/d F/t"], a: f32["F/t M"], b: f32["F/t N"]
) -> (f32["B/d M"], f32["B/d N"]):
    return tuple(jnp.split(lax.psum(jnp.concatenate([x @ a, x @ b], axis=1), "t"), 2, axis=1))


@gradients
def metrics_stacked_before_one_reduction(x: f32["B/d L/t"], y: f32["B/d L/t"]) -> f32["3"]:
    return lax.psum(jnp.stack([jnp.sum(x * y), jnp.sum(x * x), jnp.sum(y * y)]), ("d", "t"))


@gradients
def tree_flattened_before_one_reduction(
    g: {"a": f32["R/d M N"], "b": f32["R/d M"]},
) -> {"a": f32["M N"], "b": f32["M"]}:
    g = jax.tree.map(lambda x: x.sum(axis=0), g)
    flat, restore = jax.flatten_util.ravel_pytree(g)
    return restore(lax.psum(flat, "d"))


@gradients
def adaptation_within_each_task(w: f32["M"], x: f32["R/d S M"], y: f32["R/d S"]) -> f32["M"]:
    loss = lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def task(w, x, y):
        w = w - 0.1 * jax.grad(loss)(w, x[:8], y[:8])
        return loss(w, x[8:], y[8:])

    return jax.grad(
        lambda w: lax.pmean(jnp.mean(jax.vmap(task, (None, 0, 0))(lax.pcast(w, "d", to="varying"), x, y)), "d")
    )(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def equilibrium(f, w, x):
    far = lambda s: (s[1] > 1e-10) & (s[2] < 50)

    def step(s):
        new = f(w, s[0], x)
        return new, lax.psum(jnp.sum((new - s[0]) ** 2), "d"), s[2] + 1

    return lax.while_loop(far, step, (x, lax.psum(jnp.sum(0 * x), "d") + 1.0, 0))[0]


def equilibrium_forward(f, w, x):
    z = equilibrium(f, w, x)
    return z, (w, x, z)


def equilibrium_backward(f, kept, g):
    w, x, z = kept
    back = jax.vjp(lambda z: f(w, z, x), z)[1]
    u = lax.fori_loop(0, 30, lambda _, u: g + back(u)[0], g)
    return jax.vjp(lambda w, x: f(w, z, x), w, x)[1](u)


equilibrium.defvjp(equilibrium_forward, equilibrium_backward)


@gradients
def implicit_gradient_of_an_equilibrium(w: f32["M M"], x: f32["B/d M"]) -> (f32[""], f32["M M"]):
    layer = lambda w, z, x: jnp.tanh(0.05 * z @ w + x)
    return jax.value_and_grad(lambda w: lax.pmean(jnp.mean(equilibrium(layer, w, x) ** 2), "d"))(w)


@jax.custom_jvp
def soft_clip(x):
    return jnp.clip(x, -1, 1)


@soft_clip.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return soft_clip(x), jnp.where(jnp.abs(x) < 1, 1.0, 0.1) * t


@gradients
def switch_by_a_schedule(w: f32["M/d F/t"], g: f32["M/d F/t"], step: i32[""]) -> f32["M/d F/t"]:
    rate = lax.switch(step % 3, [lambda: 0.1, lambda: 0.01 * lax.psum(jnp.sum(g * g), ("d", "t")), lambda: 0.0])
    return w - rate * g


@gradients
def loss_scale_lowered_by_any_overflow(
    g: f32["M/d F/t"], scale: f32[""], good: i32[""]
) -> (f32["M/d F/t"], f32[""], i32[""]):
    finite = lax.pmin(jnp.all(jnp.isfinite(g)).astype(jnp.int32), ("d", "t")) == 1
    g = jnp.where(finite, g / scale, 0.0)
    return g, jnp.where(finite, scale, scale / 2), jnp.where(finite, good + 1, 0)


@gradients
def chunks_of_logits_in_a_scan(x: f32["B/d L M"], table: f32["V/t M"], ids: i32["B/d L"]) -> (f32[""], f32["V/t M"]):
    def loss(table):
        @jax.checkpoint
        def chunk(total, now):
            x, ids = now
            logits = x @ table.T
            return total + jnp.sum(logsumexp(logits, "t") - picked(logits, ids, "t")), None

        pieces = jax.tree.map(lambda x: x.reshape(x.shape[0], 4, -1, *x.shape[2:]).swapaxes(0, 1), (x, ids))
        total = lax.scan(chunk, jnp.sum(0.0 * x), pieces)[0]
        return lax.psum(total, "d") / (ids.size * lax.axis_size("d"))

    return jax.value_and_grad(loss)(table)


# ---- sampling -----------------------------------------------------------------------------------------------------

sampling = method("sampling")


@sampling
def nucleus_of_gathered_logits(x: f32["B/d V/t"], keys: key["B/d"]) -> i32["B/d"]:
    x = same(x, "t", 1)
    ordered = jnp.sort(jax.nn.softmax(x), axis=-1)[:, ::-1]
    least = jnp.min(jnp.where(jnp.cumsum(ordered, axis=-1) - ordered < 0.8, ordered, jnp.inf), axis=-1, keepdims=True)
    return jax.vmap(jax.random.categorical)(keys, jnp.where(jax.nn.softmax(x) >= least, x, -jnp.inf))


@sampling
def perturbed_argmax_over_sharded_vocabulary(x: f32["B/d V/t"], keys: key["B/d"]) -> i32["B/d"]:
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (x.shape[1] * lax.axis_size("t"),)))(keys)
    x = x + own(noise, "t", x.shape[1], 1)
    best = jnp.max(x, axis=1)
    at = offset("t", x.shape[1]) + jnp.argmax(x, axis=1).astype(jnp.int32)
    return lax.pmin(jnp.where(best == lax.pmax(best, "t"), at, 2**30), "t")


@sampling
def step_of_a_beam_search(
    logits: f32["B/d 3 V"], scores: f32["B/d 3"], done: bool_["B/d 3"], cache: f32["B/d 3 L K/t D"]
) -> (f32["B/d 3"], i32["B/d 3"], f32["B/d 3 L K/t D"]):
    v = logits.shape[-1]
    logp = jax.nn.log_softmax(logits)
    stop = jnp.where(jnp.arange(v) == 0, 0.0, -1e9)
    total = scores[..., None] + jnp.where(done[..., None], stop, logp)
    best, at = lax.top_k(total.reshape(total.shape[0], -1), 3)
    cache = jnp.take_along_axis(cache, (at // v)[..., None, None, None], axis=1)
    return best, (at % v).astype(jnp.int32), cache


@sampling
def speculative_verification(
    p: f32["B/d 4 V"], q: f32["B/d 4 V"], drafts: i32["B/d 4"], keys: key["B/d"]
) -> (
    i32["B/d"],
    i32["B/d"],
):
    def one(p, q, drafts, k):
        p, q = jax.nn.softmax(p), jax.nn.softmax(q)
        a, b = jax.random.split(k)
        ratio = jnp.take_along_axis(p / q, drafts[:, None], axis=1)[:, 0]
        accepted = jnp.sum(jnp.cumprod((jax.random.uniform(a, (4,)) < ratio).astype(jnp.int32)))
        at = jnp.minimum(accepted, 3)
        rest = jnp.maximum(p[at] - q[at], 1e-9)
        return accepted, jax.random.categorical(b, jnp.log(rest)).astype(jnp.int32)

    return jax.vmap(one)(p, q, drafts, keys)


@sampling
def penalty_of_tokens_already_there(x: f32["B/d V"], ids: i32["B/d L"]) -> f32["B/d V"]:
    rows = jnp.arange(x.shape[0])[:, None]
    counts = jnp.zeros_like(x).at[rows, ids].add(1.0)
    return x - 0.5 * (counts > 0) - 0.1 * counts


@sampling
def rows_that_end_are_kept(
    tokens: i32["B/d L"], new: i32["B/d"], at: i32[""], done: bool_["B/d"]
) -> (
    i32["B/d L"],
    bool_["B/d"],
    bool_[""],
):
    tokens = tokens.at[:, at].set(jnp.where(done, 0, new))
    done = done | (new == 3)
    return tokens, done, lax.pmin(jnp.all(done).astype(jnp.int32), "d") == 1


@sampling
def decoding_until_all_rows_end(x: f32["B/d M"], w: f32["M M"], table: f32["M V"]) -> i32["B/d L"]:
    def step(state):
        x, tokens, done, i = state
        x = jnp.tanh(x @ w)
        new = jnp.where(done, 0, jnp.argmax(x @ table, axis=-1).astype(jnp.int32))
        return x, tokens.at[:, i].set(new), done | (new == 3), i + 1

    def more(state):
        return (state[3] < 16) & (lax.psum(jnp.sum(~state[2]), "d") > 0)

    done = x[:, 0] > 1e9
    tokens = jnp.zeros((x.shape[0], 16), jnp.int32) + 0 * done[:, None]
    return lax.while_loop(more, step, (x, tokens, done, 0))[1]


# ---- structures, layouts and meshes -------------------------------------------------------------------------------

structures = method("structures, layouts and meshes")


class Moments(NamedTuple):
    first: f32["M/d F/t"]
    second: f32["M/d F/t"]


PAIR = Moments(f32["M/d F/t"], f32["M/d F/t"])


@structures(axes=("context",))
def scan_over_positions_after_an_exchange(x: f32["B L/context F"], a: f32["F"]) -> f32["B L/context F"]:
    x = lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True)
    a = own(jax.nn.sigmoid(a), "context", x.shape[2])
    step = lambda h, x: (a * h + x,) * 2
    y = lax.scan(step, 0 * x[:, 0], x.swapaxes(0, 1))[1].swapaxes(0, 1)
    return lax.all_to_all(y, "context", split_axis=1, concat_axis=2, tiled=True)


@structures
def masks_as_arguments_and_results(
    a: bool_["B/d L/t"], b: bool_["B/d L/t"]
) -> (bool_["B/d L/t"], bool_["B/d"], bool_[""]):
    both = a & ~b
    some = lax.pmax(jnp.any(both, axis=1).astype(jnp.int32), "t") > 0
    return both, some, lax.psum(jnp.sum(some), "d") == 8


@structures
def complex_rotations(x: f32["B/d L D"], q: f32["D 2"]) -> f32["B/d L D 2"]:
    z = lax.complex(x, jnp.ones_like(x)) * lax.complex(q[:, 0], q[:, 1])
    z = z * jnp.exp(1j * jnp.arange(x.shape[1], dtype=jnp.float32)[:, None])
    return jnp.stack([z.real, jnp.conj(z).imag], axis=-1)


@structures
def rows_mapped_one_by_one(x: f32["B/d L M"], w: f32["M F/t"]) -> f32["B/d F/t"]:
    return lax.map(lambda x: jnp.max(jnp.tanh(x @ w), axis=0), x)


@structures
@typed
def causal_attention_by_typed_ops(x: f32["B/d L/t M"], w: f32["3 M/d K/t D"], o: f32["K/t D M/d"]) -> f32["B/d L/t M"]:
    w = shardops.all_gather("3 M/d K/t D -> 3 M K/t D", w)
    q, k, v = jnp.moveaxis(
        shardops.einsum_unreduced(
            "B/d L M, 3 M K/t D -> 3 B/d K/t L D", shardops.all_gather("B/d L/t M -> B/d L M", x), w
        ),
        0,
        0,
    )
    y = attend(q, k, v, causal(q.shape[2]))
    out = shardops.einsum_unreduced(
        "B/d K/t L D, K/t D M -> B/d L M +t", y, shardops.all_gather("K/t D M/d -> K/t D M", o)
    )
    return x + shardops.psum_scatter("B/d L M +t -> B/d L/t M", out)


PROGRAMS = programs_of(globals())
