"""Settings of the devices: mesh, compiler and environment, and the processes of a run."""

import dataclasses
import re
from typing import Any

from shardwright_data.checks import check_choice, check_range, within


@dataclasses.dataclass
class MeshConfig:
    """Number of devices along each axis. At most one may be -1, which takes the devices that are left."""

    p: int = within(1, 2**20, 1)
    """Devices that each hold some of the layers, as stages of a pipeline (docs/pipeline.md)."""
    r: int = within(-1, 2**20, 1)
    """Replicas: each has all weights."""
    d: int = within(-1, 2**20, -1)
    """Devices over which the batch, and the weights at rest, are sharded (FSDP)."""
    e: int = within(-1, 2**20, 1)
    """Devices over which experts are sharded (docs/experts.md); elsewhere they are as those of d."""
    c: int = within(-1, 2**20, 1)
    """Devices that each hold some of the positions of a sequence (docs/long-context.md)."""
    t: int = within(-1, 2**20, 1)
    """Devices of tensor parallelism."""


@dataclasses.dataclass
class HardwareConfig:
    """Settings of the devices, their compiler and their environment."""

    chip: str | None = None
    """Kind of the devices, for plans (docs/plan.md): a name in shardwright/cluster/chips/, or the path of a YAML file
    like those. A run takes the chip that JAX finds, if that is known, instead of a name. Null: that alone."""
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of XLA for the compilation of the steps: its flags without their dashes, and what else it takes for a
    program. An option that is null is left out. One that the installed XLA does not know is left out too, and a line
    is printed for it. Flags in the environment's XLA_FLAGS hold for all programs, and an unknown one there ends the
    run."""
    deterministic: bool = False
    """True: the programs have no operation whose result differs from run to run, for a replay or a resumed run that
    is equal bit for bit on an NVIDIA GPU; other devices need no setting. XLA then takes the first kernel that compiles
    instead of the fastest, and cuDNN computes the gradient of attention in a fixed order: docs/reliability.md has the
    price."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables, such as NCCL's, that are set before the devices start. A variable that is set already
    keeps its value."""
    simulated_devices: int | None = within(1, 4097, None)
    """Number of devices, at most 4096, that this host's CPU simulates where JAX uses the CPU; null: one. Without effect
    on other devices, and where XLA_FLAGS in the environment has xla_force_host_platform_device_count."""
    compilation_cache: str | None = "~/.cache/shardwright/compiled"
    """Directory in which compiled programs are kept for the next run of the same step; null: none. Let nobody write
    there whom you would not let run programs as you. It grows, and what is in it can be deleted at any time. A run of
    several processes, of which the first writes and all read, does not use the default, since each host may have its
    own: give a directory that all hosts share. The variable JAX_COMPILATION_CACHE_DIR overrides it."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of XLA for the steps: `compiler_options`, and those of `deterministic`."""
        return self.compiler_options | ({"xla_gpu_exclude_nondeterministic_ops": True} if self.deterministic else {})


@dataclasses.dataclass
class DistributedConfig:
    """The processes of a run, on one host or on many. docs/multi-host.md shows how to start them."""

    auto: bool = False
    """Whether JAX finds the processes by itself, as it can under Slurm, Open MPI, Kubernetes and on Cloud TPU.
    Otherwise there is one process, or coordinator, count and id describe them."""
    count: int | None = within(1, 2**31, None)
    """Number of processes, at least 1. Null: one; with auto, as many as there are."""
    coordinator: str | None = None
    """Address and port of process 0, as address:port, the same in all processes. The port has to be free there."""
    id: int | None = None
    """Number of this process, in [0, count)."""
    devices: str = "all"
    """all: a process uses all devices that it sees. one: it uses the one with its number on the host, which needs
    auto, and Slurm or Open MPI."""
    join_timeout: int = within(1, 2**31, 300)
    """Seconds, at least 1, that the processes have to find one another."""
    heartbeat_timeout: int = within(1, 2**31, 60)
    """Seconds, at least 1. When a process has sent no heartbeat for so long, JAX ends the others."""
    stall_timeout: int = within(1, 2**31, 600)
    """Seconds, at least 1. A process that stays so long at one place of a step has stalled, and ends."""
    pause_timeout: int = within(1, 2**31, 3600)
    """The same for places that may take longer: start, compilation, first step, checkpoints, validation, end."""

    @property
    def is_single(self) -> bool:
        """Whether there is one process for certain, which then looks for no others."""
        return not self.auto and self.count in (None, 1)


def check_distributed(c: DistributedConfig) -> None:
    """Raises ValueError for a setting that is out of its range or contradicts another one."""
    check_range("distributed.id", c.id, 0, c.count or 2**31)
    check_choice("distributed.devices", c.devices, ("all", "one"))
    by_hand = {f"distributed.{name}": getattr(c, name) for name in ("coordinator", "count", "id")}
    given = [f"{name}={value}" for name, value in by_hand.items() if value is not None]
    if c.auto and (c.coordinator is not None or c.id is not None):
        raise ValueError(f"distributed.auto is true beside {', '.join(given)}; give one of the two ways.")
    if not c.auto and c.devices == "one":
        raise ValueError("distributed.devices is one, which needs distributed.auto=true.")
    if not c.auto and 0 < len(given) < 3 and c.count != 1:
        missing = [name for name, value in by_hand.items() if value is None]
        raise ValueError(
            f"{', '.join(given)}: give {' and '.join(missing)} too, or distributed.auto=true alone where JAX finds the "
            "processes by itself: under Slurm, Open MPI, Kubernetes, and on Cloud TPU."
        )
    if c.coordinator is not None:
        address, _, port = c.coordinator.rpartition(":")
        if not address or not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) < 2**16):
            raise ValueError(
                f"distributed.coordinator is {c.coordinator!r}; write it as address:port, the port in [1, 65535]."
            )
