"""Each configuration composes, and its name tells the truth."""

import copy
import dataclasses

import jax
import pytest

from shardwright.modeling.model import load_model
from shardwright.modeling.weights import shapes_of
from shardwright.run.differences import config_differences
from shardwright.run.resuming import fixed_settings, with_defaults
from tests.support.shipped import RUNS, load

SIZES = {"84m": 101e6, "270m": 336e6, "540m": 671e6, "1b": 1074e6, "2b": 2147e6, "7b": 7248e6}
PARAMETERS = {name: pytest.approx(size, rel=5e-3) for name, size in SIZES.items()}
# 124,439,808 is what transformers counts for "gpt2"; here 47 rows of its table are added.
PARAMETERS["124m"] = 124_439_808 + 47 * 768
PARAMETERS |= {"olmoe": 6_919_161_856, "qwen30b": 30_532_122_624}  # as transformers counts

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", [name for name in RUNS if "c4" in name or name == "gpt2_124m"])
def test_a_model_has_the_parameters_that_its_name_says(name):
    """The steps of all are traced in test_scale.py."""
    hardware, _, size = name.rpartition("_")
    c = load(name)
    hosts = {"flat_tokens_c4_a100x8x4": 4, "c4_h100x64": 8}.get(hardware)
    assert (c.distributed.auto, c.distributed.count) == (hosts is not None, hosts)
    weights = shapes_of(load_model(c.model).table)
    assert sum(x.size for x in jax.tree.leaves(weights)) == PARAMETERS[size]


@pytest.mark.parametrize("hardware", ["a100", "h100", "h200", "cpu"])
def test_hardware_is_one_setting(hardware):
    options = load("flat_tokens_c4_a100x8_84m", f"hardware={hardware}").hardware.options
    assert ("xla_gpu_reduce_scatter_combine_threshold_bytes" in options) == (hardware != "cpu")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_is_fast_unless_it_is_to_be_deterministic(deterministic):
    given = f"hardware.deterministic={str(deterministic).lower()}"
    options = load("flat_tokens_c4_a100x8_84m", "hardware=h100", given).hardware.options
    assert options.get("xla_gpu_exclude_nondeterministic_ops", False) == deterministic


def test_a_checkpoint_made_before_a_setting_existed_is_as_if_it_had_the_default():
    c = load("first_chip")
    current = dataclasses.asdict(c)
    saved = copy.deepcopy(current)
    del saved["model"]["norm_epsilon"], saved["optimizer"]["z_loss"], saved["data"]["stream"]["text_separator"]
    fixed = fixed_settings(saved, current)
    assert config_differences(with_defaults(saved), current, fixed) == []
    current["optimizer"]["z_loss"] = 0.5
    lines = config_differences(with_defaults(saved), current, fixed)
    assert lines == ["optimizer.z_loss: checkpoint has 0.0, this run has 0.5"]
