"""Every test sees eight simulated devices, whatever the machine; or TEST_DEVICES of them."""

import importlib.metadata
import os

# Both are read when jax is imported, which happens after this file. The device count holds for the CPU alone, so
# the CPU is the platform unless one is asked for, e.g. with JAX_PLATFORMS=cuda.
# Without LLVM's optimizations; and, where jaxlib can still do without, not by the fusion emitters, whose code takes
# LLVM three times as long: compiling is most of the time of tests that compute little. XLA's own optimizations, of
# which tests read the results, stay.
DEVICES = os.environ.get("TEST_DEVICES", "8")
FLAGS = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No test finds what an earlier one, or a run of this user, compiled; tests of the cache itself turn it on.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
