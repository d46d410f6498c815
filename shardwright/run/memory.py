"""Peak memory of a device in the training step: measured by the device, or predicted by the compiler."""

from typing import Any

import jax

_seen: dict[jax.Device, int] = {}
"""Highest peak so far of each device. A sweep runs many jobs in one process, in which a device's peak never falls."""


def predicted_peak(compiled: jax.stages.Compiled) -> int | None:
    """Bytes that a compiled program needs on each device, arguments and results included; None where XLA has no figure.

    Donated arguments, whose memory the results take over, count once.
    """
    m = compiled.memory_analysis()
    if m is None:
        return None
    arrays = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return arrays + m.temp_size_in_bytes + m.generated_code_size_in_bytes


def peak_memory(compiled: jax.stages.Compiled, done: Any) -> dict[str, int | str]:
    """Peak memory of the fullest device of this process.

    Args:
        compiled: the training step.
        done: an output of the step, which this waits for.

    Returns:
        A dict with those of these entries that are known:

        peak_memory_bytes    measured peak since the process began, or else the compiler's figure for the step
        source               "device" or "compiler"
        predicted_bytes      beside a measurement, the compiler's figure for the step
        device_memory_bytes  memory of the device that this process may use

        A CPU measures nothing. A job of a sweep is not measured where an earlier job of the same process took more.
    """
    jax.block_until_ready(done)
    predicted = predicted_peak(compiled)
    stats = {device: device.memory_stats() or {} for device in jax.local_devices()}
    peaks = {device: s["peak_bytes_in_use"] for device, s in stats.items() if "peak_bytes_in_use" in s}
    risen = [peak for device, peak in peaks.items() if peak > _seen.get(device, 0)]
    _seen.update(peaks)
    peak, source = (max(risen), "device") if risen else (predicted, "compiler")
    limits = [s["bytes_limit"] for s in stats.values() if "bytes_limit" in s]
    found = {"peak_memory_bytes": peak, "source": source if peak is not None else None}
    found |= {"predicted_bytes": predicted if risen else None, "device_memory_bytes": min(limits, default=None)}
    return {name: value for name, value in found.items() if value is not None}
