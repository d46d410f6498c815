"""The executor of pipeline schedules in the training step: losses, gradients and updates against one device.

The one-device run is the whole program without p, which test_oracles.py holds to transformers and test_optimizer.py to
optax. Settings are combined so that every two values of two settings meet (`PAIRS`); the meshes of 16 devices, which
are long to compile, are slow.
"""

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import train
from shardlib import shardops
from shardlib.equations import body_of
from shardlib.layers import LayerAux
from shardlib.pipeline import run_schedule
from shardlib.placement import LayerPlacement, place_layers
from shardlib.schedules import CHUNKS, in_a_ring, schedule_of
from shardlib.shardtypes import Array, ShardError, f32, make_shardings, pytree_dataclass, u32
from shardlib.tick_tables import tick_table
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import TokenBatch, in_microbatches
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.models import gpt2
from shardwright.run.config import Config, PipelineConfig
from shardwright.run.stages import placement_of, training_table
from tests.support import tiny

BATCH, LENGTH, LAYERS = 64, 16, 8
SETTINGS = {
    "p": (1, 2, 4),
    "mesh": ("", "r", "d", "t", "rd", "rt", "dt"),  # the axes of two devices; those beside p
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"),
    "v": (1, 2),
    "m": (4, 8, 16),
    "tied": (False, True),
    "gather": ("layer", "step"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    p: int
    mesh: str
    schedule: str
    v: int
    m: int
    tied: bool
    gather: str

    @property
    def devices(self) -> int:
        return self.p * 2 ** len(self.mesh)

    @property
    def is_possible(self) -> bool:
        if self.p == 1:  # without an effect of the schedule
            return self.v == 1 and self.schedule == "gpipe"
        return self.v == CHUNKS.get(self.schedule, self.v)

    def __str__(self) -> str:
        text = f"p={self.p} {self.mesh or 'alone'} {self.schedule} v={self.v} m={self.m} {self.gather}"
        return text + " tied" * self.tied


def pairs_of(case: Case) -> set:
    values = dataclasses.asdict(case).items()
    return set(itertools.combinations(values, 2))


def chosen() -> list[Case]:
    """Few cases in which all pairs of values meet that can: the one with the most new pairs, again and again."""
    cases = [case for case in itertools.starmap(Case, itertools.product(*SETTINGS.values())) if case.is_possible]
    possible = {case: pairs_of(case) for case in cases}
    left, found = set().union(*possible.values()), []
    while left:
        # Of those with as many new pairs, the one with the fewest devices and ticks.
        best = max(possible, key=lambda case: (len(possible[case] & left), -case.devices * case.v, -case.m))
        found.append(best)
        left -= possible[best]
    return found


CASES = chosen()
SHORT = "p=2 d zb_h1"


def settings(case: Case) -> Config:
    c = tiny.config(tiny.model(d_model=64, layers=LAYERS, tied_embeddings=case.tied))
    c.training = dataclasses.replace(
        c.training, batch_size=BATCH, microbatches=case.m, gather_weights=case.gather, compute_dtype="f32"
    )
    c.pipeline = PipelineConfig(case.schedule, case.v)
    return c


@functools.cache
def batch() -> TokenBatch:
    rng = np.random.default_rng(0)
    shape = BATCH, LENGTH
    return TokenBatch(
        targets=rng.integers(0, 64, shape).astype(np.uint32),
        is_seq_start=rng.random(shape) < 0.2,
        loss_mask=rng.random(shape) < 0.9,
    )


def in_layer_order(tree, order):
    """`tree`, State or weights on the host, with its stacks in the order of the layers."""
    if order is None or tree is None:
        return tree
    rows = [int(np.flatnonzero(order == layer)[0]) for layer in range(order.max() + 1)]
    if isinstance(tree, train.State):
        parts = (in_layer_order(getattr(tree, f.name), order) for f in dataclasses.fields(tree))
        return train.State(*parts)
    return dataclasses.replace(tree, layers=jax.tree.map(lambda x: x[rows], tree.layers))


def one_step(c: Config, mesh):
    """(metrics, state after a step, loss of the evaluation), on the host, layers in their order.

    Momentum starts at 0, so that after one step it is the clipped gradient times 1 - adam_b1.
    """
    with jax.set_mesh(mesh):
        order = placement_of(c, load_model(c.model)).order
        state, placed = tiny.state(c, 7), tiny.place_batch(c, batch())
        nats, targets = tiny.evaluation_step(c)(state.weights, placed)
        state, metrics = tiny.training_step(c)(state, placed, np.int32(4))
        host = in_layer_order(jax.tree.map(np.asarray, state), order)
        return float(metrics.loss), float(metrics.grad_norm), host, float(nats / targets)


@functools.cache
def oracle(tied: bool):
    return one_step(settings(Case(1, "", "gpipe", 1, 4, tied, "layer")), tiny.mesh("one device"))


def assert_same_step(found, expected):
    *scalars, state, validation = found
    *expected_scalars, expected_state, expected_validation = expected
    np.testing.assert_allclose([*scalars, validation], [*expected_scalars, expected_validation], rtol=2e-6)
    assert_close(state.adam_mu, expected_state.adam_mu, 1e-5)
    assert_close(state.adam_nu, expected_state.adam_nu, 1e-5)
    # Adam divides by the root of a square: what is noise in a gradient near 0 is a share of the learning rate.
    for x, e in zip(jax.tree.leaves(state.weights), jax.tree.leaves(expected_state.weights), strict=True):
        assert np.mean(np.abs(x - e) > 1e-5) < 1e-3


def assert_close(found, expected, rtol):
    """Each array within rtol of its largest entry, which reassociated f32 sums of so many terms keep."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, e), x in zip(paths, jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, e, rtol=0, atol=rtol * np.abs(e).max(), err_msg=jax.tree_util.keystr(path))


def mesh_of(case: Case):
    sizes = {axis: 2 if axis in case.mesh else 1 for axis in "rdt"}
    return make_mesh(**sizes, devices=jax.devices()[: case.devices], p=case.p)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if str(c).startswith(SHORT) else pytest.mark.slow) for c in CASES], ids=str
)
def test_step_equals_that_of_one_device(case):
    if case.devices > len(jax.devices()):
        command = [sys.executable, "-m", "pytest", "-q", f"{__file__}::test_step_equals_that_of_one_device[{case}]"]
        done = subprocess.run(
            [*command, "-m", ""],
            env={**os.environ, "TEST_DEVICES": str(case.devices)},
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stdout
        assert "1 passed" in done.stdout
        return
    assert_same_step(one_step(settings(case), mesh_of(case)), oracle(case.tied))


def matmuls(mesh, **pipeline) -> int:
    """How many products the traced training step has; loops and tasks count once."""
    c = settings(SMALL)
    c.pipeline = PipelineConfig(**pipeline)
    with jax.set_mesh(mesh):
        return len(re.findall(r"\bdot_general\[", str(traced_step(c).jaxpr)))


@pytest.mark.long
def test_what_is_saved_is_not_computed_again():
    stages = mesh_of(SMALL)
    once = matmuls(tiny.mesh("one device"))
    assert matmuls(stages) == once
    assert matmuls(stages, schedule="zb_h1") == once


@functools.cache
def dropout_step(p: int, schedule: str):
    """Loss and gradients of GPT-2 with dropout, on the host, layers in their order."""
    c = tiny.config(
        gpt2.ModelConfig(vocab=64, positions=16, d_model=64, heads=4, layers=4, dropout=0.3, bos_id=0), microbatches=4
    )
    c.training.batch_size = BATCH
    c.pipeline = PipelineConfig(schedule, virtual_stages=2)
    seeds = np.arange(BATCH, dtype=np.uint32).reshape(4, -1)

    def per_device(w: gpt2.GPT2, batch: train.Batch, seeds: u32["m B/r/d"]) -> tuple[f32[""], gpt2.GPT2]:
        return tiny.loss_and_gradients(w, batch, c, seeds)

    with jax.set_mesh(tiny.mesh("one device") if p == 1 else make_mesh(jax.devices()[: 2 * p], t=2, p=p)):
        model = load_model(c.model)
        order = placement_of(c, model).order
        w = jax.jit(lambda key: initialize(model.table, key, order))(jax.random.key(1))
        loss, g = tiny.per_device(per_device)(w, tiny.place_batch(c, batch()), seeds)
        return float(loss), in_layer_order(jax.tree.map(np.asarray, g), order)


@pytest.mark.parametrize(
    "schedule", [pytest.param("interleaved_1f1b", marks=pytest.mark.long), pytest.param("zb_v", marks=pytest.mark.slow)]
)
def test_dropout_is_that_of_one_device(schedule):
    """A mask depends on row and layer, not on stage or microbatch, and is the same in forward and backward."""
    (loss, g), (expected_loss, expected) = dropout_step(2, schedule), dropout_step(1, "gpipe")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    # What is added to all keys of a softmax has no gradient but rounding.
    np.testing.assert_allclose(g.layers.b_k, 0, atol=1e-6)
    g, expected = (dataclasses.replace(x, layers=dataclasses.replace(x.layers, b_k=None)) for x in (g, expected))
    assert_close(g, expected, 1e-5)


# ---- what a stage may not do --------------------------------------------------------------------------------------

SMALL = Case(2, "", "interleaved_1f1b", 1, 4, False, "layer")


def traced_step(c: Config):
    """The training step, traced on the mesh in force; nothing is compiled."""
    shapes = jax.eval_shape(lambda: tiny.state(c))

    def place(x, s):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

    state = jax.tree.map(place, shapes, make_shardings(train.State[train.Transformer], like=shapes))
    return tiny.training_step(c).trace(state, in_microbatches(batch(), c.training.microbatches), np.int32(0))


def shifted_by_shardops(x):
    return shardops.ppermute("X/r/d/p Y/t Z", x, axis="p", shift=1)


def summed_past_shardops(x):
    return x + lax.pcast(0 * lax.psum(x, "p"), ("p",), to="varying")


@jax.custom_vjp
def summed_in_the_backward_pass(x):
    return x


summed_in_the_backward_pass.defvjp(lambda x: (x, None), lambda _, g: (summed_past_shardops(g),))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (
            shifted_by_shardops,
            r"test_pipeline.py:\d+: a pipeline stage runs ppermute over p, which would wait forever: stages",
        ),
        (summed_past_shardops, r"a pipeline stage runs psum\w* over p, which would wait forever"),
        (summed_in_the_backward_pass, r"a pipeline stage runs psum\w* over p"),
    ],
)
def test_a_collective_over_p_in_a_stage_is_refused(reduce, message, monkeypatch):
    layer = train.Llama.layer
    monkeypatch.setattr(train.Llama, "layer", lambda self, x, *args: layer(self, reduce(x), *args))
    with jax.set_mesh(mesh_of(SMALL)), pytest.raises(ShardError, match=message):
        traced_step(settings(SMALL))


@pytest.mark.quick
@pytest.mark.parametrize(("gather", "width"), [("layer", 32), pytest.param("step", 64, marks=pytest.mark.long)])
def test_a_stage_holds_its_part_of_the_vocabulary(gather, width):
    """What the loop over ticks is given and carries: embedding and unembedding [64, 64], and their gradients."""
    case = dataclasses.replace(SMALL, mesh="d", gather=gather)
    with jax.set_mesh(mesh_of(case)):
        loops = scans_of(traced_step(settings(case)).jaxpr.jaxpr)
        ticks = len(table_of_case(case).columns["forward"])
    (loop,) = [eqn for eqn in loops if eqn.params["length"] == ticks]
    shapes = [var.aval.shape for var in loop.invars if var.aval.ndim == 2]
    assert [shape for shape in shapes if set(shape) <= {32, 64}] == [(32, width)] * 4


def scans_of(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in eqn.params.values():
            if hasattr(body_of(value)[0], "eqns") and eqn.primitive.name != "scan":
                yield from scans_of(body_of(value)[0])


DIFFERS = ".*; it must be a scalar, the same on every device"


@pytest.mark.parametrize(("given", "message"), [(jnp.mean, DIFFERS), (lambda x: jnp.zeros(3), r"f32\[3\]")])
def test_what_is_no_scalar_or_differs_is_refused(given, message):
    class Wrong(train.Llama):
        def layer(self, x, w, tokens, attention):
            return super().layer(x, w, tokens, attention), LayerAux(given(x))

    c = tiny.config(tiny.model())
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state, step = jax.eval_shape(lambda: tiny.state(c)), train.make_training_step(c, Wrong(c.model))
        with pytest.raises(ShardError, match=f"a layer gives loss in its LayerAux: {message}"):
            step.lower(state, tiny.place_batch(c), np.int32(0))


# ---- placement, settings ------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_rows_of_chunks():
    even = place_layers(8, in_a_ring(2, 2))
    assert even.rows.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert even.order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert place_layers(8, in_a_ring(4, 1)).order is None
    down_and_up = place_layers(8, ((0, 3), (1, 2)))
    assert down_and_up.rows.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match=r"12 layers do not divide into 4 equal stages .*, each a multiple of 2"):
        place_layers(12, in_a_ring(2, 2), period=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"virtual_stages": 3}, "8 layers do not divide into 6 equal stages"),
        ({"schedule": "gpipe", "virtual_stages": 2}, "gpipe is defined for one chunk"),
        ({"schedule": "2f2b"}, "2f2b"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    c = settings(SMALL)
    c.pipeline = dataclasses.replace(c.pipeline, **changes)
    with jax.set_mesh(mesh_of(SMALL)), pytest.raises(ValueError, match=message):
        training_table(c, load_model(c.model))


def table_of_case(case: Case):
    with jax.set_mesh(mesh_of(case)):
        return training_table(settings(case), load_model(settings(case).model))


# ---- memory and program size --------------------------------------------------------------------------------------


def executor_program(m: int, schedule: str):
    """The compiled executor alone on p=2: stages of one tanh layer each that saves what it gives."""
    placement = LayerPlacement(in_a_ring(2, 1), 1)
    table = tick_table(schedule_of(schedule)(2, m, 1))

    @pytree_dataclass
    class Small:
        layers: Array["layers/p", f32["M"]]

    def stage(w, x, numbers, part):
        return save_for_backward(jnp.tanh(x * w[0])), LayerAux()

    parts = SimpleNamespace(first=lambda w, part: part, layers=stage, last=lambda w, x, _: jnp.sum(x))

    @jax.jit
    def program(w, data):
        def per_device(w, data):
            loss, g, *_ = run_schedule(parts, placement, table, Small(w), (data,))
            return shardops.psum("+p ->", loss), g.layers

        P = jax.sharding.PartitionSpec
        return jax.shard_map(per_device, in_specs=(P("p"), P()), out_specs=(P(), P("p")))(w, data)

    with jax.set_mesh(make_mesh(jax.devices()[:2], p=2)):
        w = jax.device_put(np.ones((2, 1024), np.float32), jax.NamedSharding(jax.sharding.get_mesh(), jax.P("p")))
        return program.lower(w, jax.ShapeDtypeStruct((m, 1024), jnp.float32)).compile()


@pytest.mark.parametrize(
    "schedule", ["zb_h1", *(pytest.param(x, marks=pytest.mark.long) for x in ("1f1b", "interleaved_1f1b"))]
)
def test_memory_and_program_do_not_grow_with_microbatches(schedule):
    few, many = (executor_program(m, schedule) for m in (8, 32))
    assert many.memory_analysis().temp_size_in_bytes <= 1.05 * few.memory_analysis().temp_size_in_bytes

    def count(compiled):
        return len(re.findall(r"^\s+\S+ = ", compiled.as_text(), re.M))

    assert abs(count(many) - count(few)) <= 2


def test_memory_of_gpipe_grows():
    few, many = (executor_program(m, "gpipe").memory_analysis().temp_size_in_bytes for m in (8, 32))
    assert many > few + 20 * 4096
