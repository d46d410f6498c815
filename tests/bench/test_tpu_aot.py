import types

import pytest

from bench import tpu_aot
from bench.steps import config_of
from shardwright.modeling.settings import ModelConfig


@pytest.mark.quick
@pytest.mark.parametrize(("length", "pairs"), [(512, 1), (3072, 6)])
def test_floors_are_those_of_the_shapes(length, pairs):
    """Of a layer with 2 heads of 64, blocks of 512 and of 1024: products at 918 TFLOP/s, or reads at 1,638 GB/s."""
    model = ModelConfig(vocab=96, d_model=32, layers=1, n_kv=1, n_q_per_kv=2, d_head=64, d_ff=48)
    c = config_of(model, batch_size=3, seq_len=length)
    chips = [types.SimpleNamespace(device_kind="TPU v6 lite")]
    weights, attention = tpu_aot.floors(c, "v6e", chips)
    parameters = 32 * (128 + 64 + 64) + 128 * 32 + 3 * 32 * 48 + 96 * 32 + 3 * 32
    assert weights == pytest.approx(1e3 * 6 * parameters * 3 * length / 918e12)
    block = 512 if length == 512 else 1024
    read = 1e3 * 2 * 2 * block * 64 / 1638e9
    products = [1e3 * n * 2 * block**2 * 64 / 918e12 for n in (2, 3, 4)]
    assert attention == pytest.approx(3 * 2 * pairs * sum(max(read, floor) for floor in products))
