"""training.changes: the settings and the loader of each step."""

import json

import pytest

from shardwright.program.changes import loader_at, settings_at
from tests.support import tiny
from tests.support.written_datasets import write

pytestmark = pytest.mark.quick

CHANGES = [
    {"step": 3, "training.seq_len": 32},
    {"step": 6, "training.seq_len": 48, "training.batch_size": 4},
]


def test_a_change_holds_from_its_step_on():
    config = {"training": {"seq_len": 16, "batch_size": 8, "changes": CHANGES}}
    found = [settings_at(config, step)["training"] for step in range(8)]
    lengths, sizes = ([training[name] for training in found] for name in ("seq_len", "batch_size"))
    assert lengths == [16, 16, 16, 32, 32, 32, 48, 48]
    assert sizes == [8, 8, 8, 8, 8, 8, 4, 4]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_checkpoint_is_resumed_by_the_loader_that_was_saved(tmp_path, step):
    """It is that of the last step done, which is of the phase before where the settings change."""
    c = tiny.config(tiny.model(vocab=259), changes=CHANGES[:1])
    c.data.filespec = write(tmp_path / "d")
    state = json.loads(json.dumps(loader_at(c, step - 1).state(step)))
    assert loader_at(c, step, state=state).seq_len == (32 if step >= 3 else 16)
    with pytest.raises(ValueError, match="The checkpoint was made with other data"):
        loader_at(c, step, state=state | {"dataset": "another"})
