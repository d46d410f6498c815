"""Peak memory of a device in the training step: measured by the device, or predicted by the compiler."""

from typing import Any

import jax


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
        What is known of this: the peak since the process began, or else the compiler's figure for the step; which of
        the two it is, "device" or "compiler"; that figure; and the memory of the device that this process may use. A
        CPU measures nothing. In a sweep the process may have run other jobs before, which took more.
    """
    jax.block_until_ready(done)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    predicted = predicted_peak(compiled)
    about = {
        "peak_memory_bytes": max(peaks, default=predicted),
        "source": "device" if peaks else "compiler",
        "predicted_bytes": predicted,
        "device_memory_bytes": min((found["bytes_limit"] for found in stats if "bytes_limit" in found), default=None),
    }
    return {name: value for name, value in about.items() if value is not None}
