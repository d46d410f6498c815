"""Each configuration composes, its name tells the truth, and it traces on meshes of thousands of
devices, which need not exist.
"""

import functools
import math
import re

import jax
import pytest
import yaml

from shardwright.modeling.model import load_model, module_of
from shardwright.modeling.weights import shapes_of
from shardwright.program.config import Config, check_divides
from shardwright.program.step import open_steps
from tests.support.shipped import CONFIGS, RUNS, load

SIZES = {"84m": 101e6, "270m": 336e6, "540m": 671e6, "1b": 1074e6, "2b": 2147e6, "7b": 7248e6}
PARAMETERS = {name: pytest.approx(size, rel=5e-3) for name, size in SIZES.items()}
# 124,439,808 is what transformers counts for "gpt2"; here 47 rows of its table are added.
PARAMETERS["124m"] = 124_439_808 + 47 * 768
PARAMETERS |= {"olmoe": 6_919_161_856, "qwen30b": 30_532_122_624}  # as transformers counts

CHECKED = {
    "flat_tokens_c4_a100x8_2b": [{"r": 32, "d": 8, "t": 8}, {"p": 4, "r": 8, "d": 8, "t": 8}],
    "c4_h100x64_olmoe": [{"r": 1, "d": 256, "t": 8}],
    "local_gpt2": [{"r": 2048, "d": 1, "t": 1}],
}


def settings_of(group: str) -> dict:
    """Settings in the file of a model, with those of its defaults."""
    given = yaml.safe_load((CONFIGS / f"model/{group}.yaml").read_text())
    defaults = [settings_of(name) for name in given.pop("defaults", []) if name != "_self_"]
    return functools.reduce(dict.__or__, [*defaults, given])


@pytest.mark.quick
@pytest.mark.parametrize("size", PARAMETERS)
def test_a_model_has_the_parameters_that_its_name_says(size):
    """Of the runs whose names end so."""
    of_size = [name for name in RUNS if name.endswith(f"_{size}")]
    texts = [(CONFIGS / f"{x}.yaml").read_text() for x in of_size if "c4" in x or "gpt2" in x]
    (group,) = {*re.findall(r"model: (\w+)", "".join(texts))}
    given = {"module": "train"} | settings_of(group)
    model = load_model(module_of(given["module"]).ModelConfig(**given))
    assert sum(x.size for x in jax.tree.leaves(shapes_of(model.table))) == PARAMETERS[size]


def load_for(name: str, mesh: dict[str, int]) -> Config:
    """The configuration with the smallest batch that this mesh divides."""
    c = load(name)
    c.training.microbatches = math.lcm(c.training.microbatches, mesh.get("p", 1))
    c.training.batch_size = math.prod(mesh.get(axis, 1) for axis in "rde") * c.training.microbatches
    return c


@pytest.mark.long
def test_configurations_compose():
    """Of those for GPUs, the others differ in the size of the model alone."""
    names = [name for name in RUNS if "_c4_a100" not in name or name.endswith("_84m")]
    assert all(load(name).training.steps > 0 for name in names)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKED)
def test_steps_type_check(name):
    for mesh in CHECKED[name]:
        c = load_for(name, mesh)
        check_divides(c, mesh)
        (step, *_) = open_steps(c, mesh)
        for kind in ("training", "evaluation"):
            assert step.other(name=kind).traced
