"""Optimizer state of another shape than its weight: its types; Adafactor and SOAP of
docs/changing.md, on every mesh.

Adafactor is compared with optax, SOAP with its algorithm in numpy, both in f64.
"""

import dataclasses
import fnmatch
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import train
from shardlib.array_types import arrays_in, factor_type
from shardlib.exact import compare as exact
from shardlib.mesh import on_mesh
from shardlib.parsing import parse_shape
from shardlib.shardtypes import (
    Factor,
    ShardError,
    Subset,
    f32,
    i32,
    make_shardings,
    pytree_dataclass,
    typed_shard_map,
)
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import Weight
from shardwright.models import moe
from shardwright.optimizers.config import GroupConfig
from shardwright.optimizers.rates import Update, updates_of
from shardwright.program.checkpoint import named_leaves
from shardwright.program.config import PipelineConfig
from shardwright.program.stages import placement_of, stack_orders
from shardwright.program.step import trace_step
from tests.support import tiny
from tests.support.optax_truth import random_like
from tests.support.recipes import RECIPES

assert RECIPES  # importing it makes the programs of docs/recipes importable
factors, of_soap = (importlib.import_module(name) for name in ("factors", "soap"))
ADAFACTOR, SOAP = "adafactor:adafactor", "soap:soap"
SETTINGS = {
    ADAFACTOR: {"algorithm": ADAFACTOR},
    SOAP: {"groups": [GroupConfig("layers.w_*", algorithm=SOAP)]},
}
STEPS = 6


# ---- the types -----------------------------------------------------------------------------------

W_Q = f32["layers/p M/fsdp K/t Q D"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ("", "layers/p"),
        ("inputs", "layers/p M/fsdp"),
        ("outputs", "layers/p K/t Q D"),
        ("inputs outputs", "layers/p M/fsdp K/t Q D"),
        ("inputs inputs", "layers/p M/fsdp by_M/t"),
        ("outputs outputs", "layers/p K/t Q D by_K_Q_D/fsdp"),
    ],
)
def test_a_factor_has_the_dims_of_its_sides(dims, expected):
    assert factor_type(W_Q, dims, 1, 3).spec == parse_shape(expected)


@pytest.mark.quick
def test_axes_stay_in_the_order_in_which_they_can_be_gathered():
    assert str(factor_type(f32["M/c/t/d E"], "outputs outputs", 1, 1).spec) == "E by_E/c/t/d"
    assert str(factor_type(f32["A/t B/d C/c E"], "outputs outputs", 3, 1).spec) == "E by_E/t/c/d"


@pytree_dataclass
class Two:
    """Weights of a model without layers."""

    up: f32["M/d F/t"]
    bias: f32["F/t/d"]


TABLE = Two(up=Weight((16, 24), "matrix", inputs=1, outputs=1), bias=Weight((24,), "vector"))


def updates_by(algorithm: str = "adafactor", table: Two = TABLE) -> Two:
    return jax.tree.map(lambda weight: Update(weight, algorithm, 1.0, 0.0), table)


def of_up(dims: str) -> Two:
    """Zeros for the matrix alone."""
    return jax.jit(lambda: factors.zeros(dims, updates_by(), lambda update: update.weight.sides))()


def test_zeros_are_sharded_as_declared():
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        rows, square = of_up("inputs"), of_up("outputs outputs")
        assert (rows.up.array.shape, rows.up.array.sharding.spec) == ((16,), P("d"))
        assert (square.up.array.shape, square.up.array.sharding.spec) == ((24, 24), P("t", "d"))
        assert rows.bias is square.bias is None
        assert make_shardings(Subset["inputs", Two], like=rows) == jax.tree.map(
            lambda x: x.sharding, rows
        )


@typed_shard_map
def kept(w: Two, rows: Subset["inputs", Two]) -> Subset["inputs", Two]:
    return rows


@typed_shard_map
def made(w: Two) -> Subset["inputs", Two]:
    return Two(Factor(factors.mean(w.up, "M/d F/t", "M/d"), 1, 1), None)


