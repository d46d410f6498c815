"""The CPU at hand, measured as a chip, held against numpy and against programs that are timed whole."""

import timeit

import jax
import numpy as np
import pytest

from bench.plan.cpu import MESSAGES, measured_cpu
from shardwright.cluster.chips import chip_of

pytestmark = pytest.mark.long
FACTOR = 5
"""Other programs run beside the tests."""


@pytest.fixture(scope="module")
def cpu():
    return measured_cpu(8)


def test_all_devices_together_multiply_as_fast_as_numpy(cpu):
    x = np.ones((1024, 1024), np.float32)
    rate = 2 * 1024**3 / min(timeit.repeat(lambda: x @ x, number=1, repeat=5))
    assert rate / FACTOR < 8 * cpu.peak["f32"] < FACTOR * rate
    assert cpu.matmul_s(1, 1024, 1024, 1024, "f32") >= 2 * 1024**3 / cpu.peak["f32"] * 0.999


def test_small_products_take_what_they_take_in_a_program(cpu):
    @jax.jit
    def program(x):
        for _ in range(100):
            x = x @ x
        return x

    x = np.full((64, 64), 1 / 64, np.float32)
    program(x).block_until_ready()
    seconds = min(timeit.repeat(lambda: program(x).block_until_ready(), number=1, repeat=10)) / 100
    assert seconds / FACTOR < cpu.matmul_s(1, 64, 64, 64, "f32") / 8 < FACTOR * seconds


def test_what_is_more_takes_longer(cpu):
    mesh = {"d": 8, "t": 1}
    for op in ("all_gather", "psum_scatter", "psum", "all_to_all", "ppermute"):
        small, large = (cpu.collective_s(op, size, mesh, ("d",)) for size in (MESSAGES[0], MESSAGES[-1]))
        assert 1e-6 < small < large < 1, op
    assert cpu.launch_s < 1e-3
    assert cpu.matmul_s(1, 64, 64, 64, "f32") < cpu.matmul_s(1, 1024, 1024, 1024, "f32")
    assert 1e8 < 8 * cpu.memory_bandwidth < 1e12


@pytest.mark.slow
def test_a_machine_with_fewer_devices_is_shared_by_the_planned_ones(cpu):
    found = len(jax.devices())
    twice = measured_cpu(2 * found)
    assert not twice.collectives
    assert 1 / FACTOR < cpu.peak["f32"] / (2 * twice.peak["f32"]) < FACTOR
    assert twice.collective_s("psum", 1e6, {"d": 16}, ("d",)) > 0


def test_what_is_measured_says_so(cpu):
    assert "measured here" in cpu.sources["memory_bandwidth"]
    assert cpu.sources["far_bandwidth"] == chip_of("cpu").sources["far_bandwidth"]
