"""What the loss of a target depends on. The model itself: test_oracles.py."""

import jax
import numpy as np
import pytest

import train
from shardwright.data.loader import TokenBatch
from tests.support import tiny


@pytest.mark.long
def test_a_target_sees_its_document_up_to_itself():
    """What the loss at one position depends on, found by its gradient."""
    c, length = tiny.model(embed_init_scale=1.0), tiny.LENGTH
    settings = tiny.config(c)
    # Each place of the first row holds a token of its own, so a row of the table's gradient tells
    # which place was seen.
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
            batch = tiny.place_batch(
                settings, TokenBatch(targets=tokens, is_seq_start=starts, loss_mask=mask)
            )
            table = np.asarray(step(w, batch).embed)
            seen = set(np.flatnonzero(np.abs(table).sum(axis=1)))
            first = max(i for i in range(place + 1) if starts[0, i])
            # The first of a document is predicted from id 0; each later one sees the targets before
            # it as well.
            assert seen == {0, *tokens[0, first:place]}, f"target {place}"
