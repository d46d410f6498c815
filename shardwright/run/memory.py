"""Peak memory of a device in the training step: measured by the device, or predicted by the compiler."""

import jax


def peak_memory(compiled: jax.stages.Compiled, done: object) -> dict[str, int | str]:
    """Peak memory of the fullest device of this process, in bytes, and its source.

    The source is "device" for the peak since the process began, in which a sweep may have run other jobs. A CPU
    measures nothing: then it is "compiler", for what the step needs, arguments and results included. Donated arguments,
    whose memory the results take over, count once. Empty where nothing is known.

    Args:
        compiled: the training step.
        done: an output of the step, which this waits for.
    """
    jax.block_until_ready(done)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if peaks := [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]:
        return {"peak_memory_bytes": max(peaks), "source": "device"}
    m = compiled.memory_analysis()
    if m is None:
        return {}
    arrays = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    predicted = arrays + m.temp_size_in_bytes + m.generated_code_size_in_bytes
    return {"peak_memory_bytes": predicted, "source": "compiler"}
