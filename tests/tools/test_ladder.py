"""The coordinate check: slopes, the models that it trains, and that it finds each multiplier that
is missing.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.optimizers import rates, scales
from shardwright.run.launch import composed
from shardwright.tools.ladder.coordinates import (
    GRADIENT,
    LadderConfig,
    ladder_of,
    limit_of,
    measure,
    slope_of,
)
from shardwright.tools.ladder.scales import show_scales
from tests.support import tiny

SLOPES = [(0.1, "ok"), (0.2, "GROWS"), (-0.5, "ok"), (-1.0, "SHRINKS")]


@pytest.mark.parametrize(("power", "verdict"), SLOPES)
def test_a_slope_and_its_error_are_those_of_numpy(power, verdict):
    rng, widths = np.random.default_rng(0), [1, 2, 4, 8] * 3
    runs = [(n, [n**power * np.exp(0.05 * rng.standard_normal())]) for n in widths]
    found, error, word = slope_of(runs)
    x, y = np.log2([n for n, _ in runs]), np.log2([numbers[0] for _, numbers in runs])
    (slope, _), covariance = np.polyfit(x, y, 1, cov="unscaled")
    rest = np.sum((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2) / (len(x) - 2)
    assert (found, error) == pytest.approx((slope, np.sqrt(covariance[0, 0] * rest)))
    assert word == verdict


@pytest.mark.parametrize(
    ("number", "verdict"), [(0.0, "ZERO"), (np.nan, "NOT FINITE"), (np.inf, "NOT FINITE")]
)
def test_what_has_no_slope_is_not_ok(number, verdict):
    runs = [(1, [1.0, number]), (2, [number, 1.0]), (4, [1.0, 1.0])]
    assert slope_of(runs)[2] == verdict


def test_widths_multiply_the_base_and_depths_its_layers():
    c = tiny.config(tiny.model(layers=6))
    c.optimizer = tiny.optimizer(base={"d_model": 16, "d_ff": 24, "layers": 2, "rope_base": 5.0})
    found = [*ladder_of(c, LadderConfig(widths=[1, 4], depths=[3]))]
    sizes = [
        (axis, n, own.model.d_model, own.model.d_ff, own.model.layers) for axis, n, own in found
    ]
    assert sizes == [("width", 1, 16, 24, 2), ("width", 4, 64, 96, 2), ("depth", 3, 16, 24, 6)]
    assert {own.model.rope_base for *_, own in found} == {5.0}
    assert {(own.optimizer.warmup_steps, own.optimizer.schedule) for *_, own in found} == {
        (0, "constant")
    }


def test_scales_are_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    base = "optimizer.base={d_model: 64, n_kv: 1, d_ff: 256}"
    show_scales(composed("local_test_synthetic", "optimizer.parametrization=mup", base))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["unembed", "0", "0.03125", "0.25", "1", "0.4", "adamw"] in lines
    assert ["layers.w_down", "0", "0.03125", "0.25", "0.25", "0.4", "adamw"] in lines


# ---- multipliers that are missing ----------------------------------------------------------------

BASE: dict[str, Any] = {"d_model": 32, "n_kv": 4, "d_ff": 64}


class Unrated(scales.Scale):
    """A Scale whose learning rate does not depend on the width."""

    def rate(self, algorithm):
        return self.multiplier


class SameEpsilon(scales.Scale):
    """A Scale with the epsilon of the base."""

    @property
    def epsilon(self):
        return 1.0


def kept(scale, kind=scales.Scale, **changes):
    """A copy of a Scale, as another kind or with changes."""
    given = {field.name: getattr(scale, field.name) for field in dataclasses.fields(scale)}
    return kind(**given | changes)


def unfolded(scale):
    """A copy of a Scale without its multiplier."""
    std, mean = scale.std / scale.multiplier, scale.mean / scale.multiplier
    return kept(scale, std=std, mean=mean, multiplier=1.0)


def wider_init(scale):
    """A copy of a Scale with the initial values of the base."""
    return kept(scale, std=scale.std * scale.inputs**0.5)


CHANGES: dict[str, Any] = {
    "learning rate": lambda scale: kept(scale, Unrated),
    "initial values": wider_init,
    "epsilon": lambda scale: kept(scale, SameEpsilon),
    "multiplier": unfolded,
}
DEEP: dict[str, Any] = {"parametrization": "completep", "axis": "depth"}
DEEP["base"] = {"d_model": 32, "layers": 2}
ATTENTION = "Llama.layer "
MISSING: list[tuple[str, str, dict[str, Any], str]] = [
    ("learning rate", "w_down", {}, ATTENTION),
    ("initial values", "w_o", {}, ATTENTION),
    ("epsilon", "w_gate", {}, f"{GRADIENT}layers.w_gate"),
    ("multiplier", "w_o", DEEP, f"{GRADIENT}layers.w_o"),
]
"""What is missing of which weight, settings of `found_by`, and how the name of a value that shows
it begins.
"""


LLAMA: dict[str, Any] = {"vocab": 64, "layers": 2, "n_q_per_kv": 1, "d_head": 8, **BASE}


OF_BASE: dict[str, list] = {}
"""Numbers of each model at the sizes of its base, where no scale can be missing."""


def found_by(axis="width", base=BASE, **optimizer):
    """Slopes of a tiny model with these settings, 8 times as wide or deep as the base."""
    c = tiny.config(tiny.model(**LLAMA))
    c.optimizer = tiny.optimizer(**{"parametrization": "mup", "base": base} | optimizer)
    settings, found = LadderConfig(**{"widths": [], "depths": [], f"{axis}s": [1, 8]}), {}
    with jax.set_mesh(tiny.mesh("one device")):
        for _, n, own in ladder_of(c, settings):
            of = OF_BASE if n == 1 else {}
            if repr(own) not in of:
                batch = tiny.place_batch(own, tiny.host_batch(vocab=8))
                of[repr(own)] = [*measure(own, batch, 2, 2)]
            for name, numbers in of[repr(own)]:
                found.setdefault(name, []).append((n, numbers))
    return {name: slope_of(runs, limit_of(axis, name)) for name, runs in found.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "weight", "kwargs", "where"), MISSING, ids=[change for change, *_ in MISSING]
)
def test_each_missing_scale_of_a_single_weight_is_found(change, weight, kwargs, where, monkeypatch):
    real = scales.scales_of

    def planted(c, model):
        def of(path, scale):
            return CHANGES[change](scale) if path[-1].name == weight else scale

        return jax.tree_util.tree_map_with_path(of, real(c, model))

    for module in (scales, rates):
        monkeypatch.setattr(module, "scales_of", planted)
    found = found_by(**kwargs)
    (slope,) = [slope for name, slope in found.items() if name.startswith(where)]
    assert slope[-1] != "ok", found


@pytest.mark.long
@pytest.mark.parametrize("kwargs", [{}, DEEP], ids=["width", "depth"])
def test_with_all_multipliers_nothing_depends_on_the_size(kwargs):
    found = found_by(**kwargs)
    assert {key: slope for key, slope in found.items() if slope[-1] != "ok"} == {}
