"""Stretched rotary wavelengths are those of transformers."""

import numpy as np
import pytest

from shardwright.modeling.rope import rope_frequencies
from shardwright.modeling.settings import ModelConfig, RopeScaling

SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, original_length=8192, low_frequency_factor=1.0, high_frequency_factor=4.0),
    "llama3 of 3.2": RopeScaling("llama3", 32.0, original_length=8192),
    "llama3, short": RopeScaling(
        "llama3", 2.5, original_length=100, low_frequency_factor=1.5, high_frequency_factor=9.0
    ),
}


def model(scaling, base=500_000.0, d_head=128):
    return ModelConfig(
        vocab=8, d_model=8, layers=1, n_kv=1, n_q_per_kv=1, d_head=d_head, d_ff=8, rope_base=base, rope_scaling=scaling
    )


@pytest.mark.parametrize("base", [500_000.0, 100.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(scaling, base):
    torch = pytest.importorskip("torch", reason="transformers' frequencies need torch, installed on Python 3.11 only")
    transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from tools.huggingface.llama import to_huggingface
    from train import weight_table

    c = model(scaling, base)
    stated, _ = to_huggingface(weight_table(c), c)
    config = transformers.LlamaConfig(**stated | {"max_position_embeddings": 2**17})
    if scaling is None:
        expected = LlamaRotaryEmbedding(config).inv_freq
    else:
        expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
        assert attention_factor == 1
    found = rope_frequencies(c)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    """The comparison above reaches all three of its parts."""
    ratio = rope_frequencies(model(None)) / rope_frequencies(model(SCALINGS["llama3"]))
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert ((ratio > 1) & (ratio < 8)).sum() > 5
    assert (np.diff(ratio) >= -1e-6).all()


def test_the_llama3_factors_must_leave_room_between_them():
    with pytest.raises(ValueError, match=r"high_frequency_factor is 2.0, .* above low_frequency_factor 2.0"):
        rope_frequencies(model(RopeScaling("llama3", 4.0, low_frequency_factor=2.0, high_frequency_factor=2.0)))
