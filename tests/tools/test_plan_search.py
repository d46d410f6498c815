"""The search for settings: what it finds is the best of all, and the configuration that it writes composes."""

import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from shardwright.cluster.chips import chip_of
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import SAVED, Change, advice, doubled, planned_change, planned_step
from shardwright.inspect.tables import in_bytes
from shardwright.modeling.model import load_model
from shardwright.run.checks import register_schema, to_config
from shardwright.tools.plan import compare
from shardwright.tools.plan.search import as_config, as_lines, changes_of, search
from shardwright.tools.verify import all_meshes
from tests.support import tiny

ROOT = Path(__file__).parents[2]
H100 = chip_of("h100")


@pytest.mark.slow
def test_what_is_found_is_the_best_of_all():
    c = tiny.config(tiny.model(layers=2))
    found = search(c, 2, H100, seconds=600.0)
    best = math.inf
    meshes, _ = all_meshes(c, 2)
    for mesh, m, save in itertools.product(meshes, (1, 2), SAVED):
        if m >= mesh["p"] and m % mesh["p"] == 0:
            other = tiny.config(tiny.model(layers=2), microbatches=m, save=save)
            step = planned_step(other, load_model(c.model), mesh, H100)
            best = min(best, plan_of(step, H100, 1).seconds)
    assert found[0].plan.seconds <= best * (1 + 1e-9)
    assert [change.plan.seconds for change in found] == sorted(change.plan.seconds for change in found)
    assert all(change.plan.step.devices == 2 for change in found)
    lines = as_lines(c, found)
    assert sum(bool(re.match(r" +\d", line)) for line in lines) == 6
    assert re.fullmatch(r"Best: \d+% of its step is [a-z ]+\.", lines[-1])
    assert max(map(len, lines)) <= 80


@pytest.mark.long
def test_a_search_in_which_nothing_fits_says_so():
    c = tiny.config(tiny.model(layers=1))
    tight = dataclasses.replace(H100, memory_bytes=1e3)
    with pytest.raises(ValueError, match=r"nothing fits on 2 devices: mesh\.p=1 .* needs least"):
        search(c, 2, tight, seconds=5.0)
    with pytest.raises(ValueError, match="no mesh of 7 devices can be planned"):
        search(c, 7, H100)


@pytest.mark.long
@pytest.mark.parametrize(("chip", "unroll", "shown"), [("h100", None, "training.unroll=null"), ("v5e", 1, "")])
def test_a_search_unrolls_layers_where_a_loop_costs_time(chip, unroll, shown):
    c, told = tiny.config(unroll=1, save="everything"), []
    found = search(c, 1, chip_of(chip), seconds=60.0, tell=told.append)
    assert found[0].settings.get("training.unroll", 1) == unroll
    lines = as_lines(c, found)
    assert shown in "\n".join(lines[1:3])
    assert re.fullmatch(r"Best: \d+% of its step is [a-z ]+\.", lines[-1])
    assert told[-1].startswith(f"1 x {chip}: {len(told)} planned, best ")
    assert told[-1].endswith(f" a step with {' '.join(changes_of(c, found[0].settings)) or 'its own settings'}")
    assert ("training.unroll=null" in str(found[0])) == (unroll is None)


def test_no_search_loses_the_settings_that_are_there():
    c = tiny.config(save="dots")
    c.mesh.d, c.mesh.e, c.mesh.t = 2, 2, 2  # no search begins with e
    (found,) = search(c, 8, H100, seconds=0.0)
    assert dict(found.plan.step.mesh) == dict.fromkeys("prdect", 1) | {"d": 2, "e": 2, "t": 2}
    assert found.settings["training.save"] == "dots"


def test_the_configuration_that_is_written_composes(tmp_path):
    settings = {"mesh.p": 2, "mesh.r": 1, "mesh.d": 2, "mesh.t": 1, "training.microbatches": 4, "training.save": "dots"}
    settings |= {"pipeline.schedule": "zb_h1", "pipeline.virtual_stages": 1}
    text = as_config(
        "gpt2_124m", ["hardware=h200", "training.batch_size=64", "paths.model_name=a"], ROOT / "configs", settings
    )
    (tmp_path / "best.yaml").write_text(text)
    register_schema()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        c = to_config(compose("best", overrides=[f"hydra.searchpath=[file://{ROOT}/configs]"]))
    assert (c.hardware.chip, c.training.batch_size, c.paths.model_name) == ("h200", 64, "a")
    for name, value in settings.items():
        section, field = name.split(".")
        assert getattr(getattr(c, section), field) == value
    assert OmegaConf.create(text).defaults[0] == "gpt2_124m"


