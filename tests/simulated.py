"""Simulated devices, and how XLA compiles for them in tests and in the programs that tests start."""

import importlib.metadata


def xla_flags(devices: int | str) -> str:
    """XLA_FLAGS of a process with so many devices of the CPU.

    Without LLVM's optimizations; and, where jaxlib can still do without, not by the fusion emitters, whose code takes
    LLVM three times as long: compiling is most of the time of tests that compute little. XLA's own optimizations, of
    which tests read the results, stay.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return flags + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")
