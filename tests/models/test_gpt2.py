"""The second model, trained by the same train.py: dropout, and its exchange with transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardwright.models import gpt2
from shardwright.program.checks import check_config
from shardwright.sampling import cache
from tests.support import tiny
from tests.support.transformers_models import imported, theirs


def model(**changes) -> gpt2.ModelConfig:
    sizes = {"vocab": 64, "positions": 24, "d_model": 64, "layers": 3, "heads": 8, "bos_id": 5}
    return gpt2.ModelConfig(**{**sizes, **changes})


def test_dropout_keeps_the_mean():
    keys = jax.random.split(jax.random.key(3), 50)
    dropped = np.asarray(gpt2.dropout(jnp.ones((50, 400)), 0.25, keys))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    kept = (dropped != 0).mean(axis=1)
    assert kept.mean() == pytest.approx(0.75, abs=4 * (0.25 * 0.75 / dropped.size) ** 0.5)
    assert len(np.unique(dropped, axis=0)) == 50, "each key drops others"


def test_each_sequence_position_and_use_of_dropout_has_a_key_of_its_own():
    keys = jax.random.split(jax.random.key(3), 4)

    @jax.jit
    @jax.shard_map(out_specs=PartitionSpec(None, None, "t"))
    def own(keys):
        return jnp.stack([jax.random.key_data(gpt2.keys_at(keys, site, 5)) for site in range(3)])

    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        found = np.asarray(own(keys))
    assert found.shape[:3] == (3, 4, 10)
    assert len(np.unique(found.reshape(120, -1), axis=0)) == 120


@pytest.mark.long
def test_training_drops_other_entries_in_each_sequence():
    """And at each step; evaluation drops none.

    Of sequences of the same tokens one counts, and then another.
    """
    c, batch = tiny.config(model(dropout=0.3)), tiny.host_batch()
    c.optimizer.learning_rate = 0.0
    for values in (batch.targets, batch.is_seq_start):
        values[:] = values[0]
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state, step, found = tiny.state(c), tiny.training_step(c), []
        for row, number in ((0, 0), (1, 0), (1, 1)):
            batch.loss_mask[:] = np.arange(tiny.BATCH)[:, None] == row
            placed = tiny.place_batch(c, batch)
            nats, targets = tiny.evaluation_step(c)(state.weights, placed)
            state, metrics = step(state, placed, np.int32(number))
            found += [float(metrics.loss), float(nats / targets)]
    first, without, second, *_, later, _ = found
    assert len({first, second, later, without}) == 4
    assert found[1::2] == pytest.approx([without] * 3, rel=1e-6)


@pytest.mark.long
def test_logits_with_a_cache_are_those_without():
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        cache.check_cache(tiny.forward(tiny.config(model(positions=16, dropout=0.1))), 16)


def test_sequences_longer_than_the_table_of_positions_are_refused():
    message = r"sequences have 16 tokens, but model\.positions is 8; raise it\."
    with pytest.raises(ValueError, match=message):
        check_config(tiny.config(model(positions=tiny.LENGTH - 8)))


def test_their_weights_become_ours_again():
    """The tensors of the first checkpoints have no prefix; the mask is one of them."""
    model = theirs("GPT2")
    expected, w = imported(model)
    named = {name.removeprefix("transformer."): x.numpy() for name, x in model.state_dict().items()}
    tensors = named | {"h.0.attn.bias": np.tri(96)[None, None]}
    found, weights = gpt2.from_huggingface(model.config.to_dict(), tensors)
    assert dataclasses.replace(found, module="gpt2") == expected
    jax.tree.map(np.testing.assert_array_equal, weights, w)