def test_what_is_not_the_factor_that_is_declared_is_refused():
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        w = tiny.place(random_like(TABLE, 0), Two)
        assert jax.jit(kept)(w, of_up("inputs")).up.array.sharding.spec == P("d")
        with pytest.raises(
            ShardError, match=r"rows.up.array: f32\['M/d'\]: size mismatch: dim M is 16"
        ):
            jax.jit(kept)(w, of_up("outputs"))
        with pytest.raises(ShardError, match=r"rows.up is f32\[16,24\].*, not a Factor"):
            jax.jit(kept)(w, w)
        with pytest.raises(
            ShardError, match=r"up.array: f32\['M/d'\] is a Factor, and no argument is one"
        ):
            jax.jit(made)(w)


def test_weights_that_cannot_have_the_state_are_refused():
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        with pytest.raises(
            ValueError,
            match=r"^bias has no inputs and outputs, which the state of soap needs; choose another",
        ):
            factors.zeros("inputs", updates_by("soap"), lambda update: True)
        table = dataclasses.replace(TABLE, up=Weight((16, 6), "matrix", inputs=1, outputs=1))
        expected = (
            "up: the state `F/t by_F/d` of soap: by_F is 6, which d = 4 devices do not "
            "divide; choose another "
        )
        expected += "algorithm than soap for it by optimizer.groups."
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            factors.zeros(
                "outputs outputs", updates_by("soap", table), lambda update: update.weight.sides
            )
    with pytest.raises(ShardError, match="'rows' are not dims of a Factor"):
        Subset["rows", Two]


def shapes_of_state(recipe: str, mesh: str = "d=2 t=2", **changes):
    c = config(recipe, **changes)
    with jax.sharding.use_abstract_mesh(tiny.mesh(mesh).abstract_mesh):
        model = load_model(c.model)
        return jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model)), model.table


def test_the_state_of_adafactor_is_rows_and_columns():
    state, table = shapes_of_state(ADAFACTOR)
    sizes = {field.name: 0 for field in dataclasses.fields(state)}
    for name, x in named_leaves(state).items():
        sizes[name.partition("/")[0]] += x.size
    expected = parameters(
        jax.tree.map(lambda weight: np.zeros(weight.shape, np.float32), table), table
    )
    matrices, vectors = ([x for x in expected.values() if x.ndim == n] for n in (2, 1))
    assert sizes == {
        "weights": sum(x.size for x in expected.values()),
        "adam_mu": 0,
        "adam_nu": sum(x.size for x in vectors),
        "nu_rows": sum(x.shape[0] for x in matrices),
        "nu_columns": sum(x.shape[1] for x in matrices),
        "average": 0,
    }
    assert sizes["nu_rows"] + sizes["nu_columns"] < sizes["weights"] / 10


@pytest.mark.parametrize(("recipe", "field"), [(ADAFACTOR, "nu_rows"), (SOAP, "soap_left")])
def test_groups_choose_and_frozen_weights_have_no_state(recipe, field):
    other = recipe
    groups = [GroupConfig("*"), GroupConfig("layers.w_[qk]", algorithm=other)]
    groups += [
        GroupConfig("layers.w_q", algorithm="frozen"),
        GroupConfig("embed", algorithm="frozen"),
    ]
    state, _ = shapes_of_state(recipe, algorithm="adamw", groups=groups)
    assert named_leaves(getattr(state, field)).keys() == {"layers/w_k/array"}
    names = [name for name in named_leaves(state) if not name.startswith("weights/")]
    assert not [
        name for name in names if name.endswith(("/embed", "/layers/w_q")) or "/w_q/" in name
    ]
    assert "adam_mu/layers/w_v" in names


def test_factors_of_stages_are_in_the_order_of_the_layers_in_checkpoints():
    c = config(SOAP)
    c.pipeline = PipelineConfig(schedule="zb_v", virtual_stages=2)
    with jax.sharding.use_abstract_mesh(tiny.mesh("p=2 d=2 t=2").abstract_mesh):
        model = load_model(c.model)
        state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
        orders = stack_orders(placement_of(c, model), train.State[train.Transformer], state)
    assert orders["soap_left/layers/w_q/array"].tolist() == [0, 3, 1, 2]
    of_layers = {name for name in named_leaves(state) if "layers/" in name}
    assert orders.keys() == of_layers


