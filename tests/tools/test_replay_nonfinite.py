"""Of planted NaNs and infinities the tensor, or the line, and the layer are named."""

import functools
import re
import types

import jax
import numpy as np
import pytest

from shardwright.inspect.statistics.collect import StepWithoutStages
from shardwright.modeling.model import load_model
from shardwright.program.stages import placement_of
from shardwright.program.step import trace_step
from shardwright.tools.replay import nonfinite
from tests.support import tiny
from tests.support.edits import Change
from tests.support.recipes import SOURCE

pytestmark = pytest.mark.long

LAYERS, MICROBATCHES = 2, 2


def session_of(c):
    """What an Explainer asks of a Session."""
    model = load_model(c.model)
    traced = trace_step(c, model, spec=tiny.train.SPEC)
    own = {"config": c, "model": model, "step": 3, "traced": traced}
    session = types.SimpleNamespace(**own, placement=placement_of(c, model))
    session.arguments = traced.arguments()
    session.without_stages = lambda: StepWithoutStages(session.traced, session.placement)
    return session


@pytest.fixture(scope="module")
def explain():
    """Lines on a step whose state has a change."""
    c = tiny.config(tiny.model(layers=LAYERS, norm_epsilon=0.0), microbatches=MICROBATCHES)
    with jax.set_mesh(tiny.mesh("one device")):
        explainer, batch = nonfinite.Explainer(session_of(c)), tiny.place_batch(c)
        clean = tiny.state(c)

        def lines(part: str, name: str, change) -> list[str]:
            return explainer.explain(changed(clean, part, name, change), batch)

        yield lines


def changed(state, part: str, name: str, change):
    """A copy of the state, where `change` changed an array."""
    state = jax.tree.map(lambda x: x.copy(), state)
    *inner, last = name.split("/")
    owner = functools.reduce(getattr, inner, getattr(state, part))
    array = np.array(getattr(owner, last))
    change(array)
    setattr(owner, last, jax.device_put(array, getattr(owner, last).sharding))
    return state


def planted(value: float, layer: int | None):
    def change(array):
        row = array if layer is None else array[layer]
        row.reshape(-1)[row.size // 2] = value

    return change


@pytest.mark.parametrize(("part", "value"), [("weights", np.nan), ("adam_mu", np.inf)])
def test_of_a_state_the_array_and_the_layer_are_named(explain, part, value):
    kind = "NaN" if np.isnan(value) else "an infinity"
    for name, layer in (("layers/w_o", 0), ("layers/mlp_norm", 1), ("unembed", None)):
        (line,) = explain(part, name, planted(value, layer))
        of_layer = "" if layer is None else f", layer {layer}"
        assert line.startswith(f"before the step, {part}/{name}{of_layer}, entry ["), line
        assert f": {kind} (1 of " in line


def huge(array):
    """All entries at the end of f32's range, with their signs: finite, and no product with them
    is.
    """
    array[...] = np.where(array < 0, -3e38, 3e38)


def test_of_an_activation_the_line_and_the_layer_are_named(explain):
    first, *_ = explain("weights", "layers/w_o", lambda array: huge(array[1]))
    formula = "B/b L/c K/t Q D, K/t Q D M -> B/b L/c M +t"
    product = f'shardops.matmul("{formula}", attended, w_o)'
    ((node, *_), _) = Change(product, within="Llama.attend").place(SOURCE)
    at = rf"(NaN|an infinity) is first computed at train\.py:{node.lineno}, "
    assert re.match(at, first), first
    assert ", layer 1, microbatch 0 (" in first
    assert "backward" not in first


def test_a_step_that_is_finite_has_no_origin(explain):
    assert explain("weights", "final_norm", lambda array: None) == []
