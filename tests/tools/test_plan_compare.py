"""tools.plan: which meshes are compared, what comes first, what a run costs; a plan as JSON."""

import dataclasses
import json
import math
import re

import pytest

from shardwright.cluster.chips import chip_of
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import Change, planned_change, planned_step
from shardwright.modeling.model import load_model
from shardwright.tools.plan import compare
from shardwright.tools.plan.compare import candidates, compared
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
def test_costs_are_those_of_the_run(plan):
    """24 · 3 · 8 dollars a day, for 100 steps of 864 s."""
    made = [Change({"mesh.d": 8}, plan._replace(seconds=864.0, steps=steps)) for steps in (100, 0)]
    assert [line.split()[-2] for line in compare._table(made)[1:]] == ["$576", "unknown"]


@pytest.fixture(scope="module")
def plan():
    return planned_change(tiny.config(), dict.fromkeys("prdect", 1) | {"d": 8}, H100, {})


def test_what_limits_a_step_adds_up(plan):
    assert sum(plan.limits.values()) == pytest.approx(1)
    assert min(plan.limits.values()) > -1e-9
    assert list(plan.limits.values()) == sorted(plan.limits.values(), reverse=True)
    data = json.loads(json.dumps(plan.as_data()))
    assert data["peak_bytes"] == pytest.approx(sum(array["bytes"] for array in data["memory"]))
    assert data["seconds"] == pytest.approx(sum(row["exposed"] for row in data["work"]), rel=0.01)