@pytest.mark.long
@pytest.mark.parametrize("recipe", [ADAFACTOR, SOAP])
def test_the_step_is_proved(recipe):
    c, mesh = config(recipe), tiny.mesh("p=2 d=2 t=2").abstract_mesh
    c.training.microbatches, c.pipeline = 2, PipelineConfig(schedule="1f1b")
    with jax.sharding.use_abstract_mesh(mesh):
        assert find_unsound(trace_step(c, load_model(c.model), mesh)) == []


@pytest.mark.long
@pytest.mark.parametrize("recipe", [ADAFACTOR, SOAP])
def test_experts_are_matrices_of_their_own(recipe):
    settings = dataclasses.asdict(tiny.model(layers=4)) | {
        "module": "moe",
        "experts": 8,
        "experts_per_token": 2,
    }
    c = config(recipe, groups=[GroupConfig("layers.w_*", algorithm=recipe)])
    c.model, c.training.compute_dtype = moe.ModelConfig(**settings), "f32"
    c.optimizer.groups += [GroupConfig("layers.router", algorithm=c.optimizer.groups[0].algorithm)]
    mesh = tiny.mesh("c=2 d=2 t=2").abstract_mesh
    field, dims = {ADAFACTOR: ("nu_rows", "M/c/d"), SOAP: ("soap_left", "M/c/d by_M/t")}[recipe]
    with jax.sharding.use_abstract_mesh(mesh):
        model = load_model(c.model)
        state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
        kind = train.State[type(model.table)]
        found = {path: str(array.spec) for path, array, _ in arrays_in(kind, state)}
        assert found[f"{field}.layers.w_gate.array"] == str(
            on_mesh(parse_shape(f"layers E/e {dims}"))
        )
        assert trace_step(c, model).traced
        assert trace_step(c, model, name="evaluation").traced


# ---- updates in f64 ------------------------------------------------------------------------------


def config(recipe: str, **changes):
    c = tiny.config(tiny.model(layers=4))
    settings = (
        {"warmup_steps": 0, "clip_norm": 1e9, "weight_decay": 0.0} | SETTINGS[recipe] | changes
    )
    c.optimizer = tiny.optimizer(**settings)
    return c


def gradients(table, step: int):
    return random_like(table, step + 1, (1e-2, 1.0, 1e-2, 3.0, 1e-3, 1.0)[step])


def updated(recipe: str, mesh: str, **changes) -> list:
    """State, on the host in f64, before and after each update of random weights by random
    gradients, on a mesh.
    """
    c = config(recipe, **changes)
    with jax.set_mesh(tiny.mesh(mesh)):
        model = load_model(c.model)
        state = jax.jit(functools.partial(train.init_state, config=c, model=model))(
            jax.random.key(0)
        )
        state = dataclasses.replace(
            state, weights=tiny.place(random_like(model.table, 0), train.Transformer)
        )
        updates = updates_of(c.optimizer, model, train.OPTIMIZERS)

        def update(
            state: train.State[train.Transformer], g: train.Transformer, step: i32[""]
        ) -> train.State[train.Transformer]:
            return train.update_state(state, g, step, c, updates)[0]

        def place(i):
            return tiny.place(gradients(model.table, i), train.Transformer)

        traced = tiny.per_device(update).trace(state, place(0), jnp.int32(0))
        structure, leaves = jax.tree.structure(state), jax.tree.leaves(state)
        found = [jax.tree.map(np.float64, state)]
        for i in range(STEPS):
            machine, outs = exact.run(
                traced.jaxpr,
                tiny.mesh(mesh).shape,
                [*leaves, *jax.tree.leaves(place(i)), np.int32(i)],
            )
            leaves = [exact.without_devices(machine, x).value for x in outs]
            found.append(structure.unflatten(leaves))
    return found


def parameters(tree, table) -> dict[str, np.ndarray]:
    """The parameters that a reference has: each layer's own, a matrix as [inputs, outputs]."""
    found = {}
    for name, x in named_leaves(tree).items():
        weight, is_stack = named_leaves(table)[name], name.startswith("layers/")
        for i, of_layer in enumerate(x if is_stack else [x]):
            shape = weight.shape[is_stack:]
            rows = int(np.prod(shape[: weight.inputs])) if weight.inputs else shape[0]
            found[f"{name}, layer {i}" if is_stack else name] = np.float64(of_layer).reshape(
                (rows, -1) if len(shape) > 1 else shape
            )
    return found


