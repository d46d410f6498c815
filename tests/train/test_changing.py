"""docs/recipes: each patch, in a copy of train.py, against a dense computation, optax or torch; and
its Python.
"""

import dataclasses
import functools
import json
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
import zarr
from jax.sharding import AbstractMesh, AxisType
from safetensors.numpy import load_file

from shardwright.data.loader import TokenBatch
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.optimizers.config import GroupConfig
from shardwright.program.checkpoint import Checkpointer, named_leaves
from shardwright.program.config import PipelineConfig
from shardwright.program.resume import fresh_state
from shardwright.program.step import trace_step
from shardwright.sampling.sampler import Sampler, Sampling
from tests.support import dense, tiny
from tests.support.huggingface_models import COMPARES, export, read, to_run
from tests.support.recipes import RECIPES, ROOT, SOURCE, changed, module_of
from tests.support.redrawn import redrawn

EVERY_LONG = pytest.mark.long(every_case=True)
STAGES = "p=2 d=2 t=2"


@dataclasses.dataclass
class Trained:
    """What a run of a changed train.py gave."""

    before: list
    """Weights before each step."""
    metrics: list
    gradients: list
    """Of the loss, from what adamw keeps of them."""
    validation: float
    state: object


def trained(
    recipe: str,
    mesh: str,
    steps: int = 1,
    batch: TokenBatch | None = None,
    optimizer=(),
    **training,
):
    """What some steps of a changed train.py gave, in f32 and without clipping; `batch` each
    time.
    """
    c = tiny.config(tiny.model(module="changed_train", layers=4), **training)
    c.optimizer = tiny.optimizer(warmup_steps=0, clip_norm=1e9, **dict(optimizer))
    if mesh.startswith("p"):
        c.training.microbatches, c.pipeline = 2, PipelineConfig(schedule="1f1b")

    def host(tree):
        return jax.tree.map(np.asarray, tree)

    with module_of(changed(recipe)) as train, jax.set_mesh(tiny.mesh(mesh)):
        c.model = train.ModelConfig(**vars(c.model))  # of the recipe
        model = load_model(c.model)
        state = jax.jit(functools.partial(train.init_state, config=c, model=model))(
            jax.random.key(0)
        )
        batch = tiny.place_batch(c, batch)
        nats, targets = train.make_evaluation_step(c, model)(state.weights, batch)
        step, found = (
            train.make_training_step(c, model),
            Trained([], [], [], float(nats / targets), None),
        )
        for i in range(steps):
            found.before.append(host(state.weights))
            mu = host(state.adam_mu)
            state, metrics = step(state, batch, np.int32(i))
            found.metrics.append(metrics)

            def of_step(new, old):
                return None if new is None else (new - 0.9 * old) / np.float32(0.1)

            def is_none(x):
                return x is None

            found.gradients.append(jax.tree.map(of_step, host(state.adam_mu), mu, is_leaf=is_none))
        found.state = host(state)
    return found


def assert_gradients(found: Trained, loss) -> None:
    """Loss and gradients of the first step are those of `loss`, a function of the weights."""
    expected, g = jax.jit(jax.value_and_grad(loss))(found.before[0])
    np.testing.assert_allclose(found.metrics[0].loss, expected, rtol=2e-5)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found.gradients[0]), jax.tree.leaves(g), strict=True
    ):
        scale = float(np.abs(theirs).max())
        np.testing.assert_allclose(
            ours, theirs, rtol=2e-4, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path)
        )


BATCH = tiny.host_batch()
TOKENS = dense.tokens_of(BATCH)
KIND = np.random.default_rng(5).integers(0, 64, BATCH.targets.shape).astype(np.uint32)
WITH_KIND = dataclasses.replace(BATCH, inputs=KIND[..., None])
# The second input of the token that is read: of the one before the target, 0 before a document.
KIND_READ = np.where(BATCH.is_seq_start, 0, np.pad(KIND[:, :-1], ((0, 0), (1, 0))))


def alibi(layer, scores, i, j):
    return scores - (2.0 ** (-(np.arange(16) + 1) / 2))[:, None, None] * (i - j)


def layer_norm(x, epsilon):
    return dense.rms(x - x.mean(-1, keepdims=True), epsilon)


def in_window(i, j):
    return (i >= j) & (i - j < 5)


