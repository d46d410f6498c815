"""Reports the peak memory of a device in the training step: measured, or predicted by the
compiler.
"""

import jax


def peak_memory(compiled: jax.stages.Compiled, done: object) -> dict[str, int | str]:
    """Returns `peak_memory_bytes`, the peak of the fullest device of this process, and its
    `source`.

    The source "device" is the peak since the process started, including earlier jobs of a sweep.
    Where devices do not report it, such as on CPU, the source is "compiler": what the step needs,
    with arguments and results; donated arguments count once. Empty if neither is known.

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
