"""Devices that need not be present, to compile for: those of a chip's compiler, which docs/check.md
installs.
"""

import math
import string
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from shardwright.cluster.chips import chip_of

GPUS = {"h100": 84_942_979_072, "h200": 151_397_597_184}
"""Memory of each chip, in bytes."""
TPUS = {"v5e": "v5e:{}", "v6e": "v6e:{}", "v7x": "tpu7x:2x2x1"}
_SLICES = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
WITHOUT_DEVICE = {"gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}}
"""Compiler options by platform. Autotuning needs a device; without it, Triton's matmuls would get a
bad tile size."""


def devices_of(chip: str, count: int, hosts: int | None = None) -> Any:
    """Returns this many devices to compile for, on as many `hosts` as they need.

    Raises RuntimeError if the chip's compiler is not installed, and ValueError for a chip that it
    does not have.
    """
    if chip in TPUS:
        shape = next((shape for size, shape in _SLICES.items() if size >= count), f"1x{count}")
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=TPUS[chip].format(shape)
        )
    elif chip in GPUS:
        known = chip_of(chip)
        hosts = hosts or math.ceil(count / known.near)
        values = {
            "name": known.kinds[0],
            "memory": GPUS[chip],
            "bandwidth": f"{known.memory_bandwidth:.0f}",
        }
        config = string.Template(
            Path(__file__).with_name("chips").joinpath("gpu.txtpb").read_text()
        ).substitute(values)
        target = {"target_config": config, "topology": f"1x{hosts}x{count // hosts}"}
        topology = topologies.get_topology_desc(platform="cuda", **target)
    else:
        raise ValueError(f"programs can be compiled ahead for {', '.join((*GPUS, *TPUS))} only")
    return topology.devices[:count]
