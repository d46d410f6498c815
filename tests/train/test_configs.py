"""Each configuration composes, and its name tells the truth."""

import copy
import dataclasses
import functools
import re

import jax
import pytest
import yaml

from shardwright.data.loader import DataConfig, StreamConfig
from shardwright.modeling.model import load_model, module_of
from shardwright.modeling.weights import shapes_of
from shardwright.program.differences import config_differences
from shardwright.program.saved_config import fixed_settings, with_defaults
from tests.support import tiny
from tests.support.shipped import CONFIGS, RUNS, load

SIZES = {"84m": 101e6, "270m": 336e6, "540m": 671e6, "1b": 1074e6, "2b": 2147e6, "7b": 7248e6}
PARAMETERS = {name: pytest.approx(size, rel=5e-3) for name, size in SIZES.items()}
# 124,439,808 is what transformers counts for "gpt2"; here 47 rows of its table are added.
PARAMETERS["124m"] = 124_439_808 + 47 * 768
PARAMETERS |= {"olmoe": 6_919_161_856, "qwen30b": 30_532_122_624}  # as transformers counts

pytestmark = pytest.mark.quick


def settings_of(group: str) -> dict:
    """Settings in the file of a model, with those of its defaults."""
    given = yaml.safe_load((CONFIGS / f"model/{group}.yaml").read_text())
    defaults = [settings_of(name) for name in given.pop("defaults", []) if name != "_self_"]
    return functools.reduce(dict.__or__, [*defaults, given])


@pytest.mark.parametrize("size", PARAMETERS)
def test_a_model_has_the_parameters_that_its_name_says(size):
    """Of the runs whose names end so."""
    of_size = [name for name in RUNS if name.endswith(f"_{size}")]
    texts = [(CONFIGS / f"{x}.yaml").read_text() for x in of_size if "c4" in x or "gpt2" in x]
    (group,) = {*re.findall(r"model: (\w+)", "".join(texts))}
    given = {"module": "train"} | settings_of(group)
    model = load_model(module_of(given["module"]).ModelConfig(**given))
    assert sum(x.size for x in jax.tree.leaves(shapes_of(model.table))) == PARAMETERS[size]


@pytest.mark.parametrize(
    ("name", "hosts", "is_gpu", "is_deterministic"),
    [("c4_h100x64_7b", 8, True, False), ("flat_tokens_c4_a100x8_84m", None, False, True)],
)
def test_hardware_and_hosts_are_one_setting(name, hosts, is_gpu, is_deterministic):
    """A run is fast unless it is to be deterministic."""
    given = [] if is_gpu else ["hardware=cpu"]
    c = load(name, *given, f"hardware.deterministic={str(is_deterministic).lower()}")
    assert (c.distributed.auto, c.distributed.count) == (hosts is not None, hosts)
    options = c.hardware.options
    assert ("xla_gpu_reduce_scatter_combine_threshold_bytes" in options) == is_gpu
    assert options.get("xla_gpu_exclude_nondeterministic_ops", False) == is_deterministic


def test_a_checkpoint_made_before_a_setting_existed_is_as_if_it_had_the_default():
    c = tiny.config()
    c.data = DataConfig(stream=StreamConfig())
    current = dataclasses.asdict(c)
    saved = copy.deepcopy(current)
    del saved["model"]["norm_epsilon"], saved["optimizer"]["z_loss"]
    del saved["data"]["stream"]["text_separator"]
    fixed = fixed_settings(saved, current)
    assert config_differences(with_defaults(saved), current, fixed) == []
    current["optimizer"]["z_loss"] = 0.5
    lines = config_differences(with_defaults(saved), current, fixed)
    assert lines == ["optimizer.z_loss: checkpoint has 0.0, this run has 0.5"]