@pytest.mark.quick
def test_the_settings_that_are_named_are_those_that_change():
    c = tiny.config(save="dots", unroll=1)
    own = {"mesh.d": c.mesh.d, "training.save": "dots", "training.unroll": 1}
    assert changes_of(c, own) == []
    assert changes_of(c, own | {"mesh.d": 64, "training.unroll": None}) == ["mesh.d=64", "training.unroll=null"]


@pytest.mark.quick
def test_costs_are_those_of_the_run(plan):
    """24 · 3 · 8 dollars a day, for 100 steps of 864 s."""
    made = [Change({"mesh.d": 8}, plan._replace(seconds=864.0, steps=steps)) for steps in (100, 0)]
    assert [line.split()[5] for line in as_lines(tiny.config(), made)[1:3]] == ["$576", "unknown"]


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


def test_chips_are_compared_for_a_deadline_or_a_budget(monkeypatch, plan):
    """By plans whose days and dollars are given: the cheapest that is in time, or the fastest that can be paid."""
    c = tiny.config()

    def searched(c, devices, chip, *_):
        if chip.name == "v5e":
            raise ValueError("nothing fits on 8 devices")
        seconds = {("h100", 8): 4.0, ("h100", 64): 0.6, ("a100", 8): 9.0}[chip.name, devices] * 864
        step = plan.step._replace(mesh={**plan.step.mesh, "d": devices})
        return [
            Change({"mesh.d": devices, "mesh.t": 1}, plan._replace(chip=chip, step=step, seconds=seconds, steps=100))
        ]

    monkeypatch.setattr(compare, "search", searched)
    kinds = [(chip_of(name), n) for name, n in (("h100", 8), ("h100", 64), ("a100", 8), ("v5e", 8))]

    def of(**limits):
        return compare.compared(c, kinds, limits.get("deadline"), limits.get("budget"), print)

    # Days 4, 0.6 and 9; dollars 24 · 3 · 8 · 4 = 2304, 24 · 3 · 64 · 0.6 = 2765, and 24 · 2 · 8 · 9 = 3456.
    rows = of(deadline="5d")
    assert [line.split()[:4] for line in rows[1:4]] == [
        ["8", "h100", "4", "$2,304"],
        ["64", "h100", "0.6", "$2,765"],
        ["8", "a100", "9", "$3,456"],
    ]
    assert rows[5] == "Cheapest within plan.deadline=5d: 8 x h100."
    assert rows[6].endswith("With: mesh.d=8")
    assert rows[7] == "8 x v5e: nothing fits on 8 devices"
    assert "Cheapest within plan.deadline=24h: 64 x h100." in of(deadline="24h")
    assert "Fastest within plan.budget=2500.0: 8 x h100." in of(budget=2500.0)
    assert "Fastest: 64 x h100." in of()
    assert "None keeps plan.deadline=0.5d and plan.budget=9.0. Nearest: 8 x h100." in of(deadline="0.5d", budget=9.0)
    assert max(map(len, rows)) <= 80
    with pytest.raises(ValueError, match=r"^plan.deadline is 'soon'; give days or hours, as 7d or 36h\.$"):
        of(deadline="soon")


@pytest.mark.long
def test_twice_the_batch_names_what_grows_most():
    """By hand: what a layer keeps is of the batch; weights and moments are not."""
    c = tiny.config()
    sizes = dict.fromkeys("prdect", 1) | {"d": 2}
    now = planned_change(c, sizes, H100, {})
    (line,) = doubled(c, sizes, now)
    other = planned_change(c, sizes, H100, {"training.batch_size": 2 * c.training.batch_size})
    assert line.startswith(f"twice the batch: {in_bytes(other.step.peak)}, fits; ")
    assert re.search(r"(saved|working), \S+\.py:\d+ grows most, by ", line)


def test_what_limits_a_step_adds_up(plan):
    assert sum(plan.limits.values()) == pytest.approx(1)
    assert min(plan.limits.values()) > -1e-9
    assert list(plan.limits.values()) == sorted(plan.limits.values(), reverse=True)