def same(found: list, expected: list, tolerance: float = 1e-8) -> None:
    """Constants such as the learning rate are rounded to f32 in the traced update: that is most of
    the tolerance.
    """
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.keys() == b.keys()
        for name in b:
            error = np.abs(a[name] - b[name]).max() / max(np.abs(b[name]).max(), 1e-30)
            assert error <= tolerance, f"{name} after {step} updates: {error}"
    moved = {name: np.abs(expected[0][name] - expected[-1][name]).max() for name in expected[0]}
    assert min(moved.values()) > 1e-4, moved


# ---- Adafactor -----------------------------------------------------------------------------------


def schedule(c):
    return optax.cosine_decay_schedule(c.learning_rate, c.schedule_steps, c.final_fraction)


@pytest.mark.long
def test_adafactor_is_optaxs():
    decay, table = 0.1, load_table()
    c = config(ADAFACTOR, weight_decay=decay)
    path = [
        parameters(state.weights, table)
        for state in updated(ADAFACTOR, "p=2 d=2 t=2", weight_decay=decay)
    ]
    # optax.adafactor does not multiply the decay by the rate.
    scaled, rate = (
        optax.adafactor(min_dim_size_to_factor=1),
        optax.scale_by_schedule(schedule(c.optimizer)),
    )
    oracle = optax.chain(scaled, optax.add_decayed_weights(-decay), rate)
    with jax.enable_x64(True):
        w = jax.tree.map(jnp.asarray, path[0])
        moments, expected = oracle.init(w), [path[0]]
        for i in range(STEPS):
            g = jax.tree.map(jnp.asarray, parameters(gradients(table, i), table))
            change, moments = oracle.update(g, moments, w)
            w = optax.apply_updates(w, change)
            expected.append(jax.tree.map(np.asarray, w))
    same(path, expected)


def load_table():
    return train.Llama(tiny.model(layers=4)).table


# ---- SOAP ----------------------------------------------------------------------------------------


def soap_by_numpy(path: dict, table, c, frequency: int, longest: int) -> list:
    """Weights before and after each update of c's group by SOAP, and of the rest by AdamW, as the
    paper's authors do.

    The first moment is kept in the bases, and turned where they change.
    """
    b1, b2, w, states, found = c.adam_b1, c.adam_b2, dict(path), {}, [dict(path)]
    for step in range(STEPS):
        rate, gs = float(schedule(c)(step)), parameters(gradients(table, step), table)
        for name, g in gs.items():
            is_own = fnmatch.fnmatch(name.partition(",")[0].replace("/", "."), c.groups[0].match)
            sides = [is_own and n <= longest for n in g.shape]
            s = states.setdefault(
                name, {"m": 0 * g, "v": 0 * g, "GG": [np.zeros((n, n)) for n in g.shape], "Q": None}
            )
            outer = [np.einsum("ij,kj->ik", x, x) for x in (g, g.T)] if is_own else []
            if is_own and s["Q"] is None:
                s["GG"] = [(1 - b2) * x for x in outer]
                pairs = zip(s["GG"], sides, strict=True)
                s["Q"] = [
                    np.linalg.eigh(x)[1][:, ::-1] if has else np.eye(len(x)) for x, has in pairs
                ]
                # Of the longer side, eigenvectors of eigenvalue 0 are anyone's choice: those of
                # Householder's QR.
                short, wide = int(g.shape[1] < g.shape[0]), g if g.shape[1] < g.shape[0] else g.T
                if sides[1 - short] and g.shape[0] != g.shape[1]:
                    s["Q"][1 - short] = np.linalg.qr(wide @ s["Q"][short], mode="complete")[0]
                continue
            count = step if is_own else step + 1
            turned = s["Q"][0].T @ g @ s["Q"][1] if is_own else g
            s["m"] = b1 * s["m"] + (1 - b1) * turned
            s["v"] = b2 * s["v"] + (1 - b2) * turned**2
            if is_own:
                change = (
                    s["m"]
                    / (np.sqrt(s["v"]) + c.adam_epsilon)
                    * np.sqrt(1 - b2**count)
                    / (1 - b1**count)
                )
                change = s["Q"][0] @ change @ s["Q"][1].T
            else:
                change = (
                    s["m"] / (1 - b1**count) / (np.sqrt(s["v"] / (1 - b2**count)) + c.adam_epsilon)
                )
            w[name] = w[name] - rate * (change + c.weight_decay * w[name])
            if not is_own:
                continue
            s["GG"] = [b2 * x + (1 - b2) * o for x, o in zip(s["GG"], outer, strict=True)]
            if step % frequency == 0:
                m = s["Q"][0] @ s["m"] @ s["Q"][1].T
                for side in (0, 1):
                    if sides[side]:
                        q = s["Q"][side]
                        order = np.argsort(-np.diag(q.T @ s["GG"][side] @ q))
                        s["v"] = np.take(s["v"], order, side)
                        s["Q"][side] = np.linalg.qr(s["GG"][side] @ q[:, order])[0]
                s["m"] = s["Q"][0].T @ m @ s["Q"][1]
        found.append(dict(w))
    return found


