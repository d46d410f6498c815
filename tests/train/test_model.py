"""The model against transformers' Llama; with QK-norm, against its Qwen3."""

import jax
import numpy as np
import pytest

import train
from shardwright.data.loader import TokenBatch
from tests.support import tiny
from tests.support.huggingface_models import losses_and_gradients, their_logits
from tests.support.llama_truth import compare, llama

EVERY_LONG = pytest.mark.long(every_case=True)


@pytest.mark.parametrize(
    ("mesh", "changes", "z_loss"),
    [
        *(pytest.param(name, {}, 0.0, marks=EVERY_LONG) for name in tiny.MESHES),
        pytest.param("r=2 d=2 t=2", {"tied_embeddings": True}, 0.0, marks=EVERY_LONG),
        ("d=4 t=2", {}, 0.01),
        pytest.param("r=2 d=2 t=2", {"qk_norm": True}, 0.0, marks=EVERY_LONG),
        pytest.param("d=4 t=2", {"logit_softcap": 0.5}, 0.0, marks=EVERY_LONG),
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
        logits, *_ = losses_and_gradients(w, batch, c, document_mask=False)
    row = TokenBatch(batch.targets, np.zeros_like(batch.is_seq_start), batch.loss_mask)
    row.is_seq_start[:, 0] = True
    np.testing.assert_allclose(logits, their_logits(llama(w, c), row, bos_id=0).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_rope_base_and_grouping_matter():
    """The comparison above can tell: another base, or queries grouped otherwise, gives other logits."""
    batch = tiny.host_batch()
    with jax.set_mesh(tiny.mesh("one device")):
        w = tiny.weights(tiny.model())
        logits, _, _ = losses_and_gradients(w, batch, tiny.model(rope_base=100.0))
    assert np.abs(logits - their_logits(llama(w, tiny.model()), batch, bos_id=0).detach().numpy()).max() > 1e-2


@pytest.mark.long
def test_a_target_sees_its_document_up_to_itself():
    """What the loss at one position depends on, found by its gradient."""
    c, length = tiny.model(embed_init_scale=1.0), tiny.LENGTH
    settings = tiny.config(c)
    # Each place of the first row holds a token of its own, so a row of the table's gradient tells which place was seen.
    tokens = np.zeros((tiny.BATCH, length), np.uint32)
    tokens[0] = np.arange(1, length + 1)
    starts = np.zeros((tiny.BATCH, length), bool)
    starts[:, 0] = True
    starts[0, [5, 6, 11]] = True

    def gradient(w: train.Transformer, batch: train.Batch) -> train.Transformer:
        return tiny.loss_and_gradients(w, batch, settings)[1]

    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        w, step = tiny.weights(c), tiny.per_device(gradient)
        for place in range(length):
            mask = np.zeros_like(starts)
            mask[0, place] = True
            batch = tiny.place_batch(settings, TokenBatch(targets=tokens, is_seq_start=starts, loss_mask=mask))
            table = np.asarray(step(w, batch).embed)
            seen = set(np.flatnonzero(np.abs(table).sum(axis=1)))
            first = max(i for i in range(place + 1) if starts[0, i])
            # The first of a document is predicted from id 0; each later one sees the targets before it as well.
            assert seen == {0, *tokens[0, first:place]}, f"target {place}"
