"""Every test sees eight simulated devices, whatever the machine."""

import os

# Both are read when jax is imported, which happens after this file. The device count holds for the CPU alone, so
# the CPU is the platform unless one is asked for, e.g. with JAX_PLATFORMS=cuda.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