@pytest.mark.parametrize(
    ("chosen", "decay", "longest", "mesh"),
    [
        ("layers.w_[qg]*", 0.0, 64, "one device"),
        pytest.param("layers.w_*", 0.1, 32, "d=2 e=2 c=2", marks=pytest.mark.long),
    ],
)
def test_soap_is_its_algorithm(chosen, decay, longest, mesh, monkeypatch):
    """With a basis of each side of rectangular matrices, and of the shorter one alone."""
    monkeypatch.setattr(of_soap, "FREQUENCY", 2)
    monkeypatch.setattr(of_soap, "LONGEST", longest)
    settings = {"weight_decay": decay, "groups": [GroupConfig(chosen, algorithm=SOAP)]}
    table, c = load_table(), config(SOAP, **settings)
    path = [parameters(state.weights, table) for state in updated(SOAP, mesh, **settings)]
    # The rounded constants count for more in the larger bases.
    same(
        path,
        soap_by_numpy(path[0], table, c.optimizer, 2, longest),
        1e-8 if longest == 32 else 1e-7,
    )


@pytest.mark.parametrize(
    ("shape", "rank", "dtype"), [((32, 32), None, np.float32), ((24, 48), 6, np.float64)]
)
def test_soap_does_not_enlarge_rounding(shape, rank, dtype, monkeypatch):
    """Gradients that differ by 1e-7, as on another mesh, move a matrix to the same place; of low
    rank too.
    """
    c, (n, m) = config(SOAP).optimizer, shape

    def changes(by: float) -> list:
        rng, of_mesh, moment, found = (
            np.random.default_rng(0),
            np.random.default_rng(1),
            np.zeros(shape),
            [],
        )
        zeros = [jnp.zeros(size, dtype) for size in (shape, (n, n), (m, m))]
        state = [zeros[0], *zeros[1:], *zeros[1:]]
        step_of = jax.jit(functools.partial(of_soap.soap_of_matrix, c))
        for step in range(8):
            g = (
                rng.normal(size=shape)
                if rank is None
                else rng.normal(size=(n, rank)) @ rng.normal(size=(rank, m))
            )
            g = g * (1 + by * of_mesh.normal(size=shape))
            moment = moment if step == 0 else c.adam_b1 * moment + (1 - c.adam_b1) * g
            change, _, *state = step_of(
                jnp.int32(step), jnp.asarray(g, dtype), jnp.asarray(moment, dtype), *state
            )
            found.append(np.asarray(change))
        return found

    monkeypatch.setattr(of_soap, "FREQUENCY", 3)
    with jax.enable_x64(dtype == np.float64):
        for a, b in zip(changes(0.0), changes(1e-7), strict=True):
            assert np.linalg.norm(a - b) <= {np.float64: 1e-5, np.float32: 2e-4}[
                dtype
            ] * np.linalg.norm(a)
        assert np.linalg.norm(a) > 1
