"""The model against transformers' Llama; with QK-norm, against its Qwen3."""

import jax
import numpy as np
import pytest
import tiny
from llama_truth import compare, llama, llama_logits, losses_and_grads

from shardwright_data.loader import TokenBatch


@pytest.mark.parametrize(
    ("mesh", "changes", "z_loss"),
    [
        *(pytest.param(name, {}, 0.0, marks=pytest.mark.long) for name in tiny.MESHES),
        pytest.param("r=2 d=2 t=2", {"tied_embeddings": True}, 0.0, marks=pytest.mark.long),
        ("d=4 t=2", {}, 0.01),
        ("r=2 d=2 t=2", {"qk_norm": True}, 0.0),
        pytest.param("d=4 t=2", {"logit_softcap": 0.5}, 0.0, marks=pytest.mark.long),
    ],
)
def test_logits_loss_and_gradients_equal_llama(mesh, changes, z_loss):
    compare(mesh, changes, z_loss)


@pytest.mark.long
def test_without_the_mask_a_row_is_one_document():
    c, batch = tiny.model(), tiny.host_batch()
    assert batch.is_seq_start[:, 1:].any()
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        w = tiny.weights(c)
        logits, *_ = losses_and_grads(w, batch, c, document_mask=False)
    row = TokenBatch(batch.targets, np.zeros_like(batch.is_seq_start), batch.loss_mask)
    row.is_seq_start[:, 0] = True
    np.testing.assert_allclose(logits, llama_logits(llama(w, c), row).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_rope_base_and_grouping_matter():
    """The comparison above can tell: another base, or queries grouped otherwise, gives other logits."""
    batch = tiny.host_batch()
    with jax.set_mesh(tiny.mesh("one device")):
        w = tiny.weights(tiny.model())
        logits, _, _ = losses_and_grads(w, batch, tiny.model(rope_base=100.0))
    assert np.abs(logits - llama_logits(llama(w, tiny.model()), batch).detach().numpy()).max() > 1e-2
