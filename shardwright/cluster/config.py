"""Defines the settings of the devices (mesh, compiler, environment) and processes of a run."""

import dataclasses
import re
from typing import Any

from shardwright.data.checks import a_path, check_range, one_of, within


@dataclasses.dataclass
class MeshConfig:
    """Number of devices along each axis. At most one may be -1, for the remaining devices."""

    p: int = within(1, 2**20, 1)
    """Pipeline parallelism: each device holds some of the layers (docs/parallelism.md)."""
    r: int = within(-1, 2**20, 1)
    """Data parallelism with replicated weights."""
    d: int = within(-1, 2**20, -1)
    """Data parallelism with weights sharded at rest (FSDP)."""
    e: int = within(-1, 2**20, 1)
    """Expert parallelism (docs/parallelism.md); elsewhere, works like d."""
    c: int = within(-1, 2**20, 1)
    """Context parallelism: each device holds some of the positions of a sequence
    (docs/parallelism.md)."""
    t: int = within(-1, 2**20, 1)
    """Tensor parallelism."""


@dataclasses.dataclass
class HardwareConfig:
    """Settings of the devices, their compiler and their environment."""

    chip: str | None = a_path(None)
    """Kind of device, for plans (docs/plan.md): a name in shardwright/cluster/chips/, or the path
    of such a YAML file. A run prefers the chip that JAX reports, if known, to a name. Null: only
    that."""
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """XLA options for compiling the steps: XLA flags without dashes, and other compiler options.
    Null omits an option. An option that the installed XLA does not know is omitted, and a line is
    printed. Flags in the environment's XLA_FLAGS apply to all programs, and an unknown one ends the
    run."""
    deterministic: bool = False
    """Makes replays and resumed runs bit-for-bit equal on NVIDIA GPUs; other devices do not need
    it. XLA then uses the first kernel that compiles instead of the fastest, and cuDNN computes the
    gradient of attention in a fixed order (cost in docs/status.md)."""
    strict: bool = False
    """Refuses a run whose compiled step communicates other than written, which is otherwise listed
    (docs/check.md)."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables, such as NCCL's, to set before the devices start. Variables that are
    already set keep their value."""
    simulated_devices: int | None = within(1, 4097, None)
    """Number of devices, at most 4096, to simulate on this host's CPU; null: one. No effect if JAX
    uses other devices, or if XLA_FLAGS in the environment has
    xla_force_host_platform_device_count."""
    compilation_cache: str | None = "~/.cache/shardwright/compiled"
    """Directory that caches compiled programs for later runs of the same step; null: none. Whoever
    can write there can run programs as you. It grows; delete its contents at any time. Runs of
    several processes ignore the default, because the first writes and all read: give a directory
    that all hosts share. JAX_COMPILATION_CACHE_DIR overrides it."""

    @property
    def options(self) -> dict[str, Any]:
        """XLA options for the steps: `compiler_options`, and those of `deterministic`."""
        return self.compiler_options | (
            {"xla_gpu_exclude_nondeterministic_ops": True} if self.deterministic else {}
        )


@dataclasses.dataclass
class DistributedConfig:
    """Settings of the processes of a run, on one host or many (docs/multi-host.md)."""

    auto: bool = False
    """Lets JAX detect the processes, under Slurm, Open MPI, Kubernetes and on Cloud TPU. Otherwise
    there is one process, or coordinator, count and id describe them."""
    count: int | None = within(1, 2**31, None)
    """Number of processes, at least 1. Null: one; with auto, as many as JAX detects."""
    coordinator: str | None = None
    """Address and port of process 0, as address:port, the same in all processes. The port must be
    free there."""
    id: int | None = None
    """Number of this process, in [0, count)."""
    devices: str = one_of(("all", "one"), default="all")
    """all: each process uses all devices that it sees. one: it uses the device with its local rank,
    which needs auto, and Slurm or Open MPI."""
    join_timeout: int = within(1, 2**31, 300)
    """Seconds, at least 1, for the processes to find one another."""
    heartbeat_timeout: int = within(1, 2**31, 60)
    """Seconds, at least 1, without a heartbeat from a process until JAX ends the others."""
    stall_timeout: int = within(1, 2**31, 600)
    """Seconds, at least 1, without progress in a step until a process counts as stalled and
    ends."""
    pause_timeout: int = within(1, 2**31, 3600)
    """Like stall_timeout, for what may take longer: start, compilation, first step, checkpoints,
    validation, end."""

    @property
    def is_single(self) -> bool:
        """True if there is certainly only one process, which then does not look for others."""
        return not self.auto and self.count in (None, 1)


def check_distributed(c: DistributedConfig) -> None:
    """Raises ValueError for a setting that is out of range or contradicts another."""
    check_range("distributed.id", c.id, 0, c.count or 2**31)
    by_hand = {f"distributed.{name}": getattr(c, name) for name in ("coordinator", "count", "id")}
    given = [f"{name}={value}" for name, value in by_hand.items() if value is not None]
    if c.auto and (c.coordinator is not None or c.id is not None):
        raise ValueError(
            f"distributed.auto is true together with {', '.join(given)}; give only one of the two."
        )
    if not c.auto and c.devices == "one":
        raise ValueError("distributed.devices is one, which needs distributed.auto=true.")
    if not c.auto and 0 < len(given) < 3 and c.count != 1:
        missing = [name for name, value in by_hand.items() if value is None]
        raise ValueError(
            f"{', '.join(given)}: also give {' and '.join(missing)}, or only distributed.auto=true "
            f"where JAX detects the processes: under Slurm, Open MPI, Kubernetes, and on Cloud TPU."
        )
    if c.coordinator is not None:
        address, _, port = c.coordinator.rpartition(":")
        if not address or not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) < 2**16):
            raise ValueError(
                f"distributed.coordinator is {c.coordinator!r}; write it as address:port, the port "
                "in [1, 65535]."
            )
