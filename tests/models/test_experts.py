"""Mixtures of experts: layers against plain loops and transformers.

Whole steps: tests/train/test_oracles.py.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import products, shardops
from shardlib.layers import LayerMetrics
from shardlib.shardtypes import bool_, f32
from shardwright.inspect.soundness import examine
from shardwright.modeling.model import load_model
from shardwright.models import moe
from shardwright.program.step import trace_step
from tests.support import tiny


def small(**changes) -> moe.ModelConfig:
    sizes = vars(tiny.model(layers=2, d_head=8, d_ff=24))
    return moe.ModelConfig(
        **sizes | {"module": "moe", "experts": 8, "experts_per_token": 3} | changes
    )


# ---- one layer -----------------------------------------------------------------------------------

MESH = "e=2 c=2 t=2"
B, L = 8, 16
COUNTS = bool_["B/b L/c/t"]
PADDED = np.arange(L) < np.array([16, 1, 3, 0, 7, 16, 5, 2])[:, None]
PADDED[0, 4:9] = False  # targets that do not count, between others
"""Which of the targets count."""


def with_slots(chosen: np.ndarray, pools: int, slots: int) -> np.ndarray:
    """Which of the choices [B, L, E] find a slot of their pool."""
    kept = np.zeros_like(chosen)
    for sequence, of_sequence in enumerate(chosen):
        free = [slots] * pools
        for token, of_token in enumerate(of_sequence):
            for expert in np.flatnonzero(of_token):
                pool = expert // (chosen.shape[2] // pools)
                kept[sequence, token, expert] = free[pool] > 0
                free[pool] -= 1
    return kept


def plain(x, w, c, slots=None):
    """The experts of each position, one after the other, of whole arrays.

    Each pool has `slots` slots for a sequence.

    Also which choices found a slot.
    """
    biased = w.b_router is not None  # as gpt-oss has it
    b_router, b_gate, b_up, b_down = (
        (w.b_router, w.b_gate, w.b_up, w.b_down) if biased else (0, *[np.zeros(c.experts)] * 3)
    )
    scores = jax.nn.softmax(x @ w.router + b_router, axis=-1)
    lowest = jnp.sort(scores, axis=-1)[..., -c.experts_per_token, None]
    chosen = scores >= lowest
    kept = (
        chosen
        if slots is None
        else with_slots(np.asarray(jax.lax.stop_gradient(chosen)), c.pools or c.experts, slots)
    )
    weights = scores / jnp.sum(scores * chosen, axis=-1, keepdims=True) if c.normalize else scores
    out = jnp.zeros_like(x)
    for i in range(c.experts):
        gate, up = x @ w.w_gate[i] + b_gate[i], x @ w.w_up[i] + b_up[i]
        if biased:
            gate = jnp.where(gate > 7, 7, gate)
            hidden = (
                gate
                / (1 + jnp.exp(-1.702 * gate))
                * (jnp.where(abs(up) > 7, 7 * jnp.sign(up), up) + 1)
            )
        else:
            hidden = jax.nn.silu(gate) * up
        y = hidden @ w.w_down[i] + b_down[i]
        out += jnp.where(kept[..., i, None], weights[..., i, None] * y, 0.0)
    return out, kept


def layer_of(c, seed=3) -> moe.Layer:
    """Random weights of one layer."""
    rng = np.random.default_rng(seed)

    def draw(weight):
        return rng.normal(0, 3 * weight.std or 0.3, weight.shape[1:]).astype(np.float32)

    return jax.tree.map(draw, load_model(c).table.layers)


def used(w: moe.Layer):
    """Weights as a layer gets them. Per-device code."""
    return tiny.at_rest(w)


@pytest.mark.parametrize(
    ("platform", "mesh", "slots", "pools", "bias"),
    [
        ("tpu", "e=2 c=2 t=2", 16, 2, True),
        pytest.param("cpu", "c=4 t=2", None, None, False, marks=pytest.mark.long),
        pytest.param("gpu", "e=8", 8, None, True, marks=pytest.mark.long),
    ],
)
def test_a_layer_is_that_of_plain_loops_on_every_mesh(
    platform, mesh, slots, pools, bias, monkeypatch
):
    """Values and all gradients, with drops and without, of each expert by its own largest entry.

    On a GPU rows are added in turns, not by a scatter; on a TPU `ragged_dot` multiplies groups of
    rows. Expert 5 has no tokens: its gradients are 0.
    """
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform=platform))
    c = small(pools=pools, expert_bias=bias, activation="clamped" if bias else "silu")
    x, out = np.random.default_rng(1).normal(size=(2, B, L, 32)).astype(np.float32)
    w = layer_of(c)
    x[..., 0], w.router[0] = 1.0, np.where(np.arange(8) == 5, -100.0, 0.0)
    if bias:  # beyond the limits of the activation
        w.b_gate, w.b_up = 20 * w.b_gate, 20 * w.b_up

    def loss(x: f32["B/b L/c/t M"], w: moe.Layer, out: f32["B/b L/c/t M"], counts: COUNTS) -> tuple:
        w = used(w)
        routing = moe.route(x, w, c)
        if slots is None:
            y, filled = moe.everywhere(x, routing, w, c), 0.0
        else:
            y, filled = moe.in_slots(x, routing, counts, w, slots, c)
        total = shardops.einsum_unreduced("B/b L/c/t M, B/b L/c/t M -> +b +c +t", y, out)
        return shardops.psum("+b +c +t ->", total), filled

    def both(
        x: f32["B/b L/c/t M"], w: moe.Layer, out: f32["B/b L/c/t M"], counts: COUNTS
    ) -> tuple[f32[""], f32[""], f32["B/b L/c/t M"], moe.Layer]:
        (value, filled), (dx, dw) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            x, w, out, counts
        )
        return value, jnp.float32(filled), dx, dw

    with jax.set_mesh(tiny.mesh(mesh)):
        value, filled, dx, dw = jax.tree.map(np.asarray, tiny.per_device(both)(x, w, out, PADDED))

    def reference(x, w):
        return (lambda y, kept: (jnp.sum(y * out), kept))(*plain(x, w, c, slots))

    (expected, kept), (x_expected, w_expected) = jax.value_and_grad(
        reference, argnums=(0, 1), has_aux=True
    )(x, w)
    of_tokens = np.sum(kept, axis=-1)
    are_dropped = of_tokens.sum() < B * L * c.experts_per_token
    assert slots is None or (filled == of_tokens[PADDED].sum() and are_dropped)
    assert not kept[..., 5].any()
    np.testing.assert_allclose(value, expected, rtol=1e-5)

    def near(a, b):
        return np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())

    near(dx, x_expected)
    near(dw.router, w_expected.router)
    if bias:
        near(dw.b_router, w_expected.b_router)
    for name in ("w_gate", "w_up", "w_down", *(("b_gate", "b_up", "b_down") if bias else ())):
        for ours, theirs in zip(
            getattr(dw, name), np.asarray(getattr(w_expected, name)), strict=True
        ):
            near(ours, theirs)


# ---- losses --------------------------------------------------------------------------------------


def extras(c, w, x):
    """Loss of a layer, its gradient by the router and its bias, and the load of each expert."""

    def run(
        x: f32["B/b L/c/t M"], w: moe.Layer, counts: COUNTS
    ) -> tuple[f32[""], moe.Layer, f32["E"]]:
        def loss(w):
            w = used(w)
            found = moe.aux_of(moe.route(x, w, c), None, counts, jnp.float32(total), w, c)
            return found.loss, found.metrics["largest_load"]

        (value, load), g = jax.value_and_grad(loss, has_aux=True)(w)
        return value, g, load

    total = PADDED.sum()
    with jax.set_mesh(tiny.mesh(MESH)):
        return jax.tree.map(np.asarray, tiny.per_device(run)(x, w, PADDED))


def test_losses_are_those_of_transformers_for_each_sequence():
    """Of the tokens that count alone: no padding is there."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    c = small(balance_loss=0.25, router_z_loss=0.5, correction_bias=True, bias_rate=0.5)
    x, w = np.random.default_rng(1).normal(size=(B, L, 32)).astype(np.float32), layer_of(c)
    w.router_bias = np.zeros(c.experts, np.float32)  # which moves alone
    x[~PADDED] = 7  # all alike, which would move each mean
    router, total = torch.tensor(w.router, requires_grad=True), PADDED.sum()
    logits = [torch.tensor(of[there]) @ router for of, there in zip(x, PADDED, strict=True)]
    balance = sum(
        len(of) / total * load_balancing_loss_func((of,), c.experts, c.experts_per_token)
        for of in logits
        if len(of)
    )
    every = torch.cat(logits)
    expected = 0.25 * balance + 0.5 * torch.logsumexp(every, dim=-1).square().mean()
    expected.backward()
    value, g, load = extras(c, w, x)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(
        g.router, router.grad, rtol=0, atol=1e-5 * router.grad.abs().max().item()
    )
    chosen = torch.topk(every, c.experts_per_token).indices.flatten()
    loads = torch.bincount(chosen, minlength=c.experts).numpy() / total
    mean = c.experts_per_token / c.experts
    np.testing.assert_allclose(load, loads / mean, rtol=1e-6)
    np.testing.assert_allclose(g.router_bias, 0.5 * (loads - mean), atol=1e-7)


