"""The products of a step alone: no trainer can be faster without multiplying faster.

Each product with a weight, forward and both of its gradients, as plain jnp.dot's of the very shapes that a device has,
in one jitted program on the same devices. Those of attention are added at the rate which these reached, causal ones
alone: as batched products of their own they would measure how fast scores are written, which a fused kernel never does.
The peak FLOP/s for MFU is measured or looked up here too.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.throughput.peers.job import Job
from training_io.flops import peak_flops

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def attention_share(job: Job) -> float:
    """FLOPs of causal attention's products over those of the products with weights."""
    c = job.shapes
    return c.layers * c.heads * c.d_head * job.length / c.matmul_parameters


def dots(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A product, and its gradients by both factors."""
    return jnp.dot(x, w), jnp.dot(dy, w.T), jnp.dot(x.T, dy)


class Contestant:
    def __init__(self, job: Job, weights: None = None):
        self.job, dtype = job, DTYPES[job.dtype]
        devices = jax.devices()[: job.devices]
        mesh = jax.make_mesh((len(devices),), ("device",), axis_types=(AxisType.Auto,), devices=devices)
        on_each, rows = NamedSharding(mesh, P("device")), job.tokens // job.d
        # Each layer has operands of its own, and there is no loop: out of one, XLA would move what does not change, and
        # equal products it would compute once.
        products = [(i, o) for i, o, n in job.shapes.products(job.t) for _ in range(n)]

        @functools.partial(jax.jit, out_shardings=on_each)
        def operands(key):
            keys = iter(jax.random.split(key, 3 * len(products)))
            draw = lambda *shape: jax.random.normal(next(keys), (len(devices), *shape), dtype)
            return [(draw(rows, i), draw(i, o), draw(rows, o)) for i, o in products]

        @functools.partial(jax.jit, out_shardings=on_each)
        def places():
            place = lambda *shape: jnp.zeros((len(devices), *shape), dtype)
            return [(place(rows, o), place(rows, i), place(i, o)) for i, o in products]

        def per_device(given, _):
            of_device = jax.tree.map(lambda x: x[0], given)
            return jax.tree.map(lambda x: x[None], [dots(*product) for product in of_device])

        self.given, self.results = operands(jax.random.key(job.seed)), places()
        of_each = P("device")
        mapped = jax.shard_map(per_device, mesh=mesh, in_specs=(of_each, of_each), out_specs=of_each, check_vma=False)
        # The results of a step go where those of the step before were: fresh memory would cost page faults on a CPU.
        self.jitted = jax.jit(mapped, donate_argnums=1, keep_unused=True)

    def step(self) -> jax.Array:
        self.results = self.jitted(self.given, self.results)
        return self.results[0][0]

    def wait(self, results: list[jax.Array]) -> list[float]:
        jax.block_until_ready(results[-1])
        return []

    def about(self) -> dict:
        devices = jax.devices()[: self.job.devices]
        peak = peak_flops(devices, DTYPES[self.job.dtype])
        return {
            "peak": peak.total,
            "peak_source": peak.source,
            "attention_share": attention_share(self.job),
            "device": devices[0].device_kind,
            "jax": jax.__version__,
        }

    def device_peak(self) -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
