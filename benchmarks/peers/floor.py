"""The products of a step alone: no trainer can be faster without multiplying faster.

Each product with a weight, forward and both of its gradients, as plain jnp.dot's of the very shapes that a device has,
in one jitted program on the same devices. Those of attention are added at the rate which these reached, causal ones
alone: as batched products of their own they would measure how fast scores are written, which a fused kernel never does.
The peak FLOP/s for MFU is measured or looked up here too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import training_io
from benchmarks.peers.job import Job

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def attention_share(job: Job) -> float:
    """FLOPs of causal attention's products over those of the products with weights."""
    c = job.shapes
    return c.layers * c.heads * c.d_head * job.length / c.matmul_parameters


class Contestant:
    def __init__(self, job: Job, weights: None = None):
        self.job, dtype = job, DTYPES[job.dtype]
        devices = jax.devices()[: job.devices]
        mesh = jax.make_mesh((len(devices),), ("device",), axis_types=(AxisType.Auto,), devices=devices)
        rows = job.tokens // job.d
        groups: dict[int, list[tuple[int, int]]] = {}
        for inputs, outputs, n in job.shapes.products(job.t):
            groups.setdefault(n, []).append((inputs, outputs))

        def draw(key, *shape):
            return jax.random.normal(key, (len(devices), *shape), dtype)

        @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P("device")))
        def operands(key):
            keys = iter(jax.random.split(key, 3 * sum(map(len, groups.values()))))
            of = lambda i, o: (draw(next(keys), rows, i), draw(next(keys), i, o), draw(next(keys), rows, o))
            return {n: [of(*product) for product in products] for n, products in groups.items()}

        def dots(x, w, dy):
            return jnp.dot(x, w), jnp.dot(dy, w.T), jnp.dot(x.T, dy)

        def per_device(given, results):
            given, results = jax.tree.map(lambda x: x[0], (given, results))
            for n, products in given.items():

                def turn(_, results, products=products):
                    # Tied to the results before, so that the products are not moved out of the loop.
                    inputs, _ = lax.optimization_barrier((products, results))
                    return [dots(*product) for product in inputs]

                results[n] = lax.fori_loop(0, n, turn, results[n])
            return jax.tree.map(lambda x: x[None], results)

        self.given = operands(jax.random.key(job.seed))
        shapes = jax.eval_shape(
            lambda given: {n: [jax.vmap(dots)(*p) for p in ps] for n, ps in given.items()}, self.given
        )
        sharding = NamedSharding(mesh, P("device"))
        self.results = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=sharding
        )()
        mapped = jax.shard_map(per_device, mesh=mesh, in_specs=P("device"), out_specs=P("device"), check_vma=False)
        self.jitted = jax.jit(mapped, donate_argnums=1)

    def step(self) -> jax.Array:
        self.results = self.jitted(self.given, self.results)
        return jax.tree.leaves(self.results)[0]

    def wait(self, results: list[jax.Array]) -> list[float]:
        jax.block_until_ready(results[-1])
        return []

    def about(self) -> dict:
        devices = jax.devices()[: self.job.devices]
        peak = training_io.peak_flops(devices, DTYPES[self.job.dtype])
        return {
            "peak": peak.total,
            "peak_source": peak.source,
            "attention_share": attention_share(self.job),
            "device": devices[0].device_kind,
            "jax": jax.__version__,
        }

    def device_peak(self) -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