def latent_heads(of, h, position, epsilon=1e-5):
    """Queries, keys and values of multi-head latent attention; the first half of a head's entries
    is turned.
    """
    half = of.w_q.shape[-1] // 2
    project = functools.partial(jnp.einsum, "blm,m...d->bl...d")
    latent = dense.rms(h @ of.w_latent, epsilon) * of.latent_norm

    def turned(x):
        return dense.rotated(x, position, 10_000.0)

    q, k, v = (project(x, w) for x, w in ((h, of.w_q), (latent, of.w_k), (latent, of.w_v)))
    shared = jnp.broadcast_to(turned(h @ of.w_turned)[:, :, None], (*k.shape[:3], half))
    return (
        jnp.concatenate([turned(q[..., :half]), q[..., half:]], -1),
        jnp.concatenate([shared, k], -1),
        v,
    )


DENSE = {  # recipe: how dense.logits is told of it
    "latent_attention": {"qkv": latent_heads},
    "activation": {"activation": jax.nn.gelu},
    "layernorm": {"norm": layer_norm},
    "alibi": {"rope": lambda layer: False, "score": alibi},
    "sliding_window": {"sees": lambda layer, i, j, position: in_window(i, j)},
    "alternating_windows": {
        "sees": lambda layer, i, j, position: (i >= j) if layer % 2 else in_window(i, j)
    },
    "new_weight": {"gain": True},
    "attention_sinks": {"sinks": True},
    "second_input": {"second": KIND_READ},
    "value_residual": {"values": lambda v, first: (v + first) / 2},
}


@pytest.mark.quick
@pytest.mark.parametrize("recipe", RECIPES)
def test_git_applies_each_recipe_to_the_source_of_today(recipe, tmp_path):
    (tmp_path / "train.py").write_text(SOURCE)
    patch = ROOT / f"docs/recipes/{recipe}.patch"
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == changed(recipe) != SOURCE


