"""Statistics of a step: those of NumPy and of a dense model, the same on every mesh, without a
trace in the step.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import train
from shardwright.inspect.statistics.collect import RunStatistics, Statistics, finished, sums
from shardwright.modeling.model import load_model
from shardwright.program.stages import placement_of
from shardwright.program.step import Step, trace_step
from tests.support import dense, tiny
from tests.support.edits import Change
from tests.support.recipes import SOURCE, module_of

# ---- statistics ----------------------------------------------------------------------------------


def of_numpy(x: np.ndarray, fp8=ml_dtypes.float8_e4m3fn) -> dict[str, float]:
    x = np.float64(x).reshape(-1)
    nonzero = x[x != 0]
    scaled = nonzero / (np.abs(x).max() / float(ml_dtypes.finfo(fp8).max))
    return {
        "rms": np.sqrt(np.mean(x**2)),
        "max": np.abs(x).max(),
        "zeros": np.mean(x == 0),
        "bf16": np.mean(nonzero.astype(ml_dtypes.bfloat16) == 0),
        "fp8": np.mean(np.float32(scaled).astype(fp8) == 0),
    }


def values(shape=(8, 6, 4)) -> np.ndarray:
    """Of very different sizes, some of them zero, others below what bf16 and FP8 can hold."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 2, shape)
    return np.float32(np.where(rng.random(shape) < 0.2, 0, x))


@pytest.mark.quick
@pytest.mark.parametrize("of_gradient", [False, True])
def test_the_statistics_are_those_of_numpy(of_gradient):
    fp8 = ml_dtypes.float8_e5m2 if of_gradient else ml_dtypes.float8_e4m3fn
    x = values()
    found = finished(np.asarray(sums(jnp.asarray(x), of_gradient=of_gradient)).reshape(6, 1, 1))
    expected = of_numpy(x, fp8)
    assert 0.1 < expected["fp8"] < 0.9
    assert found == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
    by_row = finished(
        np.asarray(sums(jnp.asarray(x), rows=True, of_gradient=of_gradient)).reshape(6, 1, -1)
    )
    for i, row in enumerate(x):
        assert {name: v[i] for name, v in by_row.items()} == {
            name: pytest.approx(value, rel=1e-6) for name, value in of_numpy(row, fp8).items()
        }


# ---- points --------------------------------------------------------------------------------------


def config(**changes):
    return tiny.config(tiny.model(layers=2), **{"microbatches": 2, **changes})


@functools.cache
def stepped(name: str, **changes):
    """What the microscope says of a step on a mesh; the state on the host; and a function that does
    the step and returns the new state and the metrics.
    """
    c = config(**changes)
    model = load_model(c.model)
    with jax.set_mesh(tiny.mesh(name)):
        state, batch = tiny.state(c), tiny.place_batch(c)
        traced = trace_step(c, model)
        microscope = RunStatistics(traced, placement_of(c, model), {})
        found = microscope.collect(state, batch, np.int32(3), *traced.arguments())

    def step():
        with jax.set_mesh(tiny.mesh(name)):
            return jax.device_get(train.make_training_step(c, model)(state, batch, np.int32(3)))

    return found, jax.device_get(state), step


def named(found: dict, kind: str) -> dict[str, dict]:
    return {entry["name"]: entry for entry in found[kind]}


@pytest.mark.long
def test_points_have_names_and_lines():
    found, *_ = stepped("d=4 t=2")
    points = named(found, "points")
    for name, point in points.items():
        function, _, variable = name.partition(" ")
        line = SOURCE.splitlines()[int(point["place"].removeprefix("train.py:")) - 1]
        assert line.strip().startswith(f"{variable} = save_for_backward(")
        assert np.shape(point["rms"]) == ((2,) if function.startswith("Llama.") else ())
    functions = collections.Counter(name.partition(" ")[0] for name in points)
    assert functions == {"Llama.attend": 4, "Llama.layer": 1, "Llama.mlp": 2, "cross_entropy": 2}


