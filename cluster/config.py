"""Settings of the devices: the mesh, what the hardware is told, and the processes of a run."""

import dataclasses
from typing import Any

from configuration.checks import check_choice, check_ranges


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis; at most one may be -1, which takes what is left."""

    p: int = 1
    """Pipeline stages' devices: each holds some of the layers (docs/pipeline.md)."""
    r: int = 1
    d: int = -1
    t: int = 1


@dataclasses.dataclass
class HardwareConfig:
    name: str = "any"
    """What the run is meant for, in words."""
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """XLA's flags without their dashes, and what else XLA takes for a program, for the compilation of the steps. Left
    out are those that are null and, with a line that says so, those that the installed XLA does not know. Flags in the
    environment's XLA_FLAGS hold for all programs, and an unknown one there ends the run."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables, such as NCCL's, that are set before the devices start; one that is set already stays."""
    memory_fraction: float | None = None
    """Part of a GPU's memory that JAX reserves when it starts, in (0, 1]; null: JAX's own default, 0.75. Whoever sets
    XLA_PYTHON_CLIENT_MEM_FRACTION overrides it."""
    compilation_cache: str | None = "~/.cache/shardwright/compiled"
    """Directory in which compiled programs are kept, for the next run of the same step; null: none. It must be writable
    by nobody whom you would not let run programs as you. It grows; what is in it can be deleted at any time. A run of
    several processes, of which the first writes and all read, keeps none here, where hosts may each have their own:
    give a directory that they share. Whoever sets JAX_COMPILATION_CACHE_DIR overrides it."""


@dataclasses.dataclass
class DistributedConfig:
    """The processes of a run, on one host or on many. docs/multi-host.md tells how to start them."""

    auto: bool = False
    """Whether JAX finds out by itself who the processes are, as it can under Slurm, Open MPI, Kubernetes and on Cloud
    TPU. Otherwise there is one, or coordinator, count and id say it."""
    count: int | None = None
    """Processes of the run, at least 1. Null: one; with auto, as many as there are."""
    coordinator: str | None = None
    """address:port of process 0, the same in all processes; the port is one that is free there."""
    id: int | None = None
    """Which process this is, in [0, count)."""
    devices: str = "all"
    """all: a process uses all devices that it sees. one: that of its number on the host, of those that all processes
    there see; only with auto, under Slurm and Open MPI."""
    join_timeout: int = 300
    """Seconds, at least 1, that the processes have to find one another."""
    heartbeat_timeout: int = 60
    """Seconds, at least 1. Of a process that is not heard of for so long, the others say that it is gone, and end."""
    stall_timeout: int = 600
    """Seconds, at least 1. A process that lives, but is so long at one point of a step, has stalled, and all end."""
    pause_timeout: int = 3600
    """The same for what may take longer than a step: start, compilation, first step, checkpoints, validation."""

    @property
    def is_single(self) -> bool:
        """Whether there is one process for certain, which then looks for no others."""
        return not self.auto and self.count in (None, 1)


def check_distributed(c: DistributedConfig) -> None:
    """Raises ValueError for a setting out of its range, or that others contradict."""
    seconds = dict.fromkeys(("join_timeout", "heartbeat_timeout", "stall_timeout", "pause_timeout"), (1, 2**31))
    check_ranges("distributed", c, {"count": (1, 2**31), "id": (0, c.count or 2**31), **seconds})
    check_choice("distributed.devices", c.devices, ("all", "one"))
    given = {f"distributed.{name}": getattr(c, name) for name in ("coordinator", "count", "id")}
    if c.auto:
        for name in ("distributed.coordinator", "distributed.id"):
            if given[name] is not None:
                raise ValueError(f"{name} is {given[name]}; set distributed.auto=false, or leave it out.")
        return
    if c.devices == "one":
        raise ValueError("distributed.devices is one, which needs distributed.auto=true.")
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3 and c.count != 1:
        said = ", ".join(f"{name} is {value}" for name, value in given.items() if value is not None)
        raise ValueError(
            f"{said}; give {' and '.join(missing)} too, or distributed.auto=true alone where JAX finds the processes "
            "by itself: under Slurm, Open MPI, Kubernetes, and on Cloud TPU."
        )
    if c.coordinator is not None:
        address, _, port = c.coordinator.rpartition(":")
        if not address or not (port.isdecimal() and 1 <= int(port) < 2**16):
            raise ValueError(
                f"distributed.coordinator is {c.coordinator!r}; write it as address:port, the port in [1, 65535]."
            )
