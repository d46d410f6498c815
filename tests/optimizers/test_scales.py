"""muP and CompleteP: scales of weights against the package mup and the papers' tables, and
multipliers in the model.
"""

import math

import jax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.models import family, moe
from shardwright.optimizers import scales
from shardwright.optimizers.rates import updates_of
from tests.support import tiny

BASE = {"d_model": 16, "n_kv": 4, "d_ff": 24}
WIDE = {"d_model": 64, "n_kv": 16, "d_ff": 96}


def scaled(c, model, **changes):
    """Name, algorithm, Scale and Update of each weight, for an optimizer with these settings."""
    c = tiny.optimizer(base=c, **changes)
    found = zip(
        jax.tree_util.tree_flatten_with_path(updates_of(c, model, train.OPTIMIZERS))[0],
        jax.tree.leaves(scales.scales_of(c, model)),
        strict=True,
    )
    return {
        jax.tree_util.keystr(path[-1:], simple=True): (scale, update)
        for (path, update), scale in found
    }


# Printed by mup 1.0.0 (PyPI; MuAdamW, MuReadout) for a model of nn.Embedding, nn.LayerNorm and
# nn.Linear layers, with d_model and d_ff 4 times those of the base: factors on the initial std, the
# learning rate and weight decay, and on the output in the forward pass.
MUP = {
    "embed": (1.0, 1.0, 1.0, 1.0),
    "attention_norm": (1.0, 1.0, 1.0, 1.0),
    **dict.fromkeys(("w_q", "w_k", "w_v", "w_o", "w_up", "w_down"), (0.5, 0.25, 4.0, 1.0)),
    "unembed": (1.0, 1.0, 1.0, 0.25),
}


def test_widths_are_those_of_mup():
    base, found = (
        load_model(tiny.model(**BASE)),
        scaled(BASE, load_model(tiny.model(**WIDE)), parametrization="mup"),
    )
    for name, (std, rate, decay, forward) in MUP.items():
        scale, update = found[name]
        of_base = getattr(base.table, name, None) or getattr(base.table.layers, name)
        # A factor a on the output is as good as a on the weight: a·std, a·rate and decay/a.
        assert scale.std == pytest.approx(std * forward * of_base.std), name
        assert update.rate == pytest.approx(rate * forward), name
        assert update.decay == pytest.approx(0.1 * decay / forward), name


# Table 1 of arXiv 2505.01618, column CompleteP with α = 1, for m_N = 4 and m_L = 3: initial
# variance, learning rate, epsilon and decay. `branch` is the multiplier of the output that the
# weight carries here.
COMPLETEP = {
    "embed": (1, 1, 1 / 4, 1, 1),
    "attention_norm": (None, 1, 1 / 12, 1, 1),
    "w_q": (1 / 4, 1 / 4, 1 / 12, 4, 1),
    "w_up": (1 / 4, 1 / 4, 1 / 12, 4, 1),
    "w_o": (1 / 4, 1 / 4, 1 / 12, 4, 1 / 3),
    "w_down": (1 / 4, 1 / 4, 1 / 12, 4, 1 / 3),
    "final_norm": (None, 1, 1 / 4, 1, 1),
    "unembed": (1, 1, 1 / 4, 1, 1 / 4),
}


def test_completep_is_that_of_its_table():
    base = load_model(tiny.model(**BASE, layers=2))
    model = load_model(tiny.model(**WIDE, layers=6))
    found = scaled({**BASE, "layers": 2}, model, parametrization="completep")
    for name, (variance, rate, epsilon, decay, branch) in COMPLETEP.items():
        scale, update = found[name]
        of_base = getattr(base.table, name, None) or getattr(base.table.layers, name)
        if variance is not None:
            assert scale.std == pytest.approx(branch * math.sqrt(variance) * of_base.std), name
        assert update.rate == pytest.approx(branch * rate), name
        assert update.epsilon == pytest.approx(epsilon / branch), name
        assert update.decay == pytest.approx(0.1 * decay / branch), name


def test_router_and_few_keys_are_outputs():
    """What maps the width to a number that doesn't grow is scaled like the output projection:
    table 3.
    """
    sizes = vars(tiny.model(d_model=64, d_ff=32, n_kv=2))
    c = moe.ModelConfig(**sizes | {"module": "moe", "experts": 4, "experts_per_token": 2})
    found = scaled(
        {"d_model": 16, "n_q_per_kv": 1, "d_ff": 8}, load_model(c), parametrization="mup"
    )
    for name, (inputs, outputs) in {
        "router": (4, 1),
        "w_k": (4, 1),
        "w_gate": (4, 4),
        "w_q": (4, 2),
    }.items():
        scale, update = found[name]
        assert (scale.inputs, scale.outputs, update.rate, update.epsilon) == (
            inputs,
            outputs,
            1 / 4,
            1 / outputs,
        ), name
        of_base = 16**-0.5
        assert scale.std == pytest.approx(of_base / (4 if outputs == 1 else 2)), name


def test_muon_keeps_the_spectral_condition():
    """arXiv 2310.17813: the spectral norm of an update is in proportion to √(fan-out / fan-in)."""
    c = tiny.optimizer(algorithm="muon", parametrization="mup", base=BASE)
    for wide in (WIDE, {"d_model": 64, "n_kv": 4, "d_ff": 384}):
        model, base = load_model(tiny.model(**wide)), load_model(tiny.model(**BASE))
        updates = updates_of(c, model, train.OPTIMIZERS)
        for name in ("w_q", "w_o", "w_up", "w_down"):
            norms = []
            for table, rate in (
                (base.table, 1.0),
                (model.table, getattr(updates.layers, name).rate),
            ):
                weight = getattr(table.layers, name)
                fan_in = math.prod(weight.shape[1 : 1 + weight.inputs])
                fan_out = math.prod(weight.shape[1 + weight.inputs :])
                norms.append(rate * math.sqrt(max(fan_in, fan_out)) / math.sqrt(fan_out / fan_in))
            assert norms[0] == pytest.approx(norms[1]), name


# ---- models that cannot be scaled ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"residual": ["mlp_norm", "w_dwon"]}, "has no weight w_dwon that scales the residual"),
        ({"residuals": ["mlp_norm"]}, "has residuals; it maps scores, residual, logits to weights"),
    ],
)
def test_a_misspelled_carrier_is_refused(wrong, message, monkeypatch):
    monkeypatch.setattr(train.Llama, "multipliers", wrong, raising=False)
    with pytest.raises(ValueError, match=message):
        scaled({"layers": 1}, train.Llama(tiny.model(layers=4)), parametrization="completep")


def of_family(**changes) -> family.ModelConfig:
    return family.ModelConfig(**vars(tiny.model()) | {"module": "family"} | changes)


@pytest.mark.parametrize(
    ("c", "base", "message"),
    [
        (of_family(norm_offset=True), {"d_model": 16}, "model.norm_offset multiplies by what no"),
        (tiny.model(), {"qk_norm": True}, "optimizer.base changes which weights the model has"),
    ],
)
def test_a_model_that_cannot_be_scaled_is_rejected(c, base, message):
    with pytest.raises(ValueError, match=message):
        scales.scales_of(tiny.optimizer(parametrization="mup", base=base), load_model(c))