@pytest.mark.parametrize("program", ["evaluation", pytest.param("training", marks=EVERY_LONG)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_types_of_each_recipe_hold(recipe, program):
    microbatches = 1 if recipe in ("dpo", "simpo") else 2
    c = tiny.config(tiny.model(module="changed_train", layers=4), microbatches=microbatches)
    c.optimizer.loss = "changed_train:dpo" if recipe == "dpo" else c.optimizer.loss
    mesh = AbstractMesh((2, 2, 2), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    with module_of(changed(recipe)) as train, jax.sharding.use_abstract_mesh(mesh):
        c.model = train.ModelConfig(**vars(c.model))
        assert trace_step(c, load_model(c.model), name=program, spec=train.SPEC).traced


ON_C = "d=2 c=2 t=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mesh"), [*((recipe, STAGES) for recipe in DENSE), ("latent_attention", ON_C)]
)
def test_a_model_is_the_dense_one(recipe, mesh):
    c = tiny.model(layers=4)
    batch = WITH_KIND if "second" in recipe else BATCH
    found = trained(recipe, mesh, batch=batch)

    def loss(w, **how):
        return dense.cross_entropy(dense.logits(w, dense.tokens_of(batch), c, **how), batch)

    assert_gradients(found, functools.partial(loss, **DENSE[recipe]))
    np.testing.assert_allclose(found.validation, found.metrics[0].loss, rtol=1e-5)
    plain = {"gain": True, "sinks": True} | DENSE[recipe]
    plain = {} if recipe not in ("new_weight", "attention_sinks") else dict.fromkeys(plain, False)
    if "latent" in recipe:
        # its weights are not the Llama's; without what is turned it is another model
        plain = {"qkv": lambda of, h, position: latent_heads(of, h, 0 * position)}
    assert abs(loss(found.before[0], **plain) - found.validation) > 1e-4, "the change is felt"


@pytest.mark.parametrize(
    ("mesh", "training"),
    [
        pytest.param("d=2 t=2", {"microbatches": 4}, marks=pytest.mark.long),
        pytest.param(STAGES, {}, marks=pytest.mark.slow),
    ],
)
def test_a_loss_and_a_metric_from_a_layer(mesh, training):
    c, found = tiny.model(layers=4), trained("layer_loss", mesh, **training)

    def loss(w):
        stream = []
        plain = dense.cross_entropy(dense.logits(w, TOKENS, c, stream=stream), BATCH)
        return plain + 0.01 * sum(stream)

    assert_gradients(found, loss)
    stream = []
    plain = dense.cross_entropy(dense.logits(found.before[0], TOKENS, c, stream=stream), BATCH)
    np.testing.assert_allclose(found.validation, plain, rtol=1e-5)
    np.testing.assert_allclose(found.metrics[0].layers.by_name()["stream"], stream, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [STAGES, ON_C])
def test_mixture_of_depths(mesh):
    c, found = tiny.model(layers=4), trained("mixture_of_depths", mesh)

    def loss(w):
        losses, shares = [], []

        def around(of, before, after):
            score = jax.nn.sigmoid(dense.rms(before, c.norm_epsilon) @ of.router)
            # equal scores are wanted alike
            wanted = score >= jnp.sort(score, axis=1)[:, score.shape[1] // 2, None]
            losses.append(-jnp.mean(jnp.log(jnp.where(wanted, score, 1 - score))))
            shares.append(jnp.mean(score > 0.5))
            return jnp.where(
                (score > 0.5)[..., None], before + score[..., None] * (after - before), before
            )

        plain = dense.cross_entropy(dense.logits(w, TOKENS, c, around=around), BATCH)
        return plain + 0.01 * sum(losses), (plain, shares)

    assert_gradients(found, lambda w: loss(w)[0])
    _, (plain, shares) = loss(found.before[0])
    np.testing.assert_allclose(found.validation, plain, rtol=1e-5)
    np.testing.assert_allclose(found.metrics[0].layers.by_name()["taken"], shares, rtol=1e-4)
    assert min(shares) > 0.2
    assert max(shares) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["latent_attention", "mixture_of_depths", "value_residual"])
def test_a_step_is_proved_and_a_text_sampled(recipe):
    c = tiny.config(tiny.model(module="changed_train", layers=2))
    settings = Sampling(max_tokens=8, temperature=0.0)
    with module_of(changed(recipe)) as train:
        c.model = train.ModelConfig(**vars(c.model))
        model = load_model(c.model)
        mesh = AbstractMesh((2, 2, 2), ("d", "c", "t"), axis_types=(AxisType.Explicit,) * 3)
        assert find_unsound(trace_step(c, model, mesh, spec=train.SPEC)) == []
        with jax.set_mesh(tiny.mesh("d=2 t=2")):
            w = jax.jit(functools.partial(train.init_state, config=c, model=model))(
                jax.random.key(0)
            ).weights
            sampler, prompts = (
                Sampler(trace_step(c, model, spec=train.SPEC), settings, 16),
                [[5, 9, 2], [7]],
            )
            texts = sampler.generate(w, prompts)
            assert redrawn(sampler.forward, w, prompts, texts, settings, 16) == texts


@pytest.mark.long
def test_latent_attention_is_that_of_deepseek():
    """Of transformers, whose heads have the entries that are turned last."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    c = tiny.model(module="changed_train", layers=2, n_q_per_kv=1, d_head=8, norm_epsilon=1e-6)
    with module_of(changed("latent_attention")) as train:
        table, rng = load_model(train.ModelConfig(**vars(c))).table, np.random.default_rng(0)
    w = jax.tree.map(lambda x: rng.normal(x.mean, x.std or 0.3, x.shape).astype(np.float32), table)
    config = transformers.DeepseekV3Config(
        vocab_size=c.vocab, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=2, pad_token_id=None,
        first_k_dense_replace=2, num_attention_heads=8, num_key_value_heads=8, kv_lora_rank=16, q_lora_rank=None,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, rope_interleave=False, rms_norm_eps=1e-6,
        num_mtp_layers=0, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip

    def flat(x):
        return torch.tensor(x.reshape(len(x), -1).T.copy())

    state = {
        "model.embed_tokens.weight": w.embed,
        "model.norm.weight": w.final_norm,
        "lm_head.weight": w.unembed,
    }
    state = {name: torch.tensor(x) for name, x in state.items()}
    for i in range(2):
        of = jax.tree.map(lambda x, i=i: x[i], w.layers)
        named = {
            "input_layernorm": torch.tensor(of.attention_norm),
            "self_attn.q_proj": flat(np.roll(of.w_q, 4, axis=-1)),
            "self_attn.kv_a_proj_with_mqa": flat(
                np.concatenate([of.w_latent, of.w_turned], axis=-1)
            ),
            "self_attn.kv_a_layernorm": torch.tensor(of.latent_norm),
            "self_attn.kv_b_proj": flat(np.concatenate([of.w_k, of.w_v], axis=-1)),
            "self_attn.o_proj": torch.tensor(of.w_o.reshape(-1, c.d_model).T.copy()),
            "post_attention_layernorm": torch.tensor(of.mlp_norm),
            "mlp.gate_proj": flat(of.w_gate),
            "mlp.up_proj": flat(of.w_up),
            "mlp.down_proj": flat(of.w_down),
        }
        state |= {f"model.layers.{i}.{name}.weight": x for name, x in named.items()}
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    model.load_state_dict(state, strict=True)
    ids = np.random.default_rng(1).integers(0, c.vocab, (2, 24))
    position = np.broadcast_to(np.arange(24), ids.shape)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()
    qkv = functools.partial(latent_heads, epsilon=1e-6)
    found = dense.logits(w, (ids, position, np.ones_like(ids)), c, qkv=qkv)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_label_smoothing_is_torchs_and_leaves_validation_alone():
    torch = pytest.importorskip(
        "torch", reason="label smoothing is compared with torch's, on Python 3.11 only"
    )
    c, found = tiny.model(layers=4), trained("label_smoothing", STAGES)
    logits = dense.logits(found.before[0], TOKENS, c)
    flat, targets = (
        torch.tensor(np.asarray(logits)).flatten(0, 1),
        BATCH.targets.astype(np.int64).flatten(),
    )
    targets = torch.tensor(targets)
    smoothed = torch.nn.functional.cross_entropy(
        flat, targets, reduction="none", label_smoothing=0.1
    )
    np.testing.assert_allclose(
        found.metrics[0].loss, smoothed[BATCH.loss_mask.flatten()].mean(), rtol=1e-5
    )
    np.testing.assert_allclose(found.validation, dense.cross_entropy(logits, BATCH), rtol=1e-5)
    assert_gradients(
        found, lambda w: dense.cross_entropy(dense.logits(w, TOKENS, c), BATCH, smoothing=0.1)
    )


# ---- losses of pairs -----------------------------------------------------------------------------


def pair_sums(logits, mean=False):
    """Sum, or mean, of the log-probabilities of the targets of each sequence, as [pairs, (chosen,
    rejected)].
    """
    at_target = jnp.take_along_axis(
        jax.nn.log_softmax(logits), BATCH.targets[..., None].astype(np.int32), -1
    )[..., 0]
    sums = (at_target * BATCH.loss_mask).sum(1) / (BATCH.loss_mask.sum(1) if mean else 1)
    return sums.reshape(-1, 2).T


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d=2 t=2", STAGES])
def test_preferences_are_dpo(mesh):
    """The reference policy has a layer less. Its log-probabilities are an input of the dataset."""
    sizes = tiny.model(layers=3)
    with jax.set_mesh(tiny.mesh("one device")):
        of_reference = dense.logits(jax.tree.map(np.asarray, tiny.weights(sizes)), TOKENS, sizes)
    log_p = np.asarray(jax.nn.log_softmax(of_reference))
    log_p = np.take_along_axis(log_p, BATCH.targets[..., None].astype(np.int32), -1)
    batch = dataclasses.replace(BATCH, loss_inputs=log_p.astype(np.float32).view(np.uint32))
    settings = {"optimizer": {"loss": "changed_train:dpo"}, "microbatches": 2}
    c, found = tiny.model(layers=4), trained("dpo", mesh, batch=batch, **settings)
    chosen_of, rejected_of = pair_sums(of_reference)

    def loss(w):
        chosen, rejected = pair_sums(dense.logits(w, TOKENS, c))
        margin = 0.1 * ((chosen - chosen_of) - (rejected - rejected_of))
        return jnp.mean(jnp.log1p(jnp.exp(-margin)))

    assert_gradients(found, loss)
    with pytest.raises(ValueError, match="whole sequences"):
        trained("dpo", "one device", batch=batch, loss_chunk=4, **settings)


@pytest.mark.slow
def test_preferences_without_a_reference_are_simpo():
    c, found = tiny.model(layers=4), trained("simpo", STAGES)

    def loss(w):
        chosen, rejected = pair_sums(dense.logits(w, TOKENS, c), mean=True)
        return jnp.mean(jnp.log1p(jnp.exp(1.0 - 2.0 * (chosen - rejected))))

    assert_gradients(found, loss)
    with pytest.raises(ValueError, match="whole sequences"):
        trained("simpo", "one device", loss_chunk=4)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "chunk"), [("d=2 t=2", None), (STAGES, 4)])
def test_multi_token_prediction_is_the_dense_one(mesh, chunk):
    c, found = tiny.model(layers=3), trained("multi_token_prediction", mesh, loss_chunk=chunk)

    def of(w, *layers):
        of_layers = jax.tree.map(lambda x: x[np.array(layers)], w.layers)
        return dense.logits(dataclasses.replace(w, layers=of_layers), TOKENS, c)

    mask, count = BATCH.loss_mask[:, 1:] & ~BATCH.is_seq_start[:, 1:], BATCH.loss_mask.sum()

    def next_token(w):
        return dense.cross_entropy(of(w, 0, 1, 2), BATCH)

    def loss(w):
        logs = jax.nn.log_softmax(of(w, 0, 1, 3)[:, :-1])
        after = jnp.take_along_axis(logs, BATCH.targets[:, 1:, None].astype(np.int32), -1)[..., 0]
        return next_token(w) - jnp.sum(after * mask) / count

    assert_gradients(found, loss)
    np.testing.assert_allclose(found.validation, next_token(found.before[0]), rtol=1e-5)


@pytest.mark.long
def test_a_scalar_in_the_metrics():
    found = trained("weight_norm", "d=2 t=2")
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(found.state.weights)))
    np.testing.assert_allclose(found.metrics[0].weight_norm, norm, rtol=1e-5)


def dense_gradients(w, c):
    return jax.jit(jax.grad(lambda w: dense.cross_entropy(dense.logits(w, TOKENS, c), BATCH)))(w)


def updated_by(transformation, w, c, steps: int):
    """Weights after steps of an optimizer of optax."""
    state = transformation.init(w)
    for _ in range(steps):
        updates, state = transformation.update(dense_gradients(w, c), state, w)
        w = optax.apply_updates(w, updates)
    return w


def schedule(c):
    return optax.cosine_decay_schedule(c.learning_rate, c.schedule_steps, c.final_fraction)


@pytest.mark.slow
def test_lion_is_optaxs():
    c, m = tiny.optimizer(), tiny.model(layers=4)
    settings = {"algorithm": "lion", "learning_rate": 1e-3, "weight_decay": 0.1}
    found = trained("lion", "d=2 t=2", steps=3, optimizer=settings)
    assert all(x is None for x in jax.tree.leaves(found.state.adam_nu, is_leaf=lambda x: x is None))
    oracle = optax.lion(
        schedule(tiny.optimizer(**settings)), c.adam_b1, c.adam_b2, weight_decay=0.1
    )
    expected = updated_by(oracle, found.before[0], m, 3)
    for ours, theirs in zip(
        jax.tree.leaves(found.state.weights), jax.tree.leaves(expected), strict=True
    ):
        # Where rounding turns a sign, an entry goes the other way.
        same = np.isclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert same.mean() > 0.999, same.mean()


@pytest.mark.slow
def test_a_metric_computed_on_the_host(tmp_path):
    """It is that of the weights in the checkpoint, by another formula: ‖W‖² over the largest
    eigenvalue of WᵀW.
    """
    c = tiny.config(
        tiny.model(module="changed_train", layers=1),
        eval_interval=2,
        eval_batches=0,
        checkpoint_interval=2,
    )
    c.data.filespec, c.training.steps, c.model.vocab = str(ROOT / "synthetic_dataset.zarr"), 4, 1280
    with module_of(changed("host_metric")) as train, jax.set_mesh(tiny.mesh("d=4 t=2")):
        train.train(c, load_model(c.model), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = {
        line["step"]: line["stable_rank"] for line in lines if line.get("event") == "embedding"
    }
    assert found.keys() == {2, 4}
    for step, rank in found.items():
        w = zarr.open_array(tmp_path / f"checkpoints/{step:010}/weights/embed", mode="r")[:].astype(
            np.float64
        )
        np.testing.assert_allclose(rank, np.sum(w**2) / np.linalg.eigvalsh(w.T @ w)[-1], rtol=1e-4)


EXCHANGE = "\nfrom shardwright.huggingface.families import from_huggingface, to_huggingface\n"


def with_products(w):
    """Weights with the factors of LoRA multiplied out."""
    of = w.layers
    q, v = (
        jnp.einsum("lmr,lrkqd->lmkqd", of.lora_qa, of.lora_qb),
        jnp.einsum("lmr,lrkd->lmkd", of.lora_va, of.lora_vb),
    )
    return dataclasses.replace(w, layers=dataclasses.replace(of, w_q=of.w_q + q, w_v=of.w_v + v))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d=2 t=2", STAGES])
def test_lora_trains_its_factors_alone_and_is_the_dense_model_with_their_products(tmp_path, mesh):
    """From a run without them; and what its export writes is the same model."""
    c = tiny.config(tiny.model(layers=4))
    with (
        jax.set_mesh(tiny.mesh("d=2")),
        Checkpointer(tmp_path / "base" / "checkpoints") as checkpoints,
    ):
        base = tiny.weights(c.model)
        checkpoints.save(3, {"weights": base}, {"config": dataclasses.asdict(c), "loader": {}})
        base = jax.tree.map(np.asarray, base)
    page = (ROOT / "docs/changing.md").read_text()
    _, groups = re.search(r"^```yaml\n(training:\n.*?)```", page, flags=re.S | re.M)[1].split(
        "groups:\n"
    )
    c.optimizer = tiny.optimizer(warmup_steps=0, clip_norm=1e9, weight_decay=0)
    c.optimizer.groups = [GroupConfig(**group) for group in yaml.safe_load(groups)]
    c.training.init_from, c.training.init_from_missing = str(tmp_path / "base"), "fresh"
    if mesh.startswith("p"):
        c.training.microbatches, c.pipeline = 2, PipelineConfig(schedule="1f1b")
    c.model = dataclasses.replace(c.model, module="changed_train")

    def host(tree):
        return jax.tree.map(np.asarray, tree)

    def loss(w):
        return dense.cross_entropy(dense.logits(w, TOKENS, tiny.model(layers=4)), BATCH)

    value_and_grad = jax.jit(jax.value_and_grad(lambda w: loss(with_products(w))))
    with module_of(changed("lora")) as train, jax.set_mesh(tiny.mesh(mesh)):
        model, batch = load_model(c.model), tiny.place_batch(c)
        state = fresh_state(trace_step(c, model, spec=train.SPEC))
        trained = {name for name in named_leaves(state.weights) if name.startswith("layers/lora_")}
        assert len(trained) == 4
        assert named_leaves(state.adam_mu).keys() == named_leaves(state.adam_nu).keys() == trained
        step, evaluation = train.make_training_step(c, model), train.make_evaluation_step(c, model)
        for i in range(3):
            before, mu = host(state.weights), host(state.adam_mu)
            state, metrics = step(state, batch, np.int32(i))
            expected, g = value_and_grad(before)
            np.testing.assert_allclose(metrics.loss, expected if i else loss(base), rtol=2e-5)
            for name, ours in named_leaves(host(state.adam_mu)).items():
                theirs = named_leaves(g)[name]
                ours = (ours - 0.9 * named_leaves(mu)[name]) / np.float32(0.1)
                np.testing.assert_allclose(
                    ours, theirs, rtol=2e-4, atol=2e-5 * np.abs(theirs).max(), err_msg=name
                )
        after = host(state.weights)
        for name, x in named_leaves(after).items():
            if name in trained:
                assert np.abs(x - named_leaves(before)[name]).max() > 1e-3
            else:
                np.testing.assert_array_equal(x, named_leaves(base)[name])
        with Checkpointer(tmp_path / "lora" / "checkpoints") as checkpoints:
            checkpoints.save(3, state, {"config": dataclasses.asdict(c), "loader": {}})
        nats, targets = evaluation(state.weights, batch)
    directory = tmp_path / "merged"
    with module_of(changed("lora") + EXCHANGE):
        said = export(tmp_path / "lora", directory, step=3)
        rounded = export(tmp_path / "lora", tmp_path / "rounded", step=3, dtype="bf16")
    for text in (said, rounded):
        assert not COMPARES or "with those of transformers: they differ by at most" in text
    name = "model.layers.0.self_attn.q_proj.weight"  # has a product of factors
    exact, nearest = (
        load_file(tmp_path / path / "model.safetensors")[name] for path in ("merged", "rounded")
    )
    np.testing.assert_array_equal(nearest, exact.astype(nearest.dtype))
    assert nearest.dtype == jnp.bfloat16
    to_run(directory, tmp_path / "run")
    c.model, merged = read(tmp_path / "run")
    assert c.model.module == "train"
    merged = host(merged)
    np.testing.assert_allclose(nats / targets, loss(merged), rtol=2e-5)
    for name, x in named_leaves(merged).items():
        np.testing.assert_allclose(
            x, named_leaves(with_products(after))[name], rtol=1e-5, atol=1e-7
        )
