"""Updates by optax of arrays like the weights of a model."""

import jax
import numpy as np
import optax

import train
from tests.support import tiny

SIZES = 1e-2, 1.0, 1e-2, 3.0, 1e-3  # of the gradients of five steps


def random_like(table, seed: int, size: float = 1.0):
    """Host arrays for the weights that `table` describes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda weight: (size * rng.normal(size=weight.shape)).astype(np.float32), table
    )


def updated_by_optax(oracle: optax.GradientTransformation, table) -> tuple[list, list[float]]:
    """The weights before and after each of five updates on one device, and the norms of the
    gradients.
    """
    moments = jax.jit(oracle.init)(random_like(table, 0))

    @jax.jit
    def step(weights, moments, g):
        updates, moments = oracle.update(g, moments, weights)
        return optax.apply_updates(weights, updates), moments, optax.tree.norm(g)

    path, norms = [random_like(table, 0)], []
    for i, size in enumerate(SIZES):
        weights, moments, norm = step(path[-1], moments, random_like(table, i + 1, size))
        path.append(jax.tree.map(np.asarray, weights))
        norms.append(float(norm))
    return path, norms


def updated_on(mesh: str, update, start, table, act: str = "float32") -> tuple[list, list]:
    """The weights before and after each of five updates of State `start` on the mesh, and what else
    `update` returns.

    update(state, g, step) -> (state, other), per device. The gradients are those of
    updated_by_optax.
    """
    with jax.set_mesh(tiny.mesh(mesh)):
        state = tiny.place(start, train.State[type(table)])
        step_fn, path, others = tiny.per_device(update, act), [start.weights], []
        for i, size in enumerate(SIZES):
            state, other = step_fn(
                state, tiny.place(random_like(table, i + 1, size), type(table)), np.int32(i)
            )
            path.append(jax.tree.map(np.asarray, state.weights))
            others.append(other)
    return path, others


def same(found: list, expected: list, **tolerance) -> None:
    """Compares weights after each update, and makes sure that there was something to compare."""
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):

        def close(path, a, b, step=step):
            return np.testing.assert_allclose(
                a, b, **tolerance, err_msg=f"{jax.tree_util.keystr(path)} after {step} updates"
            )

        jax.tree_util.tree_map_with_path(close, a, b)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected[0], expected[-1])
    assert min(jax.tree.leaves(moved)) > 1e-2
