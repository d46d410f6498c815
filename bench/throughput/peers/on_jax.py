"""Shared parts of the contestants on JAX."""

import jax
import jax.numpy as jnp

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


class OnJax:
    """A contestant on JAX's devices."""

    def wait(self, losses: list[jax.Array]) -> list[float]:
        """Waits for the steps that returned these losses."""
        return [float(loss) for loss in jax.device_get(losses)]

    def device_peak(self) -> int | None:
        """Peak bytes of the first device, if it counts them."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
