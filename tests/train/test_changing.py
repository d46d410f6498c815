"""docs/recipes: models and losses against a dense computation or optax, on a sharded mesh, and
the other parts of changing.md.
"""

import dataclasses
import functools
import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
import zarr

import train
from shardlib.layers import LayerMetrics
from shardlib.shardtypes import Of, f32, i32, u32
from shardwright.inspect.soundness import examine, find_unsound
from shardwright.modeling.model import load_model
from shardwright.optimizers.config import GroupConfig
from shardwright.optimizers.rates import updates_of
from shardwright.program.checkpoint import Checkpointer, named_leaves
from shardwright.program.config import PipelineConfig
from shardwright.program.resume import fresh_state
from shardwright.program.stages import placement_of
from tests.support import dense, tiny
from tests.support.huggingface_models import export, read, to_run
from tests.support.recipes import ROOT

SHARDED, STAGES = "d=2 c=2 t=2", "p=2 d=2 t=2"
BATCH = tiny.host_batch()
TOKENS = dense.tokens_of(BATCH)


def config(recipe: str = "train", layers: int = 2, loss: str = "cross_entropy", **training):
    sizes = dataclasses.asdict(tiny.model(layers=layers, module=recipe))
    module = train if recipe == "train" else importlib.import_module(recipe)
    c = tiny.config(module.ModelConfig(**sizes), **training)
    c.optimizer.loss = loss
    return c


def random_weights(table, seed: int = 0):
    """Weights on the host, of which no vector is all ones."""
    rng = np.random.default_rng(seed)

    def draw(x):
        return rng.normal(x.mean, x.std or 0.3, x.shape).astype(np.float32)

    return jax.tree.map(draw, table)


def computed(c, mesh: str = SHARDED, batch=BATCH):
    """Random weights, and loss, gradients and metrics of layers of a step, on the host."""
    model = load_model(c.model)
    Weights, w = model.Weights, random_weights(model.table)
    forward = tiny.forward_of(model, c.training, in_training=True)
    if mesh == STAGES:
        c.training.microbatches, c.pipeline = 2, PipelineConfig(schedule="1f1b")
    with jax.set_mesh(tiny.mesh(mesh)):

        @tiny.per_device
        def step(
            w: Of[Weights], batch: train.Batch
        ) -> tuple[f32[""], Of[Weights], LayerMetrics | None]:
            loss, g, layers = train.loss_and_gradients(w, batch, None, c, forward)
            return loss, g, LayerMetrics.of_rows(layers, None)

        found = step(tiny.place(w, Weights), tiny.place_batch(c, batch))
    return w, *jax.tree.map(np.asarray, found)


def assert_is(expected, w, loss, g) -> None:
    """Loss and gradients are those of a function of the weights."""
    theirs, of_theirs = jax.jit(jax.value_and_grad(expected))(w)
    np.testing.assert_allclose(loss, theirs, rtol=2e-5)
    for name, x in named_leaves(of_theirs).items():
        scale = float(np.abs(x).max())
        ours = named_leaves(g)[name]
        np.testing.assert_allclose(ours, x, rtol=2e-4, atol=2e-5 * scale, err_msg=name)


# ---- models --------------------------------------------------------------------------------------

KIND = np.random.default_rng(5).integers(0, 64, BATCH.targets.shape).astype(np.uint32)
WITH_KIND = dataclasses.replace(BATCH, inputs=KIND[..., None])
# The second input of the token that is read: of the one before the target, 0 before a document.
KIND_READ = np.where(BATCH.is_seq_start, 0, np.pad(KIND[:, :-1], ((0, 0), (1, 0))))


def layer_norm(x, epsilon):
    return dense.rms(x - x.mean(-1, keepdims=True), epsilon)


