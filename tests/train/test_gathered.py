"""Weights that are gathered ahead: when, and what is rejected.

Numbers: test_oracles.py; dtypes: test_bf16.py.
"""

import jax
import pytest

from shardlib.shardtypes import ShardError
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from tests.support import tiny
from tests.support.recipes import SOURCE, module_of


def test_auto_gathers_once_where_there_is_nothing_to_gather():
    found = {}
    for mesh in ("one device", "t=8", "d=8", "r=2 d=2 t=2"):
        with jax.set_mesh(tiny.mesh(mesh)):
            settings = [
                tiny.config(gather_weights=setting) for setting in ("layer", "auto", "step")
            ]
            found[mesh] = [tiny.forward(c).gathers_ahead for c in settings]
    alone, sharded = [False, True, True], [False, False, True]
    assert found == {"one device": alone, "t=8": alone, "d=8": sharded, "r=2 d=2 t=2": sharded}


@pytest.mark.parametrize(("how", "refused"), [("layer", "matmul"), ("step", "all_gather")])
def test_a_layer_that_does_not_gather_a_weight_is_refused_where_all_are_gathered_ahead_too(
    how, refused
):
    old = '"M/fsdp F/t -> M F/t", w.w_up'
    assert SOURCE.count(old) == 1
    with module_of(SOURCE.replace(old, '"M/fsdp F/t -> M/fsdp F/t", w.w_up')) as changed_train:
        c = tiny.config(tiny.model(module="changed_train"), gather_weights=how)
        with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ShardError, match=refused):
            trace_step(c, load_model(c.model), spec=changed_train.SPEC).lower()
