"""Mixtral, Qwen3-MoE and OLMoE become runs with the same logits, and runs become them."""

import dataclasses

import huggingface_models as models
import jax
import numpy as np
import pytest
from huggingface_models import export, to_run

from shardwright.run.opening import read_weights
from tools.huggingface import families

truth = pytest.importorskip("experts_truth")
transformers = pytest.importorskip("transformers")


@pytest.mark.long
@pytest.mark.parametrize("kind", truth.KINDS)
def test_there_and_back_is_the_same_to_the_bit(kind, one_device, tmp_path):
    c = truth.model(kind, bos_id=3)
    w = models.weights(c)
    said = export(models.save(tmp_path / "run", w, c), tmp_path / "exported")
    assert "with those of transformers: they differ by at most" in said
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(loaded).__name__ == f"{truth.KINDS[kind][0]}ForCausalLM"
    to_run(tmp_path / "exported", tmp_path / "back")
    model, weights = models.read(tmp_path / "back")
    assert model == dataclasses.replace(c, family=kind)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, weights), jax.tree.map(np.asarray, w))


@pytest.mark.long
@pytest.mark.parametrize("kind", truth.KINDS)
def test_what_transformers_saved_has_its_logits(kind, one_device, tmp_path):
    c = truth.model(kind, bos_id=3)
    their = truth.theirs(kind, jax.tree.map(np.asarray, models.weights(c)), c)
    their.save_pretrained(tmp_path / "model")
    to_run(tmp_path / "model", tmp_path / "run", bos_id=3)
    found, weights = models.read(tmp_path / "run")
    batch = models.rows(found)
    expected = models.their_logits(their, batch, 3).detach().numpy()
    np.testing.assert_allclose(models.logits_of(found)(weights, batch), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_experts": 1}, "model.shared_experts is 1; mixtral in transformers does not have it"),
        ({"scores": "sigmoid"}, "model.scores is 'sigmoid'; mixtral in transformers"),
        ({"normalize": False}, "model.normalize is False; mixtral in transformers"),
        ({"sinks": True, "qk_norm_all": True}, "model.sinks is True; olmoe in transformers"),
    ],
)
def test_other_math_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        families.to_huggingface(None, truth.model(**changes))


def test_what_training_adds_to_experts_may_differ_from_the_checkpoint(one_device, tmp_path):
    c = truth.model()
    w = models.weights(c)
    other = dataclasses.replace(c, pools=2, capacity_factor=1.0, balance_loss=0.1)
    config = dataclasses.asdict(models.settings(other))
    found, _ = read_weights(models.save(tmp_path / "run", w, c), w, config)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, w))