DENSE = {  # recipe: how dense.logits is told of it, and the mesh
    "layernorm": ({"norm": layer_norm}, SHARDED),
    "alternating_windows": (
        {"sees": lambda layer, i, j, position: (i >= j) & (layer % 2 or i - j < 5)},
        STAGES,
    ),
    "mlp_gain": ({"gain": True}, SHARDED),
    "attention_sinks": ({"sinks": True}, SHARDED),
    "second_input": ({"second": KIND_READ}, STAGES),
    "value_residual": ({"values": lambda v, first: (v + first) / 2}, STAGES),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", DENSE)
def test_a_model_is_the_dense_one(recipe):
    how, mesh = DENSE[recipe]
    c = config(recipe, layers=4 if recipe == "alternating_windows" else 2)
    w, loss, g, _ = computed(c, mesh, WITH_KIND if recipe == "second_input" else BATCH)

    def expected(w):
        return dense.cross_entropy(dense.logits(w, TOKENS, c.model, **how), BATCH)

    assert_is(expected, w, loss, g)


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", ["alibi", "gated_attention", "gelu", "layer_loss", "sliding_window"]
)
def test_other_recipes_compute_what_one_device_does(recipe):
    with jax.set_mesh(tiny.mesh(SHARDED)):
        found, undecided, *_ = examine(tiny.step(config(recipe)), ("training",))
    assert (found, undecided) == ([], [])


@pytest.mark.long
def test_mixture_of_depths():
    c = config("mixture_of_depths")
    w, loss, g, layers = computed(c)

    def expected(w, shares):
        losses = []

        def around(of, before, after):
            score = jax.nn.sigmoid(dense.rms(before, c.model.norm_epsilon) @ of.router)
            # equal scores are wanted alike
            wanted = score >= jnp.sort(score, axis=1)[:, score.shape[1] // 2, None]
            losses.append(-jnp.mean(jnp.log(jnp.where(wanted, score, 1 - score))))
            shares.append(jnp.mean(score > 0.5))
            taken = before + score[..., None] * (after - before)
            return jnp.where((score > 0.5)[..., None], taken, before)

        logits = dense.logits(w, TOKENS, c.model, around=around)
        return dense.cross_entropy(logits, BATCH) + 0.01 * sum(losses)

    assert_is(lambda w: expected(w, []), w, loss, g)
    expected(w, shares := [])
    np.testing.assert_allclose(layers.by_name()["taken"], shares, rtol=1e-4)
    assert all(0.2 < share < 0.8 for share in shares)


@pytest.mark.long
def test_masked_diffusion_is_the_dense_one():
    """Without random keys, as in validation: row i has the key i."""
    c = config("masked_diffusion", loss_chunk=4)
    w, loss, g, _ = computed(c)
    keys = [jax.random.key(i) for i in range(tiny.BATCH)]
    share = np.array([jax.random.uniform(key) for key in keys])[:, None]
    drawn = [jax.random.uniform(jax.random.fold_in(key, 1), (tiny.LENGTH,)) for key in keys]
    hidden = np.array(drawn) < share
    ids, position, document = TOKENS
    is_read = ~np.pad(hidden[:, :-1], ((0, 0), (1, 0))) | (position == 0)
    tokens = np.where(is_read, ids, c.model.vocab - 1), position, document

    weighted = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask * hidden / share)

    def expected(w):
        logits = dense.logits(w, tokens, c.model, sees=lambda *_: True)
        mean = dense.cross_entropy(logits, weighted)
        return mean * weighted.loss_mask.sum() / BATCH.loss_mask.sum()

    assert_is(expected, w, loss, g)


