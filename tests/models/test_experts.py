"""Mixtures of experts: layers against plain loops and transformers.

Whole steps: tests/train/test_oracles.py.
"""

import dataclasses
import importlib.util
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import products, shardops
from shardlib.layers import LayerMetrics
from shardlib.shardtypes import bool_, f32
from shardwright.data.loader import TokenBatch
from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.models import family, moe
from shardwright.program.step import trace_step
from tests.support import tiny
from tests.support.recipes import ROOT, train_with


def oracles():
    """torch and transformers, which take seconds to import."""
    return pytest.importorskip("torch"), pytest.importorskip("transformers")


def small(**changes) -> moe.ModelConfig:
    sizes = {
        "vocab": 64,
        "d_model": 32,
        "layers": 2,
        "n_kv": 8,
        "n_q_per_kv": 2,
        "d_head": 8,
        "d_ff": 24,
    }
    return moe.ModelConfig(**sizes | {"experts": 8, "experts_per_token": 3} | changes)


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
    ("platform", "slots", "pools"),
    [
        pytest.param("gpu", 8, None, marks=pytest.mark.long),
        ("tpu", 16, 2),
    ],
)
def test_a_layer_is_that_of_plain_loops_as_on(platform, slots, pools, monkeypatch):
    """On a GPU rows are added in turns, not by a scatter.

    On a TPU groups of rows are multiplied by `ragged_dot`.
    """
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform=platform))
    test_a_layer_is_that_of_plain_loops_on_every_mesh("e=2 c=2 t=2", slots, pools, False)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("mesh", "slots", "pools", "bias"),
    [
        ("one device", None, None, True),
        ("e=2 c=2 t=2", 16, 2, True),
        ("e=8", 8, None, False),
        ("c=2 t=4", 48, 1, False),  # which are enough for all choices
        ("r=2 d=2 e=2", 8, 4, False),
        ("c=4 t=2", None, None, False),
    ],
)
def test_a_layer_is_that_of_plain_loops_on_every_mesh(mesh, slots, pools, bias):
    """Values and all gradients, with drops and without, of each expert by its own largest entry."""
    c = small(pools=pools, expert_bias=bias, activation="clamped" if bias else "silu")
    x, out = np.random.default_rng(1).normal(size=(2, B, L, 32)).astype(np.float32)
    w = layer_of(c)
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
    assert slots is None or (
        filled == of_tokens[PADDED].sum() and are_dropped == ((slots, pools) != (48, 1))
    )
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


@pytest.mark.parametrize(
    ("platform", "slots", "pools"),
    [("cpu", 8, None), ("tpu", None, None)],
)
def test_an_expert_without_tokens_has_a_zero_gradient(platform, slots, pools, monkeypatch):
    """Not NaN, and not what was there before: https://github.com/openxla/tokamax/issues/887."""
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform=platform))
    c, x = small(pools=pools), np.random.default_rng(1).normal(size=(B, L, 32)).astype(np.float32)
    w = layer_of(c)
    x[..., 0], w.router[0] = 1.0, np.where(np.arange(8) == 5, -100.0, 0.0)

    def gradient(x: f32["B/b L/c/t M"], w: moe.Layer) -> moe.Layer:
        def total(w):
            routing = moe.route(x, used(w), c)
            if slots is None:
                y = moe.everywhere(x, routing, used(w), c)
            else:
                y, _ = moe.in_slots(x, routing, jnp.ones(x.shape[:2], bool), used(w), slots, c)
            square = shardops.einsum_unreduced("B/b L/c/t M -> +b +c +t", jnp.square(y))
            return shardops.psum("+b +c +t ->", square)

        return jax.grad(total)(w)

    with jax.set_mesh(tiny.mesh("e=2 c=2 t=2")):
        g = jax.tree.map(np.asarray, tiny.per_device(gradient)(x, w))
    for name in ("w_gate", "w_up", "w_down"):
        of_experts = np.abs(getattr(g, name)).max(axis=(1, 2))
        assert of_experts[5] == 0
        assert np.all(of_experts[np.arange(8) != 5] > 0)


# ---- losses --------------------------------------------------------------------------------------


