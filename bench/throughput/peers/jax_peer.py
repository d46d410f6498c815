"""Shared parts of the contestants in JAX, and of the two peers: RoPE, JAX's own attention, a jitted step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.throughput.peers.job import Job, Shapes, batches, inputs_of

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def rope_tables(c: Shapes, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, [length, 1, d_head / 2], of the angles by which pairs turn (arXiv 2104.09864)."""
    frequencies = c.rope_base ** (-np.arange(0, c.d_head, 2) / c.d_head)
    angles = jnp.asarray((np.arange(length)[:, None, None] * frequencies).astype(np.float32))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on x[batch, length, heads, d_head], by halves, in f32."""
    (cos, sin), (a, b) = rope, jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; cuDNN's kernel where there is one."""
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


class JaxContestant:
    """A contestant on JAX's devices."""

    def wait(self, losses: list[jax.Array]) -> list[float]:
        """Waits for the steps that returned these losses."""
        return [float(loss) for loss in jax.device_get(losses)]

    def device_peak(self) -> int | None:
        """Peak bytes of the first device, if it counts them."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


class JaxPeer(JaxContestant):
    """A peer. A subclass has initial(job, weights) -> state and training_step(state, ids, targets) -> state, loss.

    On several devices: plain data parallelism, sequences sharded over all devices, everything else replicated.
    """

    def __init__(self, job: Job, weights: dict[str, np.ndarray] | None = None):
        self.job = job
        devices = jax.devices()[: job.devices]
        mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
        everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        self.state = jax.device_put(self.initial(job, weights), everywhere)
        self.batches = [jax.device_put((inputs_of(x), x), by_row) for x in batches(job)]
        self.jitted = jax.jit(self.training_step, donate_argnums=0, out_shardings=(everywhere, everywhere))
        self.steps = 0

    def step(self) -> jax.Array:
        """Starts a step. Returns its loss, on the device."""
        self.state, loss = self.jitted(self.state, *self.batches[self.steps % len(self.batches)])
        self.steps += 1
        return loss

    def about(self) -> dict:
        """Facts for the record."""
        fused = jax.default_backend() == "gpu" and self.job.dtype == "bf16"
        return {"attention": f"{'cudnn' if fused else 'xla'} of jax.nn.dot_product_attention"}
