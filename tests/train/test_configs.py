"""Each configuration composes, and the steps of the large ones type-check on abstract meshes of their size."""

import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from shipped import CONFIGS, RUNS, load

import train
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.resuming import fixed_settings, with_defaults
from shardwright.settings.differences import config_differences
from shardwright_data.loader import batch_shapes

PARAMETERS = {"84m": 101e6, "270m": 336e6, "540m": 671e6, "1b": 1074e6, "2b": 2147e6}
DEVICES = {"a100x1": 1, "a100x8": 8, "a100x8x4": 32}

pytestmark = pytest.mark.quick


def trace_step(c: Config, devices: int) -> train.State:
    """Type-checks the training step as it would run on so many devices, and gives the shapes of its state."""
    r, t = c.mesh.r, c.mesh.t
    mesh = AbstractMesh((r, devices // r // t, t), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    sizes = c.training.batch_size, c.training.seq_len, c.training.microbatches
    with jax.sharding.use_abstract_mesh(mesh):
        model, batch = load_model(c.model), batch_shapes(*sizes)
        state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
        step = jax.ShapeDtypeStruct((), jnp.int32)
        new, metrics = jax.eval_shape(train.make_training_step(c, model), state, batch, step)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics.loss.shape == ()
    return state


@pytest.mark.parametrize("name", RUNS)
def test_composes_and_its_header_tells_the_truth(name):
    c = load(name)
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert re.match(rf"# .*python -m train --config-name={name}\b", text)
    tokens = re.search(r"# ([\d,]+) steps of ([\d,]+) tokens", text)
    assert tokens, "the header says how long the run is"
    steps, a_step = (int(number.replace(",", "")) for number in tokens.groups())
    assert (steps, a_step) == (c.training.steps, c.training.batch_size * c.training.seq_len)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in RUNS if "c4" in name])
def test_c4_runs_type_check_on_their_devices(name):
    hardware, size = name.split("_c4_")[1].split("_")
    c = load(name)
    assert (c.distributed.auto, c.distributed.count) == ((True, 4) if hardware == "a100x8x4" else (False, None))
    state = trace_step(c, DEVICES[hardware])
    assert sum(x.size for x in jax.tree.leaves(state.weights)) == pytest.approx(PARAMETERS[size], rel=5e-3)


@pytest.mark.long
def test_gpt2_is_gpt2_and_type_checks_on_its_devices():
    state = trace_step(load("gpt2_124m"), 8)
    # 124,439,808 is what transformers counts for "gpt2"; here 47 rows of its table are added.
    assert sum(x.size for x in jax.tree.leaves(state.weights)) == 124_439_808 + 47 * 768


@pytest.mark.parametrize("hardware", ["a100", "h100", "h200", "cpu"])
def test_hardware_is_one_setting(hardware):
    options = load("flat_tokens_c4_a100x8_84m", f"hardware={hardware}").hardware.compiler_options
    assert ("xla_gpu_exclude_nondeterministic_ops" in options) == (hardware != "cpu")


def test_a_checkpoint_made_before_a_setting_existed_is_as_if_it_had_the_default():
    c = load("local_test_synthetic")
    current = dataclasses.asdict(c)
    saved = copy.deepcopy(current)
    del saved["model"]["norm_epsilon"], saved["optimizer"]["z_loss"]
    fixed = fixed_settings(saved, current)
    assert config_differences(with_defaults(saved), current, fixed) == []
    current["optimizer"]["z_loss"] = 0.5
    lines = config_differences(with_defaults(saved), current, fixed)
    assert lines == ["optimizer.z_loss: checkpoint has 0.0, this run has 0.5"]