def extras(c, w, x, counts=None):
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

    counts = np.ones((B, L), bool) if counts is None else counts
    total = counts.sum()
    with jax.set_mesh(tiny.mesh(MESH)):
        return jax.tree.map(np.asarray, tiny.per_device(run)(x, w, counts))


def test_the_balance_loss_is_that_of_transformers_for_each_sequence():
    torch, _ = oracles()
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    c = small(balance_loss=0.25, router_z_loss=0.5)
    x, w = np.random.default_rng(1).normal(size=(B, L, 32)).astype(np.float32), layer_of(c)
    router = torch.tensor(w.router, requires_grad=True)
    logits = torch.tensor(x) @ router
    balance = (
        sum(load_balancing_loss_func((of,), c.experts, c.experts_per_token) for of in logits) / B
    )
    expected = 0.25 * balance + 0.5 * torch.logsumexp(logits, dim=-1).square().mean()
    expected.backward()
    value, g, load = extras(c, w, x)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(
        g.router, router.grad, rtol=0, atol=1e-5 * router.grad.abs().max().item()
    )
    counts = torch.bincount(
        torch.topk(logits, c.experts_per_token).indices.flatten(), minlength=c.experts
    )
    np.testing.assert_allclose(
        load, counts.numpy() / (B * L * c.experts_per_token / c.experts), rtol=1e-6
    )


def test_padding_counts_in_no_loss_and_no_metric():
    """Against the same of the tokens that count alone, in numpy: no padding is there."""
    c = small(balance_loss=0.25, router_z_loss=0.5, correction_bias=True, bias_rate=0.5)
    x, w = np.random.default_rng(1).normal(size=(B, L, 32)).astype(np.float32), layer_of(c)
    w.router_bias = np.linspace(-0.3, 0.3, c.experts).astype(np.float32)
    x[~PADDED] = 7  # all alike, which would move each mean
    value, g, load = extras(c, w, x, PADDED)
    total, balance, z_loss, loads = PADDED.sum(), 0, 0, np.zeros(c.experts)
    for of_sequence, is_there in zip(np.float64(x), PADDED, strict=True):
        logits = of_sequence[is_there] @ w.router
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        chosen = np.zeros_like(scores)
        np.put_along_axis(
            chosen, np.argsort(-(scores + w.router_bias))[:, : c.experts_per_token], 1, axis=1
        )
        loads += chosen.sum(axis=0)
        if n := len(scores):
            balance += n / total * c.experts * (chosen.mean(axis=0) @ scores.mean(axis=0))
        z_loss += np.square(np.log(np.exp(logits).sum(axis=1))).sum() / total
    np.testing.assert_allclose(value, 0.25 * balance + 0.5 * z_loss, rtol=1e-5)
    np.testing.assert_allclose(load, loads / total * c.experts / c.experts_per_token, rtol=1e-6)
    np.testing.assert_allclose(
        g.router_bias, 0.5 * (loads / total - c.experts_per_token / c.experts), atol=1e-7
    )


def test_the_correction_bias_moves_alone():
    """Its own gradient is compared above; the loss and the router's gradient are 0."""
    c = small(correction_bias=True, bias_rate=0.5)
    value, g, _ = extras(
        c, layer_of(c), np.random.default_rng(1).normal(size=(B, L, 32)).astype(np.float32)
    )
    assert value == 0
    assert not g.router.any()
    assert g.router_bias.any()


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
    for on_mesh, microbatches in (("one device", 1), ("p=2 d=2", 4)):
        config = tiny.config(c, microbatches=microbatches)
        with jax.set_mesh(tiny.mesh(on_mesh)):
            w = tiny.place(jax.tree.map(np.asarray, tiny.state(config).weights), moe.Weights)
            found.append(gradients_of(w, config, batch))
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
        return train.loss_and_gradients(w, batch, None, config, forward)

    return jax.tree.map(np.asarray, tiny.per_device(run)(w, tiny.place_batch(config, batch)))


# ---- the proof -----------------------------------------------------------------------------------

