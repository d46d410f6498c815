"""The executor of pipeline schedules in the training step: dropout, what stages may not do, memory.

Whole steps and
their evaluation: test_oracles.py; the executor in f64 against NumPy: test_microbatches.py.
"""

import re
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
from shardlib.schedules import in_a_ring, schedule_of
from shardlib.shardtypes import Array, ShardError, f32, make_shardings, pytree_dataclass, u32
from shardlib.tick_tables import tick_table
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import in_microbatches
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.models import gpt2
from shardwright.program.config import Config, PipelineConfig
from shardwright.program.stages import placement_of, training_table
from tests.support import tiny

STAGES = "p=2 t=2"


def config(**pipeline) -> Config:
    c = tiny.config(tiny.model(d_model=64, layers=4), microbatches=4, gather_weights="layer")
    c.pipeline = PipelineConfig(**pipeline)
    return c


def traced_step(c: Config):
    """The training step, traced on the mesh in force; nothing is compiled."""
    shapes = jax.eval_shape(lambda: tiny.state(c))

    def place(x, s):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

    state = jax.tree.map(place, shapes, make_shardings(train.State[train.Transformer], like=shapes))
    return tiny.training_step(c).trace(
        state, in_microbatches(tiny.host_batch(), c.training.microbatches), np.int32(0)
    )


def matmuls(mesh: str, **pipeline) -> int:
    """How many products the traced training step has; loops and tasks count once."""
    with jax.set_mesh(tiny.mesh(mesh)):
        return len(re.findall(r"\bdot_general\[", str(traced_step(config(**pipeline)).jaxpr)))


@pytest.mark.long
def test_what_is_saved_is_not_computed_again():
    once = matmuls("one device")
    assert matmuls(STAGES) == once
    assert matmuls(STAGES, schedule="zb_h1") == once


def dropout_step(mesh: str):
    """Loss and gradients of GPT-2 with dropout, on the host, layers in their order."""
    c = tiny.config(
        gpt2.ModelConfig(
            vocab=64, positions=16, d_model=64, heads=4, layers=4, dropout=0.3, bos_id=0
        ),
        microbatches=4,
    )
    c.pipeline = PipelineConfig("zb_v", virtual_stages=2)
    seeds = np.arange(tiny.BATCH, dtype=np.uint32).reshape(4, -1)

    def per_device(
        w: gpt2.GPT2, batch: train.Batch, seeds: u32["m B/r/d"]
    ) -> tuple[f32[""], gpt2.GPT2]:
        return tiny.loss_and_gradients(w, batch, c, seeds)

    with jax.set_mesh(tiny.mesh(mesh)):
        model = load_model(c.model)
        order = placement_of(c, model).order
        w = jax.jit(lambda key: initialize(model.table, key, order))(jax.random.key(1))
        loss, g = tiny.per_device(per_device)(w, tiny.place_batch(c), seeds)
        rows = np.arange(4) if order is None else np.argsort(order)
        layers = {name: np.asarray(x)[rows] for name, x in vars(g.layers).items()}
        return float(loss), np.asarray(g.embed), layers


@pytest.mark.long
def test_dropout_is_that_of_one_device():
    """A mask depends on row and layer, not on stage, microbatch or mesh, and is the same in forward
    and backward.
    """
    (loss, embed, layers), (expected_loss, *expected) = (
        dropout_step("p=2 d=2 t=2"),
        dropout_step("one device"),
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    # What is added to all keys of a softmax has no gradient but rounding.
    np.testing.assert_allclose(layers.pop("b_k"), 0, atol=1e-6)
    for found, of_one in [
        (embed, expected[0]),
        *((x, expected[1][name]) for name, x in layers.items()),
    ]:
        np.testing.assert_allclose(found, of_one, rtol=0, atol=1e-5 * np.abs(of_one).max())


# ---- what a stage may not do ---------------------------------------------------------------------


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
            r"test_pipeline.py:\d+: a pipeline stage runs ppermute over p, which would wait "
            r"forever: stages",
        ),
        (summed_past_shardops, r"a pipeline stage runs psum\w* over p, which would wait forever"),
        (summed_in_the_backward_pass, r"a pipeline stage runs psum\w* over p"),
    ],
)
def test_a_collective_over_p_in_a_stage_is_refused(reduce, message, monkeypatch):
    layer = train.Llama.layer
    monkeypatch.setattr(train.Llama, "layer", lambda self, x, *args: layer(self, reduce(x), *args))
    with jax.set_mesh(tiny.mesh(STAGES)), pytest.raises(ShardError, match=message):
        traced_step(config())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("gather", "width"), [("layer", 32), pytest.param("step", 64, marks=pytest.mark.long)]
)
def test_a_stage_holds_its_part_of_the_vocabulary(gather, width):
    """What the loop over ticks is given and carries: embedding and unembedding [64, 64], and their
    gradients.
    """
    c = config()
    c.training.gather_weights = gather
    with jax.set_mesh(tiny.mesh("p=2 d=2")):
        loops = scans_of(traced_step(c).jaxpr.jaxpr)
        ticks = len(training_table(c, load_model(c.model)).columns["forward"])
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