@pytest.mark.long
def test_multi_token_prediction_is_the_dense_one(monkeypatch):
    """Targets of the second head weigh 0.3."""
    c = config("multi_token_prediction", loss_chunk=4)
    kind = type(load_model(c.model))

    def weighted(*given, more=kind.more_predictions):
        ((x, targets),) = more(*given)
        return [(x, dataclasses.replace(targets, counted=0.3 * targets.counted))]

    monkeypatch.setattr(kind, "more_predictions", weighted)
    w, loss, g, _ = computed(c, STAGES)
    *others, last = range(c.model.layers)
    mask, count = BATCH.loss_mask[:, 1:] & ~BATCH.is_seq_start[:, 1:], BATCH.loss_mask.sum()

    def of(w, layers):
        of_layers = jax.tree.map(lambda x: x[np.array(layers)], w.layers)
        sizes = dataclasses.replace(c.model, layers=len(layers))
        return dense.logits(dataclasses.replace(w, layers=of_layers), TOKENS, sizes)

    def expected(w):
        logs = jax.nn.log_softmax(of(w, [*others[:-1], last])[:, :-1])
        after = jnp.take_along_axis(logs, BATCH.targets[:, 1:, None].astype(np.int32), -1)[..., 0]
        return dense.cross_entropy(of(w, others), BATCH) - 0.3 * jnp.sum(after * mask) / count

    assert_is(expected, w, loss, g)


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.long
def test_label_smoothing_is_optaxs_with_weights_and_without(monkeypatch):
    c = config(loss="label_smoothing:loss")
    w, loss, g, _ = computed(c, STAGES)
    smoothed = optax.smooth_labels(jax.nn.one_hot(BATCH.targets, c.model.vocab), 0.1)

    def expected(weights, w):
        losses = optax.softmax_cross_entropy(dense.logits(w, TOKENS, c.model), smoothed)
        return jnp.sum(losses * weights) / weights.sum()

    assert_is(functools.partial(expected, BATCH.loss_mask), w, loss, g)
    of_loss = importlib.import_module("label_smoothing").loss
    monkeypatch.setattr(of_loss, "inputs", {"kind": u32, "weight": f32}, raising=False)
    monkeypatch.setattr(of_loss, "weights", "weight", raising=False)
    # Rows weigh differently, so that no mean of means over devices or microbatches is right.
    weights = np.random.default_rng(2).random(BATCH.targets.shape, np.float32) - 0.3
    weights = np.maximum(weights, 0) * np.arange(len(weights), dtype=np.float32)[:, None]
    batch = dataclasses.replace(BATCH, loss_inputs=np.stack([KIND, weights.view(np.uint32)], -1))
    for mesh, chunk in ((STAGES, None), (SHARDED, 4)):
        c.training.loss_chunk = chunk
        _, loss, g, _ = computed(c, mesh, batch)
        assert_is(functools.partial(expected, weights * BATCH.loss_mask), w, loss, g)


def pair_sums(logits):
    """Sums of the log-probabilities of the targets of each sequence, as [(chosen, rejected),
    pairs].
    """
    log_p = jax.nn.log_softmax(logits)
    at_target = jnp.take_along_axis(log_p, BATCH.targets[..., None].astype(np.int32), -1)[..., 0]
    return (at_target * BATCH.loss_mask).sum(1).reshape(-1, 2).T


REFERENCE = np.random.default_rng(1).normal(size=(*BATCH.targets.shape, 64)).astype(np.float32)
"""Logits of the reference policy."""


def dpo(logits):
    chosen, rejected = pair_sums(logits) - pair_sums(REFERENCE)
    return jnp.mean(jnp.log1p(jnp.exp(-0.1 * (chosen - rejected))))


@pytest.mark.long
def test_a_loss_of_pairs():
    """The reference's log-probabilities are an input of the dataset."""
    c = config(loss="preferences:dpo", microbatches=2)
    log_p = np.asarray(jax.nn.log_softmax(REFERENCE))
    log_p = np.take_along_axis(log_p, BATCH.targets[..., None].astype(np.int32), -1)
    batch = dataclasses.replace(BATCH, loss_inputs=log_p.view(np.uint32))
    w, loss, g, _ = computed(c, STAGES, batch)
    assert_is(lambda w: dpo(dense.logits(w, TOKENS, c.model)), w, loss, g)
    c.training.loss_chunk = 4
    with pytest.raises(ValueError, match="whole sequences"):
        computed(c, "one device", batch)


# ---- an optimizer --------------------------------------------------------------------------------


