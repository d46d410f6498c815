"""Whole training steps against oracles: model × settings × mesh.

A row is a model, the mesh, and settings of training. One step must have the loss and the gradients
of the oracle, which is transformers' own class or, for rules that no class has, the dense
computation of tests/support/dense.py; and move the weights as AdamW and Muon in NumPy move them by
these gradients.
"""

import dataclasses
import functools
import math
import types

import jax
import numpy as np
import pytest

import train
from shardlib import products
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import Weight
from shardwright.optimizers.config import OptimizerConfig
from shardwright.program.config import PipelineConfig
from shardwright.program.stages import placement_of
from tests.support import dense, rule_models, tiny
from tests.support.transformers_models import Truth, truth_of

C2, STAGES = "e=2 c=2 t=2", "p=2 d=2 t=2"
BLOCKS = {"attention": "blockwise", "attention_block": 5}
STEP = {"microbatches": 2, "gather_weights": "step"}
LAYER = {"microbatches": 2, "gather_weights": "layer"}
IN_V = {"microbatches": 4, "schedule": "zb_v", "virtual_stages": 2}
OWN = {
    "algorithm": "tests.support.own_parts:sgd",
    "loss": "tests.support.own_parts:halved",
    "learning_rate": 100.0,
}
UNMOVED = {"bias_rate": 0.0}
MUON = {"algorithm": "muon"}
POOLS = {"pools": 4, "capacity_factor": 8.0}  # which drop nothing


def row(name: str, mesh: str, short: bool = False, **settings):
    marks = [] if short else pytest.mark.long
    return pytest.param(name, mesh, settings, marks=marks, id=f"{name}, {mesh}")


ROWS = [
    # Of training: `gpu` adds up lookups as on a GPU, `optimizer` and `model` are settings of those.
    row("Llama", "d=4 t=2", **STEP, **BLOCKS, loss_chunk=4, optimizer={"z_loss": 0.01}),
    row("Llama", "r=2 d=2 t=2", optimizer=OWN, document_mask=False, save="more", unroll=None),
    row("alibi", "d=4 t=2", True, save="nothing", optimizer={"clip_norm": 0.5}),
    row("Llama tied", STAGES, **IN_V, gather_weights="layer", gpu=True),
    # Vectors of 4 entries, which d and e do not divide.
    row("Qwen3 small", STAGES, **LAYER, schedule="1f1b", optimizer=MUON),
    row("Gemma2", C2, context="gather", **BLOCKS, unroll=2, gpu=True),
    row("GPT2", STAGES, **STEP, schedule="zb_h1"),
    row("Mixtral", C2, **LAYER, gpu=True, model=POOLS, optimizer=MUON, save="dots"),
    row("GptOss", C2, context="ring", attention_block=5, **LAYER, gpu=True),
    row("DeepseekV3", "p=2 e=2 t=2", **STEP, model=UNMOVED),
    row("Qwen3Next", "e=2 d=2 t=2", model=POOLS | {"chunk": 4}, save="offload"),
    row("Qwen3Next", "c=2 d=2 t=2", model={"chunk": 4}, **LAYER),
    row("Qwen3Next", "c=8", model={"chunk": 1}, unroll=None),
]


def batch():
    return tiny.host_batch(vocab=32)  # of the models of rules, whose vocabulary is the smaller one


@functools.cache
def of_dense(name: str) -> Truth:
    """What the dense computation gives for a model of rules."""
    given, c = batch(), rule_models.SIZES

    slopes = 2.0 ** (-8 * (np.arange(c.heads)[:, None, None] + 1) / c.heads)

    rng = np.random.default_rng(3)

    def drawn(weight):
        """So that texts are not uniform, and heads differ; norms too differ from 1."""
        return np.float32(rng.normal(weight.mean, 2 * weight.std or 0.1, weight.shape))

    def score(layer, scores, i, j):  # of "alibi"
        return scores - slopes * (i - j)

    def loss(w):
        logits = dense.logits(w, dense.tokens_of(given), c, score=score)
        return dense.cross_entropy(logits, given)

    with jax.set_mesh(tiny.mesh("one device")):
        w = jax.tree.map(drawn, rule_models.KINDS[name](c).table)
        return Truth(c, w, *jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(w)))


def truth(name: str, settings: dict) -> Truth:
    if name in rule_models.KINDS:
        return of_dense(name)
    pytest.importorskip("torch")
    z_loss = settings.get("optimizer", {}).get("z_loss", 0.0)
    return truth_of(name, settings.get("document_mask", True), z_loss, batch)


def config(of: Truth, settings: dict):
    """The configuration of a row."""
    settings = dict(settings)
    parts = {name: settings.pop(name, {}) for name in ("model", "optimizer", "gpu")}
    stages = {
        name: settings.pop(name) for name in ("schedule", "virtual_stages") if name in settings
    }
    stages = {"schedule": "gpipe"} | stages
    c = tiny.config(dataclasses.replace(of.config, **parts["model"]), **settings)
    c.optimizer = tiny.optimizer(schedule="constant", schedule_steps=None, **parts["optimizer"])
    c.pipeline = PipelineConfig(**stages)
    return c