@pytest.mark.parametrize(
    ("given", "message"), [(jnp.mean, DIFFERS), (lambda x: jnp.zeros(3), r"f32\[3\]")]
)
def test_what_is_no_scalar_or_differs_is_refused(given, message):
    class Wrong(train.Llama):
        def layer(self, x, w, tokens, attention):
            return super().layer(x, w, tokens, attention), LayerAux(given(x))

    c = tiny.config(tiny.model())
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state, step = (
            jax.eval_shape(lambda: tiny.state(c)),
            train.make_training_step(c, Wrong(c.model)),
        )
        with pytest.raises(ShardError, match=f"a layer gives loss in its LayerAux: {message}"):
            step.lower(state, tiny.place_batch(c), np.int32(0))


# ---- placement, settings -------------------------------------------------------------------------


@pytest.mark.quick
def test_rows_of_chunks():
    even = place_layers(8, in_a_ring(2, 2))
    assert even.rows.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert even.order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert place_layers(8, in_a_ring(4, 1)).order is None
    down_and_up = place_layers(8, ((0, 3), (1, 2)))
    assert down_and_up.rows.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    with pytest.raises(
        ValueError, match=r"12 layers do not divide into 4 equal stages .*, each a multiple of 2"
    ):
        place_layers(12, in_a_ring(2, 2), period=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"virtual_stages": 3}, "4 layers do not divide into 6 equal stages"),
        ({"schedule": "gpipe", "virtual_stages": 2}, "gpipe is defined for one chunk"),
        ({"schedule": "2f2b"}, "2f2b"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    c = config(**changes)
    with jax.set_mesh(tiny.mesh(STAGES)), pytest.raises(ValueError, match=message):
        training_table(c, load_model(c.model))


# ---- memory and program size ---------------------------------------------------------------------


def executor_program(m: int, schedule: str):
    """The compiled executor alone on p=2: stages of one tanh layer each that saves what it
    gives.
    """
    placement = LayerPlacement(in_a_ring(2, 1), 1)
    table = tick_table(schedule_of(schedule)(2, m, 1))

    @pytree_dataclass
    class Small:
        layers: Array["layers/p", f32["M"]]

    def stage(w, x, numbers, part):
        return save_for_backward(jnp.tanh(x * w[0])), LayerAux()

    parts = SimpleNamespace(
        first=lambda w, part: part, layers=stage, last=lambda w, x, _: jnp.sum(x)
    )

    @jax.jit
    def program(w, data):
        def per_device(w, data):
            loss, g, *_ = run_schedule(parts, placement, table, Small(w), (data,))
            return shardops.psum("+p ->", loss), g.layers

        P = jax.sharding.PartitionSpec
        return jax.shard_map(per_device, in_specs=(P("p"), P()), out_specs=(P(), P("p")))(w, data)

    with jax.set_mesh(make_mesh(jax.devices()[:2], p=2)):
        w = jax.device_put(
            np.ones((2, 1024), np.float32), jax.NamedSharding(jax.sharding.get_mesh(), jax.P("p"))
        )
        return program.lower(w, jax.ShapeDtypeStruct((m, 1024), jnp.float32)).compile()


@pytest.mark.parametrize("schedule", ["zb_h1", pytest.param("1f1b", marks=pytest.mark.long)])
def test_memory_and_program_do_not_grow_with_microbatches(schedule):
    few, many = (executor_program(m, schedule) for m in (8, 32))
    assert (
        many.memory_analysis().temp_size_in_bytes <= 1.05 * few.memory_analysis().temp_size_in_bytes
    )

    def count(compiled):
        return len(re.findall(r"^\s+\S+ = ", compiled.as_text(), re.M))

    assert abs(count(many) - count(few)) <= 2


@pytest.mark.long
def test_memory_of_gpipe_grows():
    few, many = (executor_program(m, "gpipe").memory_analysis().temp_size_in_bytes for m in (8, 32))
    assert many > few + 20 * 4096