@pytest.mark.long
def test_microbatches_change_no_gradient_and_no_metric():
    """Nor does the loss: those of the layers are means over the tokens that count, of which a
    microbatch has more.
    """
    c = small(
        correction_bias=True,
        bias_rate=0.5,
        balance_loss=0.25,
        router_z_loss=0.5,
        capacity_factor=0.5,
    )
    batch = tiny.host_batch()
    batch = dataclasses.replace(
        batch, loss_mask=batch.loss_mask & (np.arange(len(batch.targets)) % 4 < 3)[:, None]
    )
    found = []
    with jax.set_mesh(tiny.mesh("one device")):
        w = jax.tree.map(np.asarray, tiny.state(tiny.config(c)).weights)
    for on_mesh, microbatches in (("one device", 1), ("p=2 d=2", 4)):
        config = tiny.config(c, microbatches=microbatches)
        with jax.set_mesh(tiny.mesh(on_mesh)):
            found.append(gradients_of(tiny.place(w, moe.Weights), config, batch))
    (_, _, metrics), _ = found
    largest, dropped = metrics.by_name()["largest_load"], metrics.by_name()["dropped"]
    assert (largest > 1).all()
    assert (dropped > 0).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max()), *found
    )


def gradients_of(w, config, batch=None):
    def run(w: moe.Weights, batch: train.Batch) -> tuple[f32[""], moe.Weights, LayerMetrics]:
        forward = dataclasses.replace(tiny.forward(config), in_training=True)
        loss, g, layers = train.loss_and_gradients(w, batch, None, config, forward)
        return loss, g, LayerMetrics.of_rows(layers, None)

    return jax.tree.map(np.asarray, tiny.per_device(run)(w, tiny.place_batch(config, batch)))


# ---- the proof -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_step_is_proved():
    """Routing, both exchanges and the losses are followed.

    Of pools only the products are taken to be right.
    """
    losses = {"balance_loss": 0.1, "router_z_loss": 0.1, "correction_bias": True}
    choice = {"scores": "sigmoid", "groups": 2, "groups_per_token": 1, "qk_norm_all": True}
    experts = {"shared_experts": 2, "expert_bias": True, "activation": "clamped"}
    sizes = {"layers": 1, "capacity_factor": 1.0, "pools": 4, "d_head": 16}
    c = small(**sizes, **losses, **choice, **experts)
    with tiny.abstract_mesh(dict.fromkeys("prdect", 1) | {"e": 2, "t": 2}):
        step = trace_step(tiny.config(c, batch_size=2, seq_len=8), load_model(c))
        assert examine(step, ("training",)).found == []