@pytest.mark.long
def test_lion_is_optaxs():
    """Other optimizers: tests/optimizers/test_factors.py."""
    c, steps = config(), range(3)
    c.optimizer = tiny.optimizer(
        algorithm="lion:lion", learning_rate=1e-3, weight_decay=0.1, warmup_steps=0, clip_norm=1e9
    )
    model = load_model(c.model)
    updates = updates_of(c.optimizer, model, train.OPTIMIZERS)
    w, gs = random_weights(model.table), [random_weights(model.table, i + 1) for i in steps]
    with jax.set_mesh(tiny.mesh(SHARDED)):

        @tiny.per_device
        def update(
            state: train.State[train.Transformer], g: train.Transformer, step: i32[""]
        ) -> train.State[train.Transformer]:
            return train.update_state(state, g, step, c, updates)[0]

        state = tiny.state(c)
        assert not named_leaves(state.adam_nu)
        state = dataclasses.replace(state, weights=tiny.place(w, train.Transformer))
        for i in steps:
            state = update(state, tiny.place(gs[i], train.Transformer), np.int32(i))
    o = c.optimizer
    schedule = optax.cosine_decay_schedule(o.learning_rate, o.schedule_steps, o.final_fraction)
    oracle = optax.lion(schedule, o.adam_b1, o.adam_b2, weight_decay=0.1)
    moments = oracle.init(w)
    for g in gs:
        change, moments = oracle.update(g, moments, w)
        w = optax.apply_updates(w, change)
    for name, x in named_leaves(state.weights).items():
        np.testing.assert_allclose(x, named_leaves(w)[name], rtol=1e-5, atol=1e-6, err_msg=name)


