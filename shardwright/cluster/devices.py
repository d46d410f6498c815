"""Starts the devices of a run: joins its processes, makes the mesh, sets up the compiler."""

import contextlib
import math
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from shardwright.axes import axes_of_mesh, mesh_text
from shardwright.cluster.chips import Chip, chip_of
from shardwright.cluster.config import DistributedConfig, HardwareConfig
from shardwright.data.untrusted import check_private
from shardwright.settings.exits import LOST
from shardwright.settings.output import say

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm] (what is deleted is unknown to it)
_settings = cast(Any, jax.config)  # whose attributes are made as it runs


def make_mesh(devices: Sequence[Device], **given: int) -> jax.sharding.Mesh:
    """Makes a mesh of all `devices` with the given sizes of axes of shardwright.axes.AXES, 1 by
    default.

    One size may be -1, for the remaining devices. Raises ValueError for sizes that do not fit.
    """
    sizes = axes_of_mesh(given)
    wanted = math.prod(map(abs, given.values()))
    if list(given.values()).count(-1) == 1:
        sizes |= {
            axis: len(devices) // max(1, wanted) for axis, size in given.items() if size == -1
        }
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        shown = mesh_text(given)
        can_simulate = devices[0].platform == "cpu" and min(given.values(), default=1) > 0
        simulate = (
            f" hardware.simulated_devices={wanted} simulates {wanted}." if can_simulate else ""
        )
        raise ValueError(
            f"mesh {shown} does not fit {len(devices)} devices: the product of the sizes must be "
            f"their number. Set mesh.<axis>; one may be -1, for the remaining devices.{simulate}"
        )
    return explicit_mesh(axes_of_mesh(sizes), devices)


def explicit_mesh(
    sizes: Mapping[str, int],
    devices: Sequence[Device] | None = None,
    device: AbstractDevice | None = None,
) -> Any:
    """Makes a mesh with these axes, in this order, whose types JAX checks.

    It is a jax.sharding.Mesh of `devices`; without them an AbstractMesh, of devices like `device`,
    to trace on.
    """
    kinds = (AxisType.Explicit,) * len(sizes)
    if devices is None:
        return AbstractMesh(
            tuple(sizes.values()), tuple(sizes), axis_types=kinds, abstract_device=device
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def device_like(chip: Chip) -> AbstractDevice:
    """A device of this kind, which need not exist."""
    return AbstractDevice(device_kind=chip.kinds[0], num_cores=None, platform=chip.platform)


def start_devices(processes: DistributedConfig, hardware: HardwareConfig) -> None:
    """Applies the settings of `hardware` and joins the other processes of the run, if there are
    any.

    Must be called before anything else uses devices. Ends this process with LOST if the processes
    do not find one another within processes.join_timeout, because JAX waits outside Python and
    would abort.

    Raises:
        ValueError: JAX cannot detect the processes, or process 0 cannot use its port.
    """
    for name, value in hardware.environment.items():
        older = name.replace("XLA_CLIENT_", "XLA_PYTHON_CLIENT_")  # JAX accepts one of the two
        if older not in os.environ:
            os.environ.setdefault(name, value)
    simulate_devices(hardware)
    # If hosts do not share their homes, only process 0 would have cached programs, and would not
    # compile with the rest.
    unshared = (
        not processes.is_single and hardware.compilation_cache == type(hardware).compilation_cache
    )
    if directory := _settings.jax_compilation_cache_dir or (
        None if unshared else hardware.compilation_cache
    ):
        _keep_programs(os.path.expanduser(directory))
    if processes.is_single or jax.distributed.is_initialized():
        return
    named = {"coordinator_address": processes.coordinator, "num_processes": processes.count}
    named |= {"process_id": processes.id, "cluster_detection_method": "deactivate"}
    if processes.coordinator is not None and not processes.auto and processes.id == 0:
        _check_port(processes.coordinator)
        # Without it, JAX listens on all addresses of the host, 127.0.0.1 or not.
        named["coordinator_bind_address"] = processes.coordinator
    # An empty grpc_proxy disables the proxy, which processes of a run do not need. Set only if
    # there is one, because JAX warns of any such variable.
    if any(os.environ.get(name) for name in ("http_proxy", "https_proxy")):
        os.environ.setdefault("grpc_proxy", "")
    waiting = threading.Timer(processes.join_timeout, _give_up_joining, [processes])
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            **({} if processes.auto else named),
            # None: under Slurm and Open MPI, the one device with the process's local rank.
            local_device_ids=None if processes.devices == "one" else [],
            # Longer than join_timeout, so that _give_up_joining ends the process first, with its
            # own message.
            initialization_timeout=processes.join_timeout + 30,
            heartbeat_timeout_seconds=processes.heartbeat_timeout,
            # At the end the others wait for process 0, which writes the last files.
            shutdown_timeout_seconds=processes.pause_timeout,
        )
    except jax.errors.JaxRuntimeError as error:
        raise _cannot_listen(processes.coordinator or "the port that JAX chose", error) from error
    except ValueError as error:
        raise ValueError(
            f"distributed.auto is true, but JAX detects no cluster ({error}) Start the processes "
            f"with srun, mpirun, or as a Kubernetes job, or give distributed.coordinator, count "
            f"and id (see docs/multi-host.md)."
        ) from error
    except RuntimeError as error:
        if not processes.auto:
            raise
        # On Kubernetes, JAX waits at most a minute until pod 0 has an address, which needs its
        # image to be pulled.
        print(f"Error: {error} {LOST.next}", file=sys.stderr)
        sys.exit(LOST.code)
    finally:
        waiting.cancel()