ALL = {
    "correction_bias": True,
    "shared_experts": 2,
    "scores": "sigmoid",
    "groups": 2,
    "qk_norm_all": True,
}
ALL |= {"expert_bias": True, "activation": "clamped", "groups_per_token": 1}


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("sizes", "factor", "pools", "settings"),
    [
        ("r2 d2 e2 c2 t2", 1.0, None, {}),
        ("d2 e4", 1.0, 4, ALL),
        ("p2 e2 t2", None, None, ALL),
        ("e2 c2 t2", 1.0, None, {"algorithm": "muon"}),  # of matrices whose last axis is t or c
    ],
)
def test_steps_are_proved(sizes, factor, pools, settings):
    """Routing, both exchanges and the losses are followed.

    Of pools only the products are taken to be right.
    """
    given = {key: value for key, value in settings.items() if key != "algorithm"}
    c = small(
        layers=2,
        capacity_factor=factor,
        pools=pools,
        balance_loss=0.1,
        router_z_loss=0.1,
        d_head=16,
        **given,
    )
    c = tiny.config(dataclasses.replace(c, experts=16), microbatches=2, batch_size=16)
    c.optimizer = tiny.optimizer(algorithm=settings.get("algorithm", "adamw"))
    mesh = {word[0]: int(word[1:]) for word in sizes.split()}
    with tiny.abstract_mesh(dict.fromkeys("prdect", 1) | mesh):
        found = find_unsound(trace_step(c, load_model(c.model)))
    assert [str(finding) for finding in found] == []


@pytest.mark.long
def test_losses_of_layers_that_one_device_alone_scales_are_refused():
    """Stages add them up in the pipeline, and one device in `loss_and_gradients`: a line of the
    losses is named.
    """
    file, old = "train.py", "loss + jnp.sum(aux.loss) / forward.training.microbatches"
    source = (ROOT / file).read_text()
    assert source.count(old) == 1
    c = tiny.config(small(layers=2, balance_loss=0.1, d_head=16), microbatches=2)
    changed = train_with({file: source.replace(old, old.replace("jnp.sum", "50 * jnp.sum"))})
    with changed as module, tiny.abstract_mesh({"r": 1, "d": 2, "t": 1, "p": 2}):
        found = find_unsound(trace_step(c, load_model(c.model), spec=module.SPEC))
    assert "one device runs another program, in which this line does something else" in str(
        found[0]
    )


@pytest.mark.parametrize("pools", [None, pytest.param(1, marks=pytest.mark.long)])
def test_experts_are_causal(pools):
    """What is sampled and evaluated drops nothing.

    In training the first choices of a sequence have the slots.
    """
    c = tiny.config(small(layers=1, capacity_factor=1.0, pools=pools))
    with jax.set_mesh(tiny.mesh("one device")):
        assert check_causal(tiny.step_of(tiny.forward(c), 64, 2)) == ""


LAST_CHOICES = {  # an edit that gives slots to the last choices of a sequence
    "choice = jnp.where(chosen, jnp.arange(length * n, dtype=jnp.int32), length * n)": (
        "choice = jnp.where(chosen, length * n - 1 - jnp.arange(length * n, dtype=jnp.int32), "
        "length * n)"
    ),
    "    token = choice": (
        "    choice = jnp.where(choice < length * n, length * n - 1 - choice, choice)\n    token = "
        "choice"
    ),
}


@pytest.mark.long
def test_slots_by_a_priority_over_the_sequence_are_refused(tmp_path):
    source = Path(moe.__file__).read_text()
    for old, new in LAST_CHOICES.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "last_choices.py").write_text(source)
    spec = importlib.util.spec_from_file_location("last_choices", tmp_path / "last_choices.py")
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    c = tiny.config(small(layers=1, capacity_factor=0.25))
    with jax.set_mesh(tiny.mesh("one device")):
        last = tiny.forward_of(edited.Model(c.model), c.training, True)
        with pytest.raises(ValueError, match=r"last_choices.py:\d+: .*depend on a later token"):
            check_causal(tiny.step_of(last, 64, 2))