def clipped(mesh: str, limit: float) -> tuple:
    """w_q, w_k, and the metric of each layer, after a step of qk_clip in two microbatches."""
    c = config("qk_clip", layers=4, microbatches=2)
    own = GroupConfig("layers.w_[qk]", algorithm="qk_clip:muon_clip")
    c.optimizer = tiny.optimizer(algorithm="muon", warmup_steps=0, groups=[own])
    if mesh == STAGES:  # device 0 has layers 0 and 3
        c.pipeline = PipelineConfig(schedule="zb_v", virtual_stages=2)
    with jax.set_mesh(tiny.mesh(mesh)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("qk_clip"), "LIMIT", limit)
        model = load_model(c.model)
        order, w = placement_of(c, model).rows.reshape(-1), random_weights(model.table)
        w = dataclasses.replace(w, layers=jax.tree.map(lambda x: x[order], w.layers))
        state = dataclasses.replace(tiny.state(c), weights=tiny.place(w, train.Transformer))
        state, metrics = tiny.training_step(c)(state, tiny.place_batch(c), np.int32(0))
        if mesh == "r=2 d=2 t=2":
            assert find_unsound(tiny.step(c)) == []
        of = state.weights.layers
        found = (np.asarray(x)[np.argsort(order)] for x in (of.w_q, of.w_k))
        return *found, np.asarray(metrics.layers.by_name()["max_logit"])


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["r=2 d=2 t=2", SHARDED, STAGES])
def test_qk_clip_scales_heads_by_the_largest_logit_of_the_batch(mesh):
    """Muon's own update is that of tests/optimizers/test_muon.py."""
    c, largest, document = config("qk_clip", layers=4), [], TOKENS[2]

    def note(layer, scores, i, j):
        seen = (document[:, :, None] == document[:, None]) & (i >= j)
        largest.append(jnp.where(seen[:, None], scores, -jnp.inf).max((2, 3)))
        return scores

    dense.logits(random_weights(load_model(c.model).table), TOKENS, c.model, score=note)
    of_rows = np.stack(largest)  # [layers, rows, heads]
    of_heads = of_rows.max(1)
    limit = float(np.median(of_heads))
    w_q, w_k, _ = clipped("one device", 1e9)
    factor = np.minimum(limit / of_heads, 1).reshape(4, 1, *w_q.shape[2:4], 1)
    of_k = np.sqrt(factor.min(3))
    new_q, new_k, metric = clipped(mesh, limit)
    np.testing.assert_allclose(new_k, w_k * of_k, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(new_q, w_q * factor / of_k[:, :, :, None], rtol=1e-4, atol=1e-6)
    means = of_rows.reshape(4, 2, -1, of_rows.shape[2]).max(2).mean(1).max(1)
    np.testing.assert_allclose(metric, means, rtol=1e-5)


# ---- a listener ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_metric_computed_on_the_host(tmp_path, monkeypatch, no_hashes):
    """It is that of the weights in the checkpoint, by another formula: ‖W‖² over the largest
    eigenvalue of WᵀW.
    """
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    c = config(layers=1, eval_interval=1, eval_batches=0, checkpoint_interval=1)
    c.data.filespec, c.training.steps, c.model.vocab = str(ROOT / "synthetic_dataset.zarr"), 2, 1280
    c.training.listeners = ["stable_rank:StableRank"]
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        train.train(c, load_model(c.model), tmp_path)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = {x["step"]: x["stable_rank"] for x in lines if x.get("event") == "embedding"}
    assert found.keys() == {1, 2}
    for step, rank in found.items():
        w = np.float64(zarr.open_array(tmp_path / f"checkpoints/{step:010}/weights/embed")[:])
        np.testing.assert_allclose(rank, np.sum(w**2) / np.linalg.eigvalsh(w.T @ w)[-1], rtol=1e-4)


# ---- LoRA ----------------------------------------------------------------------------------------


def with_products(w):
    """Weights with the factors of LoRA multiplied out."""
    of = w.layers
    q = jnp.einsum("lmr,lrkqd->lmkqd", of.lora_qa, of.lora_qb)
    v = jnp.einsum("lmr,lrkd->lmkd", of.lora_va, of.lora_vb)
    return dataclasses.replace(w, layers=dataclasses.replace(of, w_q=of.w_q + q, w_v=of.w_v + v))


@pytest.mark.long
def test_lora_is_the_dense_model_with_its_products():
    c = config("lora")
    for name in ("lora_qb", "lora_vb"):  # which begin at 0
        assert not getattr(load_model(c.model).table.layers, name).std
    w, loss, g, _ = computed(c, STAGES)

    def expected(w):
        return dense.cross_entropy(dense.logits(with_products(w), TOKENS, c.model), BATCH)

    assert_is(expected, w, loss, g)


@pytest.mark.long
def test_lora_trains_its_factors_alone_and_exports_their_products(tmp_path):
    """From a run without them, with the settings of the page."""
    c, base = config("lora"), random_weights(load_model(config().model).table)
    with jax.set_mesh(tiny.mesh("d=2")), Checkpointer(tmp_path / "base/checkpoints") as checkpoints:
        weights = {"weights": tiny.place(base, train.Transformer)}
        about = {"config": dataclasses.asdict(config()), "loader": {}}
        checkpoints.save(3, weights, about)
    page = (ROOT / "docs/changing.md").read_text()
    (groups,) = re.findall(r"^```yaml\ntraining:\n.*?groups:\n(.*?)```", page, re.S | re.M)
    c.optimizer = tiny.optimizer(warmup_steps=0, weight_decay=0)
    c.optimizer.groups = [GroupConfig(**group) for group in yaml.safe_load(groups)]
    c.training.init_from, c.training.init_from_missing = str(tmp_path / "base"), "fresh"
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        state = fresh_state(tiny.step(c))
        trained = {name for name in named_leaves(state.weights) if "/lora_" in name}
        assert named_leaves(state.adam_mu).keys() == named_leaves(state.adam_nu).keys() == trained
        step, batch = tiny.training_step(c), tiny.place_batch(c)
        for i in range(2):
            state, _ = step(state, batch, np.int32(i))
        after = jax.tree.map(np.asarray, state.weights)
        for name, x in named_leaves(after).items():
            if name in trained:
                assert np.abs(x).max() > 1e-3
            else:
                np.testing.assert_array_equal(x, named_leaves(base)[name])
        with Checkpointer(tmp_path / "lora/checkpoints") as checkpoints:
            checkpoints.save(2, state, {"config": dataclasses.asdict(c), "loader": {}})
    export(tmp_path / "lora", tmp_path / "merged", step=2)
    to_run(tmp_path / "merged", tmp_path / "run")
    sizes, merged = read(tmp_path / "run")
    assert sizes.module == "train"
    expected = named_leaves(with_products(after))
    for name, x in named_leaves(jax.tree.map(np.asarray, merged)).items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-7)
