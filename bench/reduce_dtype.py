"""What the dtype costs in which gradients are reduced over d: sums of a ring in bf16 and f32 beside those in f64.

    python -m bench.reduce_dtype

Each summand is the gradient of one sequence of the demo's dataset in bf16, by the demo's model on one device. A ring
adds one summand after the other, and rounds each time to the dtype in which it sends. An error is that of all matrices
together, relative to the norm of the sum.
"""

import jax
import jax.numpy as jnp
import numpy as np

import train
from shardlib.shardtypes import f32, typed_shard_map
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import compute_scope, load_model
from shardwright.modeling.weights import initialize
from shardwright.run.launch import composed
from shardwright_data.loader import make_loader

COUNTS = (2, 8, 64)


def gradients(count: int) -> list[np.ndarray]:
    """Of each matrix, its gradients by `count` sequences, f32[count, ...] with values of bf16."""
    overrides = "training.batch_size=1", "training.gather_weights=step", "training.compute_dtype=bf16"
    c = composed("local_test_synthetic", *overrides)
    model = load_model(c.model)
    forward = train.Forward(model, c.training)

    @typed_shard_map
    def step(w: model.Weights, batch: train.Batch) -> tuple[f32[""], model.Weights]:
        return train.loss_and_gradients(w, batch, c, forward)[:2]

    with jax.set_mesh(make_mesh(jax.devices()[:1])), compute_scope("bf16"):
        w = jax.jit(lambda key: initialize(model.table, key))(jax.random.key(0))
        step, loader = jax.jit(step), make_loader(c.data, "train", 1, c.training.seq_len)
        found = [jax.tree.leaves(step(w, loader.load(i))[1]) for i in range(count)]
    matrices = (terms for terms in zip(*found, strict=True) if terms[0].ndim > 2)
    return [np.stack([np.asarray(x.astype(jnp.bfloat16), np.float32) for x in terms]) for terms in matrices]


def ring(terms: np.ndarray, dtype: type) -> np.ndarray:
    """Their sum, rounded to `dtype` after each addition."""
    total = terms[0]
    for term in terms[1:]:
        total = (total + term).astype(dtype).astype(np.float32)
    return total


def norm(arrays: list[np.ndarray]) -> float:
    """Norm of all together."""
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in arrays)))


def figures(terms: list[np.ndarray]) -> str:
    """The errors and the spread, of f32[summands, ...] for each matrix."""
    exact = [np.sum(x, axis=0, dtype=np.float64) for x in terms]
    errors = [norm([ring(x, dtype) - e for x, e in zip(terms, exact, strict=True)]) for dtype in (jnp.bfloat16, "f4")]
    spread = norm([np.std(x, axis=0, ddof=1, dtype=np.float64) for x in terms]) * len(terms[0]) ** 0.5
    return f"{errors[0] / norm(exact):13.1e}   {errors[1] / norm(exact):6.0e}   {spread / norm(exact):.1e}"


if __name__ == "__main__":
    found = gradients(max(COUNTS))
    print("summands   error in bf16   in f32   spread of the summands' mean")
    for count in COUNTS:
        print(f"{count:8}   {figures([x[:count] for x in found])}")