STEPS = 4
"""Of which the moments are corrected for: the step is behind the warmup."""


def moved(c: OptimizerConfig, weight: Weight, w: np.ndarray, g: np.ndarray) -> np.ndarray:
    """A weight that Muon, or AdamW, moves by a gradient, where the moments were 0."""
    w, g = np.float64(w), np.float64(g)
    if c.algorithm == "muon" and weight.kind == "matrix":
        sides = weight.shape[-weight.inputs - weight.outputs :]
        rows, columns = math.prod(sides[: weight.inputs]), math.prod(sides[weight.inputs :])
        x = g.reshape(-1, rows, columns)
        x = x / np.linalg.norm(x, axis=(1, 2), keepdims=True)
        for _ in range(c.muon_iterations):
            square = x @ x.swapaxes(1, 2)
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        change = c.muon_rms * max(rows, columns) ** 0.5 * x.reshape(w.shape)
    else:
        mu = (1 - c.adam_b1) * g / (1 - c.adam_b1**STEPS)
        nu = (1 - c.adam_b2) * g**2 / (1 - c.adam_b2**STEPS)
        change = mu / (np.sqrt(nu) + c.adam_epsilon)
    return w - c.learning_rate * (change + c.weight_decay * w * (weight.kind in c.decay_on))


def in_order(weights, order):
    """Weights whose stacks are in another order."""
    if order is None:
        return weights
    return dataclasses.replace(weights, layers=jax.tree.map(lambda x: x[order], weights.layers))


def close(found: np.ndarray, expected: np.ndarray, least: float, where: str) -> None:
    """A gradient, up to f32 rounding of its largest entry, of `least` at least; each expert up to
    its own.

    Where CPUs sum in another order, an entry of "no positions" is 2.2e-5 off, and the norm 9e-6
    from the one of f64.
    """
    of_experts = where.endswith(("w_gate", "w_up", "w_down")) and expected.ndim == 4
    scale = np.abs(expected).max(axis=(2, 3) if of_experts else None, keepdims=True)
    np.testing.assert_allclose(
        (found - expected) / np.maximum(scale, least), 0, atol=4e-5, err_msg=where
    )


@pytest.mark.parametrize(("name", "mesh", "settings"), ROWS)
def test_a_step_is_that_of_its_oracle(name, mesh, settings, monkeypatch):
    if settings.get("gpu"):
        monkeypatch.setattr(
            products, "target_device", lambda: types.SimpleNamespace(platform="gpu")
        )
    of = truth(name, settings)
    c = config(of, settings)
    model = rule_models.KINDS[name](c.model) if name in rule_models.KINDS else load_model(c.model)
    kind = train.State[type(of.weights)]
    with jax.set_mesh(tiny.mesh(mesh)):
        order = placement_of(c, model).order  # of the layers at rest
        fresh = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
        start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), fresh)
        start = tiny.place(dataclasses.replace(start, weights=in_order(of.weights, order)), kind)
        placed = tiny.place_batch(c, batch())
        if "p=" in mesh and not c.optimizer.z_loss:
            nats, targets = train.make_evaluation_step(c, model)(start.weights, placed)
            # sums of f32 in the order of the CPU
            np.testing.assert_allclose(nats / targets, of.loss, rtol=2e-5)
        state, metrics = train.make_training_step(c, model)(start, placed, np.int32(STEPS - 1))
        back = None if order is None else np.argsort(order)
        weights, moment = (
            in_order(jax.tree.map(np.asarray, x), back) for x in (state.weights, state.adam_mu)
        )
    is_own = c.optimizer.algorithm == OWN["algorithm"]
    of_loss = jax.tree.map(lambda g: np.float64(g) / (1 + is_own), of.gradients)
    norm = math.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(of_loss)))
    np.testing.assert_allclose(metrics.loss, of.loss / (1 + is_own), rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=2e-5)
    assert norm > c.optimizer.clip_norm, "gradients are clipped"
    # Those of the biases of keys are 0 but for rounding: they add the same to all scores of a
    # query.
    least = 1e-2 * max(np.abs(g).max() for g in jax.tree.leaves(of_loss))
    trees = of.weights, weights, moment, model.table
    for (path, g), *of_weight in zip(
        jax.tree_util.tree_leaves_with_path(of_loss), *map(jax.tree.leaves, trees), strict=True
    ):
        where, (w, new, mu, weight) = jax.tree_util.keystr(path), of_weight
        is_muon = c.optimizer.algorithm == "muon" and weight.kind == "matrix"
        share = 1 - (c.optimizer.muon_momentum if is_muon else c.optimizer.adam_b1)
        found = (w - new) / c.optimizer.learning_rate if is_own else mu / share
        close(found * norm / c.optimizer.clip_norm, g, least, where)
        if not is_own:
            expected = moved(c.optimizer, weight, w, found)
            np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-5, err_msg=where)
