"""Optimizer state of another shape than its weight: Adafactor and SOAP of
docs/changing.md, on every mesh.

Adafactor is compared with optax, SOAP with its algorithm in numpy, both in f64.
"""

import dataclasses
import fnmatch
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train
from shardlib.exact import compare as exact
from shardlib.shardtypes import (
    i32,
)
from shardwright.modeling.model import load_model
from shardwright.optimizers.config import GroupConfig
from shardwright.optimizers.rates import updates_of
from shardwright.program.checkpoint import named_leaves
from shardwright.program.config import PipelineConfig
from shardwright.program.stages import placement_of, stack_orders
from tests.optimizers.optax_truth import random_like
from tests.support import tiny
from tests.support.recipes import RECIPES

assert RECIPES  # importing it makes the programs of docs/recipes importable
factors, of_soap = (importlib.import_module(name) for name in ("factors", "soap"))
ADAFACTOR, SOAP = "adafactor:adafactor", "soap:soap"
SETTINGS = {
    ADAFACTOR: {"algorithm": ADAFACTOR},
    SOAP: {"groups": [GroupConfig("layers.w_*", algorithm=SOAP)]},
}
STEPS = 6


# ---- stages --------------------------------------------------------------------------------------


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


# ---- updates in f64 ------------------------------------------------------------------------------


def config(recipe: str, layers: int = 4, **changes):
    c = tiny.config(tiny.model(layers=layers), batch_size=4, seq_len=8)
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


def load_table(layers: int = 4):
    return train.Llama(tiny.model(layers=layers)).table


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
    settings = {"weight_decay": decay, "groups": [GroupConfig(chosen, algorithm=SOAP)], "layers": 2}
    table, c = load_table(layers=2), config(SOAP, **settings)
    path = [parameters(state.weights, table) for state in updated(SOAP, mesh, **settings)]
    # The rounded constants count for more in the larger bases.
    same(
        path,
        soap_by_numpy(path[0], table, c.optimizer, 2, longest),
        1e-8 if longest == 32 else 1e-7,
    )
