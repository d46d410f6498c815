"""tools/chip: the settings for a device, by JAX's name for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shipped import load

from shardwright.plan.chips import chip_of
from tools.chip import settings_for

ROOT = Path(__file__).parents[2]
ON_COLAB = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "Tesla T4": "t4", "NVIDIA L4": "l4"}
ON_COLAB |= {"NVIDIA A100-SXM4-40GB": "a100_40gb", "NVIDIA H100 80GB HBM3": "h100"}


@pytest.mark.parametrize(("kind", "name"), ON_COLAB.items())
def test_each_device_of_colab_has_a_chip_that_a_run_takes(kind, name):
    settings = settings_for(kind, chip_of(name).platform)
    assert load("first_chip", *settings.split()).hardware.chip == name


def test_of_a_device_that_is_not_known_the_platform_is_given():
    assert settings_for("some accelerator", "gpu") == "hardware=gpu"


def test_this_machine():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "tools.chip"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "hardware=cpu hardware.chip=cpu\n"
