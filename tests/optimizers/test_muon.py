"""Muon against optax; its collectives.

On every mesh: tests/train/test_oracles.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import train
from shardlib.shardtypes import Array, f32, i32, pytree_dataclass
from shardwright.modeling.weights import Weight
from shardwright.optimizers import muon as optimizers
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.rates import learning_rate
from tests.optimizers.optax_truth import random_like, same, updated_by_optax, updated_on
from tests.support import tiny

State = train.State[train.Transformer]


def config(**changes) -> OptimizerConfig:
    return tiny.optimizer(algorithm="muon", **changes)


def fresh_state(table) -> train.State:
    zeros = random_like(table, 0, size=0.0)
    nu = jax.tree.map(lambda weight, x: None if weight.kind == "matrix" else x, table, zeros)
    return train.State(random_like(table, 0), zeros, nu)


# ---- the update ----------------------------------------------------------------------------------


def dimension_numbers(weight: Weight) -> MuonDimensionNumbers | None:
    if weight.kind != "matrix":
        return None
    inner = weight.inputs + weight.outputs
    return MuonDimensionNumbers(
        tuple(range(-inner, -weight.outputs)), tuple(range(-weight.outputs, 0))
    )


def muon_by_optax(c: OptimizerConfig, table) -> optax.GradientTransformation:
    """Muon with Keller Jordan's Nesterov momentum, of whatever in `table` is a matrix; AdamW of the
    rest.

    optax.contrib.muon's own Nesterov momentum corrects the biases of average and gradient by
    different factors, which the reference, torch, and this project do not. So optax.trace is the
    momentum here, and Muon gets its result.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, c.learning_rate, c.warmup_steps, c.schedule_steps, 1e-3
    )
    is_matrix = jax.tree.map(lambda weight: weight.kind == "matrix", table)
    rest = jax.tree.map(lambda weight: weight.kind != "matrix", table)
    muon = optax.contrib.muon(
        schedule,
        beta=0.0,
        nesterov=False,
        ns_steps=c.muon_iterations,
        weight_decay=c.weight_decay if "matrix" in c.decay_on else 0.0,
        consistent_rms=c.muon_rms,
        muon_weight_dimension_numbers=jax.tree.map(dimension_numbers, table),
    )
    decay = jax.tree.map(lambda weight: weight.kind in c.decay_on, table)
    adamw = optax.adamw(
        schedule,
        c.adam_b1,
        c.adam_b2,
        c.adam_epsilon,
        weight_decay=c.weight_decay,
        mask=lambda params: decay,
    )
    return optax.chain(
        optax.masked(optax.chain(optax.trace(c.muon_momentum, nesterov=True), muon), is_matrix),
        optax.masked(adamw, rest),
    )


def muon_update(c: OptimizerConfig, table):
    StateOfTable, updates = train.State[type(table)], tiny.updates(c, table)

    def update(state: StateOfTable, g: type(table), step: i32[""]) -> tuple[StateOfTable, f32[""]]:
        rate = learning_rate(step, c)
        for algorithm in (optimizers.muon, train.adamw):
            state = algorithm(state, g, step, rate, c, updates)
        return state, rate

    return update


def assert_optaxs(c: OptimizerConfig, table, mesh: str) -> None:
    found, _ = updated_on(mesh, muon_update(c, table), fresh_state(table), table)
    # Newton-Schulz enlarges rounding where singular values are small, up to 3.4445⁵ = 485 times.
    same(found, updated_by_optax(muon_by_optax(c, table), table)[0], rtol=1e-5, atol=3e-6)


def test_five_updates_equal_optax():
    """Stacks of 8 and 12 matrices, which four devices of d and t divide; by settings that are not
    the defaults.
    """
    c = config(decay_on=["embedding", "vector"], muon_rms=0.3, muon_momentum=0.8, muon_iterations=3)
    assert_optaxs(c, train.Llama(tiny.model(layers=4)).table, "r=2 d=2 t=2")


@pytree_dataclass
class OtherWeights:
    """Stacks of other kinds than train.py has."""

    single: f32["M/d F/t"]
    layers: Array["layers", f32["M F/t/d"]]
    stack_in_blocks: f32["stages/t M/d F"]
    two_deep: f32["outer inner K/t D M/d"]
    in_another_order: f32["M/c/t/d E"]
    bias: f32["F/t/d"]


def test_stacks_of_any_kind():
    table = OtherWeights(
        single=Weight((16, 24), "matrix", inputs=1, outputs=1),
        layers=Weight((3, 16, 24), "matrix", 0.25, inputs=1, outputs=1),
        stack_in_blocks=Weight((6, 16, 24), "matrix", 0.25, inputs=1, outputs=1),
        two_deep=Weight((2, 3, 4, 2, 16), "matrix", inputs=2, outputs=1),
        in_another_order=Weight((16, 8), "matrix", inputs=1, outputs=1),
        bias=Weight((24,), "vector"),
    )
    assert_optaxs(config(), table, "c=2 d=2 t=2")


# ---- communication -------------------------------------------------------------------------------


def lowered_update(mesh: str) -> str:
    c, table = config(), train.Llama(tiny.model()).table
    updates = tiny.updates(c, table)

    def update(state: State, g: train.Transformer) -> State:
        return optimizers.muon(state, g, jnp.int32(0), jnp.float32(c.learning_rate), c, updates)

    with jax.set_mesh(tiny.mesh(mesh)):
        state = tiny.place(fresh_state(table), State)
        return tiny.per_device(update, "bfloat16").lower(state, state.weights).as_text()


def test_what_is_exchanged_is_in_the_compute_dtype_and_filled_up_late():
    """Entries that a device sends and receives, its own share included, as docs/optimizers.md
    counts them.
    """
    text = lowered_update("d=4 t=2")
    results = re.findall(r"stablehlo\.all_to_all.*-> tensor<([\dx]+)x(\w+)>", text)
    assert {dtype for _, dtype in results} == {"bf16"}
    kinds = r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)"
    assert {*re.findall(kinds, text)} == {"all_to_all"}, "nothing within Newton-Schulz"
    m, heads, d_ff, d_head = 32, 16, 48, 4
    q_and_o = m * heads * d_head  # 6 matrices: 8 in eighths over d, then 2 in halves over t
    k_and_v = m * heads * d_head // 2
    mlp = m * d_ff  # 9 matrices: 12 in eighths over d, then 3, filled up to 4, in halves over t
    once = [q_and_o, q_and_o, k_and_v, k_and_v, mlp * 12 // 8, mlp * 4 // 2]
    assert sorted(
        int(np.prod([int(n) for n in shape.split("x")])) for shape, _ in results
    ) == sorted(once * 2)