@pytest.mark.long
def test_points_have_the_statistics_of_a_dense_model():
    found, state, _ = stepped("d=4 t=2")
    norms, gates = [], []

    def norm(x, epsilon):
        norms.append(np.asarray(x))
        return dense.rms(x, epsilon)

    def activation(x):
        gates.append(np.asarray(x))
        return jax.nn.silu(x)

    c, batch = config(), tiny.host_batch()
    dense.logits(state.weights, dense.tokens_of(batch), c.model, norm=norm, activation=activation)
    points = named(found, "points")
    for i in range(2):
        for name, expected in (("mlp gate", gates[i]), ("layer x", norms[2 * i + 1])):
            # FP8 has a scale for each microbatch
            both = [of_numpy(half) for half in np.split(expected, 2)]
            mean = {key: np.mean([each[key] for each in both]) for key in both[0]}
            mean |= {"max": max(each["max"] for each in both), "rms": of_numpy(expected)["rms"]}
            entry = {key: points[f"Llama.{name}"][key][i] for key in mean}
            assert entry == {
                key: pytest.approx(value, rel=1e-4, abs=1e-3) for key, value in mean.items()
            }


@pytest.mark.long
def test_gradients_and_updates_are_those_of_the_step():
    found, before, step = stepped("d=4 t=2")
    after, metrics = step()
    weights = named(found, "weights")
    squares = 0.0
    for keys, w in jax.tree_util.tree_flatten_with_path(before.weights)[0]:
        name = jax.tree_util.keystr(keys, simple=True, separator=".")
        new = functools.reduce(getattr, name.split("."), after.weights)
        rows = [(w, new)] if "." not in name else list(zip(w, new, strict=True))

        def as_list(x):
            return x if isinstance(x, list) else [x]

        for i, (old_row, new_row) in enumerate(rows):
            of_w = {
                key: as_list(weights[name][key])[i]
                for key in ("rms", "max", "zeros", "bf16", "fp8")
            }
            assert of_w == {
                key: pytest.approx(value, rel=1e-5) for key, value in of_numpy(old_row).items()
            }
            update = np.sqrt(np.mean((np.float64(new_row) - old_row) ** 2)) / of_w["rms"]
            assert as_list(weights[name]["update"])[i] == pytest.approx(update, rel=1e-3)
            squares += as_list(weights[name]["gradient"]["rms"])[i] ** 2 * old_row.size
    assert np.sqrt(squares) == pytest.approx(metrics.grad_norm, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [("p=2 d=2 t=2", {}), ("d=4 t=2", {"loss_chunk": 8, "gather_weights": "step"})],
)
def test_statistics_are_the_same_on_every_mesh_and_however_the_step_is_computed(mesh, changes):
    found, expected = stepped(mesh, **changes)[0], stepped("d=4 t=2")[0]
    for kind in ["points"] if changes else ["points", "weights"]:
        for a, b in zip(jax.tree.leaves(found[kind]), jax.tree.leaves(expected[kind]), strict=True):
            limit = 1e-3 if changes else 2e-4
            assert a == b if isinstance(a, str) else a == pytest.approx(b, rel=limit, abs=limit)


# ---- the step stays as it is ---------------------------------------------------------------------


MARK = Change('checkpoint_name(g, "gradient")', "g", within="make_training_step.training_step")


def traced(source: str, **changes) -> Step:
    """The training step of a source of train.py."""
    c = tiny.config(tiny.model(layers=2, module="changed_train"), **changes)
    with jax.set_mesh(tiny.mesh("d=4 t=2")), module_of(source) as module:
        step = trace_step(c, load_model(c.model), spec=module.SPEC)
        assert step.traced
        return step


@pytest.mark.long
def test_the_marks_leave_no_trace_in_the_program():
    """Of which a checkpoint keeps a hash; and nor does the setting."""
    steps = [
        traced(SOURCE),
        traced(MARK.apply(SOURCE)),
        traced(SOURCE, microscope_interval=1),
    ]
    assert len({step.hash for step in steps}) == 1


def test_a_step_without_marks_is_refused():
    with pytest.raises(ValueError, match="the step marks 0 gradients of 12 weights"):
        Statistics(traced(MARK.apply(SOURCE)).jaxpr, load_model(config().model).table)