def check_chip(hardware: HardwareConfig) -> None:
    """Prints that CPUs simulate the chip of the settings.

    Raises ValueError if JAX cannot start the platform of JAX_PLATFORMS, or if the settings are for
    another chip, and neither they nor XLA_FLAGS simulate devices.
    """
    try:
        platform = jax.default_backend()
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS')}, and JAX cannot start it. Check "
            f"that this host has such a device, install JAX for it with pip install "
            f"'shardwright[cuda]' or 'shardwright[tpu]', or unset JAX_PLATFORMS. {error}".strip()
        ) from error
    if platform != "cpu":
        return
    chip = chip_of(hardware.chip) if hardware.chip else None
    of_gpus = any(name.lstrip("-").startswith("xla_gpu_") for name in hardware.compiler_options)
    if chip.platform == "cpu" if chip else not of_gpus:
        return
    if hardware.simulated_devices is None and jax.local_device_count() == 1:
        given = (
            f"hardware.chip is {hardware.chip}"
            if chip
            else "hardware.compiler_options are those of GPUs"
        )
        raise ValueError(
            f"{given}, but JAX finds only a CPU. Install JAX for the chip (pip install "
            "'shardwright[cuda]' or 'shardwright[tpu]'), give hardware=cpu, or try the run on "
            "simulated devices with hardware.simulated_devices=<number>."
        )
    if chip:
        say(f"chip       no {hardware.chip} here: simulated by this host's CPU")


def simulate_devices(hardware: HardwareConfig) -> None:
    """Applies hardware.simulated_devices. Has no effect once devices have started."""
    count = hardware.simulated_devices
    if count is None or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # in a later job of a sweep
        jax.config.update("jax_num_cpu_devices", count)


def _keep_programs(directory: str) -> None:
    """Creates `directory` and makes it JAX's compilation cache.

    If that is not possible, or others could write programs there, prints a line and disables the
    cache.
    """
    # Without HOME and an entry in passwd there is no home, and a folder named ~ would be made here.
    kept = None if directory.startswith("~") else directory
    if kept and "://" not in directory:
        path = Path(os.path.abspath(directory))
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            check_private(path)
        except OSError as error:
            say(f"hardware.compilation_cache: not used: {error}.")
            kept = None
    jax.config.update("jax_compilation_cache_dir", kept)
    # Also short compilations: a start has about fifty, which together take as long as a small
    # model's step.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def known_options(options: Mapping[str, Any], print_line: Callable[[str], None]) -> dict[str, Any]:
    """Returns the compiler options that the installed XLA knows, and calls `print_line` for each
    other one.

    Omits options that are None. Raises ValueError for a value that XLA rejects. Starts the devices.
    """
    known = {name.lstrip("-"): value for name, value in options.items() if value is not None}
    program = jax.jit(lambda: 0).lower()
    while known:
        try:
            program.compile(compiler_options=known)
            break
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            unknown = [name for name in known if f"No such compile option: '{name}'" in str(error)]
            if not unknown:
                raise ValueError(
                    f"hardware.compiler_options: XLA rejects a value in {known}: {error}"
                ) from error
            known.pop(unknown[0])
            print_line(
                f"compiler   {unknown[0]} is ignored: the XLA of jax {jax.__version__} does not "
                "know it"
            )
    return known


def _check_port(address: str) -> None:
    """Raises ValueError if process 0 cannot listen at its address; JAX may crash without a message
    then.
    """
    host, _, port = address.rpartition(":")
    try:
        family = socket.getaddrinfo(host.strip("[]"), None)[0][0]
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise _cannot_listen(address, error) from error


def _cannot_listen(address: str, error: Exception) -> ValueError:
    return ValueError(
        f"process 0 cannot listen at {address}: {error}. Give an address of its host and a free "
        f"port in distributed.coordinator, or with distributed.auto a port in JAX_COORDINATOR_PORT."
    )


def _give_up_joining(processes: DistributedConfig) -> None:
    """Prints why joining failed, and ends the process."""
    problem = (
        f"not all processes found one another within {processes.join_timeout} s "
        "(distributed.join_timeout)."
    )
    if processes.coordinator is not None:
        problem += (
            f" Check that process 0 runs and that all hosts reach it at {processes.coordinator}."
        )
    if proxy := os.environ.get("grpc_proxy"):  # noqa: SIM112
        problem += f" They connect through a proxy: unset grpc_proxy={proxy}."
    try:
        os.write(
            2,
            f"Error: process {processes.id} on {socket.gethostname()}: {problem} "
            f"{LOST.next}\n".encode(),
        )
    finally:
        os._exit(LOST.code)