def test_the_block_of_deepseek_v3():
    """Router, experts and two shared ones: values and all gradients, each expert by its own largest
    entry.
    """
    torch, transformers = oracles()
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    settings = {
        "scores": "sigmoid",
        "groups": 4,
        "groups_per_token": 2,
        "correction_bias": True,
        "weight_scale": 2.5,
    }
    c = small(**settings, experts=16, experts_per_token=3, shared_experts=2)
    w, (x, out) = (
        layer_of(c),
        np.random.default_rng(1).normal(size=(2, B, L, 32)).astype(np.float32),
    )
    config = transformers.DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=c.d_ff, n_routed_experts=16, num_experts_per_tok=3, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, n_shared_experts=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block, tensor = DeepseekV3MoE(config), lambda x: torch.tensor(np.ascontiguousarray(x))
    block.load_state_dict(
        {
            "gate.weight": tensor(w.router.T),
            "gate.e_score_correction_bias": tensor(w.router_bias),
            "experts.gate_up_proj": tensor(
                np.concatenate([w.w_gate, w.w_up], axis=2).swapaxes(1, 2)
            ),
            "experts.down_proj": tensor(w.w_down.swapaxes(1, 2)),
            "shared_experts.gate_proj.weight": tensor(w.shared_gate.T),
            "shared_experts.up_proj.weight": tensor(w.shared_up.T),
            "shared_experts.down_proj.weight": tensor(w.shared_down.T),
        }
    )
    expected = (block(tensor(x)) * tensor(out)).sum()
    expected.backward()

    def shared(x, w):
        return family.gated_mlp(x, w.shared_gate, w.shared_up, w.shared_down, c.activation)

    def loss(w: moe.Layer, x: f32["B/b L/c/t M"], out: f32["B/b L/c/t M"]) -> f32[""]:
        w = used(w)
        y = moe.everywhere(x, moe.route(x, w, c), w, c) + shared(x, w)
        total = shardops.einsum_unreduced("B/b L/c/t M, B/b L/c/t M -> +b +c +t", y, out)
        return shardops.psum("+b +c +t ->", total)

    def both(
        w: moe.Layer, x: f32["B/b L/c/t M"], out: f32["B/b L/c/t M"]
    ) -> tuple[f32[""], moe.Layer]:
        return jax.value_and_grad(loss)(w, x, out)

    with jax.set_mesh(tiny.mesh("e=2 c=2 t=2")):
        value, g = jax.tree.map(np.asarray, tiny.per_device(both)(w, x, out))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    gradients = {name: parameter.grad.numpy() for name, parameter in block.named_parameters()}

    def near(a, b):
        return np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    near(g.router.T, gradients["gate.weight"])
    near(g.shared_down.T, gradients["shared_experts.down_proj.weight"])
    near(g.shared_gate.T, gradients["shared_experts.gate_proj.weight"])
    ours = np.concatenate([g.w_gate, g.w_up], axis=2).swapaxes(1, 2)
    for i in range(c.experts):
        near(ours[i], gradients["experts.gate_up_proj"][i])
        near(g.w_down[i].T, gradients["experts.down_proj"][i])


def test_evaluation_computes_the_chosen_experts_alone(monkeypatch):
    """The logits are those of all experts."""
    c, ids = (
        tiny.config(small(capacity_factor=0.25, experts_per_token=1)),
        tiny.host_batch().targets,
    )
    starts = np.arange(tiny.LENGTH)[None] == np.zeros((len(ids), 1))
    with jax.set_mesh(tiny.mesh(MESH)):
        of = tiny.forward_of(moe.Model(c.model), c.training, in_training=False)
        w = jax.tree.map(
            lambda x: jax.random.normal(jax.random.key(sum(x.shape)), x.shape), of.model.table
        )

        def logits() -> np.ndarray:
            @tiny.per_device
            def run(w: of.model.Weights, batch: TokenBatch) -> train.act["B/b L/c V/t/p"]:
                return of.logits(of.gatherable(w), of.tokens(batch))

            return np.asarray(run(w, TokenBatch(ids, starts, starts)))

        with monkeypatch.context() as patch:
            patch.setattr(moe, "everywhere", None)
            found = logits()

        def in_all(x, routing, counted, w, slots, config):
            return moe.everywhere(x, routing, w, config), None

        monkeypatch.setattr(moe, "in_slots", in_all)
        expected = logits()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
