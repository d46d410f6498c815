"""The products of a step alone: a trainer that is faster has to multiply faster.

Each product with a weight, forward and both of its gradients, has the shapes that a device has. Its
form is that of our step, which XLA multiplies fastest on a CPU. All are in one jitted program on
the same devices. The causal products of attention are added at the rate that these reach: as
batched products they would measure how fast scores are written, and a fused kernel does not write
scores.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.throughput.peers.job import Job
from bench.throughput.peers.plain_jax import DTYPES, OnJax
from shardlib.products import einsum_with_gradients


def dots(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A product of x[sequences, length, i] and w[i, o], and its gradients by both factors."""
    y, vjp = jax.vjp(
        lambda x, w: einsum_with_gradients("bli,io->blo", x, w, None, x.size <= dy.size), x, w
    )
    return y, *vjp(dy)


class Contestant(OnJax):
    """The products of a step."""

    def __init__(self, job: Job, _: object = None):
        dtype = DTYPES[job.dtype]
        devices = jax.devices()[: job.devices]
        self.mesh = jax.make_mesh(
            (len(devices),), ("device",), axis_types=(AxisType.Auto,), devices=devices
        )
        of_each = P("device")
        rows = (job.sequences // job.d, job.length)
        on_each = NamedSharding(self.mesh, of_each)
        # Each layer has its own operands, and there is no loop: XLA would move constant products
        # out of a loop, and compute equal products only once.
        products = [(i, o) for i, o, n in job.shapes.products(job.t) for _ in range(n)]

        # A program for each shape, not one for all operands: compiling that took minutes on a GPU.
        @functools.partial(jax.jit, static_argnums=1, out_shardings=on_each)
        def draw(key, shape):
            return jax.random.normal(key, (len(devices), *shape), dtype)

        @functools.partial(jax.jit, static_argnums=0, out_shardings=on_each)
        def place(shape):
            return jnp.zeros((len(devices), *shape), dtype)

        keys = iter(jax.random.split(jax.random.key(job.seed), 3 * len(products)))
        shapes = [((*rows, i), (i, o), (*rows, o)) for i, o in products]

        def per_device(given, _):
            local_attention = jax.tree.map(lambda x: x[0], given)
            return jax.tree.map(lambda x: x[None], [dots(*product) for product in local_attention])

        self.batches = [[tuple(draw(next(keys), shape) for shape in each) for each in shapes]]
        self.results = [(place(dy), place(x), place(w)) for x, w, dy in shapes]
        mapped = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(of_each, of_each),
            out_specs=of_each,
            check_vma=False,
        )
        # The results of a step reuse the memory of the step before: fresh memory would cost page
        # faults on a CPU.
        self.jitted = jax.jit(mapped, donate_argnums=1, keep_unused=True)

    def run(self, given: list[tuple[jax.Array, ...]]) -> jax.Array:
        self.results = self.jitted(given, self.results)
        return self.results[0][0]

    def wait(self, results: list[jax.Array]) -> list[float]:
        """Waits for the last step. There are no losses."""
        jax.block_until_ready(results[-1])
        return []
