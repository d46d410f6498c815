"""The training step of train.py, broken in one place at a time: no break that communicates wrongly survives tracing."""

import pytest
from recipes import SOURCE
from traced_steps import program
from wrong_edits import EDITS

from shardlib.shardtypes import ShardError

pytestmark = pytest.mark.quick

CONFIGS = {axes: (axes[0] == "p", {"microbatches": 2}, {}, None) for axes in ("r d t", "p r d t")}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_step_as_it_stands_traces(config):
    program(SOURCE, config)


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit.gate == "types"], ids=str)
def test_broken_step_does_not_trace(edit):
    with pytest.raises((ShardError, TypeError, ValueError)) as raised:
        program(edit.source, CONFIGS[edit.where[0]])
    assert edit.message in str(raised.value)
