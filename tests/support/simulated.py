"""Simulated devices, and how XLA compiles for them in tests and in the programs that tests
start.
"""

import importlib.metadata
import os


def xla_flags(devices: int | str) -> str:
    """XLA_FLAGS of a process with so many devices of the CPU.

    Without LLVM's optimizations; and, where jaxlib can still do without, not by the fusion
    emitters, whose code takes LLVM three times as long: compiling is most of the time of tests that
    compute little. XLA's own optimizations, of which tests read the results, stay.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return flags + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version(
        "jaxlib"
    ).startswith("0.10.")


def compiled_in(directory: str) -> dict[str, str]:
    """Environment in which JAX keeps what takes long to compile in a directory, which stays below 4
    GiB.

    The lines of a program are part of the key, as tests read them.
    """
    names = {
        "CACHE_DIR": directory,
        "CACHE_INCLUDE_METADATA_IN_KEY": "true",
        "CACHE_MAX_SIZE": str(2**32),
    }
    kept = {f"JAX_COMPILATION_{name}": value for name, value in names.items()}
    return kept | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}


def without_cache() -> dict[str, str]:
    """The environment of a program that keeps what it compiles as it does without tests."""
    return {name: value for name, value in os.environ.items() if name not in compiled_in("")}
