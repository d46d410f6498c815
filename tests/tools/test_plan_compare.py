"""A comparison of meshes and chips: which ones are planned, what comes first, and how it is
shown.
"""

import dataclasses
import math
import re

import pytest

from shardwright.cluster.chips import chip_of
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import Change, advice, planned_change, planned_step
from shardwright.modeling.model import load_model
from shardwright.tools.plan import compare
from shardwright.tools.plan.compare import candidates, compared, differing
from tests.support import tiny

H100 = chip_of("h100")


@pytest.mark.quick
def test_candidates_are_meshes_of_all_devices_that_divide_the_batch():
    c = tiny.config(tiny.model(layers=8), batch_size=576)
    for devices in (1, 8, 64):
        found = candidates(c, devices, H100)
        assert found == [x for i, x in enumerate(found) if x not in found[:i]]
        for settings in found:
            sizes = {name[-1]: n for name, n in settings.items() if name.startswith("mesh.")}
            assert math.prod(sizes.values()) == devices
            assert sizes["t"] <= H100.near
            assert 576 % (sizes["r"] * sizes["d"] * settings["training.microbatches"]) == 0
    of_hosts = {"mesh.p": 1, "mesh.r": 8, "mesh.d": 4, "mesh.t": 2}
    assert sum(of_hosts.items() <= settings.items() for settings in found) == 1
    assert len({x["mesh.p"] for x in found}) == 4


@pytest.mark.quick
def test_candidates_begin_with_the_settings_that_are_there():
    c = tiny.config()
    c.mesh.d, c.mesh.e, c.mesh.t = 2, 2, 2
    first, *others = candidates(c, 8, H100)
    own = {
        f"mesh.{axis}": n
        for axis, n in (dict.fromkeys("prdect", 1) | {"d": 2, "e": 2, "t": 2}).items()
    }
    assert first == own | {"training.microbatches": c.training.microbatches}
    assert {settings["mesh.e"] for settings in others} == {2}


@pytest.mark.long
def test_the_first_is_the_fastest_that_fits(monkeypatch):
    model = tiny.model(layers=1)
    c = tiny.config(model, microbatches=1)
    made = []
    monkeypatch.setattr(compare, "TRIED", 2)
    plans_of = compare.plans_of

    def noted(*given):
        made.append(plans_of(*given))
        return made[-1]

    monkeypatch.setattr(compare, "plans_of", noted)
    lines, best = compared(c, [(H100, 2)])
    for d, t in ((2, 1), (1, 2)):
        mesh = dict.fromkeys("prdect", 1) | {"d": d, "t": t}
        other = plan_of(planned_step(c, load_model(model), mesh, H100), H100, 1)
        assert best.plan.seconds <= other.seconds * (1 + 1e-9)
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"Fastest: 2 x h100\. \d+% of its step is [a-z ]+\.", lines[-1])
    with pytest.raises(ValueError, match="no mesh of 7 h100 can be planned"):
        compared(c, [(H100, 7)])
    tight = dataclasses.replace(H100, memory_bytes=1e3)
    plans = [change._replace(plan=change.plan._replace(chip=tight)) for change in made[0]]
    monkeypatch.setattr(compare, "plans_of", lambda *_: plans)
    with pytest.raises(
        ValueError, match=r"nothing fits: mesh\.d=1 mesh\.t=2 on 2 x h100 needs least"
    ):
        compared(c, [(tight, 2)])


@pytest.mark.quick
def test_the_settings_that_are_named_are_those_that_change(plan):
    c = tiny.config(save="dots", unroll=1)
    own = {"mesh.d": c.mesh.d, "training.save": "dots", "training.unroll": 1}
    assert differing(c, own) == {}
    changed = Change(differing(c, own | {"mesh.d": 64, "training.unroll": None}), plan)
    assert str(changed) == "mesh.d=64 training.unroll=null"


@pytest.mark.quick
def test_costs_are_those_of_the_run(plan):
    """24 · 3 · 8 dollars a day, for 100 steps of 864 s."""
    made = [Change({"mesh.d": 8}, plan._replace(seconds=864.0, steps=steps)) for steps in (100, 0)]
    assert [line.split()[-2] for line in compare._table(made)[1:]] == ["$576", "unknown"]


@pytest.mark.long
def test_advice_names_changes_with_their_gain():
    c = tiny.config(microbatches=2, save="nothing")
    sizes = {"p": 1, "r": 1, "d": 4, "t": 2}
    now = planned_change(c, sizes, H100, {})
    lines = advice(c, sizes, now, most=30)
    gains = [float(line.split("%")[0]) for line in lines]
    assert len(gains) == 3
    assert gains == sorted(gains)
    assert gains[-1] < 0


@pytest.fixture(scope="module")
def plan():
    return planned_change(tiny.config(), dict.fromkeys("prdect", 1) | {"d": 8}, H100, {})


def test_chips_are_compared_with_their_days_and_dollars(monkeypatch, plan):
    def planned(c, devices, chip):
        if chip.name == "v5e":
            raise ValueError("nothing fits on 8 devices")
        seconds = {("h100", 8): 4.0, ("h100", 64): 0.6, ("a100", 8): 9.0}[chip.name, devices] * 864
        step = plan.step._replace(mesh={**plan.step.mesh, "d": devices})
        made = plan._replace(chip=chip, step=step, seconds=seconds, steps=100)
        return [Change({"mesh.d": devices, "mesh.t": 1}, made)]

    monkeypatch.setattr(compare, "plans_of", planned)
    kinds = [(chip_of(name), n) for name, n in (("h100", 8), ("h100", 64), ("a100", 8), ("v5e", 8))]

    # Days 4, 0.6 and 9; dollars 24 · 3 · 8 · 4 = 2304, 24 · 3 · 64 · 0.6 = 2765, and 24 · 2 · 8 · 9
    # = 3456.
    rows, _ = compared(tiny.config(), kinds)
    assert [[*line.split()[:2], *line.split()[7:9]] for line in rows[1:4]] == [
        ["64", "h100", "0.60", "$2,765"],
        ["8", "h100", "4.00", "$2,304"],
        ["8", "a100", "9.00", "$3,456"],
    ]
    assert rows[5].startswith("Fastest: 64 x h100. ")
    assert rows[6] == "8 x v5e: nothing fits on 8 devices"
    assert max(map(len, rows)) <= 80


def test_what_limits_a_step_adds_up(plan):
    assert sum(plan.limits.values()) == pytest.approx(1)
    assert min(plan.limits.values()) > -1e-9
    assert list(plan.limits.values()) == sorted(plan.limits.values(), reverse=True)
