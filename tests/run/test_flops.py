from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.modeling.masks import AttentionMask
from shardwright.modeling.model import load_model
from shardwright.models import delta, family, moe
from shardwright.program import flops
from shardwright.program.flops import flops_of_model, peak_flops

# Llama-2-7B, from its published config.
LAYERS, HEADS, HEAD_DIM, D_MODEL, D_FF, VOCAB = 32, 32, 128, 4096, 11008, 32000
PARAMETERS = (
    LAYERS * (4 * D_MODEL**2 + 3 * D_MODEL * D_FF + 2 * D_MODEL) + 2 * VOCAB * D_MODEL + D_MODEL
)


def of_kind(kind, size):
    return SimpleNamespace(kind=kind, shape=(size,), used=1.0)


def test_conventions_give_published_utilizations():
    # 11,361 tokens/s on one H100 (989 TFLOP/s) is 49.2% with causal attention counted half.
    table = [of_kind("matrix", PARAMETERS - VOCAB * D_MODEL), of_kind("embedding", VOCAB * D_MODEL)]
    c = SimpleNamespace(layers=LAYERS, heads=HEADS, d_head=HEAD_DIM)
    flops = flops_of_model(table, c, AttentionMask().attended(4096))
    assert PARAMETERS == 6_738_415_616
    assert 100 * 11361 * flops / 989e12 == pytest.approx(49.2, abs=0.05)


GEMMA3_1B = family.ModelConfig(
    vocab=262144, d_model=1152, layers=26, n_kv=1, n_q_per_kv=4, d_head=256, d_ff=6912, tied_embeddings=True,
    window=512, full_every=6, qk_norm=True, norms="both", norm_offset=True, activation="gelu",
)  # fmt: skip
GPT_OSS_20B = moe.ModelConfig(
    vocab=201088, d_model=2880, layers=24, n_kv=8, n_q_per_kv=8, d_head=64, d_ff=2880, window=128, full_every=2,
    experts=32, experts_per_token=4, sinks=True,
)  # fmt: skip


@pytest.mark.parametrize(("c", "full", "ratio"), [(GEMMA3_1B, 4, 1.62), (GPT_OSS_20B, 12, 1.31)])
def test_windows_leave_pairs_out(c, full, ratio):
    """From the published configurations, at 32k: the causal pairs of all layers, over those that
    are attended.
    """
    length, active = 32768, 4 if hasattr(c, "experts") else 1
    layer = 2 * c.d_model * c.d_head * (c.heads + c.n_kv) + active * 3 * c.d_model * c.d_ff
    layer += c.d_model * c.experts if hasattr(c, "experts") else 0
    position = np.arange(length)
    seen = [np.minimum(position + 1, size).mean() for size in (length, c.window)]
    pairs = full * seen[0] + (c.layers - full) * seen[1]

    def by_hand(pairs):
        return 6 * (c.layers * layer + c.vocab * c.d_model) + 12 * c.heads * c.d_head * pairs

    model = load_model(c)
    rules = [model.mask_at(place) for place in range(model.period)]
    found = flops_of_model(model.table, c, np.mean([rule.attended(length) for rule in rules]))
    assert found == pytest.approx(by_hand(pairs), rel=2e-4)  # norms, biases and sinks
    assert flops_of_model(model.table, c, seen[0]) / found == pytest.approx(ratio, abs=0.005)


def test_the_delta_rule_counts_what_xla_lowers():
    """In one chunk, since XLA counts the body of a loop once."""
    c = delta.ModelConfig(
        vocab=8, d_model=8, layers=1, n_kv=1, n_q_per_kv=1, d_head=2, d_ff=8, experts=1, experts_per_token=1,
        deltas=1, key_heads=2, values_per_key=3, d_key=512, d_value=384, chunk=64,
    )  # fmt: skip
    k = jnp.zeros((1, c.chunk, c.key_heads, c.d_key))
    g = jnp.zeros((*k.shape[:3], c.values_per_key))
    v = jnp.zeros((*g.shape, c.d_value))
    of_chunk = jax.jit(lambda *x: delta.in_chunks(*x, most=c.chunk))
    found = of_chunk.lower(k, k, v, g, g, jnp.zeros((1, c.chunk), int)).cost_analysis()["flops"]
    assert found / c.chunk == pytest.approx(c.state_flops, rel=0.02)


def test_a_cpu_has_no_mfu():
    peak = peak_flops(jax.devices(), jnp.float32)
    assert flops.Speed(100, 1e6, peak).of_step(2.0) == {"tokens_per_second": 50}
