"""Every test sees eight simulated devices, whatever the machine; or TEST_DEVICES of them."""

import os

from simulated import xla_flags

# Both are read when jax is imported, which happens after this file. The device count holds for the CPU alone, so
# the CPU is the platform unless one is asked for, e.g. with JAX_PLATFORMS=cuda.
FLAGS = xla_flags(os.environ.get("TEST_DEVICES", "8"))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No test finds what an earlier one, or a run of this user, compiled; tests of the cache itself turn it on.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
