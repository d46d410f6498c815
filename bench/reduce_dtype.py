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


def gradients(count: int) -> list[list[np.ndarray]]:
    """Of `count` sequences, the gradients of the matrices, in bf16."""
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
        found = [step(w, loader.load(i))[1] for i in range(count)]
    return [[np.asarray(x, jnp.bfloat16) for x in jax.tree.leaves(g) if x.ndim > 2] for g in found]


def ring(terms: list[np.ndarray], dtype) -> np.ndarray:
    """Their sum, rounded to `dtype` after each addition."""
    total = terms[0].astype(dtype)
    for term in terms[1:]:
        total = (total.astype(np.float32) + term.astype(np.float32)).astype(dtype)
    return total.astype(np.float64)


def norm(arrays: list[np.ndarray]) -> float:
    """Norm of all together."""
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in arrays)))


def main() -> None:
    """Prints a line for each number of summands."""
    found = gradients(max(COUNTS))
    print("summands   error in bf16   in f32   spread of the summands' mean")
    for count in COUNTS:
        tensors = [[g[i] for g in found[:count]] for i in range(len(found[0]))]
        exact = [np.sum([x.astype(np.float64) for x in terms], axis=0) for terms in tensors]
        errors = [
            norm([ring(terms, dtype) - e for terms, e in zip(tensors, exact, strict=True)]) / norm(exact)
            for dtype in (jnp.bfloat16, np.float32)
        ]
        deviations = [np.std([x.astype(np.float64) for x in terms], axis=0, ddof=1) for terms in tensors]
        spread = norm(deviations) * count**0.5 / norm(exact)
        print(f"{count:8}   {errors[0]:13.1e}   {errors[1]:6.0e}   {spread:.1e}")


if __name__ == "__main__":
    main()
