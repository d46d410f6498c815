"""Shipped configurations on 1,024 devices, which need not exist: the types hold, and the proof
accepts the steps.
"""

import math

import jax
import pytest

from shardwright.axes import axes_of_mesh
from shardwright.cluster.devices import explicit_mesh
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.program.config import check_divides
from shardwright.program.step import trace_step
from shardwright.run.launch import composed

MESHES = {
    "gpt2_124m": {"r": 4, "d": 256},
    "local_experts": {"r": 32, "d": 4, "e": 8},
    "c4_h100x64_7b": {"d": 128, "t": 8},
    "c4_h100x64_olmoe": {"d": 16, "e": 64},
    "c4_h100x64_qwen30b": {"d": 8, "e": 128},
    "c4_h100x64_qwen30b model=moe_deepseek_v3": {"d": 2, "e": 256, "t": 2},
    "c4_h100x64_qwen30b model=moe_qwen3_next_80b_a3b": {"d": 2, "e": 256, "t": 2},
    "flat_tokens_c4_a100x8x4_84m": {"r": 8, "d": 128},
    "flat_tokens_c4_a100x8_2b": {"d": 256, "t": 4},
}
IN_CI = ("gpt2_124m", "local_experts")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.long(every_case=True) if x in IN_CI else pytest.mark.slow)
        for x in MESHES
    ],
)
def test_a_shipped_configuration_is_proved_on_1024_devices(name):
    sizes = {"r": 1, "t": 1} | MESHES[name]
    assert math.prod(sizes.values()) == 1024
    c = composed(*name.split(), "paths.model_name=large")
    c.training.batch_size = c.training.microbatches * 1024 // sizes["t"]
    with jax.sharding.use_abstract_mesh(explicit_mesh(axes_of_mesh(sizes))):
        check_divides(c, sizes)
        assert not find_unsound(trace_step(c, load_model(c.model)))
